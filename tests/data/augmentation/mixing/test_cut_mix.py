"""CutMix: shares are areas exactly, boxes as the paper draws them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lightning_eff as eff
from lightning_eff.data.augmentation._boxes import inside
from lightning_eff.data.augmentation.mixing._pasting import boxes, cut_mix, own_share, pasted
from tests.cases import Case
from tests.data.augmentation.modules import ON_IMAGES, Own, Spied, batches, chi_squared, train
from tests.runs import fit_yaml

CASES = {
    "CutMix": Case(
        active=lambda: eff.CutMix(per_sample=True),
        neutral=lambda: eff.CutMix(prob=0.0),
        **ON_IMAGES,
    )
}


@pytest.mark.parametrize("side", [(8, 8), (7, 13)])
def test_shares_are_areas_exactly(side: tuple[int, int]) -> None:
    """Own pixels 0 and the other's 1: the mean is ``1 - lambda'``, after the border has cut the box."""
    generator = torch.Generator().manual_seed(0)
    share = torch.rand(300, generator=generator, dtype=torch.float64)
    drawn = boxes(share, side, generator)
    own = ~inside(*drawn, side, torch.device("cpu"))
    values = torch.cat([torch.zeros(300, 1, *side), torch.ones(300, 1, *side)]).double()
    partner = torch.arange(600).roll(300)
    mixture = pasted(values, partner, torch.cat([own, own]))[:300]
    torch.testing.assert_close(
        1 - mixture.mean((1, 2, 3)), own_share(own), rtol=0, atol=1e-15
    )  # of sums that are integers
    cut = 0
    for k in range(300):
        top, left, height, width = (int(t[k]) for t in drawn)
        rows = min(top + height, side[0]) - max(top, 0)
        columns = min(left + width, side[1]) - max(left, 0)
        assert height == int(side[0] * (1 - share[k]) ** 0.5) and width == int(side[1] * (1 - share[k]) ** 0.5)
        assert float(own_share(own)[k]) == pytest.approx(1 - rows * columns / (side[0] * side[1]), abs=1e-12)
        cut += rows < height or columns < width
    assert cut > 100, "boxes leave the image"


@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize("side", [(8, 8), (7, 13)])
def test_one_box_for_all_images_equals_its_mask(side: tuple[int, int], alpha: float) -> None:
    """Bit for bit, for boxes in either role and beyond the border; and the loader's tensors keep their values."""
    x, partner = torch.randn(6, 3, *side), torch.randperm(6)
    given, roles = x.clone(), set[bool]()
    for seed in range(200):
        own = cut_mix(alpha, 1, side, torch.Generator().manual_seed(seed))
        (mixture,), share = eff.CutMix(alpha).mix([x], partner, torch.Generator().manual_seed(seed))
        assert torch.equal(mixture, pasted(x, partner, own))
        assert torch.equal(share, own_share(own).float().expand(6))
        assert torch.equal(x, given) and mixture.data_ptr() != x.data_ptr()
        roles.add(bool(own[0, 0, 0]))
    assert roles == {False, True}


def test_centres_are_any_pixel_as_likely() -> None:
    share = torch.full((6400,), 0.9, dtype=torch.float64)
    top, left, height, width = boxes(share, (8, 8), torch.Generator().manual_seed(1))
    at = (top + height // 2) * 8 + left + width // 2
    assert chi_squared(torch.bincount(at, minlength=64).float(), torch.full((64,), 100.0)) < 4


@pytest.mark.parametrize("per_sample", [False, True])
def test_in_training_each_pixel_is_of_one_image_and_labels_go_by_area(per_sample: bool) -> None:
    technique = eff.CutMix(per_sample=per_sample)
    spied = Spied(technique)
    data = batches(60)
    net = train(Own(F.cross_entropy), technique, data=data)
    for (x, y), (own, labels), partner, share in zip(net.given, data, spied.partners, spied.shares, strict=True):
        other = own[partner]
        assert bool(((x == own) | (x == other)).all()) and torch.equal(y, labels)
        fixed = partner == torch.arange(len(partner))
        assert torch.allclose((x == own).float().mean((1, 2, 3))[~fixed], share[~fixed], atol=1e-6)
        assert float(share.min()) >= 0.5
        assert per_sample or len(set(share.tolist())) == 1


def test_arguments() -> None:
    with pytest.raises(ValueError, match=r"CutMix\(alpha=0\): expected a finite number > 0"):
        eff.CutMix(alpha=0)


def test_yaml(tmp_path: Path) -> None:
    names: Any = {"model": "tests.data.augmentation.modules.ResNet", "data": "tests.data.augmentation.modules.Pictures"}
    fit_yaml(tmp_path, "CutMix", {"prob": 0.5}, max_steps=4, **names)
