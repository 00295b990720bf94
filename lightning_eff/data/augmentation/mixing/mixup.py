"""Mixup: train on convex combinations of samples and of their labels (Zhang et al. 2017)."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation._arguments import check_number, no_mixing
from lightning_eff.data.augmentation.mixing._convex import Convex

WHO = "Mixup"


class Mixup(Convex):
    """Train on ``lambda x_i + (1 - lambda) x_j``, and on ``lambda L(y_i) + (1 - lambda) L(y_j)``.

    Each sample of a micro-batch is mixed with another one of it (a random permutation says which), with
    ``lambda ~ Beta(alpha, alpha)``: one for the micro-batch, as in the paper's code, or one for each sample. For cross-entropy
    and binary cross-entropy the loss is that on the mixed target, exactly, in the same forward pass: ``training_step`` goes on
    to take integer labels. Roles are swapped where ``lambda`` is below one half, which changes no distribution: the labels that
    ``training_step`` sees are those of the larger share. A metric that it computes of them is told once.

    The loss must be a call of ``torch.nn.functional`` that can be seen (``nn.CrossEntropyLoss`` and Hugging Face's models
    with ``labels=`` make such calls), with any reduction, class weights (each of the two losses is divided by its own
    labels' weights), ignored and smoothed labels, or probabilities as labels. Another loss is an error at the first batch, and
    so are labels that reach it beside such a call: by a mask, an index, a weight or an embedding. Metrics may use labels. A
    batch of which only a part can be mixed, such as numbers beside categories, is an error unless ``keys`` name that part.
    What chooses samples by their loss scores the mixtures. Where several techniques mix, each batch is mixed by one of them.

    It regularises: it costs a little time at each step, makes training fit more slowly, and pays over many epochs alone.

    Logged: ``share``, the mean share of the other samples in the last micro-batch, and ``milliseconds``, what it took of the
    host to make it.

    Args:
        alpha: of the Beta distribution, >= 0: 0.2 for ImageNet in the paper, 1 for CIFAR; 0 is plain training.
        prob: the chance of a micro-batch to be mixed, in [0, 1]; 0 is plain training.
        until: the share of the budget in [0, 1] from which on batches are left alone; 0 is plain training.
        per_sample: draw ``lambda`` for each sample instead of once for the micro-batch.
        keys: names or positions of the tensors (B, ...) of floating point that are mixed. None takes the batch's images
            (B, C, H, W), or its only tensor of floating point with B rows.
        labels: names or positions of the labels in the batch; None looks for what the step's losses have as targets.

    Raises:
        ValueError: if an argument is out of its range; at setup, for ``until`` below 1 in a run without an end; at the first
            batch, before any weight has changed, if it holds nothing to mix (as where samples are tokens), images of uint8, or
            labels that are no classes, or if the step's loss on labels cannot be seen.

    Sources:
        Zhang et al. 2017, arXiv:1710.09412.
    """

    saves: ClassVar[str] = "nothing of a step: it regularises, for a better end of long training"
    paper: ClassVar[str] = "Zhang et al. 2017, arXiv:1710.09412"
    constraints: ClassVar[str] = (
        "automatic optimization; inputs of floating point; labels that are classes; a loss of torch.nn.functional"
    )
    survey: ClassVar[Survey | None] = Survey("data augmentation (mixup)", shen="3.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"alpha": Uniform(0.1, 1.0, log=True), "until": Choice((0.8, 1.0))}, no_mixing
    )
    control: ClassVar[Control] = Control("no augmentation: the baseline for as many seconds")
    conflicts: ClassVar[Mapping[str, str]] = {
        "SAF": "a mixture's scores would be held to those of another mixture some epochs before"
    }

    def __init__(
        self,
        alpha: float = 0.2,
        *,
        prob: float = 1.0,
        until: float = 1.0,
        per_sample: bool = False,
        keys: Sequence[str | int] | None = None,
        labels: Sequence[str | int] | None = None,
    ) -> None:
        check_number(
            alpha, who=WHO, name="alpha", low=0, high=float("inf"), what="of Beta(alpha, alpha); 0 is plain training"
        )
        super().__init__(prob=prob, until=until, keys=keys, labels=labels)
        self.alpha = alpha
        self.per_sample = per_sample
