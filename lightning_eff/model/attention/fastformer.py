"""Fastformer: one global query and one global key for each head, by additive attention (Wu et al. 2021)."""

import math
from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._attention.calls import Call, CannotReplace, keys_alone
from lightning_eff._core._needs.needs import Need, Part, Reasons
from lightning_eff._core.search_space import RunProfile, SearchSpace, Survey
from lightning_eff._core.technique import Control
from lightning_eff.model.attention._replacing.inside import Inside, places, put_inside
from lightning_eff.model.attention._replacing.technique import CONFLICTS, NO_DROPOUT, no_sequences

WHO = "Fastformer"
QUERY, KEY, MIX = "fastformer_query", "fastformer_key", "fastformer_mix"
_NO_WEIGHTS = "it has no weight for each pair that the other could act on"


def pooled(x: Tensor, weights: Tensor, hidden: Tensor | None) -> Tensor:
    """``sum_i a_i x_i`` with ``a = softmax_i(w x_i / sqrt(E))``, for each head: (B, H, 1, E).

    Args:
        x: (B, H, n, E).
        weights: w, (H, E).
        hidden: which tokens have no part, broadcasts to (B, H, n), or None.
    """
    scores = torch.einsum("bhne,he->bhn", x, weights.to(x.dtype)) / math.sqrt(x.shape[-1])
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    return scores.softmax(-1)[..., None, :].to(x.dtype) @ x


def additive_attention(
    q: Tensor, k: Tensor, v: Tensor, w_q: Tensor, w_k: Tensor, mix: Tensor, hidden: Tensor | None = None
) -> Tensor:
    """``W (k' * v_i) + q_i`` with the global query ``q' = pool(q)`` and the global key ``k' = pool(q' * k_i)``: (B, H, n, E).

    Args:
        q: (B, H, n, E).
        k: likewise.
        v: likewise.
        w_q: (H, E).
        w_k: likewise.
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
        why = _unfit(call)
        if why is None and call.dropout:
            why = NO_DROPOUT.format(call.dropout, WHO)
        if why is not None:
            raise CannotReplace(why)
        there, _ = keys_alone(call, WHO)
        hidden = None
        if there is not None:
            hidden = ~there if there.dtype == torch.bool else there <= torch.finfo(there.dtype).min / 2
            if there.dtype != torch.bool and bool((there.masked_fill(hidden, 0) != 0).any()):
                raise CannotReplace("its mask adds numbers to the scores of keys, of which it has none")
        w_q, w_k, mix = (cast(Tensor, self._parameters[name]) for name in (QUERY, KEY, MIX))
        return additive_attention(call.query, call.whole_key, call.whole_value, w_q, w_k, mix, hidden)

    def reset_parameters(self) -> None:
        """The class's own, and these as they begin."""
        reset = getattr(super(), "reset_parameters", None)
        if reset is not None:
            reset()
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Normal entries of deviation 0.02, as the source has them."""
        for name in (QUERY, KEY, MIX):
            cast(Tensor, self._parameters[name]).normal_(std=0.02)


def _unfit(call: Call) -> str | None:
    q, k, v = call.query, call.key, call.value
    if q.shape[-2] != k.shape[-2]:
        return f"it is on {q.shape[-2]} queries and {k.shape[-2]} keys, and not on its own tokens"
    if v.shape[-1] != q.shape[-1]:
        return f"its values have {v.shape[-1]} features and its queries {q.shape[-1]}, to which they are added"
    causal = call.causal
    if call.mask is not None and not causal:
        try:
            _, causal = keys_alone(call, WHO)
        except CannotReplace as e:
            return str(e)
    return "it is causal, and global queries and keys would tell each token of later ones" if causal else None


def _pointless(profile: RunProfile) -> str | None:
    if (why := no_sequences(profile)) is not None:
        return why
    if profile.sequence_length is not None and profile.sequence_length < 512:
        return f"in sequences of {profile.sequence_length} tokens exact attention is faster"
    return None


class Fastformer(Architecture):
    """Replace attention by one global query and one global key a head, which scale each token's key and value.

    With learnt vectors w for each head, ``q' = sum_i a_i q_i`` with ``a = softmax_i(w_q q_i / sqrt(E))``, and likewise k' of
    the products ``q' * k_i``. What attention returns is ``W (k' * v_i) + q_i`` for each token i, with W over the features of
    all heads. The module's own maps of queries, keys, values and outputs are used as they are; their weights are not shared,
    as they are in some of the paper's models. Its calls of ``F.scaled_dot_product_attention`` (Hugging Face's "sdpa" among
    them) and of ``nn.MultiheadAttention`` (with ``need_weights=False``) are changed. Keys that a mask hides as padding have
    no part in what is global; grouped queries go along. An attention on as many other tokens as its own looks like one on its
    own.

    **For encoders**: causal attention is refused, and so are masks that say more than what is padding, and dropout of weights.
    Without attention to single tokens it is another model, made for long texts that are classified or recommended. It is linear
    in the length: above some 8,000 tokens it is faster than fused exact attention, below it is not.

    Its checkpoints load into ``lightning_eff.apply(plain, Fastformer())`` alone, and ``export`` refuses.

    Logged: ``attentions``, how many.

    Args:
        active: False is plain training.

    Raises:
        ValueError: for another value; at setup or in ``apply``, where no attention is found, or one that is causal, on other
            tokens than its own, or with a mask that cannot be read; at the first batch with dropout of weights.

    Sources:
        Wu et al. 2021, "Fastformer: Additive Attention Can Be All You Need", arXiv:2108.09084.
    """

    saves: ClassVar[str] = "the square of the length in attention, above some 8,000 tokens, for another model"
    paper: ClassVar[str] = "Wu et al. 2021, arXiv:2108.09084"
    constraints: ClassVar[str] = (
        "encoders, by scaled_dot_product_attention or nn.MultiheadAttention, without dropout of weights, not compiled; a single"
        " device or DDP"
    )
    survey: ClassVar[Survey | None] = Survey("linear attention (Fastformer)", zhuang="4", shen="4.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({}, _pointless)
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero, with fused exact attention"
    )
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
            _NO_WEIGHTS,
        ),
    }
    change_at: ClassVar[Change] = Change.ADAPT
    stays: ClassVar[str] = "attention to single tokens does not compute what global queries and keys do"
    needs: ClassVar[Need] = Need.WHOLE
    refuses: ClassVar[Reasons] = {**Architecture.refuses, Part.PIPELINE: ""}
    _count = 0

    def __init__(self, *, active: bool = True) -> None:
        if not isinstance(active, bool):
            raise ValueError(f"{WHO}({active=}): expected True or False.")
        self.active = active

    @property
    @override
    def neutral(self) -> bool:
        return not self.active

    @override
    def change(self, surgeon: Surgeon) -> None:
        found = places(surgeon, who=WHO, unfit=_unfit)
        by_id = {id(surgeon.root.get_submodule(path)): place for path, place in found.items()}

        def build(plain: nn.Module) -> nn.Module:
            made, place = cast(Fastformed, put_inside(Fastformed, plain, who=WHO)), by_id[id(plain)]
            features = place.heads * place.width
            made.register_parameter(QUERY, nn.Parameter(torch.empty(place.heads, place.width)))
            made.register_parameter(KEY, nn.Parameter(torch.empty(place.heads, place.width)))
            made.register_parameter(MIX, nn.Parameter(torch.empty(features, features)))
            made.begin()
            return made

        surgeon.swap(lambda path, m: path in found, build, what="a module that attends")
        self._count = len(found)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"attentions": self._count}

    @override
    def summary(self) -> str:
        return f"{self._count} attentions by global queries and keys" if self._count else "changed before"
