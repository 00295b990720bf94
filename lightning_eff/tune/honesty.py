"""Checks that a trial wins by training alone: a run must not use validation data or change the metric."""

from collections.abc import Mapping, Sequence
from typing import Any

CHANCE = 3  # samples that may be in both sets by chance, and a factor on the baseline's share of them
ALIKE = 0.01  # relative difference of a metric that rounding may cause for the same weights


def peeks(own: Mapping[str, Any], baseline: Mapping[str, Any]) -> str | None:
    """Return why a run must have trained on validation data, or None.

    Data sets may have samples in common, so the baseline's share of common samples is expected.

    Args:
        own: ``overlap`` in a run's record. For each kind of sample it has the count in the validation data, and the total.
        baseline: the same for the baseline.
    """
    for make, (shared, total) in own.items():
        known, of = baseline.get(make, (0, total))
        expected = (known + CHANCE) * max(total / max(of, 1), 1.0)
        if shared > CHANCE * expected:
            return (
                f"{shared} of {total} samples ({make}) that it trained on are in the validation set, and {known} of {of} of the"
                " baseline's. Train on training data alone."
            )
    return None


def leaks(seeing: Sequence[float], blind: Sequence[float]) -> str | None:
    """Return why a run's losses show that it learns from validation data, or None.

    Args:
        seeing: the training losses of a rehearsal.
        blind: the losses of the same rehearsal with other validation data.
    """
    pairs = list(zip(seeing, blind, strict=False))
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if first is None:
        return None
    return (
        f"its training changes with the validation data: other validation data made the loss of batch {first}"
        f" {pairs[first][1]:.6g} instead of {pairs[first][0]:.6g}. Train on training data alone."
    )


def mismeasures(own: float, baseline: float) -> str | None:
    """Return why a run measures something else than the baseline, or None.

    Args:
        own: the target that a rehearsal logs.
        baseline: the target that the baseline logs for the same weights.
    """
    if abs(own - baseline) <= ALIKE * max(abs(own), abs(baseline)):
        return None
    return (
        f"the target logged with it is {own:.6g}, and the target of the same weights in the baseline is {baseline:.6g}, so it"
        " changes the measured model or the metric. Leave the network and validation as they are."
    )


def early(own: int, baseline: int) -> str | None:
    """Return why a run trains before its clock starts, or None.

    Args:
        own: the samples that a rehearsal trained on before its first step.
        baseline: the same for the baseline.
    """
    if own <= baseline:
        return None
    return (
        f"it trains on {own} samples before the first step, and the baseline on {baseline}, but the clock starts at that step."
        " Train in training steps."
    )
