"""Lets ranks agree during the trials at setup, so that none waits for a rank that has raised."""

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_eff._core._run.error_text import first_line

Result = TypeVar("Result")
END, GATHER, SWAP = range(3)
_RAISED = -1
_DIFFER = "the ranks did not make the same exchanges"


class RanksDiffer(RuntimeError):
    """Another rank has raised, or makes another exchange than this one."""


class Meeting:
    """The context of a trial on all ranks of a group, which agree before each exchange and at the end.

    Args:
        group: the ranks.
        device: this rank's device.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device, self._over = group, device, False

    def __enter__(self) -> "Meeting":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.agree(END)
        elif not self._over:
            self._same(_RAISED)

    def agree(self, what: int) -> None:
        """Go on if all ranks do the same: ``GATHER``, ``SWAP`` or ``END``.

        Raises:
            RanksDiffer: on all ranks, if they do not.
        """
        if self._over or not self._same(what):
            raise RanksDiffer(_DIFFER)

    def _same(self, what: int) -> bool:
        both = torch.tensor([what, -what], device=self._device)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group)
        highest, lowest = int(both[0]), -int(both[1])
        self._over = lowest < highest or what == END
        return lowest == highest


def agreed(run: Callable[[], Result], group: dist.ProcessGroup, *, who: str) -> Result:
    """Return the result of ``run``, which exchanges nothing; collective.

    Raises:
        Exception: what ``run`` raised on this rank.
        ValueError: if it raised on other ranks only.
    """
    found: list[Result] = []
    own: Exception | None = None
    try:
        found.append(run())
    except Exception as error:
        own = error
    ranks: list[str] = [""] * group.size()
    dist.all_gather_object(ranks, "" if own is None else described(own), group=group)
    if own is not None:
        raise own
    if told := problem_of(ranks):
        raise ValueError(f"{who}: another rank raised in training_step at setup: {told}. Find the cause on that rank.")
    return found[0]


def described(error: Exception) -> str:
    """Return the error in one line."""
    return _DIFFER if isinstance(error, RanksDiffer) else f"{type(error).__name__}: {first_line(error)}"


def problem_of(ranks: Iterable[str]) -> str:
    """Return the problem of the first rank that has one of its own; empty if none has one."""
    told = [problem for problem in ranks if problem]
    return next((problem for problem in told if problem != _DIFFER), told[0] if told else "")
