"""MASS: an encoder sees a text without one span of it, and the decoder predicts that span alone (Song et al. 2019)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.scoring import agree
from lightning_eff._core.batches import lies_at, map_tensors, tensors
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique

WHO = "SpanMasking"


def spans(maskable: Tensor, ratio: float, generator: torch.Generator) -> Tensor:
    """One span in each row: ``k = round(ratio m)``, at least 1, of its m maskable places, next to each other, (B, S), bool.

    Where it begins is drawn evenly from the ``m - k + 1`` places where it fits. A row without maskable places has none.

    Args:
        maskable: the places that may be masked, (B, S), bool.
        ratio: in (0, 1].
        generator: where draws come from, on the CPU.
    """
    m = maskable.sum(dim=1, keepdim=True)
    k = (ratio * m).round().long().clamp(min=1)
    drawn = torch.rand(len(maskable), 1, generator=generator, dtype=torch.float64).to(maskable.device)
    begin = (drawn * (m - k + 1)).long()
    place = maskable.cumsum(dim=1) - 1
    return maskable & (place >= begin) & (place < begin + k)


def hide(
    ids: Tensor, chosen: Tensor, mask_token: int, hidden: float, random: float, generator: torch.Generator
) -> Tensor:
    """The tokens with those that are chosen replaced: by the mask token, by others of the batch, or (the rest) by themselves.

    Args:
        ids: tokens (B, S).
        chosen: which, (B, S), bool.
        mask_token: the number that hides.
        hidden: share of the chosen that it replaces.
        random: share replaced by tokens that stand elsewhere in the batch.
        generator: where draws come from, on the CPU.
    """
    if hidden == 1.0:
        return ids.masked_fill(chosen, mask_token)
    fate = torch.rand(ids.shape, generator=generator, dtype=torch.float32).to(ids.device)
    others = ids.flatten()[torch.randint(ids.numel(), ids.shape, generator=generator).to(ids.device)]
    changed = torch.where(fate < hidden + random, others, ids).masked_fill(fate < hidden, mask_token)
    return torch.where(chosen, changed, ids)


def decoder_input(ids: Tensor, chosen: Tensor, mask_token: int) -> Tensor:
    """What a decoder reads: the token before, where that is in the span, and elsewhere the mask token; (B, S)."""
    before = ids.masked_fill(~chosen, mask_token)
    return torch.cat([torch.full_like(ids[:, :1], mask_token), before[:, :-1]], dim=1)


def is_encoder_decoder(module: nn.Module) -> bool:
    """Whether a part of ``module`` is one: by its Hugging Face config, or by parts called encoder and decoder."""
    return any(
        getattr(getattr(m, "config", None), "is_encoder_decoder", False) or {"encoder", "decoder"} <= m._modules.keys()
        for m in module.modules()
    )


def _pointless(profile: RunProfile) -> str | None:
    return "samples are no sequences" if profile.sequence_length is None else None


class SpanMasking(Technique):
    """Hide a contiguous span of each text from the encoder, and let the decoder predict it, and nothing else.

    The loader gives texts: ``input_ids`` (B, S), and ``labels`` that hold the same tokens, ignored where there is
    padding. Of the m tokens of a text that attend and are not special, ``round(ratio m)`` next to each other are hidden
    in ``input_ids``; ``labels`` keep these alone, so that the places that the encoder does not see are those that the
    decoder predicts. What the decoder reads is the span one place later, with everything else hidden: transformers'
    models make that of the labels by themselves, with the padding token where a label is ignored; where the batch has
    ``decoder_input_ids``, they are made here, with the mask token.

    It makes a pre-training task of plain text, and saves no compute of itself: the loss is on half of the places, which
    :class:`FusedLinearCrossEntropy` then computes alone. Evaluation sees what its loader gives: mask there what is to
    be compared. Draws follow from the run's seed, the step, the batch and the rank alone.

    Logged: ``masked``, the share of the last batch's maskable tokens that was hidden.

    Args:
        ratio: share of each text that is hidden, in (0, 1]; the paper's is 0.5. 0 is plain training.
        mask_token_id: the token that hides; None takes that of a Hugging Face config in the module. T5, which has none,
            has sentinels, such as ``vocab_size - 1``.
        hidden: share of the span that it replaces. 1 hides all; the paper's is BERT's 0.8.
        random: share of the span replaced by other tokens of the batch, in the paper 0.1; the rest stays.
        special_tokens: tokens that are never hidden; None takes those that a Hugging Face config names.
        keys: names (dict, dataclass) or positions (tuple, list) of the tokens and of their labels in the batch.
        ignore_index: the label of places that do not count.

    Raises:
        ValueError: if an argument is out of its range; at setup, if the module is no encoder-decoder, or the mask token
            is not known; at the first batch, on all ranks and before any weight has changed, if it has no such tokens
            and labels, or labels that count are not the tokens themselves.

    Sources:
        Song et al. 2019, arXiv:1905.02450.
    """

    saves: ClassVar[str] = "labelled data: encoder-decoders learn of plain text, a span of it at a time"
    paper: ClassVar[str] = "Song et al. 2019, arXiv:1905.02450"
    constraints: ClassVar[str] = "encoder-decoders whose batches hold texts as tokens and, once more, as labels"
    needs: ClassVar[Need] = Need.BATCH
    survey: ClassVar[Survey | None] = Survey("token masking (MASS)", zhuang="2.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"ratio": Choice((0.3, 0.5, 0.7))}, _pointless)
    control: ClassVar[Control] = Control(
        "the baseline on its loader's own task for as many seconds, by a downstream measure that neither is trained on"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "MaskRateSchedule": "both say which tokens of a batch are masked",
        "SequenceLengthWarmup": "a span of a whole text is not one of the pieces that it is cut into",
    }
    needs_automatic_optimization: ClassVar[bool] = False
    sparse_gradients: ClassVar[bool] = True

    def __init__(
        self,
        ratio: float = 0.5,
        *,
        mask_token_id: int | None = None,
        hidden: float = 1.0,
        random: float = 0.0,
        special_tokens: list[int] | None = None,
        keys: list[str | int] | None = None,
        ignore_index: int = -100,
    ) -> None:
        if not 0 <= ratio <= 1:
            raise ValueError(
                f"{WHO}({ratio=}): expected a share of the tokens in [0, 1], the paper's 0.5. 0 is plain training."
            )
        if not (hidden >= 0 and random >= 0 and hidden + random <= 1 + 1e-9):
            raise ValueError(f"{WHO}({hidden=}, {random=}): expected shares of the span, together at most 1.")
        if mask_token_id is not None and (
            isinstance(mask_token_id, bool) or not isinstance(mask_token_id, int) or mask_token_id < 0
        ):
            raise ValueError(f"{WHO}({mask_token_id=}): expected an integer >= 0, or None.")
        if keys is not None and (isinstance(keys, str) or not isinstance(keys, Sequence) or len(keys) != 2):
            raise ValueError(
                f"{WHO}({keys=}): expected two names or positions, of the tokens and of their labels, such as"
                " ['input_ids', 'labels'] or [0, 1]."
            )
        self.ratio, self.mask_token_id, self.hidden, self.random = ratio, mask_token_id, hidden, random
        self.special_tokens = None if special_tokens is None else list(special_tokens)
        self.keys = None if keys is None else list(keys)
        self.ignore_index = ignore_index
        self._reset()

    def _reset(self) -> None:
        self._seen, self._masked = False, 0.0
        self._mask_token = -1
        self._special: Tensor | None = None

    @property
    @override
    def neutral(self) -> bool:
        return self.ratio == 0.0

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        session.chain.add(Stage.TRANSFORM, self._link)

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        if not is_encoder_decoder(session.module):
            raise ValueError(
                f"{WHO}: {type(session.module).__name__} holds no encoder-decoder (a Hugging Face config with"
                " is_encoder_decoder, or a module with parts called encoder and decoder); expected one, whose decoder predicts"
                " what its encoder does not see. Take the technique out."
            )
        configs = [getattr(m, "config", None) for m in session.module.modules()]
        found = [getattr(config, "mask_token_id", None) for config in configs]
        token = next((t for t in [self.mask_token_id, *found] if isinstance(t, int)), None)
        if token is None:
            raise ValueError(
                f"{WHO}: no config in {type(session.module).__name__} names a mask_token_id; expected the token that hides a"
                " span. Give mask_token_id=, such as the tokenizer's, or a sentinel of T5's."
            )
        self._mask_token = token
        named = {getattr(config, name, None) for config in configs for name in _SPECIAL}
        special = sorted(t for t in named if isinstance(t, int)) if self.special_tokens is None else self.special_tokens
        self._special = torch.tensor(special, dtype=torch.int64)
        rank_zero_info(f"{WHO}: the mask token is {token}, never masked are {special or 'no'} tokens.")

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        held = self._held(batch)
        if not self._seen:
            agree(self.session, self._problem(batch, held))
            self._seen = True
        if held is None:
            return proceed(batch)
        ids, labels, maskable = held
        generator = self.session.generator(WHO, step.global_step, step.batch_idx, self.session.rank)
        chosen = spans(maskable, self.ratio, generator)
        self._masked = int(chosen.sum()) / max(int(maskable.sum()), 1)
        seen = hide(ids, chosen, self._mask_token, self.hidden, self.random, generator)
        wanted = ids.to(labels.dtype).masked_fill(~chosen, self.ignore_index)
        named, keys = tensors(batch), self.keys or ["input_ids", "labels"]
        places = [next(i for i, (path, _) in enumerate(named) if lies_at(path, key)) for key in keys]
        made = [t for _, t in named]
        for i, (path, t) in enumerate(named):
            if lies_at(path, "decoder_input_ids") and t.shape == ids.shape:
                made[i] = decoder_input(ids, chosen, self._mask_token)
        made[places[0]], made[places[1]] = seen, wanted
        each = iter(made)  # by place, since tokens and labels may be one tensor
        return proceed(map_tensors(batch, lambda t: next(each)))

    def _held(self, batch: Any) -> tuple[Tensor, Tensor, Tensor] | None:
        """The batch's tokens, labels and what may be masked; None where it has no such tensors."""
        named = tensors(batch)
        keys = self.keys or ["input_ids", "labels"]
        ids, labels = (next((t for path, t in named if lies_at(path, key)), None) for key in keys)
        if ids is None or labels is None or ids.shape != labels.shape or ids.ndim != 2 or ids.is_floating_point():
            return None
        maskable = labels != self.ignore_index
        for path, t in named:
            if lies_at(path, "attention_mask") and not lies_at(path, "decoder_attention_mask") and t.shape == ids.shape:
                maskable &= t != 0
        if self._special is not None and len(self._special):
            maskable &= ~torch.isin(ids, self._special.to(ids.device))
        return ids, labels, maskable

    def _problem(self, batch: Any, held: tuple[Tensor, Tensor, Tensor] | None) -> ValueError | None:
        """What is wrong with the first batch."""
        keys = self.keys or ["input_ids", "labels"]
        if held is None:
            listed = ", ".join(
                f"{path or 'the batch'} {tuple(t.shape)} {str(t.dtype)[6:]}" for path, t in tensors(batch)
            )
            return ValueError(
                f"{WHO}: found no tokens {keys[0]!r} and labels {keys[1]!r} of one shape (B, S) and of integers in the batch:"
                f" {listed or 'no tensors'}. Name them by keys=, such as keys=['tokens', 'targets'] or keys=[0, 1]."
            )
        ids, labels, maskable = held
        counts = labels != self.ignore_index
        if bool((ids != labels)[counts].any()):
            return ValueError(
                f"{WHO}: the labels {keys[1]!r} are not the tokens {keys[0]!r} themselves, at"
                f" {int((ids != labels)[counts].sum()):,} of {int(counts.sum()):,} places that count; expected plain"
                " texts, of which a span is to be predicted. Let the loader mask nothing and give the tokens once more as"
                " labels."
            )
        if not bool(maskable.any()):
            return ValueError(
                f"{WHO}: none of the first batch's tokens may be masked; expected labels and tokens that count."
            )
        return None

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"masked": self._masked}

    @override
    def summary(self) -> str:
        return f"{self._masked:.1%} of the tokens in spans, in the last batch" if self._seen else "no step taken"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen, "masked": self._masked}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seen, self._masked = state_dict["seen"], state_dict["masked"]


_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "decoder_start_token_id")
