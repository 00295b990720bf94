"""The base of adapters: what trains and what is frozen, what checkpoints hold, and reports."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.naming import check_met, meets
from lightning_eff._core._architecture.record import swapped
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._needs.needs import Part, Reasons
from lightning_eff._core._stack.walking import parameters_by_name, parameters_of
from lightning_eff._core.search_space import RunProfile
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.adapters._arguments import Save
from lightning_eff.model.adapters._partial import Partial
from lightning_eff.model.adapters._pieces import check_numbers, check_strategy

#: For ``conflicts``: why two adapters cannot train together.
RIVALS = "each freezes what the other trains; use one, and name other weights to train in also=[...]"
_ZERO = "its initial weights of zero would be frozen"
#: For ``conflicts``: techniques that start with weights of zero.
DEAD = {"ZeroProjections": _ZERO, "ZerO": _ZERO, "Fixup": _ZERO}
#: For ``conflicts``: techniques that act on weights of linear layers, if all of these are frozen.
FROZEN = {
    "GradientCentralization": "it centres gradients of weights that are frozen here",
    "ReplaceOptimizer": "it updates hidden matrices, which are frozen here",
    "KFAC": "it preconditions weights that are frozen here",
}


def blockwise(what: str) -> dict[str, str]:
    """``conflicts`` with techniques that train blocks or other parts in turn; ``what`` is what trains in each block."""
    return {
        "FixRes": "it ends by training only the classifier and norms, which are frozen here",
        "GreedyLayerwise": f"it trains some blocks at a time, and only their {what} train here",
        "LayerFreezing": f"it freezes blocks, and only their {what} train here",
    }


def unless_memory_bound(profile: RunProfile) -> str | None:
    """Why a search for a faster recipe need not try an adapter, or None."""
    return (
        None
        if profile.memory_bound
        else "memory does not limit the batch or the model, so training all weights is better"
    )


#: what adapters are compared with
CONTROL = Control("the baseline, which trains all weights, for the same time")


class Adapter(Architecture):
    """A technique that trains few parameters and freezes all others.

    Parameters that other techniques add to the module train as well, because their initial values are not pretrained.

    Attributes:
        save: what checkpoints hold.
        also: patterns of parameters or modules that train in addition.
        names: patterns of the modules to act on; None looks for them, and an empty list is plain training.
    """

    change_at = Change.ADAPT
    refuses: ClassVar[Reasons] = {
        **Architecture.refuses,
        Part.FLAT: "it cannot distinguish trained parameters from frozen ones there",
    }
    neutral_at: ClassVar[Mapping[str, Any]] = {"names": []}
    control = CONTROL
    _partial: Partial | None = None
    _trained = 0
    _frozen = 0

    def _take(self, save: Save, also: Sequence[str], names: Sequence[str] | None = None) -> None:
        """Keep the arguments that adapters share."""
        self.save: Save = save
        self.also = list(also)
        self.names = None if names is None else list(names)

    def begin(self, root: nn.Module) -> set[int]:
        """The ids of parameters that train in addition, in a module before the adapter is applied.

        Raises:
            ValueError: for a pattern of ``also`` that means no parameter.
        """
        found: set[int] = set()
        if self.also:
            named = dict(root.named_parameters(remove_duplicate=False))
            paths = [*named, *(path for path, m in root.named_modules() if path and any(True for _ in m.parameters()))]
            who, of = type(self).__name__, type(root).__name__
            check_met(self.also, paths, who=who, what="parameters and modules", root=of, argument="also")
            found = {
                id(p) for name, p in named.items() if any(meets(at, one) for one in self.also for at in _above(name))
            }
        for _, m, swap in swapped(root):
            found |= {id(p) for name, p in parameters_by_name(m) if name not in swap.tensors and p.requires_grad}
        return found

    def freeze(self, surgeon: Surgeon, trained: set[int], what: str) -> None:
        """Freeze all parameters except ``trained``, and log what trains.

        Args:
            surgeon: the change.
            trained: the ids of parameters that train.
            what: what was added, for the log line.

        Raises:
            ValueError: if nothing is left to train.
        """
        who, root = type(self).__name__, surgeon.root
        numbers = sum(p.numel() for p in parameters_of(root) if p.requires_grad)
        surgeon.freeze(lambda name, p: id(p) not in trained)
        self._trained = sum(p.numel() for p in parameters_of(root) if p.requires_grad)
        self._frozen = numbers - self._trained
        if not self._trained:
            raise ValueError(
                f"{who}: nothing of {type(root).__name__} is left to train, because the module itself has frozen it"
                " (requires_grad=False). Set requires_grad=True, or name other parameters in also=[...]."
            )
        share = 100 * self._trained / max(1, self._trained + self._frozen)
        rank_zero_info(f"{who}: {what}; trains {self._trained:,} parameters ({share:.3g} %).")

    # -- in a run

    @override
    def check(self, session: Session) -> None:
        super().check(session)
        check_strategy(session, who=type(self).__name__, save=self.save)
        for other in session.techniques:
            if isinstance(other, Adapter) and not other.neutral and other.save != self.save:
                raise ValueError(
                    f"{type(self).__name__}(save={self.save!r}): {type(other).__name__} has save={other.save!r}, and a"
                    " checkpoint holds one or the other. Give both the same."
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
        if self._partial is not None:  # also after the run, when nothing is patched any more
            checkpoint["state_dict"] = self._partial.without(checkpoint["state_dict"])

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._partial is None else {"base": self._partial.base}

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "_partial"}

    # -- reports

    @override
    def report(self) -> "dict[str, float | int | Tensor]":
        return {"trained": self._trained, "frozen": self._frozen}

    @override
    def summary(self) -> str:
        if not self._trained:
            return "the module was already adapted"
        return f"trained {self._trained:,} parameters, with {self._frozen:,} frozen"


def _above(name: str) -> Iterator[str]:
    """A parameter's name, and the paths of the modules that contain it."""
    parts = name.split(".")
    yield from (".".join(parts[:i]) for i in range(len(parts), 0, -1))


def folded(paths: Sequence[str], most: int = 8) -> str:
    """Paths without their numbers, each once: ``blocks.*.qkv (4), ...``."""
    counts: dict[str, int] = {}
    for path in paths:
        key = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", path)
        counts[key] = counts.get(key, 0) + 1
    listed = [name if count == 1 else f"{name} ({count})" for name, count in counts.items()]
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
