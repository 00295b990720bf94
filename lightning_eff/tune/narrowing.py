"""Search a learning rate on a narrow copy of the model, carry it over to the wide one by ``MuP``, and confirm it there.

A learning rate carries over between runs of equally many steps. So the narrow runs have the steps of the wide budget, and take
less time.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_eff._cli.errors import UsageError
from lightning_eff.bench.arms import Arm
from lightning_eff.bench.calibration import FEWEST_STEPS
from lightning_eff.bench.reports import drawing
from lightning_eff.bench.results import now, write_json
from lightning_eff.tune.arguments import in_memory
from lightning_eff.tune.config import Choices, Recipes, parsed
from lightning_eff.tune.confirm import RECIPE, Bench
from lightning_eff.tune.inspection import probing, profiling
from lightning_eff.tune.inspection.looking import Look
from lightning_eff.tune.reports.writing import recipe
from lightning_eff.tune.search import chosen, require_extra
from lightning_eff.tune.space import technique_classes
from lightning_eff.tune.timing import LEAST, Timetable, in_words
from lightning_eff.tune.tuner import SHARES, Tell, Tuner

CARRIED = ("rate", "weight_decay")  # own settings of a module that carry over
SCHEMA = "lightning_eff.tune.narrow/1"
PLAN = "narrow.json"


class WideRecipes(Recipes):
    """Writes choices that were found on a narrow model as configs of the wide one, with ``MuP``.

    Args:
        paths: the paths of the wide model's configs.
        base: the narrow model, with ``class_path`` and ``init_args``.
        like: writes the narrow model's configs.
        scheduled: whether the wide module decays its own learning rate.
    """

    def __init__(self, paths: Sequence[str], base: Mapping[str, Any], like: Recipes, *, scheduled: bool) -> None:
        super().__init__(paths, like.space, scheduled=scheduled)
        self._base = dict(base)

    @override
    def overlay(self, choices: Choices, steps: int) -> dict[str, Any]:
        config = super().overlay(choices, steps)
        if choices.own:  # others are the baseline
            trainer = config.setdefault("trainer", {})
            here = trainer.get("callbacks") or (self._raw.get("trainer") or {}).get("callbacks") or []
            ours = {"class_path": "lightning_eff.MuP", "init_args": {"base": self._base}}
            trainer["callbacks"] = [*(here if isinstance(here, list) else [here]), ours]
        return config


class NarrowTuner:
    """Search the learning rate and weight decay on a narrow model, and confirm them on the wide one.

    :meth:`run` profiles both and searches on the narrow one. The recipe is the wide config with the values found, and ``MuP``
    with the narrow model as its base. It is compared with the wide baseline. :meth:`run` writes ``recipe.yaml`` and
    ``results.json``.

    Args:
        baseline: the path(s) of the wide model's configs.
        narrow: the path(s) of configs that make it narrow, merged on top of the baseline's.
        target, budget, search, out, seed, seeds, threads, jobs, mode: as for :class:`Tuner`. The budget is of a wide run.
        **settings: further arguments of :class:`Tuner`.

    Raises:
        ValueError: for a value out of range, or settings that this search does not have.
    """

    def __init__(
        self, baseline: Sequence[str], narrow: Sequence[str], *, out: Any = "lightning_logs/tune", **settings: Any
    ) -> None:
        for name in ("include", "exclude"):
            if settings.pop(name, None):
                raise UsageError(
                    f"--{name}: a search with --narrow tries no techniques, only the learning rate and weight decay. Leave it"
                    " out, or tune the wide config without --narrow."
                )
        self.out = Path(out)
        self._settings = {**settings, "exclude": [cls.__name__ for cls in technique_classes()]}
        self.paths = tuple(baseline)
        self.wide = Tuner(self.paths, out=self.out, **self._settings)  # reads the arguments
        self._narrow_paths = (*self.paths, *narrow)
        for path in narrow:
            if not Path(path).is_file():
                raise UsageError(f"--narrow {path}: there is no such file. Give a config that makes the model narrow.")

    def look(self, tell: Tell | None = None) -> Look:
        """Profile both models, and return the search space.

        Args:
            tell: a function that is called with a line about each stage.

        Raises:
            ValueError: for a config or budget that cannot be used, a target that is not logged, or a narrow model that MuP
                cannot take as the base.
            RuntimeError: if one of the two does not train.
        """
        return self._look(tell or (lambda line: None))[2]

    def _look(self, say: Tell) -> tuple[profiling.Found, Tuner, Look, WideRecipes]:
        self.out.mkdir(parents=True, exist_ok=True)
        file = self.out / PLAN
        plan = {
            "wide": [Path(path).read_text() for path in self.paths],
            "narrow": [Path(path).read_text() for path in self._narrow_paths],
            **{name: getattr(self.wide, name) for name in ("budget", "target", "mode", "seed", "threads")},
        }
        if file.is_file():
            saved = json.loads(file.read_text())
            if saved["plan"] != json.loads(json.dumps(plan)):
                raise UsageError(
                    f"{self.out} holds another search. Name another folder with --out, or delete this one."
                )
            found = profiling.Found.of(saved["wide"])
        elif any(self.out.iterdir()):
            raise UsageError(f"{self.out} holds other files. Name an empty folder with --out.")
        else:
            say("profiling the wide model")
            found = self._profile(self.paths)
            say("profiling the narrow model")
            # the narrow runs have as many steps as the wide ones
            steps = max(found.steps, 2 * FEWEST_STEPS)
            seconds = steps * self._profile(self._narrow_paths).step_seconds
            saved = {"plan": plan, "wide": found.record(), "seconds": seconds}
            write_json(file, saved)
        settings = {**self._settings, "budget": saved["seconds"]}
        tuner = Tuner(self._narrow_paths, out=self.out / "narrow", **settings)
        look = tuner.look(say)
        own = tuple(one for one in look.space.own if one.name in CARRIED)
        if not any(one.name == "rate" for one in own):
            raise UsageError(f"--narrow: {look.space.own_left_out.get('rate', 'the learning rate is not searched')}.")
        space = replace(look.space, own=own, techniques={})
        recipes = Recipes(self._narrow_paths, space, scheduled=look.recipes.scheduled)
        base = parsed(self._narrow_paths)["model"]
        wide = WideRecipes(
            self.paths,
            {name: base[name] for name in ("class_path", "init_args") if base.get(name) is not None},
            recipes,
            scheduled=found.run.decayed_rate or found.run.manual_optimization,
        )
        if not saved.get("runs"):
            self._check(wide, tuner, found.steps, say)
            write_json(file, {**saved, "runs": True})
        return found, tuner, Look(look.found, space, recipes), wide

    def _check(self, recipes: WideRecipes, tuner: Tuner, steps: int, say: Tell) -> None:
        """Train the wide model for two steps with MuP, before any time is spent on a search.

        Raises:
            ValueError: if they do not run.
        """
        say("two steps of the wide model with MuP")
        own = {
            setting.name: probing.middle(setting.range) if setting.value is None else setting.value
            for setting in recipes.space.own
        }
        arm = recipes.arm(RECIPE, Choices(own), steps, self.out / "configs")
        one, places = self.wide, tuner._places(1)
        try:
            began = time.monotonic()
            places.start()
            write_json(tuner.out / "start.json", {"process_seconds": time.monotonic() - began})
            why = probing.failure(
                arm, "MuP", places, target=one.target, steps=steps, seed=one.seed, threads=one.threads
            )
        finally:
            places.close()
        if why is not None:
            raise UsageError(f"--narrow: the wide model does not train with this narrow model as its base. {why}")

    def _profile(self, paths: Sequence[str]) -> profiling.Found:
        one = self.wide
        arm = Arm("baseline", "baseline", tuple(paths))
        return profiling.look(
            arm, target=one.target, budget=one.budget, seed=one.seed, threads=one.threads, memory=one.memory
        )

    def run(self, *, progress: bool = True, tell: Tell | None = None) -> dict[str, Any]:
        """Search, confirm, and write the results. Results that are already in the folder are reused.

        Args:
            progress: whether to show progress bars in the confirming bench.
            tell: a function that is called with a line about each stage.

        Returns:
            The results, as in ``results.json``: ``own`` (the values found), ``sentence`` (the verdict on the wide model),
            ``summary`` and ``trials``.

        Raises:
            ModuleNotFoundError: without Optuna (the extra ``tune``) or matplotlib (``bench``).
            ValueError: if the search time is too short, and as in :meth:`look`.
            RuntimeError: if the narrow model trains in none of its trials, or the wide one with the values found in none.
        """
        require_extra()
        drawing.require_extra()
        say = tell or (lambda line: None)
        one = self.wide
        if one.search is None:
            raise UsageError("NarrowTuner(search=None): there is no time to search. Set search='1h'.")
        timetable = Timetable(one.search, SHARES)
        found, tuner, look, recipes = self._look(say)
        narrow = tuner._durations(look.found)
        confirming = found.durations(one.budget, narrow.process, len(one.seeds), one.jobs).bench(LEAST)
        searched = tuner._searched()  # before it was interrupted
        seconds = timetable.left - searched - confirming
        if seconds < narrow.trial(SHARES) and not searched:
            least = math.ceil(timetable.spent + confirming + narrow.trial(SHARES))
            raise UsageError(
                f"--search {one.search:g}s is too short: a trial takes about {in_words(narrow.trial(SHARES))}, and the"
                f" confirmation on the wide model {in_words(confirming)}. Set --search to {least}s or more."
            )
        say(
            f"plan: {in_words(max(seconds, 0.0))} for trials of the narrow model, then {in_words(confirming)} to confirm"
        )
        places = tuner._places(tuner.jobs)
        try:
            search = tuner._search(look, places, searched + max(seconds, 0.0), say)
        finally:
            places.close()
        best = search.best("baseline")
        assert best is not None
        choices = chosen(best)
        bench = Bench(
            recipes,
            Choices(),
            lambda choices: found.steps,
            self.out,
            baseline_steps=found.steps,
            target=one.target,
            mode=one.mode,
            budget=one.budget,
            seeds=one.seeds,
            threads=one.threads,
            jobs=min(one.jobs, in_memory(found.peak_bytes)),
            memory=one.memory,
            progress=progress,
            drawn=True,
        )
        say(f"confirming {choices.describe()} on the wide model; about {in_words(confirming)}")
        results = bench.run("confirm", {RECIPE: choices}, controls=True)
        summary = results["summary"][RECIPE]
        if RECIPE not in results["calibration"]:
            raise RuntimeError(
                f"tune --narrow: {summary['sentence']} The narrow model's best was {choices.describe()}."
            )
        steps = results["calibration"][RECIPE]["steps"]
        sentence = f"{choices.describe()}, found on the narrow model and carried over by MuP: {summary['sentence']}"
        (self.out / "recipe.yaml").write_text(recipe(recipes, choices, steps, sentence))
        record = {
            "schema": SCHEMA,
            "finished": now(),
            "own": dict(choices.own),
            "sentence": sentence,
            "summary": summary,
            "bench": results["folder"],
            "narrow_budget_seconds": tuner.budget,
            "budget_seconds": one.budget,
            "steps": found.steps,
            "trials": search.trials("baseline"),
        }
        write_json(self.out / "results.json", record)
        return record
