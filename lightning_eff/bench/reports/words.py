"""What the bench found, in words: one plain sentence or a few an arm, and the cells of the tables."""

import math
from collections.abc import Callable
from statistics import fmean
from typing import Any, NamedTuple

from lightning_eff.bench.reports import findings

Form = Callable[[dict[str, Any]], Callable[[float], str]]  #: how to show the three figures of an interval


def number(value: float | None, digits: int = 4) -> str:
    """A figure with ``digits`` significant digits, or a dash for none."""
    if value is None:
        return "–"
    size = abs(value)
    if 10**digits <= size < 1e9:
        text = f"{value:.0f}"
    else:
        text = f"{value:.{digits}g}" if size == 0 or 1e-4 <= size < 10**digits else f"{value:.{digits - 1}e}"
    return text.replace("-", "−")


def spread(mean: float | None, std: float | None) -> str:
    """A mean and its standard deviation with as many decimals as its two leading digits need."""
    if mean is None or not std or not 1e-6 < std < 10:
        return number(mean) + ("" if mean is None or std is None else f" ± {number(std, 2)}")
    places = 1 - math.floor(math.log10(std))
    return f"{mean:.{places}f} ± {std:.{places}f}".replace("-", "−")


def ratio(value: float) -> str:
    """A ratio with two decimals, or three digits far from 1."""
    return f"{value:.2f}" if 0.1 <= value < 100 else f"{value:.3g}"


def ratios(interval: dict[str, Any]) -> Callable[[float], str]:
    """How to show an interval of ratios: finer where two decimals would hide on which side of 1 a bound lies."""
    close = any(value != 1 and ratio(value) == "1.00" for value in (interval["low"], interval["high"]))
    return (lambda value: f"{value:.4f}") if close and interval["high"] < 10 else ratio


def differences(interval: dict[str, Any]) -> Callable[[float], str]:
    """How to show an interval of differences: signed, with the decimals that its width deserves."""
    width = interval["high"] - interval["low"]
    places = 2 - math.ceil(math.log10(width)) if width > 0 else -1
    if not 0 <= places <= 8:
        return lambda value: ("+" if value > 0 else "") + number(value, 3)
    return lambda value: f"{value:+.{places}f}".replace("-", "−")


def amount(size: float) -> str:
    """A number of bytes, in GiB from one on and in MiB below."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def sentence(plan: dict[str, Any], arm: dict[str, Any], summary: dict[str, dict[str, Any]], sign: int) -> str:
    """What is to be told of one arm.

    Args:
        plan: the bench's plan.
        arm: the arm, as the plan has it.
        summary: of all arms, by name, but for the sentences.
        sign: -1 if lower is better, 1 if higher is.
    """
    own = summary[arm["name"]]
    parts = [_main(plan, arm, own)]
    if own["failed"] and own["verdict"] != "failed":
        told = ", ".join(f"seed {failure['seed']} {failure['status']}" for failure in own["failed"])
        parts.append(f"Failed and left out: {len(own['failed'])} of its {own['runs']} runs ({told}).")
    if own["verdict"] == "faster":
        parts += [_control(control, found, summary, sign) for control, found in own["better_than_control"].items()]
    if own["equivalent_seconds"] is not None:
        parts.append(f"The baseline needs {number(own['equivalent_seconds'], 3)} s, fully decayed, to end as well.")
    elif own["equivalent_bound"] is not None:
        parts.append(f"The baseline budget that ends as well lies {own['equivalent_bound']}, off the ladder.")
    if own["verdict"] == "no difference shown" and own["speedup_from"] == "metric":
        seeds, budget = own["seeds_needed"], plan["seeds"]
        if seeds is not None and seeds > len(budget):
            parts.append(f"If a difference of this size is real, {seeds} seeds in all would show it (power 80 %).")
        elif seeds is None:
            parts.append(f"A difference of this size would not be shown by {findings.MOST_SEEDS} seeds.")
    if own["caused_share"] > 0.005:
        parts.append(
            f"First steps of kinds that only it has (growth, recompilation) took {own['caused_share']:.1%} of its budget."
        )
    gap = own["price_gap"]
    if gap is not None and not 1 / findings.HOLDS <= gap <= findings.HOLDS:
        parts.append(
            f"Beware: on quiet stretches a budget second of it took {ratio(gap)} times the baseline's wall-clock, "
            + ("so the calibrated prices miss costs." if gap > 1 else "so the calibrated prices are too high.")
        )
    return " ".join(parts)


def _main(plan: dict[str, Any], arm: dict[str, Any], own: dict[str, Any]) -> str:
    name, target, verdict = arm["name"], plan["target"], own["verdict"]
    final = own["final"]
    if verdict == "failed":
        first = own["failed"][0]
        why = f": {first['error']}" if first["error"] else "."
        return f"{name} failed on every seed. Seed {first['seed']} {first['status']}{why}".rstrip(".") + "."
    ended = f"{target} {spread(final['mean'], final['std'])}"
    seeds = len(final["values"])
    over = f"over {seeds} seed{'s' if seeds != 1 else ''}"
    if not own["runs"]:
        return f"{name} has no run yet."
    if arm["kind"] == "baseline":
        called = name if name == "baseline" else f"{name}, the baseline,"
        return f"{called} ends at {ended} {over}."
    if arm["kind"] == "ladder":
        budget = arm["factor"] * plan["budget"]["seconds"]
        return f"{name}, the baseline at {number(budget, 3)} s, ends at {ended} {over}."
    speed, by = own["speedup"], own["difference"]
    if verdict == "no verdict":
        pairs = by["n"] if by else "fewer than two"
        if own.get("repeated"):
            return (
                f"{name}: no verdict, since other seeds gave the same runs, loss by loss, as where a module or its data set a"
                f" seed of their own; it ends at {ended}."
            )
        what = (
            "calibration blocks" if own["speedup_from"] == "throughput" else "seeds finished in it and in the baseline"
        )
        return f"{name}: no verdict, from {pairs if what[0] == 's' else 'fewer than two'} {what}; it ends at {ended}."
    if own["speedup_from"] == "throughput":
        start = {
            "faster": f"{name} is faster: it trains bit for bit as the baseline does, at",
            "slower": f"{name} is slower: it trains bit for bit as the baseline does, at",
            "no difference shown": f"{name}: no difference shown. It trains bit for bit as the baseline does, at",
        }[verdict]
        return f"{start} {_times(speed)} its speed ({_range(speed, ratios)}, {speed['n']} blocks)."
    gap = f"{differences(by)(by['estimate'])} in {target} ({_range(by, differences)})"
    figures = f"{_times(speed)} the baseline's speed ({_range(speed, ratios)}, {speed['n']} seeds), {gap}"
    if verdict == "no difference shown":
        return f"{name}: no difference shown. It comes to {figures}."
    return f"{name} is {verdict}: {figures}."


def _control(name: str, found: dict[str, Any] | None, summary: dict[str, dict[str, Any]], sign: int) -> str:
    """Whether the recipe beats its control, said plainly where it does not."""
    if found is None:
        return f"But whether it beats its control, {name}, is not known: fewer than two seeds finished in both."
    gap = f"{differences(found)(found['estimate'])} between them ({_range(found, differences)})"
    shown = found["low"] > 0 or found["high"] < 0
    if shown and sign * found["estimate"] > 0:
        return f"It beats its control, {name}: {gap}."
    if shown:
        return f"But its control, {name}, gains more: {gap}."
    if summary[name]["verdict"] == "faster":
        return f"But its control, {name}, gains as much, as far as these seeds show: {gap}."
    return f"But it is not shown to beat its control, {name}: {gap}."


def _times(interval: dict[str, Any]) -> str:
    return f"{ratios(interval)(interval['estimate'])} times"


def _range(interval: dict[str, Any], form: Form) -> str:
    show = form(interval)
    return f"95 % interval {show(interval['low'])} to {show(interval['high'])}"


class Column(NamedTuple):
    """A column of the table: its key in the rows and its head."""

    key: str
    head: str


APART = "What sets arms apart from the baseline, beside their techniques"  #: the head of findings.unlike
UNLIKE = [Column("what", "what"), Column("baseline", "baseline"), Column("own", "its own")]  #: its columns


def cells(results: dict[str, Any], summary: dict[str, dict[str, Any]]) -> tuple[list[Column], list[dict[str, str]]]:
    """The main table's columns (those about which something is known) and its rows, one an arm, as text."""
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
    """An interval as ``estimate [low, high]``, or a dash."""
    if interval is None:
        return "–"
    show = form(interval)
    return f"{show(interval['estimate'])} [{show(interval['low'])}, {show(interval['high'])}]"


#: Where an arm's wall-clock went: the key, the head, and the figure of a run in seconds.
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
    """Columns and rows of the seconds: on the budget's clock, on the wall-clock, and by phase; means of a run."""
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
    """The runs of an arm that its summary counts."""
    kept = own["final"]["values"]
    return [run for run in results["runs"] if run["arm"] == name and str(run["seed"]) in kept]


def plan_line(results: dict[str, Any]) -> str:
    """The plan in a line."""
    plan = results["plan"]
    budget, seeds = plan["budget"], ", ".join(map(str, plan["seeds"]))
    better = "lower" if plan["mode"] == "min" else "higher"
    schedule = "each arm's own schedule" if plan["schedule"] == "own" else f"{plan['schedule']} decay in every arm"
    return (
        f"{number(budget['seconds'])} s of training a run on the {budget['clock']} clock; {plan['target']}, {better} is "
        f"better; seeds {seeds}; {plan['threads']} thread{'s' if plan['threads'] != 1 else ''}; {schedule}"
    )


def machine_line(results: dict[str, Any]) -> str:
    """The machine and its versions in a line."""
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
    """One line a failed run."""
    return [
        f"{name}, seed {failure['seed']}: {failure['status']}" + (f": {failure['error']}" if failure["error"] else "")
        for name, own in summary.items()
        for failure in own["failed"]
    ]
