"""DiffAugment: T against one written out by pixels, the generator's gradient through it, and GANs with two optimizers."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_eff as eff
from lightning_eff.data.augmentation.images import diff_augment as file
from lightning_eff.data.augmentation.images.diff_augment import TRANSFORMS, diff_augment, find_discriminator
from tests.cases import Case, classifier
from tests.models import flat, trainer
from tests.runs import fit_yaml

_NO_SUBMODULE = "has no such submodule"

CASES = {
    "DiffAugment": Case(
        active=lambda: eff.DiffAugment(discriminator="model"),
        neutral=lambda: eff.DiffAugment(policy=[]),
        model="vit",
        refuses={
            **dict.fromkeys(
                ("gpt2", "llama", "bert"), r"not on exactly one floating-point tensor of images \(B, C, H, W\)"
            ),
            **dict.fromkeys(("tiny_gpt", "padded", "translator"), _NO_SUBMODULE),
        },
        lost=(classifier, "classifier", _NO_SUBMODULE),
    )
}
POLICY = ("color", "translation", "cutout")


def by_pixels(x: Tensor, policy: Any, g: Generator, span: float = 2.0) -> Tensor:
    """``T`` of the paper's code, written out image by image: a factor and a term for each pixel, or one that it comes from."""
    count, _, height, width = x.shape
    made = list(x)
    for name in policy:
        if name == "color":
            u, v, w = (torch.rand(count, 1, 1, 1, generator=g).flatten().tolist() for _ in range(3))
            for b in range(count):
                one = made[b] + (u[b] - 0.5) * span / 2
                gray = one.sum(0) / len(one)
                one = torch.stack([gray * (1 - 2 * v[b]) + 2 * v[b] * channel for channel in one])
                whole = one.sum() / one.numel()
                made[b] = whole * (0.5 - w[b]) + (0.5 + w[b]) * one
        elif name == "translation":
            for dim, size in ((1, height), (2, width)):
                most = int(size / 8 + 0.5)
                shift = torch.randint(-most, most + 1, (count, 1), generator=g).flatten().tolist()
                for b in range(count):
                    padded = F.pad(made[b], (0, 0, most, most) if dim == 1 else (most, most, 0, 0))
                    made[b] = padded.narrow(dim, most + shift[b], size)
        else:
            spans = []
            for size in (height, width):
                length = int(size * 0.5 + 0.5)
                centre = torch.randint(0, size + (1 - length % 2), (count,), generator=g).tolist()
                spans.append([(max(c - length // 2, 0), min(c - length // 2 + length, size)) for c in centre])
            for b in range(count):
                keep = torch.ones(height, width)
                keep[slice(*spans[0][b]), slice(*spans[1][b])] = 0
                made[b] = made[b] * keep
    return torch.stack(made)


@pytest.mark.parametrize("policy", [*[(name,) for name in TRANSFORMS], POLICY])
@pytest.mark.parametrize("side", [(8, 8), (16, 9)])
def test_t_is_that_of_the_paper_written_out(policy: Any, side: tuple[int, int]) -> None:
    x = torch.randn(20, 3, *side, generator=Generator().manual_seed(0)).requires_grad_()
    weights = torch.randn(20, 3, *side, generator=Generator().manual_seed(1))
    found = []
    for t in (diff_augment, by_pixels):
        made = t(x, policy, Generator().manual_seed(2), 1.5)
        (gradient,) = torch.autograd.grad((made * weights).sum(), x)
        found.append((made, gradient))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    assert not torch.equal(found[0][0], x) and found[0][1].abs().max() > 0


class GAN(pl.LightningModule):
    """A generator and a discriminator of 8 x 8 images, by two optimizers, with a non-saturating loss."""

    def __init__(self, again: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Unflatten(1, (1, 8, 8)))
        self.discriminator = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(36, 1))
        self.again = again
        self.gradients: list[Tensor] = []

    def judged(self, x: Tensor) -> Any:
        return checkpoint(self.discriminator, x, use_reentrant=False) if self.again else self.discriminator(x)

    def painted(self, z: Tensor) -> Any:
        if self.again == "all":
            return checkpoint(lambda z: self.discriminator(self.generator(z)), z, use_reentrant=False)
        return self.judged(self.generator(z))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, z = batch
        both: Any = self.optimizers()
        for optimizer, net in zip(both, (self.discriminator, self.generator), strict=True):
            if net is self.generator:
                loss = F.softplus(-self.painted(z)).mean()
            else:
                loss = (
                    F.softplus(-self.judged(real)).mean() + F.softplus(self.judged(self.generator(z).detach())).mean()
                )
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.gradients.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
            optimizer.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.softplus(-self.discriminator(batch[0])).mean())

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.discriminator, self.generator)]


def batches(count: int = 1) -> list[Any]:
    g = Generator().manual_seed(1)
    return [(torch.randn(6, 1, 8, 8, generator=g), torch.randn(6, 4, generator=g)) for _ in range(count)]


def train(net: Any, *callbacks: pl.Callback, data: Any = None, **kwargs: Any) -> Any:
    data = batches() if data is None else data
    loader = DataLoader(data, batch_size=None)
    checkpoint_from = kwargs.pop("ckpt_path", None)
    run = trainer(*callbacks, **{"max_epochs": 1, **kwargs})
    run.fit(net, loader, loader if kwargs.get("limit_val_batches") else None, ckpt_path=checkpoint_from)
    return net


class Drawn:
    """The states of what each call's ``T`` was drawn from, and what it was of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states: list[Tensor] = []
        self.images: list[Tensor] = []

        def spy(x: Tensor, policy: Any, generator: Generator, span: float = 2.0) -> Tensor:
            self.states.append(generator.get_state())
            self.images.append(x.detach().clone())
            return diff_augment(x, policy, generator, span)

        monkeypatch.setattr(file, "diff_augment", spy)

    def again(self, at: int, x: Tensor) -> Tensor:
        """``T`` of that call, by pixels."""
        generator = Generator()
        generator.set_state(self.states[at])
        return by_pixels(x, POLICY, generator)


@pytest.mark.parametrize("again", ["", "discriminator", "all"])
def test_both_networks_steps_go_through_t_and_the_generator_gets_its_gradient(
    monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    """Gradients of both optimizers' steps are those with T written out; checkpoints run the T again that it was."""
    (real, z), net, drawn = batches()[0], GAN(again), Drawn(monkeypatch)
    twin = copy.deepcopy(net)
    train(net, eff.DiffAugment())
    d, g = twin.discriminator, twin.generator
    calls = [0, 1, len(drawn.images) // 2 + 1 if again else 2]  # those of one step's run again come behind it
    fake = g(z).detach()
    loss = F.softplus(-d(drawn.again(calls[0], real))).mean() + F.softplus(d(drawn.again(calls[1], fake))).mean()
    first = torch.autograd.grad(loss, list(d.parameters()))
    with torch.no_grad():
        for p, gradient in zip(d.parameters(), first, strict=True):
            p -= 0.1 * gradient
    second = torch.autograd.grad(F.softplus(-d(drawn.again(calls[2], g(z)))).mean(), list(g.parameters()))
    for found, expected in zip(net.gradients, (first, second), strict=True):
        torch.testing.assert_close(found, torch.cat([t.flatten() for t in expected]), rtol=1e-4, atol=1e-6)
        assert found.abs().max() > 1e-4
    assert len({tuple(state.tolist()) for state in drawn.states}) == 3, "each call has draws of its own"
    assert not any(m._forward_pre_hooks for m in net.modules())


def test_without_it_steps_are_others_and_validation_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = Drawn(monkeypatch)
    nets = [train(GAN(), *some, data=batches(2), limit_val_batches=2) for some in ([], [eff.DiffAugment()])]
    assert not torch.equal(flat(nets[0]), flat(nets[1]))
    assert len(drawn.images) == 6, "of both steps, and none of validation"
    neutral = train(GAN(), eff.DiffAugment(policy=[]), data=batches(2))
    assert torch.equal(flat(neutral), flat(nets[0]))


def test_a_run_that_goes_on_draws_what_the_undisturbed_one_did(tmp_path: Path) -> None:
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.save_checkpoint(tmp_path / f"{batch_idx}.ckpt")

    whole = train(GAN(), eff.DiffAugment(), Save(), data=batches(4))
    for at in range(3):
        technique = eff.DiffAugment()
        assert torch.equal(
            flat(train(GAN(), technique, data=batches(4), ckpt_path=tmp_path / f"{at}.ckpt")), flat(whole)
        )
        assert technique.summary() == "transformed the images of 12 calls of the discriminator 'discriminator'"


def test_from_the_end_of_its_share_of_the_budget_on_it_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = Drawn(monkeypatch)
    train(GAN(), eff.DiffAugment(until=0.5), data=batches(4))
    assert len(drawn.images) == 6
    with pytest.raises(ValueError, match=r"DiffAugment\(until=0.5\): the Trainer has no end"):
        train(GAN(), eff.DiffAugment(until=0.5), max_epochs=-1)


def test_both_passes_of_two_draw_the_same_and_each_image_is_transformed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Judge(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.critic = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.softplus(-self.critic(batch[0])).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    drawn = Drawn(monkeypatch)
    train(Judge(), eff.DiffAugment(), eff.SharpnessAwareMinimization(rho=0.1))
    assert len(drawn.images) == 2 and torch.equal(*drawn.images) and torch.equal(*drawn.states)


def test_the_network_that_judges_is_found_or_named() -> None:
    class Named(nn.Module):
        def __init__(self, *names: str) -> None:
            super().__init__()
            for name in names:
                setattr(self, name, nn.Sequential(nn.Linear(1, 1)))

    for name in ("discriminator", "netD", "critic", "D", "image_discriminator", "net_d"):
        assert find_discriminator(Named("generator", "d_loss", name), None) == name
    assert find_discriminator(Named("judge", "critic"), "judge") == "judge"
    with pytest.raises(ValueError, match="several submodules, netD, critic, are called a discriminator"):
        find_discriminator(Named("netD", "critic"), None)
    with pytest.raises(ValueError, match="no submodule is called a discriminator or critic in Named, which has judge"):
        find_discriminator(Named("judge"), None)
    with pytest.raises(ValueError, match=r"discriminator='other'\): Named has no such submodule. .*it has judge"):
        find_discriminator(Named("judge"), "other")


class Uncalled(GAN):
    def judged(self, x: Tensor) -> Any:
        return self.discriminator.forward(x)


class Features(GAN):
    def judged(self, x: Tensor) -> Any:
        return self.discriminator(x.flatten(1).unflatten(1, (8, 8)))


def test_what_cannot_be_transformed_is_refused_before_any_weight_changes() -> None:
    compiled = GAN()
    compiled.discriminator.compile(backend="eager")
    for net, message in (
        (Uncalled(), "did not call 'discriminator' as a module in its first step"),
        (
            Features(),
            r"'discriminator' was called on \(6, 8, 8\), and not on exactly one floating-point tensor of images",
        ),
        (compiled, "the discriminator 'discriminator' is compiled as a whole"),
    ):
        before = flat(net).clone()
        with pytest.raises(ValueError, match=f"DiffAugment: .*{message}"):
            train(net, eff.DiffAugment())
        if not isinstance(net, Uncalled):  # whose step has its optimizers' steps within itself
            assert torch.equal(flat(net), before)
        assert not any(m._forward_pre_hooks for m in net.modules())


def test_arguments() -> None:
    for policy in ("color", ["color", "color"], ["flip"]):
        with pytest.raises(ValueError, match=r"DiffAugment\(policy=.*expected a list of some of 'color', .*each once"):
            eff.DiffAugment(policy=policy)
    with pytest.raises(ValueError, match=r"DiffAugment\(span=0\): expected a finite number > 0"):
        eff.DiffAugment(span=0)
    with pytest.raises(ValueError, match=r"DiffAugment\(discriminator=''\): expected a dotted path"):
        eff.DiffAugment(discriminator="")


class Images(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(batches(4), batch_size=None)


def test_yaml(tmp_path: Path) -> None:
    here = "tests.data.augmentation.images.test_diff_augment"
    names: Any = {"model": f"{here}.GAN", "data": f"{here}.Images"}
    fit_yaml(tmp_path, "DiffAugment", {"policy": ["translation", "cutout"]}, max_steps=4, **names)
