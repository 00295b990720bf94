"""Finds the hidden matrices of a module, and splits parameters into them.

A hidden matrix is a weight between activations: ``y = W x`` with ``W`` of shape (out, in). Embeddings, heads, positions and
tables are not hidden matrices, and a fused projection is several.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from lightning_eff._core._branches.side_by_side import verdicts
from lightning_eff._core.blocks import Candidate, candidates

Split = str | Mapping[str, int | Sequence[int]] | None

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# a component of a parameter's name that says: no map between activations
_NOT_HIDDEN = re.compile(
    r"(\w*_)?(embed|embedding|embeddings|embedder|emb|embd|wte|wpe|lm_head|head|classifier|unembed|score|logits|output_projection)"
    r"|tok(ens?)?(_emb\w*|_type\w*)?|pos(ition\w*|_emb\w*|_table)?|cls(_token)?|(\w*_)?relative_attention_bias|A_log|router"
)
_EMBEDDED = re.compile(r"(\w*_)?(embed|embedding|embeddings|embedder|emb|embd|wte)|tok(ens?)?(_emb\w*)?")
_POSITION = re.compile(r"(\w*_)?pos(ition\w*|_\w+)?|wpe|(\w*_)?relative_attention_bias")
_HEAD = re.compile(r"(\w*_)?(lm_head|head|classifier|unembed|score|logits|output_projection)")
_FUSED_QKV = re.compile(r"(\w*_)?(qkv(_?proj\w*)?|c_attn|in_proj|in_proj_weight|Wqkv|W_pack|attn_qkv)")
_FUSED_PAIR = re.compile(r"gate_up_proj|fused_gate_up|w12")


@dataclass(frozen=True)
class Layout:
    """The matrices (out, in) in the tensor of one parameter.

    Attributes:
        form: "matrix" for (out, in), "convolution" for (out, in, ...) as (out, in * ...), "stack" for k matrices
            (k, out, in).
        transposed: whether the tensor is (in, out), or (k, in, out).
        parts: sizes along ``out`` of fused layers, or empty.
    """

    form: str = "matrix"
    transposed: bool = False
    parts: tuple[int, ...] = ()

    def apart(self, tensor: Tensor) -> list[Tensor]:
        """Return the matrices of ``tensor`` as views, or as a copy for a convolution with another memory order."""
        if self.form == "convolution":
            return [tensor.flatten(1)]
        found: list[Tensor] = []
        for matrix in tensor.unbind(0) if self.form == "stack" else (tensor,):
            matrix = matrix.mT if self.transposed else matrix
            found += matrix.split(list(self.parts)) if self.parts else [matrix]
        return found

    def blocks(self, tensor: Tensor) -> list[Tensor]:
        """Return the matrices in tensors (j, out, in) of adjacent matrices with one shape."""
        if self.form == "convolution":
            return [tensor.flatten(1)[None]]
        matrices = tensor if self.form == "stack" else tensor[None]
        matrices = matrices.mT if self.transposed else matrices
        if not self.parts:
            return [matrices]
        if len(set(self.parts)) == 1:
            return [matrix.unflatten(0, (len(self.parts), -1)) for matrix in matrices.unbind(0)]
        return [part[None] for matrix in matrices.unbind(0) for part in matrix.split(list(self.parts))]

    def targets(self, tensor: Tensor) -> list[Tensor]:
        """Return the blocks as views to write to; a convolution is returned unchanged."""
        return [tensor] if self.form == "convolution" else self.blocks(tensor)


def layout_by_name(name: str | None, tensor: Tensor, split: Split) -> Layout | None:
    """Return the layout of a parameter from its name, which can be None; return None if it is not a matrix.

    A tensor of two dimensions or more counts as a matrix unless a component of its name says otherwise. A tensor of three
    is a stack of matrices where its name has "expert" in it, else a convolution.
    """
    if tensor.ndim < 2:
        return None
    components = name.split(".") if name is not None else []
    if any(_NOT_HIDDEN.fullmatch(component) for component in components):
        return None
    form = "matrix"
    if tensor.ndim > 2:
        form = "stack" if tensor.ndim == 3 and any("expert" in component for component in components) else "convolution"
    return _with_parts(Layout(form), name, tensor, split)


def _with_parts(layout: Layout, name: str | None, tensor: Tensor, split: Split) -> Layout:
    """Return ``layout`` with the parts that ``split`` gives for the fused layers of the parameter."""
    if split is None or layout.form == "convolution":
        return layout
    rows, columns = tensor.shape[-2:]
    if isinstance(split, Mapping):
        for pattern, parts in split.items():
            if name is not None and fnmatchcase(name, pattern):
                return _divided(layout, name, tensor, parts)
        return layout
    components = name.split(".") if name is not None else []
    count = 0
    if any(_FUSED_QKV.fullmatch(component) for component in components) or name is None:
        count = 3 if max(rows, columns) == 3 * min(rows, columns) else 0
    elif any(_FUSED_PAIR.fullmatch(component) for component in components):
        count = 2 if max(rows, columns) % 2 == 0 else 0
    if not count:
        return layout
    if not layout.transposed and rows % count:
        return layout
    # a fused projection gives more than it takes: (d, 3 d) holds its outputs along the second dimension
    transposed = layout.transposed or (count == 3 and columns == 3 * rows)
    out = columns if transposed else rows
    return Layout(layout.form, transposed, (out // count,) * count)


def _divided(layout: Layout, name: str, tensor: Tensor, parts: int | Sequence[int]) -> Layout:
    out = tensor.shape[-1] if layout.transposed else tensor.shape[-2]
    sizes = (out // max(parts, 1),) * parts if isinstance(parts, int) else tuple(parts)
    if not sizes or sum(sizes) != out or min(sizes) < 1:
        raise ValueError(
            f"split=...: {name} of shape {tuple(tensor.shape)} has {out} outputs, but got {parts!r}. Pass a number of equal"
            f" parts that divides {out}, or sizes with the sum {out}."
        )
    return Layout(layout.form, layout.transposed, sizes)


def hidden_matrices(module: nn.Module, split: Split = "auto") -> dict[str, Layout]:
    """Return the hidden matrices of any module by the parameter's name in ``module.named_parameters()``.

    They are the weights of linear layers, of attention's fused input projection, of convolutions with one group, and stacks of
    experts' matrices. Embeddings, weights tied to one, heads, positions and other tables do not count.

    In a stack of consecutive blocks, all matrices count. Outside the stack, or without one, the first matrix reads the input
    unless there is a known embedding. The last one writes the output unless there is a known head. Both are excluded. A list
    whose blocks run in parallel, such as attention heads, is not a stack.

    Args:
        module: any module.
        split: the parameters with several layers in one tensor, as in :class:`Muon`.
    """
    lists = candidates(module)
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for own, p in owner._parameters.items():
            if p is not None and p.ndim > 1:
                owners.setdefault(id(p), []).append((f"{path}.{own}" if path else own, owner, own))
    maps: dict[str, tuple[str, Layout]] = {}
    for name, p in module.named_parameters():
        held = owners.get(id(p), [])
        if p.ndim < 2 or any(isinstance(owner, nn.Embedding | nn.EmbeddingBag) for _, owner, _ in held):
            continue
        path, owner, own = next((one for one in held if one[0] == name), held[0])
        layout = _layout_in(owner, own, path, p)
        if layout is not None:
            maps[name] = (path, _with_parts(layout, name, p, split))
    # names count below the block alone: "embedding.layers.3.fc.weight" is a matrix of a block
    inside = [c.path for c in lists]
    found = {
        n: layout for n, (path, layout) in maps.items() if _within(path, inside) and _is_hidden(_below(path, inside))
    }
    hidden = [n for n, (path, _) in maps.items() if _is_hidden(path)]
    beside = [n for n in hidden if not _within(maps[n][0], inside)]
    stacked = bool(found) and (len(beside) <= 2 or _has_stack(module, lists))
    outside = beside if stacked else hidden
    ends: set[str] = set()
    if not any(_is_input(held) for held in owners.values()):
        ends.update(outside[:1])
    if not any(_is_head(held) for held in owners.values()):
        ends.update(outside[-1:])
    ends |= {n for n in outside if any(_alike(maps[n][0], maps[end][0], inside) for end in ends)}
    kept = {n for n in outside if n not in ends} | (found.keys() if stacked else set())
    return {n: layout for n, (_, layout) in maps.items() if n in kept}


def _has_stack(module: nn.Module, lists: Sequence[Candidate]) -> bool:
    """Whether the blocks of a list follow each other; if unknown, a list with most of the module counts as such."""
    if any(isinstance(c.container, nn.Sequential) for c in lists):
        return True
    told = verdicts(module, lists)
    size = sum(p.numel() for p in module.parameters() if p.ndim > 1)
    most = [c.composite and 2 * sum(p.numel() for p in c.container.parameters() if p.ndim > 1) >= size for c in lists]
    return any(told.get(c.path, large) for c, large in zip(lists, most, strict=True))


def _is_input(held: Sequence[tuple[str, nn.Module, str]]) -> bool:
    """Whether a parameter embeds the input: a lookup table, or a parameter named like one, except positions."""
    return any(
        (isinstance(owner, nn.Embedding | nn.EmbeddingBag) or any(_EMBEDDED.fullmatch(part) for part in parts))
        and not any(_POSITION.fullmatch(part) for part in parts)
        for path, owner, _ in held
        for parts in [path.split(".")]
    )


def _is_head(held: Sequence[tuple[str, nn.Module, str]]) -> bool:
    """Whether a parameter writes the output: a parameter named like a head, or a table shared with a linear layer."""
    tied = any(isinstance(owner, nn.Embedding) for _, owner, _ in held) and any(
        is_linear(owner) for _, owner, _ in held
    )
    return tied or any(_HEAD.fullmatch(part) for path, _, _ in held for part in path.split("."))


def _is_hidden(name: str) -> bool:
    return not any(_NOT_HIDDEN.fullmatch(component) for component in name.split("."))


def _within(path: str, lists: Iterable[str]) -> bool:
    return any(path.startswith(f"{one}.") for one in lists)


def _alike(path: str, other: str, lists: Iterable[str]) -> bool:
    """Whether two weights have the same place in two blocks of one list."""
    for one in lists:
        if path.startswith(f"{one}.") and other.startswith(f"{one}."):
            return path.removeprefix(f"{one}.").partition(".")[2] == other.removeprefix(f"{one}.").partition(".")[2]
    return False


def _below(path: str, stacks: Iterable[str]) -> str:
    for stack in stacks:
        if path.startswith(f"{stack}."):
            return path.removeprefix(f"{stack}.")
    return path


def _layout_in(owner: nn.Module, own: str, path: str, p: Tensor) -> Layout | None:
    """Return the layout of the parameter ``own`` of ``owner`` if it is a linear layer's weight."""
    if isinstance(owner, _CONVOLUTIONS):
        return Layout("convolution") if own == "weight" and owner.groups == 1 else None
    if isinstance(owner, nn.MultiheadAttention) and own == "in_proj_weight":
        return Layout()
    if isinstance(owner, nn.RNNBase):
        return Layout()
    if type(owner).__name__ == "Conv1D" and own == "weight" and p.ndim == 2:  # transformers' linear layer
        return Layout(transposed=True)
    if p.ndim == 3 and "expert" in path.lower():
        return Layout("stack", transposed=bool(getattr(owner, "is_transposed", False)))  # transformers says so
    if own in ("weight", "q_proj_weight", "k_proj_weight", "v_proj_weight") and p.ndim == 2 and is_linear(owner):
        return Layout()
    return None


def is_linear(owner: Any) -> bool:
    """Whether a module with a 2-D weight is a linear layer: torch's, or one with the same names of sizes."""
    if isinstance(owner, nn.Linear | nn.MultiheadAttention):
        return True
    return hasattr(owner, "in_features") and hasattr(owner, "out_features")


_MODULE: ContextVar[nn.Module | None] = ContextVar("module", default=None)


@contextmanager
def parameters_of(module: nn.Module) -> Iterator[None]:
    """Let optimizers that are created in this context know the module of their parameters."""
    token = _MODULE.set(module)
    try:
        yield
    finally:
        _MODULE.reset(token)


def layouts_of(module: nn.Module | None, split: Split) -> dict[int, Layout | None] | None:
    """Return the layout of each parameter of ``module`` by id, with None for parameters that are not matrices.

    Args:
        module: the module; None uses that of :func:`parameters_of`. Without one the result is None.
        split: as in :class:`Muon`.
    """
    module = _MODULE.get() if module is None else module
    if module is None:
        return None
    found = hidden_matrices(module, split)
    return {id(p): found.get(name) for name, p in module.named_parameters()}


def named(params: Any) -> list[tuple[str | None, Tensor]]:
    """Return the parameters with their names, if they have names."""
    return [one if isinstance(one, tuple) else (None, one) for one in params]
