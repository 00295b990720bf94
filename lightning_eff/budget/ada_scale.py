"""Scale learning rate and schedule by the measured gain of a larger batch: AdaScale (Johnson et al. 2020, arXiv:2007.05105)."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Number
from lightning_eff._core._lightning.names import is_a, is_overridden
from lightning_eff._core._needs.needs import UNTRIED, Need, Part, Reasons
from lightning_eff._core._optim.gradient_norms import gradient_square
from lightning_eff._core._optim.scaled_steps import ScaledSteps
from lightning_eff._core.search_space import RunProfile, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.budget._micro_gradients import MicroGradients, signal_and_noise

WHO = "AdaScale"
_SMALLEST = 1e-6  # of a variance, as in the paper


def variance_and_square(small: Tensor, large: Tensor, S: int) -> tuple[Tensor, Tensor]:
    """Return unbiased estimates of ``sigma^2``, the variance of a micro-batch's gradient, and ``mu^2``, the true one's square.

    ``sigma^2 = (sum_i |g_i|^2 - S |g|^2) / (S - 1)`` and ``mu^2 = |g|^2 - sigma^2 / S``, at least 1e-6 and 0.

    Args:
        small: the mean of ``|g_i|^2`` over the ``S`` micro-batches.
        large: ``|g|^2``, of their mean gradient.
        S: the number of micro-batches, >= 2.
    """
    mu2, sigma2 = signal_and_noise(small, large, 1, S)
    return sigma2.clamp(min=_SMALLEST), mu2.clamp(min=0.0)


def averaged(mean: Tensor, value: Tensor, n: Tensor, S: int) -> Tensor:
    """Return the moving average with ``theta = max(1 - S / 1000, 0)`` after its ``n``-th value; the mean of the first values.

    ``theta mean + (1 - theta) value``, and the mean of all values while ``n < 1 / (1 - theta)``.
    """
    theta = max(1 - S / 1000, 0.0)
    return mean + torch.clamp(1 / n, min=1 - theta) * (value - mean)


def gain(sigma2: float, mu2: float, S: int) -> float:
    """Return ``r = (sigma^2 + mu^2) / (sigma^2 / S + mu^2)``, in [1, S]: one step with ``S`` micro-batches is worth ``r``."""
    return (sigma2 + mu2) / (sigma2 / S + mu2)


def _for_the_users_rate(profile: RunProfile) -> str | None:
    return "it carries a tuned learning rate to a larger batch, and a search tunes it for the run's own batch"


class AdaScale(MicroGradients):
    """Scale the learning rate and the schedule to a larger batch by the measured gain of averaging its micro-batches.

    A module's learning rate and schedule are tuned for some batch. Train with ``S`` such batches in each step, on ``S``
    ranks, in ``S`` accumulated micro-batches, or both. Each step then uses ``r`` times the schedule's learning rate and counts
    as ``r`` steps of the schedule. The gain ``r`` is between 1 and ``S``. It is near ``S`` where noise dominates the gradient,
    as late in training, and near 1 where micro-batches agree. It follows from the variance ``sigma^2`` of the micro-batches'
    gradients and the square ``mu^2`` of the true gradient::

        r = (sigma^2 + mu^2) / (sigma^2 / S + mu^2)

    Both are moving averages over earlier steps, from the norms of gradients that the step computes anyway. So the gain of a
    step does not depend on its own samples, and the first step has ``r = 1``. :class:`LinearScaling` uses a fixed factor.

    Use it to train with more devices than the learning rate was tuned for, with SGD. A scheduler that steps once per step
    (``"interval": "step"``) is stepped as often as ``tau``, the sum of all gains, passes an integer: give it the length that
    it has for the small batch. With ``steps``, training ends when ``tau`` reaches that length, and
    :class:`LearningRateSchedule` follows ``floor(tau)``, as step schedulers do. Schedulers that step per epoch or by a metric
    continue as before. For Adam and similar optimizers, use ``power=0.5``.

    It adds no passes. The host waits for the device once per step. The scaling is applied within the optimizer step only, so
    LearningRateMonitor shows the unscaled value. Gradients are measured before clipping. A shorter window at an epoch's end,
    or one in which ``training_step`` returned None, is not measured, and counts with the last gain.

    It logs ``gain``, ``scaled_steps`` (``tau``), ``variance`` (``sigma^2``) and ``square`` (``mu^2``).

    Args:
        steps: the number of the small batch's steps that the run is worth at its end. None leaves the end to the Trainer.
        power: the exponent of the gain in the learning rate. 1 suits SGD, 0.5 suits Adam, 0 is plain training.

    Raises:
        ValueError: for a value out of range. At setup, if a step has a single micro-batch, with Lightning's
            ``GradientAccumulationScheduler``, with manual optimization, with step schedulers whose ``frequency`` is not 1 or
            that an own ``lr_scheduler_step`` steps, and under strategies that divide the module or compress gradients.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, accumulate_grad_batches=4, callbacks=[AdaScale(steps=10_000)])

    References:
        Johnson et al. 2020, "AdaScale SGD: A User-Friendly Algorithm for Distributed Training", arXiv:2007.05105.
        Qiao et al. 2021, "Pollux", arXiv:2008.12260 (the square root, for Adam).
    """

    saves = "time on many devices: large batches with a suitable learning rate and schedule, without a new search"
    paper = "Johnson et al. 2020, arXiv:2007.05105"
    constraints = "needs several ranks or accumulate_grad_batches > 1"
    needs: ClassVar[Need] = Need.WHOLE
    refuses: ClassVar[Reasons] = {
        Part.COPIES: UNTRIED,
        Part.COMPRESSED: "it compares gradients with their exact mean over processes",
    }
    search_space = SearchSpace(pointless=_for_the_users_rate)
    control = Control("the baseline with its learning rate and schedule tuned for the same batch and as many steps")
    needs_optimizer: ClassVar[bool] = True
    conflicts: ClassVar[Mapping[str, str]] = {
        "BatchSizeWarmup": "both scale the learning rate with the batch. Train with a constant batch, or with"
        " BatchSizeWarmup alone",
        "LinearScaling": "both scale the learning rate with the batch. Use AdaScale for a measured factor, or LinearScaling"
        " for a fixed one",
    }
    neutral_at: ClassVar[Mapping[str, Any]] = {"power": 0.0}

    def __init__(
        self,
        steps: Annotated[int, Count()] | None = None,
        *,
        power: Annotated[float, Number(at_least=0, at_most=2)] = 1.0,
    ) -> None:
        self.steps, self.power = steps, power
        self._scaled: ScaledSteps | None = None

    def _reset(self) -> None:
        super()._reset()
        self._averages = torch.zeros(3, dtype=torch.float64)  # sigma^2, mu^2, measured steps; on the device
        self._gain = 1.0  # of the current step
        self._tau = 0.0
        self._S = 1
        self._stepped: list[int] = []  # how often each scheduler that counts steps was stepped
        self._own_hook = False  # whether the module decides how schedulers step
        self._counting: list[RemovableHandle] = []

    # -- the run

    @override
    def on_budget(self, session: Session) -> None:
        session.progress.max_scaled_steps = self.steps

    @override
    def check(self, session: Session) -> None:
        for callback in session.trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if is_a(callback, GradientAccumulationScheduler):
                raise ValueError(
                    f"{WHO} and GradientAccumulationScheduler cannot train together: the gain compares a fixed number of"
                    " micro-batches per step. Use Trainer(accumulate_grad_batches=...), or remove one of them."
                )
        self._S = session.replicas.count * session.trainer.accumulate_grad_batches
        if self._S == 1:
            raise ValueError(
                f"{WHO}(steps={self.steps}): a step has one micro-batch, so there is no variance to measure. Set"
                " Trainer(accumulate_grad_batches=...) to 2 or more, train on several devices with strategy='ddp', or remove"
                f" {WHO}."
            )

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        self._S = session.replicas.count * session.trainer.accumulate_grad_batches
        self._own_hook = is_overridden("lr_scheduler_step", session.module)
        original = session.module.lr_scheduler_step

        def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
            if session.asleep:
                original(scheduler, metric)
                return
            counting = [config.scheduler for config in self._counted(session)]
            place = next((i for i, one in enumerate(counting) if one is scheduler), None)
            if place is None:
                original(scheduler, metric)
                return
            self._stepped += [0] * (len(counting) - len(self._stepped))
            reached = math.floor(min(self._tau, self.steps or math.inf))
            for _ in range(reached - self._stepped[place]):
                original(scheduler, metric)
            self._stepped[place] = max(reached, self._stepped[place])

        session.patches.set(session.module, "lr_scheduler_step", lr_scheduler_step)

    @staticmethod
    def _counted(session: Session) -> list[Any]:
        """The settings of the schedulers that count steps."""
        configs = session.trainer.strategy.lr_scheduler_configs
        return [config for config in configs if config.interval == "step" and not config.reduce_on_plateau]

    @override
    def on_optimizers(self, session: Session) -> None:
        for config in self._counted(session):
            name, module = type(config.scheduler).__name__, type(session.module).__name__
            if config.frequency != 1:
                raise ValueError(
                    f"{WHO}: the scheduler {name} steps every {config.frequency} batches, which are not steps of the small"
                    " batch. Remove 'frequency' from the scheduler's settings in configure_optimizers."
                )
            if self._own_hook:
                raise ValueError(
                    f"{WHO}: {module}.lr_scheduler_step decides how {name} steps, so it cannot follow the steps of the small"
                    f" batch. Remove lr_scheduler_step from {module}, or return {name} with 'interval': 'epoch'."
                )
        self._scaled = ScaledSteps(session.optimizers, lambda: self.rate_factor)
        self._counting = [optimizer.register_step_post_hook(self._advance) for optimizer in session.optimizers]

    def _advance(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._session is not None and not self._session.asleep:
            self._tau += self._gain

    @property
    def rate_factor(self) -> float:
        """The factor of the current step's learning rate."""
        return self._gain**self.power

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        if batch_idx % session.trainer.accumulate_grad_batches == 0:
            sigma2, mu2, n = self._averages.tolist()
            self._gain = gain(sigma2, mu2, self._S) if n else 1.0

    @override
    @torch.no_grad()
    def _measure(self, trainer: Trainer, parameters: list[nn.Parameter]) -> None:
        (small,) = self._mean_square(trainer)
        large = gradient_square(trainer.strategy, [(p, p.grad) for p in parameters])
        of_one, of_all = self._unscaled(trainer, small, large)
        found = torch.stack(variance_and_square(of_one, of_all, self._S))
        averages = self._averages = self._averages.to(found.device)
        n = averages[2:] + 1
        moved = torch.cat([averaged(averages[:2], found, n, self._S), n])
        self._averages = torch.where(found.isfinite().all(), moved, averages)  # not finite where gradients overflowed

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        super().on_batch_end(session, batch_idx)
        session.progress.scaled_steps = math.floor(self._tau)
        if self.steps is not None and self._tau >= self.steps:
            session.trainer.should_stop = True

    @override
    def detach(self, session: Session) -> None:
        super().detach(session)
        for hook in self._counting:
            hook.remove()
        if self._scaled is not None:
            self._scaled.remove()
        self._scaled, self._counting = None, []

    # -- what is kept and told

    @override
    def state_dict(self) -> dict[str, Any]:
        kept = {"averages": self._averages.tolist(), "gain": self._gain, "tau": self._tau}
        return {**super().state_dict(), **kept, "stepped": list(self._stepped)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._averages = torch.tensor(state_dict["averages"], dtype=torch.float64)
        self._gain, self._tau, self._stepped = state_dict["gain"], state_dict["tau"], list(state_dict["stepped"])
        if self._session is not None:
            self._session.progress.scaled_steps = math.floor(self._tau)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        sigma2, mu2, _ = self._averages.tolist()
        return {"gain": self._gain, "scaled_steps": self._tau, "variance": sigma2, "square": mu2}

    @override
    def summary(self) -> str:
        if not self._tau:
            return "made no step"
        of = f" of {self.steps:,}" if self.steps is not None else ""
        return (
            f"worth {self._tau:,.0f}{of} steps of the small batch; the last step with {self._S} micro-batches was worth"
            f" {self._gain:.2f}"
        )
