"""Block sparsity: rows that keep like columns are put into groups, each of which keeps whole dense blocks (Ma et al. 2023)."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core.search_space import SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.sparsity._masks.allotting import Distribution, allotted
from lightning_eff.model.sparsity._masks.finding import Weight, chosen, largest
from lightning_eff.model.sparsity._masks.masked import RIVALS_IN_STATE, Masked, agreed, no_time, rivals
from lightning_eff.model.sparsity._random_mask import fixed

WHO = "BlockSparsity"


def groups_of(kept: Tensor, size: int) -> Tensor:
    """An order of the rows in which each ``size`` that stand side by side keep like columns, (rows,).

    Each group begins with the row that keeps most of those that are left, and takes those of the largest
    ``J(i, j) = |K_i ∩ K_j| / |K_i ∪ K_j|`` with it; of equal ones the first.

    Args:
        kept: ``K``, which columns each row keeps, (rows, columns).
        size: of a group; the rows are whole groups.
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
    """What :func:`regroup` with the same order is of: ``ungroup(regroup(w, o), o) = w``."""
    return torch.empty_like(w).index_copy_(0, order, w)


def blocks_of(scores: Tensor, order: Tensor, size: int, count: int) -> Tensor:
    """A mask of ``count`` blocks: a block is a column of a group of rows, and those of the largest sums are kept.

    Args:
        scores: of each kernel, (rows, columns).
        order: of the rows.
        size: rows of a group.
        count: how many blocks.
    """
    sums = regroup(scores, order).unflatten(0, (-1, size)).sum(1)
    kept = largest(sums.flatten(), count).view_as(sums)
    return ungroup(kept.repeat_interleave(size, 0), order)


class BlockSparsity(Masked):
    """Let ``sparsity`` of the weights be zero in such places that each group of rows is a dense matrix of few columns.

    When ``start`` of the budget is used, the weights say what is kept. Of a matrix, first each row's largest numbers are
    looked at, as if single numbers were pruned; rows that would keep like columns are put into groups of ``size``; and each
    group keeps whole columns, those of the largest sums of magnitudes. Of a convolution a number is a whole kernel, so that
    blocks of the weight are blocks of its transpose too, by which the backward pass multiplies. With rows in the order of
    :attr:`orders`, a product is one of small dense matrices for each group. Blocks stay until the end of the run, and are the
    same on all ranks. Zeros are exact in every checkpoint, which is the plain module's, with rows in their old places; momenta
    of what is pruned are zero.

    **It saves no time here.** Weights are masked within dense products, which take as long as before. What it gives is a
    network whose zeros suit products of blocks, to run it by; the paper's are kernels of their own on GPUs. The paper prunes
    before training, by masks of other methods; ``start=0`` does so by first weights.

    Which weights there are is said at :class:`RigL`. Rows are the first dimension: outputs, or inputs where a module keeps
    those first. Weights whose rows are not made of whole groups stay dense, which is told, and refused where ``names`` means
    them. Of equal sums the first are kept.

    Logged: ``sparsity``, ``kept`` (numbers), ``blocks`` (that are kept).

    Attributes:
        orders: by weight, the rows in the order of their groups: (rows,), or (k, rows) of a stack of experts.

    Args:
        sparsity: the share of the masked weights that is zero, in [0, 1). 0 is plain training.
        size: rows of a group, an integer >= 1.
        start: the share of the budget that is trained densely before, in [0, 1).
        distribution: "uniform", the same share of each weight; "erk", a larger share of large ones.
        regroup: False for groups of rows as they stand.
        names: dotted paths of weights or of modules that hold them, their last parts or patterns; None for all.
        dense: patterns of weights among these that are left alone.

    Raises:
        ValueError: for other values; at setup, if there is nothing to mask, a name means nothing, or one that is named is not
            made of whole groups.

    Sources:
        Ma et al. 2023, Conference on Parsimony and Learning, PMLR 234:282-301.
    """

    saves: ClassVar[str] = "no time: a network of few dense blocks, for products that use them"
    paper: ClassVar[str] = "Ma et al. 2023, PMLR 234"
    constraints: ClassVar[str] = "rows in whole groups"
    survey: ClassVar[Survey | None] = Survey("regrouping to dense blocks (HRBP)", zhuang="2.1", shen="4.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"sparsity": Uniform(0.5, 0.9)}, no_time)
    control: ClassVar[Control] = Control("a random mask of the same size, which stays", fixed)
    conflicts: ClassVar[Mapping[str, str]] = {**rivals(WHO), **RIVALS_IN_STATE}
    needs_budget: ClassVar[bool] = True

    def __init__(
        self,
        sparsity: float = 0.8,
        *,
        size: int = 16,
        start: float = 0.1,
        distribution: Distribution = "uniform",
        regroup: bool = True,
        names: Sequence[str] | None = None,
        dense: Sequence[str] = (),
    ) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{WHO}({size=}): expected rows of a group, an integer >= 1.")
        if isinstance(start, bool) or not 0.0 <= start < 1.0:
            raise ValueError(f"{WHO}({start=}): expected the share of the budget that is trained densely, in [0, 1).")
        if not isinstance(regroup, bool):
            raise ValueError(f"{WHO}({regroup=}): expected True or False, whether like rows are put into groups.")
        self.size, self.start, self.regroup = size, float(start), regroup
        self._take(sparsity=sparsity, distribution=distribution, names=names, dense=dense)

    @override
    def _reset(self) -> None:
        super()._reset()
        self.orders: dict[str, Tensor] = {}
        self._blocks = 0

    @override
    def asked(self) -> dict[str, Any]:
        own = {"size": self.size, "start": self.start, "regroup": self.regroup}
        return {"sparsity": self.sparsity, "distribution": self.distribution, **own}

    @override
    def find(self, module: nn.Module) -> dict[str, Weight]:
        found = chosen(module, self.names, self.dense, (1, 1), who=WHO, masked=self.masks)
        whole = {name: weight for name, weight in found.items() if matrix(weight)[1] % self.size == 0}
        if left := [f"{name} {weight.shape}" for name, weight in found.items() if name not in whole]:
            if self.names is not None or not whole:
                raise ValueError(
                    f"{WHO}(size={self.size}): {len(left)} weights are not made of whole groups, such as {left[0]}; expected"
                    " rows that the size divides. Leave them out of names=, or by dense=, or give another size."
                )
            rank_zero_info(
                f"{WHO}: {len(left)} of {len(found)} weights stay dense, since their rows are no whole groups of {self.size},"
                f" such as {left[0]}."
            )
        return whole

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
            scores = size.reshape(k, rows, columns, kernel).sum(3)
            count = max(round(numbers[name] / (k * self.size * kernel)), 1)
            orders = [self._order(one, count) for one in scores]
            kept = [blocks_of(one, order, self.size, count) for one, order in zip(scores, orders, strict=True)]
            masks[name] = torch.stack(kept).unsqueeze(3).expand(k, rows, columns, kernel).reshape(weight.shape)
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
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "blocks": self._blocks}

    @override
    def summary(self) -> str:
        if not self.masks and not self._total:
            return f"no weight masked: the run ended before {self.start:.0%} of its budget"
        return f"{super().summary()}; {self._blocks:,} blocks of {self.size} rows are kept"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "orders": dict(self.orders), "blocks": self._blocks}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.orders, self._blocks = dict(state_dict["orders"]), state_dict["blocks"]


def matrix(weight: Weight) -> tuple[int, int, int, int]:
    """A weight as (k, rows, columns, numbers of a kernel)."""
    if weight.stack:
        return (*weight.shape, 1)  # pyright: ignore[reportReturnType]
    rows, columns, *kernel = weight.shape
    return 1, rows, columns, prod(kernel)
