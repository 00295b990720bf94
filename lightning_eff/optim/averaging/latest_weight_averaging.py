"""Latest weight averaging (LAWA): the mean of the last k snapshots of the weights (Kaddour 2022, arXiv:2209.14981)."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_eff._core.search_space import Choice, Integer, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.optim.averaging._engine import AveragedWeights, check_bn_batches, is_count, wide


@torch.no_grad()
def latest_mean(snapshots: Iterable[Tensor], *, device: torch.device) -> Tensor:
    """``mean = (1/k) sum_j w_j``, summed in double precision and rounded once.

    Args:
        snapshots: k >= 1 tensors of one shape and dtype, on any device.
        device: where to compute; on MPS, which has no double precision, the sum is in single.

    Returns:
        The mean, of the shape and dtype of the snapshots, on ``device``.
    """
    first, *rest = snapshots
    first = first.to(device)
    total = first.to(wide(first), copy=True)
    for w in rest:
        total += w.to(device)
    return (total / (1 + len(rest))).to(first.dtype)


class LatestWeightAveraging(AveragedWeights):
    """Validate, test and keep the mean of the last ``window`` snapshots, while training goes on from the raw weights.

    A snapshot holds every parameter that takes gradients; one that is unfrozen later is averaged over the snapshots
    since. While the trainer validates, and from the end of fit on, the module holds the mean. Every checkpoint's
    ``state_dict`` is the mean too, once there is a snapshot, so what ``ModelCheckpoint`` keeps as best is what was
    validated; the raw weights and the snapshots (``window`` copies of the weights) are in this callback's state, and a
    resumed fit goes on from them. A second fit without a checkpoint starts from the mean, with an empty window. A
    checkpoint that is saved because of an exception, after this callback has put everything back, holds raw weights.

    BatchNorm statistics are not averaged: they are recomputed for each mean that is used, by the rule of torch's
    ``update_bn``, from forward passes of ``training_step`` that leave no trace in the run: no log, no draw from the
    global generators, the training loader where it was. Their cost is counted. Other buffers keep their latest values.
    If another technique changes which blocks the network has, the window is emptied: earlier snapshots are of another
    network.

    Lightning's own ``WeightAveraging`` does not serve: it keeps one running average in a deep copy of the module, from
    which a snapshot that leaves the window cannot be taken out again.

    Args:
        window: how many of the latest snapshots the mean is over, >= 1; 1 means the latest alone.
        interval: "epoch" takes a snapshot after each complete epoch, a number N >= 1 after every N optimizer steps
            (under manual optimization as Lightning counts them: each optimizer's).
        start: take snapshots only of steps from this fraction of the budget on, in [0, 1]; 1 takes none, which is
            plain training.
        offload: keep the snapshots in CPU memory.
        bn_batches: how many training batches, on each rank, BatchNorm statistics are recomputed from; None takes a
            whole epoch. Wu & Johnson (2021, arXiv:2105.07576) find 1,000 to 10,000 samples to be enough.

    Raises:
        ValueError: if an argument is out of its range; at setup, if the trainer has another weight averaging, if
            ``start`` needs a budget that it has not, or if BatchNorm meets manual optimization.
    """

    saves = "epochs while the learning rate is high; nothing once it is fully decayed"
    paper = "Kaddour 2022, arXiv:2209.14981"
    constraints = "single device or DDP; window + 1 copies of the weights; BatchNorm needs automatic optimization"
    survey: ClassVar[Survey | None] = Survey("latest weight averaging (LAWA)", zhuang="2.1", shen="5.4")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {
            "window": Integer(3, 12),
            "interval": Integer(5, 500, log=True),
            "start": Choice((0.0, 0.5, 0.75)),
        },
        lambda profile: (
            "the learning rate ends at zero, where the last weights are as good" if profile.decayed_rate else None
        ),
    )
    control = Control("the baseline for as many seconds with its learning rate decayed to zero, where the gain shrinks")

    def __init__(
        self,
        *,
        window: int = 6,
        interval: Literal["epoch"] | int = "epoch",
        start: float = 0.0,
        offload: bool = False,
        bn_batches: int | None = 100,
    ) -> None:
        if not is_count(window):
            raise ValueError(
                f"LatestWeightAveraging({window=}): expected an integer >= 1; 1 keeps the latest snapshot alone."
            )
        if interval != "epoch" and not is_count(interval):
            raise ValueError(
                f"LatestWeightAveraging({interval=}): expected 'epoch' or a number of optimizer steps >= 1."
            )
        if not 0.0 <= start <= 1.0:
            raise ValueError(f"LatestWeightAveraging({start=}): expected a fraction of the budget in [0, 1].")
        check_bn_batches("LatestWeightAveraging", bn_batches)
        self.window = window
        self.interval: Literal["epoch"] | int = interval
        self.start = start
        self.offload = offload
        self.bn_batches = bn_batches
        self._reset()

    @override
    def _reset(self) -> None:
        super()._reset()
        self._snapshots: deque[dict[str, Tensor]] = deque()

    # -- the run

    @property
    @override
    def neutral(self) -> bool:
        return self.start == 1.0

    @override
    def check(self, session: Session) -> None:
        super().check(session)
        if self.start > 0.0:
            self.check_budget(session, f"start={self.start}", "start=0.0")

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        trainer = session.trainer
        if self.interval == "epoch":
            due = trainer.is_last_batch
        else:
            due = trainer.global_step // self.interval > self._step // self.interval
        if due and session.progress.u >= self.start:
            self._take(session)

    # -- snapshots and their mean

    @torch.no_grad()
    def _take(self, session: Session) -> None:
        held = self._snapshots[-1] if self._snapshots else {}
        while len(self._snapshots) >= self.window:
            self._snapshots.popleft()
        self._snapshots.append(
            {
                name: p.detach().to("cpu" if self.offload else p.device, copy=True)
                for name, p in session.module.named_parameters()
                if p.requires_grad or name in held
            }
        )
        self.outdate(session)

    @property
    @override
    def names(self) -> Iterable[str]:
        return self._snapshots[-1] if self._snapshots else ()

    @override
    def average(self, session: Session) -> Iterator[tuple[str, Tensor]]:
        parameters = dict(session.module.named_parameters())
        for name in self.names:
            yield name, latest_mean((s[name] for s in self._snapshots if name in s), device=parameters[name].device)

    @override
    def forget(self) -> None:
        self._snapshots.clear()

    @override
    def to_devices(self, devices: Mapping[str, torch.device]) -> None:
        if not self.offload:
            for snapshot in self._snapshots:
                snapshot.update({name: w.to(devices[name]) for name, w in snapshot.items()})

    @override
    def saved(self) -> dict[str, Any]:
        return {"snapshots": [dict(snapshot) for snapshot in self._snapshots]}

    @override
    def restore(self, state: dict[str, Any]) -> None:
        snapshots = state["snapshots"]
        self._snapshots = deque(dict(snapshot) for snapshot in snapshots[-self.window :])
        if len(snapshots) > self.window:
            self._statistics = None

    @override
    def saved_weights(self, state: dict[str, Any]) -> Mapping[str, Tensor]:
        return state["snapshots"][-1] if state["snapshots"] else {}

    # -- Lightning's hooks

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self.neutral:
            return
        batches = trainer.num_training_batches
        steps = math.ceil(batches / trainer.accumulate_grad_batches) if math.isfinite(batches) else 1
        first = steps if self.interval == "epoch" else self.interval
        if -1 < trainer.max_steps < first and not self._taken:
            rank_zero_warn(
                f"LatestWeightAveraging(interval={self.interval!r}): the run ends after max_steps={trainer.max_steps}"
                f" steps and the first snapshot would be taken after {first}, so nothing will be averaged. Give a"
                " smaller number of steps as interval=."
            )

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"snapshots": len(self._snapshots), "taken": self._taken}

    @override
    def summary(self) -> str:
        if not self._snapshots:
            return f"no snapshot to average (of {self._taken} taken): the weights are the raw ones"
        return f"mean of the last {len(self._snapshots)} of {self._taken} snapshots"
