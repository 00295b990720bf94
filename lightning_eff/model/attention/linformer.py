"""Linformer: learnt matrices project the keys and values of n tokens to k (Wang et al. 2020)."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count
from lightning_eff._core._attention.calls import Call, CannotReplace
from lightning_eff._core._attention.inside import Inside, Place, put_inside
from lightning_eff._core.search_space import Choice, SearchSpace
from lightning_eff.model.attention._replacing.inside import InsideAttention
from lightning_eff.model.attention._replacing.masks import problem_of_mask, visible_keys
from lightning_eff.model.attention._replacing.technique import CONFLICTS, EXACT, too_short

WHO = "Linformer"
KEYS, VALUES = "linformer_keys", "linformer_values"
_CAUSAL = "it is causal, and mixtures of keys would show later tokens to earlier queries"
_LENGTHS = "its projections need a fixed number of tokens"


def projected(x: Tensor, maps: Tensor, there: Tensor | None) -> Tensor:
    """Return ``E x`` for each head, (B, H, k, D), without hidden tokens.

    Args:
        x: keys or values, (B, H, n, D).
        maps: E, (k, n).
        there: which tokens count, broadcasts to (B, H, n), or None for all.
    """
    return maps.to(x.dtype) @ (x if there is None else x.masked_fill(~there[..., None], 0.0))


class Linformed(Inside):
    """Attention whose keys and values are projected along their tokens."""

    def attends(self, call: Call) -> Tensor:
        e, f = (cast(Tensor, self._parameters[name]) for name in (KEYS, VALUES))
        why = problem_of_mask(call, WHO, _CAUSAL)
        if why is None and call.key.shape[-2] != e.shape[-1]:
            why = (
                f"it has {call.key.shape[-2]} tokens, but its projections are for {e.shape[-1]}: give"
                f" length={call.key.shape[-2]}, and only batches of that length"
            )
        if why is not None:
            raise CannotReplace(why)
        there, _ = visible_keys(call, WHO)
        k, v = projected(call.key, e, there), projected(call.value, f, there)
        return replace(call, key=k, value=v, mask=None).run()

    @override
    @torch.no_grad()
    def begin(self) -> None:
        """Draw normal entries of variance 1 / k."""
        for name in (KEYS, VALUES):
            maps = cast(Tensor, self._parameters[name])
            maps.normal_(std=1.0 / math.sqrt(len(maps)))


class Linformer(InsideAttention):
    """Let attention see k learnt mixtures of the keys and values instead of all n tokens.

    Attention becomes ``softmax(Q (E K)^T / sqrt(d)) F V`` with learnt E and F (k, n) for each layer, shared by its
    heads. Their entries start normal with variance 1 / k. The module stays unchanged; its calls of
    ``F.scaled_dot_product_attention`` (Hugging Face's "sdpa" among them) and of ``nn.MultiheadAttention`` (with
    ``need_weights=False``) are replaced. Dropout of weights and grouped queries are supported. Keys that a mask hides
    as padding are not part of the mixtures.

    **It works for encoders with one sequence length**: causal attention is refused, since a mixture contains later
    tokens. So are masks that say more than what is padding, and batches with another number of tokens.

    **Where it pays.** A head of d features needs 2 n k d products to mix and 2 n k d to attend, instead of 2 n^2 d.
    It saves nothing below n = 2 k, and up to about 8,000 tokens fused exact attention is faster on a GPU. It changes
    the model, so train with it from the start or fine-tune with it. Its checkpoints load only into
    ``lightning_eff.apply(plain, Linformer(...))``, and ``lightning_eff.export`` refuses it.

    Logged: ``attentions``, the number of attention modules.

    Args:
        rank: the number of mixtures k, at most n. 256 is the paper's, and 0 is plain training.
        length: the number of tokens n. None takes it from a pass on made-up inputs, which is right for images.

    Raises:
        ValueError: for a value out of range. At setup or in ``apply``, if there is no attention, or one is causal or
            has fewer tokens than ``rank``. At a batch of another length.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[Linformer(rank=256, length=4096)])

    References:
        Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity", arXiv:2006.04768.
    """

    saves = "the quadratic cost of attention, above about 8,000 tokens; changes the model"
    paper = "Wang et al. 2020, arXiv:2006.04768"
    constraints = (
        "encoders on batches of one length, by scaled_dot_product_attention or nn.MultiheadAttention, not compiled; a single"
        " device or DDP"
    )
    search_space = SearchSpace({"rank": Choice((64, 128))}, too_short)
    control = EXACT
    conflicts: ClassVar[Mapping[str, str]] = {
        **CONFLICTS,
        **dict.fromkeys(
            (
                "SequenceLengthWarmup",
                "TokenBudgetBatches",
                "ProgressiveResizing",
                "EfficientTrain",
                "FixRes",
                "AutoProg",
                "CompoundGrowth",
                "PatchDropout",
                "RandomLTD",
                "TokenDropping",
                "TokenMerging",
                "PartialTokenTraining",
            ),
            _LENGTHS,
        ),
        **dict.fromkeys(
            ("AttentionWindowWarmup", "NarrowAttention"), "its keys are mixtures, which belong to no window"
        ),
    }
    stays = "attention to all keys computes something else"
    neutral_at: ClassVar[Mapping[str, Any]] = {"rank": 0}

    def __init__(
        self,
        rank: Annotated[int, Count(at_least=0)] = 256,
        *,
        length: Annotated[int, Count()] | None = None,
    ) -> None:
        self.rank, self.length = rank, length

    @override
    def unfit(self, call: Call) -> str | None:
        return problem_of_mask(call, WHO, _CAUSAL)

    @override
    def check_places(self, found: Mapping[str, Place]) -> None:
        for path, place in found.items():
            n = self.length or place.tokens
            if self.rank > n:
                raise ValueError(
                    f"{WHO}(rank={self.rank}): {path} attends to only {n} tokens, found by {place.of}. Use rank={n} or less,"
                    " or give length."
                )

    @override
    def build(self, plain: nn.Module, place: Place) -> Inside:
        made = cast(Linformed, put_inside(Linformed, plain, who=WHO))
        for name in (KEYS, VALUES):
            made.register_parameter(name, nn.Parameter(torch.empty(self.rank, self.length or place.tokens)))
        made.begin()
        return made

    @override
    def summary(self) -> str:
        return (
            f"{self._replaced} attention modules saw {self.rank} mixtures of tokens"
            if self._replaced
            else "changed before"
        )

    @override
    def settings(self) -> dict[str, Any]:
        return {"rank": self.rank, "length": self.length}
