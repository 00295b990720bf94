"""SuperMix: images mixed by masks that let a teacher see the classes of all of them (Dabouei et al. 2021)."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_warn
from torch import Generator, Tensor, nn
from typing_extensions import override

from lightning_eff._core._samples.functions import TensorFunction
from lightning_eff._core._targets.calls import Change, TargetCall
from lightning_eff._core.search_space import RunProfile, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Step
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation._arguments import check_number
from lightning_eff.data.augmentation._boxes import numbers
from lightning_eff.data.augmentation._mixing import Mixing
from lightning_eff.data.augmentation.mixing._given import Given
from lightning_eff.data.augmentation.mixing.several._masks import Found, blended, search

WHO = "SuperMix"
_TARGETS = ("teacher", "mixed")

Teacher = nn.Module | TensorFunction


def _pointless(profile: RunProfile) -> str | None:
    return "a search has no teacher to give"


def _of_brightness(cls: Callable[..., Any], values: Mapping[str, Any], profile: RunProfile) -> Any:
    """With a teacher that tells light from dark: a search passes over it."""
    return cls(teacher=lambda images: torch.stack([images.mean((1, 2, 3)), -images.mean((1, 2, 3))], dim=1), **values)


class SuperMix(Mixing):
    """Train on images mixed by masks with which a teacher sees the classes of all of them.

    Each image of a micro-batch is mixed with ``k - 1`` others of it, by masks that sum to 1 in each pixel. They begin even, and
    are changed by Newton's steps along the smoothed gradient until a teacher, which the user gives, has the images' classes as
    its likeliest ones: the classes that it sees in the images by themselves. What is minimised is the divergence of its
    prediction from ``y``, of which each image's class has ``lambda_k`` with ``lambda ~ Dirichlet(alpha, .., alpha)``, and
    ``sparsity`` times the mean of ``M (1 - M)``, which is 0 where each pixel is of one image. Images whose classes are not
    seen together in the end stay as they are, with their own label; the authors, who make images before training, leave them
    out. As in their code the search ends when at most ``tolerance`` of the images are left, so that with 0.7 about a third of a
    micro-batch is mixed; their page says that it is the share that is done. Where images are of one class, that one is to be
    the likeliest.

    Labels of mixtures are by default the class that the teacher finds likeliest in each, which is what the authors' students
    learn of them: it is distillation. With ``targets="mixed"`` they are the batch's own labels by ``lambda``, and the loss is
    ``sum_k lambda_k L(y_k)``. Either is exact for cross-entropy and binary cross-entropy, in the same forward pass, and
    ``training_step`` goes on to take integer labels; a metric that it computes of them reads each image's own label, and is
    told once. The authors' students learn of the images as they are in the same step, which here those do that are left.

    A teacher is a trained network, or a function, of images (B, C, H, W) as the batch has them that returns a score for each
    class, (B, classes), before a softmax; its classes are numbered as the labels are. It runs in evaluation mode, without
    autocast, on the images' device; it is no part of the trained module, nor of checkpoints.

    It costs far more than a step: one pass of the teacher on the images, and up to ``iterations`` forward and backward passes
    on those that are left. Made before training, as the authors do, images are used in many epochs; here each is new. It
    regularises, and pays, where it does, by what the teacher knows. Labels are one of each image. What chooses samples by their
    loss scores the mixtures. Where several techniques mix, each batch is mixed by one of them.

    Logged: ``share``, the mean weight of other labels than the images' own in the last micro-batch, ``accepted``, the part of
    it that is mixed, ``passes`` of the teacher (0 where nothing was mixed), and ``milliseconds``, what it took of the host.

    Args:
        teacher: of images (B, C, H, W), scores (B, classes). It must be given.
        k: how many images are mixed into one, >= 2.
        alpha: of the Dirichlet distribution, > 0.
        mask: rows and columns of a mask before it is enlarged, >= 1: 8 for CIFAR in the paper, 16 for ImageNet.
        sigma: the deviation of the Gaussian that smooths gradients, in the masks' pixels, >= 0: 2 for ImageNet.
        sparsity: what it weighs that each pixel be of one image, >= 0.
        iterations: steps of the search, at most, >= 1.
        tolerance: the share of images that may be left where the search ends, in [0, 1); 0 goes on for all of them.
        targets: "teacher" or "mixed": what labels mixtures have.
        prob: the chance of a micro-batch to be mixed, in [0, 1]; 0 is plain training.
        until: the share of the budget in [0, 1] from which on batches are left alone; 0 is plain training.
        keys: names or positions of the images (B, C, H, W) of floating point; None takes all such tensors. Of several, the
            first ones are what the teacher sees.
        labels: names or positions of the labels in the batch; None looks for what the step's losses have as targets.

    Raises:
        ValueError: if an argument is out of its range, or there is no teacher; at setup, for ``until`` below 1 in a run without
            an end; at the first batch, before any weight has changed, if it holds no images of floating point, smaller ones
            than masks, or labels that are no classes, and one of each image, if the teacher returns no scores, or such without
            a gradient in the images or not finite, if it has other classes than the loss, or if the step's loss on labels
            cannot be seen. Later images whose scores are not finite are not mixed, and others not with them; it warns once.

    Sources:
        Dabouei et al. 2021, arXiv:2003.05034.
    """

    saves: ClassVar[str] = "nothing of a step: it regularises, for a better end of long training"
    paper: ClassVar[str] = "Dabouei et al. 2021, arXiv:2003.05034"
    constraints: ClassVar[str] = (
        "a teacher that is given; automatic optimization; images (B, C, H, W) of floating point; one class label of each; a"
        " loss of torch.nn.functional"
    )
    survey: ClassVar[Survey | None] = Survey("data augmentation (SuperMix)", shen="3.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({}, _pointless, _of_brightness)
    control: ClassVar[Control] = Control(
        "no augmentation: the baseline for as many seconds; and TokenMix, or CutMix, for as many, which look for no masks"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "SAF": "a mixture's scores would be held to those of another mixture some epochs before"
    }
    larger_first: ClassVar[bool] = False

    def __init__(
        self,
        teacher: Teacher,
        *,
        k: int = 2,
        alpha: float = 3.0,
        mask: int = 8,
        sigma: float = 1.0,
        sparsity: float = 25.0,
        iterations: int = 50,
        tolerance: float = 0.7,
        targets: Literal["teacher", "mixed"] = "teacher",
        prob: float = 1.0,
        until: float = 1.0,
        keys: Sequence[str | int] | None = None,
        labels: Sequence[str | int] | None = None,
    ) -> None:
        if not callable(teacher):
            raise ValueError(
                f"{WHO}({teacher=}): expected a teacher, a trained network or a function of images (B, C, H, W) that returns a"
                " score for each class, (B, classes), because masks go by what it sees. Without one, CutMix needs none."
            )
        for name, value, low in (("k", k, 2), ("mask", mask, 1), ("iterations", iterations, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{WHO}({name}={value!r}): expected an integer >= {low}.")
        for name, value, what in (
            ("alpha", alpha, "of the Dirichlet distribution, above 0"),
            ("sigma", sigma, "the deviation of the Gaussian that smooths gradients"),
            ("sparsity", sparsity, "what it weighs that each pixel be of one image"),
        ):
            check_number(value, who=WHO, name=name, low=0, high=float("inf"), what=what)
        if alpha == 0:
            raise ValueError(f"{WHO}({alpha=}): expected a number above 0. prob=0 is plain training.")
        check_number(tolerance, who=WHO, name="tolerance", low=0, high=1, what="the share of images that may be left")
        if tolerance == 1:
            raise ValueError(f"{WHO}({tolerance=}): expected less than 1. prob=0 is plain training.")
        if targets not in _TARGETS:
            raise ValueError(f"{WHO}({targets=}): expected one of {', '.join(map(repr, _TARGETS))}.")
        super().__init__(prob=prob, until=until, keys=keys, labels=labels)
        self.teacher = teacher
        self.k = k
        self.alpha = alpha
        self.mask = mask
        self.sigma = sigma
        self.sparsity = sparsity
        self.iterations = iterations
        self.tolerance = tolerance
        self.targets: Literal["teacher", "mixed"] = targets

    @override
    def _reset(self) -> None:
        super()._reset()
        self._accepted, self._passes = 0.0, 0
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
                f"{WHO}(mask={self.mask}): images of {images.shape[-2]} x {images.shape[-1]} pixels are smaller than masks;"
                " expected masks of fewer rows and columns, because they are enlarged. Give a smaller mask."
            )
        start = time.perf_counter()
        scores = self._scores(images.detach().float().requires_grad_(), gradient=True)
        self.session.chain.cost.seconds += time.perf_counter() - start
        if not scores.requires_grad:
            raise ValueError(
                f"{WHO}: the teacher's scores do not come of the images in a way that gradients take; expected ones that do,"
                " because masks are looked for by them. Let the teacher not detach, round or run without gradients."
            )
        if not bool(scores.isfinite().all()):
            raise ValueError(
                f"{WHO}: the teacher returned scores that are not finite; expected numbers, because masks go by them. Look at"
                " what it returns for the batch's images."
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
                f"{WHO}: the teacher returned {got} for {len(images)} images; expected a score for each class,"
                f" ({len(images)}, classes), of floating point. Let it return its logits, as teacher=lambda x: net(x).logits."
            )
        self._classes = scores.shape[1]
        return scores.to(images.device, torch.float32)

    # -- the mixtures

    @override
    def compose(self, inputs: list[Tensor], size: int, generator: Generator) -> tuple[list[Tensor], Tensor, Tensor]:
        start, k = time.perf_counter(), min(self.k, size)
        order = torch.randperm(size, generator=generator)
        place = order.argsort()
        # of each, those that follow it in a random order
        members = torch.stack([order[(place + j) % size] for j in range(k)], dim=1)
        share = torch.from_numpy(numbers(generator).dirichlet(np.full(k, self.alpha), size)).float()
        images = inputs[0].detach().float()
        found = self._search(images, members.to(images.device), share.to(images.device))
        accepted = found.accepted
        self._accepted, self._passes = float(accepted.float().mean()), found.passes + 1
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
        told = scores.isfinite().all(dim=1)[members].all(dim=1)  # of mixtures: those of whose images the teacher tells
        if not self._warned and not bool(told.all()):
            self._warned = True
            rank_zero_warn(
                f"{WHO}: the teacher returned scores that are not finite for images of a batch; masks go by them, so that such"
                " images stay as they are, as do those that were to be mixed with them. Look at what the teacher returns."
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
        """The classes that the teacher sees, as such labels as ``y`` are."""
        assert self._seen is not None
        seen = self._seen.to(y.device)
        if y.ndim == 1 and (not y.is_floating_point() or self._classes == 2):
            return seen.to(y.dtype)
        if y.ndim == 2 and y.shape[1] == self._classes:
            return F.one_hot(seen, self._classes).to(y.dtype)
        raise ValueError(
            f"{WHO}: the teacher has {self._classes} classes, and the labels {path or 'in the batch'} {tuple(y.shape)}"
            f" {str(y.dtype)[6:]} have others; expected the same, because mixtures have the teacher's. Give such a teacher, or"
            " targets='mixed', which has the batch's own labels."
        )

    @override
    def weighing(self, share: Tensor) -> Change:
        change = super().weighing(share)

        def checked(call: TargetCall) -> Tensor:
            if self.targets == "teacher" and call.of_classes and call.scores.shape[-1] != self._classes:
                raise ValueError(
                    f"{WHO}: the teacher has {self._classes} classes, and F.{call.fn.__name__} has {call.scores.shape[-1]};"
                    " expected as many, because mixtures have the teacher's. Give such a teacher, or targets='mixed', which has"
                    " the batch's own labels."
                )
            return change(call)

        return checked

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        super().on_batch_start(session, batch, batch_idx)
        self._accepted, self._passes, self._seen = 0.0, 0, None

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "accepted": self._accepted, "passes": self._passes}
