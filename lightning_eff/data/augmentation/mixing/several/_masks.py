"""Masks with which a teacher recognises the classes of several images in their mixture, and the search for them."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST, _MOST = 1e-4, 2000.0  # bounds of the length of a step


def masks_of(m: Tensor, side: tuple[int, int]) -> Tensor:
    """Return ``M_k = sigmoid(up(m_k)) / sum_j sigmoid(up(m_j))``, which sum to 1 in each pixel: (B, K, H, W).

    Args:
        m: the parameters of the masks, (B, K, h, w). ``up`` is bilinear interpolation.
        side: H and W.
    """
    masks = F.interpolate(m, side, mode="bilinear", align_corners=False).sigmoid()
    return masks / masks.sum(dim=1, keepdim=True)


def blended(x: Tensor, masks: Tensor) -> Tensor:
    """Return ``sum_k M_k x_k``, (B, C, H, W), for ``x`` (B, K, C, H, W) and masks (B, K, H, W)."""
    return (masks[:, :, None] * x).sum(dim=1)


def smoothed(g: Tensor, sigma: float) -> Tensor:
    """Smooth each map of ``g`` (B, K, h, w) with a Gaussian filter over ``5 sigma`` pixels, padded with zeros."""
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
    """Return ``KL(y || softmax(f)) + lambda_s mean |M (M - 1)|`` of each sample, (B,).

    Args:
        scores: ``f``, the teacher's scores for the mixtures, (B, C).
        target: ``y``, with sum 1, (B, C).
        masks: ``M``, (B, K, H, W). The second term is 0 if each pixel is taken from one image.
        sparsity: ``lambda_s``.
    """
    divergence = F.kl_div(scores.log_softmax(dim=1), target, reduction="none").sum(dim=1)
    return divergence + sparsity * (masks * (1 - masks)).mean(dim=(1, 2, 3))


def newton(m: Tensor, value: Tensor, gradient: Tensor, sigma: float) -> Tensor:
    """Return ``m - |L| / <g, G g> * G g`` for each sample, the zero of a linear ``L``: (B, K, h, w).

    The factor is clamped to [0.0001, 2000].

    Args:
        m: (B, K, h, w).
        value: ``L``, (B,).
        gradient: ``g``, the gradient of ``L`` with respect to ``m``.
        sigma: the standard deviation of the filter ``G``, see :func:`smoothed`.
    """
    direction = smoothed(gradient, sigma)
    length = value.abs() / ((gradient * direction).sum(dim=(1, 2, 3)) + 1e-10)
    return m - length.clamp(_LEAST, _MOST)[:, None, None, None] * direction


def sees(scores: Tensor, wanted: Tensor) -> Tensor:
    """Return whether the ``wanted`` classes, (B, C) bool, have the largest of each sample's scores (B, C): (B,)."""
    low = scores.masked_fill(~wanted, math.inf).amin(dim=1)
    high = scores.masked_fill(wanted, -math.inf).amax(dim=1)
    return (low > high) & scores.isfinite().all(dim=1)


@dataclass(frozen=True)
class Found:
    """The result of :func:`search`.

    Attributes:
        masks: (B, K, H, W).
        accepted: for which samples the teacher recognises the classes of all images, (B,).
        seen: the most likely class of each accepted mixture, (B,).
        passes: the number of passes of the teacher.
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
    """Find masks with which the teacher recognises the classes of all images, by steps of :func:`newton`.

    The search starts from uniform masks and minimises :func:`objective`. Each pass takes the samples that are not yet accepted.
    The search ends when at most the fraction ``tolerance`` of the samples is left, or after ``iterations`` steps.

    Args:
        teacher: returns scores (B, C) of images, with a gradient.
        x: the images to mix, (B, K, C', H, W).
        target: ``y``, (B, C), above 0 for the classes of the images.
        mask: the number of rows and columns of a mask before it is enlarged.
        sigma: the standard deviation of the gradient's filter.
        sparsity: ``lambda_s``.
        iterations: the largest number of steps.
        tolerance: the fraction of samples that may be left.
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
        if passes > 1:  # the uniform masks of the first pass are never accepted
            accepted[left] = sees(scores.detach(), wanted[left])
            seen[left] = scores.detach().argmax(dim=1)
            if int((~accepted).sum()) <= int(tolerance * size) or passes > iterations:
                return Found(masks_of(m, side), accepted, seen, passes)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        going = ~accepted[left]
        m[left[going]] = newton(leaf.detach(), value.detach(), gradient, sigma)[going]
        left = left[going]
