"""The reference task that goes on from a trained model: it begins with that model's weights."""

from pathlib import Path

import pytest
import torch
from pytest import MonkeyPatch

from benchmarks import tune
from benchmarks.trained import module
from benchmarks.trained.module import TrainedGPT
from examples.gpt.module import GPT


def test_it_begins_with_the_weights_of_the_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    dense = GPT(16, 2, 2, 8)
    torch.save({"state_dict": dense.state_dict()}, tmp_path / "dense.ckpt")
    torch.manual_seed(1)
    made = TrainedGPT(16, 2, 2, 8, dense=str(tmp_path / "dense.ckpt"))
    text = torch.randint(0, 256, (2, 8))
    assert torch.equal(made(text), dense(text)) and not torch.equal(GPT(16, 2, 2, 8)(text), dense(text))
    assert made.hparams["num_samples"] == 0 and made.hparams["lr"] == 1e-2


def test_without_the_checkpoint_it_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"TrainedGPT\(dense=.*none.ckpt.*benchmarks.trained.module"):
        TrainedGPT(dense=str(tmp_path / "none.ckpt"))


def test_the_dense_training_is_the_baseline_of_the_gpt(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    small = {
        "model": {"dim": 16, "num_layers": 2, "block_size": 16},
        "data": {"block_size": 16, "batch_size": 2, "max_bytes": 100_000, "num_eval_windows": 2},
    }
    asked: list[str] = []
    settings = tune.settings
    monkeypatch.setattr(tune, "settings", lambda task, point: asked.append(task) or settings(task, small))
    threads = torch.get_num_threads()
    try:
        loss = module.make(tmp_path / "dense.ckpt", steps=3)
    finally:
        torch.set_num_threads(threads)
    kept = torch.load(tmp_path / "dense.ckpt", weights_only=True)
    assert asked == ["gpt"] and kept["global_step"] == 3 and 4 < loss < 7  # a guess is ln 256 = 5.5
    TrainedGPT(16, 2, 2, 16, dense=str(tmp_path / "dense.ckpt"))
