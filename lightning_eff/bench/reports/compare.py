"""Two results of the bench side by side: what each found of the arms they share, and what sets them apart."""

import textwrap
from typing import Any

from lightning_eff.bench.reports import words
from lightning_eff.bench.reports.report import NARROWEST, WIDEST, grid
from lightning_eff.bench.reports.statistics import summarize
from lightning_eff.bench.results import validate


def compare(a: dict[str, Any], b: dict[str, Any], width: int = 100) -> str:
    """Two results side by side, for a terminal: warnings first, then the arms that both have, then what differs.

    Args:
        a: results of the bench's schema.
        b: others, of the same target and mode.
        width: columns of the terminal; 80 to 160 are used.

    Raises:
        ValueError: the two cannot be compared: an unknown schema, another target or another mode.
    """
    for name, results in (("A", a), ("B", b)):
        try:
            validate(results)
        except ValueError as error:
            raise ValueError(f"Results {name} cannot be read: {error}") from None
    for field, advice in (("target", "the same metric"), ("mode", "the same direction of it")):
        if a["plan"][field] != b["plan"][field]:
            raise ValueError(
                f"These results cannot be compared: A's {field} is {a['plan'][field]!r}, B's is {b['plan'][field]!r}. "
                f"Run both benches with {advice}."
            )
    width = min(max(width, NARROWEST), WIDEST)
    parts = [f"{name}: {r['title']} ({r['created']})" for name, r in (("A", a), ("B", b))] + [""]
    if warned := warnings(a, b):
        parts += [*(_wrap(line, width, "! ") for line in warned), ""]
    shared = [arm["name"] for arm in a["plan"]["arms"] if arm["name"] in _arms(b)]
    if shared:
        parts += [grid(*_cells(a, b, shared), width), ""]
    else:
        parts += ["No arm has the same name in both.", ""]
    for name, own, other in (("A", a, b), ("B", b, a)):
        if alone := [arm for arm in _arms(own) if arm not in _arms(other)]:
            parts.append(_wrap(f"Only in {name}: {', '.join(alone)}.", width, ""))
    told = differences(a, b)
    parts += ["What differs"] if told else ["Plan, configs, machine and versions are the same."]
    parts += [_wrap(line, width, "- ") for line in told]
    return "\n".join(parts) + "\n"


def warnings(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """What keeps figures of the two from being held against each other, worst first.

    Args:
        a: results of the bench's schema.
        b: others, of the same target and mode.
    """
    one, two = a["plan"]["budget"], b["plan"]["budget"]
    warned = []
    if one["seconds"] != two["seconds"]:
        warned.append(
            f"The budgets differ ({one['seconds']:g} s and {two['seconds']:g} s): final metrics do not compare, and a "
            "speed-up holds for its own budget."
        )
    if one["clock"] != two["clock"]:
        warned.append(
            f"The clocks differ ({one['clock']} and {two['clock']}): the same number of seconds is not the same budget, so "
            "final metrics do not compare."
        )
    if _machine(a) != _machine(b):
        if one["clock"] == two["clock"] == "reference":
            warned.append(
                "The machines differ. That is no obstacle to final metrics and speed-ups, since both budgets are in "
                "reference-system seconds; throughput ratios, which are measured, and wall-clock times do not compare."
            )
        else:
            warned.append(
                "The machines differ, and wall-clock seconds of different machines are not comparable: final metrics and "
                "speed-ups do not compare. Bench both on the reference clock for that."
            )
    if a["plan"]["seeds"] != b["plan"]["seeds"]:
        warned.append("The seeds differ: final metrics are not of the same runs, and means over few seeds wander.")
    first, second = a["plan"]["arms"][0], b["plan"]["arms"][0]
    if first["configs"] != second["configs"] or first["name"] != second["name"]:
        warned.append(
            f"The baselines differ ({first['name']} and {second['name']}, or their configs): speed-ups are over different ones."
        )
    warned += [f"{name} is not finished." for name, results in (("A", a), ("B", b)) if not results["finished"]]
    return warned


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """One line for each entry of the plan, of a shared arm and of the machine that is not the same in both.

    Args:
        a: results of the bench's schema.
        b: others.
    """
    lines = []
    for head, one, two in (
        ("plan", _flat(a["plan"], "arms"), _flat(b["plan"], "arms")),
        ("machine", _flat(a["machine"]), _flat(b["machine"])),
        *(
            (f"arm {name}", _flat(arm, "name"), _flat(_arms(b)[name], "name"))
            for name, arm in _arms(a).items()
            if name in _arms(b)
        ),
    ):
        for key in [*one, *(key for key in two if key not in one)]:
            left, right = one.get(key, "nothing"), two.get(key, "nothing")
            if left != right:
                lines.append(f"{head}, {key}: {left} | {right}")
    return lines


def _cells(a: dict[str, Any], b: dict[str, Any], shared: list[str]) -> tuple[list[words.Column], list[dict[str, str]]]:
    """The figures of each shared arm, A's beside B's."""
    keys = {"verdict": "verdict", "final": a["plan"]["target"], "speedup": "speed-up", "throughput": "samples/s ratio"}
    tables = {name: {row["arm"]: row for row in words.cells(r, summarize(r))[1]} for name, r in (("A", a), ("B", b))}
    columns = [words.Column(f"{key} {name}", f"{head} {name}") for key, head in keys.items() for name in tables]
    rows = [
        {"arm": arm, **{f"{key} {name}": table[arm][key] for key in keys for name, table in tables.items()}}
        for arm in shared
    ]
    return columns, rows


def _arms(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {arm["name"]: arm for arm in results["plan"]["arms"]}


def _machine(results: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a machine another one: the hardware and the threads in use, not the versions."""
    machine = results["machine"]
    return tuple(machine[key] for key in ("cpu", "cores", "gpu", "threads"))


def _flat(value: dict[str, Any], *left_out: str) -> dict[str, str]:
    """Nested entries by dotted names, as text."""
    flat: dict[str, str] = {}
    for key, item in value.items():
        if key in left_out:
            continue
        if isinstance(item, dict):
            flat |= {f"{key}.{inner}": text for inner, text in _flat(item).items()}
        else:
            flat[key] = ", ".join(map(str, item)) if isinstance(item, list | tuple) else str(item)
    return flat


def _wrap(text: str, width: int, bullet: str) -> str:
    clean = " ".join(text.split())
    return textwrap.fill(clean, width, initial_indent=bullet, subsequent_indent=" " * len(bullet))
