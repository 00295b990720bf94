"""Choose the bits of each saved tensor under an average (GACT: Liu et al. 2022, arXiv:2206.11357, section 4).

Rounding tensor ``i`` to ``b`` bits adds an expected squared error of ``c_i / (2^b - 1)^2`` to the gradient of all parameters.
The errors of different tensors add up, since each is rounded with its own random numbers. The sensitivities ``c_i`` are
measured in training:

- The input ``X`` of a linear layer affects only the weight's gradient ``dW = dY^T X``. Then
  ``c = |dY|^2 sum_j R_j^2 / (6 n)``, with ``R_j`` the range of the group that holds element ``j``, and ``n`` rows of ``X`` and
  ``dY``. One ordinary backward pass gives both.
- Tensors of one kind (the same place in each block) are rounded differently from that pass, all together, in one more forward
  and backward pass. ``c`` of the kind is the squared difference of the two gradients, over
  ``1 / (2^b - 1)^2 + 1 / (2^b' - 1)^2``. It is divided among the blocks in proportion to ``|dY|^2 sum_j R_j^2 / n``.

At 1 bit, an element is decoded as one end of its group's range. For operations other than linear layers, the effect cannot be
extrapolated from finer rounding, so the squared error of 1 bit counts ``ONE_BIT_PENALTY`` times there. Without it, an average
of 3 bits was further from a trained GPT-2's gradient than at least 2 bits (0.030 compared with 0.023 of it).
"""

import heapq
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

CHOICES = (1, 2, 3, 4, 8)
MEASURING_BITS = 8  # for all tensors but the probed ones, since less noise makes differences clearer
PROBE_BITS = 4
WIDE_BITS = 4  # the fewest bits of tensors that get 8 with a fixed number of bits
ONE_BIT_PENALTY = 4.0
_DIRECT = ("linear", "addmm")


def step_error(bits: int) -> float:
    """Return the squared error of rounding to ``bits`` bits, in units of that of one bit: ``1 / (2^b - 1)^2``."""
    return 1.0 / (2**bits - 1) ** 2


def allocate(
    sensitivity: Mapping[str, float],
    numel: Mapping[str, int],
    budget: float,
    penalty: float = ONE_BIT_PENALTY,
    least: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Return the bits ``b_i`` that minimize ``sum_i c_i p_i / (2^b_i - 1)^2`` with ``sum_i n_i b_i <= budget sum_i n_i``.

    Every tensor starts with the fewest bits. The step that reduces the sum most per bit is taken as long as one fits. The
    gains of a tensor's steps decrease, so the result is optimal for its own average, which is below the budget by less than
    one step.

    Args:
        sensitivity: ``c_i >= 0`` by name.
        numel: ``n_i > 0``, the number of elements, by at least the same names.
        budget: the average bits per element, >= 1.
        penalty: ``p_i`` at 1 bit for tensors that are not inputs of linear layers; 1 otherwise.
        least: the bits that a tensor starts with, 1 by default.
    """
    bits = {name: (least or {}).get(name, CHOICES[0]) for name in sensitivity}
    left = sum((budget - bits[name]) * numel[name] for name in sensitivity)
    heap: list[tuple[float, str, int]] = []

    def error(name: str, bits: int) -> float:
        return step_error(bits) * (penalty if bits == 1 and not is_direct(name) else 1.0)

    def offer(name: str, at: int) -> None:
        if at + 1 < len(CHOICES):
            now, then = CHOICES[at], CHOICES[at + 1]
            gain = sensitivity[name] * (error(name, now) - error(name, then)) / ((then - now) * numel[name])
            heapq.heappush(heap, (-gain, name, at))

    for name in sensitivity:
        offer(name, CHOICES.index(bits[name]))
    while heap:
        _, name, at = heapq.heappop(heap)
        cost = (CHOICES[at + 1] - CHOICES[at]) * numel[name]
        if cost <= left:
            left -= cost
            bits[name] = CHOICES[at + 1]
            offer(name, at + 1)
    return bits


class Statistics:
    """The results of one ordinary pass for its compressed tensors: ``sum_j R_j^2``, elements and ``|dY|^2``."""

    def __init__(self) -> None:
        self.ranges: dict[str, Tensor] = {}
        self.numel: dict[str, int] = {}
        self.bits: dict[str, int] = {}
        self.shared: dict[str, int] = {}
        self._gradients: dict[str, list[Tensor]] = {}

    def on_groups(self, key: str, packed: Any) -> None:
        """Record a compressed tensor, whose ranges are ``scale (2^b - 1)``."""
        levels = 2**packed.bits - 1
        self.ranges[key] = packed.scale.double().square().sum() * (levels**2 * packed.group_size)
        self.numel[key] = packed.shape.numel()
        self.bits[key] = packed.bits

    def on_shared(self, key: str, numel: int) -> None:
        """Record that a tensor of ``numel`` elements uses the codes of ``key``."""
        self.shared[key] = self.shared.get(key, 0) + numel

    def on_output(self, keys: list[str], output: Any) -> None:
        """Watch the gradient of the output of the operation that saved these tensors."""
        if not isinstance(output, Tensor) or not output.requires_grad:
            return

        def look(dy: Tensor) -> None:
            rows = max(1, dy.numel() // max(dy.shape[-1], 1)) if dy.ndim else 1
            for key in keys:
                self._gradients.setdefault(key, []).append(dy.detach().double().square().sum() / rows)

        output.register_hook(look)

    def guesses(self) -> dict[str, float]:
        """Return ``|dY|^2 sum_j R_j^2 / (6 n)`` by key, which is the sensitivity for inputs of linear layers."""
        zero = torch.zeros((), dtype=torch.float64)
        return {
            key: float(ranges * sum(self._gradients.get(key, []), zero.to(ranges.device))) / 6
            for key, ranges in self.ranges.items()
        }


def is_direct(key: str) -> bool:
    """Return whether the tensor of that key is the input of a linear layer, which affects only a weight's gradient."""
    return key.partition(":")[2].partition(":")[0] in _DIRECT


class Allocation:
    """The bits of each tensor by its key, from the measurements so far.

    Args:
        budget: the average bits per element, in [1, 8].
        family: a function that returns a key's kind, the same for all blocks of a stack.
    """

    def __init__(self, budget: float, family: Callable[[str], str]) -> None:
        self.budget = budget
        self.family = family
        self.sensitivity: dict[str, float] = {}
        self.numel: dict[str, int] = {}
        self.shared: dict[str, int] = {}
        self.wide: set[str] = set()
        self.bits: dict[str, int] = {}
        self._kinds: dict[str, int] = {}

    def __call__(self, key: str, wide: bool) -> int:
        """Return the bits of a tensor; an unseen one gets the most that its kind has, or a safe value."""
        bits = self.bits.get(key)
        if bits is not None:
            return bits
        bits = self._kinds.get(self.family(key))
        if bits is not None:
            return bits
        if not self.bits and not wide:  # nothing is known yet, and the budget must hold
            return max(choice for choice in CHOICES if choice <= self.budget)
        return CHOICES[-1]

    def learn(
        self,
        sensitivity: Mapping[str, float],
        numel: Mapping[str, int],
        shared: Mapping[str, int] | None = None,
        wide: Iterable[str] = (),
    ) -> None:
        """Adopt measurements and solve again; tensors that were not measured keep theirs.

        Args:
            sensitivity: the sensitivities by key.
            numel: the elements of each of them.
            shared: the elements of tensors without their own codes, by the key of the codes they use. They count in the average
                with 0 bits.
            wide: keys that get at least ``WIDE_BITS``, because the effect of rounding queries and keys grows exponentially with
                the weights, faster than it is measured.
        """
        self.sensitivity.update(sensitivity)
        self.numel.update({key: numel[key] for key in sensitivity})
        self.shared.update({key: (shared or {}).get(key, 0) for key in sensitivity})
        self.wide.update(wide)
        self._solve()

    def _solve(self) -> None:
        elements = sum(self.numel[key] for key in self.sensitivity)
        whole = self.budget * (elements + sum(self.shared.values()))
        # sensitivities drift between measurements, which hurts tensors with few bits most, so use the highest floor
        for few in (2, 1):
            least = {key: WIDE_BITS if key in self.wide else few for key in self.sensitivity}
            if sum(least[key] * self.numel[key] for key in least) <= whole:
                break
        self.bits = allocate(self.sensitivity, self.numel, whole / elements, least=least) if elements else {}
        self._kinds = {}
        for key, bits in self.bits.items():
            kind = self.family(key)
            self._kinds[kind] = max(bits, self._kinds.get(kind, 0))

    def state_dict(self) -> dict[str, Any]:
        """Return plain containers that determine the bits."""
        of_keys = {"sensitivity": dict(self.sensitivity), "numel": dict(self.numel), "shared": dict(self.shared)}
        return {**of_keys, "wide": sorted(self.wide)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sensitivity, self.numel = dict(state["sensitivity"]), dict(state["numel"])
        self.shared, self.wide = dict(state["shared"]), set(state["wide"])
        if self.sensitivity:
            self._solve()


def kinds(statistics: Statistics, family: Callable[[str], str]) -> dict[str, list[str]]:
    """Return the keys to probe, by kind, in an order that does not depend on that of the pass."""
    found: dict[str, list[str]] = {}
    for key in statistics.numel:
        if not is_direct(key):
            found.setdefault(family(key), []).append(key)
    return {kind: sorted(found[kind]) for kind in sorted(found)}


def divide(total: float, keys: Iterable[str], guesses: Mapping[str, float]) -> dict[str, float]:
    """Divide ``total`` among ``keys`` in proportion to their guesses, or evenly if these are zero."""
    keys = list(keys)
    whole = sum(guesses[key] for key in keys)
    return {key: total * (guesses[key] / whole if whole > 0 else 1 / len(keys)) for key in keys}


def squared_distance(a: list[Tensor | None], b: list[Tensor | None]) -> float:
    """Return ``|a - b|^2`` over the tensors that are in both."""
    pairs = zip(a, b, strict=False)
    return sum(float((x - y).double().square().sum()) for x, y in pairs if x is not None and y is not None)
