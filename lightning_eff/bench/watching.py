"""What a run may not do in silence: train on validation data, or move its weights while the clock stands for validation.

Samples are told by marks, one number each, so that what a step was given can be held against what validation was given,
whoever fed it. And a rehearsal may be blind: then validation has one sample only, again and again, and a run that takes
nothing from validation data trains as before, bit for bit.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from typing_extensions import override

from lightning_eff._core._lightning.names import is_overridden
from lightning_eff._core.batches import tensors
from lightning_eff._core.patches import Patches
from lightning_eff.bench.pace import Incomparable

FEWEST = 4  # numbers of a sample, below which samples are alike by chance: labels, lengths
MOST = 1024  # of a sample's numbers, spread over it by chance, are looked at
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def marks(batch: Tensor) -> Tensor:
    """One number for each sample of ``batch``, shape (B, ...), that is the same for the same samples and no others.

    ``mark[b] = sum_i r_i bits(batch[b, i]) mod 2**64`` with odd random ``r_i`` that depend on the shape alone.
    """
    flat = batch.detach().flatten(1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten(1)
    generator = torch.Generator().manual_seed(flat.shape[1])
    if flat.shape[1] > MOST:
        at = torch.randperm(flat.shape[1], generator=generator)[:MOST]
        flat = flat[:, at.to(flat.device)]
    factors = torch.randint(-(2**62), 2**62, (flat.shape[1],), generator=generator) * 2 + 1
    bits = flat.contiguous().view(_WORDS[flat.element_size()]).long()
    return (bits * factors.to(bits.device)).sum(1)


class Samples:
    """Marks of the samples that a run has trained on, and of those that it was validated on."""

    def __init__(self) -> None:
        self._trained: dict[str, list[Tensor]] = {}
        self._validated: dict[str, list[Tensor]] = {}

    def trained(self, batch: Any) -> None:
        """A step was given ``batch``."""
        self._add(self._trained, batch)

    def validated(self, batch: Any) -> None:
        """Validation was given ``batch``."""
        self._add(self._validated, batch)

    def _add(self, to: dict[str, list[Tensor]], batch: Any) -> None:
        for _, tensor in tensors(batch):
            if tensor.ndim > 1 and tensor[0:1].numel() >= FEWEST and not tensor.requires_grad:
                to.setdefault(f"{tensor.dtype} {tuple(tensor.shape[1:])}", []).append(marks(tensor))

    @property
    def count(self) -> int:
        """How many samples were trained on so far."""
        return max((sum(len(part) for part in parts) for parts in self._trained.values()), default=0)

    def overlap(self) -> dict[str, list[int]]:
        """By the samples' make: how many that were trained on are of the validation data, and how many there were."""
        found: dict[str, list[int]] = {}
        for make, parts in self._trained.items():
            ours = torch.cat([part.cpu() for part in parts])
            theirs = self._validated.get(make)
            shared = int(torch.isin(ours, torch.cat([p.cpu() for p in theirs])).sum()) if theirs else 0
            found[make] = [shared, len(ours)]
        return found


def watch(trainer: Trainer, module: LightningModule, samples: Samples, patches: Patches) -> None:
    """Note what samples reach ``training_step`` or the module itself where gradients are taken."""
    step = module.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            samples.trained((args[:1], kwargs.get("batch")))
        return step(*args, **kwargs)

    training_step.__wrapped__ = getattr(step, "__wrapped__", step)  # pyright: ignore[reportFunctionMemberAccess]
    patches.set(module, "training_step", training_step)
    if not hasattr(module, "_orig_mod") and is_overridden("forward", module):
        forward = module.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and not trainer.validating:
                samples.trained((args, kwargs))
            return forward(*args, **kwargs)

        patches.set(module, "forward", watched)


def weights(module: LightningModule) -> list[float]:
    """A number for each parameter, by which a change shows."""
    return [float(p.detach().double().sum()) for p in module.parameters() if p.numel()]


def exchange(module: LightningModule, *, keep: str | None, take: str | None) -> None:
    """Write the weights that are about to be validated into a file, or validate those of a file in their place.

    What is drawn by chance from then on is the same either way; what the loader draws before, by :func:`draw_alike`. Parts that
    are compiled go by their plain names, and what a file has beside the module's own is left out.

    Args:
        module: that is validated.
        keep: the file to write; None for none.
        take: the file to read; None for none.

    Raises:
        Incomparable: if the weights of ``take`` are of another module.
    """
    state = module.state_dict()
    plain = {name.replace("_orig_mod.", ""): name for name in state}
    if keep is not None:
        torch.save({name: state[own] for name, own in plain.items()}, keep)
    if take is not None:
        held = torch.load(take, map_location="cpu", weights_only=False)  # a file of ours
        if missing := [name for name in plain if name not in held]:
            raise Incomparable(f"there is no {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}")
        try:
            module.load_state_dict({own: held[name] for name, own in plain.items()})
        except RuntimeError as error:
            raise Incomparable(" ".join(str(error).split())) from None
    draw_alike()


def draw_alike() -> None:
    """Let Python, NumPy and torch draw the same from here on, whatever was drawn before: masks, noise, dropout."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


class _First(Dataset[Any]):
    """A map-style data set all of whose items are its first."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: Any) -> Any:
        return self._data[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_data":  # of pickle and copy, which ask before there is anything
            raise AttributeError(name)
        return getattr(self._data, name)


class _FirstOfStream(IterableDataset[Any]):
    """A stream that gives its first item again and again, as often as it has items."""

    def __init__(self, data: Any) -> None:
        self._data = data

    @override
    def __iter__(self) -> Iterator[Any]:
        first: list[Any] = []
        for item in self._data:
            first = first or [item]
            yield first[0]


def blind(trainer: Trainer, module: LightningModule, patches: Patches) -> None:
    """Let validation loaders give their first sample alone, in place of each, for whoever asks for them."""
    for owner in (getattr(trainer, "datamodule", None), module):
        if owner is not None and is_overridden("val_dataloader", owner):
            patches.set(owner, "val_dataloader", _blinded(owner.val_dataloader))


def _blinded(original: Callable[[], Any]) -> Callable[[], Any]:
    def val_dataloader() -> Any:
        return _each(original())

    return val_dataloader


def _each(loaders: Any) -> Any:
    if isinstance(loaders, Mapping):
        return {name: _each(one) for name, one in loaders.items()}
    if isinstance(loaders, list | tuple):
        return [_each(one) for one in loaders]
    if isinstance(loaders, DataLoader):
        stream = isinstance(loaders.dataset, IterableDataset)
        held = _FirstOfStream(loaders.dataset) if stream else _First(loaders.dataset)
        object.__setattr__(loaders, "dataset", held)  # its own __setattr__ allows no other data set
    return loaders
