"""Settings of techniques that a search found, and their papers' settings where the recipe was searched."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks.evidence_arms import CLAIMS, PAPERS, SETTINGS, WEIGHTS


def rows(
    task: str, found: Mapping[str, Any], tried: Mapping[str, Any]
) -> Iterator[tuple[str, str, Mapping[str, Any], float]]:
    """The technique, its settings in words, the arm's summary, and the budget.

    Settings that a search found are shown where they are not the recipe's.

    Args:
        task: which.
        found: its results of the recipes with their papers' settings.
        tried: its search among other settings ("search_settings"), and what won there ("settings").
    """
    confirmed, searched = tried.get("settings"), tried.get("search_settings")
    if confirmed is None:
        return
    seconds = confirmed["plan"]["budget"]["seconds"]
    for recipe, others in SETTINGS.items():
        ends = {} if searched is None else _ended(searched, recipe, others)
        best = min(ends, key=lambda name: ends[name], default=recipe)
        if best != recipe and best in confirmed["summary"] and recipe in found.get("summary", {}):
            yield CLAIMS[recipe][0], f"{others[best]} (best of {len(ends)})", confirmed["summary"][best], seconds
    for recipe, papers in PAPERS.items():
        for name, words in papers.items():
            if name in confirmed["summary"]:
                yield WEIGHTS[recipe][0], f"the paper's settings, {words}", confirmed["summary"][name], seconds


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
