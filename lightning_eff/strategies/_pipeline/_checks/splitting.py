"""Tries at setup whether PyTorch's split backward pass, for inputs and then for weights, computes a stage's gradients.

PyTorch follows the graph from the weights to the stage's input. If several blocks use another activation with a gradient (a
conditioning, a skip from the embedding), that activation is not on this path. Its graph is freed after the first block.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

_RELATIVE = 1e-3  # allowed difference of gradients that were summed in another order


def splits(output: Tensor, received: Tensor, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether the split backward pass of a stage computes the same gradients as the whole one.

    Args:
        output: the stage's hidden state, or the loss. Its graph is consumed.
        received: the stage's input, a leaf.
        parameters: parameters that can get gradients. Their gradients do not change.
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
