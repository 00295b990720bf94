"""Compares the best recipe of a search with the tuned baseline on new seeds, with controls, and measures each technique."""

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
from lightning_eff.tune.timing import ROUNDS

BENCHES = "benches.json"  # the finished benches, each with the key of its baseline
BASELINE, RECIPE = "baseline", "recipe"


@dataclass(frozen=True)
class Contribution:
    """The contribution of a technique to a recipe: the target without it minus the target with it, positive if it helps.

    Attributes:
        name: the technique.
        interval: the 95 % interval over seeds. None for fewer than two seeds.
        dropped: whether it adds nothing, because the recipe is on average as good without it.
        large: why the technique is kept to save memory. None if the recipe without it fits into the limit.
    """

    name: str
    interval: Interval | None
    dropped: bool
    large: str | None = None

    def describe(self) -> str:
        """Return the contribution in words."""
        kept = "" if self.large is None else f", kept because a run without it is too large: {self.large}"
        if self.interval is None:
            return f"{self.name}: unknown{kept}"
        sure = "" if self.interval.excludes(0.0) else ", which may be chance"
        bounds = f"{self.interval.estimate:+.4g} [{self.interval.low:+.4g}, {self.interval.high:+.4g}]"
        return f"{self.name}: {bounds}{', dropped' if self.dropped else sure}{kept}"


class Bench:
    """The confirming benches of a search. They have one baseline and the same step costs, and reuse each other's runs.

    Args:
        recipes: writes choices as configs.
        baseline: the choices of the tuned baseline.
        steps: returns the optimizer steps that the budget holds for choices.
        baseline_steps: the steps of the tuned baseline in its trial.
        folder: the folder for the benches. Each has its own.
        target, mode, budget, threads, jobs, memory: see Tuner.
        seeds: the seeds, which the search did not use.
        progress: whether to show a bar.
        drawn: whether to draw each bench's report, which needs matplotlib.
    """

    def __init__(
        self,
        recipes: Recipes,
        baseline: Choices,
        steps: Callable[[Choices], int],
        folder: Path,
        *,
        baseline_steps: int,
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
        self.baseline_steps, self.memory = baseline_steps, memory
        self.settings = {"target": target, "mode": mode, "seeds": list(seeds), "threads": threads, "jobs": jobs}
        self.settings["budget"] = Budget(budget, "reference")
        self.sign = 1.0 if mode == "min" else -1.0
        self.progress, self.drawn = progress, drawn
        file = folder / BENCHES
        self._done: dict[str, str] = json.loads(file.read_text()) if file.is_file() else {}

    def run(self, name: str, arms: Mapping[str, Choices], *, controls: bool) -> dict[str, Any]:
        """Compare choices with the tuned baseline, and return the results. The key "folder" has the name of their folder.

        Each set of arms has its own folder, because a resumed search may find another best recipe. Runs of earlier benches
        with the same tuned baseline are reused.

        Args:
            name: the name of the bench.
            arms: the choices, by the name of the arm.
            controls: whether to add the control runs of each technique.
        """
        place = self._place(name, arms)

        def source(choices: Choices) -> Any:
            return self.recipes.arm("", choices, self.steps(choices), self.folder / "configs").source

        bench = Benchmark(
            source(self.baseline),
            {arm: source(choices) for arm, choices in arms.items()},
            out=self.folder / place,
            controls="auto" if controls else None,
            rounds=ROUNDS,
            reference=self.folder / "prices.json",
            known=[
                self.folder / done for done, key in self._done.items() if key == self.baseline.key and done != place
            ],
            title=f"Results of tuning: {name}",
            tuned=[BASELINE, *arms],
            baseline_name=BASELINE,
            **self.settings,
        )
        results = bench.run(progress=self.progress, report=self.drawn)
        self._done[place] = self.baseline.key
        write_json(self.folder / BENCHES, self._done)
        return {**results, "folder": place}

    def begun(self, name: str, arms: Mapping[str, Choices]) -> bool:
        """Whether a bench of these choices has begun. It may be finished."""
        return (self.folder / self._place(name, arms)).is_dir()

    def _place(self, name: str, arms: Mapping[str, Choices]) -> str:
        keys = [self.baseline.key, *(choices.key for choices in arms.values())]
        return f"{name}-{hashlib.sha256(' '.join(keys).encode()).hexdigest()[:8]}"

    @staticmethod
    def leave_one_out(choices: Choices) -> dict[str, Choices]:
        """Return a recipe, and the recipe without each of its techniques, by the names of the arms."""
        return {RECIPE: choices} | {f"without {name}": choices.without(name) for name in choices.techniques}

    def contributions(self, choices: Choices) -> list[Contribution]:
        """Return the contribution of each technique of a recipe. All arms use the same seeds."""
        results = self.run("leave_one_out", self.leave_one_out(choices), controls=False)
        return [contribution(results, name, self.sign, self.memory) for name in choices.techniques]


def contribution(results: Mapping[str, Any], name: str, sign: float, memory: int | None = None) -> Contribution:
    """Return the contribution of a technique, from a bench with the arms "recipe" and "without NAME"."""
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
    """Return why an arm's runs use too much memory, or None."""
    if memory is None:
        return None
    return too_much(max((run["peak_memory_bytes"] for run in results["runs"] if run["arm"] == arm), default=0), memory)


def confirmed(results: Mapping[str, Any], arm: str) -> bool:
    """Whether an arm is faster than the baseline beyond chance."""
    return results["summary"][arm]["verdict"] == "faster"
