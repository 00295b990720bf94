"""The inputs of a block, and the same inputs for fewer of its tokens."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff._core.blocks import hidden_of

Path = tuple[int | str, ...]
Call = tuple[tuple[Any, ...], dict[str, Any]]


def leaves(call: Call) -> Iterator[tuple[Path, Any]]:
    """Yield the inputs of a call with their paths: position or name, then the place in tuples, lists and dicts."""
    yield from _leaves((), list(call[0]))
    yield from _leaves((), call[1])


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _leaves((*path, i), item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves((*path, key), item)
    else:
        yield path, value


def mapped(call: Call, fn: Callable[[Path, Any], Any]) -> Call:
    """Return the call with ``fn(path, value)`` in place of each leaf."""
    args, kwargs = call
    return tuple(_mapped((), list(args), fn)), _mapped((), kwargs, fn)


def _mapped(path: Path, value: Any, fn: Callable[[Path, Any], Any]) -> Any:
    if isinstance(value, list | tuple):
        items = [_mapped((*path, i), item, fn) for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _mapped((*path, key), item, fn) for key, item in value.items()}
    return fn(path, value)


def is_cache(value: Any) -> bool:
    """Return whether ``value`` is a cache of keys and values in transformers' form; training needs none."""
    return hasattr(value, "get_seq_length")


def told(path: Path, value: Any) -> str:
    """Describe an input, such as ``position_embeddings.0 (1, 32, 16)``."""
    name = ".".join(map(str, path)) if isinstance(path[0], str) else f"argument {'.'.join(map(str, path))}"
    return f"{name} {tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__}"


@dataclass(frozen=True)
class Kept:
    """Tokens on which a block runs; the others bypass it unchanged.

    Attributes:
        index: their positions, shape (k,) for all samples, or (B, k) for each; in any order, without duplicates. The block
            sees them in the order of the sequence, so causality is kept.
    """

    index: Tensor


@dataclass(frozen=True)
class Plan:
    """Which dimensions of a block's inputs run along its tokens.

    Attributes:
        hidden: the path of the hidden state, (B, T, D) or (T, B, D).
        dim: its dimension along the tokens, 1 or 0.
        dims: the dimensions of the other inputs along the tokens, by path.
        tables: the dimensions of the block's own buffers with a row per position, such as rotary tables, by dotted name.
    """

    hidden: Path
    dim: int
    dims: Mapping[Path, tuple[int, ...]] = field(default_factory=dict)
    tables: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def fewer(self, call: Call, index: Tensor, hidden: Tensor | None = None) -> Call:
        """Return the call on the tokens at ``index``, ascending, of shape (k,) or (B, k), without caches.

        Args:
            call: the call on all tokens.
            index: positions of the tokens.
            hidden: replaces the selected hidden state, if given.
        """
        size = hidden_of(*call).shape[1 - self.dim]

        def take(path: Path, value: Any) -> Any:
            if path == self.hidden:
                return take_tokens(value, index, self.dim) if hidden is None else hidden
            if is_cache(value):
                return None
            dims = self.dims.get(path)
            return value if dims is None else take_along(value, dims, index, size)

        return mapped(call, take)


@contextmanager
def tables_at(block: nn.Module, tables: Mapping[str, tuple[int, ...]], index: Tensor) -> Iterator[None]:
    """Reduce the block's own ``tables`` to the rows at ``index``, (k,), until the context ends."""
    held: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for path, dims in tables.items():
            owner, _, name = path.rpartition(".")
            buffers: Any = getattr(block, "_orig_mod", block).get_submodule(owner)._buffers
            held.append((buffers, name, buffers[name]))
            for dim in dims:
                buffers[name] = buffers[name].index_select(dim, index)
        yield
    finally:
        for buffers, name, whole in held:
            buffers[name] = whole


def take_tokens(hidden: Tensor, index: Tensor, dim: int) -> Tensor:
    """Return the tokens at ``index``, (k,) or (B, k), of a hidden state with the tokens in ``dim``."""
    if index.ndim == 1:
        return hidden.index_select(dim, index)
    return hidden.gather(dim, _spread(index, hidden, dim))


def put_tokens(hidden: Tensor, index: Tensor, new: Tensor, dim: int) -> Tensor:
    """Return ``hidden`` with ``new`` in place of the tokens at ``index``; the others stay bit-for-bit the same."""
    dtype = torch.promote_types(hidden.dtype, new.dtype)
    if index.ndim == 1:
        return hidden.to(dtype).index_copy(dim, index, new.to(dtype))
    return hidden.to(dtype).scatter(dim, _spread(index, hidden, dim), new.to(dtype))


def _spread(index: Tensor, hidden: Tensor, dim: int) -> Tensor:
    """Expand ``index`` (B, k) for ``gather`` and ``scatter`` along the tokens of a hidden state."""
    index = index if dim == 1 else index.t()
    return index.unsqueeze(-1).expand(*index.shape, hidden.shape[-1])


def take_along(value: Tensor, dims: tuple[int, ...], index: Tensor, size: int) -> Tensor:
    """Return an input at the tokens ``index`` along ``dims``. Mask rows that would see nothing more see themselves.

    Raises:
        ValueError: if ``index`` is (B, k) and the input has no dimension for the ``size`` samples.
    """
    if index.ndim == 1:

        def take(t: Tensor, dim: int) -> Tensor:
            return t.index_select(dim, index)
    else:
        if 0 in dims or value.shape[0] not in (1, size):
            raise ValueError(
                f"an input of shape {tuple(value.shape)} has no dimension for the {size} samples, whose tokens differ"
            )

        def take(t: Tensor, dim: int) -> Tensor:
            shape = [len(index) if d == 0 else index.shape[1] if d == dim else 1 for d in range(t.ndim)]
            return torch.take_along_dim(t, index.reshape(shape), dim)

    taken = value
    for dim in dims:
        taken = take(taken, dim)
    hidden = _hides(value, dims)
    if hidden is None:
        return taken
    # a query without any key left would give NaN, or the mean of masked keys
    saw = take((~hidden).any(dim=-1, keepdim=True), dims[0])
    hides = _hides(taken, dims)
    assert hides is not None
    eye = torch.eye(taken.shape[-1], dtype=torch.bool, device=taken.device)
    eye = eye.reshape([taken.shape[-1] if d in dims else 1 for d in range(taken.ndim)])
    return taken.masked_fill(hides.all(dim=-1, keepdim=True) & saw & eye, True if taken.dtype == torch.bool else 0.0)


def given_back(rest: tuple[Any, ...], less: Call, call: Call) -> tuple[Any, ...]:
    """Return a block's other outputs, with passed-on inputs replaced by those of ``call``, for all tokens.

    Args:
        rest: its outputs other than the hidden state.
        less: the call on fewer tokens.
        call: the call on all tokens.
    """
    handed = {id(value): path for path, value in leaves(less) if isinstance(value, Tensor)}
    given = dict(leaves(call))
    return tuple(given[handed[id(value)]] if id(value) in handed else value for value in rest)


def _hides(mask: Tensor, dims: tuple[int, ...]) -> Tensor | None:
    """Return what a square mask hides; None for other inputs."""
    if len(dims) != 2 or dims[1] != mask.ndim - 1:
        return None
    if mask.dtype == torch.bool:
        return ~mask
    return mask <= BLIND if mask.is_floating_point() else None


BLIND = -1e4  #: mask values at or below this hide a key
