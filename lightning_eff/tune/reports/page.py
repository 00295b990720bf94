"""The report of a search as one HTML file in the style of the bench's report, without scripts and external files."""

from collections.abc import Mapping
from html import escape
from typing import Any

from lightning_eff.bench.reports import findings
from lightning_eff.bench.reports.drawing import Drawing
from lightning_eff.bench.reports.figures import draw
from lightning_eff.bench.reports.report_html import document, figure_html, list_html, section_html, table_html
from lightning_eff.bench.reports.statistics import summarize
from lightning_eff.tune.reports import cost, pictures, prose

NO_CURVES = "No recipe was compared with the baseline on fresh seeds, so there are no curves and no time to the target."
COLUMNS = "display: block; columns: 25rem; column-gap: 1.5rem"  # a grid would leave areas blank beside low figures


def decided(record: Mapping[str, Any], benches: Mapping[str, dict[str, Any]]) -> str | None:
    """Return the folder of the bench that decided: the last one that has the sentence of the record's summary."""
    known = [name for name in record["benches"] if name in benches]
    sentence = record["summary"].get("sentence")
    for name in reversed(known):
        if sentence is not None and sentence in [own["sentence"] for own in benches[name]["summary"].values()]:
            return name
    return known[0] if known else None


def page(
    record: Mapping[str, Any], benches: Mapping[str, dict[str, Any]], profile: list[str], recipe: str | None
) -> str:
    """Return the page as HTML text.

    Args:
        record: the record in ``results.json``.
        benches: the results of the confirming benches, by folder.
        profile: the profile of the baseline in words.
        recipe: the text of ``recipe.yaml``, or None.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
    """
    name = decided(record, benches)
    shown: dict[str, Drawing] = {}
    if name is not None:
        shown = {one.name: one for one in draw(benches[name], summarize(benches[name]))}
    made = (draw_one(record) for draw_one in pictures.ALL[1:])
    search = "\n".join(figure_html(one) for one in made if one is not None)
    return document(
        "What tuning found",
        f'<header>\n<h1>What tuning found</h1>\n<p class="dim">{escape(_plan(record))}</p>\n</header>',
        section_html("What to do", _to_do(record)),
        _confirmed(record, benches, name, shown),
        _contributions(record),
        section_html(
            "The search",
            f"<p>{escape(prose.counted(record))}</p>\n"
            + (f'<div class="figures" style="{COLUMNS}">\n{search}\n</div>\n' if search else "")
            + _folded("Every trial", _trials(record)),
        ),
        "" if recipe is None else _folded("The recipe", f"<pre>{escape(recipe)}</pre>"),
        _listed("What was refused, and why", prose.refusals(record)),
        _listed("What was left out, and why", prose.left_out(record)),
        _listed("The module", profile),
    )


def _plan(record: Mapping[str, Any]) -> str:
    limit = record.get("memory_bytes")
    plan = f"{record['budget_seconds']:g} s of training per run, judged by {record['target']}"
    plan += f", at most {limit / 2**30:.3g} GiB of memory" if limit else ""
    return f"{plan}. Finished {record['finished']}. Cost: {cost.in_words(record['cost'])}"


def _to_do(record: Mapping[str, Any]) -> str:
    """Return the next step, with its command as code."""
    style = "faster" if record["recipe"] is not None else ""
    first, *others = (_code(line) for line in prose.to_do(record))
    rest = "\n".join(f"<p>{line}</p>" for line in others)
    return f'<ul class="verdicts">\n<li class="{style}"><strong>{first}</strong></li>\n</ul>\n{rest}'


def _code(line: str) -> str:
    """Return a line of Markdown as HTML text: text between backticks is code."""
    parts = escape(line).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


def _confirmed(
    record: Mapping[str, Any],
    benches: Mapping[str, dict[str, Any]],
    name: str | None,
    shown: dict[str, Drawing],
) -> str:
    """Return the results of the bench on fresh seeds with its figures, and links to all benches."""
    if name is None:
        return section_html("Recipe and baseline", f"<p>{escape(NO_CURVES)}</p>")
    results = benches[name]
    lead = figure_html(shown["speedups"], "lead") if "speedups" in shown else ""
    figures = "\n".join(figure_html(shown[one]) for one in ("seconds", "pareto", "memory") if one in shown)
    notes = "\n".join(f"<p>{escape(line)}</p>" for line in findings.lines(results, summarize(results)))
    links = "\n".join(
        f'<li><a href="{escape(folder)}/report.html">{escape(folder.rpartition("-")[0])}</a>:'
        f" {escape(' '.join(record['benches'][folder].values()))}</li>"
        for folder in record["benches"]
    )
    parts = [
        lead,
        notes,
        f'<div class="figures" style="{COLUMNS}">\n{figures}\n</div>',
        f"<p>All figures, by bench:</p>\n<ul>{links}</ul>",
    ]
    return section_html("Recipe and baseline on fresh seeds", "\n".join(filter(None, parts)))


def _contributions(record: Mapping[str, Any]) -> str:
    if not record["contributions"]:
        return ""
    drawn = pictures.contributions(record)
    body = figure_html(drawn, "lead") if drawn is not None else ""
    unknown = [part["name"] for part in record["contribution_figures"] if part["estimate"] is None]
    body += f"<p>Not known: {escape(', '.join(unknown))}.</p>" if unknown else ""
    return section_html("What each technique adds", body)


def _trials(record: Mapping[str, Any]) -> str:
    return table_html(*prose.columns_and_rows(record), first="trial")


def _listed(head: str, lines: list[str]) -> str:
    return _folded(head, list_html(lines)) if lines else ""


def _folded(head: str, body: str) -> str:
    """Return a section that is closed at first."""
    return f"<details>\n<summary>{escape(head)}</summary>\n{body}\n</details>"
