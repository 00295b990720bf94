"""The best of a search, held against the tuned baseline on fresh seeds with controls; and what each technique adds."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_eff.bench.benchmark import Benchmark
from lightning_eff.bench.pace import Budget
from lightning_eff.bench.reports.intervals import Interval, paired_interval
from lightning_eff.bench.results import write_json
from lightning_eff.tune.arguments import too_much
from lightning_eff.tune.config import Choices, Recipes

BENCHES = "benches.json"  # those that are over, each with the key of its baseline
BASELINE, RECIPE = "baseline", "recipe"


@dataclass(frozen=True)
class Contribution:
    """What a technique adds to a stack: the target without it, less that with it, so that above 0 it helps.

    Attributes:
        name: of the technique.
        interval: over the seeds, at 95 %; None for fewer than two of them.
        dropped: it adds nothing: on average the stack is as good without it.
        large: why the stack without it uses more memory than it may, so that it is not left out; None where it does not.
    """

    name: str
    interval: Interval | None
    dropped: bool
    large: str | None = None

    def told(self) -> str:
        """In words."""
        kept = "" if self.large is None else f", kept, since a run without it is too large: {self.large}"
        if self.interval is None:
            return f"{self.name}: not known{kept}"
        sure = "" if self.interval.excludes(0.0) else ", which may be chance"
        bounds = f"{self.interval.estimate:+.4g} [{self.interval.low:+.4g}, {self.interval.high:+.4g}]"
        return f"{self.name}: {bounds}{', dropped' if self.dropped else sure}{kept}"


class Bench:
    """Benches of what a search found, all with one baseline, at the same prices; what one has trained the next takes over.

    Args:
        recipes: writes choices as configs.
        baseline: the tuned baseline's choices.
        steps: of choices, the optimizer steps that the budget holds, for settings that a config has in steps.
        held: of the tuned baseline, as its trial told.
        folder: for the benches, each in its own.
        target, mode, budget, threads, jobs, memory: see Tuner.
        seeds: that nothing was searched on.
        progress: show a bar.
        drawn: draw each bench's report, which needs matplotlib.
    """

    def __init__(
        self,
        recipes: Recipes,
        baseline: Choices,
        steps: Callable[[Choices], int],
        folder: Path,
        *,
        held: int,
        target: str,
        mode: Any,
        budget: float,
        seeds: Sequence[int],
        threads: int,
        jobs: int,
        memory: int | None = None,
        progress: bool,
        drawn: bool,
    ) -> None:
        self.recipes, self.baseline, self.steps, self.folder = recipes, baseline, steps, folder
        self.held, self.memory = held, memory
        self.settings = {"target": target, "mode": mode, "seeds": list(seeds), "threads": threads, "jobs": jobs}
        self.settings["budget"] = Budget(budget, "reference")
        self.sign = 1.0 if mode == "min" else -1.0
        self.progress, self.drawn = progress, drawn
        file = folder / BENCHES
        self._done: dict[str, str] = json.loads(file.read_text()) if file.is_file() else {}

    def run(self, name: str, arms: Mapping[str, Choices], *, controls: bool) -> dict[str, Any]:
        """The results of a bench of these choices, by name, against the tuned baseline; under "folder", where they lie.

        Each set of arms has a folder of its own, so that a search that goes on, and finds another best, is no obstacle. What
        another one of the same tuned baseline has trained is not trained again.
        """
        place = self._place(name, arms)

        def source(choices: Choices) -> Any:
            return self.recipes.arm("", choices, self.steps(choices), self.folder / "configs").source

        bench = Benchmark(
            source(self.baseline),
            {arm: source(choices) for arm, choices in arms.items()},
            out=self.folder / place,
            controls="auto" if controls else None,
            rounds=4,
            reference=self.folder / "prices.json",
            known=[
                self.folder / done for done, key in self._done.items() if key == self.baseline.key and done != place
            ],
            title=f"What tuning found: {name}",
            tuned=[BASELINE, *arms],
            baseline_name=BASELINE,
            **self.settings,
        )
        results = bench.run(progress=self.progress, report=self.drawn)
        self._done[place] = self.baseline.key
        write_json(self.folder / BENCHES, self._done)
        return {**results, "folder": place}

    def begun(self, name: str, arms: Mapping[str, Choices]) -> bool:
        """Whether a bench of these choices was begun, so that it goes on where it was, or is over."""
        return (self.folder / self._place(name, arms)).is_dir()

    def _place(self, name: str, arms: Mapping[str, Choices]) -> str:
        keys = [self.baseline.key, *(choices.key for choices in arms.values())]
        return f"{name}-{hashlib.sha256(' '.join(keys).encode()).hexdigest()[:8]}"

    @staticmethod
    def apart(choices: Choices) -> dict[str, Choices]:
        """A stack, and the stack without each of its techniques."""
        return {RECIPE: choices} | {f"without {name}": choices.without(name) for name in choices.techniques}

    def contributions(self, choices: Choices) -> list[Contribution]:
        """What each technique of a stack adds: the stack, and the stack without each, on the same seeds."""
        results = self.run("leave_one_out", self.apart(choices), controls=False)
        return [contribution(results, name, self.sign, self.memory) for name in choices.techniques]


def contribution(results: Mapping[str, Any], name: str, sign: float, memory: int | None = None) -> Contribution:
    """What a technique adds, from a bench with an arm "recipe" and an arm "without NAME"."""
    finals: dict[str, dict[int, float]] = {}
    for run in results["runs"]:
        if run["status"] == "finished":
            finals.setdefault(run["arm"], {})[run["seed"]] = run["points"][-1]["metric"]
    own, other = finals.get(RECIPE, {}), finals.get(f"without {name}", {})
    added = [sign * (other[seed] - own[seed]) for seed in own if seed in other]
    mean = sum(added) / len(added) if added else None
    large = too_large(results, f"without {name}", memory)
    return Contribution(
        name, paired_interval(added), dropped=mean is not None and mean <= 0.0 and large is None, large=large
    )


def too_large(results: Mapping[str, Any], arm: str, memory: int | None) -> str | None:
    """Why an arm's runs use more memory than they may; None where none of them does."""
    if memory is None:
        return None
    return too_much(max((run["peak_memory_bytes"] for run in results["runs"] if run["arm"] == arm), default=0), memory)


def confirmed(results: Mapping[str, Any], arm: str) -> bool:
    """Whether a bench found an arm faster than the baseline, beyond chance."""
    return results["summary"][arm]["verdict"] == "faster"
