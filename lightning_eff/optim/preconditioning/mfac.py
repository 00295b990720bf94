"""M-FAC: multiply the gradient by the inverse empirical Fisher matrix of the latest gradients (Frantar et al. 2021)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Number
from lightning_eff._core._run.free_memory import in_words
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.optim.preconditioning._gradients import (
    Gradients,
    Norm,
    Preconditioner,
    Sums,
    check_room,
    dtype_of_rows,
    length_of_rows,
    stepped,
)


@torch.no_grad()
def inverse_weights(gram: Tensor, index: int, *, damping: float, num_gradients: int) -> Tensor:
    """``w`` with which ``F^-1 g_i = sum_j w_j g_j``, where ``F = lambda I + (1/m) sum_j g_j g_j^T``.

    The paper builds the inverse one gradient at a time: ``F_0^-1 = I / lambda``, and by Sherman and Morrison

        F_j^-1 = F_{j-1}^-1 - (F_{j-1}^-1 g_j)(F_{j-1}^-1 g_j)^T / (m + g_j^T F_{j-1}^-1 g_j).

    Its dynamic algorithm needs only the gradients' products: up to a factor, ``g_j^T F_{j-1}^-1 g_l`` and the denominators
    are rows and pivots of ``lambda I + G G^T / m`` under elimination. Together they are one Cholesky factorization of this
    k x k matrix, and ``F^-1 G^T = G^T (lambda I + G G^T / m)^-1`` gives ``w`` by two triangular solves.

    Args:
        gram: ``G G^T``, shape (k, k): the products of the k <= m gradients so far; missing ones count as zero.
        index: ``i``.
        damping: ``lambda`` > 0.
        num_gradients: ``m``.

    Returns:
        ``w``, shape (k,), in ``gram``'s dtype, which should be float64; NaN if rounding errors exceed ``lambda``.
    """
    # λ I + G Gᵀ / m, whose j-th pivot is λ (m + g_jᵀ F_{j−1}⁻¹ g_j) / m >= λ
    matrix = gram / num_gradients
    matrix.diagonal().add_(damping)
    factor, failed = torch.linalg.cholesky_ex(matrix)
    # w = (λ I + G Gᵀ / m)⁻¹ e_i
    w = torch.zeros_like(gram[0])
    w[index] = 1.0
    return torch.cholesky_solve(w[:, None], factor)[:, 0] + (torch.nan if failed else 0.0)


class MFAC(Preconditioner):
    """Multiply the gradient by the inverse empirical Fisher matrix of the latest gradients, before the optimizer steps.

    ``F = lambda I + (1/m) sum g_i g_i^T`` over the gradients of the last ``m`` steps, including this one. Gradients from
    before the run count as zero. Directions in which gradients have been large get shorter steps; directions that no gradient
    of the window shows keep their length. ``F`` and its inverse are never formed: a step takes two products of the ``m``
    gradients with a vector, and the factorization of an m x m matrix on the CPU. The gradient is the one that the optimizer
    would use, the mean over an accumulation window and the ranks of DDP, before clipping. The module's own optimizer keeps
    its learning rate, momentum and weight decay.

    It costs ``m`` copies of the gradient in float32 on the parameters' devices, and as much in each checkpoint. Setup reports
    the size, and refuses a device with less memory.

    ``F^-1 g`` has other units than ``g``: alone in the window, a gradient gets the norm ``m / ||g||``. By default the result
    is scaled to the gradient's norm, so that learning rates and clipping keep their meaning. ``norm="inverse"`` keeps the
    paper's norm, for which the learning rate must be tuned again. If another technique changes the network's blocks, the
    window starts anew.

    It logs ``gradient_norm`` and ``direction_norm``, the cosine between the two (``cosine``), the ``damping`` used, ``window``
    (the number of gradients in it), and ``rewritten`` and ``left`` (the numbers of steps with and without preconditioning).

    Args:
        num_gradients: the number of gradients in the window, ``m``. The paper uses 512 to 1024; 0 is plain training.
        damping: the damping ``lambda``, in units of a squared gradient. Large values give the plain gradient. It is at least
            the rounding error of the gradients' products, the largest product times 1e-7.
        norm: the norm of the result, as above.

    Raises:
        ValueError: for a value out of range. At setup, if the window does not fit in memory, with LBFGS, or if the optimizers
            step no parameter of the module.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[MFAC(num_gradients=128)])

    References:
        Frantar, Kurtic and Alistarh 2021, "M-FAC: Efficient Matrix-Free Approximations of Second-Order Information",
        arXiv:2107.03356, section 3.2.
    """

    saves: ClassVar[str] = "steps, according to the paper; each one reads m gradients twice"
    paper: ClassVar[str] = "Frantar et al. 2021 (M-FAC), arXiv:2107.03356"
    constraints: ClassVar[str] = "needs automatic optimization; keeps m gradients in float32, also in checkpoints"
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"num_gradients": Choice((32, 128, 512)), "damping": Uniform(1e-6, 1e-1, log=True)}
    )
    control: ClassVar[Control] = Control(
        "the baseline for the same time with a learning rate that decays to zero; the learning rate is tuned in both arms"
    )
    neutral_at: ClassVar[Mapping[str, Any]] = {"num_gradients": 0}

    def __init__(
        self,
        num_gradients: Annotated[int, Count(at_least=0)] = 128,
        *,
        damping: Annotated[float, Number(above=0)] = 1e-3,
        norm: Norm = "gradient",
    ) -> None:
        self.num_gradients, self.damping = num_gradients, float(damping)
        self.norm: Norm = norm

    @override
    def _reset(self) -> None:
        super()._reset()
        self._rows: dict[str, Tensor] = {}  # the gradients of each parameter, (m, numel)
        self._gram = torch.zeros(self.num_gradients, self.num_gradients, dtype=torch.float64)
        self._seen = 0  # gradients since the window began; the next one's row is this modulo m

    @override
    def on_optimizers(self, session: Session) -> None:
        super().on_optimizers(session)
        m, parameters = self.num_gradients, stepped(session)
        told = check_room(f"MFAC(num_gradients={m})", session, m)
        rank_zero_info(f"MFAC: {told}, and as much in each checkpoint")
        loaded, filled = self._rows, min(self._seen, m)
        parameters |= {
            name: p for name, p in session.module.named_parameters() if name in loaded
        }  # unfrozen in that run
        self._rows = {name: _room(p, m) for name, p in parameters.items()}
        for name in loaded.keys() & self._rows.keys():
            self._rows[name][:filled] = loaded[name]

    @override
    def precondition(self, session: Session, gradients: Gradients) -> Gradients | None:
        m, slot = self.num_gradients, self._seen % self.num_gradients
        self._seen += 1
        k = min(self._seen, m)
        # G g of the newest gradient g, which is row `slot` of G
        sums = Sums()
        for name in self._rows.keys() - gradients.keys():
            self._rows[name][slot] = 0.0
        for name, g in gradients.items():
            if name not in self._rows:  # unfrozen since then
                self._rows[name] = _room(g, m)
            self._rows[name][slot] = g.flatten()
            sums.add(torch.mv(self._rows[name][:k], g.flatten()))
        products = sums.total()
        self._gram[slot, :k] = self._gram[:k, slot] = products
        # rounding errors of the products are damped too
        eps = max(torch.finfo(g.dtype).eps for g in gradients.values())
        damping = max(self.damping, eps * float(self._gram[:k, :k].diagonal().max()))
        # F⁻¹ g = Σ w_j g_j
        w = inverse_weights(self._gram[:k, :k], slot, damping=damping, num_gradients=m)
        at = {kind: w.to(*kind) for kind in {(g.device, g.dtype) for g in gradients.values()}}
        directions = {
            name: torch.mv(self._rows[name][:k].T, at[g.device, g.dtype]).view_as(g) for name, g in gradients.items()
        }
        self._last["damping"] = damping
        return self._finished(gradients, directions, float(w @ products), self.norm)

    @override
    def on_blocks_changed(self, session: Session) -> None:
        self._seen = 0

    # -- reports and state

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "window": min(self._seen, self.num_gradients)}

    @override
    def summary(self) -> str:
        if not self._rewritten:
            return "M-FAC: no gradient was preconditioned"
        size = sum(rows.numel() * rows.element_size() for rows in self._rows.values())
        return (
            f"M-FAC: preconditioned {self._rewritten:,} steps by the last {min(self._seen, self.num_gradients)} gradients,"
            f" which take {in_words(size)}"
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        filled = min(self._seen, self.num_gradients)
        whole = filled == self.num_gradients
        return {
            **super().state_dict(),
            "seen": self._seen,
            "rows": {name: rows if whole else rows[:filled].clone() for name, rows in self._rows.items()},
            "gram": self._gram[:filled, :filled].clone(),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        m, seen, rows, gram = self.num_gradients, state_dict["seen"], state_dict["rows"], state_dict["gram"]
        if self.neutral:
            return
        held = len(gram)
        if held not in (0, m):  # another m: the newest that fit, the oldest first
            order = list(range(seen - min(held, m), seen))
            at = [i % held for i in order]
            rows, gram, seen = {name: r[at] for name, r in rows.items()}, gram[at][:, at], len(order)
        self._seen, filled = seen, min(seen, m)
        for name, room in self._rows.items():  # a tuner's checkpoint is loaded after the rows exist
            room.zero_()
            room[:filled] = rows.get(name, 0.0)
        self._rows = {**rows, **self._rows}
        self._gram[:filled, :filled] = gram


def _room(of: Tensor, num_gradients: int) -> Tensor:
    """Zeros for so many gradients of a parameter, on its device."""
    return torch.zeros(num_gradients, length_of_rows(of), dtype=dtype_of_rows(of), device=of.device)
