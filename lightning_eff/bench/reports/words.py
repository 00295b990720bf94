"""The bench's verdicts as sentences, and the cells of its tables."""

import math
from collections.abc import Callable
from statistics import fmean
from typing import Any, NamedTuple

from lightning_eff.bench.reports import findings

Form = Callable[[dict[str, Any]], Callable[[float], str]]  #: how to show the three figures of an interval


def number(value: float | None, digits: int = 4) -> str:
    """Format a figure with ``digits`` significant digits, or as a dash for None."""
    if value is None:
        return "–"
    size = abs(value)
    if 10**digits <= size < 1e9:
        text = f"{value:.0f}"
    else:
        text = f"{value:.{digits}g}" if size == 0 or 1e-4 <= size < 10**digits else f"{value:.{digits - 1}e}"
    return text.replace("-", "−")


def spread(mean: float | None, std: float | None) -> str:
    """Format a mean and its standard deviation, which has two significant digits."""
    if mean is None or not std or not 1e-6 < std < 10:
        return number(mean) + ("" if mean is None or std is None else f" ± {number(std, 2)}")
    places = 1 - math.floor(math.log10(std))
    return f"{mean:.{places}f} ± {std:.{places}f}".replace("-", "−")


def ratio(value: float) -> str:
    """Format a ratio with two decimals, or with three digits if it is far from 1."""
    return f"{value:.2f}" if 0.1 <= value < 100 else f"{value:.3g}"


def ratios(interval: dict[str, Any]) -> Callable[[float], str]:
    """Return the format for an interval of ratios. It has more decimals where two would round a bound to 1."""
    close = any(value != 1 and ratio(value) == "1.00" for value in (interval["low"], interval["high"]))
    return (lambda value: f"{value:.4f}") if close and interval["high"] < 10 else ratio


def differences(interval: dict[str, Any]) -> Callable[[float], str]:
    """Return the format for an interval of differences: signed, with decimals that fit its width and show each bound's sign."""
    width = interval["high"] - interval["low"]
    places = 2 - math.ceil(math.log10(width)) if width > 0 else -1
    while 0 <= places < 8 and any(value and round(value, places) == 0 for value in (interval["low"], interval["high"])):
        places += 1
    if not 0 <= places <= 8:
        return lambda value: ("+" if value > 0 else "") + number(value, 3)
    return lambda value: f"{value:+.{places}f}".replace("-", "−")


def amount(size: float) -> str:
    """Format a number of bytes in GiB, or in MiB below one GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def sentence(plan: dict[str, Any], arm: dict[str, Any], summary: dict[str, dict[str, Any]], sign: int) -> str:
    """Return the verdict on one arm with its figures, in a few sentences.

    Args:
        plan: the bench's plan.
        arm: the arm's entry in the plan.
        summary: the summaries of all arms by name; their own sentences are not read.
        sign: -1 if lower is better, 1 if higher is.
    """
    own = summary[arm["name"]]
    parts = [_main(plan, arm, own)]
    if own["failed"] and own["verdict"] != "failed":
        failed = ", ".join(f"seed {failure['seed']} {failure['status']}" for failure in own["failed"])
        parts.append(f"Failed runs do not count: {len(own['failed'])} of {own['runs']} ({failed}).")
    if own["verdict"] == "faster":
        parts += [_control(control, found, summary, sign) for control, found in own["better_than_control"].items()]
    if own["equivalent_seconds"] is not None:
        parts.append(
            f"The baseline needs {number(own['equivalent_seconds'], 3)} s, fully decayed, for the same {plan['target']}."
        )
    elif own["equivalent_bound"] is not None:
        parts.append(
            f"The baseline needs a budget {own['equivalent_bound']} for the same {plan['target']}, which the ladder does not"
            " cover."
        )
    if own["verdict"] == "no measurable difference" and own["speedup_from"] == "metric":
        needed = own["seeds_needed"]
        parts.append(
            f"Even {findings.MOST_SEEDS} seeds would not show a difference of this size."
            if needed is None
            else f"If a difference of this size is real, {needed} seeds would show it."
        )
    if own["caused_share"] > 0.005:
        parts.append(
            f"It spent {own['caused_share']:.1%} of its budget on the first steps of kinds that the baseline does not have, as"
            " after growth or recompilation."
        )
    gap = own["price_gap"]
    if gap is not None and not 1 / findings.HOLDS <= gap <= findings.HOLDS:
        parts.append(
            f"Warning: while the machine was idle, a second of its budget took {ratio(gap)} times as much wall-clock time as a"
            f" second of the baseline's. Its step costs are therefore too {'low' if gap > 1 else 'high'}."
        )
    return " ".join(parts)


def _main(plan: dict[str, Any], arm: dict[str, Any], own: dict[str, Any]) -> str:
    """Return the verdict with its figures."""
    name, target, verdict = arm["name"], plan["target"], own["verdict"]
    final = own["final"]
    if verdict == "failed":
        first = own["failed"][0]
        why = f": {first['error']}" if first["error"] else "."
        return f"{name} failed on every seed. Seed {first['seed']} {first['status']}{why}".rstrip(".") + "."
    seeds = len(final["values"])
    ends = f"ends at {target} {spread(final['mean'], final['std'])}"
    over = f"over {seeds} seed{'s' if seeds != 1 else ''}"
    if not own["runs"]:
        return f"{name} has no run yet."
    if arm["kind"] == "baseline":
        called = name if name == "baseline" else f"{name}, the baseline,"
        return f"{called} {ends} {over}."
    if arm["kind"] == "ladder":
        budget = arm["factor"] * plan["budget"]["seconds"]
        return f"{name}, the baseline at {number(budget, 3)} s, {ends} {over}."
    if verdict == "no verdict":
        return f"{name}: no verdict, because {_why_none(own)}. It {ends}."
    speed, by = own["speedup"], own["difference"]
    if own["speedup_from"] == "throughput":
        said = f"{name}: no measurable difference" if verdict == "no measurable difference" else f"{name} is {verdict}"
        return (
            f"{said}: it trains bit for bit like the baseline, at {_times(speed)} its speed ({_range(speed, ratios)},"
            f" {speed['n']} rehearsal rounds)."
        )
    figures = (
        f"{_times(speed)} the baseline's speed ({_range(speed, ratios)}, {speed['n']} seeds), with"
        f" {differences(by)(by['estimate'])} in {target} ({_range(by, differences)})"
    )
    if verdict == "no measurable difference":
        inside = f"The speed-up's interval includes 1 and the final {target}'s includes 0"
        return f"{name}: no measurable difference. {inside}: {figures}."
    if verdict == "undecided":
        return f"{name} is undecided: {_why_undecided(target, own)}. It reaches {figures}."
    return f"{name} is {verdict}: {figures}."


def _why_none(own: dict[str, Any]) -> str:
    """Say why an arm has no verdict."""
    if own.get("repeated"):
        return "several seeds gave identical runs, loss by loss. This happens where a module or its data set a seed themselves"
    if own["speedup_from"] == "throughput":
        return "its speed was measured in fewer than two rehearsal rounds"
    return "fewer than two seeds finished both in it and in the baseline"


def _why_undecided(target: str, own: dict[str, Any]) -> str:
    """Say which interval keeps an arm undecided, and how many seeds would decide it."""
    speed, by = own["speedup"], own["difference"]
    fast, better = (not speed["low"] <= 1 <= speed["high"]), (not by["low"] <= 0 <= by["high"])
    if fast and better:
        return (
            f"the intervals of the speed-up and of the final {target} both exclude no difference, but in opposite directions."
            " More seeds would not decide it"
        )
    of_speed, of_metric = "the speed-up's interval", f"the final {target}'s interval"
    why = (
        f"{of_speed} excludes 1, but {of_metric} includes 0"
        if fast
        else f"{of_metric} excludes 0, but {of_speed} includes 1"
    )
    needed = own["seeds_needed"]
    return f"{why}; " + (
        f"even {findings.MOST_SEEDS} seeds would not decide it" if needed is None else f"{needed} seeds would decide it"
    )


def _control(name: str, found: dict[str, Any] | None, summary: dict[str, dict[str, Any]], sign: int) -> str:
    """Say whether the recipe beats its control."""
    if found is None:
        return f"Its control, {name}, cannot be compared: fewer than two seeds finished in both."
    gap = f"{differences(found)(found['estimate'])} between them ({_range(found, differences)})"
    shown = found["low"] > 0 or found["high"] < 0
    if shown and sign * found["estimate"] > 0:
        return f"It beats its control, {name}: {gap}."
    if shown:
        return f"But its control, {name}, is better: {gap}."
    if summary[name]["verdict"] == "faster":
        return f"But its control, {name}, is faster too, with no measurable difference between them: {gap}."
    return f"But no measurable difference separates it from its control, {name}: {gap}."


def _times(interval: dict[str, Any]) -> str:
    return f"{ratios(interval)(interval['estimate'])} times"


def _range(interval: dict[str, Any], form: Form) -> str:
    show = form(interval)
    return f"95 % interval {show(interval['low'])} to {show(interval['high'])}"


class Column(NamedTuple):
    """A column of a table: its key in the rows, and its heading."""

    key: str
    head: str


APART = "Other differences from the baseline"  #: the heading of findings.unlike
UNLIKE = [Column("what", "what"), Column("baseline", "baseline"), Column("own", "its own")]  #: its columns


def cells(results: dict[str, Any], summary: dict[str, dict[str, Any]]) -> tuple[list[Column], list[dict[str, str]]]:
    """Return the main table's columns, without empty ones, and a row of texts for each arm."""
    plan = results["plan"]
    columns = [
        Column("verdict", "verdict"),
        Column("final", f"final {plan['target']}"),
        Column("difference", "difference [95 %]"),
        Column("speedup", "speed-up [95 %]"),
        Column("worth", "ladder worth"),
        Column("throughput", "samples/s ratio"),
        Column("time", "time to target"),
        Column("memory", "peak memory"),
        Column("extra", "extra passes"),
        Column("energy", "energy"),
    ]
    rows = [{"arm": arm["name"], **_cells(results, arm, summary[arm["name"]])} for arm in plan["arms"]]
    optional = ("worth", "energy")
    return [c for c in columns if c.key not in optional or any(row[c.key] != "–" for row in rows)], rows


def _cells(results: dict[str, Any], arm: dict[str, Any], own: dict[str, Any]) -> dict[str, str]:
    runs = finished_runs(results, arm["name"], own)
    final, reached = own["final"], [seconds for seconds in own["time_to_target"]["seconds"] if seconds is not None]
    compared = arm["kind"] in ("recipe", "control")
    time = "–"
    if reached and arm["kind"] != "ladder":
        time = f"{number(fmean(reached), 3)} s" + (
            f" ({len(reached)} of {len(runs)})" if len(reached) < len(runs) else ""
        )
    elif compared and runs:
        time = "not reached"
    joules = [run["energy_joules"] for run in runs if run["energy_joules"] is not None]
    peak = f"{amount(fmean(run['peak_memory_bytes'] for run in runs))}" if runs else "–"
    worth = (
        f"{number(own['equivalent_seconds'], 3)} s"
        if own["equivalent_seconds"] is not None
        else own["equivalent_bound"]
    )
    return {
        "final": spread(final["mean"], final["std"]),
        "difference": bracket(own["difference"], differences),
        "speedup": bracket(own["speedup"], ratios),
        "throughput": ratio(own["throughput"]["estimate"]) if own["throughput"] else "–",
        "time": time,
        "worth": worth or "–",
        "memory": peak + (f" (×{ratio(own['memory']['estimate'])})" if own["memory"] else ""),
        "extra": f"{100 * own['extra_share']:.0f} %" if runs else "–",
        "energy": f"{number(fmean(joules) / 1000, 3)} kJ" if joules else "–",
        "verdict": own["verdict"] if compared or own["verdict"] == "failed" else arm["kind"],
    }


def bracket(interval: dict[str, Any] | None, form: Form) -> str:
    """Format an interval as ``estimate [low, high]``, or None as a dash."""
    if interval is None:
        return "–"
    show = form(interval)
    return f"{show(interval['estimate'])} [{show(interval['low'])}, {show(interval['high'])}]"


#: The phases of a run's wall-clock time: the key, the heading, and the seconds of a run.
PHASES: tuple[tuple[str, str, Callable[[dict[str, Any]], float]], ...] = (
    (
        "training",
        "training",
        lambda run: max(0.0, run["wall_seconds"] - run["extra_seconds"] - run.get("caused_seconds", 0.0)),
    ),
    ("extra", "extra passes", lambda run: run["extra_seconds"]),
    ("caused", "own first steps", lambda run: run.get("caused_seconds", 0.0)),
    ("setup", "set-up", lambda run: run["setup_seconds"]),
    ("warmup", "compilation", lambda run: run["warmup_seconds"]),
    ("validation", "validation", lambda run: run["validation_seconds"]),
)


def times(results: dict[str, Any], summary: dict[str, dict[str, Any]]) -> tuple[list[Column], list[dict[str, str]]]:
    """Return columns and rows of the mean seconds of a run: on the budget's clock, in wall-clock time and by phase."""
    clock = results["plan"]["budget"]["clock"]
    heads = [Column("seconds", f"{clock} s"), Column("wall", "wall-clock s")]
    heads += [Column(key, f"{head} s") for key, head, _ in PHASES if key != "training"]
    heads += [Column("samples", "samples/s"), Column("tokens", "tokens/s")]
    rows = []
    for arm in results["plan"]["arms"]:
        own = summary[arm["name"]]
        runs = finished_runs(results, arm["name"], own)
        row = {key: number(fmean(map(of, runs)), 3) if runs else "–" for key, _, of in PHASES if key != "training"}
        row["seconds"] = number(fmean(run["seconds"] for run in runs), 3) if runs else "–"
        row["wall"] = number(fmean(run["wall_seconds"] for run in runs), 3) if runs else "–"
        row |= {"samples": number(own["samples_per_second"]), "tokens": number(own["tokens_per_second"])}
        rows.append({"arm": arm["name"], **row})
    return heads, rows


def finished_runs(results: dict[str, Any], name: str, own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs of an arm that its summary counts."""
    kept = own["final"]["values"]
    return [run for run in results["runs"] if run["arm"] == name and str(run["seed"]) in kept]


def plan_line(results: dict[str, Any]) -> str:
    """Describe the plan in a line."""
    plan = results["plan"]
    budget, seeds = plan["budget"], ", ".join(map(str, plan["seeds"]))
    better = "lower" if plan["mode"] == "min" else "higher"
    schedule = "each arm's own schedule" if plan["schedule"] == "own" else f"{plan['schedule']} decay in every arm"
    clock = "reference-system time" if budget["clock"] == "reference" else "wall-clock time"
    return (
        f"{number(budget['seconds'])} s of training per run ({clock}); {plan['target']}, {better} is better; seeds {seeds};"
        f" {plan['threads']} thread{'s' if plan['threads'] != 1 else ''}; {schedule}"
    )


def machine_line(results: dict[str, Any]) -> str:
    """Describe the machine and its software versions in a line."""
    machine = results["machine"]
    parts = [f"{machine['cpu']}, {machine['cores']} cores, {amount(machine['memory_bytes'])}"]
    if machine["gpu"]:
        parts.append(f"{machine['gpu']}, driver {machine['driver'] or 'not known'}")
    parts.append(machine["os"])
    parts.append(f"Python {machine['python']}, torch {machine['torch']}, Lightning {machine['lightning']}")
    git = machine["git"]
    revision = f" at {git['revision'][:10]}{' with changes' if git['dirty'] else ''}" if git else ""
    return "; ".join(parts) + f", lightning_eff {machine['lightning_eff']}{revision}"


def failures(summary: dict[str, dict[str, Any]]) -> list[str]:
    """List the failed runs, one line each."""
    return [
        f"{name}, seed {failure['seed']}: {failure['status']}" + (f": {failure['error']}" if failure["error"] else "")
        for name, own in summary.items()
        for failure in own["failed"]
    ]
