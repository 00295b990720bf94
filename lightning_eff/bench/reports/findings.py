"""Findings about a whole bench: what to do, verdicts by chance, tuning, step costs, and other differences between arms."""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import Any

from lightning_eff.bench.reports.intervals import t_quantile

LEVEL = 0.95  #: of every interval
POWER = 0.8  #: the probability that the stated number of seeds shows a difference
COMPARED = ("faster", "slower", "undecided", "no measurable difference")  #: the verdicts of a comparison
MOST_SEEDS = 200
HOLDS = 1.1  #: the largest credible ratio of wall-clock time to step cost, relative to the baseline's
PEAKS = ("peak learning rate", "peak reached at")
QUIET_SECONDS = 2.0  #: the least training time in quiet stretches that checks an arm's step costs


def lines(results: dict[str, Any], summary: dict[str, dict[str, Any]]) -> list[str]:
    """Return sentences about the whole bench: tuned arms, verdicts by chance, and the check of the step costs."""
    plan = results["plan"]
    found = [tuning(plan), chance(plan, summary)]
    if plan["budget"]["clock"] == "reference":
        found.append(prices(results, summary))
    return [line for line in found if line]


def advice(results: dict[str, Any], summary: dict[str, dict[str, Any]]) -> list[str]:
    """Return one line for each recipe that says what to do with it: use it, leave it out, or run more seeds."""
    return [_advice(arm["name"], results, summary) for arm in results["plan"]["arms"] if arm["kind"] == "recipe"]


def _advice(name: str, results: dict[str, Any], summary: dict[str, dict[str, Any]]) -> str:
    own, seeds = summary[name], len(results["plan"]["seeds"])
    verdict, needed = own["verdict"], own["seeds_needed"]
    if verdict == "failed":
        return f"Fix {name}: it {own['failed'][0]['status']} on every seed."
    if not own["runs"]:
        return f"Wait for {name}: it has no run yet."
    if verdict == "no verdict":
        more = " Let the module and its data use the bench's seed." if own["repeated"] else ""
        return f"Run at least {max(3, seeds + 1)} seeds of {name}: there are too few for a verdict.{more}"
    speed = f"{own['speedup']['estimate']:.2f} times the baseline's speed"
    if verdict == "slower":
        return f"Leave {name} out: it is slower ({speed})."
    if verdict != "faster":
        said = "is undecided" if verdict == "undecided" else "makes no measurable difference"
        if own["failed"] and needed is not None and needed <= seeds:
            return f"Fix the failed runs of {name}: it {said} with the other seeds."
        if needed is None and seeds < 3:
            return f"Run at least 3 seeds of {name}: it {said} with {seeds}."
        if needed is None:
            return f"Leave {name} out: it {said}, and more seeds would hardly change that."
        if verdict == "undecided" and own["speedup"]["estimate"] > 1:
            return f"Run {needed} seeds of {name} to decide: it {said} ({speed})."
        return f"Leave {name} out, or run {needed} seeds to decide: it {said}."
    sign = -1 if results["plan"]["mode"] == "min" else 1
    for control, found in own["better_than_control"].items():
        beaten = found is not None and sign * found["estimate"] > 0 and (found["low"] > 0 or found["high"] < 0)
        if not beaten and summary[control]["verdict"] == "faster":
            return f"Prefer the control '{control}' to {name} ({speed}): it is simpler, and {name} does not beat it."
        if not beaten:
            return f"Run more seeds before you use {name} ({speed}): it does not beat its control '{control}' yet."
    return f"Use {name}: it is faster ({speed})."


def tuning(plan: dict[str, Any]) -> str:
    """Say which arms were tuned, if the plan says so."""
    tuned, baseline = plan.get("tuned"), plan["arms"][0]["name"]
    recipes = [arm["name"] for arm in plan["arms"] if arm["kind"] == "recipe"]
    if tuned is None or not recipes:
        return ""
    start = "The baseline was tuned" if baseline in tuned else "The baseline was not tuned"
    rest = [name for name in recipes if name not in tuned]
    if len(rest) in (0, len(recipes)):
        return f"{start}; the recipes were{' not' if rest else ''} tuned."
    return f"{start}; tuned recipes: {', '.join(n for n in recipes if n in tuned)}; not tuned: {', '.join(rest)}."


def chance(plan: dict[str, Any], summary: dict[str, dict[str, Any]]) -> str:
    """Say how many verdicts chance alone would give among so many comparisons."""
    arms = [arm["name"] for arm in plan["arms"] if arm["kind"] in ("recipe", "control")]
    verdicts = [summary[name]["verdict"] for name in arms]
    count = sum(verdict in COMPARED for verdict in verdicts)
    if not count:
        return ""
    given = sum(verdict in ("faster", "slower") for verdict in verdicts)
    return (
        f"{given} of {count} comparison{'s' if count > 1 else ''} {'is' if given == 1 else 'are'} faster or slower. If no arm"
        f" differed from the baseline, chance would give up to {(1 - LEVEL) * count:.2g} such"
        f" verdict{'s' if count > 1 else ''}, and at least one with a probability of up to {1 - LEVEL**count:.0%}."
    )


def prices(results: dict[str, Any], summary: dict[str, dict[str, Any]]) -> str:
    """Say whether wall-clock time agreed with the step costs while nothing else ran on the machine."""
    arms = [arm["name"] for arm in results["plan"]["arms"] if arm["kind"] in ("recipe", "control")]
    seen = any("quiet" in run for run in results["runs"])
    gaps = {name: summary[name]["price_gap"] if seen else None for name in arms if summary[name]["runs"]}
    if not gaps:
        return ""
    known = {name: gap for name, gap in gaps.items() if gap is not None}
    if not known:
        return (
            "Step costs were not checked against wall-clock time, because the machine was never idle during these runs."
        )
    good = [name for name, gap in known.items() if 1 / HOLDS <= gap <= HOLDS]
    bad = [f"{name} ({gap:.2f} times)" for name, gap in known.items() if name not in good]
    parts = (
        [f"wall-clock time on the idle machine confirms, within 10 %, the step costs of {', '.join(good)}"]
        if good
        else []
    )
    parts += [f"wall-clock time contradicts the step costs of {', '.join(bad)}"] if bad else []
    parts += [f"not checked: {', '.join(n for n in gaps if n not in known)}"] if len(known) < len(gaps) else []
    text = "; ".join(parts) + "."
    return text[0].upper() + text[1:]


def price_gap(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> float | None:
    """Return an arm's wall-clock time per second of its budget, relative to the baseline's; 1 if its step costs are right.

    Only quiet stretches count. The result is None if the arm or the baseline has too few of them. Older results have no
    stretches. There whole runs count, unless the baseline's varied by more than a tenth over seeds.

    Args:
        pairs: (baseline's run, arm's run) for each seed.
    """
    per_second = []
    stretches = any("quiet" in run for pair in pairs for run in pair)
    for runs in zip(*pairs, strict=True):
        parts = [run["quiet"] if stretches else run for run in runs if not stretches or "quiet" in run]
        parts = [part for part in parts if part["seconds"] > 0]
        wall, priced = (math.fsum(part[name] for part in parts) for name in ("wall_seconds", "seconds"))
        if not priced or (stretches and wall < QUIET_SECONDS):
            return None
        speeds = [part["wall_seconds"] / part["seconds"] for part in parts]
        if not stretches and not per_second and max(speeds) > HOLDS * min(speeds):
            return None
        per_second.append(wall / priced)
    return per_second[1] / per_second[0] if per_second and per_second[0] > 0 else None


def seeds_needed(differences: Sequence[float], fixed: float = 0.0) -> int | None:
    """Return the total number of seeds that would show the measured difference, if it is real, with a power of 80 %.

    This is the least ``n`` with ``|mean| > hypot(t · s / √n, fixed) + z · s / √n``. Here t is Student's quantile with
    ``n − 1`` degrees of freedom, s the standard deviation of the differences, and z the normal quantile of the power.

    Args:
        differences: the differences of at least two seeds.
        fixed: the half-width of an error that more seeds do not reduce, such as that of the step costs.

    Returns:
        The number, or None if it exceeds 200 or no number is enough.
    """
    mean, deviation = fmean(differences), stdev(differences)
    z = NormalDist().inv_cdf(POWER)
    for seeds in range(2, MOST_SEEDS + 1):
        error = deviation / math.sqrt(seeds)
        if abs(mean) > math.hypot(t_quantile((1 + LEVEL) / 2, seeds - 1) * error, fixed) + z * error:
            return seeds
    return None


def unlike(results: dict[str, Any]) -> list[dict[str, str]]:
    """List how recipes and controls differ from the baseline other than by their techniques.

    The rehearsals record the model, optimizer, batch and learning rate. Settings in configs are compared too.

    Returns:
        Rows with ``arm``, ``what``, ``baseline`` and ``own``, as text.
    """
    arms = results["plan"]["arms"]
    first = arms[0]
    base = _properties(results, first)
    rows = []
    for arm in arms:
        if arm["kind"] not in ("recipe", "control"):
            continue
        own = _properties(results, arm)
        known = [*base, *(name for name in own if name not in base)] if base and own else []
        for what in known:
            one, other = base.get(what, "–"), own.get(what, "–")
            if "–" in (one, other) and "." not in what:  # only configs list everything
                continue
            if one != other and not (what in PEAKS and _near(results, first, arm)[what]):
                rows.append({"arm": arm["name"], "what": what, "baseline": one, "own": other})
    return rows


def _near(results: dict[str, Any], *arms: dict[str, Any]) -> dict[str, bool]:
    """Return whether the peaks of two arms are equal within the resolution of rehearsals, which have few steps."""
    one, other = (results["calibration"][arm["name"]]["lr"] for arm in arms)
    rates = sorted((one["peak"], other["peak"]))
    return {PEAKS[0]: rates[1] <= 1.15 * rates[0], PEAKS[1]: abs(one["peak_at"] - other["peak_at"]) < 0.04}


def _properties(results: dict[str, Any], arm: dict[str, Any]) -> dict[str, str]:
    """Return the properties of an arm that are compared with the baseline's, as texts."""
    calibration = results["calibration"].get(arm["name"], {})
    if not calibration:
        return {}
    lr, facts = calibration["lr"], calibration.get("facts", {})
    found = {name: _text(value) for name, value in facts.items() if name != "techniques"}
    if "peak" in lr:
        found[PEAKS[0]] = f"{lr['peak']:.3g}"
        found[PEAKS[1]] = f"{lr['peak_at']:.0%} of the budget"
    if not arm["configs"] or not arm["configs"][0].startswith("# "):
        return found
    found = {
        name: value for name, value in found.items() if not name.startswith("model.")
    }  # the configs have these too
    return found | {name: _text(value) for name, value in _settings(arm["configs"]).items()}


def _settings(configs: Sequence[str]) -> dict[str, Any]:
    """Return the configs' settings of the model, data and Trainer by dotted names, without callbacks and loggers."""
    import yaml

    merged = {name: value for text in configs for name, value in flat(yaml.safe_load(text) or {}).items()}
    left_out = ("trainer.callbacks", "trainer.logger", "seed_everything")
    return {name: value for name, value in merged.items() if name not in left_out}


def flat(value: dict[str, Any], name: str = "") -> dict[str, Any]:
    """Return the entries of nested dicts by dotted names."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= flat(item, f"{name}{key}.") if isinstance(item, dict) else {f"{name}{key}": item}
    return found


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
