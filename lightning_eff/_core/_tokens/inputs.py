"""What a block is called with, and the same for fewer of its tokens."""

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
    """What a call hands over, by position or name and place in tuples, lists and dicts."""
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
    """The call with ``fn(path, value)`` in place of each of its leaves."""
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
    """Whether it is a cache of keys and values, as transformers has them; training needs none."""
    return hasattr(value, "get_seq_length")


def told(path: Path, value: Any) -> str:
    """An input in words, such as ``position_embeddings.0 (1, 32, 16)``."""
    name = ".".join(map(str, path)) if isinstance(path[0], str) else f"argument {'.'.join(map(str, path))}"
    return f"{name} {tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__}"


@dataclass(frozen=True)
class Kept:
    """Tokens that a block is called on; the others bypass it as they are.

    Attributes:
        index: their places, shape (k,) for all samples, or (B, k) for each; in any order, none twice. The block sees
            them in the order of the sequence, so that what is causal stays so.
    """

    index: Tensor


@dataclass(frozen=True)
class Plan:
    """Which dimensions of a block's inputs run along its tokens.

    Attributes:
        hidden: the path of the hidden state, (B, T, D) or (T, B, D).
        dim: its dimension along the tokens, 1 or 0.
        dims: by path, those of the other inputs that have any.
        tables: by dotted name, those of the block's own buffers that have a row for each place, such as rotary tables.
    """

    hidden: Path
    dim: int
    dims: Mapping[Path, tuple[int, ...]] = field(default_factory=dict)
    tables: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def fewer(self, call: Call, index: Tensor, hidden: Tensor | None = None) -> Call:
        """The call on the tokens at ``index``, ascending, of shape (k,) or (B, k); caches are left out.

        Args:
            call: on all tokens.
            index: which tokens.
            hidden: what stands for the hidden state, if not its own tokens.
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
    """The block's own ``tables`` hold the rows of the places ``index``, (k,), alone."""
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
    """The tokens at ``index``, (k,) or (B, k), of a hidden state with the tokens in ``dim``."""
    if index.ndim == 1:
        return hidden.index_select(dim, index)
    return hidden.gather(dim, _spread(index, hidden, dim))


def put_tokens(hidden: Tensor, index: Tensor, new: Tensor, dim: int) -> Tensor:
    """``hidden`` with ``new`` in place of the tokens at ``index``; the others are bit for bit as they were."""
    dtype = torch.promote_types(hidden.dtype, new.dtype)
    if index.ndim == 1:
        return hidden.to(dtype).index_copy(dim, index, new.to(dtype))
    return hidden.to(dtype).scatter(dim, _spread(index, hidden, dim), new.to(dtype))


def _spread(index: Tensor, hidden: Tensor, dim: int) -> Tensor:
    """``index`` (B, k) for ``gather`` and ``scatter`` along the tokens of a hidden state."""
    index = index if dim == 1 else index.t()
    return index.unsqueeze(-1).expand(*index.shape, hidden.shape[-1])


def take_along(value: Tensor, dims: tuple[int, ...], index: Tensor, size: int) -> Tensor:
    """An input at the tokens ``index`` along ``dims``; rows of masks that would see nothing more see themselves.

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
    # a query all of whose keys are gone would make attention NaN, or the mean of what it may not see
    saw = take((~hidden).any(dim=-1, keepdim=True), dims[0])
    hides = _hides(taken, dims)
    assert hides is not None
    eye = torch.eye(taken.shape[-1], dtype=torch.bool, device=taken.device)
    eye = eye.reshape([taken.shape[-1] if d in dims else 1 for d in range(taken.ndim)])
    return taken.masked_fill(hides.all(dim=-1, keepdim=True) & saw & eye, True if taken.dtype == torch.bool else 0.0)


def given_back(rest: tuple[Any, ...], less: Call, call: Call) -> tuple[Any, ...]:
    """What a block returned beside the hidden state, with inputs that it handed on as they are in ``call``, of all tokens.

    Args:
        rest: what it returned.
        less: what it was called with.
        call: the same on all tokens.
    """
    handed = {id(value): path for path, value in leaves(less) if isinstance(value, Tensor)}
    given = dict(leaves(call))
    return tuple(given[handed[id(value)]] if id(value) in handed else value for value in rest)


def _hides(mask: Tensor, dims: tuple[int, ...]) -> Tensor | None:
    """What a square mask hides; None for other inputs."""
    if len(dims) != 2 or dims[1] != mask.ndim - 1:
        return None
    if mask.dtype == torch.bool:
        return ~mask
    return mask <= BLIND if mask.is_floating_point() else None


BLIND = -1e4  #: what is added to scores at this or below hides
