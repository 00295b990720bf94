"""Loader tuning: measure while training how many workers, how much prefetch and whether pinning keep the device busy.

Mohan et al. 2021 (arXiv:2007.06775) show that input pipelines stall training, and that the number of workers and their
prefetch decide it. Setting them from measurements during the run is tf.data's autotuning (Murray et al. 2021,
arXiv:2101.12127).
"""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction
from lightning_eff._core._needs.needs import Need
from lightning_eff._core.loaders import ResumableLoader
from lightning_eff._core.search_space import SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data._loader.moving import Freedom, cores_of_a_rank, freedom_of
from lightning_eff.data._loader.rule import Measured, best_of, next_setting
from lightning_eff.data._loader.tuner import LoaderTuner, Setting

WHO = "LoaderTuning"


class LoaderTuning(Technique):
    """Find the training loader's number of workers, prefetch and pinning that keep the device busy, while training.

    It measures the loader's own setting over a window of batches: how long the device waits for a batch, and how long a batch
    takes overall. If waiting takes more than the fraction ``waiting`` of the time, it measures other settings in turn and keeps
    the one with the least time per batch, including the time to start workers in each epoch. It logs the loader's cost, whether
    or not it changes a setting.

    Use it if the GPU is not busy or you do not know how many workers to choose. It never changes batches, their order or random
    numbers, so the weights are those of plain training bit for bit. A checkpoint resumes exactly, whatever was tried before and
    after it. Settings change between batches: the loader's iterator is created again at its position. A setting that fails (no
    shared memory left, or no batch within 60 seconds) is dropped, and the loader's own setting continues with the same batch.
    Under DDP all ranks use the same setting, chosen by the slowest.

    A setting that could change batches stays as it is, and the log says why:

    - **Random augmentation** draws from the training process with 0 workers, and from each worker's seed otherwise, so such a
      data set keeps its number of workers. Workers are watched. If making a batch drew from Python's, NumPy's or torch's global
      generator, or changed plain numbers that the data set keeps, the batch is discarded and made again with the loader's own
      setting, which then stays.
    - **Data sets** that hold a random generator or cannot be pickled (for example because of open files), and loaders with a
      ``worker_init_fn`` of their own, keep their number of workers.
    - **Iterable data sets** keep their number of workers, and change prefetch and pinning when an epoch begins.
    - **Only pinning changes** for samplers and batch samplers other than torch's, several loaders, samples that another
      technique chooses, and ``in_order=False``.
    - **Nothing changes** for loaders with persistent workers, with their own state (``StatefulDataLoader``) or with their own
      iteration.

    It cannot detect samples that depend on their process in other ways, such as the time or the operating system's random
    numbers, or data sets whose tensors are written to during the run.

    It logs ``waiting_share`` (the fraction of the last batch's time that the device waited), ``waiting_seconds`` (over the
    whole run), ``batch_seconds`` (of the last batch), ``num_workers``, ``prefetch_factor`` and ``pin_memory`` (0 or 1) in
    use, and ``switches`` (the number of changes of setting).

    Args:
        num_batches: the number of batches to measure each setting over, after its first ones. None is plain training.
        waiting: the fraction of the time that the device may wait before other settings are tried.
        least_gain: the fraction of the time per batch that another setting must save.
        max_workers: the maximum number of worker processes per rank. None takes its CPU cores.
        max_prefetch: the maximum number of batches that each worker prepares ahead.

    Raises:
        ValueError: for a value out of range.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[LoaderTuning()])

    References:
        Mohan et al. 2021, "Analyzing and Mitigating Data Stalls in DNN Training", arXiv:2007.06775. Murray et al. 2021,
        "tf.data: A Machine Learning Data Processing Framework", arXiv:2101.12127.
    """

    saves = "the time that the device waits for batches"
    paper = "Mohan et al. 2021, arXiv:2007.06775; Murray et al. 2021, arXiv:2101.12127"
    constraints = "changing the number of workers needs a map-style data set that draws no random numbers"
    needs: ClassVar[Need] = Need.BATCH
    search_space = SearchSpace()
    control = Control(
        "the baseline for as many seconds with a well-chosen num_workers, because the weights are the same bit for bit"
    )
    needs_automatic_optimization: ClassVar[bool] = False
    sparse_gradients: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"num_batches": None}

    def __init__(
        self,
        num_batches: Annotated[int | None, Count()] = 50,
        *,
        waiting: Annotated[float, Fraction(below=1)] = 0.02,
        least_gain: Annotated[float, Fraction(below=1)] = 0.05,
        max_workers: Annotated[int | None, Count(at_least=0)] = None,
        max_prefetch: Annotated[int, Count()] = 8,
    ) -> None:
        self.num_batches, self.waiting, self.least_gain = num_batches, waiting, least_gain
        self.max_workers, self.max_prefetch = max_workers, max_prefetch

    def _reset(self) -> None:
        self._tuners: list[LoaderTuner] = []
        self._measured: dict[Setting, Measured] = {}
        self._own: Setting | None = None  # which the measurements belong to
        self._goal: Setting | None = None  # measured now or chosen, on all ranks
        self._freedom: Freedom | None = None
        self._done = self._failed = self._drew = False
        self._count = 0  # batches since the goal was set, the same on all ranks
        self._awaits_epoch = False
        self._begins_epoch = True
        self._window: list[tuple[float, float]] = []  # waiting and total seconds per batch
        self._startups: list[float] = []
        self._before: float | None = None  # end of the previous batch, unless something came in between
        self._figures = {"waiting_share": 0.0, "waiting_seconds": 0.0, "batch_seconds": 0.0, "switches": 0}
        self._seconds = 0.0
        self._said: list[str] = []
        self._active = Setting()

    # -- the run

    @override
    def attach(self, session: Session) -> None:
        session.loaders.tune = self._take

    def _take(self, loader: ResumableLoader) -> None:
        if self.session.loaders.alone:  # the first loader of a round
            self._tuners, self._freedom = [], None
        tuner = LoaderTuner(loader, self._device_waits)
        loader.tuner = tuner
        self._tuners.append(tuner)
        self._begins_epoch = True

    def _device_waits(self) -> bool:
        device = self.session.trainer.strategy.root_device
        return device.type != "cuda" or bool(torch.cuda.current_stream(device).query())

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self._begins_epoch = True

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        now, first = time.perf_counter(), self._begins_epoch
        waited = sum(tuner.waited_seconds + tuner.made_seconds for tuner in self._tuners)
        for tuner in self._tuners:
            self._figures["switches"] += tuner.switches
            tuner.waited_seconds, tuner.made_seconds, tuner.switches = 0.0, 0.0, 0
        seconds = waited if self._before is None else max(now - self._before, waited)
        self._figures.update(waiting_share=waited / max(seconds, 1e-12), batch_seconds=seconds)
        self._figures["waiting_seconds"] += waited
        self._seconds += seconds
        if first:
            self._startups.append(waited)
        elif self._before is not None:
            self._window.append((waited, seconds))
        self._begins_epoch, self._before = False, now
        if self._awaits_epoch and first:
            self._awaits_epoch, self._count = False, 0
        self._count += 1
        if len(self._tuners) > 0 and not self._awaits_epoch:
            self._decide(session)

    def _decide(self, session: Session) -> None:
        """Choose what to measure next or to keep, at the same batches on all ranks."""
        assert self.num_batches is not None
        if self._freedom is None:
            self._begin_tuning(session)
        if self._done:
            return
        goal = self._goal
        assert goal is not None
        unsettled = goal.lookahead + 1
        if self._count == unsettled:
            self._window.clear()
        if self._count < unsettled + self.num_batches:
            return
        tuner = self._tuners[0]
        told = session.replicas.everyone((self._mean(), tuner.failed, tuner.drew))
        means = [mean for mean, _, _ in told]
        if any(mean is None for mean in means) and not any(failed for _, failed, _ in told):
            self._count = unsettled  # validation or the like came in between: extend the window
            return
        failed = next((failed for _, failed, _ in told if failed), "")
        if failed and not self._failed:
            self._failed = True
            self._say(f"{failed}, so the loader keeps {tuner.own}")
        if any(drew for _, _, drew in told) and not self._drew:
            self._drew = True
        at_fault = goal != tuner.own and (self._failed or (self._drew and goal.num_workers != tuner.own.num_workers))
        if at_fault:
            self._measured[goal] = Measured(0.0, math.inf)
        else:  # the slowest rank's, which the others wait for
            self._measured[goal] = max((m for m in means if m is not None), key=lambda m: m.seconds)
        self._look_at_freedom(session)
        self._go_on(session, at_fault=at_fault)

    def _mean(self) -> Measured | None:
        if not self._window:
            return None
        waiting, seconds = (sum(values) / len(self._window) for values in zip(*self._window, strict=True))
        startup = min(self._startups, default=waiting) - waiting
        return Measured(waiting, seconds, max(startup, 0.0))

    def _begin_tuning(self, session: Session) -> None:
        """Find out which settings may change on all ranks, once the loaders are known."""
        own = self._tuners[0].own
        self._tuners[0].drew |= self._drew
        self._look_at_freedom(session)
        if self._own != own:  # another loader than the checkpoint's
            self._measured, self._own, self._goal, self._done = {}, own, own, False
        elif self._goal is not None and self._goal != own:
            self._move(session, self._goal)

    def _look_at_freedom(self, session: Session) -> None:
        loader, trainer = self._tuners[0].loader, session.trainer
        before = self._freedom
        if before is None or (self._drew and before.workers):
            limits = trainer.fit_loop.max_batches
            freedom = freedom_of(
                loader,
                alone=session.loaders.alone and len(self._tuners) == 1,
                chosen_by=session.loaders.taken_by,
                cut_short=_length(loader) != limits,
                drew=self._drew or self._tuners[0].drew,
                accelerator=trainer.strategy.root_device.type == "cuda",
            )
            told = session.replicas.everyone(freedom)
            for other in told:
                freedom = freedom.both(other)
            self._freedom = freedom
            if freedom.reason:
                self._say(f"the number of workers stays {self._tuners[0].own.num_workers}, because {freedom.reason}")
        if self._failed:
            assert self._freedom is not None
            self._freedom = replace(self._freedom, workers=False, prefetch=False)

    def _go_on(self, session: Session, *, at_fault: bool) -> None:
        """Choose the next setting after a window has ended."""
        tuner, freedom = self._tuners[0], self._freedom
        assert freedom is not None
        epoch = float(session.trainer.fit_loop.max_batches)
        following = next_setting(
            self._measured,
            tuner.own,
            freedom,
            epoch=epoch,
            waiting=self.waiting,
            least_gain=self.least_gain,
            max_workers=self._most_workers(session),
            max_prefetch=self.max_prefetch,
        )
        if following is None:
            self._done = True
            following = best_of(self._measured, epoch=epoch, least_gain=self.least_gain)
            found = [
                f"{s}: {m.cost(epoch):.3g} s per batch, {m.share(epoch):.0%} of it waiting" for s, m in self._finite()
            ]
            self._say(f"using {following} from step {session.trainer.global_step} on (measured {'; '.join(found)})")
        if following != self._goal or at_fault:
            self._move(session, following)
        self._goal = following

    def _finite(self) -> list[tuple[Setting, Measured]]:
        return [(s, m) for s, m in self._measured.items() if math.isfinite(m.seconds)]

    def _most_workers(self, session: Session) -> int:
        if self.max_workers is not None:
            return self.max_workers
        return cores_of_a_rank(session.trainer.num_devices)

    def _move(self, session: Session, setting: Setting) -> None:
        assert self._freedom is not None
        now = self._freedom.in_epoch and not session.epoch_complete()
        self._tuners[0].switch(setting, now=now)
        self._count, self._awaits_epoch = 0, not now
        self._window.clear()
        self._startups.clear()
        self._begins_epoch, self._before = now, None

    @override
    def detach(self, session: Session) -> None:
        self.report()
        self._tuners = []

    def _say(self, text: str) -> None:
        self._said.append(text)
        rank_zero_info(f"{WHO}: {text}")

    # -- time outside of batches

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        self._before = None

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        self._before = time.perf_counter() if self._session is not None else None

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        self._before = None

    # -- report and state

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        if self._tuners:
            self._active = self._tuners[0].active
        setting = self._active
        return {
            **self._figures,
            "num_workers": setting.num_workers,
            "prefetch_factor": setting.prefetch_factor,
            "pin_memory": int(setting.pin_memory),
        }

    @override
    def summary(self) -> str:
        waited = self._figures["waiting_seconds"]
        share = waited / max(self._seconds, 1e-12)
        cost = f"the device waited {waited:.3g} s for the loader, {share:.0%} of the time"
        return "; ".join([cost, *self._said])

    @override
    def state_dict(self) -> dict[str, Any]:
        measured = [[*_plain(s), m.waiting, m.seconds, m.startup] for s, m in self._measured.items()]
        return {
            "measured": measured,
            "own": None if self._own is None else _plain(self._own),
            "goal": None if self._goal is None else _plain(self._goal),
            "done": self._done,
            "failed": self._failed,
            "drew": self._drew,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._measured = {Setting(*row[:3]): Measured(*row[3:]) for row in state_dict["measured"]}
        self._own = None if state_dict["own"] is None else Setting(*state_dict["own"])
        self._goal = None if state_dict["goal"] is None else Setting(*state_dict["goal"])
        self._done, self._failed, self._drew = state_dict["done"], state_dict["failed"], state_dict["drew"]


def _plain(setting: Setting) -> list[int | bool]:
    return [setting.num_workers, setting.prefetch_factor, setting.pin_memory]


def _length(loader: Any) -> float:
    try:
        return float(len(loader))
    except (TypeError, NotImplementedError):
        return math.inf
