"""Easy data augmentation: tokens of a text replaced by synonyms, put in, swapped and left out (Wei & Zou 2019)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core._targets.window import Targets
from lightning_eff._core.batches import lies_at, map_tensors, tensors
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation._arguments import check_names, check_number, too_few_epochs
from lightning_eff.data.augmentation._engine import Augmentation
from lightning_eff.data.augmentation._tokens import (
    attended,
    check_ids,
    configs,
    configured_special_tokens,
    found_tokens,
)
from lightning_eff.data.augmentation.text._edits import Edited, apply_edits

WHO = "EDA"
OPERATIONS = ("replace", "insert", "swap", "delete")
IGNORED = -100


def num_changed(alpha: float, length: int) -> int:
    """``n = max(1, round(alpha l))`` of a text of ``l`` tokens; 0 where there are none."""
    return max(1, round(alpha * length)) if length else 0


def replace(ids: list[int], n: int, synonyms: Mapping[int, Sequence[int]], generator: Generator) -> Edited:
    """``n`` tokens that have synonyms, at random, each become one of theirs; fewer where fewer have some."""
    can = [t for t, x in enumerate(ids) if synonyms.get(x)]
    found: Edited = [(x, t) for t, x in enumerate(ids)]
    for at in _some(len(can), n, generator):
        others = synonyms[ids[can[at]]]
        found[can[at]] = (others[_one(len(others), generator)], can[at])
    return found


def insert(ids: list[int], n: int, synonyms: Mapping[int, Sequence[int]], generator: Generator) -> Edited:
    """``n`` times a synonym of a random token that has some, at a random place."""
    can = [x for x in ids if synonyms.get(x)]
    found: Edited = [(x, t) for t, x in enumerate(ids)]
    for _ in range(n if can else 0):
        others = synonyms[can[_one(len(can), generator)]]
        found.insert(_one(len(found) + 1, generator), (others[_one(len(others), generator)], None))
    return found


def swap(ids: list[int], n: int, generator: Generator) -> Edited:
    """``n`` times two tokens at random places change places."""
    found: Edited = [(x, t) for t, x in enumerate(ids)]
    for _ in range(n if len(ids) > 1 else 0):
        i, j = _some(len(ids), 2, generator)
        found[i], found[j] = found[j], found[i]
    return found


def delete(ids: list[int], p: float, generator: Generator) -> Edited:
    """Each token goes with the chance ``p``; where all would, one at random stays."""
    goes = (torch.rand(len(ids), generator=generator, dtype=torch.float64) < p).tolist()
    found: Edited = [(x, t) for t, x in enumerate(ids) if not goes[t]]
    if not found and ids:
        at = _one(len(ids), generator)
        found = [(ids[at], at)]
    return found


def _one(count: int, generator: Generator) -> int:
    return int(torch.randint(count, (), generator=generator))


def _some(count: int, n: int, generator: Generator) -> list[int]:
    return torch.randperm(count, generator=generator)[:n].tolist()


def _pointless(profile: RunProfile) -> str | None:
    return "samples are no sequences" if profile.sequence_length is None else too_few_epochs(profile)


class EDA(Augmentation):
    """Make of each training text, with the chance ``prob``, another by one of four operations, drawn for each text.

    - ``"replace"``: ``n`` random tokens that have synonyms become one of theirs;
    - ``"insert"``: ``n`` times, a synonym of a random token is put in at a random place;
    - ``"swap"``: ``n`` times, two random tokens change places;
    - ``"delete"``: each token is left out with the chance ``alpha``; one stays in any case.

    ``n = max(1, round(alpha l))`` of a text of ``l`` tokens. They act on tokens, where the paper has words: with word pieces,
    give synonyms of whole words that are one token, or none. There is no built-in dictionary: synonyms come from the table
    that you give, and without one only swaps and deletions are made. Special tokens and padding stay where they are, and keep
    their order: what is put in or moved stands between two special tokens as the text did. A batch's width stays: deletions
    lengthen the padding, which is ``pad_token_id`` and hidden by the attention mask if there is one, and insertions use it up,
    as many as there is room for.

    Labels of whole texts stay. Labels of tokens, tensors of the tokens' shape, follow the text: those of a language model,
    the same text or its next tokens, become those of the new text, so that it is trained on the text as it is now; tags go
    with their tokens. What was ignored stays so, and a token that was put in is not asked for. The labels of an encoder-decoder
    are another text, which stays. Other tensors of that shape (types) go with their tokens, but not positions.

    The paper has copies, 16 of each text for 500 texts, 8 for 2,000 and 4 from 5,000 on, beside the original: as a run sees a
    text again and again, one in ``1 / (1 - prob)`` is the original. It gains on a few hundred texts; on pretrained transformers
    others find hardly anything. It costs the host's time for each text (logged), so it is for texts and not for documents.

    Logged: ``share``, the share of the last micro-batch's tokens that are others at their places now, and ``milliseconds``.

    Args:
        alpha: the share of a text's tokens that is changed, in [0, 1]; 0 is plain training. 0.05 to 0.1 in the paper.
        synonyms: for tokens, the tokens that may stand in for them: ``{17: [4, 231], ...}``; None for none.
        operations: some of the four names; None takes all that the arguments allow.
        prob: the chance of a text to be changed, in [0, 1].
        pad_token_id: what stands behind a text that became shorter; None takes that of a Hugging Face config.
        special_tokens: tokens that never change; None takes those that a Hugging Face config names.
        until: the share of the budget in [0, 1] from which on texts are left alone; 0 is plain training.
        keys: names or positions of the tokens (B, T) in the batch; None takes ``input_ids``, or the only tensor (B, T) of
            integers that is no label, and not called a mask, a position or a type.
        labels: names or positions of the labels in the batch; None looks for what the step's losses have as targets.

    Raises:
        ValueError: if an argument is out of its range; at setup, for ``until`` below 1 in a run without an end, or where no
            padding token is known and one is needed; at the first batch, before any weight has changed, if it holds no such
            tokens, or an attention mask by pairs, or if the step's loss on labels cannot be seen.

    Sources:
        Wei & Zou 2019, arXiv:1901.11196.
    """

    saves: ClassVar[str] = "nothing of a step: it regularises, for a better end of training on few texts"
    paper: ClassVar[str] = "Wei & Zou 2019, arXiv:1901.11196"
    constraints: ClassVar[str] = "automatic optimization; tokens (B, T) of integers; a loss of torch.nn.functional"
    needs: ClassVar[Need] = Need.CALLS | Need.STEP
    survey: ClassVar[Survey | None] = Survey("data augmentation (EDA)", shen="3.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"alpha": Uniform(0.02, 0.3, log=True), "prob": Choice((0.5, 0.8))}, _pointless
    )
    control: ClassVar[Control] = Control("no augmentation: the baseline for as many seconds")
    conflicts: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("SpanMasking", "MaskRateSchedule"), "what it hides, and asks for, would be moved"
    )
    order: ClassVar[int] = -1  # noise comes into the text as it is then

    def __init__(
        self,
        alpha: float = 0.1,
        *,
        synonyms: Mapping[int, Sequence[int]] | None = None,
        operations: Sequence[str] | None = None,
        prob: float = 0.8,
        pad_token_id: int | None = None,
        special_tokens: Sequence[int] | None = None,
        until: float = 1.0,
        keys: Sequence[str | int] | None = None,
        labels: Sequence[str | int] | None = None,
    ) -> None:
        check_number(alpha, who=WHO, name="alpha", low=0, high=1, what="the share of a text; 0 is plain training")
        check_ids(pad_token_id, who=WHO, name="pad_token_id")
        check_ids(special_tokens, who=WHO, name="special_tokens")
        check_names(labels, who=WHO, name="labels")
        super().__init__(prob=prob, until=until, keys=keys)
        self.alpha = alpha
        self.synonyms = {} if synonyms is None else _checked(synonyms)
        self.operations = _known(operations, bool(self.synonyms))
        self.pad_token_id = pad_token_id
        self.special_tokens = None if special_tokens is None else list(special_tokens)
        self.labels = None if labels is None else list(labels)
        self._pad = 0
        self._special: set[int] = set()
        self._other_text = False  # whether labels of tokens are of another text than the tokens

    @override
    def _reset(self) -> None:
        super()._reset()
        self._checked = False

    @property
    @override
    def neutral(self) -> bool:
        return super().neutral or self.alpha == 0.0

    # -- the run

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        self._targets = Targets(session, WHO, self.labels)

    @override
    def on_model(self, session: Session) -> None:
        told = configs(session.module)
        self._other_text = any(getattr(config, "is_encoder_decoder", False) for config in told)
        found = [self.pad_token_id, *(getattr(config, "pad_token_id", None) for config in told)]
        pad = next((t for t in found if isinstance(t, int)), None)
        needs = [name for name in self.operations if name in ("insert", "delete")]
        if pad is None and needs:
            raise ValueError(
                f"{WHO}(operations={list(self.operations)}): no config in {type(session.module).__name__} names a pad_token_id,"
                f" and {' and '.join(needs)} change(s) the length of texts; expected the token that stands behind them. Give"
                " pad_token_id=, or operations=['swap']."
            )
        named = configured_special_tokens(session.module) if self.special_tokens is None else self.special_tokens
        self._pad = -1 if pad is None else pad  # -1 is no token
        self._special = {*named, *([] if pad is None else [pad])}
        rank_zero_info(f"{WHO}: never changed are {sorted(self._special) or 'no'} tokens.")

    @override
    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if not self._checked:
            on_all_ranks(self.session, lambda: self._fits(batch))
            if not self._targets.labels(step, batch):  # the step skips this batch
                self._note(0.0)
                return proceed(batch)
            self._checked = True
        return super()._link(step, batch, proceed)

    def _fits(self, batch: Any) -> None:
        for _, ids in found_tokens(batch, self.keys, who=WHO):
            pairs = [(p, t) for p, t in tensors(batch) if t.ndim > 2 and t.shape[-2:] == (ids.shape[1],) * 2]
            if pairs and set(self.operations) & {"insert", "swap", "delete"}:
                path, mask = pairs[0]
                raise ValueError(
                    f"{WHO}: {path} {tuple(mask.shape)} says of pairs of tokens what attends to what, which a moved token would"
                    " make wrong; expected an attention mask (B, T). Give such a one, or operations=['replace']."
                )

    @override
    def change(self, step: Step, batch: Any, generator: Generator) -> tuple[Any, float] | None:
        named, labels = tensors(batch), self._targets.labels(step, batch)
        found = dict(found_tokens(batch, self.keys, who=WHO))
        made: dict[str, Tensor] = {}
        others = total = 0
        for path, ids in found.items():
            masked = any(lies_at(p, "attention_mask") and t.shape == ids.shape for p, t in named)
            seen = attended(ids, named) if masked else _within(ids != self._pad)
            rows = [self._edited(row, open_, generator) for row, open_ in zip(ids.tolist(), seen.tolist(), strict=True)]
            beside = {p: t for p, t in named if t.shape == ids.shape and p not in found}
            if self._other_text:
                beside = {p: t for p, t in beside.items() if p not in labels and "decoder" not in p}
            made |= apply_edits(
                rows, path, ids, seen, beside, labels=set(labels), pad=max(self._pad, 0), ignored=IGNORED
            )
            others += int((made[path] != ids).sum())
            total += ids.numel()
        each = iter([made.get(path, t) for path, t in named])  # by place, since tokens and labels may be one tensor
        return map_tensors(batch, lambda t: next(each)), others / max(total, 1)

    def _edited(self, row: list[int], seen: list[bool], generator: Generator) -> Edited | None:
        """The tokens of one text that are shown now, with the places that they had; None where it stays as it is."""
        if float(torch.rand((), generator=generator, dtype=torch.float64)) >= self.prob:
            return None
        shown = [t for t, s in enumerate(seen) if s]
        open_ = [t for t in shown if row[t] not in self._special]
        if not open_:
            return None
        ids, n = [row[t] for t in open_], num_changed(self.alpha, len(open_))
        operation = self.operations[_one(len(self.operations), generator)]
        if operation == "replace":
            edited = replace(ids, n, self.synonyms, generator)
        elif operation == "insert":
            edited = insert(ids, min(n, len(row) - len(shown)), self.synonyms, generator)
        elif operation == "swap":
            edited = swap(ids, n, generator)
        else:
            edited = delete(ids, self.alpha, generator)
        return _between_special(edited, open_, shown, row)


def _between_special(edited: Edited, open_: list[int], shown: list[int], row: list[int]) -> Edited:
    """The new text with the special tokens in it: each behind as large a share of it as it stood behind before."""
    found: Edited = []
    inside = set(open_)
    before = done = 0
    for t in shown:
        if t in inside:
            before += 1
            continue
        upto = math.floor(len(edited) * before / len(open_) + 0.5)
        found += [(x, None if at is None else open_[at]) for x, at in edited[done:upto]]
        found.append((row[t], t))
        done = upto
    return found + [(x, None if at is None else open_[at]) for x, at in edited[done:]]


def _within(held: Tensor) -> Tensor:
    """The places from the first to the last one that is held, of each row: padding within a text is a token."""
    counts = held.int()
    return (counts.cumsum(dim=1) > 0) & (counts.flip(1).cumsum(dim=1).flip(1) > 0)


def _checked(synonyms: Any) -> dict[int, list[int]]:
    """The table, as lists.

    Raises:
        ValueError: if it is none of token ids.
    """
    if not isinstance(synonyms, Mapping):
        raise ValueError(
            f"{WHO}(synonyms={type(synonyms).__name__}): expected a mapping of tokens to lists of tokens, such as"
            " {17: [4, 231]}."
        )
    found: dict[int, list[int]] = {}
    for token, others in synonyms.items():
        check_ids(token, who=WHO, name="synonyms")
        if isinstance(others, str) or not isinstance(others, Sequence):
            raise ValueError(
                f"{WHO}(synonyms={{{token}: {others!r}}}): expected a list of tokens that stand in for it."
            )
        check_ids(others, who=WHO, name="synonyms")
        found[token] = [other for other in others if other != token]
    return {token: others for token, others in found.items() if others}


def _known(operations: Sequence[str] | None, with_synonyms: bool) -> tuple[str, ...]:
    """The operations that are drawn from.

    Raises:
        ValueError: if a name is none of them, or needs synonyms and there are none.
    """
    if operations is None:
        return OPERATIONS if with_synonyms else OPERATIONS[2:]
    wrong = isinstance(operations, str) or not operations or any(name not in OPERATIONS for name in operations)
    if wrong:
        raise ValueError(f"{WHO}({operations=}): expected a list of some of {', '.join(map(repr, OPERATIONS))}.")
    need = [name for name in operations if name in OPERATIONS[:2]]
    if need and not with_synonyms:
        raise ValueError(
            f"{WHO}({operations=}, synonyms=None): {' and '.join(need)} need(s) synonyms; expected a table. Give synonyms=, a"
            " mapping of tokens to lists of tokens, or operations=['swap', 'delete']."
        )
    return tuple(operations)
