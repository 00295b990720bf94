"""``docs/peers.md`` from the committed results: ``python -m benchmarks.peers page``."""

import json
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "peers.json"
PAGE = ROOT / "docs" / "peers.md"
MEBI = 2**20
Row = dict[str, Any]
HEADINGS = [
    *("case", "peer", "time, ours / peer", "goal", "ms per call, ours / peer"),
    *("transient MiB, ours / peer", "kept MiB, ours / peer", "verdict"),
]
__all__ = ["growing", "page", "table", "verdict", "write"]


def verdict(row: Row) -> str:
    """The row in plain words: time, then memory, then goals.

    A difference in time counts if the interval excludes 1, one in transient memory from 10 % and 1 MiB.
    """
    if problem := row.get("missing"):
        return f"not measured: {problem}"
    if problem := row.get("error"):
        return f"failed: {problem}"
    low, high = row["interval"]
    change = abs(row["ratio"] - 1)
    said = ["no measurable difference in time"]
    if low > 1 or high < 1:
        said = [f"{change:.0%} {'slower' if low > 1 else 'faster'}" if change >= 0.005 else "as fast"]
    ours, peer = row["ours_transient_bytes"], row["peer_transient_bytes"]
    if abs(ours - peer) > max(0.1 * min(ours, peer), MEBI):
        said.append(f"{abs(ours - peer) / MEBI:.1f} MiB {'more' if ours > peer else 'less'} memory")
    goals = (("time", row["goal"], row["ratio"], low), ("memory", row["transient_goal_mib"], ours / MEBI, ours / MEBI))
    for name, goal, value, least in goals:
        if goal is not None and value <= goal:
            said.append(f"meets the {name} goal")
        elif goal is not None:
            said.append(f"misses the {name} goal" + (" by less than the spread" if least <= goal else ""))
    return "; ".join(said)


def cells(row: Row) -> list[str]:
    """The row's cells."""
    peer = f"{row['peer']} ({row['package']} {row['version']})" if row["version"] else row["peer"]
    if "missing" in row or "error" in row:
        return [row["name"], peer, "–", _goal(row), "–", "–", "–", verdict(row)]
    low, high = row["interval"]
    return [
        row["name"],
        peer,
        f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})",
        _goal(row),
        f"{_short(row['ours_ms'][1])} / {_short(row['peer_ms'][1])}",
        _pair(row, "transient"),
        _pair(row, "state"),
        verdict(row),
    ]


def _goal(row: Row) -> str:
    time, memory = row["goal"], row["transient_goal_mib"]
    goals = [f"≤ {time:g}"] if time is not None else []
    goals += [f"≤ {memory:g} MiB"] if memory is not None else []
    return ", ".join(goals) or "–"


def _pair(row: Row, kind: str) -> str:
    ours, peer = (row[f"{name}_{kind}_bytes"] / MEBI for name in ("ours", "peer"))
    return f"{_short(ours)} / {_short(peer)}"


def _short(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(rows: list[Row]) -> str:
    """A markdown table of some rows."""
    return _markdown(HEADINGS, [cells(row) for row in rows])


def _markdown(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def figures(rows: list[Row]) -> str:
    """The further figures of the rows that have some."""
    lines = [[row["name"], name, f"{value:.4g}"] for row in rows for name, value in row.get("figures", {}).items()]
    return _markdown(["case", "figure", "value"], lines) if lines else ""


def growing(series: list[Row]) -> str:
    """A table for each axis along which costs grow."""
    made = []
    for axis in dict.fromkeys(one["axis"] for one in series):
        chosen = [one for one in series if one["axis"] == axis]
        sizes = sorted({point["size"] for one in chosen for point in one["points"]})
        rows = []
        for one in chosen:
            of = {point["size"]: point for point in one["points"]}
            times = [_short(of[size]["ms"]) if size in of else "–" for size in sizes]
            slope = "–" if one["exponent"] is None else f"{one['exponent']:.2f}"
            rows.append([one["name"], *times, slope, one.get("error", "–")])
        rows = [row[:-1] if all(r[-1] == "–" for r in rows) else row for row in rows]
        failed = ["failure"] if len(rows[0]) > len(sizes) + 2 else []
        headings = [f"ms per step, by {axis}", *(f"{size:,}" for size in sizes), "exponent", *failed]
        made.append(_markdown(headings, rows))
    return "\n\n".join(made)


def page(results: dict[str, Any]) -> str:
    """The whole text."""
    rows, machine = results["rows"], results["machine"]
    before, after = (load[0] for load in results["load"])
    families = dict.fromkeys(row["family"] for row in rows)
    head = (Path(__file__).with_name("page.md")).read_text().rstrip()
    text = (
        f"The results are from {machine['cpu']} ({machine['cores']} cores, of which one was used), torch {machine['torch']},"
        f" Lightning {machine['lightning']}, Python {machine['python']}. The machine's load was {before:.1f} at the start and"
        f" {after:.1f} at the end. The run took {results['seconds'] / 60:.0f} minutes of processor time"
        f" (`benchmarks/results/{RESULTS.name}`)."
    )
    if not results["complete"]:
        text += " The run was stopped before its end, so some cases are missing."
    parts = [head, *_wrapped(text), "## Summary", *_summary(rows)]
    for family in families:
        chosen = [row for row in rows if row["family"] == family]
        parts += [f"## {family.replace('_', ' ').capitalize()}", table(chosen)]
        parts += [text] if (text := figures(chosen)) else []
    if results["growth"]:
        told = (
            "Cost per step at several sizes. The exponent is the slope between the two largest sizes: with 1, twice the size"
            " takes twice the time. The cost of a callback is the difference between a fit with it and a fit without it."
        )
        parts += ["## How costs grow", *_wrapped(told), growing(results["growth"])]
    return "\n\n".join(parts) + "\n"


def _wrapped(text: str) -> list[str]:
    return ["\n".join(textwrap.wrap(text, 128))]


def _summary(rows: list[Row]) -> list[str]:
    done = [row for row in rows if "ratio" in row]
    slower = [row for row in done if row["interval"][0] > 1]
    faster = [row for row in done if row["interval"][1] < 1]
    goals = [row for row in done if row["goal"] is not None or row["transient_goal_mib"] is not None]
    missed = [row for row in goals if "misses" in verdict(row)]
    absent = [row for row in rows if "missing" in row]
    failed = [row for row in rows if "error" in row]
    lines = [
        f"- {len(done)} cases were measured. Ours is faster than the peer in {len(faster)}, slower in {len(slower)}, and not"
        f" measurably different in {len(done) - len(faster) - len(slower)}.",
        f"- {len(goals)} cases have a goal, and {len(goals) - len(missed)} meet it.",
    ]
    if absent:
        lines.append(f"- Not measured, because the peer is not installed: {', '.join(row['name'] for row in absent)}.")
    if failed:
        lines.append(f"- Failed: {', '.join(row['name'] for row in failed)}.")
    return ["\n".join("\n  ".join(textwrap.wrap(line, 126)) for line in lines)]


def write() -> None:
    """Write the page."""
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
