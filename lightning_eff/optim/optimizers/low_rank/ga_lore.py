"""GaLore: Adam in the leading singular directions of each matrix's gradient (Zhao et al. 2024)."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.declared import declared
from lightning_eff._core._arguments.kinds import Count, Number
from lightning_eff.optim.optimizers._first_order import Betas, Eps, Rate
from lightning_eff.optim.optimizers._matrices import Split
from lightning_eff.optim.optimizers.low_rank._projected import Projected, adam_direction


def leading_directions(G: Tensor, rank: int) -> Tensor:
    """Return the leading singular vectors of ``G`` on its shorter side, as columns (side, rank).

    Args:
        G: (m, n). The left singular vectors are returned if ``m <= n``, else the right ones. If a value is not finite, the
            first columns of the identity are returned, and the weights show that value, as with any optimizer.
        rank: at most the shorter side.
    """
    left = G.shape[0] <= G.shape[1]
    if not G.isfinite().all():
        return torch.eye(min(G.shape), rank, dtype=G.dtype, device=G.device)
    found = torch.linalg.svd(G, full_matrices=False)
    return (found.U[:, :rank] if left else found.Vh[:rank].mT).clone()


class GaLore(Projected):
    """Adam whose moments live in the leading singular directions of each matrix's gradient, at full rank of the weights.

    For each hidden matrix ``W`` of shape (m, n) with ``m <= n`` and gradient ``G``, at learning rate ``lr``::

        every refresh_steps, from the first step:  P = the first r left singular vectors of G
        R = P^T G
        M = b1 M + (1 - b1) R,  V = b2 V + (1 - b2) R^2
        W = W - lr alpha P [M^ / (sqrt(V^) + eps)]

    with ``^`` for division by ``1 - b^t``, and from the right with right singular vectors if ``m > n``. The moments stay as
    they are when ``P`` changes. Over the run, the updates leave every subspace, so the weights are not of low rank.

    Use it where Adam's states do not fit into memory, for pretraining and full fine-tuning. The state of a matrix has
    ``r (m + 2 n)`` elements instead of ``2 m n``. Every ``refresh_steps``, a step also computes a singular value
    decomposition of each gradient. **Which parameters are matrices** is decided as in :class:`Muon`, best from the
    module itself. Matrices with a side of at most ``rank``, embeddings, heads, biases and scales use AdamW with the same
    learning rate, betas and weight decay. A parameter group may have its own ``rank`` and ``scale``, and ``"algorithm":
    "galore"`` or ``"adamw"``.

    With :class:`OptimizerInBackward` in the trainer's callbacks, the gradients are not held either, as in the paper.

    Args:
        params: a module, its ``named_parameters()`` or ``parameters()``, or groups of them.
        lr: the learning rate: the paper uses 0.01 for pretraining. Projected updates are also multiplied by ``scale``.
        betas: the factors (b1, b2).
        eps: the number that keeps the denominator away from zero.
        weight_decay: the weight decay, decoupled and scaled by the learning rate.
        rank: the number ``r`` of directions; the paper uses a quarter to a half of the width.
        refresh_steps: the number ``T`` of steps after which ``P`` is computed again.
        scale: the factor ``alpha`` of the projected updates.
        split: tensors that hold several matrices, as in :class:`Muon`.

    Raises:
        ValueError: for a value out of range, if no matrix has two sides longer than ``rank``, and for DTensors. When a step
            begins, for a sparse gradient.

    Example:
        >>> optimizer = GaLore(model.parameters(), lr=1e-2, rank=4)
        >>> trainer = L.Trainer(callbacks=[ReplaceOptimizer(GaLore, lr=1e-2, rank=4)])

    References:
        Zhao et al. 2024, "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection", arXiv:2403.03507.
    """

    paper: ClassVar[str] = "Zhao et al. 2024, arXiv:2403.03507"
    saves: ClassVar[str] = "most of Adam's state of matrices; computes singular vectors every refresh_steps"
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
        rank: Annotated[int, Count()] = 128,
        refresh_steps: Annotated[int, Count()] = 200,
        scale: Annotated[float, Number(above=0)] = 0.25,
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
        }
        super().__init__(params, defaults, split=split)

    @override
    def direction(self, group: dict[str, Any], G: Tensor, state: dict[str, Any], j: int, number: int) -> Tensor:
        if (state["step"] - 1) % group["refresh_steps"] == 0:
            state[f"basis_{j}"] = leading_directions(G, group["rank"])
        P, left = state[f"basis_{j}"], G.shape[0] <= G.shape[1]
        # R := P^T G, or G Q
        N = adam_direction(group, P.mT @ G if left else G @ P, state, j)
        return (P @ N if left else N @ P.mT).mul_(group["scale"])
