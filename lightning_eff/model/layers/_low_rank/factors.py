"""The best factors of a matrix, from its singular values (Eckart & Young 1936), and the rank that is needed."""

import torch
from torch import Tensor


def at_least_single(matrix: Tensor) -> Tensor:
    """``matrix`` in float32, or unchanged if it is float64."""
    return matrix if matrix.dtype == torch.float64 else matrix.float()


def rank_of_energy(singular_values: Tensor, energy: float) -> int:
    """The smallest r whose singular values hold this fraction of the sum of all squares.

    ``min r: sum_{i <= r} s_i^2 >= energy sum_i s_i^2``; 1 for a matrix of zeros.

    Args:
        singular_values: shape (R,), in descending order.
        energy: in (0, 1]; 1 needs all singular values that are not zero.
    """
    squares = singular_values.double().square()
    total = float(squares.sum())
    if total == 0.0:
        return 1
    reached = squares.cumsum(0) >= energy * total * (1.0 - 1e-12)
    return int(reached.float().argmax()) + 1 if bool(reached.any()) else len(singular_values)


def energy_of_rank(singular_values: Tensor, rank: int) -> float:
    """``sum_{i <= r} s_i^2 / sum_i s_i^2``; 1 for a matrix of zeros."""
    squares = singular_values.double().square()
    total = float(squares.sum())
    return float(squares[:rank].sum()) / total if total > 0.0 else 1.0


def decomposition(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``U, s, V^T`` of a matrix (m, n), in float32 or float64."""
    u, s, vh = torch.linalg.svd(at_least_single(matrix.detach()), full_matrices=False)
    return u, s, vh


def factors(u: Tensor, s: Tensor, vh: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """``A = U_r sqrt(S_r)`` and ``B = sqrt(S_r) V_r^T``: the product of rank r that is nearest to the matrix.

    Both factors have the same singular values, so optimizer steps move them equally fast (Khodak et al. 2021, section 3.1).

    Args:
        u: shape (m, R).
        s: shape (R,), in descending order.
        vh: shape (R, n).
        rank: r, in [1, R].

    Returns:
        A of shape (m, r) and B of shape (r, n).
    """
    # W ~ (U_r S_r^(1/2)) (S_r^(1/2) V_r^T)
    root = s[:rank].sqrt()
    return u[:, :rank] * root, root[:, None] * vh[:rank]
