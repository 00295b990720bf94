"""TransMix: CutMix with labels weighted by the attention of the class token (Chen et al. 2022)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Fraction
from lightning_eff._core._needs.needs import DIFFERS, Part, Reasons
from lightning_eff._core._targets.calls import Change, TargetCall, mixed
from lightning_eff._core.passes import loss_of, unseen
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation._arguments import Alpha, Keys, Probability, Until, no_mixing
from lightning_eff.data.augmentation._mixing import Mixing, with_settings
from lightning_eff.data.augmentation.mixing._pasting import cut_mix, own_share, pasted
from lightning_eff.data.augmentation.mixing._reading import Reading, grid_of

WHO = "TransMix"
_MOST_BESIDE = 8  # tokens in front of the patches: class token, distillation token, registers
_FEWER = "attention is read, and must cover all patches at their positions"


def attended_share(weights: Tensor, own: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return ``lambda = A . down(M)``: the share of the class token's attention on each image's own pixels, (B,).

    ``down`` averages ``M`` over each patch. For boxes of whole patches this equals nearest-neighbour sampling, which the paper
    uses. It is exact also if the border of a box cuts a patch.

    Args:
        weights: ``A``, (B, h w), nonnegative weights of the patches in row order. They are normalised to sum to one.
        own: ``M``, (B, H, W) or (1, H, W), true for an image's own pixels.
        grid: h and w.
    """
    down = F.adaptive_avg_pool2d(own.to(weights.device, torch.float32)[:, None], grid).flatten(1)
    weights = weights.float()
    return (weights * down).sum(dim=1) / weights.sum(dim=1)


def _pointless(profile: RunProfile) -> str | None:
    return no_mixing(profile) or (None if profile.num_blocks > 1 else "there are no attention blocks")


def _by_area(technique: "TransMix") -> Mapping[str, Callback]:
    if technique.neutral or technique.attention == 0:
        return {}
    return {"labels by area": with_settings(technique, attention=0.0)}


class TransMix(Mixing):
    """Mix images as CutMix does, and weight both labels by the attention that the class token pays to each image.

    Images are made exactly as by :class:`CutMix`. During the step the last attention before the loss is read. ``A`` are its
    weights from the class token to the patches, averaged over heads and normalised to sum to one. With the mask ``M`` of an
    image's own pixels, ``lambda = A . down(M)``, and the loss is ``lambda L(y_i) + (1 - lambda) L(y_j)``. No gradient flows
    through ``lambda``. The authors' code uses the mean of this value and the share of the area, which is ``attention=0.5``.

    Use it for vision transformers with a class token when you train for many epochs. It costs little time per step, and the
    training loss falls more slowly. Early in training, attention carries little information.

    It reads ``F.scaled_dot_product_attention`` (including Hugging Face's "sdpa"), ``nn.MultiheadAttention`` with
    ``need_weights=False``, and a hand-written softmax of scores (B, H, L, S). Fused attention stays fused, and the one row of
    weights is recomputed, which is cheap. The class token must be the first of up to 8 tokens in front of square patches in row
    order. Models that average the patches, or attend within windows, raise an error at the first batch.

    There must be one label per image. ``training_step`` still receives integer labels, those of the larger area, which may have
    the smaller weight. Metrics that it computes from the labels are too low, and a warning says so. Techniques that choose
    samples by their loss see the mixtures, with these weights. If other techniques skip all blocks in a step, its weights are
    those of the area. If several techniques mix, they take turns, one per batch.

    It logs ``share``, the mean area of the other images in the last micro-batch. ``attended`` is the mean weight of their
    labels (0 if nothing was mixed), and ``milliseconds`` is the host time of the mixing.

    Args:
        alpha: the parameter of the Beta distribution of CutMix's areas. 1 draws them uniformly.
        attention: the weight of attention in the label weights. The rest is the weight of the area. 1 is the paper's rule, 0.5
            that of its code, 0 is CutMix.
        prob: the probability that a micro-batch is mixed. 0 is plain training.
        until: the fraction of the budget after which batches are left unchanged. 0 is plain training.
        per_sample: whether each image has its own box. By default there is one box per micro-batch.
        keys: the names or positions of the images in the batch, floating point, shape (B, C, H, W). None takes all such
            tensors.
        labels: the names or positions of the labels in the batch. None takes the tensors that are targets of the step's losses.

    Raises:
        ValueError: for a value out of range. At setup, if ``until`` is below 1 and the run has no end. At the first batch,
            before any weight changes, if images are not floating point, or labels are not one class per image. Also if no loss
            call on the labels is visible, or no attention from a class token to patches.

    Example:
        >>> trainer = L.Trainer(max_epochs=100, callbacks=[TransMix(alpha=1.0)])

    References:
        Chen et al. 2022, "TransMix: Attend to Mix for Vision Transformers", arXiv:2111.09833.
    """

    paper = "Chen et al. 2022, arXiv:2111.09833"
    constraints = f"{Mixing.constraints}, and a vision transformer with a class token, not compiled"
    refuses: ClassVar[Reasons] = {Part.TENSOR: DIFFERS}
    search_space = SearchSpace({"attention": Choice((0.5, 1.0)), "until": Choice((0.8, 1.0))}, _pointless)
    control = Control(
        "the baseline without augmentation, trained for the same time, and CutMix, which weights labels by area",
        _by_area,
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("PatchDropout", "PartialTokenTraining", "TokenMerging"), _FEWER),
        "AttentionWindowWarmup": _FEWER,
        **dict.fromkeys(("Linformer", "Fastformer"), "it replaces attention to patches, which is read"),
        "DiffAugment": "it shifts images within the step, and the mask of their pixels does not move with them",
        "RegionalCompilation": "compiled code hides the attention of the blocks, which is read",
        **Mixing.conflicts,
    }
    larger_first: ClassVar[bool] = False
    logged = ("attended",)

    def __init__(
        self,
        alpha: Alpha = 1.0,
        *,
        attention: Annotated[float, Fraction()] = 1.0,
        prob: Probability = 1.0,
        until: Until = 1.0,
        per_sample: bool = False,
        keys: Keys = None,
        labels: Keys = None,
    ) -> None:
        super().__init__(alpha=alpha, prob=prob, until=until, per_sample=per_sample, keys=keys, labels=labels)
        self.attention = attention

    @override
    def _reset(self) -> None:
        super()._reset()
        self._beside: int | None = None  # tokens in front of the patches
        self._own: Tensor | None = None  # the mask of the current batch
        self._reading: Reading | None = None
        self._step: Step | None = None

    @override
    def detach(self, session: Session) -> None:
        self._own, self._reading, self._step = None, None, None

    # -- the attention

    @override
    def look(self, step: Step, batch: Any) -> None:
        """Check that the last attention before the loss is that of a class token, and count the tokens before the patches."""
        images = self.inputs(batch, self._targets.labels(step, batch))[0]
        reading = Reading(WHO)

        def around(run: Proceed, given: Any) -> Any:
            with reading:
                return run(given)

        mend = "Use CutMix instead, which weights labels by area."
        step.forward_only(batch, len(images), around, transform=False)
        weights = reading.weights()
        if weights is None and self._may_rest():  # all blocks are skipped in this step, but evaluation runs them
            with unseen(self.session), torch.enable_grad(), reading:
                loss_of(self.session, batch, step.batch_idx, whole=False)
            weights = reading.weights()
        if weights is None:
            raise ValueError(
                f"{WHO}: saw no attention in training_step. It reads F.scaled_dot_product_attention, a softmax of scores"
                f" (B, H, L, S) and nn.MultiheadAttention with need_weights=False, outside of compiled code. {mend}"
            )
        size, tokens = weights.shape
        if size != len(images):
            raise ValueError(
                f"{WHO}: the last attention of training_step is of {size} sequences for {len(images)} images, as in windows."
                f" {mend}"
            )
        side = (images.shape[-2], images.shape[-1])
        for beside in range(1, _MOST_BESIDE + 1):
            grid = grid_of(tokens - beside, side)
            if grid is not None and grid[0] > 1 and side[0] % grid[0] == 0:
                self._beside = beside
                return
        raise ValueError(
            f"{WHO}: the last attention of training_step is to {tokens} tokens, which are no grid of square patches"
            f" of images of {side[0]} x {side[1]} pixels behind a class token. {mend}"
        )

    def _may_rest(self) -> bool:
        """Return whether other techniques may skip all blocks that have attention in a step."""
        return any(technique.drops_blocks for technique in self.session.working)

    # -- the mixtures

    @override
    def generator(self, step: Step) -> Generator:
        """Return the generator of CutMix, so that both draw the same."""
        return self.session.generator("CutMix", step.global_step, step.batch_idx, self.session.rank)

    @override
    def mix(self, inputs: list[Tensor], partner: Tensor, generator: Generator) -> tuple[list[Tensor], Tensor]:
        side = (inputs[0].shape[-2], inputs[0].shape[-1])
        size = len(partner)
        own = cut_mix(self.alpha, size if self.per_sample else 1, side, generator)
        self._own = own.to(inputs[0].device)
        return [pasted(x, partner, self._own) for x in inputs], own_share(own).float().expand(size)

    @override
    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        self._own, self._step = None, step
        return super()._link(step, batch, lambda given: self._read_within(given, proceed))

    def _read_within(self, batch: Any, proceed: Proceed) -> Any:
        if self._own is None or self.attention == 0:
            return proceed(batch)
        self._reading = Reading(WHO)
        with self._reading:
            return proceed(batch)

    @override
    def weighing(self, share: Tensor) -> Change:
        def change(call: TargetCall) -> Tensor:
            mine = share if self.attention == 0 else self._by_attention(call, share)
            if call.input.requires_grad:
                self._figures["attended"] = 1 - mine.mean()
            return mixed(mine, 1 - mine)(call)

        return change

    def _by_attention(self, call: TargetCall, area: Tensor) -> Tensor:
        """Return ``lambda`` of each image of the batch, (B,). Images outside of this loss call keep the share of their area."""
        assert (
            self._reading is not None and self._own is not None and self._beside is not None and self._step is not None
        )
        weights = self._reading.weights()
        if weights is None and self._may_rest():  # no block ran
            return area
        samples = call.element_samples.reshape(len(call.element_samples), -1)[:, 0]
        height, width = self._own.shape[-2:]
        if weights is not None and len(weights) == self._step.versions * len(samples):
            weights = weights[: len(samples)]  # of several versions of the images, the plain ones come first
        grid = None if weights is None else grid_of(weights.shape[1] - self._beside, (height, width))
        if weights is None or grid is None or len(weights) != len(samples):
            got = "none" if weights is None else f"one of {len(weights)} sequences to {weights.shape[1]} tokens"
            raise ValueError(
                f"{WHO}: before a loss call on {len(samples)} labels the last attention was {got}, unlike in the first batch"
                f" (square patches behind {self._beside} tokens). Let the last block compute all tokens, or remove {WHO}."
            )
        own = self._own if len(self._own) == 1 else self._own[samples]
        found = area.to(weights.device, copy=True)
        by_area = found[samples]
        found[samples] = (
            self.attention * attended_share(weights[:, self._beside :], own, grid) + (1 - self.attention) * by_area
        )
        return found
