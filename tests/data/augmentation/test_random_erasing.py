"""RandomErasing: areas and shapes within their bounds and evenly drawn, noise in them, and all else as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lightning_eff as eff
from lightning_eff.data.augmentation.random_erasing import rectangles
from tests.cases import Case
from tests.data.augmentation.modules import ON_IMAGES, SIZE, Own, batches, chi_squared, train
from tests.runs import fit_yaml

CASES = {
    "RandomErasing": Case(
        active=lambda: eff.RandomErasing(prob=1.0),
        neutral=lambda: eff.RandomErasing(prob=0.0),
        **ON_IMAGES,
    )
}


def test_areas_and_ratios_are_within_their_bounds_up_to_rounding() -> None:
    side, n = (64, 48), 4000
    top, left, height, width = rectangles(n, (0.02, 0.4), (0.3, 3.3), side, torch.Generator().manual_seed(0))
    assert bool(((top >= 0) & (left >= 0) & (top + height <= 64) & (left + width <= 48)).all())
    low = (height - 0.5) * (width - 0.5) / (64 * 48), (height - 0.5) / (width + 0.5)
    high = (height + 0.5) * (width + 0.5) / (64 * 48), (height + 0.5) / (width - 0.5)
    assert bool(((high[0] >= 0.02) & (low[0] <= 0.4)).all()) and bool(((high[1] >= 0.3) & (low[1] <= 3.3)).all())
    exact = (height * width).double() / (64 * 48)
    assert float(exact.min()) < 0.03 and float(exact.max()) > 0.37, "the whole range is drawn"


def test_where_all_fit_areas_and_places_are_drawn_evenly() -> None:
    """Ratio 1 in images of 200 pixels: each area fits, so that its distribution is the even one."""
    n, side = 5000, (200, 200)
    top, left, height, width = rectangles(n, (0.1, 0.4), (1.0, 1.0), side, torch.Generator().manual_seed(0))
    assert torch.equal(height, width)
    # the ends of ten equal parts of the area, to whole pixels, and what lies between them
    ends = ((torch.linspace(0.1, 0.4, 11, dtype=torch.float64) * 40_000).sqrt() - 0.5).ceil()
    bounds = ((ends - 0.5).clamp(min=1) ** 2 / 40_000).clamp(0.1, 0.4)
    bounds[0], bounds[-1] = 0.1, 0.4
    expected = (bounds[1:] - bounds[:-1]) / 0.3 * n
    counts = torch.stack(
        [((height >= a) & (height < b)).sum() for a, b in zip(ends[:-1], [*ends[1:-1], 1e9], strict=True)]
    )
    assert chi_squared(counts.double(), expected) < 4
    for begin in (top, left):
        place = begin.double() / (200 - height + 1)
        assert chi_squared(torch.histc(place.float(), 10, 0, 1), torch.full((10,), n / 10)) < 4


@pytest.mark.parametrize("fill", ["normal", "zero"])
def test_erased_pixels_are_filled_and_all_others_stay(fill: Any) -> None:
    data = batches(60)
    technique = eff.RandomErasing(prob=0.5, fill=fill)
    net = train(Own(F.cross_entropy), technique, data=data)
    changed, values = 0, []
    for (x, y), (own, labels) in zip(net.given, data, strict=True):
        erased = x != own
        assert torch.equal(y, labels)
        values.append(x[erased])
        changed += int(erased.flatten(1).any(1).sum())
        for one in erased[:, 0]:
            rows, columns = (one.any(dim).long().sum() for dim in (1, 0))
            assert int(one.sum()) == int(rows * columns)
    n = 60 * SIZE
    assert abs(changed - n / 2) < 4 * (n / 4) ** 0.5
    noise = torch.cat(values)
    if fill == "zero":
        assert not noise.any()
    else:
        assert (
            abs(float(noise.mean())) < 4 / len(noise) ** 0.5
            and abs(float(noise.std()) - 1) < 4 / (2 * len(noise)) ** 0.5
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"area": 0.2}, r"area=0.2\): expected 2 values, each a number in \(0, 1\]"),
        ({"area": (0.0, 0.4)}, r"area=\(0.0, 0.4\)\): expected 2 values, each a number in \(0, 1\]"),
        ({"area": (0.4, 0.2)}, r"area=\(0.4, 0.2\)\): expected the smaller number first"),
        ({"area": (0.4, 2.0)}, r"area=\(0.4, 2.0\)\): expected 2 values, each a number in \(0, 1\]"),
        ({"ratio": [0.3]}, r"ratio=\[0.3\]\): expected 2 values, each a finite number > 0"),
        ({"fill": "mean"}, r"fill='mean'\): expected 'normal' or 'zero': the values of erased pixels"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^RandomErasing\({message}"):
        eff.RandomErasing(**arguments)


def test_rectangles_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"RandomErasing\(area=\(0.9, 1.0\), .*: hardly any such rectangle.* 8 x 8 pixels"
    ):
        train(Own(F.cross_entropy), eff.RandomErasing(area=(0.9, 1.0), ratio=(3.0, 4.0)))


def test_yaml(tmp_path: Path) -> None:
    names: Any = {"model": "tests.data.augmentation.modules.ResNet", "data": "tests.data.augmentation.modules.Pictures"}
    fit_yaml(tmp_path, "RandomErasing", {"area": [0.1, 0.2], "prob": 1.0}, max_steps=4, **names)
