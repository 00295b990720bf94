"""Initialization with zeros and ones: partial identities, Hadamard matrices, and branches that start at zero (Zhao et al.
2021).
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._branches.ends import alike_unused, biases_beside, refuse_unequal
from lightning_eff._core._branches.finding import branches
from lightning_eff._core._branches.graph import Graph
from lightning_eff._core.search_space import Choice, SearchSpace, needs_matrices
from lightning_eff._core.session import Session
from lightning_eff.model.initialization._divided.writing import whole
from lightning_eff.model.initialization._given.attention import Attentions
from lightning_eff.model.initialization._given.names import Ends, by_hand
from lightning_eff.model.initialization._maps import SAME_WEIGHTS, UNSEEN, OfMaps, Patterns, listed

WHO = "ZerO"


def hadamard(p: int) -> Tensor:
    """Return ``H_1 = [1]``, ``H_2k = [[H_k, H_k], [H_k, -H_k]]``: shape (p, p), for p a power of two."""
    h = torch.ones(1, 1)
    while len(h) < p:
        h = torch.cat([torch.cat([h, h], dim=1), torch.cat([h, -h], dim=1)])
    return h


def zero_and_one(m: int, n: int) -> Tensor:
    """Return the matrix from n inputs to m outputs: ``I`` (m, n) if m <= n, else ``I H / sqrt(p) I`` with
    ``p = 2^ceil(log2 m)``.

    The columns of the second are orthonormal if m is p. No number is drawn.
    """
    if m <= n:
        return torch.eye(m, n)
    p = 2 ** math.ceil(math.log2(m))
    return (hadamard(p) / math.sqrt(p))[:m, :n].clone()


class ZerO(OfMaps):
    """Start without random numbers: layers are partial identities or Hadamard matrices, and residual branches add nothing.

    At the first batch of a fresh fit, one forward pass finds linear layers, convolutions and sums ``x + f(x)``. A layer
    with no more outputs than inputs passes its first inputs on unchanged. A layer with more outputs spreads its inputs
    by a Hadamard matrix; otherwise the extra outputs would be zero and stay alike in training. A convolution does the
    same at the centre of its kernel. The last layer of each residual branch is zero, and so are the biases of all these
    layers. Queries, keys and values that one layer computes are separate matrices, and so are experts and the groups of
    a convolution.

    Use it for deep residual networks whose quality depends on the seed. Embeddings, heads tied to one, norms and
    position tables stay unchanged; those that are drawn still differ between seeds and make tokens differ. It costs one
    forward pass. A log line lists what was set.

    Logged: ``numbers``, how many numbers were set.

    Args:
        last: whether the last layers of branches start at zero, as in the paper.
        maps: the names or patterns of the weights to set. None sets all, and ``[]`` is plain training.
        branches: the names or patterns of the weights in which residual branches end, or of their modules, such as
            ``["blocks.*.proj"]``. None finds them.
        attention: the weights of each kind of attention, where queries, keys and values of one layer are not
            recognised: names or patterns by role, with + between roles that one layer computes in equal parts, such as
            ``[{"query+key+value": "blocks.*.qkv", "output": "blocks.*.proj"}]``. None finds them.
        force: whether to also set weights that were loaded or trained before.

    Raises:
        ValueError: for a value of the wrong kind. At setup, for a pretrained module without ``force``. At the first
            batch, if there is no linear layer or convolution, or none that matches a given name.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[ZerO()])

    References:
        Zhao, Schaefer, Anandkumar 2021, "ZerO Initialization: Initializing Neural Networks with only Zeros and Ones",
        arXiv:2110.12661.
    """

    saves = "steps: deep residual networks start as identities, and the result depends less on the seed"
    paper = "Zhao et al. 2021, arXiv:2110.12661"
    search_space = SearchSpace({"last": Choice((True, False))}, needs_matrices)
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("LSUV", "OrthogonalInit", "TFixup"), SAME_WEIGHTS),
        "ZeroProjections": "ZerO already starts the last layers of residual branches at zero",
        "ACTPrecision": UNSEEN,
    }

    def __init__(
        self,
        *,
        last: bool = True,
        maps: Patterns | None = None,
        branches: Ends | None = None,
        attention: Attentions | None = None,
        force: bool = False,
    ) -> None:
        self.last, self.branches = last, branches
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
            f"{WHO}: set {len(found)} weights to identities and Hadamard matrices: {listed([*found])}; set to zero at the end"
            f" of a branch: {listed(ends_found) or 'none'}"
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
        return f"set {self._numbers:,} numbers without drawing any"
