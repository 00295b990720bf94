"""SaliencyMix: paste the most salient part of another image, and mix both labels by area (Uddin et al. 2020)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import BACKWARD
from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.steps import Step
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation._arguments import check_number, no_mixing
from lightning_eff.data.augmentation._boxes import inside, numbers
from lightning_eff.data.augmentation._mixing import draw_shares
from lightning_eff.data.augmentation.mixing._gradients import ByGradients
from lightning_eff.data.augmentation.mixing._pasting import own_share, pasted, sides

WHO = "SaliencyMix"
_MAPS = ("fine_grained", "gradient")
_SURROUNDS = (12, 24, 28, 48, 56, 112)  # sides of the windows, in pixels: those of Montabone & Soto's code


def fine_grained_saliency(images: Tensor) -> Tensor:
    """``sum_s |I - mean_s(I)|``: how far each pixel's intensity is from the mean of windows around it. (B, H, W), float32.

    The on- and the off-centre differences of Montabone & Soto (2010), added up; windows end at the border.

    Args:
        images: (B, C, H, W); the intensity ``I`` is the mean of the channels.
    """
    intensity = images.float().mean(dim=1)
    height, width = intensity.shape[-2:]
    # sums over windows are differences of an integral image's entries, which are large
    integral = F.pad(intensity.double(), (1, 0, 1, 0)).cumsum(-1).cumsum(-2)
    found = torch.zeros_like(intensity)
    for side in _SURROUNDS:
        top, bottom = _windows(height, side, images.device)
        left, right = _windows(width, side, images.device)
        by_rows = integral.index_select(-2, bottom) - integral.index_select(-2, top)
        sums = by_rows.index_select(-1, right) - by_rows.index_select(-1, left)
        area = (bottom - top)[:, None] * (right - left)
        found += (intensity - (sums / area).float()).abs()
    return found


def _windows(size: int, side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the window around each of ``size`` places begins, and where it has ended: (size,) of integers each."""
    at = torch.arange(size, device=device)
    return (at - side // 2).clamp(min=0), (at + side // 2 + 1).clamp(max=size)


def peaks(saliency: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of the largest of each map (n, H, W), the first of several: each (n,), of integers, on the CPU."""
    at = saliency.flatten(1).argmax(dim=1).cpu()
    return at // saliency.shape[-1], at % saliency.shape[-1]


class SaliencyMix(ByGradients):
    """Train on images with the most salient box of another image in them, and on both labels by their areas.

    Each image of a micro-batch gets a box of another one of it (a random permutation says which). With
    ``lambda ~ Beta(alpha, alpha)`` the box has ``sqrt(1 - lambda)`` of both sides, at least a pixel; its centre is where the
    other image is most salient, it is pasted at the same place, and it ends at the border. The loss is
    ``lambda' L(y_i) + (1 - lambda') L(y_j)`` with the areas as they are then: for cross-entropy and binary cross-entropy that
    is the loss on the mixed target, exactly, in the same forward pass, and ``training_step`` goes on to take integer labels.
    Each box has its own source's centre; the authors' code takes that of one image for the whole batch.

    Saliency is by default the fine-grained static one of Montabone & Soto, which the authors took, computed on the images' own
    device where OpenCV's is computed on the host: how far a pixel's intensity is from the mean of windows around it. With
    ``saliency="gradient"`` it is the size of the loss's gradient in each pixel, which takes another forward and backward pass
    at each step, counted.

    A box may be the larger part of an image: that its centre is its own source's peak forbids to exchange the two. So a metric
    that ``training_step`` computes of its labels reads each image's own label; it is told once. Labels are one of each image:
    maps of labels are refused. What chooses samples by their loss scores the mixtures. Where several techniques mix, each batch
    is mixed by one of them.

    It regularises: it costs time at each step, makes training fit more slowly, and pays over many epochs alone. Where what
    matters lies in the middle of most images, middles are pasted onto middles, and CutMix, which is cheaper, does as well.

    Logged: ``share``, the mean area of the other images in the last micro-batch, and ``milliseconds``, what it took of the
    host to make it.

    Args:
        alpha: of the Beta distribution, > 0; 1, the paper's, draws ``lambda`` evenly.
        prob: the chance of a micro-batch to be mixed, in [0, 1]: 1 for ImageNet in the paper, 0.5 for CIFAR; 0 is plain
            training.
        saliency: ``"fine_grained"`` or ``"gradient"``.
        until: the share of the budget in [0, 1] from which on batches are left alone; 0 is plain training.
        per_sample: draw a size for each image instead of one for the micro-batch.
        keys: names or positions of the images (B, C, H, W) of floating point; None takes all such tensors. Of several, the
            first one's intensity says where boxes lie.
        labels: names or positions of the labels in the batch; None looks for what the step's losses have as targets.

    Raises:
        ValueError: if an argument is out of its range; at setup, for ``until`` below 1 in a run without an end; at the first
            batch, before any weight has changed, if it holds no images of floating point, or labels that are no classes, and
            one of each image, if the step's loss on labels cannot be seen, or if a gradient in the images is asked for that it
            has not.

    Sources:
        Uddin et al. 2020, arXiv:2006.01791; Montabone & Soto 2010, Image and Vision Computing 28(3).
    """

    saves: ClassVar[str] = "nothing of a step: it regularises, for a better end of long training"
    paper: ClassVar[str] = "Uddin et al. 2020, arXiv:2006.01791"
    constraints: ClassVar[str] = (
        "automatic optimization; images (B, C, H, W) of floating point; one class label of each; a loss of torch.nn.functional"
    )
    survey: ClassVar[Survey | None] = Survey("data augmentation (SaliencyMix)", shen="3.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"prob": Choice((0.5, 1.0)), "until": Choice((0.8, 1.0))}, no_mixing
    )
    control: ClassVar[Control] = Control(
        "no augmentation: the baseline for as many seconds; and CutMix, whose boxes lie anywhere"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "SAF": "a mixture's scores would be held to those of another mixture some epochs before"
    }
    larger_first: ClassVar[bool] = False

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        prob: float = 1.0,
        saliency: Literal["fine_grained", "gradient"] = "fine_grained",
        until: float = 1.0,
        per_sample: bool = False,
        keys: Sequence[str | int] | None = None,
        labels: Sequence[str | int] | None = None,
    ) -> None:
        check_number(alpha, who=WHO, name="alpha", low=0, high=float("inf"), what="of Beta(alpha, alpha), above 0")
        if alpha == 0:
            raise ValueError(
                f"{WHO}({alpha=}): expected a number above 0; 1 draws shares evenly. prob=0 is plain training."
            )
        if saliency not in _MAPS:
            raise ValueError(f"{WHO}({saliency=}): expected one of {', '.join(map(repr, _MAPS))}.")
        super().__init__(prob=prob, until=until, keys=keys, labels=labels)
        self.alpha = alpha
        self.saliency: Literal["fine_grained", "gradient"] = saliency
        self.per_sample = per_sample
        if saliency == "gradient":
            self.refuses = BACKWARD  # pyright: ignore[reportAttributeAccessIssue]

    @override
    def look(self, step: Step, batch: Any) -> None:
        if self.saliency == "gradient":
            self.gradient_sizes(step, batch, self.inputs(batch, self._targets.labels(step, batch)))

    @override
    def mix(self, inputs: list[Tensor], partner: Tensor, generator: Generator) -> tuple[list[Tensor], Tensor]:
        side = (inputs[0].shape[-2], inputs[0].shape[-1])
        size, device = len(partner), inputs[0].device
        share = draw_shares(self.alpha, size if self.per_sample else 1, numbers(generator)).expand(size)
        maps = self.sizes_of(inputs) if self.saliency == "gradient" else fine_grained_saliency(inputs[0])
        rows, columns = (t[partner] for t in peaks(maps))
        height, width = (s.clamp(min=1) for s in sides(share, side))
        own = ~inside(rows - height // 2, columns - width // 2, height, width, side, torch.device("cpu"))
        on_device = own.to(device)
        return [pasted(x, partner, on_device) for x in inputs], own_share(own).float()
