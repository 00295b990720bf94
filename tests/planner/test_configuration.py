"""What a plan prints can be run: every layout that is searched is one that strategies and techniques take."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy

import lightning_eff
from lightning_eff import FP8Precision, HybridParallelStrategy
from lightning_eff.planner._launch.abilities import PLANNED, Abilities, abilities
from lightning_eff.planner._launch.configuration import (
    Section,
    as_yaml,
    callbacks,
    configuration,
    loader_batch,
    strategy,
)
from lightning_eff.planner.command import main
from lightning_eff.planner.layouts import Layout, enumerate_layouts
from lightning_eff.planner.profiling import ModuleProfile
from lightning_eff.planner.recipe import batch_key
from lightning_eff.strategies._pipeline import layout as pipeline_layout
from lightning_eff.strategies._pipeline.order import SPLIT_BACKWARD, refusal
from tests.planner.models import Flat, Llama
from tests.planner.test_command import ROOT, recipe
from tests.planner.test_search import layout, profile

SECTION = Section([], [], "bf16-mixed", ("data", "init_args", "batch_size"), 4, "stack", ["recipe.yaml"])


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)


def every(able: Abilities | None = None, of: ModuleProfile | None = None, gpus: int = 8) -> list[Layout]:
    return list(enumerate_layouts(of or profile(), gpus, 8, 16, Counter(), able, fp8=True))


def test_the_strategy_takes_every_layout_with_every_argument() -> None:
    """Built as it is printed, and laid out over the blocks as the pipeline does it; all of its arguments are there."""
    seen: set[tuple[Any, ...]] = set()
    for at in every():
        split = [range(i, i + 1) for i in range(at.num_stages - 1)] + [range(at.num_stages - 1, 8)]
        key = (at.dp, at.tp, at.pp, at.shard, at.shards, at.schedule, at.stages_per_rank, at.num_microbatches)
        if key in seen:
            continue
        seen.add(key)
        found = strategy(at, split, SECTION)
        assert isinstance(found, dict)
        if at.plain:
            assert found["class_path"] == "lightning.pytorch.strategies.DDPStrategy"
            other = strategy(at, split, replace(SECTION, package="pytorch_lightning"))
            assert isinstance(other, dict) and other["class_path"] == "pytorch_lightning.strategies.DDPStrategy"
            continue
        arguments = found["init_args"]
        text = dict(arguments, timeout=None)
        built = HybridParallelStrategy(**text)
        assert set(arguments) == set(HybridParallelStrategy.__init__.__annotations__) - {"return"}
        assert built.settings.shard == (at.shards or at.shard != "none")
        assert arguments["sequence_parallel"] is False, "it would not save what lies between the maps"
        if at.pp > 1:
            blocks = [torch.nn.Linear(1, 1) for _ in range(8)]
            where = pipeline_layout.layout(
                torch.nn.Module(),
                blocks,
                schedule=at.schedule,
                num_ranks=at.pp,
                split=arguments["pipeline_split"],
                path="stack",
                who="test",
            )
            pipeline_layout.check_num_microbatches(arguments["num_microbatches"], where, who="test")
            assert where.num_stages == at.num_stages
            assert refusal(at.schedule, at.pp, at.num_stages, at.num_microbatches) is None
            assert loader_batch(at) % arguments["num_microbatches"] == 0
    assert {"zero2", "zero3", "none"} == {key[3] for key in seen} and any(key[4] for key in seen)


def test_techniques_stand_where_they_are_not_refused() -> None:
    layouts = every()
    assert {at.remat for at in layouts} == {"none", "selective", "full", "sqrt", "optimal"}
    assert {at.bits for at in layouts} == {32, 8, 4} and any(at.offload for at in layouts)
    assert any(at.fp8 and at.tp > 1 for at in layouts) and any(at.fp8 and at.pp > 1 for at in layouts)
    for at in layouts:
        if at.bits < 32 or at.offload:
            assert at.plain, "they need a single device or DDP"
        assert not (at.bits < 32 and (at.fp8 or at.remat != "none"))
        if at.remat == "optimal":
            assert at.shard == "none" and at.pp == 1
        if at.schedule in SPLIT_BACKWARD:
            assert at.remat == "none" and at.shard != "zero3"
        for entry in callbacks(at, "stack"):
            cls = getattr(lightning_eff, entry["class_path"].rpartition(".")[2])
            assert cls(**entry["init_args"]) and cls.__name__ in PLANNED


class OwnBackward(Flat):
    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


def able(**changes: Any) -> Abilities:
    module = changes.pop("module", Flat())
    given: dict[str, Any] = {
        "callbacks": [],
        "plugins": [],
        "precision": "bf16-mixed",
        "optimizer": torch.optim.AdamW(module.parameters()),
        "sync_batchnorm": False,
        "fp8": False,
        "batch": None,
        "without": [],
        "exact": False,
    }
    return abilities(module, **(given | changes))


ALL = {"tp", "pp", "shard", "fp8", "bits", "offload", "remat"}


@pytest.mark.parametrize(
    ("changes", "gone"),
    [
        ({}, set()),
        ({"callbacks": [lightning_eff.SelectiveBackprop]}, set()),
        ({"callbacks": [lightning_eff.ManifoldMixup]}, {"pp"}),
        ({"callbacks": [lightning_eff.SequenceLengthWarmup]}, set()),
        ({"callbacks": [lightning_eff.SharpnessAwareMinimization]}, {"tp", "pp", "shard"}),
        ({"callbacks": [StochasticWeightAveraging]}, {"tp", "pp", "shard"}),
        ({"callbacks": [lightning_eff.ActivationOffload]}, {"bits"}),
        ({"callbacks": [lightning_eff.LoRA]}, set()),
        ({"callbacks": [lightning_eff.PromptTuning]}, {"pp"}),
        ({"precision": "16-mixed"}, {"tp", "pp", "shard", "offload", "fp8"}),
        ({"precision": "32-true"}, {"fp8"}),
        ({"sync_batchnorm": True}, {"tp", "pp"}),
        ({"module": OwnBackward()}, {"pp"}),
        ({"optimizer": torch.optim.LBFGS(Flat().parameters())}, {"tp", "pp", "shard", "offload"}),
        ({"optimizer": None}, {"offload"}),
        ({"plugins": [{"class_path": "lightning_eff.ACTPrecision"}]}, {"bits", "fp8"}),
        ({"plugins": [{"class_path": "lightning_eff.StochasticRoundingBF16"}]}, {"offload", "fp8"}),
        ({"plugins": [{"class_path": "FP8Precision", "init_args": {"amax": "delayed"}}], "fp8": True}, {"pp", "bits"}),
        ({"exact": True}, {"fp8", "bits"}),
        ({"without": ["Rematerialization", "pipeline"]}, {"remat", "pp"}),
        ({"without": ["shard", "OptimizerOffload", "fp8"]}, {"shard", "offload", "fp8"}),
    ],
)
def test_what_the_recipe_would_have_refused_is_not_searched(changes: dict[str, Any], gone: set[str]) -> None:
    found = every(able(**changes))
    seen = {name for name in ("tp", "pp") if any(getattr(at, name) > 1 for at in found)}
    seen |= {"shard"} if any(at.shard != "none" for at in found) else set()
    seen |= {"fp8"} if any(at.fp8 for at in found) else set()
    seen |= {"bits"} if any(at.bits < 32 for at in found) else set()
    seen |= {"offload"} if any(at.offload for at in found) else set()
    seen |= {"remat"} if any(at.remat != "none" for at in found) else set()
    assert found and seen == ALL - gone


def test_fp8_has_to_have_a_layer_that_gains() -> None:
    assert not any(at.fp8 for at in every(of=replace(profile(), fp8_share=0.0)))
    assert not any(at.fp8 for at in enumerate_layouts(profile(), 8, 8, 16, Counter()))


def test_a_loader_that_cannot_be_set_keeps_its_batches() -> None:
    found = every(Abilities(batch=4))
    assert found and {loader_batch(at) for at in found} == {4}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"data": {"init_args": {"batch_size": 4, "size": 4}}}, ("data", "init_args", "batch_size")),
        ({"data": {"init_args": {"loader": {"batch_size": 4}}}}, ("data", "init_args", "loader", "batch_size")),
        ({"data": {"init_args": {"batch_size": 8}}}, None),
        ({"data": {"init_args": {"batch_size": 4, "other": {"batch_size": 4}}}}, None),
        ({"data": None, "model": {"init_args": {"batch_size": 4}}}, ("model", "init_args", "batch_size")),
        ({"data": None, "model": {"init_args": {"width": 4}}}, None),
    ],
)
def test_where_a_config_has_the_batch_size(config: dict[str, Any], found: tuple[str, ...] | None) -> None:
    assert batch_key(config, 4) == found


def test_the_config_says_all_of_the_layout() -> None:
    at = layout(dp=4, pp=2, tp=2, shard="zero3", shards=2, schedule="Interleaved1F1B", stages_per_rank=2)
    at = replace(at, micro_batch=3, num_microbatches=4, remat="full", fp8=True)
    split = [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    own = [{"class_path": "Rematerialization"}, {"class_path": "lightning.pytorch.callbacks.Timer"}]
    found = configuration(at, split, 8, replace(SECTION, callbacks=own))
    trainer = found["trainer"]
    assert (trainer["num_nodes"], trainer["devices"], trainer["accumulate_grad_batches"]) == (2, 8, 1)
    arguments = trainer["strategy"]["init_args"]
    assert arguments["shard"] == 2 and arguments["pipeline_split"] == [2, 2, 2, 2] and arguments["layers"] == "stack"
    assert (arguments["schedule"], arguments["num_microbatches"]) == ("Interleaved1F1B", 4)
    assert arguments["timeout"] == "0:30:00"
    names = [entry["class_path"].rpartition(".")[2] for entry in trainer["callbacks"]]
    assert names == ["Timer", "Rematerialization"], "the recipe's own stay, and what is planned takes its place"
    assert trainer["precision"] is None and trainer["plugins"][0]["init_args"]["base"] == "bf16-mixed"
    assert FP8Precision(**trainer["plugins"][0]["init_args"])
    assert found["data"] == {"init_args": {"batch_size": 12}}
    text = as_yaml(found, SECTION, "plan.yaml", 8, 2)
    assert yaml.safe_load(text) == found and "lightning-eff fit --config recipe.yaml --config plan.yaml" in text
    single = configuration(layout(micro_batch=3, num_microbatches=4, bits=4, offload=True), [range(8)], 1, SECTION)
    assert single["trainer"]["accumulate_grad_batches"] == 4 and single["data"]["init_args"]["batch_size"] == 3
    assert single["trainer"]["strategy"] == "auto", "a class of its own would have to be told the device"


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    "only",
    [
        ["pp=2", "tp=2", "remat=full"],
        ["shards=2", "tp=1"],
        ["bits=4", "offload=true"],
        ["fp8=true", "pp=1", "shard=none"],
    ],
    ids=" ".join,
)
def test_what_is_written_is_read_by_fit(only: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LightningCLI takes recipe and plan together, and builds from them the trainer that was planned."""
    from lightning.pytorch.cli import LightningCLI

    config = recipe(tmp_path, callbacks=[{"class_path": "LearningRateMonitor"}])
    text = yaml.safe_load(Path(config).read_text())
    text["model"]["init_args"] |= {"dim": 2048, "num_heads": 8} if "fp8=true" in only else {}
    Path(config).write_text(yaml.safe_dump(text))
    options = [word for each in only for word in ("--only", each)]
    base = [
        "--config",
        config,
        "--gpus",
        "8",
        "--gpu",
        "h200",
        "--timeline",
        "none",
        "--quiet",
        "--out",
        "out/plan.yaml",
    ]
    main([*base, "--json", "-", "--global-batch", "32", *options])
    best = json.loads(capsys.readouterr().out)
    written = Path("out/plan.yaml").read_text()
    assert best["config"] == written
    at = best["best"][0]

    class Built(LightningCLI):
        def instantiate_trainer(self, **kwargs: Any) -> Any:
            section = self.config_init["trainer"]
            self.built = {name: section[name] for name in ("strategy", "callbacks", "plugins", "precision", "devices")}

    arguments = ["--config", config, "--config", "out/plan.yaml"]
    cli = Built(
        pl.LightningModule,
        pl.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=None,
        run=False,
        args=arguments,
    )
    built = cli.built
    if at["tp"] * at["pp"] > 1 or at["shard"] != "none":
        assert isinstance(built["strategy"], HybridParallelStrategy)
        assert built["strategy"].settings.shard == (at["shards"] or at["shard"] != "none")
        assert built["strategy"]._timeout.total_seconds() == 1800
    else:
        assert isinstance(built["strategy"], DDPStrategy)
    names = [type(callback).__name__ for callback in built["callbacks"]]
    assert names[0] == "LearningRateMonitor" and ("Rematerialization" in names) == (at["remat"] != "none")
    assert ("ActivationCompression" in names, "OptimizerOffload" in names) == (at["bits"] < 32, at["offload"])
    assert (built["precision"] is None) == at["fp8"] == isinstance((built["plugins"] or [None])[0], FP8Precision)
    samples = at["micro_batch"] * (at["num_microbatches"] if at["pp"] > 1 else 1)
    assert cli.datamodule.batch_size == samples, "the loader gives what the plan counts on"


def test_pairs_are_relied_upon_where_the_module_carries_a_plan() -> None:
    from lightning_eff.planner._launch.abilities import carries_pairs, fp8_share

    llama = Llama(2, 64, 128, 8)
    assert carries_pairs(llama, list(llama.model.model.layers))
    assert not carries_pairs(Flat(), [])
    assert fp8_share([torch.nn.Sequential(torch.nn.Linear(64, 64))]) == 0.0
    mixed = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.Linear(4096, 1024))
    assert fp8_share([mixed]) == pytest.approx(0.8)
