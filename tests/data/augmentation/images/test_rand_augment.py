"""RandAugment: exactly N operations to each image, each of K as likely, in images of every range and number of channels."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lightning_eff as eff
from lightning_eff.data.augmentation.images import _policies
from lightning_eff.data.augmentation.images._operations import OPERATIONS, operated
from lightning_eff.data.augmentation.images.rand_augment import PAPERS, rand_augment
from tests.cases import Case
from tests.data.augmentation.modules import ON_IMAGES, Own, batches, chi_squared, conv_next, train, vit
from tests.models import trainer
from tests.runs import fit_yaml

pytest.importorskip("kornia")
_RANGE: Any = {"mean": 0.5, "std": 0.1}  # of numbers drawn from a normal distribution

CASES = {
    "RandAugment": Case(
        active=lambda: eff.RandAugment(**_RANGE),
        neutral=lambda: eff.RandAugment(num_operations=0),
        **ON_IMAGES,
    )
}


def images(channels: int = 3, size: int = 6) -> Tensor:
    return torch.rand(size, channels, 8, 9, generator=torch.Generator().manual_seed(0))


def net(channels: int = 3) -> Any:
    built = Own(F.cross_entropy)
    built.body = torch.nn.Sequential(torch.nn.Conv2d(channels, 8, 3, padding=1), torch.nn.ReLU())
    return built


def test_operations_are_the_papers_and_drawn_evenly() -> None:
    assert len(PAPERS) == 14 == len(set(PAPERS)) and "invert" not in PAPERS
    n = 7000
    which, strength = rand_augment(n, 2, 9.0, PAPERS, torch.Generator().manual_seed(0))
    assert which.shape == strength.shape == (n, 2)
    for slot in which.T:
        counts = torch.bincount(slot, minlength=14).double()
        assert chi_squared(counts, torch.full((14,), n / 14, dtype=torch.float64)) < 4
    both = torch.bincount(which[:, 0] * 14 + which[:, 1], minlength=196).double()
    assert chi_squared(both, torch.full((196,), n / 196, dtype=torch.float64)) < 4, "the second apart from the first"
    assert bool((strength.abs() == 0.9).all())


@pytest.mark.parametrize("number", [1, 2, 3])
def test_exactly_n_operations_are_done_to_each_image(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where they are done, in a run; and what comes out is what they make one after the other."""
    done: list[tuple[str, float, Tensor]] = []

    def spy(p: Tensor, names: Any, which: Tensor, strength: Tensor, fill: float) -> Tensor:
        done.extend((names[int(k)], float(s), one) for k, s, one in zip(which, strength, p, strict=True))
        return operated(p, names, which, strength, fill)

    monkeypatch.setattr(_policies, "operated", spy)
    x, y = images(), batches()[0][1]
    made = train(net(), eff.RandAugment(num_operations=number), data=[(x, y)]).given[-1][0]
    assert len(done) == number * len(x)
    for i, own in enumerate(x):
        mine = done[i :: len(x)]
        assert torch.equal(mine[0][2], own) and len(mine) == number
        p = own[None]
        for name, strength, _ in mine:
            assert abs(strength) == 0.9
            p = OPERATIONS[name].apply(p, torch.tensor([strength], dtype=torch.float64), 0.5).clamp(0, 1)
        torch.testing.assert_close(made[i], p[0], rtol=0, atol=1e-5)


def run_on(x: Tensor, technique: Any, **kwargs: Any) -> Tensor:
    module = net(x.shape[1])
    pl.seed_everything(3, verbose=False)
    inner = module.forward
    module.forward = lambda images: inner(images.float())
    return train(module, technique, data=[(x, torch.arange(len(x)) % 4)], **kwargs).given[-1][0]


def test_all_ranges_give_the_same_pictures() -> None:
    """0 to 1, 0 to 255, bytes and normalised: what the network gets is the same image in its own values."""
    levels = (images() * 255).round()
    p, mean, std = levels / 255, [0.5, 0.4, 0.3], [0.2, 0.3, 0.25]
    expected = run_on(p, eff.RandAugment())
    assert not torch.equal(expected, p)
    m, s = (torch.tensor(v)[:, None, None] for v in (mean, std))
    by_255 = run_on(levels, eff.RandAugment(scale=255))
    as_bytes = run_on(levels.byte(), eff.RandAugment())
    normalised = run_on((p - m) / s, eff.RandAugment(mean=mean, std=std))
    torch.testing.assert_close(by_255 / 255, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(normalised * s + m, expected, rtol=0, atol=1e-5)
    assert as_bytes.dtype == torch.uint8
    assert float((as_bytes.float() / 255 - expected).abs().max()) <= 0.5 / 255 + 1e-6


def test_images_to_which_nothing_is_done_stay_bit_for_bit() -> None:
    x, mean = images(size=200), [0.41, 0.43, 0.47]
    z = (x - torch.tensor(mean)[:, None, None]) / 0.23
    technique = eff.RandAugment(mean=mean, std=0.23, prob=0.3, num_operations=1, operations=["invert", "identity"])
    made = run_on(z, technique)
    changed = (made != z).flatten(1).any(1)
    assert abs(int(changed.sum()) - 30) < 4 * (200 * 0.15 * 0.85) ** 0.5
    assert technique.report()["share"] == pytest.approx(float(changed.float().mean()))
    last = z.contiguous(memory_format=torch.channels_last)
    again = run_on(last, eff.RandAugment(mean=mean, std=0.23))
    assert again.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_any_number_of_channels_but_for_color(channels: int) -> None:
    others = [name for name in PAPERS if name != "color"]
    x = images(channels)
    assert run_on(x, eff.RandAugment(operations=others)).shape == x.shape
    if channels == 1:
        run_on(x, eff.RandAugment())
        return
    with pytest.raises(ValueError, match=rf"RandAugment: .* have {channels} channels, for which color .*operations=\["):
        run_on(x, eff.RandAugment())


def test_draws_follow_from_seed_and_step_and_rank() -> None:
    data = [batches()[0]] * 3

    def made(seed: int, *callbacks: Any) -> list[Tensor]:
        built = Own(F.cross_entropy)
        pl.seed_everything(seed, verbose=False)
        return [x for x, _ in train(built, eff.RandAugment(**_RANGE), *callbacks, data=data).given]

    class Rank(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.callbacks[0].session.rank = 1

    first = made(0)
    assert all(torch.equal(a, b) for a, b in zip(first, made(0), strict=True))
    assert not torch.equal(first[0], first[1])
    assert all(not torch.equal(a, b) for other in (made(1), made(0, Rank())) for a, b in zip(first, other, strict=True))


class Siamese(pl.LightningModule):
    """Two views of each image, which are the same before augmentation.

    Attributes:
        given: the views of each step.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
        )
        self.given: list[dict[str, Tensor]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.given.append(batch)
        return F.mse_loss(self.encoder(batch["first"]), self.encoder(batch["second"]).detach())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def views(*callbacks: pl.Callback) -> list[dict[str, Tensor]]:
    """The views of each step, made from pairs that are the same."""
    pl.seed_everything(0, verbose=False)
    x = torch.rand(8, 3, 32, 32)
    net = Siamese()
    data: Any = torch.utils.data.DataLoader([{"first": x, "second": x.clone()}] * 4, batch_size=None)  # pyright: ignore[reportArgumentType]
    trainer(*callbacks, max_epochs=1).fit(net, data)
    return net.given


@pytest.mark.parametrize(
    ("technique", "least"),
    [
        (partial(eff.RandAugment, 2, prob=0.9), 20),  # of 32 pairs, where draws differ: most of them
        (partial(eff.RandomCrop, 4), 24),  # all but one in 81
        (partial(eff.RandomFlip), 8),  # half of them
    ],
    ids=["RandAugment", "RandomCrop", "RandomFlip"],
)
def test_views_have_draws_of_their_own_if_asked(technique: Any, least: int) -> None:
    alike, own = views(technique()), views(technique(independent=True))
    changed = 0
    for same, different in zip(alike, own, strict=True):
        assert torch.equal(same["first"], same["second"])
        assert torch.equal(different["first"], same["first"])
        changed += sum(not torch.equal(a, b) for a, b in zip(different["first"], different["second"], strict=True))
    assert changed >= least


def test_views_grow_together_in_size_and_magnitude() -> None:
    """What Koçyiğit et al. combine: images and magnitudes that grow together, and a cyclic learning rate."""
    together = views(
        eff.RandAugment(2, prob=0.9, initial_magnitude=0.0, independent=True),
        eff.ProgressiveResizing(0.5, until=0.5),
        eff.LearningRateSchedule("sgdr", cycles=2),
    )
    sides = [[both[name].shape[-1] for both in together] for name in ("first", "second")]
    assert sides[0] == sides[1] and sides[0][0] < sides[0][-1] == 32


@pytest.mark.parametrize("build", [vit, conv_next], ids=["vit", "convnext"])
def test_hugging_face_models_and_bfloat16(build: Any) -> None:
    technique = eff.RandAugment(**_RANGE)
    module = train(build(), technique, data=batches(2), precision="bf16-mixed")
    assert all(x.dtype == torch.float32 for x, _ in module.given) and module.losses[-1] > 0
    assert technique.report()["milliseconds"] > 0


def test_the_magnitude_rises_linearly_over_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first step to the last, in equal parts, as the strengths of the operations show."""
    strengths: list[float] = []

    def spy(p: Tensor, names: Any, which: Tensor, strength: Tensor, fill: float) -> Tensor:
        strengths.append(float(strength.abs().max()))
        return operated(p, names, which, strength, fill)

    monkeypatch.setattr(_policies, "operated", spy)
    x, y = images(), batches()[0][1]
    technique = eff.RandAugment(1, 9, initial_magnitude=1)
    train(net(), technique, data=[(x, y)] * 8)
    assert strengths == pytest.approx([(1 + 8 * k / 8) / 10 for k in range(8)])
    assert technique.report()["magnitude"] == pytest.approx(8)
    with pytest.raises(
        ValueError, match=r"RandAugment\(initial_magnitude=0\): the Trainer has no end .* Set one of them"
    ):
        train(net(), eff.RandAugment(initial_magnitude=0), data=[(x, y)], max_steps=-1, max_epochs=-1)


class Seeing(Own):
    """Takes batches of any make."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.given.append(batch)
        return F.cross_entropy(self(batch["image"]), batch["label"])


def test_what_later_batches_hold_beyond_the_range_is_clipped_and_told() -> None:
    y = torch.arange(6) % 4
    x = images(1)
    beyond = x.clone()
    beyond[0, 0, 0] = 1.5
    technique = eff.RandAugment(operations=["identity", "brightness"], magnitude=0.0)
    module = Seeing(F.cross_entropy)
    train(module, technique, data=[{"image": t, "label": y} for t in (x, beyond)])
    assert technique.report()["clipped"] == pytest.approx(9 / beyond.numel())
    assert float(module.given[-1]["image"][0, 0, 0].max()) in (1.0, 1.5)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (
            lambda x: {"image": x * 255},
            {},
            r"have values from .* to .* of the range .*, and not within 0 to 1. Set mean= and std=",
        ),
        (lambda x: {"image": x}, {"scale": 255}, r"scale=255\): .* so they would be black"),
        (lambda x: {"image": x * 4 - 2}, {}, r"are -\d.* and not within 0 to 1"),
        (lambda x: {"image": x}, {"mean": [0.1, 0.2], "std": 2}, r"mean=\[0.1, 0.2\]\): .* have 1 channels"),
        (lambda x: {"image": x[:, :, :2]}, {}, r"have 2 x 9 pixels, fewer than 3 x 3"),
        (
            lambda x: {"image": x, "mask": x[:, 0] > 0.5},
            {},
            r"holds \['mask'\], which would no longer match the images after .*rotate",
        ),
        (lambda x: {"image": x, "boxes": x[:, 0, 0, :4]}, {}, r"holds \['boxes'\], .*Set operations="),
        (lambda x: {"image": x}, {"keys": ["pixels"]}, r"keys=\['pixels'\]\): \['pixels'\] are not in the batch"),
        (lambda x: {"image": x[:, 0]}, {}, r"found no images in the batch: \['image'\] \(6, 8, 9\)"),
    ],
    ids=["bytes", "unit", "normalised", "means", "small", "masks", "boxes", "keys", "none"],
)
def test_what_cannot_be_changed_is_refused(make: Any, arguments: Any, message: str) -> None:
    batch = {**make(images(1)), "label": torch.arange(6) % 4}
    with pytest.raises(ValueError, match=rf"^RandAugment(?s:.*){message}"):
        train(Seeing(F.cross_entropy), eff.RandAugment(**arguments), data=[batch])


def test_masks_may_stay_where_nothing_moves() -> None:
    still = [name for name in PAPERS if not OPERATIONS[name].moves]
    x = images(1)
    batch = {"image": x, "mask": x[:, 0] > 0.5, "label": torch.arange(6) % 4}
    module = train(Seeing(F.cross_entropy), eff.RandAugment(operations=still), data=[batch])
    assert torch.equal(module.given[0]["mask"], batch["mask"]) and not torch.equal(module.given[0]["image"], x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_operations": -1}, r"num_operations=-1\): expected an integer >= 0"),
        ({"num_operations": 1.5}, r"num_operations=1.5\): expected an integer"),
        ({"initial_magnitude": 11}, r"initial_magnitude=11\): expected a number in \[0, 10\], or None"),
        ({"magnitude": 11}, r"magnitude=11\): expected a number in \[0, 10\]"),
        (
            {"operations": ["rotate", "cutout"]},
            r"operations=\['rotate', 'cutout'\]\): expected a list of some of 'identity', .*'translate_y'",
        ),
        ({"operations": "rotate"}, r"operations='rotate'\): expected a list of some of 'identity'"),
        ({"std": 0}, r"std=0\): expected a finite number > 0, or a list of them"),
        ({"mean": "half"}, r"mean='half'\): expected a finite number"),
        ({"scale": 0}, r"scale=0\): expected a finite number > 0"),
        ({"fill": 2}, r"fill=2\): expected a number in \[0, 1\]"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^RandAugment\({message}"):
        eff.RandAugment(**arguments)


def test_without_kornia_setup_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kornia", None)
    with pytest.raises(ImportError, match=r"RandAugment: the package kornia is not installed.*\.\[augmentation\]"):
        train(Own(F.cross_entropy), eff.RandAugment(**_RANGE))
    train(Own(F.cross_entropy), eff.RandAugment(num_operations=0))


def test_yaml(tmp_path: Path) -> None:
    names: Any = {"model": "tests.data.augmentation.modules.ResNet", "data": "tests.data.augmentation.modules.Pictures"}
    arguments = {"num_operations": 1, "mean": [0.5], "std": 0.1, "operations": ["rotate", "invert"]}
    fit_yaml(tmp_path, "RandAugment", arguments, max_steps=4, **names)
