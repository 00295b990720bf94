"""RMSNormalization: replace LayerNorm with a norm that divides by the root mean square (Zhang & Sennrich 2019).

The rule is ``y = x / sqrt(mean(x^2) + eps) g``. LayerNorm also subtracts the mean of x and adds a bias.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._resume.marks import Marked, device_of
from lightning_eff._core.search_space import SearchSpace, needs_matrices
from lightning_eff._core.technique import Control
from lightning_eff.model.layers._shared.arguments import Paths
from lightning_eff.model.layers._shared.choosing import ByName, check_any, select
from lightning_eff.model.layers._shared.fast_paths import REASON, read_in_evaluation

WHO = "RMSNormalization"


class RMSNorm(Marked):
    """``x / sqrt(mean(x^2) + eps) g`` over the last dimensions, with a LayerNorm's gain.

    Args:
        plain: the LayerNorm, whose ``weight`` becomes this module's parameter.
        device: the device of its mark, if it has no gain.
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
        """Set the gain to ones."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    @override
    def extra_repr(self) -> str:
        return f"{tuple(self.normalized_shape)}, eps={self.eps}"


class RMSNormalization(ByName, Architecture):
    """Replace LayerNorm with RMSNorm, which subtracts no mean and adds no bias.

    Each ``nn.LayerNorm`` that is called as a module becomes a norm by the root mean square with the same gain and epsilon,
    computed by ``torch.nn.functional.rms_norm``. Its biases are dropped. On centred inputs both compute the same function.

    Use it if your LayerNorms are not fused. **It seldom saves time otherwise**: the paper's 7 to 64 % of a model's time are
    for unfused norms on older hardware. If both are one kernel, they read and write the same bytes, and the gain is one
    vector of biases per norm.

    **It changes the model**; most language models since have used RMSNorm without loss of quality. Checkpoints load only into
    ``lightning_eff.apply(plain, RMSNormalization())``; norms without a bias have a mark, ``lightning_eff_mark``, in it.
    ``export`` refuses, because LayerNorm always subtracts the mean. It logs ``norms``, the number of norms.

    Args:
        names: dotted paths of the LayerNorms to replace, their last parts, or patterns, such as ``["blocks.*.norm1"]``. None
            takes all, ``[]`` is plain training.

    Raises:
        ValueError: for a wrong value. At setup or in ``apply``, if there is no LayerNorm to replace, a name matches none, or
            a named one cannot be replaced.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[RMSNormalization()])

    References:
        Zhang & Sennrich 2019, "Root Mean Square Layer Normalization", arXiv:1910.07467.
    """

    saves = "some time of unfused norms; almost none if LayerNorm is one kernel"
    paper = "Zhang & Sennrich 2019, arXiv:1910.07467"
    constraints = "modules with nn.LayerNorm; gains nothing if it is fused"
    search_space = SearchSpace({}, needs_matrices)
    control = Control("the baseline for the same time with its learning rate decayed to zero")
    conflicts: ClassVar[Mapping[str, str]] = {}
    change_at = Change.SWAP
    stays = "a LayerNorm subtracts the mean, whatever its gain and bias"
    _count = 0

    def __init__(self, names: Paths = None) -> None:
        self._take_names(names)

    @override
    def change(self, surgeon: Surgeon) -> None:
        root = surgeon.root
        every = {path: m for path, m in root.named_modules() if isinstance(m, nn.LayerNorm)}
        read = read_in_evaluation(root)

        def unfit(path: str, m: nn.LayerNorm) -> str | None:
            if type(m).forward is not nn.LayerNorm.forward:
                return "it is a subclass of nn.LayerNorm with its own forward"
            return REASON if id(m) in read else None

        found, left = select(every, self.names, unfit, who=WHO, what="LayerNorms", root=root)
        check_any(found, left, who=WHO, what="LayerNorm", root=root)
        surgeon.leave(left)
        chosen, where = {id(m) for m in found.values()}, device_of(root)

        def build(plain: nn.Module) -> nn.Module:
            assert isinstance(plain, nn.LayerNorm)
            return RMSNorm(plain, where)

        paths = surgeon.swap(lambda path, m: id(m) in chosen, build, what="a LayerNorm")
        self._count = len(chosen)
        rank_zero_info(f"{WHO}: replaced {self._count} LayerNorms: {', '.join(paths[:4])}{' ...' * (len(paths) > 4)}")

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"norms": self._count}

    @override
    def summary(self) -> str:
        return f"{self._count} norms by the root mean square" if self._count else "the module already had its norms"
