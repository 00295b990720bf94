"""Whether PyTorch's split backward pass, inputs apart from weights, computes a stage's gradients; tried at setup.

It follows the graph from the weights to what the stage received. An activation with a trainable history of its own that
several blocks are given (a conditioning, a skip from the embedding) lies on no such way, and its graph is let go of after
the first of them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

_RELATIVE = 1e-3  # by which gradients that were summed up in another order may differ


def splits(output: Tensor, received: Tensor, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether the split backward pass of a stage gives the gradients of the whole one.

    Args:
        output: the stage's hidden state, or the loss; its graph is used up.
        received: the hidden state that it was given, a leaf.
        parameters: those that may get gradients; theirs are left as they are.
    """
    given = torch.ones_like(output)
    wanted = torch.autograd.grad(output, [received, *parameters], given, retain_graph=True, allow_unused=True)
    before = [p.grad for p in parameters]
    last = output.ndim == 0
    if output._is_view():  # PyTorch detaches it in place
        output = output.clone()
    try:
        for p in parameters:
            p.grad = None
        received.grad = None
        grads, groups = stage_backward_input([output], None if last else [given], [received], iter(parameters))
        stage_backward_weight(iter(parameters), groups)
        return all(map(_same, wanted, [grads[0], *(p.grad for p in parameters)]))
    except (RuntimeError, KeyError):
        return False
    finally:
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad
        received.grad = None


def _same(wanted: Tensor | None, found: Tensor | None) -> bool:
    if wanted is None or found is None:
        return all(g is None or not bool(g.any()) for g in (wanted, found))
    return torch.allclose(wanted, found, rtol=_RELATIVE, atol=_RELATIVE * float(wanted.abs().max()) + 1e-12)
