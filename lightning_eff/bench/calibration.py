"""Compute step costs and the steps of a budget from rehearsals, and check whether arms can be compared."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from lightning_eff.bench.pace import Incomparable
from lightning_eff.bench.reports.intervals import paired_interval, paired_ratio

FEWEST_STEPS = 20  # of a budget
DECAYED = 0.1  # the largest final learning rate of a decayed schedule, as a fraction of its peak
KEPT = 0.75  # the fraction of a kind's steps that count: the fastest
BY_CHANCE = 0.01  # the fraction of single rehearsals in which random slow steps look like a technique's
SLOW = 1.2  # a step is slow if it takes so many times the level of its kind


def sweep_steps(budget: float, step_seconds: float) -> int:
    """Return the number of steps of a rehearsal: a twentieth of a run or one second of it, between 24 and 96."""
    return round(min(max(budget / step_seconds / 20, 1.0 / step_seconds, 24), 96))


def _by_kind(block: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the seconds of a rehearsal's counted steps, by kind."""
    return {kind: [block["times"][at] for at in places] for kind, places in _counted(block).items()}


def _counted(block: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the indices of a rehearsal's steps that count, by kind.

    The first step of all does not count if its kind has others, because it also starts the loader. The first step of a kind
    does not count if it took more than twice as long as the next one, as with compilation and allocation.
    """
    by_kind: dict[str, list[int]] = {}
    for at, kind in enumerate(block["kinds"]):
        by_kind.setdefault(kind, []).append(at)
    times = block["times"]
    for kind, places in by_kind.items():
        first_of_all = kind == block["kinds"][0]
        if len(places) > 1 and (first_of_all or times[places[0]] > 2 * times[places[1]]):
            del places[0]
    return by_kind


def slow_steps(blocks: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """Return the steps that took more than :data:`SLOW` times their kind's level in every rehearsal.

    Other programs slow down different steps each time. A technique that does more in every tenth step, such as KFAC with its
    inverses, slows down the same ones. The result is empty for one rehearsal, or if the rehearsals had different steps.
    """
    if len(blocks) < 2 or any(block["kinds"] != blocks[0]["kinds"] for block in blocks):
        return frozenset()
    return frozenset.intersection(*map(_lifted, blocks))


def _lifted(block: Mapping[str, Any]) -> frozenset[int]:
    """Return the steps of a rehearsal that took more than :data:`SLOW` times their kind's level."""
    level = {kind: _trimmed(times) for kind, times in _by_kind(block).items()}
    pairs = enumerate(zip(block["kinds"], block["times"], strict=True))
    return frozenset(at for at, (kind, seconds) in pairs if seconds > SLOW * level[kind])


def periodic_steps(block: Mapping[str, Any]) -> frozenset[int]:
    """Return the slow steps of a single rehearsal that repeat at a fixed period until its end.

    A technique that does more in every tenth step slows down all of these. Random slow steps rarely fill a whole period. A
    period counts if chance would give it in fewer than one of a hundred rehearsals with as many other slow steps.
    """
    places = sorted(at for places in _counted(block).values() for at in places)
    lifted, n = _lifted(block) & frozenset(places), len(block["kinds"])
    tried = [
        frozenset(range(first, n, period)) & frozenset(places)
        for period in range(2, n // 3 + 1)
        for first in range(period)
    ]
    found: set[int] = set()
    for steps in tried:
        if len(steps) >= 3 and steps <= lifted:
            chance = max(len(lifted - steps), 1) / len(places)
            if len(tried) * chance ** len(steps) < BY_CHANCE:
                found |= steps
    return frozenset(found)


def _trimmed(times: Sequence[float]) -> float:
    """Return the mean of the fastest three quarters, since other programs slow down single steps."""
    return fmean(sorted(times)[: math.ceil(KEPT * len(times))])


def _rate(
    block: Mapping[str, Any], level: Callable[[Sequence[float]], float], slow: frozenset[int] = frozenset()
) -> float:
    """Return the samples per second of a rehearsal, with ``level`` of each kind's seconds, separately for ``slow`` steps."""
    parts = [
        [block["times"][at] for at in places if (at in slow) == apart]
        for places in _counted(block).values()
        for apart in (False, True)
    ]
    seconds = math.fsum(level(times) * len(times) for times in parts if times)
    return block["samples"] / len(block["kinds"]) * sum(map(len, parts)) / seconds


def prices(blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each kind's step cost, the median of its trimmed means over rehearsals, with its fraction of all steps."""
    found: dict[str, list[list[float]]] = {}
    for block in blocks:
        for kind, times in _by_kind(block).items():
            found.setdefault(kind, []).append(times)
    total = sum(len(times) for rehearsals in found.values() for times in rehearsals) or 1
    return [
        {
            "kind": kind,
            "seconds": median(map(_trimmed, rehearsals)),
            "share": sum(map(len, rehearsals)) / total,
        }
        for kind, rehearsals in found.items()
    ]


def prices_of_one(block: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return :func:`prices` of a single rehearsal, scaled up by the additional time of :func:`periodic_steps`."""
    scale = _priced_rate([block]) / _rate(block, _trimmed, periodic_steps(block))
    return [{**price, "seconds": price["seconds"] * scale} for price in prices([block])]


def rates(baseline: Sequence[Mapping[str, Any]], arm: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return the samples per second of the baseline and of an arm in each round, in which they took turns.

    They follow from trimmed means, separately for :func:`slow_steps`. If the slowest quarter of the arm's steps adds more or
    less time than the baseline's, beyond chance, all steps count.
    """
    slow = slow_steps(baseline), slow_steps(arm)

    def added(block: Mapping[str, Any], of: frozenset[int]) -> float:
        return math.log(_rate(block, _trimmed, of) / _rate(block, fmean))

    more = [added(b, slow[1]) - added(a, slow[0]) for a, b in zip(baseline, arm, strict=True)]
    differs = paired_interval(more, level=0.99)
    level = fmean if differs is not None and differs.excludes(0.0) else _trimmed
    return [(_rate(a, level, slow[0]), _rate(b, level, slow[1])) for a, b in zip(baseline, arm, strict=True)]


def tied(
    blocks: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]], pairs: Sequence[tuple[float, float]]
) -> list[dict[str, Any]]:
    """Return an arm's step costs, scaled so that their ratio to the baseline's is the speed ratio measured in pairs.

    Args:
        blocks: the arm's rehearsals.
        baseline: the baseline's rehearsals.
        pairs: the samples per second of the baseline and of the arm, in each round.
    """
    measured = paired_ratio(pairs)
    scale = _priced_rate(blocks) / _priced_rate(baseline) / (measured.estimate if measured is not None else 1.0)
    return [{**price, "seconds": price["seconds"] * scale} for price in prices(blocks)]


def _priced_rate(blocks: Sequence[Mapping[str, Any]]) -> float:
    """Return the samples per second at the step costs of these rehearsals."""
    samples = fmean(block["samples"] / len(block["kinds"]) for block in blocks)
    return samples / math.fsum(price["seconds"] * price["share"] for price in prices(blocks))


def steps_in(budget: float, block: Mapping[str, Any], priced: Mapping[str, float], windows: int = 8) -> int:
    """Return the number of optimizer steps in ``budget`` seconds, from a rehearsal of the whole schedule.

    The budget is divided into windows. The steps of each window follow from the mean cost of the rehearsal's steps there.
    """
    costs = [priced[kind] for kind in block["kinds"]]
    per_step = len(costs) / max(block["steps"], 1)
    cuts = [round(i * len(costs) / windows) for i in range(windows + 1)]
    parts = [costs[a:b] for a, b in itertools.pairwise(cuts) if b > a]
    return max(1, round(sum(budget / len(parts) / (fmean(part) * per_step) for part in parts)))


def stop_if_failed(record: Mapping[str, Any]) -> None:
    """Raise ``RuntimeError`` if a rehearsal of the baseline did not finish."""
    if record["status"] != "finished":
        raise RuntimeError(
            f"The baseline {record['status']} in its rehearsal, so there is nothing to compare with:"
            f" {record['error']}\nFix it, and run the bench again in a new folder."
        )


def check_length(name: str, budget: float, step_seconds: float) -> None:
    """Raise :class:`Incomparable` if the budget has too few steps for any schedule."""
    if budget / step_seconds < FEWEST_STEPS:
        raise Incomparable(
            f"{name}: got a budget of {budget:g} s, which is {budget / step_seconds:.1f} optimizer steps of"
            f" {step_seconds:.3g} s; expected at least {FEWEST_STEPS}. Raise --budget to"
            f" {math.ceil(FEWEST_STEPS * step_seconds)}s or more."
        )


def check_rate(name: str, rate: Mapping[str, float], steps: int) -> None:
    """Raise :class:`Incomparable` if a baseline's learning rate does not peak early and decay fully in the budget."""
    if rate["peak_at"] > 0.5:
        raise Incomparable(
            f"{name}: got a learning rate that still rises at {rate['peak_at']:.0%} of the budget of {steps} steps; expected a"
            " peak in its first half. The budget is too short for the schedule's warm-up. Raise --budget, or shorten the"
            " warm-up."
        )
    if rate["last"] > DECAYED * rate["peak"]:
        raise Incomparable(
            f"{name}: got a learning rate that ends at {rate['last'] / rate['peak']:.0%} of its peak after the {steps} steps of"
            f" the budget; expected at most {DECAYED:.0%}, because a baseline without decay is weak (Kaddour et al. 2023). Let"
            " the schedule last trainer.estimated_stepping_batches with interval 'step', or let the bench decay the learning"
            " rate in every arm: --schedule linear."
        )


def check_same(
    name: str, baseline: Mapping[str, Any], arm: Mapping[str, Any], *, other_training_data: bool | None
) -> None:
    """Raise :class:`Incomparable` if an arm validates or trains on other data than the baseline.

    Args:
        name: the arm's name.
        baseline: the record of the baseline's rehearsal.
        arm: the record of the arm's rehearsal.
        other_training_data: whether the arm may train on other data. None also leaves the option out of the message.
    """
    ours, theirs = arm["data"]["validation"], baseline["data"]["validation"]
    if ours != theirs:
        raise Incomparable(
            f"{name}: got validation data of {sorted(ours)}, but the baseline has {sorted(theirs)}"
            f"{' (same shapes, other values)' if sorted(ours) == sorted(theirs) else ''}; expected the same, because"
            " metrics on other data do not compare. Give every arm the same data and limit_val_batches."
        )
    ours, theirs = arm["data"]["training"], baseline["data"]["training"]
    if ours != theirs and not other_training_data:
        raise Incomparable(
            f"{name}: got a training set of {_size(ours)}, but the baseline has {_size(theirs)}; expected the same. Give every"
            " arm the same data"
            + ("." if other_training_data is None else ", or compare data sets with --allow-other-training-data.")
        )


def _size(data: Mapping[str, Any] | None) -> str:
    return "unknown length" if data is None else f"{data['length']} items (hash {data['items'][:8]})"


def same_training(baseline: Mapping[str, Any], arm: Mapping[str, Any]) -> bool:
    """Return whether an arm's rehearsal equals the baseline's bit for bit, with the same active techniques.

    Such arms differ only in speed.
    """
    names = ("losses", "metrics", "samples", "tokens", "techniques", "steps")
    return all(baseline[name] == arm[name] for name in names) and bool(baseline["losses"])
