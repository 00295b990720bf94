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
from lightning_eff.optim.optimizers._matrices import Split
from lightning_eff.optim.optimizers._two_sided.folding import Fold, multiplied, outer, sides, working
from lightning_eff.optim.optimizers._two_sided.rule import Kronecker


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
    momentum, and with ``graft="adam"`` its second moment.

    Work and state are divided over ranks as in :class:`SOAP`: the roots under DDP, and everything for DTensors (FSDP2, tensor
    parallelism, or both), of which one rank owns each matrix.

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
        distributed: whether to divide the roots of whole parameters, as in :class:`SOAP`.

    Raises:
        ValueError: for a value out of range, or if there is no hidden matrix. When a step begins, for a sparse gradient, or
            if ranks that share a DTensor have gradients of different parameters.
        RuntimeError: when a step ends, if it failed on another rank.

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
        distributed: bool = True,
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
        super().__init__(
            params, defaults, split=split, merge=merge, block=block_size, vectors=vectors, distributed=distributed
        )

    @override
    def moments(self, like: Tensor) -> dict[str, Any]:
        return {"exp_avg": torch.zeros(like.shape, dtype=like.dtype, device=like.device)}

    @override
    def adam_settings(self, group: dict[str, Any]) -> dict[str, Any]:
        b1, b2 = group["betas"]
        # a sum of squares is no mean of them
        return {**group, "eps": group["graft_eps"], "betas": (b1, b2 if b2 < 1 else 0.999)}

    @override
    def directions(
        self, group: dict[str, Any], folds: list[Fold], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> list[Tensor]:
        b1 = group["betas"][0]
        # M := b1 M + (1 - b1) G
        lists.lerp_([state["exp_avg"] for state in states], grads, 1 - b1)
        updates = [torch.empty(g.shape, dtype=working(g.dtype), device=g.device) for g in grads]
        pieces = [(f.apart(g), f.apart(s["exp_avg"])) for f, g, s in zip(folds, grads, states, strict=True)]
        into = [fold.apart(update) for fold, update in zip(folds, updates, strict=True)]
        buckets = list(self.buckets(folds, grads, [s["step"] for s in states]))
        due: dict[float, list[tuple[dict[str, Any], str, int]]] = {}  # by the roots' power
        for (shape, dtype, _, t), members in buckets:
            G = torch.stack([pieces[i][0][j] for i, j in members]).to(working(dtype))
            for dim, product in outer(G, kept := sides(shape)).items():
                owners = [(states[i], f"{j}_{dim}") for i, j in members]
                self._learn(group, product, owners)
                if (t - 1) % group["root_steps"] == 0:
                    due.setdefault(1 / (2 * len(kept)), []).extend((state, name, t) for state, name in owners)
        for power, some in due.items():
            self._find_roots(group, power, some)
        for (shape, dtype, _, t), members in buckets:
            M = torch.stack([pieces[i][1][j] for i, j in members]).to(working(dtype))
            roots = {dim: torch.stack([states[i][f"root_{j}_{dim}"] for i, j in members]) for dim in sides(shape)}
            U = multiplied(M.div_(1 - b1**t), roots)
            lists.copy_([into[i][j] for i, j in members], list(U.unbind()))
        if group["graft"] is not None:
            for fold, update, g, state in zip(folds, updates, grads, states, strict=True):
                self._graft(group, fold, update, g, state)
        return updates

    def _learn(self, group: dict[str, Any], product: Tensor, owners: list[tuple[dict[str, Any], str]]) -> None:
        """Move the covariances of one side on, by the products ``G G^T``, (n, d, d)."""
        b2 = group["betas"][1]
        for (state, name), one in zip(owners, product, strict=True):
            if f"covariance_{name}" not in state:
                state[f"covariance_{name}"] = torch.zeros_like(one)
        covariances = [state[f"covariance_{name}"] for state, name in owners]
        # L := b2 L + (1 - b2) G G^T
        if b2 < 1:
            lists.lerp_(covariances, list(product.unbind()), 1 - b2)
        else:
            lists.add_(covariances, list(product.unbind()))

    def _find_roots(self, group: dict[str, Any], power: float, due: list[tuple[dict[str, Any], str, int]]) -> None:
        """Compute roots of one power anew; ``due`` has the state, the name and the step of each."""
        b2, eps = group["betas"][1], group["eps"]
        L = [state[f"covariance_{name}"] / (1 - b2**t if b2 < 1 else 1.0) for state, name, t in due]
        for (state, name, _), root in zip(due, self.each(L, lambda C: inverse_root(C, power, eps)), strict=True):
            state[f"root_{name}"] = root.clone()

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
