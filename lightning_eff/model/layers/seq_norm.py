"""SeqNorm: each sample over groups of channels, and then BatchNorm by groups of samples (Dimitriou & Arandjelovic 2022).

The rule is ``GroupNorm(x; G)`` without gain and bias, followed by ``_ghosts.groups.ghost_batch_norm`` with BatchNorm's.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lightning_eff._core._architecture.naming import check_names, meets
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.layers._ghosts.groups import check_size, chosen, normed, refuse_synchronized
from lightning_eff.model.layers._marks import Marked, device_of

WHO = "SeqNorm"


class SequentialNorm(Marked, _BatchNorm):
    """A BatchNorm of what each sample is after it was normed over groups of channels.

    Args:
        plain: the BatchNorm, whose parameters and running statistics it takes as the same tensors.
        size: samples of a ghost batch.
        channel_groups: G, groups of channels; None leaves them as they are.
        device: where its mark lies.
    """

    def __init__(self, plain: _BatchNorm, size: int, channel_groups: int | None, device: torch.device | None) -> None:
        super().__init__(plain.num_features, plain.eps, plain.momentum, plain.affine, plain.track_running_stats)
        for name, tensor in plain._parameters.items():
            self._parameters[name] = tensor
        for name, tensor in plain._buffers.items():
            self._buffers[name] = tensor
        self.size, self.channel_groups = size, channel_groups
        self.kind = type(plain)
        self.mark(float(channel_groups or 0), f"a norm over {channel_groups or 'no'} groups of channels first", device)

    @override
    def _check_input_dim(self, input: Tensor) -> None:
        """As the plain one does."""
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


def _pointless(profile: RunProfile) -> str | None:
    return None if profile.image_side is not None else "samples are no images, whose networks have BatchNorm"


class SeqNorm(Architecture):
    """Norm each sample over groups of its channels, and then let BatchNorm take its statistics over groups of samples.

    Where BatchNorm stood, two norms follow upon each other: the first divides each sample's channels into
    ``channel_groups``, and gives each of these mean 0 and variance 1 over its channels and positions, without gain or bias;
    the second is BatchNorm by ghost batches of ``size`` samples, as ``GhostNorm`` computes it, with BatchNorm's own gain,
    bias and running statistics. The source reports 0.3, 1.7 and 1.1 % of accuracy on CIFAR-10, CIFAR-100 and ImageNet.

    **Another model**, also in evaluation, where samples are normed over groups of channels as well. Its checkpoints have the
    plain module's parameters and statistics, and a mark beside them, ``lightning_eff_mark``, so that no plain module loads
    them as if it computed the same; they load into ``lightning_eff.apply(plain, SeqNorm(...))``. ``export`` refuses. **Costs
    time**: one norm more, and a call for each group of samples.

    Logged: ``norms``, how many.

    Args:
        size: samples of a ghost batch, an integer >= 2.
        channel_groups: G, an integer >= 1 that divides the channels of each norm that is named; others are left. None leaves
            the first norm out, and computes what ``GhostNorm`` does.
        names: dotted paths of BatchNorms, their last parts or patterns, such as ``["layer1.*"]``; None takes all, ``[]`` is
            plain training.

    Raises:
        ValueError: for other values; at setup or in ``apply``, if there is no BatchNorm, or none whose channels can be
            divided, with what there is; for a name that means none, with the nearest ones; for a named one that cannot be
            replaced, with the reason; and with ``Trainer(sync_batchnorm=True)``.

    Sources:
        Dimitriou & Arandjelovic 2022, arXiv:2006.07159; Hoffer et al. 2017, arXiv:1705.08741.
    """

    saves: ClassVar[str] = "steps, where noisier statistics generalise better; no time of a step"
    paper: ClassVar[str] = "Dimitriou & Arandjelovic 2022, arXiv:2006.07159"
    constraints: ClassVar[str] = "modules with BatchNorm; without sync_batchnorm"
    survey: ClassVar[Survey | None] = Survey("sequential normalisation (SeqNorm)", shen="4.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"size": Choice((8, 16, 32)), "channel_groups": Choice((2, 4, 8))}, _pointless
    )
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds, and the baseline at the ghost batch's size with its own best rate"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "GhostNorm": "it computes by ghost batches itself; expected one of the two"
    }
    change_at: ClassVar[Change] = Change.SWAP
    stays: ClassVar[str] = "samples are normed over groups of channels first, which no running statistics do"
    _count = 0

    def __init__(self, size: int = 32, *, channel_groups: int | None = 4, names: Sequence[str] | None = None) -> None:
        check_size(size, who=WHO)
        whole = isinstance(channel_groups, int) and not isinstance(channel_groups, bool) and channel_groups >= 1
        if channel_groups is not None and not whole:
            raise ValueError(f"{WHO}({channel_groups=}): expected an integer >= 1, or None for no norm over channels.")
        self.size, self.channel_groups = size, channel_groups
        self.names = check_names(names, who=WHO, what="BatchNorms", example="layer1.*")

    @property
    @override
    def neutral(self) -> bool:
        return self.names == []

    @override
    def check(self, session: Session) -> None:
        super().check(session)
        refuse_synchronized(session.trainer, who=WHO)

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        found, left = chosen(root, self.names, who=WHO)
        for path, m in [*found.items()]:
            if self.channel_groups is None or m.num_features % self.channel_groups == 0:
                continue
            reason = f"its {m.num_features} channels cannot be divided into {self.channel_groups} groups"
            if any(meets(path, name) for name in self.names or ()):
                raise ValueError(
                    f"{WHO}: {path} ({type(m).__name__}) cannot be replaced: {reason}. Leave it out of the names."
                )
            left[path] = reason
            del found[path]
        if not found:
            reasons = "; ".join(f"{path}: {reason}" for path, reason in left.items())
            raise ValueError(
                f"{WHO}(channel_groups={self.channel_groups}): no BatchNorm of {type(root).__name__} is left to act on:"
                f" {reasons}. Expected a number that divides some of these; give another, or take the technique out."
            )
        surgeon.leave(left)
        ids, where = {id(m) for m in found.values()}, device_of(root)

        def build(plain: nn.Module) -> nn.Module:
            assert isinstance(plain, _BatchNorm)
            return SequentialNorm(plain, self.size, self.channel_groups, where)

        surgeon.swap(lambda path, m: id(m) in ids, build, what="a BatchNorm")
        self._count = len(found)
        groups = f"over {self.channel_groups} groups of channels, and then " if self.channel_groups else ""
        rank_zero_info(f"{WHO}: {self._count} BatchNorms norm {groups}over {self.size} samples at a time.")

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"norms": self._count}

    @override
    def summary(self) -> str:
        return f"{self._count} sequential norms" if self._count else "the module had its norms already"
