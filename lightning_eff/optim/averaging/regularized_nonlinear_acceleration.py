"""Regularized nonlinear acceleration (RNA): extrapolate from the last iterates (Scieur et al. 2016)."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Number
from lightning_eff._core._needs.needs import Need
from lightning_eff._core.search_space import Choice, Integer, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.optim.averaging._engine import BNBatches, rivals, wide
from lightning_eff.optim.averaging._snapshots import Interval, SnapshotWindow, Start


@torch.no_grad()
def gram(points: list[Tensor]) -> Tensor:
    """``R^T R`` with ``r_i = x_{i+1} - x_i``, shape (k, k) in float64 on the CPU, of k + 1 tensors of one shape."""
    x = torch.stack([p.flatten().to(wide(p)) for p in points])
    # r_i = x_{i+1} − x_i
    r = x[1:] - x[:-1]
    return (r @ r.T).cpu().double()


def coefficients(gram: Tensor, *, regularization: float) -> Tensor:
    """The ``c`` that minimises ``c^T (K + lambda I) c`` with ``sum_i c_i = 1`` and ``K = R^T R / ||R^T R||``; shape (k,).

    Args:
        gram: ``R^T R``, shape (k, k). If it is not finite (the run has diverged), ``c`` is that of a plain mean.
        regularization: ``lambda`` >= 0. With 0 and dependent residuals, ``c`` is the minimiser of least norm.
    """
    k = len(gram)
    if not bool(gram.isfinite().all()):
        return gram.new_full((k,), 1 / k)
    norm = torch.linalg.matrix_norm(gram, 2)
    system = torch.zeros(k + 1, k + 1, dtype=gram.dtype)
    system[:k, :k] = gram / norm if norm > 0 else gram
    system[:k, :k] += regularization * torch.eye(k, dtype=gram.dtype)
    system[:k, k] = system[k, :k] = 1.0
    right = torch.zeros(k + 1, 1, dtype=gram.dtype)
    right[k] = 1.0
    # (K + λI) c + μ 1 = 0, 1ᵀc = 1
    return torch.linalg.lstsq(system, right, driver="gelsd").solution[:k, 0]


@torch.no_grad()
def combination(points: Iterable[Tensor], c: Tensor, *, device: torch.device) -> Tensor:
    """``sum_i c_i x_i``, in double precision, on ``device``, in the dtype of the points."""
    total: Tensor | None = None
    for x, factor in zip(points, c.tolist(), strict=False):
        x = x.to(device)
        term = x.to(wide(x)) * factor
        total = term if total is None else total + term
        dtype = x.dtype
    assert total is not None
    return total.to(dtype)  # pyright: ignore[reportPossiblyUnboundVariable]


class RegularizedNonlinearAcceleration(SnapshotWindow):
    """Validate, test and save a point extrapolated from the last snapshots, while training continues undisturbed.

    The ``window`` snapshots ``x_0, ..., x_k`` have ``k`` differences ``r_i = x_{i+1} - x_i``, the residuals. The shown
    weights are ``sum_i c_i x_i`` with ``i < k``. The coefficients ``c`` minimise the norm of the summed residuals under the
    condition that they sum to one, with ``lambda`` as a penalty on large coefficients. For gradient descent on a quadratic
    in d dimensions, d + 1 residuals without ``lambda`` give the minimiser exactly. Noisy training makes the coefficients
    large. A larger ``lambda`` then brings them closer to those of a plain mean.

    Use it for smooth problems with little gradient noise. It costs ``window + 1`` copies of the weights.

    The module holds that point while the trainer validates, and from the end of fit on. Every checkpoint's ``state_dict``
    is that point once there are three snapshots; the raw weights and the snapshots are in this callback's state. BatchNorm
    statistics are recomputed for it, by the rule of torch's ``update_bn``. A parameter that is unfrozen later joins when
    every snapshot has it.

    It logs ``snapshots`` (the number kept) and ``largest`` (the largest absolute coefficient).

    Args:
        window: the number of snapshots kept, ``k + 1``.
        interval: when a snapshot is taken. "epoch" takes one after each complete epoch, a number N after every N optimizer
            steps.
        regularization: ``lambda``, relative to the largest eigenvalue of ``R^T R``.
        start: the fraction of the budget before which no snapshot is taken. 1 is plain training.
        offload: whether to keep the snapshots in CPU memory.
        bn_batches: the number of training batches, on each rank, from which BatchNorm statistics are recomputed; None uses
            a whole epoch.

    Raises:
        ValueError: for a value out of range. At setup, with another weight average, if ``start`` is set in a run without an
            end, or for BatchNorm with manual optimization.

    Example:
        >>> rna = RegularizedNonlinearAcceleration(window=6, interval=100, regularization=1e-4)
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[rna])

    References:
        Scieur et al. 2016, "Regularized Nonlinear Acceleration", arXiv:1606.04133.
    """

    saves: ClassVar[str] = "steps on smooth problems with little gradient noise; it is fragile under noise"
    paper: ClassVar[str] = "Scieur et al. 2016, arXiv:1606.04133"
    needs: ClassVar[Need] = Need.WHOLE
    fewest: ClassVar[int] = 3
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {
            "window": Integer(4, 12),
            "interval": Integer(5, 500, log=True),
            "regularization": Choice((1e-8, 1e-4, 1e-2)),
        }
    )
    control: ClassVar[Control] = Control(
        "the baseline for the same time with a learning rate that decays to zero, and the mean of as many snapshots"
    )
    conflicts: ClassVar = rivals(
        "ExponentialMovingAverage", "LatestWeightAveraging", "Lookahead", "StochasticWeightAveraging"
    )

    def __init__(
        self,
        window: Annotated[int, Count(at_least=3)] = 6,
        *,
        interval: Interval = "epoch",
        regularization: Annotated[float, Number(at_least=0)] = 1e-4,
        start: Start = 0.0,
        offload: bool = False,
        bn_batches: BNBatches = 100,
    ) -> None:
        self.window = window
        self.interval = interval
        self.regularization = regularization
        self.start = start
        self.offload = offload
        self.bn_batches = bn_batches

    @override
    def _reset(self) -> None:
        super()._reset()
        self._largest = 0.0

    @property
    @override
    def names(self) -> Iterable[str]:
        if len(self._snapshots) < self.fewest:
            return ()
        return [name for name in self._snapshots[-1] if all(name in snapshot for snapshot in self._snapshots)]

    @override
    def average(self, session: Session) -> Iterator[tuple[str, Tensor]]:
        parameters, names = dict(session.module.named_parameters()), [*self.names]
        total = torch.stack([gram([snapshot[name] for snapshot in self._snapshots]) for name in names]).sum(dim=0)
        c = coefficients(total, regularization=self.regularization)
        self._largest = float(c.abs().max())
        for name in names:
            yield name, combination((s[name] for s in self._snapshots), c, device=parameters[name].device)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"snapshots": len(self._snapshots), "largest": self._largest}

    @override
    def saved(self) -> dict[str, Any]:
        return {**super().saved(), "largest": self._largest}

    @override
    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._largest = state["largest"]

    @override
    def summary(self) -> str:
        if not self.names:
            return f"too few snapshots to extrapolate ({len(self._snapshots)}); the module holds the raw weights"
        return f"extrapolated from {len(self._snapshots)} snapshots; the largest coefficient is {self._largest:.3g}"
