"""SuperMix: masks that sum to 1, a teacher that sees the classes of all images where it is said to, and the labels of that."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_eff as eff
from lightning_eff.data.augmentation.mixing.several._masks import (
    blended,
    masks_of,
    newton,
    objective,
    search,
    sees,
    smoothed,
)
from tests.cases import Case
from tests.data.augmentation.modules import (
    CLASSES,
    LOSSES,
    ON_IMAGES,
    SIDE,
    SIZE,
    Own,
    ResNet,
    Spied,
    batches,
    check_exact,
    codes,
    conv_next,
    train,
    vit,
)
from tests.runs import fit_yaml


def quadrants(images: Tensor) -> Tensor:
    """A teacher of four classes: how bright each quarter of an image is."""
    return 6 * F.adaptive_avg_pool2d(images.mean(1, keepdim=True), 2).flatten(1)


CASES = {
    "SuperMix": Case(
        active=lambda: eff.SuperMix(teacher=quadrants, mask=4, iterations=4, tolerance=0.3, targets="mixed"),
        neutral=lambda: eff.SuperMix(teacher=quadrants, prob=0.0),
        **ON_IMAGES,
    )
}


def technique(**kwargs: Any) -> Any:
    return eff.SuperMix(**{"teacher": quadrants, "mask": 4, "iterations": 20, "tolerance": 0.0, **kwargs})


def planted(count: int, size: int = 12, seed: int = 0) -> list[Any]:
    """Images with a bright quarter, which is their class, 0 to 2, and one that is less bright in all, which is class 3.

    In even mixtures the one that all have is the brightest: masks must take each quarter from its own image.
    """
    g, made = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        y = torch.arange(size) % 3
        bright = torch.tensor([0.0, 0, 0, 1]).repeat(size, 1)
        bright[torch.arange(size), y] = 1.5
        x = bright.reshape(size, 1, 2, 2).repeat_interleave(SIDE // 2, 2).repeat_interleave(SIDE // 2, 3)
        made.append((x + 0.1 * torch.randn(size, 1, SIDE, SIDE, generator=g), y))
    return made


# -- the rule


def test_masks_sum_to_one_and_are_what_they_are_written_out_to_be() -> None:
    m = torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(0)) * 4
    for side in ((5, 6), (11, 32)):
        masks = masks_of(m, side)
        assert masks.shape == (3, 4, *side) and bool((masks > 0).all())
        torch.testing.assert_close(masks.sum(1), torch.ones(3, *side))
    same = masks_of(m, (5, 6)).double()
    e = 1 / (1 + (-m.double()).exp())
    torch.testing.assert_close(same, e / e.sum(1, keepdim=True), rtol=1e-5, atol=1e-6)
    assert torch.equal(masks_of(torch.zeros(1, 4, 2, 2), (6, 6)), torch.full((1, 4, 6, 6), 0.25))
    x = torch.randn(3, 4, 2, 5, 6)
    by_hand = sum(same[:, k, None] * x[:, k].double() for k in range(4))
    torch.testing.assert_close(blended(x.double(), same), by_hand)


@pytest.mark.parametrize("sigma", [1.0, 0.7, 2.0])
def test_gradients_are_smoothed_by_a_gaussian_with_zeros_around(sigma: float) -> None:
    g = torch.randn(2, 3, 7, 6, generator=torch.Generator().manual_seed(1))
    found, half = smoothed(g, sigma), int(5 * sigma) // 2
    weight = {a: float(torch.exp(torch.tensor(-(a**2) / (2 * sigma**2)).double())) for a in range(-half, half + 1)}
    total = sum(weight.values()) ** 2
    for row, column in ((0, 0), (3, 3), (6, 1)):
        by_hand = 0.0
        for a in range(-half, half + 1):
            for b in range(-half, half + 1):
                if 0 <= row + a < 7 and 0 <= column + b < 6:
                    by_hand += weight[a] * weight[b] / total * float(g[1, 2, row + a, column + b])
        assert float(found[1, 2, row, column]) == pytest.approx(by_hand, abs=1e-5)
    assert torch.equal(smoothed(g, 0.0), g)


def test_what_is_minimised_is_the_divergence_and_how_far_pixels_are_from_one_image() -> None:
    g = torch.Generator().manual_seed(2)
    scores, target = torch.randn(5, 4, generator=g), torch.tensor([[0.3, 0.7, 0, 0]]).expand(5, 4)
    masks = masks_of(torch.randn(5, 2, 3, 3, generator=g), (6, 6))
    p = scores.double().softmax(1)
    for k in range(5):
        divergence = 0.3 * (0.3 / p[k, 0]).log() + 0.7 * (0.7 / p[k, 1]).log()
        apart = (masks[k].double() * (1 - masks[k].double())).sum() / (2 * 36)
        assert float(objective(scores, target, masks, 25.0)[k]) == pytest.approx(
            float(divergence + 25 * apart), rel=1e-5
        )
    assert float(objective(100 * codes(torch.tensor([2])), codes(torch.tensor([2])), torch.ones(1, 1, 2, 2), 9.0)) == 0


def test_a_step_brings_a_linear_objective_to_zero() -> None:
    g = torch.Generator().manual_seed(3)
    m, gradient = torch.randn(2, 4, 2, 5, 5, generator=g).double()
    value = torch.tensor([0.3, 2.0, 0.01, 5.0]).double()
    for sigma in (0.0, 1.0):
        after = value + (gradient * (newton(m, value, gradient, sigma) - m)).sum((1, 2, 3))
        torch.testing.assert_close(after, torch.zeros(4).double(), rtol=0, atol=1e-9)
    still = newton(m, value, 1e-30 * gradient, 0.0)
    torch.testing.assert_close(still, m, rtol=0, atol=1e-20)


def test_classes_are_seen_where_theirs_are_the_largest_scores() -> None:
    scores = torch.tensor([[3.0, 1, 2, 0], [3, 1, 2, 0], [3, 1, 2, 0], [1, 1, 0, 0], [float("nan"), 1, 2, 0]])
    wanted = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0]]).bool()
    assert sees(scores, wanted).tolist() == [True, False, True, False, False]
    for row, want in zip(scores[:3], wanted[:3], strict=True):
        top = set(row.topk(int(want.sum())).indices.tolist()) == set(want.nonzero().flatten().tolist())
        assert bool(sees(row[None], want[None])) == top


@pytest.mark.parametrize("share", [0.5, 0.6, 0.8])
@pytest.mark.parametrize("sparsity", [25.0, 1.0, 0.0])
def test_masks_show_what_the_teacher_looks_at(share: float, sparsity: float) -> None:
    """Of images whose classes are known to lie in one quarter each: that quarter comes of its image."""
    x, y = planted(1)[0]
    members = torch.stack([torch.arange(12), torch.arange(12).roll(-1)], 1)
    target = share * codes(y) + (1 - share) * codes(y.roll(-1))
    even = torch.full((12, 2, SIDE, SIDE), 0.5)
    assert not bool(sees(quadrants(blended(x[members], even)), target > 0).any())
    settings: Any = {"mask": 8, "sigma": 1.0, "sparsity": sparsity, "tolerance": 0.0}
    before = torch.zeros(12).bool()
    for iterations in (1, 2, 4, 20):
        found = search(quadrants, x[members], target, iterations=iterations, **settings)
        assert bool((found.accepted | ~before).all()), "once accepted, always"
        before = found.accepted
    assert bool(found.accepted.all()) and found.passes <= 21
    torch.testing.assert_close(found.masks.sum(1), torch.ones(12, SIDE, SIDE))
    made = quadrants(blended(x[members], found.masks))
    assert torch.equal(found.seen, made.argmax(1))
    lower = objective(made, target, found.masks, sparsity)
    assert float(lower.mean()) < float(objective(quadrants(x[members].mean(1)), target, even, sparsity).mean())
    for at in range(12):
        assert set(made[at].topk(2).indices.tolist()) == {int(y[i]) for i in members[at]}
        for k, image in enumerate(members[at].tolist()):
            row, column = (4 * int(y[image] // 2)), 4 * int(y[image] % 2)
            assert float(found.masks[at, k, row : row + 4, column : column + 4].mean()) > 0.5


# -- in training


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("data", [planted(6), batches(6)], ids=["planted", "noise"])
def test_the_teacher_sees_the_classes_of_all_images_in_what_is_mixed_and_the_rest_is_as_it_was(
    k: int, data: Any
) -> None:
    one = technique(k=k, targets="mixed")
    spied = Spied(one)
    net = train(Own(F.cross_entropy), one, data=data)
    changed = left = 0
    for (x, y), (own, labels), partner, share in zip(net.given[-6:], data, spied.partners, spied.shares, strict=True):
        assert torch.equal(y, labels) and partner.shape == (len(x), k - 1) and share.shape == (len(x), k)
        torch.testing.assert_close(share.sum(1), torch.ones(len(x)))
        alone = quadrants(own).argmax(1)
        for at in range(len(x)):
            if float(share[at, 0]) == 1:
                assert torch.equal(x[at], own[at])
                left += 1
                continue
            changed += 1
            members = [at, *partner[at].tolist()]
            assert len(set(members)) == k
            classes = {int(alone[i]) for i in members}
            assert set(quadrants(x)[at].topk(len(classes)).indices.tolist()) == classes
            # in each pixel, between the darkest and the brightest of them
            assert bool((x[at] <= own[members].amax(0) + 1e-5).all() & (x[at] >= own[members].amin(0) - 1e-5).all())
    assert changed > (changed + left) / 2
    assert one.report()["accepted"] == pytest.approx(float((spied.shares[-1][:, 0] < 1).float().mean()))


@pytest.mark.parametrize("k", [2, 3])
def test_what_is_aimed_at_are_the_classes_that_the_teacher_sees_by_their_shares(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_eff.data.augmentation.mixing.several import super_mix as file

    asked: list[tuple[Tensor, Tensor]] = []

    def spy(teacher: Any, x: Tensor, target: Tensor, **settings: Any) -> Any:
        asked.append((x, target))
        return search(teacher, x, target, **settings)

    monkeypatch.setattr(file, "search", spy)
    one, data = technique(k=k, targets="mixed"), batches(4)
    spied = Spied(one)
    train(Own(F.cross_entropy), one, data=data)
    for (own, _), (x, target), partner, share in zip(data, asked, spied.partners, spied.shares, strict=True):
        members = torch.cat([torch.arange(SIZE)[:, None], partner], dim=1)
        assert torch.equal(x, own[members])
        alone, mixed = quadrants(own).argmax(1), share[:, 0] < 1
        expected = (share[:, :, None] * codes(alone[members])).sum(1)
        torch.testing.assert_close(target[mixed], expected[mixed])
        torch.testing.assert_close(target.sum(1), torch.ones(SIZE))


def test_mixtures_have_the_class_that_the_teacher_sees_in_them() -> None:
    one, data = technique(iterations=3), batches(5)
    spied, net = Spied(one), Own(F.cross_entropy)
    net.lr = 0.0
    train(net, one, data=data)
    mixed = 0
    for (x, y), share, loss in zip(net.given[-5:], spied.shares, net.losses[-5:], strict=True):
        accepted = share[:, 1] == 1
        assert torch.equal(accepted, share[:, 0] == 0)
        target = torch.where(accepted, quadrants(x).argmax(1), y)
        assert loss == pytest.approx(F.cross_entropy(net(x), target).item(), rel=1e-5)
        mixed += int(accepted.sum())
    assert 5 < mixed < 30, "some are left as they are"


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_those_on_mixed_targets(name: str) -> None:
    loss, soft = LOSSES[name]
    check_exact(Own(loss), technique(targets="mixed"), soft, larger_first=False)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_those_on_the_teachers_classes(name: str) -> None:
    loss, soft = LOSSES[name]
    one, net = technique(), Own(loss)
    spied, twin = Spied(one), copy.deepcopy(net)
    train(net, one)
    x, y = net.given[-1]
    target = torch.where(spied.shares[0][:, 1] == 1, quadrants(x).argmax(1), y)
    assert not torch.equal(target, y)
    assert net.losses[-1] == pytest.approx(soft(twin(x), codes(target)).item(), rel=1e-5)


@pytest.mark.parametrize("build", [ResNet, vit, conv_next], ids=["resnet", "vit", "convnext"])
def test_modules_with_integer_labels(build: Any) -> None:
    check_exact(build(), technique(targets="mixed"), LOSSES["cross-entropy"][1], larger_first=False)


@pytest.mark.parametrize("k", [2, 3])
def test_shares_are_of_a_dirichlet_distribution(k: int) -> None:
    data = [
        (torch.cat([x for x, _ in batches(16, seed)]), torch.cat([y for _, y in batches(16, seed)]))
        for seed in range(6)
    ]
    one = technique(k=k, targets="mixed", iterations=6)
    spied = Spied(one)
    train(Own(F.cross_entropy), one, data=data)
    # of one class, images are accepted whatever their shares are
    same = []
    for (x, _), partner, share in zip(data, spied.partners, spied.shares, strict=True):
        alone = quadrants(x).argmax(1)
        same.append(share[(alone[:, None] == alone[partner]).all(1)])
    drawn = torch.cat(same)
    drawn = drawn[drawn[:, 0] < 1].double()
    assert len(drawn) > 25
    spread = (1 / k) * (1 - 1 / k) / (3 * k + 1)
    assert abs(float(drawn[:, 0].mean()) - 1 / k) < 4 * (spread / len(drawn)) ** 0.5
    assert 0.5 * spread < float(drawn[:, 0].var()) < 2 * spread


class Counted(nn.Module):
    """A teacher that would draw, learn and remember, were it not looked at alone; it notes how many images it saw."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm, self.drop, self.head = nn.BatchNorm2d(1), nn.Dropout(0.5), nn.Linear(SIDE * SIDE, CLASSES)
        self.seen: list[int] = []
        self.modes: list[bool] = []

    def forward(self, images: Tensor) -> Tensor:
        self.seen.append(len(images))
        self.modes.append(self.training)
        return 20 * self.head(self.drop(self.norm(images)).flatten(1))


def test_a_teacher_is_looked_at_alone_and_its_passes_are_counted() -> None:
    teacher = Counted().train()
    before = {name: t.clone() for name, t in teacher.state_dict().items()}
    one, data = technique(teacher=teacher, iterations=6), batches(1)
    net = train(ResNet(), one, data=data)
    assert not any(teacher.modes) and teacher.training
    assert all(torch.equal(before[name], t) for name, t in teacher.state_dict().items())
    assert all(p.grad is None for p in teacher.parameters())
    assert set(net.state_dict()) == set(ResNet().state_dict())
    assert one.report()["passes"] == len(teacher.seen) - 1, "but for the look at the first batch"
    assert teacher.seen[:3] == [SIZE] * 3 and teacher.seen == sorted(teacher.seen, reverse=True)
    assert teacher.seen[-1] < SIZE, "what is accepted is not run again"


def test_the_search_ends_when_enough_are_done_or_after_its_steps() -> None:
    data, passes = batches(1), []
    for tolerance in (0.0, 0.5, 0.9):
        one = technique(teacher=Counted(), tolerance=tolerance, iterations=10)
        train(ResNet(), one, data=data)
        passes.append(one.report()["passes"])
        assert one.report()["accepted"] >= 1 - tolerance or passes[-1] == 12
    assert 12 >= passes[0] > passes[1] >= passes[2] == 3


def test_where_classes_are_never_seen_training_is_plain() -> None:
    """A teacher that sees a class of its own in whatever is not an image of the batch."""
    data = planted(3)
    known = {tuple(x.flatten().tolist()) for images, _ in data for x in images}

    def blind(images: Tensor) -> Tensor:
        plain = torch.tensor([tuple(x.flatten().tolist()) in known for x in images.detach()])
        return torch.where(plain[:, None], 1.0, torch.tensor([0.0, 0, 0, 0, 1])) * F.pad(quadrants(images), (0, 1)) + (
            ~plain[:, None] * torch.tensor([0.0, 0, 0, 0, 99])
        )

    one = technique(teacher=blind, iterations=3, targets="mixed")
    net, plain = train(Own(F.cross_entropy), one, data=data), train(Own(F.cross_entropy), data=data)
    assert all(torch.equal(x, own) for (x, _), (own, _) in zip(net.given[-3:], data, strict=True))
    assert net.losses[-3:] == pytest.approx(plain.losses[-3:], rel=1e-6)
    assert one.report() == {"share": 0.0, "milliseconds": one.report()["milliseconds"], "accepted": 0.0, "passes": 5}


def test_later_images_without_finite_scores_are_not_mixed() -> None:
    """Neither they nor others with them, and the others among themselves as before; it is said once."""
    broken = torch.tensor([True] + [False] * 11)

    def teacher(images: Tensor) -> Tensor:
        scores = quadrants(images)
        return torch.where((images.amax((1, 2, 3)) > 9)[:, None], float("nan"), scores)

    data = planted(4)
    for x, _ in data[1:]:
        x[broken] += 10.0
    one = technique(teacher=teacher, k=2, iterations=10)
    net = Own(F.cross_entropy)
    with pytest.warns(UserWarning, match="SuperMix: the teacher returned scores that are not finite") as told:
        train(net, one, data=data)
    assert sum("not finite" in str(w.message) for w in told) == 1
    mixed = 0
    for (x, y), (own, labels) in zip(net.given[-3:], data[1:], strict=True):
        changed = (x != own).flatten(1).any(1)
        assert not bool(changed[broken].any()) and torch.equal(y, labels) and bool(x.isfinite().all())
        assert bool((x[changed].amax((1, 2, 3)) < 4).all()), "no part of such an image"
        mixed += int(changed.sum())
    assert mixed > 6


def test_more_images_than_a_batch_has_are_all_of_it() -> None:
    one = technique(k=5, targets="mixed")
    spied = Spied(one)
    train(Own(F.cross_entropy), one, data=[(x[:3], y[:3]) for x, y in batches(2)])
    assert all(share.shape == (3, 3) for share in spied.shares)


@pytest.mark.parametrize("kind", ["probabilities", "two"])
def test_labels_of_other_kinds_become_the_teachers(kind: str) -> None:
    x, y = batches()[0]

    def two(images: Tensor) -> Tensor:
        return quadrants(images)[:, :2]

    if kind == "two":  # one number for each image
        labels, teacher = (y % 2).float(), two
        net: Any = Own(lambda z, y: F.binary_cross_entropy_with_logits(z[:, 0], y))
    else:
        labels, teacher = torch.rand(SIZE, CLASSES).softmax(-1), quadrants
        net = Own(F.cross_entropy)
    one, twin = technique(teacher=teacher), copy.deepcopy(net)
    spied = Spied(one)
    train(net, one, data=[(x, labels)])
    made, accepted = net.given[-1][0], spied.shares[0][:, 1] == 1
    seen = teacher(made).argmax(1)
    if kind == "two":
        target = torch.where(accepted, seen.float(), labels)
    else:
        target = torch.where(accepted[:, None], codes(seen), labels)
    assert bool(accepted.any())
    assert net.losses[-1] == pytest.approx(twin.own(twin(made), target).item(), rel=1e-5)


# -- what is refused


def _before_any_weight_changes(net: Any, one: Any, message: str, data: Any = None) -> None:
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(ValueError, match=f"SuperMix.*{message}"):
        train(net, one, data=data)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (
            lambda x: x,
            r"the teacher returned \(6, 1, 8, 8\) float32 for 6 images, not one score per class, \(6, cl",
        ),
        (lambda x: None, "the teacher returned NoneType for 6 images"),
        (lambda x: x.mean((2, 3)), r"the teacher returned \(6, 1\) float32"),
        (lambda x: quadrants(x.detach()), "the teacher's scores have no gradient with respect to the images"),
        (lambda x: quadrants(x) / 0, "the teacher returned scores that are not finite"),
        (lambda x: quadrants(x)[:, :3], r"the teacher has 3 classes, and F.cross_entropy has 4"),
    ],
    ids=["maps", "none", "one", "detached", "infinite", "others"],
)
def test_what_is_no_teacher_is_refused_before_any_weight_changes(teacher: Any, message: str) -> None:
    _before_any_weight_changes(ResNet(), technique(teacher=teacher), message)


def test_what_does_not_fit_is_refused() -> None:
    _before_any_weight_changes(
        ResNet(), technique(mask=9), r"\(mask=9\): images of 8 x 8 pixels are smaller than masks"
    )
    labels = torch.full((SIZE, 3), 1 / 3)
    net = Own(lambda z, y: F.cross_entropy(z[:, :3], y))
    _before_any_weight_changes(
        net, technique(), "the teacher has 4 classes, and the labels", [(batches()[0][0], labels)]
    )
    train(net, technique(targets="mixed"), data=[(batches()[0][0], labels)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"teacher": None},
            r"teacher=None\): expected a module or function of images .*one score per class.*CutMix needs no teacher",
        ),
        ({"k": 1}, r"k=1\): expected an integer >= 2"),
        ({"mask": 0}, r"mask=0\): expected an integer >= 1"),
        ({"iterations": 0}, r"iterations=0\): expected an integer >= 1"),
        ({"alpha": 0}, r"alpha=0\): expected a finite number > 0"),
        ({"sigma": -1}, r"sigma=-1\): expected a finite number >= 0"),
        ({"tolerance": 1}, r"tolerance=1\): expected a number in \[0, 1\)"),
        ({"targets": "soft"}, r"targets='soft'\): expected 'teacher' or 'mixed'"),
    ],
)
def test_arguments(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^SuperMix\({message}"):
        technique(**arguments)


def test_yaml(tmp_path: Path) -> None:
    names: Any = {"model": "tests.data.augmentation.modules.ResNet", "data": "tests.data.augmentation.modules.Pictures"}
    teacher = {"class_path": f"{Counted.__module__}.Counted"}
    fit_yaml(tmp_path, "SuperMix", {"teacher": teacher, "iterations": 2}, max_steps=4, **names)
