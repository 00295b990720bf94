"""Scores by which a data set is pruned: EL2N and GraNd (Paul et al. 2021), distances to prototypes (Sorscher et al. 2022)."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def el2n(bounds: list[Tensor], counts: list[Tensor]) -> Tensor:
    """``||p - y||_2`` of each sample, shape (B,): of one with several rows (tokens), the root of the mean of its squares.

    Args:
        bounds: of each loss call, ``||d s_i / d z_i||`` with ``s_i`` the sum of the losses of sample i and ``z_i`` its logits,
            shape (B,); for a cross-entropy of one row that is ``||p_i - y_i||``.
        counts: of each call, how many rows of each sample count, shape (B,).
    """
    squares = [
        bound.double().square() / count.double().clamp(min=1e-12) for bound, count in zip(bounds, counts, strict=True)
    ]
    return torch.stack(squares).sum(dim=0).sqrt()


def norm_of_map_gradient(x: Tensor, g: Tensor, *, bias: bool) -> Tensor:
    """``||dl_i/dW||_F`` of each sample, with the bias where there is one, for a linear map ``z = W x + b``, shape (B,).

    With ``dl_i/dW = sum_t g_it x_it^T`` its square is ``sum_tu (x_it . x_iu) (g_it . g_iu)``, and for one row
    ``(||g|| ||x||)^2``.

    Args:
        x: what comes into the map, shape (B, T, d).
        g: the gradient of each sample's own loss with respect to what the map gives, shape (B, T, C).
        bias: whether the map has one, whose gradient is ``sum_t g_it``.
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
    """Each row's distance to the centroid of its own cluster of k-means, shape (N,), float64.

    Args:
        embeddings: shape (N, d).
        clusters: k, in [1, N]; with 1 it is the distance to the mean.
        seed: of where k-means begins.
    """
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    x = np.asarray(embeddings, dtype=np.float64)
    with threadpool_limits(1):  # sums of several threads are rounded in another order each time
        found = KMeans(clusters, n_init=4, random_state=seed % 2**32).fit(x)  # pyright: ignore[reportArgumentType]
    return torch.from_numpy(np.linalg.norm(x - found.cluster_centers_[found.labels_], axis=1))


def without_samples(labels: Tensor, kept: Tensor, least: int) -> list[int]:
    """The classes of which none is kept, ascending: of those with at least ``least`` samples.

    Args:
        labels: the class of each sample, integers, shape (N,); below 0, as of ``ignore_index``, it is none.
        kept: indices of what is kept, shape (K,).
        least: a class with fewer samples is passed over, >= 1.
    """
    classes, sizes = labels.unique(return_counts=True)
    left = torch.isin(classes, labels[kept])
    return classes[~left & (sizes >= least) & (classes >= 0)].tolist()


def best(scores: Tensor, count: int, *, easy: bool, labels: Tensor | None = None, balance: float = 0.0) -> Tensor:
    """The indices of the ``count`` samples that are kept, long, shape (count,), ascending; of equal scores the first.

    Args:
        scores: high is hard, shape (N,).
        count: in [1, N].
        easy: keep those of the lowest scores, in place of the highest.
        labels: the class of each sample, shape (N,), where ``balance`` > 0.
        balance: each of the C classes has its own best ``floor(balance count / C)`` (all, where it has fewer); the rest are
            the best of what is left, whatever their class.
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
