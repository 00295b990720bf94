"""SLAMB under two processes: its rule against one process, masks, what is sent, and exact resumes; LAMB on one process."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import lightning_eff as eff
from lightning_eff import SLAMB
from tests.cases import Case
from tests.conftest import Once
from tests.models import flat, loader, module, trainer
from tests.strategies.communication_launch import launch
from tests.strategies.slamb_jobs import INTERVAL, STEPS, WARMUP

SGD = "configure_optimizers returned SGD, and SLAMB replaces Adam, AdamW or LAMB"
CASES = {
    "SLAMB": Case(
        active=lambda: SLAMB(0.3, interval=3, warmup_steps=2, min_size=64),
        neutral=lambda: SLAMB(0.0),
        refuses={"classifier": SGD, "convolved": SGD},
        anywhere=True,
    )
}
pytestmark = pytest.mark.timeout(900)  # one start of processes serves all, on a busy machine too


@pytest.fixture(scope="module")
def two(once: Once) -> dict[str, Any]:
    """What two processes find, one start for all."""
    return once("slamb", lambda: launch("slamb_reference", "slamb_resume", of="slamb_jobs"))


def test_two_ranks_train_as_the_algorithm_does_in_one_process(two: dict[str, Any]) -> None:
    found = two["slamb_reference"]
    assert max(found["errors"]) < 1e-12, found["errors"]
    assert found["error"] < 1e-12
    assert found["moved"] > 0.05


def test_ranks_draw_the_same_masks_and_meet_every_interval(two: dict[str, Any]) -> None:
    found = two["slamb_reference"]
    assert found["masks alike"]
    assert len(set(found["drawn"][WARMUP:])) == 1 < found["drawn"][WARMUP] + 1
    assert found["drawn"][:WARMUP] == [0] * WARMUP
    assert found["fraction"] == pytest.approx(0.4, abs=0.1)
    assert found["changes"] > 0.2, "the masks stay the same"
    met = [t <= WARMUP or (t - WARMUP) % INTERVAL == 0 for t in range(1, STEPS + 1)]
    assert found["alike"] == met


def test_what_is_sent_is_counted(two: dict[str, Any]) -> None:
    found = two["slamb_reference"]
    whole = 8 * found["numel"]  # of two ranks, each sends as many bytes as a vector has
    for t in range(1, STEPS + 1):
        momenta = 8 * found["sent"][t - 1]
        met = t > WARMUP and (t - WARMUP) % INTERVAL == 0
        if t <= WARMUP:
            assert found["reported"][t - 1] == 0.0
            continue
        assert momenta < 0.85 * whole
        assert found["bytes"][t - 1] == found["reported"][t - 1] == momenta + whole * met


def test_resume_equals_uninterrupted(two: dict[str, Any]) -> None:
    found = two["slamb_resume"]
    assert found["saved"] == 4
    assert found["differences"] == [{}, {}]
    assert found["alike"], "ranks end with different weights"
    assert found["alone"], "one process did not go on"


def test_checkpoints_hold_the_mean(two: dict[str, Any]) -> None:
    assert two["slamb_resume"]["error"] < 1e-6


@pytest.mark.parametrize("source", [torch.optim.AdamW, torch.optim.Adam, eff.LAMB])
def test_one_process_trains_by_lamb(source: Any) -> None:
    def trained(optimizer: Any, *callbacks: pl.Callback) -> torch.Tensor:
        pl.seed_everything(1, verbose=False)
        net: Any = module("classifier", batch_norm=False)

        def configure_optimizers() -> Any:
            made = optimizer(net.parameters())
            return [made], [torch.optim.lr_scheduler.StepLR(made, 1, 0.5)]

        net.configure_optimizers = configure_optimizers
        trainer(*callbacks, max_epochs=2, precision="64-true").fit(net, loader("classifier", shuffle=False))
        return flat(net)

    settings: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    lamb = trained(lambda parameters: eff.LAMB(parameters, vectors=True, **settings))
    found = trained(lambda parameters: source(parameters, **settings), SLAMB(trust_range=(0.0, 1e6)))
    torch.testing.assert_close(found, lamb, rtol=0, atol=1e-12)


def test_other_optimizers_and_checkpoints_are_refused(tmp_path: Any) -> None:
    t = trainer(max_steps=1)
    t.fit(module("tiny_gpt"), loader("tiny_gpt"))
    t.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match="SLAMB: the checkpoint was saved without it"):
        trainer(SLAMB(), max_steps=2).fit(module("tiny_gpt"), loader("tiny_gpt"), ckpt_path=tmp_path / "plain.ckpt")
    net: Any = module("tiny_gpt")
    net.configure_optimizers = lambda: torch.optim.AdamW(net.parameters(), amsgrad=True)
    with pytest.raises(ValueError, match=r"AdamW\(amsgrad=True\) has no form in LAMB"):
        trainer(SLAMB(), max_steps=2).fit(net, loader("tiny_gpt"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ratio": 1.5}, r"SLAMB\(ratio=1.5\): expected a number in \[0, 1\]"),
        ({"interval": 0}, r"SLAMB\(interval=0\): expected an integer >= 1"),
        ({"decay": 1.0}, r"SLAMB\(decay=1.0\): expected a number in \[0, 1\)"),
        ({"warmup_steps": -1}, r"SLAMB\(warmup_steps=-1\)"),
        ({"trust_range": (2.0, 1.0)}, "the smallest ratio is above the largest"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SLAMB(**arguments)
