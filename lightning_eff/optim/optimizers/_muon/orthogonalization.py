"""The polar factor of many matrices at once, by matrix products only (Jordan et al. 2024; Amsel et al. 2025).

The polar factor of a matrix ``X = U S V^T`` is ``U V^T``, the nearest matrix whose singular values are all one. An odd
polynomial of ``X`` acts on its singular values. So a few steps ``X := a X + b (X X^T) X + c (X X^T)^2 X`` bring them close to
one. Matrices of one shape are stacked, so that a step needs three batched products for any number of matrices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_eff.optim.optimizers import _lists as lists
from lightning_eff.optim.optimizers._muon.scratch import Scratch

Coefficients = tuple[float, float, float]
#: the largest slope of one stage, by the dtype of the products; others take one step at a time. See :func:`stages`
_SLOPES = {torch.float32: 50.0, torch.bfloat16: 16.0}
_LINE = 64  # bytes; tensors in shared memory begin at multiples
_SMALL = 64  # from this shorter side on, bfloat16 products are faster than float32 ones where a CPU has them


@dataclass(frozen=True)
class Iteration:
    """One kind of iteration.

    Attributes:
        steps: ``(a, b, c)`` of each step; further steps repeat the last one.
        safety: factor of the Frobenius norm, so that rounding cannot lift a singular value above one.
        eps: added to the norm, or its least value if ``clamped``.
        clamped: see ``eps``.
    """

    steps: tuple[Coefficients, ...]
    safety: float
    eps: float
    clamped: bool

    def coefficients(self, num_iterations: int) -> tuple[Coefficients, ...]:
        """Return the coefficients of ``num_iterations`` steps."""
        missing = num_iterations - len(self.steps)
        return (*self.steps[:num_iterations], *[self.steps[-1]] * max(missing, 0))


ITERATIONS = {
    # Jordan et al. 2024: one quintic whose slope at 0 is steep; singular values end in about [0.7, 1.2]
    "newton_schulz": Iteration(((3.4445, -4.775, 2.0315),), safety=1.0, eps=1e-7, clamped=True),
    # Amsel et al. 2025, arXiv:2505.16932: the best quintic after the steps before, for singular values in [1e-3, 1]; the
    # coefficients are those of their implementation, with a margin for bfloat16
    "polar_express": Iteration(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        safety=1.02,
        eps=1e-6,
        clamped=False,
    ),
}


@dataclass(slots=True)
class Stack:
    """Matrices of one shape.

    Attributes:
        blocks: indices of the given blocks in it, in order.
        x: shape (k, out, in).
        spare: memory like ``x``.
    """

    blocks: list[int]
    x: Tensor
    spare: Tensor | None = None


@cache
def multiplies_bfloat16() -> bool:
    """Return whether this processor has instructions for bfloat16 products (AMX or AVX512-BF16) that torch uses."""
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


def product_dtype(shape: Sequence[int], device: torch.device, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which matrices (..., m, n) are orthogonalized.

    It depends only on the shape, the device and the processor, so the result of a matrix does not depend on other matrices,
    on the rank or on the step.

    Args:
        shape: the shape of one or several.
        device: their device.
        dtype: the given dtype. None uses bfloat16 on CUDA. On a CPU it uses bfloat16 if the shorter side is 64 or longer and
            :func:`multiplies_bfloat16`, else float32.
    """
    if dtype is not None:
        return dtype
    if device.type == "cpu":
        small = min(shape[-2:]) < _SMALL
        return torch.float32 if small or not multiplies_bfloat16() else torch.bfloat16
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def orthogonalize(
    matrices: Sequence[Tensor],
    *,
    method: str = "polar_express",
    num_iterations: int = 5,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Return the approximate polar factors of ``matrices``: singular values become about one, singular vectors stay.

    Args:
        matrices: matrices (m, n) of any shapes on one device. They do not change.
        method: "polar_express" or "newton_schulz".
        num_iterations: number of steps, >= 1.
        dtype: type of the products; None as in :func:`product_dtype`.

    Returns:
        The factors in the order and shapes of ``matrices``, in the type of the products. They are views of a few large tensors.
    """
    found, scratch = list(matrices), Scratch()
    stacks = stacked([matrix[None] for matrix in matrices], dtype, scratch)
    polar(stacks, scratch, method=method, num_iterations=num_iterations)
    for stack in stacks:
        for index, one in zip(stack.blocks, stack.x.unbind(0), strict=True):
            found[index] = one
    return found


def polar(stacks: Sequence[Stack], scratch: Scratch, *, method: str = "polar_express", num_iterations: int = 5) -> None:
    """Replace the matrices of each stack by their polar factors, as in :func:`orthogonalize`; they lie in ``scratch``."""
    how = ITERATIONS[method]
    steps = how.coefficients(num_iterations)
    alike: dict[Any, list[Stack]] = {}  # by the size of the Gram matrices, whose products are then made together
    for stack in stacks:
        m, _ = sorted(stack.x.shape[1:])
        # by the shape only, so that the result does not depend on other matrices or on the rank
        key = (stack.x.dtype, m) if len(_stages_of(stack, steps)) < len(steps) else id(stack)
        alike.setdefault(key, []).append(stack)
    if not stacks:
        return
    groups = [(some, _stages_of(some[0], steps)) for some in alike.values()]
    sizes = [_whole_lines(stack.x.numel() * stack.x.element_size()) for stack in stacks]
    grams = max(_gram_bytes(*group) for group in groups)
    # the momenta of Muon were there, which are no longer needed
    *rooms, rest = scratch.get("updates", [sum(sizes) + grams], torch.uint8, stacks[0].x.device).split([*sizes, grams])
    for stack, room in zip(stacks, rooms, strict=True):
        stack.spare = room[: stack.x.numel() * stack.x.element_size()].view(stack.x.dtype).view(stack.x.shape)
    for some, parts in groups:
        _iterate(some, parts, how, rest)


def _whole_lines(size: int) -> int:
    """Return ``size`` bytes rounded up, so that a tensor of any dtype may begin there."""
    return -(-size // _LINE) * _LINE


def _names_of(parts: Sequence[Sequence[Coefficients]]) -> tuple[str, ...]:
    """The matrices of the shorter side's size that the stages work with; later ones of one name share its memory."""
    return ("gram", "q", "q", "q") if all(len(part) == 1 for part in parts) else ("gram", "q", "p", "free")


def _gram_bytes(stacks: Sequence[Stack], parts: Sequence[Sequence[Coefficients]]) -> int:
    first, count = stacks[0].x, sum(len(stack.x) for stack in stacks)
    one = count * min(first.shape[1:]) ** 2 * first.element_size()
    return len(set(_names_of(parts))) * _whole_lines(one)


def _stages_of(stack: Stack, steps: Sequence[Coefficients]) -> list[list[Coefficients]]:
    """Return the stages for a stack: several steps on the Gram matrix where that is cheaper, else one step each."""
    parts = stages(steps, _SLOPES.get(stack.x.dtype, 0.0))
    m, n = sorted(stack.x.shape[1:])
    return parts if gram_is_cheaper(m, n, parts) else [[step] for step in steps]


def stacked(blocks: Sequence[Tensor], dtype: torch.dtype | None, scratch: Scratch) -> list[Stack]:
    """Copy blocks of matrices (j, out, in) to stacks in the :func:`product_dtype`, one for each shape."""
    by_shape: dict[torch.Size, list[int]] = {}
    for index, block in enumerate(blocks):
        by_shape.setdefault(block.shape[1:], []).append(index)
    stacks: list[Stack] = []
    for shape, indices in by_shape.items():
        some = [blocks[i] for i in indices]
        sizes, kind = [len(block) for block in some], product_dtype(some[0].shape, some[0].device, dtype)
        x = scratch.get(f"stack {len(stacks)}", (sum(sizes), *shape), kind, some[0].device)
        lists.copy_(list(x.split(sizes)), some)
        stacks.append(Stack(indices, x))
    return stacks


def gram_is_cheaper(m: int, n: int, parts: Sequence[Sequence[Coefficients]]) -> bool:
    """Whether stages of several steps take fewer multiplications than single steps for (m, n) matrices, ``m <= n``.

    A stage computes the Gram matrix and multiplies by it, ``m^2 n`` twice. Its steps need four products of ``m^3`` each, but
    the first three and the last two, and a single step only one.
    """
    steps = sum(len(part) for part in parts)
    return sum(2 * n + (4 * len(part) - 3) * m for part in parts) < steps * (2 * n + m)


def stages(steps: Sequence[Coefficients], slope: float) -> list[list[Coefficients]]:
    """Split the steps into stages, which compute the Gram matrix again, before the product of slopes at zero exceeds ``slope``.

    Rounding errors of a Gram matrix are as large as those of its largest eigenvalue, so squares of small singular values are
    lost. Stages enlarge these first. In float32 and with a slope of 50, the result differs from single steps by about 1e-5
    for any condition number, and without stages by 1e-3. In bfloat16, 16 is the most that does not add to the error of
    single steps. With 50, singular values reach 1.4.
    """
    found: list[list[Coefficients]] = []
    product = math.inf
    for step in steps:
        product *= step[0]
        if product > slope:
            found.append([])
            product = step[0]
        found[-1].append(step)
    return found


def _normalize(x: Tensor, how: Iteration) -> None:
    """Scale ``x`` of shape (k, m, n) in place to singular values of at most one."""
    norm = torch.linalg.vector_norm(x.flatten(1), dim=1).mul_(how.safety)
    x.div_((norm.clamp_(min=how.eps) if how.clamped else norm.add_(how.eps))[:, None, None])


def _iterate(stacks: Sequence[Stack], parts: Sequence[Sequence[Coefficients]], how: Iteration, room: Tensor) -> None:
    """Do the steps of each stage on stacks with equal shorter sides. ``room`` has :func:`_gram_bytes` to work in.

    With ``A = X X^T`` and ``P = a I + b A + c A^2``, each step is ``X := P X``, ``A := P A P``. All ``P`` are polynomials in
    one matrix, so they commute. The code computes their product ``Q`` over each of the :func:`stages`.
    """
    first, sizes = stacks[0].x, [len(stack.x) for stack in stacks]
    side, names = min(first.shape[1:]), _names_of(parts)
    shape = (sum(sizes), side, side)
    size = sum(sizes) * side**2 * first.element_size()
    places = {name: i * _whole_lines(size) for i, name in enumerate(dict.fromkeys(names))}
    gram, q, p, free = (room[at : at + size].view(first.dtype).view(shape) for at in (places[name] for name in names))
    for stack in stacks:
        _normalize(stack.x, how)
    for part in parts:
        for stack, own in zip(stacks, gram.split(sizes), strict=True):
            _gram(stack.x, own)
        for k, (a, b, c) in enumerate(part):
            # P = a I + b A + c A^2
            own = torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=p if k else q)
            own.diagonal(dim1=1, dim2=2).add_(a)
            if k + 1 < len(part):
                torch.bmm(torch.bmm(own, gram, out=free), own, out=gram)
            if k:
                q, free = torch.bmm(p, q, out=free), q
        for stack, own in zip(stacks, q.split(sizes), strict=True):
            assert stack.spare is not None
            # with rounding they do not commute: P_k ... P_1 X, or X P_1 ... P_k for a tall matrix
            x = stack.x
            stack.x = torch.bmm(x, own.mT, out=stack.spare) if _is_tall(x) else torch.bmm(own, x, out=stack.spare)
            stack.spare = x


def _is_tall(x: Tensor) -> bool:
    return x.shape[1] > x.shape[2]


def _gram(x: Tensor, out: Tensor) -> None:
    """Write the smaller Gram matrix of each to ``out``: ``X X^T``, or ``X^T X`` for a tall one."""
    if _is_tall(x):
        torch.bmm(x.mT, x, out=out)
    else:
        torch.bmm(x, x.mT, out=out)
