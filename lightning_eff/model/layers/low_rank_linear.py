"""LowRankLinear: linear maps as products of two thin ones, begun by a singular value decomposition (Khodak et al. 2021).

The rule is ``W x + b ~ A (B x) + b`` with ``A B`` the best product of rank r, which ``_low_rank.factors.factors`` makes of W.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import LinearMap, choose
from lightning_eff._core._architecture.naming import meets
from lightning_eff._core._stack.finding import candidates
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey
from lightning_eff._core.technique import Control
from lightning_eff.model.layers._low_rank.factored import FactoredLinear
from lightning_eff.model.layers._low_rank.technique import LowRank, Place

WHO = "LowRankLinear"


def _pointless(profile: RunProfile) -> str | None:
    return None if profile.num_matrices else "there is no hidden linear map"


class LowRankLinear(LowRank):
    """Compute linear maps as two thin ones: ``A (B x) + b`` for ``W x + b``, with r channels between.

    A product of N x r and r x K has ``r (N + K)`` weights for ``N K``, and as many fewer products a token. The factors are
    those of the map's first weights, their singular values split evenly between the two. Maps are found in the stacks of
    repeated blocks, or everywhere where there is no stack; heads and stems are left, as are tied maps, and those that two
    factors would not make smaller; what is left is said, with the reason. Name maps to factor them all the same.

    **Seldom pays**: below about 512 features a map's time is that of reading and writing its inputs and outputs, which are
    more with two maps (less than 5 % of the time of a step was saved in Composer's measurements, for more than 1 % of
    accuracy). By default maps with fewer features than that on either side are left.

    The factors are two ``nn.Linear``, ``first`` and ``second``, which optimizers and precision plugins see as such. Weight
    decay pulls at the factors, not at their product. ``lightning_eff.export`` multiplies them, and gives the plain module. With
    ``energy`` ranks go by the first weights; those of a checkpoint go by it.

    Logged: ``factored``, how many maps; ``weights``, how many theirs are.

    Args:
        rank: r, an integer >= 1 and at most the smaller side of each map that is named; or a share of that side, in (0, 1];
            None for a quarter, unless ``energy`` is given.
        energy: instead, the share of the sum of squared singular values that each map keeps, in (0, 1]. Of random weights, all
            are alike: 0.9 of them is a rank of half and more.
        names: dotted paths of maps, their last parts or patterns, such as ``["mlp.*"]``; None looks for them, ``[]`` is plain
            training.
        min_features: maps with fewer inputs or outputs are left, unless they are named; >= 1.

    Raises:
        ValueError: for other values; at setup or in ``apply``, where no map is left to act on, with the reason for each; for a
            name that means no map, with the nearest ones; for a named map whose rank is smaller, or that cannot be replaced,
            with the reason.

    Sources:
        Khodak et al. 2021, arXiv:2105.01029 (the first factors); Composer's Factorize (what it saves).
    """

    saves: ClassVar[str] = "products and weights of large maps, for some quality; seldom time below 512 features"
    paper: ClassVar[str] = "Khodak et al. 2021, arXiv:2105.01029"
    constraints: ClassVar[str] = "pays for large maps alone: two maps of few features take longer than one"
    survey: ClassVar[Survey | None] = Survey("low-rank linear maps", shen="4.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"rank": Choice((0.125, 0.25, 0.5))}, _pointless)
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds, and one of narrower layers with as many weights"
    )
    what: ClassVar[str] = "linear map"
    conflicts: ClassVar[Mapping[str, str]] = {
        "CompoundGrowth": "pairs of factors look to it like feed-forward networks, whose few channels it would tile",
        "Fixup": "it puts scalars before and behind each map, which is then no plain one that could be factored",
    }

    def __init__(
        self,
        rank: int | float | None = None,
        *,
        energy: float | None = None,
        names: Sequence[str] | None = None,
        min_features: int = 512,
    ) -> None:
        self._take(rank, energy, names, "linear maps", "mlp.*")
        if not isinstance(min_features, int) or isinstance(min_features, bool) or min_features < 1:
            raise ValueError(f"{WHO}({min_features=}): expected an integer >= 1, features on either side of a map.")
        self.min_features = min_features

    @override
    def _places(self, root: nn.Module) -> tuple[list[Place], dict[str, str]]:
        maps, left = choose(root, self.names, who=WHO)
        stacks = [f"{stack.path}." for stack in candidates(root) if stack.composite and stack.path]
        found: list[Place] = []
        small: list[int] = []
        for m in maps:
            named = self.names is not None and any(meets(m.path, name) for name in self.names)
            smaller = min(m.in_features, m.out_features)
            if not named and stacks and not m.path.startswith(tuple(stacks)):
                left[str(m)] = "it lies outside of the blocks"
            elif not named and smaller < self.min_features:
                left[str(m)] = f"it has fewer than min_features={self.min_features} on a side"
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
