"""Resume training bit for bit, also in mid-epoch, and change nothing else.

Lightning's own checkpoints do not hold the position in the data, random states or gradients of an open accumulation window. A
resumed run therefore begins its epoch's data again, with other random numbers. Keeping them is good practice rather than a
method, as in torchtitan (Liang et al. 2024, arXiv:2410.06511). Every technique of this package includes what this one adds.
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
    return "it changes nothing in an uninterrupted run"


class ExactResume(Technique):
    """Make a run that resumes from a checkpoint end exactly like an uninterrupted one, bit for bit.

    Without it, a run that Lightning resumes in mid-epoch begins that epoch's data again, with other random numbers. With
    it, the run resumes exactly from a checkpoint saved after any batch, also in mid-epoch and within an accumulation
    window. This holds for plain modules and precision plugins, under DDP, Lightning's ``ModelParallelStrategy``,
    ``HybridParallelStrategy`` in every layout, and for both checkpoint formats.

    Use it in any run that may be interrupted. Every other technique of this package does the same by itself, so it adds nothing
    to a run that has one.

    Loaders with their own state resume from that: torchdata's ``StatefulDataLoader`` and ``nodes.Loader``, litdata's
    ``StreamingDataLoader``, and any class with ``state_dict`` and ``load_state_dict``. A resumed run makes the last batch
    before the checkpoint again. If it differs, that state is not enough, and the epoch's used batches are loaded again.

    A checkpoint holds the position of the training loaders on every rank, and the state from which their samplers began the
    epoch. It also holds the state of Python's, NumPy's and torch's random generators, and logged values. Within an
    accumulation window it also holds the gradients so far, which are as large as the weights on each data-parallel rank.
    They are saved rather than recomputed, because the window's batches have already changed BatchNorm statistics.

    With Lightning's ``AsyncCheckpointIO()`` among the plugins, a background thread writes checkpoints, also those that are
    folders of pieces. Without a technique, Lightning ignores the plugin for folders.

    A resumed run first does what Lightning still had to do when it saved: the hooks of later callbacks and of the module,
    validation, schedulers, early stopping and logging. If such a hook reads the batch, the checkpoint holds the batch too.

    A run does not resume exactly in these cases:

    - Checkpoints saved while a step is under way, such as those of ``OnExceptionCheckpoint``. That batch is trained on again,
      with other random numbers.
    - Random augmentation inside persistent workers, and nondeterministic kernels.
    - Another layout with the same number of data-parallel ranks. The same batches follow, and results agree within rounding if
      the forward pass draws no random numbers.
    - Another number of data-parallel ranks. The epoch begins again.
    - Manual optimization, unless each batch either makes all its steps or leaves all its gradients to later batches.

    The contract page has the whole list.

    Raises:
        ValueError: at setup, under another strategy that shards parameters.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[ExactResume()])  # then trainer.fit(..., ckpt_path="last")
    """

    saves = "the difference between a resumed run and an uninterrupted one"
    paper = "common practice; Liang et al. 2024, arXiv:2410.06511"
    constraints = "needs as many data-parallel ranks as the checkpoint"
    needs: ClassVar[Need] = Need.BATCH
    search_space = SearchSpace(pointless=_gains_nothing)
    control = Control("the baseline, because it changes nothing in an uninterrupted run")
    needs_automatic_optimization: ClassVar[bool] = False
    sparse_gradients: ClassVar[bool] = True

    def __init__(self) -> None:
        self._batches = 0
        self._open = 0

    @override
    def check(self, session: Session) -> None:
        strategy = session.trainer.strategy
        known = is_plain(strategy) or isinstance(strategy, HoldsGradients) or Part.ITSELF in parts_of(strategy)
        if not known:
            raise ValueError(
                f"ExactResume: {type(strategy).__name__} does not give access to the gradients of an open accumulation"
                " window, which a checkpoint must hold. Use a single device, strategy='ddp' or strategy='hybrid', or remove"
                " ExactResume."
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
        return f"a checkpoint saved now resumes exactly after batch {self._batches} of its epoch"
