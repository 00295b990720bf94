"""AugMix: mix each image with chains of operations on it, for consistent predictions (Hendrycks et al. 2019)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_warn
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Alias, Count, Number
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._targets.calls import TargetCall
from lightning_eff._core._targets.window import Targets
from lightning_eff._core.batches import join, num_samples
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff.data.augmentation._arguments import ImageProbability, Keys, Until, no_images
from lightning_eff.data.augmentation.images._operations import FARTHEST, OPERATIONS, SOME, operated, signed
from lightning_eff.data.augmentation.images._pixels import Fill, Mean, Scale, Std
from lightning_eff.data.augmentation.images._policies import Policy

WHO = "AugMix"
#: The operations of the paper: those that are not among its test corruptions.
PAPERS = (
    *("auto_contrast", "equalize", "posterize", "rotate", "solarize"),
    *("shear_x", "shear_y", "translate_x", "translate_y"),
)
DEEPEST = 3


@dataclass(frozen=True)
class Chains:
    """The draws for B images: chains of operations and their weights.

    Attributes:
        which: the indices of operations in names, (B, width, depth), -1 after the end of a shorter chain.
        strength: the signed strengths.
        w: the weight of each chain, (B, width). Rows sum to 1.
        m: the weight of the image itself, (B,).
    """

    which: Tensor
    strength: Tensor
    w: Tensor
    m: Tensor


def draw_chains(
    count: int, width: int, depth: int | None, severity: float, alpha: float, names: Sequence[str], generator: Generator
) -> Chains:
    """Draw chains, with ``w ~ Dirichlet(alpha, .., alpha)``, ``m ~ Beta(alpha, alpha)`` and strengths up to ``severity / 10``.

    Posterizing begins at 4 bits, and translations end at a third of the side, as in the authors' code.

    Args:
        count: the number of images.
        width: the number of chains.
        depth: the number of operations in a chain. None draws 1 to 3 for each.
        severity: in (0, 10].
        alpha: above 0.
        names: the names of operations.
        generator: on the CPU.
    """
    deepest = DEEPEST if depth is None else depth
    which = torch.randint(0, len(names), (count, width, deepest), generator=generator)
    low = min(0.1, severity)
    level = low + (severity - low) * torch.rand(which.shape, generator=generator, dtype=torch.float64)
    begin = torch.tensor([float(name == "posterize") for name in names], dtype=torch.float64)
    scale = torch.tensor([1 / (3 * FARTHEST) if "translate" in name else 1.0 for name in names], dtype=torch.float64)
    strength = signed(names, which, level / 10 * scale[which] + begin[which], generator)
    if depth is None:
        long = torch.randint(1, DEEPEST + 1, (count, width, 1), generator=generator)
        which = torch.where(torch.arange(DEEPEST) < long, which, -1)
    rng = np.random.default_rng(int(torch.randint(0, 2**62, (), generator=generator)))
    w = torch.from_numpy(rng.dirichlet([alpha] * width, count))
    return Chains(which, strength, w, torch.from_numpy(rng.beta(alpha, alpha, count)))


def aug_mix(p: Tensor, drawn: Chains, names: Sequence[str], fill: float) -> Tensor:
    """Return ``m x + (1 - m) sum_i w_i chain_i(x)`` for images (B, C, H, W) in [0, 1]."""
    count, width, depth = drawn.which.shape
    chains = p.repeat_interleave(width, dim=0)
    for at in range(depth):
        chains = operated(chains, names, drawn.which[:, :, at].flatten(), drawn.strength[:, :, at].flatten(), fill)
    w, m = (t.to(p).reshape(count, -1, 1, 1, 1) for t in (drawn.w, drawn.m))
    # x + (1 - m) sum_i w_i (chain_i(x) - x), in which chains of identities leave x exactly unchanged
    return p + (1 - m[:, 0]) * (w * (chains.unflatten(0, (count, width)) - p[:, None])).sum(1)


def jensen_shannon(*logs: Tensor) -> Tensor:
    """Return ``JS = 1/k sum_i KL(p_i || M)`` with ``M = 1/k sum_i p_i``, for ``log p_i`` (.., C): (..), in [0, log k]."""
    stacked = torch.stack(logs).clamp(min=-1e4)  # classes with log p = -inf contribute nothing
    mean = stacked.logsumexp(0) - np.log(len(logs))
    return (stacked.exp() * (stacked - mean)).sum(-1).mean(0)


def consistent(call: TargetCall, weight: float, seen: list[Tensor]) -> Tensor:
    """Return ``L(x) + weight JS(p(x), p(x'), p(x''))`` for a call on three versions of each sample, the unchanged ones first.

    Args:
        call: a call of ``F.cross_entropy`` or ``F.nll_loss`` with three times the rows.
        weight: the weight of JS.
        seen: a list to which the mean of JS is appended, detached.

    Raises:
        ValueError: if it is a call of another function, or one without a reduction.
    """
    rows, rest = divmod(len(call.input), 3)
    if not call.of_classes or call.reduction == "none" or rest or len(call.target) != len(call.input):
        raise ValueError(
            f"{WHO}(consistency={weight:g}): training_step calls F.{call.fn.__name__}, reduction={call.reduction!r}, on"
            f" {tuple(call.input.shape)}, so the predictions for the versions of an image cannot be compared. Use"
            " F.cross_entropy or F.nll_loss with one row per sample and a mean or sum, or set consistency=0."
        )
    first = {**call.arguments, "input": call.input[:rows], "target": call.target[:rows]}
    scores = call.scores if call.fn is F.nll_loss else call.scores.log_softmax(-1)
    divergence = jensen_shannon(*scores.float().split(rows))
    valid = call.valid[:rows].to(divergence.dtype)
    seen.append((divergence * valid).sum().detach() / valid.sum())
    return call.fn(**first) + weight * call.reduce(divergence * valid, valid).to(call.input.dtype)


class AugMix(Policy):
    """Mix each training image with chains of random operations on it, and optionally train for consistent predictions.

    Each image becomes ``m x + (1 - m) sum_i w_i chain_i(x)``: by default three chains of one to three operations, with weights
    from a Dirichlet and a Beta distribution. Operations are drawn uniformly from auto_contrast, equalize, posterize, rotate,
    solarize, shear_x, shear_y, translate_x and translate_y, with strengths up to ``severity``. So the result stays close to the
    image. kornia computes the operations on the device of the batch.

    Use it to make classifiers robust to corrupted images. Accuracy on clean images improves only a little. It costs more per
    step than :class:`RandAugment`, and pays off only over many epochs.

    With ``consistency`` above 0, the step gets each image three times in one batch: unchanged, and in two versions of AugMix.
    The loss is that of the unchanged images plus ``consistency`` times the Jensen-Shannon divergence of the three predictions.
    The paper's best results use 12. This takes about three times the time and the activation memory. BatchNorm sees all
    versions, and so do the metrics of ``training_step``. The loss must be a call of ``F.cross_entropy`` or ``F.nll_loss`` on
    the labels. Techniques that smooth or mix labels do so for the unchanged images. Techniques that choose samples do so before
    the batch is tripled.

    Operations are defined on values from black to white: see :class:`RandAugment` for ``mean``, ``std`` and ``scale``.

    It logs ``share``, the fraction of images changed in the last micro-batch, and ``clipped``, the fraction of its values
    outside of the range. ``milliseconds`` is the host time of the augmentation, and ``divergence`` the mean Jensen-Shannon
    divergence, in [0, log 3].

    Args:
        width: the number of chains. Also accepted as ``mixture_width``.
        depth: the number of operations in each chain. None draws 1 to 3 for each chain. Also accepted as ``chain_depth``.
        severity: the largest strength of operations.
        alpha: the parameter of the Dirichlet and the Beta distribution.
        consistency: the weight of the Jensen-Shannon divergence in the loss. The paper uses 12. 0 trains on one version of each
            image.
        operations: the operations to draw from. None takes the nine above. All operations of :class:`RandAugment` are
            available.
        mean: the value that the data set subtracts from pixels, one number or one per channel.
        std: the value that the data set divides by, one number or one per channel.
        scale: the largest value of pixels before normalisation, such as 1 or 255.
        fill: the value of pixels from outside of the image, from 0 (black) to 1 (white).
        prob: the probability that an image is changed. 0 is plain training. Also accepted as ``p``.
        until: the fraction of the budget after which images are left unchanged. 0 is plain training.
        keys: the names or positions of the images in the batch, floating point or uint8, shape (B, C, H, W). None takes all
            such tensors.
        labels: the names or positions of the labels, for ``consistency``. None takes the tensors that are targets of the step's
            losses.

    Raises:
        ValueError: for a value out of range. At setup, if ``until`` is below 1 and the run has no end. At the first batch,
            before any weight changes, if it holds no images, or images outside of the range of values. Also for masks and boxes
            that would no longer match the images. With ``consistency``, if no loss call on the labels is visible.
        ImportError: at setup, if kornia is not installed.

    Example:
        >>> mean, std = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)  # of CIFAR-10
        >>> trainer = L.Trainer(max_epochs=200, callbacks=[AugMix(consistency=12, mean=mean, std=std)])

    References:
        Hendrycks et al. 2019, "AugMix: A Simple Data Processing Method to Improve Robustness and Uncertainty",
        arXiv:1912.02781.
    """

    saves = "no time per step: it makes networks robust to corrupted images"
    paper = "Hendrycks et al. 2019, arXiv:1912.02781"
    constraints = f"{Policy.constraints}; consistency= needs a loss of torch.nn.functional on classes"
    needs: ClassVar[Need] = Need.CALLS | Need.STEP
    search_space = SearchSpace({"severity": Uniform(1.0, 6.0), "until": Choice((0.8, 1.0))}, no_images)
    checkpointed = ("_divergence",)

    def __init__(
        self,
        *,
        width: Annotated[int, Count(), Alias("mixture_width")] = 3,
        depth: Annotated[int | None, Count(), Alias("chain_depth")] = None,
        severity: Annotated[float, Number(above=0, at_most=10)] = 3.0,
        alpha: Annotated[float, Number(above=0)] = 1.0,
        consistency: Annotated[float, Number(at_least=0)] = 0.0,
        operations: Annotated[Sequence[str] | None, SOME] = None,
        mean: Mean = 0.0,
        std: Std = 1.0,
        scale: Scale = 1.0,
        fill: Fill = 0.5,
        prob: ImageProbability = 1.0,
        until: Until = 1.0,
        keys: Keys = None,
        labels: Keys = None,
    ) -> None:
        super().__init__(mean=mean, std=std, scale=scale, fill=fill, prob=prob, until=until, keys=keys)
        self.width, self.depth, self.severity, self.alpha = width, depth, severity, alpha
        self.consistency = consistency
        self.operations = PAPERS if operations is None else tuple(operations)
        self.labels = labels

    @override
    def _reset(self) -> None:
        super()._reset()
        self._divergence: float | Tensor = 0.0
        self._told = False

    @property
    @override
    def names(self) -> Sequence[str]:
        return self.operations

    @override
    def draw(self, count: int, generator: Generator) -> Chains:
        return draw_chains(count, self.width, self.depth, self.severity, self.alpha, self.names, generator)

    @override
    def touched(self, drawn: Chains) -> Tensor:
        return drawn.m < 1

    @override
    def done(self, p: Tensor, drawn: Chains) -> Tensor:
        return aug_mix(p, drawn, self.names, self.fill)

    @override
    def _without(self, names: Sequence[str]) -> str:
        left = [name for name in self.names if name not in names] or ["identity", *list(OPERATIONS)[1:3]]
        return f"Set operations={left}, or remove AugMix."

    # -- consistency

    @override
    def attach(self, session: Session) -> None:
        if not self.consistency:
            super().attach(session)
            return
        self._targets = Targets(session, WHO, self.labels)
        # after techniques that choose and mix samples, inside of those that smooth labels
        session.chain.add(Stage.REWEIGHT, self._consistent, order=1)

    def _consistent(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        targets = self._targets
        labels = targets.labels(step, batch)
        if not labels:  # the step skips this batch
            return proceed(batch)
        self._look_once(lambda: self.look(step, batch))
        if not self._acts():
            self._note(0.0)
            return proceed(batch) if targets.checked else targets.run(step, batch, proceed, TargetCall.plain)
        with self._timed():
            generator, shares, versions = self.generator(step), [], [batch]
            for _ in range(2):
                made = self.change(step, batch, generator)
                versions.append(batch if made is None else made[0])
                shares.append(0.0 if made is None else made[1])
            whole = join(versions)
        step.versions = len(versions)
        self._note(sum(shares) / 2)
        self.session.chain.cost.forward_samples += 2 * num_samples(batch)
        seen: list[Tensor] = []
        output = targets.run(step, whole, proceed, lambda call: consistent(call, self.consistency, seen))
        self._divergence = torch.stack(seen).mean() if seen else 0.0
        if targets.compared and not self._told:
            self._told = True
            rank_zero_warn(
                f"{WHO}: training_step compares the labels with its output, as a metric does. It sees each image three times,"
                " unchanged and in two versions, so training metrics are means over all three. Rely on validation metrics,"
                " which are computed on unchanged images."
            )
        return output

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "divergence": self._divergence}
