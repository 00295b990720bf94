"""What tells trained weights from random ones, and that they are left alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_eff import OrthogonalInit, ZeroProjections
from lightning_eff.model.initialization._once import trained
from tests import families
from tests.models import hugging_face, loader, module, trainer


def test_norms_tell_what_was_trained() -> None:
    fresh = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4))
    fresh.append(nn.LayerNorm(4, elementwise_affine=False))
    nn.init.zeros_(fresh[4].weight)  # as a branch's last norm may begin
    fresh.append(nn.LayerNorm(1))
    assert trained(fresh) == ""
    fresh[0].weight.data.normal_()
    assert trained(fresh) == "", "maps are random in any case"
    fresh[3].weight.data[1] += 1e-6
    assert trained(fresh) == "3, of RMSNorm, has scales that differ, as after training"
    fresh[1](torch.randn(8, 4))
    assert trained(fresh) == "1, of BatchNorm1d, has seen 1 batches"
    with torch.device("meta"):
        assert trained(nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4))) == "", "which has no numbers yet"


def told(logged: pytest.LogCaptureFixture) -> list[str]:
    found = [one.getMessage() for one in logged.records if "overwrites weights" in one.getMessage()]
    logged.clear()
    return found


def test_who_sets_weights_of_ones_own_checkpoint_anew_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = module("tiny_gpt")
    first = trainer(max_steps=3)
    first.fit(before, loader("tiny_gpt"))
    first.save_checkpoint(tmp_path / "own.ckpt")

    def loaded() -> Any:
        m = module("tiny_gpt")
        m.load_state_dict(before.state_dict())
        return m

    for technique in (OrthogonalInit, ZeroProjections):
        trainer(technique(), max_steps=1).fit(loaded(), loader("tiny_gpt"))
        (line,) = told(caplog)
        assert line.startswith(
            f"{technique.__name__}: norm, of LayerNorm, has scales that differ, as after training, and"
        )
    trainer(ZeroProjections(), max_steps=1).validate(loaded(), loader("tiny_gpt"), verbose=False)
    trainer(ZeroProjections(force=True), max_steps=1).fit(loaded(), loader("tiny_gpt"))
    ours = OrthogonalInit()
    trainer(ours, max_steps=4).fit(loaded(), loader("tiny_gpt"), ckpt_path=tmp_path / "own.ckpt")
    assert ours.report() == {"numbers": 0}, "a run that goes on is left alone"
    trainer(OrthogonalInit(), max_steps=1).fit(module("tiny_gpt"), loader("tiny_gpt"))
    assert told(caplog) == [], "where no weight is set, and where one says so, or begins with random ones"


def test_what_an_initialization_began_itself_may_be_fitted_again(caplog: pytest.LogCaptureFixture) -> None:
    m = module("tiny_gpt")
    trainer(OrthogonalInit(), max_steps=3).fit(m, loader("tiny_gpt"))
    assert trained(m)
    ours = OrthogonalInit()
    trainer(ours, max_steps=1).fit(m, loader("tiny_gpt"))
    assert ours.report() == {"numbers": 0} and told(caplog) == []


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_random_models_are_not_taken_for_trained_ones(name: str) -> None:
    assert trained(hugging_face(name, 2)) == ""


@pytest.mark.slow
def test_no_random_family_is_taken_for_a_trained_one() -> None:
    assert {name: why for name in families.FAMILIES if (why := trained(families.module(name)))} == {}
