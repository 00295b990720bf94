"""The base class of techniques that put another attention, with its own parameters, into modules that attend."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._attention.calls import Call
from lightning_eff._core._attention.inside import Inside, Place, places
from lightning_eff._core._needs.needs import Need, Part, Reasons


class InsideAttention(Architecture):
    """A technique that puts another attention, with its own parameters, into every module that attends."""

    change_at = Change.ADAPT
    needs: ClassVar[Need] = Need.WHOLE
    refuses: ClassVar[Reasons] = {**Architecture.refuses, Part.PIPELINE: ""}
    _replaced = 0  # modules

    def unfit(self, call: Call) -> str | None:
        """Return why a call cannot be replaced, or None."""
        return None

    def check_places(self, found: "Mapping[str, Place]") -> None:
        """Raise ``ValueError`` if the modules that attend cannot be replaced with these settings."""

    @abstractmethod
    def build(self, plain: nn.Module, place: "Place") -> Inside:
        """Return the module that takes the place of ``plain``."""

    @override
    def change(self, surgeon: Surgeon) -> None:
        found = places(surgeon, who=type(self).__name__, unfit=self.unfit)
        self.check_places(found)
        of = next(iter(found.values())).of
        rank_zero_info(f"{type(self).__name__}: replaced {len(found)} attention modules, found by {of}.")
        by_id = {id(surgeon.root.get_submodule(path)): place for path, place in found.items()}

        def build(plain: nn.Module) -> nn.Module:
            return self.build(plain, by_id[id(plain)])

        surgeon.swap(lambda path, m: path in found, build, what="a module that attends")
        self._replaced = len(found)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"attentions": self._replaced}
