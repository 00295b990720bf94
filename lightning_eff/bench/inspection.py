"""Inspect an arm's model, optimizer, techniques and data in its first rehearsal."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_eff._core import rng
from lightning_eff._core.batches import tensors
from lightning_eff._core.technique import techniques_of


def facts(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Return properties in which an arm may differ from the baseline, as JSON values, by their names in the report."""
    plain: Any = getattr(module, "_orig_mod", module)
    found: dict[str, Any] = {
        "model": type(plain).__name__,
        "parameters": sum(p.numel() for p in module.parameters()),
        "precision": str(trainer.precision),
        "accumulated batches": trainer.accumulate_grad_batches,
        "gradient clipping": trainer.gradient_clip_val,
        "optimizer": ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers),
    }
    for name in ("weight_decay", "betas", "momentum"):
        values = {str(group[name]) for o in trainer.optimizers for group in o.param_groups if name in group}
        if values:
            found[name.replace("_", " ")] = ", ".join(sorted(values))
    given = getattr(plain, "hparams", {})
    for name, value in given.items() if isinstance(given, Mapping) else ():
        if isinstance(value, int | float | str):
            found[f"model.{name}"] = value
    return found


def acting(trainer: Trainer) -> list[str]:
    """Return the active techniques with their settings, as texts to compare."""
    found = [one for one in techniques_of(trainer) if not one.neutral]
    return [f"{type(c).__name__}({ {k: v for k, v in vars(c).items() if not k.startswith('_')} })" for c in found]


def training_data(trainer: Trainer) -> dict[str, Any] | None:
    """Return the length of a map-style training set and a hash of three of its items; None for other data sets."""
    dataset = getattr(trainer.train_dataloader, "dataset", None)
    try:
        length = len(dataset)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None
    digest = hashlib.sha1()
    with rng.fork():
        for index in (0, length // 2, length - 1):
            torch.manual_seed(index)  # for random augmentation
            for _, tensor in tensors(dataset[index]):  # pyright: ignore[reportOptionalSubscript]
                digest.update(raw(tensor))
    return {"length": length, "items": digest.hexdigest()}


def raw(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes, for a hash."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
