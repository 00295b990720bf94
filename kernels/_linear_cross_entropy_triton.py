"""A Triton kernel for the cross-entropy of a chunk of logits, which writes the gradient over the logits.

A program reads one row in blocks, with a running maximum and sum of exponentials. If the gradient is needed, it reads the row
again and writes the gradient over it. A row has 50 to 500 KB, so the second read comes from the cache. All arithmetic is
float32.
"""

# ruff: noqa: ANN001, ANN202 -- what a kernel's arguments are, its docstring says; Triton takes no types for them
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_eff.kernels import _launch

BLOCK = 8192  # logits per block


@triton.jit(do_not_specialize=["smoothing"])
def loss_kernel(
    logits,
    target,
    row_grad,
    loss,
    columns,
    stride,
    smoothing,
    GRADIENT: tl.constexpr,
    SCALED: tl.constexpr,
    SMOOTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute ``loss`` (rows,) of ``logits`` (rows, columns), whose rows are ``stride`` apart and become their gradient."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(target + row)
    logits += row * stride
    at_label = tl.load(logits + label).to(tl.float32)
    offset = tl.arange(0, BLOCK)
    largest = tl.full((), float("-inf"), dtype=tl.float32)
    exponentials = tl.zeros((BLOCK,), dtype=tl.float32)
    values = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + offset < columns
        z = tl.load(logits + start + offset, mask=inside, other=float("-inf")).to(tl.float32)
        largest_now = tl.maximum(largest, tl.max(z, axis=0))
        # if all logits so far are -inf, the sum is 0 and its factor does not matter
        shift = tl.where(largest_now == float("-inf"), 0.0, largest_now)
        exponentials = exponentials * tl.exp(largest - shift) + tl.exp(z - shift)
        if SMOOTH:
            values += tl.where(inside, z, 0.0)
        largest = largest_now
    total = tl.sum(exponentials, axis=0)
    logsumexp = largest + tl.log(total)
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
        for start in range(0, columns, BLOCK):
            inside = start + offset < columns
            z = tl.load(logits + start + offset, mask=inside, other=float("-inf")).to(tl.float32)
            d = tl.exp(z - largest) / total - tl.where(start + offset == label, 1.0 - smoothing, 0.0)
            if SMOOTH:
                d -= smoothing / columns
            tl.store(logits + start + offset, (scale * d).to(logits.dtype.element_ty), mask=inside)


def num_warps(block: int) -> int:
    """Return the warps for a block, with 16 logits per thread."""
    return min(max(block // 512, 1), 16)


def loss_and_gradient(
    logits: Tensor,
    target: Tensor,
    *,
    smoothing: float,
    gradient: bool,
    row_grad: Tensor | None,
    block: int = BLOCK,
) -> Tensor:
    """Return each row's loss, float32. If ``gradient``, write its gradient to ``logits`` (n, V) of stride (any, 1).

    ``row_grad``, float32 (n,), multiplies each row's gradient; None means 1.
    """
    n, columns = logits.shape
    loss = torch.empty(n, dtype=torch.float32, device=logits.device)
    block = min(block, triton.next_power_of_2(columns))
    with _launch.current(logits.device):
        loss_kernel[(n,)](
            logits,
            target,
            row_grad,
            loss,
            columns,
            logits.stride(0),
            smoothing,
            GRADIENT=gradient,
            SCALED=row_grad is not None,
            SMOOTH=smoothing > 0,
            BLOCK=block,
            num_warps=num_warps(block),
        )
    return loss
