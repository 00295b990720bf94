"""From a search to a verdict: the best few are confirmed, and what adds nothing is dropped."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_eff.tune.config import Choices
from lightning_eff.tune.confirm import RECIPE, Bench, Contribution, confirmed
from lightning_eff.tune.search import Search, chosen

CONFIRMED = 2  # recipes of a search that are confirmed, at most


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
        recipe: the choices that won; None where the baseline stands.
        baseline: the tuned baseline's choices.
        sentence: the verdict in words.
        steps: optimizer steps that the recipe's budget holds.
        contributions: of the techniques of the stack that was confirmed first.
        summaries: of each bench by its folder's name: each arm's sentence.
        summary: the recipe's in the bench that confirmed it.
    """

    recipe: Choices | None
    baseline: Choices
    sentence: str
    steps: int
    contributions: tuple[Contribution, ...] = ()
    summaries: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)


class Finding:
    """Args: look: what was looked at; search: that is over; bench: of its tuned baseline."""

    def __init__(self, look: Any, search: Search, bench: Bench) -> None:
        self._look, self._search, self._bench = look, search, bench
        self._sentences: dict[str, dict[str, str]] = {}

    def conclude(self, tell: Callable[[str], None]) -> Found:
        """Confirm the best, and find what it stands on."""
        baseline, steps = self._bench.baseline, self._look.found.steps
        best = self._search.best("baseline")
        assert best is not None
        better = [
            chosen(record)
            for record in self._search.ranked("recipes")
            if (record["value"] < best["value"]) == (self._search.mode == "min") and record["value"] != best["value"]
        ]
        better = list({choices.key: choices for choices in better}.values())[
            :CONFIRMED
        ]  # a sampler may say a thing twice
        if not better:
            ranked = self._search.ranked("recipes")
            why = f"the best came to {ranked[0]['value']:.5g}" if ranked else "none came to its end"
            return self._stands(f"no recipe of the search reached the tuned baseline's {best['value']:.5g}: {why}")
        arms = {RECIPE if i == 0 else f"{RECIPE} {i + 1}": choices for i, choices in enumerate(better)}
        tell(f"confirming {', '.join(choices.told() for choices in better)}")
        results = self._run("confirm", arms, controls=True)
        won = [name for name in arms if confirmed(results, name)]
        if not won:
            told = "; ".join(results["summary"][name]["sentence"] for name in arms)
            return self._stands(f"what the search found was not confirmed on fresh seeds: {told}")
        name = max(won, key=lambda one: results["summary"][one]["speedup"]["estimate"])
        stack, summary, steps = arms[name], results["summary"][name], results["calibration"][name]["steps"]
        parts: tuple[Contribution, ...] = ()
        if len(stack.techniques) > 1:
            tell(f"leaving out one technique after the other of {stack.told()}")
            parts = tuple(self._bench.contributions(stack))
            less = stack
            for part in parts:
                less = less.without(part.name) if part.dropped else less
            if less != stack and less.techniques:
                tell(f"confirming what is left: {less.told()}")
                again = self._run("reduced", {RECIPE: less}, controls=True)
                if confirmed(again, RECIPE):
                    stack, summary = less, again["summary"][RECIPE]
                    steps = again["calibration"][RECIPE]["steps"]
        said = f"{stack.told()}: {summary['sentence']}"
        return Found(stack, baseline, said, steps, parts, self._sentences, summary)

    def _stands(self, why: str) -> Found:
        sentence = f"The baseline stands: {why}"
        return Found(None, self._bench.baseline, sentence, self._look.found.steps, (), self._sentences)

    def _run(self, name: str, arms: Mapping[str, Choices], *, controls: bool) -> dict[str, Any]:
        results = self._bench.run(name, arms, controls=controls)
        self._sentences[results["folder"]] = {arm: own["sentence"] for arm, own in results["summary"].items()}
        return results
