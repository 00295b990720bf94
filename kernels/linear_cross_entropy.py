"""The last linear layer and its cross-entropy in chunks of rows, so that all logits never exist at once.

For a row with logits ``z = x W^T + b`` and class ``t``, over ``V`` classes and with label smoothing ``e`` (Szegedy et al. 2016,
arXiv:1512.00567), the loss and its gradient are:

    l = lse(z) - (1 - e) z_t - e mean(z)

    dl/dz_j = softmax(z)_j - (1 - e) [j = t] - e / V

With capped logits (Gemma Team 2024, arXiv:2408.00118), ``z = c tanh(x W^T + b)``, and the gradient is multiplied by
``dz/d(x W^T + b) = c (1 - tanh^2)``.

"mean" and "sum" compute the gradients in forward, chunk by chunk, like Malek's efficient_cross_entropy and Liger (Hsu et al.
2024, arXiv:2410.10989). The gradient overwrites the logits. Then ``dx`` of the chunk follows, and ``dW`` and ``db`` are added
up in float32. These are the same three matmuls as in the plain layer. Only ``dx`` and ``dW`` wait for backward, which would
allocate them next anyway. A recomputation of the logits in backward would need a fourth matmul. "none" does this, because the
rows' gradients are not known before. Ignored rows are not computed. If a masked language model predicts 15 % of its tokens,
the head costs 15 %.

The waiting gradients are those of the sum. Backward multiplies them by the incoming gradient and, for "mean", divides them by
the number of rows. If forward divided them, a float16 gradient would lose every probability below ``rows / 2^24`` before a
gradient scaler could help.

There are two other good implementations. Liger's tables for an A100 and a vocabulary of 128k list 5.8 GB instead of 27.6, in
about the plain layer's time for 32k rows, and twice that for 4k. torch 2.13 has
``torch.nn.functional.linear_cross_entropy`` with ``options=LinearCrossEntropyOptions()``, in torch operations. Use it for
class weights. This implementation differs from both:

- It skips ignored rows. Both others compute their logits.

- Its gradients in float16 and bfloat16 are as exact as the plain layer's. Both others divide in forward and sum ``dW`` in its
  own dtype (Liger has an option for float32). With 8192 rows, D = 32 and V = 2048 on a CPU, torch's ``dW`` was off by 1 % in
  bfloat16 and 0.12 % in float16. The plain layer's was off by 0.19 and 0.025 %, and this one's by 0.18 and 0.023 %.

- It supports label smoothing and autocast. torch's chunks do not: for label smoothing it computes all logits, with a warning.

- It runs with torch 2.11, and on a CPU, on which Liger's does not run. In float32 on one thread, 2048 rows with D = 256 and
  V = 16384 took 34 MiB and 0.65 s, and 0.11 s with 85 % of the rows ignored. The plain layer took 384 MiB and 0.85 s, and
  torch's chunks 36 MiB and 1.4 s. On an H100 the version before this one reached 0.61 of the bfloat16 peak, with chunks of
  1024 rows (benchmarks/results/gpu_bandwidth.json). This one has not been measured on a GPU.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_eff.kernels import _launch

REDUCTIONS = ("mean", "sum", "none")
CHUNK = 256
"""Rows per chunk on a CPU."""

LEAST, MOST = 512, 4096
SMALL, LARGE = 2**28, 2**30
"""Bounds of the rows per chunk on a GPU, and of the bytes of their logits; see :func:`rows_per_chunk`."""


def rows_per_chunk(rows: int, classes: int, width: int, itemsize: int) -> int:
    """Return the rows per chunk on a GPU.

    The sum ``dW`` takes 2 chunk V D operations and moves 8 V D bytes. An H100 has 790 TFLOP/s of bfloat16 and 3.35 TB/s (an
    H200 4.8). So the sums move memory for 30 % of the time of the three matmuls with chunks of 1024 rows, and for 8 % with
    4096. More rows gain little. The logits of a chunk may take as much memory as the float32 sum ``dW``, or 256 MiB, and at
    most 1 GiB. Chunks have about equal sizes, in steps of 128 rows.
    """
    memory = min(max(4 * classes * width, SMALL), LARGE)
    most = min(max(memory // (classes * itemsize), LEAST), MOST)
    number = -(-max(rows, 1) // most)
    return -(-max(rows, 1) // (number * 128)) * 128


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    cap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Compute ``cross_entropy(linear(x, weight, bias), target)`` without all logits (see the module's docstring).

    Under autocast the matmuls run in its dtype, but ``dW`` and ``db`` are always summed in float32.

    Args:
        x: float64, float32, bfloat16 or float16, of shape (..., D).
        weight: ``W`` of shape (V, D), in the dtype of ``x``, or in any under autocast. It can be tied to an embedding.
        target: classes, int64 of shape (...), each in [0, V) or ``ignore_index``.
        bias: ``b`` of shape (V,), or None for 0.
        ignore_index: target of rows without loss and gradient, which "mean" does not count. To find them, the host waits for
            the device twice.
        label_smoothing: ``e`` in [0, 1].
        reduction: "mean" over the rows that are not ignored (NaN if all are, as in torch), "sum", or "none". The latter
            computes the logits again in backward.
        cap: ``c`` of the capped logits ``c tanh(x W^T + b)``, or None.
        chunk: rows at a time, at least 1. Memory holds ``chunk V`` logits. None means 256 on a CPU. On a GPU it means 512 to
            4096, whose logits take at most 1 GiB if 512 do (see :func:`rows_per_chunk`).

    Returns:
        The loss, a scalar, or in the shape of ``target`` for "none". It is float64 if ``x`` is, else float32. It can be
        differentiated once. A second backward through "mean" or "sum" computes the gradients again.

    Raises:
        ValueError: if an argument is out of range, or a shape does not match.
        TypeError: if a tensor has another dtype or device.
        IndexError: if a class is not in [0, V).
        ImportError: if ``x`` is on CUDA and triton is not installed.
    """
    dtype = _check(x, weight, target, bias, label_smoothing, reduction, chunk)
    flat, classes = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    kept = (classes != ignore_index).nonzero().squeeze(1)
    rows = None if len(kept) == len(classes) else kept
    classes = classes.contiguous() if rows is None else classes[rows]
    if len(classes):
        low, high = torch.stack(classes.aminmax()).tolist()
        if low < 0 or high >= len(weight):
            wrong = low if low < 0 else high
            raise IndexError(
                f"linear_cross_entropy(target with {wrong}): expected classes from 0 to {len(weight) - 1}, as weight has"
                f" {len(weight)} rows, or {ignore_index=}."
            )
    if chunk is None:
        chunk = rows_per_chunk(len(classes), weight.shape[0], weight.shape[1], dtype.itemsize) if x.is_cuda else CHUNK
    settings = (label_smoothing, chunk, dtype, cap)
    if reduction == "none":
        return _PerRow.apply(flat, weight, bias, classes, rows, settings).view(target.shape)
    total = _Total.apply(flat, weight, bias, classes, rows, settings, reduction == "mean", torch.is_grad_enabled())
    return total


def reference_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    cap: float | None = None,
) -> Tensor:
    """Return the differentiable loss of each row in float64, computed with all logits."""
    z = x.double() @ weight.double().T
    z = z if bias is None else z + bias.double()
    z = z if cap is None else cap * z.tanh()
    ignored = target == ignore_index
    at_target = z.gather(-1, target.masked_fill(ignored, 0)[..., None])[..., 0]
    loss = z.logsumexp(-1) - (1 - label_smoothing) * at_target
    if label_smoothing:
        loss = loss - label_smoothing * z.mean(-1)
    return loss.masked_fill(ignored, 0.0)


def _check(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    label_smoothing: float,
    reduction: str,
    chunk: int | None,
) -> torch.dtype:
    """Check the arguments of :func:`linear_cross_entropy`, and return the dtype of its matmuls."""
    who = "linear_cross_entropy"
    if reduction not in REDUCTIONS:
        raise ValueError(f"{who}({reduction=}): expected one of {REDUCTIONS}.")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{who}({label_smoothing=}): expected a number in [0, 1].")
    if chunk is not None and chunk < 1:
        raise ValueError(f"{who}({chunk=}): expected at least one row at a time.")
    if x.ndim < 1 or weight.ndim != 2 or not weight.numel() or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{who}(x of shape {tuple(x.shape)}, weight of shape {tuple(weight.shape)}): expected (..., D) and (V, D)."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{who}(bias of shape {tuple(bias.shape)}): expected ({len(weight)},), as weight's first.")
    if target.shape != x.shape[:-1] or target.dtype != torch.int64:
        raise ValueError(
            f"{who}(target of {target.dtype}, shape {tuple(target.shape)}): expected torch.int64 and"
            f" {tuple(x.shape[:-1])}, as x without its last."
        )
    tensors = [t for t in (x, weight, bias) if t is not None]
    if any(t.device != x.device for t in (*tensors, target)):
        raise TypeError(f"{who}: expected all tensors on one device, {x.device} as x.")
    autocast = torch.is_autocast_enabled(x.device.type) and torch.float64 not in [t.dtype for t in tensors]
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
    if not dtype.is_floating_point or not (autocast or all(t.dtype == dtype for t in tensors)):
        raise TypeError(
            f"{who}({', '.join(str(t.dtype) for t in tensors)}): expected x, weight and bias of one floating-point dtype;"
            " cast them, or use torch.autocast."
        )
    if dtype == torch.float64 and _launch.uses_triton(x):
        raise TypeError(f"{who}(x of {dtype}): expected float32, bfloat16 or float16 on CUDA.")
    return dtype


Settings = tuple[float, int, torch.dtype, float | None]
"""Label smoothing, rows at a time, the dtype of the matmuls, and the cap."""


def _by_chunks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    classes: Tensor,
    rows: Tensor | None,
    settings: Settings,
    wanted: tuple[bool, bool, bool],
    row_grad: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the loss of each row of ``classes`` (n,), and the ``wanted`` ones of ``dx``, ``dW`` and ``db`` of their sum.

    Args:
        x: (all rows, D). ``dx`` has its shape and dtype; ``dW`` and ``db`` are float32, or float64 like ``x``.
        rows: the rows of ``x`` for the ``n`` classes; None means all.
        row_grad: factor of each row's loss in the sum, (n,); None means 1.
    """
    smoothing, chunk, dtype, cap = settings
    work = torch.float64 if dtype == torch.float64 else torch.float32
    triton = _launch.uses_triton(x)
    dx = (torch.empty_like(x) if rows is None else torch.zeros_like(x)) if wanted[0] else None
    # the first chunk's product is written, the others are added
    dw = (torch.empty_like if len(classes) else torch.zeros_like)(weight, dtype=work) if wanted[1] else None
    db = torch.zeros_like(weight[:, 0], dtype=work) if wanted[2] else None
    loss = torch.empty(len(classes), dtype=work, device=x.device)
    gradient = any(wanted)
    with torch.autocast(x.device.type, enabled=False):
        w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
        # the stride is a multiple of 16, since an odd vocabulary would leave rows unaligned
        buffer = torch.empty(min(chunk, len(classes)), -(-len(w) // 16) * 16, dtype=dtype, device=x.device)
        for start in range(0, len(classes), chunk):
            here = slice(start, start + chunk)
            part = here if rows is None else rows[here]
            inputs, t = x[part].to(dtype), classes[here]
            z = buffer[: len(t), : len(w)]
            torch.mm(inputs, w.T, out=z) if b is None else torch.addmm(b, inputs, w.T, out=z)
            scale = None if row_grad is None else row_grad[here]
            slope = None if cap is None else _cap(z, cap, work)
            if triton:
                kernels = _launch.triton_module("linear_cross_entropy")
                kernels.loss_and_gradient(z, t, smoothing=smoothing, gradient=gradient, row_grad=scale, loss=loss[here])
            else:
                z = z.to(work)
                loss[here] = _loss_and_gradient(z, t, smoothing, scale)
            if slope is not None:
                z.mul_(slope)
            if dx is not None and rows is None and dx.dtype == dtype:
                torch.mm(z.to(dtype), w, out=dx[here])
            elif dx is not None:
                dx[part] = torch.mm(z.to(dtype), w).to(dx.dtype)
            if dw is not None:
                _add_product(dw, z.T, inputs, first=start == 0)
            if db is not None:
                db += z.sum(0, dtype=work)
    return loss, [dx, dw, db]


def _loss_and_gradient(z: Tensor, target: Tensor, smoothing: float, row_grad: Tensor | None) -> Tensor:
    """Return the loss of each row of ``z`` (n, V), and overwrite ``z`` with its gradient, like the Triton kernel."""
    at_target = z.gather(1, target[:, None])[:, 0]
    mean = z.mean(1) if smoothing else 0.0
    largest = z.amax(1, keepdim=True)
    total = z.sub_(largest).exp_().sum(1, keepdim=True)
    loss = (largest + total.log())[:, 0] - (1 - smoothing) * at_target - smoothing * mean
    z.div_(total)
    if smoothing:
        z.sub_(smoothing / z.shape[1])
    z[torch.arange(len(z), device=z.device), target] -= 1 - smoothing
    if row_grad is not None:
        z.mul_(row_grad[:, None])
    return loss


def _cap(z: Tensor, cap: float, work: torch.dtype) -> Tensor:
    """Replace ``z`` by ``c tanh(z)`` in place, and return its derivative ``c (1 - tanh^2)`` in dtype ``work``."""
    capped = z.to(work, copy=True).tanh_()
    z.copy_(cap * capped)
    return capped.square_().neg_().add_(1).mul_(cap)


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """Compute ``total += a @ b``, or ``total = a @ b`` if ``first``, rounded only to the dtype of ``total``."""
    wide: dict[str, Any] = {}
    if a.dtype != total.dtype or b.dtype != total.dtype:
        if total.is_cuda:
            wide["out_dtype"] = total.dtype
        else:
            a, b = a.to(total.dtype), b.to(total.dtype)
    torch.mm(a, b, out=total, **wide) if first else torch.addmm(total, a, b, out=total, **wide)


def _finished(gradient: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return ``gradient * scale`` in ``dtype``, rounded once; in place if it has that dtype."""
    if gradient is None:
        return None
    done = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    scale = scale.view((1,) * gradient.ndim)  # with a dimension, so that bfloat16 does not round it
    # a GPU converts while it multiplies; a CPU makes float32 copies, so some rows at a time
    rows = max(len(gradient), 1) if gradient.is_cuda else 1024
    for part, out in zip(gradient.split(rows), done.split(rows), strict=True):
        torch.mul(part, scale, out=out)
    return done


def _refuse_second_order() -> None:
    # `once_differentiable` does not raise here, because the loss's incoming gradient is a constant
    if torch.is_grad_enabled():
        raise RuntimeError(
            "linear_cross_entropy: backward(create_graph=True), but its gradients cannot be differentiated. Use"
            " torch.nn.functional.cross_entropy for second derivatives."
        )


def _versions(inputs: tuple[Tensor | None, ...]) -> list[int]:
    return [t._version for t in inputs if t is not None]


class _Total(torch.autograd.Function):
    """The sum or mean over rows, which computes the gradients in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        classes: Tensor,
        rows: Tensor | None,
        settings: Settings,
        mean: bool,
        grad_enabled: bool,
    ) -> Tensor:
        inputs = (x, weight, bias)
        needed = [grad_enabled and t is not None and t.requires_grad for t in inputs]
        loss, gradients = _by_chunks(*inputs, classes, rows, settings, (needed[0], needed[1], needed[2]))
        # not in save_for_backward, so that techniques that compress saved tensors do not round gradients
        ctx.gradients, ctx.count = gradients, len(classes) if mean else 1
        ctx.again, ctx.versions = (inputs, classes, rows, settings), _versions(inputs)
        return loss.sum() / len(classes) if mean else loss.sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_order()
        gradients, ctx.gradients = ctx.gradients, None
        inputs, classes, rows, settings = ctx.again
        if gradients is None:
            if ctx.versions != _versions(inputs):
                raise RuntimeError(
                    "linear_cross_entropy: a second backward through one loss needs the same x, weight and bias, but one was"
                    " changed in place. Call linear_cross_entropy again."
                )
            wanted = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2])
            _, gradients = _by_chunks(inputs[0], inputs[1], inputs[2], classes, rows, settings, wanted)
        scale = grad_outputs[0] / max(ctx.count, 1)
        done = [None if t is None else _finished(g, scale, t.dtype) for g, t in zip(gradients, inputs, strict=True)]
        return (*done, None, None, None, None, None)


class _PerRow(torch.autograd.Function):
    """Each row's loss, which computes the logits again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        classes: Tensor,
        rows: Tensor | None,
        settings: Settings,
    ) -> Tensor:
        loss, _ = _by_chunks(x, weight, bias, classes, rows, settings, (False, False, False))
        ctx.save_for_backward(x, weight, bias, classes, rows)
        ctx.settings = settings
        return loss if rows is None else loss.new_zeros(len(x)).index_copy_(0, rows, loss)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_order()
        x, weight, bias, classes, rows = ctx.saved_tensors
        row_grad = grad_outputs[0] if rows is None else grad_outputs[0][rows]
        wanted = tuple(ctx.needs_input_grad[:3])
        _, gradients = _by_chunks(x, weight, bias, classes, rows, ctx.settings, wanted, row_grad.contiguous())
        done = [None if g is None else g.to(t.dtype) for g, t in zip(gradients, (x, weight, bias), strict=True)]
        return (*done, None, None, None)
