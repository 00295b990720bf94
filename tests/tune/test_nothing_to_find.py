"""A search in which there is nothing to find: every technique is neutral, and what it claims is chance."""

from pathlib import Path

import pytest

from lightning_eff._core.search_space import SearchSpace
from lightning_eff.bench.running.workers import InProcess
from lightning_eff.tune.concluding import Finding
from lightning_eff.tune.config import Recipes
from lightning_eff.tune.confirm import Bench
from lightning_eff.tune.inspection import profiling
from lightning_eff.tune.own import discover
from lightning_eff.tune.search import Search, chosen
from lightning_eff.tune.space import Candidate, Space
from lightning_eff.tune.trials import Trials
from lightning_eff.tune.tuner import Tuner
from tests.tune import tasks
from tests.tune.tasks import Here, config

pytest.importorskip("optuna")

REPETITIONS, ALLOWED = 20, 2
BUDGET, TRIALS = 1.0, 4
NEUTRAL = [tasks.Neutral, tasks.NeutralToo, tasks.NeutralAsWell]


def searched(folder: Path, seed: int) -> str | None:
    """What a search claims for a recipe; None where the baseline stands."""
    path = config(folder)
    tuner = Tuner(path, target="val_loss", budget=BUDGET, out=folder / "out", threads=1, seed=seed)
    tuner.out.mkdir(parents=True)
    found: profiling.Found = tuner._profile(lambda line: None)
    own, without = discover({"model": {"init_args": {"lr": 3e-3, "weight_decay": 0.01}}}, found)
    names = {f"tests.tune.tasks.{cls.__name__}": cls for cls in NEUTRAL}
    techniques = {name: Candidate(name, cls, SearchSpace()) for name, cls in names.items()}
    space = Space(tuple(own), without, techniques, {}, 2, found.run)
    recipes = Recipes(tuner.paths, space, scheduled=found.run.decayed_rate)
    places = Here()
    trials = Trials(recipes, found, places, tuner.out, target="val_loss", budget=BUDGET, seed=seed, threads=1)  # pyright: ignore[reportArgumentType]
    search = Search(space, trials, tuner.out, mode="min", budget=BUDGET, seconds=1e6, seed=seed, limit=TRIALS)
    search.search()
    best = search.best("baseline")
    assert best is not None
    bench = Bench(
        recipes,
        chosen(best),
        trials.steps,
        tuner.out,
        baseline_steps=trials.steps(chosen(best)),
        target="val_loss",
        mode="min",
        budget=BUDGET,
        seeds=[100 * seed + i for i in (1, 2, 3)],
        threads=1,
        jobs=1,
        progress=False,
        drawn=False,
    )

    class Look:
        pass

    look = Look()
    look.found, look.space, look.recipes = found, space, recipes  # pyright: ignore[reportAttributeAccessIssue]
    result = Finding(look, search, bench).conclude(lambda line: None)
    return None if result.recipe is None else result.sentence


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_search_among_neutral_techniques_claims_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_eff.bench.benchmark.Workers", lambda *args: InProcess())
    claims: list[str] = []
    for seed in range(REPETITIONS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        claim = searched(folder, seed)
        print(f"{seed}: {claim or 'the baseline stands'}", flush=True)
        claims += [claim] if claim is not None else []
    assert len(claims) <= ALLOWED, claims
