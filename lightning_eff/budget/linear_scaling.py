"""Scale the learning rate with the batch size, after a gradual warm-up (Goyal et al. 2017, arXiv:1706.02677)."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction, Number
from lightning_eff._core._lightning.names import is_a
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._optim.scaled_steps import ScaledSteps
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique

WHO = "LinearScaling"


def factor_at(u: float, k: float, warmup: float) -> float:
    """Return the factor of the learning rate ``eta`` at the fraction ``u`` of the budget, for ``k`` times the base batch.

    ``1 + (k - 1) u / warmup`` while ``u < warmup``, which rises from ``eta`` to ``k eta`` in equal steps; then ``k``.
    """
    return 1.0 + (k - 1.0) * (u / warmup) if u < warmup else k


def loader_batch_size(loader: Any) -> int | None:
    """Return the batch size of a loader or of its batch sampler, or None where neither has one."""
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(owner, "batch_size", None)
        if isinstance(size, int) and not isinstance(size, bool) and size >= 1:
            return size
    return None


def _each(loaders: Any) -> list[Any]:
    """List the loaders in ``trainer.train_dataloader``: one, or a list, tuple or mapping of them."""
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, list | tuple) else [loaders]


def _all_at_once(technique: Any) -> Mapping[str, Technique]:
    if technique.neutral or not technique.warmup:
        return {}
    settings = {"power": technique.power, "batch_size": technique.batch_size}
    return {"no_warmup": LinearScaling(technique.base_batch_size, 0.0, **settings)}


def _search(cls: Callable[..., Any], values: Mapping[str, Any], profile: RunProfile) -> Any:
    values = dict(values)
    base = max(1, round(profile.batch_size * profile.world_size / values.pop("times")))
    return cls(base, **values)


class LinearScaling(Technique):
    """Scale the learning rate with the batch size, after a gradual warm-up.

    Each step uses the learning rate of the module's schedule times ``(B / base_batch_size) ** power``. ``B`` is the number of
    samples per optimizer step: the loader's batch size times ``accumulate_grad_batches``, over all ranks. Tune the learning
    rate once for ``base_batch_size``; with another number of devices, another loader or another accumulation window, the run
    adapts it. A run that resumes on other devices uses the learning rate of its new batch.

    In theory, ``k`` SGD steps at learning rate ``eta`` equal one step at ``k eta`` on ``k`` times the samples, if the weights
    barely change in between. Early in training they do change, so the learning rate begins at the base value and rises
    linearly over the first ``warmup`` of the budget. Goyal et al. train 90 epochs from a learning rate of 0.1 for 256 images,
    with a warm-up of 5 epochs.

    Use it for data-parallel training with a large batch. It costs nothing. The rule holds up to a critical batch size, which
    :class:`GradientNoiseScale` measures. For Adam and similar optimizers, use the square root: ``power=0.5``.

    The scaling is applied within the optimizer step only. LearningRateMonitor shows the unscaled value, and any scheduler
    continues to work. A shorter window or a smaller batch at the end of an epoch does not change the factor.

    It logs ``batch``, the samples per step, and ``rate_factor``.

    Args:
        base_batch_size: the samples per step, over all ranks, for which the module's learning rate was tuned.
        warmup: the fraction of the budget over which the learning rate rises from its base value. 0 is no warm-up.
        power: the exponent of the batch size. 1 suits SGD, 0.5 suits Adam, 0 is plain training.
        batch_size: the samples per loader batch on each rank, instead of the loader's own value. Needed for loaders
            without one, such as those that batch by tokens, and with :class:`TokenBudgetBatches`; give the mean there.

    Raises:
        ValueError: for a value out of range. At setup, with Lightning's ``GradientAccumulationScheduler`` or
            :class:`BatchSizeWarmup`, with :class:`TokenBudgetBatches` if ``batch_size`` is missing, and with ``warmup`` in a
            run without an end. Before the first step, if the loader has no batch size or there are several loaders, and
            ``batch_size`` is missing.

    Example:
        >>> trainer = L.Trainer(max_epochs=90, devices=1, callbacks=[LinearScaling(256, warmup=5 / 90)])

    References:
        Goyal et al. 2017, "Accurate, Large Minibatch SGD", arXiv:1706.02677, sections 2.1 and 2.2.
        Malladi et al. 2022, arXiv:2205.10287 (the square root).
    """

    saves = "time on many devices: large batches with a suitable learning rate, without a new search"
    paper = "Goyal et al. 2017, arXiv:1706.02677"
    constraints = "needs a loader with a batch size, or batch_size="
    needs: ClassVar[Need] = Need.BATCH
    search_space = SearchSpace(
        {"times": Choice((0.5, 2.0, 4.0)), "warmup": Uniform(0.0, 0.2), "power": Choice((0.5, 1.0))}, make=_search
    )
    control = Control(
        "the baseline with its learning rate tuned for the same batch; and the full learning rate from the first step",
        _all_at_once,
    )
    needs_optimizer: ClassVar[bool] = True
    conflicts: ClassVar[Mapping[str, str]] = {
        "BatchSizeWarmup": "both scale the learning rate with the batch. BatchSizeWarmup alone scales it from its first batch",
        "TokenBudgetBatches": "its batches differ from the loader's batch size. Give their mean as batch_size= to use both",
    }
    neutral_at: ClassVar[Mapping[str, Any]] = {"power": 0.0}

    def __init__(
        self,
        base_batch_size: Annotated[int, Count()],
        warmup: Annotated[float, Fraction()] = 0.05,
        *,
        power: Annotated[float, Number(at_least=0, at_most=2)] = 1.0,
        batch_size: Annotated[float, Number(above=0)] | None = None,
    ) -> None:
        self.base_batch_size, self.warmup, self.power, self.batch_size = base_batch_size, warmup, power, batch_size
        if batch_size is not None:
            others = {name: why for name, why in self.conflicts.items() if name != "TokenBudgetBatches"}
            self.conflicts = others  # pyright: ignore[reportAttributeAccessIssue] -- only of this instance
        self._scaled: ScaledSteps | None = None
        self._batch, self._factor = 0.0, 1.0

    # -- the run

    @override
    def check(self, session: Session) -> None:
        for callback in session.trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if is_a(callback, GradientAccumulationScheduler):
                raise ValueError(
                    f"{WHO} and GradientAccumulationScheduler cannot train together: the learning rate would jump with"
                    " the batch in mid-run. Use Trainer(accumulate_grad_batches=...), or BatchSizeWarmup instead of both."
                )
        if self.warmup and not session.progress.limits():
            raise ValueError(
                f"{WHO}(warmup={self.warmup}): the Trainer has no end (max_steps=-1, max_epochs=-1, max_time=None), so"
                " warm-up has no length. Set max_steps, max_epochs or max_time, or warmup=0."
            )

    @override
    def attach(self, session: Session) -> None:
        self._batch, self._factor = 0.0, 1.0

    @override
    def on_optimizers(self, session: Session) -> None:
        self._scaled = ScaledSteps(session.optimizers, lambda: self._factor)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._session is not None and not self.neutral:
            self._find_batch(self._session)

    def _find_batch(self, session: Session) -> None:
        """Find the samples per step once Lightning has made its loaders; every rank finds the same, or raises."""
        loaders = _each(session.trainer.train_dataloader)
        own = loader_batch_size(loaders[0]) if len(loaders) == 1 else None
        sizes = session.gather(own if self.batch_size is None else self.batch_size)
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            raise ValueError(
                f"{WHO}: found {_found(loaders, own)}, so the samples per step are unknown. Give the samples per batch on each"
                f" rank, or their mean: {WHO}({self.base_batch_size}, batch_size=...)."
            )
        self._batch = sum(known) * session.trainer.accumulate_grad_batches

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        self._factor = factor_at(session.progress.u, (self._batch / self.base_batch_size) ** self.power, self.warmup)

    @override
    def detach(self, session: Session) -> None:
        if self._scaled is not None:
            self._scaled.remove()
            self._scaled = None

    # -- reports

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"batch": self._batch, "rate_factor": self._factor}

    @override
    def summary(self) -> str:
        return (
            f"{self._batch:g} samples per step, the last at {self._factor:.3g} times the learning rate for"
            f" {self.base_batch_size:g}"
        )


def _found(loaders: list[Any], own: int | None) -> str:
    if own is not None:
        return f"batches of {own} on this rank, and a loader without batch_size on another"
    if len(loaders) != 1:
        return f"{len(loaders)} training loaders"
    loader = getattr(loaders[0], "_loader", loaders[0])  # the user's own loader, if it is wrapped
    return f"a {type(loader).__name__} without batch_size"
