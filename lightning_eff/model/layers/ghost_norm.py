"""GhostNorm: BatchNorm by small groups of a large batch's samples (Hoffer et al. 2017).

The rule is ``y_l = w (x_l - mu_l) / sqrt(var_l + eps) + b`` for each group ``l``, which ``_ghosts.groups.ghost_batch_norm``
computes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lightning_eff._core._architecture.naming import check_names
from lightning_eff._core._needs.needs import Part, Reasons
from lightning_eff._core._stack.showing import Worn, put_on, take_off, worn_by
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique
from lightning_eff.model.layers._ghosts.groups import check_size, chosen, normed, refuse_synchronized

WHO = "GhostNorm"


class Groups:
    """Of how many samples ghost batches are, and into how many the last batch was divided."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.count = 0


class Ghost(Worn):
    """A BatchNorm that computes by ghost batches while it trains."""

    def forward(self, x: Tensor) -> Tensor:
        """BatchNorm's own ``forward``, group by group."""
        assert isinstance(self, _BatchNorm)
        if not self.training:
            return self._plain.forward(self, x)  # pyright: ignore[reportAttributeAccessIssue]
        groups: Groups = worn_by(cast(Any, self))
        y, count = normed(self, x, groups.size, self._plain.forward)  # pyright: ignore[reportAttributeAccessIssue]
        groups.count = max(groups.count, count)
        return y


def _pointless(profile: RunProfile) -> str | None:
    if profile.image_side is None:
        return "samples are no images, whose networks have BatchNorm"
    return None if profile.batch_size >= 32 else f"a batch of {profile.batch_size} is no larger than a ghost batch"


class GhostNorm(Technique):
    """Let BatchNorm take its statistics over small groups of a batch's samples, as if each were a batch of its own.

    The statistics of large batches are less noisy, and networks that are trained with them generalise worse: by groups, the
    noise is that of a small batch, while gradients, steps and devices have the large one. Each group of ``size`` samples,
    counted along dimension 0 of what a norm is given, has mean 0 and variance 1 in each channel before the norm's own gain
    and bias. The last group has what is left, or joins the one before where it would have a single value in each channel.

    Evaluation is the plain module's, by running statistics. These move as far as by one plain batch, to the mean of the
    groups' statistics: the running mean is that of plain training, and the running variance that within groups, which is
    what the network was trained with. Parameters and checkpoints are the plain module's.

    **Costs time**: as many calls as there are groups, where BatchNorm has one (Composer: 5 % of throughput, for 0.3 % of
    accuracy either way). Of batches no larger than ``size`` it is plain training, which is warned of. Norms of other kinds
    are left, as are ``nn.SyncBatchNorm``.

    Logged: ``norms``, how many BatchNorms; ``groups``, the most that the last batch was divided into.

    Args:
        size: samples of a ghost batch, an integer >= 2.
        names: dotted paths of BatchNorms, their last parts or patterns, such as ``["layer1.*"]``; None takes all, ``[]`` is
            plain training.

    Raises:
        ValueError: for other values; at setup, if there is no BatchNorm, with what there is, for a name that means none,
            with the nearest ones, for a named one that cannot be acted on, with the reason, and with
            ``Trainer(sync_batchnorm=True)``.

    Sources:
        Hoffer et al. 2017, arXiv:1705.08741; MosaicML 2022, Composer's method card (what it costs).
    """

    saves: ClassVar[str] = "nothing of a step: it lets larger batches generalise as small ones do"
    paper: ClassVar[str] = "Hoffer et al. 2017, arXiv:1705.08741"
    constraints: ClassVar[str] = "modules with BatchNorm; without sync_batchnorm"
    refuses: ClassVar[Reasons] = {
        Part.SHARD: "",
        Part.TENSOR: "",
        Part.PIPELINE: "the technique's statistics would be those of micro-batches",
    }
    survey: ClassVar[Survey | None] = Survey("ghost batch normalisation", shen="4.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"size": Choice((8, 16, 32))}, _pointless)
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds, and the baseline at the ghost batch's size with its own best rate"
    )
    conflicts: ClassVar[Mapping[str, str]] = {}
    needs_automatic_optimization: ClassVar[bool] = False
    sparse_gradients: ClassVar[bool] = True

    def __init__(self, size: int = 32, *, names: Sequence[str] | None = None) -> None:
        check_size(size, who=WHO)
        self.size = size
        self.names = check_names(names, who=WHO, what="BatchNorms", example="layer1.*")
        self._reset()

    def _reset(self) -> None:
        self._norms: list[nn.Module] = []
        self._groups = Groups(self.size)
        self._count = 0
        self._warned = False

    @property
    @override
    def neutral(self) -> bool:
        return self.names == []

    @override
    def check(self, session: Session) -> None:
        refuse_synchronized(session.trainer, who=WHO)

    @override
    def attach(self, session: Session) -> None:
        self._reset()

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        found, left = chosen(session.module, self.names, who=WHO)
        self._norms, self._count = list[nn.Module](found.values()), len(found)
        session.views.append(self._view)
        if left:
            listed = "; ".join(f"{path} ({reason})" for path, reason in left.items())
            rank_zero_info(f"{WHO}: left as they are: {listed}")
        rank_zero_info(f"{WHO}: {self._count} BatchNorms take their statistics over {self.size} samples at a time.")

    @contextmanager
    def _view(self, training: bool) -> Iterator[None]:
        worn = [m for m in self._norms if not isinstance(m, Worn)] if training else []
        for m in worn:
            put_on(m, Ghost, cast(Any, self._groups))
        try:
            yield
        finally:
            for m in worn:
                take_off(m)

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        self._groups.count = 0

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        if self._groups.count == 1 and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"{WHO}(size={self.size}): the batch was one group in each BatchNorm, which is plain training. Give a smaller"
                " size, or a larger batch."
            )

    @override
    def detach(self, session: Session) -> None:
        self._norms = []

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"norms": self._count, "groups": self._groups.count}

    @override
    def summary(self) -> str:
        return (
            f"{self._count} BatchNorms by ghost batches of {self.size} samples, {self._groups.count} in the last batch"
        )
