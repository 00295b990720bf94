"""torch's backward passes expressed by graph edges, within which torch function modes stay active."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


def backward_by_edges(
    tensors: Any, gradient: Any = None, retain_graph: bool | None = None, create_graph: bool = False, **kwargs: Any
) -> None:
    """Call ``torch.autograd.backward`` with graph edges, for which torch does not suspend modes as it does for tensors."""
    tensors = (tensors,) if isinstance(tensors, Tensor | GradientEdge) else tuple(tensors)
    gradients = kwargs.pop("grad_tensors", gradient)
    gradients = (gradients,) * len(tensors) if gradients is None or isinstance(gradients, Tensor) else gradients
    inputs = kwargs.pop("inputs", None)
    torch.autograd.backward(
        [t if isinstance(t, GradientEdge) else get_gradient_edge(t) for t in tensors],
        [
            torch.ones_like(t) if g is None and isinstance(t, Tensor) and t.numel() == 1 else g
            for t, g in zip(tensors, gradients, strict=True)
        ],
        retain_graph=retain_graph,
        create_graph=create_graph,
        inputs=None if inputs is None else [t if isinstance(t, GradientEdge) else get_gradient_edge(t) for t in inputs],
        **kwargs,
    )


def grad_by_edges(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """Call ``torch.autograd.grad`` with graph edges, for which torch does not suspend modes as it does for tensors."""
    outputs, inputs = ((t,) if isinstance(t, Tensor | GradientEdge) else tuple(t) for t in (outputs, inputs))
    given = (grad_outputs,) * len(outputs) if grad_outputs is None or isinstance(grad_outputs, Tensor) else grad_outputs
    found = torch.autograd.grad(
        [t if isinstance(t, GradientEdge) else get_gradient_edge(t) for t in outputs],
        [t if isinstance(t, GradientEdge) else get_gradient_edge(t) for t in inputs],
        [
            torch.ones_like(t) if g is None and isinstance(t, Tensor) and t.numel() == 1 else g
            for t, g in zip(outputs, given, strict=True)
        ],
        retain_graph=retain_graph,
        create_graph=create_graph,
        allow_unused=allow_unused or materialize_grads,
        is_grads_batched=is_grads_batched,
    )
    if not materialize_grads:
        return found
    return tuple(torch.zeros_like(t) if g is None else g for t, g in zip(inputs, found, strict=True))
