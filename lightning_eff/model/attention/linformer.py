"""Linformer: keys and values of n tokens are projected to k of them by maps that are learnt (Wang et al. 2020)."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._attention.calls import Call, CannotReplace, keys_alone
from lightning_eff._core._needs.needs import Need, Part, Reasons
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey
from lightning_eff._core.technique import Control
from lightning_eff.model.attention._replacing.inside import Inside, places, put_inside
from lightning_eff.model.attention._replacing.technique import CONFLICTS, no_sequences

WHO = "Linformer"
KEYS, VALUES = "linformer_keys", "linformer_values"
_CAUSAL = "it is causal, and what it projects would tell each query of later tokens"
_LENGTHS = "its maps are of one number of tokens"


def projected(x: Tensor, maps: Tensor, there: Tensor | None) -> Tensor:
    """``E x`` for each head, (B, H, k, D): what is not ``there`` has no part in it.

    Args:
        x: keys or values, (B, H, n, D).
        maps: E, (k, n).
        there: which of them count, broadcasts to (B, H, n), or None for all.
    """
    return maps.to(x.dtype) @ (x if there is None else x.masked_fill(~there[..., None], 0.0))


class Linformed(Inside):
    """Attention whose keys and values are projected along their tokens."""

    def attends(self, call: Call) -> Tensor:
        e, f = (cast(Tensor, self._parameters[name]) for name in (KEYS, VALUES))
        why = _unfit(call)
        if why is None and call.key.shape[-2] != e.shape[-1]:
            why = (
                f"it is on {call.key.shape[-2]} tokens, and its maps on {e.shape[-1]}: give length="
                f"{call.key.shape[-2]}, and batches of that length alone"
            )
        if why is not None:
            raise CannotReplace(why)
        there, _ = keys_alone(call, WHO)
        if there is not None and there.dtype != torch.bool:
            hidden = there <= torch.finfo(there.dtype).min / 2
            if bool((there.masked_fill(hidden, 0) != 0).any()):
                raise CannotReplace("its mask adds numbers to the scores of keys, which are no more there one by one")
            there = ~hidden
        k, v = projected(call.key, e, there), projected(call.value, f, there)
        return replace(call, key=k, value=v, mask=None).run()

    def reset_parameters(self) -> None:
        """The class's own, and the maps as they begin."""
        reset = getattr(super(), "reset_parameters", None)
        if reset is not None:
            reset()
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Entries are normal, of variance 1 / k."""
        for name in (KEYS, VALUES):
            maps = cast(Tensor, self._parameters[name])
            maps.normal_(std=1.0 / math.sqrt(len(maps)))


def _unfit(call: Call) -> str | None:
    if call.causal:
        return _CAUSAL
    if call.mask is None:
        return None
    try:
        _, causal = keys_alone(call, WHO)
    except CannotReplace as e:
        return str(e)
    return _CAUSAL if causal else None


def _pointless(profile: RunProfile) -> str | None:
    if (why := no_sequences(profile)) is not None:
        return why
    if profile.sequence_length is not None and profile.sequence_length < 512:
        return f"in sequences of {profile.sequence_length} tokens exact attention is faster"
    return None


class Linformer(Architecture):
    """Let attention see k mixtures of the n tokens' keys and values, which are learnt, in the place of all n.

    Attention becomes ``softmax(Q (E K)^T / sqrt(d)) F V`` with E and F (k, n) for each layer, shared by its heads; their
    entries are normal of variance 1 / k at first. The module stays as it is, its calls of ``F.scaled_dot_product_attention``
    (Hugging Face's "sdpa" among them) and of ``nn.MultiheadAttention`` (with ``need_weights=False``) are changed, and dropout
    of weights and grouped queries go along. Keys that a mask hides as padding have no part in the mixtures.

    **For encoders of one length alone**: causal attention is refused, since a mixture holds later tokens, and so are masks that
    say more than what is padding, and batches of another number of tokens.

    **Where it pays.** A head of d features takes 2 n k d products to mix and 2 n k d to attend, in the place of 2 n^2 d: none
    are saved below n = 2 k, and up to some 8,000 tokens fused exact attention is faster on a GPU. Another model: trained from
    nothing, or trained on. Its checkpoints load into ``lightning_eff.apply(plain, Linformer(...))`` alone, and ``export``
    refuses.

    Logged: ``attentions``, how many.

    Args:
        rank: k >= 1, at most n; the paper has 256. 0 is plain training.
        length: n, tokens; None takes as many as a pass on made-up inputs has, which is right for images.

    Raises:
        ValueError: for other values; at setup or in ``apply``, where no attention is found, or one that is causal or has fewer
            tokens than ``rank``; at a batch of another length.

    Sources:
        Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity", arXiv:2006.04768.
    """

    saves: ClassVar[str] = "the square of the length in attention, above some 8,000 tokens, for another model"
    paper: ClassVar[str] = "Wang et al. 2020, arXiv:2006.04768"
    constraints: ClassVar[str] = (
        "encoders on batches of one length, by scaled_dot_product_attention or nn.MultiheadAttention, not compiled; a single"
        " device or DDP"
    )
    survey: ClassVar[Survey | None] = Survey("linear attention (Linformer)", zhuang="4", shen="4.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"rank": Choice((64, 128))}, _pointless)
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero, with fused exact attention"
    )
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
        **dict.fromkeys(("AttentionWindowWarmup", "NarrowAttention"), "its keys are mixtures, which are in no window"),
    }
    change_at: ClassVar[Change] = Change.ADAPT
    stays: ClassVar[str] = "attention to all keys does not compute what it does to mixtures of them"
    needs: ClassVar[Need] = Need.WHOLE
    refuses: ClassVar[Reasons] = {**Architecture.refuses, Part.PIPELINE: ""}
    _count = 0

    def __init__(self, rank: int = 256, *, length: int | None = None) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            raise ValueError(f"{WHO}({rank=}): expected an integer >= 1, such as 256; 0 is plain training.")
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
            raise ValueError(f"{WHO}({length=}): expected a number of tokens >= 1, or None.")
        self.rank, self.length = rank, length

    @property
    @override
    def neutral(self) -> bool:
        return self.rank == 0

    @override
    def change(self, surgeon: Surgeon) -> None:
        found = places(surgeon, who=WHO, unfit=_unfit)
        tokens = {path: self.length or place.tokens for path, place in found.items()}
        for path, n in tokens.items():
            if self.rank > n:
                raise ValueError(
                    f"{WHO}(rank={self.rank}): {path} attends to {n} tokens, found by {found[path].of}; expected at most as"
                    " many mixtures. Lower rank, or give length."
                )
        by_id = {id(surgeon.root.get_submodule(path)): n for path, n in tokens.items()}

        def build(plain: nn.Module) -> nn.Module:
            made = cast(Linformed, put_inside(Linformed, plain, who=WHO))
            for name in (KEYS, VALUES):
                made.register_parameter(name, nn.Parameter(torch.empty(self.rank, by_id[id(plain)])))
            made.begin()
            return made

        surgeon.swap(lambda path, m: path in found, build, what="a module that attends")
        self._count = len(found)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"attentions": self._count}

    @override
    def summary(self) -> str:
        return f"{self._count} attentions to {self.rank} mixtures of tokens" if self._count else "changed before"

    @override
    def settings(self) -> dict[str, Any]:
        return {"rank": self.rank, "length": self.length}
