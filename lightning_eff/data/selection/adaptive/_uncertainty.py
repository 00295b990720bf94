"""Learn a set that contains the samples' gradient norms, and draw with the best probabilities for the worst case in it."""

from dataclasses import dataclass

import torch
from torch import Tensor


def worst_norms(s: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Compute the worst-case norms ``v_i = <c, s_i> + k <d, s_i>`` with ``k = sqrt(n / sum_j <d, s_j>)``.

    The set is ``U = {v : (1/n) sum_i (v_i - <c, s_i>)^2 / <d, s_i> <= 1}``. If samples are drawn with ``p``, the second moment
    of the gradient is ``(1/n^2) sum_i v_i^2 / p_i``. ``p_i = v_i / sum_j v_j`` minimizes its worst case.

    Args:
        s: features, >= 0, shape (n, F).
        c: coefficients of the set's center, >= 0, shape (F,).
        d: coefficients of its extent, >= 0, shape (F,).

    Returns:
        Shape (n,).
    """
    extent = s @ d
    total = extent.sum()
    return s @ c if total == 0 else s @ c + (len(s) / total).sqrt() * extent


def mixed_with_uniform(v: Tensor, share: float) -> Tensor:
    """Compute ``p_i = (1 - share) v_i / sum_j v_j + share / n``, shape (n,), float64. It is uniform if all ``v_i`` are 0."""
    v = v.double()
    n, total = len(v), v.sum()
    own = v / total if total > 0 else torch.full_like(v, 1 / n)
    return (1 - share) * own + share / n


def fit(s: Tensor, v: Tensor, w: Tensor, every: Tensor, *, rounds: int = 100) -> tuple[Tensor, Tensor]:
    """Solve ``c, d = argmin {sum_i <d, s_i> : (1/|D|) sum_j w_j (<c, s_j> - v_j)^2 / <d, s_j> <= 1}``, both >= 0.

    The constraint is of degree -1 in ``d`` and the objective of degree 1, so the solution is a multiple of the ``d`` that
    minimizes the sum of both. That sum is convex. Each round finds the best ``c`` for ``d`` and then takes a step in ``d``.

    Args:
        s: features of the observed samples, > 0 in at least one entry of each row, shape (|D|, F).
        v: their observed norms, >= 0, shape (|D|,).
        w: their weights, > 0, shape (|D|,).
        every: the sum of the features of all samples, shape (F,).
        rounds: the maximum number of rounds.

    Returns:
        ``c`` and ``d``, float64, shape (F,).
    """
    s, v, w = s.double(), v.double(), (w / w.mean()).double()
    tiny = 1e-12 * float(v.mean()) + 1e-300
    scale = every.double() / every.double().max()
    c = d = torch.full((s.shape[1],), max(float(v.mean() / s.sum(dim=1).mean()), tiny), dtype=torch.float64)
    for _ in range(rounds):
        c = _least_squares(s, v, w / (s @ d).clamp(min=tiny))
        # d_f <- d_f sqrt(mean_j w_j s_jf (<c, s_j> - v_j)^2 / e_j^2 / S_f), with e_j = <d, s_j>
        miss = (s @ c - v).square()
        slope = (s.T @ (w * miss / (s @ d).clamp(min=tiny).square())) / len(s)
        before, d = d, d * (slope / scale.clamp(min=1e-12)).sqrt()
        if bool((before - d).abs().max() <= 1e-9 * d.max()):
            break
    extent = s @ d
    miss = (s @ c - v).square()
    used = torch.where(miss > 0, w * miss / extent.clamp(min=tiny), 0.0).mean()
    return c, d * used  # now the mean is 1, or nothing is uncertain


def _least_squares(s: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Solve ``c = argmin {sum_j w_j (<c, s_j> - v_j)^2 : c >= 0}`` by trying each set of free coordinates."""
    gram, right = s.T @ (s * w[:, None]), s.T @ (w * v)
    free = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * len(right))  # all sets, (2^F, F)
    inverse = torch.linalg.pinv(gram * free[:, :, None] * free[:, None, :], hermitian=True)
    c = (inverse @ (free * right)[:, :, None]).squeeze(2) * free
    values = ((c @ gram) * c).sum(dim=1) - 2 * c @ right
    return c[values.where((c >= 0).all(dim=1), torch.inf).argmin()]


def features(norms: Tensor, ages: Tensor) -> Tensor:
    """Compute ``s_i = (m, g_i, m a_i)`` from the mean ``m`` of the last norms, a sample's own ``g_i`` and its age ``a_i``.

    Args:
        norms: the norm last seen of each sample, shape (n,). NaN stands for none and counts as the mean.
        ages: its age in epochs, >= 0, shape (n,). Samples without a norm take the greatest age.

    Returns:
        Shape (n, 3), float64. All entries are 0 if no norm was seen.
    """
    known = norms.isfinite()
    if not bool(known.any()):
        return torch.zeros(len(norms), 3, dtype=torch.float64)
    m = norms[known].double().mean()
    g = torch.where(known, norms.double(), m)
    a = torch.where(known, ages.double(), ages[known].double().max())
    return torch.stack([m.expand_as(g), g, m * a], dim=1)


@dataclass
class Moments:
    """Running means of squared gradient norms.

    Attributes:
        uniform: ``E |g_U1|^2`` of one sample that is drawn uniformly.
        drawn: ``E |g_R1|^2`` of one sample that is drawn with ``p`` and weighted.
        signal: ``|grad F|^2`` of the true gradient.
    """

    uniform: float = 0.0
    drawn: float = 0.0
    signal: float = 0.0

    def take(self, uniform: float, drawn: float, signal: float, smoothing: float) -> None:
        """Update the means with another step, which has the weight ``1 - smoothing``."""
        self.uniform += (1 - smoothing) * (uniform - self.uniform)
        self.drawn += (1 - smoothing) * (drawn - self.drawn)
        self.signal += (1 - smoothing) * (signal - self.signal)

    def gain(self, samples: int) -> float:
        """Compute ``r = E|g_U|^2 / E|g_R|^2`` for M samples per step, with ``E|g|^2 = E|g_1|^2 / M + (1 - 1/M) |grad F|^2``."""
        signal = (samples - 1) * max(self.signal, 0.0)
        below = self.drawn + signal
        return (self.uniform + signal) / below if below > 0 else 1.0
