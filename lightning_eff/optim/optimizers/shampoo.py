"""Shampoo: gradients multiplied from either side by roots of their covariances (Gupta et al. 2018, arXiv:1802.09568)."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff.optim.optimizers import _lists as lists
from lightning_eff.optim.optimizers._first_order import check, check_counts
from lightning_eff.optim.optimizers._kronecker import Fold, Kronecker, multiplied, outer, sides, working
from lightning_eff.optim.optimizers._matrices import Split


def inverse_root(covariance: Tensor, power: float, eps: float) -> Tensor:
    """``(C + eps lambda_max I)^-power`` by eigenvalues, none of which counts as less than zero.

    Args:
        covariance: ``C``, (n, d, d), symmetric. Where one is not finite, the result is not either.
        power: > 0.
        eps: >= 0, in parts of the largest eigenvalue. Eigenvalues that small are rounding errors of the larger ones, so it
            counts as no less than 8 units of the dtype's precision (1e-6 in float32).
    """
    eps = max(eps, 8 * torch.finfo(covariance.dtype).eps)
    finite = covariance.isfinite().all(-1).all(-1)[:, None, None]
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    values, vectors = torch.linalg.eigh(torch.where(finite, covariance, identity))
    values = values.clamp(min=0) + eps * values[:, -1:].clamp(min=0)
    # a covariance of zero multiplies gradients of zero, by whatever
    roots = torch.where(values > 0, values, 1.0).pow(-power)
    return torch.where(finite, (vectors * roots.unsqueeze(-2)) @ vectors.mT, covariance)


GRAFTS = ("adam", "sgd", None)


class Shampoo(Kronecker):
    """Momentum multiplied from either side by the inverse root of the gradients' covariance; AdamW for all else.

    For each hidden matrix ``W`` of shape (out, in) with gradient ``G``, at rate ``lr`` and decay ``lambda``, block by block::

        M = b1 M + (1 - b1) G
        L = b2 L + (1 - b2) G G^T,  R = b2 R + (1 - b2) G^T G
        U = (L^ + eps I)^(-1/4) M^ (R^ + eps I)^(-1/4)
        W = W - lr lambda W - lr |A| / |U| U

    with ``^`` for division by ``1 - b^t``, ``eps`` in parts of the largest eigenvalue, and roots that are computed anew every
    ``root_steps`` and stale in between. ``b2 = 1`` sums covariances, as the first paper does. ``A`` is the step that is grafted
    on: Adam's, or gradient descent's ``M^``; each matrix then moves as far as that would have moved it, in Shampoo's direction,
    so that Adam's rate serves (Anil et al. 2020). Without grafting the first step of a matrix is ``U V^T`` of its gradient's
    singular vectors. Sides longer than ``block_size`` are cut up, each block with factors of its own. Tensors of ``k`` sides
    have ``k`` factors and the power ``-1 / (2 k)``.

    Which parameters are matrices, how they are folded, and what stays AdamW's is as in :class:`SOAP`; a group may say
    ``"algorithm": "shampoo"`` or ``"adamw"``. State: for each side of ``d`` two tensors (d, d), momentum, and with
    ``graft="adam"`` its second moment. Every rank of DDP does the same step by itself. Parameters that are divided over ranks
    are refused.

    Args:
        params: a module, its ``named_parameters()`` or ``parameters()``, or groups of them.
        lr: the rate, >= 0: about AdamW's, with ``graft="adam"``.
        betas: (b1, b2), b1 in [0, 1), b2 in [0, 1].
        eps: > 0, what is added to the eigenvalues, in parts of the largest one; at least 1e-6 in float32 and 2e-15 in
            float64, below which an eigenvalue is a rounding error.
        weight_decay: ``lambda`` >= 0, decoupled and scaled by the rate.
        graft: "adam", "sgd" or None.
        graft_eps: > 0 keeps Adam's denominator away from zero.
        root_steps: steps between two computations of the roots, >= 1.
        block_size: the longest side of a block, >= 1.
        merge: kernels of convolutions are merged into inputs up to this product, >= 1.
        vectors: whether tensors of one dimension have a factor too.
        split: what is several maps in one tensor, as in :class:`Muon`.

    Raises:
        ValueError: for other values, where there is no hidden matrix, and for DTensors; as a step begins, for a sparse
            gradient.

    Sources:
        Anil et al. 2020, arXiv:2002.09018 (grafting, stale roots); Shi et al. 2023, arXiv:2309.06497 (blocks, Adam).
    """

    paper: ClassVar[str] = "Gupta et al. 2018, arXiv:1802.09568; Anil et al. 2020, arXiv:2002.09018 (grafting)"
    saves: ClassVar[str] = (
        "steps; each costs products with two square matrices for each weight matrix, and roots of them now and then"
    )
    constraints: ClassVar[str] = "hidden matrices of some thousand rows at most, or in blocks"

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        graft: str | None = "adam",
        graft_eps: float = 1e-8,
        root_steps: int = 10,
        block_size: int = 1024,
        merge: int = 1024,
        vectors: bool = False,
        split: Split = "auto",
    ) -> None:
        check("Shampoo", betas=betas[:1], num_betas=1, lr=lr, eps=eps, weight_decay=weight_decay, graft_eps=graft_eps)
        if len(betas) != 2 or not 0 <= betas[1] <= 1:
            raise ValueError(f"Shampoo(betas={tuple(betas)}): expected b1 in [0, 1) and b2 in [0, 1].")
        if graft not in GRAFTS:
            raise ValueError(f"Shampoo({graft=}): expected one of {GRAFTS}.")
        check_counts("Shampoo", root_steps=root_steps, block_size=block_size, merge=merge)
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
        for (shape, dtype, _, t), members in self.buckets(params, [s["step"] for s in states]).items():
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
