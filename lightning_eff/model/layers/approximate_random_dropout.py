"""Approximate random dropout: hidden units are dropped by regular patterns, and not computed (Song et al. 2018).

The rule, patterns that keep one of each ``period`` units and their probabilities, stands in ``_row_dropout.patterns``.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._branches.ffns import FFN, Part, check_names
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, needs_blocks
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique
from lightning_eff.model.layers._row_dropout.looking import found
from lightning_eff.model.layers._row_dropout.patterns import draw, probabilities
from lightning_eff.model.layers._row_dropout.thinning import Thinned

WHO = "ApproximateRandomDropout"
_FP8 = ("FP8Precision", "INT8Precision", "S2FP8Precision", "Wang2018FP8Precision")
_FACTORS = ("LowRankLinear", "ButterflyLinear")
_BESIDE = ("Fixup", "LoRA")


class ApproximateRandomDropout(Technique):
    """Drop hidden units of feed-forward networks by regular patterns, and compute products with those that are kept alone.

    Plain dropout multiplies activations by zeros after they were computed. Here each network draws a pattern for each batch:
    a period i, and of each i units that lie side by side the one that is kept. The products of the step, forward and backward,
    then have an i-th of the hidden units, and a kept unit counts i times. Periods from 1 to ``most`` are drawn with the
    probabilities of the largest entropy for which ``rate`` of all units are dropped on average. Each unit is kept with
    probability 1 - rate, and the expectation over patterns of what a network returns, before what it feeds, is that of plain
    dropout, which is the network without any. **All samples of a batch share a pattern**: that is what saves the products, and
    makes the noise coarser than dropout's.

    A network ``W_2 f(W_1 x)`` and its gated forms are found in what the loss is computed from, on the run's first batch, and
    seen there to return with half of the units what it returns with the others' weights at zero. Evaluation is the plain
    module's, and so are parameters and checkpoints. Weights of dropped units have a gradient of zero, as under dropout.
    Dropout that the module has there itself goes on; set it to zero, so that it is not dropped twice.

    The source reports 1.2 to 2.2 times as fast training of perceptrons. In a transformer the feed-forward networks are some
    60 % of a step, and one of the sliced weights is copied for its product: measure before you believe.
    No time of it was measured here.

    Logged: ``kept``, the share of hidden units that the last batch was computed with; ``networks``, how many.

    Args:
        rate: of hidden units that are dropped on average, in [0, 1 - 1 / most]; 0 is plain training.
        most: the longest period, an integer >= 2.
        ffn: feed-forward networks by name, each a list of its maps that ends with the one back to the stream; ``*`` stands
            for a block's number: ``[["blocks.*.mlp.0", "blocks.*.mlp.2"]]``. None finds them.

    Raises:
        ValueError: if an argument is out of its range; on the first batch, before any weight has changed, if no feed-forward
            network is found, with what was found in its place, one has fewer units than ``most``, or does not treat each
            unit by itself.

    Sources:
        Song et al. 2018, arXiv:1805.08939.
    """

    saves: ClassVar[str] = "products of feed-forward networks, forward and backward, of the dropped hidden units"
    paper: ClassVar[str] = "Song et al. 2018, arXiv:1805.08939"
    constraints: ClassVar[str] = "feed-forward networks called as modules"
    survey: ClassVar[Survey | None] = Survey("approximate random dropout", shen="4.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"rate": Choice((0.25, 0.5, 0.7))}, needs_blocks)
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds, and one whose hidden units are 1 - rate of them throughout"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "CompoundGrowth": "both say how many hidden units feed-forward networks have",
        "RegionalCompilation": "blocks whose widths change would be compiled anew for each pattern",
        "KFAC": "its factors are of all hidden units, of which a step has some",
        **dict.fromkeys(_FACTORS, "its maps are factors, whose channels would be taken for hidden units"),
        **dict.fromkeys(
            _BESIDE, "its maps have scalars or factors beside them, and are not seen to be feed-forward networks"
        ),
        **dict.fromkeys(
            _FP8, "its maps run in an arithmetic of their own, which does not see what is kept of a weight"
        ),
    }
    needs_automatic_optimization: ClassVar[bool] = False
    sparse_gradients: ClassVar[bool] = True

    def __init__(self, rate: float = 0.5, *, most: int = 4, ffn: Sequence[Sequence[str]] | None = None) -> None:
        if not isinstance(most, int) or isinstance(most, bool) or most < 2:
            raise ValueError(f"{WHO}({most=}): expected an integer >= 2, the longest period.")
        number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not number or not 0.0 <= rate <= 1.0 - 1.0 / most + 1e-12:
            raise ValueError(
                f"{WHO}({rate=}, {most=}): expected a rate in [0, {1.0 - 1.0 / most:.3g}], of which a period of {most} drops"
                " most. Give a smaller rate or a larger most."
            )
        check_names(ffn, who=WHO)
        self.rate, self.most = float(rate), most
        self.ffn = None if ffn is None else [list(names) for names in ffn]
        self._reset()

    def _reset(self) -> None:
        self._thinned: Thinned | None = None
        self._learnt: list[Any] = []  # the networks of a checkpoint
        self._kept = 1.0
        self._count = 0

    @property
    @override
    def neutral(self) -> bool:
        return self.rate == 0.0

    @override
    def attach(self, session: Session) -> None:
        self._reset()

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        if self._learnt:
            ffns = [FFN(hidden, tuple(Part(*part) for part in parts)) for hidden, parts in self._learnt]
            self._thinned = Thinned(session.module, ffns)
        session.views.append(self._view)

    def _view(self, training: bool) -> AbstractContextManager[None]:
        return nullcontext() if self._thinned is None else self._thinned.view(training)

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        if self._thinned is None:
            self._look(session, batch, batch_idx)
        if self._thinned is None:  # the step passes over this batch
            return
        likely = probabilities(self.rate, self.most)
        numbers = session.generator(self.name(), session.trainer.global_step, batch_idx)
        patterns = self._thinned.patterns = [draw(likely, numbers) for _ in self._thinned.ffns]
        hidden = [ffn.hidden for ffn in self._thinned.ffns]
        units = sum(len(range(p.first, h, p.period)) for p, h in zip(patterns, hidden, strict=True))
        self._kept, self._count = units / sum(hidden), len(hidden)

    def _look(self, session: Session, batch: Any, batch_idx: int) -> None:
        self._thinned = on_all_ranks(
            session, lambda: found(session, batch, batch_idx, most=self.most, names=self.ffn, who=WHO)
        )
        if self._thinned is not None:
            ffns = self._thinned.ffns
            rank_zero_info(f"{WHO}: hidden units are dropped in {len(ffns)} feed-forward networks, such as {ffns[0]}.")

    @override
    def detach(self, session: Session) -> None:
        if session.fitting:
            self._learnt, self._thinned = self._ffns(), None

    def _ffns(self) -> list[Any]:
        if self._thinned is None:
            return self._learnt
        return [[ffn.hidden, [list(part) for part in ffn.parts]] for ffn in self._thinned.ffns]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"ffns": self._ffns()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._learnt = state_dict["ffns"]

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"kept": self._kept, "networks": self._count}

    @override
    def summary(self) -> str:
        return f"{self.rate:g} of the hidden units of {self._count} feed-forward networks dropped on average"
