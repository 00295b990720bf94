"""8-bit codes by running ranges, one per attention head and one per other tensor (Mesa: Pan et al. 2021, arXiv:2111.11124).

For the tensor ``x`` of one name, with its running minimum ``m`` and range ``R``:

    m <- 0.9 m + 0.1 min(x)        R <- 0.9 R + 0.1 (max(x) - min(x))        at first m = min(x), R = max(x) - min(x)
    code = clamp(floor(255 (x - m) / R + u), 0, 255)        u ~ U(0, 1)        decoded = m + R / 255 code

Only two numbers per head are stored besides the codes, which are clamped at both ends. The extremes of ``x`` count as at most
``REACH`` ranges away from the running one, so ``R`` at most doubles from one tensor to the next.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_eff.kernels._group_quantization_torch import PERIOD, PIECE, SMALLEST_RANGE, noise, offset
from lightning_eff.memory._compression.affine import SAME, Line
from lightning_eff.memory._compression.codes import Host

DECAY = 0.9
LEVELS = 255
REACH = 5.0
# A tensor is kept exactly if clamping removes more than this fraction of the variance in any of its heads ...
WORST_CLIPPED = 0.01
# ... or if the expected squared rounding error exceeds this multiple of it, as for groups.
WORST_ROUNDED = 4.0


def follow(running: Tensor | None, low: Tensor, high: Tensor) -> Tensor:
    """Return the running minimum and range after a tensor whose heads have these extremes.

    A tensor with NaN or infinity does not change them. A range of 0 counts as none.

    Args:
        running: minimum and range, float32, shape (2, num_heads), NaN before the first tensor; None is NaN.
        low: each head's smallest element, float32, shape (num_heads,).
        high: each head's largest, likewise.
    """
    if running is None or running.shape[1] != len(low):
        running = low.new_full((2, len(low)), float("nan"))
    running = running.to(low.device)
    minimum, span = running
    nearest, furthest = minimum - REACH * span, minimum + (1 + REACH) * span
    near_low, near_high = low.clamp(nearest, furthest), high.clamp(nearest, furthest)
    # m <- 0.9 m + 0.1 min(x), R <- 0.9 R + 0.1 (max(x) - min(x))
    moved = torch.stack([torch.lerp(near_low, minimum, DECAY), torch.lerp(near_high - near_low, span, DECAY)])
    first = torch.stack([low, high - low])
    return torch.where((high - low).isfinite().all(), torch.where(span > 0, moved, first), running)


class RangeCodes:
    """A tensor in 8 bits per element, with its minimum and scale.

    Args:
        codes: uint8, contiguous, of the tensor's shape.
        scale: the width of a step, float32, broadcastable.
        minimum: likewise; no other code changes either.
        shape: the tensor's shape.
        dtype: the tensor's dtype.
        host: the destination of the codes; None leaves them on their device.
    """

    __slots__ = (
        "_codes", "_dtype", "_minimum", "_scale", "_shape", "_ticket", "bits", "host_bytes", "num_bytes", "numel"
    )  # fmt: skip

    def __init__(
        self, codes: Tensor, scale: Tensor, minimum: Tensor, shape: torch.Size, dtype: torch.dtype, host: Host | None
    ) -> None:
        self._scale, self._minimum, self._shape, self._dtype = scale, minimum, shape, dtype
        self.bits, self.numel = 8, codes.numel()
        self._ticket: Any = None if host is None else host.put(codes)
        self._codes = codes if host is None else None
        self.host_bytes = 0 if host is None else codes.numel()
        self.num_bytes = codes.numel() - self.host_bytes + 4 * (scale.numel() + minimum.numel())

    def decode(self, line: Line = SAME) -> Tensor:
        codes = self._ticket.get() if self._codes is None else self._codes
        scale, minimum = self._scale * line.factor, self._minimum * line.factor + line.offset
        return codes.to(torch.float32).mul_(scale).add_(minimum).to(self._dtype).view(self._shape)


class RunningRanges:
    """Encodes tensors by running ranges, stored by the tensors' names.

    Args:
        state: the result of :meth:`state_dict` to continue from.
    """

    def __init__(self, state: Mapping[str, Tensor] | None = None) -> None:
        self._running: dict[str, Tensor] = dict(state or {})

    def encode(
        self, key: str, y: Tensor, heads: tuple[int, int] | None, seed: int | None, host: Host | None = None
    ) -> tuple[RangeCodes, Tensor]:
        """Update the tensor's range, and encode it with the result.

        Args:
            key: the tensor's name.
            y: the tensor, floating-point, contiguous.
            heads: the dimension with its heads, the last within it, and their number; None for one range.
            seed: the seed for stochastic rounding; None rounds to nearest.
            host: the destination of the codes; None leaves them on their device.

        Returns:
            The codes, and whether they are fit for use, a boolean scalar on the tensor's device.
        """
        dim, number = (0, 1) if heads is None else heads
        x = y.unflatten(dim, (-1, number))
        wide = [number if d == dim + 1 else 1 for d in range(x.ndim)]
        others = [d for d in range(x.ndim) if d != dim + 1]
        low, high = (e.float().reshape(number) for e in (x.amin(others), x.amax(others)))
        running = self._running[key] = follow(self._running.get(key), low, high)
        minimum, span = (t.view(wide) for t in running)
        scale = span / LEVELS
        # 255 (x - m) / R
        scaled = (x.float() - minimum).mul_(scale.clamp_min(SMALLEST_RANGE).reciprocal())
        fit = (high - low).isfinite().all() & running.isfinite().all() & _fits(scaled, others, low, high, running)
        codes = _clamped(scaled.view(-1), seed).view(x.shape)
        return RangeCodes(codes, scale, minimum.clone(), y.shape, y.dtype, host), fit

    def state_dict(self) -> dict[str, Tensor]:
        """Return minimum and range of each head, float32, shape (2, num_heads), in host memory, by the tensors' names."""
        return {key: running.cpu() for key, running in self._running.items()}  # tensors are never changed in place


def of_rank(states: Sequence[Mapping[str, Tensor]], rank: int) -> Mapping[str, Tensor]:
    """Return the ranges with which a process resumes from a checkpoint with those of each process."""
    return states[rank % len(states)]


def _fits(scaled: Tensor, others: list[int], low: Tensor, high: Tensor, running: Tensor) -> Tensor:
    """Return whether neither clamping nor rounding ruins a head of a tensor, given in steps."""
    variance = scaled.var(others, correction=0).view(-1)
    fit = torch.ones((), dtype=torch.bool, device=scaled.device)
    minimum, span = running
    # on a CUDA device, both are computed without a synchronization
    if scaled.is_cuda or bool(((low < minimum) | (high > minimum + span)).any()):
        clipped = (scaled - scaled.clamp(0, LEVELS)).square_().mean(others).view(-1)
        fit = fit & ~(clipped > WORST_CLIPPED * variance).any()
    if scaled.is_cuda or bool((variance * WORST_ROUNDED < 0.25).any()):
        f = scaled.frac().abs_()
        fit = fit & ~((f * (1 - f)).mean(others).view(-1) > WORST_ROUNDED * variance).any()
    return fit


def _clamped(scaled: Tensor, seed: int | None) -> Tensor:
    """Return ``clamp(floor(scaled + u), 0, 255)`` of a flat tensor, which is overwritten."""
    table = noise(scaled.device, stochastic=seed is not None)
    first = 0 if seed is None else offset(seed)
    for at in range(0, scaled.numel(), PIECE):
        part, start = scaled[at : at + PIECE], (first + at) % PERIOD
        part += table[start : start + len(part)]
    return scaled.clamp_(0, LEVELS).to(torch.int16).to(torch.uint8)
