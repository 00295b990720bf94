"""Mixup: train on convex combinations of samples and of their labels (Zhang et al. 2017)."""

from typing import Annotated, ClassVar

from lightning_eff._core._arguments.kinds import Alias
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform
from lightning_eff.data.augmentation._arguments import AlphaOrZero, Keys, Probability, Until, no_mixing
from lightning_eff.data.augmentation.mixing._convex import Convex


class Mixup(Convex):
    """Train on weighted means of two samples, with the weighted mean of the losses on both labels.

    Each sample of a micro-batch is mixed with another one, given by a random permutation: ``lambda x_i + (1 - lambda) x_j``
    with ``lambda ~ Beta(alpha, alpha)``. The loss is ``lambda L(y_i) + (1 - lambda) L(y_j)``, computed in the same forward
    pass. For cross-entropy and binary cross-entropy this equals the loss on the mixed target. ``training_step`` still receives
    integer labels, those with the larger weight (``lambda`` is at least one half, which does not change the distribution of
    mixtures).

    Use it when you train for many epochs and the model overfits. It costs little time per step, and the training loss falls
    more slowly.

    The loss must be a call of ``torch.nn.functional`` on the labels. ``nn.CrossEntropyLoss`` and Hugging Face models with
    ``labels=`` make such calls. Any reduction, class weights, ignored labels, label smoothing and labels that are probabilities
    work. Each of the two losses is divided by the class weights of its own labels. Labels that reach the loss in another way,
    such as a mask, an index, a weight or an embedding, raise an error at the first batch. So do batches with a part that cannot
    be mixed, such as categories next to numbers, unless ``keys`` names the other part.

    Metrics that ``training_step`` computes from the labels are too low, and a warning says so. Techniques that choose samples
    by their loss see the mixtures. If several techniques mix, they take turns, one per batch.

    It logs ``share``, the mean weight of the other samples in the last micro-batch, and ``milliseconds``, the host time of the
    mixing.

    Args:
        alpha: the parameter of the Beta distribution of the mixing weight. The paper uses 0.2 for ImageNet and 1 for CIFAR. 0
            is plain training. Also accepted as ``mixup_alpha``.
        prob: the probability that a micro-batch is mixed. 0 is plain training.
        until: the fraction of the budget after which batches are left unchanged. 0 is plain training.
        per_sample: whether each sample has its own ``lambda``. By default there is one per micro-batch, as in the paper's code.
        keys: the names or positions of the tensors to mix, floating point, shape (B, ...). None takes the batch's images
            (B, C, H, W), or its only floating-point tensor with B rows.
        labels: the names or positions of the labels in the batch. None takes the tensors that are targets of the step's losses.

    Raises:
        ValueError: for a value out of range. At setup, if ``until`` is below 1 and the run has no end. At the first batch,
            before any weight changes, if there is nothing to mix (token ids, for example), or if images are uint8. Also if
            labels are no classes, or if no loss call on the labels is visible.

    Example:
        >>> trainer = L.Trainer(max_epochs=100, callbacks=[Mixup(alpha=0.2)])

    References:
        Zhang et al. 2017, "mixup: Beyond Empirical Risk Minimization", arXiv:1710.09412.
    """

    paper = "Zhang et al. 2017, arXiv:1710.09412"
    constraints = (
        "needs automatic optimization, floating-point inputs, labels that are classes and a loss of torch.nn.functional"
    )
    search_space = SearchSpace({"alpha": Uniform(0.1, 1.0, log=True), "until": Choice((0.8, 1.0))}, no_mixing)
    mend: ClassVar[str] = "Remove Mixup."

    def __init__(
        self,
        alpha: Annotated[AlphaOrZero, Alias("mixup_alpha")] = 0.2,
        *,
        prob: Probability = 1.0,
        until: Until = 1.0,
        per_sample: bool = False,
        keys: Keys = None,
        labels: Keys = None,
    ) -> None:
        super().__init__(alpha=alpha, prob=prob, until=until, per_sample=per_sample, keys=keys, labels=labels)
