"""RandomFlip: images and their mirror images as numpy makes them, each as often as its probability says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import lightning_eff as eff
from tests.cases import Case
from tests.data.augmentation.images.test_rand_augment import Seeing, images, run_on
from tests.data.augmentation.modules import ON_IMAGES, chi_squared, train
from tests.runs import fit_yaml

CASES = {
    "RandomFlip": Case(
        active=lambda: eff.RandomFlip(),
        neutral=lambda: eff.RandomFlip(0.0),
        **ON_IMAGES,
    )
}
WAYS: dict[str, list[tuple[int, ...]]] = {
    "horizontal": [(), (2,)],
    "vertical": [(), (1,)],
    "both": [(), (1,), (2,), (1, 2)],
}


@pytest.mark.parametrize("direction", list(WAYS))
def test_each_image_is_its_own_mirror_image_as_often_as_prob_says(direction: Any) -> None:
    n, prob = 400, 0.3
    x = images(size=n)
    technique = eff.RandomFlip(prob, direction=direction)
    made = run_on(x, technique).numpy()
    ways = WAYS[direction]
    mirrored = [np.stack([np.flip(one, axis=axes) for one in x.numpy()]) for axes in ways]
    same = np.stack([(made == other).all(axis=(1, 2, 3)) for other in mirrored])
    assert (same.sum(0) == 1).all(), "bit for bit one of them"
    expected = [prob ** len(axes) * (1 - prob) ** (len(ways[-1]) - len(axes)) * n for axes in ways]
    assert chi_squared(torch.from_numpy(same.sum(1)).double(), torch.tensor(expected).double()) < 4
    assert technique.report()["share"] == pytest.approx(1 - same[0].mean())


def test_certain_flips_flip_all_and_bytes_too() -> None:
    x = (images() * 255).byte()
    assert torch.equal(run_on(x, eff.RandomFlip(1.0)), x.flip(3))
    assert torch.equal(run_on(x, eff.RandomFlip(1.0, direction="both")), x.flip(2, 3))
    last = images().contiguous(memory_format=torch.channels_last)
    assert run_on(last, eff.RandomFlip(1.0)).is_contiguous(memory_format=torch.channels_last)


def test_masks_are_refused() -> None:
    x = images(1)
    batch = {"image": x, "mask": x[:, 0] > 0, "label": torch.arange(6) % 4}
    with pytest.raises(ValueError, match=r"^RandomFlip: the batch holds \['mask'\], .*or remove RandomFlip\."):
        train(Seeing(F.cross_entropy), eff.RandomFlip(), data=[batch])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prob": 1.5}, r"prob=1.5\): expected a number in \[0, 1\]"),
        ({"direction": "left"}, r"direction='left'\): expected 'horizontal', 'vertical' or 'both'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^RandomFlip\({message}"):
        eff.RandomFlip(**arguments)


def test_yaml(tmp_path: Path) -> None:
    names: Any = {"model": "tests.data.augmentation.modules.ResNet", "data": "tests.data.augmentation.modules.Pictures"}
    fit_yaml(tmp_path, "RandomFlip", {"prob": 0.5, "direction": "both"}, max_steps=4, **names)
