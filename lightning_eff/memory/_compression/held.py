"""One saved tensor as it is held until its backward pass: exact, in codes, or in bits."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_eff.kernels.bit_mask import pack_mask, pack_pair, unpack_mask, unpack_pair
from lightning_eff.kernels.group_quantization import Packed
from lightning_eff.memory._compression.affine import SAME, Line
from lightning_eff.memory._compression.codes import Codes

EXACT_BITS = 32  # marks a tensor that is kept as it is, of any dtype
_SAMPLED_GROUPS = 64
# A tensor is kept exactly if the expected squared rounding error exceeds this multiple of its variance inside a group.
WORST_ERROR = 4.0
# The same at 1 bit, which only measured sensitivities choose; it is 7.5 in groups of 256 normal numbers.
WORST_ERROR_OF_ONE_BIT = 16.0

Restore = Callable[[Tensor], Tensor]
_nothing: dict[tuple[torch.dtype, torch.device], Tensor] = {}


class Version:
    """Detects whether a tensor was changed in place, without keeping its storage.

    A detached alias shares the version counter of its tensor, even with another storage.

    Args:
        x: the tensor.
        alias: its detached alias, if that is kept anyway.
    """

    __slots__ = ("alias", "saved", "shape")

    def __init__(self, x: Tensor, alias: Tensor | None = None) -> None:
        if alias is None:
            empty = _nothing.get((x.dtype, x.device))
            if empty is None:
                empty = _nothing[x.dtype, x.device] = torch.empty(0, dtype=x.dtype, device=x.device)
            alias = x.detach()
            alias.data = empty
        self.alias = alias
        self.saved = x._version
        self.shape = x.shape

    def check(self) -> None:
        """Raise autograd's error if the saved tensor has changed.

        Raises:
            RuntimeError: if the tensor was changed in place after it was saved.
        """
        now = self.alias._version
        if now != self.saved:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" [{self.alias.type()} {list(self.shape)}] is at version {now}; expected version {self.saved} instead."
                " Do not change in place what a backward pass needs."
            )


class Held:
    """The record of one saved tensor, and its size.

    Attributes:
        bits: the bits per element; ``EXACT_BITS`` if the tensor is kept as it is.
        num_bytes: the size of masks and signs. ``codes`` report their own size, since they may serve several tensors.
        codes: the codes of which it is a ``line``, if any.
        restore: the function that gives decoded codes the form of the tensor.
        key: the name under which its bits are decided; empty without one.
        derived: whether it follows from the codes without being a line of them.
    """

    __slots__ = (
        "__weakref__", "_decode", "_tensor", "_version", "bits", "codes", "derived", "key", "line", "num_bytes", "restore"
    )  # fmt: skip

    def __init__(self, x: Tensor, version: Version, tensor: Tensor | None) -> None:
        self._version = version
        self._tensor = tensor
        self._decode: Callable[[], Tensor] | None = None
        self.bits = EXACT_BITS
        self.num_bytes = 0
        self.codes: Codes | None = None
        self.line = SAME
        self.restore: Restore = _as_it_is
        self.key = ""
        self.derived = False

    @classmethod
    def exact(cls, x: Tensor) -> "Held":
        """Hold ``x`` itself, without its graph."""
        tensor = x.detach()
        return cls(x, Version(x, tensor), tensor)

    @classmethod
    def coded(cls, x: Tensor, decode: Callable[[], Tensor], bits: int, num_bytes: int) -> "Held":
        """Hold what ``decode`` needs, of ``num_bytes``."""
        held = cls(x, Version(x), None)
        held._decode, held.bits, held.num_bytes = decode, bits, num_bytes
        return held

    @classmethod
    def of_codes(cls, x: Tensor, codes: Codes, restore: Restore, line: Line = SAME, *, keep: bool = False) -> "Held":
        """Hold ``codes``, of which ``x`` is that ``line``, and with ``keep`` also ``x`` until :meth:`settle`."""
        held = cls(x, Version(x), x.detach() if keep else None)
        held.bits, held.codes, held.restore, held.line = codes.bits, codes, restore, line
        return held

    def settle(self, *, fit: bool) -> None:
        """Keep one of the two: the compressed form if it is ``fit`` for use, else the tensor."""
        if fit:
            self._tensor = None
        else:
            self.codes, self.bits = None, EXACT_BITS

    def get(self) -> Tensor:
        """Return the tensor, decoded anew at each call.

        Raises:
            RuntimeError: if it was changed in place after it was saved.
        """
        self._version.check()
        if self._tensor is not None:
            return self._tensor
        if self.codes is not None:
            return self.restore(self.codes.decode(self.line))
        assert self._decode is not None, "one of the three is kept"
        return self._decode()


def memory_order(x: Tensor) -> list[int]:
    """Return the dimensions of ``x`` from the longest stride to the shortest, as :func:`dense` orders them."""
    stride = x.stride()
    return list(range(x.ndim)) if x.is_contiguous() else sorted(range(x.ndim), key=lambda dim: -stride[dim])


def dense(x: Tensor) -> tuple[Tensor, Restore]:
    """Return ``x`` as a contiguous tensor in its own memory order, and the function that restores the form of ``x``.

    An expanded dimension is stored once. A permuted tensor gets its strides back; one with gaps (a slice) gets the order of its
    dimensions in memory.
    """
    x = x.detach()
    if x.is_contiguous():
        return x, _as_it_is
    shape, expanded = x.shape, False
    for dim, step in enumerate(x.stride()):
        if step == 0 and shape[dim] > 1:
            x, expanded = x.narrow(dim, 0, 1), True
    order = memory_order(x)
    inverse = [order.index(dim) for dim in range(x.ndim)]

    def restore(y: Tensor) -> Tensor:
        y = y.permute(inverse)
        return y.expand(shape) if expanded else y

    return x.permute(order).contiguous(), restore


def _as_it_is(y: Tensor) -> Tensor:
    return y


def mask(x: Tensor) -> Held | None:
    """Hold one bit per element, if ``x`` is boolean or has at most two values."""
    y, restore = dense(x)
    if x.dtype is torch.bool:
        codes, shape = pack_mask(y), y.shape
        return Held.coded(x, lambda: restore(unpack_mask(codes, shape)), 1, codes.numel())
    pair = pack_pair(y)
    if pair is None:
        return None
    return Held.coded(x, lambda: restore(unpack_pair(pair)), 1, pair.num_bytes)


def sign(x: Tensor) -> Held:
    """Hold one bit per element, decoded as 1 for positive values and NaN, and as 0 otherwise."""
    y, restore = dense(x)
    codes, shape, dtype = pack_mask(~(y <= 0)), y.shape, x.dtype
    return Held.coded(x, lambda: restore(unpack_mask(codes, shape).to(dtype)), 1, codes.numel())


def fits(y: Tensor, packed: Packed) -> Tensor:
    """Return whether the compressed form of ``y`` (contiguous) is fit for use, a boolean scalar on its device.

    It is unfit if a scale or a minimum is not finite (NaN, infinity, a range beyond float32). It is also unfit if the expected
    squared error of stochastic rounding, ``scale^2 f (1 - f)`` with the fraction ``f`` that is rounded away, exceeds
    ``WORST_ERROR`` times the variance inside a group, both averaged over at most 64 groups: a few outliers then hide the other
    elements. With 4 bits or more, groups of 256 cannot reach that.
    """
    fit = (packed.scale.sum() + packed.minimum.sum()).isfinite()
    size, levels = packed.group_size, 2**packed.bits - 1
    worst = WORST_ERROR_OF_ONE_BIT if packed.bits == 1 else WORST_ERROR
    whole = y.numel() // size
    # n elements of range R have a standard deviation of at least R / sqrt(2 n), f (1 - f) <= 1/4, scale = R / levels
    if whole and 2 * size > 4 * levels**2 * worst:
        every = -(-whole // _SAMPLED_GROUPS)
        groups = y.view(-1)[: whole * size].view(whole, size)[::every].float()
        scale, minimum = packed.scale[:whole:every, None], packed.minimum[:whole:every, None]
        f = ((groups - minimum) / scale.clamp_min(torch.finfo(torch.float32).tiny)).frac_()
        error = (scale.square() * f * (1 - f)).mean()
        fit = fit & ~(error > worst * groups.var(dim=1, correction=0).mean())
    return fit
