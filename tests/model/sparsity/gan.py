"""A GAN that steps its two optimizers itself, and the same training in plain PyTorch."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader

Masks = dict[str, Tensor]


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Images and noise."""
    g = torch.Generator().manual_seed(5)
    return [(torch.randn(8, 1, 8, 8, generator=g), torch.randn(8, 4, generator=g)) for _ in range(count)]


def gan_loader(count: int) -> DataLoader[Any]:
    return DataLoader(batches(count), batch_size=None)  # pyright: ignore[reportArgumentType]


class GAN(pl.LightningModule):
    """A generator with BatchNorm and a discriminator with spectral normalization.

    Args:
        shared: one fake batch for both steps, whose graph outlives the discriminator's step, as in DCGAN's example; otherwise
            a fake batch for each step, and ``toggle_optimizer``.
        critic: the number of discriminator steps per batch.
        clip: the norm to which ``clip_gradients`` clips; None does not clip. A negative one is clipped to by torch's function.
        every: batches between two steps of the generator.
        by: how the step is taken: "step", "closure" (which calls backward), or "torch" (without Lightning's wrappers).
    """

    def __init__(
        self, *, shared: bool = True, critic: int = 1, clip: float | None = None, every: int = 1, by: str = "step"
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.shared, self.critic, self.clip, self.every, self.by = shared, critic, clip, every, by
        self.generator = nn.Sequential(
            nn.Linear(4, 32), nn.Unflatten(1, (8, 2, 2)), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 4)
        )
        self.discriminator = nn.Sequential(
            spectral_norm(nn.Conv2d(1, 8, 4, 4)), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(32, 1)
        )

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.generator.parameters(), 0.01, betas=(0.5, 0.9)),
            torch.optim.SGD(self.discriminator.parameters(), 0.05, momentum=0.9),
        )

    def losses(self, real: Tensor, fake: Tensor) -> Tensor:
        """The discriminator's loss."""
        yes, no = self.discriminator(real), self.discriminator(fake)
        return _bce(yes, 1.0) + _bce(no, 0.0)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        def step(optimizer: Any, loss: Callable[[], Tensor]) -> None:
            if not self.shared:
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()

            def closure() -> None:
                self.manual_backward(loss())
                if self.clip is not None and self.clip < 0:
                    nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], -self.clip)
                elif self.clip is not None:
                    self.clip_gradients(optimizer, self.clip, "norm")

            if self.by == "closure":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            if not self.shared:
                self.untoggle_optimizer(optimizer)

        g, d = self.optimizers(use_pl_optimizer=self.by != "torch")  # pyright: ignore[reportGeneralTypeIssues]
        run(self, batch, batch_idx, lambda loss: step(d, loss), lambda loss: step(g, loss))


def _bce(logits: Tensor, target: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


def run(
    net: GAN,
    batch: tuple[Tensor, Tensor],
    batch_idx: int,
    discriminate: Callable[[Callable[[], Tensor]], None],
    generate: Callable[[Callable[[], Tensor]], None],
) -> None:
    """The losses of one batch, in order."""
    real, noise = batch
    fake = net.generator(noise) if net.shared else None
    for i in range(net.critic):
        made = net.generator(noise + i) if fake is None else fake
        discriminate(lambda made=made: net.losses(real, made.detach()))
    if batch_idx % net.every == 0:
        made = net.generator(-noise) if fake is None else fake
        generate(lambda: _bce(net.discriminator(made), 1.0))


class Plain:
    """Training of a GAN without Lightning, with masks that may be replaced between batches.

    Args:
        net: trained in place.
        penalties: by parameter, a factor of the l1 norm in the loss.
        after: called after each step, with the optimizer and the dense gradient of each of its parameters.
    """

    def __init__(
        self,
        net: GAN,
        after: Callable[[Any, dict[str, Tensor]], None] | None = None,
        penalties: dict[str, float] | None = None,
    ) -> None:
        self.net, self.masks, self.after, self.penalties = net, Masks(), after, penalties or {}
        self._generator, self._discriminator = net.configure_optimizers()

    @torch.no_grad()
    def put(self, masks: Masks) -> None:
        """Set other weights to zero."""
        self.masks = masks
        for name, mask in masks.items():
            self.net.get_parameter(name).mul_(mask)

    def step(self, optimizer: Any, loss: Callable[[], Tensor]) -> None:
        self.net.zero_grad()
        loss().backward()
        own = [p for group in optimizer.param_groups for p in group["params"]]
        held = {n: p for n, p in self.net.named_parameters() if any(p is q for q in own)}
        dense: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, p in held.items():
                assert p.grad is not None
                dense[name] = p.grad.clone()
                p.grad.add_(p.sign(), alpha=self.penalties.get(name, 0.0)).mul_(self.masks.get(name, torch.ones(())))
        if self.net.clip is not None:
            nn.utils.clip_grad_norm_(own, abs(self.net.clip))
        optimizer.step()
        with torch.no_grad():
            for name, p in held.items():
                p.mul_(self.masks.get(name, torch.ones(())))
            if self.after is not None:
                self.after(optimizer, dense)

    def train(self, data: list[tuple[Tensor, Tensor]], first: int = 0) -> None:
        """Train on each batch, of which the first has this index."""
        for i, batch in enumerate(data, start=first):
            run(
                self.net,
                batch,
                i,
                lambda loss: self.step(self._discriminator, loss),
                lambda loss: self.step(self._generator, loss),
            )


class Zeros(pl.Callback):
    """The steps after which a masked weight, or a momentum of one, was not zero.

    Attributes:
        leaks: names, in order.
        steps: the number of optimizer steps that were seen.
    """

    def __init__(self, technique: Any) -> None:
        self.technique, self.leaks, self.steps = technique, list[str](), 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(lambda *_: self._look(trainer, pl_module))

    def _look(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.steps += 1
        named = dict(pl_module.named_parameters())
        for name, mask in self.technique.masks.items():
            held = [named[name].detach()]
            for optimizer in trainer.optimizers:
                held += [s for s in (optimizer.state.get(named[name]) or {}).values() if isinstance(s, Tensor)]
            if any(bool(t[~mask].any()) for t in held if t.shape == mask.shape):
                self.leaks.append(name)
