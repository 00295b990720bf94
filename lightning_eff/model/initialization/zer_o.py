"""Zeros and ones alone: partial identities, Hadamard matrices, and branches that begin at zero (Zhao et al. 2021)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._branches.ends import alike_unused, biases_beside, refuse_unequal
from lightning_eff._core._branches.finding import branches
from lightning_eff._core._branches.graph import Graph
from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.initialization._divided.writing import whole
from lightning_eff.model.initialization._given.names import by_hand, check_branches
from lightning_eff.model.initialization._maps import MAPS_ARE_RIVALS, UNSEEN, OfMaps, listed, no_maps

WHO = "ZerO"


def hadamard(p: int) -> Tensor:
    """``H_1 = [1]``, ``H_2k = [[H_k, H_k], [H_k, -H_k]]``: shape (p, p), for p a power of two."""
    h = torch.ones(1, 1)
    while len(h) < p:
        h = torch.cat([torch.cat([h, h], dim=1), torch.cat([h, -h], dim=1)])
    return h


def zero_and_one(m: int, n: int) -> Tensor:
    """The map of n inputs to m outputs: ``I`` (m, n) if m <= n, else ``I H / sqrt(p) I`` with ``p = 2^ceil(log2 m)``.

    Columns of the second are orthonormal if m is p, and no matter of which network: no number is drawn.
    """
    if m <= n:
        return torch.eye(m, n)
    p = 2 ** math.ceil(math.log2(m))
    return (hadamard(p) / math.sqrt(p))[:m, :n].clone()


class ZerO(OfMaps):
    """Begin without random numbers: maps are partial identities or Hadamard matrices, and residual branches add nothing.

    At the first batch of a fresh fit, one forward pass is looked through for linear maps, convolutions and sums ``x + f(x)``,
    whatever modules are called. A map to as many outputs as inputs or fewer hands on its first inputs as they are; one to
    more spreads them by a Hadamard matrix, without which outputs beyond the inputs would be zero, and stay alike in training.
    A convolution does so at the middle of its kernel. The last map of each residual branch is zero. Biases of all of these
    are zero. One map that makes queries, keys and values is three; each expert, and each group of a convolution, is one.

    Embeddings, heads that are tied to one, norms and tables of places stay as they are: those that are drawn still differ from
    seed to seed, and tell tokens apart.

    What was set is said at the start.

    Logged: ``numbers``, how many were set.

    Args:
        last: whether last maps of branches begin at zero, as in the source.
        maps: names of weights, or patterns of them, that are set alone; None for all, an empty list for plain training.
        branches: names of the weights in which residual branches end, or of their modules, or patterns of them, e.g.
            ``["blocks.*.proj"]``; None looks for them.
        attention: where queries, keys and values of one map are not told apart: for each kind of attention names or patterns
            of the weights that make its query, key and value, and of its output map; roles that one map makes in equal parts
            are joined by +, e.g. ``[{"query+key+value": "blocks.*.qkv", "output": "blocks.*.proj"}]``. None looks for them.
        force: also set weights that were loaded or trained before.

    Raises:
        ValueError: at setup, for a pretrained module without ``force``; at the first batch, where there is no map, or none of
            a name that was given.

    Source:
        Zhao, Schaefer, Anandkumar 2021, arXiv:2110.12661.
    """

    saves: ClassVar[str] = "steps: deep networks begin as their skips, and no seed decides how well"
    paper: ClassVar[str] = "Zhao et al. 2021, arXiv:2110.12661"
    survey: ClassVar[Survey | None] = Survey("initialisation: without random numbers (ZerO)", shen="4.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"last": Choice((True, False))}, no_maps)
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero: a step costs the same"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("LSUV", "OrthogonalInit", "TFixup"), MAPS_ARE_RIVALS),
        "ZeroProjections": "residual branches end at zero with ZerO by itself",
        "ACTPrecision": UNSEEN,
    }

    def __init__(
        self,
        *,
        last: bool = True,
        maps: Sequence[str] | None = None,
        branches: Sequence[str] | None = None,
        attention: Sequence[Mapping[str, Any]] | None = None,
        force: bool = False,
    ) -> None:
        self.last, self.branches = last, check_branches(branches, who=WHO)
        self._take(maps, attention, force)

    @override
    def initialize(self, session: Session, batch: Any, batch_idx: int) -> int | None:
        seen = self.look(session, batch, batch_idx)
        if seen is None:
            return None
        module, (graph, _, found, parameters) = session.module, seen
        ends = self._ends(module, graph) if self.last else []
        zero = {*ends, *alike_unused(module, graph, ends)}
        numbers = 0
        for name, one in found.items():
            with whole(parameters[name]) as weight:
                for matrix, put in one.split(weight):
                    new = torch.zeros(matrix.shape)
                    if name not in zero:
                        middle = tuple(size // 2 for size in matrix.shape[2:])
                        new[(slice(None), slice(None), *middle)] = zero_and_one(*matrix.shape[:2])
                    put(new.to(matrix))
            numbers += parameters[name].numel()
            for bias in biases_beside(module, name):
                parameters[bias].detach().zero_()
                numbers += parameters[bias].numel()
        ends_found = [name for name in found if name in zero]
        rank_zero_info(
            f"{WHO}: {len(found)} maps are made of zeros and ones: {listed([*found])}; zero, since they end a branch:"
            f" {listed(ends_found) or 'none'}"
        )
        return numbers

    def _ends(self, module: nn.Module, graph: Graph) -> list[str]:
        if self.branches is None:
            every = branches(graph)
            refuse_unequal(module, graph, every, who=WHO)
            return [end.weight for branch in every for end in branch.last]
        return [weight for weight, *_ in by_hand(module, self.branches, who=WHO)]

    @override
    def check_names(self, module: nn.Module) -> None:
        super().check_names(module)
        by_hand(module, self.branches or (), who=WHO)

    @override
    def summary(self) -> str:
        return f"{self._numbers} numbers began without being drawn"
