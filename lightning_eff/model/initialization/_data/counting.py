"""Where a language model's running text stands in its batches, as its loss tells, and how often tokens follow each other."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_eff._core.batches import tensors

_MERGED = 64  # batches after which pairs are counted together
_ONTO_CLASSES = (F.cross_entropy, F.nll_loss)


@dataclass(frozen=True)
class ClassLoss:
    """A loss call on labels: how many classes, the labels in one row, and which label is ignored."""

    classes: int
    target: Tensor
    ignored: int


class LossesSeen(TorchFunctionMode):
    """Notes the losses of classes that are computed within."""

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
    """Where a batch holds its text.

    Attributes:
        labels: the path of the tensor (B, T) that the loss's labels are made of.
        ignored: the label that counts as none.
        filled: the path of the tokens that stand where no label does, for a masked language model; None for others.
        mask: the path of the mask whose zeros are padding; None without one.
    """

    labels: str
    ignored: int
    filled: str | None
    mask: str | None

    @property
    def masked(self) -> bool:
        """Whether labels are those of masked tokens, and not of those that follow."""
        return self.filled is not None

    def of(self, batch: Any, classes: int) -> tuple[Tensor, Tensor]:
        """The tokens of a batch (B, T), and which of them count."""
        found = dict(tensors(batch))
        labels = found[self.labels].long()
        valid = (labels != self.ignored) & (labels >= 0) & (labels < classes)
        if self.filled is None:
            return labels, valid
        tokens = torch.where(valid, labels, found[self.filled].long())
        counted = (tokens >= 0) & (tokens < classes)
        return tokens, counted if self.mask is None else counted & found[self.mask].bool()


def text_in(batch: Any, call: ClassLoss) -> Text | None:
    """Where the text is that ``call``'s labels are of; None where no tensor of the batch gives them.

    Labels are a tensor's numbers as they stand, those after the first of each row, or those of either that count. Where they
    are neither the tokens of another tensor nor the ones that follow upon these, tokens are masked.
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
    """Whether labels are the tokens, or those that follow upon them."""
    same = bool((labels == tokens)[valid].all())
    return same or bool((labels[:, :-1] == tokens[:, 1:])[valid[:, :-1]].all())


def _is_small(tokens: Tensor) -> bool:
    """Whether these are kinds of tokens and not tokens: all are 0 or 1."""
    return bool(((tokens == 0) | (tokens == 1)).all())


@dataclass
class Counts:
    """How often tokens stand in a text, and pairs of them next to each other.

    Attributes:
        classes: C, of tokens.
        single: shape (C,), int64.
        pairs: ``x C + y`` for each pair that was met, sorted, int64.
        times: how often each was.
    """

    classes: int
    single: Tensor = field(init=False)
    pairs: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    times: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    _waiting: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.single = torch.zeros(self.classes, dtype=torch.int64)

    def add(self, tokens: Tensor, counted: Tensor) -> None:
        """Count the tokens (B, T) of which ``counted`` says that they count, and the pairs in which both do."""
        tokens, counted = tokens.cpu(), counted.cpu()
        self.single += tokens[counted].bincount(minlength=self.classes)
        both = counted[:, 1:] & counted[:, :-1]
        self._waiting.append((tokens[:, :-1] * self.classes + tokens[:, 1:])[both])
        if len(self._waiting) >= _MERGED:
            self.merge()

    def merge(self) -> None:
        """Put what was counted together."""
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
        """Counts in which each pair is one of both orders."""
        c, found = self.classes, Counts(self.classes)
        found.join(self.single, self.pairs, self.times)
        found.join(torch.zeros_like(self.single), self.pairs % c * c + self.pairs // c, self.times)
        return found
