"""LowRankConv: replace a convolution with a vertical and a horizontal one, initialised from its weight (Tai et al. 2015).

The rule is ``W_nc(y, x) ~ sum_k H_nk(x) V_kc(y)``, the best product of rank r of the matrix that
``_low_rank.factored.conv_matrix`` makes of W. ``_low_rank.factors.factors`` computes it.
"""

from typing import Annotated, Any, ClassVar

from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Alias, Count
from lightning_eff._core.search_space import Choice, SearchSpace, needs_images
from lightning_eff.model.layers._low_rank.factored import FactoredConv2d, conv_matrix
from lightning_eff.model.layers._low_rank.technique import Energy, LowRank, Place
from lightning_eff.model.layers._shared.arguments import COUNT_OR_FRACTION, Paths
from lightning_eff.model.layers._shared.choosing import is_named, select

WHO = "LowRankConv"
_OTHERS = (nn.Conv1d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class LowRankConv(LowRank):
    """Replace a ky x kx convolution with two: ky x 1 to r channels, then 1 x kx to the outputs.

    For C inputs and N outputs, the pair has ``r (C ky + N kx)`` weights instead of ``C N ky kx``, and needs as many fewer
    products per pixel. A 1 x 1 convolution becomes two 1 x 1 convolutions. The factors start as the best approximation of the
    initial weight. At the full rank, ``min(C ky, N kx)``, they compute the same function, for every stride, dilation and
    padding. The technique skips grouped convolutions, convolutions that the pair would not make smaller, and those with few
    channels, such as stems. It logs them with the reason.

    Use it on wide convolutions, and measure the step time. **It seldom saves time**: 3 x 3 convolutions have specialised
    kernels that are faster per product than 3 x 1 ones, and the pair writes and reads an extra feature map.

    The pair is two ``nn.Conv2d``, ``first`` and ``second``. ``lightning_eff.export`` multiplies them and returns the plain
    module. With ``energy``, the initial weights decide the ranks; a checkpoint brings its own ranks. It logs ``factored``,
    the number of convolutions, and ``weights``, the number of their weights.

    Args:
        rank: the rank of each convolution. A fraction refers to its full rank: 1 is a rank of one, and 1.0 is
            the full rank. None is a quarter, unless ``energy`` is given. Also accepted as ``latent_channels``.
        energy: the fraction of the sum of squared singular values that each convolution keeps, instead of ``rank``.
        names: dotted paths of the convolutions to replace, their last parts, or patterns, such as ``["layer*.conv1"]``. None
            looks for convolutions, ``[]`` is plain training.
        min_channels: the number of input and output channels below which a convolution is skipped, unless it is named.

    Raises:
        ValueError: for a value out of range, or if both ``rank`` and ``energy`` are given. At setup or in ``apply``, if there
            is no convolution to replace, a name matches none, or a named one cannot be replaced.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[LowRankConv(0.25, names=["layer4.*"])])

    References:
        Tai et al. 2015, "Convolutional Neural Networks with Low-Rank Regularization", arXiv:1511.06067.
    """

    saves = "products and weights of wide convolutions, at some cost in quality; seldom time"
    paper = "Tai et al. 2015, arXiv:1511.06067"
    constraints = "two-dimensional convolutions with groups=1; seldom faster than a 3 x 3 kernel"
    search_space = SearchSpace({"rank": Choice((0.125, 0.25, 0.5))}, needs_images)
    what: ClassVar[str] = "convolution"

    def __init__(
        self,
        rank: Annotated[int | float | None, COUNT_OR_FRACTION, Alias("latent_channels")] = None,
        *,
        energy: Energy = None,
        names: Paths = None,
        min_channels: Annotated[int, Count()] = 16,
    ) -> None:
        self._take(rank, energy, names)
        self.min_channels = min_channels

    @override
    def _places(self, root: nn.Module) -> tuple[list[Place], dict[str, str]]:
        every: dict[str, Any] = {p: m for p, m in root.named_modules() if isinstance(m, (nn.Conv2d, *_OTHERS))}
        small: list[int] = []

        def unfit(path: str, m: nn.Conv2d) -> str | None:
            reason, side = _unfit(m), min(m.in_channels, m.out_channels)
            if reason or is_named(path, self.names) or side >= self.min_channels:
                return reason
            small.append(side)
            return f"it has fewer channels than min_channels={self.min_channels}"

        chosen, left = select(every, self.names, unfit, who=WHO, what="convolutions", root=root)
        self._floor = ("min_channels", max(small)) if small else None
        return [_place(path, m, is_named(path, self.names)) for path, m in chosen.items()], left


def _unfit(m: nn.Module) -> str | None:
    if not isinstance(m, nn.Conv2d):
        return f"it is {type(m).__name__}, and only two-dimensional convolutions have columns and rows"
    if m.groups > 1:
        return f"its {m.groups} groups are already small"
    if type(m).forward is not nn.Conv2d.forward or type(m)._conv_forward is not nn.Conv2d._conv_forward:
        return "it is a subclass of nn.Conv2d with its own forward"
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
