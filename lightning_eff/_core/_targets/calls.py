"""One loss call of a ``training_step`` on the batch's labels, and what a technique may make of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_eff._core.losses import counts_of

_CLASSES = (F.cross_entropy, F.nll_loss)


@dataclass(frozen=True)
class TargetCall:
    """A loss call whose targets are the batch's labels, or are made of them.

    A call has *elements*: a row of logits each for ``cross_entropy`` and ``nll_loss``, an entry of the input for the
    others. ``reduction="mean"`` divides their sum by what they count: 0 for ignored labels, the weight of the class where
    there are class weights, 1 otherwise.

    Attributes:
        fn: the function of ``torch.nn.functional`` that was called.
        arguments: its arguments by name, ``input``, ``target`` and ``reduction`` among them.
        label: the path of the labels in the batch, such as ``"['labels']"``.
        shape: the labels' shape, (B, ...).
        places: for each entry of the target, which entry of the flattened labels it stands for; -1 for none.
        others: the targets that the call would have had, had the batch had each of the other labels.
        factors: of a part of a batch, what its loss on its own target and on each of the others counts for, beside the others'
            mean; none where all count alike.
    """

    fn: Callable[..., Tensor]
    arguments: dict[str, Any]
    label: str
    shape: torch.Size
    places: Tensor
    others: tuple[Tensor, ...] = ()
    factors: tuple[float, ...] = ()

    @property
    def input(self) -> Tensor:
        """The logits, log-probabilities or predictions."""
        return self.arguments["input"]

    @property
    def scores(self) -> Tensor:
        """Of a call on classes, the input with the classes in its last dimension: of the elements' shape and (C,)."""
        return self.input.movedim(self._class_dim, -1)

    @property
    def target(self) -> Tensor:
        """The call's own target."""
        return self.arguments["target"]

    @property
    def reduction(self) -> str:
        """``"mean"``, ``"sum"`` or ``"none"``."""
        return self.arguments["reduction"]

    @property
    def of_classes(self) -> bool:
        """Whether an element is a row of logits, and its target a class or probabilities of classes."""
        return self.fn in _CLASSES

    @property
    def element_places(self) -> Tensor:
        """The places of the elements, of their shape."""
        if self.of_classes:
            return self.places.select(self._class_dim, 0) if self._of_probabilities else self.places
        return self.places.broadcast_to(torch.broadcast_shapes(self.input.shape, self.target.shape))

    @property
    def element_samples(self) -> Tensor:
        """The sample of each element, of the elements' shape; -1 where it stands for no label."""
        per_sample = max(math.prod(self.shape[1:]), 1)
        return self.element_places.div(per_sample, rounding_mode="floor")

    @property
    def valid(self) -> Tensor:
        """Which elements the call does not ignore, of their shape."""
        if self.of_classes and not self._of_probabilities:
            return self.target != self.arguments["ignore_index"]
        return torch.ones_like(self.element_places, dtype=torch.bool)

    @property
    def _class_dim(self) -> int:
        return 1 if self.input.ndim > 1 else 0

    @property
    def _of_probabilities(self) -> bool:
        return self.target.is_floating_point()

    def plain(self) -> Tensor:
        """What the module's own call returns."""
        return self.fn(**self.arguments)

    def losses(self, target: Tensor | None = None) -> Tensor:
        """The loss of each element, with its graph: for the call's own target, one of ``others``, or probabilities.

        Args:
            target: as the call's own; for classes also probabilities with the classes in the last dimension, (..., C)
                beside elements (...), where ignored labels stay ignored.
        """
        target = self.target if target is None else target
        if self.of_classes and target.is_floating_point():
            return self._soft(target)
        return self.fn(**{**self.arguments, "target": target, "reduction": "none"})

    def counted(self, target: Tensor | None = None) -> Tensor:
        """What each element counts in the mean's denominator, for a target as in :meth:`losses`."""
        target = self.target if target is None else target
        weight = self.arguments.get("weight")
        if not (self.of_classes and target.is_floating_point()):
            elements = self.input.new_empty(self.element_places.shape)
            return counts_of(self.fn, {**self.arguments, "target": target}, elements)
        valid = self.valid.to(self.input.dtype)
        if weight is None or self._of_probabilities:  # torch divides by the number of rows there, weights or not
            return valid
        return (target.to(weight.dtype) * weight).sum(dim=-1) * valid

    def reduce(self, losses: Tensor, counted: Tensor) -> Tensor:
        """The elements' losses reduced as the call is: ``sum(losses) / sum(counted)`` for a mean."""
        if self.reduction == "none":
            return losses
        return losses.sum() if self.reduction == "sum" else losses.sum() / counted.sum()

    def at_elements(self, values: Tensor, *, fill: float) -> Tensor:
        """What belongs to samples or labels, given to each element that stands for one of them.

        Dimensions of ``values`` after those of the labels stay: (..., C) from probabilities (B, ..., C).

        Args:
            values: by sample, (B,), or by label, (B, ...) or (B, ..., C).
            fill: for elements that stand for no label, such as those that a shift has padded.

        Raises:
            ValueError: if the shape is neither.
        """
        n = len(self.shape)
        places = self.element_places
        if values.shape[:n] == self.shape:
            rows, index = values.reshape(-1, *values.shape[n:]), places
            if values.ndim > n and not self.of_classes:  # one-hot targets: the last dimension is that of the classes
                index = places.select(-1, 0)
        elif values.shape == self.shape[:1]:
            rows, index = values, self.element_samples
        else:
            raise ValueError(
                f"Got values of shape {tuple(values.shape)} for the labels {self.label} of shape {tuple(self.shape)};"
                f" expected {tuple(self.shape[:1])}, one for each sample, or {tuple(self.shape)}, one for each label,"
                " with further dimensions for classes."
            )
        found = rows.to(index.device)[index.clamp(min=0)]
        known = (index >= 0).reshape(index.shape + (1,) * (found.ndim - index.ndim))
        return torch.where(known, found, fill)

    def completed(self, target: Tensor) -> Tensor:
        """Soft targets from :meth:`at_elements`, with the call's own where elements stand for no label.

        Raises:
            ValueError: if they are not of the shape (..., C) of the call's input, or for losses by entry of its shape.
        """
        known = self.element_places >= 0
        expected = self.input.movedim(self._class_dim, -1).shape if self.of_classes else known.shape
        if target.shape != expected:
            raise ValueError(
                f"Got soft targets of shape {tuple(target.shape)} for an F.{self.fn.__name__}; expected"
                f" {tuple(expected)}{', the classes in the last dimension' if self.of_classes else ''}."
            )
        if not self.of_classes:
            return torch.where(known, target.to(self.input.dtype), self.target.to(self.input.dtype))
        if self._of_probabilities:
            own = self.target.movedim(self._class_dim, -1)
            return torch.where(known.unsqueeze(-1), target.to(own.dtype), own)
        own = self.target.clamp(min=0).unsqueeze(-1)  # the ignored are ignored whatever they say
        return target.scatter(-1, own, torch.where(known.unsqueeze(-1), target.gather(-1, own), 1.0))

    def _soft(self, target: Tensor) -> Tensor:
        """Elements' losses for probabilities: the call's own (N, C, ...), or (..., C) that a technique has given."""
        at = self._class_dim
        if target is not self.target and not any(target is other for other in self.others):
            target = target.movedim(-1, at)
        weight = self.arguments.get("weight")
        target = target.to(self.input.dtype)
        if self.fn is F.cross_entropy:
            smoothing = self.arguments["label_smoothing"]
            rows = F.cross_entropy(self.input, target, weight=weight, reduction="none", label_smoothing=smoothing)
        else:
            weighed = target if weight is None else target.movedim(at, -1).mul(weight).movedim(-1, at)
            rows = -(weighed * self.input).sum(dim=at)
        return rows.masked_fill(~self.valid, 0.0)


Change = Callable[[TargetCall], Tensor]


def mixed(*weights: float | Tensor) -> Change:
    """The loss ``sum_k lambda_k L(y_k)``: ``y_0`` are the batch's own labels, the others come after them.

    With a mean, each ``L(y_k)`` is divided by what its own targets count, as if the step had made one call for each.
    Elements that stand for no label keep their own target alone.

    Args:
        weights: ``lambda_k``, one more than there are other labels, each a number or of shape (B,).
    """

    def change(call: TargetCall) -> Tensor:
        if len(weights) != 1 + len(call.others):
            raise ValueError(
                f"Got {len(weights)} weights for the labels {call.label} and {len(call.others)} other(s); expected one"
                f" for each, {1 + len(call.others)}."
            )
        terms = []
        for k, (target, weight) in enumerate(zip((call.target, *call.others), weights, strict=True)):
            factor = call.factors[k] if call.factors else 1.0
            if factor == 0:  # nothing counts, and the mean is no number
                terms.append(0 * call.input.sum())
                continue
            if not isinstance(weight, Tensor) or weight.ndim == 0:
                terms.append(factor * weight * call.fn(**{**call.arguments, "target": target}))
                continue
            losses = call.losses(target)
            at = call.at_elements(weight.to(losses.device, losses.dtype), fill=float(k == 0))
            terms.append(factor * call.reduce(at * losses, call.counted(target)))
        return torch.stack(terms).sum(dim=0)

    return change


def soft(values: Tensor, weight: float | Tensor = 1.0) -> Change:
    """The loss ``(1 - w) L(y) + w L(p)`` with soft targets ``p`` beside the batch's own labels ``y``.

    For one-hot ``p`` that is the plain loss. Ignored labels stay ignored, and elements that stand for no label plain.

    Args:
        values: ``p``: probabilities (B, ..., C) beside class labels (B, ...); for losses by entry, values of the
            labels' shape, or (B, ..., C) where the targets are one-hot codes of the labels.
        weight: ``w``, a number or of shape (B,).
    """

    def change(call: TargetCall) -> Tensor:
        target = call.completed(call.at_elements(values, fill=0.0))
        losses, counted = call.losses(target), call.counted(target)
        if not isinstance(weight, Tensor) and weight == 1.0:
            return call.reduce(losses, counted)
        share = weight if isinstance(weight, Tensor) else torch.tensor(float(weight))
        share = share.to(losses.device, losses.dtype)
        share = call.at_elements(share, fill=0.0) if share.ndim else share
        return call.reduce((1 - share) * call.losses() + share * losses, (1 - share) * call.counted() + share * counted)

    return change


def weighted(weigh: Callable[[Tensor, TargetCall], Tensor]) -> Change:
    """The loss ``sum_e w_e l_e / sum_e w_e c_e``, with ``w`` made of the elements' losses ``l``; ``c`` is what they count.

    Without a reduction in the call, its elements are ``w_e l_e`` and the module divides as it always does.

    Args:
        weigh: of the losses (without a graph) and the call, the weights: of the losses' shape.
    """

    def change(call: TargetCall) -> Tensor:
        losses = call.losses()
        weights = weigh(losses.detach(), call)
        if weights.shape != losses.shape:
            raise ValueError(
                f"Got weights of shape {tuple(weights.shape)} for losses of shape {tuple(losses.shape)}; expected the"
                " same shape, a weight for each element."
            )
        weights = weights.to(losses.device, losses.dtype)
        return call.reduce(weights * losses, weights * call.counted())

    return change
