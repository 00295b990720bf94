"""Performer: softmax attention by positive orthogonal random features, linear in the length (Choromanski et al. 2020).

The kernel ``exp(q k)`` is the mean of ``phi(q) phi(k)`` over draws of the features (:func:`positive_features`), so

    out_i = phi(q_i) (sum_j phi(k_j) v_j^T) / (phi(q_i) sum_j phi(k_j)).

The sums over j are computed once, or up to i in causal attention (:func:`linear_attention`).
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._arguments.kinds import Alias, Count
from lightning_eff._core._attention.calls import Call, CannotReplace, keys_alone
from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff.model.attention._replacing.masks import in_full, refuse_dropout
from lightning_eff.model.attention._replacing.projections import orthogonal_rows
from lightning_eff.model.attention._replacing.technique import (
    EXACT,
    NO_PAIRS,
    OUTSIDE,
    ReplacedAttention,
    too_short,
)

WHO = "Performer"
CHUNK = 64  # the queries of causal attention at a time


def positive_features(x: Tensor, omega: Tensor, *, shift: Tensor | None = None) -> Tensor:
    """Return ``phi(x) = exp(omega x - |x|^2 / 2 - shift) / sqrt(m)``; without a shift, ``E[phi(x) phi(y)] = exp(x y)``.

    Args:
        x: (.., E).
        omega: (m, E), with rows like normal vectors.
        shift: (.., 1), against overflow; it cancels in attention if it is one per query, or one for all keys.
    """
    exponent = x @ omega.T - x.square().sum(-1, keepdim=True) / 2
    if shift is not None:
        exponent = exponent - shift
    return torch.exp(exponent) / math.sqrt(len(omega))


def linear_attention(fq: Tensor, fk: Tensor, v: Tensor, *, causal: bool, chunk: int = CHUNK) -> Tensor:
    """Return ``fq_i (sum_j fk_j v_j^T) / (fq_i sum_j fk_j)`` over all j, or over j <= i: (.., L, E').

    Causal sums are prefix sums: within a chunk over its own keys, plus the sums over all chunks before. Rows with a
    denominator of zero are zero.

    Args:
        fq: the features of queries, (.., L, m).
        fk: the features of keys, (.., S, m).
        v: (.., S, E').
        causal: whether only j <= i counts.
        chunk: the number of queries at a time in causal attention.
    """
    ones = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], dim=-1)  # the denominator is one more column
    if not causal:
        sums = fq @ (fk.transpose(-1, -2) @ ones)
    else:
        before = fk.new_zeros(*fk.shape[:-2], fk.shape[-1], ones.shape[-1])
        found: list[Tensor] = []
        start = 0
        for q in fq.split(chunk, dim=-2):
            k, some = (t[..., start : start + chunk, :] for t in (fk, ones))
            inner = (q @ k.transpose(-1, -2)).tril()
            found.append(inner @ some + q @ before)
            before = before + k.transpose(-1, -2) @ some
            start += chunk
        sums = torch.cat(found, dim=-2)
    top, bottom = sums[..., :-1], sums[..., -1:]
    return top / torch.where(bottom > 0, bottom, 1.0)


class Performer(ReplacedAttention):
    """Estimate softmax attention by random features, in time and memory that are linear in the length.

    Queries and keys, each times the square root of attention's scale, are mapped to ``features`` positive features with
    orthogonal directions, ``exp(omega x - |x|^2 / 2) / sqrt(m)``. On average over draws, their products are the softmax
    kernel. Sums over keys are computed once; in causal attention they are prefix sums. The weights of a row sum to one,
    as in softmax. Padding on either side is read from the mask, also from a causal one. Grouped queries are supported.
    Everything is computed in float32 or higher.

    **Where it pays.** For L tokens and heads of E features it takes about ``2 L m (E + 1)`` products instead of
    ``2 L^2 E``. It saves nothing below ``L = m``, and up to about 8,000 tokens fused exact attention is faster on a
    GPU, and exact. It changes the model: the squared error of the weights falls with 1 / m, and is large where logits
    are large. Fine-tune a pretrained module with it before you use it. It adds no parameter, and acts in evaluation
    only under a Trainer that has it.

    Logged: ``attentions``, the calls in the last step; ``features``, their number m; ``draws``, how often features were
    drawn.

    Args:
        features: the number of features m. None is ``E log E``, rounded, for heads of E features, and 0 is plain
            training. Also accepted as ``nb_features``.
        redraw: the number of optimizer steps after which features are drawn again. None keeps one draw for the whole
            run.

    Raises:
        ValueError: for a value out of range. At setup, for compiled modules. At the first batch, before any weight has
            changed, if there is no attention or a call cannot be replaced: it drops weights, its mask says more than
            what is padding and whether it is causal, or it is causal with other keys than queries. A later batch with
            such a mask raises it too.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[Performer(features=256)])

    References:
        Choromanski et al. 2020, "Rethinking Attention with Performers", arXiv:2009.14794.
    """

    saves = "the quadratic cost of attention, above about 8,000 tokens; an estimate"
    paper = "Choromanski et al. 2020, arXiv:2009.14794"
    constraints = (
        "attention by scaled_dot_product_attention or nn.MultiheadAttention, without dropout of weights, not compiled; pays"
        " for thousands of tokens"
    )
    survey = Survey("linear attention (Performer)", zhuang="4", shen="4.1")
    search_space = SearchSpace({"features": Choice((64, 256))}, too_short)
    control = EXACT
    conflicts: ClassVar[Mapping[str, str]] = {
        **OUTSIDE,
        **dict.fromkeys(
            (
                "MemoryEfficientAttention",
                "SangerAttention",
                "A3Attention",
                "ELSAAttention",
                "AttentionWindowWarmup",
                "NarrowAttention",
            ),
            NO_PAIRS,
        ),
    }
    neutral_at: ClassVar[Mapping[str, Any]] = {"features": 0}
    checkpointed = ("_draw", "_features")
    _features = 0

    def __init__(
        self,
        features: Annotated[int | None, Count(at_least=0), Alias("nb_features")] = None,
        *,
        redraw: Annotated[int, Count()] | None = 1000,
    ) -> None:
        self.features, self.redraw = features, redraw
        self._draw = 0
        self._drawn: dict[tuple[int, int, str, torch.dtype], Tensor] = {}

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        self._draw, self._drawn, self._features = 0, {}, 0

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        draw = 0 if self.redraw is None else session.trainer.global_step // self.redraw
        if draw != self._draw:
            self._draw, self._drawn = draw, {}

    def _omega(self, width: int, like: Tensor) -> Tensor:
        at = self.seed, width, str(like.device), like.dtype
        if at not in self._drawn:
            rows = self.features or max(1, round(width * math.log(width)))
            g = rng.keyed_generator(self.seed, WHO, width, self._draw)
            self._drawn[at] = orthogonal_rows(rows, width, g, gaussian=True).to(like)
        return self._drawn[at]

    @override
    def attend(self, call: Call) -> Tensor:
        refuse_dropout(call, WHO)
        of_keys, causal = keys_alone(call, WHO)
        if causal and call.query.shape[-2] != call.key.shape[-2]:
            raise CannotReplace("it is causal with other keys than queries")

        def compute(dtype: torch.dtype) -> Tensor:
            root = math.sqrt(call.scale)
            q, k = call.query.to(dtype) * root, call.whole_key.to(dtype) * root
            omega = self._omega(q.shape[-1], q)
            self._features = len(omega)
            hidden = None
            if of_keys is not None and of_keys.dtype == torch.bool:
                hidden = ~of_keys
            elif of_keys is not None:
                hidden = of_keys <= torch.finfo(of_keys.dtype).min / 2
            fq, fk = self._safe(q, omega, (-1,), None), self._safe(k, omega, (-2, -1), hidden)
            if of_keys is not None and of_keys.dtype != torch.bool:
                assert hidden is not None
                fk = fk * torch.exp(of_keys.to(dtype).masked_fill(hidden, 0.0))[..., None]
            return linear_attention(fq, fk, call.whole_value.to(dtype), causal=causal)

        return in_full(call, compute)

    def _safe(self, x: Tensor, omega: Tensor, dims: tuple[int, ...], hidden: Tensor | None) -> Tensor:
        """Return positive features scaled to a largest value of about one; hidden keys get zeros."""
        with torch.no_grad():
            exponent = x @ omega.T
            shift = exponent - x.square().sum(-1, keepdim=True) / 2
            if hidden is not None:
                shift = shift.masked_fill(hidden[..., None], -torch.inf)
            shift = shift.amax(dims, keepdim=True)
            shift = shift.masked_fill(shift == -torch.inf, 0.0)
        found = positive_features(x, omega, shift=shift)
        return found if hidden is None else found.masked_fill(hidden[..., None], 0.0)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "features": self._features, "draws": self._draw + 1}

    @override
    def summary(self) -> str:
        if not self._features:
            return "no step taken"
        return f"{self._calls} calls of attention per step by {self._features} features, drawn {self._draw + 1} times"

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._drawn = {}
