"""Operations, against Pillow's on bytes; strengths, signs, and what values mean."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance, ImageOps

from lightning_eff.data.augmentation.images._pixels import Pixels

pytest.importorskip("kornia")
from lightning_eff.data.augmentation.images._operations import OPERATIONS, operated, signed

GRAY = 128
MOVING = {"rotate": 1.5, "shear_x": 1.0, "shear_y": 1.0}  # those that interpolate, and by how many pixels at the border


def pictures(channels: int = 3) -> torch.Tensor:
    """Smooth images of bytes, as numbers from 0 to 1."""
    g = torch.Generator().manual_seed(0)
    rough = torch.rand(2, channels, 6, 7, generator=g)
    return (F.interpolate(rough, size=(24, 31), mode="bicubic").clamp(0, 1) * 200 + 20).round() / 255


def by_pillow(image: Any, name: str, s: float) -> Any:
    """The operation as the authors' code does it by Pillow, with ``s`` of its range."""
    width, height = image.size
    gray: Any = (GRAY,) * 3 if image.mode == "RGB" else GRAY

    def moved(*matrix: float) -> Any:
        return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=gray)

    by = {
        "identity": lambda: image,
        "auto_contrast": lambda: ImageOps.autocontrast(image),
        "equalize": lambda: ImageOps.equalize(image),
        "invert": lambda: ImageOps.invert(image),
        "rotate": lambda: image.rotate(30 * s, Image.Resampling.BILINEAR, fillcolor=gray),
        "solarize": lambda: ImageOps.solarize(image, 255 * (1 - s)) if s else image,
        "posterize": lambda: ImageOps.posterize(image, 8 - round(4 * s)),
        "color": lambda: ImageEnhance.Color(image).enhance(1 + 0.9 * s),
        "contrast": lambda: ImageEnhance.Contrast(image).enhance(1 + 0.9 * s),
        "brightness": lambda: ImageEnhance.Brightness(image).enhance(1 + 0.9 * s),
        "sharpness": lambda: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * s),
        "shear_x": lambda: moved(1, 0.3 * s, 0, 0, 1, 0),
        "shear_y": lambda: moved(1, 0, 0, 0.3 * s, 1, 0),
        "translate_x": lambda: moved(1, 0, round(150 / 331 * width * s), 0, 1, 0),
        "translate_y": lambda: moved(1, 0, 0, 0, 1, round(150 / 331 * height * s)),
    }
    return by[name]()


def on_bytes(x: torch.Tensor, name: str, s: float) -> torch.Tensor:
    images = [(one * 255).round().byte().permute(1, 2, 0).squeeze(-1).numpy() for one in x]
    made = [torch.from_numpy(np.array(by_pillow(Image.fromarray(one), name, s))) for one in images]
    return torch.stack([one[None] if one.ndim == 2 else one.permute(2, 0, 1) for one in made]).float()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_pillows(name: str, channels: int) -> None:
    x = pictures(channels)
    for s in (0.0, 0.3, 0.7, 1.0, *((-0.6, -1.0) if OPERATIONS[name].signed else ())):
        every = torch.zeros(len(x), dtype=torch.long)
        got = operated(x, [name], every, torch.full((len(x),), s), GRAY / 255) * 255
        off = (got - on_bytes(x, name, s)).abs()
        if name in MOVING and s:  # Pillow does not blend with what lies beyond the border, within a pixel of it
            a = on_bytes(torch.ones_like(x), name, s) < 255
            border = F.max_pool2d(a.float(), 5, 1, 2).bool()
            border[:, :, :2] = border[:, :, -2:] = border[:, :, :, :2] = border[:, :, :, -2:] = True
            assert float(border.float().mean()) < 0.75
            off = off.masked_fill(border, 0.0)
        assert float(off.max()) < 1.5, (name, s)


def test_at_strength_0_images_stay() -> None:
    x = pictures()
    for name, operation in OPERATIONS.items():
        if name in ("auto_contrast", "equalize", "invert"):
            continue
        made = operated(x, [name], torch.zeros(2, dtype=torch.long), torch.zeros(2), 0.5)
        torch.testing.assert_close(made, x, rtol=0, atol=1e-6)
        assert operation.signed or name in ("identity", "solarize", "posterize")


def test_each_image_has_its_own_operation_and_strength() -> None:
    x = torch.cat([pictures(), pictures()])
    names = ("invert", "brightness")
    made = operated(x, names, torch.tensor([1, 0, -1, 1]), torch.tensor([-1.0, 0.3, 0.3, 0.5]), 0.5)
    expected = [x[0] * 0.1, 1 - x[1], x[2], (x[3] * 1.45).clamp(max=1)]
    torch.testing.assert_close(made, torch.stack(expected))


def test_all_images_that_move_are_warped_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by its own matrix, so that they are as if warped one by one."""
    x = torch.cat([pictures()] * 4)
    names = ("rotate", "shear_x", "invert", "translate_y", "shear_y", "translate_x")
    which = torch.tensor([0, 1, 2, 3, 4, 5, -1, 0])
    strength = torch.tensor([0.9, -0.4, 1.0, 0.7, 0.2, -0.9, 0.5, -0.3], dtype=torch.float64)
    alone = [
        x[i]
        if which[i] < 0
        else OPERATIONS[names[which[i]]].apply(x[i : i + 1], strength[i : i + 1], 0.5)[0].clamp(0, 1)
        for i in range(len(x))
    ]
    passes: list[int] = []
    sample = F.grid_sample
    monkeypatch.setattr(
        F, "grid_sample", lambda x, *args, **kwargs: (passes.append(len(x)), sample(x, *args, **kwargs))[1]
    )
    made = operated(x, names, which, strength, 0.5)
    assert passes == [6]
    torch.testing.assert_close(made, torch.stack(alone), rtol=0, atol=1e-6)


def test_signs_are_drawn_where_an_operation_has_one() -> None:
    which = torch.arange(3).repeat(4000)
    strength = signed(
        ("rotate", "posterize", "color"), which, torch.full(which.shape, 0.7), torch.Generator().manual_seed(0)
    )
    assert bool((strength[which == 1] == 0.7).all()) and bool((strength.abs() == 0.7).all())
    for place in (0, 2):
        assert abs(int((strength[which == place] < 0).sum()) - 2000) < 4 * 1000**0.5


def test_a_channel_of_one_value_keeps_it() -> None:
    x = pictures()
    x[:, 1] = 0.4
    for name in ("auto_contrast", "equalize"):
        made = operated(x, [name], torch.zeros(2, dtype=torch.long), torch.ones(2), 0.5)
        torch.testing.assert_close(made[:, 1], x[:, 1])


@pytest.mark.parametrize(
    ("pixels", "low", "high"),
    [
        (Pixels(0.0, 1.0, 1.0, who="X"), [0.0] * 3, [1.0] * 3),
        (Pixels(0.0, 1.0, 255, who="X"), [0.0] * 3, [255.0] * 3),
        (Pixels((0.5, 0.4, 0.3), (0.2, 0.1, 0.5), 1.0, who="X"), [-2.5, -4.0, -0.6], [2.5, 6.0, 1.4]),
        (Pixels([100.0], 50.0, 255, who="X"), [-2.0] * 3, [3.1] * 3),
    ],
)
def test_ranges_there_and_back(pixels: Pixels, low: list[float], high: list[float]) -> None:
    p = pictures()
    p[:, :, 0, 0], p[:, :, 1, 1] = 0.0, 1.0
    x = pixels.back(p, p)
    torch.testing.assert_close(x.amin((0, 2, 3)), torch.tensor(low))
    torch.testing.assert_close(x.amax((0, 2, 3)), torch.tensor(high))
    torch.testing.assert_close(pixels.whole(x), p)
    pixels.fits(x)
    levels = (p * 255).round().byte()
    assert torch.equal(pixels.back(pixels.whole(levels), levels), levels)
