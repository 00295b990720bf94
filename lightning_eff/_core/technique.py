"""The base classes of techniques that are callbacks: of all, and of those that evaluate other weights than they train."""

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
from lightning_eff._core.search_space import SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step


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
    """What an honest comparison must hold a technique against, beside the baseline for as many seconds.

    Attributes:
        text: one line for people.
        arms: given the technique as the recipe has it (an instance, attached to no run), the callbacks that take its
            place in the recipe's ``trainer.callbacks``, by a short name of the arm; all else of the recipe stays. Empty
            where its settings are neutral, and where the baseline for as many seconds is itself the control, which
            ``text`` then says.
    """

    text: str
    arms: Callable[[Any], Mapping[str, Callback]] = _no_arms


@of_both
class Technique(Callback):
    """A callback that changes how an unchanged LightningModule trains, through the ways in of ``_core`` alone.

    A subclass declares its arguments in the signature of ``__init__`` (see ``_arguments/kinds.py``). It looks at the run
    in :meth:`check`, asks for what it needs in :meth:`attach`, :meth:`on_model` and :meth:`on_optimizers`, and acts in
    the links and blocks that it asked for. The first technique among a trainer's callbacks opens the :class:`Session` for
    all of them. Everything is put back at the end, also after an exception.

    Class attributes, which the command line's table is made of:
        saves: what the technique saves or gains.
        paper: where it comes from.
        constraints: where it does not work.
        control: what an honest comparison must hold it against; required of every exported technique.
        survey: the row of the surveys that it answers to; None where it stands in neither.
        search_space: the settings that a search would try, and when that is pointless; None for stand-ins.
        neutral_at: by attribute, the value that makes it plain training by itself, beside those of its base classes.
        checkpointed: the attributes that checkpoints hold, such as ``_steps`` or ``_scorer.checked``, beside those of its base
            classes. A checkpoint has them under their own names without underscores.
        stage: where ``_link`` stands in the chain of a step; None for a technique with no link, or with others.
        order: its place among the links of that stage, whatever the order of the callbacks.
        conflicts: names of techniques and precision plugins that it cannot train with, and why.
        needs_automatic_optimization: refuses modules with ``automatic_optimization = False``.
        needs_budget: refuses runs without any of ``max_steps``, ``max_epochs`` and ``max_time``.
        needs_optimizer: refuses modules whose ``configure_optimizers`` returns none, under automatic optimization.
        sets_rates: sets the optimizers' rates by itself, over the whole budget; others leave them alone.
        needs: what it needs of each process; strategies that divide the module so that a need is not met are refused.
        refuses: divisions that it cannot train under for a reason of its own, with the reason; "" lifts one of its needs'.
        sparse_gradients: leaves gradients of sparse layout alone, or computes with them rightly; beside others, tables have
            dense gradients.
        compiles: compiles parts of the module: its :meth:`on_model` comes first, so that what others put around the calls of
            blocks stays outside of compiled code.
    """

    kind: ClassVar[str] = "callback"
    saves: ClassVar[str]
    paper: ClassVar[str]
    control: ClassVar[Control]
    constraints: ClassVar[str] = ""
    survey: ClassVar[Survey | None] = None
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

    _made_with: Mapping[str, str] = {}
    _session: Session | None = None
    _past: Session | None = None  # the closed one, for a checkpoint that is saved after the run

    @override
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _then_reset(declared(cls.__init__))

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        technique = super().__new__(cls)
        technique._made_with = changed_settings(cls.__init__, args, renamed(cls.__name__, aliases_of(cls), kwargs))
        return technique

    # of a subclass without ``__init__``, which else were said to take anything
    __new__.__signature__ = inspect.Signature([inspect.Parameter("cls", inspect.Parameter.POSITIONAL_ONLY)])  # pyright: ignore[reportFunctionMemberAccess]

    def __repr__(self) -> str:
        """The class with the settings that are not the defaults."""
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self._made_with.items())})"

    @classmethod
    def name(cls) -> str:
        """The class's name in snake_case, as in ``eff/<name>/<quantity>``."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    @property
    def session(self) -> Session:
        """The run that this technique is attached to."""
        if self._session is None:
            raise RuntimeError(
                f"{type(self).__name__} is attached to no run; it is so from setup to teardown of a Trainer."
            )
        return self._session

    # -- what subclasses say

    @property
    def neutral(self) -> bool:
        """True where the settings make this plain training: then nothing is attached and nothing contradicts it."""
        declared = (pair for cls in type(self).__mro__ for pair in vars(cls).get("neutral_at", {}).items())
        return any(getattr(self, name) == value for name, value in declared)

    @property
    def changes_shapes(self) -> bool:
        """True where these settings hand the network batches of other shapes as the run goes on."""
        return False

    @property
    def drops_blocks(self) -> bool:
        """True where a training step of these settings may pass over all blocks of a stack."""
        return False

    def _reset(self) -> None:
        """Set what a fit finds and counts to its first values; called after construction and before :meth:`attach`."""

    def on_budget(self, session: Session) -> None:
        """Tell ``session.progress`` of an end of the run that the Trainer has not; called before any technique's checks."""

    def check(self, session: Session) -> None:
        """Raise ``ValueError`` if this run cannot be trained with the technique; nothing has been touched yet."""

    def on_open(self, session: Session) -> None:
        """The run begins, in evaluation too, unless neutral; nothing of the module's own has run yet."""

    def attach(self, session: Session) -> None:
        """Ask for links; called in ``Callback.setup`` of a fit, after :meth:`_reset`, unless neutral."""
        if self.stage is not None:
            session.chain.add(self.stage, self._link, self.order)

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """The link at :attr:`stage` of the chain."""
        raise NotImplementedError

    def on_model(self, session: Session) -> None:
        """The module is complete, its checkpoint (if any) loaded, and the strategy has not wrapped it."""

    def on_optimizers(self, session: Session) -> None:
        """The optimizers are built."""

    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        """Raise ``ValueError`` if one cannot resume from a checkpoint with this technique's ``state`` (None: without)."""

    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        """Before each micro-batch; ``session.progress.u`` is up to date."""

    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        """After each micro-batch, before checkpoints and validation."""

    def on_rest_of_validation(self, session: Session) -> None:
        """A run resumes within the last hooks of a validation, and this technique's ``on_validation_end`` is to come."""

    def on_blocks_changed(self, session: Session) -> None:
        """Another technique changed which blocks the network has, or overwrote weights."""

    def detach(self, session: Session) -> None:
        """The run ends, well or not; what ``_core`` was asked for is put back by itself."""

    def report(self) -> dict[str, float | int | torch.Tensor]:
        """Quantities for the logger, by their name in ``eff/<technique>/<quantity>``."""
        return {}

    def summary(self) -> str:
        """One line on what was done, for the closing report."""
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
        if self._leads() and pl_module.automatic_optimization:  # a manual step may run the network again
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
        """Whether this is the technique whose hooks drive the session; the others' do nothing of themselves."""
        return self._session is not None and self._session.techniques[0] is self

    def __getstate__(self) -> dict[str, Any]:
        own = ("_session", "_past", *BATCH_HOOKS)  # in a fit, a hook that does nothing is None
        run = self._session or self._past
        return {
            key: value
            for key, value in self.__dict__.items()
            if key not in own and (run is None or getattr(value, "__dict__", {}).get("session") is not run)
        }


def techniques_of(trainer: Trainer) -> list[Technique]:
    """Every technique among the trainer's callbacks, in their order."""
    return [c for c in trainer.callbacks if isinstance(c, Technique)]  # pyright: ignore[reportAttributeAccessIssue]


class OtherWeights(Technique):
    """A technique of which validation, checkpoints and the fit's end see other weights than those that are trained.

    A subclass says what they are in :meth:`put_in` and :meth:`take_out`, neither of which does anything if it is done
    already, and wraps the strategy's ``lightning_module_state_dict`` in :meth:`shown`. A run that fails ends with those
    that are trained.
    """

    _finished = False  # whether the fit ended, and left the other weights in the module

    @abstractmethod
    def put_in(self, session: Session) -> None:
        """Put the other weights into the module, if there are any."""

    @abstractmethod
    def take_out(self, session: Session) -> None:
        """Put the trained weights back."""

    @contextmanager
    def shown(self, session: Session) -> Iterator[None]:
        """The module holds the other weights."""
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
