"""LowRankConv: convolutions as one down columns and one along rows, begun by the nearest such pair (Tai et al. 2015).

The rule is ``W_nc(y, x) ~ sum_k H_nk(x) V_kc(y)``, the best product of rank r of the matrix that
``_low_rank.factored.conv_matrix`` makes of W, which ``_low_rank.factors.factors`` finds.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.naming import check_met, meets
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey
from lightning_eff._core.technique import Control
from lightning_eff.model.layers._low_rank.factored import FactoredConv2d, conv_matrix
from lightning_eff.model.layers._low_rank.technique import LowRank, Place

WHO = "LowRankConv"
_OTHERS = (nn.Conv1d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _pointless(profile: RunProfile) -> str | None:
    return None if profile.image_side is not None else "samples are no images"


class LowRankConv(LowRank):
    """Compute a convolution of ky x kx as two: ky x 1 to r channels, and 1 x kx from these to the outputs.

    The pair has ``r (C ky + N kx)`` weights for ``C N ky kx``, and as many fewer products a pixel; a 1 x 1 convolution
    becomes two of these. The factors are the nearest ones to the convolution's first weights, and compute the same function
    at the full rank, ``min(C ky, N kx)``, whatever strides, dilations and paddings are. Grouped convolutions are left, as
    are those that the pair would not make smaller and those of few input channels, as stems are; what is left is said, with
    the reason.

    **Seldom pays**: convolutions of 3 x 3 have kernels of their own, faster for each product than those of 3 x 1, and
    between the two all of a feature map is written and read once more. Measure before you believe in the products that are
    saved.

    The pair are two ``nn.Conv2d``, ``first`` and ``second``. ``lightning_eff.export`` multiplies them, and gives the plain
    module. With ``energy`` ranks go by the first weights; those of a checkpoint go by it.

    Logged: ``factored``, how many convolutions; ``weights``, how many theirs are.

    Args:
        rank: r, an integer >= 1 and at most the full rank of each convolution that is named; or a share of that, in (0, 1];
            None for a quarter, unless ``energy`` is given.
        energy: instead, the share of the sum of squared singular values that each one keeps, in (0, 1].
        names: dotted paths of convolutions, their last parts or patterns, such as ``["layer*.conv1"]``; None looks for them,
            ``[]`` is plain training.
        min_channels: convolutions with fewer inputs or outputs are left, unless they are named; >= 1.

    Raises:
        ValueError: for other values; at setup or in ``apply``, where no convolution is left to act on, with the reason for
            each; for a name that means none, with the nearest ones; for a named one whose rank is smaller, or that cannot be
            replaced, with the reason.

    Sources:
        Tai et al. 2015, arXiv:1511.06067.
    """

    saves: ClassVar[str] = "products and weights of wide convolutions, for some quality; time seldom"
    paper: ClassVar[str] = "Tai et al. 2015, arXiv:1511.06067"
    constraints: ClassVar[str] = (
        "two-dimensional convolutions of one group; seldom faster than a 3 x 3 kernel of its own"
    )
    survey: ClassVar[Survey | None] = Survey("low-rank convolutions", shen="4.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"rank": Choice((0.125, 0.25, 0.5))}, _pointless)
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds, and one of narrower layers with as many weights"
    )
    what: ClassVar[str] = "convolution"
    conflicts: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        rank: int | float | None = None,
        *,
        energy: float | None = None,
        names: Sequence[str] | None = None,
        min_channels: int = 16,
    ) -> None:
        self._take(rank, energy, names, "convolutions", "layer*.conv1")
        if not isinstance(min_channels, int) or isinstance(min_channels, bool) or min_channels < 1:
            raise ValueError(f"{WHO}({min_channels=}): expected an integer >= 1, channels on either side.")
        self.min_channels = min_channels

    @override
    def _places(self, root: nn.Module) -> tuple[list[Place], dict[str, str]]:
        every = {path: m for path, m in root.named_modules() if isinstance(m, (nn.Conv2d, *_OTHERS))}
        if self.names is not None:
            check_met(self.names, every, who=WHO, what="convolutions", root=type(root).__name__)
        found: list[Place] = []
        left: dict[str, str] = {}
        small: list[int] = []
        for path, m in every.items():
            named = self.names is not None and any(meets(path, name) for name in self.names)
            if self.names is not None and not named:
                continue
            reason = _unfit(m)
            if named and reason is not None:
                raise ValueError(
                    f"{WHO}: {path} ({type(m).__name__}) cannot be replaced: {reason}. Leave it out of the names."
                )
            if reason is None and not named and min(m.in_channels, m.out_channels) < self.min_channels:
                reason = f"it has fewer than min_channels={self.min_channels} on a side"
                small.append(min(m.in_channels, m.out_channels))
            if reason is not None:
                left[path] = reason
            else:
                assert isinstance(m, nn.Conv2d)
                found.append(_place(path, m, named))
        self._floor = ("min_channels", max(small)) if small else None
        return found, left


def _unfit(m: nn.Module) -> str | None:
    if not isinstance(m, nn.Conv2d):
        return (
            f"it is a {type(m).__name__}, and only two-dimensional convolutions have columns and rows to be told apart"
        )
    if m.groups > 1:
        return f"it has {m.groups} groups, each of which is small already"
    if type(m).forward is not nn.Conv2d.forward or type(m)._conv_forward is not nn.Conv2d._conv_forward:
        return "a subclass of nn.Conv2d with a forward of its own"
    return None


def _place(path: str, m: nn.Conv2d, named: bool) -> Place:
    n, c, ky, kx = m.weight.shape

    def matrix() -> Tensor:
        return conv_matrix(m.weight)

    return Place(
        path,
        m,
        m.weight.numel(),
        c * ky + n * kx,
        matrix,
        min(c * ky, n * kx),
        lambda rank: FactoredConv2d(m, rank),
        named,
    )
