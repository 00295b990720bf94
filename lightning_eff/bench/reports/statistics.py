"""Compute figures and verdicts from a bench's runs, with the protocol of Kaddour et al. 2023 (arXiv:2307.06440).

Everything is paired by seed. An arm is only faster or slower if its intervals exclude "no difference".
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from lightning_eff.bench.reports import findings, words
from lightning_eff.bench.reports.intervals import Interval, paired_interval, paired_ratio


def time_to(points: Sequence[dict[str, Any]], target: float, mode: str) -> float | None:
    """Return the seconds at which a curve first reaches ``target``, or None if it never does.

    Between two evaluations the metric is interpolated linearly. If the first evaluation already reaches the target, its time
    is returned, which is an upper bound.

    Args:
        points: evaluations with ``seconds`` and ``metric``, in order. Those without a finite metric are skipped.
        target: a value of the metric.
        mode: "min" if lower is better, "max" if higher is.
    """
    sign = _sign(mode)
    before: tuple[float, float] | None = None
    for seconds, metric in _curve(points):
        gap = sign * (metric - target)  # >= 0 once the target is reached
        if gap >= 0:
            if before is None:
                return seconds
            return before[0] + (seconds - before[0]) * -before[1] / (gap - before[1])
        before = (seconds, gap)
    return None


def speed_up(baseline: Sequence[dict[str, Any]], arm: Sequence[dict[str, Any]], mode: str) -> float:
    """Return how many times as fast as the baseline an arm is, from the two curves of one seed; below 1 if it is slower.

    The worse curve's final metric is the goal. The result is the baseline's time to the goal, divided by the arm's. Equal
    ends give 1, and swapped curves give the reciprocal. If the better curve reaches the goal by its first evaluation, that
    time is an upper bound.

    It is conservative in both directions. Where the better curve crosses the goal, its learning rate has not decayed yet. A
    run with such a short budget would be better there.

    Args:
        baseline: evaluations of the baseline's run. Those at second 0 or without a finite metric are skipped.
        arm: evaluations of the arm's run with the same seed.
        mode: "min" if lower is better, "max" if higher is.
    """
    sign = _sign(mode)
    own, other = _curve(arm), _curve(baseline)
    if not own or not other:
        raise ValueError(
            "speed_up: expected at least one evaluation after second 0 with a finite metric in both curves."
        )
    gain = sign * (own[-1][1] - other[-1][1])
    if gain == 0:
        return 1.0
    reached = time_to(arm, other[-1][1], mode) if gain > 0 else time_to(baseline, own[-1][1], mode)
    assert reached is not None  # the better curve passes the worse one's end, at its own end at the latest
    return other[-1][0] / reached if gain > 0 else reached / own[-1][0]


def equivalent_seconds(
    ladder: Iterable[tuple[float, float]], final: float, mode: str
) -> tuple[float | None, str | None]:
    """Return the budget at which the fully decayed baseline ends at ``final``, interpolated in log(seconds).

    Args:
        ladder: (budget in seconds, mean final metric) of the baseline, for at least two budgets.
        final: the arm's mean final metric.
        mode: "min" if lower is better, "max" if higher is.

    Returns:
        The seconds and None. Outside the ladder, None and the bound: "beyond 120 s" or "below 15 s".
    """
    sign = _sign(mode)
    rungs = sorted((seconds, sign * (metric - final)) for seconds, metric in ladder)
    if len(rungs) < 2:
        return None, None
    if rungs[0][1] > 0:
        return None, f"below {rungs[0][0]:.4g} s"
    for (x0, y0), (x1, y1) in pairwise(rungs):
        if y0 <= 0 <= y1:
            share = -y0 / (y1 - y0) if y1 > y0 else 0.0
            return math.exp(math.log(x0) + share * (math.log(x1) - math.log(x0))), None
    return None, f"beyond {rungs[-1][0]:.4g} s"


def summarize(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures and the verdict of each arm, as plain JSON values; intervals are at 95 %.

    An arm is "faster" or "slower" if two intervals exclude "no difference": that of the speed-up, and that of the difference
    in the final metric. If only one of them does, or the two disagree, the arm is "undecided". If neither does, there is "no
    measurable difference".

    Arms that train bit for bit like the baseline differ only in speed. The interval of their speed ratio in the rehearsals
    decides, unless the runs contradict it. A ladder arm has another budget and gets no verdict.

    In reference-system time, an error in the step costs is the same for all seeds. Seeds cannot show it, so the intervals
    are widened by the uncertainty of the step costs.

    Args:
        results: results of the bench's schema; their ``summary`` is not read.

    Returns:
        A dict by arm, each with ``verdict``, ``sentence``, ``speedup``, ``difference`` and further figures.
    """
    arms = results["plan"]["arms"]
    finished = {arm["name"]: _finished(results, arm["name"]) for arm in arms}
    summary = {arm["name"]: _summary(results, arm, finished) for arm in arms}
    sign = _sign(results["plan"]["mode"])
    for arm in arms:
        if arm["kind"] == "recipe":
            own = summary[arm["name"]]["better_than_control"]
            for control in (
                other["name"] for other in arms if other["kind"] == "control" and other["of"] == arm["name"]
            ):
                mine, theirs = finished[arm["name"]], finished[control]
                pairs = _once({seed: (theirs[seed], mine[seed]) for seed in mine if seed in theirs})
                own[control] = _plain(paired_interval([_final(a) - _final(b) for b, a in pairs]))
    for arm in arms:
        summary[arm["name"]]["sentence"] = words.sentence(results["plan"], arm, summary, sign)
    return summary


def _summary(results: dict[str, Any], arm: dict[str, Any], finished: dict[str, dict[int, Any]]) -> dict[str, Any]:
    plan, name = results["plan"], arm["name"]
    first, mode, seeds = plan["arms"][0]["name"], plan["mode"], plan["seeds"]
    calibration = results["calibration"].get(name, {})
    runs = [run for run in results["runs"] if run["arm"] == name]
    own, baseline = finished[name], finished[first]
    finals = {seed: _final(run) for seed, run in own.items()}
    compared = arm["kind"] in ("recipe", "control")
    pairs = (
        {seed: (baseline[seed], own[seed]) for seed in seeds if seed in own and seed in baseline} if compared else {}
    )

    same = bool(calibration.get("same_training")) and compared
    throughput = _throughput(calibration.get("rates", []), list(pairs.values())) if compared else None
    distinct = _once(pairs)
    gains = [speed_up(b["points"], a["points"], mode) for b, a in distinct]
    reached = [_reached(baseline.get(seed), own.get(seed), mode, name == first) for seed in seeds]
    difference = paired_interval([_final(a) - _final(b) for b, a in distinct])
    speedup = paired_ratio([(1.0, gain) for gain in gains])
    error = slope = 0.0  # the step costs' error as a logarithm, and the change of the metric per unit of it
    if plan["budget"]["clock"] == "reference" and throughput is not None and calibration.get("rates"):
        slope = _slope([b for b, _ in pairs.values()])
        error = math.log(throughput.high / throughput.estimate)
        speedup = _widened(speedup, error, ratio=True)
        difference = _widened(difference, slope * error)
    same = same and not _contradicted(throughput, difference, _sign(mode))
    speedup = throughput if same else speedup
    equivalent, bound = _equivalent(plan, finished, own) if compared else (None, None)
    gap = findings.price_gap(list(pairs.values()))
    verdict = _verdict(runs, own, compared, same, speedup, difference, _sign(mode))
    needed = None
    open_question = verdict in ("undecided", "no measurable difference") and not same
    if open_question and not _both_exclude(speedup, difference):
        by_metric = findings.seeds_needed([_final(a) - _final(b) for b, a in distinct], slope * error)
        by_speed = findings.seeds_needed([math.log(gain) for gain in gains], error)
        needed = None if by_metric is None or by_speed is None else max(by_metric, by_speed)
    return {
        "runs": len(runs),
        "repeated": len(pairs) - len(distinct),
        "failed": [_failure(run) for run in runs if run["seed"] not in own],
        "final": {
            "mean": fmean(finals.values()) if finals else None,
            "std": stdev(finals.values()) if len(finals) > 1 else None,
            "values": {str(seed): value for seed, value in finals.items()},
        },
        "difference": _plain(difference),
        "time_to_target": {"seconds": reached, "reached": sum(seconds is not None for seconds in reached)},
        "speedup": _plain(speedup),
        "speedup_from": "throughput" if same else "metric",
        "throughput": _plain(throughput),
        "memory": _plain(_ratio(pairs.values(), "peak_memory_bytes")),
        "energy": _plain(_ratio(pairs.values(), "energy_joules")),
        "equivalent_seconds": equivalent,
        "equivalent_bound": bound,
        "price_gap": gap if plan["budget"]["clock"] == "reference" else None,
        "seeds_needed": needed,
        "samples_per_second": _rate(own.values(), "samples"),
        "tokens_per_second": _rate(own.values(), "tokens"),
        "extra_share": _share(own.values(), "extra_seconds", "wall_seconds"),
        "caused_share": _share(own.values(), "caused_seconds", "seconds"),
        "verdict": verdict,
        "better_than_control": {},
        "sentence": "",
    }


def _once(
    pairs: Mapping[int, tuple[dict[str, Any], dict[str, Any]]],
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the pairs of runs without those that equal an earlier seed's, loss by loss, since they are no new evidence.

    Runs are equal if a module or its data set a seed themselves.
    """
    found: dict[Any, tuple[dict[str, Any], dict[str, Any]]] = {}
    for seed, pair in pairs.items():
        courses = [tuple(loss for _, loss in run["losses"]) for run in pair]
        ends = [tuple(metric for _, metric in _curve(run["points"])) for run in pair]
        found.setdefault((*courses, *ends) if all(courses) else seed, pair)
    return list(found.values())


def _slope(baseline: Sequence[dict[str, Any]]) -> float:
    """Return the baseline's change of metric per unit of log(seconds) over the last third of its budget."""
    slopes = [0.0]
    for run in baseline:
        curve = _curve(run["points"])
        early = [point for point in curve if point[0] <= 0.7 * curve[-1][0]]
        if early:
            slopes.append(abs(curve[-1][1] - early[-1][1]) / math.log(curve[-1][0] / early[-1][0]))
    return max(fmean(slopes[1:] or slopes), 0.0)


def _widened(interval: Interval | None, error: float, *, ratio: bool = False) -> Interval | None:
    """Widen an interval by the half-width of an independent error, added in quadrature; in logarithms for a ratio."""
    if interval is None:
        return None
    form, back = (math.log, math.exp) if ratio else (float, float)
    middle = form(interval.estimate)
    half = math.hypot(form(interval.high) - middle, error)
    return Interval(interval.estimate, back(middle - half), back(middle + half), interval.n)


def _contradicted(throughput: Interval | None, difference: Interval | None, sign: int) -> bool:
    """Return whether the final metric differs although the speed does not, or differs in the opposite direction."""
    if throughput is None or difference is None or not difference.excludes(0):
        return False
    return not throughput.excludes(1) or (throughput.estimate > 1) != (sign * difference.estimate > 0)


def _verdict(
    runs: list[dict[str, Any]],
    own: dict[int, Any],
    compared: bool,
    same: bool,
    speedup: Interval | None,
    difference: Interval | None,
    sign: int,
) -> str:
    if runs and not own:
        return "failed"
    if not compared or speedup is None or (difference is None and not same):
        return "no verdict"
    better = same or (difference is not None and difference.excludes(0) and sign * difference.estimate > 0)
    worse = same or (difference is not None and difference.excludes(0) and sign * difference.estimate < 0)
    if speedup.low > 1 and better:
        return "faster"
    if speedup.high < 1 and worse:
        return "slower"
    one_excludes = not same and (speedup.excludes(1) or (difference is not None and difference.excludes(0)))
    return "undecided" if one_excludes else "no measurable difference"


def _both_exclude(speedup: Interval | None, difference: Interval | None) -> bool:
    """Return whether both intervals exclude "no difference"."""
    return speedup is not None and difference is not None and speedup.excludes(1) and difference.excludes(0)


def _finished(results: dict[str, Any], name: str) -> dict[int, dict[str, Any]]:
    """Return an arm's runs that ended with a finite metric, by seed in the plan's order."""
    runs = {run["seed"]: run for run in results["runs"] if run["arm"] == name and run["status"] == "finished"}
    good = {seed: run for seed, run in runs.items() if run["points"] and _is_number(run["points"][-1]["metric"])}
    return {seed: good[seed] for seed in results["plan"]["seeds"] if seed in good and _curve(good[seed]["points"])}


def _failure(run: dict[str, Any]) -> dict[str, Any]:
    if run["status"] != "finished":
        return {"seed": run["seed"], "status": run["status"], "error": run["error"]}
    return {"seed": run["seed"], "status": "diverged", "error": "its final metric is not a finite number"}


def _reached(baseline: dict[str, Any] | None, own: dict[str, Any] | None, mode: str, itself: bool) -> float | None:
    """Return the seconds to the baseline's final metric of the same seed. The baseline itself needs its whole budget."""
    if baseline is None or own is None:
        return None
    return own["points"][-1]["seconds"] if itself else time_to(own["points"], _final(baseline), mode)


def _equivalent(
    plan: dict[str, Any], finished: dict[str, dict[int, Any]], own: dict[int, Any]
) -> tuple[float | None, str | None]:
    """Apply :func:`equivalent_seconds` to the seeds that finished in the arm and at every budget of the ladder."""
    rungs = [arm for arm in plan["arms"] if arm["kind"] in ("baseline", "ladder")]
    common = [seed for seed in own if all(seed in finished[rung["name"]] for rung in rungs)]
    if len(rungs) < 2 or not common:
        return None, None
    seconds = plan["budget"]["seconds"]
    means = [(r["factor"] * seconds, fmean(_final(finished[r["name"]][s]) for s in common)) for r in rungs]
    return equivalent_seconds(means, fmean(_final(own[seed]) for seed in common), plan["mode"])


def _throughput(rates: list[Any], pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> Interval | None:
    """Return the ratio of samples per second to the baseline's, from the rehearsals, or else from the runs' wall-clock time."""
    if rates:
        return paired_ratio([(baseline, arm) for baseline, arm in rates])
    whole = [(b, a) for b, a in pairs if min(b["samples"], b["wall_seconds"], a["samples"], a["wall_seconds"]) > 0]
    return paired_ratio([(b["samples"] / b["wall_seconds"], a["samples"] / a["wall_seconds"]) for b, a in whole])


def _ratio(pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]], field: str) -> Interval | None:
    """Return the interval of a field's ratio to the baseline's, over the seeds in which both have it."""
    known = [(b, a) for b, a in pairs if b[field] and a[field] and b["memory_kind"] == a["memory_kind"]]
    return paired_ratio([(b[field], a[field]) for b, a in known])


def _rate(runs: Iterable[dict[str, Any]], field: str) -> float | None:
    """Return the mean of a count per second of the budget, or None if nothing was counted."""
    rates = [run[field] / run["seconds"] for run in runs if run["seconds"] > 0 and run[field] > 0]
    return fmean(rates) if rates else None


def _share(runs: Iterable[dict[str, Any]], part: str, whole: str) -> float:
    """Return the mean fraction of one field in another; a run without the field counts as 0."""
    shares = [run.get(part, 0.0) / run[whole] for run in runs if run[whole] > 0]
    return fmean(shares) if shares else 0.0


def _curve(points: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return (seconds, metric) of the evaluations after second 0 with a finite metric."""
    return [(p["seconds"], p["metric"]) for p in points if p["seconds"] > 0 and _is_number(p["metric"])]


def _final(run: dict[str, Any]) -> float:
    return run["points"][-1]["metric"]


def _is_number(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _plain(interval: Interval | None) -> dict[str, Any] | None:
    return None if interval is None else asdict(interval)


def _sign(mode: str) -> int:
    if mode not in ("min", "max"):
        raise ValueError(f"{mode=}: expected 'min' (lower is better) or 'max'.")
    return -1 if mode == "min" else 1
