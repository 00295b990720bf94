"""ButterflyLinear: replace linear layers with two block-diagonal ones and permutations (Dao et al. 2019, 2022).

The rule is ``W x + b ~ Q L P R x + b`` with L and R block-diagonal and P and Q permutations. This is Monarch's form of a
butterfly product; ``_monarch.factors.project`` computes it from W.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import LinearMap, choose
from lightning_eff._core._architecture.naming import by_reason
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._arguments.kinds import Count
from lightning_eff._core._stack.finding import candidates
from lightning_eff._core.search_space import Choice, SearchSpace, needs_matrices
from lightning_eff._core.technique import Control
from lightning_eff.model.layers._monarch.factors import num_weights
from lightning_eff.model.layers._monarch.module import MonarchLinear
from lightning_eff.model.layers._shared.arguments import Paths
from lightning_eff.model.layers._shared.choosing import ByName, is_named

WHO = "ButterflyLinear"


class ButterflyLinear(ByName, Architecture):
    """Replace large linear layers with two block-diagonal ones: ``Q L P R x + b`` instead of ``W x + b``.

    P and Q are fixed permutations. The weight (N, K) is divided into ``blocks`` runs of inputs times ``blocks`` classes of
    outputs; a class holds every ``blocks``-th output. The product of the two factors has a matrix of rank r in each of these
    parts. ``LowRankLinear`` has rank r in total, whereas this product usually has full rank. It has ``r blocks (K + N)``
    weights instead of ``K N``, and needs as many fewer products per token. ``blocks`` equal to the square root of the width
    with ``rank=1`` gives the Monarch matrices of the paper's theory; two of them make any butterfly matrix, such as a Fourier
    or Hadamard transform. Its experiments use 4 blocks and a larger rank.

    The factors start as the best approximation of the layer's initial weight: the r largest singular values of each part. The
    technique looks for layers in the stacks of repeated blocks, or in the whole module if it has no stack. It skips heads,
    stems, tied layers, layers whose features ``blocks`` does not divide, and layers that would not become smaller, and logs
    them with the reason. Name a layer to replace it anyway.

    Use it on layers of at least 512 features. **It seldom saves time**: two batches of small products and a permutation of
    all activations move more memory than one product. The paper trained GPT-2 1.8 to 2 times as fast with custom kernels.
    With torch's kernels, layers below about 512 features become slower, so they are skipped by default.

    The factors have three dimensions: ``left`` (blocks, N / blocks, blocks r) and ``right`` (blocks, blocks r, K / blocks).
    Optimizers and plugins that act on matrices skip them. ``lightning_eff.export`` multiplies them and returns the plain
    module. It logs ``maps``, the number of layers, and ``weights``, the number of their weights.

    Args:
        blocks: the number of blocks in each factor. It must divide the inputs and outputs of each named layer.
        rank: the rank r of each part. It is at most the smaller side of a part. None is the layer's smaller side divided by
            ``blocks`` squared, or 1 if that is larger; ``P R x`` then has as many numbers as the smaller side.
        names: dotted paths of the linear layers to replace, their last parts, or patterns, such as ``["mlp.*"]``. None looks
            for layers, ``[]`` is plain training.
        min_features: the number of inputs and outputs below which a layer is skipped, unless it is named.

    Raises:
        ValueError: for a value out of range. At setup or in ``apply``, if there is no layer to replace, a name matches none,
            or a named layer cannot be divided or replaced.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[ButterflyLinear(4, names=["mlp.*"])])

    References:
        Dao et al. 2022, "Monarch: Expressive Structured Matrices for Efficient and Accurate Training", arXiv:2204.00595.
        Dao et al. 2019, "Learning Fast Algorithms for Linear Transforms Using Butterfly Factorizations", arXiv:1903.05895.
    """

    saves = "products and weights of large linear layers, at some cost in quality; seldom time without custom kernels"
    paper = "Dao et al. 2022, arXiv:2204.00595; Dao et al. 2019, arXiv:1903.05895"
    constraints = "pays only for large linear layers; the number of blocks must divide their features"
    search_space = SearchSpace({"blocks": Choice((4, 8, 16))}, needs_matrices)
    control = Control(
        "the baseline for the same time, and with as many weights a baseline with narrower layers and LowRankLinear"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "LowRankLinear": "both factor the same linear layers",
        "QKNorm": "it normalises the output of a layer with one weight, and a factored layer has two",
        **dict.fromkeys(
            ("FP8Precision", "INT8Precision", "S2FP8Precision", "Wang2018FP8Precision"),
            "the plugin runs linear layers in low precision, and the factors are not linear layers",
        ),
        "LayerScale": "it needs the output channels of linear layers, which it cannot read from a factor",
        "LoRA": "it adds factors to linear layers, and this replaces all of them",
        "CompoundGrowth": "it cannot tile the hidden units of feed-forward networks made of factors",
    }
    change_at = Change.STRUCTURE
    _count = 0
    _before = 0
    _after = 0

    def __init__(
        self,
        blocks: Annotated[int, Count(at_least=2)] = 4,
        *,
        rank: Annotated[int | None, Count()] = None,
        names: Paths = None,
        min_features: Annotated[int, Count()] = 512,
    ) -> None:
        self.blocks, self.rank, self.min_features = blocks, rank, min_features
        self._take_names(names)

    # -- the change

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        maps, left = choose(root, self.names, who=WHO)
        stacks = [f"{stack.path}." for stack in candidates(root) if stack.composite and stack.path]
        chosen: dict[int, LinearMap] = {}
        small: list[int] = []  # sides of layers that are left only because they are small
        for m in maps:
            named = is_named(m.path, self.names)
            reason = self._undivided(m)
            if named and reason is not None:
                raise ValueError(
                    f"{WHO}(blocks={self.blocks}, rank={self.rank}): {m} {reason}. Leave it out of `names`."
                )
            if not named and stacks and not m.path.startswith(tuple(stacks)):
                reason = "is outside the blocks"
            elif not named and min(m.in_features, m.out_features) < self.min_features:
                small += [] if reason else [min(m.in_features, m.out_features)]
                reason = f"has fewer features than min_features={self.min_features}"
            elif not named and reason is None and self._size(m) >= m.in_features * m.out_features:
                reason = f"has {m.in_features * m.out_features:,} weights, and two factors would have {self._size(m):,}"
            if reason is None:
                chosen[id(m.module)] = m
            else:
                left[str(m)] = f"it {reason}"
        if not chosen:
            fix = f"Set min_features={max(small)} or lower" if small else "Give other blocks"
            raise ValueError(
                f"{WHO}(blocks={self.blocks}): found no linear layer in {type(root).__name__} to replace.{by_reason(left)}"
                f" {fix}, name some with {WHO}(names=[...]), or remove the callback."
            )
        surgeon.leave(left)
        kept, before = 0.0, 0.0

        def build(plain: nn.Module) -> nn.Module:
            nonlocal kept, before
            m = chosen[id(plain)]
            weight, bias = plain.weight, plain.bias
            assert isinstance(weight, Tensor)
            made = MonarchLinear(
                m.in_features,
                m.out_features,
                (self.blocks, self.blocks),
                self._rank(m),
                transposed=m.transposed,
                bias=bias if isinstance(bias, nn.Parameter) else None,
            )
            if not weight.is_meta:
                made.begin(weight.t() if m.transposed else weight)
                kept += float(made.weight.detach().double().square().sum())
                before += float(weight.detach().double().square().sum())
            return made

        surgeon.swap(lambda path, m: id(m) in chosen, build, what="a linear layer")
        self._count = len(chosen)
        self._before = sum(m.in_features * m.out_features for m in chosen.values())
        self._after = sum(map(self._size, chosen.values()))
        squares = f" The factors keep {kept / before:.3g} of the squared weights." if before else ""
        rank_zero_info(
            f"{WHO}: replaced {self._count} linear layers with factors of {self.blocks} blocks, which have"
            f" {self._after:,} weights instead of {self._before:,}.{squares}"
        )

    def _undivided(self, m: LinearMap) -> str | None:
        """Why the blocks do not suit a layer, or None."""
        odd = [size for size in (m.in_features, m.out_features) if size % self.blocks]
        if odd:
            return f"has {odd[0]} features, which {self.blocks} blocks do not divide"
        most = min(m.in_features, m.out_features) // self.blocks
        return f"has parts of rank {most} at most, below rank={self.rank}" if (self.rank or 1) > most else None

    def _rank(self, m: LinearMap) -> int:
        return self.rank or max(1, min(m.in_features, m.out_features) // self.blocks**2)

    def _size(self, m: LinearMap) -> int:
        return num_weights(m.out_features, m.in_features, (self.blocks, self.blocks), self._rank(m))

    # -- reports

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"maps": self._count, "weights": self._after}

    @override
    def summary(self) -> str:
        if not self._count:
            return "the module already had its factors"
        return f"{self._count} linear layers as two factors, {self._after:,} weights instead of {self._before:,}"
