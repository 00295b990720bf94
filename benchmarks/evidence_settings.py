"""Techniques with their papers' settings and with searched ones, side by side on one task."""

from collections.abc import Iterable
from typing import Any

from benchmarks.evidence_arms import CLAIMS, PAPERS, SAME, SETTINGS, WEIGHTS

OWN = "the paper's"
DEFAULT = ("data_driven_init",)  #: recipes whose settings are the technique's defaults, since no paper names any


def lines(
    task: str,
    found: dict[str, Any],
    weights: dict[str, Any],
    searched: dict[str, Any] | None,
    confirmed: dict[str, Any],
    cell: Any,
) -> list[str]:
    """What was searched and how, and a table with a line for each technique.

    Args:
        task: which.
        found: its results of the recipes with their papers' settings.
        weights: those of what moves the weights, whose recipes were searched.
        searched: of the search among other settings, with its one seed; None where there was none yet.
        confirmed: of what won there, and of the papers' settings of what moves the weights.
        cell: writes an arm's summary.
    """
    told: list[str] = []
    if searched is not None:
        plan = searched["plan"]
        seeds = ", ".join(map(str, plan["seeds"]))
        told += [
            f"The settings of what the first table holds were searched on seed {seeds}, which no evaluation uses, in whole"
            f" runs of {plan['budget']['seconds']:g} s: the paper's, as the recipe has them, beside those in"
            f" `benchmarks/{task}/settings`. The best was then held against the baseline as everything else is, where it was"
            " not the paper's."
        ]
    told += [
        "Of what moves the weights the recipes were searched: their papers' settings stand beside them, at the baseline's rate"
        " for all that the optimizer leaves to AdamW, as everywhere here.",
        "",
        "| technique | with its paper's settings | with searched ones | which, the best of how many |",
        "|---|---|---|---|",
    ]
    for recipe, others in SETTINGS.items():
        names = {} if searched is None else _ended(searched, recipe, others)
        if not names or recipe not in found["summary"]:
            continue
        best = min(names, key=lambda name: names[name])
        own = best == recipe
        anew = "the same" if own else cell(confirmed["summary"].get(best))
        words = ("the default" if recipe in DEFAULT else OWN) if own else others[best]
        which = f"{words}, of {len(names)}"
        told.append(f"| `{CLAIMS[recipe][0]}` | {cell(found['summary'][recipe])} | {anew} | {which} |")
    for recipe, others in PAPERS.items():
        for name, words in others.items():
            if name in confirmed["summary"]:
                both = (cell(confirmed["summary"][name]), cell(weights["summary"].get(recipe)))
                told.append(f"| `{WEIGHTS[recipe][0]}` | {both[0]} | {both[1]} | the paper's: {words} |")
            elif (task, recipe) in SAME:
                own = cell(weights["summary"].get(recipe))
                told.append(f"| `{WEIGHTS[recipe][0]}` | the same | {own} | the paper's: {words} |")
    return told


def to_confirm(searched: dict[str, Any]) -> list[str]:
    """What is to be held against the baseline after a search: what won there, and the papers' of what moves the weights."""
    return [*winners(searched), *(name for of in PAPERS.values() for name in of)]


def winners(searched: dict[str, Any]) -> list[str]:
    """The settings that ended best of their technique's, where these are not the paper's: what is to be confirmed."""
    found = {recipe: _ended(searched, recipe, others) for recipe, others in SETTINGS.items()}
    best = {recipe: min(ends, key=lambda name: ends[name]) for recipe, ends in found.items() if ends}
    return [name for recipe, name in best.items() if name != recipe]


def _ended(searched: dict[str, Any], recipe: str, others: Iterable[str]) -> dict[str, float]:
    """The mean losses that a technique's settings ended with, the paper's first."""
    summary = searched["summary"]
    return {name: mean for name in (recipe, *others) if (mean := summary.get(name, {}).get("final", {}).get("mean"))}
