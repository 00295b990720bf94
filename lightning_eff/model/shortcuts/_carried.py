"""Tensors of a forward pass that later blocks of the same pass use."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from typing_extensions import override


class _Tied(torch.autograd.Function):
    """The identity of ``t``. Its node keeps the pass until the graph is gone, also if only ``weights`` take a gradient."""

    @staticmethod
    @override
    def forward(ctx: FunctionCtx, t: Tensor, weights: Tensor, of: "Pass") -> Tensor:
        ctx.of = of  # pyright: ignore[reportAttributeAccessIssue]
        return t.view_as(t)

    @staticmethod
    @override
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None


class Pass:
    """A forward pass.

    Args:
        start: autograd's count of nodes when it began.

    Attributes:
        kept: each tensor with its version and whether autograd was on, by key.
        end: autograd's count of nodes when the next pass began; None for the last pass.
        over: whether :meth:`Carried.end` was called in it.
    """

    def __init__(self, start: int) -> None:
        self.start = start
        self.end: int | None = None
        self.kept: dict[int, tuple[Tensor, int, bool]] = {}
        self.over = False


def rerunning() -> bool:
    """Return whether a backward pass runs, so that the code that runs now is recomputed by gradient checkpointing."""
    return torch._C._current_graph_task_id() != -1


class Carried:
    """The tensors of the last forward pass, and of those that wait for their backward pass. Copies and pickles are empty.

    A recomputed block gets the tensors of its forward pass. The number of the autograd node that asks for them identifies it.

    Args:
        who: the technique's name, for messages.
        apart: the message for tensors of another shape, after the shapes. The default is for hidden states of blocks.
    """

    def __init__(self, who: str, apart: str = "") -> None:
        self.who = who
        self.apart = apart or f"Remove {who}, or what changes the number of tokens between blocks"
        self._last = Pass(0)
        self._waiting: list[weakref.ref[Pass]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Carried, (self.who, self.apart)

    def begin(self) -> None:
        """Start a forward pass."""
        if not rerunning():
            self._waiting.append(weakref.ref(self._last))
            start = torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]
            self._last.end = start
            self._last = Pass(start)
            self._waiting = [one for one in self._waiting if one() is not None]

    def put(self, key: int, t: Tensor) -> None:
        """Keep a tensor under a key."""
        if rerunning():
            return
        if t.is_inference():
            t = t.clone()  # nothing tells whether it is changed in place later
        self._last.kept[key] = t, -1 if t.is_inference() else t._version, torch.is_grad_enabled()

    @property
    def over(self) -> bool:
        """Whether the last pass has no tensors, or all blocks have used them. Recomputed blocks may use them again."""
        return not rerunning() and (self._last.over or not self._last.kept)

    def end(self) -> None:
        """Note that no later block needs a tensor of the last pass."""
        if not rerunning():
            self._last.over = True

    def get(self, key: int, like: Tensor, weights: Tensor, *, last: bool = False) -> Tensor:
        """Return the tensor under a key.

        Args:
            key: the key.
            like: the tensor that it will be added to, which has the same shape.
            weights: the parameter that it will be multiplied by.
            last: whether no later block needs it.

        Raises:
            ValueError: if this pass has none, it was changed since, or has another shape.
        """
        found = self._rerun(key) if rerunning() else self._last
        if key not in found.kept:
            raise ValueError(
                f"{self.who}: a block ran in a pass in which block {key} did not, whose tensor it uses. Run all blocks in"
                f" each pass, or remove {self.who}."
            )
        t, version, graph = found.kept[key]
        if version not in (-1, t._version if not t.is_inference() else -1):
            raise ValueError(
                f"{self.who}: the module changed a hidden state in place (x += y) after block {key} had returned or got it."
                f" Write x = x + y, or remove {self.who}."
            )
        if t.shape != like.shape:
            raise ValueError(
                f"{self.who}: a tensor from earlier in the pass has shape {tuple(t.shape)}, but a later block has"
                f" {tuple(like.shape)}. {self.apart}."
            )
        if torch.is_grad_enabled():
            return _Tied.apply(t, weights, found)  # pyright: ignore[reportReturnType]
        if not graph and last:
            del found.kept[key]
        elif graph and not rerunning():
            found.kept[key] = t, version, False  # without a graph here, the gradient of a later run would be lost
        return t

    def _rerun(self, key: int) -> Pass:
        """Return the pass whose block is recomputed."""
        node: Any = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        for found in (self._last, *(one() for one in self._waiting)):
            if found is not None and found.start <= number and (found.end is None or number < found.end):
                _, _, graph = found.kept.get(key, (None, 0, False))
                if graph or not torch.is_grad_enabled():
                    return found
        raise ValueError(
            f"{self.who}: blocks are recomputed whose forward pass had no graph, so the gradient of tensors from earlier"
            f" blocks would be lost. Set use_reentrant=False in checkpoint, or remove {self.who}."
        )
