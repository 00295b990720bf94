"""Torch's Triton kernel for products with block-sparse matrices (BSR), for weights whose rows are grouped in some order."""

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_eff._core._architecture.linear_maps import LinearMap
from lightning_eff.model.sparsity._kernels.products import Kernels, Packed, below, failed_trial

_NAME = "torch's block-sparse kernels"


class Side(NamedTuple):
    """Where the blocks of a BSR matrix are.

    Attributes:
        starts: the first block of each row of blocks, and their number, (rows of blocks + 1,).
        columns: the column of each block, (blocks,).
        shape: rows and columns of the matrix.
    """

    starts: Tensor
    columns: Tensor
    shape: tuple[int, int]

    def matrix(self, values: Tensor) -> Tensor:
        """The matrix of these values, (blocks, rows of a block, columns of a block)."""
        return torch.sparse_bsr_tensor(self.starts, self.columns, values, size=self.shape, check_invariants=False)


class Places(NamedTuple):
    """Where the blocks of a weight are, whose rows are in the order of their groups.

    Attributes:
        order: the rows in this order, (rows,); None if they are as they are.
        inverse: the inverse order; None as above.
        rows: the rows of each block in the weight itself, (blocks, rows of a block).
        columns: the column of each block, (blocks, 1).
        turn: the blocks in the order of the transposed weight, (blocks,).
        plain: of the weight with its rows in this order.
        turned: of its transpose.
        block: rows and columns of a block.
    """

    order: Tensor | None
    inverse: Tensor | None
    rows: Tensor
    columns: Tensor
    turn: Tensor
    plain: Side
    turned: Side
    block: tuple[int, int]


def places_of(mask: Tensor, order: Tensor, block: tuple[int, int]) -> Places:
    """Return where the blocks are that a mask keeps.

    Args:
        mask: of a matrix, (rows, columns), constant in each block once its rows are in ``order``.
        order: the order of the rows.
        block: rows and columns of a block.
    """
    _hush()
    kept = mask[order][:: block[0], :: block[1]]
    rows, columns = kept.nonzero(as_tuple=True)
    turn = (columns * len(kept) + rows).argsort()
    straight = torch.arange(len(order), device=order.device)
    same = torch.equal(order, straight)
    return Places(
        order=None if same else order,
        inverse=None if same else torch.empty_like(order).index_copy_(0, order, straight),
        rows=order.view(-1, block[0])[rows],
        columns=columns.unsqueeze(1),
        turn=turn,
        plain=Side(_starts(rows, kept.shape[0]), columns, (mask.shape[0], mask.shape[1])),
        turned=Side(_starts(columns[turn], kept.shape[1]), rows[turn], (mask.shape[1], mask.shape[0])),
        block=block,
    )


def _starts(rows: Tensor, number: int) -> Tensor:
    counts = torch.bincount(rows, minlength=number)
    return torch.cat((counts.new_zeros(1), counts.cumsum(0)))


def multiply(bsr: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x A^T + bias`` for a BSR matrix ``A``, whose number of block rows divides the rows of contiguous ``x``."""
    y = x.new_empty(len(x), bsr.shape[0])
    added = y.t() if bias is None else bias.unsqueeze(1).expand(-1, len(x))
    beta, (high, wide) = 0 if bias is None else 1, bsr.values().shape[1:]
    zeros = round(1 - bsr.values().numel() / bsr.shape.numel(), 2)
    meta = _launch(*bsr.shape, len(x), high, wide, beta, zeros, x.dtype)
    _triton_ops().bsr_dense_addmm(added, bsr, x.t(), beta=beta, out=y.t(), meta=meta)
    return y


def _triton_ops() -> Any:
    return importlib.import_module("torch.sparse._triton_ops")  # it imports triton


@cache
def _launch(
    m: int, k: int, n: int, high: int, wide: int, beta: int, zeros: float, dtype: torch.dtype
) -> dict[str, int]:
    """How torch launches its kernel on these shapes: as it found best on an A100, and elsewhere by its defaults.

    Torch warns of its defaults for each shape, though a user cannot give others.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return _triton_ops().bsr_dense_addmm_meta(m, k, n, high, wide, beta, 1, sparsity=zeros, dtype=dtype)


@cache
def _hush() -> None:
    """Let torch say that its BSR tensors are in beta state, which it says once, to nobody."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.sparse_bsr_tensor(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1, 1, 1), size=(1, 1))


class Blocks(Packed):
    """A weight of few dense blocks.

    Args:
        w: the weight with zeros, as (rows, columns).
        places: where its blocks are.
        transposed: whether ``w`` is (in, out).
    """

    def __init__(self, w: Tensor, places: Places, *, transposed: bool) -> None:
        wide = places.block[1]
        values = w.reshape(len(w), -1, wide)[places.rows, places.columns]
        self._w = places.plain.matrix(values)
        self._t = places.turned.matrix(values[places.turn].transpose(1, 2).contiguous())
        self.multiple = max(places.block)  # both are powers of two
        self._places, self._transposed = places, transposed

    def times(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._from_rows(x, bias) if self._transposed else self._to_rows(x, bias)

    def back(self, g: Tensor) -> Tensor:
        return self._to_rows(g, None) if self._transposed else self._from_rows(g, None)

    def _to_rows(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x w^T + bias``."""
        order, inverse = self._places.order, self._places.inverse
        bias = bias if bias is None or order is None else bias[order]
        y = multiply(self._w, x, bias)
        return y if inverse is None else y.index_select(1, inverse)

    def _from_rows(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x w + bias``."""
        order = self._places.order
        return multiply(self._t, x if order is None else x.index_select(1, order), bias)


def misfit(block: tuple[int, int]) -> str | None:
    """Return why blocks of these sides do not fit, or None."""
    if all(side >= 16 and side & (side - 1) == 0 for side in block):
        return None
    return f"blocks have {block[0]} x {block[1]} elements, and the kernels need powers of two from 16 on"


@cache
def unavailable(device: torch.device) -> str | None:
    """Return why the kernels do not run on a device, or None."""
    if why := below(device, _NAME):
        return why
    if importlib.util.find_spec("triton") is None:
        return f"{_NAME} need triton, which is not installed"

    def trial() -> tuple[Tensor, Tensor]:
        numbers = torch.Generator().manual_seed(0)
        mask = torch.eye(4, dtype=torch.bool).repeat_interleave(16, 0).repeat_interleave(16, 1)
        w = torch.randint(-2, 3, (64, 64), generator=numbers).float() * mask
        x = torch.randint(-1, 2, (64, 64), generator=numbers).float()
        places = places_of(mask.to(device), torch.arange(64, device=device), (16, 16))
        found = Blocks(w.bfloat16().to(device), places, transposed=False).times(x.bfloat16().to(device), None)
        return found.cpu(), (x @ w.t()).bfloat16()  # at most 32, so exact

    return failed_trial(trial)


def kernels(find: Callable[[str], Places], block: tuple[int, int]) -> Kernels:
    """The kernels for blocks of these sides, given what finds those that a weight keeps."""
    turned: dict[str, bool] = {}

    def unfit(name: str, m: LinearMap, dtype: torch.dtype) -> str | None:
        turned[name] = m.transposed
        return misfit(block)

    def pack(name: str, w: Tensor, back: bool) -> Packed:
        transposed = turned[name]
        return Blocks(w.t() if transposed else w, find(name), transposed=transposed)

    return Kernels(_NAME, unavailable, unfit, pack)
