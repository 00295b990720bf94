"""Changed architectures in a run: when the change is made, which parameters the optimizers get, and what is kept at the end."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_eff._core._architecture.classes import check_classes
from lightning_eff._core._architecture.record import applied, frozen, swapped
from lightning_eff._core._architecture.watch import BypassWatch
from lightning_eff._core._lightning.names import is_a
from lightning_eff._core._needs.offers import is_plain
from lightning_eff._core._optim.combined import CombinedOptimizer
from lightning_eff._core._optim.no_weight_decay import exempt_from_decay
from lightning_eff._core._optim.removed_parameters import remove_parameters
from lightning_eff._core._optim.scheduled import schedulers_of
from lightning_eff._core._stack.compiled import compiled_around
from lightning_eff._core._stack.walking import parameters_by_name, parameters_of
from lightning_eff._core.optimizers import is_per_parameter, rewrite_configured
from lightning_eff._core.steps import Proceed, Stage, Step

if TYPE_CHECKING:
    from lightning_eff._core.session import Session


_CONFIGURING: "list[tuple[LightningModule, int]]" = []


def configuring() -> "tuple[LightningModule, int] | None":
    """Return the module whose ``configure_model`` is running, and the run's seed, which all its processes share; or None."""
    return _CONFIGURING[-1] if _CONFIGURING else None


@contextmanager
def _configuring(module: LightningModule, seed: int) -> Iterator[None]:
    _CONFIGURING.append((module, seed))
    try:
        yield
    finally:
        _CONFIGURING.pop()


class Undoable(Protocol):
    """A change that can be undone."""

    def undo(self) -> None:
        """Undo the change."""
        ...


def check(session: "Session", who: str) -> None:
    """Raise ``ValueError`` if the module of a run cannot be changed."""
    trainer = session.trainer
    callbacks = list(trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue]
    if any(is_a(callback, StochasticWeightAveraging) for callback in callbacks):
        raise ValueError(
            f"{who}: Lightning's StochasticWeightAveraging copies the module at setup, before it is changed, and would"
            " average other parameters than those trained. Use lightning_eff's own, or change the module first:"
            f" Trainer.fit(lightning_eff.apply(module, {who}(...))) without {who} among the callbacks."
        )
    first = min(callbacks.index(technique) for technique in session.techniques)
    for callback in callbacks[:first]:
        if is_a(callback, WeightAveraging):
            raise ValueError(
                f"{who}: {type(callback).__name__} precedes it in the callbacks, so it copies the module before it is changed."
                f" Move {type(callback).__name__} to the end of the list."
            )


class ArchitectureOfRun:
    """The changes that all architecture techniques of a run make to its module.

    They are made in ``configure_model``, when the module is complete and its checkpoint not yet loaded. They are undone at
    the end, unless the run trained the module or loaded a checkpoint into it.

    Args:
        session: the run, whose patches are being set.
        change: makes the changes that are still due.
    """

    def __init__(self, session: "Session", change: Callable[[], Undoable]) -> None:
        self._session = session
        self._changed: list[Undoable] = []
        self._kept = False
        # under other strategies the forward pass does not use the registered parameters
        self._watched = not is_plain(session.trainer.strategy)
        self._compares = session.trainer.ckpt_path is None  # the run that saved the checkpoint was checked
        module = session.module
        configure = module.configure_model

        def configure_model() -> None:  # not wrapped: Lightning unwraps, and would find no overridden method
            with _configuring(module, session.seed if session.fitting else torch.initial_seed() % 2**63):
                configure()
            self._changed.append(change())

        session.patches.set(module, "configure_model", configure_model)
        if session.fitting:
            session.patches.set(module, "configure_optimizers", _adopting(module))
            session.chain.add(Stage.SAVE, self._watch)

    def keep(self) -> None:
        """Keep the changes from now on, because the module holds trained or loaded weights."""
        self._kept = True
        self._changed.clear()  # frees the memory of the original modules

    def close(self) -> None:
        """Undo the changes at the end of the run, unless they are kept."""
        if not self._kept:
            for changed in reversed(self._changed):
                changed.undo()
        self._changed.clear()

    def _watch(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if self._watched:
            return proceed(batch)
        if self._compares:
            self._compares = not check_classes(step, batch)
        if compiled_around(step.module, [m for _, m, _ in swapped(step.module)]):
            output, ran = proceed(batch), not self._compares  # a compiled graph does not call modules
        else:
            with BypassWatch(step.module) as watch:
                output = proceed(batch)
            ran = watch.ran and not self._compares
        manual = not step.module.automatic_optimization  # such a step returns None
        self._watched = ran if manual else output is not None  # a step that returns None may have called no module
        return output


def _adopting(module: LightningModule) -> Callable[..., Any]:
    """Wrap ``configure_optimizers`` so that optimizers whose parameters were listed by name also get new parameters.

    Parameters that a replacement names in ``undecayed`` get a group without weight decay. Parameters that a technique froze
    are removed from their groups.
    """
    original = module.configure_optimizers

    @functools.wraps(original)
    def configure_optimizers() -> Any:
        configured = original()
        optimizers: list[Optimizer] = []
        rewrite_configured(configured, lambda o: optimizers.append(o) or o)
        adopt(module, optimizers)
        new = [
            p
            for _, m, _ in swapped(module)
            if (undecayed := getattr(m, "undecayed", ()))
            for name, p in parameters_by_name(m)
            if name in undecayed
        ]
        without = frozen(module)
        if not module.automatic_optimization:
            _check_each_trains(module, optimizers, without)
        for optimizer in optimizers:
            if not isinstance(optimizer, CombinedOptimizer):
                exempt_from_decay(optimizer, schedulers_of(configured), list[Tensor](new))
            remove_parameters(optimizer, without)
        return configured

    configure_optimizers.__wrapped__ = inspect.unwrap(original)
    return configure_optimizers


def _check_each_trains(module: LightningModule, optimizers: list[Optimizer], without: list[nn.Parameter]) -> None:
    """Raise ``ValueError`` if techniques froze all parameters of one of several optimizers, which has its own loss."""
    gone, paths = {id(p) for p in without}, {id(p): path for path, p in module.named_parameters()}
    for index, optimizer in enumerate(optimizers):
        had = [p for group in optimizer.param_groups for p in group["params"]]
        if not had or any(id(p) not in gone for p in had):
            continue
        where = [paths[id(p)] for p in had if id(p) in paths]
        record = next((one for one in applied(module) if {*where} & {*one.where}), applied(module)[0])
        parts = list(dict.fromkeys(path.partition(".")[0] for path in where))
        way = f"Train them too with also={parts}, or remove" if "also" in record.settings else "Remove"
        raise ValueError(
            f"{record.technique}: it freezes all parameters of optimizer {index} ({type(optimizer).__name__}:"
            f" {', '.join(parts)}), so the loss that {type(module).__name__} computes for that optimizer would have no"
            f" gradient. {way} {record.technique}."
        )


def adopt(module: nn.Module, optimizers: list[Optimizer]) -> None:
    """Add new parameters that are in no group to the group of the module's original parameters.

    Raises:
        ValueError: if there is none, or the optimizer may have prepared state for the parameters that it was given.
    """
    groups = {id(p): (o, group) for o in optimizers for group in o.param_groups for p in group["params"]}
    if not optimizers:
        return
    for path, m, swap in swapped(module):
        new = {name: p for name, p in parameters_by_name(m) if p.requires_grad and id(p) not in groups}
        if not new:
            continue
        home = next((groups[id(p)] for p in parameters_of(m) if id(p) in groups), None)
        names = ", ".join(f"{path}.{name}" for name in new)
        if home is None:
            raise ValueError(
                f"{swap.by}: {names} would not be trained, because no optimizer of configure_optimizers has any parameter of"
                f" {path}. Give the optimizer self.parameters() or the parameters of {path}, or leave {path} out of"
                f" {swap.by}."
            )
        optimizer, group = home
        if not is_per_parameter(optimizer) or optimizer.state:
            raise ValueError(
                f"{swap.by}: {names} would not be trained: {type(optimizer).__name__} got {path}'s other parameters by name,"
                " and parameters cannot be added to it later. Give it self.parameters() in configure_optimizers, which"
                f" includes the new ones, or leave {path} out of {swap.by}."
            )
        group["params"].extend(new.values())
        groups.update({id(p): home for p in new.values()})
