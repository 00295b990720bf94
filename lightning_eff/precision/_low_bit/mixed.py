"""Choose the bits of each layer under an average, by measured sensitivity (after HAQ: Wang et al. 2019, arXiv:1811.08886).

HAQ searches the bits by reinforcement learning. Here they follow from one backward pass. Rounding an operand of a layer to
``b`` bits changes its output by ``D_b``, and the loss by about ``sum_r (sum_n g_rn D_b,rn)^2`` over rows ``r``, with the
gradient ``g`` of the output, up to a factor that all layers share (the empirical Fisher information in place of the Hessian).
:func:`scores` measures this for every number of bits. :func:`allocate` minimizes its sum over layers under the average.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

CHOICES = tuple(range(2, 9))
Quantize = Callable[[Tensor, int], Tensor]


@torch.no_grad()
def scores(x: Tensor, weight: Tensor, g: Tensor, quantize: Quantize) -> tuple[Tensor, Tensor]:
    """Return ``sum_r (sum_n g_rn D_b,rn)^2`` for each number of bits, of the weight and of the input.

    Args:
        x: (R, K), float32.
        weight: (N, K), float32.
        g: the gradient of the product, (R, N), float32.
        quantize: a function that returns a matrix rounded to some bits by row.
    """
    gw = g @ weight  # sum_n g_rn W_nk, so that D of the input needs no product per number of bits
    of_inputs = [((quantize(x, b) - x) * gw).double().sum(1).square().sum() for b in CHOICES]
    of_weight = [(g * (x @ (quantize(weight, b) - weight).t())).double().sum(1).square().sum() for b in CHOICES]
    return torch.stack(of_weight), torch.stack(of_inputs)


def allocate(scores: Mapping[str, Sequence[float]], sizes: Mapping[str, int], budget: float) -> dict[str, int]:
    """Return the bits ``b_i`` that minimize ``sum_i scores_i(b_i)`` with ``sum_i n_i b_i <= budget sum_i n_i``.

    Every layer starts with the fewest bits. The step to more bits that reduces the sum most per bit is taken as long as it
    fits, along the lower convex hull of the layer's scores. The sum is above the optimum by less than the gain of the first
    step that does not fit.

    Args:
        scores: of each layer, for each of ``CHOICES``.
        sizes: ``n_i > 0``, the number of elements.
        budget: the average bits per element, >= 2.
    """
    at = dict.fromkeys(scores, 0)
    left = sum((budget - CHOICES[0]) * sizes[name] for name in scores)
    heap: list[tuple[float, str, int]] = []

    def offer(name: str) -> None:
        now, size = at[name], sizes[name]
        fitting = [to for to in range(now + 1, len(CHOICES)) if (to - now) * size <= left]
        gains = [((scores[name][now] - scores[name][to]) / ((to - now) * size), to) for to in fitting]
        if gains and (best := max(gains))[0] > 0:
            heapq.heappush(heap, (-best[0], name, best[1]))

    for name in sorted(scores):
        offer(name)
    while heap:
        _, name, to = heapq.heappop(heap)
        cost = (CHOICES[to] - CHOICES[at[name]]) * sizes[name]
        if cost <= left:
            left -= cost
            at[name] = to
        offer(name)
    return {name: CHOICES[index] for name, index in at.items()}


class MixedBits:
    """The bits of each layer, from the measurements so far.

    Args:
        budget: the average bits per element. Layers that were not measured have its integer part.
        weights: whether the bits of weights are chosen.
        inputs: whether the bits of inputs are chosen.
    """

    def __init__(self, budget: float, *, weights: bool, inputs: bool) -> None:
        self.budget = budget
        self._chosen = {"weights": weights, "inputs": inputs}
        self.bits: dict[str, dict[str, int]] = {"weights": {}, "inputs": {}}
        self._scores: dict[str, dict[str, list[float]]] = {"weights": {}, "inputs": {}}
        self._sizes: dict[str, dict[str, int]] = {"weights": {}, "inputs": {}}
        self._pending: dict[str, tuple[Tensor, Tensor, int, int]] = {}

    def __call__(self, kind: str, path: str, fixed: int) -> int:
        """Return the bits of "weights" or "inputs" of the layer at ``path``; ``fixed`` if they are not chosen."""
        return self.bits[kind].get(path, int(self.budget)) if self._chosen[kind] else fixed

    def watch(self, path: str, x: Tensor, weight: Tensor, y: Tensor, quantize: Quantize) -> None:
        """Measure the layer at ``path`` once the gradient of its output ``y`` is known."""
        if not y.requires_grad:
            return
        x, weight = x.detach(), weight.detach()

        def measure(g: Tensor) -> None:
            with torch.autocast(g.device.type, enabled=False):
                a, w, dy = (
                    x.reshape(-1, x.shape[-1]).float(),
                    weight.float(),
                    g.detach().reshape(-1, g.shape[-1]).float(),
                )
                of_weight, of_input = scores(a, w, dy, quantize)
            _, _, _, seen = before = self._pending.get(path, (0.0, 0.0, 0, 0))
            self._pending[path] = (before[0] + of_weight, before[1] + of_input, w.numel(), seen + a.numel())

        y.register_hook(measure)

    def settle(self, gather: Callable[[Any], list[Any]]) -> bool:
        """Adopt the measurements of all ranks, and choose again. Return whether there were any.

        A measurement that is not finite, as from an overflowing gradient, is ignored.
        """
        own = {path: (w.tolist(), x.tolist(), n, m) for path, (w, x, n, m) in self._pending.items()}
        self._pending = {}
        found: dict[str, tuple[list[float], list[float], int, int]] = {}
        for of_rank in gather(own):
            for path, (w, x, n, m) in of_rank.items():
                zero = [0.0] * len(CHOICES)
                before = found.get(path, (zero, zero, 0, 0))
                added = ([a + b for a, b in zip(*pair, strict=True)] for pair in ((before[0], w), (before[1], x)))
                found[path] = (*added, max(n, before[2]), m + before[3])  # pyright: ignore[reportArgumentType]
        if not found or not all(math.isfinite(v) for w, x, _, _ in found.values() for v in (*w, *x)):
            return bool(found)
        for path, (w, x, n, m) in found.items():
            self._scores["weights"][path], self._sizes["weights"][path] = w, n
            self._scores["inputs"][path], self._sizes["inputs"][path] = x, m
        self._solve()
        return True

    def _solve(self) -> None:
        for kind, chosen in self._chosen.items():
            if chosen:
                sizes = {path: size for path, size in self._sizes[kind].items() if size}
                self.bits[kind] = allocate({path: self._scores[kind][path] for path in sizes}, sizes, self.budget)

    def average(self, kind: str) -> float | None:
        """Return the average bits per element of "weights" or "inputs"; None before the first measurement."""
        sizes, bits = self._sizes[kind], self.bits[kind]
        return sum(bits[path] * sizes[path] for path in bits) / sum(sizes[path] for path in bits) if bits else None

    def state_dict(self) -> dict[str, Any]:
        """Return plain containers that determine the bits."""
        return {kind: {"scores": dict(self._scores[kind]), "sizes": dict(self._sizes[kind])} for kind in self._scores}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for kind in self._scores:
            self._scores[kind], self._sizes[kind] = dict(state[kind]["scores"]), dict(state[kind]["sizes"])
        self._solve()
