"""What LoRA and VeRA share: peft's layers around linear layers, and what trains of them."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import LinearMap
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._stack.walking import parameters_of
from lightning_eff.model.adapters._adapter import Adapter, folded
from lightning_eff.model.adapters._optional import imported
from lightning_eff.model.adapters._peft.places import places
from lightning_eff.model.adapters._peft.reading import read


class Maker(Protocol):
    """Puts one of peft's layers around a linear layer."""

    def __call__(self, base: nn.Module, *, transposed: bool, read: bool) -> nn.Module: ...


class OnLinearLayers(Adapter):
    """Put one of peft's layers around each linear layer.

    Class attributes:
        trains: the name of the trained weights, for the log line.
        bounded: whether a layer's smaller side bounds the rank.

    Attributes:
        rank: the rank of the factors.
        starts_alone: whether the new weights have initial values without those of the linear layer.
    """

    trains: ClassVar[str]
    bounded: ClassVar[bool]
    constraints = "fine-tuning; needs peft"
    rank: int
    starts_alone: bool = True
    _maps = 0

    @abstractmethod
    def maker(self, maps: Sequence[LinearMap]) -> Maker:
        """How the layers are made, given all linear layers that get one."""

    @override
    def change(self, surgeon: Surgeon) -> None:
        who, root = type(self).__name__, surgeon.root
        imported("peft", extra="peft", who=who)
        maps, left = places(root, self.names, rank=self.rank, bounded=self.bounded, who=who)
        make = self.maker(maps)
        trained = self.begin(root)
        chosen = {id(m.module): m for m in maps}
        bases = {id(p) for m in maps for p in parameters_of(m.module)}
        made: list[nn.Module] = []
        in_readers = read(root)

        def build(plain: nn.Module) -> nn.Module:
            made.append(new := make(plain, transposed=chosen[id(plain)].transposed, read=id(plain) in in_readers))
            return new

        surgeon.leave(left)
        surgeon.swap(lambda path, m: id(m) in chosen, build, what="a linear layer", numbers=self.starts_alone)
        bases |= {id(p) for m in made for p in parameters_of(m.get_submodule("base_layer"))}
        self._maps = len(made)
        where = folded([m.path for m in maps])
        self.freeze(
            surgeon,
            (trained - bases) | {id(p) for m in made for p in parameters_of(m) if id(p) not in bases},
            f"{self.trains} of rank {self.rank} on {len(maps)} linear layers: {where}",
        )

    @override
    def report(self) -> "dict[str, float | int | Tensor]":
        return {**super().report(), "maps": self._maps}
