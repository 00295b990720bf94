"""Masks with which a teacher sees the classes of several images in their mixture, and how they are looked for."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST, _MOST = 1e-4, 2000.0  # of a step's length


def masks_of(m: Tensor, side: tuple[int, int]) -> Tensor:
    """``M_k = sigmoid(up(m_k)) / sum_j sigmoid(up(m_j))``: they sum to 1 in each pixel. (B, K, H, W).

    Args:
        m: what is looked for, (B, K, h, w); ``up`` enlarges it, bilinear.
        side: H and W.
    """
    masks = F.interpolate(m, side, mode="bilinear", align_corners=False).sigmoid()
    return masks / masks.sum(dim=1, keepdim=True)


def blended(x: Tensor, masks: Tensor) -> Tensor:
    """``sum_k M_k x_k``, (B, C, H, W), of ``x`` (B, K, C, H, W) and masks (B, K, H, W)."""
    return (masks[:, :, None] * x).sum(dim=1)


def smoothed(g: Tensor, sigma: float) -> Tensor:
    """Each map of ``g`` (B, K, h, w) after a Gaussian of the deviation ``sigma`` over ``5 sigma`` pixels; zeros lie around."""
    if sigma == 0:
        return g
    half = int(5 * sigma) // 2
    at = torch.arange(-half, half + 1, dtype=g.dtype, device=g.device)
    kernel = torch.exp(-((at / sigma) ** 2) / 2)
    kernel = kernel / kernel.sum()
    maps = g.flatten(0, 1)[:, None]
    maps = F.conv2d(maps, kernel[None, None, :, None], padding=(half, 0))
    return F.conv2d(maps, kernel[None, None, None], padding=(0, half)).reshape(g.shape)


def objective(scores: Tensor, target: Tensor, masks: Tensor, sparsity: float) -> Tensor:
    """``KL(y || softmax(f)) + lambda_s mean |M (M - 1)|`` of each sample, (B,).

    Args:
        scores: ``f``, of the mixtures, (B, C).
        target: ``y``, of sum 1, (B, C).
        masks: ``M``, (B, K, H, W): the second term is 0 where each pixel is of one image.
        sparsity: ``lambda_s``.
    """
    divergence = F.kl_div(scores.log_softmax(dim=1), target, reduction="none").sum(dim=1)
    return divergence + sparsity * (masks * (1 - masks)).mean(dim=(1, 2, 3))


def newton(m: Tensor, value: Tensor, gradient: Tensor, sigma: float) -> Tensor:
    """``m - |L| / <g, G g> * G g`` for each sample, where a linear ``L`` would be 0: (B, K, h, w).

    Args:
        m: (B, K, h, w).
        value: ``L``, (B,).
        gradient: ``g``, of ``L`` in ``m``.
        sigma: of ``G``, :func:`smoothed`. The factor is held between 0.0001 and 2000.
    """
    direction = smoothed(gradient, sigma)
    length = value.abs() / ((gradient * direction).sum(dim=(1, 2, 3)) + 1e-10)
    return m - length.clamp(_LEAST, _MOST)[:, None, None, None] * direction


def sees(scores: Tensor, wanted: Tensor) -> Tensor:
    """Whether the largest of each sample's scores (B, C) are those of the ``wanted`` classes, (B, C) of bool: (B,)."""
    low = scores.masked_fill(~wanted, math.inf).amin(dim=1)
    high = scores.masked_fill(wanted, -math.inf).amax(dim=1)
    return (low > high) & scores.isfinite().all(dim=1)


@dataclass(frozen=True)
class Found:
    """What :func:`search` found.

    Attributes:
        masks: (B, K, H, W).
        accepted: for which samples the teacher sees the classes of all images, (B,).
        seen: the class that it finds most likely in each accepted mixture, (B,).
        passes: of the teacher.
    """

    masks: Tensor
    accepted: Tensor
    seen: Tensor
    passes: int


def search(
    teacher: Callable[[Tensor], Tensor],
    x: Tensor,
    target: Tensor,
    *,
    mask: int,
    sigma: float,
    sparsity: float,
    iterations: int,
    tolerance: float,
) -> Found:
    """Masks with which the teacher sees all images' classes, from even ones on, by :func:`newton` on :func:`objective`.

    Each pass takes the samples that are not accepted yet, and steps on from where the teacher did not see their classes. It
    ends when at most ``tolerance`` of the samples are left, or after so many ``iterations``.

    Args:
        teacher: of images, scores (B, C), with a gradient.
        x: the images that are mixed, (B, K, C', H, W).
        target: ``y``, (B, C), above 0 for the classes of the images.
        mask: rows and columns of what is enlarged.
        sigma: of the gradient's smoothing.
        sparsity: ``lambda_s``.
        iterations: steps, at most.
        tolerance: a share of the samples.
    """
    side, size = (x.shape[-2], x.shape[-1]), len(x)
    m = x.new_zeros(size, x.shape[1], mask, mask)
    accepted = torch.zeros(size, dtype=torch.bool, device=x.device)
    seen, left, wanted, passes = accepted.long(), torch.arange(size, device=x.device), target > 0, 0
    while True:
        with torch.enable_grad():
            leaf = m[left].requires_grad_()
            masks = masks_of(leaf, side)
            scores = teacher(blended(x[left], masks))
            value = objective(scores, target[left], masks, sparsity)
        passes += 1
        if passes > 1:  # even masks are where it begins, and are not looked at
            accepted[left] = sees(scores.detach(), wanted[left])
            seen[left] = scores.detach().argmax(dim=1)
            if int((~accepted).sum()) <= int(tolerance * size) or passes > iterations:
                return Found(masks_of(m, side), accepted, seen, passes)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        going = ~accepted[left]
        m[left[going]] = newton(leaf.detach(), value.detach(), gradient, sigma)[going]
        left = left[going]
