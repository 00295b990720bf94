"""What rehearsals tell: the price of each kind of step, how many steps a budget holds, and whether arms compare."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from lightning_eff.bench.pace import Incomparable
from lightning_eff.bench.reports.intervals import paired_interval, paired_ratio

FEWEST_STEPS = 20  # in a budget
DECAYED = 0.1  # of its peak, at most, is what is left of a decayed learning rate; cosine schedules often end there
KEPT = 0.75  # of a kind's steps in a rehearsal: the fastest
BY_CHANCE = 0.01  # rehearsals in which slow steps of the machine's look like a technique's, where there is one alone
SLOW = 1.2  # times the level of its kind: a step that takes as long in every rehearsal is slow by itself


def sweep_steps(budget: float, step_seconds: float) -> int:
    """How many steps a rehearsal makes: a twentieth of a run's or a second's, whichever is more, between 24 and 96."""
    return round(min(max(budget / step_seconds / 20, 1.0 / step_seconds, 24), 96))


def _by_kind(block: Mapping[str, Any]) -> dict[str, list[float]]:
    """Seconds of a rehearsal's steps, by kind, without those that :func:`_counted` leaves out."""
    return {kind: [block["times"][at] for at in places] for kind, places in _counted(block).items()}


def _counted(block: Mapping[str, Any]) -> dict[str, list[int]]:
    """Which steps of a rehearsal count, by kind.

    The first step, which also starts the loader, is left out where its kind has others, and the first of a kind that
    took twice the next: compilation, allocation.
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
    """Which steps of an arm are slow by themselves: those that took more than :data:`SLOW` times their kind's level each time.

    What the machine does lifts other steps in each rehearsal; what a technique does in every tenth step, such as the
    inverses of KFAC, lifts the same ones. None are known where there is one rehearsal alone, or these are not of the same
    steps.
    """
    if len(blocks) < 2 or any(block["kinds"] != blocks[0]["kinds"] for block in blocks):
        return frozenset()
    return frozenset.intersection(*map(_lifted, blocks))


def _lifted(block: Mapping[str, Any]) -> frozenset[int]:
    """The steps of a rehearsal that took more than :data:`SLOW` times their kind's level."""
    level = {kind: _trimmed(times) for kind, times in _by_kind(block).items()}
    pairs = enumerate(zip(block["kinds"], block["times"], strict=True))
    return frozenset(at for at, (kind, seconds) in pairs if seconds > SLOW * level[kind])


def periodic_steps(block: Mapping[str, Any]) -> frozenset[int]:
    """Which steps of a single rehearsal are slow by themselves: those that come back at equal distances throughout.

    What a technique does in every tenth step lifts each tenth step, from the first that it lifts to the end. What the machine
    does lifts three or more steps at equal distances, too, but seldom all of them: distances count where, with as many
    other steps lifted, fewer than one in a hundred rehearsals would have them by chance.
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
    """The mean of the fastest three quarters: what else the machine does lifts single steps, now more, now less."""
    return fmean(sorted(times)[: math.ceil(KEPT * len(times))])


def _rate(
    block: Mapping[str, Any], level: Callable[[Sequence[float]], float], slow: frozenset[int] = frozenset()
) -> float:
    """Samples per second of a rehearsal, with ``level`` for the seconds of each kind of step, ``slow`` ones apart."""
    parts = [
        [block["times"][at] for at in places if (at in slow) == apart]
        for places in _counted(block).values()
        for apart in (False, True)
    ]
    seconds = math.fsum(level(times) * len(times) for times in parts if times)
    return block["samples"] / len(block["kinds"]) * sum(map(len, parts)) / seconds


def prices(blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each kind's price in seconds, the median over rehearsals of its trimmed mean, with its share of all steps."""
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
    """:func:`prices` of a single rehearsal, raised together by what :func:`periodic_steps` take beyond their kinds' levels."""
    scale = _priced_rate([block]) / _rate(block, _trimmed, periodic_steps(block))
    return [{**price, "seconds": price["seconds"] * scale} for price in prices([block])]


def rates(baseline: Sequence[Mapping[str, Any]], arm: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Samples per second of the baseline and of an arm in each round, in which they took turns.

    Told from trimmed means, those of :func:`slow_steps` apart, unless the arm has other slow steps of its own: what the
    slowest quarter adds differs from the baseline's by more than chance over the rounds. Then all steps count.
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
    """An arm's prices, scaled as one so that they stand to the baseline's as the speeds do that were measured in pairs.

    Args:
        blocks: the arm's rehearsals.
        baseline: the baseline's.
        pairs: samples per second of the baseline and of the arm, in each round.
    """
    measured = paired_ratio(pairs)
    scale = _priced_rate(blocks) / _priced_rate(baseline) / (measured.estimate if measured is not None else 1.0)
    return [{**price, "seconds": price["seconds"] * scale} for price in prices(blocks)]


def _priced_rate(blocks: Sequence[Mapping[str, Any]]) -> float:
    """Samples per second at the prices of these rehearsals."""
    samples = fmean(block["samples"] / len(block["kinds"]) for block in blocks)
    return samples / math.fsum(price["seconds"] * price["share"] for price in prices(blocks))


def steps_in(budget: float, block: Mapping[str, Any], priced: Mapping[str, float], windows: int = 8) -> int:
    """How many optimizer steps fit into ``budget`` seconds, from a rehearsal that passed through the schedule.

    The share ``u`` of the budget is cut into windows; each holds as many steps as its part of the budget pays for at
    the mean price of the steps that were met there.
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
            f" {record['error']}\nMend it and run the bench again in a fresh folder."
        )


def check_length(name: str, budget: float, step_seconds: float) -> None:
    """Raise :class:`Incomparable` if the budget holds too few steps for any schedule."""
    if budget / step_seconds < FEWEST_STEPS:
        raise Incomparable(
            f"{name}: got a budget of {budget:g} s, which holds {budget / step_seconds:.1f} optimizer steps of"
            f" {step_seconds:.3g} s; expected at least {FEWEST_STEPS}. Raise --budget to"
            f" {math.ceil(FEWEST_STEPS * step_seconds)}s or more."
        )


def check_rate(name: str, rate: Mapping[str, float], steps: int) -> None:
    """Raise :class:`Incomparable` if a baseline's learning rate does not peak early and decay wholly in the budget."""
    if rate["peak_at"] > 0.5:
        raise Incomparable(
            f"{name}: got a learning rate that still rises at {rate['peak_at']:.0%} of the budget, which holds {steps}"
            " steps; expected a peak in its first half. The budget is too short for the schedule's warm-up: raise"
            " --budget, or shorten the warm-up."
        )
    if rate["last"] > DECAYED * rate["peak"]:
        raise Incomparable(
            f"{name}: got a learning rate that ends at {rate['last'] / rate['peak']:.0%} of its peak after the {steps}"
            f" steps that the budget holds; expected {DECAYED:.0%} at most, because a baseline that is not decayed is a"
            " weak one (Kaddour et al. 2023). Lay the schedule out over trainer.estimated_stepping_batches with"
            " interval 'step', or let the bench decay the rate in every arm: --schedule linear."
        )


def check_same(
    name: str, baseline: Mapping[str, Any], arm: Mapping[str, Any], *, other_training_data: bool | None
) -> None:
    """Raise :class:`Incomparable` if an arm was validated on other data than the baseline, or trains on other data.

    Args:
        name: of the arm.
        baseline: its rehearsal's record.
        arm: the arm's.
        other_training_data: whether it may train on other data; None where nobody can allow that.
    """
    ours, theirs = arm["data"]["validation"], baseline["data"]["validation"]
    if ours != theirs:
        raise Incomparable(
            f"{name}: got validation data of {sorted(ours)}, other than the baseline's of {sorted(theirs)}"
            f"{' (same make, other values)' if sorted(ours) == sorted(theirs) else ''}; expected the same, because"
            " metrics on other data do not compare. Give every arm the same data and limit_val_batches."
        )
    ours, theirs = arm["data"]["training"], baseline["data"]["training"]
    if ours != theirs and not other_training_data:
        raise Incomparable(
            f"{name}: got a training set of {_size(ours)}, other than the baseline's of {_size(theirs)}; expected the"
            " same. Give every arm the same data"
            + (
                "."
                if other_training_data is None
                else ", or, if the choice of data is what you compare, say --allow-other-training-data."
            )
        )


def _size(data: Mapping[str, Any] | None) -> str:
    return "unknown length" if data is None else f"{data['length']} items (hash {data['items'][:8]})"


def same_training(baseline: Mapping[str, Any], arm: Mapping[str, Any]) -> bool:
    """Whether an arm's rehearsal was the baseline's bit for bit, and no technique acts that the baseline has not.

    Then the arms differ in nothing but speed.
    """
    names = ("losses", "metrics", "samples", "tokens", "techniques", "steps")
    return all(baseline[name] == arm[name] for name in names) and bool(baseline["losses"])
