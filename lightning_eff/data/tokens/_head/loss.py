"""The cross-entropy of a placeholder, by the kernel that stores no whole logits."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_eff.data.tokens._head.calls import Node
from lightning_eff.kernels.linear_cross_entropy import CHUNK, linear_cross_entropy, rows_per_chunk


def fused_loss(node: Node, arguments: dict[str, Any], rows: int | None) -> tuple[Tensor, int] | None:
    """Return the result of the loss call and the number of computed rows, or None if it needs the logits.

    The call is one of ``F.cross_entropy``, or of ``F.nll_loss`` on ``log_softmax``, which is equivalent.

    Rows with the ignored label, and rows of the layer's output that never reach the call, are not computed. Class weights ``w``
    multiply the losses of rows: the mean is ``sum_i w_{y_i} l_i / sum_i w_{y_i}`` over rows i that count.

    Args:
        node: the content of the call's ``input``.
        arguments: the arguments of the call, by name.
        rows: the number of rows of logits at a time; None chooses it by the device, at most a quarter of the rows.
    """
    target, weight, reduction = arguments["target"], arguments["weight"], arguments["reduction"]
    smoothing, ignored = arguments.get("label_smoothing", 0.0), arguments["ignore_index"]
    if type(target) is not Tensor or target.dtype != torch.int64 or target.device != node.call.x.device:
        return None
    if node.rows.at != (1 if len(node.rows.shape) > 1 else 0) or target.shape != node.rows.outer:
        return None
    if (weight is not None and (smoothing or weight.shape != (node.rows.classes,))) or reduction not in _REDUCTIONS:
        return None
    node.call.check()
    x, classes = node.call.x.reshape(-1, node.call.x.shape[-1]), target.flatten()
    back: Tensor | None = None
    if not node.rows.straight:
        index = node.rows.indices(x.device).flatten()
        if node.rows.once:  # the other rows are not computed
            classes = classes.new_full((len(x),), ignored).index_copy_(0, index, classes)
            back = index
        else:
            x = x[index]
    computed = int((classes != ignored).sum())
    w, b = node.call.weight, node.call.bias
    if node.scale is not None:
        x, b = x * node.scale, None if b is None else b * node.scale
    if node.shift is not None:
        shift = node.shift.to(w.dtype)
        b = shift if b is None else b + shift
    with node.call.casting():
        loss = linear_cross_entropy(
            x.to(node.call.x.dtype),
            w,
            classes,
            b,
            ignore_index=ignored,
            label_smoothing=smoothing,
            reduction=reduction if weight is None else "none",
            cap=node.cap,
            chunk=rows or _rows(node.call.x, w, node.dtype),
        )
    if weight is not None:
        counted = weight.to(loss.dtype)[classes.masked_fill(classes == ignored, 0)] * (classes != ignored)
        loss = loss * counted
        loss = loss.sum() / counted.sum() if reduction == "mean" else loss.sum() if reduction == "sum" else loss
    if reduction == "none":
        loss = (loss if back is None else loss[back]).reshape(target.shape)
    return node.call.announced(loss.to(_dtype(node))), computed


_REDUCTIONS = ("mean", "sum", "none")


def _rows(x: Tensor, weight: Tensor, dtype: torch.dtype) -> int:
    """Return the rows of logits at a time, for the layer's input (..., D), its weight and the dtype of its logits."""
    rows = x.shape[:-1].numel()
    most = rows_per_chunk(rows, weight.shape[0], weight.shape[1], dtype.itemsize) if x.is_cuda else CHUNK
    return min(most, -(-rows // 4))


def _dtype(node: Node) -> torch.dtype:
    """Return the dtype of the module's own call here, since autocast computes losses in float32."""
    device = node.call.x.device
    with torch.no_grad():
        one = F.cross_entropy(
            torch.zeros(1, 2, dtype=node.dtype, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        )
    return one.dtype
