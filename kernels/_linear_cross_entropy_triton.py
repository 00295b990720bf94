"""Triton kernels for the cross-entropy of a chunk of logits, which write the gradient over the logits.

A program reads one row in blocks of LANES x ITEMS logits. Each lane keeps a maximum and a sum of exponentials of its own, so
that no block waits for the other threads. They are combined once per row. If the gradient is needed, the program reads the
row again and writes the gradient over it. A row has 50 to 500 KB, so the second read comes from the cache. All arithmetic is
float32.

Rows of a width that is not a multiple of 16, such as GPT-2's 50257, would be read in single elements. The kernel reads and
writes up to the next multiple if the memory of the row goes on so far. It writes back what it read there.
"""

# ruff: noqa: ANN001, ANN202 -- what a kernel's arguments are, its docstring says; Triton takes no types for them
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_eff.kernels import _launch

MULTIPLE = 16  # of a row's width and stride, so that a thread reads 16 bytes at once
ITEMS = 8  # neighbouring logits of a lane
BLOCK = 8192  # logits per block. Other sizes change the order of the sums, so it is not chosen by timing


@triton.jit
def at_once(logits, start, offset, columns, width):
    """Return a block of a row as it is in memory, in float32, and -inf beyond its ``columns`` logits."""
    raw = tl.load(logits + start + offset, mask=start + offset < width, other=float("-inf"))
    return raw, tl.where(start + offset < columns, raw.to(tl.float32), float("-inf"))


@triton.jit(do_not_specialize=["smoothing"])
def loss_kernel(
    logits,
    target,
    row_grad,
    loss,
    columns,
    width,
    stride,
    smoothing,
    GRADIENT: tl.constexpr,
    SCALED: tl.constexpr,
    SMOOTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Compute ``loss`` (rows,) of ``logits`` (rows, columns), whose rows are ``stride`` apart and become their gradient.

    The memory of a row has ``width`` >= ``columns`` elements, of which those beyond ``columns`` keep their values.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(target + row)
    logits += row * stride
    at_label = tl.load(logits + label).to(tl.float32)
    LANES: tl.constexpr = BLOCK // ITEMS
    offset = tl.arange(0, LANES)[:, None] * ITEMS + tl.arange(0, ITEMS)[None, :]
    largest = tl.full((LANES,), float("-inf"), dtype=tl.float32)
    exponentials = tl.zeros((LANES,), dtype=tl.float32)
    values = tl.zeros((LANES,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        _, z = at_once(logits, start, offset, columns, width)
        largest_now = tl.maximum(largest, tl.max(z, axis=1))
        # if all logits of a lane so far are -inf, the sum is 0 and its factor does not matter
        shift = tl.where(largest_now == float("-inf"), 0.0, largest_now)
        exponentials = exponentials * tl.exp(largest - shift) + tl.sum(tl.exp(z - shift[:, None]), axis=1)
        if SMOOTH:
            values += tl.sum(tl.where(start + offset < columns, z, 0.0), axis=1)
        largest = largest_now
    top = tl.max(largest, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(exponentials * tl.exp(largest - shift), axis=0)
    logsumexp = top + tl.log(total)
    # l = lse - (1 - e) z_t - e mean(z)
    result = logsumexp - (1.0 - smoothing) * at_label
    if SMOOTH:
        result -= smoothing * (tl.sum(values, axis=0) / columns)
    tl.store(loss + row, result)
    if GRADIENT:
        # dl/dz_j = exp(z_j - lse) - (1 - e) [j = t] - e / V
        scale = 1.0
        if SCALED:
            scale = tl.load(row_grad + row)
        inverse = 1.0 / total
        for start in range(0, width, BLOCK):
            raw, z = at_once(logits, start, offset, columns, width)
            d = tl.exp(z - top) * inverse - tl.where(start + offset == label, 1.0 - smoothing, 0.0)
            if SMOOTH:
                d -= smoothing / columns
            d = tl.where(start + offset < columns, (scale * d).to(raw.dtype), raw)
            tl.store(logits + start + offset, d, mask=start + offset < width)


def width_of(logits: Tensor) -> int:
    """Return how many elements of each row the kernel may read: a multiple of 16 if the memory goes on so far."""
    (n, columns), stride = logits.shape, logits.stride(0)
    width = -(-columns // MULTIPLE) * MULTIPLE
    end = logits.storage_offset() + (n - 1) * stride + width
    fits = width <= stride and end * logits.element_size() <= logits.untyped_storage().nbytes()
    return width if fits and stride % MULTIPLE == 0 else columns


def loss_and_gradient(
    logits: Tensor,
    target: Tensor,
    *,
    smoothing: float,
    gradient: bool,
    row_grad: Tensor | None,
    loss: Tensor | None = None,
    block: int = BLOCK,
) -> Tensor:
    """Return each row's loss, float32. If ``gradient``, write its gradient to ``logits`` (n, V) of stride (any, 1).

    Elements of the memory between two rows keep their values.

    Args:
        logits: see above.
        target: the class of each row, (n,).
        smoothing: label smoothing.
        gradient: whether to write the gradient.
        row_grad: float32, (n,). It multiplies each row's gradient; None means 1.
        loss: where to write the losses, float32, (n,), or None.
        block: logits per block.
    """
    n, columns = logits.shape
    loss = torch.empty(n, dtype=torch.float32, device=logits.device) if loss is None else loss
    block = max(min(block, triton.next_power_of_2(columns)), ITEMS)
    with _launch.current(logits.device):
        loss_kernel[(n,)](
            logits,
            target,
            row_grad,
            loss,
            columns,
            width_of(logits),
            logits.stride(0),
            smoothing,
            GRADIENT=gradient,
            SCALED=row_grad is not None,
            SMOOTH=smoothing > 0,
            BLOCK=block,
            ITEMS=ITEMS,
            num_warps=num_warps(block),
        )
    return loss


def num_warps(block: int) -> int:
    """Return the warps for a block, with 16 logits per thread."""
    return min(max(block // 512, 1), 16)
