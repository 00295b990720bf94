"""Techniques that set weights once, under strategies that divide them: bit for bit what one process sets."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy

from lightning_eff import OrthogonalInit, ZeroProjections
from lightning_eff._core.session import Session
from lightning_eff._core.technique import techniques_of
from tests.model.initialization.begun import begun
from tests.model.initialization.divided_jobs import BY_DATA, BY_STRUCTURE, MODELS, alone
from tests.models import TinyGPT, make_batch, module, trainer
from tests.strategies.launch import launch


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=() if i == 0 else pytest.mark.slow) for i, model in enumerate(MODELS)]
)
def test_two_processes_set_what_one_sets(model: str, tmp_path: Path) -> None:
    expected: dict[str, Any] = {name: alone(model, build()) for name, build in {**BY_STRUCTURE, **BY_DATA}.items()}
    torch.manual_seed(0)
    expected["plain"] = MODELS[model]().state_dict()
    torch.save(expected, tmp_path / f"{model}.pt")
    found = launch("tests.model.initialization.divided_jobs", "layouts", model, str(tmp_path), world_size=2)
    whole = [[], True, True]
    for name in BY_STRUCTURE:
        for layout in ("hybrid", "hybrid, on meta", "pipeline", "tensor", "fsdp2 of its own"):
            assert found.pop(f"{layout}: {name}") == whole, (layout, name)
    for name in BY_DATA:
        for layout in ("pipeline", "tensor"):
            assert found.pop(f"{layout}: {name}") == whole, (layout, name)
        whole_on_meta = "it computes with all weights together"
        assert whole_on_meta in found.pop(f"hybrid, on meta: {name}")
        assert "computes with all weights together before they are divided" in found.pop(f"fsdp2 of its own: {name}")
    assert not found


@pytest.mark.slow
def test_a_checkpoints_weights_stay(tmp_path: Path) -> None:
    found = launch("tests.model.initialization.divided_jobs", "resumed", str(tmp_path), world_size=2, timeout=500)
    assert "expected weights that can be set before. Load them into the module" in found.pop("refused")
    assert found.pop("numbers") > 0
    assert found == {"went on": True, "left": True, "apart": True}


@pytest.mark.parametrize("build", {**BY_STRUCTURE, **BY_DATA}.values(), ids=[*BY_STRUCTURE, *BY_DATA])
def test_a_strategy_that_divides_in_its_own_way_is_refused(build: Any) -> None:
    run = trainer(build(), max_steps=2)
    run._accelerator_connector.strategy = FSDPStrategy()
    with pytest.raises(
        ValueError,
        match=r"FSDPStrategy joins.*sets whole weights.*Use HybridParallelStrategy",
    ):
        Session.open(run, module("tiny_gpt"), techniques_of(run), "fit")


def test_last_maps_are_zero_in_either_order() -> None:
    """Whole maps are drawn before the last ones become zero, whichever callback comes first."""
    ends = ("proj.weight", "mlp.2.weight", "head.weight")
    states = []
    for first, second in ((OrthogonalInit, ZeroProjections), (ZeroProjections, OrthogonalInit)):
        torch.manual_seed(0)
        m: Any = TinyGPT(2, dropout=0.0)
        m.configure_optimizers = lambda m=m: torch.optim.SGD(m.parameters(), 0.0)
        batch = make_batch("tiny_gpt")
        trainer(first(), second(), max_steps=1).fit(m, torch.utils.data.DataLoader([batch], batch_size=None))  # pyright: ignore[reportArgumentType]
        states.append(m.state_dict())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name])
        assert name.endswith(ends) == (not value.any()) or "bias" in name
    alone_ = begun(lambda: TinyGPT(2, dropout=0.0), make_batch("tiny_gpt"), OrthogonalInit())
    assert torch.equal(states[0]["blocks.0.qkv.weight"], alone_.blocks[0].qkv.weight)
