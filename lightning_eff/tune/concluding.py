"""Turns a search into a verdict: it confirms the best recipes, and drops techniques that add nothing."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_eff.bench.pace import Incomparable
from lightning_eff.tune.config import Choices
from lightning_eff.tune.confirm import BASELINE, RECIPE, Bench, Contribution, confirmed, too_large
from lightning_eff.tune.search import Search, chosen
from lightning_eff.tune.timing import LEAST, in_words

CONFIRMED = 2  # largest number of recipes in the confirming bench


@dataclass(frozen=True)
class Conclusion:
    """The result of a search.

    Attributes:
        recipe: the winning choices. None if the baseline won.
        baseline: the choices of the tuned baseline.
        sentence: the verdict in words.
        steps: the optimizer steps that the budget holds for the recipe.
        baseline_steps: the same for the tuned baseline.
        contributions: the contributions of the techniques in the first confirmed recipe.
        summaries: the sentences of all arms, by the folder of their bench.
        summary: the recipe's summary in the bench that confirmed it.
    """

    recipe: Choices | None
    baseline: Choices
    sentence: str
    steps: int
    baseline_steps: int
    contributions: tuple[Contribution, ...] = ()
    summaries: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)


class Finding:
    """Confirms the best recipes of a search.

    Args:
        look: the findings before the search.
        search: the finished search.
        bench: the confirming benches.
        seconds: estimates the duration of a bench, from the number of its arms and how many of them are known.
        left: returns the seconds that are left.
    """

    def __init__(
        self,
        look: Any,
        search: Search,
        bench: Bench,
        seconds: Callable[[int, int], float] = lambda arms, known: 0.0,
        left: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._look, self._search, self._bench = look, search, bench
        self._seconds, self._left = seconds, left
        self._slower = 1.0  # measured over estimated duration of a bench
        self._steps: int | None = None  # of the tuned baseline in the budget
        self._sentences: dict[str, dict[str, str]] = {}
        self._tell: Callable[[str], None] = lambda line: None

    def conclude(self, tell: Callable[[str], None]) -> Conclusion:
        """Confirm the best recipe, and measure what each of its techniques adds."""
        self._tell = tell
        best = self._search.best("baseline")
        assert best is not None
        better = [
            chosen(record)
            for record in self._search.ranked("recipes")
            if (record["value"] < best["value"]) == (self._search.mode == "min") and record["value"] != best["value"]
        ]
        better = list({choices.key: choices for choices in better}.values())  # a sampler may propose the same twice
        if not better:
            ranked = self._search.ranked("recipes")
            if ranked and ranked[0]["value"] == best["value"]:
                return self._stands(f"no recipe of the search beat the tuned baseline's {best['value']:.5g}")
            why = (
                f"the best recipe got {ranked[0]['value']:.5g}" if ranked else "no recipe trained for the whole budget"
            )
            return self._stands(f"no recipe of the search reached the tuned baseline's {best['value']:.5g}: {why}")
        try:
            arms, results = self._compared(self._few(better[:CONFIRMED]))
        except Incomparable as error:
            return self._stands(f"the best recipes cannot be compared with it on new seeds: {error}")
        won = [name for name in arms if self._confirmed(results, name)]
        if not won:
            sentences = " ".join(self._sentence(results, name) for name in arms)
            return self._stands(f"no recipe of the search was confirmed on new seeds. {sentences}")
        name = max(won, key=lambda one: results["summary"][one]["speedup"]["estimate"])
        return self._reduced(arms[name], results["summary"][name], results["calibration"][name]["steps"])

    def _few(self, best: list[Choices]) -> list[Choices]:
        """Return the recipes to confirm in the time that is left.

        Measuring the techniques of the best recipe has priority over a second recipe. If the measurement does not fit at all,
        the time decides how many recipes are confirmed.
        """
        alone = best[:1]
        for few in (best, alone):
            if self._bench.begun("confirm", _named(few)):  # before the search was resumed
                return few
        apart = self._leave_one_out(best[0]) if len(best[0].techniques) > 1 else 0.0
        for few in (best, alone):
            if self._expected(1 + 2 * len(few)) + apart <= self._left():
                return few
        return best if self._expected(1 + 2 * len(best)) <= self._left() else alone

    def _compared(self, few: Sequence[Choices]) -> tuple[dict[str, Choices], dict[str, Any]]:
        """Compare these recipes with the baseline. If they cannot be compared together, compare the first that can be alone.

        Raises:
            Incomparable: if no recipe can be compared, or no time is left for it.
        """
        arms = _named(few)
        try:
            return arms, self._run("confirm", arms, "confirming " + ", ".join(choices.describe() for choices in few))
        except Incomparable:
            for choices in few if len(few) > 1 else ():
                alone = {RECIPE: choices}
                if self._expected(3) <= self._left() or self._bench.begun("confirm", alone):
                    try:
                        return alone, self._run("confirm", alone, f"confirming {choices.describe()} alone")
                    except Incomparable:
                        pass
            raise

    def _leave_one_out(self, stack: Choices) -> float:
        """Return the estimated duration of a leave-one-out bench of a confirmed recipe."""
        return self._expected(2 + len(stack.techniques), known=2)

    def _reduced(self, stack: Choices, summary: Mapping[str, Any], steps: int) -> Conclusion:
        """Return a confirmed recipe without the techniques that add nothing, if it is confirmed without them too."""
        parts: tuple[Contribution, ...] = ()
        notes: list[str] = []
        if len(stack.techniques) > 1:
            begun = self._bench.begun("leave_one_out", self._bench.leave_one_out(stack))
            if (need := self._leave_one_out(stack)) > self._left() and not begun:
                notes.append(
                    f"The gain of each technique was not measured: it takes about {in_words(need)}, and"
                    f" {in_words(max(self._left(), 0.0))} of --search were left. Raise --search and run the command again to"
                    " measure it."
                )
            else:
                try:
                    parts = self._contributions(stack)
                except Incomparable as error:
                    notes.append(f"The gain of each technique was not measured: {error}")
        dropped = [part.name for part in parts if part.dropped]
        less = stack
        for name in dropped:
            less = less.without(name)
        if dropped and not less.techniques:
            notes.append("The recipe is as good without any one of its techniques, so none is dropped.")
        elif dropped:
            again = self._again(less, dropped, notes)
            if again is not None and self._confirmed(again, RECIPE):
                stack, summary = less, again["summary"][RECIPE]
                steps = again["calibration"][RECIPE]["steps"]
            elif again is not None:
                sentence = self._sentence(again, RECIPE)
                notes.append(f"Without the techniques that seem to add nothing it was not confirmed: {sentence}")
        parts = tuple(replace(part, dropped=part.dropped and part.name not in stack.techniques) for part in parts)
        said = " ".join([f"{stack.describe()}: {summary['sentence']}", *notes])
        return Conclusion(stack, self._bench.baseline, said, steps, self._of_baseline, parts, self._sentences, summary)

    def _again(self, less: Choices, dropped: Sequence[str], notes: list[str]) -> dict[str, Any] | None:
        """Return the results of a bench of a recipe without dropped techniques. If it is None, ``notes`` get the reason."""
        known = 2 if len(dropped) == 1 else 1  # the baseline, and the recipe without a single technique
        begun = self._bench.begun("reduced", {RECIPE: less})
        without = f"Without the techniques that add nothing ({', '.join(dropped)})"
        if (need := self._expected(LEAST, known)) > self._left() and not begun:
            notes.append(
                f"{without} it was not confirmed again: it takes about {in_words(need)}, and less was left of --search."
            )
            return None
        try:
            return self._run("reduced", {RECIPE: less}, f"confirming the reduced recipe: {less.describe()}", known)
        except Incomparable as error:
            notes.append(f"{without} it cannot be compared: {error}")
            return None

    def _contributions(self, stack: Choices) -> tuple[Contribution, ...]:
        self._begin(f"measuring each technique of {stack.describe()}", self._leave_one_out(stack))
        return tuple(self._bench.contributions(stack))

    def _stands(self, why: str) -> Conclusion:
        sentence = f"The baseline won: {why}"
        return Conclusion(
            None, self._bench.baseline, sentence, self._of_baseline, self._of_baseline, (), self._sentences
        )

    @property
    def _of_baseline(self) -> int:
        return self._steps or self._bench.baseline_steps

    def _expected(self, arms: int, known: int = 0) -> float:
        """Return the estimated duration of a bench, corrected by how long earlier benches took."""
        return self._slower * self._seconds(arms, known)

    def _confirmed(self, results: Mapping[str, Any], arm: str) -> bool:
        """Whether an arm is faster beyond chance, and within the memory limit."""
        return confirmed(results, arm) and too_large(results, arm, self._bench.memory) is None

    def _sentence(self, results: Mapping[str, Any], arm: str) -> str:
        """Return a bench's sentence about an arm, with its memory if that is over the limit."""
        large = too_large(results, arm, self._bench.memory)
        return results["summary"][arm]["sentence"] + ("" if large is None else f" But {large}.")

    def _begin(self, what: str, seconds: float) -> None:
        self._tell(f"{what}{f'; about {in_words(seconds)}' if seconds else ''}")

    def _run(self, name: str, arms: Mapping[str, Choices], what: str, known: int = 0) -> dict[str, Any]:
        expected = self._seconds(1 + 2 * len(arms), known)
        self._begin(what, self._slower * expected)
        began = time.monotonic()
        results = self._bench.run(name, arms, controls=True)
        if expected:
            self._slower = max(self._slower, (time.monotonic() - began) / expected)
        self._steps = results["calibration"][BASELINE]["steps"]
        self._sentences[results["folder"]] = {arm: own["sentence"] for arm, own in results["summary"].items()}
        return results


def _named(recipes: Sequence[Choices]) -> dict[str, Choices]:
    """Return recipes by the names of their arms in a confirming bench."""
    return {RECIPE if i == 0 else f"{RECIPE} {i + 1}": choices for i, choices in enumerate(recipes)}
