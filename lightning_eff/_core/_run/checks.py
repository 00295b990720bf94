"""Check that techniques can train a run, before anything is changed."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Protocol

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_eff._core._needs.needs import Need, Reasons
from lightning_eff._core._needs.offers import refusal


class Needing(Protocol):
    """The requirements and conflicts that a technique declares; see ``Technique``."""

    conflicts: ClassVar[Mapping[str, str]]
    needs_automatic_optimization: ClassVar[bool]
    needs_budget: ClassVar[bool]
    needs_optimizer: ClassVar[bool]
    needs: ClassVar[Need]
    refuses: ClassVar[Reasons]


def check_run(trainer: Trainer, module: LightningModule, techniques: Sequence[Needing], *, has_end: bool) -> None:
    """Check the requirements of every technique, and that no two conflict.

    Args:
        trainer: the trainer, in ``Callback.setup``.
        module: its LightningModule.
        techniques: those whose settings are not neutral, in the order of the callbacks.
        has_end: whether the trainer has a budget, so that progress is known.

    Raises:
        ValueError: with the value, the problem and the fix.
    """
    check_pairs(techniques)
    for technique in techniques:
        who = type(technique).__name__
        for cls in type(trainer.precision_plugin).__mro__:
            if cls.__name__ in technique.conflicts:
                raise ValueError(
                    f"{who}: the precision plugin {cls.__name__} cannot train together with it:"
                    f" {technique.conflicts[cls.__name__]}. Remove one of them."
                )
        if technique.needs_automatic_optimization and not module.automatic_optimization:
            raise ValueError(
                f"{who}: {type(module).__name__} has automatic_optimization=False; expected True, because under manual"
                f" optimization the module itself calls backward and step, so {who} cannot intervene. Use automatic"
                f" optimization, or remove {who}."
            )
        if technique.needs_budget and not has_end:
            raise ValueError(
                f"{who}: the Trainer has no end (max_steps=-1, max_epochs=-1, max_time=None), so the progress of the run is"
                " unknown. Set one of max_steps, max_epochs and max_time."
            )
        why_not = refusal(who, technique.needs, technique.refuses, trainer.strategy)
        if why_not is not None:
            raise ValueError(why_not)
        if "dataloader_iter" in inspect.signature(inspect.unwrap(module.training_step)).parameters:
            raise ValueError(
                f"{who}: training_step takes dataloader_iter; expected a batch, because the technique must see it. Let"
                " training_step take (batch, batch_idx)."
            )


def check_optimizers(module: LightningModule, optimizers: Sequence[Optimizer], techniques: Sequence[Needing]) -> None:
    """Raise ``ValueError`` if no optimizer holds a parameter, but a technique acts on optimizer steps."""
    if not module.automatic_optimization or any(group["params"] for o in optimizers for group in o.param_groups):
        return
    for technique in techniques:
        if technique.needs_optimizer:
            raise ValueError(
                f"{type(technique).__name__}: {type(module).__name__}.configure_optimizers returned no optimizer, so no weight"
                " would be trained. Return an optimizer, or remove the technique."
            )


def check_pairs(techniques: Sequence[Needing]) -> None:
    """Raise ``ValueError`` if two techniques conflict, or are of the same class."""
    for i, technique in enumerate(techniques):
        for other in techniques[:i]:
            _check_pair(other, technique)


def _check_pair(first: Needing, second: Needing) -> None:
    a, b = type(first).__name__, type(second).__name__
    reason = second.conflicts.get(a) or first.conflicts.get(b)
    if a == b:
        reason = "the same technique twice would act twice on the same thing"
    if reason:
        raise ValueError(f"{a} and {b} cannot train together: {reason}. Remove one of them.")


def log_trials(techniques: Sequence[Needing]) -> None:
    """Log that Lightning's tuner tries steps without these techniques."""
    names = ", ".join(type(technique).__name__ for technique in techniques)
    rank_zero_info(
        f"Lightning's tuner tries plain training steps without techniques ({names}). The batch size or learning rate that it"
        " finds ignores their effect on memory and loss."
    )


def is_checkpointed_reentrantly(modules: Iterable[nn.Module]) -> bool:
    """Return whether one of ``modules`` declares that it is checkpointed with ``use_reentrant=True``.

    transformers' models and torch's ``CheckpointWrapper`` declare it. A call of ``checkpoint`` in a module's code does not.
    """
    for m in modules:
        keywords = getattr(getattr(m, "_gradient_checkpointing_func", None), "keywords", {})
        if getattr(m, "gradient_checkpointing", False) and keywords.get("use_reentrant", False):
            return True
        if getattr(getattr(m, "checkpoint_impl", None), "name", None) == "REENTRANT":
            return True
    return False
