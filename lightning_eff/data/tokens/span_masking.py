"""MASS: the encoder sees a text without one span, and the decoder predicts only that span (Song et al. 2019)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Fraction, Integer
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.scoring import agree
from lightning_eff._core.batches import lies_at, map_tensors, tensors
from lightning_eff._core.search_space import Choice, SearchSpace, needs_sequences
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data.tokens._texts.arguments import SpecialTokens, TextKeys, TokenId
from lightning_eff.data.tokens._texts.batches import SPECIAL, maskable, named_by_configs, no_texts, tokens_and_labels

WHO = "SpanMasking"


def spans(maskable: Tensor, ratio: float, generator: torch.Generator) -> Tensor:
    """Draw one span in each row: ``k = round(ratio m)``, at least 1, consecutive places of its m maskable ones, (B, S), bool.

    Its start is uniform over the ``m - k + 1`` places where it fits. A row without maskable places has no span.

    Args:
        maskable: the places that may be masked, (B, S), bool.
        ratio: the fraction of them, in (0, 1].
        generator: the source of random numbers, on the CPU.
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
    """Replace chosen tokens by the mask token or by other tokens of the batch, and leave the rest of them unchanged.

    Args:
        ids: the tokens (B, S).
        chosen: the chosen ones, (B, S), bool.
        mask_token: the id of the mask token.
        hidden: the fraction of the chosen tokens that it replaces.
        random: the fraction replaced by other tokens of the batch.
        generator: the source of random numbers, on the CPU.
    """
    if hidden == 1.0:
        return ids.masked_fill(chosen, mask_token)
    fate = torch.rand(ids.shape, generator=generator, dtype=torch.float32).to(ids.device)
    others = ids.flatten()[torch.randint(ids.numel(), ids.shape, generator=generator).to(ids.device)]
    changed = torch.where(fate < hidden + random, others, ids).masked_fill(fate < hidden, mask_token)
    return torch.where(chosen, changed, ids)


def decoder_input(ids: Tensor, chosen: Tensor, mask_token: int) -> Tensor:
    """Return the decoder's input (B, S): the previous token where it is in the span, else the mask token."""
    before = ids.masked_fill(~chosen, mask_token)
    return torch.cat([torch.full_like(ids[:, :1], mask_token), before[:, :-1]], dim=1)


def is_encoder_decoder(module: nn.Module) -> bool:
    """Return whether a part of ``module`` is an encoder-decoder, by its Hugging Face config or its children's names."""
    return any(
        getattr(getattr(m, "config", None), "is_encoder_decoder", False) or {"encoder", "decoder"} <= m._modules.keys()
        for m in module.modules()
    )


class SpanMasking(Technique):
    """Pretrain an encoder-decoder on plain text: hide one span of each text from the encoder, and let the decoder predict it.

    The loader returns texts: ``input_ids`` (B, S), and ``labels`` with the same tokens, ignored at padding. Of the m tokens of
    a text that attend and are not special, ``round(ratio m)`` consecutive ones are hidden in ``input_ids``. Only these count in
    ``labels``, so the decoder predicts what the encoder does not see. The decoder reads the span shifted by one place, with
    everything else hidden. The models of transformers create this input from the labels, with the padding token where a label
    is ignored. If the batch has ``decoder_input_ids``, the technique creates it, with the mask token.

    Use it for encoder-decoders without labelled data. It saves no compute by itself: the loss covers half of the positions,
    which :class:`FusedLinearCrossEntropy` can exploit. Validation, test and prediction see the loader's own batches, so mask
    there what you want to compare. Draws depend on the seed, step, batch and rank.

    It logs ``masked``, the fraction of the last batch's maskable tokens that was hidden.

    Args:
        ratio: the fraction of each text to hide, 0.5 in the paper. 0 is plain training.
        mask_token_id: the id of the mask token. None takes that of a Hugging Face config in the module. T5 has none; use a
            sentinel, such as ``vocab_size - 1``.
        hidden: the fraction of the span that the mask token replaces. 1 hides all; the paper uses BERT's 0.8.
        random: the fraction of the span that other tokens of the batch replace, 0.1 in the paper. The rest stay unchanged.
        special_tokens: the ids that are never hidden. None takes those in a Hugging Face config.
        keys: the names (dict, dataclass) or positions (tuple, list) of the tokens and of their labels in the batch. None is
            "input_ids" and "labels".
        ignore_index: the label of positions that do not count.

    Raises:
        ValueError: for a value out of range. At setup, if the module is not an encoder-decoder, or the mask token is unknown.
            At the first batch, on all ranks and before any weight changes, if it has no such tokens and labels, or the labels
            differ from the tokens.

    Example:
        >>> trainer = L.Trainer(max_steps=100_000, callbacks=[SpanMasking(0.5, mask_token_id=32_099)])

    References:
        Song et al. 2019, "MASS: Masked Sequence to Sequence Pre-training for Language Generation", arXiv:1905.02450.
    """

    saves = "labelled data: encoder-decoders learn from plain text"
    paper = "Song et al. 2019, arXiv:1905.02450"
    constraints = "needs an encoder-decoder, with the same tokens as input and as labels in the batch"
    needs: ClassVar[Need] = Need.BATCH
    search_space = SearchSpace({"ratio": Choice((0.3, 0.5, 0.7))}, needs_sequences)
    control = Control("the baseline on its loader's own task for the same time, compared on a downstream task")
    conflicts: ClassVar[Mapping[str, str]] = {
        "MaskRateSchedule": "both choose the masked tokens",
        "SequenceLengthWarmup": "it cuts texts into pieces, and a span may cross them",
    }
    needs_automatic_optimization: ClassVar[bool] = False
    sparse_gradients: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"ratio": 0.0}
    checkpointed = ("_seen", "_masked")
    stage = Stage.TRANSFORM

    def __init__(
        self,
        ratio: Annotated[float, Fraction()] = 0.5,
        *,
        mask_token_id: TokenId | None = None,
        hidden: Annotated[float, Fraction()] = 1.0,
        random: Annotated[float, Fraction()] = 0.0,
        special_tokens: SpecialTokens | None = None,
        keys: TextKeys | None = None,
        ignore_index: Annotated[int, Integer()] = -100,
    ) -> None:
        if hidden + random > 1 + 1e-9:
            raise ValueError(
                f"{WHO}({hidden=}, {random=}): they are fractions of the same span, so their sum must be at most 1. Lower one"
                " of them, as in hidden=0.8, random=0.1."
            )
        self.ratio, self.mask_token_id, self.hidden, self.random = ratio, mask_token_id, hidden, random
        self.special_tokens = special_tokens
        self.keys = keys
        self.ignore_index = ignore_index

    def _reset(self) -> None:
        self._seen, self._masked = False, 0.0
        self._mask_token = -1
        self._special: Tensor | None = None

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        if not is_encoder_decoder(session.module):
            raise ValueError(
                f"{WHO}: {type(session.module).__name__} holds no encoder-decoder (a Hugging Face config with"
                f" is_encoder_decoder, or children named encoder and decoder). Remove {WHO}."
            )
        named = sorted(named_by_configs(session.module, ["mask_token_id"]))
        token = self.mask_token_id if self.mask_token_id is not None else next(iter(named), None)
        if token is None:
            raise ValueError(
                f"{WHO}: no config in {type(session.module).__name__} has a mask_token_id. Set mask_token_id=, such as the"
                " tokenizer's, or a sentinel of T5."
            )
        self._mask_token = token
        special = self.special_tokens
        if special is None:
            special = sorted(named_by_configs(session.module, ("pad_token_id", "decoder_start_token_id", *SPECIAL)))
        self._special = torch.tensor(special, dtype=torch.int64)
        rank_zero_info(f"{WHO}: the mask token is {token}, and the special tokens are {special}.")

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        held = self._held(batch)
        if not self._seen:
            agree(self.session, self._problem(batch, held))
            self._seen = True
        if held is None:
            return proceed(batch)
        ids, labels, places = held
        generator = self.session.generator(WHO, step.global_step, step.batch_idx, self.session.rank)
        chosen = spans(places, self.ratio, generator)
        self._masked = int(chosen.sum()) / max(int(places.sum()), 1)
        seen = hide(ids, chosen, self._mask_token, self.hidden, self.random, generator)
        wanted = ids.to(labels.dtype).masked_fill(~chosen, self.ignore_index)
        named, keys = tensors(batch), self.keys or ["input_ids", "labels"]
        at = [next(i for i, (path, _) in enumerate(named) if lies_at(path, key)) for key in keys]
        made = [t for _, t in named]
        for i, (path, t) in enumerate(named):
            if lies_at(path, "decoder_input_ids") and t.shape == ids.shape:
                made[i] = decoder_input(ids, chosen, self._mask_token)
        made[at[0]], made[at[1]] = seen, wanted
        each = iter(made)  # in order, since tokens and labels may be one tensor
        return proceed(map_tensors(batch, lambda t: next(each)))

    def _held(self, batch: Any) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the batch's tokens, labels and maskable positions, or None without such tensors."""
        found = tokens_and_labels(batch, self.keys or ["input_ids", "labels"])
        if found is None or found[0].ndim != 2:
            return None
        return (*found, (found[1] != self.ignore_index) & maskable(batch, found[0], self._special))

    def _problem(self, batch: Any, held: tuple[Tensor, Tensor, Tensor] | None) -> ValueError | None:
        """Return what is wrong with the first batch, if anything."""
        keys = self.keys or ["input_ids", "labels"]
        if held is None:
            return no_texts(WHO, batch, keys)
        ids, labels, places = held
        counts = labels != self.ignore_index
        if bool((ids != labels)[counts].any()):
            return ValueError(
                f"{WHO}: the labels {keys[1]!r} differ from the tokens {keys[0]!r} at"
                f" {int((ids != labels)[counts].sum()):,} of {int(counts.sum()):,} positions that count. Let the loader mask"
                " nothing and return the tokens as labels."
            )
        if not bool(places.any()):
            return ValueError(
                f"{WHO}: none of the first batch's tokens may be masked. Check its labels, attention_mask and special_tokens."
            )
        return None

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"masked": self._masked}

    @override
    def summary(self) -> str:
        return f"hid {self._masked:.1%} of the tokens in the last batch" if self._seen else "made no step"
