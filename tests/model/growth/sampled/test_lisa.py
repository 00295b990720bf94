"""LISA against plain training whose blocks are frozen by hand, and the uniform draw."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_eff import LISA, BlockSparsity, OptimizerInBackward
from lightning_eff._core.rng import keyed_generator
from lightning_eff.model.growth.sampled.lisa import drawn
from tests.cases import Case, no_blocks
from tests.ddp import launch
from tests.models import TinyGPT, loader, module, trainer
from tests.runs import SaveBatches, differences, final_state, fit

CASES = {
    "LISA": Case(
        active=lambda: LISA(1, interval=3),
        neutral=lambda: LISA(None),
        lost=(no_blocks, "classifier", "no stack of repeated blocks"),
    ),
}


class ByHand(pl.Callback):
    """The reference: freezes all blocks but those of the draw, and deletes the optimizer states of what it froze."""

    def __init__(self, num_active: int, interval: int, release: bool) -> None:
        self.num_active, self.interval, self.release = num_active, interval, release

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        blocks = pl_module.blocks if hasattr(pl_module, "blocks") else pl_module.model.transformer.h
        if trainer.global_step % self.interval:
            return
        active = drawn(len(blocks), self.num_active, keyed_generator(1, "LISA", trainer.global_step // self.interval))
        for i, block in enumerate(blocks):
            block.requires_grad_(i in active)
            for p in block.parameters():
                p.grad = None
                if self.release and i not in active:
                    trainer.optimizers[0].state.pop(p, None)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.requires_grad_(True)


@pytest.mark.parametrize(("model", "states"), [("tiny_gpt", "release"), ("tiny_gpt", "keep"), ("gpt2", "release")])
def test_it_is_training_with_blocks_frozen_by_hand(model: str, states: Any) -> None:
    reference = fit(model, list, callbacks=[ByHand(2, 3, states == "release")])
    ours = fit(model, lambda: [LISA(2, interval=3, states=states)])
    assert differences(final_state(*reference), final_state(*ours)) == []
    assert differences(final_state(*reference), final_state(*fit(model, list))) != []


def test_only_blocks_that_train_have_states() -> None:
    net, technique = TinyGPT(), LISA(1, interval=2)
    t = trainer(technique, max_steps=8)
    t.fit(net, loader("tiny_gpt"))
    held = {name for name, p in net.named_parameters() if p in t.optimizers[0].state}
    outside = {name for name, _ in net.named_parameters() if not name.startswith("blocks")}
    first = technique.report()["first_block"]
    assert held == outside | {name for name, _ in net.named_parameters() if name.startswith(f"blocks.{first}.")}
    whole = sum(p.numel() for p in net.parameters())
    block = sum(p.numel() for name, p in net.named_parameters() if name.startswith("blocks.0."))
    assert technique.report()["parameters_frozen"] == pytest.approx(3 * block / whole)


def test_blocks_are_drawn_uniformly_without_replacement() -> None:
    draws = [drawn(5, 2, keyed_generator(0, "LISA", period)) for period in range(2000)]
    assert all(len(set(active)) == 2 and active == sorted(active) for active in draws)
    counts = torch.tensor(draws).flatten().bincount(minlength=5)
    # each of five blocks is in 2 of 5 draws; a count has a standard deviation of 22
    assert (counts - 800).abs().max() < 4 * 22
    pairs = {tuple(active) for active in draws}
    assert len(pairs) == 10


def test_with_steps_in_the_backward_pass_it_ends_alike() -> None:
    technique = OptimizerInBackward()
    alone = final_state(*fit("tiny_gpt", lambda: [LISA(1, interval=3)]))
    assert differences(alone, final_state(*fit("tiny_gpt", lambda: [LISA(1, interval=3), technique]))) == []
    assert technique.report()["released_bytes"] > 0


def test_more_blocks_than_there_are_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"LISA\(num_active=4\): the module has 4 blocks, so all of them would always train"
    ):
        trainer(LISA(4), max_steps=2).fit(module("tiny_gpt"), loader("tiny_gpt"))


def test_a_block_that_trained_when_the_run_began_trains_again_after_a_resume(tmp_path: Path) -> None:
    def build() -> list[LISA]:
        return [LISA(1, interval=3)]

    draws = [drawn(4, 1, keyed_generator(1, "LISA", period)) for period in range(8)]
    again = next(i for i, active in enumerate(draws) if i > 1 and active == draws[0])
    at, last = 3 * again - 1, 3 * again + 2
    whole = fit("tiny_gpt", build, directory=tmp_path, steps=[at], max_steps=last)
    resumed = fit("tiny_gpt", build, resume=tmp_path / f"step={at}.ckpt", max_steps=last)
    assert differences(final_state(*whole), final_state(*resumed)) == []
    assert all(p.requires_grad for p in resumed[0].parameters())


def test_a_run_that_resumes_within_a_window_trains_the_blocks_of_that_window(tmp_path: Path) -> None:
    """The draw of the window's blocks is not the run's first one."""
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "max_steps": 9}
    batch, step = 11, 6  # the first of two batches of a step; five batches are an epoch of three steps

    def build() -> list[LISA]:
        return [LISA(1, interval=3)]

    first, now = (drawn(4, 1, keyed_generator(1, "LISA", period)) for period in (0, step // 3))
    assert first != now
    whole = fit("tiny_gpt", build, callbacks=[SaveBatches(tmp_path, [batch])], **settings)
    assert torch.load(tmp_path / f"batch={batch}.ckpt", weights_only=True)["global_step"] == step
    resumed = fit("tiny_gpt", build, resume=tmp_path / f"batch={batch}.ckpt", **settings)
    assert differences(final_state(*whole), final_state(*resumed)) == []


def test_others_see_all_that_trains_in_either_order(tmp_path: Path) -> None:
    """Techniques look for trained weights at setup, when some blocks may be frozen already."""
    found: list[dict[str, torch.Tensor]] = []
    masked: list[set[str]] = []
    for backwards in (False, True):
        made = [LISA(1, interval=3), sparsity := BlockSparsity(sparsity=0.5, size=4, start=0.3)]
        resume = tmp_path / "batch=3.ckpt" if found else None  # before there are masks
        saving = [] if found else [SaveBatches(tmp_path, [3])]
        net, t = fit(
            "tiny_gpt", lambda made=made, b=backwards: made[:: -1 if b else 1], callbacks=saving, resume=resume
        )
        found.append(final_state(net, t))
        masked.append({*sparsity.masks})
    assert differences(*found) == []
    maps = {name for name, p in net.named_parameters() if p.ndim == 2 and name.startswith("blocks.")}
    assert masked[0] == masked[1] >= maps


@pytest.mark.timeout(600)
def test_a_block_that_ranks_trained_separately_is_averaged_when_it_freezes() -> None:
    for name, (error, apart) in launch("frozen_apart", "LocalSGD", "DiLoCo").items():
        assert apart > 1e-4 and error < 1e-4 * apart, name


@pytest.mark.timeout(600)
def test_ranks_freeze_the_same_blocks_and_resume_within_windows() -> None:
    for name, found in launch("frozen", "LISA", "LayerFreezing").items():
        assert found["differences"] == [{}, {}], name
        first, second = found["frozen"]
        assert first == second and found["alike"], name
        assert len({tuple(names) for names in first}) > 2, f"{name} froze the same blocks throughout"
