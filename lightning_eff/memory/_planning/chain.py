"""A chain of blocks, and the possible treatments of each between forward and backward.

The chain is that of Herrmann et al. 2019 (HAL-02352969): block ``i`` turns the tensor ``x_i`` into ``x_{i+1}``. Its backward
pass turns the gradient of ``x_{i+1}`` into that of ``x_i``, using ``x_i`` and what the block saved.
"""

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from math import isfinite
from typing import Literal


@dataclass(frozen=True)
class Stage:
    """A profiled block of the chain.

    Args:
        name: its name in messages, such as ``"h.3"``.
        forward_seconds: the time of a forward pass, >= 0.
        backward_seconds: the time of its backward pass without recomputation, >= 0.
        input_bytes: the size of the block's input, from which recomputation starts.
        saved_bytes: the size of everything that autograd stores for the block without recomputation, with its output and
            without its input.
        output_bytes: the size of the block's output, at most ``saved_bytes``.
        forward_peak_bytes: the peak memory of a forward pass beyond its input and what it leaves: its output, or, in a pass
            that saves, ``saved_bytes``.
        backward_peak_bytes: the peak memory of the backward pass beyond ``saved_bytes``, the block's input, and the gradients
            of output and input.
        again_seconds: the time of a forward pass that ends with the last saved tensor, as for the last block of a Segment; at
            most ``forward_seconds``, the value for None.

    Raises:
        ValueError: if a number is negative, not finite, or too large.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    input_bytes: int
    saved_bytes: int
    output_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    again_seconds: float | None = None

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if field != "name" and value is not None and not (value >= 0 and isfinite(value)):
                raise ValueError(
                    f"Stage {self.name!r}: got {field}={value!r}; expected a finite number >= 0. Profile the block again."
                )
        if self.output_bytes > self.saved_bytes:
            raise ValueError(
                f"Stage {self.name!r}: got output_bytes={self.output_bytes} and saved_bytes={self.saved_bytes}; expected"
                " output_bytes <= saved_bytes, which includes the output. Add the output to it."
            )
        if self.last_seconds > self.forward_seconds:
            raise ValueError(
                f"Stage {self.name!r}: got again_seconds={self.again_seconds} and forward_seconds={self.forward_seconds};"
                " expected again_seconds <= forward_seconds, of which it is a part. Remove it."
            )

    @property
    def last_seconds(self) -> float:
        """The time of the forward pass in which the last block of a Segment runs again and is stored."""
        return self.forward_seconds if self.again_seconds is None else self.again_seconds


class Action(Enum):
    """The treatment of a block's saved tensors between its forward and its backward pass."""

    KEEP = "kept"
    RECOMPUTE = "recomputed"
    OFFLOAD = "moved to host memory"


@dataclass(frozen=True)
class Keep:
    """Block ``index`` runs once; its saved tensors stay, or, with ``offload``, move to the host and return.

    The block's interior (what it saves, without its output) and its input move to the host.
    """

    index: int
    offload: bool = False


@dataclass(frozen=True)
class Segment:
    """Blocks ``start`` to ``end - 1`` run without saving; their input is stored, or, with ``offload``, moves to the host.

    When the backward pass needs the first of their saved tensors, they run again following ``inner``, a plan for exactly these
    blocks: Segments in it run again without saving, and Keeps save. If the last block is a Keep, it stops at its last saved
    tensor.
    """

    start: int
    end: int
    inner: tuple["Item", ...]
    offload: bool = False


Item = Keep | Segment
Kind = Literal["forward", "again", "backward", "wait"]


@dataclass(frozen=True)
class Event:
    """One step of the predicted schedule.

    Attributes:
        kind: a first ``"forward"`` run, a run ``"again"`` in the backward pass, a ``"backward"`` run, or a ``"wait"`` for
            copies.
        block: the block, or -1 for a wait.
        start_seconds: when it starts.
        end_seconds: when it ends.
        held_bytes: the most bytes on the device during it.
        copying_bytes: the part of them in copies, not gone yet or, in the backward pass, back early.
    """

    kind: Kind
    block: int
    start_seconds: float
    end_seconds: float
    held_bytes: int
    copying_bytes: int


def boundaries(stages: tuple[Stage, ...]) -> list[int]:
    """Return the bytes of ``x_0`` to ``x_n``: block i's input and block i - 1's output, the larger if they differ."""
    inside = (max(left.output_bytes, right.input_bytes) for left, right in pairwise(stages))
    return [stages[0].input_bytes, *inside, stages[-1].output_bytes]


def span(item: Item) -> tuple[int, int]:
    """Return the blocks ``start`` to ``end - 1`` of an item, as (start, end)."""
    return (item.index, item.index + 1) if isinstance(item, Keep) else (item.start, item.end)
