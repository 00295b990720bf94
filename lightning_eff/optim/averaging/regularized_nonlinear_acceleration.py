"""Regularised nonlinear acceleration (RNA): a run's end, extrapolated from its iterates (Scieur et al. 2016)."""

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core.search_space import Choice, Integer, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.optim.averaging._engine import is_count, rivals, wide
from lightning_eff.optim.averaging._snapshots import SnapshotWindow


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
        gram: ``R^T R``, shape (k, k). Where it is not finite, as of a run that has diverged, ``c`` is a plain mean's.
        regularization: ``lambda`` >= 0. With 0 and dependent residuals, ``c`` is the shortest of all that minimise.
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
    """Validate, test and keep the point that the last iterates are on the way to, while training goes on undisturbed.

    Of ``window`` snapshots ``x_0, ..., x_k`` the ``k`` differences ``r_i = x_{i+1} - x_i`` are the residuals. The weights that
    are shown are ``sum_i c_i x_i``, ``i < k``, with the coefficients that make the sum of residuals shortest, on condition
    that they sum to one, with ``lambda`` against large ones. For gradient descent on a quadratic in d dimensions, d + 1
    residuals and no ``lambda`` give its minimiser exactly. In training with noise, coefficients grow with it: give a larger
    ``lambda``, with which they become those of a plain mean.

    While the trainer validates, and from the end of fit on, the module holds that point, and so does every checkpoint's
    ``state_dict``, once there are three snapshots; the raw weights and the snapshots are in this callback's state. BatchNorm
    statistics are recomputed for it, by the rule of torch's ``update_bn``. Parameters that are thawed later join when every
    snapshot has them.

    Logged: ``snapshots``, how many are held, and ``largest``, the largest coefficient's size.

    Args:
        window: ``k + 1``, snapshots that are held, >= 3.
        interval: "epoch" takes a snapshot after each complete epoch, a number N >= 1 after every N optimizer steps.
        regularization: ``lambda``, relative to the largest eigenvalue of ``R^T R``, >= 0.
        start: take snapshots only of steps from this fraction of the budget on, in [0, 1]; 1 takes none, which is plain
            training.
        offload: keep the snapshots in CPU memory.
        bn_batches: how many training batches, on each rank, BatchNorm statistics are recomputed from; None takes an epoch.

    Raises:
        ValueError: if an argument is out of its range; at setup, beside another weight averaging, if ``start`` needs a budget
            that the run has not, or if BatchNorm meets manual optimization.

    Sources:
        Scieur et al. 2016, arXiv:1606.04133.
    """

    saves: ClassVar[str] = "steps of smooth problems without noise; fragile under noise"
    paper: ClassVar[str] = "Scieur et al. 2016, arXiv:1606.04133"
    constraints: ClassVar[str] = "window + 1 copies of the weights; BatchNorm needs automatic optimization"
    needs: ClassVar[Need] = Need.WHOLE
    fewest: ClassVar[int] = 3
    survey: ClassVar[Survey | None] = Survey("regularized nonlinear acceleration", zhuang="2.1", shen="5.4")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {
            "window": Integer(4, 12),
            "interval": Integer(5, 500, log=True),
            "regularization": Choice((1e-8, 1e-4, 1e-2)),
        }
    )
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero; and the mean of as many snapshots"
    )
    conflicts: ClassVar = rivals(
        "ExponentialMovingAverage", "LatestWeightAveraging", "Lookahead", "StochasticWeightAveraging"
    )

    def __init__(
        self,
        window: int = 6,
        *,
        interval: Literal["epoch"] | int = "epoch",
        regularization: float = 1e-4,
        start: float = 0.0,
        offload: bool = False,
        bn_batches: int | None = 100,
    ) -> None:
        if not is_count(window) or window < 3:
            raise ValueError(
                f"RegularizedNonlinearAcceleration({window=}): expected an integer >= 3, of which two residuals are made."
            )
        if not 0.0 <= regularization < float("inf"):
            raise ValueError(f"RegularizedNonlinearAcceleration({regularization=}): expected a finite number >= 0.")
        self.set_interval(interval, start, offload, bn_batches)
        self.window = window
        self.regularization = regularization
        self._reset()

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
            return f"too few snapshots to extrapolate from ({len(self._snapshots)}): the weights are the raw ones"
        return f"extrapolated from {len(self._snapshots)} snapshots, the largest coefficient {self._largest:.3g}"
