"""SkipInit: where alpha begins; the rest is ReZero's, and tested with it."""

import math
from typing import Any

import pytest
import torch

import lightning_eff as eff
from lightning_eff import SkipInit
from tests.cases import Case, classifier
from tests.model.initialization.test_re_zero import scales
from tests.model.initialization.test_zero_projections import resnet
from tests.models import TinyGPT

CASES = {
    "SkipInit": Case(
        active=lambda: SkipInit(alpha="depth"),
        neutral=lambda: SkipInit(branches=[]),
        architecture=True,
        lost=(classifier, "classifier", "found no residual branch"),
    )
}


@pytest.mark.parametrize(("alpha", "value"), [(0.0, 0.0), (0.25, 0.25), ("depth", 1 / math.sqrt(3))])
def test_alpha_begins_as_told(alpha: Any, value: float) -> None:
    m = eff.apply(resnet(lambda _: torch.nn.Identity()), SkipInit(alpha=alpha))
    assert [p.item() for p in scales(m).values()] == pytest.approx([value] * 3)


def test_by_depth_the_stream_grows_e_fold_at_most() -> None:
    """Against the bound's own arithmetic, (1 + 1/d)^d, with branches whose outputs are as large as their inputs."""
    torch.manual_seed(0)
    net = eff.apply(TinyGPT(8, dropout=0.0), SkipInit(alpha="depth"))
    assert net.blocks is not None
    x = y = torch.randn(4, 16, 16)
    with torch.no_grad():
        for block in net.blocks:
            y = block(y)
    assert y.var() < math.e * x.var()
    assert all(p.item() == pytest.approx(0.25) for p in scales(net).values())


@pytest.mark.parametrize("alpha", ["deep", math.nan, math.inf, True, None])
def test_bad_first_values_are_refused(alpha: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a finite number or 'depth'"):
        SkipInit(alpha=alpha)
