"""An advice as one HTML file, in the style of the bench's report: no script, and nothing from outside it."""

from html import escape

from lightning_eff.advice.engine import Findings
from lightning_eff.advice.reports import pictures
from lightning_eff.advice.reports.recipe import python, recipe
from lightning_eff.advice.reports.table import (
    FAILED,
    PROBLEMS,
    SECOND,
    SUGGESTIONS,
    THIRD,
    code_of,
    failed,
    headline,
    lower_line,
    none_of,
    not_measured,
    ordered,
    row,
    still_open,
    where,
)
from lightning_eff.bench.reports.report_html import document, figure_html, list_html, section_html, table_html
from lightning_eff.bench.reports.words import Column

COLUMNS = (
    ("speed-up", "speed"),
    ("memory", "memory"),
    ("numbers", "numbers"),
    ("costs", "cost"),
    ("verdict", "verdict"),
)


def page(found: Findings) -> str:
    """The page as HTML text.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    gains = found.stack.gains
    view = found.view
    style, tag = (
        ("faster", "recipe found") if gains else ("", "no gain yet" if still_open(found) else "nothing to gain")
    )
    verdict = f'<li class="{style}"><strong class="tag">{tag}</strong> {escape(headline(found))}</li>'
    if lower := lower_line(found):
        verdict += f'\n<li class="faster"><strong class="tag">lower precision</strong> {escape(lower)}</li>'
    figures = "\n".join(figure_html(one) for one in (pictures.time(found), pictures.memory(found)))
    speeds = pictures.speeds(found)
    rows = [row(found, one) for one in ordered(found)]
    columns = [Column(key, head) for head, key in COLUMNS]
    measured = (figure_html(speeds, "lead") if speeds else "") + (table_html(columns, rows, "tried") if rows else "")
    problems = [f"{one.what} {one.fix}" for one in found.problems]
    title = f"Advice for {found.name}"
    return document(
        title,
        f'<header>\n<h1>{escape(title)}</h1>\n<p class="dim">{1000 * view.step_seconds:.3g} ms per batch: '
        f"{escape(where(view.phases))}. Measured in {found.seconds:.0f} s.</p>\n</header>",
        section_html("Advice", f'<ul class="verdicts">\n{verdict}\n</ul>'),
        section_html("Where a step's time and memory go", f'<div class="figures">\n{figures}\n</div>'),
        _recipe(found),
        section_html("What was measured", measured or "<p>No trial was measured.</p>"),
        _listed("In your code", code_of(found)),
        _listed("How the recipe came about", found.stack.tried),
        section_html(SECOND, _suggestions(found)),
        section_html(THIRD, list_html(problems) if problems else _none(found, PROBLEMS, "None found.")),
        _listed(FAILED, not_measured(found)),
        _folded("Failed trials", failed(found)),
        _folded("Not tried, and why", [f"{name}: {why}" for name, why in found.left.items()]),
        _listed("Notes", found.notes),
    )


def _recipe(found: Findings) -> str:
    body = f"<pre>{escape(recipe(found, found.stack, 'recipe.yaml'))}</pre>"
    if code := python(found.stack):
        body += f"\n<p>In Python:</p>\n<pre>{escape(code)}</pre>"
    if found.lower.gains:
        text = recipe(found, found.lower, "recipe-lower-precision.yaml")
        body += f"\n<p>With lower precision, which changes rounding:</p>\n<pre>{escape(text)}</pre>"
    return section_html("The recipe", body)


def _suggestions(found: Findings) -> str:
    if not found.suggestions:
        return _none(found, SUGGESTIONS, "Nothing.")
    items = [
        f"<li><strong>{escape(one.name)}</strong>: {escape(one.reason)} {escape(one.expected)}"
        f"<pre>{escape(one.code)}</pre></li>"
        for one in found.suggestions
    ]
    return "<ul>\n" + "\n".join(items) + "\n</ul>"


def _none(found: Findings, part: str, words: str) -> str:
    return f"<p>{escape(none_of(found, part, words))}</p>"


def _listed(head: str, lines: list[str]) -> str:
    return section_html(head, list_html(lines)) if lines else ""


def _folded(head: str, lines: list[str]) -> str:
    if not lines:
        return ""
    return section_html(head, f"<details>\n<summary>{len(lines)}</summary>\n{list_html(lines)}\n</details>")
