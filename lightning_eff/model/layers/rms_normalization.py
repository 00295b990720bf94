"""RMSNormalization: norms that divide by the root mean square, in the place of LayerNorm (Zhang & Sennrich 2019).

The rule is ``y = x / sqrt(mean(x^2) + eps) g``, where a LayerNorm subtracts the mean of x first and adds a bias in the end.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.naming import check_met, check_names, meets
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core.search_space import RunProfile, SearchSpace, Survey
from lightning_eff._core.technique import Control
from lightning_eff.model.layers._fast_paths import REASON, read_in_evaluation
from lightning_eff.model.layers._marks import Marked, device_of

WHO = "RMSNormalization"


class RMSNorm(Marked):
    """``x / sqrt(mean(x^2) + eps) g`` over the last dimensions, with a LayerNorm's own gain.

    Args:
        plain: the LayerNorm, whose ``weight`` it takes as the same parameter.
        device: where its mark lies, if it has no gain.
    """

    weight: nn.Parameter | None

    def __init__(self, plain: nn.LayerNorm, device: torch.device | None) -> None:
        super().__init__()
        self.normalized_shape, self.eps = plain.normalized_shape, plain.eps
        self.elementwise_affine = plain.elementwise_affine
        self.register_parameter("weight", plain.weight if plain.elementwise_affine else None)
        self.bias = None
        if plain.bias is None:  # the names of its parameters are those of the plain one
            self.mark(0.0, "a norm that does not subtract the mean", device)

    @override
    def forward(self, x: Tensor) -> Tensor:
        # y = x / sqrt(mean(x^2) + eps) g
        return F.rms_norm(x, list(self.normalized_shape), self.weight, self.eps)

    def reset_parameters(self) -> None:
        """A gain of ones."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    @override
    def extra_repr(self) -> str:
        return f"{tuple(self.normalized_shape)}, eps={self.eps}"


def _pointless(profile: RunProfile) -> str | None:
    return None if profile.num_matrices else "there is no hidden linear map before which a LayerNorm could stand"


class RMSNormalization(Architecture):
    """Put RMSNorm in the place of LayerNorm: no mean is subtracted, and no bias added.

    Each ``nn.LayerNorm`` that is called becomes a norm by the root mean square with the same gain and epsilon, computed by
    ``torch.nn.functional.rms_norm``, which is one kernel where torch has one. Its biases are dropped.

    **Saves time only where LayerNorm is not fused**: the source's 7 to 64 % of a model's time are those of unfused norms on
    older hardware. Where both are one kernel they read and write the same bytes, and what is left is a vector of biases a
    norm. On centred inputs the two are the same function.

    **Another model**, as good as the plain one in most language models since. Its checkpoints load into
    ``lightning_eff.apply(plain, RMSNormalization())`` alone; of norms without a bias a mark, ``lightning_eff_mark``, says so.
    ``export`` refuses, since no LayerNorm leaves the mean where it is.

    Logged: ``norms``, how many.

    Args:
        names: dotted paths of LayerNorms, their last parts or patterns, such as ``["blocks.*.norm1"]``; None takes all,
            ``[]`` is plain training.

    Raises:
        ValueError: for other values; at setup or in ``apply``, where no LayerNorm is left to act on, with what there is, for a
            name that means none, with the nearest ones, and for a named one that cannot be replaced, with the reason.

    Sources:
        Zhang & Sennrich 2019, arXiv:1910.07467.
    """

    saves: ClassVar[str] = "some time of unfused norms; next to none where LayerNorm is one kernel"
    paper: ClassVar[str] = "Zhang & Sennrich 2019, arXiv:1910.07467"
    constraints: ClassVar[str] = "modules with nn.LayerNorm; gains nothing where that is fused"
    survey: ClassVar[Survey | None] = Survey("normalisation (RMSNorm)", shen="4.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({}, _pointless)
    control: ClassVar[Control] = Control("the baseline for as many seconds with its learning rate decayed to zero")
    conflicts: ClassVar[Mapping[str, str]] = {}
    change_at: ClassVar[Change] = Change.SWAP
    stays: ClassVar[str] = "a LayerNorm subtracts the mean, which no gain or bias of it undoes"
    _count = 0

    def __init__(self, names: Sequence[str] | None = None) -> None:
        self.names = check_names(names, who=WHO, what="LayerNorms", example="blocks.*.norm1")

    @property
    @override
    def neutral(self) -> bool:
        return self.names == []

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        every = {path: m for path, m in root.named_modules() if isinstance(m, nn.LayerNorm)}
        if self.names is not None and every:
            check_met(self.names, every, who=WHO, what="LayerNorms", root=type(root).__name__)
        read = read_in_evaluation(root)
        chosen: set[int] = set()
        left: dict[str, str] = {}
        for path, m in every.items():
            named = self.names is not None and any(meets(path, name) for name in self.names)
            if self.names is not None and not named:
                continue
            reason = REASON if id(m) in read else ""
            if type(m).forward is not nn.LayerNorm.forward:
                reason = "a subclass of nn.LayerNorm with a forward of its own"
            if reason and named:
                raise ValueError(
                    f"{WHO}: {path} ({type(m).__name__}) cannot be replaced: {reason}. Leave it out of the names."
                )
            if reason:
                left[path] = reason
            else:
                chosen.add(id(m))
        if left and not chosen:
            reasons = "; ".join(f"{path}: {reason}" for path, reason in left.items())
            raise ValueError(f"{WHO}: no LayerNorm of {type(root).__name__} can be replaced: {reasons}. Take it out.")
        surgeon.leave(left)
        where = device_of(root)

        def build(plain: nn.Module) -> nn.Module:
            assert isinstance(plain, nn.LayerNorm)
            return RMSNorm(plain, where)

        paths = surgeon.swap(lambda path, m: id(m) in chosen, build, what="a LayerNorm")
        self._count = len(chosen)
        rank_zero_info(
            f"{WHO}: {self._count} norms do not subtract the mean: {', '.join(paths[:4])}{' ...' * (len(paths) > 4)}"
        )

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"norms": self._count}

    @override
    def summary(self) -> str:
        return f"{self._count} norms by the root mean square" if self._count else "the module had its norms already"
