"""TokenMix: whole patches of one image each, labels by a teacher's activation written out, and even maps by tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_eff as eff
from lightning_eff.data.augmentation.mixing.token_mix import activation_share, patch_of, token_blocks
from tests.cases import Case
from tests.data.augmentation.modules import (
    LOSSES,
    ON_IMAGES,
    SIDE,
    SIZE,
    Own,
    ResNet,
    Spied,
    batches,
    check_exact,
    conv_next,
    train,
    vit,
)
from tests.runs import fit_yaml


def energy(images: Tensor) -> Tensor:
    """A teacher: where pixels are far from gray."""
    return images.square().mean(1)


CASES = {
    "TokenMix": Case(
        active=lambda: eff.TokenMix(teacher=energy, block=2, patch=2),
        neutral=lambda: eff.TokenMix(teacher="uniform", prob=0.0),
        **ON_IMAGES,
    )
}


def technique(**kwargs: Any) -> Any:
    return eff.TokenMix(**{"teacher": energy, "block": 2, "patch": 2, "per_sample": True, **kwargs})


@pytest.mark.parametrize("grid", [(14, 14), (4, 4), (3, 9)])
def test_tokens_are_as_many_as_asked_for_in_several_blocks(grid: tuple[int, int]) -> None:
    draws, count = np.random.default_rng(0), grid[0] * grid[1]
    several = 0
    for share in np.linspace(0, 1, 60):
        own = token_blocks(float(share), grid, max(count // 14, 1), draws)
        assert own.shape == grid
        asked = int((1 - share) * count)
        assert asked * 0.9 - 1 <= int((~own).sum()) <= asked
        # where tokens of others are one rectangle, they fill what is around them
        rows, columns = (~own).nonzero(as_tuple=True)
        if len(rows):
            around = (int(rows.max() - rows.min()) + 1) * (int(columns.max() - columns.min()) + 1)
            several += around > len(rows)
    assert several > 30
    assert bool(token_blocks(1.0, grid, 2, draws).all())


def by_loops(own: Tensor, mine: Tensor, others: Tensor) -> Tensor:
    found = []
    for m, a, b in zip(own, mine.double(), others.double(), strict=True):
        first = sum(float(a[i, j] / a.sum()) for i in range(a.shape[0]) for j in range(a.shape[1]) if m[i, j])
        second = sum(float(b[i, j] / b.sum()) for i in range(a.shape[0]) for j in range(a.shape[1]) if not m[i, j])
        found.append(first / (first + second))
    return torch.tensor(found)


def test_shares_are_the_teachers_activation_in_each_region() -> None:
    g = torch.Generator().manual_seed(0)
    own = torch.rand(40, 4, 5, generator=g) < 0.6
    mine, others = torch.rand(2, 40, 4, 5, generator=g)
    torch.testing.assert_close(activation_share(own, mine, others), by_loops(own, mine, others), rtol=1e-5, atol=1e-6)
    even = torch.full((40, 4, 5), 0.3)
    tokens = own.float().mean((1, 2))
    torch.testing.assert_close(activation_share(own, even, 2 * even), tokens, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(activation_share(own, 0 * even, even), tokens, rtol=1e-5, atol=1e-6)
    # all of both images' content lies where the other one is
    assert torch.equal(activation_share(own, (~own).float(), own.float()), tokens)
    both = activation_share(own, mine, others) + activation_share(~own, others, mine)
    torch.testing.assert_close(both, torch.ones(40))


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("teacher", [energy, "uniform"], ids=["teacher", "uniform"])
def test_in_training_each_patch_is_wholly_of_one_image(teacher: Any, per_sample: bool) -> None:
    one, data = technique(teacher=teacher, per_sample=per_sample), batches(30)
    spied = Spied(one)
    net = train(Own(F.cross_entropy), one, data=data)
    for (x, y), (own, labels), partner, share in zip(net.given[-30:], data, spied.partners, spied.shares, strict=True):
        other = own[partner]

        def patches(images: Tensor) -> Tensor:
            return images.unfold(2, 2, 2).unfold(3, 2, 2).flatten(4)[:, 0]  # (B, 4, 4, 4 pixels)

        mine, theirs = ((patches(x) == patches(t)).all(-1) for t in (own, other))
        assert bool((mine | theirs).all()) and torch.equal(y, labels)
        fixed = partner == torch.arange(SIZE)
        maps = patches(own.square()).mean(-1) if teacher is energy else torch.ones(SIZE, 4, 4)
        expected = by_loops(mine, maps, maps[partner])
        torch.testing.assert_close(share[~fixed], expected[~fixed].float(), rtol=1e-4, atol=1e-5)
        if teacher == "uniform":
            torch.testing.assert_close(share[~fixed], mine.float().mean((1, 2))[~fixed])


@pytest.mark.parametrize("build", [lambda: Own(F.cross_entropy), vit, conv_next], ids=["own", "vit", "convnext"])
def test_the_loss_is_that_on_mixed_targets(build: Any) -> None:
    check_exact(build(), technique(patch=None if build is vit else 2), LOSSES["cross-entropy"][1], larger_first=False)


class Trained(nn.Module):
    """A teacher that would draw, learn and remember, were it not looked at alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv, self.norm, self.drop = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Dropout(0.5)
        self.modes: list[bool] = []

    def forward(self, images: Tensor) -> Tensor:
        self.modes.append(self.training or torch.is_grad_enabled())
        return self.drop(self.norm(self.conv(images))).relu().sum(1)


def test_a_teacher_is_looked_at_alone() -> None:
    teacher = Trained().train()
    before = {name: t.clone() for name, t in teacher.state_dict().items()}
    net = train(ResNet(), technique(teacher=teacher), data=batches(3))
    assert teacher.modes == [False] * 4 and teacher.training, "one look, and one of each step"
    assert all(torch.equal(before[name], t) for name, t in teacher.state_dict().items())
    assert not any("teacher" in name or name == "conv.weight" for name in net.state_dict())
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (lambda x: x, r"the teacher returned \(6, 1, 8, 8\) for 6 images, not maps \(6, h, w\)"),
        (lambda x: None, "the teacher returned a NoneType for 6 images"),
        (lambda x: x[:, 0], "negative or not finite"),
        (lambda x: x[:, 0] / 0, "negative or not finite"),
    ],
)
def test_a_teacher_of_something_else_is_refused_before_any_weight_changes(teacher: Any, message: str) -> None:
    net = ResNet()
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(ValueError, match=f"TokenMix: .*{message}"):
        train(net, technique(teacher=teacher))
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


def test_later_images_whose_maps_are_no_activations_count_by_their_tokens() -> None:
    def teacher(images: Tensor) -> Tensor:
        signed = torch.arange(SIDE).expand(len(images), SIDE, SIDE) - 2.0
        return torch.where((images.amax((1, 2, 3)) > 50)[:, None, None], signed, energy(images))

    data = batches(6)
    for x, _ in data[1:]:
        x[0] += 100.0
    one = technique(teacher=teacher)
    spied = Spied(one)
    with pytest.warns(
        UserWarning, match="TokenMix: the teacher returned maps .* by the number of their patches"
    ) as told:
        net = train(Own(F.cross_entropy), one, data=data)
    assert sum("by the number of their patches" in str(w.message) for w in told) == 1

    def patches(images: Tensor) -> Tensor:
        return images.unfold(2, 2, 2).unfold(3, 2, 2).flatten(4)[:, 0]

    for (x, _), (own, _), partner, share in zip(
        net.given[-5:], data[1:], spied.partners[-5:], spied.shares[-5:], strict=True
    ):
        mine = (patches(x) == patches(own)).all(-1)
        maps = patches(own.square()).mean(-1)
        maps[0] = 1.0
        moved = partner != torch.arange(SIZE)
        torch.testing.assert_close(
            share[moved], by_loops(mine, maps, maps[partner])[moved].float(), rtol=1e-4, atol=1e-5
        )


def test_patches_are_those_of_the_modules_own_convolution() -> None:
    assert patch_of(vit(), 1) == 2 and patch_of(conv_next(), 1) == 2
    with pytest.raises(
        ValueError, match=r"ResNet holds no nn.Conv2d of 1 channels whose stride is its kernel.*patch=16"
    ):
        train(ResNet(), technique(patch=None))
    two = nn.Sequential(nn.Conv2d(1, 2, 2, stride=2), nn.Conv2d(1, 2, 4, stride=4))
    with pytest.raises(ValueError, match=r"of several sizes, \[\(2, 2\), \(4, 4\)\]"):
        patch_of(two, 1)
    for patch in (3, SIDE):
        with pytest.raises(
            ValueError, match=rf"images of 8 x 8 pixels are not made of several whole patches of {patch} x"
        ):
            train(ResNet(), technique(patch=patch))


def test_arguments_and_control() -> None:
    for teacher in (None, "even", 3):
        with pytest.raises(
            ValueError,
            match=r"TokenMix\(teacher=.*expected a module or function of images .*maps \(B, h, w\) or 'uniform'",
        ):
            eff.TokenMix(teacher=teacher)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"TokenMix\(alpha=0\): expected a finite number > 0"):
        eff.TokenMix(teacher="uniform", alpha=0)
    with pytest.raises(ValueError, match=r"TokenMix\(block=0\): expected an integer >= 1"):
        eff.TokenMix(teacher="uniform", block=0)
    one = technique(alpha=0.7)
    (arm,) = one.control.arms(one).values()
    assert isinstance(arm, eff.TokenMix) and (arm.teacher, arm.alpha, arm.block, arm.patch) == ("uniform", 0.7, 2, 2)
    assert one.control.arms(arm) == {}


def test_yaml(tmp_path: Path) -> None:
    here = "tests.data.augmentation"
    names: Any = {"model": f"{here}.modules.ResNet", "data": f"{here}.modules.Pictures"}
    fit_yaml(tmp_path, "TokenMix", {"teacher": "uniform", "patch": 2}, max_steps=4, **names)
    teacher = {"class_path": f"{here}.mixing.test_token_mix.Trained"}
    fit_yaml(tmp_path, "TokenMix", {"teacher": teacher, "patch": 2}, max_steps=4, **names)
