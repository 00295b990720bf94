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
from lightning_eff._core.search_space import Choice, SearchSpace
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
_CAREFUL_CHUNK = 16


def positive_features(x: Tensor, omega: Tensor, *, shift: Tensor | None = None) -> Tensor:
    """Return ``phi(x) = exp(omega x - |x|^2 / 2 - shift) / sqrt(m)``; without a shift, ``E[phi(x) phi(y)] = exp(x y)``.

    Args:
        x: (.., E).
        omega: (m, E), with rows like normal vectors.
        shift: (.., 1), against overflow; it cancels in attention if it is one per query, or one for all keys.
    """
    exponent = log_features(x, omega)
    if shift is not None:
        exponent = exponent - shift
    return torch.exp(exponent) / math.sqrt(len(omega))


def log_features(x: Tensor, omega: Tensor) -> Tensor:
    """Return ``omega x - |x|^2 / 2``, the logarithm of ``sqrt(m) phi(x)``: (.., m)."""
    return x @ omega.T - x.square().sum(-1, keepdim=True) / 2


def linear_attention(
    fq: Tensor, fk: Tensor, v: Tensor, *, causal: bool, chunk: int = CHUNK, sees: Tensor | None = None
) -> Tensor | None:
    """Return ``fq_i (sum_j fk_j v_j^T) / (fq_i sum_j fk_j)`` over all j, or over j <= i: (.., L, E').

    Causal sums are prefix sums: within a chunk over its own keys, plus the sums over all chunks before.

    Args:
        fq: the features of queries, (.., L, m).
        fk: the features of keys, (.., S, m).
        v: (.., S, E').
        causal: whether only j <= i counts.
        chunk: the number of queries at a time in causal attention.
        sees: which rows see a key, (.., L or 1, 1); None if all do. Other rows are zero.

    Returns:
        None if the denominator of a row is so small that terms which matter may have underflowed, or if it overflowed.
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
    numbers = torch.finfo(bottom.dtype)
    floor = numbers.tiny * fk.shape[-2] * fk.shape[-1] / numbers.eps  # all that underflows is below eps of this
    right = (bottom > floor) & (bottom < torch.inf)
    if not bool((right if sees is None else right | ~sees).all()):
        return None
    return top / torch.where(bottom > 0, bottom, 1.0)


def careful_linear_attention(
    log_q: Tensor, log_k: Tensor, v: Tensor, *, causal: bool, chunk: int = _CAREFUL_CHUNK
) -> Tensor:
    """Return what :func:`linear_attention` returns, from the logarithms of features, without harmful underflow.

    Sums over keys are kept relative to each feature's largest key so far, ``c = max_j log k_j``, and each row relative to
    its largest term, ``r_i = max (log q_i + c)``. Then the factors of each term are at most 1, and its product underflows
    only if it is negligible in its row. Keys in the row's own chunk are added term by term, because later keys of the chunk
    may have a larger maximum. It takes several times the memory and time.

    Args:
        log_q: (.., L, m).
        log_k: (.., S, m), -inf for hidden keys.
        v: (.., S, E').
        causal: whether only j <= i counts.
        chunk: the number of queries at a time in causal attention.
    """
    ones = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], dim=-1)
    found: list[Tensor] = []
    if not causal:
        most = log_k.detach().amax(-2, keepdim=True)
        row = _finite((log_q.detach() + most).amax(-1, keepdim=True))
        found.append(torch.exp(log_q + most - row) @ (torch.exp(log_k - _finite(most)).transpose(-1, -2) @ ones))
    else:
        most = torch.full_like(log_k[..., :1, :], -torch.inf).detach()
        before = log_k.new_zeros(*log_k.shape[:-2], log_k.shape[-1], ones.shape[-1])
        start = 0
        for q in log_q.split(chunk, dim=-2):
            k, some = (t[..., start : start + chunk, :] for t in (log_k, ones))
            start += chunk
            upto = torch.maximum(most, k.detach().cummax(-2).values)
            row = _finite((q.detach() + upto).amax(-1, keepdim=True))
            terms = q.unsqueeze(-2) + k.unsqueeze(-3) - row.unsqueeze(-1)
            later = torch.ones(terms.shape[-3:-1], dtype=torch.bool, device=q.device).triu(1)
            inner = torch.exp(terms.masked_fill(later[..., None], -torch.inf)).sum(-1)
            found.append(inner @ some + torch.exp(q + most - row) @ before)
            now = _finite(upto[..., -1:, :])
            before = before * torch.exp(most - now).transpose(-1, -2) + torch.exp(k - now).transpose(-1, -2) @ some
            most = upto[..., -1:, :]
    sums = torch.cat(found, dim=-2)
    top, bottom = sums[..., :-1], sums[..., -1:]
    return top / torch.where(bottom == 0, 1.0, bottom)  # a row that sees no key is zero


def _finite(x: Tensor) -> Tensor:
    """Return ``x`` with 0 in place of -inf, to subtract it."""
    return x.masked_fill(x == -torch.inf, 0.0)


class Performer(ReplacedAttention):
    """Estimate softmax attention by random features, in time and memory that are linear in the length.

    Queries and keys, each times the square root of attention's scale, are mapped to ``features`` positive features with
    orthogonal directions, ``exp(omega x - |x|^2 / 2) / sqrt(m)``. On average over draws, their products are the softmax
    kernel. Sums over keys are computed once; in causal attention they are prefix sums. The weights of a row sum to one,
    as in softmax. Padding on either side is read from the mask, also from a causal one. Grouped queries are supported.
    Everything is computed in float32 or higher. If features of a call underflow so far that a row would be wrong, the call is
    computed again relative to running maxima, which is several times slower.

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
            bias = None
            if of_keys is not None and of_keys.dtype != torch.bool:
                assert hidden is not None
                bias = of_keys.to(dtype).masked_fill(hidden, 0.0)[..., None]
            v, sees = call.whole_value.to(dtype), None
            if hidden is not None:
                shown = (~hidden)[..., None]
                sees = shown.cumsum(-2) > 0 if causal else shown.any(-2, keepdim=True)
            fq, fk = self._safe(q, omega, (-1,), None), self._safe(k, omega, (-2, -1), hidden)
            fk = fk if bias is None else fk * torch.exp(bias)
            out = linear_attention(fq, fk, v, causal=causal, sees=sees)
            if out is not None:
                return out
            log_k = log_features(k, omega)
            log_k = log_k if bias is None else log_k + bias
            log_k = log_k if hidden is None else log_k.masked_fill(hidden[..., None], -torch.inf)
            return careful_linear_attention(log_features(q, omega), log_k, v, causal=causal)

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
