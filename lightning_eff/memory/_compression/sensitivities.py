"""Measure the effect of rounding each saved tensor on a batch's gradient (GACT: Liu et al. 2022, arXiv:2206.11357)."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from lightning_eff.memory._compression.bits import (
    MEASURING_BITS,
    PROBE_BITS,
    Statistics,
    divide,
    is_direct,
    kinds,
    squared_distance,
    step_error,
)
from lightning_eff.memory._compression.engine import Engine


class Sensitivities(NamedTuple):
    """The measurements, by the tensors' keys.

    Attributes:
        values: the ``c_i`` of :mod:`.bits`, >= 0.
        numel: the number of elements.
        shared: the elements of tensors that use the codes of another.
        wide: keys of tensors that get more bits than others.
    """

    values: dict[str, float]
    numel: dict[str, int]
    shared: dict[str, int]
    wide: list[str]


def measure(
    engine: Engine, gradient: Callable[[], list[Tensor | None]], gather: Callable[[Any], list[Any]]
) -> tuple[Sensitivities, int]:
    """Measure this rank's sensitivities, and return them with the number of passes.

    Args:
        engine: the engine. Its bits are those of the measurement meanwhile, and are restored afterwards.
        gradient: a function that returns the gradient of every parameter, in a pass through ``engine`` with the same rounding
            each time.
        gather: a function that gathers a value from every rank into a list.
    """
    statistics, wide_ones, passes, bits = Statistics(), set[str](), 1, engine.bits

    def measuring(key: str, wide: bool) -> int:
        if wide:
            wide_ones.add(key)
        return MEASURING_BITS

    engine.bits = measuring
    engine.on_groups, engine.on_output = statistics.on_groups, statistics.on_output
    engine.on_shared = statistics.on_shared
    try:
        first = gradient()
        engine.on_groups = engine.on_shared = engine.on_output = None
        guesses = statistics.guesses()
        values = {key: guess for key, guess in guesses.items() if is_direct(key)}
        found = kinds(statistics, engine.tensors.family)
        for kind in sorted({kind for there in gather(sorted(found)) for kind in there}):
            keys = found.get(kind, [])
            members = frozenset(keys)
            engine.bits = lambda key, wide: PROBE_BITS if key in members else MEASURING_BITS  # noqa: B023
            engine.reseeded = members.__contains__
            difference = squared_distance(first, gradient())
            passes += 1
            if keys:
                unit = step_error(PROBE_BITS) + step_error(statistics.bits[keys[0]])
                values |= divide(difference / unit, keys, guesses)
    finally:
        engine.bits, engine.reseeded = bits, None
        engine.on_groups = engine.on_shared = engine.on_output = None
    return Sensitivities(values, statistics.numel, statistics.shared, sorted(wide_ones)), passes


def over_ranks(of_ranks: Iterable[Sensitivities]) -> Sensitivities:
    """Sum the values over all ranks, and take the largest number of elements."""
    values: dict[str, float] = {}
    numel: dict[str, int] = {}
    shared: dict[str, int] = {}
    wide: set[str] = set()
    for one in of_ranks:
        wide.update(one.wide)
        for key, value in one.values.items():
            values[key] = values.get(key, 0.0) + value
            numel[key] = max(one.numel[key], numel.get(key, 0))
            shared[key] = max(one.shared.get(key, 0), shared.get(key, 0))
    return Sensitivities(values, numel, shared, sorted(wide))
