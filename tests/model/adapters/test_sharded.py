"""Adapters under strategies that divide parameters: what two processes train, keep and resume is what one does."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

import lightning_eff as eff
from lightning_eff import LoRA, PromptTuning, QuantizedBase, VisualPromptTuning
from lightning_eff._core.session import Session
from lightning_eff._core.technique import techniques_of
from lightning_eff.strategies.hybrid_parallel import HybridParallelStrategy
from tests.conftest import Once
from tests.model.adapters import sharded_jobs as jobs
from tests.models import loader, make_batch, module, trainer
from tests.strategies.hybrid_jobs import apart
from tests.strategies.launch import launch

JOBS = "tests.model.adapters.sharded_jobs"
#: float32 of numbers around 1; the largest seen is 1.2e-7
TOLERANCE = 3e-7
SHARDED = [(layout, name) for layout in ("hybrid", "fsdp2") for name in jobs.TRIED]
#: where maps are split, and where blocks are apart
SPLIT = [("tensor", "LoRA"), ("tensor", "DoRA"), ("tensor", "VisualPromptTuning"), ("pipeline", "BitFit")]
OTHERS = [
    (layout, name)
    for layout in ("tensor", "pipeline")
    for name in jobs.TRIED
    if (layout, name) not in SPLIT
    and (layout == "tensor" or name not in ("PromptTuning", "VisualPromptTuning, shallow"))
]
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def one_process(cases: list[tuple[str, str]], folder: Path) -> None:
    """What the cases are compared with."""
    for name, kind in dict.fromkeys((name, jobs.LAYOUTS[layout][1]) for layout, name in cases):
        saved = str(folder / "one process.ckpt") if (name, kind) == ("LoRA", "") else None
        torch.save(jobs.alone(name, kind, saved), folder / f"{name} {kind}.pt")


def check_trained(found: dict[str, Any], cases: list[tuple[str, str]]) -> None:
    """That what was trained, held, saved and resumed is what one process trains."""
    assert [*found] == [f"{layout}: {name}" for layout, name in cases]
    for case, one in found.items():
        assert one.pop("apart") < TOLERANCE, case
        assert one.pop("moved") > 3e-3, case
        assert one.pop("counted") == one.pop("wanted"), case
        assert (one.pop("divided") > 20) != case.startswith("pipeline"), case
        assert one == {"still": True, "optimized": True, "kept": True, "resumed": 0.0}, case


def in_two_processes(folder: Path) -> dict[str, Any]:
    one_process(SHARDED + SPLIT, folder)
    for name in jobs.NEW:
        torch.save(jobs.first_of(name), folder / f"first {name}.pt")
    torch.save(jobs.whole(eff.export(jobs.run("LoRA", devices=1)[0])), folder / "merged.pt")
    torch.save(jobs.whole(jobs.run("LoRA", devices=1, steps=2)[0]), folder / "at two.pt")
    found = launch(JOBS, "everything", SHARDED + SPLIT, str(folder), world_size=2, timeout=240)
    return {"folder": str(folder), **found}


@pytest.fixture
def two(once: Once, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes found, and a folder with their checkpoints."""
    return once("sharded_adapters", lambda: in_two_processes(tmp_path_factory.mktemp("sharded")))


@pytest.mark.timeout(900)
def test_two_processes_train_keep_and_resume_as_one(two: dict[str, Any]) -> None:
    check_trained(two["trained"], SHARDED + SPLIT)


def test_first_values_are_those_of_one_process_wherever_weights_are_made(two: dict[str, Any]) -> None:
    for where in ("rank0", "meta"):
        for name in jobs.NEW:
            found = two["around"].pop(f"{where}: {name}")
            if (where, name) == ("meta", "DoRA"):
                assert len(found) == 2
                for said in found:
                    assert (
                        "has no initial values, because the weights that it depends on are on the meta device" in said
                    )
                    assert "Build the module with its weights" in said and "init_on='rank0'" in said
            else:
                assert found == 0.0, (where, name)


@pytest.mark.parametrize("layout", ["hybrid", "fsdp2"])
def test_what_stands_around_training(layout: str, two: dict[str, Any]) -> None:
    found = two["around"]
    assert found[f"longer, {layout}"] == [4, 4]
    assert found[f"folder, {layout}"] == 0.0
    assert len(found[f"other weights, {layout}"]) == 2
    assert len(found[f"lost, {layout}"]) == 2
    for said in found[f"lost, {layout}"]:
        assert "missing keys ['" in said and "with LoRA" in said and "Load a checkpoint of this module" in said
    for said in found[f"other weights, {layout}"]:
        assert "are not those of the checkpoint's run" in said


def test_files_are_put_together_of_what_trains_and_hold_what_was_moved(two: dict[str, Any]) -> None:
    assert two["around"]["put together"]
    assert two["around"]["moved"]


def test_a_whole_module_is_left_and_one_process_resumes_in_two(two: dict[str, Any]) -> None:
    assert two["around"]["merged"] < TOLERANCE
    assert two["around"]["from one process"] == 0.0
    assert two["around"]["bit_fit alone"] < TOLERANCE


def test_plans_of_wrapped_maps_are_refused_with_what_there_is(two: dict[str, Any]) -> None:
    plans = two["around"]["plans"]
    assert "'blocks.0.qkv' names no module with parameters" in plans["blocks.0.qkv"]
    assert "blocks.*.qkv.base_layer" in plans["blocks.0.qkv"]
    assert "the split module differs from the whole one" in plans["blocks.0.qkv.base_layer"]
    assert 'or use tensor_parallel_plan="auto"' in plans["blocks.0.qkv.base_layer"]


@pytest.mark.parametrize("layout", ["hybrid", "tensor"])
def test_a_checkpoint_of_two_processes_is_read_by_one_and_by_peft(
    layout: str, two: dict[str, Any], tmp_path: Path
) -> None:
    """It is whole: it loads beside the frozen weights, computes what was trained, and so does peft's own model."""
    folder = Path(two["folder"])
    one = torch.load(folder / "LoRA .pt", weights_only=True)
    checkpoint = folder / f"{layout} LoRA.ckpt"
    net, _ = jobs.run("LoRA", devices=1, steps=2, resume=str(checkpoint))
    assert apart(jobs.whole(net), torch.load(folder / "at two.pt", weights_only=True)) < TOLERANCE
    plain: Any = jobs.made("gpt2", [])
    technique = jobs.TRIED["LoRA"][1]()
    net = eff.apply(jobs.made("gpt2", []), *technique)
    left = net.load_state_dict(torch.load(checkpoint, weights_only=True)["state_dict"], strict=False)
    assert not left.unexpected_keys and not set(left.missing_keys) & set(one["optimized"])
    loaded = peft.PeftModel.from_pretrained(plain.model, eff.export_adapter(net.model, tmp_path))
    batch = make_batch("gpt2")
    with torch.no_grad():
        mine, merged, theirs = (m.eval()(**batch).logits for m in (net.model, eff.export(net).model, loaded))
        untrained = jobs.made("gpt2", []).model.eval()(**batch).logits
    assert (mine - untrained).abs().max() > 1e-2
    torch.testing.assert_close(theirs, mine, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(merged, mine, rtol=1e-5, atol=1e-5)


# -- what is refused at setup, on all ranks

FSDP2 = "ModelParallelStrategy"
HYBRID = HybridParallelStrategy
REFUSED: dict[str, tuple[Any, str, Any, str]] = {
    "FSDP1": (
        LoRA,
        "tiny_gpt",
        FSDPStrategy,
        "LoRA: FSDPStrategy joins parameters into flat tensors.*Use HybridParallelStrategy or strategy='ddp'",
    ),
    "folder": (
        LoRA,
        "tiny_gpt",
        lambda: jobs._fsdp2(save_distributed_checkpoint=True),
        r"LoRA\(save='adapter'\).*saves a folder that holds the whole module.*save_distributed_checkpoint=False .*or use LoRA",
    ),
    "tensor": (
        LoRA,
        "tiny_gpt",
        lambda: jobs._fsdp2(tensor_parallel_size=2),
        "needs a plan in configure_model, .*Use tensor_parallel_size=1, or HybridParallelStrategy",
    ),
    "prompts": (
        PromptTuning,
        "short",
        lambda: HYBRID(pipeline_parallel_size=2),
        r"cuts what it returns. Use HybridParallelStrategy\(pipeline_parallel_size=1\)",
    ),
    "shallow": (
        lambda: VisualPromptTuning(deep=False),
        "vit",
        lambda: HYBRID(pipeline_parallel_size=2),
        r"give deep=True. Use HybridParallelStrategy\(pipeline_parallel_size=1\)",
    ),
    "codes": (
        lambda: QuantizedBase(names=["blocks.*"]),
        "tiny_gpt",
        lambda: HYBRID(init_on="rank0"),
        "rounded where the module is made.*Use init_on='all'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_is_refused_at_setup(name: str) -> None:
    build, model, strategy, said = REFUSED[name]
    t = trainer(build(), max_steps=2)
    t._accelerator_connector.strategy = strategy()
    with pytest.raises(ValueError, match=said):
        Session.open(t, module(model), techniques_of(t), "fit")


def test_apply_in_configure_model_changes_a_module_once() -> None:
    """The module itself, in its own ``configure_model``, with the run's own seed."""
    own = jobs.made("tiny_gpt", [LoRA(rank=4)], "own")
    trainer(LoRA(rank=4), max_steps=1).fit(own, loader("tiny_gpt"))
    assert isinstance(own.net.blocks[0].qkv.base_layer, nn.Linear)


# -- behind the marker: each in each layout, and four processes


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_other_layout(tmp_path: Path) -> None:
    one_process(OTHERS, tmp_path)
    check_trained(launch(JOBS, "trained", OTHERS, str(tmp_path), world_size=2, timeout=600), OTHERS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_data_and_tensor_parallel_at_once(tmp_path: Path) -> None:
    cases = [("grid", name) for name in jobs.TRIED]
    one_process(cases, tmp_path)
    check_trained(launch(JOBS, "trained", cases, str(tmp_path), world_size=4, timeout=600), cases)
