"""Latest weight averaging (LAWA): the mean of the last k snapshots of the weights (Kaddour 2022, arXiv:2209.14981)."""

from collections.abc import Iterable, Iterator
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count
from lightning_eff._core.search_space import Choice, Integer, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.optim.averaging._engine import BNBatches, wide
from lightning_eff.optim.averaging._snapshots import Interval, SnapshotWindow, Start


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
    """Validate, test and save the mean of the last ``window`` snapshots, while training continues from the raw weights.

    A snapshot holds every parameter that requires gradients. A parameter that is unfrozen later is averaged over the
    snapshots taken since. Use it where the learning rate does not decay to zero, and early in long runs. It costs
    ``window + 1`` copies of the weights (with ``offload``, in CPU memory).

    The module holds the mean while the trainer validates, and from the end of fit on. Every checkpoint's ``state_dict`` is
    the mean once there is a snapshot, so the checkpoint that ``ModelCheckpoint`` keeps as best is the one that was
    validated. The raw weights and the snapshots are in this callback's state, from which a resumed fit continues. A second
    fit without a checkpoint starts from the mean, with an empty window. Checkpoints saved because of an exception hold raw
    weights.

    BatchNorm statistics are recomputed for each mean that is used, by the rule of torch's ``update_bn``. The forward passes
    of ``training_step`` for this leave no trace in the run (no logs, no random draws, the loader stays where it was), and
    their cost is counted. Other buffers keep their latest values. If another technique changes the network's blocks, the
    window is emptied.

    It differs from Lightning's ``WeightAveraging``, which keeps one running average, so a snapshot that leaves the window
    cannot be removed from it.

    Args:
        window: the number of latest snapshots that are averaged. 1 uses only the latest.
        interval: when a snapshot is taken. "epoch" takes one after each complete epoch, a number N after every N optimizer
            steps (under manual optimization, each optimizer's steps count).
        start: the fraction of the budget before which no snapshot is taken. 1 is plain training.
        offload: whether to keep the snapshots in CPU memory.
        bn_batches: the number of training batches, on each rank, from which BatchNorm statistics are recomputed; None uses
            a whole epoch. Wu & Johnson (2021, arXiv:2105.07576) find 1,000 to 10,000 samples sufficient.

    Raises:
        ValueError: for a value out of range. At setup, with another weight average, if ``start`` is set in a run without an
            end, or for BatchNorm with manual optimization.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[LatestWeightAveraging(window=6, interval=200)])

    References:
        Kaddour 2022, "Stop Wasting My Time! Saving Days of ImageNet and BERT Training with Latest Weight Averaging",
        arXiv:2209.14981.
    """

    saves = "epochs, as long as the learning rate is high; nothing once it has decayed"
    paper = "Kaddour 2022, arXiv:2209.14981"
    constraints = "keeps window + 1 copies of the weights; BatchNorm needs automatic optimization"
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {
            "window": Integer(3, 12),
            "interval": Integer(5, 500, log=True),
            "start": Choice((0.0, 0.5, 0.75)),
        },
        lambda profile: (
            "the learning rate ends at zero, where an average gains little" if profile.decayed_rate else None
        ),
    )
    control = Control("the baseline for the same time with a learning rate that decays to zero, where the gain shrinks")
    sparse_gradients = True

    def __init__(
        self,
        window: Annotated[int, Count()] = 6,
        *,
        interval: Interval = "epoch",
        start: Start = 0.0,
        offload: bool = False,
        bn_batches: BNBatches = 100,
    ) -> None:
        self.window = window
        self.interval = interval
        self.start = start
        self.offload = offload
        self.bn_batches = bn_batches

    @override
    def average(self, session: Session) -> Iterator[tuple[str, Tensor]]:
        held = self.pieces(session)
        for name in self.names:
            yield name, latest_mean((s[name] for s in self._snapshots if name in s), device=held[name].device)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"snapshots": len(self._snapshots), "taken": self._taken}

    @override
    def summary(self) -> str:
        if not self._snapshots:
            return f"no snapshot to average ({self._taken} taken); the module holds the raw weights"
        return f"mean of the last {len(self._snapshots)} of {self._taken} snapshots"
