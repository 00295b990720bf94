"""Trials on the workers of a Ray cluster: those of one machine, and once more where a worker is lost."""

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_eff import cli
from lightning_eff._cli.errors import UsageError
from lightning_eff.bench.arms import Arm
from lightning_eff.bench.pace import Pace
from lightning_eff.bench.running.jobs import Job
from lightning_eff.bench.running.ray_places import RayPlaces, _room
from lightning_eff.tune.search import Search
from lightning_eff.tune.trials import Trials
from lightning_eff.tune.tuner import Tuner
from tests.tune.tasks import Here, config


def test_a_missing_ray_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    arguments = [
        "tune",
        "--baseline",
        config(tmp_path),
        "--target=val_loss",
        "--budget=2s",
        "--engine=ray",
        "--dry-run",
    ]
    with pytest.raises(SystemExit) as stopped:
        cli.main([*arguments, "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2 and not (tmp_path / "out").exists()
    told = capsys.readouterr().err
    assert "--engine ray: the package ray is not installed" in told
    assert "pip install -c constraints.txt '.[ray]'" in told


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        places = RayPlaces(2, 1, tmp_path_factory.mktemp("ray"))
        yield places
        places.close()
        ray.shutdown()


def test_a_worker_has_room_on_a_node_and_not_between_two() -> None:
    def node(alive: bool = True, **resources: float) -> dict[str, Any]:
        return {"Alive": alive, "Resources": resources}

    assert _room([node(CPU=3.0), node(CPU=3.0), node(alive=False, CPU=64.0)], 2) == 2, "one core of each is left over"
    assert _room([node(CPU=8.0, GPU=4.0), node(CPU=64.0)], 4) == 2, (
        "as many as its cores are for, and none without a GPU"
    )
    assert _room([node(CPU=8.0, GPU=1.0)], 4) == 1


def searched(folder: Path, look: Any, places: Any, jobs: int, known: Path | None = None) -> Search:
    """A search of few trials; prices are measured, so those of ``known`` are taken where there are some."""
    if known is not None:
        shutil.copytree(known / "rehearsals", folder / "rehearsals")
    more: dict[str, Any] = {"target": "val_loss", "budget": 0.4, "seed": 0, "threads": 1}
    trials = Trials(look.recipes, look.found, places, folder, **more)
    search = Search(look.space, trials, folder, mode="min", budget=0.4, seconds=1e6, limit=3, jobs=jobs)
    search.search()
    return search


@pytest.mark.slow
def test_two_ray_workers_give_the_trials_of_one_machine(two: Any, tmp_path: Path) -> None:
    include = ["tests.tune.tasks.Halving", "tests.tune.tasks.Neutral"]
    text = "model: {class_path: tests.tune.tasks.Waiting, init_args: {pause: 0.002}}"
    tuner = Tuner(
        config(tmp_path, text), target="val_loss", budget=0.4, include=include, out=tmp_path / "out", threads=1
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_eff.tune.tuner.Places", Here)
        look = tuner.look()
    one = searched(tmp_path / "one", look, Here(), 1)
    several = searched(tmp_path / "several", look, two, 2, tmp_path / "one")

    def without_memory(search: Search) -> list[dict[str, Any]]:
        return [{k: v for k, v in trial.items() if k != "peak_bytes"} for trial in search.trials()]

    assert without_memory(several) == without_memory(one)
    assert sum(trial["value"] is not None for trial in one.trials()) > 2
    assert len(list(Path(two.logs).iterdir())) == 2, "both had something to do"


@pytest.mark.slow
def test_a_lost_workers_job_runs_again(two: Any, tmp_path: Path) -> None:
    arm = Arm(
        "slow", "recipe", (config(tmp_path, "model: {class_path: tests.tune.tasks.Waiting, init_args: {pause: 0.1}}"),)
    )
    job = Job(arm, 1, Pace("val_loss", steps=60, sweep=60), "slow", 1)
    pids = {two._ray.get(host.start.remote()) for host in two._all}
    found: list[dict[str, Any]] = []
    waiting = threading.Thread(target=lambda: found.extend(two.do([job])))
    waiting.start()
    time.sleep(3.0)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    waiting.join(120)
    assert [record["status"] for record in found] == ["finished"] and found[0]["steps"] == 60, json.dumps(found)[:500]
    assert not pids & {two._ray.get(host.start.remote()) for host in two._all}, "others took their place"


@pytest.mark.slow
def test_a_cluster_without_room_says_so(two: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the Ray cluster has room for \d+"):
        RayPlaces(10_000, 1, tmp_path)
