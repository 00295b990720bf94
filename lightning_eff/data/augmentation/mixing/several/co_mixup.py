"""Co-Mixup: compose images from salient blocks of several others, jointly for a whole batch (Kim et al. 2021)."""

import math
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction, Number
from lightning_eff._core._needs.needs import BACKWARD, Reasons
from lightning_eff._core._targets.calls import Change, TargetCall, mixed
from lightning_eff._core.batches import join
from lightning_eff._core.search_space import Choice, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Step
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation._arguments import Alpha, Keys, Probability, Until, no_mixing
from lightning_eff.data.augmentation._boxes import numbers
from lightning_eff.data.augmentation.mixing._gradients import ByGradients
from lightning_eff.data.augmentation.mixing._hook import CHOOSERS
from lightning_eff.data.augmentation.mixing.several._grids import Floats, Integers, Weights, together

WHO = "CoMixup"
Weight = Annotated[float, Number(at_least=0)]


def block_saliency(maps: Tensor, blocks: int) -> Tensor:
    """Return ``s``: the mean of each map over each block, normalised to sum to 1: (m, n), float64.

    A map whose sum is zero or not finite counts as uniform.

    Args:
        maps: nonnegative, (m, H, W).
        blocks: the number of blocks per row and per column; n is its square.
    """
    means = F.adaptive_avg_pool2d(maps.double()[:, None], blocks).flatten(1)
    total = means.sum(dim=1, keepdim=True)
    whole = (total > 0) & total.isfinite()
    return torch.where(whole, means / torch.where(whole, total, 1.0), 1 / means.shape[1])


def compatibility(maps: Tensor, blocks: int, omega: float) -> Tensor:
    """Return ``A = (1 - omega) I + omega C``, (m, m), with the distances ``C`` of salient positions, scaled to a mean of 1 / m.

    The most salient position of an input is the window of a block's size with the largest mean. Distances are Manhattan
    distances.

    Args:
        maps: (m, H, W).
        blocks: the number of blocks per row and per column.
        omega: in [0, 1].
    """
    window = (maps.shape[-2] // blocks, maps.shape[-1] // blocks)
    means = F.avg_pool2d(maps.double()[:, None], window, stride=1)[:, 0]
    at = means.flatten(1).argmax(dim=1)
    place = torch.stack([at // means.shape[-1], at % means.shape[-1]], dim=1).double()
    away = torch.cdist(place, place, p=1)
    away = away * (len(away) / away.sum().clamp(min=1))  # all distances are 0 if all positions are equal
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
    """Find the input of each block of m outputs, with a low energy (see :func:`together`): (m, n).

    A block of input ``i`` costs ``-s_i - eta / n * log(lambda_i)`` with ``lambda ~ Dirichlet(alpha, .., alpha)``.

    Args:
        saliency: ``s``, (m, n).
        compatible: ``A``, (m, m).
        weights: ``beta``, ``gamma`` and ``tau``.
        eta: the weight of the prior.
        alpha: the parameter of the Dirichlet distribution.
        rounds: the number of times that each output is optimised.
        rng: draws ``lambda`` and the initial outputs.
    """
    m, n = saliency.shape
    share = rng.dirichlet(np.full(m, alpha))
    start = rng.integers(0, m, (m, n))
    cost = -saliency - eta / n * np.log(share + 1e-8)[:, None]
    return together(cost, round(n**0.5), compatible, weights, start, rounds)


def in_places(outputs: Integers) -> Integers:
    """Order the outputs so that each takes the place of an input that it contains much of: (m, n)."""
    m = len(outputs)
    held = (outputs[:, :, None] == np.arange(m)).sum(axis=1)
    found = np.empty_like(outputs)
    for _ in range(m):
        output, place = np.unravel_index(held.argmax(), held.shape)
        found[place] = outputs[output]
        held[output, :], held[:, place] = -1, -1
    return found


def shares(source: Tensor) -> tuple[Tensor, Tensor]:
    """Return the other samples in each mixture, (B, K - 1), and the shares of pixels, the own one first: (B, K), float32.

    Other samples are ordered by decreasing share. Missing ones are filled with the sample itself, with a share of 0.

    Args:
        source: the sample from which each pixel is taken, (B, H, W), on the CPU.
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


def with_clean(call: TargetCall, share: Tensor, clean: float) -> Tensor:
    """Return ``L(mixtures) + clean L(images)`` for a call on B images followed by their B mixtures.

    Args:
        call: a loss call with twice the rows.
        share: the weights of the labels in each mixture, (B, K).
        clean: the weight of the second term.

    Raises:
        ValueError: if the call has no reduction, or not one row per sample.
    """
    size = len(share)
    if call.reduction == "none" or {len(call.input), len(call.target), len(call.places)} != {2 * size}:
        raise ValueError(
            f"{WHO}(clean={clean:g}): training_step calls F.{call.fn.__name__}, reduction={call.reduction!r}, on"
            f" {tuple(call.input.shape)}, so the loss of the unmixed images cannot be separated. Use a mean or sum over one row"
            " per sample, or set clean=0."
        )
    images = {**call.arguments, "input": call.input[:size], "target": call.target[:size]}
    mixtures = replace(
        call,
        arguments={**call.arguments, "input": call.input[size:], "target": call.target[size:]},
        places=call.places[size:] - size * math.prod(call.shape[1:]),
        others=tuple(other[size:] for other in call.others),
        shape=torch.Size([size, *call.shape[1:]]),
    )
    return mixed(*share.unbind(dim=1))(mixtures) + clean * call.fn(**images)


class CoMixup(ByGradients):
    """Compose images from salient blocks of several others, and train on the labels of all of them.

    A micro-batch is divided into parts of ``part`` images, and each part yields as many mixtures. A mixture has ``blocks`` x
    ``blocks`` blocks. Each block is taken from one image of the part, at the same position. The mixtures of a part are chosen
    jointly, to minimise the energy
    ``sum_j [ sum_k c[z_jk, k] + beta / n #borders_j + gamma / n o_j . h(A sum_{i != j} o_i) ]``:

    - ``c`` is the negative saliency of a block, minus ``eta / n log(lambda)``. Saliency is the size of the loss's gradient in
      the pixels, normalised per image. ``lambda`` is drawn from a Dirichlet distribution, so that some images are favoured.
    - ``beta`` penalises borders between blocks of different images.
    - ``gamma`` penalises mixtures of a part that use the same images. ``o_j`` counts the blocks of each image in a mixture.
      Blocks that the other mixtures use count beyond ``tau`` images' worth (``h``).
    - ``A`` gives a small weight, ``omega``, to the distance between the most salient positions of two images.

    The loss is ``sum_k lambda_k L(y_k)`` with the fractions of pixels, computed in the same forward pass. For cross-entropy and
    binary cross-entropy this equals the loss on the mixed target. ``training_step`` still receives integer labels.

    Use it for image classification when you train for many epochs and step time matters little. A step costs about twice as
    much (the saliency takes an extra forward and backward pass), plus about 50 ms on the host per part. The training loss falls
    more slowly.

    The search differs from the authors' code. It finds each mixture by exact expansions of one image at a time, on the host,
    where theirs exchanges two images; both come equally close to the smallest energy. If the result has more energy than the
    most salient image in each block, the latter is used. Blocks that are half of two images, and the term against identical
    sources in the last round, are not implemented.

    With ``clean`` above 0, the step gets the unmixed images too, before the mixtures in one batch, and the loss becomes
    ``L(mixtures) + clean L(images)``. The authors train with ``clean=1``, and take the gradient of the second term from the
    pass that finds the saliency. Here it is one more pass, so a step costs about three times as much as a plain one. BatchNorm
    and the metrics of ``training_step`` see both. Without this loss, the authors advise a smaller ``alpha``.

    Each mixture takes the place of the image that it contains most of, as far as possible, so its own label may have a small
    weight. Metrics that ``training_step`` computes from the labels are too low, and a warning says so. There must be one label
    per image. Techniques that choose samples by their loss see the mixtures, and cannot be combined with ``clean``. If several
    techniques mix, they take turns, one per batch.

    It logs ``share``, the mean weight of the other images in the last micro-batch (of the unmixed images too, whose weight is
    0). ``sources`` is the mean number of images in
    a mixture (0 if nothing was mixed), and ``milliseconds`` is the host time including the saliency.

    Args:
        part: the number of images that are mixed together.
        blocks: the number of blocks per row and per column.
        beta: the weight of borders between blocks. The authors use 0.16 to 0.48.
        gamma: the weight of the penalty on using the same images. With 0 all mixtures of a part may be the same.
        tau: the number of images' worth of blocks that the other mixtures may use without penalty. The authors use 0.81 to 0.84
            with 4 blocks.
        eta: the weight of the random prior.
        omega: the weight of distances between the most salient positions of images.
        alpha: the parameter of the Dirichlet distribution.
        rounds: the number of times that each mixture is optimised. 3 is faster.
        clean: the weight of the loss on the unmixed images in each step that mixes. The authors use 1.
        prob: the probability that a micro-batch is mixed. 0 is plain training.
        until: the fraction of the budget after which batches are left unchanged. 0 is plain training.
        keys: the names or positions of the images in the batch, floating point, shape (B, C, H, W). None takes all such
            tensors.
        labels: the names or positions of the labels in the batch. None takes the tensors that are targets of the step's losses.

    Raises:
        ValueError: for a value out of range. At setup, if ``until`` is below 1 and the run has no end. At the first batch,
            before any weight changes, if images are not floating point, or labels are not one class per image. Also if no loss
            call on the labels is visible, if the loss has no gradient in the images, or if there are more blocks than
            pixels. With ``clean``, at setup if another technique chooses samples or makes versions of them, and in the first
            step if a loss call has no reduction.

    Example:
        >>> trainer = L.Trainer(max_epochs=200, callbacks=[CoMixup(blocks=4, prob=0.5)])

    References:
        Kim et al. 2021, "Co-Mixup: Saliency Guided Joint Mixup with Supermodular Diversity", arXiv:2102.03065. Boykov, Veksler
        & Zabih 2001, "Fast Approximate Energy Minimization via Graph Cuts".
    """

    paper = "Kim et al. 2021, arXiv:2102.03065"
    refuses: ClassVar[Reasons] = BACKWARD
    search_space = SearchSpace({"beta": Choice((0.16, 0.32)), "until": Choice((0.8, 1.0))}, no_mixing)
    control = Control(
        "the baseline without augmentation, trained for the same time, and SaliencyMix(saliency='gradient'), which costs as"
        " much and mixes two images"
    )
    larger_first: ClassVar[bool] = False
    logged = ("sources",)

    def __init__(
        self,
        *,
        part: Annotated[int, Count(at_least=2)] = 20,
        blocks: Annotated[int, Count(at_least=2, at_most=8)] = 4,
        beta: Weight = 0.32,
        gamma: Weight = 1.0,
        tau: Weight = 0.83,
        eta: Weight = 0.05,
        omega: Annotated[float, Fraction()] = 0.001,
        alpha: Alpha = 2.0,
        rounds: Annotated[int, Count()] = 4,
        clean: Weight = 0.0,
        prob: Probability = 1.0,
        until: Until = 1.0,
        keys: Keys = None,
        labels: Keys = None,
    ) -> None:
        super().__init__(alpha=alpha, prob=prob, until=until, keys=keys, labels=labels)
        self.part = part
        self.blocks = blocks
        self.beta, self.gamma, self.tau = beta, gamma, tau
        self.eta, self.omega = eta, omega
        self.rounds = rounds
        self.clean = clean

    @override
    def check(self, session: Session) -> None:
        super().check(session)
        others = [type(t).__name__ for t in session.working if type(t).__name__ in CHOOSERS]
        others += [type(t).__name__ for t in session.working if getattr(t, "consistency", 0)]
        if self.clean and others:
            raise ValueError(
                f"{WHO}(clean={self.clean:g}): {others[0]} changes which samples the step gets, so the unmixed images could not"
                f" be told from the mixtures. Set clean=0, or remove {others[0]}."
            )

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
                f" column. Use fewer blocks, or remove {WHO}."
            )

    # -- the loss on unmixed images

    @override
    def _mixture(self, step: Step, batch: Any, labels: dict[str, Tensor]) -> tuple[Any, Tensor, Tensor] | None:
        made = super()._mixture(step, batch, labels)
        if made is None or not self.clean:
            return made
        mixture, partner, share = made
        step.versions = 2
        self.session.chain.cost.forward_samples += len(share)
        own = torch.arange(len(share))[:, None].expand(partner.shape)
        alone = torch.zeros_like(share)
        alone[:, 0] = 1
        return join([batch, mixture]), torch.cat([own, partner]), torch.cat([alone, share])

    @override
    def weighing(self, share: Tensor) -> Change:
        if not self.clean:
            return super().weighing(share)
        return lambda call: with_clean(call, share[len(share) // 2 :], self.clean)

    # -- the mixtures

    @override
    def compose(self, inputs: list[Tensor], size: int, generator: Generator) -> tuple[list[Tensor], Tensor, Tensor]:
        self._fits(inputs[0])
        source = self._sources_of(self.sizes_of(inputs), numbers(generator))
        partner, share = shares(source)
        self._figures["sources"] = float((share > 0).sum(dim=1).float().mean())
        at = source.to(inputs[0].device)[:, None]
        return [x.gather(0, at.expand(x.shape)) for x in inputs], partner, share

    def _sources_of(self, maps: Tensor, rng: np.random.Generator) -> Tensor:
        """Return the sample from which each pixel is taken, (B, H, W), on the CPU."""
        weights = Weights(self.beta, self.gamma, self.tau)
        made = []
        for first in range(0, len(maps), self.part):
            few = maps[first : first + self.part]
            saliency = block_saliency(few, self.blocks).cpu().numpy()
            compatible = compatibility(few, self.blocks, self.omega).cpu().numpy()
            found = sources(saliency, compatible, weights, eta=self.eta, alpha=self.alpha, rounds=self.rounds, rng=rng)
            made.append(torch.from_numpy(first + in_places(found)))
        grids = torch.cat(made).reshape(-1, self.blocks, self.blocks)
        # nearest-neighbour enlargement: if blocks does not divide the side, some blocks have one pixel more
        rows, columns = (torch.arange(side) * self.blocks // side for side in maps.shape[-2:])
        return grids[:, rows][:, :, columns]
