"""Manifold Mixup: affine layers mix outputs, depth 0 is Mixup, what runs again is mixed again, what cannot be is refused."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_eff as eff
from tests.cases import Case, no_blocks
from tests.data.augmentation.modules import CLASSES, LOSSES, SIZE, ResNet, Spied, batches, codes, train, vit
from tests.runs import fit_yaml

_NO_IMAGES = "found no images in the batch, and no other tensor .* Leave 0 out of depths"

CASES = {
    "ManifoldMixup": Case(
        active=lambda: eff.ManifoldMixup(),
        neutral=lambda: eff.ManifoldMixup(alpha=0.0),
        model="vit",
        refuses=dict.fromkeys(("gpt2", "llama", "bert", "tiny_gpt", "padded", "translator"), _NO_IMAGES),
        lost=(no_blocks, "classifier", "found no stack of repeated blocks"),
    )
}


class Deep(ResNet):
    """Convolutions that are not affine, then affine blocks. Remembers what each batch's scores were."""

    def __init__(self, bends: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Conv(bend=k < bends) for k in range(3))
        self.scores: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        h = images.expand(-1, 8, -1, -1)
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean((2, 3)))

    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        self.scores.append(z.detach())
        return F.cross_entropy(z, y)


class Conv(nn.Module):
    def __init__(self, bend: bool) -> None:
        super().__init__()
        self.conv, self.bend = nn.Conv2d(8, 8, 3, padding=1), bend

    def forward(self, h: Tensor) -> Tensor:
        return self.conv(h).tanh() if self.bend else self.conv(h)


def depth(*k: int, **kwargs: Any) -> Any:
    return eff.ManifoldMixup(depths=k, per_sample=True, **kwargs)


@pytest.mark.parametrize(("k", "bends"), [(1, 1), (2, 2), (2, 1), (3, 3)])
def test_above_an_affine_network_mixes_outputs(k: int, bends: int) -> None:
    """``f(mix) = lambda f(x_i) + (1 - lambda) f(x_j)``, on inputs that stay as they were; and so the loss of its scores."""
    x, y = batches()[0]
    technique = depth(k)
    spied = Spied(technique)
    net = Deep(bends)
    z = copy.deepcopy(net)(x)
    train(net, technique, data=[(x, y)])
    share = spied.shares[0][:, None]
    mixed = share * z + (1 - share) * z[spied.partners[0]]
    torch.testing.assert_close(net.scores[-1], mixed, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(net.scores[-1], z, atol=1e-3)
    assert torch.equal(net.given[-1][0], x) and torch.equal(net.given[-1][1], y)
    loss = LOSSES["cross-entropy"][1](mixed, spied.targets(0, y))
    assert net.losses[-1] == pytest.approx(loss.item(), rel=1e-5)


def test_below_a_network_that_bends_it_does_not() -> None:
    x, y = batches()[0]
    technique = depth(1)
    spied = Spied(technique)
    net = Deep(bends=3)
    with torch.no_grad():
        for block in net.blocks:
            block.conv.weight.mul_(8)
    z = copy.deepcopy(net)(x)
    train(net, technique, data=[(x, y)])
    share = spied.shares[0][:, None]
    assert not torch.allclose(net.scores[-1], share * z + (1 - share) * z[spied.partners[0]], atol=1e-3)


@pytest.mark.parametrize("per_sample", [False, True])
def test_depth_0_is_mixup_number_for_number(per_sample: bool) -> None:
    runs = []
    for technique in (
        eff.Mixup(alpha=2.0, per_sample=per_sample),
        eff.ManifoldMixup(depths=[0], per_sample=per_sample),
    ):
        pl.seed_everything(0, verbose=False)
        net = train(ResNet(), technique, data=batches(5))
        runs.append((net.given, net.losses, list(net.parameters())))
    (first, losses, weights), (second, others, same) = runs
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, second, strict=True))
    assert losses == others and all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))


def test_depths_are_drawn_as_often() -> None:
    depths: list[int] = []

    class Note(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            depths.append(int(technique.report()["depth"]))

    technique = eff.ManifoldMixup(depths=[0, 1, 3], layers="blocks")
    data = batches(60)
    net = train(Deep(), technique, Note(), data=data)
    counts = torch.tensor([depths.count(k) for k in range(4)])
    assert counts[2] == 0 and (counts[[0, 1, 3]] - 20).abs().max() < 4 * (60 / 3 * 2 / 3) ** 0.5
    changed = [not torch.equal(x, own) for (x, _), (own, _) in zip(net.given[-60:], data, strict=True)]
    assert changed == [k == 0 for k in depths]


class _Gradient(pl.Callback):
    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.found.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).clone())


def by_hand(net: Any, x: Tensor, technique: Any, spied: Any) -> Tensor:
    """Scores of a Hugging Face ViT whose first block's output is mixed, written out."""
    model, share, partner = net.model, spied.shares[0][:, None, None], spied.partners[0]
    h = model.vit.embeddings(x)
    for k, block in enumerate(model.vit.layers if hasattr(model.vit, "layers") else model.vit.encoder.layer):
        h = block(h)
        h = h[0] if isinstance(h, tuple) else h
        h = share * h + (1 - share) * h[partner] if k == 0 else h
    return model.classifier(model.vit.layernorm(h)[:, 0])


@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
def test_gradients_of_hugging_faces_vit_are_those_of_mixed_hidden_states(again: bool) -> None:
    x, y = batches()[0]
    technique, net, gradient = depth(1), vit(), _Gradient()
    for p in net.modules():
        p.p = 0.0 if isinstance(p, nn.Dropout) else getattr(p, "p", None)
    twin, spied = copy.deepcopy(net), Spied(technique)
    if again:
        net.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    train(net, technique, gradient, data=[(x, y)])
    loss = LOSSES["cross-entropy"][1](by_hand(twin, x, technique, spied), spied.targets(0, y))
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None])
    assert net.losses[-1] == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(gradient.found[0], expected, rtol=1e-4, atol=1e-6)


class Checkpointed(Deep):
    """Runs its blocks again in the backward pass."""

    def forward(self, images: Tensor) -> Tensor:
        h: Any = images.expand(-1, 8, -1, -1)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return self.head(h.mean((2, 3)))


def test_a_hand_written_checkpoint_is_mixed_again_too() -> None:
    weights = []
    for cls in (Deep, Checkpointed):
        pl.seed_everything(0, verbose=False)
        weights.append(list(train(cls(), depth(2), data=batches(3)).parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_both_passes_of_two_are_mixed_and_nothing_stays() -> None:
    net = Deep(bends=3)
    train(net, depth(1), eff.SharpnessAwareMinimization(rho=0.1), data=batches(3))
    train(net, eff.SharpnessAwareMinimization(rho=0.1))
    assert not any(m._forward_hooks for m in net.modules())
    x, y = batches()[0]
    technique = depth(2)
    spied = Spied(technique)
    net = Deep(bends=2)
    z = copy.deepcopy(net)(x)
    train(net, technique, eff.SharpnessAwareMinimization(rho=1e-9), data=[(x, y)])
    share = spied.shares[0][:, None]
    for scores in net.scores[-2:]:
        torch.testing.assert_close(scores, share * z + (1 - share) * z[spied.partners[0]], rtol=1e-4, atol=1e-5)


def test_each_version_of_an_image_is_mixed_with_the_others_same_version() -> None:
    """AugMix's consistency puts three versions of the batch into one, and mixtures are within each of them."""
    pytest.importorskip("kornia")
    x, y = batches()[0]
    technique, net = depth(2), Deep(bends=2)
    spied, twin = Spied(technique), copy.deepcopy(net)
    train(net, technique, eff.AugMix(consistency=1.0, mean=0.5, std=0.1), data=[(x, y)])
    whole, _ = net.given[-1]
    assert len(whole) == 3 * SIZE and torch.equal(whole[:SIZE], x)
    share = spied.shares[0][:, None]
    for version, scores in zip(whole.split(SIZE), net.scores[-1].split(SIZE), strict=True):
        z = twin(version)
        torch.testing.assert_close(scores, share * z + (1 - share) * z[spied.partners[0]], rtol=1e-5, atol=1e-6)


class Texts(pl.LightningModule):
    """Classifies ids by blocks, whose samples lie in dimension ``at``."""

    def __init__(self, at: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.at = nn.Embedding(11, 8), nn.Linear(8, CLASSES), at
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.scores: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.embed(batch[0]).transpose(0, self.at)
        for block in self.blocks:
            h = block(h)
        self.scores.append(self.head(h.transpose(0, self.at).mean(1)))
        return F.cross_entropy(self.scores[-1], batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_texts_are_mixed_behind_their_embeddings() -> None:
    ids, y = torch.randint(0, 11, (SIZE, 7), generator=torch.Generator().manual_seed(0)), batches()[0][1]
    technique = depth(1, 2)
    spied = Spied(technique)
    net = train(Texts(), technique, data=[(ids, y)])
    plain = Texts()
    plain.training_step((ids, y), 0)
    share = spied.shares[0][:, None]
    mixed = share * plain.scores[0] + (1 - share) * plain.scores[0][spied.partners[0]]
    torch.testing.assert_close(net.scores[-1], mixed, rtol=1e-4, atol=1e-6)


class Twice(Deep):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + super().forward(-images)


class Never(Deep):
    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks[0](images.expand(-1, 8, -1, -1)).mean((2, 3)))


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (Twice, "the block of depth 2, a Conv, was called 2 times in a step"),
        (Never, "the block of depth 2, a Conv, was called 0 times"),
        (lambda: Texts(1), r"depths \[2\] do not have the samples in their first dimension"),
    ],
    ids=["twice", "never", "turned"],
)
def test_what_cannot_be_mixed_is_refused_before_any_weight_changes(net: Any, message: str) -> None:
    built = net()
    ids = torch.zeros(SIZE, SIZE).long()
    before = [p.clone() for p in built.parameters()]
    with pytest.raises(ValueError, match=f"ManifoldMixup: .*{message}"):
        train(built, depth(2), data=[(ids, batches()[0][1])] if isinstance(built, Texts) else None)
    assert all(torch.equal(p, q) for p, q in zip(built.parameters(), before, strict=True))


class Skips(Deep):
    """Passes over a block of its own accord from the second step on."""

    def forward(self, images: Tensor) -> Tensor:
        h = images.expand(-1, 8, -1, -1)
        for block in self.blocks[: 3 if self.global_step == 0 else 1]:
            h = block(h)
        return self.head(h.mean((2, 3)))


def test_a_block_that_a_later_step_does_not_call_is_an_error() -> None:
    net = Skips()
    with pytest.raises(ValueError, match="a Conv, was called 0 times in this step, but once in the first one"):
        train(net, depth(2), data=batches(3))
    assert not any(m._forward_hooks for m in net.modules())


def test_blocks_that_others_let_rest_are_not_drawn() -> None:
    depths: list[int] = []

    class Note(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            depths.append(int(technique.report()["depth"]))

    class Adds(Conv):
        def forward(self, h: Tensor) -> Tensor:
            return h + super().forward(h)

    class Residual(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Adds(bend=k < 1) for k in range(3))

    technique = depth(1, 2, 3)
    train(Residual(), technique, eff.StochasticDepth(drop=0.5), Note(), data=batches(20))
    assert {1, 2, 3} <= set(depths)
    with pytest.raises(ValueError, match=r"StochasticDepth: block 0 .* does not return its input plus something"):
        train(Deep(), depth(1, 2, 3), eff.StochasticDepth(drop=0.5), data=batches(20))


def test_named_modules() -> None:
    x, y = batches()[0]
    technique = depth(1, layers=["body.0"])
    spied = Spied(technique)

    class Affine(ResNet):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3))

        def loss(self, z: Tensor, y: Tensor) -> Tensor:
            self.z = z.detach()
            return F.cross_entropy(z, y)

    net = Affine()
    z = copy.deepcopy(net)(x)
    train(net, technique, data=[(x, y)])
    share = spied.shares[0][:, None]
    torch.testing.assert_close(net.z, share * z + (1 - share) * z[spied.partners[0]], rtol=1e-5, atol=1e-6)
    assert spied.targets(0, y).shape == codes(y).shape
    with pytest.raises(
        ValueError, match=r"ManifoldMixup\(layers=\['trunk'\]\): \['trunk'\] are no submodules .*'body'"
    ):
        train(ResNet(), depth(1, layers=["trunk"]))


def test_arguments() -> None:
    for depths in ([], [-1], [True], "01"):
        with pytest.raises(ValueError, match=r"ManifoldMixup\(depths=.*expected a sequence, each an integer >= 0"):
            eff.ManifoldMixup(depths=depths)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"ManifoldMixup\(depths=\[0, 0\]\): a depth is given twice"):
        eff.ManifoldMixup(depths=[0, 0])
    with pytest.raises(ValueError, match=r"ManifoldMixup\(alpha=-1\): expected a finite number >= 0"):
        eff.ManifoldMixup(alpha=-1)
    with pytest.raises(ValueError, match=r"ManifoldMixup\(layers=\[\]\): expected a dotted path or a list"):
        eff.ManifoldMixup(layers=[])
    with pytest.raises(ValueError, match=r"ManifoldMixup\(depths=\[4\]\): .*has only 3 blocks"):
        train(Deep(), depth(4))


def test_the_control_mixes_inputs_alone() -> None:
    technique = eff.ManifoldMixup(alpha=1.0, keys=["x"])
    (arm,) = technique.control.arms(technique).values()
    assert isinstance(arm, eff.ManifoldMixup) and (arm.depths, arm.alpha, arm.keys) == ([0], 1.0, ["x"])
    assert technique.control.arms(eff.ManifoldMixup(depths=[0])) == {}


def test_yaml(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "ManifoldMixup", {"depths": [0, 1], "alpha": 1.0}, max_steps=4)
