"""TransMix: CutMix's pixels, with labels by what a transformer's class token attends to (Chen et al. 2022)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core._needs.needs import DIFFERS, Part, Reasons
from lightning_eff._core._targets.calls import Change, TargetCall, mixed
from lightning_eff._core.passes import loss_of, unseen
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation._arguments import check_number, no_mixing
from lightning_eff.data.augmentation._mixing import Mixing
from lightning_eff.data.augmentation.mixing._pasting import cut_mix, own_share, pasted
from lightning_eff.data.augmentation.mixing._reading import Reading, grid_of

WHO = "TransMix"
_MOST_BESIDE = 8  # tokens in front of the patches: class tokens, a distillation token, registers
_FEWER = "the attention that is read must be to all patches, at their places"


def attended_share(weights: Tensor, own: Tensor, grid: tuple[int, int]) -> Tensor:
    """``lambda = A . down(M)``: the share of the class token's attention that goes to each image's own pixels, (B,).

    ``down`` takes the mean of ``M`` over each patch, which is exact where a box's border cuts one; for boxes of whole patches
    it is the nearest pixel's value, which the paper takes.

    Args:
        weights: ``A``, (B, h w), of the patches in rows, not negative; they are made to sum to one.
        own: ``M``, (B, H, W) or (1, H, W), true where pixels are an image's own.
        grid: h and w.
    """
    down = F.adaptive_avg_pool2d(own.to(weights.device, torch.float32)[:, None], grid).flatten(1)
    weights = weights.float()
    return (weights * down).sum(dim=1) / weights.sum(dim=1)


def _pointless(profile: RunProfile) -> str | None:
    return no_mixing(profile) or (None if profile.num_blocks > 1 else "there are no blocks that could attend")


def _by_area(technique: "TransMix") -> Mapping[str, Callback]:
    names = ("alpha", "prob", "until", "per_sample", "keys", "labels")
    settings = {name: getattr(technique, name) for name in names}
    return (
        {} if technique.neutral or technique.attention == 0 else {"labels by area": TransMix(attention=0.0, **settings)}
    )


class TransMix(Mixing):
    """Train on CutMix's images, and on both labels by the attention that the class token pays to either image's pixels.

    Images are made as CutMix makes them, number for number. While the step runs, the last attention before the loss is read:
    ``A``, the weights of the class token's query on the patches, the mean over heads, that sum to one. With the mask ``M`` of
    an image's own pixels, ``lambda = A . down(M)``, and the loss is ``lambda L(y_i) + (1 - lambda) L(y_j)``. No gradient goes
    through ``lambda``. The authors' code takes the mean of this and the area's share: ``attention=0.5``.

    Fused attention stays fused: from its queries and keys the one row is computed again beside it, which is cheap. Read are
    ``F.scaled_dot_product_attention``, by whatever name (Hugging Face's "sdpa" among them), ``nn.MultiheadAttention`` with
    ``need_weights=False``, and a softmax of scores (B, H, L, S) that is written by hand. The class token is the first of up to
    8 tokens in front of the patches, which are square and lie in rows. Models that take the patches' mean have none, and those
    with windows no attention to all patches: they are refused at the first batch.

    ``training_step`` goes on to take integer labels, those of the larger area, which is not always the larger share; a metric
    that it computes of them is told once. Labels are one of each image. What chooses samples by their loss scores the mixtures,
    by these shares. A step in which other techniques pass over all blocks goes by area. Where several techniques mix, each
    batch is mixed by one of them.

    It regularises: it costs little time at each step, makes training fit more slowly, and pays over many epochs, on vision
    transformers alone. Early in training attention says nothing yet.

    Logged: ``share``, the mean area of the other images in the last micro-batch, ``attended``, the mean weight of their labels
    (0 where nothing was mixed), and ``milliseconds``, what it took of the host to make the images.

    Args:
        alpha: of the Beta distribution of CutMix's areas, > 0; 1 draws them evenly.
        attention: how much of ``lambda`` attention says, in [0, 1]; the rest is the area's share. 1 is the paper's rule, 0.5
            its code's, 0 is CutMix.
        prob: the chance of a micro-batch to be mixed, in [0, 1]; 0 is plain training.
        until: the share of the budget in [0, 1] from which on batches are left alone; 0 is plain training.
        per_sample: draw a box for each image instead of one for the micro-batch.
        keys: names or positions of the images (B, C, H, W) of floating point; None takes all such tensors.
        labels: names or positions of the labels in the batch; None looks for what the step's losses have as targets.

    Raises:
        ValueError: if an argument is out of its range; at setup, for ``until`` below 1 in a run without an end; at the first
            batch, before any weight has changed, if it holds no images of floating point, or labels that are no classes, and
            one of each image, if the step's loss on labels cannot be seen, or if no attention of a class token to patches is.

    Sources:
        Chen et al. 2022, arXiv:2111.09833.
    """

    saves: ClassVar[str] = "nothing of a step: it regularises, for a better end of long training"
    paper: ClassVar[str] = "Chen et al. 2022, arXiv:2111.09833"
    constraints: ClassVar[str] = (
        "automatic optimization; vision transformers with a class token, not compiled; images (B, C, H, W) of floating point;"
        " one class label of each; a loss of torch.nn.functional"
    )
    refuses: ClassVar[Reasons] = {Part.TENSOR: DIFFERS}
    survey: ClassVar[Survey | None] = Survey("data augmentation (TransMix)", shen="3.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"attention": Choice((0.5, 1.0)), "until": Choice((0.8, 1.0))}, _pointless
    )
    control: ClassVar[Control] = Control(
        "no augmentation: the baseline for as many seconds; and CutMix, whose labels go by area",
        _by_area,
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("PatchDropout", "PartialTokenTraining", "TokenMerging"), _FEWER),
        "AttentionWindowWarmup": _FEWER,
        **dict.fromkeys(("Linformer", "Fastformer"), "what it attends to are no patches"),
        "DiffAugment": "it shifts images within the step, and the mask of their pixels stays where it was",
        "RegionalCompilation": "compiled code hides the blocks' attention, which is read",
        "SAF": "a mixture's scores would be held to those of another mixture some epochs before",
    }
    larger_first: ClassVar[bool] = False

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        attention: float = 1.0,
        prob: float = 1.0,
        until: float = 1.0,
        per_sample: bool = False,
        keys: Sequence[str | int] | None = None,
        labels: Sequence[str | int] | None = None,
    ) -> None:
        check_number(alpha, who=WHO, name="alpha", low=0, high=float("inf"), what="of Beta(alpha, alpha), above 0")
        if alpha == 0:
            raise ValueError(
                f"{WHO}({alpha=}): expected a number above 0; 1 draws areas evenly. prob=0 is plain training."
            )
        check_number(attention, who=WHO, name="attention", low=0, high=1, what="how much of lambda attention says")
        super().__init__(prob=prob, until=until, keys=keys, labels=labels)
        self.alpha = alpha
        self.attention = attention
        self.per_sample = per_sample

    @override
    def _reset(self) -> None:
        super()._reset()
        self._beside: int | None = None  # tokens in front of the patches
        self._own: Tensor | None = None  # of the batch that is mixed
        self._reading: Reading | None = None
        self._step: Step | None = None
        self._attended: float | Tensor = 0.0

    @override
    def detach(self, session: Session) -> None:
        self._own, self._reading, self._step = None, None, None

    # -- the attention

    @override
    def look(self, step: Step, batch: Any) -> None:
        """Whether the last attention before the loss is that of a class token to patches, and how many tokens stand before."""
        images = self.inputs(batch, self._targets.labels(step, batch))[0]
        reading = Reading(WHO)

        def around(run: Proceed, given: Any) -> Any:
            with reading:
                return run(given)

        mend = "Take the technique out, or train with CutMix, whose labels go by area."
        step.forward_only(batch, len(images), around, transform=False)
        weights = reading.weights()
        if weights is None and self._may_rest():  # all blocks rest in this very step; evaluation runs them
            with unseen(self.session), torch.enable_grad(), reading:
                loss_of(self.session, batch, step.batch_idx, whole=False)
            weights = reading.weights()
        if weights is None:
            raise ValueError(
                f"{WHO}: saw no attention in training_step; expected calls of F.scaled_dot_product_attention, a"
                " softmax of scores (B, H, L, S), or nn.MultiheadAttention with need_weights=False, outside of compiled code."
                f" {mend}"
            )
        size, tokens = weights.shape
        if size != len(images):
            raise ValueError(
                f"{WHO}: the last attention of training_step is of {size} sequences for {len(images)} images, as in windows;"
                f" expected one of each. {mend}"
            )
        side = (images.shape[-2], images.shape[-1])
        for beside in range(1, _MOST_BESIDE + 1):
            grid = grid_of(tokens - beside, side)
            if grid is not None and grid[0] > 1 and side[0] % grid[0] == 0:
                self._beside = beside
                return
        raise ValueError(
            f"{WHO}: the last attention of training_step is to {tokens} tokens, which are no grid of square patches of images"
            f" of {side[0]} x {side[1]} pixels behind 1 to {_MOST_BESIDE} other tokens; expected a class token in front of the"
            f" patches. {mend}"
        )

    def _may_rest(self) -> bool:
        """Whether other techniques may pass over all blocks in a step."""
        return any(technique.drops_blocks for technique in self.session.working)

    # -- the mixtures

    @override
    def generator(self, step: Step) -> Generator:
        """That of CutMix, so that both draw the same."""
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
        self._own, self._attended, self._step = None, 0.0, step
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
                self._attended = 1 - mine.mean()
            return mixed(mine, 1 - mine)(call)

        return change

    def _by_attention(self, call: TargetCall, area: Tensor) -> Tensor:
        """``lambda`` of each of the batch's images, (B,), that a loss call is about; other images keep their area's share."""
        assert (
            self._reading is not None and self._own is not None and self._beside is not None and self._step is not None
        )
        weights = self._reading.weights()
        if weights is None and self._may_rest():  # no block ran, and nothing says otherwise
            return area
        samples = call.element_samples.reshape(len(call.element_samples), -1)[:, 0]
        height, width = self._own.shape[-2:]
        if weights is not None and len(weights) == self._step.versions * len(samples):
            weights = weights[: len(samples)]  # of several versions of the images, the plain ones come first
        grid = None if weights is None else grid_of(weights.shape[1] - self._beside, (height, width))
        if weights is None or grid is None or len(weights) != len(samples):
            got = "none" if weights is None else f"one of {len(weights)} sequences to {weights.shape[1]} tokens"
            raise ValueError(
                f"{WHO}: before a loss call on {len(samples)} labels the last attention was {got}; expected one of each to"
                f" square patches and {self._beside} tokens in front of them, as in the first batch. Let the last block compute"
                " all tokens, or take the technique out."
            )
        own = self._own if len(self._own) == 1 else self._own[samples]
        found = area.to(weights.device, copy=True)
        by_area = found[samples]
        found[samples] = (
            self.attention * attended_share(weights[:, self._beside :], own, grid) + (1 - self.attention) * by_area
        )
        return found

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "attended": self._attended}
