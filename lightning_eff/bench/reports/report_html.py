"""The bench's report as one HTML file without scripts or external references."""

import json
from base64 import b64encode
from collections.abc import Iterable
from html import escape
from typing import Any

from lightning_eff.bench.reports import findings, words
from lightning_eff.bench.reports.drawing import Drawing, svg
from lightning_eff.bench.reports.figures import draw
from lightning_eff.bench.reports.statistics import summarize

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --soft: #f3f5f7; --grid: #d5d9de; --dim: #555d66;
  --better: #0072b2; --worse: #d55e00; }
@media (prefers-color-scheme: dark) { @media not print { :root { --ink: #e8eaed; --paper: #15181c; --soft: #1f242a;
  --grid: #3a4149; --dim: #a6aeb7; --better: #4aa8e0; --worse: #ff8a3d; }
  figure img { filter: invert(.91) hue-rotate(180deg); } } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--grid); }
p, li { max-width: 48rem; }
.dim, figcaption { color: var(--dim); font-size: .875rem; }
.verdicts { list-style: none; padding: 0; margin: 1rem 0; }
.verdicts li { margin: .6rem 0; padding: .15rem 0 .15rem .8rem; border-left: 4px solid var(--grid); }
.verdicts .faster { border-color: var(--better); }
.verdicts .slower, .verdicts .failed { border-color: var(--worse); }
.tag { display: inline-block; padding: 0 .45rem; border: 1px solid currentColor; border-radius: .6rem; font-size: .8rem;
  margin-right: .3rem; }
figure { margin: 0; break-inside: avoid; }
figure img { display: block; width: 100%; max-width: 34rem; height: auto; }
.lead { max-width: 34rem; }
.top { display: grid; gap: 0 2rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); align-items: start; }
.figures { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); }
table { border-collapse: collapse; width: 100%; font-size: .8125rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .35rem .5rem; border-bottom: 1px solid var(--grid); }
thead th { background: var(--soft); }
td, th { overflow-wrap: normal; }
tbody th { overflow-wrap: anywhere; min-width: 6.5rem; }
pre { background: var(--soft); padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8125rem; }
summary { cursor: pointer; padding: .3rem 0; }
@media screen and (max-width: 820px) {
  table, tbody, tr, th, td { display: block; }
  thead { display: none; }
  tr { border: 1px solid var(--grid); border-radius: .4rem; margin: 0 0 .8rem; }
  td, tbody th { display: grid; grid-template-columns: 9rem 1fr; border: 0; padding: .2rem .6rem; }
  tbody th { display: block; background: var(--soft); font-size: .9375rem; }
  td.none { display: none; }
  td::before { content: attr(data-head); color: var(--dim); }
}
@media print {
  @page { margin: 12mm; }
  body { padding: 0; font-size: 9.5pt; max-width: none; }
  table { font-size: 7.5pt; }
  th, td { padding: 2pt 3pt; }
  tbody th { min-width: 18mm; }
  tr, li { break-inside: avoid; }
  h2 { break-after: avoid; }
  .lead { max-width: 105mm; }
  .top { display: block; }
  .figures { display: block; columns: 2; column-gap: 8mm; }
  .figures figure { margin-bottom: 6mm; }
  details > summary { list-style: none; }
  details::details-content { content-visibility: visible; display: block; height: auto; }
}
"""

HOW = (
    "Budget: every arm trains for the same number of training seconds, and its learning rate decays fully. All arms of a seed "
    "see the same data in the same order, and they take turns.",
    "Reference-system time: each step costs the calibrated time of its kind, so a busy machine does not matter. Wall-clock "
    "time is also shown. Set-up, validation and compilation do not count. First steps of kinds that only the arm has do count.",
    "Speed-up: how many times as fast the better of arm and baseline reaches the worse one's final metric. Below 1, the arm is "
    "worse. It is conservative, because the learning rate of the better curve has not decayed at that point. Arms that train "
    "bit for bit like the baseline are compared by their speed in the rehearsals.",
    "Intervals: 95 %, Student's t on differences paired by seed, or by rehearsal round for speeds. In reference-system time "
    "they include the uncertainty of the step costs.",
    "Verdicts: an arm is faster or slower if the interval of the speed-up excludes 1 and the interval of the difference in the "
    "metric excludes 0. It is undecided if only one of them does, or if they disagree. If neither does, there is no measurable "
    "difference, which does not prove that there is none.",
    "Seeds that would decide: the total number of seeds that shows a difference of the measured size in 80 % of cases.",
    "Controls: a recipe must also beat its control, a simpler way to the same gain, such as the small model throughout for a "
    "model that grows. All results hold for this model, data, budget and machine.",
)

_NOTE = (
    '<p class="dim">Means over seeds. Wall-clock time includes extra passes and own first steps, but not set-up, compilation'
    " and validation.</p>"
)


def page(results: dict[str, Any]) -> str:
    """Return the whole report as HTML text. The same results give the same text.

    Args:
        results: results of the bench's schema.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
    """
    summary = summarize(results)
    drawings = {drawing.name: drawing for drawing in draw(results, summary)}
    lead = figure_html(drawings.pop("speedups"), "lead") if "speedups" in drawings else ""
    curves = "\n".join(map(figure_html, drawings.values()))
    unlike = findings.unlike(results)
    state = f"finished {escape(results['finished'])}" if results["finished"] else "not finished: results so far"
    return document(
        results["title"],
        f'<header>\n<h1>{escape(results["title"])}</h1>\n<p class="dim">Started {escape(results["created"])}, {state}.\n'
        f"{escape(words.plan_line(results))}.</p>\n</header>",
        '<div class="top">',
        _listed("What to do", findings.advice(results, summary)),
        lead,
        "</div>",
        _verdicts(results, summary),
        "\n".join(f"<p>{escape(line)}</p>" for line in findings.lines(results, summary)),
        section_html("Figures of all arms", table_html(*words.cells(results, summary))),
        section_html("Curves", f'<div class="figures">\n{curves}\n</div>') if drawings else "",
        section_html(words.APART, table_html(words.UNLIKE, unlike)) if unlike else "",
        _listed("Failed runs", words.failures(summary)),
        section_html("Details", _details(results, summary)),
    )


def document(title: str, *parts: str) -> str:
    """Return a page in the report's style with these parts of HTML text, without empty ones."""
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>"
    )
    return "\n".join([head, *filter(None, parts), "</main>\n</body>\n</html>\n"])


def section_html(head: str, body: str) -> str:
    """Return a section of the page under its heading."""
    return f"<section>\n<h2>{escape(head)}</h2>\n{body}\n</section>"


def list_html(lines: Iterable[str], tag: str = "ul") -> str:
    """Return a list of lines of plain text."""
    return "\n".join([f"<{tag}>", *(f"<li>{escape(line)}</li>" for line in lines), f"</{tag}>"])


def _listed(head: str, lines: list[str]) -> str:
    return section_html(head, list_html(lines)) if lines else ""


def _folded(heading: str, body: str) -> str:
    """Return a part of the page that opens with a click."""
    return f"<details>\n<summary>{escape(heading)}</summary>\n{body}\n</details>"


def _details(results: dict[str, Any], summary: dict[str, dict[str, Any]]) -> str:
    """Return the folded parts of the page: explanations, times, notes, plan and machine."""
    notes = [f"{run['arm']}, seed {run['seed']}: {note}" for run in results["runs"] for note in run["notes"]]
    parts = [
        ("How to read this page", list_html(HOW)),
        ("Seconds per run", _NOTE + table_html(*words.times(results, summary))),
        ("Notes on runs", list_html(notes) if notes else ""),
        ("Plan and machine", _plan(results)),
    ]
    return "\n".join(_folded(heading, body) for heading, body in parts if body)


def _verdicts(results: dict[str, Any], summary: dict[str, dict[str, Any]]) -> str:
    """Return the verdict on each arm: recipes first, then controls, the baseline and the ladder."""
    order = ("recipe", "control", "baseline", "ladder")
    arms = sorted(results["plan"]["arms"], key=lambda arm: order.index(arm["kind"]))
    items = []
    for arm in arms:
        own = summary[arm["name"]]
        compared = arm["kind"] in ("recipe", "control") or own["verdict"] == "failed"
        tag = own["verdict"] if compared else arm["kind"]
        kind = "control: " if arm["kind"] == "control" else ""
        style = f' class="{tag}"' if compared and " " not in tag else ""
        items.append(f'<li{style}><strong class="tag">{escape(kind + tag)}</strong> {escape(own["sentence"])}</li>')
    return section_html("Verdicts", '<ul class="verdicts">\n' + "\n".join(items) + "\n</ul>")


def figure_html(drawing: Drawing, style: str = "") -> str:
    """Return a figure with its caption."""
    picture = f"data:image/svg+xml;base64,{b64encode(svg(drawing)).decode()}"
    opening = f'<figure class="{style}">' if style else "<figure>"
    image = f'<img src="{picture}" alt="{escape(drawing.alternative)}">'
    return f"{opening}\n{image}\n<figcaption>{escape(drawing.caption)}</figcaption>\n</figure>"


def table_html(columns: list[words.Column], rows: list[dict[str, str]], first: str = "arm") -> str:
    """Return a table, which narrow screens show as one card per row. ``first`` is the heading of the rows' names."""
    heads = "".join(f'<th scope="col">{escape(column.head)}</th>' for column in columns)
    lines = [f'<table>\n<thead><tr><th scope="col">{escape(first)}</th>{heads}</tr></thead>\n<tbody>']
    for row in rows:
        cells = "".join(_cell(column.head, row[column.key]) for column in columns)
        lines.append(f'<tr><th scope="row">{escape(row["arm"])}</th>{cells}</tr>')
    return "\n".join([*lines, "</tbody>\n</table>"])


def _cell(head: str, text: str) -> str:
    """Return a cell that does not break within brackets. Cards on narrow screens leave out dashes."""
    kept = escape(text).replace(" ± ", "\u00a0±\u00a0").replace(", ", ",\u00a0")
    style = ' class="none"' if text == "–" else ""
    return f'<td{style} data-head="{escape(head)}">{kept}</td>'


def _plan(results: dict[str, Any]) -> str:
    """Return the machine in a line, the arms with their configs, and the plan as in the file."""
    parts = [f"<p>{escape(words.machine_line(results))}.</p>"]
    for arm in results["plan"]["arms"]:
        of = f" of {arm['of']}" if arm["of"] else ""
        factor = f", {arm['factor']:g} × the budget" if arm["factor"] != 1 else ""
        heading = f"{arm['name']} ({arm['kind']}{of}{factor})"
        configs = "\n".join(arm["configs"]) or "built in Python"
        costs = _calibration(results["calibration"].get(arm["name"]))
        parts.append(
            _folded(
                heading,
                f"<p>{escape(arm['description'])}</p>\n<pre>{escape(configs)}</pre>" + ("\n" + costs if costs else ""),
            )
        )
    plan = {key: value for key, value in results["plan"].items() if key != "arms"}
    for heading, value in (("Plan", plan), ("Machine", results["machine"])):
        text = escape(json.dumps(value, ensure_ascii=False, indent=1))
        parts.append(_folded(f"{heading}, as in the file", f"<pre>{text}</pre>"))
    return "\n".join(parts)


def _calibration(calibration: dict[str, Any] | None) -> str:
    """Return the step costs of an arm's kinds of steps."""
    if not calibration or not calibration["prices"]:
        return ""
    prices = [
        f"{price['kind']}: {words.number(1000 * price['seconds'], 3)} ms, {100 * price['share']:.0f} % of steps"
        for price in calibration["prices"]
    ]
    same = " It trains bit for bit like the baseline." if calibration["same_training"] else ""
    return f"<p>The schedule has {calibration['steps']} steps.{same} Step costs:</p>\n{list_html(prices)}\n"
