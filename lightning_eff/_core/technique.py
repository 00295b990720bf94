"""The base classes of techniques that are callbacks, and of those that evaluate other weights than they train."""

import functools
import inspect
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_eff._core._arguments.declared import aliases_of, declared, renamed
from lightning_eff._core._lightning.names import of_both
from lightning_eff._core._lightning.settings import changed_settings
from lightning_eff._core._needs.needs import Need, Reasons
from lightning_eff._core._run._muting.idle_hooks import BATCH_HOOKS, driving
from lightning_eff._core._surveys.items import InSurveys
from lightning_eff._core.search_space import SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step

#: For ``conflicts``: the techniques under which each rank has weights of its own between averagings, and trains all of them.
LOCAL_STEPS = ("DiLoCo", "DynamicAveraging", "LocalSGD", "SLAMB")


def _no_arms(technique: Any) -> Mapping[str, Callback]:
    return {}


def _then_reset(init: Callable[..., None]) -> Callable[..., None]:
    """``init``, which resets a technique in the end, unless it is called by the ``__init__`` of a subclass."""

    @functools.wraps(init)
    def initialized(self: "Technique", *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if type(self).__init__ is initialized:
            self._reset()

    return initialized


def _for_checkpoint(value: Any) -> Any:
    """``value`` with its container copied, or a number on a device as a plain number."""
    if isinstance(value, dict | list):
        return value.copy()
    return value.item() if isinstance(value, torch.Tensor) and value.ndim == 0 else value


@dataclass(frozen=True)
class Control:
    """The control of an honest comparison, in addition to the baseline with the same training time.

    Attributes:
        text: one line for people.
        arms: takes the technique as the recipe has it, an instance attached to no run. Returns the callbacks that replace it
            in the recipe's ``trainer.callbacks``, by a short name of the arm. Empty if the technique's settings are neutral,
            or if the baseline with the same training time is itself the control; ``text`` then says so.
    """

    text: str
    arms: Callable[[Any], Mapping[str, Callback]] = _no_arms


@of_both
class Technique(Callback):
    """A callback that changes how an unchanged LightningModule trains, only through the interfaces of ``_core``.

    A subclass declares its arguments in the signature of ``__init__`` (see ``_arguments/kinds.py``). It checks the run in
    :meth:`check`, and requests access in :meth:`attach`, :meth:`on_model` and :meth:`on_optimizers`. It then acts in the links
    and blocks that it requested. The first technique among a trainer's callbacks opens the :class:`Session` for all of them.
    Everything is undone at the end, also after an exception.

    Class attributes, from which the command line's table is generated:
        saves: what the technique saves or gains.
        paper: its source.
        constraints: where it does not work.
        control: the control of an honest comparison; required of every exported technique.
        survey: its row in the surveys; None if it is in neither.
        search_space: the settings that a search tries, and when that is pointless; None for control techniques.
        neutral_at: by attribute, a value that alone makes it plain training, in addition to those of its base classes.
        checkpointed: the attributes that checkpoints hold, such as ``_steps`` or ``_scorer.checked``, in addition to those of
            its base classes. A checkpoint holds them under the last part of the name, without its underscore.
        stage: the stage of ``_link`` in the chain of a step; None for a technique that adds no link, or adds links itself.
        order: its place among the links of that stage, whatever the order of the callbacks.
        conflicts: names of techniques and precision plugins that it cannot train with, and why.
        needs_automatic_optimization: refuses modules with ``automatic_optimization = False``.
        needs_budget: refuses runs without any of ``max_steps``, ``max_epochs`` and ``max_time``.
        needs_optimizer: refuses modules whose ``configure_optimizers`` returns none, under automatic optimization.
        sets_rates: sets the optimizers' learning rates itself, over the whole budget.
        needs: what it needs of each process. Strategies that divide the module so that a need is not met are refused.
        refuses: strategy parts under which it cannot train for another reason, with the reason; "" lifts a reason of a need.
        sparse_gradients: ignores sparse gradients or computes with them correctly. With other techniques, embedding tables
            have dense gradients.
        compiles: compiles parts of the module. Its :meth:`on_model` is called first, so that other techniques' wrappers
            around block calls stay outside of compiled code.
        initializes: sets weights at the first batch. It is called before the others, which may hide some of the weights.
    """

    kind: ClassVar[str] = "callback"
    saves: ClassVar[str]
    paper: ClassVar[str]
    control: ClassVar[Control]
    constraints: ClassVar[str] = ""
    survey = InSurveys()
    search_space: ClassVar[SearchSpace | None] = None
    neutral_at: ClassVar[Mapping[str, Any]] = {}
    checkpointed: ClassVar[tuple[str, ...]] = ()
    stage: ClassVar[Stage | None] = None
    order: ClassVar[int] = 0
    conflicts: ClassVar[Mapping[str, str]] = {}
    needs_automatic_optimization: ClassVar[bool] = True
    needs_budget: ClassVar[bool] = False
    needs_optimizer: ClassVar[bool] = False
    sets_rates: ClassVar[bool] = False
    needs: ClassVar[Need] = Need.WHOLE
    refuses: ClassVar[Reasons] = {}
    sparse_gradients: ClassVar[bool] = False
    compiles: ClassVar[bool] = False
    initializes: ClassVar[bool] = False

    _made_with: Mapping[str, str] = {}
    _session: Session | None = None
    _past: Session | None = None  # the closed session, for a checkpoint that is saved after the run

    @override
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _then_reset(declared(cls.__init__))

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        technique = super().__new__(cls)
        technique._made_with = changed_settings(cls.__init__, args, renamed(cls.__name__, aliases_of(cls), kwargs))
        return technique

    # the signature of a subclass without ``__init__``, which would otherwise be (*args, **kwargs)
    __new__.__signature__ = inspect.Signature([inspect.Parameter("cls", inspect.Parameter.POSITIONAL_ONLY)])  # pyright: ignore[reportFunctionMemberAccess]

    def __repr__(self) -> str:
        """Return the class with the settings that differ from the defaults."""
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self._made_with.items())})"

    @classmethod
    def name(cls) -> str:
        """Return the class's name in snake_case, as in ``eff/<name>/<quantity>``."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    @property
    def session(self) -> Session:
        """The run that this technique is attached to."""
        if self._session is None:
            raise RuntimeError(
                f"{type(self).__name__} is not attached to a run. Use its session between setup and teardown of a Trainer."
            )
        return self._session

    # -- for subclasses to override

    @property
    def neutral(self) -> bool:
        """Whether the settings make this plain training. Then nothing is attached, and nothing conflicts with it."""
        declared = (pair for cls in type(self).__mro__ for pair in vars(cls).get("neutral_at", {}).items())
        return any(getattr(self, name) == value for name, value in declared)

    @property
    def changes_shapes(self) -> bool:
        """Whether these settings give the network batches of changing shapes during the run."""
        return False

    @property
    def drops_blocks(self) -> bool:
        """Whether a training step with these settings may skip all blocks of a stack."""
        return False

    def _reset(self) -> None:
        """Set what a fit finds and counts to its first values; called after construction and before :meth:`attach`."""

    def on_budget(self, session: Session) -> None:
        """Give ``session.progress`` a limit that the Trainer does not have. Called before any technique's checks."""

    def check(self, session: Session) -> None:
        """Raise ``ValueError`` if the technique cannot train this run. Nothing has been changed yet."""

    def on_open(self, session: Session) -> None:
        """Called when the run begins, in evaluation too, unless neutral. None of the module's own code has run."""

    def attach(self, session: Session) -> None:
        """Request links. Called in ``Callback.setup`` of a fit, after :meth:`_reset`, unless neutral."""
        if self.stage is not None:
            session.chain.add(self.stage, self._link, self.order)

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """Run the step, as the link at :attr:`stage` of the chain."""
        raise NotImplementedError

    def on_model(self, session: Session) -> None:
        """Called when the module is complete with its checkpoint (if any) loaded, before the strategy wraps it."""

    def on_optimizers(self, session: Session) -> None:
        """Called when the optimizers are built."""

    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        """Raise ``ValueError`` if the run cannot resume with this technique's ``state`` in the checkpoint (None: no state)."""

    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        """Called before each micro-batch; ``session.progress.u`` is up to date."""

    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        """Called after each micro-batch, before checkpoints and validation."""

    def on_rest_of_validation(self, session: Session) -> None:
        """Called if a run resumes within the last hooks of a validation, before this technique's ``on_validation_end``."""

    def on_blocks_changed(self, session: Session) -> None:
        """Called when another technique changed which blocks the network has, or overwrote weights."""

    def detach(self, session: Session) -> None:
        """Called when the run ends, also after an error. ``_core`` undoes its own changes."""

    def report(self) -> dict[str, float | int | torch.Tensor]:
        """Return quantities for the logger, by the last part of their name ``eff/<technique>/<quantity>``."""
        return {}

    def summary(self) -> str:
        """Return one line about what the technique did, for the closing report."""
        return "nothing to tell"

    # -- Lightning's hooks

    @override
    def state_dict(self) -> dict[str, Any]:
        return {key: _for_checkpoint(getattr(owner, name)) for key, owner, name in self._checkpointed()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for key, owner, name in self._checkpointed():
            setattr(owner, name, _for_checkpoint(state_dict[key]))

    def _checkpointed(self) -> Iterator[tuple[str, Any, str]]:
        """The attributes that checkpoints hold: the key, the object that has it, and its name there."""
        for path in (path for cls in type(self).__mro__ for path in vars(cls).get("checkpointed", ())):
            owner, _, name = path.rpartition(".")
            yield name.lstrip("_"), getattr(self, owner) if owner else self, name

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        Session.open(trainer, pl_module, techniques_of(trainer), stage)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._leads():
            self.session.start()

    @driving
    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._leads():
            self.session.begin_batch(batch, batch_idx)

    @driving
    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._leads() and pl_module.automatic_optimization:  # a manual step may run the network again afterwards
            self.session.after_backward()

    @driving
    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._leads():
            self.session.end_batch(batch_idx)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._leads():
            self.session.outdate()

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        session = self._session or self._past
        if session is not None and session.techniques[0] is self:
            session.save(checkpoint)

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._leads():
            self.session.load(checkpoint)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._session is not None:
            self._session.close(failed=True)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._session is not None:
            self._session.close()

    def _leads(self) -> bool:
        """Return whether this technique's hooks drive the session, which only the first technique's do."""
        return self._session is not None and self._session.techniques[0] is self

    def __getstate__(self) -> dict[str, Any]:
        own = ("_session", "_past", *BATCH_HOOKS)  # during a fit, hooks that do nothing are None
        run = self._session or self._past
        return {
            key: value
            for key, value in self.__dict__.items()
            if key not in own and (run is None or getattr(value, "__dict__", {}).get("session") is not run)
        }


def techniques_of(trainer: Trainer) -> list[Technique]:
    """Return every technique among the trainer's callbacks, in order."""
    return [c for c in trainer.callbacks if isinstance(c, Technique)]  # pyright: ignore[reportAttributeAccessIssue]


class OtherWeights(Technique):
    """A technique for which validation, checkpoints and the end of the fit use other weights than those that are trained.

    A subclass implements :meth:`put_in` and :meth:`take_out`, which do nothing if already done, and wraps the strategy's
    ``lightning_module_state_dict`` in :meth:`shown`. A run that fails ends with the trained weights.
    """

    _finished = False  # whether the fit ended with the other weights in the module

    @abstractmethod
    def put_in(self, session: Session) -> None:
        """Put the other weights into the module, if there are any."""

    @abstractmethod
    def take_out(self, session: Session) -> None:
        """Restore the trained weights."""

    @contextmanager
    def shown(self, session: Session) -> Iterator[None]:
        """Put the other weights into the module until the context ends."""
        try:
            self.put_in(session)
            yield
        finally:
            self.take_out(session)

    @override
    def detach(self, session: Session) -> None:
        if session.fitting and not self._finished:
            self.take_out(session)

    @override
    def on_rest_of_validation(self, session: Session) -> None:
        self.put_in(session)

    def _finish(self) -> None:
        if self._session is not None and self._session.fitting and not self.neutral:
            self.put_in(self._session)
            self._finished = True

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        if self.session.fitting:
            self.put_in(self.session)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if self.session.fitting:
            self.take_out(self.session)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._finish()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_end(trainer, pl_module)
        self._finish()  # for a fit with nothing left to train
