"""Corrects or refuses hooks that use gradients or parameters, since each process has only a part of them."""

from dataclasses import dataclass

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn

from lightning_eff._core._lightning.names import both
from lightning_eff.strategies._hybrid.arguments import innermost
from lightning_eff.strategies._hybrid.layout import Layout
from lightning_eff.strategies._hybrid.norms import FUNCTIONS, Places
from lightning_eff.strategies._hybrid.reading import Reader, Reads, hooks_of

_WITH_GRADIENTS = (
    *("configure_gradient_clipping", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
    *("optimizer_zero_grad", "on_train_batch_start", "on_train_batch_end"),
)
_OTHERS = (
    *("optimizer_step", "lr_scheduler_step", "on_before_backward", "on_save_checkpoint"),
    *("on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end"),
    *("on_test_start", "on_test_end", "on_test_epoch_start", "on_test_epoch_end"),
)
_CLIPPING = ("clip_gradients", "clip_grad_by_norm", "clip_grad_by_value")


@dataclass(frozen=True)
class Hook:
    """A hook that computes gradient norms, which must be those of the whole model.

    Attributes:
        owner: the module or a callback.
        name: name of the method.
        places: namespaces and closures in which it finds the functions for norms.
    """

    owner: object
    name: str
    places: Places


def check_hooks(trainer: Trainer, module: LightningModule, layout: Layout, *, who: str) -> list[Hook]:
    """Check the hooks of the module, the callbacks and the precision plugin in a divided model.

    Returns:
        The hooks that need :class:`~.norms.Norms`.

    Raises:
        ValueError: if a hook reads gradients or parameters of which this process has only a part.
    """
    _check_clipping(trainer.precision_plugin, layout, who=who)
    found: list[Hook] = []
    names = (*_WITH_GRADIENTS, *_OTHERS)
    if trainer.state.fn not in (None, TrainerFn.FITTING):
        names = tuple(name for name in _OTHERS if "validation" in name or "test" in name)
    owners = [module, *trainer.callbacks]  # pyright: ignore[reportAttributeAccessIssue]
    for owner in owners:
        reader = Reader.of(module, owner, both(*FUNCTIONS.values()))
        for name, functions in hooks_of(owner, names):
            reads = reader.read(functions)
            _check(f"{type(owner).__name__}.{name}", name, reads, trainer, layout, who=who)
            if reads.norms:
                found.append(Hook(owner, name, Places(reads.namespaces, reads.cells)))
    return found


def _check_clipping(plugin: Precision, layout: Layout, *, who: str) -> None:
    for inner in innermost(plugin):
        for name in _CLIPPING:
            written = [f for _, functions in hooks_of(inner, (name,)) for f in functions]
            if written:
                raise ValueError(
                    f"{who}: {type(inner).__name__} overrides {name}, but with {layout} each process has only a part of the"
                    f" gradients, and {who} must clip them by the norm of all. Remove the method, or use"
                    f" {who}(shard=False) without tensor and pipeline parallelism."
                )


def _check(what: str, name: str, reads: Reads, trainer: Trainer, layout: Layout, *, who: str) -> None:
    whole = f"or use {who}(shard=False) without tensor and pipeline parallelism"
    if reads.gradients is not None:
        raise ValueError(
            f"{who}: {what} computes numbers from gradients (.grad in {reads.gradients}), but with {layout} each process has"
            " only a part of them. Use self.clip_gradients(...) or gradient_clip_val= to clip, and"
            " torch.nn.utils.clip_grad_norm_ or lightning.pytorch.utilities.grad_norm for norms, which cover all processes,"
            f" {whole}."
        )
    if reads.parameters is not None or (reads.lists is not None and layout.pipeline > 1):
        raise ValueError(
            f"{who}: {what} reads parameters (in {reads.parameters or reads.lists}), but with {layout} each process has only a"
            " part of them. Do it in configure_optimizers, before or after the fit, or on a checkpoint"
            f" (trainer.save_checkpoint), where the parameters are whole, {whole}."
        )
    if not reads.norms:
        return
    norms = ", ".join(dict.fromkeys(f.__name__ for f in reads.norms))
    if name not in _WITH_GRADIENTS:
        raise ValueError(
            f"{who}: {what} calls {norms}, but with {layout} the step's gradients do not exist there. Call it in"
            f" on_before_optimizer_step or configure_gradient_clipping, {whole}."
        )
    if name == "on_after_backward" and trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"{who}: {what} calls {norms} after each of {trainer.accumulate_grad_batches} accumulated backward passes, but with"
            f" {layout} the processes' gradients are not added up then. Call it in on_before_optimizer_step, {whole}."
        )
