"""A falling mask rate for masked language models: more is predicted early in training than late (Ankner et al. 2023)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.scoring import agree
from lightning_eff._core.batches import lies_at, map_tensors, tensors
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique

WHO = "MaskRateSchedule"
SURE = 4  # standard deviations by which a loader's rate must be above another to be called so


def mask_rate(u: float, *, start: float, end: float, until: float) -> float:
    """``m(u) = start + (end - start) u / until`` for ``u < until``, and ``end`` from then on."""
    return start + (end - start) * u / until if u < until else end


@dataclass(frozen=True)
class Rule:
    """What becomes of a token that is masked, as in BERT (Devlin et al. 2019).

    Attributes:
        mask_token: the number that hides; None where nothing more can be masked.
        hidden: share of tokens that it replaces.
        random: share replaced by other tokens; the rest stay as they are.
        vocab_size: others are drawn from [0, vocab_size); None draws them from the batch's own.
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
    """Of the maskable positions, ``round(rate n)`` masked: more than there are, or fewer, drawn evenly.

    A position whose label is ignored still holds its token, which becomes its label; one that is masked holds its token
    in its label, which is put back.

    Args:
        ids: tokens (B, T).
        labels: the tokens where masked, ``ignore`` elsewhere, (B, T).
        maskable: which positions may be masked; those that are masked count, (B, T).
        rate: in [0, 1].
        rule: what masking does to a token.
        generator: where draws come from.
        ignore: the label of positions that are not masked.

    Returns:
        New ``ids`` and ``labels``; the very ones given where nothing changes.
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
    """``number`` of the places where ``among`` is True, drawn evenly; flat."""
    places = among.flatten().nonzero().squeeze(1)
    return places[torch.randperm(len(places), generator=generator)[:number].to(places.device)]


def _throughout(technique: "MaskRateSchedule") -> Mapping[str, Callback]:
    """The rate at which it starts, and the one at which it ends, for the whole run."""
    if technique.neutral:
        return {}
    kept = {name: getattr(technique, name) for name in _SETTINGS}
    rates = {technique.start, technique.end}
    return {f"{rate:.0%} throughout": MaskRateSchedule(start=rate, end=rate, **kept) for rate in sorted(rates)}


_SETTINGS = ("mask_token_id", "hidden", "random", "vocab_size", "special_tokens", "keys", "ignore_index")


def _pointless(profile: RunProfile) -> str | None:
    if profile.sequence_length is None:
        return "samples are no sequences"
    return None if profile.masked_labels else "tokens are not hidden and predicted: most labels are not -100"


class MaskRateSchedule(Technique):
    """Let the share of masked tokens fall from ``start`` to ``end`` over the first ``until`` of the budget, linearly.

    The loader masks as it always does. Positions whose label is ignored still hold their token, so more of them are
    masked from outside where the loader's own rate is below the schedule's; where it is above, masked positions get their
    token back from their label. Each batch has exactly ``round(rate n)`` masked positions of the n that may be masked:
    those that attend (``attention_mask``), and hold no special token.

    To mask more, the mask token must be known: ``mask_token_id``, or what stands in most of the first batch's masked
    positions. A loader whose rate is ``start`` or so needs none, as its masks are only taken back.

    Draws follow from the run's seed, the step, the batch and the rank alone. Evaluation is plain.

    Logged: ``rate`` of the last batch, and the ``loader_rate`` that it came with.

    Args:
        start: share of the tokens, in (0, 1).
        end: share, in (0, ``start``].
        until: fraction of the budget in [0, 1] at which ``end`` is reached, and then kept; 0 is plain training.
        mask_token_id: the token that hides; None to see it in the first batch.
        hidden: share of further masked tokens that it replaces, BERT's 0.8; 1 hides all.
        random: share replaced by other tokens, BERT's 0.1; the rest stay. ``hidden + random`` is at most 1.
        vocab_size: other tokens are drawn from [0, vocab_size); None draws them from those of the batch.
        special_tokens: tokens that are never masked, such as [CLS] and [SEP]; None takes those that a Hugging Face
            config in the module names.
        keys: names (dict, dataclass) or positions (tuple, list) of the tokens and of their labels in the batch.
        ignore_index: the label of positions that are not masked.

    Raises:
        ValueError: if an argument is out of its range; at the first batch, on all ranks and before any weight has changed,
            if it has no such tokens and labels, no ignored labels or nothing masked, if the loader masks more than
            ``start``, or if more is to be masked and the mask token cannot be told.

    Sources:
        Ankner et al. 2023, arXiv:2305.15096 (30 % to 15 %, linearly); Devlin et al. 2019, arXiv:1810.04805 (80/10/10).
    """

    saves: ClassVar[str] = "steps, by the paper's claim: up to 1.89 times fewer for BERT-base"
    paper: ClassVar[str] = "Ankner et al. 2023, arXiv:2305.15096"
    constraints: ClassVar[str] = "masked language models whose batches hold tokens and, where masked, their labels"
    needs: ClassVar[Need] = Need.BATCH
    survey: ClassVar[Survey | None] = None
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"start": Uniform(0.2, 0.5), "until": Choice((0.5, 1.0))}, _pointless
    )
    control: ClassVar[Control] = Control("either rate throughout, in as many seconds", _throughout)
    needs_automatic_optimization: ClassVar[bool] = False
    needs_budget: ClassVar[bool] = True

    def __init__(
        self,
        start: float = 0.3,
        *,
        end: float = 0.15,
        until: float = 1.0,
        mask_token_id: int | None = None,
        hidden: float = 0.8,
        random: float = 0.1,
        vocab_size: int | None = None,
        special_tokens: list[int] | None = None,
        keys: list[str | int] | None = None,
        ignore_index: int = -100,
    ) -> None:
        if not 0 < end <= start < 1:
            raise ValueError(f"{WHO}({start=}, {end=}): expected shares of the tokens, 0 < end <= start < 1.")
        if not 0.0 <= until <= 1.0:
            raise ValueError(
                f"{WHO}({until=}): expected a fraction of the budget in [0, 1], at which {end=} is reached."
            )
        if not (hidden >= 0 and random >= 0 and hidden + random <= 1 + 1e-9):
            raise ValueError(f"{WHO}({hidden=}, {random=}): expected shares of masked tokens, together at most 1.")
        for name, value in (("mask_token_id", mask_token_id), ("vocab_size", vocab_size)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ValueError(f"{WHO}({name}={value!r}): expected an integer >= 0, or None.")
        ids = special_tokens
        if ids is not None and (not isinstance(ids, list | tuple) or not all(type(i) is int and i >= 0 for i in ids)):
            raise ValueError(f"{WHO}({special_tokens=}): expected a list of tokens >= 0, such as [101, 102], or None.")
        if keys is not None and (isinstance(keys, str) or not isinstance(keys, Sequence) or len(keys) != 2):
            raise ValueError(
                f"{WHO}({keys=}): expected two names or positions, of the tokens and of their labels, such as"
                " ['input_ids', 'labels'] or [0, 1]."
            )
        self.start, self.end, self.until = start, end, until
        self.mask_token_id, self.hidden, self.random, self.vocab_size = mask_token_id, hidden, random, vocab_size
        self.special_tokens = None if special_tokens is None else list(special_tokens)
        self.keys = None if keys is None else list(keys)
        self.ignore_index = ignore_index
        self._reset()

    def _reset(self) -> None:
        self._mask_token = self.mask_token_id
        self._seen = False
        self._rate = self._loader_rate = 0.0
        self._special: Tensor | None = None

    @property
    @override
    def neutral(self) -> bool:
        return self.until == 0.0

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        session.chain.add(Stage.TRANSFORM, self._link)

    @override
    def on_model(self, session: Session) -> None:
        named = self.special_tokens
        if named is None:
            named = sorted(_named_special([getattr(m, "config", None) for m in session.module.modules()]))
        self._special = torch.tensor(named, dtype=torch.int64)

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if not self._seen:
            self._look(batch)
        held = self._held(batch)
        if held is None:
            return proceed(batch)
        ids, labels, maskable = held
        rate = mask_rate(self.session.progress.u, start=self.start, end=self.end, until=self.until)
        generator = self.session.generator(WHO, step.global_step, step.batch_idx, self.session.rank)
        rule = Rule(self._mask_token, self.hidden, self.random, self.vocab_size)
        new = remask(ids, labels, maskable, rate, rule, generator, self.ignore_index)
        count = max(int((maskable | (labels != self.ignore_index)).sum()), 1)
        self._loader_rate = int((labels != self.ignore_index).sum()) / count
        self._rate = int((new[1] != self.ignore_index).sum()) / count
        by_id = {id(ids): new[0], id(labels): new[1]}
        return proceed(map_tensors(batch, lambda t: by_id.get(id(t), t)))

    def _held(self, batch: Any) -> tuple[Tensor, Tensor, Tensor] | None:
        """The batch's tokens, labels and what may be masked; None where it has no such tensors."""
        named = tensors(batch)
        keys = self.keys or ["input_ids", "labels"]
        found = [next((t for path, t in named if lies_at(path, key)), None) for key in keys]
        ids, labels = found[0], found[1]
        if ids is None or labels is None or ids.shape != labels.shape or ids.is_floating_point():
            return None
        maskable = torch.ones_like(ids, dtype=torch.bool)
        for path, t in named:
            if lies_at(path, "attention_mask") and t.shape == ids.shape:
                maskable &= t != 0
        if self._special is not None and len(self._special):
            maskable &= ~torch.isin(ids, self._special.to(ids.device))
        return ids, labels, maskable

    # -- the first batch

    def _look(self, batch: Any) -> None:
        """See in it what the loader does, alike on all ranks."""
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
                f"{WHO}(start={self.start}): the loader masks {share:.0%} of the first batch's {of:,} tokens; expected at"
                " most start, from which the rate is to fall. Raise start, or lower the loader's own rate."
            )
        if self._mask_token is None:
            tokens = {token for _, token in every if token is not None}
            self._mask_token = tokens.pop() if len(tokens) == 1 else None
        if self._mask_token is None and share < self.start - SURE * deviation:
            raise ValueError(
                f"{WHO}(start={self.start}): the loader masks {share:.0%} of the first batch's {of:,} tokens, so more are to"
                " be masked, but no token stands in most of the masked positions. Name it by mask_token_id=, or let the"
                f" loader mask {self.start:.0%}: then masks are only taken back."
            )
        self._seen = True
        rank_zero_info(
            f"{WHO}: the loader masks {share:.1%} of the tokens; the mask token is"
            f" {'not known' if self._mask_token is None else self._mask_token}, never masked are"
            f" {'no' if self._special is None or not len(self._special) else self._special.tolist()} tokens."
        )

    def _read(self, batch: Any) -> tuple[tuple[int, int], int | None]:
        """How many tokens are masked, of how many that may be, and what most of them are hidden by."""
        keys = self.keys or ["input_ids", "labels"]
        held = self._held(batch)
        if held is None:
            listed = ", ".join(
                f"{path or 'the batch'} {tuple(t.shape)} {str(t.dtype)[6:]}" for path, t in tensors(batch)
            )
            raise ValueError(
                f"{WHO}: found no tokens {keys[0]!r} and labels {keys[1]!r} of one shape and of integers in the batch:"
                f" {listed or 'no tensors'}. Name them by keys=, such as keys=['tokens', 'targets'] or keys=[0, 1]."
            )
        ids, labels, maskable = held
        masked = labels != self.ignore_index
        if bool(masked.all()) or not bool(masked.any()):
            raise ValueError(
                f"{WHO}: {'all' if bool(masked.all()) else 'none'} of the labels {keys[1]!r} count; expected labels of a"
                f" masked language model, {self.ignore_index} where a token is not masked. Name others by keys=, say"
                " ignore_index=, or take the technique out."
            )
        replaced = ids[masked & (ids != labels)]
        if not len(replaced):
            raise ValueError(
                f"{WHO}: the tokens {keys[0]!r} are what the labels {keys[1]!r} say wherever these count; expected masked"
                " ones among them. A causal language model has nothing masked: take the technique out."
            )
        values, counts = replaced.unique(return_counts=True)
        token = int(values[counts.argmax()]) if 2 * int(counts.max()) >= len(replaced) else None
        return (int(masked.sum()), int((maskable | masked).sum())), token

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"rate": self._rate, "loader_rate": self._loader_rate}

    @override
    def summary(self) -> str:
        if not self._seen:
            return "no step taken"
        return f"{self._rate:.1%} of the tokens masked in the last batch, of which the loader masked {self._loader_rate:.1%}"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "seen": self._seen,
            "mask_token": self._mask_token,
            "rate": self._rate,
            "loader_rate": self._loader_rate,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seen, self._mask_token = state_dict["seen"], state_dict["mask_token"]
        self._rate, self._loader_rate = state_dict["rate"], state_dict["loader_rate"]


_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id")


def _named_special(configs: Sequence[Any]) -> set[int]:
    """Special tokens that Hugging Face's configs name."""
    found = [getattr(config, name, None) for config in configs for name in _SPECIAL]
    listed = [token for one in found for token in (one if isinstance(one, list | tuple) else [one])]
    return {token for token in listed if isinstance(token, int)}
