"""What is to be said of a bench as a whole: of chance, of tuning, of its prices, and of what sets arms apart."""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import Any

from lightning_eff.bench.reports.intervals import t_quantile

LEVEL = 0.95  #: of every interval
POWER = 0.8  #: with which the seeds that are named would show a difference
MOST_SEEDS = 200
HOLDS = 1.1  #: beyond this ratio of wall-clock to price, by the baseline's own, a price is doubted
PEAKS = ("peak learning rate", "peak reached at")
QUIET_SECONDS = 2.0  #: of training in quiet stretches that an arm needs, so that wall-clock tells about its prices


def lines(results: dict[str, Any], summary: dict[str, dict[str, Any]]) -> list[str]:
    """Sentences that go with the verdicts."""
    plan = results["plan"]
    said = [tuning(plan), chance(plan, summary)]
    if plan["budget"]["clock"] == "reference":
        said.append(prices(results, summary))
    return [line for line in said if line]


def tuning(plan: dict[str, Any]) -> str:
    """Which arms were tuned, as far as that was said."""
    tuned, baseline = plan.get("tuned"), plan["arms"][0]["name"]
    recipes = [arm["name"] for arm in plan["arms"] if arm["kind"] == "recipe"]
    if tuned is None or not recipes:
        return ""
    start = "A tuned baseline" if baseline in tuned else "An untuned baseline"
    rest = [name for name in recipes if name not in tuned]
    if len(rest) in (0, len(recipes)):
        return f"{start}, {'untuned' if rest else 'tuned'} recipes."
    return f"{start}; tuned: {', '.join(name for name in recipes if name in tuned)}; untuned: {', '.join(rest)}."


def chance(plan: dict[str, Any], summary: dict[str, dict[str, Any]]) -> str:
    """How many verdicts chance would give among so many comparisons."""
    arms = [arm["name"] for arm in plan["arms"] if arm["kind"] in ("recipe", "control")]
    words = [summary[name]["verdict"] for name in arms]
    count = sum(word in ("faster", "slower", "no difference shown") for word in words)
    if not count:
        return ""
    given = sum(word in ("faster", "slower") for word in words)
    several = f"{count} comparison{'s' if count > 1 else ''} at {LEVEL:.0%}"
    return (
        f"{several}: where nothing differed at all, chance would give up to {(1 - LEVEL) * count:.2g}"
        f" verdict{'s' if count > 1 else ''} (one or more with a probability of up to {1 - LEVEL**count:.0%}); {given}"
        f" {'was' if given == 1 else 'were'} given."
    )


def prices(results: dict[str, Any], summary: dict[str, dict[str, Any]]) -> str:
    """Whether wall-clock confirmed the prices on quiet stretches of the runs."""
    arms = [arm["name"] for arm in results["plan"]["arms"] if arm["kind"] in ("recipe", "control")]
    seen = any("quiet" in run for run in results["runs"])
    gaps = {name: summary[name]["price_gap"] if seen else None for name in arms if summary[name]["runs"]}
    if not gaps:
        return ""
    known = {name: gap for name, gap in gaps.items() if gap is not None}
    if not known:
        return (
            "The prices of steps were not confirmed by wall-clock: no quiet stretches, in which nothing else worked on the"
            " machine, are known of these runs."
        )
    good = [name for name, gap in known.items() if 1 / HOLDS <= gap <= HOLDS]
    bad = [f"{name} ({gap:.2f} times)" for name, gap in known.items() if name not in good]
    parts = [f"Wall-clock on quiet stretches confirmed the prices, within 10 %, of {', '.join(good)}"] if good else []
    parts += [f"it contradicts those of {', '.join(bad)}"] if bad else []
    parts += [f"not confirmed: {', '.join(n for n in gaps if n not in known)}"] if len(known) < len(gaps) else []
    told = "; ".join(parts) + "."
    return told[0].upper() + told[1:]


def price_gap(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> float | None:
    """An arm's wall-clock for each priced second by the baseline's own, over quiet stretches; 1 where the prices hold.

    None where either has too little of them. Results that know of no stretches are told by whole runs, where the
    baseline's own did not vary by more than a tenth over seeds.

    Args:
        pairs: (baseline's run, arm's run) of a seed.
    """
    told = []
    stretches = any("quiet" in run for pair in pairs for run in pair)
    for runs in zip(*pairs, strict=True):
        parts = [run["quiet"] if stretches else run for run in runs if not stretches or "quiet" in run]
        parts = [part for part in parts if part["seconds"] > 0]
        wall, priced = (math.fsum(part[name] for part in parts) for name in ("wall_seconds", "seconds"))
        if not priced or (stretches and wall < QUIET_SECONDS):
            return None
        speeds = [part["wall_seconds"] / part["seconds"] for part in parts]
        if not stretches and not told and max(speeds) > HOLDS * min(speeds):
            return None
        told.append(wall / priced)
    return told[1] / told[0] if told and told[0] > 0 else None


def seeds_needed(differences: Sequence[float], fixed: float = 0.0) -> int | None:
    """How many seeds in all would show a difference of the size that was found, with a power of 80 %, if it is real.

    The least ``n`` for which ``|mean| >= hypot(t · s / √n, fixed) + z · s / √n``, with Student's t at ``n − 1`` degrees
    and the deviation ``s`` of the differences; z is the normal distribution's quantile of the power.

    Args:
        differences: of the seeds so far, two at least.
        fixed: half-width of an error that more seeds do not lessen, such as that of the prices.

    Returns:
        The number; None if it is more than 200, or if no number would do.
    """
    mean, deviation = fmean(differences), stdev(differences)
    z = NormalDist().inv_cdf(POWER)
    for seeds in range(2, MOST_SEEDS + 1):
        error = deviation / math.sqrt(seeds)
        if abs(mean) > math.hypot(t_quantile((1 + LEVEL) / 2, seeds - 1) * error, fixed) + z * error:
            return seeds
    return None


def unlike(results: dict[str, Any]) -> list[dict[str, str]]:
    """What sets recipes and controls apart from the baseline, beside their techniques: a row for each arm and thing.

    The rehearsals' own look at the model, the optimizer, the batch and the rate is held against the baseline's, and what the
    configs say is added.

    Returns:
        Rows with ``arm``, ``what``, ``baseline`` and ``own``, as text.
    """
    arms = results["plan"]["arms"]
    first = arms[0]
    base = _looks(results, first)
    rows = []
    for arm in arms:
        if arm["kind"] not in ("recipe", "control"):
            continue
        own = _looks(results, arm)
        known = [*base, *(name for name in own if name not in base)] if base and own else []
        for what in known:
            one, other = base.get(what, "–"), own.get(what, "–")
            if "–" in (one, other) and "." not in what:  # only configs tell that there is nothing
                continue
            if one != other and not (what in PEAKS and _near(results, first, arm)[what]):
                rows.append({"arm": arm["name"], "what": what, "baseline": one, "own": other})
    return rows


def _near(results: dict[str, Any], *arms: dict[str, Any]) -> dict[str, bool]:
    """Whether two arms' peaks are as near as rehearsals can tell, which have few steps."""
    one, other = (results["calibration"][arm["name"]]["lr"] for arm in arms)
    rates = sorted((one["peak"], other["peak"]))
    return {PEAKS[0]: rates[1] <= 1.15 * rates[0], PEAKS[1]: abs(one["peak_at"] - other["peak_at"]) < 0.04}


def _looks(results: dict[str, Any], arm: dict[str, Any]) -> dict[str, str]:
    calibration = results["calibration"].get(arm["name"], {})
    if not calibration:
        return {}
    lr, facts = calibration["lr"], calibration.get("facts", {})
    told = {name: _text(value) for name, value in facts.items() if name != "techniques"}
    if "peak" in lr:
        told[PEAKS[0]] = f"{lr['peak']:.3g}"
        told[PEAKS[1]] = f"{lr['peak_at']:.0%} of the budget"
    if not arm["configs"] or not arm["configs"][0].startswith("# "):
        return told
    told = {name: value for name, value in told.items() if not name.startswith("model.")}  # the configs name it, too
    return told | {name: _text(value) for name, value in _settings(arm["configs"]).items()}


def _settings(configs: Sequence[str]) -> dict[str, Any]:
    """What configs say of the model, the data and the trainer but its callbacks, by dotted names."""
    import yaml

    merged = {name: value for text in configs for name, value in flat(yaml.safe_load(text) or {}).items()}
    left_out = ("trainer.callbacks", "trainer.logger", "seed_everything")
    return {name: value for name, value in merged.items() if name not in left_out}


def flat(value: dict[str, Any], name: str = "") -> dict[str, Any]:
    """The entries of nested dicts, by dotted names."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= flat(item, f"{name}{key}.") if isinstance(item, dict) else {f"{name}{key}": item}
    return found


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
