"""What gives a trial away that wins by other means than training: a run must take nothing from validation data."""

from collections.abc import Mapping, Sequence
from typing import Any

CHANCE = 3  # samples in both sets that are nobody's fault, and times the baseline's share of them
ALIKE = 0.01  # of a metric: what other arithmetic may make of the same weights


def peeks(own: Mapping[str, Any], baseline: Mapping[str, Any]) -> str | None:
    """Why the samples that a run trained on cannot be those of the training data; None where they can.

    Data sets may have samples in common, so that the baseline's share of them is what is expected.

    Args:
        own: ``overlap`` of a run's record: by the samples' make, how many are of the validation data, of how many.
        baseline: the same of the baseline.
    """
    for make, (shared, total) in own.items():
        known, of = baseline.get(make, (0, total))
        expected = (known + CHANCE) * max(total / max(of, 1), 1.0)
        if shared > CHANCE * expected:
            return (
                f"{shared} of {total} samples ({make}) that it trained on are of the validation data, where {known} of {of} of"
                " the baseline's were; expected no more than by chance. Train on training data alone."
            )
    return None


def leaks(seeing: Sequence[float], blind: Sequence[float]) -> str | None:
    """Why a run's losses show that it learns from validation data; None where they do not.

    Args:
        seeing: training losses of a rehearsal.
        blind: of the same rehearsal, but with other validation data.
    """
    pairs = list(zip(seeing, blind, strict=False))
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if first is None:
        return None
    return (
        f"its training changes with the validation data: other validation data made the loss of batch {first}"
        f" {pairs[first][1]:.6g} instead of {pairs[first][0]:.6g}; expected the same. Train on training data alone."
    )


def mismeasures(own: float, baseline: float) -> str | None:
    """Why a run does not measure what the baseline measures; None where it does.

    Args:
        own: the target that a rehearsal logs.
        baseline: the target that the baseline logs of the same weights.
    """
    if abs(own - baseline) <= ALIKE * max(abs(own), abs(baseline)):
        return None
    return (
        f"the target that is logged with it is {own:.6g}, and that of the same weights in the baseline is {baseline:.6g};"
        " expected the same, since else another model is measured, or another metric. Leave the network and validation as they"
        " are."
    )


def early(own: int, baseline: int) -> str | None:
    """Why a run trains while no clock runs; None where it does not.

    Args:
        own: samples that a rehearsal trained on before its first step.
        baseline: the same of the baseline.
    """
    if own <= baseline:
        return None
    return (
        f"it trains on {own} samples before the first step, where the baseline trains on {baseline}; expected the same, since"
        " the clock begins there. Train in training steps."
    )
