"""From a search to a verdict: the best few are confirmed, and what adds nothing is dropped."""

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

CONFIRMED = 2  # recipes of a search that are confirmed, at most


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
        recipe: the choices that won; None where the baseline stands.
        baseline: the tuned baseline's choices.
        sentence: the verdict in words.
        steps: optimizer steps that the recipe's budget holds.
        baseline_steps: the same of the tuned baseline.
        contributions: of the techniques of the stack that was confirmed first.
        summaries: of each bench by its folder's name: each arm's sentence.
        summary: the recipe's in the bench that confirmed it.
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
    """Confirms what a search found.

    Args:
        look: what was looked at.
        search: that is over.
        bench: of its tuned baseline.
        seconds: about how long a bench of so many arms takes, so many of which other benches have trained.
        left: seconds that are left for it all.
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
        self._slower = 1.0  # than what was expected
        self._steps: int | None = None  # that the budget holds of the tuned baseline
        self._sentences: dict[str, dict[str, str]] = {}
        self._tell: Callable[[str], None] = lambda line: None

    def conclude(self, tell: Callable[[str], None]) -> Found:
        """Confirm the best, and find what it stands on."""
        self._tell = tell
        best = self._search.best("baseline")
        assert best is not None
        better = [
            chosen(record)
            for record in self._search.ranked("recipes")
            if (record["value"] < best["value"]) == (self._search.mode == "min") and record["value"] != best["value"]
        ]
        better = list({choices.key: choices for choices in better}.values())  # a sampler may say a thing twice
        if not better:
            ranked = self._search.ranked("recipes")
            if ranked and ranked[0]["value"] == best["value"]:
                return self._stands(f"no recipe of the search passed the tuned baseline's {best['value']:.5g}")
            why = f"the best came to {ranked[0]['value']:.5g}" if ranked else "none came to its end"
            return self._stands(f"no recipe of the search reached the tuned baseline's {best['value']:.5g}: {why}")
        try:
            arms, results = self._compared(self._few(better[:CONFIRMED]))
        except Incomparable as error:
            return self._stands(f"what the search found cannot be compared with it on fresh seeds: {error}")
        won = [name for name in arms if self._confirmed(results, name)]
        if not won:
            told = "; ".join(self._sentence(results, name) for name in arms)
            return self._stands(f"what the search found was not confirmed on fresh seeds: {told}")
        name = max(won, key=lambda one: results["summary"][one]["speedup"]["estimate"])
        return self._reduced(arms[name], results["summary"][name], results["calibration"][name]["steps"])

    def _few(self, best: list[Choices]) -> list[Choices]:
        """Which of these are confirmed in the time that is left.

        What each technique of the leading one adds comes before another recipe; where it does not fit in any case, as many
        recipes as do.
        """
        alone = best[:1]
        for few in (best, alone):
            if self._bench.begun("confirm", _named(few)):  # before the search was gone on with
                return few
        apart = self._apart(best[0]) if len(best[0].techniques) > 1 else 0.0
        for few in (best, alone):
            if self._expected(1 + 2 * len(few)) + apart <= self._left():
                return few
        return best if self._expected(1 + 2 * len(best)) <= self._left() else alone

    def _compared(self, few: Sequence[Choices]) -> tuple[dict[str, Choices], dict[str, Any]]:
        """A bench of these recipes; where one or its control refuses all, of the first of them that can be held by itself.

        Raises:
            Incomparable: if none can, or no time is left for it.
        """
        arms = _named(few)
        try:
            return arms, self._run("confirm", arms, "confirming " + ", ".join(choices.told() for choices in few))
        except Incomparable:
            for choices in few if len(few) > 1 else ():
                alone = {RECIPE: choices}
                if self._expected(3) <= self._left() or self._bench.begun("confirm", alone):
                    try:
                        return alone, self._run("confirm", alone, f"confirming {choices.told()} by itself")
                    except Incomparable:
                        pass
            raise

    def _apart(self, stack: Choices) -> float:
        """About how long it takes to leave out one technique after the other of a stack that was confirmed."""
        return self._expected(2 + len(stack.techniques), known=2)

    def _reduced(self, stack: Choices, summary: Mapping[str, Any], steps: int) -> Found:
        """A stack that was confirmed, without what adds nothing to it, if it is confirmed without that, too."""
        parts: tuple[Contribution, ...] = ()
        notes: list[str] = []
        if len(stack.techniques) > 1:
            begun = self._bench.begun("leave_one_out", self._bench.apart(stack))
            if (need := self._apart(stack)) > self._left() and not begun:
                notes.append(
                    "What each technique adds was not measured: that takes about"
                    f" {in_words(need)}, and {in_words(max(self._left(), 0.0))} of --search were left; the same command with"
                    " more --search goes on."
                )
            else:
                try:
                    parts = self._contributions(stack)
                except Incomparable as error:
                    notes.append(f"What each technique adds was not measured: {error}")
        dropped = [part.name for part in parts if part.dropped]
        less = stack
        for name in dropped:
            less = less.without(name)
        if dropped and not less.techniques:
            notes.append("The stack is as good without any one of its techniques, so that none of them is left out.")
        elif dropped:
            again = self._again(less, dropped, notes)
            if again is not None and self._confirmed(again, RECIPE):
                stack, summary = less, again["summary"][RECIPE]
                steps = again["calibration"][RECIPE]["steps"]
            elif again is not None:
                told = self._sentence(again, RECIPE)
                notes.append(f"Without what seems to add nothing it was not confirmed: {told}")
        parts = tuple(replace(part, dropped=part.dropped and part.name not in stack.techniques) for part in parts)
        said = " ".join([f"{stack.told()}: {summary['sentence']}", *notes])
        return Found(stack, self._bench.baseline, said, steps, self._of_baseline, parts, self._sentences, summary)

    def _again(self, less: Choices, dropped: Sequence[str], notes: list[str]) -> dict[str, Any] | None:
        """What a bench finds of a stack without what was dropped; None where there was none, and ``notes`` then say why."""
        known = 2 if len(dropped) == 1 else 1  # the stack without that one, and the baseline
        begun = self._bench.begun("reduced", {RECIPE: less})
        without = f"Without what adds nothing ({', '.join(dropped)})"
        if (need := self._expected(LEAST, known)) > self._left() and not begun:
            notes.append(
                f"{without} it was not confirmed again: that takes about {in_words(need)}, which were not left of --search."
            )
            return None
        try:
            return self._run("reduced", {RECIPE: less}, f"confirming what is left: {less.told()}", known)
        except Incomparable as error:
            notes.append(f"{without} it cannot be compared: {error}")
            return None

    def _contributions(self, stack: Choices) -> tuple[Contribution, ...]:
        self._begin(f"leaving out one technique after the other of {stack.told()}", self._apart(stack))
        return tuple(self._bench.contributions(stack))

    def _stands(self, why: str) -> Found:
        sentence = f"The baseline stands: {why}"
        return Found(None, self._bench.baseline, sentence, self._of_baseline, self._of_baseline, (), self._sentences)

    @property
    def _of_baseline(self) -> int:
        return self._steps or self._bench.held

    def _expected(self, arms: int, known: int = 0) -> float:
        """About how long a bench of so many arms takes, so many of which are known, by how long those before took."""
        return self._slower * self._seconds(arms, known)

    def _confirmed(self, results: Mapping[str, Any], arm: str) -> bool:
        """Whether an arm is faster, beyond chance, and no larger than it may be."""
        return confirmed(results, arm) and too_large(results, arm, self._bench.memory) is None

    def _sentence(self, results: Mapping[str, Any], arm: str) -> str:
        """What a bench tells of an arm, and of its memory where that is too much."""
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
    """The arms of a bench that confirms them."""
    return {RECIPE if i == 0 else f"{RECIPE} {i + 1}": choices for i, choices in enumerate(recipes)}
