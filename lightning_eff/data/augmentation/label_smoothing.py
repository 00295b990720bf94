"""Label smoothing: a share of each target goes evenly to all classes (Szegedy et al. 2015)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core._targets.calls import TargetCall
from lightning_eff._core._targets.window import Targets
from lightning_eff._core.search_space import RunProfile, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data.augmentation._arguments import check_names, check_number, too_few_epochs
from lightning_eff.data.augmentation._mixing import check_labels, only_classes

WHO = "LabelSmoothing"


def smoothed(call: TargetCall, epsilon: float) -> Tensor:
    """``(1 - epsilon) L(y) + epsilon / K sum_k L(k)``, what the call would be on smoothed targets, reduced as it is.

    For ``F.cross_entropy`` that is its own ``label_smoothing``, class weights included. Binary targets of ``K`` classes
    become ``(1 - epsilon) y + epsilon / K``; where they are no one-hot codes of classes, but yes or no each,
    ``(1 - epsilon) y + epsilon / 2``.

    Raises:
        ValueError: if the call smooths its labels already.
    """
    if call.fn is F.cross_entropy:
        if call.arguments["label_smoothing"]:
            raise ValueError(
                f"{WHO}: training_step calls F.cross_entropy with label_smoothing={call.arguments['label_smoothing']}; expected"
                " 0, because labels would be smoothed twice. Take one of them out."
            )
        return call.fn(**{**call.arguments, "label_smoothing": epsilon})
    if call.fn is F.nll_loss:
        plain = call.plain()
        # the mean over classes of -w_k log p_k, for what is not ignored
        log_p, weight = call.scores, call.arguments.get("weight")
        rows = -(log_p if weight is None else log_p * weight).mean(dim=-1)
        rows = torch.where(call.valid, rows, 0.0)
        return (1 - epsilon) * plain + epsilon * call.reduce(rows, call.counted())
    # entries of a one-hot code stand for one label
    places = call.places
    codes = places.ndim > 0 and places.shape[-1] > 1 and bool((places == places[..., :1]).all())
    classes = call.target.shape[-1] if codes else 2
    return call.fn(**{**call.arguments, "target": (1 - epsilon) * call.target + epsilon / classes})


def _pointless(profile: RunProfile) -> str | None:
    return (
        too_few_epochs(profile) if profile.visible_loss else "the loss cannot be seen, so labels could not be smoothed"
    )


class LabelSmoothing(Technique):
    """Train on targets of which the share ``epsilon`` goes evenly to all classes, whatever loss call they are targets of.

    The step's loss on labels ``y`` becomes ``(1 - epsilon) L(y) + epsilon / K sum_k L(k)``, in the same forward pass: of
    ``F.cross_entropy`` its own ``label_smoothing=``, of ``F.nll_loss`` and binary cross-entropy what that is there, for classes
    (B, ...) of images or tokens; ignored labels stay ignored. So a Hugging Face model that takes ``labels=`` is smoothed
    without a change. Validation, test and prediction are not: losses of training and validation differ by what smoothing adds.
    Mixtures of samples are smoothed as their labels are; what chooses samples by their loss scores them by hard labels.

    Logged: ``epsilon``, and ``calls``, the loss calls of the last micro-batch that were smoothed.

    Args:
        epsilon: the share, in [0, 1); 0.1 is the source's, 0 plain training.
        labels: names or positions of the labels in the batch; None looks for what the step's losses have as targets.

    Raises:
        ValueError: if an argument is out of its range; at the first batch, before any weight has changed, if labels are no
            classes, if the step's loss on labels cannot be seen, or if it smooths them already.

    Sources:
        Szegedy et al. 2015, arXiv:1512.00567.
    """

    saves: ClassVar[str] = "nothing of a step: it regularises, at no cost that can be measured"
    paper: ClassVar[str] = "Szegedy et al. 2015, arXiv:1512.00567"
    constraints: ClassVar[str] = "automatic optimization; labels that are classes; a loss of torch.nn.functional"
    needs: ClassVar[Need] = Need.CALLS | Need.STEP
    survey: ClassVar[Survey | None] = None
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"epsilon": Uniform(0.05, 0.2)}, _pointless)
    control: ClassVar[Control] = Control("hard labels: the baseline for as many seconds")
    conflicts: ClassVar[Mapping[str, str]] = {}

    def __init__(self, epsilon: float = 0.1, *, labels: Sequence[str | int] | None = None) -> None:
        check_number(epsilon, who=WHO, name="epsilon", low=0, high=1, what="below 1; 0 is plain training")
        if epsilon == 1:
            raise ValueError(
                f"{WHO}({epsilon=}): expected a number below 1, since nothing of the labels would be left."
            )
        check_names(labels, who=WHO, name="labels")
        self.epsilon = epsilon
        self.labels = None if labels is None else list(labels)
        self._calls = self._batches = 0

    def _reset(self) -> None:
        self._looked = False
        self._calls = self._batches = 0

    @property
    @override
    def neutral(self) -> bool:
        return self.epsilon == 0.0

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        self._targets = Targets(session, WHO, self.labels, alone="loss")
        session.told_by_loss(self, "_calls")
        session.chain.add(Stage.REWEIGHT, self._link, order=-1)  # labels are made by then, outside of others there

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

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"calls": self._calls, "batches": self._batches}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._calls, self._batches = state_dict["calls"], state_dict["batches"]
