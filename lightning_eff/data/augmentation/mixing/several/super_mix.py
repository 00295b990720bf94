"""SuperMix: mix images with masks under which a teacher recognises all their classes (Dabouei et al. 2021)."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_warn
from torch import Generator, Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction, Number
from lightning_eff._core._samples.functions import TensorFunction
from lightning_eff._core._targets.calls import Change, TargetCall
from lightning_eff._core.search_space import RunProfile, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Step
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation._arguments import Alpha, Keys, NetworkOrFunction, Probability, Until
from lightning_eff.data.augmentation._boxes import numbers
from lightning_eff.data.augmentation._mixing import Mixing
from lightning_eff.data.augmentation.mixing._given import Given
from lightning_eff.data.augmentation.mixing.several._masks import Found, blended, search

WHO = "SuperMix"
_TEACHER = NetworkOrFunction(
    "images (B, C, H, W) that returns one score per class, (B, classes)", "CutMix needs no teacher."
)

Teacher = nn.Module | TensorFunction


def _pointless(profile: RunProfile) -> str | None:
    return "the search has no teacher"


def _of_brightness(cls: Callable[..., Any], values: Mapping[str, Any], profile: RunProfile) -> Any:
    """Build the technique with a teacher that tells light images from dark ones."""
    return cls(teacher=lambda images: torch.stack([images.mean((1, 2, 3)), -images.mean((1, 2, 3))], dim=1), **values)


class SuperMix(Mixing):
    """Mix images with masks under which a teacher recognises the classes of all of them.

    Each image of a micro-batch is mixed with ``k - 1`` others, with masks that sum to 1 in each pixel. The masks start uniform
    and are changed by Newton steps along the smoothed gradient. The search ends when the teacher's most likely classes for the
    mixture are those that it sees in the single images. The objective is the divergence between the teacher's prediction and a
    target ``y``, in which the class of each image has weight ``lambda_k``, with ``lambda ~ Dirichlet(alpha, .., alpha)``.
    ``sparsity`` times the mean of ``M (1 - M)`` is added, which is 0 if each pixel comes from one image. If all images have the
    same class, it must become the most likely one. Images for which the search fails stay unmixed, with their own label.

    By default the label of a mixture is the class that the teacher finds most likely in it, as in the paper. This is a form of
    distillation. With ``targets="mixed"`` the loss is ``sum_k lambda_k L(y_k)`` on the batch's own labels. Either is computed
    in the same forward pass, and equals the loss on the new target for cross-entropy and binary cross-entropy.
    ``training_step`` still receives integer labels.

    Use it for image classification when you have a trained network with the same classes, and step time does not matter. It
    costs far more than a training step: one pass of the teacher on all images, and up to ``iterations`` forward and backward
    passes on those not yet accepted. (The authors make the mixtures once, before training. Here each one is new. Their students
    also train on all images unmixed, which here holds only for images whose search fails.)

    The teacher is a module or function from images (B, C, H, W), as they are in the batch, to one score per class before a
    softmax, (B, classes). Its classes are numbered as in the labels. It runs in evaluation mode without autocast on the images'
    device, and is not part of checkpoints.

    There must be one label per image. Metrics that ``training_step`` computes from the labels are too low, and a warning says
    so. Techniques that choose samples by their loss see the mixtures. If several techniques mix, they take turns, one per
    batch.

    It logs ``share``, the mean weight of labels other than the images' own in the last micro-batch. ``accepted`` is the
    fraction of images that were mixed, ``passes`` the number of teacher passes (0 if nothing was mixed), and ``milliseconds``
    the host time.

    Args:
        teacher: the trained network that must recognise all classes in a mixture.
        k: the number of images in a mixture.
        alpha: the parameter of the Dirichlet distribution of the weights.
        mask: the number of rows and columns of a mask before it is enlarged. The paper uses 8 for CIFAR and 16 for ImageNet.
        sigma: the standard deviation of the Gaussian filter on gradients, in pixels of the mask. The paper uses 2 for ImageNet.
        sparsity: the weight of the term that favours pixels from a single image.
        iterations: the largest number of steps of the search.
        tolerance: the fraction of images that may remain unmixed when the search ends. With 0.7, as in the authors' code, about
            a third of the images is mixed. 0 continues for all of them.
        targets: the labels of mixtures. "teacher" uses the class that the teacher sees, "mixed" the batch's own labels.
        prob: the probability that a micro-batch is mixed. 0 is plain training.
        until: the fraction of the budget after which batches are left unchanged. 0 is plain training.
        keys: the names or positions of the images in the batch, floating point, shape (B, C, H, W). None takes all such
            tensors. With several, the teacher sees the first one.
        labels: the names or positions of the labels in the batch. None takes the tensors that are targets of the step's losses.

    Raises:
        ValueError: for a value out of range or a missing teacher. At setup, if ``until`` is below 1 and the run has no end. At
            the first batch, before any weight changes, if images are not floating point, or labels are not one class per image.
            Also if no loss call on the labels is visible, or if the images are smaller than the masks. The teacher must return
            finite scores with a gradient in the images, for the same number of classes as the loss. If scores of later images
            are not finite, these images and their partners stay unmixed, with one warning.

    Example:
        >>> teacher = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))  # in practice, a trained network
        >>> trainer = L.Trainer(max_epochs=100, callbacks=[SuperMix(teacher, mask=8)])

    References:
        Dabouei et al. 2021, "SuperMix: Supervising the Mixing Data Augmentation", arXiv:2003.05034.
    """

    paper = "Dabouei et al. 2021, arXiv:2003.05034"
    constraints = f"{Mixing.constraints}, and a teacher"
    search_space = SearchSpace({}, _pointless, _of_brightness)
    control = Control(
        "the baseline without augmentation, trained for the same time, and TokenMix or CutMix, which need no search for masks"
    )
    larger_first: ClassVar[bool] = False
    logged = ("accepted", "passes")

    def __init__(
        self,
        teacher: Annotated[Teacher, _TEACHER],
        *,
        k: Annotated[int, Count(at_least=2)] = 2,
        alpha: Alpha = 3.0,
        mask: Annotated[int, Count()] = 8,
        sigma: Annotated[float, Number(at_least=0)] = 1.0,
        sparsity: Annotated[float, Number(at_least=0)] = 25.0,
        iterations: Annotated[int, Count()] = 50,
        tolerance: Annotated[float, Fraction(below=1)] = 0.7,
        targets: Literal["teacher", "mixed"] = "teacher",
        prob: Probability = 1.0,
        until: Until = 1.0,
        keys: Keys = None,
        labels: Keys = None,
    ) -> None:
        super().__init__(alpha=alpha, prob=prob, until=until, keys=keys, labels=labels)
        self.teacher = teacher
        self.k = k
        self.mask = mask
        self.sigma = sigma
        self.sparsity = sparsity
        self.iterations = iterations
        self.tolerance = tolerance
        self.targets: Literal["teacher", "mixed"] = targets

    @override
    def _reset(self) -> None:
        super()._reset()
        self._seen: Tensor | None = None  # classes that the teacher sees in the batch's mixtures
        self._classes = 0
        self._given: Given | None = None
        self._warned = False

    # -- the teacher

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        self._given = Given(self.teacher)

    @override
    def detach(self, session: Session) -> None:
        if self._given is not None:
            self._given.put_back()
        self._given, self._seen = None, None

    @override
    def look(self, step: Step, batch: Any) -> None:
        images = self.inputs(batch, self._targets.labels(step, batch))[0]
        if min(images.shape[-2:]) < self.mask:
            raise ValueError(
                f"{WHO}(mask={self.mask}): images of {images.shape[-2]} x {images.shape[-1]} pixels are smaller than masks."
                f" Use mask={min(images.shape[-2:])} or less."
            )
        start = time.perf_counter()
        scores = self._scores(images.detach().float().requires_grad_(), gradient=True)
        self.session.chain.cost.seconds += time.perf_counter() - start
        if not scores.requires_grad:
            raise ValueError(
                f"{WHO}: the teacher's scores have no gradient with respect to the images, which the search for masks needs."
                " Remove torch.no_grad(), detach() or rounding from the teacher."
            )
        if not bool(scores.isfinite().all()):
            raise ValueError(
                f"{WHO}: the teacher returned scores that are not finite for the first batch. Check that it expects images in"
                " this range of values."
            )

    def _scores(self, images: Tensor, *, gradient: bool) -> Tensor:
        assert self._given is not None
        with torch.autocast(images.device.type, enabled=False):
            scores = self._given(images, gradient=gradient)
        if (
            not isinstance(scores, Tensor)
            or scores.ndim != 2
            or len(scores) != len(images)
            or scores.shape[1] < 2
            or not scores.is_floating_point()
        ):
            got = (
                f"{tuple(scores.shape)} {str(scores.dtype)[6:]}"
                if isinstance(scores, Tensor)
                else type(scores).__name__
            )
            raise ValueError(
                f"{WHO}: the teacher returned {got} for {len(images)} images, not one score per class,"
                f" ({len(images)}, classes). Let it return its logits, for example with teacher=lambda x: net(x).logits."
            )
        self._classes = scores.shape[1]
        return scores.to(images.device, torch.float32)

    # -- the mixtures

    @override
    def compose(self, inputs: list[Tensor], size: int, generator: Generator) -> tuple[list[Tensor], Tensor, Tensor]:
        start, k = time.perf_counter(), min(self.k, size)
        order = torch.randperm(size, generator=generator)
        place = order.argsort()
        # the partners of an image are those that follow it in a random order
        members = torch.stack([order[(place + j) % size] for j in range(k)], dim=1)
        share = torch.from_numpy(numbers(generator).dirichlet(np.full(k, self.alpha), size)).float()
        images = inputs[0].detach().float()
        found = self._search(images, members.to(images.device), share.to(images.device))
        accepted = found.accepted
        self._figures = {"accepted": float(accepted.float().mean()), "passes": found.passes + 1}
        made = []
        for x in inputs:
            mixture = blended(x[members.to(x.device)].float(), found.masks).to(x.dtype)
            made.append(torch.where(accepted[:, None, None, None], mixture, x))
        self.session.chain.cost.seconds += time.perf_counter() - start
        mixed = accepted.cpu()[:, None]
        if self.targets == "teacher":
            self._seen = found.seen
            return made, torch.arange(size)[:, None], torch.cat([~mixed, mixed], dim=1).float()
        alone = torch.eye(k)[:1]
        return made, members[:, 1:], torch.where(mixed, share, alone)

    def _search(self, images: Tensor, members: Tensor, share: Tensor) -> Found:
        scores = self._scores(images, gradient=False)
        told = scores.isfinite().all(dim=1)[members].all(dim=1)  # mixtures of images with finite scores
        if not self._warned and not bool(told.all()):
            self._warned = True
            rank_zero_warn(
                f"{WHO}: the teacher returned scores that are not finite for images of a batch, so these images and their"
                " partners stay unmixed. Check its output for them."
            )
        classes = scores.argmax(dim=1)[members]
        target = torch.zeros_like(scores).scatter_add_(1, classes, share)
        found = search(
            lambda x: self._scores(x, gradient=True),
            images[members],
            target,
            mask=self.mask,
            sigma=self.sigma,
            sparsity=self.sparsity,
            iterations=self.iterations,
            tolerance=self.tolerance,
        )
        return replace(found, accepted=found.accepted & told)

    # -- their labels

    @override
    def others(self, labels: dict[str, Tensor], partner: Tensor) -> dict[str, list[Tensor]]:
        if self.targets == "mixed":
            return super().others(labels, partner)
        return {path: [self._as_labels(path, y)] for path, y in labels.items()}

    def _as_labels(self, path: str, y: Tensor) -> Tensor:
        """Return the classes that the teacher sees, in the format of the labels ``y``."""
        assert self._seen is not None
        seen = self._seen.to(y.device)
        if y.ndim == 1 and (not y.is_floating_point() or self._classes == 2):
            return seen.to(y.dtype)
        if y.ndim == 2 and y.shape[1] == self._classes:
            return F.one_hot(seen, self._classes).to(y.dtype)
        raise ValueError(
            f"{WHO}: the teacher has {self._classes} classes, and the labels {path or 'in the batch'} {tuple(y.shape)}"
            f" {str(y.dtype)[6:]} have a different number. Give a teacher with the same classes, or set targets='mixed', which"
            " uses the batch's own labels."
        )

    @override
    def weighing(self, share: Tensor) -> Change:
        change = super().weighing(share)

        def checked(call: TargetCall) -> Tensor:
            if self.targets == "teacher" and call.of_classes and call.scores.shape[-1] != self._classes:
                raise ValueError(
                    f"{WHO}: the teacher has {self._classes} classes, and F.{call.fn.__name__} has {call.scores.shape[-1]}."
                    " Give a teacher with the same classes, or set targets='mixed', which uses the batch's own labels."
                )
            return change(call)

        return checked

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        super().on_batch_start(session, batch, batch_idx)
        self._seen = None
