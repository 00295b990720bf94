"""Resume bit for bit in mid-epoch, and change nothing else: the position in the data, random state, open gradients.

Lightning's own checkpoints hold none of these, so a resumed run begins its epoch's data anew, with other random numbers.
Keeping them is good practice rather than a method, as in torchtitan (Liang et al. 2024, arXiv:2410.06511). Every technique
of this package brings what this one has by itself.
"""

from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import Need, Part
from lightning_eff._core._needs.offers import is_plain, parts_of
from lightning_eff._core.progress import HoldsGradients
from lightning_eff._core.search_space import RunProfile, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique


def _gains_nothing(profile: RunProfile) -> str:
    return "a run trains as without it, and only what comes after a checkpoint differs"


class ExactResume(Technique):
    """Let a run that goes on from a checkpoint end as the undisturbed one would, to the bit.

    Plain modules and precision plugins alone resume exactly with it, from a checkpoint saved after any batch, also in
    mid-epoch and within an accumulation window. So do runs under DDP, under Lightning's ``ModelParallelStrategy``, and under
    ``HybridParallelStrategy`` in every layout. Both formats of checkpoints do.

    A checkpoint holds, of every rank: where the training loaders are and how their samplers began the epoch, the state of
    Python's, NumPy's and torch's random generators, and logged values. Within an accumulation window it also holds the
    gradients summed so far (as large as the weights, for each data-parallel rank; after an optimizer step none). Those
    gradients are saved rather than made again from the window's beginning, since its batches have moved BatchNorm statistics.

    A resumed run first does what Lightning still had to do when it saved: the hooks of later callbacks and of the module,
    validation, schedulers, early stopping and logging. Where such a hook reads the batch, the checkpoint holds the batch too.

    It adds nothing to a run that has any other technique of this package. Loaders that bring ``state_dict`` and
    ``load_state_dict`` themselves keep their own way.

    Not exact: checkpoints saved while a step is under way, as by ``OnExceptionCheckpoint`` (that batch is trained on again,
    with other random numbers); random augmentation inside persistent workers; kernels that are not deterministic. In another
    layout with as many data-parallel ranks the same batches follow, and results agree within rounding if the forward pass
    draws no random numbers. With another number of data-parallel ranks the epoch begins anew. Modules that optimize by hand
    resume exactly where each batch either makes all its steps or leaves all its gradients to later ones. The contract page has
    the whole list.

    Raises:
        ValueError: at setup, under another strategy that shards parameters.
    """

    saves = "the difference between a resumed run and an undisturbed one"
    paper = "practice; Liang et al. 2024, arXiv:2410.06511"
    constraints = "as many data-parallel ranks as the checkpoint's"
    needs: ClassVar[Need] = Need.BATCH
    search_space: ClassVar[SearchSpace | None] = SearchSpace(pointless=_gains_nothing)
    control = Control("the baseline: it trains as without it, and only what comes after a checkpoint differs")
    needs_automatic_optimization = False
    sparse_gradients = True

    def __init__(self) -> None:
        self._batches = 0
        self._open = 0

    @override
    def check(self, session: Session) -> None:
        strategy = session.trainer.strategy
        told = is_plain(strategy) or isinstance(strategy, HoldsGradients) or Part.ITSELF in parts_of(strategy)
        if not told:
            raise ValueError(
                f"ExactResume: {type(strategy).__name__} does not tell the gradients of an open accumulation window, which a"
                " checkpoint must hold. Use a single device, strategy='ddp' or strategy='hybrid', or remove ExactResume."
            )

    @override
    def attach(self, session: Session) -> None:
        self._batches = self._open = 0

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        self._batches = batch_idx + 1
        window = session.trainer.accumulate_grad_batches
        self._open = 0 if session.epoch_complete() else self._batches % window

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"batches": self._batches, "open_batches": self._open}

    @override
    def summary(self) -> str:
        return f"a checkpoint now would go on after batch {self._batches} of its epoch, to the bit"
