"""Detect runs that train on validation data, or change their weights during validation.

Each sample gets a mark, which is one number, so that training samples can be compared with validation samples. In a blind
rehearsal, validation gets only copies of one sample. A run that takes nothing from validation data then trains the same, bit
for bit.
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

FEWEST = 4  # smaller samples, such as labels and lengths, are often equal by chance
MOST = 1024  # the most numbers of a sample that count, chosen at random
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def marks(batch: Tensor) -> Tensor:
    """Return a number for each sample of ``batch``, shape (B, ...), which is equal for equal samples only.

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
    """The marks of a run's training and validation samples."""

    def __init__(self) -> None:
        self._trained: dict[str, list[Tensor]] = {}
        self._validated: dict[str, list[Tensor]] = {}

    def trained(self, batch: Any) -> None:
        """Record a training batch."""
        self._add(self._trained, batch)

    def validated(self, batch: Any) -> None:
        """Record a validation batch."""
        self._add(self._validated, batch)

    def _add(self, to: dict[str, list[Tensor]], batch: Any) -> None:
        for _, tensor in tensors(batch):
            if tensor.ndim > 1 and tensor[0:1].numel() >= FEWEST and not tensor.requires_grad:
                to.setdefault(f"{tensor.dtype} {tuple(tensor.shape[1:])}", []).append(marks(tensor))

    @property
    def count(self) -> int:
        """The number of training samples so far."""
        return max((sum(len(part) for part in parts) for parts in self._trained.values()), default=0)

    def overlap(self) -> dict[str, list[int]]:
        """Return, by dtype and shape, the number of training samples that are in the validation data, and of all."""
        found: dict[str, list[int]] = {}
        for make, parts in self._trained.items():
            ours = torch.cat([part.cpu() for part in parts])
            theirs = self._validated.get(make)
            shared = int(torch.isin(ours, torch.cat([p.cpu() for p in theirs])).sum()) if theirs else 0
            found[make] = [shared, len(ours)]
        return found


def watch(trainer: Trainer, module: LightningModule, samples: Samples, patches: Patches) -> None:
    """Record the samples that reach ``training_step`` or the module while gradients are enabled."""
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
    """Return a number per parameter, which shows changes."""
    return [float(p.detach().double().sum()) for p in module.parameters() if p.numel()]


def exchange(module: LightningModule, *, keep: str | None, take: str | None) -> None:
    """Write the weights that are about to be validated to a file, or validate the weights of a file instead.

    Random numbers are the same from then on; :func:`draw_alike` does this for the loader. Compiled parts have their plain
    names in the file, and further entries of the file are ignored.

    Args:
        module: the module.
        keep: the file to write, or None.
        take: the file to read, or None.

    Raises:
        Incomparable: if the file has the weights of another module.
    """
    state = module.state_dict()
    plain = {name.replace("_orig_mod.", ""): name for name in state}
    if keep is not None:
        torch.save({name: state[own] for name, own in plain.items()}, keep)
    if take is not None:
        saved = torch.load(take, map_location="cpu", weights_only=False)  # written by this function
        if missing := [name for name in plain if name not in saved]:
            raise Incomparable(f"there is no {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}")
        try:
            module.load_state_dict({own: saved[name] for name, own in plain.items()})
        except RuntimeError as error:
            raise Incomparable(" ".join(str(error).split())) from None
    draw_alike()


def draw_alike() -> None:
    """Seed Python, NumPy and torch, so that masks, noise and dropout are the same from here on."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


class _First(Dataset[Any]):
    """A map-style data set that returns its first item for every index."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: Any) -> Any:
        return self._data[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_data":  # pickle and copy ask before _data exists
            raise AttributeError(name)
        return getattr(self._data, name)


class _FirstOfStream(IterableDataset[Any]):
    """A stream that repeats its first item for each of its items."""

    def __init__(self, data: Any) -> None:
        self._data = data

    @override
    def __iter__(self) -> Iterator[Any]:
        first: list[Any] = []
        for item in self._data:
            first = first or [item]
            yield first[0]


def blind(trainer: Trainer, module: LightningModule, patches: Patches) -> None:
    """Let validation loaders return their first sample instead of every sample."""
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
        repeated = _FirstOfStream(loaders.dataset) if stream else _First(loaders.dataset)
        object.__setattr__(loaders, "dataset", repeated)  # its own __setattr__ refuses another data set
    return loaders
