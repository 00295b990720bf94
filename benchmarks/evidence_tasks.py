"""The page of one task in ``docs/evidence``: its recipes, every technique alone, and how it was measured."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks import evidence_further, evidence_settings, goal
from benchmarks.evidence_arms import CHANGES, CLAIMS, COMPUTE, EXACT, GOAL, LEAST, SAME, TASKS, WEIGHTS
from lightning_eff.bench.reports import findings, words

ROOT = Path(__file__).resolve().parent.parent
WORDS = {
    "no difference shown": "undecided",
    "no measurable difference": "undecided",
}  #: verdicts of the bench, in a word for a table


@dataclass(frozen=True)
class Row:
    """A technique with some settings, or a control, on one task.

    Attributes:
        of: the technique, or what stands in its place.
        settings: in words; empty for the paper's.
        found: the arm's summary.
        seconds: the budget of a run.
        control: whether it is the control of the technique.
    """

    of: str
    settings: str
    found: Mapping[str, Any]
    seconds: float
    control: bool = False

    @property
    def speed(self) -> float:
        """The speed-up, or 0 where it is not known."""
        known = self.found["speedup"]
        return known["estimate"] if known else 0.0

    def line(self) -> str:
        """The row of the table."""
        name = f"`{self.of}`" if self.of.isidentifier() else self.of
        told = (
            f"*control: {self.settings}*" if self.control else f"{name}{f': {self.settings}' if self.settings else ''}"
        )
        final, seeds = self.found["final"], len(self.found["final"]["values"])
        loss = f"{final['mean']:.4f}" if final["mean"] is not None else "–"
        return f"| {told} | {speed(self.found)} | {verdict(self.found)} | {loss} | {self.seconds:g}×{seeds} |"


def speed(found: Mapping[str, Any]) -> str:
    """A speed-up with its interval, or a dash."""
    known = found["speedup"]
    return f"{known['estimate']:.2f} [{known['low']:.2f}, {known['high']:.2f}]" if known else "–"


def verdict(found: Mapping[str, Any]) -> str:
    """A verdict in a word."""
    said: str = found["verdict"]
    return WORDS.get(said, said)


@cache
def notes(task: str) -> dict[str, Any]:
    """What the task is, and notes on its results."""
    return yaml.safe_load((ROOT / "benchmarks" / "evidence_notes.yaml").read_text())[task]


def controls(results: Mapping[str, Any], name: str) -> list[tuple[str, dict[str, Any]]]:
    """A recipe's control arms and what was found of them."""
    arms = [arm["name"] for arm in results["plan"]["arms"] if arm["kind"] == "control" and arm["of"] == name]
    return [(arm.removeprefix(f"{name}: "), results["summary"][arm]) for arm in arms]


def rows(
    task: str,
    sets: Mapping[str, Mapping[str, Any]],
    tried: Mapping[str, Any],
    others: tuple[dict[str, Any], dict[str, Any] | None] | None,
) -> list[Row]:
    """Every technique on a task, the fastest first, each with its other settings and its controls behind it.

    Args:
        task: which.
        sets: its results by set: "bench", "weights" and "compute", as far as there are any.
        tried: its searches among settings, and what won there.
        others: its results of techniques without a recipe, and of the search among their settings.
    """
    found = [*_recipes(task, sets)]
    for of, settings, one, seconds in evidence_settings.rows(task, sets.get("bench", {}), tried):
        found.append(Row(of, settings, one, seconds))
    if others is not None:
        results, searched = others
        seconds = results["plan"]["budget"]["seconds"]
        for of, settings, one in evidence_further.rows(task, results, searched):
            found.append(Row(of, settings, one, seconds))
    best: dict[str, float] = {}
    for row in found:
        if not row.control:
            best[row.of] = max(row.speed, best.get(row.of, 0.0))
    order = sorted(best, key=lambda of: (-best[of], of))
    return [
        row for of in order for row in sorted((r for r in found if r.of == of), key=lambda r: (r.control, -r.speed))
    ]


def _recipes(task: str, sets: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    for part, claims in (("bench", CLAIMS), ("weights", WEIGHTS), ("compute", COMPUTE)):
        results = sets.get(part)
        if results is None:
            continue
        seconds = results["plan"]["budget"]["seconds"]
        for recipe, (of, _) in claims.items():
            if recipe in results["summary"]:
                settings = "the paper's settings" if (task, recipe) in SAME else ""
                row = Row(of, settings, results["summary"][recipe], seconds)
                yield row
                for name, one in controls(results, recipe):
                    yield replace(row, settings=name, found=one, control=True)


def page(
    task: str,
    sets: Mapping[str, Mapping[str, Any]],
    tried: Mapping[str, Any],
    others: tuple[dict[str, Any], dict[str, Any] | None] | None,
    arms: Mapping[str, goal.Arm] | None,
    compiled: list[str],
) -> str:
    """The page of a task.

    Args:
        task: which.
        sets: as for :func:`rows`.
        tried: as for :func:`rows`.
        others: as for :func:`rows`.
        arms: whole runs at all budgets, as :func:`benchmarks.goal.gathered` has them.
        compiled: what there is to say of compilation.
    """
    title = TASKS[task]
    lines = [f"# {title[0].upper()}{title[1:]}", "", f"{notes(task)['is']} [How the figures were measured](method.md)."]
    lines += ["", *(f"- {note}" for note in notes(task)["notes"])] if notes(task)["notes"] else []
    if arms and GOAL.keys() & arms.keys():
        lines += ["", "## Time to the baseline's final loss", ""]
        lines += [
            "The fraction of the baseline's time that each recipe needs, for several budgets of the baseline.",
            "",
        ]
        lines += goal.lines(arms, GOAL, LEAST.get(task, 60.0))
        for name in EXACT & arms.keys():
            lines += ["", *goal.exact(GOAL[name], arms[name])]
        if changing := [GOAL[name] for name in GOAL if name in CHANGES & arms.keys()]:
            lines += ["", f"These recipes change the model: {'; '.join(changing)}."]
    if found := rows(task, sets, tried, others):
        lines += ["", "## Every technique alone", "", *alone(found, sets, others)]
        for part in sets:
            name = "evidence" if part == "bench" else f"evidence_{part}"
            lines += ["", f"![Speed-ups with their 95 % intervals](../{name}_{task}.png)"]
    if compiled:
        lines += ["", "## Compilation included", "", *compiled]
    lines += ["", "## How it was measured", "", *(line for results in sets.values() for line in measured(results))]
    if others is not None:
        lines += measured(others[0])
    return "\n".join(line for line in _single(lines)) + "\n"


def _single(lines: list[str]) -> Iterator[str]:
    """Lines without an empty one after another."""
    before = ""
    for line in lines:
        if line or before:
            yield line
        before = line


def alone(
    found: list[Row],
    sets: Mapping[str, Mapping[str, Any]],
    others: tuple[dict[str, Any], dict[str, Any] | None] | None,
) -> list[str]:
    """The table of all techniques, and how it is read."""
    bases = {}
    for results in (*sets.values(), *((others[0],) if others else ())):
        first = results["plan"]["arms"][0]["name"]
        bases[f"{results['plan']['budget']['seconds']:g} s"] = words.number(results["summary"][first]["final"]["mean"])
    ends = " and ".join(f"{loss} after {seconds}" for seconds, loss in bases.items())
    return [
        f"The baseline's final loss is {ends}. A speed-up below 1 is slower. The last column is seconds × seeds. If all"
        " settings of a technique are slower, only the best of them is shown.",
        "",
        "| technique | speed-up [95 %] | result | final loss | runs |",
        "|---|---|---|---|---|",
        *(row.line() for row in found),
    ]


def measured(results: Mapping[str, Any]) -> list[str]:
    """A line on how a bench was made: machine, versions, chance, and what else differs from the baseline."""
    plan, machine = results["plan"], results["machine"]
    arms = [arm["name"] for arm in plan["arms"] if arm["kind"] in ("recipe", "control")]
    verdicts = [results["summary"][name]["verdict"] for name in arms]
    count = sum(word in ("faster", "slower", *WORDS, *WORDS.values()) for word in verdicts)
    given = sum(word in ("faster", "slower") for word in verdicts)
    line = (
        f"- {plan['budget']['seconds']:g} s: {machine['cpu']}, {plan['threads']} thread; torch {machine['torch']}, Lightning"
        f" {machine['lightning']}, Python {machine['python']}. {count} comparisons, {given} of them decided; chance alone"
        f" would decide up to {(1 - findings.LEVEL) * count:.2g}."
    )
    unlike: dict[str, list[str]] = {}
    for row in findings.unlike(dict(results)):
        unlike.setdefault(row["what"], []).append(row["arm"])
    if unlike:
        line += (
            " Other differences from the baseline: "
            + "; ".join(
                f"{what} ({', '.join(arms) if len(arms) < 4 else f'{len(arms)} arms'})" for what, arms in unlike.items()
            )
            + "."
        )
    return [line]
