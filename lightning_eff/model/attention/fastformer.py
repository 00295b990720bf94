"""Fastformer: additive attention with one global query and one global key per head (Wu et al. 2021)."""

import math
from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._attention.calls import Call, CannotReplace
from lightning_eff._core._attention.inside import Inside, Place, put_inside
from lightning_eff._core.search_space import SearchSpace
from lightning_eff.model.attention._replacing.inside import InsideAttention
from lightning_eff.model.attention._replacing.masks import problem_of_mask, refuse_dropout, visible_keys
from lightning_eff.model.attention._replacing.technique import CONFLICTS, EXACT, NO_PAIRS, too_short

WHO = "Fastformer"
QUERY, KEY, MIX = "fastformer_query", "fastformer_key", "fastformer_mix"
_CAUSAL = "it is causal, and global queries and keys would show later tokens to earlier ones"


def pooled(x: Tensor, weights: Tensor, hidden: Tensor | None) -> Tensor:
    """Return ``sum_i a_i x_i`` with ``a = softmax_i(w x_i / sqrt(E))``, for each head: (B, H, 1, E).

    Args:
        x: (B, H, n, E).
        weights: w, (H, E).
        hidden: which tokens do not count, broadcasts to (B, H, n), or None.
    """
    scores = torch.einsum("bhne,he->bhn", x, weights.to(x.dtype)) / math.sqrt(x.shape[-1])
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    return scores.softmax(-1)[..., None, :].to(x.dtype) @ x


def additive_attention(
    q: Tensor, k: Tensor, v: Tensor, w_q: Tensor, w_k: Tensor, mix: Tensor, hidden: Tensor | None = None
) -> Tensor:
    """Return ``W (k' * v_i) + q_i`` with the global query ``q' = pool(q)`` and the global key ``k' = pool(q' * k_i)``.

    The result has shape (B, H, n, E).

    Args:
        q: (B, H, n, E).
        k: (B, H, n, E).
        v: (B, H, n, E).
        w_q: (H, E).
        w_k: (H, E).
        mix: W over the features of all heads, (H E, H E).
        hidden: see :func:`pooled`.
    """
    p = pooled(q, w_q, hidden) * k
    u = pooled(p, w_k, hidden) * v
    r = nn.functional.linear(u.transpose(1, 2).flatten(2), mix.to(u.dtype))
    return r.unflatten(-1, (q.shape[1], -1)).transpose(1, 2) + q


class Fastformed(Inside):
    """Additive attention."""

    def attends(self, call: Call) -> Tensor:
        if (why := _unfit(call)) is not None:
            raise CannotReplace(why)
        refuse_dropout(call, WHO)
        seen, _ = visible_keys(call, WHO)
        hidden = None if seen is None else ~seen
        w_q, w_k, mix = (cast(Tensor, self._parameters[name]) for name in (QUERY, KEY, MIX))
        return additive_attention(call.query, call.whole_key, call.whole_value, w_q, w_k, mix, hidden)

    @override
    @torch.no_grad()
    def begin(self) -> None:
        """Draw normal entries with a standard deviation of 0.02, as in the paper."""
        for name in (QUERY, KEY, MIX):
            cast(Tensor, self._parameters[name]).normal_(std=0.02)


def _unfit(call: Call) -> str | None:
    q, k, v = call.query, call.key, call.value
    if q.shape[-2] != k.shape[-2]:
        return f"it has {q.shape[-2]} queries and {k.shape[-2]} keys, so it is not self-attention"
    if v.shape[-1] != q.shape[-1]:
        return f"its values have {v.shape[-1]} features but its queries {q.shape[-1]}, and the two are added"
    return problem_of_mask(call, WHO, _CAUSAL)


class Fastformer(InsideAttention):
    """Replace attention by one global query and one global key per head, which scale each token's key and value.

    With learnt vectors w for each head, ``q' = sum_i a_i q_i`` with ``a = softmax_i(w_q q_i / sqrt(E))``, and likewise
    k' from the products ``q' * k_i``. For each token i, attention returns ``W (k' * v_i) + q_i``, with W over the
    features of all heads. The module's own projections of queries, keys, values and outputs are kept, without the
    weight sharing of some of the paper's models. Calls of ``F.scaled_dot_product_attention`` (Hugging Face's "sdpa"
    among them) and of ``nn.MultiheadAttention`` (with ``need_weights=False``) are replaced. Keys that a mask hides as
    padding do not count; grouped queries are supported. Cross-attention to an equal number of tokens is taken for
    self-attention.

    **It works for encoders**: causal attention is refused, and so are masks that say more than what is padding, and
    dropout of weights. It changes the model, because no token attends to single tokens, and is made for classifying
    long texts and for recommendation. Its cost is linear in the length: above about 8,000 tokens it is faster than
    fused exact attention, below it is not.

    Its checkpoints load only into ``lightning_eff.apply(plain, Fastformer())``, and ``lightning_eff.export`` refuses
    it.

    Logged: ``attentions``, the number of attention modules.

    Args:
        active: whether to replace attention. False is plain training.

    Raises:
        ValueError: for a value of the wrong kind. At setup or in ``apply``, if there is no attention, or one is causal,
            is not self-attention or has a mask that cannot be read. At the first batch with dropout of weights.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[Fastformer()])

    References:
        Wu et al. 2021, "Fastformer: Additive Attention Can Be All You Need", arXiv:2108.09084.
    """

    saves = "the quadratic cost of attention, above about 8,000 tokens; changes the model"
    paper = "Wu et al. 2021, arXiv:2108.09084"
    constraints = (
        "encoders, by scaled_dot_product_attention or nn.MultiheadAttention, without dropout of weights, not compiled; a single"
        " device or DDP"
    )
    search_space = SearchSpace({}, too_short)
    control = EXACT
    conflicts: ClassVar[Mapping[str, str]] = {
        **CONFLICTS,
        **dict.fromkeys(
            (
                "MemoryEfficientAttention",
                "SangerAttention",
                "A3Attention",
                "ELSAAttention",
                "Performer",
                "AttentionWindowWarmup",
                "NarrowAttention",
                "TokenMerging",
                "Linformer",
                "QKNorm",
            ),
            NO_PAIRS,
        ),
    }
    stays = "attention to single tokens computes something else"

    def __init__(self, *, active: bool = True) -> None:
        self.active = active

    @property
    @override
    def neutral(self) -> bool:
        return not self.active

    @override
    def unfit(self, call: Call) -> str | None:
        return _unfit(call)

    @override
    def build(self, plain: nn.Module, place: Place) -> Inside:
        made = cast(Fastformed, put_inside(Fastformed, plain, who=WHO))
        features = place.heads * place.width
        made.register_parameter(QUERY, nn.Parameter(torch.empty(place.heads, place.width)))
        made.register_parameter(KEY, nn.Parameter(torch.empty(place.heads, place.width)))
        made.register_parameter(MIX, nn.Parameter(torch.empty(features, features)))
        made.begin()
        return made

    @override
    def summary(self) -> str:
        return (
            f"{self._replaced} attention modules used global queries and keys" if self._replaced else "changed before"
        )
