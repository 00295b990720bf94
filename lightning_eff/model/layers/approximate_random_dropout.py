"""ApproximateRandomDropout: drop hidden units by regular patterns, and do not compute them (Song et al. 2018).

``_row_dropout.patterns`` holds the rule: patterns that keep one of every ``period`` units, and their probabilities.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Alias, Count, Fraction
from lightning_eff._core._branches.ffns import FFN, FFNs, Part
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core.search_space import Choice, SearchSpace, needs_blocks
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique
from lightning_eff.model.layers._row_dropout.looking import found
from lightning_eff.model.layers._row_dropout.patterns import draw, probabilities
from lightning_eff.model.layers._row_dropout.thinning import Thinned

WHO = "ApproximateRandomDropout"


class ApproximateRandomDropout(Technique):
    """Drop hidden units of feed-forward networks in regular patterns, and compute only the kept ones.

    Plain dropout computes all activations and then multiplies some by zero. Here each network draws a pattern for each batch:
    a period i, and which one of every i neighbouring units is kept. The products of the step, forward and backward, then use
    1/i of the hidden units, and a kept unit counts i times. Periods from 1 to ``most`` are drawn from the distribution of
    largest entropy that drops a fraction ``rate`` of the units on average. Each unit is kept with probability ``1 - rate``.
    The expected output of a network, before the layers it feeds, is the same as under plain dropout. **All samples of a batch
    share a pattern**: this saves the products, and makes the noise coarser than that of dropout.

    Networks ``W_2 f(W_1 x)`` and their gated forms are found on the first batch. The callback verifies that each computes the
    same with half of its units as with the other units' weights set to zero. Evaluation, parameters and checkpoints are those
    of the plain module. Weights of dropped units get a gradient of zero, as under dropout. The module's own dropout stays
    active: set it to zero to avoid dropping twice.

    Use it for networks with wide feed-forward layers that need dropout, and measure the step time, which was not measured
    here. The paper reports 1.2 to 2.2 times as fast training of perceptrons. In a transformer, feed-forward networks take
    about 60 % of a step, and one of the sliced weights is copied for its product. It logs ``kept``, the fraction of hidden
    units in the last batch, and ``networks``, the number of networks.

    Args:
        rate: the fraction of hidden units to drop on average, at most ``1 - 1 / most``. 0 is plain training. Also accepted as
            ``p``.
        most: the longest period.
        ffn: the feed-forward networks by name. Each is a list of its linear layers that ends with the one back to the
            residual stream; ``*`` stands for a block's number: ``[["blocks.*.mlp.0", "blocks.*.mlp.2"]]``. None finds them.

    Raises:
        ValueError: for a value out of range. On the first batch, before any weight has changed, if no feed-forward network is
            found, or one has fewer units than ``most`` or does not treat each unit separately.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[ApproximateRandomDropout(0.5)])

    References:
        Song et al. 2018, "Approximate Random Dropout", arXiv:1805.08939.
    """

    saves = "products of feed-forward networks, forward and backward, for the dropped hidden units"
    paper = "Song et al. 2018, arXiv:1805.08939"
    constraints = "feed-forward networks whose layers are called as modules"
    search_space = SearchSpace({"rate": Choice((0.25, 0.5, 0.7))}, needs_blocks)
    control = Control(
        "the baseline for the same time, and a baseline with a fraction 1 - rate of the hidden units throughout"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "CompoundGrowth": "both set the number of hidden units of feed-forward networks",
        "RegionalCompilation": "it would recompile blocks for each pattern, because their widths change",
        "KFAC": "its factors cover all hidden units, and a step computes only some",
        **dict.fromkeys(("LowRankLinear", "ButterflyLinear"), "its factors' channels would be taken for hidden units"),
        **dict.fromkeys(
            ("Fixup", "LoRA"), "it adds scalars or factors to linear layers, which hides feed-forward networks"
        ),
        **dict.fromkeys(
            ("FP8Precision", "INT8Precision", "S2FP8Precision", "Wang2018FP8Precision"),
            "the plugin computes linear layers itself and would use the whole weight",
        ),
    }
    needs_automatic_optimization: ClassVar[bool] = False
    sparse_gradients: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"rate": 0.0}

    def __init__(
        self,
        rate: Annotated[float, Fraction(below=1), Alias("p")] = 0.5,
        *,
        most: Annotated[int, Count(at_least=2)] = 4,
        ffn: FFNs | None = None,
    ) -> None:
        if rate > 1.0 - 1.0 / most + 1e-12:
            raise ValueError(
                f"{WHO}({rate=}, {most=}): periods of {most} drop at most {1.0 - 1.0 / most:.3g} of the units. Give a smaller"
                " rate or a larger `most`."
            )
        self.rate, self.most = float(rate), most
        self.ffn = ffn

    def _reset(self) -> None:
        self._thinned: Thinned | None = None
        self._learnt: list[Any] = []  # the networks that a checkpoint names
        self._kept = 1.0
        self._count = 0

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
        if self._thinned is None:  # the step skips this batch
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
            rank_zero_info(f"{WHO}: drops hidden units in {len(ffns)} feed-forward networks, such as {ffns[0]}.")

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
        return f"dropped {self.rate:.0%} of the hidden units of {self._count} feed-forward networks on average"
