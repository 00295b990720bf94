"""Find the token embedding among a module's embeddings."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

#: Last parts of the names of embeddings of other things than tokens.
_OTHERS = re.compile(
    r"(\w*_)?(wpe|pos|position\w*|pos_\w+|type|types|segment\w*|token_type\w*|time\w*|label\w*|class\w*)"
)
_RELATIVE = re.compile(r"(\w*_)?relative\w*")


def token_embeddings(root: nn.Module, names: str | Sequence[str] | None, *, who: str) -> dict[str, nn.Embedding]:
    """Return the token embeddings of ``root`` by path: all that look up one weight.

    Args:
        root: the module tree.
        names: paths, last parts of them or patterns. None uses the result of Hugging Face's ``get_input_embeddings``, or
            the only ``nn.Embedding`` whose name does not suggest positions, types and the like. If there are several, it
            uses the only one whose weight is also a head's.
        who: the start of messages.

    Raises:
        ValueError: if there is none, several are possible, or a name matches none; with the embeddings found.
    """
    every: dict[str, nn.Embedding] = {}
    for path, m in root.named_modules():
        if isinstance(m, nn.Embedding) and not any(path.startswith(f"{other}.") for other in every):
            every[path] = m  # not the tables that a technique put into an embedding
    there = ", ".join(f"{path} ({m.num_embeddings} x {m.embedding_dim})" for path, m in every.items()) or "none"
    mine = f"{type(root).__name__} has {there}"
    if names is not None:
        patterns = [names] if isinstance(names, str) else list(names)
        for pattern in patterns:
            if not any(_meets(path, pattern) for path in every):
                raise ValueError(
                    f"{who}(embeddings={names!r}): no nn.Embedding is named {pattern!r}; expected a path, its last part or a"
                    f" pattern. {mine}."
                )
        return {path: m for path, m in every.items() if any(_meets(path, pattern) for pattern in patterns)}
    if not every:
        raise ValueError(
            f"{who}: {type(root).__name__} has no token embedding (nn.Embedding); expected a language model."
            " If it looks tokens up by other means, such as F.embedding, use an nn.Embedding instead."
        )
    found = _of_hugging_face(root, every)
    if not found:
        found = {path: m for path, m in every.items() if not _of_others(path)}
    weights = {id(m.weight) for m in found.values()}
    if len(weights) > 1:
        tied = _with_head(root) & weights
        trained = {id(m.weight) for m in found.values() if m.weight.requires_grad}
        weights = next((some for some in (tied, trained) if len(some) == 1), weights)
    if len(weights) != 1:
        raise ValueError(
            f"{who}: the token embedding is ambiguous: {mine}. Name one or more of them,"
            f" {who}(embeddings=[{next(iter(found or every))!r}])."
        )
    return {path: m for path, m in every.items() if id(m.weight) in weights}


def _meets(path: str, name: str) -> bool:
    return path == name or fnmatchcase(path, name) or fnmatchcase(path, f"*.{name}")


def _of_others(path: str) -> bool:
    last = path.rpartition(".")[2]
    return bool(_OTHERS.fullmatch(last) or _RELATIVE.fullmatch(last))


def _of_hugging_face(root: nn.Module, every: dict[str, nn.Embedding]) -> dict[str, nn.Embedding]:
    """Return the results of ``get_input_embeddings`` of the outermost modules that have it, if they are ``nn.Embedding``."""
    said: set[int] = set()
    inside: set[int] = set()
    for m in root.modules():
        tell: Any = getattr(m, "get_input_embeddings", None)
        if id(m) in inside or not callable(tell):
            continue
        try:
            one = tell()
        except (NotImplementedError, AttributeError, TypeError):  # a method of that name outside of the convention
            continue
        inside |= {id(part) for part in m.modules()}
        said.add(id(one))
    return {path: m for path, m in every.items() if id(m) in said}


def _with_head(root: nn.Module) -> set[int]:
    """Return the ids of weights that a module other than an embedding registers."""
    return {id(p) for m in root.modules() if not isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
