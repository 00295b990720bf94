"""GhostNorm: compute BatchNorm over small groups of a large batch's samples (Hoffer et al. 2017).

The rule is ``y_l = w (x_l - mu_l) / sqrt(var_l + eps) + b`` for each group ``l``; ``_ghosts.groups.ghost_batch_norm``
computes it.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, cast

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lightning_eff._core._architecture.naming import by_reason
from lightning_eff._core._needs.needs import Part, Reasons
from lightning_eff._core._stack.partial_views import Worn, worn, worn_by
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique
from lightning_eff.model.layers._ghosts.groups import GhostSize, chosen, normed, refuse_synchronized
from lightning_eff.model.layers._shared.arguments import Paths
from lightning_eff.model.layers._shared.choosing import ByName

WHO = "GhostNorm"


class Groups:
    """The number of samples in a ghost batch, and the number of ghost batches in the last batch."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.count = 0


class Ghost(Worn):
    """A BatchNorm that computes in ghost batches while it trains."""

    def forward(self, x: Tensor) -> Tensor:
        """Run BatchNorm's own ``forward``, group by group."""
        assert isinstance(self, _BatchNorm)
        if not self.training:
            return self._plain.forward(self, x)  # pyright: ignore[reportAttributeAccessIssue]
        groups: Groups = worn_by(cast(Any, self))
        y, count = normed(self, x, groups.size, self._plain.forward)  # pyright: ignore[reportAttributeAccessIssue]
        groups.count = max(groups.count, count)
        return y


def _pointless(profile: RunProfile) -> str | None:
    if profile.image_side is None:
        return "the samples are not images, whose networks have BatchNorm"
    return None if profile.batch_size >= 32 else f"a batch of {profile.batch_size} is no larger than a ghost batch"


class GhostNorm(ByName, Technique):
    """Compute BatchNorm's statistics over small groups of a batch, as if each group were a batch.

    Networks trained with the statistics of large batches generalise worse, because these statistics are less noisy. In
    groups, the noise is that of a small batch, while gradients and steps use the large one. Each group of ``size`` samples,
    counted along dimension 0 of the norm's input, has mean 0 and variance 1 in each channel, before the norm's own gain and
    bias. The last group holds the rest. It joins the group before it if it would have a single value per channel.

    Evaluation uses the running statistics, as in the plain module. They move as far as with one plain batch, towards the mean
    of the groups' statistics: the running mean equals that of plain training, and the running variance is the variance within
    groups. Parameters and checkpoints are those of the plain module.

    Use it when you train with large batches and the network has BatchNorm. **It costs time**: one call per group, where
    BatchNorm has one call (Composer measured 5 % of throughput, for 0.3 % of accuracy either way). With batches of at most
    ``size`` samples it is plain training, and warns. It skips norms of other kinds and ``nn.SyncBatchNorm``. It logs
    ``norms``, the number of BatchNorms, and ``groups``, the largest number of groups in the last batch.

    Args:
        size: the number of samples in a ghost batch. Also accepted as ``ghost_batch_size``.
        names: dotted paths of the BatchNorms to change, their last parts, or patterns, such as ``["layer1.*"]``. None takes
            all, ``[]`` is plain training.

    Raises:
        ValueError: for a value out of range. At setup, if there is no BatchNorm, a name matches none, a named one cannot be
            changed, or with ``Trainer(sync_batchnorm=True)``.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[GhostNorm(32)])

    References:
        Hoffer et al. 2017, "Train longer, generalize better: closing the generalization gap in large batch training of neural
        networks", arXiv:1705.08741.
        MosaicML 2022, Composer's method card "Ghost BatchNorm" (cost).
    """

    saves = "no time per step: larger batches generalise as well as small ones"
    paper = "Hoffer et al. 2017, arXiv:1705.08741"
    constraints = "modules with BatchNorm; without sync_batchnorm"
    refuses: ClassVar[Reasons] = {
        Part.SHARD: "",
        Part.TENSOR: "",
        Part.PIPELINE: "its statistics would be those of micro-batches",
    }
    search_space = SearchSpace({"size": Choice((8, 16, 32))}, _pointless)
    control = Control(
        "the baseline for the same time, and the baseline at the ghost batch's size with its own best learning rate"
    )
    conflicts: ClassVar[Mapping[str, str]] = {}
    needs_automatic_optimization: ClassVar[bool] = False
    sparse_gradients: ClassVar[bool] = True

    def __init__(self, size: GhostSize = 32, *, names: Paths = None) -> None:
        self.size = size
        self._take_names(names)

    def _reset(self) -> None:
        self._norms: list[nn.Module] = []
        self._groups = Groups(self.size)
        self._count = 0
        self._warned = False

    @override
    def check(self, session: Session) -> None:
        refuse_synchronized(session.trainer, who=WHO)

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        found, left = chosen(session.module, self.names, who=WHO)
        self._norms, self._count = list[nn.Module](found.values()), len(found)
        session.views.append(self._view)
        skipped = f" Skipped{by_reason(left)}" if left else ""
        rank_zero_info(
            f"{WHO}: {self._count} BatchNorms compute statistics over {self.size} samples at a time.{skipped}"
        )

    def _view(self, training: bool) -> AbstractContextManager[None]:
        norms = self._norms if training else []
        return worn(Ghost, norms, [self._groups] * len(norms))

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        self._groups.count = 0

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        if self._groups.count == 1 and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"{WHO}(size={self.size}): each BatchNorm saw the batch as one group, which is plain training. Give a smaller"
                " size or a larger batch."
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
            f"{self._count} BatchNorms in ghost batches of {self.size} samples, {self._groups.count} in the last batch"
        )
