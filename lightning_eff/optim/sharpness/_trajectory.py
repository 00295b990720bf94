"""Shared by techniques that keep the network's scores close to earlier ones: a divergence within the step's own loss."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.batch import BatchKeys
from lightning_eff._core._arguments.kinds import Fraction, Number
from lightning_eff._core._samples.scoring import agree
from lightning_eff._core._targets.calls import TargetCall
from lightning_eff._core._targets.window import Targets
from lightning_eff._core.losses import LossNotVisible, loss_of
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Technique

Earlier = tuple[Tensor, Tensor | None]  # scores (..., C), and a mask (...) of the known elements; None for all

Weight = Annotated[float, Number(at_least=0)]
Temperature = Annotated[float, Number(above=0)]
Start = Annotated[float, Fraction()]
Labels = Annotated[Sequence[str | int], BatchKeys()] | None


class _Divergence(torch.autograd.Function):
    """``KL(q || p)`` of two rows of scores, with an explicit gradient, which is zero where the scores are equal."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, z_old: Tensor, tau: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        dtype = torch.promote_types(z.dtype, torch.float32)
        log_p = (z.to(dtype) / tau).log_softmax(dim=-1)
        log_q = (z_old.to(dtype) / tau).log_softmax(dim=-1)
        q = log_q.exp()
        ctx.save_for_backward(log_p.exp() - q)
        ctx.tau, ctx.dtype = tau, z.dtype
        # KL = sum_c q (log q − log p)
        return torch.where(q > 0, q * (log_q - log_p), 0.0).sum(dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (difference,) = ctx.saved_tensors
        # dKL/dz = (p − q) / tau
        return (gradient.unsqueeze(-1) * difference / ctx.tau).to(ctx.dtype), None, None


def divergence(scores: Tensor, earlier: Tensor, *, temperature: float) -> Tensor:
    """``KL(softmax(z_old / tau) || softmax(z / tau))`` of each row, with a gradient only for ``z``.

    Args:
        scores: ``z``, logits or log-probabilities, shape (..., C).
        earlier: ``z_old``, of the shape of ``scores``.
        temperature: ``tau`` > 0.

    Returns:
        Shape (...), float32 at least; exactly zero, with a gradient of zero, where the scores are equal.
    """
    return _Divergence.apply(scores, earlier, temperature)  # pyright: ignore[reportReturnType]


class Calls:
    """The loss calls on classes of one pass, each with a name that it has in every pass."""

    def __init__(self) -> None:
        self.over = False
        self._found: list[tuple[str, Tensor]] = []

    def name(self, call: TargetCall) -> str:
        """The call's name: its labels, its number of classes, and its number among such calls.

        A call that gradient checkpointing repeats after the pass keeps its name.
        """
        z = call.scores.detach()
        if self.over:
            alike = [(name, held) for name, held in self._found if held.shape == z.shape]
            return next((name for name, held in alike if len(alike) == 1 or torch.equal(held, z)), "")
        base = f"{call.label} {z.shape[-1]}"
        name = f"{base} #{sum(other.rpartition(' ')[0] == base for other, _ in self._found)}"
        self._found.append((name, z))
        return name


class Trajectory(Technique):
    """A technique whose step's loss is ``L + lambda KL(softmax(z_old / tau) || softmax(z / tau))``.

    The divergence is added to each classification loss call on the labels, with the call's own reduction. For a mean it is
    averaged over the elements that the call does not ignore. A subclass gives ``z_old`` in :meth:`earlier`.

    Attributes:
        weight: ``lambda``.
        temperature: ``tau``.
        start: the fraction of the budget at which the divergence begins to count.
        labels: names or positions of the labels in the batch, if they cannot be found by looking.
    """

    stage: ClassVar[Stage | None] = Stage.REWEIGHT
    neutral_at: ClassVar[Mapping[str, Any]] = {"weight": 0.0, "start": 1.0}
    checkpointed: ClassVar[tuple[str, ...]] = ("_checked", "_last")
    weight: float
    temperature: float
    start: float
    labels: Labels

    def _reset(self) -> None:
        self._checked = False
        self._last: float | Tensor = 0.0

    # -- what subclasses say

    @abstractmethod
    def earlier(self, step: Step, batch: Any) -> Callable[[str, TargetCall], Earlier | None]:
        """Before a pass on ``batch``: a function that gives ``z_old`` of a call, by name, or None if there is none."""

    def learn(self, step: Step, calls: list[tuple[str, TargetCall]]) -> None:
        """Look at the classification calls of a pass that is over."""

    def describe(self, session: Session, calls: list[tuple[str, TargetCall]]) -> Any:
        """Describe this rank's first step for the other ranks.

        Raises:
            ValueError: if the technique cannot work with such calls. It is raised on all ranks.
        """

    def begin(self, session: Session, described: list[Any]) -> None:
        """Begin after the first step of all ranks; ``described`` is by rank.

        Raises:
            ValueError: if the technique cannot work with them.
        """

    # -- the run

    @override
    def check(self, session: Session) -> None:
        if self.start > 0.0 and not session.progress.limits():
            raise ValueError(
                f"{type(self).__name__}(start={self.start}): this is a fraction of the run, and the Trainer has no max_steps,"
                " max_epochs or max_time. Set one of them, or start=0.0."
            )

    @override
    def attach(self, session: Session) -> None:
        self._targets = Targets(session, who=type(self).__name__, labels=self.labels)
        super().attach(session)

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if not self._targets.labels(step, batch):
            return proceed(batch)
        find, seen, made = self.earlier(step, batch), Calls(), list[tuple[str, TargetCall]]()
        found: list[tuple[Tensor, Tensor]] = []

        def change(call: TargetCall) -> Tensor:
            if not call.of_classes:
                return call.plain()
            name = seen.name(call)
            if not seen.over:
                made.append((name, call))
            earlier = find(name, call)
            return call.plain() if earlier is None else self._added(call, earlier, None if seen.over else found)

        output = self._targets.run(step, batch, proceed, change)
        seen.over = True
        if not self._checked:
            self._look(made, loss_of(output))
        if self._checked:
            self.learn(step, made)
        if found:
            total, count = (torch.stack(parts).sum() for parts in zip(*found, strict=True))
            self._last = total / count.clamp(min=1)
        return output

    def _added(self, call: TargetCall, earlier: Earlier, found: list[tuple[Tensor, Tensor]] | None) -> Tensor:
        """The call's loss plus the divergence."""
        z_old, known = earlier
        valid = call.valid
        counts = valid if known is None else valid & known
        rows = divergence(call.scores, z_old, temperature=self.temperature)
        rows = torch.where(counts, rows, 0.0)
        if found is not None:
            found.append((rows.detach().sum(), counts.sum()))
        # L + λ (1/|B|) sum_i KL_i
        if call.reduction == "mean":
            rows = rows.sum() / valid.sum().clamp(min=1)
        elif call.reduction == "sum":
            rows = rows.sum()
        plain = call.plain()
        return plain + (self.weight * rows).to(plain.dtype)

    def _look(self, made: list[tuple[str, TargetCall]], loss: Tensor | None) -> None:
        """Check the first step together with the other ranks; a step that some of them skip does not count."""
        who, session = type(self).__name__, self.session
        problem: ValueError | None = None
        described = None
        if loss is not None and not made:
            problem = LossNotVisible(
                f"{who}: no loss call on the labels is a classification loss. Use F.cross_entropy or F.nll_loss, whose scores"
                f" can be compared with earlier ones, or remove {who}."
            )
        elif loss is not None:
            try:
                described = self.describe(session, made)
            except ValueError as error:
                problem = error
        every = agree(session, problem, (loss is not None, described))
        if all(ready for ready, _ in every):
            self.begin(session, [one for _, one in every])
            self._checked = True

    # -- reports and state

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"divergence": self._last}
