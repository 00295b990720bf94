"""The nearest product of two block-diagonal matrices with permutations (Dao et al. 2022, arXiv:2204.00595).

The inputs of a matrix W (N, K) are divided into k runs, and its outputs into l classes: output ``t l + i`` is the t-th of
class i. In ``W ~ Q L P R``,

    R (k, l r, K / k):  block j computes l r numbers from the j-th run of inputs, r for each class of outputs
    P:                  number (j, i, s) of the k l r becomes number (i, j, s)
    L (l, N / l, k r):  block i computes the N / l outputs of its class from its k r numbers
    Q:                  output (i, t) becomes number t l + i

The part of the product at class i and run j is ``L[i, :, j] R[j, i]``, any matrix of rank r. The nearest product therefore
has the nearest matrix of rank r in each part: its r largest singular values (Dao et al. 2022, theorem 1, for r = 1).
"""

import torch
from torch import Tensor


def at_least_single(matrix: Tensor) -> Tensor:
    """``matrix`` in float32, or unchanged if it is float64."""
    return matrix if matrix.dtype == torch.float64 else matrix.float()


def num_weights(outputs: int, inputs: int, blocks: tuple[int, int], rank: int) -> int:
    """``r (l K + k N)``, the number of elements of both factors.

    Args:
        outputs: N.
        inputs: K.
        blocks: l and k, the numbers of classes of outputs and of runs of inputs.
        rank: r.
    """
    classes, runs = blocks
    return rank * (classes * inputs + runs * outputs)


def project(matrix: Tensor, blocks: tuple[int, int], rank: int) -> tuple[Tensor, Tensor]:
    """The factors L and R whose product is nearest to ``matrix`` in the sum of squares.

    Args:
        matrix: W of shape (N, K); l divides N and k divides K.
        blocks: l and k.
        rank: r, at most min(N / l, K / k).

    Returns:
        L of shape (l, N / l, k r) and R of shape (k, l r, K / k), in float32 or float64. The singular values are split evenly
        between the two.
    """
    (rows, columns), (n, m) = blocks, matrix.shape
    # (N / l, l, k, K / k) -> (l, k, N / l, K / k)
    parts = at_least_single(matrix.detach()).reshape(n // rows, rows, columns, m // columns).permute(1, 2, 0, 3)
    u, s, vh = torch.linalg.svd(parts, full_matrices=False)
    root = s[..., :rank].sqrt()
    left = u[..., :rank] * root.unsqueeze(-2)  # (l, k, N / l, r)
    right = root.unsqueeze(-1) * vh[..., :rank, :]  # (l, k, r, K / k)
    return (
        left.permute(0, 2, 1, 3).reshape(rows, n // rows, columns * rank),
        right.permute(1, 0, 2, 3).reshape(columns, rows * rank, m // columns),
    )


def product(left: Tensor, right: Tensor) -> Tensor:
    """``Q L P R`` as a matrix (N, K), in float32 or float64."""
    (rows, n, _), (columns, made, m) = left.shape, right.shape
    a = at_least_single(left).view(rows, n, columns, made // rows)
    b = at_least_single(right).view(columns, rows, made // rows, m)
    return torch.einsum("itjs,jism->tijm", a, b).reshape(n * rows, columns * m)


def apply(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """``Q L P R x`` for vectors ``x`` of shape (..., K), as two batches of small products."""
    (rows, n, taken), (columns, made, m) = left.shape, right.shape
    runs = x.reshape(-1, columns, m).transpose(0, 1)  # (k, T, K / k)
    inner = torch.bmm(runs, right.transpose(1, 2))  # R: (k, T, l r)
    turned = inner.view(columns, -1, rows, made // rows).permute(2, 1, 0, 3).reshape(rows, -1, taken)  # P
    outer = torch.bmm(turned, left.transpose(1, 2))  # L: (l, T, N / l)
    return outer.permute(1, 2, 0).reshape(*x.shape[:-1], n * rows)  # Q
