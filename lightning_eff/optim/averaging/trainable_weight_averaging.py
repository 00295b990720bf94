"""Trainable weight averaging (TWA): train the end of a run in the span of earlier weights (Li et al. 2022)."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction, Number
from lightning_eff._core._needs.needs import Need, Part, Reasons
from lightning_eff._core.search_space import Choice, Integer, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.optim.averaging._batch_norm import modes, recompute_statistics
from lightning_eff.optim.averaging._engine import BNBatches, rivals, wide
from lightning_eff.optim.averaging._snapshots import SnapshotWindow

RANK_TOLERANCE = 1e-12  # smaller eigenvalues of W^T W, relative to the largest, count as zero
Named = dict[str, Tensor]


@torch.no_grad()
def gram(snapshots: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """``W^T W`` of n snapshots ``w_i``, each of the same tensors by name, shape (n, n) in float64 on the CPU."""
    total = torch.zeros(len(snapshots), len(snapshots), dtype=torch.float64)
    for name, first in snapshots[0].items():
        w = torch.stack([snapshot[name].flatten() for snapshot in snapshots]).to(wide(first))
        total += (w @ w.T).cpu().double()
    return total


def orthonormal(gram: Tensor) -> Tensor:
    """The ``T``, shape (n, r), with which ``P = W T`` is an orthonormal basis of the span of ``W``'s n columns; r its rank.

    With ``W^T W = V diag(l) V^T``, ``T = V diag(l)^(-1/2)`` over the eigenvalues that are not zero.
    """
    values, vectors = torch.linalg.eigh(gram)
    kept = values > RANK_TOLERANCE * values[-1].clamp(min=0)
    # T = V diag(l)^(−1/2)
    return vectors[:, kept] / values[kept].sqrt()


@torch.no_grad()
def mean_and_basis(snapshots: Sequence[Mapping[str, Tensor]]) -> tuple[Named, Named]:
    """The mean of n snapshots, and by the same names an orthonormal basis of their span, ``P`` of shape (r, ...).

    Both are in single precision at least, computed in double. All tensors together are one vector.
    """
    turn = orthonormal(gram(snapshots))
    mean, basis = Named(), Named()
    for name, first in snapshots[0].items():
        w = torch.stack([snapshot[name].flatten() for snapshot in snapshots]).to(wide(first))
        dtype = torch.promote_types(first.dtype, torch.float32)
        mean[name] = w.mean(dim=0).to(dtype).view(first.shape)
        # P = W T
        basis[name] = (turn.T.to(w.device, w.dtype) @ w).to(dtype).view(-1, *first.shape)
    return mean, basis


@torch.no_grad()
def coordinates(basis: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Tensor:
    """``P^T g``, shape (r,) in float64 on the CPU; tensors without a gradient count as zero."""
    r = len(next(iter(basis.values())))
    total = torch.zeros(r, dtype=torch.float64)
    parts: dict[torch.device, Tensor] = {}
    for name, g in gradients.items():
        p = basis[name]
        # P^T g
        part = (p.flatten(1) @ g.flatten().to(p.device, p.dtype)).to(wide(p))
        parts[p.device] = part if p.device not in parts else parts[p.device] + part
    for part in parts.values():
        total += part.cpu().double()
    return total


@torch.no_grad()
def point(mean: Tensor, basis: Tensor, c: Tensor) -> Tensor:
    """``w = w_bar + P c`` for one tensor, of its shape; ``basis`` is (r, ...), ``c`` (r,)."""
    # w = w_bar + P c
    return mean + (c.to(basis.device, basis.dtype) @ basis.flatten(1)).view(mean.shape)


class TrainableWeightAveraging(SnapshotWindow):
    """Replace the last steps of a run by training the coefficients of an average of earlier weights.

    Between ``start`` and ``until``, ``window`` snapshots of the weights are taken at even distances. At ``until`` the
    weights become the mean of the snapshots, and from then on they move only within the span of the snapshots. With ``P`` an
    orthonormal basis of the span, ``w = w_bar + P c``. Each optimizer step is a step of SGD on the numbers ``c``, whose
    gradient is ``P^T g``: that is ``w <- w - lr P P^T g``. So few numbers pick up little of the noise in ``g``, and need few
    steps. It costs ``window + 1`` copies of the weights.

    ``g`` is the gradient that the module's optimizer would use: accumulated, over all ranks, clipped. That optimizer still
    makes its step, and its effect on these weights is replaced, so its learning rate and weight decay have no effect. ``lr``
    falls linearly to zero at the end of the budget. Weights that did not train while the snapshots were taken are left to
    the module's optimizer.

    Before ``until``, validation and checkpoints see the weights of plain training. After it they see the trained average,
    which is the module's only set of weights. BatchNorm statistics are recomputed for the mean, and continue from there.
    If another technique changes the network's blocks, earlier snapshots are dropped. With fewer than two snapshots at
    ``until``, or if the blocks change later, the run continues as plain training, with a warning.

    It logs ``snapshots`` (taken so far), ``coefficients`` (trained, 0 before ``until``) and ``moved`` (``||c||``).

    Args:
        window: the number of snapshots.
        start: the fraction of the budget at which the first snapshot may be taken.
        until: the fraction of the budget, above ``start``, at which training of the coefficients begins. 1 is plain
            training.
        lr: the learning rate at ``until``, as that of SGD on the weights. The authors use 2 for snapshots of the head of a
            run, and 0.3 to 0.03 for those of its tail.
        momentum: the momentum of SGD on the coefficients.
        offload: whether to keep snapshots, mean and basis in CPU memory, and compute there.
        bn_batches: the number of training batches, on each rank, from which BatchNorm statistics are recomputed; None uses
            a whole epoch.

    Raises:
        ValueError: for a value out of range. At setup, in a run without an end, under manual optimization, or with another
            weight average.

    Example:
        >>> twa = TrainableWeightAveraging(window=10, start=0.5, until=0.9)
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[twa])

    References:
        Li et al. 2022, "Trainable Weight Averaging: Efficient Training by Optimizing Historical Solutions",
        arXiv:2205.13104.
    """

    saves: ClassVar[str] = "epochs at the end of a run: the coefficients of an average need few steps"
    paper: ClassVar[str] = "Li et al. 2022, arXiv:2205.13104"
    constraints: ClassVar[str] = (
        "needs automatic optimization and a run with an end; keeps window + 1 copies of the weights"
    )
    needs: ClassVar[Need] = Need.WHOLE
    refuses: ClassVar[Reasons] = {
        Part.PIPELINE: "the coefficients follow from products over all weights, of which each process has some"
    }
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {
            "window": Integer(5, 40, log=True),
            "start": Choice((0.0, 0.25, 0.5)),
            "until": Choice((0.6, 0.8, 0.9)),
            "lr": Uniform(0.01, 3.0, log=True),
        }
    )
    control: ClassVar[Control] = Control(
        "the baseline for the same time with a learning rate that decays to zero, and the mean of as many snapshots"
    )
    conflicts: ClassVar[Mapping[str, str]] = rivals(
        "ExponentialMovingAverage",
        "LatestWeightAveraging",
        "Lookahead",
        "RegularizedNonlinearAcceleration",
        "ScheduleFree",
        "StochasticWeightAveraging",
    )
    needs_automatic_optimization: ClassVar[bool] = True
    needs_budget: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"until": 1.0}

    def __init__(
        self,
        window: Annotated[int, Count(at_least=2)] = 10,
        *,
        start: Annotated[float, Fraction(below=1)] = 0.5,
        until: Annotated[float, Fraction(above=0)] = 0.9,
        lr: Annotated[float, Number(above=0)] = 0.3,
        momentum: Annotated[float, Fraction(below=1)] = 0.9,
        offload: bool = False,
        bn_batches: BNBatches = 100,
    ) -> None:
        if start >= until:
            raise ValueError(
                f"TrainableWeightAveraging({start=}, {until=}): start must be below until, because snapshots are taken between"
                " them. The defaults are 0.5 and 0.9."
            )
        self.window = window
        self.start = start
        self.until = until
        self.lr = lr
        self.momentum = momentum
        self.offload = offload
        self.bn_batches = bn_batches

    @override
    def _reset(self) -> None:
        super()._reset()
        self._due = 0  # the number of snapshots due so far
        self._over = False  # whether ``until`` has passed
        self._mean: Named = {}
        self._basis: Named = {}
        self._c = torch.zeros(0, dtype=torch.float64)
        self._velocity = torch.zeros(0, dtype=torch.float64)
        self._hooks: list[RemovableHandle] = []

    # -- the shown weights are the trained ones

    @property
    @override
    def names(self) -> Iterable[str]:
        return ()

    @override
    def average(self, session: Session) -> Iterator[tuple[str, Tensor]]:
        yield from ()

    # -- the run

    @override
    def on_optimizers(self, session: Session) -> None:
        super().on_optimizers(session)
        self._hooks = [optimizer.register_step_post_hook(self._stepped_by) for optimizer in session.optimizers]

    @override
    def detach(self, session: Session) -> None:
        super().detach(session)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    @override
    def acted(self) -> bool:
        return True  # no interval can be too long

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        if self._over or not self.stepped(session):
            return
        u = session.progress.u  # as this step began
        due = math.floor((u - self.start) / (self.until - self.start) * self.window + 1e-9)
        if due > self._due:
            self._due = due
            self._take(session)
        if u >= self.until:
            self._over = True
            self._begin(session)

    @torch.no_grad()
    def _begin(self, session: Session) -> None:
        """Switch from the snapshots to their mean and the basis of their span."""
        named = dict(session.module.named_parameters())
        names = [name for name in named if all(name in snapshot for snapshot in self._snapshots)]
        if len(self._snapshots) < 2 or not names:
            rank_zero_warn(
                f"TrainableWeightAveraging: only {len(self._snapshots)} snapshot(s) with {len(names)} trained parameters were"
                " taken"
                f" before until={self.until}, so the run continues as plain training. Set start earlier or until later, or let"
                " techniques that change the network end before start."
            )
            self.forget()
            return
        self._mean, self._basis = mean_and_basis([{n: snapshot[n] for n in names} for snapshot in self._snapshots])
        count = len(self._snapshots)
        self._snapshots.clear()
        rank = len(self._basis[names[0]])
        self._c, self._velocity = (torch.zeros(rank, dtype=torch.float64) for _ in range(2))
        rank_zero_info(f"TrainableWeightAveraging: trains {rank} coefficients of {count} snapshots from here on")
        for name in names:
            named[name].copy_(self._mean[name])
        buffers = dict(session.module.named_buffers())
        found = recompute_statistics(session, modes(session.module), self.bn_batches, epoch=self._taken)
        for name, value in found.items():
            buffers[name].copy_(value)
        session.blocks_changed(self)  # weights were overwritten

    @torch.no_grad()
    def _stepped_by(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Replace the module's optimizer step by a step of the coefficients."""
        if not self._basis:
            return
        session = self.session
        named = {name: session.module.get_parameter(name) for name in self._basis}
        found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
        if found_inf is None or not bool(found_inf):  # a fused step handles the gradient scaler itself
            gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
            g = coordinates(self._basis, {n: x.to_dense() if x.is_sparse else x for n, x in gradients.items()})
            g = g if scale is None else g / float(scale)
            # v = μ v + P^T g, c = c − η v
            self._velocity = self.momentum * self._velocity + g
            self._c = self._c - self.rate * self._velocity
        for name, p in named.items():
            p.copy_(point(self._mean[name], self._basis[name], self._c))

    @property
    def rate(self) -> float:
        """The coefficients' learning rate in this step; it falls linearly from ``until`` to the end of the budget."""
        return self.lr * (1.0 - self.session.progress.u) / (1.0 - self.until)

    # -- what is held

    @override
    def forget(self) -> None:
        super().forget()
        if self._basis:
            rank_zero_warn(
                f"TrainableWeightAveraging: another technique changed the network after until={self.until}, so the run"
                " continues as"
                " plain training. Let that technique end earlier."
            )
        self._mean, self._basis = {}, {}

    @override
    def to_devices(self, devices: Mapping[str, torch.device]) -> None:
        super().to_devices(devices)
        if not self.offload:
            for held in (self._mean, self._basis):
                held.update({name: value.to(devices[name]) for name, value in held.items()})

    @override
    def saved(self) -> dict[str, Any]:
        return {
            **super().saved(),
            "due": self._due,
            "over": self._over,
            "mean": dict(self._mean),
            "basis": dict(self._basis),
            "coefficients": self._c,
            "velocity": self._velocity,
        }

    @override
    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._due, self._over = state["due"], state["over"]
        self._mean, self._basis = dict(state["mean"]), dict(state["basis"])
        self._c, self._velocity = state["coefficients"], state["velocity"]

    @override
    def saved_weights(self, state: dict[str, Any]) -> Mapping[str, Tensor]:
        return state["mean"] or super().saved_weights(state)

    # -- what it reports

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"snapshots": self._taken, "coefficients": len(self._c) if self._basis else 0, "moved": self._c.norm()}

    @override
    def summary(self) -> str:
        if not self._basis:
            return (
                f"no coefficient was trained ({self._taken} snapshots taken); the weights are those of plain training"
            )
        return f"trained {len(self._c)} coefficients of {self._taken} snapshots; the mean moved by {self._c.norm():.3g}"
