"""Gradient norms of the whole model for hooks that call torch's or Lightning's functions for norms.

Before such a hook begins, one message sends every rank the norm of each parameter's gradient. So no rank waits for another
within the hook, even if the hook does different things on different ranks.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import CellType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.grads import grad_norm
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from lightning_eff._core._lightning.names import both
from lightning_eff.strategies._hybrid.gradients import clip_by_value, scale
from lightning_eff.strategies._hybrid.shards import local

_ORDERS = (1.0, 2.0, math.inf)


class Norms:
    """The norm of every parameter's gradient, in float64, the same on every rank.

    Args:
        names: names of the plain module's parameters, in order.
        held: this rank's parameters by name.
        counts: whether this rank's piece of a parameter counts. Only one of several equal copies does.
        device: device for the sums.
    """

    def __init__(
        self,
        names: Iterable[str],
        held: Mapping[str, nn.Parameter],
        counts: Callable[[str, Tensor], bool],
        device: torch.device,
    ) -> None:
        self._names, self._held, self._counts, self._device = list(names), held, counts, device
        self._powers: dict[float, dict[str, float]] = {}
        self._there: set[str] = set()
        self.measure()

    @torch.no_grad()
    def measure(self) -> None:
        """Compute the norms again; collective over all ranks."""
        sums = torch.zeros(2, len(self._names), dtype=torch.float64, device=self._device)
        most = torch.zeros(2, len(self._names), dtype=torch.float64, device=self._device)
        for i, name in enumerate(self._names):
            grad = self._held[name].grad if name in self._held else None
            if grad is None:
                continue
            here = local(grad)
            most[1, i] = 1
            if here.numel():
                most[0, i] = torch.linalg.vector_norm(here, math.inf)
            if self._counts(name, grad):
                dtype = torch.promote_types(here.dtype, torch.float32)
                for row, order in enumerate((1.0, 2.0)):
                    sums[row, i] = torch.linalg.vector_norm(here, order, dtype=dtype).double() ** order
        nan = most[0].isnan()
        most[0].masked_fill_(nan, math.inf)  # a maximum over ranks keeps infinity; the sums have the NaN
        dist.all_reduce(sums)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        most[0].masked_fill_(sums[0].isnan(), math.nan)
        self._there = {name for name, has in zip(self._names, most[1].tolist(), strict=True) if has}
        rows = {1.0: sums[0], 2.0: sums[1].sqrt(), math.inf: most[0]}
        self._powers = {order: dict(zip(self._names, row.tolist(), strict=True)) for order, row in rows.items()}

    def of(self, names: Iterable[str], order: float) -> dict[str, float]:
        """Return the norm of each gradient by parameter name, without parameters that have no gradient.

        Raises:
            ValueError: if ``order`` is not 1, 2 or infinity.
        """
        if order not in self._powers:
            raise ValueError(
                f"got a gradient norm of order {order}, but each process has only a part of the gradients. Use an order of"
                f" {_ORDERS}."
            )
        return {name: self._powers[order][name] for name in names if name in self._there}

    def total(self, names: Iterable[str], order: float) -> float:
        """Return the norm of the gradients of ``names`` together."""
        each = torch.tensor(list(self.of(names, order).values()), dtype=torch.float64)
        return float(torch.linalg.vector_norm(each, order)) if len(each) else 0.0

    def scaled(self, names: Iterable[str], factor: float) -> None:
        """Record that the gradients of ``names`` were multiplied by ``factor``."""
        for name in names:
            for norms in self._powers.values():
                norms[name] *= factor


class Within:
    """Replacements for the functions that hooks call, under the same names, for the whole model."""

    def __init__(self, norms: Norms, names: Mapping[int, str], device: torch.device) -> None:
        self._norms, self._names, self._device = norms, names, device

    def _of(self, parameters: Tensor | Iterable[Tensor]) -> tuple[list[Any], list[str]]:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        mine = [p for p in listed if id(p) in self._names]
        if len(mine) != len(listed):
            raise ValueError(
                f"got {len(listed) - len(mine)} tensors to clip that are not parameters of the LightningModule, so their norm"
                " over all processes is unknown. Clip them in a separate call."
            )
        return mine, [self._names[id(p)] for p in mine]

    def clip_grad_norm_(
        self,
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        params, names = self._of(parameters)
        total = self._norms.total(names, float(norm_type))
        if error_if_nonfinite and not math.isfinite(total):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is {total}, so it cannot be clipped."
                " To disable this error, set `error_if_nonfinite=False`."
            )
        factor = min(1.0, float(max_norm) / (total + 1e-6)) if math.isfinite(total) else float(max_norm) / total
        scale(params, factor)
        self._norms.scaled(names, factor)
        dtypes = {p.dtype for p in params}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        return torch.tensor(total, dtype=dtype, device=self._device)

    def clip_grad_value_(
        self, parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None
    ) -> None:
        params, _ = self._of(parameters)
        clip_by_value(params, float(clip_value))
        self._norms.measure()  # collective; all ranks clip together

    def grad_norm(self, module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Any]:
        order = float(norm_type)
        if order <= 0:
            raise ValueError(f"`norm_type` must be a positive number or 'inf' (infinity norm). Got {order}")
        own = {self._names[id(p)]: key for key, p in module.named_parameters() if id(p) in self._names}
        each = self._norms.of(own, order)
        if not each:
            return {}
        found = {f"grad_{order}_norm{group_separator}{own[name]}": value for name, value in each.items()}
        found[f"grad_{order}_norm_total"] = self._norms.total(each, order)
        return {key: torch.tensor(value, device=self._device) for key, value in found.items()}


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "clip_grad_norm_": clip_grad.clip_grad_norm_,
    "clip_grad_value_": clip_grad.clip_grad_value_,
    "grad_norm": grad_norm,
}
"""The functions to replace within a hook, by the names of the methods above."""


class Places:
    """The variables in which hooks find the :data:`FUNCTIONS`, and their replacement.

    Args:
        namespaces: namespaces of the hooks' functions, in addition to those of all imported modules.
        cells: variables of closures.
    """

    def __init__(self, namespaces: Iterable[dict[str, Any]], cells: Iterable[CellType]) -> None:
        self._now: Within | None = None
        instead = {id(f): (f, self._instead(name, f)) for name, given in FUNCTIONS.items() for f in both(given)}
        self._dicts: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._cells: list[tuple[CellType, Any, Any]] = []
        every = [m.__dict__ for m in list(sys.modules.values()) if isinstance(getattr(m, "__dict__", None), dict)]
        for namespace in {id(d): d for d in (*every, *namespaces)}.values():
            if namespace is not globals():
                for key, value in list(namespace.items()):
                    if id(value) in instead:
                        self._dicts.append((namespace, key, *instead[id(value)]))
        for cell in {id(c): c for c in cells}.values():
            value = _content(cell)
            if id(value) in instead:
                self._cells.append((cell, *instead[id(value)]))

    def _instead(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def acts(*args: Any, **kwargs: Any) -> Any:
            return (function if self._now is None else getattr(self._now, name))(*args, **kwargs)

        return acts

    @contextmanager
    def acting(self, within: Within) -> Iterator[None]:
        """Replace the functions by those of ``within`` in this context."""
        self._now = within
        try:
            for namespace, key, _, mine in self._dicts:
                namespace[key] = mine
            for cell, _, mine in self._cells:
                cell.cell_contents = mine
            yield
        finally:
            for namespace, key, plain, _ in self._dicts:
                namespace[key] = plain
            for cell, plain, _ in self._cells:
                cell.cell_contents = plain
            self._now = None


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
