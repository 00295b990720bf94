"""Passes of an unchanged step whose loss can be differentiated again and again."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_eff._core._branches.tracing import looked_at
from lightning_eff._core.session import Session
from lightning_eff._core.wrapping import unrounded


@contextmanager
def watched(loss: Tensor) -> Iterator[tuple[Tensor, list[str]]]:
    """The loss, and the names of functions written by hand in its graph whose backward pass turns out to have no derivative.

    torch hands on what such a function returns as a constant, or raises in a part of the graph that nothing asks for: a second
    derivative would then be wrong in silence. The loss that is given is a multiple of 1 that takes a gradient itself, so that
    all that is handed back through the graph depends on it.
    """
    found: list[str] = []
    with ExitStack() as scope:
        for node in _own_functions(loss):
            scope.callback(node.register_hook(_noting(type(node).__name__.removesuffix("Backward"), found)).remove)
        yield loss * torch.ones((), dtype=loss.dtype, device=loss.device, requires_grad=True), found


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
    """The nodes of functions written by hand that the loss was computed by."""
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
    """The module's own step, in float32 or more, by operations that can be differentiated again and again; without a trace."""
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
            if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse:  # whose gradient has no graph
                scope.callback(setattr, m, "sparse", True)
                m.sparse = False
        yield


@contextmanager
def _in_full(module: nn.Module) -> Iterator[None]:
    """Parameters and buffers of fewer bits than float32 are float32; afterwards they have their type, and the new values."""
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
    """A tensor of a batch in float32, where it has fewer bits."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize < 4 else tensor
