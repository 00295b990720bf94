"""BlockSparsity: group rows with similar columns, and keep whole dense blocks of each group (Ma et al. 2023)."""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction
from lightning_eff._core.search_space import SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.sparsity._kernels.blocks import Places, kernels, places_of
from lightning_eff.model.sparsity._kernels.products import Backend, SparseProducts
from lightning_eff.model.sparsity._masks.allotting import allotted
from lightning_eff.model.sparsity._masks.arguments import Dense, Distribution, Sparsity, Weights
from lightning_eff.model.sparsity._masks.finding import Weight, chosen, largest
from lightning_eff.model.sparsity._masks.masked import RIVALS_IN_STATE, Masked, agreed, no_time, rivals
from lightning_eff.model.sparsity._random_mask import fixed

WHO = "BlockSparsity"


def groups_of(kept: Tensor, size: int) -> Tensor:
    """An order of the rows that puts rows with similar columns into groups of ``size`` neighbours, (rows,).

    Each group starts with the remaining row that keeps most columns, and adds the rows with the largest
    ``J(i, j) = |K_i ∩ K_j| / |K_i ∪ K_j|`` with it; ties take the first.

    Args:
        kept: ``K``, the columns that each row keeps, (rows, columns).
        size: the number of rows in a group; it divides the number of rows.
    """
    k = kept.float()
    counts, left = k.sum(1), torch.ones(len(k), dtype=torch.bool, device=k.device)
    order: list[Tensor] = []
    for _ in range(len(k) // size):
        seed = counts.masked_fill(~left, -1.0).argmax()
        both = k @ k[seed]
        like = both / (counts + counts[seed] - both).clamp_min(1.0)
        group = like.masked_fill(~left, -1.0).argsort(descending=True, stable=True)[:size]
        left[group] = False
        order.append(group)
    return torch.cat(order)


def regroup(w: Tensor, order: Tensor) -> Tensor:
    """``w`` with its rows in this order."""
    return w[order]


def ungroup(w: Tensor, order: Tensor) -> Tensor:
    """The inverse of :func:`regroup` with the same order: ``ungroup(regroup(w, o), o) = w``."""
    return torch.empty_like(w).index_copy_(0, order, w)


def blocks_of(scores: Tensor, order: Tensor, size: int, count: int) -> Tensor:
    """A mask of ``count`` blocks with the largest sums; a block is a column of a group of rows.

    Args:
        scores: the score of each kernel, (rows, columns).
        order: the order of the rows.
        size: the number of rows in a group.
        count: the number of blocks.
    """
    sums = regroup(scores, order).unflatten(0, (-1, size)).sum(1)
    kept = largest(sums.flatten(), count).view_as(sums)
    return ungroup(kept.repeat_interleave(size, 0), order)


class BlockSparsity(Masked):
    """Set weights to zero so that each group of rows keeps a dense matrix of few columns.

    Once the fraction ``start`` of the budget is used, the weights determine what is kept. First, each row's largest elements
    are found, as if single elements were pruned. Rows that would keep similar columns form groups of ``size``. Each group
    then keeps whole columns, those with the largest sums of magnitudes. In a convolution, an element is a whole kernel, so
    blocks of the weight are also blocks of its transpose, which the backward pass uses. With rows in the order of
    :attr:`orders`, a product is one small dense product per group. Blocks stay until the end of the run, and are the same on
    all ranks. Zeros are exact in every checkpoint, which is the plain module's with rows in their original places. Momenta of
    pruned elements are zero. The paper prunes before training, with masks of other methods; ``start=0`` prunes by the initial
    weights.

    Use it to get a network whose zeros suit block-sparse kernels. The paper's have blocks of one column. Torch's Triton
    kernels need blocks of 16 x 16 or more, so give ``columns=16``, 32 or 64: a block then has that many neighbouring columns.
    On CUDA devices of compute capability 8.0 or more, linear layers then run them in float16 and bfloat16, autocast included.
    They compute the output and the gradient of the input. The gradient of the weight is a dense product. One message says
    which weights the kernels multiply, and why others are multiplied densely. Convolutions, compiled code, other devices and
    types, and weights that another technique has moved within the step (SAM), are multiplied densely, which **saves no
    time**. **On a CPU**, torch has block-sparse products too. They are not used, because they are slower: on one thread, a
    linear layer's step took 1.5 to 2.0 times as long as a dense one at a sparsity of 0.8, and 0.9 to 1.5 times at 0.95
    (``benchmarks/block_sparse_cpu.py``).

    **We have not measured the kernels' speed on a GPU.** ``make gpu`` does. Torch's authors report products up to 4.8 times
    as fast as dense ones at high sparsity on an A100, and ViTs up to 1.46 times as fast in inference, in float32. With the
    dense third product, linear layers can be at most 2.1 times as fast at a sparsity of 0.8.

    It finds weights as ``RigL`` does. Rows are the first dimension: outputs, or inputs in modules that store those first. A
    weight that does not consist of whole blocks stays dense, which is logged; if ``names`` means it, it is refused. It logs
    ``sparsity``, ``kept`` (elements), ``blocks`` (kept blocks) and ``kernels`` (weights that sparse kernels multiply).

    Attributes:
        orders: by weight, the rows in the order of their groups: (rows,), or (k, rows) for a stack of experts.

    Args:
        sparsity: the fraction of the masked weights that is zero. 0 is plain training.
        size: the number of rows in a group.
        columns: the number of neighbouring columns in a block.
        start: the fraction of the budget to train densely before.
        distribution: how zeros are distributed. "uniform" is the same fraction of each weight, "erk" a larger one of large
            weights.
        regroup: whether to group similar rows; False groups neighbouring rows.
        backend: "auto" runs torch's block-sparse kernels where they run, "sparse" raises at setup if they run for no weight,
            "dense" runs none.
        names: the weights to mask, see ``RigL``.
        dense: the weights to leave alone, see ``RigL``.

    Raises:
        ValueError: for a value out of range. At setup, if there is nothing to mask, a name matches nothing, a named weight
            does not consist of whole blocks, or ``backend="sparse"`` finds no product for the kernels.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[BlockSparsity(0.8, size=16, dense=["head"])])

    References: Ma et al. 2023, "HRBP: Hardware-friendly Regrouping towards Block-based Pruning for Sparse CNN Training",
        Conference on Parsimony and Learning, PMLR 234:282-301.
    """

    saves = "time of linear layers on GPUs in blocks of 16 x 16 or more (not measured by us); no time elsewhere"
    paper = "Ma et al. 2023, PMLR 234"
    constraints = "weights that consist of whole blocks"
    search_space = SearchSpace({"sparsity": Uniform(0.5, 0.9)}, no_time)
    control = Control("a fixed random mask of the same size", fixed)
    conflicts: ClassVar[Mapping[str, str]] = {**rivals(WHO), **RIVALS_IN_STATE}
    needs_budget: ClassVar[bool] = True
    checkpointed = ("orders", "_blocks")

    def __init__(
        self,
        sparsity: Sparsity = 0.8,
        *,
        size: Annotated[int, Count()] = 16,
        columns: Annotated[int, Count()] = 1,
        start: Annotated[float, Fraction(below=1)] = 0.1,
        distribution: Distribution = "uniform",
        regroup: bool = True,
        backend: Backend = "auto",
        names: Weights = None,
        dense: Dense = (),
    ) -> None:
        self.size, self.columns, self.start, self.regroup = size, columns, float(start), regroup
        self.backend: Backend = backend
        self._take(sparsity=sparsity, distribution=distribution, names=names, dense=dense)

    @override
    def _reset(self) -> None:
        super()._reset()
        self.orders: dict[str, Tensor] = {}
        self._blocks = 0
        self._products = SparseProducts()
        self._found: dict[str, Places] = {}

    @override
    def asked(self) -> dict[str, Any]:
        own: dict[str, Any] = {"size": self.size, "start": self.start, "regroup": self.regroup}
        if self.columns > 1:  # checkpoints of earlier versions have none
            own["columns"] = self.columns
        return {"sparsity": self.sparsity, "distribution": self.distribution, **own}

    @override
    def find(self, module: nn.Module) -> dict[str, Weight]:
        found = chosen(module, self.names, self.dense, (1, 1), who=WHO, masked=self.masks)
        whole = {
            name: weight
            for name, weight in found.items()
            if matrix(weight)[1] % self.size == 0 and matrix(weight)[2] % self.columns == 0
        }
        if left := [f"{name} {weight.shape}" for name, weight in found.items() if name not in whole]:
            if self.names is not None or not whole:
                raise ValueError(
                    f"{WHO}(size={self.size}, columns={self.columns}): {len(left)} weights do not consist of whole blocks of"
                    f" rows and columns, such as {left[0]}. Leave them out of `names`, or give other sizes."
                )
            rank_zero_info(
                f"{WHO}: {len(left)} of {len(found)} weights stay dense, because size={self.size} does not divide their rows,"
                f" or columns={self.columns} their columns, such as {left[0]}."
            )
        return whole

    @override
    def on_optimizers(self, session: Session) -> None:
        super().on_optimizers(session)
        self._products = SparseProducts(kernels(self._places, (self.size, self.columns)), self.backend, who=WHO)
        self._products.find(session, {name: self.parameter(name) for name in self.weights})
        for name in self.masks:
            self._products.masked(name, self.parameter(name))
        session.views.append(lambda training: self._products.worn())

    def _places(self, name: str) -> Places:
        if name not in self._found:
            self._found[name] = places_of(self.masks[name], self.orders[name], (self.size, self.columns))
        return self._found[name]

    @override
    def apply(self, only: Iterable[str] | None = None) -> None:
        names = [*self.masks] if only is None else [*only]
        super().apply(only)
        for name in names:
            if name in self.masks:
                self._products.masked(name, self.parameter(name))

    @override
    def begin(self, session: Session, batch: Any, batch_idx: int) -> dict[str, Tensor] | None:
        return self._chosen(session) if session.progress.u >= self.start - 1e-9 else None

    @torch.no_grad()
    def _chosen(self, session: Session) -> dict[str, Tensor]:
        numbers = allotted(self.weights, self.sparsity, self.distribution)
        masks: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            k, rows, columns, kernel = matrix(weight)
            size = agreed(session, self.parameter(name).detach().abs().float())
            scores = size.reshape(k, rows, columns // self.columns, self.columns * kernel).sum(3)
            count = max(round(numbers[name] / (k * self.size * self.columns * kernel)), 1)
            orders = [self._order(one, count) for one in scores]
            kept = [blocks_of(one, order, self.size, count) for one, order in zip(scores, orders, strict=True)]
            mask = torch.stack(kept).repeat_interleave(self.columns, 2)
            masks[name] = mask.unsqueeze(3).expand(k, rows, columns, kernel).reshape(weight.shape)
            self.orders[name] = torch.stack(orders) if weight.stack else orders[0]
            self._blocks += k * count
        return masks

    def _order(self, scores: Tensor, count: int) -> Tensor:
        if not self.regroup:
            return torch.arange(len(scores), device=scores.device)
        return groups_of(largest(scores.flatten(), count * self.size).view_as(scores), self.size)

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        dense = not self.masks
        super().on_batch_start(session, batch, batch_idx)
        if dense and self.masks:
            self.clear_state(session, {name: ~mask for name, mask in self.masks.items()})
            session.blocks_changed(self)

    @override
    def detach(self, session: Session) -> None:
        super().detach(session)
        self._products.release()
        self._found = {}

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "blocks": self._blocks, "kernels": len(self._products.ran)}

    @override
    def summary(self) -> str:
        if not self.masks and not self._total:
            return f"masked no weight: the run ended before {self.start:.0%} of its budget"
        ran = len(self._products.ran)
        told = super().summary()
        if ran:
            told = told.replace("this saved no time", f"block-sparse kernels multiplied {ran} of the weights")
        return f"{told}; kept {self._blocks:,} blocks of {self.size} rows"


def matrix(weight: Weight) -> tuple[int, int, int, int]:
    """The sizes of a weight as (k, rows, columns, elements of a kernel)."""
    if weight.stack:
        return (*weight.shape, 1)  # pyright: ignore[reportReturnType]
    rows, columns, *kernel = weight.shape
    return 1, rows, columns, prod(kernel)
