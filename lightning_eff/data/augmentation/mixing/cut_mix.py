"""CutMix: paste a box of one image into another, and mix their labels by area (Yun et al. 2019)."""

from typing import Annotated

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Alias
from lightning_eff._core.search_space import Choice, SearchSpace
from lightning_eff.data.augmentation._arguments import Alpha, Keys, Probability, Until, no_mixing
from lightning_eff.data.augmentation._engine import BASELINE
from lightning_eff.data.augmentation._mixing import Mixing
from lightning_eff.data.augmentation.mixing._pasting import cut_mix, cut_mix_box, own_share, pasted, pasted_box


class CutMix(Mixing):
    """Paste a box of another image into each training image, and weight both labels by area.

    Each image of a micro-batch receives a box of another one, given by a random permutation, from the same position. With
    ``lambda ~ Beta(alpha, alpha)`` the box has ``sqrt(1 - lambda)`` of both sides. Its centre is anywhere in the image, and it
    is clipped at the border. The loss is ``lambda' L(y_i) + (1 - lambda') L(y_j)`` with the final areas, computed in the same
    forward pass. For cross-entropy and binary cross-entropy this equals the loss on the mixed target. ``training_step`` still
    receives integer labels, those of the larger area: if the box is larger than half of the image, the two images change roles.

    Use it when you train for many epochs and the model overfits. It costs little time per step, and the training loss falls
    more slowly.

    The loss must be a call of ``torch.nn.functional`` on the labels. ``nn.CrossEntropyLoss`` and Hugging Face models with
    ``labels=`` make such calls. There must be one label per image, so label maps are refused. Metrics that ``training_step``
    computes from the labels are too low, and a warning says so. Techniques that choose samples by their loss see the mixtures.
    If several techniques mix, they take turns, one per batch.

    It logs ``share``, the mean area of the other images in the last micro-batch, and ``milliseconds``, the host time of the
    mixing.

    Args:
        alpha: the parameter of the Beta distribution of the mixing weight. 1, as in the paper, draws it uniformly. Also
            accepted as ``cutmix_alpha``.
        prob: the probability that a micro-batch is mixed. The paper uses 1 for ImageNet and 0.5 for CIFAR. 0 is plain training.
        until: the fraction of the budget after which batches are left unchanged. 0 is plain training.
        per_sample: whether each image has its own box. By default there is one box per micro-batch.
        keys: the names or positions of the images in the batch, floating point, shape (B, C, H, W). None takes all such
            tensors.
        labels: the names or positions of the labels in the batch. None takes the tensors that are targets of the step's losses.

    Raises:
        ValueError: for a value out of range. At setup, if ``until`` is below 1 and the run has no end. At the first batch,
            before any weight changes, if images are not floating point, or labels are not one class per image. Also if no loss
            call on the labels is visible.

    Example:
        >>> trainer = L.Trainer(max_epochs=100, callbacks=[CutMix(alpha=1.0, prob=0.5)])

    References:
        Yun et al. 2019, "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features",
        arXiv:1905.04899.
    """

    paper = "Yun et al. 2019, arXiv:1905.04899"
    search_space = SearchSpace({"prob": Choice((0.5, 1.0)), "until": Choice((0.8, 1.0))}, no_mixing)
    control = BASELINE

    def __init__(
        self,
        alpha: Annotated[Alpha, Alias("cutmix_alpha")] = 1.0,
        *,
        prob: Probability = 1.0,
        until: Until = 1.0,
        per_sample: bool = False,
        keys: Keys = None,
        labels: Keys = None,
    ) -> None:
        super().__init__(alpha=alpha, prob=prob, until=until, per_sample=per_sample, keys=keys, labels=labels)

    @override
    def mix(self, inputs: list[Tensor], partner: Tensor, generator: Generator) -> tuple[list[Tensor], Tensor]:
        side = (inputs[0].shape[-2], inputs[0].shape[-1])
        size = len(partner)
        if not self.per_sample and all(x.shape[2:] == side and x.is_contiguous() for x in inputs):
            box, inner, share = cut_mix_box(self.alpha, side, generator)
            mixtures = [pasted_box(x, partner, box, inner=inner) for x in inputs]
            return mixtures, torch.full((size,), share, dtype=torch.float64).float()
        own = cut_mix(self.alpha, size if self.per_sample else 1, side, generator)
        on_device = own.to(inputs[0].device)
        return [pasted(x, partner, on_device) for x in inputs], own_share(own).float().expand(size)
