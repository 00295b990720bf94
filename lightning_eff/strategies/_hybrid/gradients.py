"""Gradients: clipped, where they lie in pieces on the ranks, and those of a pipeline's pass kept until they are asked for.

Lightning's closure runs ``training_step``, then zeroes gradients, then calls ``backward``. A pipeline's schedule has run
the backward passes within the first of these, so what it left is put aside, and ``backward`` puts it back.
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
    """``sqrt(sum g^2)`` over the gradients of the whole model, the same on every rank; collective over all ranks.

    Of equal copies one counts: along an axis on which a gradient is not divided, that of the first rank; of parameters
    that several stages hold, that of the stage for which ``counts`` is true.

    Args:
        gradients: of this rank's parameters; None adds nothing.
        coordinates: this rank's place along the axes of data and tensor parallelism.
        counts: whether the copy of a parameter on this stage is the one that counts.
        device: where the sum is taken.

    Returns:
        A scalar in float64, whatever the gradients' types: of each gradient it is taken in float32, or its own if larger.
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
    """``g *= min(1, max_norm / (norm + 1e-6))`` in place, as ``torch.nn.utils.clip_grad_norm_`` has it."""
    scale(params, (max_norm / (norm + 1e-6)).clamp(max=1.0))


@torch.no_grad()
def scale(params: Iterable[nn.Parameter], factor: Tensor | float) -> None:
    """``g *= factor`` in place."""
    for here in _lists(p.grad for p in params):
        torch._foreach_mul_(here, factor.to(here[0].device, here[0].dtype) if isinstance(factor, Tensor) else factor)


@torch.no_grad()
def clip_by_value(params: Iterable[nn.Parameter], max_value: float) -> None:
    """``g = clamp(g, -max_value, max_value)`` in place."""
    for here in _lists(p.grad for p in params):
        torch._foreach_clamp_min_(here, -max_value)
        torch._foreach_clamp_max_(here, max_value)


def _lists(grads: Iterable[Tensor | None]) -> Iterable[list[Tensor]]:
    """The pieces that lie here, by device and type, so that a call for each list, and not for each gradient, does."""
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        if grad is not None and (here := local(grad)).numel():
            lists.setdefault((here.device, here.dtype), []).append(here)
    return lists.values()


@contextmanager
def by_lists(optimizer: Optimizer) -> Iterator[None]:
    """Let SGD, Adam and AdamW, where they are free to, step all DTensors on a CPU in one call, as they do on a GPU.

    A call for each takes four times as long for small ones. No optimizer steps tensors of several kinds in one call, which
    torch cannot do: DTensors of several meshes, or DTensors beside plain tensors.
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
    """Say what to do where an optimizer cannot step parameters that lie in pieces (torch's Adafactor, for one).

    Args:
        computed: whether the closure has returned: an error before that is the module's own.

    Raises:
        ValueError: instead of what torch raises for an operation that it does not have for DTensors.
    """
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        pieces = any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
        if computed() and pieces and any(word in str(error).lower() for word in _OF_DTENSORS):
            raise ValueError(
                f"{who}: {type(optimizer).__name__} cannot step parameters that lie in pieces on several processes (DTensor):"
                f" {first_line(error)} Take an optimizer that can, such as AdamW or SGD, or {who}(shard=False)"
                " without tensor parallelism."
            ) from error
        raise


def _may_list(group: dict[str, Any]) -> bool:
    params = group["params"]
    if group["fused"] or group["differentiable"]:
        return False
    return all(isinstance(p, DTensor) and p.device.type == "cpu" for p in params)


class Stash:
    """Gradients put aside; it stands in for the module when a precision plugin calls ``backward``."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._grads: list[tuple[nn.Parameter, Tensor]] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Put aside the gradients that passes in here leave; those from before stay where they are."""
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
        """Add what was put aside to the parameters' gradients, as a backward pass from ``loss`` would have."""
        for p, grad in self._grads:
            p.grad = grad if p.grad is None else p.grad + grad
        self._grads = []
