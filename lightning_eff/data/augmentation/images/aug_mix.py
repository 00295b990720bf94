"""AugMix: each image with a mixture of chains of operations on it, and one opinion on all versions (Hendrycks et al. 2019)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_warn
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import Need
from lightning_eff._core._targets.calls import TargetCall
from lightning_eff._core._targets.window import Targets
from lightning_eff._core.batches import join, num_samples
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation import _arguments
from lightning_eff.data.augmentation._arguments import check_number, no_images
from lightning_eff.data.augmentation.images._operations import FARTHEST, OPERATIONS, check_names, operated, signed
from lightning_eff.data.augmentation.images._policies import Policy

WHO = "AugMix"
#: The paper's: those that are not among the corruptions that it tests with.
PAPERS = (
    *("auto_contrast", "equalize", "posterize", "rotate", "solarize"),
    *("shear_x", "shear_y", "translate_x", "translate_y"),
)
DEEPEST = 3


@dataclass(frozen=True)
class Chains:
    """What is drawn for B images: chains of operations, and how they are mixed.

    Attributes:
        which: the places of operations among names, (B, width, depth), -1 where a chain is shorter.
        strength: of each, with its sign.
        w: the weight of each chain, (B, width); rows sum to 1.
        m: the weight of the image itself, (B,).
    """

    which: Tensor
    strength: Tensor
    w: Tensor
    m: Tensor


def draw_chains(
    count: int, width: int, depth: int | None, severity: float, alpha: float, names: Sequence[str], generator: Generator
) -> Chains:
    """``w ~ Dirichlet(alpha, .., alpha)``, ``m ~ Beta(alpha, alpha)``, strengths even up to ``severity / 10``.

    Posterizing begins at 4 bits, and translations end at a third of the side, as in the authors' code.

    Args:
        count: of images.
        width: of chains.
        depth: operations of a chain; None draws 1 to 3 for each.
        severity: in (0, 10].
        alpha: above 0.
        names: of operations.
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
    """``m x + (1 - m) sum_i w_i chain_i(x)``, of images (B, C, H, W) in [0, 1]."""
    count, width, depth = drawn.which.shape
    chains = p.repeat_interleave(width, dim=0)
    for at in range(depth):
        chains = operated(chains, names, drawn.which[:, :, at].flatten(), drawn.strength[:, :, at].flatten(), fill)
    w, m = (t.to(p).reshape(count, -1, 1, 1, 1) for t in (drawn.w, drawn.m))
    # x + (1 - m) sum_i w_i (chain_i(x) - x), where identity leaves x
    return p + (1 - m[:, 0]) * (w * (chains.unflatten(0, (count, width)) - p[:, None])).sum(1)


def jensen_shannon(*logs: Tensor) -> Tensor:
    """``JS = 1/k sum_i KL(p_i || M)``, ``M = 1/k sum_i p_i``, of ``log p_i`` (.., C): (..), in [0, log k]."""
    stacked = torch.stack(logs).clamp(min=-1e4)  # classes that are ruled out have a log of -inf, and add nothing
    mean = stacked.logsumexp(0) - np.log(len(logs))
    return (stacked.exp() * (stacked - mean)).sum(-1).mean(0)


def consistent(call: TargetCall, weight: float, seen: list[Tensor]) -> Tensor:
    """``L(x) + weight JS(p(x), p(x'), p(x''))`` of a call on three versions of each sample, the plain ones first.

    Args:
        call: of ``F.cross_entropy`` or ``F.nll_loss``, with three times the rows.
        weight: 12 in the paper.
        seen: takes the mean of JS, without its graph.

    Raises:
        ValueError: if the call is none of these, or not reduced.
    """
    rows, rest = divmod(len(call.input), 3)
    if not call.of_classes or call.reduction == "none" or rest or len(call.target) != len(call.input):
        raise ValueError(
            f"{WHO}(consistency={weight:g}): training_step calls F.{call.fn.__name__}, reduction={call.reduction!r}, on"
            f" {tuple(call.input.shape)}; expected F.cross_entropy or F.nll_loss of a row for each sample, with a mean or sum,"
            " where the distributions of an image's versions can be compared. Set consistency=0, which trains on one version."
        )
    first = {**call.arguments, "input": call.input[:rows], "target": call.target[:rows]}
    scores = call.scores if call.fn is F.nll_loss else call.scores.log_softmax(-1)
    divergence = jensen_shannon(*scores.float().split(rows))
    valid = call.valid[:rows].to(divergence.dtype)
    seen.append((divergence * valid).sum().detach() / valid.sum())
    return call.fn(**first) + weight * call.reduce(divergence * valid, valid).to(call.input.dtype)


class AugMix(Policy):
    """Train on images mixed with chains of operations on them; and, if asked to, hold the network to one opinion on all.

    Each image becomes ``m x + (1 - m) sum_i w_i chain_i(x)``: three chains of one to three operations, each drawn evenly of
    auto_contrast, equalize, posterize, rotate, solarize, shear_x, shear_y, translate_x and translate_y, with strengths up to
    ``severity``, and weights of a Dirichlet and a Beta distribution. So it stays close to the image, and keeps what it shows.
    Batches are changed on their device, by kornia's functions; labels stay. Pixels that come from outside are gray.

    With ``consistency`` above 0 the step gets each image three times in one batch, plain and in two versions of AugMix, and its
    loss becomes that on the plain ones plus ``consistency`` times the Jensen-Shannon divergence of the three predictions, which
    the paper's best results come of (with 12). That takes about three times as long and three times the memory of activations.
    BatchNorm sees all versions. The loss must be F.cross_entropy or F.nll_loss on the labels, as it can be seen; another one is
    an error at the first batch. ``training_step`` and what it measures then see three times the samples. Labels that others
    smooth or mix are so for the plain images, and what chooses samples chooses before they are three.

    Operations are defined on values from black to white: see :class:`RandAugment` for ``mean``, ``std`` and ``scale``.

    It makes networks robust to corruptions, at a little gain of plain accuracy. It costs more than :class:`RandAugment`, and
    regularises: it pays over many epochs alone.

    Logged: ``share``, the share of the last micro-batch's images that were mixed; ``clipped``, the share of its values that lay
    beyond the range; ``milliseconds``, what it took of the host; and ``divergence``, the mean of JS, in [0, log 3].

    Args:
        width: chains, >= 1.
        depth: operations of each chain, >= 1; None draws 1 to 3 for each.
        severity: of operations, in (0, 10].
        alpha: of the Dirichlet and the Beta distribution, above 0.
        consistency: the weight of JS in the loss, >= 0; 12 in the paper, 0 trains on one version of each image.
        operations: names of those that are drawn from; None takes the nine. Those of RandAugment may be named, too.
        mean: that the data set has subtracted, one number or one for each channel.
        std: that it has divided by, above 0.
        scale: the largest value that pixels had before that, such as 1 or 255.
        fill: of pixels from outside of the image, from 0 for black to 1 for white.
        prob: the chance of an image to be changed, in [0, 1]; 0 is plain training.
        until: the share of the budget in [0, 1] from which on images are left alone; 0 is plain training.
        keys: names or positions of the images (B, C, H, W) of floating point or uint8; None takes all such tensors.
        labels: names or positions of the labels, for ``consistency``; None looks for what the step's losses have as targets.

    Raises:
        ValueError: if an argument is out of its range; at setup, for ``until`` below 1 in a run without an end; at the first
            batch, before any weight has changed, if it holds no images, images of another range, or masks and boxes that
            geometric operations would leave behind, or if ``consistency`` is asked of a loss that cannot be seen.
        ImportError: at setup, where kornia is not installed.

    Sources:
        Hendrycks et al. 2019, arXiv:1912.02781.
    """

    saves: ClassVar[str] = "nothing of a step: it makes networks robust to corrupted images"
    paper: ClassVar[str] = "Hendrycks et al. 2019, arXiv:1912.02781"
    constraints: ClassVar[str] = (
        "pip install 'lightning-eff[augmentation]'; automatic optimization; images (B, C, H, W) of a known range; labels of"
        " whole images; for its consistency, a loss of torch.nn.functional on classes"
    )
    needs: ClassVar[Need] = Need.CALLS | Need.STEP
    survey: ClassVar[Survey | None] = Survey("data augmentation (AugMix)", shen="3.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"severity": Uniform(1.0, 6.0), "until": Choice((0.8, 1.0))}, no_images
    )
    control: ClassVar[Control] = Control("no augmentation: the baseline for as many seconds")
    conflicts: ClassVar[Mapping[str, str]] = {}
    order: ClassVar[int] = -1

    def __init__(
        self,
        *,
        width: int = 3,
        depth: int | None = None,
        severity: float = 3.0,
        alpha: float = 1.0,
        consistency: float = 0.0,
        operations: Sequence[str] | None = None,
        mean: float | Sequence[float] = 0.0,
        std: float | Sequence[float] = 1.0,
        scale: float = 1.0,
        fill: float = 0.5,
        prob: float = 1.0,
        until: float = 1.0,
        keys: Sequence[str | int] | None = None,
        labels: Sequence[str | int] | None = None,
    ) -> None:
        for name, value in (("width", width), ("depth", 1 if depth is None else depth)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{WHO}({name}={value!r}): expected an integer >= 1.")
        check_number(severity, who=WHO, name="severity", low=0, high=10, what="above 0, the largest strength")
        check_number(alpha, who=WHO, name="alpha", low=0, high=float("inf"), what="above 0")
        for name, value in (("severity", severity), ("alpha", alpha)):
            if value == 0:
                raise ValueError(f"{WHO}({name}={value!r}): expected a number above 0.")
        check_number(consistency, who=WHO, name="consistency", low=0, high=float("inf"), what="the weight of JS")
        if operations is not None:
            check_names(operations, who=WHO, name="operations")
        _arguments.check_names(labels, who=WHO, name="labels")
        super().__init__(mean=mean, std=std, scale=scale, fill=fill, prob=prob, until=until, keys=keys)
        self.width, self.depth, self.severity, self.alpha = width, depth, severity, alpha
        self.consistency = consistency
        self.operations = PAPERS if operations is None else tuple(operations)
        self.labels = None if labels is None else list(labels)

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
        return f"Leave them out, by operations={left}, or take the technique out."

    # -- consistency

    @override
    def attach(self, session: Session) -> None:
        if not self.consistency:
            super().attach(session)
            return
        self._reset()
        self._targets = Targets(session, WHO, self.labels)
        # behind what chooses and mixes, and inside of what smooths
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
                f"{WHO}: training_step compares the labels with what it computed, as a metric does. It reads each image three"
                " times, as it is and in two versions, so such a figure of training batches is of all three; validation is not"
                " changed."
            )
        return output

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "divergence": self._divergence}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "divergence": float(self._divergence)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._divergence = state_dict["divergence"]
