"""CutMix: paste a box of one image into another, and mix their labels by area (Yun et al. 2019)."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation._arguments import check_number, no_mixing
from lightning_eff.data.augmentation._mixing import Mixing
from lightning_eff.data.augmentation.mixing._pasting import cut_mix, own_share, pasted

WHO = "CutMix"


class CutMix(Mixing):
    """Train on images with a box of another image in them, and on both labels by their areas.

    Each image of a micro-batch gets a box of another one of it (a random permutation says which), from the same place. With
    ``lambda ~ Beta(alpha, alpha)`` the box has ``sqrt(1 - lambda)`` of both sides and its centre anywhere, and ends at the
    border; the loss is ``lambda' L(y_i) + (1 - lambda') L(y_j)`` with the areas as they are then. For cross-entropy and
    binary cross-entropy that is the loss on the mixed target, exactly, in the same forward pass: ``training_step`` goes on to
    take integer labels. Where the box is the larger part, the two change roles, which changes no distribution: the labels that
    ``training_step`` sees are those of the larger area. A metric that it computes of them is told once.

    The loss must be a call of ``torch.nn.functional`` that can be seen (``nn.CrossEntropyLoss`` and Hugging Face's models
    with ``labels=`` make such calls); another one is an error at the first batch. Labels are one of each image: maps of labels
    are refused. What chooses samples by their loss scores the mixtures. Where several techniques mix, each batch is mixed by
    one of them.

    It regularises: it costs a little time at each step, makes training fit more slowly, and pays over many epochs alone.

    Logged: ``share``, the mean area of the other images in the last micro-batch, and ``milliseconds``, what it took of the
    host to make it.

    Args:
        alpha: of the Beta distribution, > 0; 1, the paper's, draws ``lambda`` evenly.
        prob: the chance of a micro-batch to be mixed, in [0, 1]: 1 for ImageNet in the paper, 0.5 for CIFAR; 0 is plain
            training.
        until: the share of the budget in [0, 1] from which on batches are left alone; 0 is plain training.
        per_sample: draw a box for each image instead of one for the micro-batch.
        keys: names or positions of the images (B, C, H, W) of floating point; None takes all such tensors.
        labels: names or positions of the labels in the batch; None looks for what the step's losses have as targets.

    Raises:
        ValueError: if an argument is out of its range; at setup, for ``until`` below 1 in a run without an end; at the first
            batch, before any weight has changed, if it holds no images of floating point, or labels that are no classes, and
            one of each image, or if the step's loss on labels cannot be seen.

    Sources:
        Yun et al. 2019, arXiv:1905.04899.
    """

    saves: ClassVar[str] = "nothing of a step: it regularises, for a better end of long training"
    paper: ClassVar[str] = "Yun et al. 2019, arXiv:1905.04899"
    constraints: ClassVar[str] = (
        "automatic optimization; images (B, C, H, W) of floating point; one class label of each; a loss of torch.nn.functional"
    )
    survey: ClassVar[Survey | None] = Survey("data augmentation (CutMix)", shen="3.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"prob": Choice((0.5, 1.0)), "until": Choice((0.8, 1.0))}, no_mixing
    )
    control: ClassVar[Control] = Control("no augmentation: the baseline for as many seconds")
    conflicts: ClassVar[Mapping[str, str]] = {
        "SAF": "a mixture's scores would be held to those of another mixture some epochs before"
    }

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        prob: float = 1.0,
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
        super().__init__(prob=prob, until=until, keys=keys, labels=labels)
        self.alpha = alpha
        self.per_sample = per_sample

    @override
    def mix(self, inputs: list[Tensor], partner: Tensor, generator: Generator) -> tuple[list[Tensor], Tensor]:
        side = (inputs[0].shape[-2], inputs[0].shape[-1])
        size = len(partner)
        own = cut_mix(self.alpha, size if self.per_sample else 1, side, generator)
        on_device = own.to(inputs[0].device)
        return [pasted(x, partner, on_device) for x in inputs], own_share(own).float().expand(size)
