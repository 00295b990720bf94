"""Gradient norms of the whole model, for Lightning's clipping and for hooks."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_eff._core.patches import Patches
from lightning_eff.strategies._hybrid import gradients
from lightning_eff.strategies._hybrid.arguments import innermost
from lightning_eff.strategies._hybrid.hooks import Hook
from lightning_eff.strategies._hybrid.norms import Norms, Within
from lightning_eff.strategies._hybrid.saving.gathering import Gathering
from lightning_eff.strategies._hybrid.saving.optimizer_state import NamedOptimizer, whole_groups
from lightning_eff.strategies._hybrid.shards import counted_here


class Clipped(Protocol):
    """The part of a replica's interface that clipping uses.

    Attributes:
        trainer: the trainer whose precision plugin clips.
        module: this rank's part of the module.
        held: names of the parameters that this rank holds.
        optimizers: this rank's optimizers.
        gathering: gathers tensors over the ranks.
        device: device for norms.
    """

    trainer: Trainer
    module: LightningModule
    held: set[str]
    optimizers: list[NamedOptimizer]
    gathering: Gathering
    device: torch.device

    def whole(self) -> AbstractContextManager[None]:
        """Show every parameter of the plain module."""
        ...


class Clipping:
    """Clips the gradients of one replica that is divided over ranks."""

    def __init__(self, replica: Clipped) -> None:
        self._replica = replica
        self._norms: Norms | None = None  # set while a hook runs that computes norms

    def install(self, patches: Patches, hooks: Iterable[Hook]) -> None:
        """Replace the precision plugin's clipping, and wrap ``hooks``."""
        for inner in innermost(self._replica.trainer.precision_plugin):
            patches.set(inner, "clip_grad_by_norm", self._by_norm)
            patches.set(inner, "clip_grad_by_value", self._by_value)
        for hook in hooks:
            patches.set(hook.owner, hook.name, self._around(hook))

    def _params(self, optimizer: Optimizer) -> list[nn.Parameter]:
        return list(self._replica.trainer.precision_plugin.main_params(optimizer))

    def _by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        params = self._params(optimizer)
        gradients.clip_by_norm(params, self.norm((p, p.grad) for p in params), float(clip_val))
        self._changed()

    def _by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        gradients.clip_by_value(self._params(optimizer), float(clip_val))
        self._changed()

    def _changed(self) -> None:
        if self._norms is not None:
            self._norms.measure()

    def norm(self, pairs: Iterable[tuple[nn.Parameter, Tensor | None]]) -> Tensor:
        """Return the norm over all ranks of gradients, in pairs with their parameters; collective."""
        names = {id(p): name for optimizer in self._replica.optimizers for name, p in optimizer.held.items()}
        gathering = self._replica.gathering
        return gradients.global_norm(
            pairs,
            coordinates=gathering.coordinates,
            counts=lambda p: id(p) not in names or gathering.owned(names[id(p)]),
            device=self._replica.device,
        )

    def _counts(self, name: str, grad: Tensor) -> bool:
        gathering = self._replica.gathering
        return gathering.owned(name) and counted_here(grad, gathering.coordinates)

    def _around(self, hook: Hook) -> Callable[..., Any]:
        """Wrap the hook so that torch's and Lightning's gradient norms cover the whole model in it."""
        inner, replica = getattr(hook.owner, hook.name), self._replica

        @wraps(inner)
        def run(*args: Any, **kwargs: Any) -> Any:
            with replica.whole():
                shown = dict(replica.module.named_parameters())
                held = {name: p for name, p in shown.items() if name in replica.held}
                self._norms = Norms(shown, held, self._counts, replica.device)
                within = Within(self._norms, {id(p): name for name, p in shown.items()}, replica.device)
                try:
                    for optimizer in replica.optimizers:
                        optimizer.take_added(replica.gathering)
                    with whole_groups(replica.optimizers, shown), hook.places.acting(within):
                        return inner(*args, **kwargs)
                finally:
                    self._norms = None

        return run
