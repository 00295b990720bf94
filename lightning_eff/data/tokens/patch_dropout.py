"""PatchDropout: train on a random part of each image's patches (Liu et al. 2022; the saving of MAE's and FLIP's encoders)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_eff._core._tokens.entering import EnteringTokens
from lightning_eff._core._tokens.inputs import Kept
from lightning_eff._core._tokens.window import At
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data.tokens._draw import draw
from lightning_eff.data.tokens._patches import Layout, find_layout, keep, no_patches
from lightning_eff.data.tokens._share import Share

WHO = "PatchDropout"


def kept_patches(count: int, ratio: float) -> int:
    """``N - floor(r N)`` of N patches, at least 1."""
    return max(count - int(ratio * count + 1e-9), 1)  # 0.29 * 100 is 29 less a rounding error


class PatchDropout(Technique):
    """Drop a random part of each image's patches once, as they enter the network; all blocks compute the rest alone.

    Of N patches ``N - floor(r N)`` are kept, other ones of each image at each step. They are taken from the hidden state that
    the first block gets, after patches have been embedded and their positions added, so each carries its own position; what
    the module hands to every block for all tokens (masks, rotary tables) is cut for each. Tokens that come of no image, such
    as a class token and registers, are always kept, in their places: they are found by a trial with other images.

    What comes after the blocks sees the kept tokens alone: a head on class tokens works as it did, one on the mean of the
    patches takes the mean of those that are kept. That this is what the head does is tried with the first batch, too: dense
    prediction, reconstruction, sums and flattened patches are refused, as are blocks that go by where tokens stand (windows
    as Swin's, relative biases as BEiT's).

    Validation, test and prediction see all patches. From the share ``until`` of the budget on training does so too, as FLIP
    ends. Draws follow from the seed, the step, the micro-batch and the rank: a resumed run draws what the undisturbed one did.

    On the rings, a small ViT for half a minute of one CPU thread, it came to 1.32 times the baseline's speed; three seeds do
    not show that this is more than chance (0.84 to 2.07; docs/evidence.md).

    Logged: ``kept``, the patches of an image that the last step saw, and ``share``, their share of all.

    Args:
        ratio: the share ``r`` of the patches that are dropped, in [0, 1); 0 is plain training. MAE drops 0.75, FLIP 0.5.
        until: the share of the budget in [0, 1] from which on all patches are seen; 0 is plain training.
        per_image: draw other patches of each image; where False, the same places in all images of a micro-batch, which
            needs no tables and masks of each image's own.
        layers: the blocks, as a path, a pattern (``"block_*"``) or a list of paths; None finds the longest stack.

    Raises:
        ValueError: if an argument is out of its range; at setup, if there is no stack; at the first batch, before any weight
            has changed, if it holds no images, none of the blocks' tokens comes of them, a block or what comes after the
            blocks cannot do without some, or ``ratio`` drops none of so few.

    Sources:
        Liu et al. 2022, arXiv:2208.07220; He et al. 2021, arXiv:2111.06377 (MAE); Li et al. 2022, arXiv:2212.00794 (FLIP).
    """

    saves: ClassVar[str] = "compute and activations of the dropped patches in every block: half at ratio 0.5"
    paper: ClassVar[str] = "Liu et al. 2022, arXiv:2208.07220"
    constraints: ClassVar[str] = (
        "automatic optimization; images; a stack of blocks on (B, T, D) with positions added before it or handed in; a head on"
        " class tokens or on the mean of the patches"
    )
    survey: ClassVar[Survey | None] = Survey("token masking (MAE, FLIP)", zhuang="2.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"ratio": Uniform(0.25, 0.75), "until": Choice((0.8, 1.0))}, no_patches
    )
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero; and smaller images throughout"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "RandomLTD": "both choose the tokens that blocks compute, and what one drops the other cannot draw from"
    }
    needs_budget: ClassVar[bool] = True

    def __init__(
        self,
        ratio: float = 0.5,
        *,
        until: float = 1.0,
        per_image: bool = True,
        layers: str | Sequence[str] | None = None,
    ) -> None:
        if not 0.0 <= ratio < 1.0:
            raise ValueError(
                f"{WHO}({ratio=}): expected a share of the patches in [0, 1), that which is dropped. 0.5 halves the compute;"
                " 0 is plain training."
            )
        if not 0.0 <= until <= 1.0:
            raise ValueError(
                f"{WHO}({until=}): expected a fraction of the budget in [0, 1], from which on all patches are seen."
            )
        self.ratio = ratio
        self.until = until
        self.per_image = per_image
        self.layers = layers
        self._reset()

    def _reset(self) -> None:
        self._layout: Layout | None = None
        self._share = Share()  # of patches
        self._where = ""

    @property
    @override
    def neutral(self) -> bool:
        return self.ratio == 0.0 or self.until == 0.0

    @override
    def attach(self, session: Session) -> None:
        self._reset()
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
                f"{WHO}(ratio={self.ratio:g}): {self._where} gets {count} patches of an image, of which none would be dropped;"
                " expected one or more. Raise ratio, or take the technique out."
            )

    def _choose(self, at: At) -> Kept | None:
        assert self._layout is not None, "it was found with the first batch"
        size, tokens = at.hidden.shape[:2]
        count = tokens - self._layout.before - self._layout.after
        kept = kept_patches(count, self.ratio)
        self._share.note(kept, count)
        if kept == count:  # in a smaller image
            return None
        patches = draw(count, kept, at.generator(), rows=size if self.per_image else 1)
        index = keep(patches, self._layout, tokens)
        return Kept(index if self.per_image else index[0])

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        self._share.end_batch()

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**self._share.report()}

    @override
    def summary(self) -> str:
        if not self._share.batches:
            return "no step taken"
        apart = 0 if self._layout is None else self._layout.before + self._layout.after
        beside = f", beside {apart} other token{'s' * (apart != 1)}" if apart else ""
        return f"{self._share.mean:.1%} of patches seen on average by {self._where}{beside}"

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._share.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._share.load_state_dict(state_dict)
