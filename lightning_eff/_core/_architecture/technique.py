"""The base class of techniques that change a module's parameters."""

import inspect
from abc import abstractmethod
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_eff._core._architecture import run
from lightning_eff._core._architecture.record import APPLIED, Applied, applied, names
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.twins import Twin, find_twins, hidden, log_changes
from lightning_eff._core._needs.needs import Need, Part, Reasons
from lightning_eff._core._stack.walking import parameters_by_name, without_collections
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Technique


class Change(IntEnum):
    """The order of a technique's change among those of others, however they are listed; then by class name."""

    SWAP = 1  #: layers of another kind
    STRUCTURE = 2  #: linear layers of another form: low rank, block-diagonal
    ADAPT = 3  #: additional parameters
    FREEZE = 4  #: fewer trained parameters


class Architecture(Technique):
    """A technique that gives a module other parameters, in training, in checkpoints and afterwards.

    A subclass implements :meth:`change` with the :class:`Surgeon` that it gets, and keeps each constructor argument in an
    attribute of the same name. In a Trainer the change is made when the module is complete, before its checkpoint is loaded,
    its optimizers are built and its strategy is set up. ``lightning_eff.apply`` makes it without a Trainer. The module keeps
    the change once a run has trained it or loaded a checkpoint into it, and ``lightning_eff.export`` undoes it.

    Class attributes, in addition to those of :class:`Technique`:
        change_at: the order of the change among those of other techniques.
        stays: why ``export`` cannot restore the plain architecture; empty if every replacement has ``fold``.
    """

    change_at: ClassVar[Change]
    stays: ClassVar[str] = ""
    needs_automatic_optimization: ClassVar[bool] = False
    needs: ClassVar[Need] = Need.MODULE
    refuses: ClassVar[Reasons] = {
        Part.ENGINE: "the technique changes the module after the engine may have begun; lightning_eff.apply changes it before"
    }

    _run: "run.ArchitectureOfRun | None" = None  # only the run's first architecture technique has it

    @abstractmethod
    def change(self, surgeon: Surgeon) -> None:
        """Change ``surgeon.root``, or raise ``ValueError``; then all changes so far are undone."""

    def settings(self) -> dict[str, Any]:
        """Return the constructor's arguments as numbers, strings, lists and dicts, for checkpoints and comparisons."""
        found: dict[str, Any] = {}
        for name in inspect.signature(type(self)).parameters:
            if not hasattr(self, name):
                raise TypeError(
                    f"{type(self).__name__} has an argument {name!r} but no attribute of that name, which checkpoints record."
                    " Set it in __init__, or override settings()."
                )
            found[name] = to_plain(getattr(self, name))
        return found

    # -- in a run

    @override
    def check(self, session: Session) -> None:
        run.check(session, type(self).__name__)

    @override
    def on_open(self, session: Session) -> None:
        first = next(t for t in session.techniques if isinstance(t, Architecture) and not t.neutral)
        if first is self:
            mine = [t for t in session.techniques if isinstance(t, Architecture)]
            self._run = run.ArchitectureOfRun(session, lambda: change(session.module, mine, seed=session.seed))

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        if self._run is not None:
            self._run.keep()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._run is not None:
            self._run.keep()

    @override
    def detach(self, session: Session) -> None:
        if self._run is not None:
            self._run.close()
            self._run = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "_run"}


def to_plain(value: Any) -> Any:
    """Return ``value`` as plain containers, numbers and strings, comparable after a checkpoint; other objects as names."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in (sorted(value, key=repr) if isinstance(value, set | frozenset) else value)]
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}" if name else type(value).__qualname__


@dataclass
class Changed:
    """The changes that :func:`change` made. They can be undone as long as the module was not changed otherwise."""

    module: nn.Module
    surgeons: list[Surgeon]
    before: list[Applied] | None
    twins: list[Twin] = field(default_factory=list)

    def undo(self) -> None:
        """Undo all changes, newest first."""
        for twin in self.twins:
            twin.undo()
        for surgeon in reversed(self.surgeons):
            surgeon.undo()
        if self.before is None:
            self.module.__dict__.pop(APPLIED, None)
        else:
            self.module.__dict__[APPLIED] = self.before


@without_collections()
def change(module: nn.Module, techniques: Sequence[Architecture], *, seed: int, batch: Any = None) -> Changed:
    """Make the changes of all ``techniques`` that are still due, in the order of :class:`Change`: all, or none.

    Args:
        module: the module tree.
        techniques: the techniques.
        seed: the seed of random draws.
        batch: a batch of the module's data, for techniques that must run the module.

    Raises:
        ValueError: if a technique was applied with other settings, a later technique was applied before it, or it finds
            nothing to act on. Nothing is left changed.
    """
    ordered = sorted((t for t in techniques if not t.neutral), key=lambda t: (t.change_at, type(t).__name__))
    done = {record.technique: record for record in applied(module)}
    before = module.__dict__.get(APPLIED)
    changed = Changed(module, [], before)
    records: list[Applied] = []
    try:
        twins = find_twins(module) if any(type(t).__name__ not in done for t in ordered) else []
        for twin in twins:
            twin.note(module)
        with hidden(twins):
            for technique in ordered:
                name = type(technique).__name__
                record = Applied(name, technique.settings(), int(technique.change_at))
                if name in done:
                    _check_same(done[name], record, module)
                    continue
                later = [r for r in done.values() if (r.order, r.technique) > (record.order, name)]
                if later:
                    raise ValueError(
                        f"{name}: {type(module).__name__} was already changed by {names(later)}, which comes after {name}."
                        " Give them together to one lightning_eff.apply, or add all of them to the Trainer's callbacks."
                    )
                surgeon = Surgeon(module, seed=seed, who=name, stays=technique.stays, batch=batch)
                changed.surgeons.append(surgeon)
                had = dict(parameters_by_name(module))
                technique.change(surgeon)
                if any(isinstance(p, DTensor) for p in had.values()):
                    _check_divided(module, had, who=name)
                record.where = surgeon.where
                records.append(record)
        changed.twins = twins
        followed = [twin for twin in twins if twin.follow()]
        log_changes(followed, ", ".join(record.technique for record in records))
        if records:
            module.__dict__[APPLIED] = [*(before or []), *records]
    except BaseException:
        changed.undo()
        raise
    return changed


def _check_divided(module: nn.Module, had: Container[str], *, who: str) -> None:
    """Raise ``ValueError`` if parameters were added to a sharded module, because no process would average their gradients."""
    new = [name for name, _ in module.named_parameters() if name not in had]
    if new:
        raise ValueError(
            f"{who}: {type(module).__name__} is already sharded (DTensor), but the new parameter {new[0]} would not be. Call"
            f" lightning_eff.apply(self, {who}(...)) in configure_model before it shards the module."
        )


def _check_same(was: Applied, asked: Applied, module: nn.Module) -> None:
    if was.settings != asked.settings:
        raise ValueError(
            f"{asked.technique}: {type(module).__name__} was already changed by {was}, not {asked}. Use the same settings, or"
            " start from the plain module (lightning_eff.export restores it if the technique can be folded)."
        )
