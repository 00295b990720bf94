"""Sets of what samples' gradient norms may be, learnt from features, and the best probabilities against the worst of them."""

from dataclasses import dataclass

import torch
from torch import Tensor


def worst_norms(s: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """The norms against which drawing is hardest: ``v_i = <c, s_i> + k <d, s_i>`` with ``k = sqrt(n / sum_j <d, s_j>)``.

    The set is ``U = {v : (1/n) sum_i (v_i - <c, s_i>)^2 / <d, s_i> <= 1}``. For a drawing with ``p``, the second moment
    of the gradient is ``(1/n^2) sum_i v_i^2 / p_i``; its least worst case is that of ``p_i = v_i / sum_j v_j``.

    Args:
        s: features, >= 0, shape (n, F).
        c: of the set's middle, >= 0, shape (F,).
        d: of its extent, >= 0, shape (F,).

    Returns:
        Shape (n,).
    """
    extent = s @ d
    total = extent.sum()
    return s @ c if total == 0 else s @ c + (len(s) / total).sqrt() * extent


def mixed_with_uniform(v: Tensor, share: float) -> Tensor:
    """``p_i = (1 - share) v_i / sum_j v_j + share / n``; shape (n,), float64. All alike where the ``v_i`` are all 0."""
    v = v.double()
    n, total = len(v), v.sum()
    own = v / total if total > 0 else torch.full_like(v, 1 / n)
    return (1 - share) * own + share / n


def fit(s: Tensor, v: Tensor, w: Tensor, every: Tensor, *, rounds: int = 100) -> tuple[Tensor, Tensor]:
    """``c, d = argmin {sum_i <d, s_i> : (1/|D|) sum_j w_j (<c, s_j> - v_j)^2 / <d, s_j> <= 1}``, both >= 0.

    The constraint and the aim are of degree -1 and 1 in ``d``, so the ``d`` that solves it is a multiple of that of the
    least sum of both. That sum is convex; each round finds the best ``c`` for ``d``, and lowers it by a step of ``d``.

    Args:
        s: features of what was seen, > 0 in at least one place of each row, shape (|D|, F).
        v: the norms seen, >= 0, shape (|D|,).
        w: how much each counts, > 0, shape (|D|,).
        every: the sum of all samples' features, shape (F,).
        rounds: how many.

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
    return c, d * used  # now the mean is 1, or there is nothing to be uncertain of


def _least_squares(s: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """``c = argmin {sum_j w_j (<c, s_j> - v_j)^2 : c >= 0}``: the best of those with some coordinates free, the others 0."""
    gram, right = s.T @ (s * w[:, None]), s.T @ (w * v)
    free = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * len(right))  # all sets, (2^F, F)
    inverse = torch.linalg.pinv(gram * free[:, :, None] * free[:, None, :], hermitian=True)
    c = (inverse @ (free * right)[:, :, None]).squeeze(2) * free
    values = ((c @ gram) * c).sum(dim=1) - 2 * c @ right
    return c[values.where((c >= 0).all(dim=1), torch.inf).argmin()]


def features(norms: Tensor, ages: Tensor) -> Tensor:
    """``s_i = (m, g_i, m a_i)``: the mean ``m`` of the norms last seen, a sample's own ``g_i``, and its age ``a_i`` in epochs.

    Args:
        norms: last seen, shape (n,), nan where none was, which counts as their mean.
        ages: how many epochs ago that was, >= 0, shape (n,); where none was, the greatest age counts.

    Returns:
        Shape (n, 3), float64; all 0 where no norm was seen.
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
    """Means over time of the square norms of gradients of one sample, uniform and as drawn, and of the true gradient.

    Attributes:
        uniform: ``E |g_U1|^2``, of a sample that is drawn evenly.
        drawn: ``E |g_R1|^2``, of one that is drawn with ``p`` and weighted.
        signal: ``|grad F|^2``.
    """

    uniform: float = 0.0
    drawn: float = 0.0
    signal: float = 0.0

    def take(self, uniform: float, drawn: float, signal: float, smoothing: float) -> None:
        """Another step's, which counts ``1 - smoothing``."""
        self.uniform += (1 - smoothing) * (uniform - self.uniform)
        self.drawn += (1 - smoothing) * (drawn - self.drawn)
        self.signal += (1 - smoothing) * (signal - self.signal)

    def gain(self, samples: int) -> float:
        """``r = E|g_U|^2 / E|g_R|^2`` of steps of M samples, whose ``E|g|^2 = E|g_1|^2 / M + (1 - 1/M) |grad F|^2``."""
        signal = (samples - 1) * max(self.signal, 0.0)
        below = self.drawn + signal
        return (self.uniform + signal) / below if below > 0 else 1.0
