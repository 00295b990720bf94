"""Loader tuning: which number of workers, prefetch and pinning keeps the device busy, measured while training.

That input pipelines stall training, and that the number of workers and what they prefetch decide it, is Mohan et al. 2021
(arXiv:2007.06775); setting them from measurements in the run is tf.data's autotuning (Murray et al. 2021, arXiv:2101.12127).
"""

import math
import time
from dataclasses import replace
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core.loaders import ResumableLoader
from lightning_eff._core.search_space import SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data._loader.moving import Freedom, cores_of_a_rank, freedom_of
from lightning_eff.data._loader.rule import Measured, best_of, next_setting
from lightning_eff.data._loader.tuner import LoaderTuner, Setting

WHO = "LoaderTuning"


class LoaderTuning(Technique):
    """Find, while training, the workers, prefetch and pinned memory with which the training loader keeps the device busy.

    The loader's own setting is measured over a window of batches: how long the device waits for batches, and how long a batch
    takes in all. Where waiting takes more than a share ``waiting`` of the time, other settings are measured in turn, and the
    one with the least time a batch stays; how long workers take to start with each epoch counts. What the loader costs is
    logged, tuned or not.

    **Batches are the same, in the same order, with the same random numbers**, whatever the setting, so weights are those of
    plain training to the bit, and a checkpoint resumes to the bit whatever was tried before and after it. Settings change
    between batches, by making the loader's iterator anew at its place. What could make batches others is left alone, and the
    log says why:

    - Random augmentation draws from the training process with 0 workers, and from each worker's seed with more: such a data
      set keeps its number of workers. Workers are watched: a batch for which Python's, NumPy's or torch's global generator
      was drawn from, or plain numbers that the data set keeps changed, is not handed out, but made again with the loader's
      own setting, for good. A data set that holds a random generator of its own, or that cannot be pickled (open files, for
      instance, which processes must not share), keeps its number of workers too; so do loaders with a ``worker_init_fn``.
    - Iterable data sets keep their number of workers, and change prefetch and pinning as an epoch begins.
    - Samplers and batch samplers other than torch's own, several loaders, samples that another technique chooses, and
      ``in_order=False`` change pinning alone; loaders with persistent workers, with a state of their own
      (``StatefulDataLoader``) or with an iteration of their own nothing.
    - What cannot be seen: a sample that depends on which process makes it by other means, such as the time or a draw from the
      operating system, and data sets whose tensors are written to in the run.

    A setting that fails (no shared memory left, or no batch within 60 seconds) is given up, and the own setting goes on with
    the very batch. Copies to the device are asynchronous from pinned memory, as Lightning does them. Under DDP all ranks have
    the same setting, chosen by the slowest of them.

    Logged: ``waiting_share`` of the last batch's time and ``waiting_seconds`` of the whole run, in which the device waited for
    the loader; ``batch_seconds``, of the last; ``num_workers``, ``prefetch_factor`` and ``pin_memory`` (0 or 1) in use;
    ``switches``, how often the iterator was made with another setting.

    Args:
        num_batches: batches that each setting is measured over, after its first ones; None leaves the loader as it is, which
            is plain training.
        waiting: in [0, 1): the share of time that the device may wait before other settings are tried.
        least_gain: in [0, 1): the share of a batch's time that another setting must save.
        max_workers: most worker processes of a rank; None takes the CPU cores that it has.
        max_prefetch: most batches that each worker makes ahead.

    Raises:
        ValueError: for other values.

    Sources:
        Mohan et al. 2021, arXiv:2007.06775; Murray et al. 2021, arXiv:2101.12127.
    """

    saves: ClassVar[str] = "the time in which the device waits for batches"
    paper: ClassVar[str] = "Mohan et al. 2021, arXiv:2007.06775; Murray et al. 2021, arXiv:2101.12127"
    constraints: ClassVar[str] = "workers: a map-style data set that draws no random numbers"
    needs: ClassVar[Need] = Need.BATCH
    survey: ClassVar[Survey | None] = None
    search_space: ClassVar[SearchSpace | None] = SearchSpace()
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds, with num_workers set as well as one can: the weights are the same to the bit"
    )
    needs_automatic_optimization: ClassVar[bool] = False
    sparse_gradients: ClassVar[bool] = True

    def __init__(
        self,
        num_batches: int | None = 50,
        *,
        waiting: float = 0.02,
        least_gain: float = 0.05,
        max_workers: int | None = None,
        max_prefetch: int = 8,
    ) -> None:
        if num_batches is not None and (not isinstance(num_batches, int) or num_batches < 1):
            raise ValueError(f"{WHO}({num_batches=}): expected an integer >= 1, or None for plain training.")
        for name, value in (("waiting", waiting), ("least_gain", least_gain)):
            if not 0 <= value < 1:
                raise ValueError(f"{WHO}({name}={value}): expected a share of time in [0, 1).")
        if max_workers is not None and (not isinstance(max_workers, int) or max_workers < 0):
            raise ValueError(f"{WHO}({max_workers=}): expected an integer >= 0, or None for this machine's cores.")
        if not isinstance(max_prefetch, int) or max_prefetch < 1:
            raise ValueError(f"{WHO}({max_prefetch=}): expected an integer >= 1.")
        self.num_batches, self.waiting, self.least_gain = num_batches, waiting, least_gain
        self.max_workers, self.max_prefetch = max_workers, max_prefetch
        self._reset()

    def _reset(self) -> None:
        self._tuners: list[LoaderTuner] = []
        self._measured: dict[Setting, Measured] = {}
        self._own: Setting | None = None  # that what was measured belongs to
        self._goal: Setting | None = None  # what is measured, or was chosen; of all ranks
        self._freedom: Freedom | None = None
        self._done = self._failed = self._drew = False
        self._count = 0  # batches since the goal was set, the same on all ranks
        self._awaits_epoch = False
        self._begins_epoch = True
        self._window: list[tuple[float, float]] = []  # waiting and seconds of its batches
        self._startups: list[float] = []
        self._before: float | None = None  # when the batch before ended, unless something came between
        self._figures = {"waiting_share": 0.0, "waiting_seconds": 0.0, "batch_seconds": 0.0, "switches": 0}
        self._seconds = 0.0
        self._said: list[str] = []
        self._active = Setting()

    @property
    @override
    def neutral(self) -> bool:
        return self.num_batches is None

    # -- the run

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        session.loaders.tune = self._take

    def _take(self, loader: ResumableLoader) -> None:
        if self.session.loaders.alone:  # the first of a round
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
        """At the same batches on all ranks: what is measured next, or stays."""
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
            self._count = unsettled  # validation or the like came between; the window is made longer
            return
        failed = next((failed for _, failed, _ in told if failed), "")
        if failed and not self._failed:
            self._failed = True
            self._say(f"{failed}, and so the loader keeps {tuner.own}")
        if any(drew for _, _, drew in told) and not self._drew:
            self._drew = True
        at_fault = goal != tuner.own and (self._failed or (self._drew and goal.num_workers != tuner.own.num_workers))
        if at_fault:
            self._measured[goal] = Measured(0.0, math.inf)
        else:  # the slowest rank's, for which the others wait
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
        """The loaders are known: what may change of them, on all ranks."""
        own = self._tuners[0].own
        self._tuners[0].drew |= self._drew
        self._look_at_freedom(session)
        if self._own != own:  # another loader than the checkpoint tells of
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
                self._say(f"the number of workers stays {self._tuners[0].own.num_workers}: {freedom.reason}")
        if self._failed:
            assert self._freedom is not None
            self._freedom = replace(self._freedom, workers=False, prefetch=False)

    def _go_on(self, session: Session, *, at_fault: bool) -> None:
        """Choose what comes after the window that has just ended."""
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
                f"{s}: {m.cost(epoch):.3g} s a batch, {m.share(epoch):.0%} of it waiting" for s, m in self._finite()
            ]
            self._say(f"{following} from step {session.trainer.global_step} on ({'; '.join(found)})")
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

    # -- what is no part of a batch's time

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

    # -- what it tells

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
