"""Group quantisation in plain torch operations that stay in a core's cache, for devices other than CUDA.

The code works through the tensor in pieces of ``PIECE`` elements. Each thread allocates its buffers once. So of about a dozen
passes only the first reads memory, and only the last writes it. Smaller pieces fit a nearer cache, but then the cost of
calling torch dominates: with 65 536 elements, both directions together take 1.4 times as long. The code uses only operations
that torch vectorises. It does not vectorise float32 to uint8, comparisons into booleans, or ``aminmax``.

The table compares three implementations at 4 bits with stochastic rounding. It shows nanoseconds of CPU time per element to
quantise and to dequantise, as medians of 5 rounds by ``benchmarks/kernels_cpu.py``. It used 2^21 elements and one thread of an
AMD EPYC of 2023 with AVX-512, on a machine with other load, with torch 2.13 and Python 3.11.

    plain operations on the whole tensor, a new random number per element                12.4 + 2.4

    fbgemm's row-wise 8-bit operators after new dither (4 bits lack float32 scales)       5.0 + 0.3

    this                                                                                  1.2 + 0.6

A step of a GPT-2 (4 layers of 256, 4 x 256 tokens) that compresses every float tensor saved for backward took 1.17 (1.11 to
1.19) times the CPU time of the exact step.

**Noise.** A new random number per element costs more than everything else together. The code instead makes a table of
``PERIOD`` numbers once: a random permutation of the midpoints ``(k + 1/2) / PERIOD``. Element ``i`` of a tensor reads
``u_i = table[(i + offset(seed)) mod PERIOD]``. This has three consequences:

- Codes depend only on the seed and the index. Over all offsets, ``u_i`` takes every value of the table equally often. So
  rounding is unbiased for each element, within ``1 / PERIOD`` of a step, or 2^-12 of a step just above a code.

- Two elements of a tensor share their number only if their indices differ by a multiple of ``PERIOD``, which is a prime. Two
  elements in the same column of a matrix never do, unless it has more than ``PERIOD`` rows. So the sums over samples and
  tokens in gradients have numbers as independent as those of a permutation.

- The offsets of two seeds are independent draws from ``PERIOD`` values, so two calls agree with probability 1 / ``PERIOD``.
"""

import threading

import torch
from torch import Tensor

from lightning_eff.kernels._seeds import spread

PERIOD = 131_071  # 2^17 - 1, a prime
PIECE = 262_144  # elements that one thread works on at a time
MAX_THREADS = 4  # a piece grows with the number of threads up to this one; more threads do not help
SEED = 20_211  # of the table
# Slightly below 1, so that the largest code cannot be rounded up to 2^bits and clamping needs no extra pass.
LARGEST = 1 - 2**-12
# The least range of a group. Smaller ranges get codes that are too small, and decode within 1e-36.
SMALLEST_RANGE = 1e-36
MAX_PLANS = 64  # cached per thread; a training run has few shapes

_tables: dict[tuple[torch.device, bool], Tensor] = {}
_thread = threading.local()


def noise(device: torch.device, *, stochastic: bool) -> Tensor:
    """Return the periodic table of ``u``, float32 of shape (PERIOD + MAX_THREADS * PIECE,); or 1/2 everywhere."""
    if (device, stochastic) not in _tables:
        with torch.inference_mode(False):
            table = torch.full((PERIOD,), 0.5, dtype=torch.float32)
            if stochastic:
                order = torch.randperm(PERIOD, generator=torch.Generator().manual_seed(SEED))
                table = order.double().add_(0.5).div_(PERIOD).clamp_(max=LARGEST).float()
            index = torch.arange(PERIOD + MAX_THREADS * PIECE) % PERIOD
            _tables[device, stochastic] = table[index].to(device)
    return _tables[device, stochastic]


def offset(seed: int) -> int:
    """Return the table index of element 0: the seed, spread over all bits, modulo PERIOD."""
    return spread(seed) % PERIOD


class _Plan:
    """The buffers of one thread for a piece of ``n`` groups, and their views.

    Attributes:
        scaled: float32 (n, group_size).
        inverse: float32 (n, 1).
        code: uint8 (n, group_size). ``signed`` is the same memory as int8, to which float32 converts fast.
        short: int16 (n, group_size), the intermediate type for 8 bits.
        pairs: for each doubling of the width from ``bits`` to 8, the width, the lower and the upper codes, each (n, m, bytes),
            and both together, (n, m bytes) of twice the width. The latter is None at 8 bits, which are the result.
    """

    def __init__(self, base: Tensor, n: int, group_size: int, bits: int) -> None:
        num = n * group_size
        bytes_, self.bits = group_size * bits // 8, bits
        self.scaled = base[: 4 * num].view(torch.float32).view(n, group_size)
        self.code = base[4 * num : 5 * num].view(n, group_size)
        self.signed = self.code.view(torch.int8)
        spare = base[5 * num : 7 * num]
        self.short = spare.view(torch.int16).view(n, group_size)
        self.inverse = torch.empty(n, 1, dtype=torch.float32, device=base.device)
        self.pairs: list[tuple[int, Tensor, Tensor, Tensor | None]] = []
        code, width = self.code, bits
        while width < 8:
            both = code.view(n, 4 // width, 2, bytes_)
            half = both.numel() // 2
            code, spare = spare[:half].view(n, 4 // width, bytes_), spare[half:]
            self.pairs.append((width, both.select(2, 0), both.select(2, 1), None if width == 4 else code))
            width *= 2

    def pack(self, out: Tensor) -> None:
        """Pack ``code`` into bytes of shape (n, group_size * bits / 8), by joining two codes into one repeatedly."""
        for width, lower, upper, both in self.pairs:
            into = out.unsqueeze(1) if both is None else both
            torch.add(lower, upper, alpha=1 << width, out=into)

    def unpack(self, stored: Tensor) -> None:
        """Invert :meth:`pack`: split bytes into nibbles, and so on down to ``bits``."""
        for width, lower, upper, both in reversed(self.pairs):
            whole = stored.unsqueeze(1) if both is None else both
            torch.bitwise_and(whole, (1 << width) - 1, out=lower)
            torch.bitwise_right_shift(whole, width, out=upper)


def _plan(device: torch.device, n: int, group_size: int, bits: int) -> _Plan:
    plans: dict[tuple[torch.device, int, int, int], _Plan] = _thread.__dict__.setdefault("plans", {})
    key = device, n, group_size, bits
    if key not in plans:
        bases: dict[torch.device, Tensor] = _thread.__dict__.setdefault("bases", {})
        size = 7 * max(n, rows_of(group_size)) * group_size
        with torch.inference_mode(False):
            if device not in bases or bases[device].numel() < size:
                plans.clear()
                bases[device] = torch.empty(size, dtype=torch.uint8, device=device)
            if len(plans) >= MAX_PLANS:
                plans.clear()
            plans[key] = _Plan(bases[device], n, group_size, bits)
    return plans[key]


def rows_of(group_size: int) -> int:
    """Return the number of groups in a piece."""
    return PIECE * min(torch.get_num_threads(), MAX_THREADS) // group_size


def quantize(x: Tensor, bits: int, group_size: int, seed: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes, scales and minima of a contiguous ``x`` of shape (numel,)."""
    num, device = x.numel(), x.device
    whole, rest = divmod(num, group_size)
    num_groups, levels = whole + (rest > 0), 2**bits - 1
    minimum = torch.empty(num_groups, 1, dtype=torch.float32, device=device)
    scale = torch.empty(num_groups, 1, dtype=torch.float32, device=device)
    codes = torch.empty(num_groups, group_size * bits // 8, dtype=torch.uint8, device=device)
    table = noise(device, stochastic=seed is not None)
    first = 0 if seed is None else offset(seed)

    def piece(x: Tensor, at: int, n: int) -> None:
        """Quantise ``n`` groups from group ``at`` on; ``x`` has shape (n, group_size)."""
        plan = _plan(device, n, group_size, 2 if bits == 3 else bits)
        scaled, low, span = plan.scaled, minimum.narrow(0, at, n), scale.narrow(0, at, n)
        u = table.as_strided((n, group_size), (group_size, 1), (first + at * group_size) % PERIOD)
        if x.dtype != torch.float32:
            x = scaled.copy_(x)
        # min, max - min
        torch.amin(x, 1, True, out=low)
        torch.amax(x, 1, True, out=span)
        span.sub_(low)
        # (2^b - 1) (x - min) / (max - min) + u
        torch.clamp_min(span, SMALLEST_RANGE, out=plan.inverse).reciprocal_()
        torch.sub(x, low, out=scaled)
        torch.addcmul(u, plan.inverse, scaled, value=levels, out=scaled)
        # floor, by conversion
        out = codes.narrow(0, at, n)
        if bits == 3:
            plan.signed.copy_(scaled)
            upper = plan.code >> 2
            plan.code.bitwise_and_(3)
            plan.pack(out[:, : group_size // 4])
            bit = _plan(device, n, group_size, 1)  # in the same memory
            bit.code.copy_(upper)
            bit.pack(out[:, group_size // 4 :])
        elif bits == 8:
            out.copy_(plan.short.copy_(scaled))
        else:
            plan.signed.copy_(scaled)
            plan.pack(out)

    rows = rows_of(group_size)
    for at in range(0, whole, rows):
        n = min(rows, whole - at)
        piece(x.narrow(0, at * group_size, n * group_size).view(n, group_size), at, n)
    if rest:
        last = x.narrow(0, num - rest, rest)
        filled = last.amin().expand(1, group_size).clone()  # the minimum has code 0
        filled[0, :rest] = last
        piece(filled, whole, 1)
    # scale = (max - min) / (2^b - 1)
    return codes.view(-1), scale.div_(levels).view(-1), minimum.view(-1)


def dequantize(codes: Tensor, scale: Tensor, minimum: Tensor, out: Tensor, bits: int, group_size: int) -> None:
    """Decode into a contiguous ``out`` of shape (numel,)."""
    num, device = out.numel(), out.device
    whole, rest = divmod(num, group_size)
    codes, scale, minimum = codes.view(-1, group_size * bits // 8), scale.view(-1, 1), minimum.view(-1, 1)

    def piece(out: Tensor, at: int, n: int) -> None:
        """Decode ``n`` groups from group ``at`` on into ``out`` of shape (n, group_size)."""
        plan = _plan(device, n, group_size, 2 if bits == 3 else bits)
        stored = codes.narrow(0, at, n)
        if bits == 3:
            plan.unpack(stored[:, : group_size // 4])
            lower = plan.code.clone()
            bit = _plan(device, n, group_size, 1)  # in the same memory
            bit.unpack(stored[:, group_size // 4 :])
            stored = torch.add(lower, bit.code, alpha=4, out=plan.code)
        elif bits < 8:
            plan.unpack(stored)
            stored = plan.code
        # min + scale code
        decoded = out if out.dtype == torch.float32 else plan.scaled
        decoded.copy_(stored).mul_(scale.narrow(0, at, n)).add_(minimum.narrow(0, at, n))
        if decoded is not out:
            out.copy_(decoded)

    rows = rows_of(group_size)
    for at in range(0, whole, rows):
        n = min(rows, whole - at)
        piece(out.narrow(0, at * group_size, n * group_size).view(n, group_size), at, n)
    if rest:
        filled = torch.empty(1, group_size, dtype=out.dtype, device=device)
        piece(filled, whole, 1)
        out.narrow(0, num - rest, rest).copy_(filled[0, :rest])
