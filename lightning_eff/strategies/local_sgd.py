"""Post-local SGD: average the ranks' weights at intervals, after a warm-up with DDP (Lin et al. 2018, arXiv:1808.07217).

The rule, ``w <- (1/N) sum_i w_i`` every ``interval`` steps, is in ``_communication.apart``.
"""

import math
from typing import Annotated, ClassVar

from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Either, OneOf
from lightning_eff._core.search_space import Choice, SearchSpace, needs_processes
from lightning_eff._core.technique import Control
from lightning_eff.strategies._communication.apart import Apart


class LocalSGD(Apart):
    """Average the weights of DDP ranks every ``interval`` optimizer steps, instead of their gradients at every step.

    The first ``warmup_steps`` steps are plain DDP. After that, gradients stay on their rank (torch's
    ``post_localSGD_hook``) and each rank steps with its own optimizer and optimizer state. The weights are averaged every
    ``interval`` local steps. One averaging sends as many bytes as the gradients of one step, so ``1 / interval`` of DDP's
    traffic remains. With ``interval=1`` and SGD this equals DDP up to rounding.

    Use it where steps wait for the network: on slow links or many nodes. Within a node with NVLink there is nothing to
    gain, because the transfer of gradients overlaps with the backward pass. A larger ``interval`` lets the ranks drift
    further apart. The paper starts local steps at the first decay of the learning rate, with an interval of 16.

    The module holds the mean over ranks during validation and after the fit, and so does every checkpoint's
    ``state_dict``. It loads into the plain module and resumes in plain DDP. The callback's state holds each rank's
    optimizer state and, between averagings, each rank's weights, so a checkpoint grows up to N times for N ranks. Resuming
    with the same number of ranks is bit for bit the uninterrupted run. With another number, all ranks start from the mean
    and from the optimizer state of rank 0.

    Gradient clipping acts on each rank's own gradient. BatchNorm statistics are those of rank 0, as in DDP, which still
    sends buffers at every step. On one process this is plain training. The callback logs ``local_steps`` and
    ``averagings``.

    Args:
        interval: the number of local steps between two averagings.
        warmup_steps: the number of plain DDP steps at the start of the run. ``math.inf`` is plain DDP throughout.

    Raises:
        ValueError: for a value out of range. At setup, under a strategy other than DDP or a single device, with a
            communication hook in DDP, or with a gradient scaler, because ranks would skip different steps.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[LocalSGD(interval=8, warmup_steps=1000)])

    References:
        Lin et al. 2018, "Don't Use Large Mini-Batches, Use Local SGD", arXiv:1808.07217.
    """

    saves = "communication: one exchange of weights every `interval` steps"
    paper = "Lin et al. 2018, arXiv:1808.07217"
    constraints = "DDP; checkpoints up to N ranks as large; no fp16 scaler; on one process it is plain training"
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"interval": Choice((2, 4, 8, 16, 32)), "warmup_steps": Choice((0, 100, 1000))}, needs_processes
    )
    control = Control("the baseline under DDP for the same time: local steps trade agreement between ranks for speed")
    conflicts: ClassVar = {
        "LatestWeightAveraging": "it would take snapshots of each rank's own weights, and only those of rank 0 would be saved",
    }

    def __init__(
        self,
        interval: Annotated[int, Count()] = 8,
        *,
        warmup_steps: Annotated[int | float, Either(Count(at_least=0), OneOf(math.inf))] = 0,
    ) -> None:
        self._take(interval, warmup_steps)

    @override
    def summary(self) -> str:
        return (
            f"{self.local_steps} of {self._steps} steps were local, with {self._averagings} averagings of the weights"
        )
