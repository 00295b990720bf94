"""Finds out how a batch's loss depends on its samples, with batches derived from one batch."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core.batches import map_tensors, select
from lightning_eff.strategies._pipeline._losses.counting import held_by_sample, values_for
from lightning_eff.strategies._pipeline.streams import reseed

_MOST_VALUES = 12
_ASKED = {
    getattr(owner, name)
    for owner, names in (
        (Tensor, ("__eq__", "__ne__", "__ge__", "__gt__", "__le__", "__lt__", "eq", "ne", "ge", "gt", "le", "lt")),
        (torch, ("eq", "ne", "ge", "gt", "le", "lt", "isin")),
    )
    for name in names
}
_CLASSES = (F.cross_entropy, F.nll_loss)
_DROPOUT = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)


class Listening(TorchFunctionMode):
    """Records the numbers with which a step compares tensors, and gives each sample its own random numbers.

    A sample's random numbers do not depend on the other samples. An index out of range raises here, before the device fails
    permanently.

    Args:
        size: samples in the running batch.
        first: number of its first sample among ``all_samples``.
        all_samples: number of samples in total.

    Attributes:
        seen: the numbers, including classes that a loss ignores.
    """

    def __init__(self, size: int, first: int, all_samples: int) -> None:
        super().__init__()
        self.size, self.first, self.all_samples = size, first, all_samples
        self.seen, self._draws = dict[float, None](), 0

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASKED:
            self._note(args, kwargs)
        elif func in _CLASSES:
            ignored = kwargs.get("ignore_index", args[4] if len(args) > 4 else -100)
            self.seen[float(ignored)] = None
            _check_classes(args, kwargs, ignored)
        elif func in (F.embedding, torch.embedding):
            _check_embedding(func, args, kwargs)
        elif func in _DROPOUT:
            return args[0] if args else kwargs["input"]
        elif func in _DRAWS:
            return self._drawn(func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, args: Any, kwargs: Any) -> None:
        for other in (*args[1:], *kwargs.values()):
            if isinstance(other, bool):
                continue
            if isinstance(other, int | float) and math.isfinite(other):
                self.seen[float(other)] = None
            elif isinstance(other, Tensor) and other.numel() <= 4 and not other.is_meta:
                self.seen.update(dict.fromkeys(float(v) for v in other.reshape(-1).tolist()))

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._draws += 1
        with rng.fork():
            reseed("draw", self._draws)
            return _DRAWS[func](self, args, kwargs)

    def rows(self, shape: torch.Size, fill: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
        """Return random numbers of ``shape`` in the type of ``like``, by sample if dimension 0 has the samples."""
        if len(shape) == 0 or shape[0] == 0 or shape[0] % self.size:
            return fill(torch.empty(shape, dtype=torch.float32)).to(like)
        each = shape[0] // self.size
        made = fill(torch.empty(each * self.all_samples, *shape[1:], dtype=torch.float32))
        return made[each * self.first : each * (self.first + self.size)].to(like, copy=True)


def _check_classes(args: Any, kwargs: Any, ignored: int) -> None:
    logits, target = (args[0] if args else kwargs["input"]), (args[1] if len(args) > 1 else kwargs["target"])
    if target.is_floating_point() or target.numel() == 0:
        return
    classes = logits.shape[1] if logits.ndim > 1 else logits.shape[0]
    bad = ((target < 0) | (target >= classes)) & (target != ignored)
    if bool(bad.any()):
        raise IndexError("a class is out of range")


def _check_embedding(func: Any, args: Any, kwargs: Any) -> None:
    found = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if len(found) < 2:
        return
    index, weight = sorted(found[:2], key=Tensor.is_floating_point)
    if index.numel() and bool(((index < 0) | (index >= weight.shape[0])).any()):
        raise IndexError("an index is out of range")


def _sized(args: Any, kwargs: Any) -> Tensor:
    """Return an empty tensor like the one that a factory call would create."""
    options = {k: v for k, v in kwargs.items() if k in ("dtype", "device")}
    size = kwargs.get("size", args)
    if len(size) == 1 and not isinstance(size[0], int):
        size = size[0]
    return torch.empty(tuple(size), **options)


def _alike(args: Any, kwargs: Any) -> Tensor:
    options = {k: v for k, v in kwargs.items() if k in ("dtype", "device")}
    return torch.empty_like(args[0] if args else kwargs["input"], **options)


def _named(args: Any, kwargs: Any, names: tuple[str, ...], defaults: tuple[Any, ...]) -> list[Any]:
    """Return the arguments after the first, given by position or name."""
    given = list(args[1 : 1 + len(names)])
    return [
        given[i] if i < len(given) else kwargs.get(n, d) for i, (n, d) in enumerate(zip(names, defaults, strict=True))
    ]


def _factory(make: Callable[[Any, Any], Tensor], fill: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def draw(mode: Listening, args: Any, kwargs: Any) -> Any:
        like = make(args, kwargs)
        made = mode.rows(like.shape, fill, like)
        return made.requires_grad_(bool(kwargs.get("requires_grad", False)))

    return draw


def _integers(make: Callable[[Any, Any], Tensor]) -> Callable[..., Any]:
    def draw(mode: Listening, args: Any, kwargs: Any) -> Any:
        bounds = [kwargs[k] for k in ("low", "high") if k in kwargs] or [a for a in args if isinstance(a, int)]
        low, high = (0, bounds[0]) if len(bounds) == 1 else bounds[:2]
        rest = tuple(a for a in args if not isinstance(a, int))
        like = make(rest, {"dtype": torch.int64, **kwargs})
        return mode.rows(like.shape, lambda t: t.uniform_(low, high).floor_().clamp_(low, high - 1), like)

    return draw


def _in_place(
    names: tuple[str, ...], defaults: tuple[Any, ...], fill: Callable[..., Callable[[Tensor], Tensor]]
) -> Callable[..., Any]:
    def draw(mode: Listening, args: Any, kwargs: Any) -> Any:
        t, given = args[0], _named(args, kwargs, names, defaults)
        with torch.no_grad():
            t.copy_(mode.rows(t.shape, fill(*given), t))
        return t

    return draw


def _normal(mode: Listening, args: Any, kwargs: Any) -> Tensor:
    mean, std = (args[0] if args else kwargs["mean"]), (args[1] if len(args) > 1 else kwargs.get("std", 1.0))
    if "size" in kwargs or len(args) > 2:
        like = torch.empty(tuple(kwargs.get("size", args[2] if len(args) > 2 else ())), device=kwargs.get("device"))
    else:
        like = torch.empty_like(mean + std * 0 if isinstance(mean, Tensor) else mean + std)
    return mean + std * mode.rows(like.shape, Tensor.normal_, like)


def _permuted(mode: Listening, args: Any, kwargs: Any) -> Tensor:
    return torch.arange(args[0] if args else kwargs["n"], device=kwargs.get("device"))


def _likeliest(mode: Listening, args: Any, kwargs: Any) -> Tensor:
    probabilities, number, again = args[0], *_named(args, kwargs, ("num_samples", "replacement"), (1, False))
    if again:
        return probabilities.argmax(-1, keepdim=True).expand(*probabilities.shape[:-1], number).clone()
    return probabilities.topk(number, -1).indices


_DRAWS: dict[Any, Callable[..., Any]] = {
    torch.randn: _factory(_sized, Tensor.normal_),
    torch.randn_like: _factory(_alike, Tensor.normal_),
    torch.rand: _factory(_sized, Tensor.uniform_),
    torch.rand_like: _factory(_alike, Tensor.uniform_),
    torch.randint: _integers(_sized),
    torch.randint_like: _integers(_alike),
    torch.normal: _normal,
    torch.randperm: _permuted,
    torch.multinomial: _likeliest,
    torch.bernoulli: lambda mode, args, kwargs: (args[0] > 0.5).to(args[0]),
    Tensor.multinomial: _likeliest,
    Tensor.normal_: _in_place(("mean", "std"), (0.0, 1.0), lambda mean, std: lambda t: t.normal_(mean, std)),
    Tensor.uniform_: _in_place(("from", "to"), (0.0, 1.0), lambda low, high: lambda t: t.uniform_(low, high)),
    Tensor.exponential_: _in_place(("lambd",), (1.0,), lambda rate: lambda t: t.exponential_(rate)),
    Tensor.bernoulli_: _in_place(
        ("p",), (0.5,), lambda p: lambda t: t.uniform_().lt_(float(torch.as_tensor(p).mean()))
    ),
}


@contextmanager
def perturbed(module: nn.Module, inside: set[int], amount: float) -> Iterator[None]:
    """Change weights outside the blocks until the context ends, so that the losses of samples differ a lot.

    Args:
        module: the module.
        inside: ids of parameters that do not change.
        amount: size of the noise, relative to noise that gives outputs of size 1. 0 changes nothing.
    """
    before: list[tuple[nn.Parameter, Tensor]] = []
    try:
        if amount:
            with rng.fork():
                for name, p in module.named_parameters():
                    if id(p) in inside or not p.is_floating_point() or isinstance(p, DTensor) or p.is_meta:
                        continue
                    reseed("perturbed", name)
                    size = amount / math.sqrt(p[0].numel()) if p.ndim > 1 else amount / 4
                    noise = torch.randn(p.shape, dtype=torch.float32).to(p.device)
                    before.append((p, p.data))
                    p.data = (p.data + size * noise).to(p.dtype)
        yield
    finally:
        for p, data in before:
            p.data = data


class Pair(NamedTuple):
    """Two micro-batches and their union."""

    first: Any
    second: Any
    together: Any


def pair_of(batch: Any, size: int, rows: Tensor) -> Pair:
    """Return the first half, the second half, and all of the samples ``rows`` of a batch of ``size``."""
    half = len(rows) // 2
    return Pair(select(batch, rows[:half], size), select(batch, rows[half:], size), select(batch, rows, size))


def variants(batch: Any, size: int, seen: dict[float, None]) -> Iterator[tuple[str, str, Pair]]:
    """Yield pairs of ``batch``'s samples like those of later batches, each with one tensor changed.

    Elements become possible padding: towards the end of samples, in different amounts in both halves, or in a whole sample.
    Or they are permuted, or become smaller.

    Yields:
        The path of the tensor, a description of the change, and the pair.
    """
    half = max(2, min(4, size // 2))
    rows = torch.arange(2 * half) % size
    whole = select(batch, rows, size)
    seen = dict.fromkeys([*seen][:_MOST_VALUES])
    for path, t in held_by_sample(whole, 2 * half):

        def put(new: Tensor, t: Tensor = t) -> Pair:
            changed = map_tensors(whole, lambda other: new if other is t else other)
            return pair_of(changed, 2 * half, torch.arange(2 * half))

        values = values_for(t, seen)
        if t.is_floating_point():
            values.append(math.nan)
        for value in values:
            for place in ("towards the end", "in a sample") if t.ndim > 1 and t.shape[1] > 1 else ("in a sample",):
                what = f"{value:g} in batch{path}, {place}"
                yield path, what, put(_padded(t, value, half, whole=place == "in a sample"))
        with rng.fork():
            reseed("variants", path)
            order = torch.randperm(t.numel())
            share = torch.rand(t.shape, dtype=torch.float32)
        yield path, f"batch{path} in another order", put(t.reshape(-1)[order.to(t.device)].view(t.shape))
        if t.dtype != torch.bool:
            less = t * share.to(t) if t.is_floating_point() else t // 2
            yield path, f"smaller numbers in batch{path}", put(torch.cat([less[:half], t[half:]]))


def _padded(t: Tensor, value: float, half: int, *, whole: bool) -> Tensor:
    """Set some elements of ``t`` to ``value``: most in the first half, few in the second."""
    t = t.clone(memory_format=torch.contiguous_format)
    if whole:
        t[0] = value
        return t
    length = t.shape[1]
    t[:half, max(1, round(0.4 * length)) :] = value
    t[half, max(1, round(0.8 * length)) :] = value
    return t
