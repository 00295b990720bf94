"""Co-Mixup: images of the most salient blocks of several others, all of a batch made together (Kim et al. 2021)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import BACKWARD, Reasons
from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Step
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation._arguments import check_number, no_mixing
from lightning_eff.data.augmentation._boxes import numbers
from lightning_eff.data.augmentation.mixing._gradients import ByGradients
from lightning_eff.data.augmentation.mixing.several._grids import Floats, Integers, Weights, together

WHO = "CoMixup"
_MOST_BLOCKS = 8  # a row's sets are gone through, which are 2^blocks


def block_saliency(maps: Tensor, blocks: int) -> Tensor:
    """``s``: each map's mean over each block, made to sum to 1; even where it is nothing, or not finite. (m, n), float64.

    Args:
        maps: not negative, (m, H, W).
        blocks: of a row, and of a column: n is their square.
    """
    means = F.adaptive_avg_pool2d(maps.double()[:, None], blocks).flatten(1)
    total = means.sum(dim=1, keepdim=True)
    whole = (total > 0) & total.isfinite()
    return torch.where(whole, means / torch.where(whole, total, 1.0), 1 / means.shape[1])


def compatibility(maps: Tensor, blocks: int, omega: float) -> Tensor:
    """``A = (1 - omega) I + omega C``: ``C`` is how far apart the most salient places of two inputs lie, of mean 1 / m. (m, m).

    Places are those of the largest mean over a window of a block's size, and distances sums of rows and columns.

    Args:
        maps: (m, H, W).
        blocks: of a row, and of a column.
        omega: in [0, 1].
    """
    window = (maps.shape[-2] // blocks, maps.shape[-1] // blocks)
    means = F.avg_pool2d(maps.double()[:, None], window, stride=1)[:, 0]
    at = means.flatten(1).argmax(dim=1)
    place = torch.stack([at // means.shape[-1], at % means.shape[-1]], dim=1).double()
    away = torch.cdist(place, place, p=1)
    away = away * (len(away) / away.sum().clamp(min=1))  # all at one place are 0 apart
    return (1 - omega) * torch.eye(len(away), dtype=away.dtype, device=away.device) + omega * away


def sources(
    saliency: Floats,
    compatible: Floats,
    weights: Weights,
    *,
    eta: float,
    alpha: float,
    rounds: int,
    rng: np.random.Generator,
) -> Integers:
    """Which input each block of each of m outputs is taken from: little of the energy that ``together`` tells. (m, n).

    A block of input ``i`` costs ``-s_i - eta / n * log(lambda_i)`` with ``lambda ~ Dirichlet(alpha, .., alpha)``.

    Args:
        saliency: ``s``, (m, n).
        compatible: ``A``, (m, m).
        weights: ``beta``, ``gamma`` and ``tau``.
        eta: of the prior, >= 0.
        alpha: of the Dirichlet distribution, > 0.
        rounds: how often each output is made anew.
        rng: of ``lambda``, and of the outputs that it begins with.
    """
    m, n = saliency.shape
    share = rng.dirichlet(np.full(m, alpha))
    start = rng.integers(0, m, (m, n))
    cost = -saliency - eta / n * np.log(share + 1e-8)[:, None]
    return together(cost, round(n**0.5), compatible, weights, start, rounds)


def in_places(outputs: Integers) -> Integers:
    """The outputs in such an order that each has much of the input whose place it takes, the most first: (m, n)."""
    m = len(outputs)
    held = (outputs[:, :, None] == np.arange(m)).sum(axis=1)
    found = np.empty_like(outputs)
    for _ in range(m):
        output, place = np.unravel_index(held.argmax(), held.shape)
        found[place] = outputs[output]
        held[output, :], held[:, place] = -1, -1
    return found


def shares(source: Tensor) -> tuple[Tensor, Tensor]:
    """The other samples in each mixture, (B, K - 1), and the shares of its pixels, its own first: (B, K), float32.

    Others come by their shares, the largest first; where a mixture has fewer than others have, itself stands with a share of 0.

    Args:
        source: the sample that each pixel is of, (B, H, W), on the CPU.
    """
    size = len(source)
    pixels = torch.zeros(size, size, dtype=torch.long)
    flat = source.flatten(1)
    pixels.scatter_add_(1, flat, torch.ones_like(flat))
    own = pixels.diagonal().clone()
    pixels.fill_diagonal_(0)
    several = max(int((pixels > 0).sum(dim=1).max()), 1)
    most, partner = pixels.topk(several, dim=1)
    partner = torch.where(most > 0, partner, torch.arange(size)[:, None])
    return partner, torch.cat([own[:, None], most], dim=1).float() / flat.shape[1]


class CoMixup(ByGradients):
    """Train on images whose blocks come of several others, the salient ones, and on the labels of all of them.

    A micro-batch goes in parts of ``part`` images, of which as many are made. Each has ``blocks`` x ``blocks`` blocks, each
    wholly of one image of the part, from the same place; together they have little of the energy
    ``sum_j [ sum_k c[z_jk, k] + beta / n #borders_j + gamma / n o_j . h(A sum_{i != j} o_i) ]``. ``c`` is the block's saliency,
    negative, where each image's sums to 1: the size of the loss's gradient in its pixels, which takes another forward and
    backward pass, counted. Less ``eta / n log(lambda)`` with a ``lambda`` of a Dirichlet distribution, which favours some
    images. Borders between blocks of two images cost ``beta``. ``o_j`` are the counts of blocks of each image: what the other
    images of the part have taken costs ``gamma`` once it is more than ``tau`` images' worth (``h``), so that they differ; ``A``
    adds a little, ``omega``, for images whose most salient places lie far apart. The loss is ``sum_k lambda_k L(y_k)`` with the
    shares of pixels: for cross-entropy and binary cross-entropy that is the loss on the mixed target, exactly, in the same
    forward pass, and ``training_step`` goes on to take integer labels.

    Images are made one by one beside the others as they are, ``rounds`` times over, from random ones, as the authors do. Each
    is found on the host by exact expansions of one image at a time, where theirs are exchanges of two, which comes as near to
    the least energy; where what was found has more energy than the most salient image in each block, that is taken. Left out
    are their blocks that are half of one image and half of another, their last round's term against two images of the same
    sources, and their clean loss: they train on the images as they are in the same step, and advise a smaller ``alpha``
    without.

    An image stands in the place of the one of which it has most, as far as there is one for each, and may have nothing of it;
    a metric that ``training_step`` computes of its labels reads the labels of places, and is told once. Labels are one of each
    image: maps of labels are refused. What chooses samples by their loss scores the mixtures. Where several techniques mix,
    each batch is mixed by one of them.

    It regularises: it costs about as much again as the step, and some 50 milliseconds of the host for each part; it makes
    training fit more slowly, and pays over many epochs alone.

    Logged: ``share``, the mean part of the last micro-batch that is of other images than the place's, ``sources``, of how many
    images each was made in the mean (0 where nothing was mixed), and ``milliseconds``, what it took of the host, the saliency's
    passes with it.

    Args:
        part: images that are made together, >= 2.
        blocks: of a row and of a column, from 2 to 8.
        beta: what borders weigh, >= 0; 0.16 to 0.48 are the authors' range.
        gamma: what it weighs that images take the same, >= 0; 0 lets all be the same one.
        tau: of how many images' worth on it counts, >= 0; 0.81 to 0.84 are the authors' range for 4 blocks.
        eta: what the prior weighs, >= 0.
        omega: how much of ``A`` are distances, in [0, 1].
        alpha: of the Dirichlet distribution, > 0.
        rounds: how often each image is made anew, >= 1; 3 are faster.
        prob: the chance of a micro-batch to be mixed, in [0, 1]; 0 is plain training.
        until: the share of the budget in [0, 1] from which on batches are left alone; 0 is plain training.
        keys: names or positions of the images (B, C, H, W) of floating point; None takes all such tensors.
        labels: names or positions of the labels in the batch; None looks for what the step's losses have as targets.

    Raises:
        ValueError: if an argument is out of its range; at setup, for ``until`` below 1 in a run without an end; at the first
            batch, before any weight has changed, if it holds no images of floating point with as many pixels as blocks, or
            labels that are no classes, and one of each image, if the step's loss on labels cannot be seen, or has no gradient
            in the images.

    Sources:
        Kim et al. 2021, arXiv:2102.03065; Boykov, Veksler & Zabih 2001, Fast approximate energy minimization via graph cuts.
    """

    saves: ClassVar[str] = "nothing of a step: it regularises, for a better end of long training"
    paper: ClassVar[str] = "Kim et al. 2021, arXiv:2102.03065"
    constraints: ClassVar[str] = (
        "automatic optimization; images (B, C, H, W) of floating point; one class label of each; a loss of torch.nn.functional"
    )
    refuses: ClassVar[Reasons] = BACKWARD
    survey: ClassVar[Survey | None] = Survey("data augmentation (Co-Mixup)", shen="3.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"beta": Choice((0.16, 0.32)), "until": Choice((0.8, 1.0))}, no_mixing
    )
    control: ClassVar[Control] = Control(
        "no augmentation: the baseline for as many seconds; and SaliencyMix(saliency='gradient'), as dear, of two images each"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "SAF": "a mixture's scores would be held to those of another mixture some epochs before"
    }
    larger_first: ClassVar[bool] = False

    def __init__(
        self,
        *,
        part: int = 20,
        blocks: int = 4,
        beta: float = 0.32,
        gamma: float = 1.0,
        tau: float = 0.83,
        eta: float = 0.05,
        omega: float = 0.001,
        alpha: float = 2.0,
        rounds: int = 4,
        prob: float = 1.0,
        until: float = 1.0,
        keys: Sequence[str | int] | None = None,
        labels: Sequence[str | int] | None = None,
    ) -> None:
        for name, value, least in (("part", part, 2), ("blocks", blocks, 2), ("rounds", rounds, 1)):
            most = _MOST_BLOCKS if name == "blocks" else None
            if isinstance(value, bool) or not isinstance(value, int) or value < least or (most and value > most):
                expected = f"from {least} to {most}" if most else f">= {least}"
                raise ValueError(f"{WHO}({name}={value!r}): expected an integer {expected}.")
        for name, value, what in (
            ("beta", beta, "what borders between blocks of two images weigh"),
            ("gamma", gamma, "what it weighs that images take the same"),
            ("tau", tau, "of how many images' worth on that counts"),
            ("eta", eta, "what the prior weighs"),
            ("alpha", alpha, "of the Dirichlet distribution, above 0"),
        ):
            check_number(value, who=WHO, name=name, low=0, high=float("inf"), what=what)
        check_number(omega, who=WHO, name="omega", low=0, high=1, what="how much of what is compatible are distances")
        if alpha == 0:
            raise ValueError(f"{WHO}({alpha=}): expected a number above 0. prob=0 is plain training.")
        super().__init__(prob=prob, until=until, keys=keys, labels=labels)
        self.part = part
        self.blocks = blocks
        self.beta, self.gamma, self.tau = beta, gamma, tau
        self.eta, self.omega = eta, omega
        self.alpha = alpha
        self.rounds = rounds

    @override
    def _reset(self) -> None:
        super()._reset()
        self._sources = 0.0

    @override
    def look(self, step: Step, batch: Any) -> None:
        images = self.inputs(batch, self._targets.labels(step, batch))
        self._fits(images[0])
        self.gradient_sizes(step, batch, images)

    def _fits(self, images: Tensor) -> None:
        height, width = images.shape[-2:]
        if min(height, width) < self.blocks:
            raise ValueError(
                f"{WHO}(blocks={self.blocks}): images of {height} x {width} pixels have fewer pixels than blocks in a row or a"
                " column; expected as many at least. Give fewer blocks, or take the technique out."
            )

    # -- the mixtures

    @override
    def compose(self, inputs: list[Tensor], size: int, generator: Generator) -> tuple[list[Tensor], Tensor, Tensor]:
        self._fits(inputs[0])
        source = self._sources_of(self.sizes_of(inputs), numbers(generator))
        partner, share = shares(source)
        self._sources = float((share > 0).sum(dim=1).float().mean())
        at = source.to(inputs[0].device)[:, None]
        return [x.gather(0, at.expand(x.shape)) for x in inputs], partner, share

    def _sources_of(self, maps: Tensor, rng: np.random.Generator) -> Tensor:
        """The sample that each pixel is taken from, (B, H, W), on the CPU."""
        weights = Weights(self.beta, self.gamma, self.tau)
        made = []
        for first in range(0, len(maps), self.part):
            few = maps[first : first + self.part]
            saliency = block_saliency(few, self.blocks).cpu().numpy()
            compatible = compatibility(few, self.blocks, self.omega).cpu().numpy()
            found = sources(saliency, compatible, weights, eta=self.eta, alpha=self.alpha, rounds=self.rounds, rng=rng)
            made.append(torch.from_numpy(first + in_places(found)))
        grids = torch.cat(made).reshape(-1, self.blocks, self.blocks)
        # as nearest neighbours are: where sides are no multiples of blocks, some have a pixel more
        rows, columns = (torch.arange(side) * self.blocks // side for side in maps.shape[-2:])
        return grids[:, rows][:, :, columns]

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        super().on_batch_start(session, batch, batch_idx)
        self._sources = 0.0

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "sources": self._sources}
