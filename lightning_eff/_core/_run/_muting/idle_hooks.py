"""Disable hooks that do nothing, because Lightning makes about ten Python calls for each in every step."""

from collections.abc import Sequence
from typing import TypeVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_eff._core._lightning.names import both, is_a
from lightning_eff._core._run.protocol import Member
from lightning_eff._core.patches import Patches

#: Hooks that Lightning calls on every callback for every batch.
BATCH_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
)

F = TypeVar("F")
_DRIVING: list[object] = []


def driving(hook: F) -> F:
    """Mark a hook that only does something in the technique that drives the run."""
    _DRIVING.append(hook)
    return hook


def silence(
    trainer: Trainer, module: LightningModule, techniques: Sequence[Member], working: Sequence[Member], patches: Patches
) -> None:
    """Set batch hooks of techniques that would do nothing in this fit to None, because Lightning skips these.

    The first technique's hooks drive the run, unless no technique works in it. A run with accumulation windows or manual
    optimization is always driven, because its checkpoints must know how far the step is.
    """
    scheduled = any(is_a(c, GradientAccumulationScheduler) for c in trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue]
    windows = scheduled or trainer.accumulate_grad_batches > 1 or not module.automatic_optimization
    driven = bool(working) or windows
    for technique in techniques:
        leads = driven and technique is techniques[0]
        for name in BATCH_HOOKS:
            own = getattr(type(technique), name)
            of_nobody = any(own is getattr(cls, name) for cls in both(Callback))
            if of_nobody or (not leads and (own in _DRIVING or technique not in working)):
                patches.set(technique, name, None)
