"""cuSPARSELt's products with 2:4 matrices, as torch calls them.

Torch's own training kernels (``torch._sparse_semi_structured_tile``) choose masks themselves, pack for compute capability 8.x
only, and its CUTLASS products run there only. cuSPARSELt packs a matrix that has zeros already, on later devices too.
"""

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensorCUSPARSELT

from lightning_eff._core._architecture.linear_maps import LinearMap
from lightning_eff.model.sparsity._kernels.products import Kernels, Packed, below, failed_trial

_NAME = "torch's 2:4 kernels"


def compress(w: Tensor) -> Tensor:
    """Return a contiguous matrix packed, in whose rows at most two of each aligned four are not zero."""
    return torch._cslt_compress(w)  # pyright: ignore[reportPrivateImportUsage]


def multiply(packed: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x W^T + bias`` for the packed ``W`` and contiguous ``x``, whose number of rows is a multiple of 8."""
    return torch._cslt_sparse_mm(packed, x.t(), bias=bias, transpose_result=True)  # pyright: ignore[reportPrivateImportUsage]


class TwoOfFour(Packed):
    """A 2:4 weight.

    Args:
        w: the weight, (out, in), with zeros.
        both: whether ``w^T`` is 2:4 too, and a backward pass follows.
    """

    multiple = 8

    def __init__(self, w: Tensor, *, both: bool) -> None:
        self._w = compress(w.contiguous())
        self._t = compress(w.t().contiguous()) if both else None

    def times(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return multiply(self._w, x, bias)

    def back(self, g: Tensor) -> Tensor | None:
        return None if self._t is None else multiply(self._t, g, None)


def kernels(axes: Mapping[str, tuple[int, ...]], *, tiles: bool) -> Kernels:
    """The kernels for masks in rows, or in ``tiles``, which are 2:4 in the transposed weights too.

    Args:
        axes: the dimensions of each weight in the order that puts its inputs last, along which the fours lie.
        tiles: see above.
    """

    def unfit(name: str, m: LinearMap, dtype: torch.dtype) -> str | None:
        if axes[name] != ((1, 0) if m.transposed else (0, 1)):
            return "its fours do not lie along the inputs"
        return misfit((m.out_features, m.in_features), dtype)

    return Kernels(_NAME, unavailable, unfit, lambda name, w, back: TwoOfFour(w, both=tiles and back))


def misfit(shape: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Return why a weight of (out, in) does not fit, or None."""
    limits = SparseSemiStructuredTensorCUSPARSELT._DTYPE_SHAPE_CONSTRAINTS[dtype]
    side = max(limits.sparse_min_rows, limits.sparse_min_cols)  # both ways, for the transposed weight
    return f"its sides are not multiples of {side}" if shape[0] % side or shape[1] % side else None


@cache
def unavailable(device: torch.device) -> str | None:
    """Return why the kernels do not run on a device, or None."""
    if why := below(device, _NAME):
        return why
    if not torch.backends.cusparselt.is_available():
        return f"{_NAME} need cuSPARSELt, which this torch does not have"

    def trial() -> tuple[Tensor, Tensor]:
        numbers = torch.Generator().manual_seed(0)
        w = torch.randint(1, 3, (64, 16, 4), generator=numbers).float()
        w.scatter_(-1, torch.rand(w.shape, generator=numbers, dtype=torch.float32).topk(2).indices, 0.0)
        x = torch.randint(-1, 2, (64, 64), generator=numbers).float()
        right = (x @ w.flatten(1).t()).bfloat16()  # at most 128, so exact
        found = TwoOfFour(w.flatten(1).bfloat16().to(device), both=False).times(x.bfloat16().to(device), None)
        return found.cpu(), right

    return failed_trial(trial)
