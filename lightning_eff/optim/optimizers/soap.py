"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al. 2024)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.declared import declared
from lightning_eff._core._arguments.kinds import Count, Fraction
from lightning_eff.optim.optimizers import _lists as lists
from lightning_eff.optim.optimizers._first_order import Betas, Eps, Rate
from lightning_eff.optim.optimizers._matrices import Split
from lightning_eff.optim.optimizers._two_sided.folding import Fold, multiplied, outer, sides, together, working
from lightning_eff.optim.optimizers._two_sided.rule import Kronecker


def first_basis(covariance: Tensor) -> Tensor:
    """The eigenvectors as columns, by falling eigenvalue.

    Args:
        covariance: (n, d, d), symmetric. If one is not finite, its basis is the identity, and the weights show the
            non-finite values, as with any optimizer.
    """
    finite = covariance.isfinite().all(-1).all(-1)[:, None, None]
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    return torch.linalg.eigh(torch.where(finite, covariance, identity)).eigenvectors.flip(-1).contiguous()


def turned(covariance: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The first half of a step of orthogonal iteration, ``C Q``, with columns in the order of their estimated eigenvalues.

    Args:
        covariance: ``C``, (n, d, d).
        basis: ``Q``, (n, d, d).

    Returns:
        ``C Q``, and the former place of each of its columns, (n, d).
    """
    found = torch.bmm(covariance, basis)
    # eigenvalues, about: diag(Q^T C Q)
    order = (basis * found).sum(-2).argsort(dim=-1, descending=True, stable=True)
    return found.take_along_dim(order.unsqueeze(-2), -1), order


def next_basis(matrices: Tensor) -> Tensor:
    """The second half: an orthonormal basis of the columns of each matrix (n, d, d)."""
    return torch.linalg.qr(matrices).Q


@dataclass(frozen=True)
class Sides:
    """Pieces of one shape.

    Attributes:
        owners: the state of each, and its number in it.
        kept: the sides that have a basis.
        V: the second moments of each.
    """

    owners: list[tuple[dict[str, Any], int]]
    kept: list[int]
    V: list[Tensor]

    def each(self, what: str, dim: int) -> list[Tensor]:
        """Return one side's matrices (d, d)."""
        return [state[f"{what}_{j}_{dim}"] for state, j in self.owners]

    def stack(self, what: str, dim: int) -> Tensor:
        """Return one side's matrices, (n, d, d)."""
        return together(self.each(what, dim))


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

    The state is Adam's, plus two tensors (d, d) for each side of length ``d``: three times Adam's for square matrices.

    Under DDP every rank computes the same step, and the ranks divide the decompositions and exchange the results, which on a
    CPU equal those of one process bit for bit. They check at each refresh that they have equal matrices, as :class:`Muon`
    does. **DTensors** (FSDP2, tensor parallelism, or both) are divided altogether: one rank owns each matrix, gets the pieces
    of its gradient, keeps its state, and sends the pieces of its step. So on N ranks each has about 1 / N of the work and of
    the state, and each gradient and each step is sent once. Checkpoints do not depend on the layout. ``sent_bytes`` is the
    number of bytes that this rank sent in the last step.

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
        distributed: whether to divide the decompositions of whole parameters over the ranks of the default process group
            while these are equal. Set it to False if not all ranks step this optimizer.

    Raises:
        ValueError: for a value out of range, or if there is no hidden matrix. When a step begins, for a sparse gradient, or
            if ranks that share a DTensor have gradients of different parameters.
        RuntimeError: when a step ends, if it failed on another rank.

    Example:
        >>> optimizer = SOAP(model.parameters(), lr=3e-3, refresh_steps=10)
        >>> trainer = L.Trainer(callbacks=[ReplaceOptimizer(SOAP, lr=3e-3)])

    References:
        Vyas et al. 2024, "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv:2409.11321.
    """

    paper: ClassVar[str] = "Vyas et al. 2024, arXiv:2409.11321"
    saves: ClassVar[str] = "steps; each costs products with two square matrices per weight matrix, and four are kept"
    constraints: ClassVar[str] = "acts on hidden matrices, and AdamW on the rest"

    first_step: ClassVar[int] = -1

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
        distributed: bool = True,
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
        super().__init__(params, defaults, split=split, merge=merge, vectors=vectors, distributed=distributed)

    @override
    def moments(self, like: Tensor) -> dict[str, Any]:
        zeros = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        return {"exp_avg": zeros, "exp_avg_sq": zeros.to(working(like.dtype), copy=True)}

    @override
    def moves(self, t: int) -> bool:
        return t > 0

    @override
    def directions(
        self, group: dict[str, Any], folds: list[Fold], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> list[Tensor]:
        b1 = group["betas"][0]
        moved = [i for i, state in enumerate(states) if state["step"]]
        if moved:
            # M := b1 M + (1 - b1) G
            lists.lerp_([states[i]["exp_avg"] for i in moved], [grads[i] for i in moved], 1 - b1)
        pieces = [
            tuple(fold.apart(x) for x in (g, s["exp_avg"], s["exp_avg_sq"]))
            for fold, g, s in zip(folds, grads, states, strict=True)
        ]
        updates = [torch.empty(g.shape, dtype=working(g.dtype), device=g.device) for g in grads]
        into = [fold.apart(u) for fold, u in zip(folds, updates, strict=True)]
        fresh: list[Sides] = []
        due: list[Sides] = []
        for (shape, dtype, _, t), members in self.buckets(folds, grads, [s["step"] for s in states]):
            G, M = (together([pieces[i][k][j] for i, j in members]).to(working(dtype)) for k in (0, 1))
            V = [pieces[i][2][j] for i, j in members]
            some = Sides([(states[i], j) for i, j in members], sides(shape, group["max_dim"]), V)
            if t:
                step = self._step(group, G, M, V, {dim: some.stack("basis", dim) for dim in some.kept}, t)
                lists.copy_([into[i][j] for i, j in members], list(step.unbind()))
            self._learn(group, G, some, t)
            if not t:
                fresh.append(some)
            elif t % group["refresh_steps"] == 0:
                due.append(some)
        self._begin_bases(fresh)
        self._refresh(due)
        return updates

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

    def _learn(self, group: dict[str, Any], G: Tensor, some: Sides, t: int) -> None:
        """Move the covariances on; at a matrix's first gradient make them."""
        b3 = group["betas"][1] if group["covariance_beta"] is None else group["covariance_beta"]
        # L := b3 L + (1 - b3) G G^T
        for dim, product in outer(G, some.kept).items():
            if t:
                lists.lerp_(some.each("covariance", dim), list(product.unbind()), 1 - b3)
                continue
            for (state, j), one in zip(some.owners, product.mul_(1 - b3), strict=True):
                state[f"covariance_{j}_{dim}"] = one.clone()

    def _begin_bases(self, fresh: list[Sides]) -> None:
        """Make the bases of matrices after their first gradient."""
        found = iter(
            self.each([one for s in fresh for dim in s.kept for one in s.each("covariance", dim)], first_basis)
        )
        for some in fresh:
            for dim in some.kept:
                for state, j in some.owners:
                    state[f"basis_{j}_{dim}"] = next(found).clone()

    def _refresh(self, due: list[Sides]) -> None:
        """Turn the bases towards the covariances' eigenvectors; the ``V`` follow the order of their columns."""
        work: list[Tensor] = []
        for some in due:
            stacked = torch.stack(some.V)
            for dim in some.kept:
                products, order = turned(some.stack("covariance", dim), some.stack("basis", dim))
                work += products.unbind()
                shape = [1] * stacked.ndim
                shape[0], shape[dim + 1] = order.shape
                stacked = stacked.take_along_dim(order.view(shape), dim + 1)
            lists.copy_(some.V, list(stacked.unbind()))
        bases = [basis for some in due for dim in some.kept for basis in some.each("basis", dim)]
        if bases:
            lists.copy_(bases, self.each(work, next_basis))
