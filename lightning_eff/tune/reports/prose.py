"""The report of a search in words: ``report.md``, and the sentences and tables that its page has, too."""

from collections.abc import Mapping
from typing import Any

from lightning_eff.bench.reports import words
from lightning_eff.tune.config import Choices
from lightning_eff.tune.reports import cost
from lightning_eff.tune.reports.pictures import tries

PARTS = {"1/9": "at 1/9 of the budget", "1/3": "at 1/3", "1/1": "at all of it"}
ADDS = "The target without it, less that with it, turned so that above 0 it helps; with its 95 % interval."


def counted(record: Mapping[str, Any]) -> str:
    """How many trials there were, and how many of them had the whole budget."""
    told = []
    for kind, of in (("baseline", "the baseline's own settings"), ("recipes", "recipes")):
        own = [trial for trial in record["trials"] if trial["kind"] == kind and not trial["free"]]
        whole = sum(trial["value"] is not None for trial in own)
        told.append(f"{len(own)} trials of {of}, of which {whole} had the whole budget")
    return "; ".join(told) + "."


def refusals(record: Mapping[str, Any]) -> list[str]:
    """Why stacks were refused or failed, each reason once with the stacks that it was the reason for."""
    found: dict[str, dict[str, None]] = {}
    for trial in record["trials"]:
        whole = trial["state"] == "complete" or (trial["why"] or "").startswith("not in the best third")
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
    """What was not tried, and why."""
    lines = [f"{name}: {cell(why)}" for name, why in sorted(record["left_out"].items())]
    return lines + [f"the baseline's {name}: {cell(why)}" for name, why in sorted(record["own_left_out"].items())]


def columns_and_rows(record: Mapping[str, Any]) -> tuple[list[words.Column], list[dict[str, str]]]:
    """A row a trial for which something ran."""
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
            said = Choices(trial["choices"]["own"], techniques).told()
            row = {"arm": f"{trial['kind']} {trial['number'] + 1}", "choices": said, "why": cell(trial["why"]) or "–"}
            row |= {part: words.number(trial["values"].get(part), 5) for part in PARTS}
            row["memory"] = words.amount(trial["peak_bytes"]) if trial.get("peak_bytes") else "–"
            rows.append(row)
    return columns, rows


def report(record: Mapping[str, Any], profile: list[str]) -> list[str]:
    """The report's lines, in Markdown, of a record and what the profile tells."""
    lines = ["# What tuning found", "", record["sentence"], ""]
    lines += [f"Cost: {cost.in_words(record['cost'])}", "", "With pictures: [report.html](report.html).", ""]
    for name, sentences in record["benches"].items():
        lines += [f"## {name.rpartition('-')[0].capitalize()} ([curves, memory, all figures]({name}/report.html))", ""]
        lines += [f"- {sentence}" for sentence in sentences.values()] + [""]
    if record["contributions"]:
        lines += [f"## What each technique adds to {record['target']}", ""]
        lines += [*(f"- {line}" for line in record["contributions"]), "", ADDS, ""]
    lines += ["## The search", "", counted(record)]
    if found := tries(record):
        lines += ["In how many trials each was: " + ", ".join(f"{name} {sum(n)}" for name, n in found.items()) + "."]
    columns, rows = columns_and_rows(record)
    lines += ["", f"| trial | {' | '.join(column.head for column in columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {row['arm']} | {' | '.join(row[column.key] for column in columns)} |" for row in rows]
    if refused := refusals(record):
        lines += ["", "## What was refused, and why", "", *(f"- {line}" for line in refused)]
    lines += ["", "## Left out, and why", "", *(f"- {line}" for line in left_out(record))]
    return [*lines, "", "## The module", "", *(f"- {line}" for line in profile)]


def cell(text: Any) -> str:
    """On one line, and without what ends a cell of a table."""
    return " ".join(str(text or "").split()).replace("|", "/")
