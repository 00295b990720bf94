"""The record of a block's call that can run again from its outputs, and the hooks that fill its saved tensors."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_eff._core._branches.sums import Output
from lightning_eff.memory._recompute.recorded_state import Call, Slot

WHO = "ReversibleLayers"
HALF = (torch.float16, torch.bfloat16)
Pair = tuple[Tensor, Tensor]


class NotReversible(ValueError):
    """A block, or the code around it, does not have the form of a reversible block."""


class Done(BaseException):
    """Raised at a sum that ends a second run."""


class Entered:
    """The place of the hidden state among a call's arguments."""


class Reversed(Call):
    """A call of a block that can run again from its outputs.

    Attributes:
        next: the call of the next block; None if this is the last one.
        before: the call of the previous block.
        outputs: y1 and y2, once known.
        middle: y1 and x2, once known.
        split: how many tensors F saved. The rest were saved by G.
        drawn: the random state at the first sum.
        made: the form of the outputs of the modules that ran before the first sum.
        flags: whether the block's input and y1 took gradients.
        entered: the input of the first block of the stack.
    """

    next: "Reversed | None" = None
    before: "weakref.ref[Reversed] | None" = None
    outputs: Pair | None = None
    middle: Pair | None = None
    entered: Tensor | None = None
    truth: Pair | None = None
    split = end = 0
    flags: tuple[bool, bool] = (False, False)
    drawn: Any = None
    made: dict[int, list[Output]]


class Filling:
    """A pack hook that fills a call's empty slots ``start`` to ``stop``; with ``waits``, it ignores tensors."""

    def __init__(self, call: Reversed, start: int, stop: int) -> None:
        self._call, self._at, self._stop = call, start, stop
        self.waits = False

    def __call__(self, tensor: Tensor) -> None:
        if self.waits:
            return
        at, self._at = self._at, self._at + 1
        if at >= self._stop or (tensor.shape, tensor.dtype) != self._call.metas[at]:
            raise differs(
                self._call, f"saved a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} as number {at}"
            )
        slot = self._call.slots[at]()
        if slot is not None and slot.value is None:
            slot.value, slot.version = tensor.detach(), tensor._version

    def finish(self) -> None:
        """Raise ``RuntimeError`` unless the run saved as many tensors as the first one."""
        if self._at != self._stop:
            raise differs(self._call, f"saved {self._at} tensors")


WAY_OUT = "Choose other blocks with layers=, use Rematerialization, or remove the callback."


def packing(call: Reversed) -> Callable[[Tensor], Slot]:
    def pack(tensor: Tensor) -> Slot:
        slot = Slot(call)
        call.slots.append(weakref.ref(slot))
        call.metas.append((tensor.shape, tensor.dtype))
        return slot

    return pack


def never(_: object) -> Tensor:
    raise RuntimeError(f"{WHO}: a block asks for gradients within its own forward pass. {WAY_OUT}")


def differs(call: Reversed, what: str) -> RuntimeError:
    return RuntimeError(
        f"{WHO}: computed again for the backward pass, {call.block} {what}; expected the {len(call.metas)} tensors of the first"
        f" run. It may draw from a generator of its own, or keep state between the runs. {WAY_OUT}"
    )
