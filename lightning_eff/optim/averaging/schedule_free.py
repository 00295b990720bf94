"""Schedule-free learning: an average of all steps replaces the decay of the learning rate (Defazio et al. 2024)."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MethodType
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction, Number
from lightning_eff._core._needs.needs import Need, Part, Reasons
from lightning_eff._core._optim.combined import set_rate
from lightning_eff._core._optim.external_rates import Share, look, unwatch, watch
from lightning_eff._core._optim.group_multipliers import Multiples
from lightning_eff._core._optim.pinned_rates import HeldRates
from lightning_eff._core._optim.scheduled import optimizers_of, put_to_rest, reference_rates, schedulers_of
from lightning_eff._core.optimizers import evaluates_anew
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import LOCAL_STEPS, Control
from lightning_eff.optim.averaging._engine import AveragedWeights, BNBatches, rivals
from lightning_eff.optim.averaging._sequences import PROGRESS, Sequences


def rates_of(optimizer: Optimizer) -> list[float | None]:
    """The learning rate of each parameter group; None where a group has none."""
    return [None if group.get("lr") is None else float(group["lr"]) for group in optimizer.param_groups]


class ScheduleFree(AveragedWeights):
    """Train without a learning-rate schedule: validate, save and end with an average of all steps.

    It wraps the module's own optimizer, whichever it is. With ``beta`` for ``momentum``, and ``c`` the weight of the current
    step relative to the sum of all weights so far (a step weighs ``t^power`` times the square of the highest learning rate so
    far)::

        z = the module's optimizer's step from z, with the gradient at y
        x = (1 - c) x + c z
        y = (1 - beta) z + beta x

    Training runs at ``y``. The module holds ``x`` while the trainer validates, in every checkpoint's ``state_dict``, and
    from the end of fit on. Afterwards ``y`` is restored bit for bit, so neither validation nor checkpoints change training.
    ``y`` and ``z`` are in this callback's state (two more copies of the weights), from which a resumed fit continues. The
    optimizer's own momentum, or its first beta, is set to zero, because the interpolation replaces it. Weight decay acts on
    ``z``. On a CPU, Adam and AdamW run torch's fused kernel unless their ``fused`` or ``foreach`` is set.

    Use it when the length of the run is not known in advance. The module's schedulers are switched off, and each group keeps
    its highest scheduled learning rate. The paper uses learning rates 1 to 10 times those of a schedule (see ``lr_factor``),
    and a warm-up.

    BatchNorm statistics are recomputed for each ``x`` that is used. If another technique changes the network's blocks, the
    average starts anew.

    Args:
        momentum: ``beta``. Longer runs use more, such as 0.95 or 0.98. None is plain training.
        lr_factor: the factor on each group's learning rate. A rate set by ``LearningRateFinder`` is used as it is.
        warmup_steps: the number of optimizer steps over which the learning rate rises from zero.
        power: the exponent of the step number in a step's weight. Above zero, late steps weigh more.
        bn_batches: the number of training batches, on each rank, from which BatchNorm statistics are recomputed; None uses
            a whole epoch.

    Raises:
        ValueError: for a value out of range. At setup, for manual optimization, for an optimizer that is schedule-free
            itself or holds parameters that are not the module's, or with another weight average.

    Example:
        >>> schedule_free = ScheduleFree(momentum=0.9, lr_factor=3.0, warmup_steps=100)
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[schedule_free])

    References:
        Defazio et al. 2024, "The Road Less Scheduled", arXiv:2405.15682.
    """

    saves: ClassVar[str] = (
        "the schedule: the run's length need not be known; according to the paper, results match a decayed learning rate"
    )
    paper: ClassVar[str] = "Defazio et al. 2024, arXiv:2405.15682"
    constraints: ClassVar[str] = "needs one optimizer without a closure"
    needs: ClassVar[Need] = Need.WHOLE
    refuses: ClassVar[Reasons] = {
        Part.PIPELINE: "runs that resume there were found to differ from those that never stopped"
    }
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {
            "lr_factor": Uniform(1.0, 10.0, log=True),
            "momentum": Choice((0.9, 0.95, 0.98)),
            "warmup_steps": Choice((0, 20, 100)),
        },
    )
    control: ClassVar[Control] = Control(
        "the baseline for the same time, with a learning rate tuned for as long that decays linearly to zero"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **rivals(
            "ExponentialMovingAverage",
            "LatestWeightAveraging",
            "Lookahead",
            "RegularizedNonlinearAcceleration",
            "StochasticWeightAveraging",
        ),
        "LearningRateSchedule": "schedule-free training has no schedule, and the learning rates weigh its average",
        **dict.fromkeys(
            LOCAL_STEPS, "ranks would average the trained weights, but not those that the optimizer steps from"
        ),
        "OptimizerOffload": "the optimizer's step runs on the CPU there, and at other weights here",
        "StochasticRoundingBF16": "the plugin makes the optimizer's step itself, and here the step is made at other weights",
    }
    needs_automatic_optimization: ClassVar[bool] = True
    sets_rates: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"momentum": None}

    def __init__(
        self,
        momentum: Annotated[float, Fraction(above=0, below=1)] | None = 0.9,
        *,
        lr_factor: Annotated[float, Number(above=0)] = 1.0,
        warmup_steps: Annotated[int, Count(at_least=0)] = 0,
        power: Annotated[float, Number(at_least=0)] = 0.0,
        bn_batches: BNBatches = 100,
    ) -> None:
        self.momentum, self.lr_factor, self.warmup_steps = momentum, lr_factor, warmup_steps
        self.power, self.bn_batches = power, bn_batches

    @override
    def _reset(self) -> None:
        super()._reset()
        self._sequences: Sequences | None = None
        self._rates: list[float | None] = []  # as training began
        self._warming = HeldRates("ScheduleFree(warmup_steps)")
        self._multiples: Multiples | None = None
        self._names: dict[Tensor, str] = {}
        self._progress: list[dict[str, Any]] = []  # of each group, until training starts
        self._loaded: dict[str, Any] | None = None  # a checkpoint's, until the optimizer is there

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
                        f" {type(optimizer).__name__}, which is already schedule-free. Return a plain optimizer such as AdamW,"
                        " or"
                        " remove ScheduleFree."
                    )
                if evaluates_anew(optimizer):
                    raise ValueError(
                        f"ScheduleFree: {type(session.module).__name__}.configure_optimizers returned"
                        f" {type(optimizer).__name__}, which evaluates the loss again within its step. Return an optimizer that"
                        " only needs gradients, such as AdamW."
                    )
                for group, rate in zip(optimizer.param_groups, reference_rates(optimizer, schedulers), strict=True):
                    if rate is not None and group.get("lr") is not None:
                        set_rate(group, rate * self.lr_factor)
            if schedulers:
                put_to_rest(schedulers)
                rank_zero_info(f"ScheduleFree: replaces {', '.join(type(s).__name__ for s in schedulers)}")
            return configured

        session.patches.set(session.module, "configure_optimizers", configure_optimizers)

    @override
    def on_optimizers(self, session: Session) -> None:
        assert self.momentum is not None
        (optimizer,) = session.optimizers
        if self._sequences is not None and self._sequences.optimizer is optimizer:
            return
        self._names = {p: name for name, p in session.module.named_parameters()}
        strange = [p for group in optimizer.param_groups for p in group["params"] if p not in self._names]
        if strange:
            raise ValueError(
                f"ScheduleFree: {type(optimizer).__name__} updates {len(strange)} tensors that are not parameters of"
                f" {type(session.module).__name__} (shapes {[tuple(p.shape) for p in strange[:3]]}). Register them as"
                " parameters of"
                " the module."
            )
        super().on_optimizers(session)
        plain = optimizer.step
        sequences = self._sequences = Sequences(optimizer, plain, self.momentum, self.power)
        if self.lr_factor != 1.0 and not self.warmup_steps:
            shares: list[Share | None] = [Share(i, self.lr_factor) for i in range(len(optimizer.param_groups))]
            self._multiples = Multiples(optimizer, [], shares)
            watch(optimizer, self._multiples)
        made = rates_of(optimizer)
        if self._loaded is not None:
            by_name = {name: p for p, name in self._names.items()}
            for name, z in self._loaded["z"].items():
                sequences.z[by_name[name]] = z
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
            look([optimizer], stepping=True)
            sequences.look()
            sequences.step()
            self.outdate(session)
            return loss

        # a bound method, since schedulers made later (lr_find's) look up its function
        session.patches.set(optimizer, "step", MethodType(step, optimizer))

    def _take_up_progress(self) -> None:
        if self._sequences is not None and self._progress:
            self._sequences.look()
            for group, saved in zip(self._sequences.param_groups, self._progress, strict=False):
                group.update(saved)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._take_up_progress()  # also for groups that were added during that run
        self._progress = []

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        super().on_batch_start(session, batch, batch_idx)
        if not self._rates:  # lr_find may have changed them
            self._rates = [rate for optimizer in session.optimizers for rate in rates_of(optimizer)]
        if self.warmup_steps:
            share = min(1.0, (session.trainer.global_step + 1) / self.warmup_steps)
            for optimizer in session.optimizers:
                self._warming.set(optimizer, self._rates, share)

    @override
    def detach(self, session: Session) -> None:
        super().detach(session)
        self._warming.release()
        if self._multiples is not None:
            unwatch(self._multiples.optimizer, self._multiples)
            self._multiples = None

    # -- the average

    def _z(self) -> dict[str, Tensor]:
        held = {} if self._sequences is None else self._sequences.z
        return {self._names[p]: z for p, z in held.items()}

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
        if self._sequences is not None:
            self._sequences.z.clear()
            for group in self._sequences.param_groups:
                for name in PROGRESS:
                    group.pop(name, None)

    # -- state and reports

    @override
    def to_devices(self, devices: Mapping[str, torch.device]) -> None:
        if self._loaded is not None:
            self._loaded["z"] = {name: z.to(devices[name], copy=True) for name, z in self._loaded["z"].items()}

    @override
    def saved(self) -> dict[str, Any]:
        groups = [] if self._sequences is None else self._sequences.param_groups
        return {
            "z": self._z(),
            "rates": self._rates,
            "absolute": self._multiples is not None and self._multiples.absolute,
            "groups": [{name: g[name] for name in PROGRESS if name in g} for g in groups],
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
        rates = [] if self._sequences is None else [group["lr"] for group in self._sequences.param_groups]
        return {"steps": self._taken, "rate": max(rates, default=0.0)}

    @override
    def summary(self) -> str:
        return f"the weights are the average of {self._taken} steps" if self._taken else "no optimizer step was made"
