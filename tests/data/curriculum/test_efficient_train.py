"""EfficientTrain: a crop of the spectrum that keeps low frequencies exactly, and its stages over the run."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_eff.data.curriculum.efficient_train import EfficientTrain, fourier_crop, stage_at
from tests.cases import Case, classifier
from tests.data.curriculum.test_progressive_resizing import Net, batches, train

_NO_IMAGES = "found no images in the batch"

CASES = {
    "EfficientTrain": Case(
        active=lambda: EfficientTrain(stages=((0.0, 0.75), (0.7, 1.0)), multiple_of=2),
        neutral=lambda: EfficientTrain(stages=((0.0, 1.0),)),
        model="vit",
        refuses=dict.fromkeys(("gpt2", "llama", "bert", "tiny_gpt"), _NO_IMAGES),
        lost=(classifier, "classifier", _NO_IMAGES),
    )
}


def wave(size: int, rows: int, columns: int, of: int) -> Tensor:
    """``cos(2 pi (rows i + columns j) / of + 1)`` at every ``of / size``-th point of ``of`` in each direction."""
    at = torch.arange(size, dtype=torch.float64) * (of / size)
    return torch.cos(2 * math.pi * (rows * at[:, None] + columns * at[None, :]) / of + 1.0)[None, None]


# -- T: the mean is preserved, low frequencies are sampled exactly, high ones are gone, B = H is the identity


@pytest.mark.parametrize(("full", "side"), [(16, 8), (16, 12), (15, 9), (16, 7), (15, 8)])
def test_low_frequencies_are_sampled_exactly_and_high_ones_are_gone(full: int, side: int) -> None:
    for rows in range(-(full // 2) + 1, full // 2):
        for columns in (0, 1, 3, full // 2 - 1):
            got = fourier_crop(wave(full, rows, columns, full), (side, side))
            if max(abs(rows), abs(columns)) < side / 2:
                torch.testing.assert_close(got, wave(side, rows, columns, full))
            elif max(abs(rows), abs(columns)) > side / 2:
                torch.testing.assert_close(got, torch.zeros_like(got), atol=1e-12, rtol=0)


def test_it_is_the_papers_crop_and_keeps_the_mean() -> None:
    """With the zero frequency in the middle, as the paper writes it."""
    x = torch.randn(2, 3, 16, 12, dtype=torch.float64)
    for side in ((8, 6), (12, 8), (16, 6), (9, 7)):
        spectrum = torch.fft.fftshift(torch.fft.fft2(x), dim=(-2, -1))
        top, left = (full // 2 - size // 2 for full, size in zip((16, 12), side, strict=True))
        crop = spectrum[..., top : top + side[0], left : left + side[1]]
        reference = torch.fft.ifft2(torch.fft.ifftshift(crop, dim=(-2, -1))).real * (side[0] * side[1] / (16 * 12))
        got = fourier_crop(x, side)
        torch.testing.assert_close(got, reference)
        torch.testing.assert_close(got.mean((2, 3)), x.mean((2, 3)))
    assert fourier_crop(x, (16, 12)) is x


def test_the_stages_are_the_papers() -> None:
    technique = EfficientTrain()
    shares = [technique.share_of(u) * 224 for u in (0.0, 0.59, 0.6, 0.79, 0.8, 1.0)]
    assert shares == pytest.approx([160, 160, 192, 192, 224, 224])
    assert stage_at(0.8, technique.stages) == 1.0


def test_stages_in_training() -> None:
    data = batches(10)
    net: Any = train(Net(), EfficientTrain(stages=[[0.0, 0.5], [0.4, 0.75], [0.7, 1.0]]), data=data)
    given = net.given
    assert [t.shape[-1] for t in given] == [8] * 4 + [12] * 3 + [16] * 3
    for images, (own, _) in zip(given, data, strict=True):
        assert torch.equal(images, fourier_crop(own, images.shape[-2:]))
    assert all(a.data_ptr() == b.data_ptr() for a, (b, _) in zip(given[7:], data[7:], strict=True))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            [],
            r"stages=\[\]\): expected pairs \(fraction of the budget in \[0, 1\), fraction of the side .*stages=\[\(0, 0.71",
        ),
        ([[0.0, 0.5, 1.0]], "expected pairs"),
        ([[0.1, 0.5]], r"with 0 as the first fraction: .*The first fraction is 0.1\."),
        ([[0.0, 0.5], [0.0, 1.0]], r"both growing.*\(0.0, 1.0\) does not follow \(0.0, 0.5\)"),
        ([[0.0, 0.5], [1.0, 1.0]], r"fraction of the budget in \[0, 1\)"),
        ([[0.0, 0.7], [0.5, 0.5]], r"both growing.*\(0.5, 0.5\) does not follow \(0.0, 0.7\)"),
        ([[0.0, 0.0]], r"fraction of the side in \(0, 1\]"),
        ([[0.0, 1.5]], r"stages=\[\[0.0, 1.5\]\]\): expected .*fraction of the side in \(0, 1\]"),
    ],
)
def test_bad_stages(stages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^EfficientTrain.*{message}"):
        EfficientTrain(stages=stages)


def test_arms_are_small_images_throughout() -> None:
    technique = EfficientTrain(multiple_of=8)
    ((name, arm),) = technique.control.arms(technique).items()
    assert name == "0.714 of the side throughout" and isinstance(arm, EfficientTrain)
    assert arm.stages == [(0.0, 160 / 224)] and arm.multiple_of == 8 and not arm.changes_shapes
    assert arm.control.arms(arm) == {}
    assert EfficientTrain.search_space is not None
