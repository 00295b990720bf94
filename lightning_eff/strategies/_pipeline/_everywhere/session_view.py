"""What techniques ask a pipeline: which part of the batch runs, what it weighs, and what the last stage alone computes."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_eff._core.batches import num_samples
from lightning_eff.strategies._pipeline import layout as layouts
from lightning_eff.strategies._pipeline._everywhere.sending import broadcast
from lightning_eff.strategies._pipeline._losses.weights import Weights
from lightning_eff.strategies._pipeline.batch import split
from lightning_eff.strategies._pipeline.shared_state import Course


class Telling:
    """Part of a pipeline.

    Attributes:
        told: objects and names of their attributes, numbers that all ranks get from the last stage's rank after each pass.
        evenly: the next batch's loss is the mean of its micro-batches', whatever counts in them.
    """

    group: ProcessGroup
    device: torch.device
    layout: layouts.Layout
    num_microbatches: int | None
    who: str
    evenly: bool = False
    _course: Course
    _weights: Weights

    @property
    def told(self) -> list[tuple[Any, str]]:
        return self.__dict__.setdefault("_told", [])

    @property
    def sees_loss(self) -> bool:
        """Whether this rank computes the loss."""
        return dist.get_rank(self.group) == self.layout.last_rank

    @property
    def part(self) -> tuple[int, int]:
        """The index of the micro-batch under way, and the number of them."""
        return self._course.part

    @property
    def share_of_part(self) -> float:
        """What its loss is multiplied by in the batch's."""
        running, (index, number) = self._course.running, self.part
        return 1 / number if running is None or running.weights is None else running.weights[index]

    def weights_of(self, batch: Any) -> list[float] | None:
        """The factors of a batch's micro-batches in its loss; None if that is their mean."""
        if self._weights.given is None and self._weights.rule is None:
            return None
        most, size = self._course.most or None, num_samples(batch)
        number, _ = layouts.num_microbatches(size, self.num_microbatches, self.layout, most=most, who=self.who)
        return self._weights.of(split(batch, number))

    def from_loss(self, value: Any) -> Any:
        """The value of the rank of the last stage, on all ranks; collective."""
        return broadcast(value, self.layout.last_rank, self.group, self.device)

    def numbers_told(self) -> list[float]:
        """Those of :attr:`told`, on the last stage's rank; zeros on others."""
        return [float(getattr(owner, name)) if self.sees_loss else 0.0 for owner, name in self.told]

    def take_numbers(self, numbers: list[float]) -> None:
        """Let them be these, which the last stage's rank gave."""
        for (owner, name), number in zip(self.told, numbers, strict=True):
            setattr(owner, name, type(getattr(owner, name))(number))
