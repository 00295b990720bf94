"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al. 2024)."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.declared import declared
from lightning_eff._core._arguments.kinds import Count, Fraction
from lightning_eff.optim.optimizers import _lists as lists
from lightning_eff.optim.optimizers._first_order import Betas, Eps, Rate
from lightning_eff.optim.optimizers._kronecker import Kronecker, multiplied, outer, sides, together, working
from lightning_eff.optim.optimizers._matrices import Split


def first_basis(covariance: Tensor) -> Tensor:
    """The eigenvectors as columns, by falling eigenvalue.

    Args:
        covariance: (n, d, d), symmetric. If one is not finite, its basis is the identity, and the weights show the
            non-finite values, as with any optimizer.
    """
    finite = covariance.isfinite().all(-1).all(-1)[:, None, None]
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    return torch.linalg.eigh(torch.where(finite, covariance, identity)).eigenvectors.flip(-1).contiguous()


def next_basis(covariance: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """One step of orthogonal iteration: ``Q := qr(C Q)``, columns in the order of their estimated eigenvalues.

    Args:
        covariance: ``C``, (n, d, d).
        basis: ``Q``, (n, d, d).

    Returns:
        The new ``Q``, and the former place of each of its columns, (n, d).
    """
    turned = torch.bmm(covariance, basis)
    # eigenvalues, about: diag(Q^T C Q)
    order = (basis * turned).sum(-2).argsort(dim=-1, descending=True, stable=True)
    turned = turned.take_along_dim(order.unsqueeze(-2), -1)
    return torch.linalg.qr(turned).Q, order


class SOAP(Kronecker):
    """Adam for matrices in the eigenbasis of the gradients' covariances; AdamW for all other parameters.

    For each hidden matrix ``W`` of shape (out, in) with gradient ``G``, at learning rate ``lr`` and weight decay ``lambda``::

        M = b1 M + (1 - b1) G
        G' = Q_L^T G Q_R,  M' = Q_L^T M Q_R
        V = b2 V + (1 - b2) G'^2
        W = W - lr lambda W - lr Q_L [M'^ / (sqrt(V^) + eps)] Q_R^T
        L = b3 L + (1 - b3) G G^T,  R = b3 R + (1 - b3) G^T G
        every refresh_steps:  Q_L = qr(L Q_L),  Q_R = qr(R Q_R)

    with ``^`` for division by ``1 - b^t``. Between two refreshes Adam runs in a fixed basis, so an old basis is good enough:
    in the paper the loss differs little for ``refresh_steps`` from 1 to 100, and 10 is its choice. On a CPU, 10 also keeps
    the decompositions a small part of the step. As in the authors' code, a matrix's first gradient only sets its bases and
    moves nothing, because in its own singular basis that gradient is diagonal.

    Use it for networks with many matrices. Each step costs products with two square matrices per weight matrix. **Which
    parameters are matrices** is decided as in :class:`Muon`, best from the module itself. Fused projections of queries, keys
    and values are split, and each expert is a matrix. A convolution is (out, in * kernel) up to ``merge``, and above it (out,
    in, kernel) with a basis for each of the three sides. Embeddings, heads, biases and scales use AdamW with the same
    learning rate, betas and weight decay. A parameter group with ``"algorithm": "soap"`` or ``"adamw"`` decides for itself.

    The state is Adam's, plus two tensors (d, d) for each side of length ``d``: three times Adam's for square matrices. Every
    rank of DDP computes the same step. Sharded parameters are refused.

    Args:
        params: a module, its ``named_parameters()`` or ``parameters()``, or groups of them.
        lr: the learning rate: about AdamW's.
        betas: the factors (b1, b2).
        eps: the number that keeps the denominator away from zero.
        weight_decay: the weight decay ``lambda``, decoupled and scaled by the learning rate.
        covariance_beta: the factor b3; None means b2.
        refresh_steps: the number of steps between two refreshes of the bases.
        max_dim: the longest side that gets a basis. Longer sides keep the identity.
        merge: the largest product up to which kernels of convolutions are merged into inputs; 1 keeps every dimension.
        vectors: whether one-dimensional tensors have a basis too.
        split: tensors that hold several matrices, as in :class:`Muon`.

    Raises:
        ValueError: for a value out of range, if there is no hidden matrix, and for DTensors. When a step begins, for a
            sparse gradient.

    Example:
        >>> optimizer = SOAP(model.parameters(), lr=3e-3, refresh_steps=10)
        >>> trainer = L.Trainer(callbacks=[ReplaceOptimizer(SOAP, lr=3e-3)])

    References:
        Vyas et al. 2024, "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv:2409.11321.
    """

    paper: ClassVar[str] = "Vyas et al. 2024, arXiv:2409.11321"
    saves: ClassVar[str] = "steps; each costs products with two square matrices per weight matrix, and four are kept"
    constraints: ClassVar[str] = "acts on hidden matrices, and AdamW on the rest"

    @declared
    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: Rate = 3e-3,
        betas: Betas = (0.95, 0.95),
        eps: Eps = 1e-8,
        weight_decay: Rate = 0.01,
        *,
        covariance_beta: Annotated[float, Fraction(below=1)] | None = None,
        refresh_steps: Annotated[int, Count()] = 10,
        max_dim: Annotated[int, Count()] = 10_000,
        merge: Annotated[int, Count()] = 1024,
        vectors: bool = False,
        split: Split = "auto",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "covariance_beta": covariance_beta,
            "refresh_steps": refresh_steps,
            "max_dim": max_dim,
        }
        super().__init__(params, defaults, split=split, merge=merge, vectors=vectors)

    @override
    def begin(self, p: Tensor) -> dict[str, Any]:
        if p not in self._folds:
            return {"step": 0}
        zeros = torch.zeros(p.shape, dtype=p.dtype, device=p.device)  # contiguous, so that its pieces are views
        return {"step": -1, "exp_avg": zeros, "exp_avg_sq": zeros.to(working(p.dtype), copy=True)}

    @override
    def update_folded(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        for state in states:
            state["step"] += 1
        b1 = group["betas"][0]
        moved = [i for i, state in enumerate(states) if state["step"]]
        if moved:
            # M := b1 M + (1 - b1) G
            lists.lerp_([states[i]["exp_avg"] for i in moved], [grads[i] for i in moved], 1 - b1)
        pieces = [
            tuple(self._folds[p].apart(x) for x in (g, s["exp_avg"], s["exp_avg_sq"]))
            for p, g, s in zip(params, grads, states, strict=True)
        ]
        updates = [torch.empty(p.shape, dtype=working(p.dtype), device=p.device) for p in params]
        into = [self._folds[p].apart(u) for p, u in zip(params, updates, strict=True)]
        for (shape, dtype, _, t), members in self.buckets(params, [s["step"] for s in states]):
            G, M = (together([pieces[i][k][j] for i, j in members]).to(working(dtype)) for k in (0, 1))
            kept = sides(shape, group["max_dim"])
            owners = [(states[i], j) for i, j in members]
            if t:
                V = [pieces[i][2][j] for i, j in members]
                step = self._step(group, G, M, V, {dim: _stack(owners, "basis", dim) for dim in kept}, t)
                lists.copy_([into[i][j] for i, j in members], list(step.unbind()))
            self._learn(group, G, owners, kept, t)
            if t and t % group["refresh_steps"] == 0:
                self._refresh(owners, kept, [pieces[i][2][j] for i, j in members])
        if moved:
            targets, lr = [params[i] for i in moved], group["lr"]
            if group["weight_decay"]:
                lists.mul_(targets, 1 - lr * group["weight_decay"])
            # W := W - lr Q_L [M'^ / (sqrt(V^) + eps)] Q_R^T
            lists.add_(targets, [updates[i].to(params[i].dtype) for i in moved], alpha=-lr)

    def _step(
        self, group: dict[str, Any], G: Tensor, M: Tensor, V: list[Tensor], Q: dict[int, Tensor], t: int
    ) -> Tensor:
        """``Q_L [M'^ / (sqrt(V^) + eps)] Q_R^T`` of a stack of pieces; moves the ``V`` on."""
        b1, b2 = group["betas"]
        # V := b2 V + (1 - b2) G'^2
        stacked = together(V).lerp_(multiplied(G, Q).square(), 1 - b2)
        if len(V) > 1:
            lists.copy_(V, list(stacked.unbind()))
        under = stacked.sqrt().div_((1 - b2**t) ** 0.5).add_(group["eps"])
        direction = multiplied(M, Q).div(1 - b1**t).div_(under)
        return multiplied(direction, Q, transposed=True)

    def _learn(
        self, group: dict[str, Any], G: Tensor, owners: list[tuple[dict[str, Any], int]], kept: list[int], t: int
    ) -> None:
        """Move the covariances on; at a matrix's first gradient make them, and the bases."""
        b3 = group["betas"][1] if group["covariance_beta"] is None else group["covariance_beta"]
        # L := b3 L + (1 - b3) G G^T
        for dim, product in outer(G, kept).items():
            if t:
                covariances = [state[f"covariance_{j}_{dim}"] for state, j in owners]
                lists.lerp_(covariances, list(product.unbind()), 1 - b3)
                continue
            covariance = product.mul_(1 - b3)
            for (state, j), one, basis in zip(owners, covariance, first_basis(covariance), strict=True):
                state[f"covariance_{j}_{dim}"], state[f"basis_{j}_{dim}"] = one.clone(), basis.clone()

    def _refresh(self, owners: list[tuple[dict[str, Any], int]], kept: list[int], V: list[Tensor]) -> None:
        """Turn the bases towards the covariances' eigenvectors; the ``V`` follow the order of their columns."""
        stacked = torch.stack(V)
        for dim in kept:
            basis, order = next_basis(_stack(owners, "covariance", dim), _stack(owners, "basis", dim))
            lists.copy_([state[f"basis_{j}_{dim}"] for state, j in owners], list(basis.unbind()))
            shape = [1] * stacked.ndim
            shape[0], shape[dim + 1] = order.shape
            stacked = stacked.take_along_dim(order.view(shape), dim + 1)
        lists.copy_(V, list(stacked.unbind()))


def _stack(owners: list[tuple[dict[str, Any], int]], what: str, dim: int) -> Tensor:
    """One side's matrices of a bucket's pieces, (n, d, d)."""
    return together([state[f"{what}_{j}_{dim}"] for state, j in owners])
