"""The bench's report as one HTML file: no script, and no reference to anything outside it."""

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
  .figures { display: block; columns: 2; column-gap: 8mm; }
  .figures figure { margin-bottom: 6mm; }
  details > summary { list-style: none; }
  details::details-content { content-visibility: visible; display: block; height: auto; }
}
"""

HOW = (
    "Every arm trains for the same budget of training seconds, on the same seeds and the same order of data, in turns with "
    "the others, and its learning rate has decayed fully at the end of it.",
    "On the reference clock each executed step costs the calibrated time of its kind, so that a busy machine does not "
    "matter; the wall-clock is shown beside it. Set-up, validation, and what a first step takes beyond its price (compilation) "
    "are timed apart and do not count, unless the arm causes it: first steps of kinds that the baseline does not make.",
    "Speed-up: the time the baseline took for its final metric, by the time the arm took for it; for an arm that ends worse, "
    "the other way round. It is conservative in both directions, because at the crossing the faster curve's learning rate "
    "has not decayed yet. Arms that train bit for bit as the baseline does are judged by their throughput instead.",
    "Intervals: Student’s t on differences that are paired by seed, 95 %; on the reference clock widened by the uncertainty "
    "of the prices, which is the same in all seeds. Speeds: the same, paired by rounds of rehearsals. “Faster” or “slower” "
    "needs the intervals of the speed-up and of the difference in the metric to exclude none; else no difference is shown, "
    "which is not to say that there is none.",
    "A recipe must beat its control too: the cheap way to the same gain, such as the small model throughout for a model that "
    "grows. What holds here holds for this model, this data, this budget and this machine.",
)

_NOTE = (
    '<p class="dim">Means over seeds. Extra passes are part of the wall-clock; the three after them come on top.</p>'
)


def page(results: dict[str, Any]) -> str:
    """The whole report as HTML text, the same for the same results.

    Args:
        results: of the bench's schema.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    summary = summarize(results)
    drawings = {drawing.name: drawing for drawing in draw(results, summary)}
    lead = figure_html(drawings.pop("speedups"), "lead") if "speedups" in drawings else ""
    curves = "\n".join(map(figure_html, drawings.values()))
    unlike = findings.unlike(results)
    state = f"finished {escape(results['finished'])}" if results["finished"] else "not finished: what there is so far"
    notes = [f"{run['arm']}, seed {run['seed']}: {note}" for run in results["runs"] for note in run["notes"]]
    return document(
        results["title"],
        f'<header>\n<h1>{escape(results["title"])}</h1>\n<p class="dim">Begun {escape(results["created"])}, {state}.\n'
        f"{escape(words.plan_line(results))}.</p>\n</header>",
        _verdicts(results, summary),
        "\n".join(f"<p>{escape(line)}</p>" for line in findings.lines(results, summary)),
        lead,
        section_html("Figures of all arms", table_html(*words.cells(results, summary))),
        section_html("Curves", f'<div class="figures">\n{curves}\n</div>') if drawings else "",
        section_html("Seconds of a run", _NOTE + table_html(*words.times(results, summary))),
        section_html(words.APART, table_html(words.UNLIKE, unlike)) if unlike else "",
        _listed("Failed runs", words.failures(summary)),
        _listed("Notes", notes),
        section_html("How to read it", list_html(HOW, "ol")),
        section_html("Plan and machine", _plan(results)),
    )


def document(title: str, *parts: str) -> str:
    """A page of the report's style with these parts of HTML text; empty ones are left out."""
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>"
    )
    return "\n".join([head, *filter(None, parts), "</main>\n</body>\n</html>\n"])


def section_html(head: str, body: str) -> str:
    """A part of the page under its head."""
    return f"<section>\n<h2>{escape(head)}</h2>\n{body}\n</section>"


def list_html(lines: Iterable[str], tag: str = "ul") -> str:
    """A list of lines of plain text."""
    return "\n".join([f"<{tag}>", *(f"<li>{escape(line)}</li>" for line in lines), f"</{tag}>"])


def _listed(head: str, lines: list[str]) -> str:
    return section_html(head, list_html(lines)) if lines else ""


def _verdicts(results: dict[str, Any], summary: dict[str, dict[str, Any]]) -> str:
    """A sentence an arm, recipes first, controls after, then what they are measured against."""
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
    """A figure with its caption."""
    picture = f"data:image/svg+xml;base64,{b64encode(svg(drawing)).decode()}"
    opening = f'<figure class="{style}">' if style else "<figure>"
    image = f'<img src="{picture}" alt="{escape(drawing.alternative)}">'
    return f"{opening}\n{image}\n<figcaption>{escape(drawing.caption)}</figcaption>\n</figure>"


def table_html(columns: list[words.Column], rows: list[dict[str, str]], first: str = "arm") -> str:
    """A table that narrow screens show as a card a row, each cell under its own head; ``first`` is over the rows' names."""
    heads = "".join(f'<th scope="col">{escape(column.head)}</th>' for column in columns)
    lines = [f'<table>\n<thead><tr><th scope="col">{escape(first)}</th>{heads}</tr></thead>\n<tbody>']
    for row in rows:
        cells = "".join(_cell(column.head, row[column.key]) for column in columns)
        lines.append(f'<tr><th scope="row">{escape(row["arm"])}</th>{cells}</tr>')
    return "\n".join([*lines, "</tbody>\n</table>"])


def _cell(head: str, text: str) -> str:
    """A cell that breaks before a bracket rather than within one; the cards leave out what is not known."""
    kept = escape(text).replace(" ± ", "\u00a0±\u00a0").replace(", ", ",\u00a0")
    style = ' class="none"' if text == "–" else ""
    return f'<td{style} data-head="{escape(head)}">{kept}</td>'


def _plan(results: dict[str, Any]) -> str:
    """The machine in a line, the arms with their configs, and the rest as it is in the file."""
    parts = [f"<p>{escape(words.machine_line(results))}.</p>"]
    for arm in results["plan"]["arms"]:
        of = f" of {arm['of']}" if arm["of"] else ""
        factor = f", {arm['factor']:g} × the budget" if arm["factor"] != 1 else ""
        head = f"{arm['name']} ({arm['kind']}{of}{factor})"
        configs = "\n".join(arm["configs"]) or "built in Python"
        parts.append(
            f"<details>\n<summary>{escape(head)}</summary>\n<p>{escape(arm['description'])}</p>\n"
            f"<pre>{escape(configs)}</pre>\n{_calibration(results['calibration'].get(arm['name']))}</details>"
        )
    plan = {key: value for key, value in results["plan"].items() if key != "arms"}
    for head, value in (("Plan", plan), ("Machine", results["machine"])):
        text = escape(json.dumps(value, ensure_ascii=False, indent=1))
        parts.append(f"<details>\n<summary>{head}, as in the file</summary>\n<pre>{text}</pre>\n</details>")
    return "\n".join(parts)


def _calibration(calibration: dict[str, Any] | None) -> str:
    """The prices of an arm's kinds of steps."""
    if not calibration or not calibration["prices"]:
        return ""
    prices = [
        f"{price['kind']}: {words.number(1000 * price['seconds'], 3)} ms, {100 * price['share']:.0f} % of steps"
        for price in calibration["prices"]
    ]
    same = "bit for bit the baseline's training" if calibration["same_training"] else "a training of its own"
    return f"<p>Laid out for {calibration['steps']} steps; {same}. Prices:</p>\n{list_html(prices)}\n"
