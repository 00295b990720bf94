"""What LowRankLinear and LowRankConv share: which modules become two, and of which rank."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.naming import by_reason, check_names
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff.model.layers._low_rank.factored import Factored
from lightning_eff.model.layers._low_rank.factors import decomposition, energy_of_rank, factors, rank_of_energy

#: The share of the full rank that is kept where nothing is said.
SHARE = 0.25


@dataclass(frozen=True)
class Place:
    """A module that two could stand in the place of.

    Attributes:
        path: dotted.
        module: the plain module.
        size: elements of its weight.
        by_rank: elements of the two factors' weights, for each unit of rank.
        matrix: makes the matrix whose factors they are, (m, n).
        full: its rank at most, min(m, n).
        build: makes the pair, given the rank, with weights of any value.
        named: asked for by name.
    """

    path: str
    module: nn.Module
    size: int
    by_rank: int
    matrix: Callable[[], Tensor]
    full: int
    build: Callable[[int], Factored]
    named: bool


class LowRank(Architecture):
    """Modules in two factors.

    Attributes:
        rank: of each, or its share of the full one.
        energy: the share of squared singular values that is kept.
        names: patterns of paths; None takes all that are found.
    """

    change_at: ClassVar[Change] = Change.STRUCTURE
    what: ClassVar[str]
    rank: int | float | None
    energy: float | None
    names: list[str] | None
    _floor: tuple[str, int] | None = None  # an argument, and from which value down it takes some that it left
    _count = 0
    _before = 0
    _after = 0

    def _take(
        self, rank: float | None, energy: float | None, names: Sequence[str] | None, what: str, example: str
    ) -> None:
        """Check and keep the arguments that both have."""
        who = type(self).__name__
        whole = isinstance(rank, int) and not isinstance(rank, bool)
        if rank is not None and not ((whole and rank >= 1) or (isinstance(rank, float) and 0.0 < rank <= 1.0)):
            raise ValueError(
                f"{who}({rank=}): expected an integer >= 1, or a share of the full rank in (0, 1] such as {SHARE}."
            )
        share = isinstance(energy, int | float) and not isinstance(energy, bool) and 0.0 < energy <= 1.0
        if energy is not None and not share:
            raise ValueError(f"{who}({energy=}): expected a share of squared singular values in (0, 1], such as 0.9.")
        if rank is not None and energy is not None:
            raise ValueError(f"{who}({rank=}, {energy=}): each says what the rank is; expected one of them.")
        self.rank, self.energy = rank, energy
        self.names = check_names(names, who=who, what=what, example=example)

    @property
    @override
    def neutral(self) -> bool:
        return self.names == []

    @abstractmethod
    def _places(self, root: nn.Module) -> tuple[list[Place], dict[str, str]]:
        """What could be acted on, and reasons by the names of what is left."""

    @override
    def change(self, surgeon: Surgeon) -> None:
        who = type(self).__name__
        places, left = self._places(surgeon.root)
        parts = {p.path: None if p.module.weight.is_meta else decomposition(p.matrix()) for p in places}  # pyright: ignore[reportCallIssue, reportArgumentType]
        ranks = {p.path: self._rank_of(p, parts[p.path]) for p in places}
        if self._session is not None:  # ranks that go by random weights are those of the first process
            ranks = self._session.replicas.everyone(ranks)[0]
        chosen: dict[int, Place] = {}
        for p in places:
            r = ranks[p.path]
            if r > p.full and not p.named:
                left[p.path] = f"its rank is {p.full} at most, which is below {r}"
            elif r * p.by_rank >= p.size and not p.named:
                left[p.path] = f"two of rank {r} have {r * p.by_rank:,} weights, and the one has {p.size:,}"
            else:
                chosen[id(p.module)] = p
        if not chosen:
            mends = ["give a smaller rank or energy"] if places else []
            if self._floor is not None:
                mends.insert(0, f"lower {self._floor[0]}= to {self._floor[1]} or less")
            mends.append(f"name some, {who}(names=[...])")
            mends[0] = mends[0][0].upper() + mends[0][1:]
            raise ValueError(
                f"{who}: {type(surgeon.root).__name__} has no {self.what} to factor (among {len(places)} that could be)."
                f"{by_reason(left)} Expected some that a lower rank makes smaller. {', or '.join(mends)}; or take"
                " the technique out."
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
        energies = f"{min(kept):.3g} to {max(kept):.3g} of their squares" if kept else "values that are not there yet"
        rank_zero_info(
            f"{who}: {self._count} {self.what}s in two factors of rank {min(found)} to {max(found)}, which keep {energies}:"
            f" {self._after:,} weights for {self._before:,}."
        )

    def _rank_of(self, place: Place, parts: tuple[Tensor, Tensor, Tensor] | None) -> int:
        who = type(self).__name__
        if self.energy is not None:
            if parts is None:
                raise ValueError(
                    f"{who}(energy={self.energy}): {place.path} lies nowhere (meta device), so its singular values are not"
                    " known; expected weights, or rank= instead."
                )
            return rank_of_energy(parts[1], self.energy)
        rank = SHARE if self.rank is None else self.rank
        if isinstance(rank, float):
            return max(1, round(rank * place.full))
        if rank > place.full and place.named:
            raise ValueError(
                f"{who}({rank=}): {place.path} ({type(place.module).__name__}) has rank {place.full} at most; expected no more."
                f" Give rank={place.full}, or leave it out of the names."
            )
        return rank

    # -- what is told

    @override
    def report(self) -> "dict[str, float | int | Tensor]":
        return {"factored": self._count, "weights": self._after}

    @override
    def summary(self) -> str:
        if not self._count:
            return "the module had its factors already"
        return f"{self._count} {self.what}s in two factors, {self._after:,} weights for {self._before:,}"
