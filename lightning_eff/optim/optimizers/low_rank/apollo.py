"""APOLLO: gradients scaled by channel as Adam in a random projection would scale them (Zhu et al. 2024)."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._arguments.declared import declared
from lightning_eff._core._arguments.kinds import Count, Number
from lightning_eff.optim.optimizers._first_order import Betas, Eps, Rate
from lightning_eff.optim.optimizers._matrices import Split
from lightning_eff.optim.optimizers.low_rank._projected import Projected, adam_direction


def projection(rank: int, G: Tensor, *key: int) -> Tensor:
    """Return a random matrix (rank, m) with entries from N(0, 1/rank), which depends only on ``key`` and the device.

    Args:
        rank: the number of rows.
        G: a gradient (m, n), whose device and dtype the result has.
        key: the seed, and what identifies the draw.
    """
    seed, *rest = key
    generator = rng.keyed_generator(seed, "APOLLO", *rest, device=G.device)
    drawn = torch.randn(rank, G.shape[0], generator=generator, device=G.device)
    return drawn.to(G.dtype).mul_(rank**-0.5)


def scaled(G: Tensor, R: Tensor, N: Tensor, by: str) -> Tensor:
    """``G diag(s)`` with ``s_j = |N_:j| / |R_:j|``, or ``G |N| / |R|``; 0 where ``R`` is 0.

    Args:
        G: the gradient, (m, n).
        R: its projection, (r, n).
        N: Adam's direction in the projection, (r, n).
        by: "channel" for a factor per column, or "tensor" for one factor.
    """
    dim = 0 if by == "channel" else (0, 1)
    size = torch.linalg.vector_norm(R, dim=dim, keepdim=True)
    s = torch.linalg.vector_norm(N, dim=dim, keepdim=True) / size
    return G * torch.where(size > 0, s, torch.zeros_like(s))


def limited(U: Tensor, last: Tensor | None, growth: float) -> tuple[Tensor, Tensor]:
    """Limit the norm of an update to ``growth`` times that of the last one; return it with its norm.

    Args:
        U: the update.
        last: the norm of the last update; None at the first step.
        growth: the factor ``gamma``.
    """
    size = torch.linalg.vector_norm(U)
    if last is None:
        return U, size
    most = growth * last
    # an update after one of norm 0 has nothing to be compared with
    factor = torch.where((last > 0) & (size > most), most / size, torch.ones_like(size))
    return U * factor, size * factor


class APOLLO(Projected):
    """Scale each matrix's gradient, by channel or as a whole, as Adam in a random projection of it would.

    For each hidden matrix ``W`` of shape (m, n) with ``m <= n`` and gradient ``G``, at learning rate ``lr``::

        every refresh_steps, from the first step:  P = a new random matrix (r, m) with entries from N(0, 1/r)
        R = P G
        M = b1 M + (1 - b1) R,  V = b2 V + (1 - b2) R^2,  N = M^ / (sqrt(V^) + eps)
        s_j = |N_:j| / |R_:j|                     or, with scale_by="tensor", s = |N| / |R|
        U = G diag(s),  U = U min(1, gamma |U_last| / |U|)
        W = W - lr alpha U

    with ``^`` for division by ``1 - b^t``, and with rows as channels if ``m > n``. The raw gradient keeps its direction, or
    that of each channel. Adam only says how long it is.

    Use it where Adam's states do not fit into memory. The state of a matrix has ``2 r n`` elements instead of ``2 m n``, and
    a step needs two small products and no decomposition. ``APOLLO(rank=1, scale_by="tensor", scale=128**0.5)`` is
    APOLLO-Mini, whose state is about that of SGD without momentum. **Which parameters are matrices** is decided as in
    :class:`Muon`. Matrices with a side of at most ``rank``, embeddings, heads, biases and scales use AdamW with the same
    learning rate, betas and weight decay. A parameter group may have its own ``rank`` and ``scale``, and ``"algorithm":
    "apollo"`` or ``"adamw"``. The projection is computed again in each step from ``seed``, the parameter's index and the
    step, so it needs no memory, and a resumed run has the same ones.

    Args:
        params: a module, its ``named_parameters()`` or ``parameters()``, or groups of them.
        lr: the learning rate: the paper uses 0.01 for pretraining.
        betas: the factors (b1, b2).
        eps: the number that keeps the denominator away from zero.
        weight_decay: the weight decay, decoupled and scaled by the learning rate.
        rank: the rank ``r`` of the projection; the paper uses a quarter of the width.
        refresh_steps: the number ``T`` of steps after which ``P`` is drawn again.
        scale: the factor ``alpha`` of the updates.
        scale_by: "channel" for a factor per channel, or "tensor" for one factor per matrix.
        growth: the largest ratio ``gamma`` of the norms of two updates of a matrix in a row; None does not limit it.
        seed: the seed of the projections.
        split: tensors that hold several matrices, as in :class:`Muon`.

    Raises:
        ValueError: for a value out of range, if no matrix has two sides longer than ``rank``, and for DTensors. When a step
            begins, for a sparse gradient.

    Example:
        >>> optimizer = APOLLO(model.parameters(), lr=1e-2, rank=4)
        >>> trainer = L.Trainer(callbacks=[ReplaceOptimizer(APOLLO, lr=1e-2, rank=4)])

    References:
        Zhu et al. 2024, "APOLLO: SGD-like Memory, AdamW-level Performance", arXiv:2412.05270.
    """

    paper: ClassVar[str] = "Zhu et al. 2024, arXiv:2412.05270"
    saves: ClassVar[str] = "most of Adam's state of matrices, and almost all of it at rank 1"
    constraints: ClassVar[str] = "acts on hidden matrices with both sides longer than the rank, and AdamW on the rest"
    steps_apart: ClassVar[bool] = True

    @declared
    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: Rate = 0.01,
        betas: Betas = (0.9, 0.999),
        eps: Eps = 1e-6,
        weight_decay: Rate = 0.0,
        *,
        rank: Annotated[int, Count()] = 256,
        refresh_steps: Annotated[int, Count()] = 200,
        scale: Annotated[float, Number(above=0)] = 1.0,
        scale_by: Literal["channel", "tensor"] = "channel",
        growth: Annotated[float, Number(at_least=1)] | None = 1.01,
        seed: Annotated[int, Count(at_least=0)] = 0,
        split: Split = "auto",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "rank": rank,
            "refresh_steps": refresh_steps,
            "scale": scale,
            "scale_by": scale_by,
            "growth": growth,
            "seed": seed,
        }
        super().__init__(params, defaults, split=split)

    @override
    def direction(self, group: dict[str, Any], G: Tensor, state: dict[str, Any], j: int, number: int) -> Tensor:
        transposed = G.shape[0] > G.shape[1]
        G = G.mT if transposed else G
        period = (state["step"] - 1) // group["refresh_steps"]
        P = projection(group["rank"], G, group["seed"], number, j, period)
        R = P @ G
        U = scaled(G, R, adam_direction(group, R, state, j), group["scale_by"])
        if group["growth"] is not None:
            U, state[f"norm_{j}"] = limited(U, state.get(f"norm_{j}"), group["growth"])
        return (U.mT if transposed else U).mul(group["scale"])
