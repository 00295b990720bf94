"""A page for a bench at several budgets: the verdicts at each, and the metric against time."""

from collections.abc import Mapping
from html import escape
from typing import Any

from lightning_eff.bench.reports import findings, words
from lightning_eff.bench.reports.drawing import COLOURS, INK, PAPER, Drawing, label, one, style
from lightning_eff.bench.reports.figures import MARKERS
from lightning_eff.bench.reports.report_html import document, figure_html, section_html, table_html


def columns_and_rows(every: Mapping[str, dict[str, Any]]) -> tuple[list[words.Column], list[dict[str, str]]]:
    """Return a row per arm with its verdict, final metric and speed-up at each budget.

    Args:
        every: the results with their summaries, by budget.
    """
    columns, rows = [], {}
    for budget, results in every.items():
        cells = words.cells(results, results["summary"])[1]
        for key, head in (("verdict", "verdict"), ("final", results["plan"]["target"]), ("speedup", "speed-up [95 %]")):
            columns.append(words.Column(f"{budget} {key}", f"{budget}: {head}"))
            for row in cells:
                rows.setdefault(row["arm"], {"arm": row["arm"]})[f"{budget} {key}"] = row[key]
    filled = [{column.key: "–" for column in columns} | row for row in rows.values()]
    return columns, filled


def front(every: Mapping[str, dict[str, Any]]) -> list[tuple[float, float, str, str]]:
    """Return (seconds, mean final metric, arm, kind) of each arm at each budget, ladder arms included, sorted by seconds."""
    found = []
    for results in every.values():
        for arm in results["plan"]["arms"]:
            final = results["summary"][arm["name"]]["final"]["mean"]
            if final is not None:
                seconds = results["plan"]["budget"]["seconds"] * arm["factor"]
                name = results["plan"]["arms"][0]["name"] if arm["kind"] == "ladder" else arm["name"]
                found.append((seconds, final, name, arm["kind"]))
    return sorted(found)


def drawn(every: Mapping[str, dict[str, Any]]) -> Drawing | None:
    """Draw the final metric against the budget, with a line per arm. Filled marks are not beaten in as little time."""
    points = front(every)
    if not points:
        return None
    plan = next(iter(every.values()))["plan"]
    sign = 1 if plan["mode"] == "min" else -1
    names = list(
        dict.fromkeys(name for _, _, name, _ in sorted(points, key=lambda p: p[3] not in ("baseline", "ladder")))
    )
    with style():
        figure, axes = one(3.4)
        for index, name in enumerate(names):
            own = [(x, y, kind) for x, y, other, kind in points if other == name]
            colour = INK if index == 0 else COLOURS[(index - 1) % len(COLOURS)]
            dash = "dashed" if own[0][2] == "control" else "solid"
            axes.plot([x for x, _, _ in own], [y for _, y, _ in own], color=colour, linestyle=dash, linewidth=1.4)
            for x, y, _ in own:
                best = not any(a <= x and sign * b < sign * y for a, b, _, _ in points)
                marker = MARKERS[index % len(MARKERS)]
                axes.plot([x], [y], marker, color=colour, markerfacecolor=colour if best else PAPER, markersize=6)
            axes.plot([], [], color=colour, linestyle=dash, marker=MARKERS[index % len(MARKERS)], label=label(name, 40))
        axes.set_xscale("log")
        axes.set_xticks(sorted({x for x, *_ in points}), minor=False)
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("budget in seconds (log scale)")
        axes.set_ylabel(label(plan["target"], 30))
        figure.legend(loc="outside upper center", ncols=2 if max(map(len, names)) < 25 else 1)
    said = "; ".join(f"{name} at {words.number(x, 3)} s {words.number(y)}" for x, y, name, _ in points)
    caption = f"{plan['target']} at the end of each budget. Filled marks: no other arm is better in as little time."
    return Drawing("budgets", caption, f"Final metric by budget: {said}.", figure)


def page(every: Mapping[str, dict[str, Any]], drawing: Drawing | None) -> str:
    """Return the page as HTML text.

    Args:
        every: the results with their summaries, by budget. The page links to a folder with that name for each.
        drawing: the result of :func:`drawn`.
    """
    title = next(iter(every.values()))["title"]
    items = []
    for budget, results in every.items():
        said = " ".join([*findings.advice(results, results["summary"]), *findings.lines(results, results["summary"])])
        link = f'<a href="{escape(budget)}/report.html">{escape(budget)}</a>'
        items.append(f"<li>{link}: {escape(words.plan_line(results))}. {escape(said)}</li>")
    return document(
        title,
        f"<h1>{escape(title)}</h1>",
        section_html("What to do at each budget", "<ul>\n" + "\n".join(items) + "\n</ul>"),
        section_html("Arms at each budget", table_html(*columns_and_rows(every))),
        "" if drawing is None else figure_html(drawing, "lead"),
    )
