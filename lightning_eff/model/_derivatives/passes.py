"""Passes of an unchanged step whose loss can be differentiated several times."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_eff._core._branches.tracing import looked_at
from lightning_eff._core._run.error_text import first_line
from lightning_eff._core.session import Session
from lightning_eff._core.wrapping import unrounded


@dataclass
class Differentiation:
    """Derivatives of a loss that are computed within :func:`watched`.

    Attributes:
        loss: the loss to differentiate, shape ().
        reason: why it could not be differentiated so often, or an empty string.
    """

    loss: Tensor
    reason: str = ""


@contextmanager
def watched(loss: Tensor) -> Iterator[Differentiation]:
    """Find out whether the derivatives in this block exist; an error in them ends the block and becomes the reason.

    torch treats the result of a custom autograd function whose backward pass has no derivative as a constant, or raises
    only in a part of the graph that nothing needs, so a second derivative would be wrong without an error. The given loss
    is multiplied by a 1 that requires a gradient, so everything that passes back through the graph depends on it.
    """
    constant: list[str] = []
    found = Differentiation(loss * torch.ones((), dtype=loss.dtype, device=loss.device, requires_grad=True))
    with ExitStack() as scope:
        for node in _own_functions(loss):
            scope.callback(node.register_hook(_noting(type(node).__name__.removesuffix("Backward"), constant)).remove)
        try:
            yield found
        except (RuntimeError, ValueError) as e:
            found.reason = first_line(e)
    if constant:
        found.reason = f"the backward pass of {', '.join(constant)} has no derivative"


def _noting(name: str, found: list[str]) -> Any:
    def note(grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor | None, ...]) -> None:
        if any(g is not None and g.requires_grad for g in grad_outputs):
            for g in grad_inputs:
                constant = g is not None and not g.requires_grad
                raises = g is not None and g.grad_fn is not None and g.grad_fn.name() == "torch::autograd::Error"
                if (constant or raises) and name not in found:
                    found.append(name)

    return note


def _own_functions(loss: Tensor) -> list[Any]:
    """Return the nodes of custom autograd functions in the loss's graph."""
    found: list[Any] = []
    seen, todo = set[Any](), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            found.append(node)
        todo += [f for f, _ in node.next_functions]
    return found


@contextmanager
def differentiable(session: Session) -> Iterator[None]:
    """Run the module's own step in float32 or higher, with operations that can be differentiated several times, and undo
    it.
    """
    module = session.module
    with ExitStack() as scope:
        scope.enter_context(_in_full(module))
        scope.enter_context(looked_at(session, precision=False))
        scope.enter_context(unrounded())
        device = next((p.device.type for p in module.parameters()), "cpu")
        scope.enter_context(torch.autocast(device, enabled=False))
        scope.enter_context(sdpa_kernel(SDPBackend.MATH))
        if any(isinstance(m, nn.RNNBase) for m in module.modules()):
            scope.enter_context(torch.backends.cudnn.flags(enabled=False))
        for m in module.modules():
            if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse:  # a sparse gradient has no graph
                scope.callback(setattr, m, "sparse", True)
                m.sparse = False
        yield


@contextmanager
def _in_full(module: nn.Module) -> Iterator[None]:
    """Convert parameters and buffers below float32 to float32; afterwards restore their type, with the new values."""
    short = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point() and t.dtype.itemsize < 4]
    stored = [(t, t.data) for t in short]
    try:
        for t in short:
            t.data = t.data.float()
        yield
    finally:
        for t, data in stored:
            data.copy_(t.data)
            t.data = data


def unshortened(tensor: Tensor) -> Tensor:
    """Return a tensor of a batch in float32 if it has fewer bits, else unchanged."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize < 4 else tensor
