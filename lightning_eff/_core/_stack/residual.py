"""Check, in the autograd graph of a call, whether a block's output is its input plus something."""

from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from lightning_eff._core._stack.chains import Node, share_memory


def _named(text: str) -> frozenset[str]:
    return frozenset(text.split())


# the inputs to which an operation adds, or into which it writes
_ADDS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(_named("Add Lerp Where"), (0, 1)),
    **dict.fromkeys(
        _named(
            "Sub Addmm Baddbmm Addmv Addcmul Addcdiv IndexAdd IndexPut IndexCopy Scatter"
            " ScatterAdd SliceScatter CopySlices"
        ),
        (0,),
    ),
}
_FIRST = _named(
    "NativeLayerNorm NativeGroupNorm NativeBatchNorm CudnnBatchNorm MiopenBatchNorm FusedRmsNorm RmsNorm InstanceNorm"
    " Div MaskedFill MaskedScatter"
)
_ANY = _named(
    "View UnsafeView ReshapeAlias AsStrided Alias Clone Copy ToCopy Expand Transpose T Permute Movedim Unsqueeze Squeeze"
    " Flatten Unflatten Roll Flip ConstantPadNd Slice Select Split SplitWithSizes SplitWithSizesCopy Chunk Unbind Cat Stack"
    " Index IndexSelect Gather NativeDropout FusedDropout Mul Sum Mean"
    " Relu LeakyRelu Gelu Silu Mish Elu Celu Selu Prelu PreluKernel Softplus Tanh Sigmoid Hardtanh Hardswish Hardsigmoid Clamp"
    " ClampMin ClampMax RegisterPostBackwardFunction"
)


def _kind(node: Node) -> str:
    """Return the operation's name, without the suffix of ``AddBackward0`` or ``SqueezeBackward1``."""
    return node.name().rpartition("::")[2].partition("Backward")[0]


def adds_to(entered: Tensor, left: Tensor) -> bool | None:
    """Return whether ``left``, a block's output, is ``entered``, its input, plus something.

    Norms, activations, scales and changes of shape are allowed before and after the sum.

    Returns:
        None if the graph does not show it: without gradients, or after an operation with an unknown derivative.
    """
    if left is entered or share_memory([left], [entered]):
        return True
    if left.grad_fn is None:
        return None
    target, known = _place(entered), True
    seen: set[tuple[Node, bool]] = set()
    front: list[tuple[Node, bool]] = [(left.grad_fn, False)]
    while front:
        node, added = front.pop()
        if node is target:
            if added:
                return True
            continue
        if (node, added) in seen:
            continue
        seen.add((node, added))
        kind, edges = _kind(node), [other for other, _ in node.next_functions]
        if isinstance(node, BackwardCFunction) and kind not in _ANY:
            known = False  # compiled, checkpointed, or a custom kernel
            continue
        adds = kind in _ADDS or (kind in ("Sum", "Mean") and any(_kind(other) == "Stack" for other in edges if other))
        places = _ADDS.get(kind) or ((0,) if kind in _FIRST else range(len(edges)))
        if kind == "ScatterAdd" and edges[0] is None:  # sums of rows in a new tensor, as of merged tokens
            places, adds = (1,), False
        if kind not in _ADDS and kind not in _FIRST and kind not in _ANY:
            continue
        for place in places:
            if place >= len(edges):
                continue
            other = edges[place]
            if other is None:  # data without a gradient, such as the input itself
                known = known and not (target is None and (added or adds))
            else:
                front.append((other, added or adds))
    return None if not known else False


def _place(t: Tensor) -> Any:
    """Return the node of a tensor in graphs computed from it; None if it takes no gradient."""
    if t.grad_fn is not None:
        return t.grad_fn
    return t.expand_as(t).grad_fn.next_functions[0][0] if t.requires_grad else None  # pyright: ignore[reportOptionalMemberAccess]


def is_subtracted(given: Tensor, made: Tensor) -> bool:
    """Return whether ``made``, a block's output, enters ``given``, the next block's input, only with a minus sign."""
    if given.grad_fn is None or made.grad_fn is None or given is made:
        return False
    signs: set[int] = set()
    seen: set[tuple[Node, int]] = set()
    front: list[tuple[Node, int]] = [(given.grad_fn, 1)]
    oldest = made.grad_fn._sequence_nr()
    while front:
        node, sign = front.pop()
        if node is made.grad_fn:
            signs.add(sign)
            continue
        if (node, sign) in seen or node._sequence_nr() < oldest:
            continue
        seen.add((node, sign))
        kind, edges = _kind(node), [other for other, _ in node.next_functions]
        if kind not in _ADDS and kind not in _FIRST and kind not in _ANY and kind not in ("Neg", "Rsub"):
            continue
        for place, other in enumerate(edges):
            turned = kind == "Neg" or (kind == "Sub" and place == 1) or (kind == "Rsub" and place == 0)
            if other is not None:
                front.append((other, -sign if turned else sign))
    return signs == {-1}
