"""Trial passes of a step that updates the module itself, as under manual optimization."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_eff._core.patches import Patches


@contextmanager
def without_updates(
    module: LightningModule,
    stepping: Callable[[Optimizer], None] | None = None,
    backward: Callable[..., None] | None = None,
) -> Iterator[None]:
    """Let ``training_step`` call ``manual_backward`` and ``step`` without any lasting effect.

    Gradients are computed without autograd's accumulation, so DDP's hooks do not fire. Optimizers and schedulers do not step.
    On exit each parameter has its previous value, gradient and ``requires_grad``, because a step may also write to weights
    itself, such as those of a moving average.

    Args:
        module: the module, in a fit with manual optimization.
        stepping: called in place of each optimizer's step, with the optimizer.
        backward: called in place of ``manual_backward``; None computes plain gradients.
    """
    trainer = module.trainer
    kept = [(p, p.detach().clone(), p.grad, p.requires_grad) for p in module.parameters()]
    patches = Patches()
    patches.set(module, "manual_backward", backward or backward_of(module))
    own = module.optimizers()  # Lightning's wrappers, which count steps
    for optimizer in (*trainer.optimizers, *(own if isinstance(own, list) else [own])):
        patches.set(
            optimizer, "step", functools.partial(_no_step, getattr(optimizer, "_optimizer", optimizer), stepping)
        )
    for config in trainer.lr_scheduler_configs:
        patches.set(config.scheduler, "step", _nothing)
    try:
        for p, _, _, _ in kept:
            p.grad = None
        yield
    finally:
        patches.restore()
        for p, value, grad, requires_grad in kept:
            p.grad = grad
            p.requires_grad_(requires_grad)
            p.data.copy_(value)


def backward_of(module: LightningModule) -> Callable[..., None]:
    """Return a ``manual_backward`` that adds gradients to ``grad`` without autograd's accumulation."""

    def manual_backward(
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        into = [p for p in (module.parameters() if inputs is None else inputs) if p.requires_grad]
        found = torch.autograd.grad(
            loss, into, gradient, retain_graph=retain_graph, create_graph=create_graph, allow_unused=True
        )
        for p, grad in zip(into, found, strict=True):
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad + grad

    return manual_backward


def _no_step(
    optimizer: Any, stepping: Callable[[Optimizer], None] | None, closure: Any = None, *args: Any, **kwargs: Any
) -> Any:
    output = closure() if callable(closure) else None
    if stepping is not None:
        stepping(optimizer)
    return output


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
