"""The share of its own time in which a recipe ends where the baseline ends: both with their rates wholly decayed.

A curve that is on its way down crosses the baseline's final loss later than a run that was meant to end there: what counts here
are whole runs at several budgets, of the recipe as of the baseline, at the same prices, and between two budgets of the recipe
the line through their losses over the logarithm of time.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.joining import ROUNDING, spread
from lightning_eff.bench.reports.intervals import Interval, paired_ratio

PARTS = ("goal", "ladder", "compute", "weights", "muon_43")  #: of the names of files with results, the first ones first

Finals = dict[float, dict[int, float]]  #: budget in seconds, seed, final loss


@dataclass
class Arm:
    """An arm's whole runs, and how far off its price may be."""

    finals: Finals = field(default_factory=dict)
    error: float = 0.0  #: of its price beside the baseline's, the half-width of its interval at 95 %, as a logarithm
    price: Interval | None = (
        None  #: of its steps, in those of the baseline, as the bench told it whose error is the largest
    )


@dataclass(frozen=True)
class Share:
    """What part of a budget an arm needs.

    Attributes:
        estimate: over the seeds, the geometric mean; where some of them lie off the budgets that were run, by the mean losses
            of all; None where that lies off them too.
        low: of the interval at 95 %, the price's error in it; None with one seed, or where some lie off.
        high: likewise.
        seeds: how many.
        below: of how many seeds it is known alone that it is less than ``least``.
        above: of how many that it is more than ``most``.
        least: of the budgets that these ``below`` ran, the least one, as a part; the largest of them where seeds differ in it.
        most: of those that these ``above`` ran, the largest one; the least of them where seeds differ in it.
    """

    estimate: float | None
    low: float | None
    high: float | None
    seeds: int
    below: int = 0
    above: int = 0
    least: float = 0.0
    most: float = math.inf


def gathered(benches: Iterable[Mapping[str, Any]]) -> dict[str, Arm]:
    """The arms of several benches of one task, "baseline" among them.

    Args:
        benches: as they are kept. One whose first arm is a recipe has that recipe's runs at several budgets.

    Of a baseline's run that was made again on another processor, whose sums round differently, the first stays.

    Raises:
        ValueError: if runs of the baseline at the same budget and seed do not end alike, or on another processor further apart
            than :data:`benchmarks.joining.ROUNDING` of the deviation over seeds: then prices or code differ.
    """
    arms: dict[str, Arm] = {}
    again: list[tuple[float, int, float]] = []
    for bench in benches:
        seconds, first = bench["plan"]["budget"]["seconds"], bench["plan"]["arms"][0]["name"]
        for arm in bench["plan"]["arms"]:
            name = first if arm["kind"] == "ladder" else arm["name"]
            own = arms.setdefault(name, Arm())
            rates = bench["calibration"].get(name, {}).get("rates")
            if rates and name != first:
                ratio = paired_ratio([(other, base) for base, other in rates])
                if ratio is not None and (error := math.log(ratio.high / ratio.estimate)) >= own.error:
                    own.error, own.price = error, ratio
            finals = own.finals.setdefault(round(seconds * arm["factor"], 6), {})
            for run in bench["runs"]:
                if run["arm"] != arm["name"] or run["status"] != "finished":
                    continue
                loss = run["points"][-1]["metric"]
                if name == "baseline" and run.get("cpu"):
                    again.append((round(seconds * arm["factor"], 6), run["seed"], loss))
                    continue
                if finals.setdefault(run["seed"], loss) != loss and name == "baseline":
                    raise ValueError(_unlike(run["seed"], seconds * arm["factor"], finals[run["seed"]], loss))
    apart = {budget: ROUNDING * spread(finals) for budget, finals in arms["baseline"].finals.items()} if again else {}
    for budget, seed, loss in again:
        first = arms["baseline"].finals[budget].setdefault(seed, loss)
        if abs(first - loss) > apart[budget]:
            raise ValueError(_unlike(seed, budget, first, loss))
    return {name: arm for name, arm in arms.items() if any(arm.finals.values())}


def _unlike(seed: int, budget: float, one: float, other: float) -> str:
    return (
        f"the baseline of seed {seed} at {budget:g} s ends at {one} in one bench and at {other} in another; expected the same."
        " Make both with one machine's prices."
    )


def seconds_to(finals: Mapping[float, float], target: float) -> tuple[float | None, str | None]:
    """The least budget of an arm that ends at ``target`` or below, between the budgets of ``finals``, and else a bound.

    Args:
        finals: the loss at the end of each budget in seconds.
        target: a loss.

    Returns:
        Seconds and None, or None and one of "below" (the least of the budgets) and "above" (the largest).
    """
    budgets = sorted(finals)
    if finals[budgets[0]] <= target:
        return (budgets[0], None) if finals[budgets[0]] == target else (None, "below")
    for earlier, later in pairwise(budgets):
        before, after = finals[earlier], finals[later]
        if after <= target:
            way = (before - target) / (before - after)
            return math.exp(math.log(earlier) + way * math.log(later / earlier)), None
    return None, "above"


def share(arm: Arm, baseline: Arm, budget: float) -> Share | None:
    """The part of ``budget`` in which ``arm`` ends where the baseline ends there, over the seeds that both have.

    None where the baseline was not run at ``budget``, or the arm has no seed of it.
    """
    return _compared(arm, baseline.finals.get(budget, {}), budget, arm.error)


def exact(name: str, arm: Arm) -> list[str]:
    """What there is to say of an arm whose steps are the baseline's but for rounding: nothing but their price sets it apart."""
    if arm.price is None:
        return []
    price = f"{arm.price.estimate:.2f} [{arm.price.low:.2f}, {arm.price.high:.2f}]"
    return [
        f"`{name}` is exact but for rounding. So its fraction is the relative cost of its step, {price}, whatever the budget"
        f" ({arm.price.n} rehearsals). Differences from this figure in the table are noise between seeds."
    ]


def as_good(arm: Arm, baseline: Arm, budget: float) -> Share | None:
    """The part that ``budget`` is of the time in which the baseline ends where ``arm`` ends after it.

    It is told from one budget of the arm and several of the baseline, as :func:`share` is from the other way round.
    """
    found = _compared(baseline, arm.finals.get(budget, {}), budget, arm.error)
    if found is None:
        return None
    estimate, low, high = (None if end is None else 1 / end for end in (found.estimate, found.high, found.low))
    ends = {"below": found.above, "above": found.below, "least": 1 / found.most, "most": 1 / found.least}
    return Share(estimate, low, high, found.seeds, **ends)


def _compared(runs: Arm, targets: Mapping[int, float], budget: float, error: float) -> Share | None:
    """In what part of ``budget``, over the seeds, ``runs`` end at ``targets``."""
    own = {
        seed: {seconds: losses[seed] for seconds, losses in runs.finals.items() if seed in losses}
        for seed in targets
        if any(seed in losses for losses in runs.finals.values())
    }
    if not own:
        return None
    found = {seed: seconds_to(finals, targets[seed]) for seed, finals in own.items()}
    least, most = (end(end(finals) for finals in own.values()) for end in (min, max))
    unknown = {
        seed
        for seed, (_, bound) in found.items()
        if (bound == "below" and min(own[seed]) > least) or (bound == "above" and max(own[seed]) < most)
    }
    if len(unknown) < len(found):  # of these seeds it would be known where they had run at the budgets of the others
        found = {seed: one for seed, one in found.items() if seed not in unknown}
        own = {seed: one for seed, one in own.items() if seed not in unknown}
    every = set.intersection(*({*finals} for finals in own.values()))
    if not every:
        return None
    of = {word: [own[seed] for seed, (_, bound) in found.items() if bound == word] for word in ("below", "above")}
    off = {word: len(runs) for word, runs in of.items()}
    least = max((min(finals) for finals in of["below"]), default=min(every))
    most = min((max(finals) for finals in of["above"]), default=max(every))
    ends = {"least": least / budget, "most": most / budget}
    if any(off.values()):
        means = {seconds: fmean(finals[seconds] for finals in own.values()) for seconds in every}
        middle, _ = seconds_to(means, fmean(targets[seed] for seed in own))
        return Share(None if middle is None else middle / budget, None, None, len(own), **off, **ends)
    ratios = [(budget, seconds) for seconds, _ in found.values() if seconds is not None]
    interval = paired_ratio(ratios)
    if interval is None:
        return Share(ratios[0][1] / budget, None, None, 1, **ends)
    half, estimate = math.hypot(math.log(interval.high / interval.estimate), error), interval.estimate
    return Share(estimate, estimate * math.exp(-half), estimate * math.exp(half), len(ratios), **ends)


def files(task: str, folder: Path, parts: Sequence[str] = PARTS) -> list[Path]:
    """The files in ``folder`` with benches of a task, at its own budget and at others."""
    named = [[folder / f"{part}_{task}.json", *sorted(folder.glob(f"{part}_{task}_*.json"))] for part in parts]
    return [file for every in named for file in every if file.is_file()]


def read(task: str, folder: Path) -> list[dict[str, Any]]:
    """The benches of a task that are kept in ``folder``."""
    return [json.loads(file.read_text()) for file in files(task, folder)]


def lines(arms: Mapping[str, Arm], told: Mapping[str, str], least: float) -> list[str]:
    """A task's tables: the fraction of the baseline's time that each arm needs, and all whole runs.

    Args:
        arms: of :func:`gathered`.
        told: the arms to show, and what they are.
        least: the shortest budget of the baseline to show, in seconds.
    """
    baseline = arms["baseline"]
    budgets = [seconds for seconds in sorted(baseline.finals) if seconds >= least and baseline.finals[seconds]]
    shown = [name for name in told if name in arms and any(share(arms[name], baseline, b) for b in budgets)]
    found = ["| recipe | " + " | ".join(f"of {seconds:g} s" for seconds in budgets) + " |"]
    found += ["|---|" + "---|" * len(budgets)]
    for name in shown:
        cells = [cell(share(arms[name], baseline, seconds)) for seconds in budgets]
        found.append(f"| {told[name]} | " + " | ".join(cells) + " |")
    found += ["", '??? note "All whole runs"', ""]
    found += [
        "    The last column divides the time of the run by the time of the baseline that reaches the same loss.",
        "",
    ]
    found += ["    | recipe | seconds | final loss (seeds) | fraction of time |", "    |---|---|---|---|"]
    for name in ("baseline", *shown):
        for seconds in sorted(arms[name].finals):
            if not (finals := arms[name].finals[seconds]):
                continue
            part = "–" if name == "baseline" else cell(as_good(arms[name], baseline, seconds))
            found.append(f"    | {told.get(name, name)} | {seconds:g} | {_ends(finals)} | {part} |")
    return found


def cell(found: Share | None) -> str:
    """A fraction with its interval, or the bounds that are known, and the number of seeds."""
    if found is None:
        return "–"
    seeds = f"{found.seeds} seed{'s' if found.seeds > 1 else ''}"
    if found.low is not None:
        return f"{found.estimate:.2f} [{found.low:.2f}, {found.high:.2f}] ({seeds})"
    off = [(found.below, f"below {found.least:.2f}"), (found.above, f"above {found.most:.2f}")]
    if found.estimate is None and (word := next((word for count, word in off if count == found.seeds), None)):
        return f"{word} ({seeds})"
    told = ", ".join(f"{count} {word}" for count, word in off if count)
    middle = "not known" if found.estimate is None else f"{found.estimate:.2f}"
    return f"{middle} ({seeds}{f', {told}' if told else ''})"


def _ends(finals: Mapping[int, float]) -> str:
    return f"{fmean(finals.values()):.4f} ({len(finals)})" if finals else "–"
