"""Shampoo: gradients multiplied from both sides by inverse roots of their covariances (Gupta et al. 2018)."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.declared import declared
from lightning_eff._core._arguments.kinds import Count, Each, Fraction
from lightning_eff.optim.optimizers import _lists as lists
from lightning_eff.optim.optimizers._first_order import Eps, Rate
from lightning_eff.optim.optimizers._kronecker import Fold, Kronecker, multiplied, outer, sides, working
from lightning_eff.optim.optimizers._matrices import Split


def inverse_root(covariance: Tensor, power: float, eps: float) -> Tensor:
    """``(C + eps lambda_max I)^-power`` by eigenvalues, of which negative ones count as zero.

    Args:
        covariance: ``C``, (n, d, d), symmetric. If one is not finite, neither is the result.
        power: > 0.
        eps: >= 0, relative to the largest eigenvalue. It is at least 8 units of the dtype's precision (1e-6 in float32),
            because smaller eigenvalues are rounding errors.
    """
    eps = max(eps, 8 * torch.finfo(covariance.dtype).eps)
    finite = covariance.isfinite().all(-1).all(-1)[:, None, None]
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    values, vectors = torch.linalg.eigh(torch.where(finite, covariance, identity))
    values = values.clamp(min=0) + eps * values[:, -1:].clamp(min=0)
    # a covariance of zero only multiplies gradients of zero
    roots = torch.where(values > 0, values, 1.0).pow(-power)
    return torch.where(finite, (vectors * roots.unsqueeze(-2)) @ vectors.mT, covariance)


class Shampoo(Kronecker):
    """Multiply the momentum of matrices from both sides by inverse roots of the gradients' covariances; AdamW for the rest.

    For each hidden matrix ``W`` of shape (out, in) with gradient ``G``, at learning rate ``lr`` and weight decay ``lambda``,
    block by block::

        M = b1 M + (1 - b1) G
        L = b2 L + (1 - b2) G G^T,  R = b2 R + (1 - b2) G^T G
        U = (L^ + eps I)^(-1/4) M^ (R^ + eps I)^(-1/4)
        W = W - lr lambda W - lr |A| / |U| U

    with ``^`` for division by ``1 - b^t``, and ``eps`` relative to the largest eigenvalue. The roots are computed every
    ``root_steps`` steps and reused in between. ``b2 = 1`` sums covariances, as the first paper does. ``A`` is the grafted
    step, Adam's or gradient descent's ``M^``: each matrix moves as far as that step would move it, in Shampoo's direction, so
    Adam's learning rate fits (Anil et al. 2020). Without grafting, the first step of a matrix is ``U V^T`` of its gradient's
    singular vectors. Sides longer than ``block_size`` are cut into blocks with factors of their own. Tensors with ``k`` sides
    have ``k`` factors and the power ``-1 / (2 k)``.

    Which parameters are matrices, how they are reshaped and which stay with AdamW is as in :class:`SOAP`. A parameter group
    may say ``"algorithm": "shampoo"`` or ``"adamw"``. The state holds two tensors (d, d) for each side of length ``d``, the
    momentum, and with ``graft="adam"`` its second moment. Every rank of DDP computes the same step. Sharded parameters are
    refused.

    Args:
        params: a module, its ``named_parameters()`` or ``parameters()``, or groups of them.
        lr: the learning rate: about AdamW's with ``graft="adam"``.
        betas: the factors (b1, b2); b2 may be 1.
        eps: the number added to the eigenvalues, relative to the largest. It is at least 1e-6 in float32 and 2e-15 in
            float64, because smaller eigenvalues are rounding errors.
        weight_decay: the weight decay ``lambda``, decoupled and scaled by the learning rate.
        graft: the step whose length is used: "adam", "sgd", or None for Shampoo's own.
        graft_eps: the number that keeps Adam's denominator away from zero.
        root_steps: the number of steps between two computations of the roots.
        block_size: the longest side of a block.
        merge: the largest product up to which kernels of convolutions are merged into inputs.
        vectors: whether one-dimensional tensors have a factor too.
        split: tensors that hold several matrices, as in :class:`Muon`.

    Raises:
        ValueError: for a value out of range, if there is no hidden matrix, and for DTensors. When a step begins, for a
            sparse gradient.

    Example:
        >>> optimizer = Shampoo(model.parameters(), lr=1e-3, root_steps=10)
        >>> trainer = L.Trainer(callbacks=[ReplaceOptimizer(Shampoo, lr=1e-3)])

    References:
        Gupta et al. 2018, "Shampoo: Preconditioned Stochastic Tensor Optimization", arXiv:1802.09568. Anil et al. 2020,
        arXiv:2002.09018 (grafting, reused roots). Shi et al. 2023, arXiv:2309.06497 (blocks, Adam).
    """

    paper: ClassVar[str] = "Gupta et al. 2018, arXiv:1802.09568; Anil et al. 2020, arXiv:2002.09018 (grafting)"
    saves: ClassVar[str] = (
        "steps; each costs products with two square matrices per weight matrix, and their roots now and then"
    )
    constraints: ClassVar[str] = "acts on hidden matrices of up to a few thousand rows, or in blocks"

    @declared
    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: Rate = 1e-3,
        betas: Annotated[tuple[float, float], Each(Fraction(), length=2)] = (0.9, 0.99),
        eps: Eps = 1e-6,
        weight_decay: Rate = 0.01,
        *,
        graft: Literal["adam", "sgd"] | None = "adam",
        graft_eps: Eps = 1e-8,
        root_steps: Annotated[int, Count()] = 10,
        block_size: Annotated[int, Count()] = 1024,
        merge: Annotated[int, Count()] = 1024,
        vectors: bool = False,
        split: Split = "auto",
    ) -> None:
        if betas[0] == 1:
            raise ValueError(f"Shampoo(betas={tuple(betas)}): the first must be below 1. The default is (0.9, 0.99).")
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "graft": graft,
            "graft_eps": graft_eps,
            "root_steps": root_steps,
        }
        super().__init__(params, defaults, split=split, merge=merge, block=block_size, vectors=vectors)

    @override
    def begin(self, p: Tensor) -> dict[str, Any]:
        if p not in self._folds:
            return {"step": 0}
        return {"step": 0, "exp_avg": torch.zeros(p.shape, dtype=p.dtype, device=p.device)}

    @override
    def adam_settings(self, group: dict[str, Any]) -> dict[str, Any]:
        b1, b2 = group["betas"]
        # a sum of squares is no mean of them
        return {**group, "eps": group["graft_eps"], "betas": (b1, b2 if b2 < 1 else 0.999)}

    @override
    def update_folded(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        for state in states:
            state["step"] += 1
        b1, lr = group["betas"][0], group["lr"]
        # M := b1 M + (1 - b1) G
        lists.lerp_([state["exp_avg"] for state in states], grads, 1 - b1)
        folds = [self._folds[p] for p in params]
        updates = [torch.empty(p.shape, dtype=working(p.dtype), device=p.device) for p in params]
        pieces = [(f.apart(g), f.apart(s["exp_avg"])) for f, g, s in zip(folds, grads, states, strict=True)]
        into = [fold.apart(update) for fold, update in zip(folds, updates, strict=True)]
        for (shape, dtype, _, t), members in self.buckets(params, [s["step"] for s in states]):
            G, M = (torch.stack([pieces[i][k][j] for i, j in members]).to(working(dtype)) for k in (0, 1))
            roots = self._roots(group, G, [(states[i], j) for i, j in members], sides(shape), t)
            U = multiplied(M.div_(1 - b1**t), roots)
            lists.copy_([into[i][j] for i, j in members], list(U.unbind()))
        if group["graft"] is not None:
            for fold, update, g, state in zip(folds, updates, grads, states, strict=True):
                self._graft(group, fold, update, g, state)
        if group["weight_decay"]:
            lists.mul_(params, 1 - lr * group["weight_decay"])
        # W := W - lr |A| / |U| U
        lists.add_(params, [u.to(p.dtype) for u, p in zip(updates, params, strict=True)], alpha=-lr)

    def _roots(
        self, group: dict[str, Any], G: Tensor, owners: list[tuple[dict[str, Any], int]], kept: list[int], t: int
    ) -> dict[int, Tensor]:
        """The inverse roots for each side of a stack of blocks, (n, d, d); moves the covariances on."""
        b2 = group["betas"][1]
        found: dict[int, Tensor] = {}
        for dim, product in outer(G, kept).items():
            name = f"covariance_{{}}_{dim}"
            if t == 1:
                for (state, j), one in zip(owners, product, strict=True):
                    state[name.format(j)] = torch.zeros_like(one)
            covariances = [state[name.format(j)] for state, j in owners]
            # L := b2 L + (1 - b2) G G^T
            if b2 < 1:
                lists.lerp_(covariances, list(product.unbind()), 1 - b2)
            else:
                lists.add_(covariances, list(product.unbind()))
            if (t - 1) % group["root_steps"] == 0:
                L = torch.stack(covariances).div_(1 - b2**t if b2 < 1 else 1.0)
                found[dim] = inverse_root(L, 1 / (2 * len(kept)), group["eps"])
                for (state, j), root in zip(owners, found[dim], strict=True):
                    state[f"root_{j}_{dim}"] = root.clone()
            else:
                found[dim] = torch.stack([state[f"root_{j}_{dim}"] for state, j in owners])
        return found

    def _graft(self, group: dict[str, Any], fold: Fold, update: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        """Give each matrix of ``U`` the length of the step that is grafted on."""
        settings, t = self.adam_settings(group), state["step"]
        b1, b2 = settings["betas"]
        A = state["exp_avg"].to(update.dtype) / (1 - b1**t)
        if group["graft"] == "adam":
            if "exp_avg_sq" not in state:
                state["exp_avg_sq"] = torch.zeros_like(update)
            state["exp_avg_sq"].lerp_(grad.to(update.dtype).square(), 1 - b2)
            A.div_((state["exp_avg_sq"] / (1 - b2**t)).sqrt_().add_(settings["eps"]))
        matrices = Fold(fold.layout, fold.merge)
        for u, a in zip(matrices.apart(update), matrices.apart(A), strict=True):
            length = torch.linalg.vector_norm(u)
            u.mul_(torch.where(length > 0, torch.linalg.vector_norm(a) / length, length))
