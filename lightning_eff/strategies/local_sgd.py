"""Post-local SGD: after a start in step, ranks train apart and average their weights (Lin et al. 2018, arXiv:1808.07217).

The rule, ``w <- (1/N) sum_i w_i`` every ``interval`` steps, stands in ``_communication.apart``.
"""

from typing import ClassVar

from typing_extensions import override

from lightning_eff._core.search_space import Choice, SearchSpace, Survey, needs_processes
from lightning_eff._core.technique import Control
from lightning_eff.strategies._communication.apart import Apart


class LocalSGD(Apart):
    """Under DDP, exchange weights every ``interval`` optimizer steps instead of gradients at every step.

    The first ``warmup_steps`` steps are plain DDP. After them gradients stay on their rank (torch's ``post_localSGD_hook``),
    each rank steps with its own optimizer, whose state stays its own, and after every ``interval`` local steps the
    weights are averaged. An average sends as many bytes as the gradients of a step, so ``1 / interval`` of DDP's remain.
    With ``interval=1`` and SGD this is DDP, up to rounding.

    While the trainer validates, and after the fit, the module holds the mean over ranks; every checkpoint's ``state_dict``
    is that mean, so it loads into the plain module and resumes in plain DDP. Between averagings each rank's own weights,
    and always each rank's optimizer state, are in this callback's state, gathered by rank 0, so that resuming with as many
    ranks is bit for bit the undisturbed run; a checkpoint grows to up to N times its size. With another number of ranks
    all start from the mean and rank 0's optimizer state. BatchNorm's statistics are rank 0's, as in DDP, which still sends
    buffers at every step.

    It pays where a step waits for the network: slow links, or many nodes. Within a node with NVLink the gradients' transfer
    hides behind the backward pass, and there is nothing to gain. The larger ``interval`` is, the further the ranks drift
    apart: the paper starts local steps at the first decay of the learning rate, with an interval of 16. Clipping acts on
    each rank's own gradient.

    Args:
        interval: local steps between two averagings, >= 1.
        warmup_steps: steps of plain DDP at the start of the run, >= 0; ``math.inf`` is plain DDP for ever.

    Raises:
        ValueError: if an argument is out of range; at setup, under another strategy than DDP or a single device, with a
            communication hook in DDP, or a gradient scaler, whose ranks would skip different steps.
    """

    saves = "communication: one exchange of weights every `interval` steps"
    paper = "Lin et al. 2018, arXiv:1808.07217"
    constraints = "DDP; checkpoints up to N ranks as large; no fp16 scaler; on one process it is plain training"
    survey: ClassVar[Survey | None] = Survey("local SGD", shen="7.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"interval": Choice((2, 4, 8, 16, 32)), "warmup_steps": Choice((0, 100, 1000))}, needs_processes
    )
    control = Control("the baseline under DDP for as many seconds: local steps trade agreement between ranks for time")
    conflicts: ClassVar = {
        "LatestWeightAveraging": "its snapshots would be of each rank's own weights, and rank 0's alone would be saved",
    }

    def __init__(self, interval: int = 8, *, warmup_steps: int | float = 0) -> None:
        self._take(interval, warmup_steps)

    @override
    def summary(self) -> str:
        return (
            f"{self.local_steps} of {self._steps} steps were made apart, and the weights averaged {self._averagings}"
            " times since"
        )
