"""TokenMix: blocks of another image's patches, and labels weighted by a teacher's activation (Liu et al. 2022)."""

import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Generator, Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count
from lightning_eff._core._samples.functions import TensorFunction
from lightning_eff._core.search_space import Choice, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Step
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation._arguments import Alpha, Keys, NetworkOrFunction, Probability, Until, no_mixing
from lightning_eff.data.augmentation._boxes import numbers
from lightning_eff.data.augmentation._mixing import Mixing, draw_shares, with_settings
from lightning_eff.data.augmentation.mixing._given import Given
from lightning_eff.data.augmentation.mixing._pasting import pasted

WHO = "TokenMix"
_STEEPEST = 0.3  # the smallest ratio of a block's sides
_TRIES = 200  # per mask: a limit for grids into which the last patches hardly fit
_TEACHER = NetworkOrFunction(
    "images (B, C, H, W) that returns maps (B, h, w)",
    "teacher='uniform' weights labels by the number of patches and needs no network.",
    names=("uniform",),
)

Teacher = nn.Module | TensorFunction | Literal["uniform"]


def token_blocks(share: float, grid: tuple[int, int], block: int, numbers: np.random.Generator) -> Tensor:
    """Draw which patches stay an image's own: all but about ``(1 - lambda) h w``, which form several blocks. (h, w), bool.

    Each block has at least ``block`` patches, or as many as are left to replace. The ratio of its sides is in [0.3, 1 / 0.3].

    Args:
        share: ``lambda``, in [0, 1].
        grid: h and w.
        block: the smallest number of patches in a block.
        numbers: makes the draws.
    """
    height, width = grid
    other = torch.zeros(grid, dtype=torch.bool)
    left = int((1 - share) * height * width)
    for _ in range(_TRIES):
        if left <= 0:
            break
        area = numbers.uniform(min(block, left), left)
        ratio = np.exp(numbers.uniform(np.log(_STEEPEST), -np.log(_STEEPEST)))
        rows, columns = max(round((area * ratio) ** 0.5), 1), max(round((area / ratio) ** 0.5), 1)
        if rows > height or columns > width:
            continue
        top, start = numbers.integers(0, height - rows + 1), numbers.integers(0, width - columns + 1)
        place = other[top : top + rows, start : start + columns]
        new = place.numel() - int(place.sum())
        if 0 < new <= left:
            place.fill_(True)
            left -= new
    return ~other


def activation_share(own: Tensor, mine: Tensor, others: Tensor) -> Tensor:
    """Return ``lambda = a / (a + b)`` with ``a = sum(M A_i)`` and ``b = sum((1 - M) A_j)`` of normalised maps ``A``: (B,).

    If both regions have no activation, ``lambda`` is the fraction of own patches.

    Args:
        own: ``M``, (B, h, w) or (1, h, w), true for an image's own patches.
        mine: ``A_i``, (B, h, w), nonnegative. A map of zeros counts as uniform.
        others: ``A_j``, the maps of the other images.
    """
    mask = own.to(mine.device, torch.float32)
    a, b = ((m * _to_one(x)).sum(dim=(1, 2)) for m, x in ((mask, mine), (1 - mask, others)))
    share = mask.mean(dim=(1, 2)).expand(a.shape)
    return torch.where(a + b > 0, a / (a + b).clamp(min=torch.finfo(torch.float32).tiny), share)


def _to_one(maps: Tensor) -> Tensor:
    maps = maps.float()
    total = maps.sum(dim=(1, 2), keepdim=True)
    return torch.where(total > 0, maps / total.clamp(min=torch.finfo(torch.float32).tiny), 1 / maps[0].numel())


def patch_of(module: nn.Module, channels: int) -> int:
    """Return the side of the patches: the kernel size of a square convolution of the images whose stride equals its kernel.

    Raises:
        ValueError: if there is no such convolution, or if there are several sizes.
    """
    stems = [m for m in module.modules() if isinstance(m, nn.Conv2d) and m.in_channels == channels]
    found = {m.kernel_size for m in stems if m.kernel_size == m.stride and m.kernel_size[0] == m.kernel_size[1] > 1}
    if len(found) != 1:
        told = (
            f"has convolutions of patches of several sizes, {sorted(found)}"
            if found
            else (f"holds no nn.Conv2d of {channels} channels whose stride is its kernel, so the patch size is unknown")
        )
        raise ValueError(
            f"{WHO}: {type(module).__name__} {told}. Give the side of a patch in pixels, such as patch=16."
        )
    return found.pop()[0]


def _by_tokens(technique: "TokenMix") -> Mapping[str, Callback]:
    if technique.neutral or technique.teacher == "uniform":
        return {}
    return {"labels by tokens": with_settings(technique, teacher="uniform")}


class TokenMix(Mixing):
    """Replace blocks of patches by those of another image, and weight both labels by a teacher's map of their content.

    Each image of a micro-batch receives patches of another one, given by a random permutation, from the same positions. About
    ``1 - lambda`` of the patches are replaced, with ``lambda ~ Beta(alpha, alpha)``, in several blocks of whole patches. A
    teacher that you give returns a map ``A`` of where the content of each image is, normalised to sum to 1. With the mask ``M``
    of an image's own patches, ``a = sum(M A_i)`` and ``b = sum((1 - M) A_j)``. The loss is ``(a L(y_i) + b L(y_j)) / (a + b)``,
    computed in the same forward pass. For cross-entropy and binary cross-entropy this equals the loss on the mixed target.
    ``training_step`` still receives integer labels. With ``teacher="uniform"`` the labels are weighted by the number of
    patches, without a teacher. In the paper, the gain over that comes from the teacher.

    Use it for vision transformers when you train for many epochs and have a trained network for the same images. Each step
    costs a forward pass of the teacher, and the training loss falls more slowly.

    The teacher is a module or function from images (B, C, H, W), as they are in the batch, to nonnegative maps (B, h, w) of any
    size. Suitable maps are the last features of a trained network summed over channels, or its activation of the right class.
    It runs in evaluation mode without gradients on the images' device, and is not part of checkpoints.

    There must be one label per image, and it may have the smaller weight. Metrics that ``training_step`` computes from the
    labels are too low, and a warning says so. Techniques that choose samples by their loss see the mixtures. If several
    techniques mix, they take turns, one per batch.

    It logs ``share``, the mean weight of the other images' labels in the last micro-batch. ``tokens`` is the mean fraction of
    their patches (0 if nothing was mixed), and ``milliseconds`` is the host time of the mixing.

    Args:
        teacher: the network that returns a map of the content of each image. "uniform" weights labels by the number of patches.
        alpha: the parameter of the Beta distribution of the mixing weight. 1 draws it uniformly.
        block: the smallest number of patches in a block. The paper uses 14 of 196. The last block may be smaller.
        patch: the side of a patch in pixels. None takes the kernel of the module's patch embedding convolution.
        prob: the probability that a micro-batch is mixed. 0 is plain training.
        until: the fraction of the budget after which batches are left unchanged. 0 is plain training.
        per_sample: whether each image has its own blocks. By default there is one draw per micro-batch.
        keys: the names or positions of the images in the batch, floating point, shape (B, C, H, W). None takes all such
            tensors. With several, the teacher sees the first one.
        labels: the names or positions of the labels in the batch. None takes the tensors that are targets of the step's losses.

    Raises:
        ValueError: for a value out of range or a missing teacher. At setup, if ``until`` is below 1 and the run has no end. At
            the first batch, before any weight changes, if images are not floating point, or labels are not one class per image.
            Also if no loss call on the labels is visible, if the patch size is unknown or does not divide the images, or if the
            teacher returns no maps. Maps with negative or infinite values are refused as well. In later batches, such images
            are weighted by the number of patches, with one warning.

    Example:
        >>> trainer = L.Trainer(max_epochs=100, callbacks=[TokenMix("uniform", patch=16)])

    References:
        Liu et al. 2022, "TokenMix: Rethinking Image Mixing for Data Augmentation in Vision Transformers", arXiv:2207.08409.
    """

    paper = "Liu et al. 2022, arXiv:2207.08409"
    constraints = f"{Mixing.constraints}, images of whole patches, and a teacher"
    search_space = SearchSpace({"teacher": Choice(("uniform",)), "until": Choice((0.8, 1.0))}, no_mixing)
    control = Control(
        "the baseline without augmentation, trained for the same time, and teacher='uniform'",
        _by_tokens,
    )
    larger_first: ClassVar[bool] = False
    logged = ("tokens",)

    def __init__(
        self,
        teacher: Annotated[Teacher, _TEACHER],
        *,
        alpha: Alpha = 1.0,
        block: Annotated[int, Count()] = 14,
        patch: Annotated[int | None, Count()] = None,
        prob: Probability = 1.0,
        until: Until = 1.0,
        per_sample: bool = False,
        keys: Keys = None,
        labels: Keys = None,
    ) -> None:
        super().__init__(alpha=alpha, prob=prob, until=until, per_sample=per_sample, keys=keys, labels=labels)
        self.teacher = teacher
        self.block = block
        self.patch = patch

    @override
    def _reset(self) -> None:
        super()._reset()
        self._patch = 0
        self._given: Given | None = None  # the teacher
        self._warned = False

    # -- the teacher

    @override
    def look(self, step: Step, batch: Any) -> None:
        images = self.inputs(batch, self._targets.labels(step, batch))[0]
        self._patch = patch_of(step.module, images.shape[1]) if self.patch is None else self.patch
        self._grid(images)
        self._maps(images, first=True)

    def _grid(self, images: Tensor) -> tuple[int, int]:
        """Return the rows and columns of patches in the images."""
        height, width = images.shape[-2:]
        if height % self._patch or width % self._patch or max(height, width) == self._patch:
            raise ValueError(
                f"{WHO}: images of {height} x {width} pixels are not made of several whole patches of {self._patch} x"
                f" {self._patch} pixels. Give patch=, or resize the images in the data set."
            )
        return height // self._patch, width // self._patch

    def _maps(self, images: Tensor, *, first: bool = False) -> Tensor:
        """Return the teacher's activation in each patch, (B, h, w), float32. It is uniform where the maps are unusable."""
        grid = self._grid(images)
        if self.teacher == "uniform":
            return images.new_ones(len(images), *grid, dtype=torch.float32)
        assert callable(self.teacher)
        self._given = self._given or Given(self.teacher)
        start = time.perf_counter()
        maps = self._given(images)
        self.session.chain.cost.seconds += time.perf_counter() - start
        if not isinstance(maps, Tensor) or maps.ndim != 3 or len(maps) != len(images) or maps.is_complex():
            got = tuple(maps.shape) if isinstance(maps, Tensor) else f"a {type(maps).__name__}"
            raise ValueError(
                f"{WHO}: the teacher returned {got} for {len(images)} images, not maps ({len(images)}, h, w). Let it return"
                " features summed over channels, or the activation of the right class."
            )
        maps = F.adaptive_avg_pool2d(maps.to(images.device, torch.float32)[:, None], grid)[:, 0]
        usable = (maps.isfinite() & (maps >= 0)).all(dim=2).all(dim=1)
        if not bool(usable.all()):
            got = (
                f"{WHO}: the teacher returned maps with entries that are negative or not finite, from {float(maps.min()):.4g}"
                f" to {float(maps.max()):.4g}. Return their ReLU or their square."
            )
            if first:
                raise ValueError(got)
            if not self._warned:
                self._warned = True
                rank_zero_warn(f"{got} Until then, such images are weighted by the number of their patches.")
            maps = torch.where(usable[:, None, None], maps, 1.0)
        return maps

    @override
    def detach(self, session: Session) -> None:
        if self._given is not None:
            self._given.put_back()

    # -- the mixtures

    @override
    def mix(self, inputs: list[Tensor], partner: Tensor, generator: Generator) -> tuple[list[Tensor], Tensor]:
        images, size, draws = inputs[0], len(partner), numbers(generator)
        grid, maps = self._grid(images), self._maps(images)
        shares = draw_shares(self.alpha, size if self.per_sample else 1, draws)
        own = torch.stack([token_blocks(float(share), grid, self.block, draws) for share in shares])
        self._figures["tokens"] = 1.0 - float(own.float().mean())
        pixels = own.repeat_interleave(self._patch, dim=1).repeat_interleave(self._patch, dim=2).to(images.device)
        share = activation_share(own, maps, maps.index_select(0, partner.to(maps.device)))
        return [pasted(x, partner, pixels) for x in inputs], share
