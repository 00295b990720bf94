"""The report of a search as one HTML file, in the style of the bench's: no script, nothing from outside it."""

from collections.abc import Mapping
from html import escape
from typing import Any

from lightning_eff.bench.reports import findings
from lightning_eff.bench.reports.drawing import Drawing
from lightning_eff.bench.reports.figures import draw
from lightning_eff.bench.reports.report_html import document, figure_html, list_html, section_html, table_html
from lightning_eff.bench.reports.statistics import summarize
from lightning_eff.tune.reports import cost, pictures, prose

NO_CURVES = (
    "Nothing was held against the baseline on fresh seeds, for the reason that the verdict gives, so that there are no curves"
    " and no time to the target."
)


def decided(record: Mapping[str, Any], benches: Mapping[str, dict[str, Any]]) -> str | None:
    """The folder of the bench that the verdict stands on: the last that tells of an arm what the record's summary tells."""
    told = [name for name in record["benches"] if name in benches]
    sentence = record["summary"].get("sentence")
    for name in reversed(told):
        if sentence is not None and sentence in [own["sentence"] for own in benches[name]["summary"].values()]:
            return name
    return told[0] if told else None


def page(
    record: Mapping[str, Any], benches: Mapping[str, dict[str, Any]], profile: list[str], recipe: str | None
) -> str:
    """The page as HTML text.

    Args:
        record: of ``results.json``.
        benches: results of the benches that confirmed, by their folder's name.
        profile: what was found of the module, in lines.
        recipe: the text of ``recipe.yaml``; None where the baseline stands.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    name = decided(record, benches)
    shown: dict[str, Drawing] = {}
    if name is not None:
        shown = {one.name: one for one in draw(benches[name], summarize(benches[name]))}
    style, said = ("faster", "a recipe was found") if record["recipe"] is not None else ("", "the baseline stands")
    verdict = (
        f'<ul class="verdicts">\n<li class="{style}"><strong class="tag">{said}</strong> {escape(record["sentence"])}</li>\n'
        "</ul>"
    )
    plan = f"{record['budget_seconds']:g} s of training a run, judged by {record['target']}"
    limit = record.get("memory_bytes")
    plan += f", at most {limit / 2**30:.3g} GiB of memory" if limit else ""
    made = (draw_one(record) for draw_one in pictures.ALL[1:])
    search = "\n".join(figure_html(one) for one in made if one is not None)
    return document(
        "What tuning found",
        f'<header>\n<h1>What tuning found</h1>\n<p class="dim">{escape(plan)}. Finished {escape(record["finished"])}.</p>\n'
        "</header>",
        section_html("Verdict", verdict),
        section_html("Cost", f"<p>{escape(cost.in_words(record['cost']))}</p>"),
        _confirmed(record, benches, name, shown),
        _contributions(record),
        section_html(
            "The search",
            f"<p>{escape(prose.counted(record))}</p>\n"
            + (f'<div class="figures">\n{search}\n</div>\n' if search else "")
            + f"<details>\n<summary>Every trial</summary>\n{_trials(record)}\n</details>",
        ),
        _listed("What was refused, and why", prose.refusals(record)),
        _listed("Left out, and why", prose.left_out(record), folded=True),
        _listed("The module", profile),
        ""
        if recipe is None
        else section_html(
            "The recipe",
            f"<p>Run it: lightning-eff fit --config recipe.yaml</p>\n<pre>{escape(recipe)}</pre>",
        ),
    )


def _confirmed(
    record: Mapping[str, Any],
    benches: Mapping[str, dict[str, Any]],
    name: str | None,
    shown: dict[str, Drawing],
) -> str:
    """What the bench on fresh seeds found, with its figures, and links to all benches."""
    if name is None:
        return section_html("Recipe against baseline", f"<p>{escape(NO_CURVES)}</p>")
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
        f'<div class="figures">\n{figures}\n</div>',
        f"<p>All figures, by bench:</p>\n<ul>{links}</ul>",
    ]
    return section_html("Recipe against baseline, on fresh seeds", "\n".join(filter(None, parts)))


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


def _listed(head: str, lines: list[str], *, folded: bool = False) -> str:
    if not lines:
        return ""
    body = list_html(lines)
    return section_html(head, f"<details>\n<summary>{len(lines)}</summary>\n{body}\n</details>" if folded else body)
