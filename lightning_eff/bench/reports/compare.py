"""Two results of the bench side by side: what each found of the arms they share, and what sets them apart."""

from typing import Any

from lightning_eff.bench.reports import words
from lightning_eff.bench.reports.findings import flat
from lightning_eff.bench.reports.report import fitting, grid, wrapped
from lightning_eff.bench.reports.statistics import summarize
from lightning_eff.bench.results import validate
from lightning_eff.monitor.machine import SAME_MACHINE


def compare(a: dict[str, Any], b: dict[str, Any], width: int = 100) -> str:
    """Two results side by side, for a terminal: warnings first, then the arms that both have, then what differs.

    Args:
        a: results of the bench's schema.
        b: others, of the same target and mode.
        width: columns of the terminal; 80 to 160 are used.

    Raises:
        ValueError: the two cannot be compared: an unknown schema, another target or another mode.
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
    told = differences(a, b)
    parts += ["What differs"] if told else ["Plan, configs, machine and versions are the same."]
    return "\n".join([*parts, *(wrapped(line, width, "- ") for line in told)]) + "\n"


def warnings(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """What keeps figures of the two from being held against each other, worst first."""
    one, two = a["plan"]["budget"], b["plan"]["budget"]
    first, second = a["plan"]["arms"][0], b["plan"]["arms"][0]
    others = any(a["machine"][name] != b["machine"][name] for name in SAME_MACHINE)
    priced = one["clock"] == two["clock"] == "reference"
    told = [
        (
            one["seconds"] != two["seconds"],
            f"The budgets differ ({one['seconds']:g} s and {two['seconds']:g} s): final metrics do not compare, and a speed-up"
            " holds for its own budget.",
        ),
        (
            one["clock"] != two["clock"],
            f"The clocks differ ({one['clock']} and {two['clock']}): the same number of seconds is not the same budget, so"
            " final metrics do not compare.",
        ),
        (
            others and priced,
            "The machines differ. That is no obstacle to final metrics and speed-ups, since both budgets are in"
            " reference-system seconds; throughput ratios, which are measured, and wall-clock times do not compare.",
        ),
        (
            others and not priced,
            "The machines differ, and wall-clock seconds of different machines are not comparable: final metrics and speed-ups"
            " do not compare. Bench both on the reference clock for that.",
        ),
        (
            a["plan"]["seeds"] != b["plan"]["seeds"],
            "The seeds differ: final metrics are not of the same runs, and means over few seeds wander.",
        ),
        (
            (first["name"], first["configs"]) != (second["name"], second["configs"]),
            f"The baselines differ ({first['name']} and {second['name']}, or their configs): speed-ups are over different"
            " ones.",
        ),
        (not a["finished"], "A is not finished."),
        (not b["finished"], "B is not finished."),
    ]
    return [line for holds, line in told if holds]


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """One line for each entry of the plan, of a shared arm and of the machine that is not the same in both."""
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
                told = [", ".join(map(str, one)) if isinstance(one, list) else str(one) for one in pair]
                lines.append(f"{head}, {key}: {told[0]} | {told[1]}")
    return lines


def _cells(both: dict[str, dict[str, Any]]) -> tuple[list[words.Column], list[dict[str, str]]]:
    """The figures of each shared arm, A's beside B's."""
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
