"""A falling mask rate for masked language models: more tokens are predicted early in training (Ankner et al. 2023)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction, Integer
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.scoring import agree
from lightning_eff._core.batches import map_tensors
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data.tokens._texts.arguments import SpecialTokens, TextKeys, TokenId
from lightning_eff.data.tokens._texts.batches import SPECIAL, maskable, named_by_configs, no_texts, tokens_and_labels

WHO = "MaskRateSchedule"
SURE = 4  # standard deviations by which a loader's rate must exceed another


def mask_rate(u: float, *, start: float, end: float, until: float) -> float:
    """Return ``m(u) = start + (end - start) u / until`` for ``u < until``, and ``end`` from then on."""
    return start + (end - start) * u / until if u < until else end


@dataclass(frozen=True)
class Rule:
    """How a token is masked, as in BERT (Devlin et al. 2019).

    Attributes:
        mask_token: the id of the mask token; None if no more tokens can be masked.
        hidden: the fraction of masked tokens that it replaces.
        random: the fraction replaced by random tokens. The rest stay unchanged.
        vocab_size: random tokens come from [0, vocab_size); None draws them from the batch.
    """

    mask_token: int | None
    hidden: float = 0.8
    random: float = 0.1
    vocab_size: int | None = None


def remask(
    ids: Tensor,
    labels: Tensor,
    maskable: Tensor,
    rate: float,
    rule: Rule,
    generator: torch.Generator,
    ignore: int = -100,
) -> tuple[Tensor, Tensor]:
    """Mask ``round(rate n)`` of the n maskable positions, by masking or unmasking random ones.

    A position with an ignored label still holds its token, which becomes its label. A masked position holds its token in its
    label, which is put back.

    Args:
        ids: the tokens (B, T).
        labels: the tokens where masked, ``ignore`` elsewhere, (B, T).
        maskable: the positions that may be masked, (B, T). Masked ones count too.
        rate: the mask rate, in [0, 1].
        rule: how a token is masked.
        generator: the source of random numbers.
        ignore: the label of positions that are not masked.

    Returns:
        New ``ids`` and ``labels``, or the given ones if nothing changes.
    """
    masked = labels != ignore
    maskable = maskable | masked
    more = round(rate * int(maskable.sum())) - int(masked.sum())
    if more < 0:
        chosen = _some(masked, -more, generator)
        ids, labels = (t.clone(memory_format=torch.contiguous_format) for t in (ids, labels))
        ids.view(-1)[chosen] = labels.view(-1)[chosen].to(ids.dtype)
        labels.view(-1)[chosen] = ignore
    elif more > 0 and rule.mask_token is not None:
        tokens = torch.where(masked, labels, ids)[maskable]
        chosen = _some(maskable & ~masked, more, generator)
        ids, labels = (t.clone(memory_format=torch.contiguous_format) for t in (ids, labels))
        own = ids.view(-1)[chosen]
        labels.view(-1)[chosen] = own.to(labels.dtype)
        fate = torch.rand(len(chosen), generator=generator, dtype=torch.float32).to(ids.device)
        size = len(tokens) if rule.vocab_size is None else rule.vocab_size
        other = torch.randint(size, (len(chosen),), generator=generator).to(ids.device)
        other = tokens[other] if rule.vocab_size is None else other
        changed = torch.where(fate < rule.hidden + rule.random, other.to(ids.dtype), own)
        ids.view(-1)[chosen] = torch.where(fate < rule.hidden, rule.mask_token, changed)
    return ids, labels


def _some(among: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Draw ``number`` of the flat places where ``among`` is True, uniformly."""
    places = among.flatten().nonzero().squeeze(1)
    return places[torch.randperm(len(places), generator=generator)[:number].to(places.device)]


def _throughout(technique: "MaskRateSchedule") -> Mapping[str, Callback]:
    """Return the control arms: the starting rate and the final rate for the whole run."""
    if technique.neutral:
        return {}
    kept = {name: getattr(technique, name) for name in _SETTINGS}
    rates = {technique.start, technique.end}
    return {f"{rate:.0%} throughout": MaskRateSchedule(start=rate, end=rate, **kept) for rate in sorted(rates)}


_SETTINGS = ("mask_token_id", "hidden", "random", "vocab_size", "special_tokens", "keys", "ignore_index")


def _pointless(profile: RunProfile) -> str | None:
    if profile.sequence_length is None:
        return "samples are not sequences"
    return None if profile.masked_labels else "the task is not masked language modelling: most labels are not -100"


class MaskRateSchedule(Technique):
    """Lower the mask rate of a masked language model linearly from ``start`` to ``end``.

    The loader masks as before. The technique adjusts each batch to exactly ``round(rate n)`` masked positions of the n that may
    be masked. These are the positions that attend (``attention_mask``) and hold no special token. Where the loader masks too
    few, more positions are masked, because those with an ignored label still hold their token. Where it masks too many, masked
    positions get their token back from their label.

    Use it to pretrain BERT-like models: the paper reports up to 1.89 times fewer steps for BERT-base. It adds no passes.
    Masking more tokens requires the mask token: ``mask_token_id``, or the token in most masked positions of the first batch.
    A loader that masks about ``start`` needs none, because its masks are only removed. Draws depend on the seed, step, batch
    and rank. Validation, test and prediction are unchanged.

    It logs the ``rate`` of the last batch, and its ``loader_rate`` before.

    Args:
        start: the mask rate at the beginning.
        end: the mask rate at the end, at most ``start``.
        until: the fraction of the budget at which ``end`` is reached. 0 is plain training.
        mask_token_id: the id of the mask token. None finds it in the first batch.
        hidden: the fraction of newly masked tokens that it replaces, 0.8 in BERT.
        random: the fraction of newly masked tokens that random tokens replace, 0.1 in BERT. The rest stay unchanged.
        vocab_size: the number of ids from which random tokens are drawn. None draws them from the batch.
        special_tokens: the ids that are never masked, such as those of [CLS] and [SEP]. None takes those in a Hugging Face
            config of the module.
        keys: the names (dict, dataclass) or positions (tuple, list) of the tokens and of their labels in the batch. None is
            "input_ids" and "labels".
        ignore_index: the label of positions that are not masked.

    Raises:
        ValueError: for a value out of range. At the first batch, on all ranks and before any weight changes, if it has no such
            tokens and labels, no ignored labels or nothing masked, if the loader masks more than ``start``, or if more must
            be masked and the mask token is unknown.

    Example:
        >>> trainer = L.Trainer(max_steps=100_000, callbacks=[MaskRateSchedule(0.3, end=0.15)])

    References:
        Ankner et al. 2023, "Dynamic Masking Rate Schedules for MLM Pretraining", arXiv:2305.15096 (30 % to 15 %).
        Devlin et al. 2019, arXiv:1810.04805 (80/10/10).
    """

    saves = "steps: up to 1.89 times fewer for BERT-base in the paper"
    paper = "Ankner et al. 2023, arXiv:2305.15096"
    constraints = "needs a masked language model, with tokens and labels in the batch"
    needs: ClassVar[Need] = Need.BATCH
    search_space = SearchSpace({"start": Uniform(0.2, 0.5), "until": Choice((0.5, 1.0))}, _pointless)
    control = Control("either rate throughout, for the same time", _throughout)
    needs_automatic_optimization: ClassVar[bool] = False
    needs_budget: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"until": 0.0}
    checkpointed = ("_seen", "_mask_token", "_rate", "_loader_rate")
    stage = Stage.TRANSFORM

    def __init__(
        self,
        start: Annotated[float, Fraction(above=0, below=1)] = 0.3,
        *,
        end: Annotated[float, Fraction(above=0, below=1)] = 0.15,
        until: Annotated[float, Fraction()] = 1.0,
        mask_token_id: TokenId | None = None,
        hidden: Annotated[float, Fraction()] = 0.8,
        random: Annotated[float, Fraction()] = 0.1,
        vocab_size: Annotated[int, Count(at_least=0)] | None = None,
        special_tokens: SpecialTokens | None = None,
        keys: TextKeys | None = None,
        ignore_index: Annotated[int, Integer()] = -100,
    ) -> None:
        if end > start:
            raise ValueError(f"{WHO}({start=}, {end=}): end must not be above start. Lower end, or raise start.")
        if hidden + random > 1 + 1e-9:
            raise ValueError(
                f"{WHO}({hidden=}, {random=}): they are fractions of the same tokens, so their sum must be at most 1. Lower one"
                " of them, as in hidden=0.8, random=0.1."
            )
        self.start, self.end, self.until = start, end, until
        self.mask_token_id, self.hidden, self.random, self.vocab_size = mask_token_id, hidden, random, vocab_size
        self.special_tokens = special_tokens
        self.keys = keys
        self.ignore_index = ignore_index

    def _reset(self) -> None:
        self._mask_token = self.mask_token_id
        self._seen = False
        self._rate = self._loader_rate = 0.0
        self._special: Tensor | None = None

    @override
    def on_model(self, session: Session) -> None:
        named = self.special_tokens
        if named is None:
            named = sorted(named_by_configs(session.module, ("pad_token_id", *SPECIAL, "mask_token_id")))
        self._special = torch.tensor(named, dtype=torch.int64)

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if not self._seen:
            self._look(batch)
        held = self._held(batch)
        if held is None:
            return proceed(batch)
        ids, labels, places = held
        rate = mask_rate(self.session.progress.u, start=self.start, end=self.end, until=self.until)
        generator = self.session.generator(WHO, step.global_step, step.batch_idx, self.session.rank)
        rule = Rule(self._mask_token, self.hidden, self.random, self.vocab_size)
        new = remask(ids, labels, places, rate, rule, generator, self.ignore_index)
        count = max(int((places | (labels != self.ignore_index)).sum()), 1)
        self._loader_rate = int((labels != self.ignore_index).sum()) / count
        self._rate = int((new[1] != self.ignore_index).sum()) / count
        by_id = {id(ids): new[0], id(labels): new[1]}
        return proceed(map_tensors(batch, lambda t: by_id.get(id(t), t)))

    def _held(self, batch: Any) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the batch's tokens, labels and maskable positions, or None without such tensors."""
        found = tokens_and_labels(batch, self.keys or ["input_ids", "labels"])
        return None if found is None else (*found, maskable(batch, found[0], self._special))

    # -- the first batch

    def _look(self, batch: Any) -> None:
        """Find out how the loader masks, the same on all ranks."""
        problem, counts, token = None, (0, 0), None
        try:
            counts, token = self._read(batch)
        except ValueError as error:
            problem = error
        every = agree(self.session, problem, (counts, token))
        masked, of = (sum(counts[i] for counts, _ in every) for i in (0, 1))
        share, deviation = masked / of, math.sqrt(self.start * (1 - self.start) / of)
        if share > self.start + SURE * deviation:
            raise ValueError(
                f"{WHO}(start={self.start}): the loader masks {share:.0%} of the first batch's {of:,} tokens, more than"
                " start. Raise start, or lower the loader's own rate."
            )
        if self._mask_token is None:
            tokens = {token for _, token in every if token is not None}
            self._mask_token = tokens.pop() if len(tokens) == 1 else None
        if self._mask_token is None and share < self.start - SURE * deviation:
            raise ValueError(
                f"{WHO}(start={self.start}): the loader masks {share:.0%} of the first batch's {of:,} tokens, but the mask"
                " token is unknown, because no token is in most masked positions. Set mask_token_id=, or let the loader mask"
                f" {self.start:.0%}, so that masks are only removed."
            )
        self._seen = True
        rank_zero_info(
            f"{WHO}: the loader masks {share:.1%} of the tokens. The mask token is"
            f" {'unknown' if self._mask_token is None else self._mask_token}, and the special tokens are"
            f" {[] if self._special is None else self._special.tolist()}."
        )

    def _read(self, batch: Any) -> tuple[tuple[int, int], int | None]:
        """Return how many tokens are masked, how many may be, and the token that replaces most of them."""
        keys = self.keys or ["input_ids", "labels"]
        held = self._held(batch)
        if held is None:
            raise no_texts(WHO, batch, keys)
        ids, labels, places = held
        masked = labels != self.ignore_index
        if bool(masked.all()) or not bool(masked.any()):
            raise ValueError(
                f"{WHO}: {'all' if bool(masked.all()) else 'none'} of the labels {keys[1]!r} count, but a masked language"
                f" model has {self.ignore_index} where a token is not masked. Set keys= or ignore_index=, or remove {WHO}."
            )
        replaced = ids[masked & (ids != labels)]
        if not len(replaced):
            raise ValueError(
                f"{WHO}: the tokens {keys[0]!r} equal the labels {keys[1]!r} wherever these count, so none is masked. Mask"
                f" them in the loader, or remove {WHO}, which does not apply to causal language models."
            )
        values, counts = replaced.unique(return_counts=True)
        token = int(values[counts.argmax()]) if 2 * int(counts.max()) >= len(replaced) else None
        return (int(masked.sum()), int((places | masked).sum())), token

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"rate": self._rate, "loader_rate": self._loader_rate}

    @override
    def summary(self) -> str:
        if not self._seen:
            return "made no step"
        return f"masked {self._rate:.1%} of the tokens in the last batch, after the loader's {self._loader_rate:.1%}"
