"""Labels drawn from the model itself at the loss calls of a step, as gradients at what the calls were given.

A loss of torch is the negative log-likelihood of a distribution of labels: of classes, of coins, of a normal or a Laplace
distribution around the prediction. Drawn from it, ``y'``, a loss ``L = sum_e w_e l_e`` has the Gauss-Newton matrix
``sum_e w_e E[d l_e(y') d l_e(y')^T]``: that of rows' gradients which are backpropagated from ``sum_e sqrt(w_e) d l_e(y')``,
draws being independent. Weights ``w_e`` hold whatever reduces the losses, in the call or after it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_eff._core.losses import SeenCall, counts_of

_OF_CLASSES = (F.cross_entropy, F.nll_loss)
_OF_COINS = (F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
_MOST_WORK = 2**27  # multiplications for which noise is made orthogonal


def weights_of(call: SeenCall, upstream: Tensor) -> Tensor:
    """``w_e``: the curvature that each element of a call gives the step's loss, in units of a log-likelihood's; >= 0.

    Args:
        call: one whose input lies in the loss's graph.
        upstream: the loss's gradient at what the call returned, of its shape.
    """
    units = curvature(call)
    if call.arguments["reduction"] == "mean":
        units = units / counts_of(call.fn, call.arguments, units).sum()
    return (units * upstream).clamp(min=0)  # a loss that is taken away has none


def curvature(call: SeenCall) -> Tensor:
    """How many log-likelihoods the loss of each element counts as, before it is reduced; of the elements' shape."""
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
    """``sqrt(w_e) d l_e(y') / d z`` with ``y'`` drawn from the model.

    Args:
        call: the call.
        weights: ``w_e``, of its elements' shape.
        generator: on the CPU.

    Returns:
        For each argument in a graph, predictions and, where the call is symmetric, perhaps targets: it, and the gradient.
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
    """A class for each row of probabilities (..., C), shape (...), long; the same on every device."""
    up_to = p.cumsum(dim=-1)
    height = _uniform(p.shape[:-1], generator).to(p).unsqueeze(-1) * up_to[..., -1:]
    return torch.searchsorted(up_to, height, right=True).squeeze(-1).clamp(max=p.shape[-1] - 1)


def balanced_noise(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Random numbers of mean 0 and variance 1 without correlations, whose rows ``e`` have just the ``sum e e^T`` expected.

    For R rows of d <= R it is ``R I`` exactly, so that a linear map's factor has no noise of sampling. For very
    many numbers they are signs.

    Args:
        shape: (..., d).
        generator: on the CPU.
    """
    d = shape[-1] if len(shape) > 1 else 1
    rows = math.prod(shape) // max(d, 1)
    if min(rows, d) <= 1 or rows * d * min(rows, d) > _MOST_WORK:
        return signs(shape, generator)
    q, r = torch.linalg.qr(torch.randn(max(rows, d), min(rows, d), generator=generator, dtype=torch.float64))
    q = q * r.diagonal().sign() * max(rows, d) ** 0.5  # of all orthonormal columns alike
    return (q if rows >= d else q.T).reshape(shape)


def signs(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """+1 or -1, one as likely as the other."""
    return (_uniform(shape, generator) < 0.5).double() * 2 - 1


def _uniform(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)
