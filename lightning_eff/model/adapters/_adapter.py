"""What adapters share: what trains and what is frozen, what checkpoints hold, and what is told."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.naming import check_met, meets
from lightning_eff._core._architecture.record import swapped
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._needs.needs import Part, Reasons
from lightning_eff._core.session import Session
from lightning_eff.model.adapters._partial import Partial
from lightning_eff.model.adapters._pieces import check_numbers, check_strategy

#: Why two of them do not stand together.
RIVALS = "each freezes what the other trains; give one of them what it shall train beside by also=[...]"


#: What begins with weights of zero, which would stay so.
_ZERO = "it begins with weights of zero, which are frozen here and would stay so"
DEAD = {"ZeroProjections": _ZERO, "ZerO": _ZERO, "Fixup": _ZERO}


class Adapter(Architecture):
    """A technique that trains few parameters, and freezes all others.

    What other techniques put into the module trains too, since its first values are no trained ones.

    Attributes:
        save: what checkpoints hold.
        also: patterns of parameters, or of modules, that train beside.
    """

    change_at: ClassVar[Change] = Change.ADAPT
    refuses: ClassVar[Reasons] = {
        **Architecture.refuses,
        Part.FLAT: "the technique's own parameters are not told from frozen ones there",
    }
    _partial: Partial | None = None
    _trained = 0
    _frozen = 0

    def _take(self, save: str, also: Sequence[str]) -> None:
        """Check and keep the arguments that all have."""
        who = type(self).__name__
        if save not in ("adapter", "all"):
            raise ValueError(
                f"{who}({save=}): expected 'adapter', for checkpoints of what trains alone, or 'all', for whole ones."
            )
        if isinstance(also, str) or not isinstance(also, Sequence) or not all(isinstance(a, str) and a for a in also):
            raise ValueError(
                f"{who}({also=}): expected a list of dotted paths of parameters or modules that train beside, their last parts"
                " or patterns, such as ['head']."
            )
        self.save: Literal["adapter", "all"] = save
        self.also = list(also)

    def begin(self, root: nn.Module) -> set[int]:
        """The ids of parameters that are to train beside, in a module to which the adapter was not applied yet.

        Raises:
            ValueError: for a pattern of ``also`` that means no parameter.
        """
        named = dict(root.named_parameters(remove_duplicate=False))
        paths = [*named, *(path for path, m in root.named_modules() if path and any(True for _ in m.parameters()))]
        who = type(self).__name__
        if self.also:
            check_met(self.also, paths, who=who, what="parameters and modules", root=type(root).__name__)
        found = {id(p) for name, p in named.items() if any(meets(at, one) for one in self.also for at in _above(name))}
        for _, m, swap in swapped(root):
            found |= {id(p) for name, p in m.named_parameters() if name not in swap.tensors and p.requires_grad}
        return found

    def freeze(self, surgeon: Surgeon, trained: set[int], what: str) -> None:
        """Freeze all but ``trained``, by id, and tell what is left.

        Args:
            surgeon: of the change.
            trained: see above.
            what: was done, for the line that is printed.

        Raises:
            ValueError: if nothing is left to train.
        """
        who, root = type(self).__name__, surgeon.root
        numbers = sum(p.numel() for p in root.parameters() if p.requires_grad)
        surgeon.freeze(lambda name, p: id(p) not in trained)
        self._trained = sum(p.numel() for p in root.parameters() if p.requires_grad)
        self._frozen = numbers - self._trained
        if not self._trained:
            raise ValueError(
                f"{who}: nothing of {type(root).__name__} is left to train: what it would train is frozen (requires_grad="
                "False) by the module itself. Expected parameters that take gradients. Let them, or name others in also=."
            )
        share = 100 * self._trained / max(1, self._trained + self._frozen)
        rank_zero_info(f"{who}: {what}; {self._trained:,} numbers train, which is {share:.3g} %.")

    # -- in a run

    @override
    def check(self, session: Session) -> None:
        super().check(session)
        check_strategy(session, who=type(self).__name__, save=self.save)
        for other in session.techniques:
            if isinstance(other, Adapter) and not other.neutral and other.save != self.save:
                raise ValueError(
                    f"{type(self).__name__}(save={self.save!r}) beside {type(other).__name__}(save={other.save!r}): a"
                    " checkpoint holds one or the other; expected the same of both."
                )

    @override
    def on_model(self, session: Session) -> None:
        check_numbers(session, who=type(self).__name__)

    @override
    def on_open(self, session: Session) -> None:
        super().on_open(session)
        adapters = [t for t in session.techniques if isinstance(t, Adapter) and not t.neutral]
        if self.save == "adapter" and adapters[0] is self:
            self._partial = Partial(session, self.state_key, type(self).__name__)
        else:
            self._partial = None

    @override
    def on_optimizers(self, session: Session) -> None:
        if self._partial is not None:
            self._partial.begin()

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._partial is not None:  # after the run too, when nothing is patched any more
            checkpoint["state_dict"] = self._partial.without(checkpoint["state_dict"])

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._partial is None else {"base": self._partial.base}

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "_partial"}

    # -- what is told

    @override
    def report(self) -> "dict[str, float | int | Tensor]":
        return {"trained": self._trained, "frozen": self._frozen}

    @override
    def summary(self) -> str:
        if not self._trained:
            return "the module was adapted already"
        return f"{self._trained:,} numbers train beside {self._frozen:,} that are frozen"


def _above(name: str) -> Iterator[str]:
    """A parameter's name, and the paths of the modules that it lies in."""
    parts = name.split(".")
    yield from (".".join(parts[:i]) for i in range(len(parts), 0, -1))


def folded(paths: Sequence[str], most: int = 8) -> str:
    """Paths with their numbers left out, each once: ``blocks.*.qkv (4), ...``."""
    counts: dict[str, int] = {}
    for path in paths:
        key = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", path)
        counts[key] = counts.get(key, 0) + 1
    told = [name if count == 1 else f"{name} ({count})" for name, count in counts.items()]
    return ", ".join(told[:most]) + (f" and {len(told) - most} more" if len(told) > most else "")
