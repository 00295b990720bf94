"""One loss call of a ``training_step`` on the batch's labels, and the changes that a technique can make to it."""

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
    """A loss call whose targets are the batch's labels, or are computed from them.

    A call has *elements*: one row of logits each for ``cross_entropy`` and ``nll_loss``, one input entry each for the others.
    ``reduction="mean"`` divides the sum of their losses by the sum of their counts. A count is 0 for ignored labels, the class
    weight if there are class weights, and 1 otherwise.

    Attributes:
        fn: the function of ``torch.nn.functional``.
        arguments: its arguments by name, including ``input``, ``target`` and ``reduction``.
        label: the path of the labels in the batch, such as ``"['labels']"``.
        shape: the labels' shape, (B, ...).
        places: for each entry of the target, the index of its entry in the flattened labels; -1 for none.
        others: the targets that the call would have had if the batch had each of the other labels.
        factors: for a part of a batch, the factor of its loss on its own target and on each of the others, relative to a plain
            mean over parts; empty if all are 1.
        whole: whether the target is the labels themselves, so that element i belongs to label i.
        sample: the sample that all elements belong to, where the labels lie in a list with one item per sample; else None.
    """

    fn: Callable[..., Tensor]
    arguments: dict[str, Any]
    label: str
    shape: torch.Size
    places: Tensor
    others: tuple[Tensor, ...] = ()
    factors: tuple[float, ...] = ()
    whole: bool = False
    sample: int | None = None

    @property
    def input(self) -> Tensor:
        """The logits, log-probabilities or predictions."""
        return self.arguments["input"]

    @property
    def scores(self) -> Tensor:
        """The input of a call on classes, with the classes in the last dimension: the elements' shape, then (C,)."""
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
        """Whether an element is a row of logits, and its target a class or class probabilities."""
        return self.fn in _CLASSES

    @property
    def element_places(self) -> Tensor:
        """The places of the elements, in their shape."""
        if self.of_classes:
            return self.places.select(self._class_dim, 0) if self._of_probabilities else self.places
        return self.places.broadcast_to(torch.broadcast_shapes(self.input.shape, self.target.shape))

    @property
    def element_samples(self) -> Tensor:
        """The sample of each element, in the elements' shape; -1 if it belongs to no label."""
        if self.sample is not None:
            return torch.where(self.element_places >= 0, self.sample, -1)
        per_sample = max(math.prod(self.shape[1:]), 1)
        return self.element_places.div(per_sample, rounding_mode="floor")

    @property
    def valid(self) -> Tensor:
        """Which elements the call does not ignore, in their shape."""
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
        """Return the result of the module's own call."""
        return self.fn(**self.arguments)

    def losses(self, target: Tensor | None = None) -> Tensor:
        """Return the loss of each element, with its graph.

        Args:
            target: the call's own (None), one of ``others``, or a target of the same form. For classes it may also be
                probabilities (..., C) for elements (...), where ignored labels stay ignored.
        """
        target = self.target if target is None else target
        if self.of_classes and target.is_floating_point():
            return self._soft(target)
        return self.fn(**{**self.arguments, "target": target, "reduction": "none"})

    def counted(self, target: Tensor | None = None) -> Tensor:
        """Return each element's count in the mean's denominator, for a target as in :meth:`losses`."""
        target = self.target if target is None else target
        weight = self.arguments.get("weight")
        if not (self.of_classes and target.is_floating_point()):
            elements = self.input.new_empty(self.target.shape if self.of_classes else self.element_places.shape)
            return counts_of(self.fn, {**self.arguments, "target": target}, elements)
        valid = self.valid.to(self.input.dtype)
        if weight is None or self._of_probabilities:  # torch divides by the number of rows here, with weights too
            return valid
        return (target.to(weight.dtype) * weight).sum(dim=-1) * valid

    def reduce(self, losses: Tensor, counted: Tensor) -> Tensor:
        """Reduce the elements' losses as the call does: ``sum(losses) / sum(counted)`` for a mean."""
        if self.reduction == "none":
            return losses
        return losses.sum() if self.reduction == "sum" else losses.sum() / counted.sum()

    def at_elements(self, values: Tensor, *, fill: float) -> Tensor:
        """Assign values of samples or labels to the elements that belong to them.

        Dimensions of ``values`` after those of the labels are kept: probabilities (B, ..., C) become (..., C).

        Args:
            values: by sample, (B,), or by label, (B, ...) or (B, ..., C).
            fill: for elements that belong to no label, such as padding after a shift.

        Raises:
            ValueError: for other shapes.
        """
        n = len(self.shape)
        if self.whole and self.of_classes and not self._of_probabilities:
            if values.shape == self.shape:
                return values
            if values.shape == self.shape[:1]:
                return values.reshape(-1, *(1,) * (n - 1)).expand(self.shape)
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
                f" expected {tuple(self.shape[:1])}, one per sample, or {tuple(self.shape)}, one per label, with further"
                " dimensions for classes."
            )
        found = rows.to(index.device)[index.clamp(min=0)]
        known = (index >= 0).reshape(index.shape + (1,) * (found.ndim - index.ndim))
        return torch.where(known, found, fill)

    def completed(self, target: Tensor) -> Tensor:
        """Return soft targets from :meth:`at_elements`, with the call's own where elements belong to no label.

        Raises:
            ValueError: if their shape is not (..., C) for class losses, or the input's shape for others.
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
        own = self.target.clamp(min=0).unsqueeze(-1)  # ignored labels are masked later
        return target.scatter(-1, own, torch.where(known.unsqueeze(-1), target.gather(-1, own), 1.0))

    def _soft(self, target: Tensor) -> Tensor:
        """Return the elements' losses for probabilities: the call's own (N, C, ...), or a technique's (..., C)."""
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
    """Return the change to the loss ``sum_k lambda_k L(y_k)``: ``y_0`` are the batch's own labels, then the others.

    With a mean, each ``L(y_k)`` is divided by the counts of its own targets, as if the step had made one call for each.
    Elements that belong to no label keep only their own target.

    Args:
        weights: ``lambda_k``, one more than there are other labels, each a number or of shape (B,).
    """

    def change(call: TargetCall) -> Tensor:
        if len(weights) != 1 + len(call.others):
            raise ValueError(
                f"Got {len(weights)} weights for the labels {call.label} and {len(call.others)} other(s); expected"
                f" {1 + len(call.others)}, one for each."
            )
        terms = []
        for k, (target, weight) in enumerate(zip((call.target, *call.others), weights, strict=True)):
            factor = call.factors[k] if call.factors else 1.0
            if factor == 0:  # no element counts, so the mean would be NaN
                terms.append(0 * call.input.sum())
                continue
            if not isinstance(weight, Tensor) or weight.ndim == 0:
                terms.append(factor * weight * call.fn(**{**call.arguments, "target": target}))
                continue
            losses = call.losses(target)
            if weight.dtype != losses.dtype or weight.device != losses.device:
                weight = weight.to(losses.device, losses.dtype)
            at = call.at_elements(weight, fill=float(k == 0))
            terms.append(factor * call.reduce(at * losses, call.counted(target)))
        return terms[0] + terms[1] if len(terms) == 2 else torch.stack(terms).sum(dim=0)

    return change


def soft(values: Tensor, weight: float | Tensor = 1.0) -> Change:
    """Return the change to the loss ``(1 - w) L(y) + w L(p)`` with soft targets ``p`` and the batch's own labels ``y``.

    For one-hot ``p`` this is the plain loss. Ignored labels stay ignored, and elements that belong to no label stay plain.

    Args:
        values: ``p``: probabilities (B, ..., C) for class labels (B, ...). For other losses, values in the labels' shape, or
            (B, ..., C) if the targets are one-hot codes of the labels.
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
    """Return the change to the loss ``sum_e w_e l_e / sum_e w_e c_e``: ``l`` are the elements' losses, ``c`` their counts.

    If the call has no reduction, its elements become ``w_e l_e``, and the module divides as it always does.

    Args:
        weigh: takes the losses (without a graph) and the call, and returns the weights ``w`` in the losses' shape.
    """

    def change(call: TargetCall) -> Tensor:
        losses = call.losses()
        weights = weigh(losses.detach(), call)
        if weights.shape != losses.shape:
            raise ValueError(
                f"Got weights of shape {tuple(weights.shape)} for losses of shape {tuple(losses.shape)}; expected the"
                " same shape, one weight per element."
            )
        weights = weights.to(losses.device, losses.dtype)
        return call.reduce(weights * losses, weights * call.counted())

    return change
