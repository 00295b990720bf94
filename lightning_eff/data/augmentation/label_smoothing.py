"""Label smoothing: give a fraction of each target to all classes equally (Szegedy et al. 2015)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Alias, Fraction
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core._targets.calls import TargetCall
from lightning_eff._core._targets.window import Targets
from lightning_eff._core.search_space import RunProfile, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data.augmentation._arguments import Keys, too_few_epochs
from lightning_eff.data.augmentation._mixing import check_labels, only_classes

WHO = "LabelSmoothing"


def smoothed(call: TargetCall, epsilon: float) -> Tensor:
    """Return ``(1 - epsilon) L(y) + epsilon / K sum_k L(k)``, the call on smoothed targets with the same reduction.

    For ``F.cross_entropy`` this is its own ``label_smoothing``, class weights included. Binary one-hot targets of ``K`` classes
    become ``(1 - epsilon) y + epsilon / K``. Independent binary targets become ``(1 - epsilon) y + epsilon / 2``.

    Raises:
        ValueError: if the call already smooths its labels.
    """
    if call.fn is F.cross_entropy:
        if call.arguments["label_smoothing"]:
            raise ValueError(
                f"{WHO}: training_step calls F.cross_entropy with label_smoothing={call.arguments['label_smoothing']}, so"
                f" labels would be smoothed twice. Set label_smoothing=0 there, or remove {WHO}."
            )
        return call.fn(**{**call.arguments, "label_smoothing": epsilon})
    if call.fn is F.nll_loss:
        plain = call.plain()
        # the mean over classes of -w_k log p_k, for labels that are not ignored
        log_p, weight = call.scores, call.arguments.get("weight")
        rows = -(log_p if weight is None else log_p * weight).mean(dim=-1)
        rows = torch.where(call.valid, rows, 0.0)
        return (1 - epsilon) * plain + epsilon * call.reduce(rows, call.counted())
    # all entries of a one-hot row belong to one label
    places = call.places
    codes = places.ndim > 0 and places.shape[-1] > 1 and bool((places == places[..., :1]).all())
    classes = call.target.shape[-1] if codes else 2
    return call.fn(**{**call.arguments, "target": (1 - epsilon) * call.target + epsilon / classes})


def _pointless(profile: RunProfile) -> str | None:
    return too_few_epochs(profile) if profile.visible_loss else "the loss is not visible, so labels cannot be smoothed"


class LabelSmoothing(Technique):
    """Give the fraction ``epsilon`` of each target to all classes equally, for any classification loss.

    The loss on labels ``y`` becomes ``(1 - epsilon) L(y) + epsilon / K sum_k L(k)`` over the ``K`` classes, in the same forward
    pass. For ``F.cross_entropy`` this is its own ``label_smoothing=``. ``F.nll_loss`` and the binary cross-entropies are
    smoothed as well. Labels may have shape (B, ...), for images or tokens, and ignored labels stay ignored. The module needs no
    change, so Hugging Face models that compute their own loss from ``labels=`` are smoothed too.

    Use it against overconfident classifiers. The time per step does not change measurably. Validation, test and prediction are
    not smoothed, so training and validation losses are not comparable. Mixed labels (``Mixup``, ``CutMix``) are smoothed after
    mixing. Techniques that choose samples by their loss use unsmoothed labels.

    It logs ``epsilon`` and ``calls``, the number of loss calls smoothed in the last micro-batch.

    Args:
        epsilon: the fraction of each target that goes to all classes. The paper uses 0.1. 0 is plain training. Also accepted as
            ``label_smoothing``.
        labels: the names or positions of the labels in the batch. None takes the tensors that are targets of the step's losses.

    Raises:
        ValueError: for a value out of range. At the first batch, before any weight changes, if the labels are no classes, if no
            loss call on the labels is visible, or if the loss smooths them already.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[LabelSmoothing(0.1)])

    References:
        Szegedy et al. 2015, "Rethinking the Inception Architecture for Computer Vision", arXiv:1512.00567.
    """

    saves = "no time per step: it regularises, at no measurable cost"
    paper = "Szegedy et al. 2015, arXiv:1512.00567"
    constraints = "needs automatic optimization, labels that are classes and a loss of torch.nn.functional"
    needs: ClassVar[Need] = Need.CALLS | Need.STEP
    search_space = SearchSpace({"epsilon": Uniform(0.05, 0.2)}, _pointless)
    control = Control("the baseline with hard labels, trained for the same time")
    neutral_at: ClassVar[Mapping[str, Any]] = {"epsilon": 0.0}
    checkpointed = ("_calls", "_batches")

    def __init__(
        self, epsilon: Annotated[float, Fraction(below=1), Alias("label_smoothing")] = 0.1, *, labels: Keys = None
    ) -> None:
        self.epsilon = epsilon
        self.labels = labels
        self._calls = self._batches = 0

    def _reset(self) -> None:
        self._looked = False
        self._calls = self._batches = 0

    @override
    def attach(self, session: Session) -> None:
        self._targets = Targets(session, WHO, self.labels, alone="loss")
        session.told_by_loss(self, "_calls")
        session.chain.add(Stage.REWEIGHT, self._link, order=-1)  # after labels are mixed, outside of other links

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        labels = self._targets.labels(step, batch)
        if not labels:  # the step skips this batch
            self._calls = 0
            self._batches += 1
            return proceed(batch)
        if not self._looked:
            on_all_ranks(self.session, lambda: check_labels(labels, who=WHO))
            self._looked = True
        self._calls = 0

        def change(call: TargetCall) -> Tensor:
            self._calls += 1
            return smoothed(call, self.epsilon)

        output = self._targets.run(step, batch, proceed, only_classes(change, who=WHO))
        self._batches += 1
        return output

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"epsilon": self.epsilon, "calls": self._calls}

    @override
    def summary(self) -> str:
        return f"smoothed the targets of {self._batches:,} batches by {self.epsilon:g}"
