"""Sorts parameters into kinds: embedding, head, hidden matrix, vector, or other."""

import difflib
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn

from lightning_eff.optim.optimizers._matrices import Layout, is_linear

KINDS = ("embedding", "head", "vector", "matrix", "other")

_EMBEDDING = re.compile(
    r"(\w*_)?(embed|embedding|embeddings|embedder|emb|embd|wte|wpe)|tok(ens?)?(_emb\w*|_type\w*)?"
    r"|pos(ition\w*|_emb\w*|_table)?|cls_token|(\w*_)?(cls|register|mask|distillation|dist)_tokens?|(\w*_)?relative_attention_bias"
)
_HEAD = re.compile(r"(\w*_)?(lm_head|head|heads|classifier|unembed|embed_out|score|logits|output_projection)")


def kinds_of(module: nn.Module, matrices: Mapping[str, Layout]) -> dict[str, str]:
    """Return the kind of every parameter by its name in ``module.named_parameters()``.

    "matrix" comes from :func:`hidden_matrices`. "vector" has one dimension or none. "embedding" is a lookup table (tied to a
    head or not), a position or a token. "head" computes the outputs from the last features. It is a linear layer or convolution
    with such a name, or the last linear layer after all hidden matrices. All others are "other": stems, depthwise
    convolutions, routers.

    Args:
        module: any module.
        matrices: the result of :func:`hidden_matrices`.
    """
    tables = {
        id(p) for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) for p in m.parameters(False)
    }
    linear = {id(m.weight) for m in module.modules() if is_linear(m) and isinstance(getattr(m, "weight", None), Tensor)}
    found: dict[str, str] = {}
    last: str | None = None
    for name, p in module.named_parameters():
        components = name.split(".")
        if name in matrices:
            found[name], last = "matrix", None
        elif p.ndim < 2:
            found[name] = "vector"
        elif id(p) in tables or any(_EMBEDDING.fullmatch(c) for c in components):
            found[name] = "embedding"
        elif any(_HEAD.fullmatch(c) for c in components) or (components[-2:-1] == ["decoder"] and id(p) in linear):
            found[name] = "head"
        else:
            found[name] = "other"
            last = name if id(p) in linear else last
    if "head" not in found.values() and last is not None:
        found[last] = "head"
    return found


def matches(pattern: str, name: str | None, kind: str) -> bool:
    """Whether ``pattern``, a kind or a pattern of names, matches the parameter."""
    return pattern == kind or (name is not None and fnmatchcase(name, pattern))


def unmatched(argument: str, pattern: str, kinds: Mapping[str, str], known: Iterable[str]) -> ValueError:
    """Return the error for a pattern that matches nothing, with the closest names.

    Args:
        argument: argument with the pattern.
        pattern: the pattern.
        kinds: kinds of all parameters by name.
        known: names of the possible parameters.
    """
    names = list(known)
    present = sorted({kinds[name] for name in names})
    if pattern in KINDS:
        tied = (
            " (a head that is tied to the embedding is the embedding)"
            if pattern == "head" and "embedding" in present
            else ""
        )
        return ValueError(
            f"ReplaceOptimizer({argument}={pattern!r}): no parameter of the module's optimizer is of this kind{tied}; there are"
            f" {present}. Remove it, or pass a pattern of names, such as {names[0] + '*' if names else '*'!r}."
        )
    parts = sorted({".".join(name.split(".")[:i]) for name in names for i in range(1, name.count(".") + 2)})
    plain = pattern.replace("*", "").strip(".")
    near = difflib.get_close_matches(plain, [*KINDS, *parts], n=4, cutoff=0.4)
    near += [part for part in parts if plain and plain in part and part not in near][:4]
    return ValueError(
        f"ReplaceOptimizer({argument}={pattern!r}): it matches no parameter of the module's optimizer; expected one of the"
        f" kinds {present} or a pattern of names with *, as in 'blocks.*.weight'. Nearest: {', '.join(near or names[:4])}."
    )
