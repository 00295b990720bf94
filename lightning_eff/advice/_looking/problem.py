"""The record of a problem."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """Something that is wrong with a run, or costs it time for nothing.

    Attributes:
        name: short and stable, such as "host-synchronisation".
        what: the observation, with figures and the line of the user's code.
        fix: one sentence, or code to paste.
        share: fraction of a step's time, or of the run's, that it costs, where that was measured.
    """

    name: str
    what: str
    fix: str
    share: float | None = None
