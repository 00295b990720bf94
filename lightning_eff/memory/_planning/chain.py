"""A chain of blocks, and what may become of each between forward and backward.

The chain is the one of Herrmann et al. 2019 (HAL-02352969): block ``i`` turns the tensor ``x_i`` into ``x_{i+1}``, and its
backward pass turns the gradient of ``x_{i+1}`` into that of ``x_i``, with what the block has saved and with ``x_i``.
"""

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from math import isfinite
from typing import Literal


@dataclass(frozen=True)
class Stage:
    """One block of the chain, as profiled.

    Args:
        name: what the user is told of it, such as ``"h.3"``.
        forward_seconds: of one forward pass, >= 0.
        backward_seconds: of its backward pass, without any recomputation, >= 0.
        input_bytes: of the block's input, from which recomputation starts.
        saved_bytes: all that autograd keeps of the block when nothing is recomputed; its output included, its input not.
        output_bytes: of the block's output; at most ``saved_bytes``.
        forward_peak_bytes: what a forward pass takes at its peak beyond its input, and beyond what it leaves: its output,
            or, in a pass that saves, ``saved_bytes``.
        backward_peak_bytes: what the backward pass takes at its peak beyond ``saved_bytes``, the block's input and the
            gradients of output and input.
        again_seconds: of a forward pass that ends when the last tensor is saved, as that of the last block of a Segment
            does; at most ``forward_seconds``, which None stands for.

    Raises:
        ValueError: a number is negative, not finite, or one is larger than it may be.
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
                " output_bytes <= saved_bytes, because what is saved includes the output. Add the output to it."
            )
        if self.last_seconds > self.forward_seconds:
            raise ValueError(
                f"Stage {self.name!r}: got again_seconds={self.again_seconds} and forward_seconds={self.forward_seconds};"
                " expected again_seconds <= forward_seconds, because it is a part of it. Leave it out."
            )

    @property
    def last_seconds(self) -> float:
        """Of the forward pass in which the last block of a Segment runs again and is kept."""
        return self.forward_seconds if self.again_seconds is None else self.again_seconds


class Action(Enum):
    """What becomes of a block's saved tensors between its forward and its backward pass."""

    KEEP = "kept"
    RECOMPUTE = "recomputed"
    OFFLOAD = "moved to host memory"


@dataclass(frozen=True)
class Keep:
    """Block ``index`` runs once; what autograd saves of it stays, or, with ``offload``, goes to the host and comes back.

    It is the block's interior (what it saves, less its output) and its input that go to the host.
    """

    index: int
    offload: bool = False


@dataclass(frozen=True)
class Segment:
    """Blocks ``start`` to ``end - 1`` run without saving; their input is kept, or, with ``offload``, goes to the host.

    In the backward pass, when the first of their saved tensors is needed, they run again following ``inner``, a plan for
    exactly these blocks: Segments in it run again without saving, what its Keeps save is held. Where the last block is a
    Keep, it runs no further than to the last tensor that it saves.
    """

    start: int
    end: int
    inner: tuple["Item", ...]
    offload: bool = False


Item = Keep | Segment
Kind = Literal["forward", "again", "backward", "wait"]


@dataclass(frozen=True)
class Event:
    """One step of the schedule that is predicted.

    ``kind`` is a first ``"forward"`` run, a run ``"again"`` in the backward pass, a ``"backward"`` run, or a ``"wait"`` for
    copies, of which ``block`` is -1. ``held_bytes``: the most that is on the device while it lasts; ``copying_bytes`` of it are
    in copies: not gone yet or, in the backward pass, back already for blocks whose turn has not come.
    """

    kind: Kind
    block: int
    start_seconds: float
    end_seconds: float
    held_bytes: int
    copying_bytes: int


def boundaries(stages: tuple[Stage, ...]) -> list[int]:
    """Bytes of ``x_0`` to ``x_n``: block i's input and block i - 1's output, the larger where they differ."""
    inside = (max(left.output_bytes, right.input_bytes) for left, right in pairwise(stages))
    return [stages[0].input_bytes, *inside, stages[-1].output_bytes]


def span(item: Item) -> tuple[int, int]:
    """The blocks ``start`` to ``end - 1`` of an item, as (start, end)."""
    return (item.index, item.index + 1) if isinstance(item, Keep) else (item.start, item.end)
