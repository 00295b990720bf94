"""SeqNorm: normalise each sample over groups of channels, then BatchNorm in groups of samples (Dimitriou & Arandjelovic 2022).

The rule is ``GroupNorm(x; G)`` without gain and bias, followed by ``_ghosts.groups.ghost_batch_norm`` with BatchNorm's.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._arguments.kinds import Count
from lightning_eff._core._resume.marks import Marked, device_of
from lightning_eff._core.search_space import Choice, SearchSpace, needs_images
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.layers._ghosts.groups import GhostSize, chosen, normed, refuse_synchronized
from lightning_eff.model.layers._shared.arguments import Paths
from lightning_eff.model.layers._shared.choosing import ByName

WHO = "SeqNorm"


class SequentialNorm(Marked, _BatchNorm):
    """A BatchNorm whose input is first normalised over groups of channels.

    Args:
        plain: the BatchNorm, whose parameters and running statistics become this module's.
        size: the number of samples in a ghost batch.
        channel_groups: G, the number of groups of channels; None skips the first norm.
        device: the device of its mark.
    """

    def __init__(self, plain: _BatchNorm, size: int, channel_groups: int | None, device: torch.device | None) -> None:
        super().__init__(plain.num_features, plain.eps, plain.momentum, plain.affine, plain.track_running_stats)
        for name, tensor in plain._parameters.items():
            self._parameters[name] = tensor
        for name, tensor in plain._buffers.items():
            self._buffers[name] = tensor
        self.size, self.channel_groups = size, channel_groups
        self.kind = type(plain)
        self.mark(
            float(channel_groups or 0), f"a norm that starts with {channel_groups or 'no'} groups of channels", device
        )

    @override
    def _check_input_dim(self, input: Tensor) -> None:
        """Check the input as the plain norm does."""
        self.kind._check_input_dim(self, input)  # pyright: ignore[reportArgumentType]

    @override
    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if self.channel_groups is not None:
            # x <- (x - mean) / sqrt(var + eps), over each sample's positions and the channels of a group
            input = F.group_norm(input, self.channel_groups, eps=self.eps)
        if not self.training:
            return _BatchNorm.forward(self, input)
        return normed(self, input, self.size, _BatchNorm.forward)[0]

    @override
    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, size={self.size}, channel_groups={self.channel_groups}"


class SeqNorm(ByName, Architecture):
    """Replace BatchNorm with two norms in sequence: over groups of each sample's channels, then over groups of samples.

    The first norm divides each sample's channels into ``channel_groups`` groups, and gives each group mean 0 and variance 1
    over its channels and positions, without gain or bias. The second is BatchNorm in ghost batches of ``size`` samples, as in
    ``GhostNorm``, with BatchNorm's own gain, bias and running statistics. The paper reports gains in accuracy of 0.3, 1.7 and
    1.1 % on CIFAR-10, CIFAR-100 and ImageNet.

    Use it for CNNs with BatchNorm that train with large batches. **It changes the model**, also in evaluation. Checkpoints
    hold the plain module's parameters and statistics, and a mark, ``lightning_eff_mark``, so that no plain module loads them.
    Load them into ``lightning_eff.apply(plain, SeqNorm(...))``. ``export`` refuses. **It costs time**: an additional norm,
    and one call per group of samples. It logs ``norms``, the number of norms.

    Args:
        size: the number of samples in a ghost batch. Also accepted as ``ghost_batch_size``.
        channel_groups: the number of groups of channels. It must divide the channels of each named norm; other norms are
            skipped. None skips the first norm, and computes the same as ``GhostNorm``.
        names: dotted paths of the BatchNorms to replace, their last parts, or patterns, such as ``["layer1.*"]``. None takes
            all, ``[]`` is plain training.

    Raises:
        ValueError: for a value out of range. At setup or in ``apply``, if there is no BatchNorm whose channels can be
            divided, a name matches none, a named one cannot be replaced, or with ``Trainer(sync_batchnorm=True)``.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[SeqNorm(32, channel_groups=4)])

    References:
        Dimitriou & Arandjelovic 2022, "Sequential Normalization: Embracing Smaller Sample Sizes for Normalization",
        arXiv:2006.07159.
        Hoffer et al. 2017, "Train longer, generalize better: closing the generalization gap in large batch training of neural
        networks", arXiv:1705.08741.
    """

    saves = "steps, if noisier statistics generalise better; no time per step"
    paper = "Dimitriou & Arandjelovic 2022, arXiv:2006.07159"
    constraints = "modules with BatchNorm; without sync_batchnorm"
    search_space = SearchSpace({"size": Choice((8, 16, 32)), "channel_groups": Choice((2, 4, 8))}, needs_images)
    control = Control(
        "the baseline for the same time, and the baseline at the ghost batch's size with its own best learning rate"
    )
    conflicts: ClassVar[Mapping[str, str]] = {"GhostNorm": "both compute BatchNorm in ghost batches"}
    change_at = Change.SWAP
    stays = "samples are first normalised over groups of channels, which running statistics cannot do"
    _count = 0

    def __init__(
        self, size: GhostSize = 32, *, channel_groups: Annotated[int | None, Count()] = 4, names: Paths = None
    ) -> None:
        self.size, self.channel_groups = size, channel_groups
        self._take_names(names)

    @override
    def check(self, session: Session) -> None:
        super().check(session)
        refuse_synchronized(session.trainer, who=WHO)

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root

        def undivided(m: _BatchNorm) -> str | None:
            if self.channel_groups is None or m.num_features % self.channel_groups == 0:
                return None
            return f"its {m.num_features} channels cannot be divided into channel_groups={self.channel_groups}"

        found, left = chosen(root, self.names, who=WHO, also=undivided)
        surgeon.leave(left)
        ids, where = {id(m) for m in found.values()}, device_of(root)

        def build(plain: nn.Module) -> nn.Module:
            assert isinstance(plain, _BatchNorm)
            return SequentialNorm(plain, self.size, self.channel_groups, where)

        surgeon.swap(lambda path, m: id(m) in ids, build, what="a BatchNorm")
        self._count = len(found)
        groups = f"over {self.channel_groups} groups of channels, and then " if self.channel_groups else ""
        rank_zero_info(f"{WHO}: {self._count} BatchNorms normalise {groups}over {self.size} samples at a time.")

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"norms": self._count}

    @override
    def summary(self) -> str:
        return f"{self._count} sequential norms" if self._count else "the module already had its norms"
