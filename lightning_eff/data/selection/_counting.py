"""Shared by all techniques that choose among a batch's samples: the argument ``keep``, budget checks, and counts."""

from typing import Annotated, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Fraction
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Technique

Keep = Annotated[float, Fraction(above=0)]


def check_budget(session: Session, setting: str, way_out: str) -> None:
    """Check that the run has an end, as settings in fractions of the budget need one.

    Args:
        session: the run.
        setting: the technique with the setting, such as ``Name(start=0.5)``.
        way_out: the setting that needs no end, such as ``start=0``.

    Raises:
        ValueError: if the run has no end.
    """
    if not session.progress.limits():
        raise ValueError(
            f"{setting}: the Trainer has no end (max_steps=-1, max_epochs=-1, max_time=None), so the used fraction of the"
            f" budget is unknown. Set one of them, or {way_out}."
        )


def check_range(who: str, start: float, end: float) -> None:
    """Raise ``ValueError`` unless ``start`` is below ``end``, the fractions of the budget at which a technique acts."""
    if not start < end:
        raise ValueError(f"{who}({start=}, {end=}): start must be below end. The defaults are 0 and 1.")


class CountsSamples(Technique):
    """A technique that trains on some samples of each batch, and counts them for its report.

    A subclass calls :meth:`count` once per batch.

    Class attributes, in addition to those of :class:`Technique`:
        did: the verb of the summary, such as ``drew``.
    """

    did: ClassVar[str] = "chose"
    checkpointed = ("_active", "_fraction", "_steps", "_samples")

    def _reset(self) -> None:
        self._active, self._fraction = False, 1.0
        self._steps = {"on": 0, "off": 0}
        self._samples = {"seen": 0, "trained": 0}

    def count(self, size: int, trained: int) -> None:
        """Count a batch of ``size`` samples. The step used ``trained`` of them."""
        self._fraction = trained / size
        self._steps["on" if self._active else "off"] += 1
        self._samples["seen"] += size
        self._samples["trained"] += trained

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"active": int(self._active), "fraction": self._fraction}

    @override
    def summary(self) -> str:
        steps, samples = self._steps, self._samples
        return (
            f"{self.did} samples in {steps['on']:,} of {sum(steps.values()):,} steps, trained on {samples['trained']:,} of"
            f" {samples['seen']:,} samples"
        )
