"""SaliencyMix: its box lies where the source is most salient, saliency is what it is written out to be, shares are areas."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lightning_eff as eff
from lightning_eff.data.augmentation.mixing.saliency_mix import fine_grained_saliency, peaks
from tests.cases import Case
from tests.data.augmentation.modules import (
    LOSSES,
    ON_IMAGES,
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

CASES = {
    "SaliencyMix": Case(
        active=lambda: eff.SaliencyMix(),
        neutral=lambda: eff.SaliencyMix(prob=0.0),
        **ON_IMAGES,
    )
}


def blobs(count: int, side: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images with one bright blob each on a dark, slightly noisy ground, and where their peaks lie: (n, 2)."""
    g = torch.Generator().manual_seed(seed)
    at = torch.stack([torch.randint(0, size, (count,), generator=g) for size in side], dim=1)
    rows, columns = (torch.arange(size)[None] for size in side)
    away = (rows - at[:, :1]).square()[:, :, None] + (columns - at[:, 1:]).square()[:, None, :]
    noise = 0.01 * torch.randn(count, 3, *side, generator=g)
    return 2.0 * torch.exp(-away / 4.5)[:, None] + noise - 0.5, at


@pytest.mark.parametrize("side", [(32, 32), (24, 45)])
def test_saliency_is_the_distance_to_the_means_of_windows(side: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *side, generator=torch.Generator().manual_seed(0))
    found = fine_grained_saliency(x)
    intensity = x.double().mean(1)
    for b, i, j in ((0, 0, 0), (0, 11, 20), (1, side[0] - 1, 3), (1, 5, side[1] - 1)):
        by_hand = 0.0
        for window in (12, 24, 28, 48, 56, 112):
            half = window // 2
            around = intensity[b, max(i - half, 0) : i + half + 1, max(j - half, 0) : j + half + 1]
            by_hand += abs(float(intensity[b, i, j] - around.mean()))
        assert float(found[b, i, j]) == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("side", [(32, 32), (24, 45)])
def test_a_box_always_holds_the_peak_of_a_single_bright_blob(side: tuple[int, int]) -> None:
    """Wherever it lies and however small the box; CutMix's boxes of the same sizes miss most of them."""
    x, at = blobs(256, side)
    partner = torch.arange(256).roll(1)
    held: dict[Any, int] = {}
    for cls in (eff.SaliencyMix, eff.CutMix):
        (made,), _ = cls(per_sample=True).mix([x], partner, torch.Generator().manual_seed(3))
        there = at[partner]
        place = torch.arange(256), slice(None), there[:, 0], there[:, 1]
        held[cls] = int((made[place] == x[partner][place]).all(1).sum())
        fixed = (made == x[partner]).all(1).float().mean((1, 2))
        assert float(fixed.min()) < 0.1, "there are small boxes"
    assert held[eff.SaliencyMix] == 256
    assert held[eff.CutMix] < 200


def test_by_gradients_boxes_lie_where_the_loss_changes_most() -> None:
    """Of a network that hardly reads but one pixel: that pixel."""

    class Reads(Own):
        def forward(self, images: Tensor) -> Tensor:
            return torch.stack([images[:, 0, 1, 6], images[:, 0, 5, 2]], 1) @ self.weight

        def __init__(self) -> None:
            super().__init__(F.cross_entropy)
            self.weight = torch.nn.Parameter(torch.tensor([[0.2, -0.1, -0.2, 0.1], [0.001, 0, 0, 0]]))
            self.lr = 0.0

    technique = eff.SaliencyMix(saliency="gradient", per_sample=True)
    spied = Spied(technique)
    data = batches(20)
    net = train(Reads(), technique, data=data)
    small = 0
    for (x, _), (own, _), partner, share in zip(net.given[-20:], data, spied.partners, spied.shares, strict=True):
        assert torch.equal(x[:, 0, 1, 6], own[partner][:, 0, 1, 6])
        small += int((share > 0.8).sum())
    assert small > 5


def test_gradients_are_those_of_the_loss_and_are_counted() -> None:
    x, y = batches()[0]
    found: list[Tensor] = []

    class Looks(eff.SaliencyMix):
        def sizes_of(self, inputs: list[Tensor]) -> Tensor:
            found.append(super().sizes_of(inputs))
            return found[-1]

    technique = Looks(saliency="gradient")
    cost: list[Any] = []

    class Cost(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            cost.append(dict(technique.session.chain.cost.__dict__))

    twin = ResNet()
    net = train(ResNet(), technique, Cost(), data=[(x, y)] * 3)
    leaf = x.clone().requires_grad_()
    F.cross_entropy(twin(leaf), y).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(found[0], leaf.grad.square().mean(1).sqrt(), rtol=1e-4, atol=1e-8)
    assert len(found) == 3 and all(torch.equal(labels, y) for _, labels in net.given)
    # in the first batch four that look for labels and one that looks at the gradient; and one of each step
    assert [c["forward_passes"] for c in cost] == [6, 7, 8] and [c["backward_passes"] for c in cost] == [2, 3, 4]
    buffers = [b for name, b in net.named_buffers() if name.endswith("num_batches_tracked")]
    assert int(buffers[0]) == 3, "passes that look leave no trace"


@pytest.mark.parametrize("saliency", ["fine_grained", "gradient"])
@pytest.mark.parametrize("build", [ResNet, vit, conv_next], ids=["resnet", "vit", "convnext"])
def test_the_loss_is_that_on_mixed_targets(build: Any, saliency: Any) -> None:
    technique = eff.SaliencyMix(per_sample=True, saliency=saliency)
    check_exact(build(), technique, LOSSES["cross-entropy"][1], larger_first=False)


def test_in_training_each_pixel_is_of_one_image_and_labels_go_by_area() -> None:
    technique = eff.SaliencyMix(per_sample=True)
    spied = Spied(technique)
    data = batches(40)
    net = train(Own(F.cross_entropy), technique, data=data)
    for (x, y), (own, labels), partner, share in zip(net.given, data, spied.partners, spied.shares, strict=True):
        other = own[partner]
        assert bool(((x == own) | (x == other)).all()) and torch.equal(y, labels)
        fixed = partner == torch.arange(len(partner))
        assert torch.allclose((x == own).float().mean((1, 2, 3))[~fixed], share[~fixed], atol=1e-6)
    assert 0.1 < float((torch.cat(spied.shares) < 0.5).float().mean()) < 0.5


def test_a_metric_is_told_which_labels_it_reads() -> None:
    accuracies: list[Tensor] = []

    def loss(z: Tensor, y: Tensor) -> Tensor:
        accuracies.append((z.argmax(-1) == y).float().mean())
        return F.cross_entropy(z, y)

    net = Own(loss)
    with pytest.warns(UserWarning, match=r"SaliencyMix: training_step compares .* is not always the larger"):
        train(net, eff.SaliencyMix())


def test_a_loss_without_a_gradient_in_the_images_is_refused() -> None:
    class Rounds(Own):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images.detach())

    net = Rounds(F.cross_entropy)
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(ValueError, match="SaliencyMix: the loss has no gradient with respect to the images"):
        train(net, eff.SaliencyMix(saliency="gradient"))
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


def test_peaks_are_the_first_of_several() -> None:
    rows, columns = peaks(torch.tensor([[[0.0, 1, 1], [1, 0, 0]], [[0, 0, 0], [0, 0, 2]]]))
    assert rows.tolist() == [0, 1] and columns.tolist() == [1, 2]


def test_arguments() -> None:
    with pytest.raises(ValueError, match=r"SaliencyMix\(alpha=0\): expected a finite number > 0"):
        eff.SaliencyMix(alpha=0)
    with pytest.raises(ValueError, match=r"SaliencyMix\(saliency='spectral'\): expected 'fine_grained' or 'gradient'"):
        eff.SaliencyMix(saliency="spectral")  # pyright: ignore[reportArgumentType]


def test_yaml(tmp_path: Path) -> None:
    names: Any = {"model": "tests.data.augmentation.modules.ResNet", "data": "tests.data.augmentation.modules.Pictures"}
    fit_yaml(tmp_path, "SaliencyMix", {"saliency": "gradient"}, max_steps=4, **names)
