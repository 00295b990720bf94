"""What LowRankLinear and LowRankConv share: which modules they replace, and with which rank."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.naming import by_reason
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._arguments.kinds import Fraction
from lightning_eff._core.technique import Control
from lightning_eff.model.layers._low_rank.factored import Factored
from lightning_eff.model.layers._low_rank.factors import decomposition, energy_of_rank, factors, rank_of_energy
from lightning_eff.model.layers._shared.choosing import ByName

#: The fraction of the full rank where neither a rank nor an energy is given.
DEFAULT = 0.25

#: The fraction of the sum of squared singular values that is kept.
Energy = Annotated[float | None, Fraction(above=0)]


@dataclass(frozen=True)
class Place:
    """A module that two smaller ones could replace.

    Attributes:
        path: the dotted path.
        module: the plain module.
        size: the number of elements of its weight.
        by_rank: the number of elements of both factors per unit of rank.
        matrix: makes the matrix to factor, (m, n).
        full: the full rank, min(m, n).
        build: makes the pair for a rank, with weights of any value.
        named: whether the user named it.
    """

    path: str
    module: nn.Module
    size: int
    by_rank: int
    matrix: Callable[[], Tensor]
    full: int
    build: Callable[[int], Factored]
    named: bool


class LowRank(ByName, Architecture):
    """Replace modules with two factors each.

    Attributes:
        rank: the rank of each, or a fraction of its full rank.
        energy: the fraction of the squared singular values that is kept.
        names: patterns of paths; None takes every module that is found.
    """

    change_at = Change.STRUCTURE
    what: ClassVar[str]
    control = Control("the baseline for the same time, and a baseline with narrower layers and as many weights")
    rank: int | float | None
    energy: float | None
    _floor: tuple[str, int] | None = None  # an argument, and the highest value at which it would take another module
    _count = 0
    _before = 0
    _after = 0

    def _take(self, rank: float | None, energy: float | None, names: Sequence[str] | None) -> None:
        """Keep the arguments that both techniques have."""
        if rank is not None and energy is not None:
            raise ValueError(f"{type(self).__name__}({rank=}, {energy=}): both set the rank. Give one of them.")
        self.rank, self.energy = rank, energy
        self._take_names(names)

    @abstractmethod
    def _places(self, root: nn.Module) -> tuple[list[Place], dict[str, str]]:
        """The modules to factor, and why others are left, by name."""

    @override
    def change(self, surgeon: Surgeon) -> None:
        who = type(self).__name__
        places, left = self._places(surgeon.root)
        parts = {p.path: None if p.module.weight.is_meta else decomposition(p.matrix()) for p in places}  # pyright: ignore[reportCallIssue, reportArgumentType]
        ranks = {p.path: self._rank_of(p, parts[p.path]) for p in places}
        if self._session is not None:  # random weights may give each process other ranks: take those of the first
            ranks = self._session.replicas.everyone(ranks)[0]
        chosen: dict[int, Place] = {}
        for p in places:
            r = ranks[p.path]
            if r > p.full and not p.named:
                left[p.path] = f"its full rank is {p.full}, below the rank of {r}"
            elif r * p.by_rank >= p.size and not p.named:
                left[p.path] = f"two factors of rank {r} have {r * p.by_rank:,} weights, and the module has {p.size:,}"
            else:
                chosen[id(p.module)] = p
        if not chosen:
            fixes = [] if self._floor is None else [f"set {self._floor[0]}={self._floor[1]} or lower"]
            fixes += ["give a smaller rank or energy"] if places else []
            fixes.append(f"name some with {who}(names=[...])")
            fix = ", or ".join(fixes)
            raise ValueError(
                f"{who}: found no {self.what} in {type(surgeon.root).__name__} that two factors would make smaller."
                f"{by_reason(left)} {fix[0].upper()}{fix[1:]}, or remove the callback."
            )
        surgeon.leave(left)
        kept: list[float] = []

        def build(plain: nn.Module) -> nn.Module:
            p = chosen[id(plain)]
            made, found = p.build(ranks[p.path]), parts[p.path]
            if found is not None:
                u, s, vh = found
                made.begin(*factors(u, s, vh, made.rank))
                kept.append(energy_of_rank(s, made.rank))
            return made

        surgeon.swap(lambda path, m: id(m) in chosen, build, what=f"a {self.what}")
        self._count = len(chosen)
        self._before = sum(p.size for p in chosen.values())
        self._after = sum(p.by_rank * ranks[p.path] for p in chosen.values())
        found = {ranks[p.path] for p in chosen.values()}
        energies = f" The factors keep {min(kept):.3g} to {max(kept):.3g} of the squared weights." if kept else ""
        rank_zero_info(
            f"{who}: replaced {self._count} {self.what}s with factors of rank {min(found)} to {max(found)}, which have"
            f" {self._after:,} weights instead of {self._before:,}.{energies}"
        )

    def _rank_of(self, place: Place, parts: tuple[Tensor, Tensor, Tensor] | None) -> int:
        who = type(self).__name__
        if self.energy is not None:
            if parts is None:
                raise ValueError(
                    f"{who}(energy={self.energy}): {place.path} is on the meta device, so it has no singular values. Give"
                    " rank= instead."
                )
            return rank_of_energy(parts[1], self.energy)
        rank = DEFAULT if self.rank is None else self.rank
        if isinstance(rank, float):
            return max(1, round(rank * place.full))
        if rank > place.full and place.named:
            raise ValueError(
                f"{who}({rank=}): the full rank of {place.path} ({type(place.module).__name__}) is {place.full}. Give"
                f" rank={place.full} or less, or leave it out of `names`."
            )
        return rank

    # -- reports

    @override
    def report(self) -> "dict[str, float | int | Tensor]":
        return {"factored": self._count, "weights": self._after}

    @override
    def summary(self) -> str:
        if not self._count:
            return "the module already had its factors"
        return f"{self._count} {self.what}s as two factors, {self._after:,} weights instead of {self._before:,}"
