"""Compare two results of the bench: the figures of their common arms, and the differences between the benches."""

from typing import Any

from lightning_eff.bench.reports import words
from lightning_eff.bench.reports.findings import flat
from lightning_eff.bench.reports.report import fitting, grid, wrapped
from lightning_eff.bench.reports.statistics import summarize
from lightning_eff.bench.results import validate
from lightning_eff.monitor.machine import SAME_MACHINE


def compare(a: dict[str, Any], b: dict[str, Any], width: int = 100) -> str:
    """Format two results side by side for a terminal: warnings, then the common arms, then the differences.

    Args:
        a: results of the bench's schema.
        b: results with the same target and mode.
        width: the terminal's width in characters; 80 to 160 are used.

    Raises:
        ValueError: if the schema is unknown, or the targets or modes differ.
    """
    both, width = {"A": a, "B": b}, fitting(width)
    for name, results in both.items():
        try:
            validate(results)
        except ValueError as error:
            raise ValueError(f"Results {name} cannot be read: {error}") from None
    for field in ("target", "mode"):
        if a["plan"][field] != b["plan"][field]:
            raise ValueError(
                f"These results cannot be compared: A's {field} is {a['plan'][field]!r}, B's is {b['plan'][field]!r}. "
                f"Run both benches with the same {field}."
            )
    parts = [f"{name}: {results['title']} ({results['created']})" for name, results in both.items()]
    parts += ["", *(wrapped(line, width, "! ") for line in warnings(a, b)), "", grid(*_cells(both), width), ""]
    for name, own, other in (("A", _arms(a), _arms(b)), ("B", _arms(b), _arms(a))):
        if alone := ", ".join(arm for arm in own if arm not in other):
            parts.append(wrapped(f"Only in {name}: {alone}.", width))
    found = differences(a, b)
    parts += ["Differences"] if found else ["Plan, configs, machine and versions are the same."]
    return "\n".join([*parts, *(wrapped(line, width, "- ") for line in found)]) + "\n"


def warnings(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return the reasons why figures of the two results cannot be compared, the most important first."""
    one, two = a["plan"]["budget"], b["plan"]["budget"]
    first, second = a["plan"]["arms"][0], b["plan"]["arms"][0]
    others = any(a["machine"][name] != b["machine"][name] for name in SAME_MACHINE)
    priced = one["clock"] == two["clock"] == "reference"
    checks = [
        (
            one["seconds"] != two["seconds"],
            f"The budgets differ ({one['seconds']:g} s and {two['seconds']:g} s). Final metrics cannot be compared, and a"
            " speed-up holds only for its budget.",
        ),
        (
            one["clock"] != two["clock"],
            f"The clocks differ ({one['clock']} and {two['clock']}). The same number of seconds is not the same budget, so"
            " final metrics cannot be compared.",
        ),
        (
            others and priced,
            "The machines differ. Final metrics and speed-ups can still be compared, because both budgets are in"
            " reference-system seconds. Measured throughput ratios and wall-clock times cannot.",
        ),
        (
            others and not priced,
            "The machines differ, so final metrics and speed-ups cannot be compared: a wall-clock second is another budget on"
            " another machine. Run both benches in reference-system time, with --budget 120rs.",
        ),
        (
            a["plan"]["seeds"] != b["plan"]["seeds"],
            "The seeds differ. Final metrics belong to different runs, and means over few seeds vary.",
        ),
        (
            (first["name"], first["configs"]) != (second["name"], second["configs"]),
            f"The baselines differ ({first['name']} and {second['name']}, or their configs). Speed-ups are relative to"
            " different baselines.",
        ),
        (not a["finished"], "A is not finished."),
        (not b["finished"], "B is not finished."),
    ]
    return [line for holds, line in checks if holds]


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return one line for each difference in the plan, in a common arm or in the machine."""
    shared = [name for name in _arms(a) if name in _arms(b)]
    lines: list[str] = []
    for head, one, two in (
        ("plan", {**a["plan"], "arms": None}, {**b["plan"], "arms": None}),
        ("machine", a["machine"], b["machine"]),
        *((f"arm {name}", _arms(a)[name], _arms(b)[name]) for name in shared),
    ):
        left, right = flat(one), flat(two)
        for key in dict.fromkeys([*left, *right]):
            pair = left.get(key, "nothing"), right.get(key, "nothing")
            if pair[0] != pair[1]:
                texts = [", ".join(map(str, one)) if isinstance(one, list) else str(one) for one in pair]
                lines.append(f"{head}, {key}: {texts[0]} | {texts[1]}")
    return lines


def _cells(both: dict[str, dict[str, Any]]) -> tuple[list[words.Column], list[dict[str, str]]]:
    """Return the figures of each common arm, A's next to B's."""
    keys = {"verdict": "verdict", "final": both["A"]["plan"]["target"], "speedup": "speed-up"}
    keys["throughput"] = "samples/s ratio"
    tables = {name: {row["arm"]: row for row in words.cells(r, summarize(r))[1]} for name, r in both.items()}
    columns = [words.Column(f"{key} {name}", f"{head} {name}") for key, head in keys.items() for name in both]
    rows = [
        {"arm": arm, **{f"{key} {name}": table[arm][key] for key in keys for name, table in tables.items()}}
        for arm in tables["A"]
        if arm in tables["B"]
    ]
    return columns, rows


def _arms(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {arm["name"]: arm for arm in results["plan"]["arms"]}
