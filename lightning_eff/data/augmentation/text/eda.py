"""Easy data augmentation: replace, insert, swap and delete tokens of a text (Wei & Zou 2019)."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction, SomeOf
from lightning_eff._core.batches import lies_at, tensors
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Step
from lightning_eff.data.augmentation._arguments import (
    Keys,
    NetworkOrFunction,
    Probability,
    SpecialTokens,
    TokenId,
    Until,
    no_text,
)
from lightning_eff.data.augmentation._lookups import lookups
from lightning_eff.data.augmentation._tokens import attended, configs, found_tokens
from lightning_eff.data.augmentation.text._edits import Edited, apply_edits
from lightning_eff.data.augmentation.text._synonyms import (
    EMBEDDING,
    Neighbours,
    Synonyms,
    Table,
    Words,
    others_only,
    single_tokens,
)
from lightning_eff.data.augmentation.text._texts import TextAugmentation

WHO = "EDA"
OPERATIONS = ("replace", "insert", "swap", "delete")
IGNORED = -100


def num_changed(alpha: float, length: int) -> int:
    """Return ``n = max(1, round(alpha l))`` for a text of ``l`` tokens, or 0 if it has none."""
    return max(1, round(alpha * length)) if length else 0


def replace(ids: list[int], n: int, synonyms: Mapping[int, Sequence[int]], generator: Generator) -> Edited:
    """Replace ``n`` random tokens that have synonyms, or all of them if there are fewer."""
    can = [t for t, x in enumerate(ids) if synonyms.get(x)]
    found: Edited = [(x, t) for t, x in enumerate(ids)]
    for at in _some(len(can), n, generator):
        others = synonyms[ids[can[at]]]
        found[can[at]] = (others[_one(len(others), generator)], can[at])
    return found


def insert(ids: list[int], n: int, synonyms: Mapping[int, Sequence[int]], generator: Generator) -> Edited:
    """Insert a synonym of a random token at a random position, ``n`` times."""
    can = [x for x in ids if synonyms.get(x)]
    found: Edited = [(x, t) for t, x in enumerate(ids)]
    for _ in range(n if can else 0):
        others = synonyms[can[_one(len(can), generator)]]
        found.insert(_one(len(found) + 1, generator), (others[_one(len(others), generator)], None))
    return found


def swap(ids: list[int], n: int, generator: Generator) -> Edited:
    """Swap two random tokens, ``n`` times."""
    found: Edited = [(x, t) for t, x in enumerate(ids)]
    for _ in range(n if len(ids) > 1 else 0):
        i, j = _some(len(ids), 2, generator)
        found[i], found[j] = found[j], found[i]
    return found


def delete(ids: list[int], p: float, generator: Generator) -> Edited:
    """Delete each token with probability ``p``. If all would be deleted, a random one stays."""
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


class EDA(TextAugmentation):
    """Change training texts by replacing, inserting, swapping or deleting tokens.

    With probability ``prob`` a text is changed by one operation, drawn uniformly. A text of ``l`` tokens has
    ``n = max(1, round(alpha l))`` changes:

    - "replace": ``n`` random tokens that have synonyms are replaced by one of them.
    - "insert": a synonym of a random token is inserted at a random position, ``n`` times.
    - "swap": two random tokens change places, ``n`` times.
    - "delete": each token is deleted with probability ``alpha``. At least one token stays.

    Use it on a few hundred texts that are seen many times. Others report hardly any gain with pretrained transformers. The time
    on the host grows with the length of the texts (it is logged), so it suits sentences rather than documents. The paper adds
    16 changed copies per text for 500 texts, 8 for 2,000 and 4 from 5,000 on. Here a fraction ``1 - prob`` of the texts that a
    run sees is original.

    The operations act on tokens, where the paper has words from WordNet. There is no built-in dictionary: without ``synonyms``
    only "swap" and "delete" are used. ``synonyms`` is a mapping of tokens, or a JSON file with one. Words need a ``tokenizer``,
    and only words that are a single token are used, with a space before them or without. "embedding" takes a random one of the
    ``num_neighbors`` tokens with the largest cosine in the module's own embedding, with its weights of the current step. It
    needs no file, but it suits a pretrained module only, and neighbors can be antonyms. Special tokens and padding stay, in
    the same order. The width of a batch stays as well. Deletions add padding (``pad_token_id``, hidden by the attention mask if
    there is one). Insertions use up padding, as long as there is some.

    Labels of whole texts are unchanged. Labels of tokens, in tensors of the same shape, follow the text. A language model is
    trained on the changed text or its next tokens, and tags move with their tokens. Ignored labels stay ignored, and inserted
    tokens have none. The labels of an encoder-decoder are another text, which is unchanged. Other tensors of that shape, such
    as token types, move with the tokens, but not positions.

    It logs ``share``, the fraction of positions in the last micro-batch whose token changed, and ``milliseconds``, the host
    time of the augmentation.

    Args:
        alpha: the fraction of a text's tokens that are changed. The paper uses 0.05 to 0.1. 0 is plain training.
        synonyms: the tokens that can replace each token, such as {17: [4, 231]}, or the words that can replace each word, such
            as {"big": ["large", "huge"]}. Also the path of a JSON file with either, or "embedding".
        tokenizer: turns a word into its token ids: a Hugging Face tokenizer, or a function of a string. Needed for words only.
        num_neighbors: the number of neighbors to draw from, for "embedding".
        operations: the operations to draw from. None takes all that are possible.
        prob: the probability that a text is changed. 0 is plain training.
        pad_token_id: the padding token. None takes that of a Hugging Face config in the module.
        special_tokens: the tokens that never change. None takes those of a Hugging Face config in the module.
        until: the fraction of the budget after which texts are left unchanged. 0 is plain training.
        keys: the names or positions of the tokens (B, T) in the batch. None takes ``input_ids``, or the only integer tensor
            (B, T) whose name is not that of a label, a mask, a position or a type.
        labels: the names or positions of the labels in the batch. None takes the tensors that are targets of the step's losses.

    Raises:
        ValueError: for a value out of range. At setup, if ``until`` is below 1 and the run has no end, or if a padding token is
            needed and none is known. At the first batch, before any weight changes, if it holds no tokens, or an attention mask
            of pairs of tokens. Also if no loss call on the labels is visible. With "embedding", also if no ``nn.Embedding``
            looks up the tokens, or one that is divided over processes, or one with too few tokens.

    Example:
        >>> eda = EDA(alpha=0.1, prob=0.8, operations=["swap", "delete"], pad_token_id=0)
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[eda])
        >>> ids = {"big": 5, "large": 8}
        >>> eda = EDA(synonyms={"big": ["large"]}, tokenizer=lambda word: [ids[word]] if word in ids else [], pad_token_id=0)

    References:
        Wei & Zou 2019, "EDA: Easy Data Augmentation Techniques for Boosting Performance on Text Classification Tasks",
        arXiv:1901.11196. Neighbors in an embedding: Wang & Yang 2015, "That's So Annoying!!!", doi:10.18653/v1/D15-1306.
    """

    paper = "Wei & Zou 2019, arXiv:1901.11196"
    constraints = "needs automatic optimization, integer tokens (B, T) and a loss of torch.nn.functional"
    search_space = SearchSpace({"alpha": Uniform(0.02, 0.3, log=True), "prob": Choice((0.5, 0.8))}, no_text)
    conflicts: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("SpanMasking", "MaskRateSchedule"), "the tokens that it hides and predicts would be moved"
    )
    order = -1  # before noise
    neutral_at: ClassVar[Mapping[str, Any]] = {"alpha": 0.0}

    def __init__(
        self,
        alpha: Annotated[float, Fraction()] = 0.1,
        *,
        synonyms: Annotated[
            Mapping[int, Sequence[int]] | Mapping[str, Sequence[str]] | str | Path | None, Synonyms()
        ] = None,
        tokenizer: Annotated[
            Callable[[str], Sequence[int]] | None, NetworkOrFunction("a string that returns its token ids")
        ] = None,
        num_neighbors: Annotated[int, Count()] = 5,
        operations: Annotated[Sequence[str] | None, SomeOf(OPERATIONS)] = None,
        prob: Probability = 0.8,
        pad_token_id: TokenId = None,
        special_tokens: SpecialTokens = None,
        until: Until = 1.0,
        keys: Keys = None,
        labels: Keys = None,
    ) -> None:
        super().__init__(prob=prob, until=until, keys=keys, special_tokens=special_tokens, labels=labels)
        self.alpha = alpha
        self.num_neighbors = num_neighbors
        self.synonyms: Table | str = EMBEDDING if synonyms == EMBEDDING else _table(synonyms, tokenizer)
        self.operations = _possible(operations, bool(self.synonyms))
        self.pad_token_id = pad_token_id
        self._pad = 0
        self._special: set[int] = set()
        self._other_text = False  # whether labels of tokens belong to another text than the tokens

    @override
    def _reset(self) -> None:
        super()._reset()
        self._embedding: nn.Embedding | None = None
        self._table: Mapping[int, Sequence[int]] = {}  # the synonyms of this run

    @override
    def detach(self, session: Session) -> None:
        self._embedding = None

    # -- the run

    @override
    def on_model(self, session: Session) -> None:
        known = configs(session.module)
        self._other_text = any(getattr(config, "is_encoder_decoder", False) for config in known)
        found = [self.pad_token_id, *(getattr(config, "pad_token_id", None) for config in known)]
        pad = next((t for t in found if isinstance(t, int)), None)
        needs = [name for name in self.operations if name in ("insert", "delete")]
        if pad is None and needs:
            raise ValueError(
                f"{WHO}(operations={list(self.operations)}): the length of texts changes with {' and '.join(needs)}, and no"
                f" config in {type(session.module).__name__} has a pad_token_id. Give pad_token_id=, or set"
                " operations=['swap']."
            )
        self._pad = -1 if pad is None else pad  # -1 is no token
        self._special = {*self._protected(session, *([] if pad is None else [pad]))}

    @override
    def fits(self, batch: Any) -> None:
        for _, ids in found_tokens(batch, self.keys, who=WHO):
            pairs = [(p, t) for p, t in tensors(batch) if t.ndim > 2 and t.shape[-2:] == (ids.shape[1],) * 2]
            if pairs and set(self.operations) & {"insert", "swap", "delete"}:
                path, mask = pairs[0]
                raise ValueError(
                    f"{WHO}: {path} {tuple(mask.shape)} is an attention mask of pairs of tokens, which would be wrong for moved"
                    " tokens. Use a mask (B, T), or set operations=['replace']."
                )

    @override
    def look(self, step: Step, batch: Any) -> None:
        """Take the synonyms as they are, or find the embedding of the tokens."""
        if isinstance(self.synonyms, dict):
            self._table = self.synonyms
            return
        calls, tokens = lookups(step, batch), [ids for _, ids in found_tokens(batch, self.keys, who=WHO)]
        paths = calls.of(tokens)
        if not paths:
            raise calls.none(tokens[0], who=f"{WHO}(synonyms={EMBEDDING!r})")
        embedding = calls.embeddings[paths[0]]
        size = len(embedding.weight)
        left = size - len([t for t in self._special if t < size]) - 1
        if self.session.divided or isinstance(embedding.weight, DTensor):
            raise ValueError(
                f"{WHO}(synonyms={EMBEDDING!r}): the embedding {paths[0]!r} is divided over processes, so none of them can"
                " compare all tokens. Give synonyms= as a mapping or a file, or train with DDP."
            )
        if self.num_neighbors > left:
            raise ValueError(
                f"{WHO}(num_neighbors={self.num_neighbors}): the embedding {paths[0]!r} has {size} tokens, of which {left} can"
                " replace another. Lower num_neighbors."
            )
        self._embedding, self._table = embedding, Neighbours(size, self.num_neighbors)

    @override
    def edit(
        self, step: Step, batch: Any, path: str, ids: Tensor, named: list[tuple[str, Tensor]], generator: Generator
    ) -> dict[str, Tensor]:
        labels = self._targets.labels(step, batch)
        masked = any(lies_at(p, "attention_mask") and t.shape == ids.shape for p, t in named)
        seen = attended(ids, named) if masked else _within(ids != self._pad)
        rows = [self._edited(row, open_, generator) for row, open_ in zip(ids.tolist(), seen.tolist(), strict=True)]
        if isinstance(self._table, Neighbours) and self._embedding is not None:
            open_numbers = sorted({x for row in rows if row is not None for x, _ in row if x < 0})
            known = self._table.resolved(open_numbers, self._embedding.weight, sorted(self._special))
            rows = [row if row is None else [(known.get(x, x), t) for x, t in row] for row in rows]
        tokens = {p for p, _ in found_tokens(batch, self.keys, who=WHO)}
        beside = {p: t for p, t in named if t.shape == ids.shape and p not in tokens}
        if self._other_text:
            beside = {p: t for p, t in beside.items() if p not in labels and "decoder" not in p}
        return apply_edits(rows, path, ids, seen, beside, labels=set(labels), pad=max(self._pad, 0), ignored=IGNORED)

    def _edited(self, row: list[int], seen: list[bool], generator: Generator) -> Edited | None:
        """Return the new tokens of a text with their old positions, or None to leave it unchanged."""
        if float(torch.rand((), generator=generator, dtype=torch.float64)) >= self.prob:
            return None
        shown = [t for t, s in enumerate(seen) if s]
        open_ = [t for t in shown if row[t] not in self._special]
        if not open_:
            return None
        ids, n = [row[t] for t in open_], num_changed(self.alpha, len(open_))
        operation = self.operations[_one(len(self.operations), generator)]
        if operation == "replace":
            edited = replace(ids, n, self._table, generator)
        elif operation == "insert":
            edited = insert(ids, min(n, len(row) - len(shown)), self._table, generator)
        elif operation == "swap":
            edited = swap(ids, n, generator)
        else:
            edited = delete(ids, self.alpha, generator)
        return _between_special(edited, open_, shown, row)


def _between_special(edited: Edited, open_: list[int], shown: list[int], row: list[int]) -> Edited:
    """Insert the special tokens into the new text, each after the same fraction of it as before."""
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
    """Return the positions from the first to the last true one of each row: padding inside a text counts as a token."""
    counts = held.int()
    return (counts.cumsum(dim=1) > 0) & (counts.flip(1).cumsum(dim=1).flip(1) > 0)


def _table(synonyms: Any, tokenizer: Any) -> Table:
    """Return the synonyms by token, of a mapping by token or by word.

    Raises:
        ValueError: if words come without a tokenizer, or none of them is a single token.
    """
    words: Words = {key: others for key, others in (synonyms or {}).items() if isinstance(key, str)}
    if not words:
        return others_only(synonyms or {})
    if tokenizer is None:
        raise ValueError(
            f"{WHO}(tokenizer=None): the synonyms are words, such as {next(iter(words))!r}, but texts are token ids. Give"
            " tokenizer=, a Hugging Face tokenizer or a function that turns a word into token ids."
        )
    encode = getattr(tokenizer, "encode", None)
    found = others_only(
        single_tokens(words, tokenizer if encode is None else lambda text: encode(text, add_special_tokens=False))
    )
    if not found:
        raise ValueError(
            f"{WHO}(synonyms=...): none of the {len(words)} words is a single token with a synonym that is a single token. Give"
            " synonyms of token ids, or a tokenizer with whole words."
        )
    return found


def _possible(operations: Sequence[str] | None, with_synonyms: bool) -> tuple[str, ...]:
    """Return the operations to draw from.

    Raises:
        ValueError: if one of them needs synonyms and there are none.
    """
    if operations is None:
        return OPERATIONS if with_synonyms else OPERATIONS[2:]
    need = [name for name in operations if name in OPERATIONS[:2]]
    if need and not with_synonyms:
        raise ValueError(
            f"{WHO}(operations={list(operations)}, synonyms=None): there are no synonyms for {' and '.join(need)}. Give"
            " synonyms=, a mapping of tokens to lists of tokens or \"embedding\", or set operations=['swap', 'delete']."
        )
    return tuple(operations)
