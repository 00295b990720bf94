"""LowRankLinear: replace linear layers with two thin ones, initialised by a singular value decomposition (Khodak et al. 2021).

The rule is ``W x + b ~ A (B x) + b`` with ``A B`` the best product of rank r, which ``_low_rank.factors.factors`` computes.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import LinearMap, choose
from lightning_eff._core._arguments.kinds import Alias, Count
from lightning_eff._core._stack.finding import candidates
from lightning_eff._core.search_space import Choice, SearchSpace, needs_matrices
from lightning_eff.model.layers._low_rank.factored import FactoredLinear
from lightning_eff.model.layers._low_rank.technique import Energy, LowRank, Place
from lightning_eff.model.layers._shared.arguments import COUNT_OR_FRACTION, Paths
from lightning_eff.model.layers._shared.choosing import is_named

WHO = "LowRankLinear"


class LowRankLinear(LowRank):
    """Replace large linear layers with two thin ones: ``A (B x) + b`` instead of ``W x + b``.

    A has shape (N, r) and B has shape (r, K), so a layer has ``r (N + K)`` weights instead of ``N K``, and needs as many
    fewer products per token. The factors start as the best approximation of rank r of the layer's initial weight, with its
    singular values split evenly between the two. The technique looks for layers in the stacks of repeated blocks, or in the
    whole module if it has no stack. It skips heads, stems, tied layers, and layers that two factors would not make smaller,
    and logs them with the reason. Name a layer to factor it anyway.

    Use it on layers of at least 512 features. **It seldom saves time**: smaller layers spend their time on reading and
    writing activations, and two layers read and write more than one. Composer measured less than 5 % of the step time saved,
    for a loss of more than 1 % in accuracy. Layers with fewer than ``min_features`` features are therefore skipped by
    default.

    The factors are two ``nn.Linear``, ``first`` and ``second``, so optimizers and precision plugins handle them as usual.
    Weight decay acts on the factors, not on their product. ``lightning_eff.export`` multiplies them and returns the plain
    module. With ``energy``, the initial weights decide the ranks; a checkpoint brings its own ranks. It logs ``factored``,
    the number of layers, and ``weights``, the number of their weights.

    Args:
        rank: the rank of each layer. A fraction refers to its smaller side: 1 is a rank of one, and 1.0 is the
            full rank. None is a quarter, unless ``energy`` is given. Also accepted as ``latent_features``.
        energy: the fraction of the sum of squared singular values that each layer keeps, instead of ``rank``. Random weights
            have similar singular values, so 0.9 keeps more than half of the full rank.
        names: dotted paths of the linear layers to replace, their last parts, or patterns, such as ``["mlp.*"]``. None looks
            for layers, ``[]`` is plain training.
        min_features: the number of inputs and outputs below which a layer is skipped, unless it is named.

    Raises:
        ValueError: for a value out of range, or if both ``rank`` and ``energy`` are given. At setup or in ``apply``, if there
            is no layer to replace, a name matches none, or a named layer cannot be replaced.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[LowRankLinear(0.25, names=["mlp.*"])])

    References:
        Khodak et al. 2021, "Initialization and Regularization of Factorized Neural Layers", arXiv:2105.01029.
        MosaicML 2022, Composer's method card "Factorize" (measured gain).
    """

    saves = "products and weights of large linear layers, at some cost in quality; seldom time"
    paper = "Khodak et al. 2021, arXiv:2105.01029"
    constraints = "pays only for large linear layers; below 512 features two layers take longer than one"
    search_space = SearchSpace({"rank": Choice((0.125, 0.25, 0.5))}, needs_matrices)
    what: ClassVar[str] = "linear layer"
    conflicts: ClassVar[Mapping[str, str]] = {
        "CompoundGrowth": "it would take a pair of factors for a feed-forward network and tile its few channels",
        "Fixup": "it adds scalars before and after each linear layer, and such a layer cannot be factored",
    }

    def __init__(
        self,
        rank: Annotated[int | float | None, COUNT_OR_FRACTION, Alias("latent_features")] = None,
        *,
        energy: Energy = None,
        names: Paths = None,
        min_features: Annotated[int, Count()] = 512,
    ) -> None:
        self._take(rank, energy, names)
        self.min_features = min_features

    @override
    def _places(self, root: nn.Module) -> tuple[list[Place], dict[str, str]]:
        maps, left = choose(root, self.names, who=WHO)
        stacks = [f"{stack.path}." for stack in candidates(root) if stack.composite and stack.path]
        found: list[Place] = []
        small: list[int] = []
        for m in maps:
            named = is_named(m.path, self.names)
            smaller = min(m.in_features, m.out_features)
            if not named and stacks and not m.path.startswith(tuple(stacks)):
                left[str(m)] = "it is outside the blocks"
            elif not named and smaller < self.min_features:
                left[str(m)] = f"it has fewer features than min_features={self.min_features}"
                small.append(smaller)
            else:
                found.append(_place(m, named))
        self._floor = ("min_features", max(small)) if small else None
        return found, left


def _place(m: LinearMap, named: bool) -> Place:
    k, n = m.in_features, m.out_features

    def matrix() -> Tensor:
        weight = m.module.weight
        assert isinstance(weight, Tensor)
        return weight.t() if m.transposed else weight

    def build(rank: int) -> FactoredLinear:
        return FactoredLinear(k, n, rank, transposed=m.transposed, plain=m.module)

    return Place(m.path, m.module, k * n, k + n, matrix, min(k, n), build, named)
