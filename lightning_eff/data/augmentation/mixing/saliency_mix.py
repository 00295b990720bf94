"""SaliencyMix: paste the most salient part of another image, and mix both labels by area (Uddin et al. 2020)."""

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import BACKWARD
from lightning_eff._core.search_space import Choice, SearchSpace
from lightning_eff._core.steps import Step
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation._arguments import Alpha, Keys, Probability, Until, no_mixing
from lightning_eff.data.augmentation._boxes import inside, numbers
from lightning_eff.data.augmentation._mixing import draw_shares
from lightning_eff.data.augmentation.mixing._gradients import ByGradients
from lightning_eff.data.augmentation.mixing._pasting import own_share, pasted, sides

_SURROUNDS = (12, 24, 28, 48, 56, 112)  # sides of the windows in pixels, from the code of Montabone & Soto


def fine_grained_saliency(images: Tensor) -> Tensor:
    """Return ``sum_s |I - mean_s(I)|`` over windows of several sides ``s`` around each pixel: (B, H, W), float32.

    This is the sum of the on-centre and off-centre differences of Montabone & Soto (2010). Windows are clipped at the border.

    Args:
        images: (B, C, H, W). The intensity ``I`` is the mean of the channels.
    """
    intensity = images.float().mean(dim=1)
    height, width = intensity.shape[-2:]
    # window sums are differences of entries of the integral image, which are large and need float64
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
    """Return the begin and the end of the window around each of ``size`` positions: (size,) integers each."""
    at = torch.arange(size, device=device)
    return (at - side // 2).clamp(min=0), (at + side // 2 + 1).clamp(max=size)


def peaks(saliency: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row and the column of the first maximum of each map (n, H, W): each (n,) integers, on the CPU."""
    at = saliency.flatten(1).argmax(dim=1).cpu()
    return at // saliency.shape[-1], at % saliency.shape[-1]


class SaliencyMix(ByGradients):
    """Paste the most salient box of another image into each training image, and weight both labels by area.

    Each image of a micro-batch receives a box of another one, given by a random permutation. With ``lambda ~ Beta(alpha,
    alpha)`` the box has ``sqrt(1 - lambda)`` of both sides, at least one pixel. Its centre is the most salient pixel of the
    other image. It is pasted at the same position and clipped at the border. The loss is ``lambda' L(y_i) + (1 - lambda')
    L(y_j)`` with the final areas, computed in the same forward pass. For cross-entropy and binary cross-entropy this equals the
    loss on the mixed target. ``training_step`` still receives integer labels. (The authors' code uses the peak of one image for
    the whole batch. Here each box uses the peak of its source.)

    The default saliency is the fine-grained static saliency of Montabone & Soto, as in the paper: how much a pixel's intensity
    differs from the mean of windows around it. It is computed on the images' device. With ``saliency="gradient"`` it is the
    size of the loss's gradient in each pixel, which takes an extra forward and backward pass per mixed batch.

    Use it when you train for many epochs and the model overfits. The training loss falls more slowly. If the objects are in the
    middle of most images, :class:`CutMix` is cheaper and works as well.

    There must be one label per image, so label maps are refused. The box may cover more than half of an image, so
    ``training_step`` does not always see the label of the larger area. Metrics that it computes from the labels are too low,
    and a warning says so. Techniques that choose samples by their loss see the mixtures. If several techniques mix, they take
    turns, one per batch.

    It logs ``share``, the mean area of the other images in the last micro-batch, and ``milliseconds``, the host time of the
    mixing.

    Args:
        alpha: the parameter of the Beta distribution of the mixing weight. 1, as in the paper, draws it uniformly.
        prob: the probability that a micro-batch is mixed. The paper uses 1 for ImageNet and 0.5 for CIFAR. 0 is plain training.
        saliency: the kind of saliency map. "gradient" takes an extra forward and backward pass per mixed batch.
        until: the fraction of the budget after which batches are left unchanged. 0 is plain training.
        per_sample: whether each image has its own box size. By default there is one size per micro-batch.
        keys: the names or positions of the images in the batch, floating point, shape (B, C, H, W). None takes all such
            tensors. With several, the intensity of the first one decides where the boxes are.
        labels: the names or positions of the labels in the batch. None takes the tensors that are targets of the step's losses.

    Raises:
        ValueError: for a value out of range. At setup, if ``until`` is below 1 and the run has no end. At the first batch,
            before any weight changes, if images are not floating point, or labels are not one class per image. Also if no loss
            call on the labels is visible, or if ``saliency="gradient"`` and the loss has no gradient in the images.

    Example:
        >>> trainer = L.Trainer(max_epochs=100, callbacks=[SaliencyMix(alpha=1.0, prob=0.5)])

    References:
        Uddin et al. 2020, "SaliencyMix: A Saliency Guided Data Augmentation Strategy for Better Regularization",
        arXiv:2006.01791. Montabone & Soto 2010, "Human Detection Using a Mobile Platform and Novel Features Derived from a
        Visual Saliency Mechanism", Image and Vision Computing 28(3).
    """

    paper = "Uddin et al. 2020, arXiv:2006.01791"
    search_space = SearchSpace({"prob": Choice((0.5, 1.0)), "until": Choice((0.8, 1.0))}, no_mixing)
    control = Control(
        "the baseline without augmentation, trained for the same time, and CutMix, whose boxes are anywhere"
    )
    larger_first: ClassVar[bool] = False

    def __init__(
        self,
        alpha: Alpha = 1.0,
        *,
        prob: Probability = 1.0,
        saliency: Literal["fine_grained", "gradient"] = "fine_grained",
        until: Until = 1.0,
        per_sample: bool = False,
        keys: Keys = None,
        labels: Keys = None,
    ) -> None:
        super().__init__(alpha=alpha, prob=prob, until=until, per_sample=per_sample, keys=keys, labels=labels)
        self.saliency: Literal["fine_grained", "gradient"] = saliency
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
