"""Mixup: the distribution of its shares, convex combinations, and what it mixes in batches of several makes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lightning_eff as eff
from lightning_eff.data.augmentation._mixing import draw_shares
from lightning_eff.data.augmentation.mixing._convex import mixup
from tests.cases import Case, own_loss
from tests.data.augmentation.modules import Own, Spied, batches, chi_squared, train
from tests.models import TinyClassifier, make_batch
from tests.runs import fit_yaml

CASES = {
    "Mixup": Case(
        active=lambda: eff.Mixup(alpha=1.0),
        neutral=lambda: eff.Mixup(alpha=0.0),
        model="vit",
        refuses=dict.fromkeys(
            ("gpt2", "llama", "bert", "tiny_gpt", "padded", "translator"), "found no images in the batch"
        ),
        lost=(own_loss, "classifier", "no loss call of training_step was seen"),
    )
}


@pytest.mark.parametrize("alpha", [0.05, 0.2, 1.0, 4.0])
def test_shares_have_the_variance_of_beta(alpha: float) -> None:
    """``Var lambda = 1 / (4 (2 alpha + 1))``, and a mean of one half."""
    n = 200_000
    share = draw_shares(alpha, n, np.random.default_rng(0))
    assert bool(((share >= 0) & (share <= 1)).all())
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(float(share.mean()) - 0.5) < 4 * (variance / n) ** 0.5
    fourth = float((share - 0.5).pow(4).mean())
    assert abs(float(share.var()) - variance) < 4 * ((fourth - variance**2) / n) ** 0.5


def test_shares_of_a_run_are_those_of_beta_folded() -> None:
    """With alpha 1, the larger share lies evenly in [0.5, 1]: by steps as by samples."""
    for per_sample in (False, True):
        technique = eff.Mixup(alpha=1.0, per_sample=per_sample)
        spied = Spied(technique)
        train(Own(F.cross_entropy), technique, data=batches(200))
        shares = torch.cat([share if per_sample else share[:1] for share in spied.shares])
        assert per_sample or all(len(set(share.tolist())) == 1 for share in spied.shares)
        counts = torch.histc(shares, 10, 0.5, 1.0)
        assert chi_squared(counts, torch.full((10,), len(shares) / 10)) < 4


def test_partners_are_a_permutation_each_as_likely() -> None:
    technique = eff.Mixup()
    spied = Spied(technique)
    train(Own(F.cross_entropy), technique, data=batches(300))
    assert all(sorted(partner.tolist()) == list(range(6)) for partner in spied.partners)
    counts = torch.zeros(6, 6)
    for partner in spied.partners:
        counts[torch.arange(6), partner] += 1
    assert chi_squared(counts, torch.full((6, 6), 50.0)) < 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_mixtures_are_convex_combinations(dtype: torch.dtype) -> None:
    x = torch.randn(5, 2, 3, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    partner, share = torch.tensor([1, 0, 4, 3, 2]), torch.tensor([0.5, 0.6, 0.7, 0.8, 1.0])
    made = mixup(x, partner, share)
    assert made.dtype == dtype and torch.equal(made[4], x[4])
    for i in range(5):
        by_hand = share[i].double() * x[i].double() + (1 - share[i].double()) * x[partner[i]].double()
        torch.testing.assert_close(
            made[i].double(), by_hand, rtol=2 * torch.finfo(dtype).eps, atol=1e-2 if dtype == torch.bfloat16 else 1e-7
        )
    last = x.contiguous(memory_format=torch.channels_last)
    assert mixup(last, partner, share[:1]).is_contiguous(memory_format=torch.channels_last)


class Seeing(TinyClassifier):
    """Remembers its batches, and takes dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.given.append(batch)
        return F.cross_entropy(self(batch["x"]), batch["y"])


def test_other_inputs_than_images_are_mixed() -> None:
    x, y = make_batch("classifier", 6)
    for batch, keys in (({"x": x, "y": y}, None), ({"x": x, "y": y, "beside": x.clone()}, ["x"])):
        net = train(Seeing(), eff.Mixup(alpha=1.0, keys=keys), data=[batch])
        assert not torch.equal(net.given[-1]["x"], x) and torch.equal(net.given[-1]["y"], y)
        assert keys is None or torch.equal(net.given[-1]["beside"], x)


def test_which_inputs_is_asked_where_it_cannot_be_told() -> None:
    x, y = make_batch("classifier", 6)
    with pytest.raises(ValueError, match=r"Mixup: the batch has several .*: .*beside.*Mixup\(keys=\['x', 'beside'\]\)"):
        train(Seeing(), eff.Mixup(), data=[{"x": x, "y": y, "beside": x}])
    with pytest.raises(ValueError, match=r"Mixup\(keys=\['z'\]\): none of them is a tensor of floating point.*\['x'\]"):
        train(Seeing(), eff.Mixup(keys=["z"]), data=[{"x": x, "y": y}])


def test_yaml(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "Mixup", {"alpha": 0.4, "until": 0.8}, max_steps=4)
