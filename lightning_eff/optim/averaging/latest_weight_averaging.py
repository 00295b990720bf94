"""Latest weight averaging (LAWA): the mean of the last k snapshots of the weights (Kaddour 2022, arXiv:2209.14981)."""

from collections.abc import Iterable, Iterator
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core.search_space import Choice, Integer, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.optim.averaging._engine import is_count, pieces, wide
from lightning_eff.optim.averaging._snapshots import SnapshotWindow


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


class LatestWeightAveraging(SnapshotWindow):
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
    constraints = "window + 1 copies of the weights; BatchNorm needs automatic optimization"
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
    sparse_gradients = True

    def __init__(
        self,
        window: int = 6,
        *,
        interval: Literal["epoch"] | int = "epoch",
        start: float = 0.0,
        offload: bool = False,
        bn_batches: int | None = 100,
    ) -> None:
        if not is_count(window):
            raise ValueError(
                f"LatestWeightAveraging({window=}): expected an integer >= 1; 1 keeps the latest snapshot alone."
            )
        self.set_interval(interval, start, offload, bn_batches)
        self.window = window
        self._reset()

    @override
    def average(self, session: Session) -> Iterator[tuple[str, Tensor]]:
        held = pieces(session)
        for name in self.names:
            yield name, latest_mean((s[name] for s in self._snapshots if name in s), device=held[name].device)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"snapshots": len(self._snapshots), "taken": self._taken}

    @override
    def summary(self) -> str:
        if not self._snapshots:
            return f"no snapshot to average (of {self._taken} taken): the weights are the raw ones"
        return f"mean of the last {len(self._snapshots)} of {self._taken} snapshots"
