"""The rate that fits the batch: in proportion to it, after a gradual warm-up (Goyal et al. 2017, arXiv:1706.02677)."""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._lightning.names import is_a
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._optim.scaled_steps import ScaledSteps
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique

WHO = "LinearScaling"


def factor_at(u: float, k: float, warmup: float) -> float:
    """What the rate ``eta`` is multiplied with at the share ``u`` of the budget, for a batch ``k`` times the base's.

    ``1 + (k - 1) u / warmup`` while ``u < warmup``: from ``eta`` to ``k eta`` by equal parts at each step; then ``k``.
    """
    return 1.0 + (k - 1.0) * (u / warmup) if u < warmup else k


def loader_batch_size(loader: Any) -> int | None:
    """The samples of one batch, as the loader or its batch sampler says; None where neither does."""
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(owner, "batch_size", None)
        if isinstance(size, int) and not isinstance(size, bool) and size >= 1:
            return size
    return None


def _each(loaders: Any) -> list[Any]:
    """The loaders in what ``trainer.train_dataloader`` is: one, or a list, tuple or mapping of them."""
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
    """Make each step at the rate of the module's schedule times ``(B / base_batch_size) ** power``.

    ``B`` is the batch of an optimizer step in samples: what the loader makes, times ``accumulate_grad_batches``, over all
    ranks. Tune the rate once, for a batch of ``base_batch_size``; on other numbers of devices, with another loader or window,
    the run finds the rate that fits. A resumed run on other devices has the rate of its own batch.

    Why in proportion: ``k`` steps of SGD at the rate ``eta``, on ``k`` batches and at weights that barely change, are one
    step at ``k eta`` on all their samples. Early in training weights do change, so the rate begins at that of the base, and
    rises to its full by equal parts over the first ``warmup`` of the budget. The rule holds up to some batch and no further
    (``GradientNoiseScale`` tells which). For Adam and its like the square root suits: ``power=0.5``.

    The rate is scaled within the optimizer's step alone: LearningRateMonitor shows it unscaled, and any schedule goes on as
    it is. The rate is the same in steps at an epoch's end whose window is shorter, or whose last batch is smaller.

    Settings to begin with: the paper's rate of 0.1 for 256 images, with ``warmup`` of 5 of 90 epochs.

    Logged: ``batch``, the samples of a step; ``rate_factor``.

    Args:
        base_batch_size: samples of a step, over all ranks, that the module's own rate was tuned for, >= 1.
        warmup: the share of the budget in [0, 1] over which the rate rises from that of the base; 0 for none.
        power: of the batch, that the rate is multiplied with, in [0, 2]; 1 suits SGD, 1/2 Adam, 0 is plain training.
        batch_size: samples of one of the loader's batches on each rank, > 0, in place of what the loader says: for
            loaders that do not say it, such as those that batch by tokens, and beside :class:`TokenBudgetBatches`; their
            mean it is then.

    Raises:
        ValueError: for other values; at setup, beside Lightning's ``GradientAccumulationScheduler`` or
            :class:`BatchSizeWarmup`, beside :class:`TokenBudgetBatches` without ``batch_size``, and with ``warmup`` in a
            run without an end; before the first step, where the loader
            does not say how many samples its batches have, or there are several loaders, and ``batch_size`` is not given.

    Sources:
        Goyal et al. 2017, arXiv:1706.02677, sections 2.1 and 2.2; Malladi et al. 2022, arXiv:2205.10287 (the square root).
    """

    saves: ClassVar[str] = "time on many devices: large batches at a rate that fits, without a search for each"
    paper: ClassVar[str] = "Goyal et al. 2017, arXiv:1706.02677"
    constraints: ClassVar[str] = "a loader that says its batch size, or batch_size="
    needs: ClassVar[Need] = Need.BATCH
    survey: ClassVar[Survey | None] = Survey("large batches", shen="5.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"times": Choice((0.5, 2.0, 4.0)), "warmup": Uniform(0.0, 0.2), "power": Choice((0.5, 1.0))}, make=_search
    )
    control: ClassVar[Control] = Control(
        "the baseline with its rate tuned on the same batch; and the full rate from the first step",
        _all_at_once,
    )
    needs_optimizer: ClassVar[bool] = True
    conflicts: ClassVar[Mapping[str, str]] = {
        "BatchSizeWarmup": "both scale the rate with the batch. BatchSizeWarmup alone scales it from that of its first batch",
        "TokenBudgetBatches": "its batches have other numbers of samples than the loader says. Their mean, as"
        " LinearScaling(..., batch_size=), is a way, too",
    }

    def __init__(
        self,
        base_batch_size: int,
        warmup: float = 0.05,
        *,
        power: float = 1.0,
        batch_size: float | None = None,
    ) -> None:
        if isinstance(base_batch_size, bool) or not isinstance(base_batch_size, int) or base_batch_size < 1:
            raise ValueError(
                f"{WHO}({base_batch_size=}): expected an integer >= 1, the samples of a step that the rate was tuned for."
            )
        if not 0.0 <= warmup <= 1.0:
            raise ValueError(f"{WHO}({warmup=}): expected a share of the budget in [0, 1]; 0 for none.")
        if not 0.0 <= power <= 2.0:
            raise ValueError(f"{WHO}({power=}): expected a number in [0, 2]: 1 suits SGD, 0.5 Adam, 0 leaves the rate.")
        if batch_size is not None and (isinstance(batch_size, bool) or not 0 < batch_size < math.inf):
            raise ValueError(
                f"{WHO}({batch_size=}): expected a number of samples > 0 in one of the loader's batches on each rank, or"
                " None to ask the loader."
            )
        self.base_batch_size, self.warmup, self.power, self.batch_size = base_batch_size, warmup, power, batch_size
        if batch_size is not None:
            others = {name: why for name, why in self.conflicts.items() if name != "TokenBudgetBatches"}
            self.conflicts = others  # pyright: ignore[reportAttributeAccessIssue] -- of this instance alone
        self._scaled: ScaledSteps | None = None
        self._batch, self._factor = 0.0, 1.0

    @property
    @override
    def neutral(self) -> bool:
        return self.power == 0.0

    # -- the run

    @override
    def check(self, session: Session) -> None:
        for callback in session.trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if is_a(callback, GradientAccumulationScheduler):
                raise ValueError(
                    f"{WHO} and GradientAccumulationScheduler cannot train together: the batch would change in mid-run, and"
                    " the rate would leap with it. Set the Trainer's accumulate_grad_batches, or take BatchSizeWarmup in"
                    " the place of both."
                )
        if self.warmup and not session.progress.limits():
            raise ValueError(
                f"{WHO}(warmup={self.warmup}): the Trainer has no end (max_steps=-1, max_epochs=-1, max_time=None), so a"
                " share of the run cannot be told. Set one of max_steps, max_epochs and max_time, or warmup=0."
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
        """Lightning has made its loaders, and no step has been made; every rank finds the same, or raises."""
        loaders = _each(session.trainer.train_dataloader)
        own = loader_batch_size(loaders[0]) if len(loaders) == 1 else None
        sizes = session.gather(own if self.batch_size is None else self.batch_size)
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            raise ValueError(
                f"{WHO}: got {_told(loaders, own)}, so the samples of a step are not known on every rank; expected one loader"
                f" that has a batch_size, or whose batch sampler has. Give {WHO}(..., batch_size=) the samples of one of the"
                " batches on each rank, or their mean."
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

    # -- what is told

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"batch": self._batch, "rate_factor": self._factor}

    @override
    def summary(self) -> str:
        return (
            f"steps of {self._batch:g} samples, the last at {self._factor:.3g} of the rate for {self.base_batch_size:g}"
        )


def _told(loaders: list[Any], own: int | None) -> str:
    if own is not None:
        return f"batches of {own} here, and on another rank a loader that does not tell their size"
    if len(loaders) != 1:
        return f"{len(loaders)} training loaders"
    loader = getattr(loaders[0], "_loader", loaders[0])  # the user's own, where it is wrapped
    return f"a {type(loader).__name__} that tells no batch_size"
