"""Local SGD under two processes: what it computes, what it sends, what validation and checkpoints see."""

import math
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_eff.strategies.compressed_ddp import CompressedDDPStrategy
from lightning_eff.strategies.local_sgd import LocalSGD
from tests.cases import Case
from tests.conftest import Once
from tests.models import flat, loader, module, trainer
from tests.runs import NUM_STEPS, differences, final_state, fit
from tests.strategies.communication_launch import launch

CASES = {
    "LocalSGD": Case(
        active=lambda: LocalSGD(interval=3, warmup_steps=2),
        neutral=lambda: LocalSGD(warmup_steps=math.inf),
        exact=True,
        figure="local_steps",
        anywhere=True,
    )
}

pytestmark = pytest.mark.timeout(900)  # one start of processes serves all, on a busy machine too


@pytest.fixture(scope="module")
def two(once: Once) -> dict[str, Any]:
    """What two processes find, one start for all."""
    jobs = ("local_equals_ddp", "local_resume", "local_validates")
    return once("local_sgd", lambda: launch(*jobs, of="local_sgd_jobs"))


def test_averaging_after_every_step_of_sgd_is_ddp(two: dict[str, Any]) -> None:
    assert two["local_equals_ddp"]["error"] < 1e-6
    assert two["local_equals_ddp"]["moved"] > 1e-4, "an interval of 3 changed nothing"


def test_ranks_meet_every_interval_after_the_start(two: dict[str, Any]) -> None:
    found = two["local_equals_ddp"]
    # two plain steps, then two apart for each meeting
    assert found["alike"] == [True, True] + [False, False, True] * 3 + [False]
    # what is sent, in the bytes of the gradients
    assert found["bytes"] == [1.0, 1.0] + [0.0, 0.0, 1.0] * 3 + [0.0]


def test_resume_equals_uninterrupted(two: dict[str, Any]) -> None:
    found = two["local_resume"]
    assert found["differences"] == [{}, {}]
    assert found["alike"], "ranks end with different weights"
    assert len(found["sizes"]) == NUM_STEPS
    # (ranks whose weights are kept, ranks whose optimizers are): none in the start, no weights where ranks have met
    assert found["sizes"] == [[0, 0]] * 2 + [[2, 2], [2, 2], [0, 2]] * 3 + [[2, 2]]


def test_checkpoints_hold_the_mean(two: dict[str, Any]) -> None:
    assert two["local_resume"]["error"] < 1e-6
    assert two["local_resume"]["plain"] == NUM_STEPS


def test_validation_sees_the_mean(two: dict[str, Any]) -> None:
    found = two["local_validates"]
    assert found["seen"] == [True] * NUM_STEPS
    assert found["kept"] == [True] * (NUM_STEPS - 1), "training did not go on from the rank's own weights"
    assert found["report"] == {"local_steps": 12.0, "averagings": 3.0}


def test_one_process_is_plain_training() -> None:
    plain = final_state(*fit("tiny_gpt", list))
    assert differences(plain, final_state(*fit("tiny_gpt", lambda: [LocalSGD(interval=2)]))) == []
    assert LocalSGD(warmup_steps=math.inf).neutral


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"interval": 0}, "LocalSGD.interval=0.: expected an integer >= 1: the number of local steps"),
        ({"interval": 2.5}, "interval=2.5"),
        ({"interval": math.inf}, "interval=inf"),
        ({"warmup_steps": -1}, "warmup_steps=-1.: expected an integer >= 0 or inf: the number of plain DDP steps"),
        ({"warmup_steps": True}, "warmup_steps=True"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalSGD(**arguments)


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (CompressedDDPStrategy("onebit"), "averages compressed gradients"),
        (DDPStrategy(ddp_comm_hook=allreduce_hook), "has a communication hook already"),
    ],
)
def test_another_communication_hook_is_refused(strategy: Any, reason: str) -> None:
    t = trainer(LocalSGD(), max_steps=2)
    t._accelerator_connector.strategy = strategy
    from lightning_eff._core.session import Session
    from lightning_eff._core.technique import techniques_of

    with pytest.raises(ValueError, match=f"LocalSGD: {type(strategy).__name__} {reason}"):
        Session.open(t, module("tiny_gpt"), techniques_of(t), "fit")


def test_a_gradient_scaler_is_refused() -> None:
    from lightning.pytorch.plugins.precision import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    net = module("tiny_gpt")
    before = flat(net).clone()
    with pytest.raises(ValueError, match=r"LocalSGD: got precision '16-mixed'.*bf16-mixed"):
        trainer(LocalSGD(), max_steps=1, plugins=[plugin]).fit(net, loader("tiny_gpt"))
    assert torch.equal(flat(net), before)
