"""Clips gradients that are divided over ranks, and keeps a pipeline's gradients until Lightning calls ``backward``.

Lightning's closure runs ``training_step``, then zeroes gradients, then calls ``backward``. A pipeline's schedule runs the
backward passes in ``training_step``. So its gradients are stored, and ``backward`` restores them.
"""

# pyright: reportPrivateImportUsage=false

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_eff._core._run.error_text import first_line
from lightning_eff.strategies._hybrid.shards import counted_here, local

_OF_DTENSORS = ("dtensor", "placement", "sharding")  # in torch's messages of operations that it cannot run on them


@torch.no_grad()
def global_norm(
    gradients: Iterable[tuple[nn.Parameter, Tensor | None]],
    *,
    coordinates: Mapping[str, int],
    counts: Callable[[nn.Parameter], bool],
    device: torch.device,
) -> Tensor:
    """Return ``sqrt(sum g^2)`` over the gradients of the whole model, the same on every rank; collective over all ranks.

    Only one of several equal copies counts. Along an axis that does not divide a gradient, this is the first rank's copy. If
    several stages hold a parameter, it is the copy of the stage for which ``counts`` is true.

    Args:
        gradients: gradients of this rank's parameters; None adds nothing.
        coordinates: this rank's index along the axes of data and tensor parallelism.
        counts: whether this stage's copy of a parameter counts.
        device: device for the sum.

    Returns:
        A float64 scalar. Each gradient's norm is computed in float32, or in the gradient's type if that is larger.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    counted = (g for p, g in gradients if g is not None and counts(p) and counted_here(g, coordinates))
    for here in _lists(counted):
        norms = torch._foreach_norm(here, 2, dtype=torch.promote_types(here[0].dtype, torch.float32))
        total += torch.stack(norms).double().square().sum()
    dist.all_reduce(total)
    return total.sqrt()


@torch.no_grad()
def clip_by_norm(params: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Compute ``g *= min(1, max_norm / (norm + 1e-6))`` in place, like ``torch.nn.utils.clip_grad_norm_``."""
    scale(params, (max_norm / (norm + 1e-6)).clamp(max=1.0))


@torch.no_grad()
def scale(params: Iterable[nn.Parameter], factor: Tensor | float) -> None:
    """Compute ``g *= factor`` in place."""
    for here in _lists(p.grad for p in params):
        torch._foreach_mul_(here, factor.to(here[0].device, here[0].dtype) if isinstance(factor, Tensor) else factor)


@torch.no_grad()
def clip_by_value(params: Iterable[nn.Parameter], max_value: float) -> None:
    """Compute ``g = clamp(g, -max_value, max_value)`` in place."""
    for here in _lists(p.grad for p in params):
        torch._foreach_clamp_min_(here, -max_value)
        torch._foreach_clamp_max_(here, max_value)


def _lists(grads: Iterable[Tensor | None]) -> Iterable[list[Tensor]]:
    """Group this rank's pieces by device and type, so that one call per group suffices."""
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        if grad is not None and (here := local(grad)).numel():
            lists.setdefault((here.device, here.dtype), []).append(here)
    return lists.values()


@contextmanager
def by_lists(optimizer: Optimizer) -> Iterator[None]:
    """Let SGD, Adam and AdamW step all DTensors on a CPU in one call, as on a GPU, unless the user set ``foreach``.

    Separate calls take four times as long for small tensors. torch cannot mix DTensors of several meshes, or DTensors and
    plain tensors, in one call, so optimizers with such a mixture stay as they are.
    """
    listed = type(optimizer) in (SGD, Adam, AdamW)
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for group in optimizer.param_groups:
        chosen = {}
        if len({p.device_mesh if isinstance(p, DTensor) else None for p in group["params"]}) > 1:
            chosen = {name: False for name in ("foreach", "fused") if name in group}
        elif listed and group["foreach"] is None and _may_list(group):
            chosen = {"foreach": True}
        before.append((group, {name: group[name] for name in chosen}))
        group.update(chosen)
    try:
        yield
    finally:
        for group, kept in before:
            group.update(kept)


@contextmanager
def steps_pieces(optimizer: Optimizer, computed: Callable[[], bool], *, who: str) -> Iterator[None]:
    """Explain the error of an optimizer that cannot step divided parameters, such as torch's Adafactor.

    Args:
        optimizer: the optimizer.
        computed: whether the closure has returned. An error before that comes from the module.
        who: name of the caller in messages.

    Raises:
        ValueError: instead of torch's error for an operation that does not support DTensors.
    """
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        pieces = any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
        if computed() and pieces and any(word in str(error).lower() for word in _OF_DTENSORS):
            raise ValueError(
                f"{who}: {type(optimizer).__name__} cannot step parameters that are divided over processes (DTensor):"
                f" {first_line(error)} Use an optimizer that can, such as AdamW or SGD, or {who}(shard=False)"
                " without tensor parallelism."
            ) from error
        raise


def _may_list(group: dict[str, Any]) -> bool:
    params = group["params"]
    if group["fused"] or group["differentiable"]:
        return False
    return all(isinstance(p, DTensor) and p.device.type == "cpu" for p in params)


class Stash:
    """Stores gradients, and replaces the module when a precision plugin calls ``backward``."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._grads: list[tuple[nn.Parameter, Tensor]] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Store the gradients of passes in this context; earlier gradients do not change."""
        params = list(self._module.parameters())
        before = [p.grad for p in params]
        for p in params:
            p.grad = None
        try:
            yield
            self._grads = [(p, p.grad) for p in params if p.grad is not None]
        finally:
            for p, grad in zip(params, before, strict=True):
                p.grad = grad

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the stored gradients to the parameters' gradients, like a backward pass from ``loss``."""
        for p, grad in self._grads:
            p.grad = grad if p.grad is None else p.grad + grad
        self._grads = []
