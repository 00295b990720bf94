"""Modules that no pipeline computes rightly: plain code, as users write it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.strategies.pipeline_hazards import Checkpointed, Layer, Plain


class Reentrant(Checkpointed):
    reentrant = True


class Skips(Plain):
    """A U-Net's skips around the stack."""

    def through(self, h: Tensor) -> Tensor:
        kept = []
        for i, block in enumerate(self.blocks):
            h = block(h if i < 2 else h + kept[3 - i])
            kept.append(h)
        return h


class Summed(Plain):
    """The head sees the sum of all hidden states."""

    def through(self, h: Tensor) -> Tensor:
        total = h
        for block in self.blocks:
            h = block(h)
            total = total + h
        return total


class SideOutputs(Plain):
    """Blocks that all read the same hidden state, and are averaged."""

    def through(self, h: Tensor) -> Tensor:
        return torch.stack([block(h) for block in self.blocks]).mean(0)


class Quiet(Plain):
    """The head sees the first block's output without a gradient."""

    def through(self, h: Tensor) -> Tensor:
        kept = h = self.blocks[0](h)
        for block in list(self.blocks)[1:]:
            h = block(h)
        return h + kept.detach()


class Noted(Plain):
    """A hook notes a number of each block, and the loss has it."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[float] = []
        for block in self.blocks:
            block.register_forward_hook(
                lambda m, args, out: self.noted.append(float(torch.as_tensor(out).detach().mean()))
            )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.noted.clear()
        return super().training_step(batch, batch_idx) + sum(self.noted)


class Nothing(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class Infinite(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * float("nan")


class Failing(Plain):
    """Blocks of which one that is told so fails at its third call after that."""

    class Layer(Layer):
        calls: Iterator[int] | None = None  # an iterator, since a number that moves is refused at setup

        def forward(self, x: Tensor) -> Tensor:
            if self.calls is not None and next(self.calls) == 3:
                raise ZeroDivisionError("in block 3")
            return super().forward(x)

    block = Layer


class Regularised(Plain):
    """The loss has a sum over all parameters."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (
            super().training_step(batch, batch_idx)
            + 1e-3 * torch.stack([p.pow(2).sum() for p in self.parameters()]).sum()
        )


class Twice(Plain):
    """Two passes in one step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + super().training_step(batch, batch_idx)


class Dropping(Plain):
    """Layer drop: the second block is passed over."""

    def through(self, h: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            h = h if i == 1 else block(h)
        return h


class TwoOutputs(Plain):
    """Blocks that return a second tensor as large as the hidden state."""

    class Layer(Layer):
        def forward(self, x: Tensor, bias: Tensor | None = None) -> Any:
            bias = x.tanh() if bias is None else bias
            return super().forward(x) + bias, bias

    block = Layer

    def through(self, h: Tensor) -> Tensor:
        bias = None
        for block in self.blocks:
            h, bias = block(h, bias)
        return h


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Plain):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Tracked(Plain):
    """A buffer outside the blocks tracks what the first block returns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("norms", torch.zeros(()))

    def through(self, h: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            h = block(h)
            if i == 0:
                self.norms = 0.9 * self.norms + 0.1 * h.detach().norm()
        return h


class Reported(Plain):
    """What the first block returns is logged."""

    def through(self, h: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            h = block(h)
            if i == 0:
                self.log("norm", h.detach().norm())
        return h


class Early(Plain):
    """The last block is not called."""

    def through(self, h: Tensor) -> Tensor:
        for block in list(self.blocks)[:-1]:
            h = block(h)
        return h
