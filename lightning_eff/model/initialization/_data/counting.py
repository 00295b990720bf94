"""Finds a language model's running text in its batches, from its loss, and counts tokens and pairs of tokens."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_eff._core.batches import tensors

_MERGED = 64  # batches after which the pairs seen so far are counted
_ONTO_CLASSES = (F.cross_entropy, F.nll_loss)


@dataclass(frozen=True)
class ClassLoss:
    """A call of a classification loss: the number of classes, the labels in one row, and the ignored label."""

    classes: int
    target: Tensor
    ignored: int


class LossesSeen(TorchFunctionMode):
    """Records the classification losses that are computed within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[ClassLoss] = []

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ONTO_CLASSES:
            logits = args[0] if args else kwargs["input"]
            target = args[1] if len(args) > 1 else kwargs["target"]
            ignored = args[4] if len(args) > 4 else kwargs.get("ignore_index", -100)
            if not target.is_floating_point():
                classes = logits.shape[1 if logits.ndim > 1 else 0]
                self.calls.append(ClassLoss(classes, target.detach().flatten(), ignored))
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Text:
    """The place of the text in a batch.

    Attributes:
        labels: the path of the tensor (B, T) from which the loss's labels are made.
        ignored: the label that is ignored.
        filled: the path of the tokens that fill positions without a label, for a masked language model; else None.
        mask: the path of the mask whose zeros are padding; None if there is none.
    """

    labels: str
    ignored: int
    filled: str | None
    mask: str | None

    @property
    def masked(self) -> bool:
        """Whether the labels are masked tokens rather than following ones."""
        return self.filled is not None

    def of(self, batch: Any, classes: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of a batch (B, T), and which of them count."""
        found = dict(tensors(batch))
        labels = found[self.labels].long()
        valid = (labels != self.ignored) & (labels >= 0) & (labels < classes)
        if self.filled is None:
            return labels, valid
        tokens = torch.where(valid, labels, found[self.filled].long())
        counted = (tokens >= 0) & (tokens < classes)
        return tokens, counted if self.mask is None else counted & found[self.mask].bool()


def text_in(batch: Any, call: ClassLoss) -> Text | None:
    """Return where the text of ``call``'s labels is; None if no tensor of the batch contains it.

    Labels are a tensor's numbers, those after the first of each row, or those of either that are not ignored. If they
    are neither the tokens of another tensor nor the following ones, they are masked tokens.
    """
    whole = {
        path: t for path, t in tensors(batch) if t.ndim == 2 and not t.is_floating_point() and t.dtype != torch.bool
    }
    exact = [
        path for path, t in whole.items() if any(torch.equal(m, call.target) for m in _made(t.long(), call.ignored))
    ]
    like = [path for path, t in whole.items() if any(_same(m, call) for m in _made(t.long(), call.ignored))]
    if not exact and not like:
        return None
    path = (exact or like)[0]
    labels = whole[path].long()
    valid = labels != call.ignored
    others = {other: o.long() for other, o in whole.items() if other != path and o.shape == labels.shape}
    masks = [other for other, o in others.items() if "mask" in other and _is_small(o)]
    tokens = {other: o for other, o in others.items() if not _is_small(o)}
    if not tokens or bool(valid.all()) or any(_runs_on(labels, o, valid) for o in tokens.values()):
        return Text(path, call.ignored, None, None)
    return Text(path, call.ignored, next(iter(tokens)), next(iter(masks), None))


def _made(t: Tensor, ignored: int) -> list[Tensor]:
    later = t[:, 1:]
    padded = torch.cat([later, later.new_full((len(t), 1), ignored)], dim=1)
    every = [t.flatten(), later.flatten(), padded.flatten()]
    return [*every, *(made[made != ignored] for made in every[:2])]


def _same(made: Tensor, call: ClassLoss) -> bool:
    if made.shape != call.target.shape:
        return False
    valid = call.target != call.ignored
    return bool(valid.any()) and torch.equal(made[valid], call.target[valid])


def _runs_on(labels: Tensor, tokens: Tensor, valid: Tensor) -> bool:
    """Return whether labels are the tokens, or the following ones."""
    same = bool((labels == tokens)[valid].all())
    return same or bool((labels[:, :-1] == tokens[:, 1:])[valid[:, :-1]].all())


def _is_small(tokens: Tensor) -> bool:
    """Return whether these are token types rather than tokens: all are 0 or 1."""
    return bool(((tokens == 0) | (tokens == 1)).all())


@dataclass
class Counts:
    """Counts of tokens in a text, and of pairs of neighbours.

    Attributes:
        classes: C, the number of tokens in the vocabulary.
        single: shape (C,), int64.
        pairs: ``x C + y`` for each pair that occurs, sorted, int64.
        times: how often each pair occurs.
    """

    classes: int
    single: Tensor = field(init=False)
    pairs: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    times: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    _waiting: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.single = torch.zeros(self.classes, dtype=torch.int64)

    def add(self, tokens: Tensor, counted: Tensor) -> None:
        """Count the tokens (B, T) that ``counted`` marks, and the pairs in which both are marked."""
        tokens, counted = tokens.cpu(), counted.cpu()
        self.single += tokens[counted].bincount(minlength=self.classes)
        both = counted[:, 1:] & counted[:, :-1]
        self._waiting.append((tokens[:, :-1] * self.classes + tokens[:, 1:])[both])
        if len(self._waiting) >= _MERGED:
            self.merge()

    def merge(self) -> None:
        """Count the pairs that were collected."""
        if self._waiting:
            pairs, times = torch.cat(self._waiting).unique(return_counts=True)
            self._waiting.clear()
            self.join(self.single.new_zeros(self.classes), pairs, times)

    def join(self, single: Tensor, pairs: Tensor, times: Tensor) -> None:
        """Add another's counts."""
        self.single = self.single + single
        self.pairs, at = torch.cat([self.pairs, pairs]).unique(return_inverse=True)
        self.times = torch.zeros_like(self.pairs).index_add_(0, at, torch.cat([self.times, times]))

    def both_ways(self) -> "Counts":
        """Return counts in which each pair counts in both orders."""
        c, found = self.classes, Counts(self.classes)
        found.join(self.single, self.pairs, self.times)
        found.join(torch.zeros_like(self.single), self.pairs % c * c + self.pairs // c, self.times)
        return found
