"""A3: a greedy search for the keys that may matter, and only the near-best of those (Ham et al. 2020, arXiv:2002.10941)."""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._attention.calls import Call
from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.technique import Control
from lightning_eff.model.attention._replacing.selecting import SLOWER, SelectedKeys, with_best
from lightning_eff.model.attention._replacing.technique import OUTSIDE, SOME_KEYS, no_sequences

WHO = "A3Attention"
_MOST = 2**22  # products that are looked through at a time


def greedy_scores(q: Tensor, k: Tensor, seen: Tensor | None, rounds: int) -> Tensor:
    """The greedy score of each key for each query, (.., L, S): those above 0 are candidates.

    Of the products ``q_e k_je`` of all keys j and features e, each round adds the largest that is left to the score of its key,
    if it is positive, and then the smallest, if it is negative; the latter is passed over where the sum of what was added so
    far is negative, so that there are candidates where most products are.

    Args:
        q: (.., L, E).
        k: (.., S, E).
        seen: which keys may be seen, (.., L, S), or None.
        rounds: M >= 1.
    """
    products = q[..., :, None, :] * k[..., None, :, :]
    if seen is not None:
        products = products.masked_fill(~seen[..., None], 0.0)
    flat = products.flatten(-2)
    rounds = min(rounds, flat.shape[-1])
    high, high_at = flat.topk(rounds)
    low, low_at = flat.topk(rounds, largest=False)
    high, low = high.clamp_min(0.0), low.clamp_max(0.0)
    taken = torch.zeros_like(high_at[..., :1])  # how many of the smallest have been
    total = torch.zeros_like(high[..., :1])
    used = torch.zeros_like(low, dtype=torch.bool)
    for i in range(rounds):
        total = total + high[..., i : i + 1]
        down = total >= 0
        used.scatter_(-1, taken, down | used.gather(-1, taken))
        total = total + torch.where(down, low.gather(-1, taken), 0.0)
        taken = (taken + down).clamp_max(rounds - 1)
    score = products.new_zeros(*q.shape[:-1], k.shape[-2])
    width = q.shape[-1]
    score.scatter_add_(-1, high_at // width, high)
    return score.scatter_add_(-1, low_at // width, torch.where(used, low, 0.0))


class A3Attention(SelectedKeys):
    """Let each query see the keys alone that a greedy search over single products finds, and of these the near-best.

    Search: of the products of a query's features with those of all keys, ``M = search S`` rounds, for S keys, add the largest
    that is left, and the smallest, to the score of its key; keys that end above 0 are candidates (:func:`greedy_scores`). Of
    these the ones stay whose attention weight is at least ``cut`` times the largest one, ``s >= max s - ln(1 / cut)``.
    Attention on these is exact, its weights sum to one again; the choice takes no gradient. A query without a candidate sees
    the key of the highest score. Masks, causal attention, grouped queries and dropout go along; a key that may not be seen is
    in no search.

    **It saves nothing on a CPU or GPU**, and is slow: the search goes over L S E products for L queries and S keys of E
    features, and its rounds come one after the other. The paper's gain is that of its own chip, which holds sorted columns of
    keys for one query at a time, and infers; training with it is what the paper does not do. It is for small models, as a study
    of what such hardware would leave. It acts in evaluation of a Trainer that has it, and nowhere else.

    Logged: ``attentions``, calls in the last step; ``kept``, the share of the pairs that could be seen.

    Args:
        search: rounds as a share of the keys, > 0: 1/2 and 1/8 are the paper's conservative and aggressive ones; None searches
            for nothing, all keys are candidates.
        cut: the share of the largest weight below which a candidate is left out, in [0, 1): .05 and .1 are the paper's; 0
            leaves all candidates in. Without a search this is plain training.

    Raises:
        ValueError: for other values; at the first batch, before any weight has changed, where no attention is seen, or one
            cannot be replaced, with the reason; at setup for compiled modules.

    Sources:
        Ham et al. 2020, "A3: Accelerating Attention Mechanisms in Neural Networks with Approximation", arXiv:2002.10941.
    """

    saves: ClassVar[str] = "products of attention on hardware made for it; costs much time elsewhere"
    paper: ClassVar[str] = "Ham et al. 2020, arXiv:2002.10941"
    constraints: ClassVar[str] = (
        "attention by scaled_dot_product_attention or nn.MultiheadAttention, not compiled; slower on a CPU or GPU"
    )
    survey: ClassVar[Survey | None] = Survey("sparse attention in hardware (A3)", zhuang="4")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"search": Choice((0.125, 0.5)), "cut": Choice((0.05, 0.1))}, no_sequences
    )
    control: ClassVar[Control] = SLOWER
    conflicts: ClassVar[Mapping[str, str]] = {**OUTSIDE, **SOME_KEYS}

    def __init__(self, search: float | None = 0.5, *, cut: float = 0.05) -> None:
        number = isinstance(search, int | float) and not isinstance(search, bool)
        if search is not None and (not number or not 0.0 < search < math.inf):
            raise ValueError(f"{WHO}({search=}): expected a share of the keys > 0, such as 0.5, or None for no search.")
        if isinstance(cut, bool) or not isinstance(cut, int | float) or not 0.0 <= cut < 1.0:
            raise ValueError(f"{WHO}({cut=}): expected a share of the largest weight in [0, 1), such as 0.05.")
        self.search, self.cut = search, float(cut)

    @property
    @override
    def neutral(self) -> bool:
        return self.search is None and self.cut == 0.0

    @override
    def keep(self, call: Call) -> Tensor:
        exact, seen = call.scores(), call.may_see()
        seen = None if seen is None else seen.expand(exact.shape)
        if self.search is None:
            candidates = torch.ones_like(exact, dtype=torch.bool) if seen is None else seen
        else:
            score = self._searched(call, seen, max(1, round(self.search * exact.shape[-1])))
            candidates = with_best(score > 0, score, seen)
        if self.cut == 0.0:
            return candidates
        among = exact.masked_fill(~candidates, -torch.inf)
        return candidates & (among >= among.amax(-1, keepdim=True) + math.log(self.cut))

    def _searched(self, call: Call, seen: Tensor | None, rounds: int) -> Tensor:
        """Greedy scores by as many queries at a time as memory holds."""
        q, k = call.query.float(), call.whole_key.float()
        most = max(1, _MOST // max(k.numel(), 1))
        found = [
            greedy_scores(some, k, None if seen is None else seen[..., i * most : (i + 1) * most, :], rounds)
            for i, some in enumerate(q.split(most, dim=-2))
        ]
        return torch.cat(found, dim=-2)
