"""Sampled quasi-Newton methods: curvature along random directions around the weights (Berahas et al. 2022).

The rules are in ``_inverse_hessians``.
"""

import contextlib
import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._arguments.kinds import Count, Number
from lightning_eff._core.losses import loss_of
from lightning_eff._core.passes import restoring
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step, silent
from lightning_eff._core.technique import Control
from lightning_eff._core.wrapping import unrounded
from lightning_eff.optim.preconditioning._gradients import (
    Gradients,
    Norm,
    Preconditioner,
    Sums,
    check_room,
    dtype_of_rows,
    length_of_rows,
    rivals,
    stepped,
)
from lightning_eff.optim.preconditioning._inverse_hessians import lbfgs_weights, lsr1_weights

Method = Literal["lbfgs", "lsr1"]


class SampledQuasiNewton(Preconditioner):
    """Multiply the gradient by an inverse Hessian from curvature along random directions around the weights.

    In optimizer steps 0, ``interval``, ..., ``m`` directions ``s`` of length ``radius`` are drawn, and the step's own batch
    gives the curvature along each: ``y = grad(w + s) - grad(w)``. These pairs define sampled L-BFGS (``method="lbfgs"``:
    positive definite, by the two-loop recursion) or sampled L-SR1 (``"lsr1"``: symmetric rank-one updates, which represent
    negative curvature too). Steps in between use the last pairs.

    A drawing step costs ``num_directions + 1`` more forward and backward passes, each with the step's own dropout, buffers
    and batch, without autocast, and without a trace in the run. Over an accumulation window and the ranks of DDP, ``y`` is
    the mean, and the directions are the same on all ranks. It keeps ``2 m`` copies of the gradient in float32 on the
    parameters' devices, and half of that in each checkpoint.

    ``H g`` is scaled to the gradient's norm, so that learning rates and clipping keep their meaning. With ``norm="inverse"``
    it is not, and a learning rate of 1 is Newton's. As in the paper, a pair is skipped if its curvature is too small or
    negative (L-BFGS), or if its update would be unbounded (L-SR1). If ``H g`` points uphill, which L-SR1 allows and for which
    the paper has a trust region, the step is plain. If another technique changes the network's blocks, new directions are
    drawn.

    It logs ``gradient_norm`` and ``direction_norm``, the cosine between the two (``cosine``), the number of ``pairs`` used,
    the extra ``passes`` so far, and ``rewritten`` and ``left`` (the numbers of steps with and without preconditioning).

    Args:
        method: the update of the inverse Hessian, as above.
        num_directions: the number of directions, ``m``; 0 is plain training.
        interval: the number of optimizer steps from drawing to drawing. The paper draws in every step.
        radius: the length of a direction over all parameters, in units of the weights.
        epsilon: the threshold below which a pair is skipped.
        norm: the norm of the result, as above.

    Raises:
        ValueError: for a value out of range. At setup, if the pairs do not fit in memory, with LBFGS, or if the optimizers
            step no parameter of the module.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[SampledQuasiNewton("lbfgs", num_directions=4)])

    References:
        Berahas, Jahani, Richtarik and Takac 2022, "Quasi-Newton Methods for Machine Learning: Forget the Past, Just Sample",
        arXiv:1901.09997, algorithms 1 to 4.
    """

    saves: ClassVar[str] = "steps, according to the paper; a drawing step costs num_directions + 1 more passes"
    paper: ClassVar[str] = "Berahas et al. 2022 (S-LBFGS, S-LSR1), arXiv:1901.09997"
    constraints: ClassVar[str] = "needs automatic optimization; keeps 2 num_directions gradients in float32"
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {
            "method": Choice(("lbfgs", "lsr1")),
            "num_directions": Choice((2, 4, 8)),
            "interval": Choice((5, 20, 100)),
            "radius": Uniform(0.01, 0.5, log=True),
        }
    )
    control: ClassVar[Control] = Control(
        "the baseline for the same time with a learning rate that decays to zero, in 1 + (m + 1) / interval times the steps"
    )
    conflicts: ClassVar = {
        **rivals("KFAC", "MFAC"),
        **dict.fromkeys(
            ("SharpnessAwareMinimization", "LookSAM", "EfficientSAM", "KSAM"),
            "both run the step at other weights, so the curvature of the gradient would be undefined",
        ),
    }
    neutral_at: ClassVar[Mapping[str, Any]] = {"num_directions": 0}
    checkpointed: ClassVar[tuple[str, ...]] = ("_passes", "_pairs")

    def __init__(
        self,
        method: Method = "lbfgs",
        *,
        num_directions: Annotated[int, Count(at_least=0)] = 4,
        interval: Annotated[int, Count()] = 10,
        radius: Annotated[float, Number(above=0)] = 0.05,
        epsilon: Annotated[float, Number(above=0)] = 1e-8,
        norm: Norm = "gradient",
    ) -> None:
        self.method, self.num_directions, self.interval = method, num_directions, interval
        self.radius, self.epsilon = float(radius), float(epsilon)
        self.norm: Norm = norm

    @override
    def _reset(self) -> None:
        super()._reset()
        self._drawn_at = -1  # the optimizer step whose directions are in S
        self._begun = False  # whether y is being summed for this step, on each rank for itself
        self._s: dict[str, Tensor] = {}  # S, of each parameter (m, numel)
        self._y: dict[str, Tensor] = {}
        self._drawn: list[str] = []  # of a checkpoint: what has directions
        self._products: Tensor | None = None  # of S and Y
        self._passes = self._pairs = 0

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        session.chain.add(Stage.PERTURB, self._link)

    @override
    def on_optimizers(self, session: Session) -> None:
        super().on_optimizers(session)
        parameters = stepped(session)
        m = self.num_directions
        told = check_room(f"SampledQuasiNewton(num_directions={m})", session, 2 * m)
        rank_zero_info(f"SampledQuasiNewton: {told}, and half as much in each checkpoint")
        if self._drawn_at >= 0:  # taken up from a checkpoint
            self._s = self._directions(session, {name: parameters[name] for name in self._drawn if name in parameters})
            self._y = {name: y.to(parameters[name].device) for name, y in self._y.items() if name in parameters}

    def _directions(self, session: Session, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        """The directions that belong to a step: rows of length ``radius``, the same on all ranks and after a resume."""
        m = self.num_directions
        drawn: dict[str, Tensor] = {}
        for name, p in parameters.items():
            generator = session.generator("SampledQuasiNewton", self._drawn_at, name)
            drawn[name] = torch.randn(m, length_of_rows(p), generator=generator, dtype=dtype_of_rows(p))
        length = torch.stack([d.double().square().sum(1) for d in drawn.values()]).sum(0).sqrt()
        for name, d in drawn.items():
            drawn[name] = (d * (self.radius / length)[:, None].to(d.dtype)).to(parameters[name].device)
        return drawn

    # -- the passes

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        session = self.session
        unfinished = self._begun or not self._s  # a step that was not finite, or another network
        if self._drawn_at != step.global_step and (step.global_step % self.interval == 0 or unfinished):
            self._drawn_at, self._begun = step.global_step, True
            self._s = self._directions(session, stepped(session, waiting=False))
            self._y = {name: torch.zeros_like(s) for name, s in self._s.items()}
        if not self._begun or self._drawn_at != step.global_step:
            return proceed(batch)
        self._sample(step, batch, proceed)
        return proceed(batch)

    def _sample(self, step: Step, batch: Any, proceed: Proceed) -> None:
        """Add this batch's share to ``y`` of all directions."""
        began, session, m = time.perf_counter(), self.session, self.num_directions
        random_state, cost = rng.capture(), session.chain.cost
        share = 1 / session.trainer.accumulate_grad_batches
        for i in (None, *range(m)):
            with rng.fork(random_state):
                gradients = self._gradients(step, batch, proceed, i)
            for name, g in gradients.items():
                y = self._y[name]
                # y_i = ∇F(w + s_i) − ∇F(w)
                if i is None:
                    y.sub_(g.flatten(), alpha=share)
                else:
                    y[i].add_(g.flatten(), alpha=share)
        self._passes += m + 1
        cost.add(batch, forward=m + 1, backward=m + 1, since=began)

    def _gradients(self, step: Step, batch: Any, proceed: Proceed, i: int | None) -> Gradients:
        """Those of the loss at ``w``, or at ``w + s_i``, of a pass that leaves no trace."""
        named = [(name, p) for name, p in stepped(self.session, waiting=False).items() if name in self._s]
        device = step.module.device.type
        fine = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()
        with silent(step.module), unrounded(), restoring(() if i is None else [p for _, p in named]):
            if i is not None:
                with torch.no_grad():
                    for name, p in named:
                        _reals(p).add_(self._s[name][i].view_as(_reals(p)))
            with fine:
                loss = loss_of(proceed(batch))
                if loss is None:
                    return {}
                found = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
        dense = [
            (name, g.to_dense() if g.is_sparse else g)
            for (name, _), g in zip(named, found, strict=True)
            if g is not None
        ]
        return {name: _reals(g).to(self._s[name].dtype) for name, g in dense}

    # -- the step

    @override
    def precondition(self, session: Session, gradients: Gradients) -> Gradients | None:
        if self._begun:
            self._begun = False
            self._y = _mean_over_ranks(session, self._y)
            bad = Sums()
            for y in self._y.values():
                bad.add((~y.isfinite()).any(1))
            good = bad.total() == 0
            for y in self._y.values():  # one that is not finite says nothing
                y[~good.to(y.device)] = 0.0
            self._products = None
        gram = self._gram(gradients)
        w, self._pairs = (lbfgs_weights if self.method == "lbfgs" else lsr1_weights)(gram, epsilon=self.epsilon)
        downhill = float(gram[0] @ w)
        if not downhill > 0:
            return None
        m, directions = self.num_directions, Gradients()
        at = {kind: w.to(*kind) for kind in {(g.device, g.dtype) for g in gradients.values()}}
        for name, g in gradients.items():
            # H g = w_0 g + Σ w_i s_i + Σ w_{m+i} y_i
            coordinates = at[g.device, g.dtype]
            direction = g.flatten() * coordinates[0]
            if name in self._s:
                direction += torch.mv(self._s[name].T, coordinates[1 : 1 + m])
                direction += torch.mv(self._y[name].T, coordinates[1 + m :])
            directions[name] = direction.view_as(g)
        return self._finished(gradients, directions, downhill, self.norm)

    def _gram(self, gradients: Gradients) -> Tensor:
        """The products of ``[g, S, Y]``, shape (1 + 2m, 1 + 2m), in float64 on the CPU."""
        m = self.num_directions
        if self._products is None:
            sums = Sums()
            for name, s in self._s.items():
                both = torch.cat([s, self._y[name]])
                sums.add(both @ both.T)
            self._products = sums.total()
        gram = torch.zeros(1 + 2 * m, 1 + 2 * m, dtype=torch.float64)
        gram[1:, 1:] = self._products
        sums = Sums()
        for name, g in gradients.items():
            x = g.flatten()
            known = (
                torch.cat([torch.mv(rows[name], x) for rows in (self._s, self._y)])
                if name in self._s
                else x.new_zeros(2 * m)
            )
            sums.add(torch.cat([torch.dot(x, x)[None], known]))
        gram[0] = gram[:, 0] = sums.total()
        return gram

    @override
    def on_blocks_changed(self, session: Session) -> None:
        self._s = {}

    # -- what it tells and keeps

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "pairs": self._pairs, "passes": self._passes}

    @override
    def summary(self) -> str:
        return (
            f"{'S-LBFGS' if self.method == 'lbfgs' else 'S-LSR1'}: {self._rewritten:,} steps along quasi-Newton directions,"
            f" {self._left:,} as they were, {self._passes:,} extra passes; {self._pairs} of {self.num_directions} pairs counted"
            " in the last"
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        session = self._session or self._past
        own = {name: y.cpu() for name, y in self._y.items()} if self._begun else self._y
        return {
            **super().state_dict(),
            "drawn_at": self._drawn_at,
            "begun": self._begun,
            "names": list(self._s),
            "y": session.gather(own) if self._begun and session is not None else [own],
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        session, ranks = self._session, state_dict["y"]
        rank = 0 if session is None or not state_dict["begun"] else session.rank
        fits = not state_dict["begun"] or session is None or len(ranks) == session.replicas.count
        if fits and all(len(y) == self.num_directions for y in ranks[rank].values()):  # else they are drawn anew
            self._drawn_at, self._begun = state_dict["drawn_at"], state_dict["begun"]
            self._y, self._drawn = dict(ranks[rank]), list(state_dict["names"])


def _reals(of: Tensor) -> Tensor:
    """A tensor of real numbers, which shares the memory."""
    return torch.view_as_real(of) if of.is_complex() else of


def _mean_over_ranks(session: Session, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mean over the ranks of each tensor, in place of it; all ranks have the same names."""
    if session.replicas.count == 1:
        return rows
    found: dict[str, Tensor] = {}
    for name in sorted(rows):
        mean = session.trainer.strategy.reduce(rows[name], reduce_op="mean")
        assert isinstance(mean, Tensor)
        found[name] = mean
    return found
