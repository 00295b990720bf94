"""Checks that a split module computes the loss and all gradients of the whole one, on every rank."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_eff.strategies._tensor.trace import Record

# Relative errors that always count as rounding, by the lowest precision of a module's computation. A wrong split has errors
# of about 1 in the affected gradients.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-4, torch.float16: 0.01, torch.bfloat16: 0.03}
_TF32 = 2.0**-10
_TIMES = 8.0  # allowed difference, as a multiple of the effect of artificial rounding errors
_FLOOR = 1e-3  # of the mean gradient norm


@dataclass(frozen=True)
class Finding:
    """A difference between two executions.

    Attributes:
        message: description of the difference, or empty.
        suspect: dotted path of the module at fault, if known.
    """

    message: str = ""
    suspect: str = ""


def rounding(dtype: torch.dtype, device: str) -> float:
    """Return the relative rounding error of a product in ``dtype``."""
    if dtype is torch.float32 and device == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return _TF32
    return torch.finfo(dtype).eps


def tolerance(dtype: torch.dtype, device: str) -> float:
    """Return the relative error that always counts as rounding."""
    return max(_TOLERANCE.get(dtype, 0.1), 10 * rounding(dtype, device))


@dataclass(frozen=True)
class Noise:
    """The effect of rounding errors on a module: the changes of its loss, and of the norms of gradients and buffers."""

    loss: float
    grads: dict[str, float]
    buffers: dict[str, float]


def noise(before: Record, jittered: Record) -> Noise:
    """Compute the noise from two executions of the whole module, the second with artificial errors."""
    return Noise(
        abs(before.loss - jittered.loss),
        {name: _distance(jittered.grads[name], grad) for name, grad in before.grads.items() if name in jittered.grads},
        {name: _distance(jittered.buffers[name], b) for name, b in before.buffers.items() if name in jittered.buffers},
    )


def local_part(whole: Tensor, param: nn.Parameter) -> Tensor:
    """Return the part of ``whole`` that this rank has of ``param``."""
    if not isinstance(param, DTensor):
        return whole
    return distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None).to_local()


def local_grad(param: nn.Parameter, grad: Tensor) -> Tensor:
    """Return this rank's part of a gradient, in the parameter's placement."""
    if isinstance(param, DTensor) and isinstance(grad, DTensor):
        return grad.redistribute(placements=param.placements).to_local()
    return grad


def compare(root: nn.Module, before: Record, after: Record, mesh: DeviceMesh, errors: Noise) -> Finding:
    """Return the difference between the whole module's execution and the split one's, equal on all ranks of ``mesh``.

    Args:
        root: the split module.
        before: the whole module's execution.
        after: the split module's execution.
        mesh: the tensor-parallel ranks.
        errors: the effect of rounding.
    """
    tol = tolerance(before.dtype, mesh.device_type)
    mine = Finding()
    if not abs(before.loss - after.loss) <= max(tol * max(abs(before.loss), tol), _TIMES * errors.loss):
        message = f"the loss is {after.loss:.7g} where the whole module's is {before.loss:.7g}"
        mine = Finding(message, _diverges(before, after, tol))
    mean = sum(float(g.norm()) for g in before.grads.values()) / max(len(before.grads), 1)
    worst, worst_error = "", 0.0
    for name, param in root.named_parameters():
        reference, grad = before.grads.get(name), after.grads.get(name)
        if (reference is None) != (grad is None):
            worst, worst_error = name, math.inf
        elif reference is not None and grad is not None:
            norm = max(float(reference.double().norm()), _FLOOR * mean, 1e-30)
            error = _distance(local_grad(param, grad), local_part(reference, param))
            if not error <= max(tol * norm, _TIMES * errors.grads.get(name, 0.0)) and not error / norm <= worst_error:
                worst, worst_error = name, error / norm
    if worst and not mine.message:
        suspect = _diverges(before, after, tol) or worst.rpartition(".")[0]
        mine = Finding(f"the gradient of {worst!r} is off by {worst_error:.2g} of its norm", suspect)
    if not mine.message:
        mine = _of_buffers(before, after, tol, errors)
    group = mesh.get_group()
    findings: list[Finding] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(findings, mine, group=group)
    return next((finding for finding in findings if finding.message), Finding())


def _of_buffers(before: Record, after: Record, tol: float, errors: Noise) -> Finding:
    """Return the difference in a buffer, such as statistics of a part of the features behind a split layer."""
    for name in dict.fromkeys((*before.buffers, *after.buffers)):
        whole, found = before.buffers.get(name), after.buffers.get(name)
        path = name.rpartition(".")[0]
        if whole is None or found is None:
            return Finding(f"the step changes the buffer {name!r} only {'split' if whole is None else 'whole'}", path)
        error, norm = _distance(found, whole), float(whole.double().norm())
        if not error <= max(tol * norm, _TIMES * errors.buffers.get(name, 0.0), 1e-30):
            return Finding(
                f"what the step leaves in the buffer {name!r} is off by {error / max(norm, 1e-30):.2g}", path
            )
    return Finding()


def _distance(value: Tensor, reference: Tensor) -> float:
    if value.shape != reference.shape:
        return math.inf
    return float((value.double() - reference.double()).norm())


def _diverges(before: Record, after: Record, tol: float) -> str:
    """Return the first module whose output has the same shape as in the whole module but other values."""
    for old, new in zip(before.prints, after.prints, strict=False):
        if old.path != new.path:
            return ""
        if old.shape == new.shape and abs(old.norm - new.norm) + abs(old.total - new.total) > tol * (
            2 * old.norm + abs(old.total)
        ):
            return new.path
    return ""
