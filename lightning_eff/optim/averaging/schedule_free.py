"""Schedule-free learning: the average of all steps in the place of a decaying rate (Defazio et al. 2024, arXiv:2405.15682)."""

import importlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._needs.needs import Need, Part, Reasons
from lightning_eff._core._optim.combined import set_rate
from lightning_eff._core._optim.held import HeldRates
from lightning_eff._core._optim.multiples import Multiples
from lightning_eff._core._optim.scheduled import optimizers_of, put_to_rest, reference_rates, schedulers_of
from lightning_eff._core._optim.written import Share, look, unwatch, watch
from lightning_eff._core.optimizers import evaluates_anew
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.optim.averaging._engine import AveragedWeights, check_bn_batches, rivals

_PROGRESS = ("k", "lr_max", "weight_sum")  # what the library keeps for a group


def rates_of(optimizer: Optimizer) -> list[float | None]:
    """The rate of each group; None where it has none."""
    return [None if group.get("lr") is None else float(group["lr"]) for group in optimizer.param_groups]


class Base:
    """The module's optimizer as ``schedulefree.ScheduleFreeWrapper`` sees it; what the wrapper keeps, it keeps here.

    So the optimizer's own state stays that of a plain run, and loads into one.

    Args:
        optimizer: the module's.
        step: its own step, without a closure.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[[], Any]) -> None:
        self.optimizer, self._step = optimizer, step
        self.state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)  # z, by parameter
        self.param_groups: list[dict[str, Any]] = []
        self.look()

    def look(self) -> None:
        """See the groups as they are now."""
        groups = self.optimizer.param_groups
        self.param_groups += [{} for _ in groups[len(self.param_groups) :]]  # somebody has thawed parameters since
        for group, own in zip(groups, self.param_groups, strict=True):
            # rates are weights of the average here, and a sum of weights must not be zero
            own |= {"params": group["params"], "lr": float(group.get("lr", 1.0)) or 1e-30}

    def step(self) -> None:
        with without_momentum(self.optimizer):
            self._step()


@contextmanager
def without_momentum(optimizer: Optimizer) -> Iterator[None]:
    """Within, ``momentum`` and the first of the ``betas`` are zero in every group: the average's own takes their place."""
    kept = [{k: group[k] for k in ("momentum", "nesterov", "betas") if k in group} for group in optimizer.param_groups]
    try:
        for group, own in zip(optimizer.param_groups, kept, strict=True):
            group.update({k: False if k == "nesterov" else 0.0 for k in own if k != "betas"})
            if own.get("betas"):
                group["betas"] = (0.0, *own["betas"][1:])
        yield
    finally:
        for group, own in zip(optimizer.param_groups, kept, strict=True):
            group.update(own)


def wrapper_around(base: Base, momentum: float, power: float) -> Any:
    """``schedulefree.ScheduleFreeWrapper`` around ``base``.

    Args:
        base: the optimizer.
        momentum: of the interpolation.
        power: of the steps' number, in their weight.

    Raises:
        ImportError: if the library is not installed.
    """
    try:
        library: Any = importlib.import_module("schedulefree")
    except ImportError as error:
        raise ImportError(
            "ScheduleFree needs the library schedulefree, which is not installed: pip install 'lightning-eff[schedulefree]'."
        ) from error

    class Wrapper(library.ScheduleFreeWrapper):
        @staticmethod
        def swap(x: Tensor, y: Tensor) -> None:
            """The library's own swaps bytes, which tensors without dimensions and with channels last do not have in a row."""
            kept = x.clone()
            x.copy_(y)
            y.copy_(kept)

    made: Any = Wrapper(base, momentum=momentum, r=power)
    made.train_mode = True
    return made


class ScheduleFree(AveragedWeights):
    """Train without a schedule: validate, keep and leave behind an average of the steps, in the place of a decayed rate.

    The library's ``schedulefree.ScheduleFreeWrapper`` goes around the module's own optimizer, whichever that is, and this
    callback does what its ``eval()`` and ``train()`` are called for. With ``beta`` for ``momentum``, and ``c`` the share of a
    step's weight in the sum of all so far, each weighing ``t^power`` times the square of the highest rate so far::

        z = the module's optimizer's step from z, with the gradient at y
        x = (1 - c) x + c z
        y = (1 - beta) z + beta x

    Training runs at ``y``. While the trainer validates, in every checkpoint's ``state_dict``, and from the end of fit on, the
    module holds ``x``; afterwards ``y`` is put back bit for bit, so that neither validation nor checkpoints change training.
    ``y`` and ``z`` are in this callback's state (two copies of the weights), and a resumed fit goes on from them. The
    optimizer's own momentum, or the first of its betas, is zero in its steps, since the interpolation takes its place. Its
    decay acts on ``z``. The module's schedulers are put to rest, each group at the highest rate that they name; the paper's
    runs want rates 1 to 10 times those of a schedule, see ``lr_factor``, and a warm-up.

    BatchNorm's statistics are recomputed for each ``x`` that is used, as by :class:`LatestWeightAveraging`. If another
    technique changes which blocks the network has, the average begins anew there.

    Args:
        momentum: beta in (0, 1); longer runs take more, as 0.95 or 0.98. None is plain training.
        lr_factor: each group's rate is multiplied by this, > 0; one that a ``LearningRateFinder`` sets counts as it is.
        warmup_steps: optimizer steps over which the rates rise from zero, >= 0.
        power: >= 0; above zero late steps weigh more.
        bn_batches: how many training batches, on each rank, BatchNorm statistics are recomputed from; None takes an epoch.

    Raises:
        ValueError: for other values; at setup, for manual optimization, for an optimizer that is schedule-free by itself or
            holds parameters that are not the module's, or beside another averaging of weights.
        ImportError: at setup, if the library is not installed.
    """

    saves: ClassVar[str] = (
        "the schedule: no end needs to be known; by the paper's claim, weights as good as a decayed rate's"
    )
    paper: ClassVar[str] = "Defazio et al. 2024, arXiv:2405.15682"
    constraints: ClassVar[str] = "pip install 'lightning-eff[schedulefree]'; one optimizer, which needs gradients alone"
    needs: ClassVar[Need] = Need.WHOLE
    refuses: ClassVar[Reasons] = {
        Part.PIPELINE: "runs that resume there were found to differ from those that never stopped"
    }
    survey: ClassVar[Survey | None] = None
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {
            "lr_factor": Uniform(1.0, 10.0, log=True),
            "momentum": Choice((0.9, 0.95, 0.98)),
            "warmup_steps": Choice((0, 20, 100)),
        },
    )
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate tuned as long and decayed linearly to zero"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **rivals(
            "ExponentialMovingAverage",
            "LatestWeightAveraging",
            "Lookahead",
            "RegularizedNonlinearAcceleration",
            "StochasticWeightAveraging",
        ),
        "LearningRateSchedule": "it does without a schedule, and the rates weigh its average",
        "LocalSGD": "it averages the weights that are trained, and not those that they are stepped from",
        "OptimizerOffload": "it makes the optimizer's step elsewhere, and here the step is made at other weights",
        "StochasticRoundingBF16": "it makes the optimizer's step by itself, and here the step is made at other weights",
    }
    needs_automatic_optimization: ClassVar[bool] = True
    sets_rates: ClassVar[bool] = True

    def __init__(
        self,
        momentum: float | None = 0.9,
        *,
        lr_factor: float = 1.0,
        warmup_steps: int = 0,
        power: float = 0.0,
        bn_batches: int | None = 100,
    ) -> None:
        def refuse(name: str, got: object, expected: str) -> None:
            raise ValueError(f"ScheduleFree({name}={got!r}): expected {expected}.")

        if momentum is not None and not 0.0 < momentum < 1.0:
            refuse("momentum", momentum, "a number in (0, 1), or None for plain training")
        if not 0.0 < lr_factor < float("inf"):
            refuse("lr_factor", lr_factor, "a finite number > 0")
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
            refuse("warmup_steps", warmup_steps, "a number of steps >= 0")
        if not 0.0 <= power < float("inf"):
            refuse("power", power, "a finite number >= 0")
        check_bn_batches("ScheduleFree", bn_batches)
        self.momentum, self.lr_factor, self.warmup_steps = momentum, lr_factor, warmup_steps
        self.power, self.bn_batches = power, bn_batches
        self._reset()

    @override
    def _reset(self) -> None:
        super()._reset()
        self._base: Base | None = None
        self._wrapper: Any = None
        self._rates: list[float | None] = []  # as training began
        self._warming = HeldRates("ScheduleFree(warmup_steps)")
        self._multiples: Multiples | None = None
        self._names: dict[Tensor, str] = {}
        self._progress: list[dict[str, Any]] = []  # of each group, until training starts
        self._loaded: dict[str, Any] | None = None  # a checkpoint's, until the optimizer is there

    @property
    @override
    def neutral(self) -> bool:
        return self.momentum is None

    # -- the run

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        configure = session.module.configure_optimizers

        def configure_optimizers() -> Any:
            configured = configure()
            schedulers = schedulers_of(configured)
            for optimizer in optimizers_of(configured):
                if any("train_mode" in group for group in optimizer.param_groups):
                    raise ValueError(
                        f"ScheduleFree: {type(session.module).__name__}.configure_optimizers returned"
                        f" {type(optimizer).__name__}, which is schedule-free by itself; expected a plain optimizer,"
                        " such as AdamW, which is made so here. Return that."
                    )
                if evaluates_anew(optimizer):
                    raise ValueError(
                        f"ScheduleFree: {type(session.module).__name__}.configure_optimizers returned"
                        f" {type(optimizer).__name__}, which evaluates the loss anew within its step; expected an optimizer"
                        " that needs gradients alone, such as AdamW. Return one."
                    )
                for group, rate in zip(optimizer.param_groups, reference_rates(optimizer, schedulers), strict=True):
                    if rate is not None and group.get("lr") is not None:
                        set_rate(group, rate * self.lr_factor)
            if schedulers:
                put_to_rest(schedulers)
                rank_zero_info(f"ScheduleFree: in the place of {', '.join(type(s).__name__ for s in schedulers)}")
            return configured

        session.patches.set(session.module, "configure_optimizers", configure_optimizers)

    @override
    def on_optimizers(self, session: Session) -> None:
        assert self.momentum is not None
        (optimizer,) = session.optimizers
        if self._base is not None and self._base.optimizer is optimizer:
            return
        self._names = {p: name for name, p in session.module.named_parameters()}
        strange = [p for group in optimizer.param_groups for p in group["params"] if p not in self._names]
        if strange:
            raise ValueError(
                f"ScheduleFree: {type(optimizer).__name__} steps {len(strange)} tensors that are no parameters of"
                f" {type(session.module).__name__} (shapes {[tuple(p.shape) for p in strange[:3]]}); expected the module's own."
            )
        super().on_optimizers(session)
        plain = optimizer.step
        self._base = Base(optimizer, plain)
        self._wrapper = wrapper_around(self._base, self.momentum, self.power)
        if self.lr_factor != 1.0 and not self.warmup_steps:
            shares: list[Share | None] = [Share(i, self.lr_factor) for i in range(len(optimizer.param_groups))]
            self._multiples = Multiples(optimizer, [], shares)
            watch(optimizer, self._multiples)
        made = rates_of(optimizer)
        if self._loaded is not None:
            by_name = {name: p for p, name in self._names.items()}
            for name, z in self._loaded["z"].items():
                self._base.state[by_name[name]]["z"] = z
            self._progress = self._loaded["groups"]
            self._take_up_progress()
            self._rates = self._loaded.get("rates", made)  # checkpoints of earlier versions have none
            if self._multiples is not None:
                self._multiples.absolute = self._loaded["absolute"]
            self._loaded = None

        def step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if session.asleep:
                return plain(closure)
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            assert self._base is not None
            look([optimizer], stepping=True)
            self._base.look()
            self._wrapper.step()
            self.outdate(session)
            return loss

        # a method, since a scheduler that is made later, as lr_find's is, looks for its function
        session.patches.set(optimizer, "step", MethodType(step, optimizer))

    def _take_up_progress(self) -> None:
        if self._base is not None and self._progress:
            self._base.look()
            for group, saved in zip(self._base.param_groups, self._progress, strict=False):
                group.update(saved)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._take_up_progress()  # of groups that were added as that run went on, too
        self._progress = []

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        super().on_batch_start(session, batch, batch_idx)
        if not self._rates:  # lr_find may have set others than they were made with
            self._rates = [rate for optimizer in session.optimizers for rate in rates_of(optimizer)]
        if self.warmup_steps:
            share = min(1.0, (session.trainer.global_step + 1) / self.warmup_steps)
            for optimizer in session.optimizers:
                self._warming.set(optimizer, self._rates, share)

    @override
    def detach(self, session: Session) -> None:
        super().detach(session)
        self._warming.release()
        self._wrapper = None
        if self._multiples is not None:
            unwatch(self._multiples.optimizer, self._multiples)
            self._multiples = None

    # -- the average

    def _z(self) -> dict[str, Tensor]:
        state = {} if self._base is None else self._base.state
        return {self._names[p]: held["z"] for p, held in state.items() if "z" in held}

    @property
    @override
    def names(self) -> Iterable[str]:
        return self._z()

    @override
    def average(self, session: Session) -> Iterator[tuple[str, Tensor]]:
        assert self.momentum is not None
        for name, z in self._z().items():
            # x = y + (1 − 1/β) (z − y), from y = (1 − β) z + β x
            yield name, torch.lerp(session.module.get_parameter(name).detach(), z, 1 - 1 / self.momentum)

    @override
    def forget(self) -> None:
        if self._base is not None:
            self._base.state.clear()
            for group in self._base.param_groups:
                for name in _PROGRESS:
                    group.pop(name, None)

    # -- what is kept and told

    @override
    def to_devices(self, devices: Mapping[str, torch.device]) -> None:
        if self._loaded is not None:
            self._loaded["z"] = {name: z.to(devices[name], copy=True) for name, z in self._loaded["z"].items()}

    @override
    def saved(self) -> dict[str, Any]:
        groups = [] if self._base is None else self._base.param_groups
        return {
            "z": self._z(),
            "rates": self._rates,
            "absolute": self._multiples is not None and self._multiples.absolute,
            "groups": [{name: g[name] for name in _PROGRESS if name in g} for g in groups],
        }

    @override
    def restore(self, state: dict[str, Any]) -> None:
        self._loaded = {
            "z": dict(state["z"]),
            **{name: list(state[name]) for name in ("groups", "rates") if name in state},
            "absolute": state.get("absolute", False),
        }

    @override
    def saved_weights(self, state: dict[str, Any]) -> Mapping[str, Tensor]:
        return state["z"]

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        rates = [] if self._base is None else [group["lr"] for group in self._base.param_groups]
        return {"steps": self._taken, "rate": max(rates, default=0.0)}

    @override
    def summary(self) -> str:
        return f"the weights are the average of {self._taken} steps" if self._taken else "no step was made"
