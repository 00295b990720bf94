"""The content of the table of techniques: judgement from ``choices.txt``, and measurements from the committed results."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import evidence_page as evidence
from benchmarks.evidence_tasks import verdict
from docs.making import facts

FILE = Path(__file__).parent / "choices.txt"
UNMEASURED = FILE.with_name("unmeasured.txt")
#: The values of each column that has a fixed set of them.
WORKS_FOR = ("any", "transformer", "CNN", "residual", "images", "language model", "several GPUs")
EFFECTS = ("time", "memory", "quality", "throughput")
COSTS = ("less", "same", "more", "much more")
RISKS = {"exact": "exact", "training": "changes training", "model": "changes the model"}
RECOMMENDATIONS = ("recommended", "situational", "for research")


@dataclass(frozen=True)
class Choice:
    """A line of ``choices.txt``.

    Attributes:
        name: the class.
        purpose: the group in the table and in the menu.
        works_for: one of :data:`WORKS_FOR`.
        effect: some of :data:`EFFECTS`.
        cost: the step cost, one of :data:`COSTS`.
        risk: one of :data:`RISKS`.
        recommendation: one of :data:`RECOMMENDATIONS`.
        elsewhere: results of others, or its use.
    """

    name: str
    purpose: str
    works_for: str
    effect: tuple[str, ...]
    cost: str
    risk: str
    recommendation: str
    elsewhere: str


@cache
def choices() -> dict[str, Choice]:
    """Return all lines by name, in the file's order.

    Raises:
        ValueError: if a line has missing columns, an unknown value, or the name of another line.
    """
    found: dict[str, Choice] = {}
    purpose = ""
    for line in FILE.read_text().splitlines():
        if line.startswith("["):
            purpose = line.strip("[]")
        elif line and not line.startswith("#"):
            cells = [cell.strip() for cell in line.split(" | ")]
            if len(cells) != 7:
                raise ValueError(f"{FILE.name}: expected 7 columns, found {len(cells)}: {line}")
            name, works_for, effect, cost, risk, recommendation, elsewhere = cells
            one = Choice(name, purpose, works_for, tuple(effect.split(", ")), cost, risk, recommendation, elsewhere)
            checks = [(works_for, WORKS_FOR), (cost, COSTS), (risk, RISKS), (recommendation, RECOMMENDATIONS)]
            checks += [(part, EFFECTS) for part in one.effect]
            for value, known in checks:
                if value not in known:
                    raise ValueError(f"{FILE.name}: {name}: {value!r} is unknown. Use one of {list(known)}.")
            if name in found:
                raise ValueError(f"{FILE.name}: {name} has two lines. Remove one.")
            found[name] = one
    return found


@cache
def reasons() -> dict[str, str]:
    """Return why each technique without a figure has none, or where its figures are, by name.

    Raises:
        ValueError: if a line of ``unmeasured.txt`` has no reason, or a name has two.
    """
    found: dict[str, str] = {}
    for line in UNMEASURED.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        names, bar, reason = line.partition(" | ")
        if not bar or not reason.endswith((".", ")")):
            raise ValueError(f"{UNMEASURED.name}: expected `names | reason.`, found: {line}")
        for name in names.split(", "):
            if name in found:
                raise ValueError(f"{UNMEASURED.name}: {name} has two reasons. Remove one.")
            found[name] = reason
    return found


def purposes() -> dict[str, list[str]]:
    """Return the names of each purpose."""
    found: dict[str, list[str]] = {}
    for one in choices().values():
        found.setdefault(one.purpose, []).append(one.name)
    return found


def best(name: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return the best settings of a technique on each task: task, settings after a comma, and the arm's summary."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for recipe, task, _, results in facts.measurements(name):
        one = results["summary"][recipe]
        if one["speedup"] is None:
            continue
        if task not in found or one["speedup"]["estimate"] > found[task][1]["speedup"]["estimate"]:
            found[task] = (facts.label(task, recipe, results), one)
    return [(task, *one) for task, one in found.items()]


def measured(name: str) -> str:
    """Format the best result on each task as a short cell, or a dash."""
    told = [f"{evidence.SHORT[task]} {one['speedup']['estimate']:.2f} {verdict(one)}" for task, _, one in best(name)]
    return "<br>".join(told) or "–"


VERDICTS = Path(__file__).parent.parent / "verdicts.md"
MARKS = ("<!-- verdicts -->", "<!-- end of verdicts -->")  #: :func:`verdicts` writes the text between them


def verdicts(text: str) -> str:
    """Update the tables in ``docs/verdicts.md``: for each purpose, the best figure of each technique on each task."""
    columns = ("gpt", "vit", "bert", "")  #: the last one has all other tasks
    lines: list[str] = []
    for purpose, names in purposes().items():
        rows: list[str] = []
        missing: dict[str, list[str]] = {}
        for name in names:
            found = {task: figure(one) for task, _, one in best(name)}
            if not found:
                missing.setdefault(reasons()[name], []).append(f"`{name}`")
                continue
            others = [f"{evidence.SHORT[task]}: {told}" for task, told in found.items() if task not in columns]
            cells = [found.get(task, "–") for task in columns[:-1]] + ["<br>".join(others) or "–"]
            rows.append(f"| `{name}` | " + " | ".join(cells) + " |")
        lines += [f"## {purpose}", ""]
        if rows:
            heads = [evidence.SHORT[task] for task in columns[:-1]]
            lines += [f"| technique | {' | '.join(heads)} | other tasks |", "|---|---|---|---|---|", *rows, ""]
        if missing:
            lines += ["Not measured on these tasks:", ""]
            lines += [f"- {', '.join(without)}: {reason}" for reason, without in missing.items()] + [""]
    before, _, rest = text.partition(MARKS[0])
    return before + MARKS[0] + "\n\n" + "\n".join(lines) + "\n" + MARKS[1] + rest.partition(MARKS[1])[2]


def figure(one: dict[str, Any]) -> str:
    """Format a speed-up with its interval, in bold if it is faster and in italics if it is slower."""
    mark = {"faster": "**", "slower": "*"}.get(one["verdict"], "")
    known = one["speedup"]
    return f"{mark}{known['estimate']:.2f}{mark} [{known['low']:.2f}, {known['high']:.2f}]"
