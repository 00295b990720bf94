"""The profile that a recipe decides by: the module's blocks, vocabulary and optimizer, a batch, and the run's length."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_eff._core._branches.side_by_side import side_by_side
from lightning_eff._core._lightning.names import is_a
from lightning_eff._core.batches import num_samples, tensors
from lightning_eff._core.blocks import outermost, stacks
from lightning_eff._core.search_space import RunProfile
from lightning_eff.optim.optimizers._matrices import hidden_matrices

ADAM = ("Adam", "AdamW", "NAdam", "RAdam")
_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Rates:
    """The module's own optimizer.

    Attributes:
        optimizer: the name of its class.
        rate: its highest learning rate, before any schedule.
        scheduled: whether a scheduler comes with it.
    """

    optimizer: str
    rate: float
    scheduled: bool


@dataclass(frozen=True)
class Profile:
    """The facts that a recipe decides by.

    Attributes:
        module: the name of the module's class.
        run: what techniques are asked by whether they could gain anything. Fields that come from a batch are filled in
            only if :attr:`data` is true.
        stack: where the repeated blocks are, in words; empty if there are none.
        vocabulary: entries of the embedding of tokens; 0 if there is none.
        convolutions: those whose windows overlap, so not those that cut an image into patches.
        parameters: numbers in the module's parameters.
        rates: of the module's optimizer; None if it could not be built.
        data: whether a batch was looked at.
        masked: the fraction of labels that are predicted, in a batch of a masked language model.
        steps: optimizer steps of the run; None if not known.
        seconds: of the run; None if not known.
        unknown: what could not be looked at, each with the reason.
    """

    module: str
    run: RunProfile = field(default_factory=RunProfile)
    stack: str = ""
    vocabulary: int = 0
    convolutions: int = 0
    parameters: int = 0
    rates: Rates | None = None
    data: bool = False
    masked: float = 0.0
    steps: int | None = None
    seconds: float | None = None
    unknown: tuple[str, ...] = ()

    @property
    def cuda(self) -> bool:
        """Whether the run is on a GPU."""
        return self.run.accelerator == "cuda"

    @property
    def adam_rate(self) -> float | None:
        """The module's learning rate if its optimizer is one of Adam's family, else None."""
        return self.rates.rate if self.rates is not None and self.rates.optimizer in ADAM else None

    def is_long(self, steps: int, seconds: float) -> bool | None:
        """Whether the run has at least so many steps or seconds; None if its length is not known."""
        if self.steps is None and self.seconds is None:
            return None
        return (self.steps or 0) >= steps or (self.seconds or 0.0) >= seconds

    def told(self) -> str:
        """In words."""
        found = [f"{self.parameters:,} parameters"]
        found += [f"{self.run.num_blocks} blocks ({self.stack})"] if self.run.num_blocks else ["no repeated blocks"]
        found += [f"a vocabulary of {self.vocabulary:,}"] if self.vocabulary else []
        found += [f"{self.convolutions} convolutions"] if self.convolutions else []
        if self.rates is not None:
            found.append(f"{self.rates.optimizer} with learning rate {self.rates.rate:g}")
        if self.run.sequence_length:
            found.append(f"{self.run.sequence_length} tokens per sample")
        if self.run.image_side:
            found.append(f"images of {self.run.image_side} pixels")
        if self.steps is not None:
            found.append(f"{self.steps:,} steps")
        if self.seconds is not None:
            found.append(f"{self.seconds:g} s")
        return ", ".join(found)


def of_module(module: nn.Module) -> Profile:
    """The profile of a module, without a run."""
    apart = side_by_side(module, by_name=True)  # pyright: ignore[reportArgumentType]
    found = outermost([c for c in stacks(module) if c.path not in apart])
    matrices = hidden_matrices(module)  # pyright: ignore[reportArgumentType]
    device = next((p.device.type for p in module.parameters()), "cpu")
    accelerator = device if device != "cpu" or not torch.cuda.is_available() else "cuda"
    manual = is_a(module, LightningModule) and not module.automatic_optimization
    return Profile(
        module=type(module).__name__,
        run=RunProfile(
            num_blocks=found[0].length if found else 0,
            num_matrices=len(matrices),
            accelerator=accelerator,
            manual_optimization=manual,
            optimizer_states=True,
            memory_bound=True,
        ),
        stack=str(found[0].path) if found else "",
        vocabulary=_vocabulary(module),
        convolutions=sum(_overlaps(m) for m in module.modules()),
        parameters=sum(p.numel() for p in module.parameters()),
    )


def _overlaps(module: nn.Module) -> bool:
    if not isinstance(module, _CONVOLUTIONS):
        return False
    return any(k > 1 and s < k for k, s in zip(module.kernel_size, module.stride, strict=True))


def _vocabulary(module: nn.Module) -> int:
    """Entries of the embedding that an output layer answers to; else of the first one, since positions come after it."""
    tables = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    heads = {m.out_features for m in module.modules() if isinstance(m, nn.Linear)}
    answered = [t.num_embeddings for t in tables if t.num_embeddings in heads]
    return max(answered) if answered else next((t.num_embeddings for t in tables), 0)


def with_batch(profile: Profile, batch: Any) -> Profile:
    """The profile, completed from a batch."""
    size = num_samples(batch)
    held = [t for _, t in tensors(batch) if t.ndim and t.shape[0] == size]
    whole = [t for t in held if t.ndim == 2 and not t.is_floating_point() and t.dtype is not torch.bool]
    length = max((t.shape[1] for t in whole), default=0)
    images = [t for t in held if t.ndim == 4 and min(t.shape[2:]) > 1]
    ignored = max((_ignored(t) for t in whole), default=0.0)
    run = replace(
        profile.run,
        batch_size=size,
        sequence_length=length if length > 1 else None,
        image_side=min(images[0].shape[2:]) if images else None,
        grids=any(t.ndim >= 3 and (t.is_floating_point() or t.dtype is torch.uint8) for t in held),
        masked_labels=ignored > 0.5 and len(whole) > 1,
    )
    return replace(profile, run=run, data=True, masked=1 - ignored if run.masked_labels else 0.0)


def _ignored(labels: Tensor) -> float:
    return float((labels == -100).float().mean())


def rates_of(optimizers: list[Any], *, scheduled: bool) -> Rates | None:
    """The first optimizer's class and the highest learning rate of all groups."""
    groups: list[Mapping[str, Any]] = [group for optimizer in optimizers for group in optimizer.param_groups]
    made = [float(g[name]) for g in groups for name in ("lr", "initial_lr", "max_lr") if g.get(name) is not None]
    if not optimizers or not made:
        return None
    return Rates(type(optimizers[0]).__name__, max(made), scheduled)
