"""The base class of techniques whose purpose is other parameters."""

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
from lightning_eff._core._architecture.twins import Twin, aside, find_twins, tell
from lightning_eff._core._needs.needs import Need, Part, Reasons
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Technique


class Change(IntEnum):
    """Where a technique's change comes among those of others, in whatever order they are given; then by class name."""

    SWAP = 1  #: layers of another kind
    STRUCTURE = 2  #: maps of another form: low rank, block-diagonal
    ADAPT = 3  #: parameters beside those that are there
    FREEZE = 4  #: fewer that are trained


class Architecture(Technique):
    """A technique after which a module has other parameters, in training, in checkpoints and from then on.

    A subclass says what it does in :meth:`change`, with the :class:`Surgeon` that it gets, and keeps each argument of its
    constructor under its own name. The rest follows: in a Trainer the change is made once the module is complete, before its
    checkpoint is loaded, its optimizers built and its strategy set up; without one by ``lightning_eff.apply``. The module
    keeps it once a run has trained it or loaded a checkpoint into it, and gives it back in ``lightning_eff.export``.

    Class attributes, beside those of :class:`Technique`:
        change_at: where the change comes among those of other techniques.
        stays: why ``export`` cannot give the plain architecture back; empty where every replacement has ``fold``.
    """

    change_at: ClassVar[Change]
    stays: ClassVar[str] = ""
    needs_automatic_optimization: ClassVar[bool] = False
    needs: ClassVar[Need] = Need.MODULE
    refuses: ClassVar[Reasons] = {
        Part.ENGINE: "the technique changes the module after that may have begun, where lightning_eff.apply changes it before"
    }

    _run: "run.ArchitectureOfRun | None" = None  # of all the run's; the first of them has it

    @abstractmethod
    def change(self, surgeon: Surgeon) -> None:
        """Change ``surgeon.root``, or raise ``ValueError`` with what there is; then all that was done is put back."""

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments as numbers, strings, lists and dicts, for checkpoints and comparisons."""
        found: dict[str, Any] = {}
        for name in inspect.signature(type(self)).parameters:
            if not hasattr(self, name):
                raise TypeError(
                    f"{type(self).__name__} has an argument {name!r} and no attribute of that name; expected one, which says"
                    " what the module was changed by. Set it in __init__, or override settings()."
                )
            found[name] = plain(getattr(self, name))
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


def plain(value: Any) -> Any:
    """``value`` as plain containers, numbers and strings, comparable after a checkpoint; other things by their names."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in (sorted(value, key=repr) if isinstance(value, set | frozenset) else value)]
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}" if name else type(value).__qualname__


@dataclass
class Changed:
    """What :func:`change` did; it can be put back as long as nothing else was done to the module."""

    module: nn.Module
    surgeons: list[Surgeon]
    before: list[Applied] | None
    twins: list[Twin] = field(default_factory=list)

    def undo(self) -> None:
        """Put back everything, newest first."""
        for twin in self.twins:
            twin.undo()
        for surgeon in reversed(self.surgeons):
            surgeon.undo()
        if self.before is None:
            self.module.__dict__.pop(APPLIED, None)
        else:
            self.module.__dict__[APPLIED] = self.before


def change(module: nn.Module, techniques: Sequence[Architecture], *, seed: int, batch: Any = None) -> Changed:
    """Make the changes of all ``techniques`` that are not made yet, in the order of :class:`Change`: all, or none.

    Args:
        module: the module tree.
        techniques: whose changes they are.
        seed: of what is drawn.
        batch: of the module's data, for those that must see it run.

    Raises:
        ValueError: if a technique was applied with other settings, or one that comes after it was applied before it, or it
            finds nothing to act on; nothing is left changed.
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
        with aside(twins):
            for technique in ordered:
                name = type(technique).__name__
                record = Applied(name, technique.settings(), int(technique.change_at))
                if name in done:
                    _check_same(done[name], record, module)
                    continue
                later = [r for r in done.values() if (r.order, r.technique) > (record.order, name)]
                if later:
                    raise ValueError(
                        f"{name}: to {type(module).__name__} was applied already: {names(later)}, which comes after {name}."
                        " Give them"
                        " together to one lightning_eff.apply, or put all of them into the Trainer's callbacks."
                    )
                surgeon = Surgeon(module, seed=seed, who=name, stays=technique.stays, batch=batch)
                changed.surgeons.append(surgeon)
                had = dict(module.named_parameters())
                technique.change(surgeon)
                if any(isinstance(p, DTensor) for p in had.values()):
                    _check_divided(module, had, who=name)
                record.where = surgeon.where
                records.append(record)
        changed.twins = twins
        followed = [twin for twin in twins if twin.follow()]
        tell(followed, ", ".join(record.technique for record in records))
        if records:
            module.__dict__[APPLIED] = [*(before or []), *records]
    except BaseException:
        changed.undo()
        raise
    return changed


def _check_divided(module: nn.Module, had: Container[str], *, who: str) -> None:
    """Raise ``ValueError`` where parameters were added to a module that is divided: nobody would average their gradients."""
    new = [name for name, _ in module.named_parameters() if name not in had]
    if new:
        raise ValueError(
            f"{who}: {type(module).__name__} is divided already (DTensor), and {new[0]}, which is new, would not be. Call"
            f" lightning_eff.apply(self, {who}(...)) in configure_model before it divides the module."
        )


def _check_same(was: Applied, asked: Applied, module: nn.Module) -> None:
    if was.settings != asked.settings:
        raise ValueError(
            f"{asked.technique}: to {type(module).__name__} was applied already: {was}; asked for is {asked}. Go on"
            " with the settings"
            " that it has, or begin from the plain module (lightning_eff.export gives it, where the technique folds away)."
        )
