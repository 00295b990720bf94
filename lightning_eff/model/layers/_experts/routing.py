"""Which experts compute which tokens, and with which weights (Zhou et al. 2022; Fedus et al. 2021).

Groups of tokens (sequences) are routed separately. G groups have T tokens each, E experts have C places per group.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Routes(NamedTuple):
    """The tokens in the places of experts.

    Attributes:
        tokens: the index of each place's token within its group, (E, G, C).
        weights: the factor of each place's output, (E, G, C); 0 for a place without a token.
    """

    tokens: Tensor
    weights: Tensor


def places(tokens: int, experts: int, share: float) -> int:
    """Return ``C = ceil(share T / E)``, at least 1 and at most T: an expert computes a token once."""
    return max(1, min(tokens, math.ceil(share * tokens / experts - 1e-9)))


def experts_choose(probabilities: Tensor, count: int) -> Routes:
    """Return Expert Choice: each expert takes the ``count`` tokens of a group with its largest probabilities.

    Args:
        probabilities: of the experts for each token, (G, T, E).
        count: C.
    """
    weights, tokens = probabilities.transpose(1, 2).topk(count, dim=-1)
    return Routes(tokens.transpose(0, 1), weights.transpose(0, 1))


def chosen_by(probabilities: Tensor, choices: int) -> tuple[Tensor, Tensor]:
    """Return the probabilities and indices of each token's most probable experts, (G, T, K)."""
    return probabilities.topk(choices, dim=-1)


def tokens_choose(weights: Tensor, experts: Tensor, count: int, num_experts: int) -> Routes:
    """Return token choice: an expert takes the first ``count`` tokens of a group that chose it, and drops the others.

    The order is that of the tokens, so no token is dropped because of a later one.

    Args:
        weights: of each token's choices, (G, T, K).
        experts: the experts that each token chose, (G, T, K).
        count: C.
        num_experts: E.
    """
    groups, tokens, _ = experts.shape
    chose = torch.zeros(groups, tokens, num_experts, dtype=torch.long, device=experts.device)
    chose = chose.scatter(-1, experts, 1)  # a token chooses an expert once
    place = (chose.cumsum(1) - chose).gather(-1, experts)
    group = torch.arange(groups, device=experts.device).view(-1, 1, 1)
    size = num_experts * groups * count
    at = (
        ((experts * groups + group) * count + place).where(place < count, size).flatten()
    )  # the last one is thrown away
    token = torch.arange(tokens, device=experts.device).view(1, -1, 1).expand_as(experts)
    filled = torch.zeros(size + 1, dtype=torch.long, device=experts.device).scatter(0, at, token.flatten())
    factors = weights.new_zeros(size + 1).scatter(0, at, weights.flatten())
    shape = (num_experts, groups, count)
    return Routes(filled[:-1].view(shape), factors[:-1].view(shape))


def all_compute(probabilities: Tensor) -> Routes:
    """Return routes by which each expert computes all tokens, with equal weights."""
    groups, tokens, experts = probabilities.shape
    every = torch.arange(tokens, device=probabilities.device).expand(experts, groups, tokens)
    return Routes(every, probabilities.new_full((), 1.0 / experts).expand(experts, groups, tokens))


def sums(routes: Routes, values: Tensor, tokens: int) -> Tensor:
    """Return the sum of ``values`` (E, G, C) over the places of each token, (G, T)."""
    groups = values.shape[1]
    return values.new_zeros(groups * tokens).index_add(0, rows(routes, tokens), values.flatten()).view(groups, tokens)


def rows(routes: Routes, tokens: int) -> Tensor:
    """Return the index of each place's token among all groups' tokens, (E G C,)."""
    group = torch.arange(routes.tokens.shape[1], device=routes.tokens.device).view(1, -1, 1)
    return (routes.tokens + tokens * group).flatten()


def normalized(routes: Routes, tokens: int) -> Routes:
    """Divide each token's weights by their sum, so that they sum to 1; those of a dropped token stay 0."""
    total = sums(routes, routes.weights, tokens).flatten()[rows(routes, tokens)].view_as(routes.weights)
    return routes._replace(weights=routes.weights / total.where(total > 0, 1.0))


def balance_loss(probabilities: Tensor, load: Tensor) -> Tensor:
    """Return ``E sum_i f_i P_i``, which is K if tokens are spread evenly (Fedus et al. 2021, eq. 4, for K = 1).

    P_i is the mean of the probabilities of expert i.

    Args:
        probabilities: (G, T, E).
        load: f_i, as :func:`loads` returns it.
    """
    return probabilities.shape[-1] * (load * probabilities.flatten(0, 1).mean(0)).sum()


def loads(experts: Tensor, number: int) -> Tensor:
    """Return f_i, the fraction of tokens that chose each of ``number`` experts, before any is dropped, (E,)."""
    every = experts.flatten()
    counts = torch.zeros(number, dtype=torch.float32, device=experts.device)
    return counts.index_add(0, every, torch.ones_like(every, dtype=torch.float32)) / experts[..., 0].numel()
