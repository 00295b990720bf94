"""Scores to prune a data set by: EL2N and GraNd (Paul et al. 2021), prototype distances (Sorscher et al. 2022)."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def el2n(bounds: list[Tensor], counts: list[Tensor]) -> Tensor:
    """Compute ``||p - y||_2`` of each sample, shape (B,), as a root mean square over its rows (tokens).

    Args:
        bounds: ``||d s_i / d z_i||`` of each loss call, with ``s_i`` the sum of the losses of sample i and ``z_i`` its logits,
            shape (B,). For a cross-entropy of one row this is ``||p_i - y_i||``.
        counts: the number of rows of each sample that count in each call, shape (B,).
    """
    squares = [
        bound.double().square() / count.double().clamp(min=1e-12) for bound, count in zip(bounds, counts, strict=True)
    ]
    return torch.stack(squares).sum(dim=0).sqrt()


def norm_of_map_gradient(x: Tensor, g: Tensor, *, bias: bool) -> Tensor:
    """Compute ``||dl_i/dW||_F`` of each sample for a linear layer ``z = W x + b``, shape (B,).

    With ``dl_i/dW = sum_t g_it x_it^T`` its square is ``sum_tu (x_it . x_iu) (g_it . g_iu)``, and for one row
    ``(||g|| ||x||)^2``.

    Args:
        x: the input of the layer, shape (B, T, d).
        g: the gradient of each sample's own loss with respect to the layer's output, shape (B, T, C).
        bias: whether to include the bias, whose gradient is ``sum_t g_it``.
    """
    x, g = x.double(), g.double()
    if x.shape[1] == 1:
        squares = (x.square().sum(dim=2) * g.square().sum(dim=2)).squeeze(1)
    else:
        squares = ((x @ x.transpose(1, 2)) * (g @ g.transpose(1, 2))).sum(dim=(1, 2))
    if bias:
        squares = squares + g.sum(dim=1).square().sum(dim=1)
    return squares.clamp(min=0).sqrt()


def prototype_distances(embeddings: np.ndarray[Any, Any], clusters: int, seed: int) -> Tensor:
    """Compute each row's distance to the centroid of its k-means cluster, shape (N,), float64.

    Args:
        embeddings: shape (N, d).
        clusters: k, in [1, N]. With 1 it is the distance to the mean.
        seed: the seed of the k-means initialization.
    """
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    x = np.asarray(embeddings, dtype=np.float64)
    with threadpool_limits(1):  # several threads would sum in a different order each time
        found = KMeans(clusters, n_init=4, random_state=seed % 2**32).fit(x)  # pyright: ignore[reportArgumentType]
    return torch.from_numpy(np.linalg.norm(x - found.cluster_centers_[found.labels_], axis=1))


def without_samples(labels: Tensor, kept: Tensor, least: int) -> list[int]:
    """Find the classes of at least ``least`` samples of which none is kept, in ascending order.

    Args:
        labels: the class of each sample, integers, shape (N,). Below 0 (such as ``ignore_index``), it has none.
        kept: the indices of the kept samples, shape (K,).
        least: the size below which a class is ignored, >= 1.
    """
    classes, sizes = labels.unique(return_counts=True)
    left = torch.isin(classes, labels[kept])
    return classes[~left & (sizes >= least) & (classes >= 0)].tolist()


def best(scores: Tensor, count: int, *, easy: bool, labels: Tensor | None = None, balance: float = 0.0) -> Tensor:
    """Choose the ``count`` samples to keep: their indices in ascending order, long, shape (count,).

    The first of equal scores wins.

    Args:
        scores: high is hard, shape (N,).
        count: in [1, N].
        easy: keep the lowest scores instead of the highest.
        labels: the class of each sample, shape (N,), if ``balance`` > 0.
        balance: each of the C classes keeps its own best ``floor(balance count / C)`` samples, or all that it has. The rest are
            the best of the other samples, whatever their class.
    """
    order = torch.sort(scores, descending=not easy, stable=True).indices
    first = torch.zeros(len(scores), dtype=torch.bool)
    if labels is not None and balance > 0:
        classes = labels.unique()
        own = int(balance * count / len(classes) + 1e-9)
        for label in classes:
            first[order[labels[order] == label][:own]] = True
    wanted = torch.cat([order[first[order]], order[~first[order]]])
    return wanted[:count].sort().values
