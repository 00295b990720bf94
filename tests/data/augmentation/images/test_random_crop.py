"""RandomCrop: each image is a part of numpy's padded image, every part as likely, and all else stays."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lightning_eff as eff
from lightning_eff.data.augmentation.images.random_crop import crops
from tests.cases import Case
from tests.data.augmentation.images.test_rand_augment import Seeing, images, run_on
from tests.data.augmentation.modules import ON_IMAGES, Own, batches, chi_squared, train
from tests.runs import fit_yaml

CASES = {
    "RandomCrop": Case(
        active=lambda: eff.RandomCrop(2),
        neutral=lambda: eff.RandomCrop(0),
        **ON_IMAGES,
    )
}
MODES: list[Any] = ["constant", "edge", "reflect", "symmetric"]


def parts(image: np.ndarray[Any, Any], padding: int, mode: Any, **kwargs: Any) -> dict[bytes, tuple[int, int]]:
    """All parts of the padded image (C, H, W) in its own size, by their bytes, with the place at which they begin."""
    whole = np.pad(image, ((0, 0), (padding, padding), (padding, padding)), mode=mode, **kwargs)
    _, height, width = image.shape
    places = ((y, x) for y in range(2 * padding + 1) for x in range(2 * padding + 1))
    return {whole[:, y : y + height, x : x + width].tobytes(): (y, x) for y, x in places}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("size", "padding"), [(5, 2), (4, 3), (2, 1), (2, 5)])
def test_lines_are_parts_of_numpys_padded_line_and_all_as_likely(mode: Any, size: int, padding: int) -> None:
    n = 4000
    found = crops(n, size, padding, mode, torch.Generator().manual_seed(0))
    pad: Any = {"constant_values": -1} if mode == "constant" else {}
    whole = np.pad(np.arange(size), padding, mode=mode, **pad)
    windows = torch.from_numpy(np.lib.stride_tricks.sliding_window_view(whole, size).copy())
    different = windows.unique(dim=0)
    counts = (found[:, None] == different).all(2).sum(0).double()
    expected = (windows[:, None] == different).all(2).sum(0).double() * n / len(windows)
    assert counts.sum() == n
    assert chi_squared(counts, expected) < 4 or len(different) == 1


@pytest.mark.parametrize("mode", MODES)
def test_images_in_training_are_parts_of_the_padded_images(mode: Any) -> None:
    x, fill = images(size=200), [0.1, 0.2, 0.3]
    technique = eff.RandomCrop(2, mode=mode, fill=fill, prob=0.5)
    made = run_on(x, technique)
    begins = np.zeros((5, 5))
    for one, own in zip(made.numpy(), x.numpy(), strict=True):
        ways = parts(own, 2, mode)
        if mode == "constant":  # numpy has one value for all channels
            each = [parts(own[c : c + 1], 2, mode, constant_values=np.float32(fill[c])) for c in range(3)]
            ways = {b"".join(many): place for *many, place in zip(*each, each[0].values(), strict=True)}
        begins[ways[one.tobytes()]] += 1
    still = begins[2, 2]
    assert abs(still - 200 * (0.5 + 0.5 / 25)) < 4 * 50**0.5
    assert (begins > 0).sum() > 20, "rows and columns are drawn apart"
    assert technique.report()["share"] == pytest.approx(1 - still / 200)


def test_bytes_stay_bytes_and_the_memory_format_stays() -> None:
    levels = (images() * 255).round()
    as_bytes = run_on(levels.byte(), eff.RandomCrop(2, fill=7))
    assert as_bytes.dtype == torch.uint8
    assert torch.equal(as_bytes.float(), run_on(levels, eff.RandomCrop(2, fill=7)))
    last = levels.contiguous(memory_format=torch.channels_last)
    assert run_on(last, eff.RandomCrop(2)).is_contiguous(memory_format=torch.channels_last)


def test_all_images_of_a_sample_move_alike() -> None:
    x = images(1)
    net = Seeing(F.cross_entropy)
    train(net, eff.RandomCrop(2, mode="edge"), data=[{"image": x, "other": 2 * x, "label": torch.arange(6) % 4}])
    given = net.given[-1]
    assert torch.equal(given["other"], 2 * given["image"]) and not torch.equal(given["image"], x)


def test_crops_come_before_flips_whatever_the_order() -> None:
    def made(*techniques: Any) -> list[Tensor]:
        pl.seed_everything(3, verbose=False)
        return [x for x, _ in train(Own(F.cross_entropy), *techniques, data=batches(3)).given]

    cropped = made(eff.RandomCrop(2))
    for both in (
        made(eff.RandomCrop(2), eff.RandomFlip(1.0)),
        made(eff.RandomFlip(1.0), eff.RandomCrop(2)),
    ):
        assert all(torch.equal(a.flip(3), b) for a, b in zip(cropped, both, strict=True))


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lambda x: {"image": x}, {"padding": 8}, r"padding=8\): the images have 8 x 9 pixels"),
        (lambda x: {"image": x}, {"fill": [0.1, 0.2]}, r"fill=\[0.1, 0.2\]\): the images .* have 1 channels"),
        (lambda x: {"image": x.byte()}, {"fill": 0.5}, r"fill=0.5\): the images .* are uint8. Give integers"),
        (lambda x: {"image": x, "mask": x[:, 0] > 0}, {}, r"holds \['mask'\], which would no longer match"),
        (lambda x: {"image": x, "boxes": x[:, 0, 0, :4]}, {}, r"holds \['boxes'\], .* Move them with the images"),
        (lambda x: {"image": x[:, 0]}, {}, r"found no images in the batch"),
    ],
)
def test_what_cannot_be_cropped_is_refused(make: Any, arguments: Any, message: str) -> None:
    net, batch = Seeing(F.cross_entropy), {**make(images(1)), "label": torch.arange(6) % 4}
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(ValueError, match=rf"^RandomCrop(?s:.*){message}"):
        train(net, eff.RandomCrop(**arguments), data=[batch])
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"padding": -1}, r"padding=-1\): expected an integer >= 0"),
        ({"mode": "wrap"}, r"mode='wrap'\): expected 'constant', 'edge', 'reflect' or 'symmetric'"),
        ({"fill": "black"}, r"fill='black'\): expected a finite number, or a list of them"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^RandomCrop\({message}"):
        eff.RandomCrop(**arguments)


def test_yaml(tmp_path: Path) -> None:
    names: Any = {"model": "tests.data.augmentation.modules.ResNet", "data": "tests.data.augmentation.modules.Pictures"}
    fit_yaml(tmp_path, "RandomCrop", {"padding": 2, "mode": "reflect"}, max_steps=4, **names)
