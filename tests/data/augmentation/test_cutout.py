"""Cutout: how often each pixel is erased, and that all others stay bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lightning_eff as eff
from lightning_eff.data.augmentation.cutout import squares
from tests.cases import Case
from tests.data.augmentation.modules import ON_IMAGES, SIZE, Own, batches, chi_squared, train
from tests.runs import fit_yaml

CASES = {
    "Cutout": Case(
        active=lambda: eff.Cutout(),
        neutral=lambda: eff.Cutout(length=0.0),
        **ON_IMAGES,
    )
}


@pytest.mark.parametrize(("side", "length"), [((8, 12), 3), ((9, 9), 4), ((6, 6), 1)])
def test_each_pixel_is_erased_as_often_as_squares_reach_it(side: tuple[int, int], length: int) -> None:
    """``s^2 / (H W)`` for interior pixels, and less at the border."""
    n = 40_000
    found = squares(n, length, side, torch.Generator().manual_seed(0), torch.device("cpu")).double().mean(0)
    expected = torch.zeros(side, dtype=torch.float64)
    for row in range(side[0]):
        for column in range(side[1]):
            top, left = max(row - length // 2, 0), max(column - length // 2, 0)
            bottom, right = row - length // 2 + length, column - length // 2 + length
            expected[top:bottom, left:right] += 1 / (side[0] * side[1])
    interior = expected[length : side[0] - length, length : side[1] - length]
    assert torch.allclose(interior, torch.tensor(length**2 / (side[0] * side[1]), dtype=torch.float64))
    assert length == 1 or float(expected[0, 0]) < length**2 / (side[0] * side[1])
    deviation = (expected * (1 - expected) / n).sqrt()
    assert bool(((found - expected).abs() < 5 * deviation).all())


def test_all_other_pixels_stay_bit_for_bit() -> None:
    data = batches(40)
    technique = eff.Cutout(length=0.5, prob=0.6)
    net = train(Own(F.cross_entropy), technique, data=data)
    changed = 0
    for (x, y), (own, labels) in zip(net.given, data, strict=True):
        erased = x != own
        assert bool((x[erased] == 0).all()) and torch.equal(y, labels)
        changed += int(erased.flatten(1).any(1).sum())
        for one in erased[:, 0]:
            rows, columns = (one.any(dim).long().sum() for dim in (1, 0))
            assert int(one.sum()) == int(rows * columns) <= 16, "a box, of 4 x 4 pixels at most"
    n = 40 * SIZE
    assert abs(changed - 0.6 * n) < 4 * (n * 0.24) ** 0.5
    first = (net.given[0][0] != data[0][0]).flatten(1)
    assert len({tuple(one) for one in first.tolist()}) > 2, "another place in each image"
    assert technique.report()["share"] == pytest.approx(
        float((net.given[-1][0] != data[-1][0]).float().mean()), abs=1e-6
    )


def test_centres_are_any_pixel_as_likely() -> None:
    drawn = squares(6400, 1, (8, 8), torch.Generator().manual_seed(0), torch.device("cpu"))
    assert chi_squared(drawn.sum(0).float(), torch.full((8, 8), 100.0)) < 4


def test_erasing_comes_before_mixing_whatever_the_order() -> None:
    def images(*techniques: Any) -> list[torch.Tensor]:
        return [x for x, _ in train(Own(F.cross_entropy), *techniques, data=batches(5)).given]

    first = images(eff.Cutout(), eff.RandomErasing(), eff.Mixup(alpha=1.0), eff.LabelSmoothing())
    second = images(eff.LabelSmoothing(), eff.Mixup(alpha=1.0), eff.RandomErasing(), eff.Cutout())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"length": 2}, r"length=2\): expected a number in \[0, 1\]"), ({"prob": "x"}, r"prob='x'\): expected a number")],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^Cutout\({message}"):
        eff.Cutout(**arguments)


def test_bytes_are_refused() -> None:
    x, y = batches()[0]
    with pytest.raises(
        ValueError, match=r"Cutout: the images \[0\] are uint8, .*Convert them to normalised floating point"
    ):
        train(Own(F.cross_entropy), eff.Cutout(), data=[(x.byte(), y)])


def test_yaml(tmp_path: Path) -> None:
    names: Any = {"model": "tests.data.augmentation.modules.ResNet", "data": "tests.data.augmentation.modules.Pictures"}
    fit_yaml(tmp_path, "Cutout", {"length": 0.25}, max_steps=4, **names)
