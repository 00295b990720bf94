"""DeepSpeed on CPU: stages against a single process, the 1-bit optimizers' start, freeze and resume, and messages.

What needs DeepSpeed runs where it is installed (the extra ``deepspeed``); the rest always does.
"""

import importlib.util
import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

from lightning_eff._core._needs.offers import refusal
from lightning_eff.strategies import deep_speed
from lightning_eff.strategies._communication.onebit_adam import OneBitAdam
from lightning_eff.strategies._communication.onebit_lamb import OneBitLamb
from lightning_eff.strategies._communication.onebit_optimizer import check_source
from lightning_eff.strategies._communication.zero_one_adam import ZeroOneAdam
from lightning_eff.strategies._names import NAMES
from lightning_eff.strategies.deep_speed import DeepSpeedEffStrategy
from tests.conftest import Once
from tests.core.architectures import LowRankAdapter
from tests.runs import largest
from tests.strategies.communication_launch import launch

pytestmark = pytest.mark.timeout(900)  # one start of processes serves all, on a busy machine too
installed = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not installed, reason="needs the extra deepspeed")
OPTIMIZERS = ("onebit_adam", "zero_one_adam", "onebit_lamb")
every = pytest.mark.parametrize("name", OPTIMIZERS)


@pytest.fixture(scope="module")
def two(once: Once) -> dict[str, Any]:
    """What two processes find, one start for all."""
    jobs = [f"{job}:{name}" for job in ("frozen", "modes") for name in OPTIMIZERS]
    jobs = ["stages", "stage_resume", "architecture", "start", "lamb_reference", "reference", *jobs]
    return once("deepspeed", lambda: launch(*jobs, of="deepspeed_jobs"))


# -- ZeRO


@needs_deepspeed
@pytest.mark.parametrize("stage", ["0", "1", "2", "3", "2 offload", "3 offload"])
def test_stages_equal_a_single_process(stage: str, two: dict[str, Any]) -> None:
    """With two parameter groups, clipping, a schedule, and an optimizer that is torch's own."""
    assert two["stages"][stage]["error"] < 1e-6
    assert two["stages"][stage]["rates"] == pytest.approx([5e-3 / 2.2, 2e-3 / 2.2])


@needs_deepspeed
def test_stages_resume(two: dict[str, Any]) -> None:
    assert two["stage_resume"] == {"1": 0.0, "2": 0.0, "3": 0.0}


REFUSED = (
    r"LowRankAdapter: \w+ leaves parameters, .* to DeepSpeed's engine, and .* lightning_eff\.apply changes it before"
)


@needs_deepspeed
def test_techniques_that_change_the_architecture_are_refused_on_every_rank(two: dict[str, Any]) -> None:
    assert len(two["architecture"]) == 2 and all(re.match(REFUSED, told) for told in two["architecture"])


@pytest.mark.parametrize("cls", [DeepSpeedEffStrategy, pl.strategies.DeepSpeedStrategy])
def test_techniques_that_change_the_architecture_are_refused(cls: type) -> None:
    technique = LowRankAdapter()
    told = refusal("LowRankAdapter", technique.needs, technique.refuses, cls.__new__(cls))
    assert told is not None and re.match(REFUSED, told)


# -- 1-bit optimizers


@needs_deepspeed
@pytest.mark.parametrize("optimizer", ["Adam", "AdamW"])
def test_the_start_is_the_users_optimizer(optimizer: str, two: dict[str, Any]) -> None:
    found = two["start"][optimizer]
    assert found["error"] < 1e-6 and found["zero_one"] < 1e-6
    assert found["rates"] == [pytest.approx([5e-3 / (1 + 0.1 * i), 2e-3 / (1 + 0.1 * i)]) for i in range(1, 13)]


@needs_deepspeed
def test_the_start_of_lamb_is_lamb(two: dict[str, Any]) -> None:
    assert two["lamb_reference"]["error"] < 1e-6


@needs_deepspeed
def test_onebit_adam_against_both_ranks_in_one_process(two: dict[str, Any]) -> None:
    found = two["reference"]
    assert found["error"] < 1e-5
    assert found["from_adam"] > 1e-4, "signs made no difference"


@needs_deepspeed
@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb"])
def test_the_variance_stays_after_the_freeze(name: str, two: dict[str, Any]) -> None:
    found = two[f"frozen:{name}"]
    assert found["changes"] == [True] * 3 + [False] * 8  # from the fourth step on
    assert found["zeros"] == 0, "a variance of zero makes steps without bound"
    assert found["alike"] == [True] * 12
    assert found["ratios"][:4] == [1.0] * 4
    assert largest(found["ratios"][4:]) < 0.15


@needs_deepspeed
def test_intervals_of_zero_one_adam(two: dict[str, Any]) -> None:
    found = two["frozen:zero_one_adam"]
    # two renewals, then every second step up to the sixth
    assert found["changes"] == [True, False, True, False, True] + [False] * 6
    assert [c["variance_interval"] for c in found["counters"]] == [1, 2, 2, 2, 2, 4] + [4] * 6
    # two meetings, one after each local step; then one after every second
    assert [c["local_interval"] for c in found["counters"]] == [1] * 7 + [2] * 5
    assert found["alike"] == [True] * 8 + [False, True, False, True]
    assert found["ratios"][8] == found["ratios"][10] == 0.0
    # residuals are zeroed as the phase changes
    assert [c["kept"] > 0 for c in found["counters"]] == [False, False, True, True, True, False] + [True] * 6


@needs_deepspeed
@every
def test_resume_equals_uninterrupted(name: str, two: dict[str, Any]) -> None:
    found = two[f"frozen:{name}"]
    assert found["ranks"] == 2
    assert found["end"], "ranks end with different weights"
    assert found["differences"] == [dict.fromkeys(found["differences"][0], 0.0)] * 2
    assert len(found["differences"][0]) >= 6


@needs_deepspeed
@every
def test_modes(name: str, two: dict[str, Any]) -> None:
    for mode, found in two[f"modes:{name}"].items():
        assert found["finite"] and found["alike"], mode
        assert found["steps"] == (6 if mode == "accumulate" else 12)
        assert found["apart"] == (name == "zero_one_adam"), mode
        assert found["losses"][-1] < found["losses"][0]


# -- without an engine: one process


@pytest.mark.parametrize("cls", [OneBitAdam, ZeroOneAdam])
def test_alone_the_momentum_is_not_rounded(cls: Any) -> None:
    """With one process nothing is sent, and only the variance stays: Adam with frozen second moments."""
    torch.manual_seed(0)
    w = torch.nn.Parameter(torch.randn(4, 3))
    optimizer = cls(torch.optim.Adam([w], lr=0.1), freeze_step=2)
    told: list[bool] = []
    optimizer.begin(told.append)
    reference, m, v = w.detach().clone(), torch.zeros(4, 3), torch.zeros(4, 3)
    for step in range(1, 7):
        g = torch.randn(4, 3)
        w.grad = g.clone()
        optimizer.step()
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2 if step <= 2 else v
        denominator = (v / (1 - 0.999 ** min(step, 2))).sqrt() + 1e-8
        reference -= 0.1 * m / (1 - 0.9**step) / denominator
        assert torch.allclose(w, reference, atol=1e-6), step
    assert told == [True, True, False, False, False, False, False]


@pytest.mark.parametrize("cls", [OneBitAdam, ZeroOneAdam, OneBitLamb])
def test_a_row_never_seen_before_the_freeze_makes_ordinary_steps_after_it(cls: Any) -> None:
    """Its variance would be zero for ever, and its first gradient divided by eps alone."""
    torch.manual_seed(0)
    seen, never_seen = torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(2, 2))
    optimizer = cls(torch.optim.Adam([seen, never_seen], lr=0.01), freeze_step=3)
    optimizer.begin(lambda wanted: None)
    before = seen.detach().clone(), never_seen.detach().clone()
    for step in range(8):
        seen.grad = torch.randn(3, 4)
        never_seen.grad = torch.randn(2, 2)
        if step < 3:
            seen.grad[1] = 0.0
            never_seen.grad = None
        optimizer.step()
    for p, was in zip((seen, never_seen), before, strict=True):
        assert (optimizer.state[p]["exp_avg_sq"] > 0).all()
        assert 0 < (p.detach() - was).abs().max() < 8 * 0.01 * 10
    assert not torch.equal(seen[1], before[0][1])


def test_a_schedule_goes_on_after_loading() -> None:
    w = torch.nn.Parameter(torch.ones(2, 2))
    source = torch.optim.AdamW([w], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(source, 1, gamma=0.5)
    optimizer = OneBitAdam(source, freeze_step=2)
    optimizer.begin(lambda wanted: None)
    w.grad = torch.ones(2, 2)
    optimizer.step()
    schedule.step()
    optimizer.load_state_dict(optimizer.state_dict())
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "returned SGD, but the 1-bit optimizer replaces an Adam"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad=True. has no 1-bit form"),
        (lambda p: torch.optim.AdamW(p, maximize=True), "maximize=True. has no 1-bit form"),
    ],
)
def test_other_optimizers_are_refused(optimizer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_source(optimizer([torch.nn.Parameter(torch.ones(2))]), who="x")


# -- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "sgd"}, "expected 'onebit_adam', 'zero_one_adam' or 'onebit_lamb'"),
        ({"optimizer": "onebit_adam", "stage": 1}, "Leave out stage and offload"),
        ({"optimizer": "onebit_adam", "offload": "cpu"}, "Leave out stage and offload"),
        ({"optimizer": "onebit_adam", "freeze_step": 0}, "freeze_step=0.: expected an integer >= 1"),
        ({"optimizer": "onebit_adam", "local_updates": 2}, "local_updates does nothing with this.*'zero_one_adam'"),
        ({"freeze_step": 2}, "freeze_step does nothing with this"),
        ({"stage": 4}, "stage=4.: expected 0, 1, 2 or 3, or None: the stage of ZeRO"),
        ({"stage": 2, "offload": "nvme"}, "offload to nvme needs stage 3"),
        ({"stage": 0, "offload": "cpu"}, "offload to cpu needs stage 1"),
        ({"stage": 3, "offload": "disk"}, "expected 'cpu' or 'nvme', or None"),
        ({"stage": 3, "offload": "nvme", "nvme_path": "/no/such/folder"}, "'/no/such/folder'.*not a writable folder"),
        ({"offload_optimizer": True}, "Use stage= and offload= instead"),
        ({"config": {}, "stage": 2}, "config replaces"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeepSpeedEffStrategy(**arguments)


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_speed, "_DEEPSPEED_AVAILABLE", False)
    with pytest.raises(ModuleNotFoundError, match=r"package deepspeed is not installed.*pip install .*\.\[deepspeed\]"):
        pl.Trainer(strategy="deepspeed_onebit_adam", accelerator="cpu", logger=False)


def test_strings_are_registered() -> None:
    """Under names that Lightning does not use."""
    available = StrategyRegistry.available_strategies()
    ours = [one for one in NAMES if one.cls == "DeepSpeedEffStrategy"]
    assert len(ours) == 9
    for one in ours:
        assert one.name in available
        assert StrategyRegistry[one.name]["strategy"] is DeepSpeedEffStrategy
        assert StrategyRegistry[one.name]["init_params"] == one.arguments
    assert StrategyRegistry["deepspeed_stage_2"]["strategy"] is pl.strategies.DeepSpeedStrategy


@needs_deepspeed
def test_configurations(tmp_path: Any) -> None:
    def zero(**settings: Any) -> dict[str, Any]:
        config = DeepSpeedEffStrategy(**settings).config
        assert isinstance(config, dict)
        return config

    assert "zero_optimization" not in zero(optimizer="onebit_adam")
    assert zero()["zero_optimization"]["stage"] == 2
    offloaded = zero(stage=3, offload="cpu")
    assert offloaded["zero_force_ds_cpu_optimizer"] is False, "DeepSpeed would refuse the module's own optimizer"
    infinity = zero(stage=3, offload="nvme", nvme_path=str(tmp_path))["zero_optimization"]
    for part in ("offload_optimizer", "offload_param"):
        assert infinity[part]["device"] == "nvme" and infinity[part]["nvme_path"] == str(tmp_path)
