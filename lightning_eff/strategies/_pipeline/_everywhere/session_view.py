"""A pipeline's interface for techniques: the running micro-batch, its weight, and values of the last stage."""

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
    """The part of a pipeline that techniques use.

    Attributes:
        told: objects and names of their number attributes, which all ranks get from the last stage's rank after each pass.
        evenly: whether the next batch's loss is the plain mean of its micro-batches' losses.
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
        """The index of the running micro-batch, and the number of micro-batches."""
        return self._course.part

    @property
    def share_of_part(self) -> float:
        """The weight of the running micro-batch's loss in the batch's loss."""
        running, (index, number) = self._course.running, self.part
        return 1 / number if running is None or running.weights is None else running.weights[index]

    def weights_of(self, batch: Any) -> list[float] | None:
        """Return the weights of a batch's micro-batches in its loss, or None for the mean."""
        if self._weights.given is None and self._weights.rule is None:
            return None
        most, size = self._course.most or None, num_samples(batch)
        number, _ = layouts.num_microbatches(size, self.num_microbatches, self.layout, most=most, who=self.who)
        return self._weights.of(split(batch, number))

    def from_loss(self, value: Any) -> Any:
        """Return the last stage's value on all ranks; collective."""
        return broadcast(value, self.layout.last_rank, self.group, self.device)

    def numbers_told(self) -> list[float]:
        """Return the numbers of :attr:`told` on the last stage's rank, and zeros on others."""
        return [float(getattr(owner, name)) if self.sees_loss else 0.0 for owner, name in self.told]

    def take_numbers(self, numbers: list[float]) -> None:
        """Set the attributes of :attr:`told` to the last stage's numbers."""
        for (owner, name), number in zip(self.told, numbers, strict=True):
            setattr(owner, name, type(getattr(owner, name))(number))
