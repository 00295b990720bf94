"""The evidence on the recipes' pages is of what the recipes choose, on seeds that no search used."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks.shipped import page
from lightning_eff.recipes.resolving import resolve
from lightning_eff.recipes.shipped import RECIPES

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COPIED = [(name, one) for name, benches in page.BENCHES.items() for one in benches if one.config]


def module(task: str) -> Any:
    """The module of a task's baseline."""
    given = yaml.safe_load((ROOT / "benchmarks" / task / "baseline.yaml").read_text())["model"]
    home, _, name = given["class_path"].rpartition(".")
    return getattr(importlib.import_module(home), name)(**given["init_args"])


def batch(task: str) -> Any:
    """A batch like those of the task."""
    ids = torch.arange(16 * 128).view(16, 128) % 250
    labels = torch.where(torch.arange(128) % 7 == 0, ids, -100)
    masked = {"input_ids": ids, "labels": labels}
    images = torch.zeros(64, 1, 8, 8), torch.zeros(64, dtype=torch.long)
    return {"gpt": ids, "bert": masked, "bert8k": masked, "vit": images}[task]


def plain(callbacks: list[dict[str, Any]], rate: float) -> dict[str, Any]:
    """Callbacks by their class, without learning rates of other parameters that are the module's own."""
    found: dict[str, Any] = {}
    for one in callbacks:
        arguments = dict(one.get("init_args", {}))
        if set(arguments.get("group_lr", {}).values()) == {rate}:
            del arguments["group_lr"]
        found[one["class_path"].removeprefix("lightning_eff.")] = arguments
    return found


@pytest.mark.parametrize(("name", "bench"), COPIED, ids=[f"{name}:{one.variant}" for name, one in COPIED])
def test_the_measured_config_is_what_the_recipe_chooses(name: str, bench: page.Bench) -> None:
    net = module(bench.task)
    arms = json.loads((RESULTS / f"{bench.results}.json").read_text())["plan"]["arms"]
    *_, text = next(arm["configs"] for arm in arms if arm["name"] == bench.arm)
    assert text.startswith(f"# benchmarks/{bench.task}/{bench.config}.yaml\n")
    measured = plain(yaml.safe_load(text)["trainer"]["callbacks"], net.hparams["lr"])
    resolved = resolve(name, net, bench.variant, data=batch(bench.task), steps=1000)
    chosen = plain(resolved.config()[:-1], net.hparams["lr"])
    if name == "exact":
        assert chosen.pop("LoaderTuning") == {} and "`LoaderTuning`" in bench.given
    if "MaskRateSchedule" in measured:
        for setting in ("mask_token_id", "vocab_size"):
            del measured["MaskRateSchedule"][setting]
        assert "the mask token and the vocabulary" in bench.given
    assert json.loads(json.dumps(chosen)) == measured


@pytest.mark.parametrize(("name", "bench"), [(n, one) for n, benches in page.BENCHES.items() for one in benches])
def test_the_results_are_there_on_seeds_that_no_search_used(name: str, bench: page.Bench) -> None:
    file = RESULTS / f"{bench.results}.json"
    if not file.is_file() and bench.optional:
        return
    if not file.is_file():
        told = page.page_of(RECIPES[name]).read_text()
        assert f"| `{name}:{bench.variant}` | not measured in this release |" in told
        return
    results = json.loads(file.read_text())
    arm = next(arm for arm in results["plan"]["arms"] if arm["name"] == bench.arm)
    assert arm["kind"] == "recipe"
    searched = {
        seed
        for file in RESULTS.glob(f"search_*_{bench.task}.json")
        for seed in json.loads(file.read_text())["plan"]["seeds"]
    }
    used = {run["seed"] for run in results["runs"] if run["arm"] == bench.arm}
    assert len(used) >= 3 and not used & {*searched, 0}


def test_every_recipe_has_a_page_with_its_evidence() -> None:
    """The pages are as the results and the recipes make them."""
    made = page.pages()
    assert {*made} == {page.DOCS / "index.md", *(page.page_of(one) for one in RECIPES.values())}
    for path, text in made.items():
        assert path.read_text() == text, f"{path}: run python -m benchmarks.shipped.page"
        assert "no measurement" not in text, path
