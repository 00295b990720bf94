"""Draws labels from the model at the loss calls of a step, and computes the gradients of these losses.

torch's losses are negative log-likelihoods of a distribution of labels: over classes, a Bernoulli distribution, or a normal or
Laplace distribution around the prediction. Let ``y'`` be drawn from it. The Gauss-Newton matrix of a loss ``L = sum_e w_e l_e``
is ``sum_e w_e E[d l_e(y') d l_e(y')^T]``. Since draws are independent, it is that of the rows' gradients from the
backpropagation of ``sum_e sqrt(w_e) d l_e(y')``. The weights ``w_e`` include every reduction of the losses.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_eff._core.losses import SeenCall, counts_of

_OF_CLASSES = (F.cross_entropy, F.nll_loss)
_OF_COINS = (F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
_MOST_WORK = 2**27  # largest number of multiplications to make noise orthogonal


def weights_of(call: SeenCall, upstream: Tensor) -> Tensor:
    """Return ``w_e`` >= 0, the curvature of each element in the step's loss, in units of a log-likelihood's curvature.

    Args:
        call: a call whose input is in the loss's graph.
        upstream: the loss's gradient at the call's result, in its shape.
    """
    units = curvature(call)
    if call.arguments["reduction"] == "mean":
        units = units / counts_of(call.fn, call.arguments, units).sum()
    return (units * upstream).clamp(min=0)  # a subtracted loss has none


def curvature(call: SeenCall) -> Tensor:
    """Return the curvature of each element's unreduced loss in units of a log-likelihood's, in the elements' shape."""
    fn, arguments = call.fn, call.arguments
    z, target, weight = arguments["input"].detach(), arguments["target"].detach(), arguments.get("weight")
    if fn in _OF_CLASSES:
        dim = 1 if z.ndim > 1 else 0
        elements = z.select(dim, 0)
        smoothing = arguments.get("label_smoothing", 0.0)
        if target.is_floating_point():  # sum_c omega_c t_c
            soft = target.to(elements) * (1 - smoothing) + smoothing / z.shape[dim]
            return soft.movedim(dim, -1).mul(1.0 if weight is None else weight.to(elements)).sum(dim=-1)
        valid = target != arguments["ignore_index"]
        if weight is None:
            return valid.to(elements)
        of_target = weight[target.masked_fill(~valid, 0)].to(elements)
        return ((1 - smoothing) * of_target + smoothing * weight.mean().to(elements)) * valid
    elements = torch.ones(torch.broadcast_shapes(z.shape, target.shape), dtype=z.dtype, device=z.device)
    elements = elements if weight is None else elements * weight
    if fn in _OF_COINS:
        positive = arguments.get("pos_weight")
        return elements if positive is None else elements * (1 + (positive - 1) * target)
    if fn is F.mse_loss:  # (f - y)^2 = 2 * (f - y)^2 / 2
        return 2 * elements
    return elements / arguments["beta"] if arguments.get("beta") else elements  # (f - y)^2 / 2 beta about zero


def sampled_gradients(call: SeenCall, weights: Tensor, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Return ``sqrt(w_e) d l_e(y') / d z`` with ``y'`` drawn from the model.

    Args:
        call: the call.
        weights: ``w_e`` in the elements' shape.
        generator: a generator on the CPU.

    Returns:
        Pairs of an argument in a graph and its gradient: predictions, and for symmetric calls possibly targets.
    """
    fn, z, target = call.fn, call.arguments["input"], call.arguments["target"]
    root, values = weights.sqrt(), z.detach()
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    if fn in _OF_CLASSES:
        dim = 1 if z.ndim > 1 else 0
        rows = values.movedim(dim, -1)
        p = rows.softmax(dim=-1) if fn is F.cross_entropy else rows.exp()
        drawn = F.one_hot(draw_classes(p, generator), p.shape[-1]).to(p.dtype)
        # p - e_y' of logits, -e_y' of log-probabilities
        residual = p - drawn if fn is F.cross_entropy else -drawn
        return [(z, (residual * root.unsqueeze(-1)).movedim(-1, dim).to(z.dtype))]
    if fn in _OF_COINS:
        p = values if fn is F.binary_cross_entropy else values.sigmoid()
        drawn = _uniform(p.shape, generator).to(p) < p
        residual = p - drawn.to(p.dtype)
        if fn is F.binary_cross_entropy:
            residual = residual / (p * (1 - p)).clamp(min=1e-12)
        return [(z, (residual * root).sum_to_size(z.shape).to(z.dtype))]
    if fn is F.l1_loss:  # d|f - y'| is +1 or -1
        residual = signs(weights.shape, generator).to(weights)
    else:  # f - y' of a normal distribution
        residual = balanced_noise(weights.shape, generator).to(weights)
    both = [(z, residual * root), (target, -residual * root)]
    return [(x, gradient.sum_to_size(x.shape).to(x.dtype)) for x, gradient in both if x.requires_grad]


def draw_classes(p: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a class for each row of probabilities (..., C), shape (...), long; the same on every device."""
    up_to = p.cumsum(dim=-1)
    height = _uniform(p.shape[:-1], generator).to(p).unsqueeze(-1) * up_to[..., -1:]
    return torch.searchsorted(up_to, height, right=True).squeeze(-1).clamp(max=p.shape[-1] - 1)


def balanced_noise(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return uncorrelated random numbers of mean 0 and variance 1 whose rows ``e`` have the expected ``sum e e^T`` exactly.

    For R rows of d <= R it is ``R I``, so that a linear layer's factor has no sampling noise. For very many numbers the
    result has random signs instead.

    Args:
        shape: (..., d).
        generator: a generator on the CPU.
    """
    d = shape[-1] if len(shape) > 1 else 1
    rows = math.prod(shape) // max(d, 1)
    if min(rows, d) <= 1 or rows * d * min(rows, d) > _MOST_WORK:
        return signs(shape, generator)
    q, r = torch.linalg.qr(torch.randn(max(rows, d), min(rows, d), generator=generator, dtype=torch.float64))
    q = q * r.diagonal().sign() * max(rows, d) ** 0.5  # uniform over orthonormal columns
    return (q if rows >= d else q.T).reshape(shape)


def signs(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return +1 or -1 with equal probability."""
    return (_uniform(shape, generator) < 0.5).double() * 2 - 1


def _uniform(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)
