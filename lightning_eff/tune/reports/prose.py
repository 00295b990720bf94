"""The report of a search in words: ``report.md``, and the sentences and tables that the HTML page shares with it."""

from collections.abc import Mapping
from typing import Any

from lightning_eff.bench.reports import words
from lightning_eff.tune.config import Choices
from lightning_eff.tune.reports import cost
from lightning_eff.tune.reports.pictures import LEFT, tries

PARTS = {"1/9": "at 1/9 of the budget", "1/3": "at 1/3", "1/1": "at all of it"}
ADDS = "The target without the technique minus the target with it. The sign is such that above 0 the technique helps."
UNFINISHED = "the time for trials was over"


def to_do(record: Mapping[str, Any]) -> list[str]:
    """Return the next step for the reader, with its command."""
    if record["recipe"] is not None:
        return ["Train with this recipe: `lightning-eff fit --config recipe.yaml`.", record["sentence"]]
    lines = ["Keep your baseline. No recipe beat it beyond chance.", record["sentence"]]
    whole = [trial for trial in record["trials"] if trial["kind"] == "baseline" and trial["value"] is not None]
    first = next((trial for trial in whole if trial["number"] == 0), None)
    best = (min if record["mode"] == "min" else max)(whole, key=lambda trial: trial["value"], default=None)
    if first is not None and best is not None and best["value"] != first["value"]:
        lines.append(
            f"Other settings may improve the baseline: {Choices.of(best['choices']).describe()} reached {record['target']}"
            f" {best['value']:.5g}, and your settings {first['value']:.5g}, on one seed. Try them with"
            " `lightning-eff fit --config baseline_tuned.yaml`."
        )
    return lines


def counted(record: Mapping[str, Any]) -> str:
    """Return how many trials there were, and how many of them had the whole budget."""
    parts = []
    for kind, of in (("baseline", "the baseline's own settings"), ("recipes", "recipes")):
        own = [trial for trial in record["trials"] if trial["kind"] == kind and not trial["free"]]
        whole = sum(trial["value"] is not None for trial in own)
        trials = "1 trial" if len(own) == 1 else f"{len(own)} trials"
        parts.append(f"{trials} of {of}, of which {whole} had the whole budget")
    return "; ".join(parts) + "."


def refusals(record: Mapping[str, Any]) -> list[str]:
    """Return why recipes were refused or failed, each reason once with its recipes."""
    found: dict[str, dict[str, None]] = {}
    for trial in record["trials"]:
        whole = trial["state"] == "complete" or (trial["why"] or "").startswith(LEFT)
        if trial["why"] and not whole:
            stack = " + ".join(trial["choices"]["techniques"]) or f"the {trial['kind']}"
            found.setdefault(cell(trial["why"]), {})[stack] = None
    lines = []
    for why, stacks in sorted(found.items()):
        first = list(stacks)[:3]
        more = f" and {len(stacks) - 3} more" if len(stacks) > 3 else ""
        lines.append(f"{why} ({', '.join(first)}{more})")
    return lines


def left_out(record: Mapping[str, Any]) -> list[str]:
    """Return the names that were not tried, with the reasons."""
    lines = [f"{name}: {cell(why)}" for name, why in sorted(record["left_out"].items())]
    return lines + [f"the baseline's {name}: {cell(why)}" for name, why in sorted(record["own_left_out"].items())]


def columns_and_rows(record: Mapping[str, Any]) -> tuple[list[words.Column], list[dict[str, str]]]:
    """Return the table of all trials that ran, one row per trial."""
    columns = [
        words.Column("choices", "choices"),
        *(words.Column(part, head) for part, head in PARTS.items()),
        words.Column("memory", "peak memory"),
        words.Column("why", "ended"),
    ]
    rows = []
    for trial in record["trials"]:
        if not trial["free"]:
            techniques = {name.rpartition(".")[2]: values for name, values in trial["choices"]["techniques"].items()}
            said = Choices(trial["choices"]["own"], techniques).describe()
            why = UNFINISHED if trial["state"] == "running" else cell(trial["why"]) or "–"
            row = {"arm": f"{trial['kind']} {trial['number'] + 1}", "choices": said, "why": why}
            row |= {part: words.number(trial["values"].get(part), 5) for part in PARTS}
            row["memory"] = words.amount(trial["peak_bytes"]) if trial.get("peak_bytes") else "–"
            rows.append(row)
    return columns, rows


def report(record: Mapping[str, Any], profile: list[str]) -> list[str]:
    """Return the lines of the report in Markdown.

    Args:
        record: the record in ``results.json``.
        profile: the profile of the baseline in words.
    """
    lines = ["# What tuning found", "", "## What to do", "", *(f"- {line}" for line in to_do(record)), ""]
    lines += [f"Cost: {cost.in_words(record['cost'])}", "", "Pictures: [report.html](report.html).", ""]
    for name, sentences in record["benches"].items():
        lines += [f"## {name.rpartition('-')[0].capitalize()} ([curves, memory, all figures]({name}/report.html))", ""]
        lines += [f"- {sentence}" for sentence in sentences.values()] + [""]
    if record["contributions"]:
        lines += [f"## What each technique adds to {record['target']}", ""]
        lines += [*(f"- {line}" for line in record["contributions"]), "", ADDS, ""]
    lines += ["## The search", "", counted(record)]
    if found := tries(record):
        lines += ["Trials per technique: " + ", ".join(f"{name} {sum(n)}" for name, n in found.items()) + "."]
    columns, rows = columns_and_rows(record)
    table = [f"| trial | {' | '.join(column.head for column in columns)} |", "|---" * (len(columns) + 1) + "|"]
    table += [f"| {row['arm']} | {' | '.join(row[column.key] for column in columns)} |" for row in rows]
    lines += ["", *_folded("Every trial", table)]
    lines += _folded("What was refused, and why", [f"- {line}" for line in refusals(record)])
    lines += _folded("What was left out, and why", [f"- {line}" for line in left_out(record)])
    return lines + _folded("The module", [f"- {line}" for line in profile])


def _folded(head: str, lines: list[str]) -> list[str]:
    """Return lines in a section that is closed at first. Return nothing for no lines."""
    return ["<details>", f"<summary>{head}</summary>", "", *lines, "", "</details>", ""] if lines else []


def cell(text: Any) -> str:
    """Return a text on one line, without the character that ends a cell of a table."""
    return " ".join(str(text or "").split()).replace("|", "/")
