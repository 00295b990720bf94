"""Hooks that look at gradients and parameters, of which each process has a part: right as in one process, or refused."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision

from lightning_eff.strategies._hybrid.hooks import check_hooks
from lightning_eff.strategies._hybrid.layout import Layout
from tests.models import TinyGPT, trainer
from tests.strategies import hook_jobs
from tests.strategies.hybrid_jobs import Settings
from tests.strategies.launch import launch

TWO: dict[str, Settings] = {
    "data": {},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
}
FOUR: dict[str, Settings] = {
    "copies": {"shard": 2},
    "data x tensor": {"tensor_parallel_size": 2},
    "data x pipeline": {"pipeline_parallel_size": 2, "schedule": "ZBVZeroBubble"},
    "replicas x pipeline": {"pipeline_parallel_size": 2, "shard": False},
    "tensor x pipeline": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
PIPELINE, SHARDS, TENSOR = Layout(2, 1, 1), Layout(1, 2, 1), Layout(1, 1, 2)


def check(layouts: dict[str, Settings], world: int, tmp_path: Path) -> dict[str, Any]:
    found = launch("tests.strategies.hook_jobs", "observe", layouts, world, str(tmp_path), world_size=world)
    alone = hook_jobs.run(lambda: "auto", 1)
    beside = hook_jobs.run_beside("auto", 1, str(tmp_path / "alone"))
    for layout in layouts:
        for ranks in found[layout]["cases"]:
            for name, case in ranks.items():
                what, plain = f"{name} in {layout}", alone[name]
                assert case["losses"] == pytest.approx(plain["losses"], abs=1e-5), what
                assert case["logged"].keys() == plain["logged"].keys(), what
                assert case["logged"] == pytest.approx(plain["logged"], rel=1e-3, abs=1e-6), what
                assert case["left"] == [], what
        assert {*found[layout]["beside"]["keys"]} - {"lightning_eff_hybrid"} == {*beside["keys"]}
        for key in ("losses", "seen", "clipped", "saved"):
            assert found[layout]["beside"][key] == pytest.approx(beside[key], rel=1e-3, abs=1e-4), f"{key} in {layout}"
    ends = [round(case["losses"][-1], 3) for name, case in alone.items() if not name.startswith("double")]
    assert len(set(ends)) >= 6, "clipping changed nothing, so nothing was compared"
    return found


def test_hooks_see_the_whole_gradient_in_two_processes(tmp_path: Path) -> None:
    found = check(TWO, 2, tmp_path)
    for ranks in found["refused"]:
        for layout, said in ranks.items():
            assert "Adaptive.on_before_optimizer_step computes numbers from gradients" in said["Adaptive"], layout
            assert "Stepping.optimizer_step calls clip_grad_norm_" in said["Stepping"], layout


@pytest.mark.slow  # five more layouts: minutes
@pytest.mark.timeout(1800)
def test_hooks_see_the_whole_gradient_in_four_processes(tmp_path: Path) -> None:
    check(FOUR, 4, tmp_path)


def test_groups_that_a_hook_adds_are_saved(tmp_path: Path) -> None:
    found = launch("tests.strategies.hook_jobs", "adding", 2, str(tmp_path), world_size=2)
    for sharded in (True, False):
        assert found[f"sharded={sharded}"] == pytest.approx(found["alone"], rel=1e-5)
    assert len(found["said"]) == 2
    assert all("SGD has 1 more parameter group(s) than configure_optimizers creates" in said for said in found["said"])


def looked_through(model: pl.LightningModule, layout: Layout, *callbacks: pl.Callback, **kwargs: Any) -> list[str]:
    """The hooks that are to be given norms."""
    return [hook.name for hook in check_hooks(trainer(*callbacks, **kwargs), model, layout, who="S")]


@pytest.mark.parametrize("layout", [PIPELINE, SHARDS, TENSOR])
@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (hook_jobs.Adaptive, r"Adaptive\.on_before_optimizer_step computes numbers from gradients"),
        (hook_jobs.Total, r"Total\.on_after_backward computes numbers from gradients \(\.grad in Total\._norm"),
        (hook_jobs.Spoilt, r"Spoilt\.optimizer_step computes numbers from gradients"),
        (hook_jobs.Stepping, r"Stepping\.optimizer_step calls clip_grad_norm_.*on_before_optimizer_step"),
        (hook_jobs.Weighing, r"Weighing\.on_train_epoch_end reads parameters.*configure_optimizers"),
        (hook_jobs.WeighingOne, r"WeighingOne\.on_train_batch_end reads parameters"),
    ],
)
def test_hooks_that_would_see_a_part_are_refused(cls: type[TinyGPT], message: str, layout: Layout) -> None:
    with pytest.raises(ValueError, match=rf"S: {message}.*shard=False"):
        looked_through(cls(), layout)


def test_callbacks_that_list_parameters_are_refused_under_a_pipeline() -> None:
    with pytest.raises(ValueError, match=r"Averaging\.on_train_batch_end reads parameters"):
        looked_through(TinyGPT(), PIPELINE, hook_jobs.Averaging())
    assert looked_through(TinyGPT(), SHARDS, hook_jobs.Averaging()) == []  # element by element, on pieces


@pytest.mark.parametrize("layout", [PIPELINE, SHARDS, TENSOR])
def test_other_hooks_are_left_alone(layout: Layout) -> None:
    assert looked_through(hook_jobs.Harmless(), layout) == []
    assert looked_through(hook_jobs.Gated(), layout) == []
    assert looked_through(hook_jobs.Logging(), layout) == ["configure_gradient_clipping", "on_before_optimizer_step"]


class Counting(pl.Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.parameters = sum(p.numel() for m in pl_module.modules() for p in m._parameters.values() if p is not None)


def test_what_is_counted_is_no_number_of_a_tensor() -> None:
    for layout in (PIPELINE, SHARDS, TENSOR):
        assert looked_through(TinyGPT(), layout, Counting()) == []


def test_hooks_that_do_not_run_are_not_looked_at() -> None:
    for fn, model in (("test", hook_jobs.Adaptive()), ("validate", hook_jobs.Weighing())):
        run = trainer()
        run.state.fn = fn  # pyright: ignore[reportAttributeAccessIssue]
        assert check_hooks(run, model, PIPELINE, who="S") == []


def test_norms_after_accumulated_passes_are_refused() -> None:
    assert looked_through(hook_jobs.Helped(), PIPELINE) == ["on_after_backward"]
    with pytest.raises(ValueError, match=r"after each of 2 accumulated .*on_before_optimizer_step"):
        looked_through(hook_jobs.Helped(), PIPELINE, accumulate_grad_batches=2)


def test_functions_that_closures_hold_are_seen() -> None:
    from lightning.pytorch.utilities import grad_norm as mine

    class Closed(TinyGPT):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log_dict(mine(self, 2))

    (hook,) = check_hooks(trainer(), Closed(), PIPELINE, who="S")
    plain = mine
    with hook.places.acting(None):  # pyright: ignore[reportArgumentType]
        assert mine is not plain
    assert mine is plain


class OwnClipping(Precision):
    def clip_grad_by_norm(self, optimizer: Any, clip_val: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.main_params(optimizer), clip_val)


def test_a_precision_plugin_that_clips_by_itself_is_refused() -> None:
    with pytest.raises(ValueError, match=r"OwnClipping overrides clip_grad_by_norm"):
        looked_through(TinyGPT(), SHARDS, plugins=[OwnClipping()])
