"""ButterflyLinear: linear maps as two block-diagonal ones with a permutation between (Dao et al. 2019, 2022).

The rule is ``W x + b ~ Q L P R x + b`` with L and R block-diagonal and P and Q permutations, Monarch's form of a butterfly's
product, which ``_monarch.factors.project`` makes of W.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import LinearMap, choose
from lightning_eff._core._architecture.naming import by_reason, check_names, meets
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._stack.finding import candidates
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey
from lightning_eff._core.technique import Control
from lightning_eff.model.layers._monarch.factors import num_weights
from lightning_eff.model.layers._monarch.module import MonarchLinear

WHO = "ButterflyLinear"


def _pointless(profile: RunProfile) -> str | None:
    return None if profile.num_matrices else "there is no hidden linear map"


class ButterflyLinear(Architecture):
    """Compute linear maps as two block-diagonal ones with fixed permutations: ``Q L P R x + b`` for ``W x + b``.

    A map's weight is divided into ``blocks`` runs of inputs by ``blocks`` classes of outputs, of which each has every
    ``blocks``-th output, and the product of the two factors has a matrix of rank r in each of these parts. Where
    ``LowRankLinear`` has rank r in all, the product here mostly has the full rank. There are ``r blocks (K + N)`` weights for
    ``K N``, and as many fewer products a token. With ``blocks`` of the square root of the width and r of 1 these are Monarch
    matrices as the source has them, of which two make any butterfly matrix, such as a Fourier or Hadamard transform; with few
    blocks and a larger r, those of its experiments (4 blocks).

    The factors begin as those whose product is nearest to the map's first weights: the r largest singular values of each
    part. Maps are found in the stacks of repeated blocks, or everywhere where there is no stack; heads and stems are left, as
    are tied maps, those whose features the blocks do not divide, and those that would not be smaller; what is left is said,
    with the reason. Name maps to change them all the same.

    **Seldom pays**: two batches of small products and a permutation of all activations between them read and write more than
    one product does. The source's 1.8 to 2 times as fast GPT-2 was trained with kernels of its own; by torch's, below about
    512 features a map takes longer than before. By default maps with fewer features than that on either side are left.

    The factors are parameters of three dimensions, ``left`` (blocks, N / blocks, blocks r) and ``right`` (blocks, blocks r,
    K / blocks): optimizers and plugins that go by matrices see none of them. ``lightning_eff.export`` multiplies them, and
    gives the plain module.

    Logged: ``maps``, how many; ``weights``, how many theirs are.

    Args:
        blocks: an integer >= 2, blocks of each factor; it divides the inputs and the outputs of each map that is named.
        rank: r, an integer >= 1, at most the smaller side of a part of each map that is named; None for the smaller side of
            the map divided by ``blocks`` twice, at least 1, with which ``P R x`` has as many numbers as that side.
        names: dotted paths of maps, their last parts or patterns, such as ``["mlp.*"]``; None looks for them, ``[]`` is plain
            training.
        min_features: maps with fewer inputs or outputs are left, unless they are named; >= 1.

    Raises:
        ValueError: for other values; at setup or in ``apply``, where no map is left to act on, with the reason for each; for a
            name that means no map, with the nearest ones; for a named map that cannot be divided or replaced, with the reason.

    Sources:
        Dao et al. 2019, arXiv:1903.05895; Dao et al. 2022, arXiv:2204.00595 (Monarch, and the nearest factors).
    """

    saves: ClassVar[str] = (
        "products and weights of large maps, for some quality; seldom time without kernels of its own"
    )
    paper: ClassVar[str] = "Dao et al. 2022, arXiv:2204.00595; Dao et al. 2019, arXiv:1903.05895"
    constraints: ClassVar[str] = "pays for large maps alone; features that the blocks divide"
    survey: ClassVar[Survey | None] = Survey("butterfly and Monarch matrices", shen="4.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"blocks": Choice((4, 8, 16))}, _pointless)
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds, one of narrower layers with as many weights, and LowRankLinear with as many"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "LowRankLinear": "each makes two factors of the same maps; expected one of the two",
        "QKNorm": "it norms what a map with one weight puts out, and a factor is none",
        **dict.fromkeys(
            ("FP8Precision", "INT8Precision", "S2FP8Precision", "Wang2018FP8Precision"),
            "its factors are no linear maps, which are what runs in few bits",
        ),
        "LayerScale": "it has a number for each channel that a map puts out, which it cannot tell in a factor",
        "LoRA": "it puts factors beside whole maps, of which this leaves none",
        "CompoundGrowth": "feed-forward networks of its factors are none whose hidden units could be tiled",
    }
    change_at: ClassVar[Change] = Change.STRUCTURE
    _count = 0
    _before = 0
    _after = 0

    def __init__(
        self,
        blocks: int = 4,
        *,
        rank: int | None = None,
        names: Sequence[str] | None = None,
        min_features: int = 512,
    ) -> None:
        for name, value, least in (("blocks", blocks, 2), ("rank", rank, 1), ("min_features", min_features, 1)):
            if name == "rank" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{WHO}({name}={value!r}): expected an integer >= {least}.")
        self.blocks, self.rank, self.min_features = blocks, rank, min_features
        self.names = check_names(names, who=WHO, what="linear maps", example="mlp.*")

    @property
    @override
    def neutral(self) -> bool:
        return self.names == []

    # -- the change

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        maps, left = choose(root, self.names, who=WHO)
        stacks = [f"{stack.path}." for stack in candidates(root) if stack.composite and stack.path]
        chosen: dict[int, LinearMap] = {}
        small: list[int] = []  # sides of maps that are left alone for their size alone
        for m in maps:
            named = self.names is not None and any(meets(m.path, name) for name in self.names)
            reason = self._undivided(m)
            if named and reason is not None:
                raise ValueError(
                    f"{WHO}(blocks={self.blocks}, rank={self.rank}): {m} {reason}. Leave it out of the names."
                )
            if not named and stacks and not m.path.startswith(tuple(stacks)):
                reason = "lies outside of the blocks"
            elif not named and min(m.in_features, m.out_features) < self.min_features:
                small += [] if reason else [min(m.in_features, m.out_features)]
                reason = f"has fewer than min_features={self.min_features} on a side"
            elif not named and reason is None and self._size(m) >= m.in_features * m.out_features:
                reason = f"has {m.in_features * m.out_features:,} weights, and two factors have {self._size(m):,}"
            if reason is None:
                chosen[id(m.module)] = m
            else:
                left[str(m)] = f"it {reason}"
        if not chosen:
            mend = f"Lower min_features= to {max(small)} or less" if small else "Give other blocks"
            raise ValueError(
                f"{WHO}: {type(root).__name__} has no linear map to make factors of (among {len(maps)} that could be)."
                f"{by_reason(left)} Expected some of features that {self.blocks} divides. {mend}, or name some,"
                f" {WHO}(names=[...]); or take the technique out."
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

        surgeon.swap(lambda path, m: id(m) in chosen, build, what="a linear map")
        self._count = len(chosen)
        self._before = sum(m.in_features * m.out_features for m in chosen.values())
        self._after = sum(map(self._size, chosen.values()))
        squares = f"{kept / before:.3g} of their squares" if before else "values that are not there yet"
        rank_zero_info(
            f"{WHO}: {self._count} linear maps in two factors of {self.blocks} blocks, which keep {squares}:"
            f" {self._after:,} weights for {self._before:,}."
        )

    def _undivided(self, m: LinearMap) -> str | None:
        """Why the blocks do not suit a map, or None."""
        odd = [size for size in (m.in_features, m.out_features) if size % self.blocks]
        if odd:
            return f"has {odd[0]} features, which {self.blocks} blocks do not divide"
        most = min(m.in_features, m.out_features) // self.blocks
        return f"has parts of rank {most} at most, which is below {self.rank}" if (self.rank or 1) > most else None

    def _rank(self, m: LinearMap) -> int:
        return self.rank or max(1, min(m.in_features, m.out_features) // self.blocks**2)

    def _size(self, m: LinearMap) -> int:
        return num_weights(m.out_features, m.in_features, (self.blocks, self.blocks), self._rank(m))

    # -- what is told

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"maps": self._count, "weights": self._after}

    @override
    def summary(self) -> str:
        if not self._count:
            return "the module had its factors already"
        return f"{self._count} linear maps in two factors, {self._after:,} weights for {self._before:,}"
