"""PatchDropout: train on a random part of each image's patches (Liu et al. 2022)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from typing_extensions import override

from lightning_eff._core._arguments.kinds import Alias, Fraction, Layers
from lightning_eff._core._tokens.entering import EnteringTokens
from lightning_eff._core._tokens.inputs import Kept
from lightning_eff._core._tokens.window import At
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.tokens._draw import draw
from lightning_eff.data.tokens._patches import Layout, find_layout, keep, no_patches
from lightning_eff.data.tokens._share import ComputesFewerTokens, Share

WHO = "PatchDropout"


def kept_patches(count: int, ratio: float) -> int:
    """Return ``N - floor(r N)`` of N patches, at least 1."""
    return max(count - int(ratio * count + 1e-9), 1)  # 0.29 * 100 is 29 less a rounding error


class PatchDropout(ComputesFewerTokens):
    """Train on a random subset of each image's patches, dropped once before the first block.

    Of N patches, ``N - floor(r N)`` are kept, drawn anew for each image and step. They are selected from the hidden state that
    the first block receives, after patch embedding and positions, so each patch keeps its position. Masks and rotary tables
    that blocks receive are cut for each image. Tokens that do not come from the image, such as a class token and registers,
    are always kept. The first batch is used to find them.

    Use it for vision transformers whose blocks dominate the step time: a ratio of 0.5 halves the compute and the activations
    of all blocks. Validation, test and prediction see all patches, and so does training from ``until`` on, as in FLIP. On the
    rings task, a small ViT trained for half a minute on one CPU thread, it ran at 1.32 times the baseline's speed. Three seeds
    do not separate this from chance (0.84 to 2.07; docs/evidence.md).

    The head sees only the kept tokens. A head on class tokens works unchanged, and a head on the mean of the patches takes the
    mean of the kept ones. The first batch is used to check this: dense prediction, reconstruction, sums and flattened patches
    are refused, and so are blocks that depend on token positions (windows as in Swin, relative biases as in BEiT). Draws
    depend on the seed, step, micro-batch and rank, so a resumed run repeats them.

    It logs ``kept``, the patches per image in the last step, and ``share``, their fraction.

    Args:
        ratio: the fraction of the patches to drop. MAE drops 0.75, FLIP 0.5, and 0 is plain training. Also accepted as ``p``
            and ``prob``.
        until: the fraction of the budget from which on all patches are used. 0 is plain training.
        per_image: whether each image of a micro-batch gets its own draw. False uses the same places in all images, which
            needs no tables and masks per image.
        layers: the blocks, as a dotted path, a pattern (``"block_*"``) or a list of paths. None finds the longest stack.

    Raises:
        ValueError: for a value out of range. At setup, if no stack of blocks is found. At the first batch, before any weight
            changes, if there are no images, no token of the blocks comes from them, a block or the head cannot work on fewer
            tokens, or ``ratio`` would drop no patch.

    Example:
        >>> trainer = L.Trainer(max_epochs=100, callbacks=[PatchDropout(0.5, until=0.9)])

    References:
        Liu et al. 2022, "PatchDropout: Economizing Vision Transformers Using Patch Dropout", arXiv:2208.07220.
        He et al. 2021, arXiv:2111.06377 (MAE). Li et al. 2022, arXiv:2212.00794 (FLIP).
    """

    saves = "compute and activations of the dropped patches in every block: half at ratio 0.5"
    paper = "Liu et al. 2022, arXiv:2208.07220"
    constraints = (
        "needs images, a stack of blocks on (B, T, D) with positions added before it or passed to it, and a head on class"
        " tokens or on the mean of the patches; automatic optimization"
    )
    search_space = SearchSpace({"ratio": Uniform(0.25, 0.75), "until": Choice((0.8, 1.0))}, no_patches)
    control = Control(
        "the baseline for the same time with a learning rate that decays to zero; and smaller images throughout"
    )
    conflicts: ClassVar[Mapping[str, str]] = {"RandomLTD": "both choose the tokens that blocks compute"}
    needs_budget: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"ratio": 0.0, "until": 0.0}

    def __init__(
        self,
        ratio: Annotated[float, Fraction(below=1), Alias("p"), Alias("prob")] = 0.5,
        *,
        until: Annotated[float, Fraction()] = 1.0,
        per_image: bool = True,
        layers: Layers | None = None,
    ) -> None:
        self.ratio = ratio
        self.until = until
        self.per_image = per_image
        self.layers = layers

    def _reset(self) -> None:
        self._layout: Layout | None = None
        self._share = Share()  # of the patches
        self._where = ""

    @override
    def attach(self, session: Session) -> None:
        self._tokens = EnteringTokens(
            session, WHO, self._choose, per_sample=self.per_image, alike="set per_image=False", also=self._look
        )
        session.chain.add(Stage.TRANSFORM, self._link)

    @override
    def on_model(self, session: Session) -> None:
        if session.fitting:
            self._where = str(self._tokens.find(self.layers))

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if self.session.progress.u >= self.until < 1.0:
            self._share.note_all()
            return proceed(batch)
        return self._tokens.run(step, batch, proceed)

    def _look(self, step: Step, batch: Any) -> None:
        generator = self.session.generator(WHO, "patches")
        self._layout = find_layout(step, batch, self._tokens.stack, generator, who=WHO)
        count = self._tokens.longest - self._layout.before - self._layout.after
        if kept_patches(count, self.ratio) == count:
            raise ValueError(
                f"{WHO}(ratio={self.ratio:g}): {self._where} gets {count} patches per image, too few for any to be dropped."
                f" Set ratio={-(-1000 // count) / 1000} or more, or remove {WHO}."
            )

    def _choose(self, at: At) -> Kept | None:
        assert self._layout is not None, "it was found with the first batch"
        size, tokens = at.hidden.shape[:2]
        count = tokens - self._layout.before - self._layout.after
        kept = kept_patches(count, self.ratio)
        self._share.note(kept, count)
        if kept == count:  # a smaller image
            return None
        patches = draw(count, kept, at.generator(), rows=size if self.per_image else 1)
        index = keep(patches, self._layout, tokens)
        return Kept(index if self.per_image else index[0])

    @override
    def summary(self) -> str:
        if not self._share.batches:
            return "made no step"
        apart = 0 if self._layout is None else self._layout.before + self._layout.after
        others = f", and {apart} other token{'s' * (apart != 1)}" if apart else ""
        return f"{self._where} computed {self._share.mean:.1%} of the patches on average{others}"
