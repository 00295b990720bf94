"""A3: a greedy search for keys that may matter, and attention to those close to the best (Ham et al. 2020,
arXiv:2002.10941).
"""

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Fraction, Number
from lightning_eff._core._attention.calls import Call
from lightning_eff._core.search_space import Choice, SearchSpace, needs_attention
from lightning_eff.model.attention._replacing.selecting import SelectedKeys, with_best
from lightning_eff.model.attention._replacing.technique import OUTSIDE, SOME_KEYS

_MOST = 2**22  # products that are searched at a time


def greedy_scores(q: Tensor, k: Tensor, seen: Tensor | None, rounds: int) -> Tensor:
    """Return the greedy score of each key for each query, (.., L, S); keys with scores above 0 are candidates.

    Of the products ``q_e k_je`` of all keys j and features e, each round adds the largest remaining one to the score of
    its key, if it is positive, and then the smallest, if it is negative. The smallest is skipped while the sum of all
    additions is negative, so that there are candidates even if most products are negative.

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
    taken = torch.zeros_like(high_at[..., :1])  # how many of the smallest were used
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
    """Let each query attend only to keys that a greedy search over single products finds, and of these to the near-best.

    The search looks at the products of a query's features with those of all S keys. In each of ``M = search S`` rounds,
    the largest remaining product and the smallest are added to the scores of their keys. Keys whose score ends above 0
    are candidates (:func:`greedy_scores`). A candidate is kept if its attention weight is at least ``cut`` times the
    largest one, ``s >= max s - ln(1 / cut)``. Attention on the kept keys is exact, and its weights sum to one again.
    The choice has no gradient. A query without a candidate sees the key with the highest score. Masks, causal
    attention, grouped queries and dropout are supported.

    **It saves nothing on a CPU or GPU**, and is slow. The search covers L S E products for L queries and S keys of E
    features, and its rounds run one after the other. The paper's gain comes from its own chip, for inference; the paper
    does not train with it. Use it on small models, to study what such hardware would keep. It acts in evaluation only
    under a Trainer that has it.

    Logged: ``attentions``, the calls in the last step; ``kept``, the fraction of visible pairs that were kept.

    Args:
        search: the number of rounds, as a fraction of the keys. 0.5 and 0.125 are the paper's conservative and
            aggressive settings. None skips the search, so all keys are candidates.
        cut: the fraction of the largest weight below which a candidate is dropped. 0.05 and 0.1 are the paper's. 0
            keeps all candidates; without a search this is plain training.

    Raises:
        ValueError: for a value out of range. At setup, for compiled modules. At the first batch, before any weight has
            changed, if there is no attention or a call cannot be replaced.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[A3Attention(search=0.5, cut=0.05)])

    References:
        Ham et al. 2020, "A3: Accelerating Attention Mechanisms in Neural Networks with Approximation",
        arXiv:2002.10941.
    """

    saves = "attention products on special hardware; costs much time elsewhere"
    paper = "Ham et al. 2020, arXiv:2002.10941"
    constraints = (
        "attention by scaled_dot_product_attention or nn.MultiheadAttention, not compiled; slower on a CPU or GPU"
    )
    search_space = SearchSpace({"search": Choice((0.125, 0.5)), "cut": Choice((0.05, 0.1))}, needs_attention)
    conflicts: ClassVar[Mapping[str, str]] = {**OUTSIDE, **SOME_KEYS}

    def __init__(
        self,
        search: Annotated[float, Number(above=0)] | None = 0.5,
        *,
        cut: Annotated[float, Fraction(below=1)] = 0.05,
    ) -> None:
        self.search, self.cut = search, cut

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
        """Compute greedy scores for as many queries at a time as fit in memory."""
        q, k = call.query.float(), call.whole_key.float()
        most = max(1, _MOST // max(k.numel(), 1))
        found = [
            greedy_scores(some, k, None if seen is None else seen[..., i * most : (i + 1) * most, :], rounds)
            for i, some in enumerate(q.split(most, dim=-2))
        ]
        return torch.cat(found, dim=-2)
