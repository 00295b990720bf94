"""``H g`` for inverse Hessians from pairs of a direction and its curvature, by the two rules of Berahas et al. 2022.

Both rules need only inner products. A vector is represented by its coordinates in the basis ``[g, s_1 .. s_m, y_1 .. y_m]``,
of which only the Gram matrix is needed.
"""

import torch
from torch import Tensor


@torch.no_grad()
def lbfgs_weights(gram: Tensor, *, epsilon: float) -> tuple[Tensor, int]:
    """Return ``H g`` of the two-loop recursion in coordinates of ``[g, s_1 .. s_m, y_1 .. y_m]``.

    Pairs are used in order, so the newest one, ``m``, satisfies the secant equation ``H y_m = s_m``. A pair counts if
    ``s^T y >= epsilon ||s||^2``, which keeps ``H`` positive definite. ``H_0 = (s^T y / y^T y) I`` from the newest valid pair.

    Args:
        gram: the products of ``[g, S, Y]``, shape (1 + 2m, 1 + 2m), float64.
        epsilon: > 0.

    Returns:
        The coordinates, shape (1 + 2m,), and how many pairs count. With none, ``H`` is the identity.
    """
    m = len(gram) // 2
    counting = [i for i in range(m) if gram[1 + i, 1 + m + i] >= epsilon * gram[1 + i, 1 + i] > 0]
    q = torch.zeros_like(gram[0])
    q[0] = 1.0
    alphas: dict[int, Tensor] = {}
    for i in reversed(counting):
        s, y = 1 + i, 1 + m + i
        # α_i = s_iᵀ q / s_iᵀ y_i;  q ← q − α_i y_i
        alphas[i] = gram[s] @ q / gram[s, y]
        q[y] -= alphas[i]
    if counting:
        s, y = 1 + counting[-1], 1 + m + counting[-1]
        q = q * gram[s, y] / gram[y, y]
    for i in counting:
        s, y = 1 + i, 1 + m + i
        # β = y_iᵀ r / s_iᵀ y_i;  r ← r + (α_i − β) s_i
        q[s] += alphas[i] - gram[y] @ q / gram[s, y]
    return q, len(counting)


@torch.no_grad()
def lsr1_weights(gram: Tensor, *, epsilon: float) -> tuple[Tensor, int]:
    """Return ``H g`` of symmetric rank-one updates in coordinates of ``[g, s_1 .. s_m, y_1 .. y_m]``.

    ``H <- H + v v^T / v^T y`` with ``v = s - H y`` if ``|v^T y| >= epsilon ||v|| ||y||``; otherwise the pair is skipped. On a
    quadratic all valid pairs satisfy ``H y = s``, and one pair per dimension makes ``H`` its inverse Hessian. ``H`` can be
    indefinite. It starts as the absolute value of ``(s^T y / y^T y) I`` of the last pair.

    Args and returns as :func:`lbfgs_weights`.
    """
    m = len(gram) // 2
    last = gram[m, 2 * m].abs() / gram[2 * m, 2 * m]
    first = last if bool(last.isfinite()) and bool(last > 0) else torch.ones_like(last)
    updates: list[tuple[Tensor, Tensor]] = []

    def times(x: Tensor) -> Tensor:  # H x, of coordinates
        return first * x + sum((v * (v @ gram @ x) / denominator for v, denominator in updates), torch.zeros_like(x))

    unit = torch.eye(len(gram), dtype=gram.dtype)
    for i in range(m):
        s, y = unit[1 + i], unit[1 + m + i]
        v = s - times(y)
        denominator = v @ gram @ y
        length = (v @ gram @ v).clamp(min=0).sqrt() * gram[1 + m + i, 1 + m + i].sqrt()
        if denominator.abs() >= epsilon * length > 0:
            updates.append((v, denominator))
    return times(unit[0]), len(updates)
