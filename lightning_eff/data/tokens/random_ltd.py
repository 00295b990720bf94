"""Random layerwise token dropping (random-LTD): each middle block computes random tokens (Yao et al. 2022)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction, Layers
from lightning_eff._core._tokens.inputs import Kept
from lightning_eff._core._tokens.window import At, Tokens
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control
from lightning_eff.data.tokens._draw import draw
from lightning_eff.data.tokens._share import ComputesFewerTokens, Share

WHO = "RandomLTD"


def kept_tokens(u: float, *, full: int, start: float, until: float, multiple_of: int) -> int:
    """Return ``k(u) = floor(k_0 + (T - k_0) u / until)``, ``k_0 = start T``, rounded down to a multiple; T from ``until`` on.

    Args:
        u: the used fraction of the budget, in [0, 1].
        full: T, the tokens of a sample.
        start: the fraction that is kept at ``u = 0``, in (0, 1].
        until: the fraction of the budget from which on all tokens are kept.
        multiple_of: a number of tokens, >= 1.

    Returns:
        k, at least ``multiple_of`` and at most T.
    """
    if u >= until:
        return full
    first = start * full
    target = first + (full - first) * u / until
    return min(max(int(target + 1e-9) // multiple_of, 1) * multiple_of, full)  # 0.29 * 100 is 29 less a rounding error


def _pointless(profile: RunProfile) -> str | None:
    if profile.num_blocks < 3:
        return "found no stack of three or more blocks"
    if profile.sequence_length is not None and profile.sequence_length < 32:
        return f"sequences of {profile.sequence_length} tokens are too short to drop some"
    return None


class RandomLTD(ComputesFewerTokens):
    """Train each middle block on a random subset of the tokens, which grows until all blocks see all tokens.

    Of the T tokens of a sample, each middle block computes ``k(u)`` tokens that it draws for itself at each step. The other
    tokens bypass that block unchanged. ``k`` grows linearly from ``start T`` to T at ``until``, in multiples of
    ``multiple_of``. The first and the last block compute all tokens. Tokens stay in order, and masks, positions and rotary
    tables are selected with them.

    Use it for deep transformers on long sequences. It saves about ``until (1 - start) / 2`` of the compute of the middle
    blocks, a third at the paper's settings. On the rings task it thins one block of three, which saves little, and no gain was
    measured (docs/evidence.md). Blocks that you compile yourself are recompiled for each number of tokens, unless
    ``dynamic=True``.

    Training is plain from ``until`` on, and validation, test and prediction always see all tokens. Draws depend on the seed,
    step, micro-batch and rank, so a resumed run and a recomputed block see the same tokens. Under :class:`ProgressiveStacking`,
    the last block is the last one that runs.

    It logs ``kept``, the tokens per sample that a middle block computed in the last step, and ``share``, their fraction.

    Args:
        start: the fraction of the tokens that middle blocks compute at first. The paper's is 0.0625 (128 of 2,048), and 1
            is plain training.
        until: the fraction of the budget from which on all tokens are computed. 0 is plain training.
        multiple_of: the number of tokens of which k is a multiple, below T. Hardware is fast at multiples of 8 or more.
        full_first: the number of blocks at the front that compute all tokens.
        full_last: the number of blocks at the end that compute all tokens.
        always: the number of tokens at the front of each sample that are always computed, such as a class token.
        per_sample: whether each sample gets its own draw, as in the paper. By default all samples of a micro-batch use the
            same places, which needs no masks and tables per sample. Blocks that store their rotary tables need the default.
        layers: the blocks, as a dotted path, a pattern (``"block_*"``) or a list of paths. None finds the longest stack.

    Raises:
        ValueError: for a value out of range. At setup, if there is no stack of blocks, or no middle block. At the first
            batch, before any weight changes, if a block depends on token positions (relative biases, convolutions, windows),
            or if ``multiple_of`` or ``always`` leaves no token to drop.

    Example:
        >>> trainer = L.Trainer(max_steps=10_000, callbacks=[RandomLTD(0.25, until=0.67)])

    References:
        Yao et al. 2022, "Random-LTD: Random and Layerwise Token Dropping Brings Efficient Training for Large-scale
        Transformers", arXiv:2211.11586. The schedule is that of DeepSpeed's ``random_ltd``.
    """

    saves = "compute and activations of the tokens that middle blocks skip, about a third"
    paper = "Yao et al. 2022, arXiv:2211.11586"
    constraints = (
        "needs a stack of three or more blocks on (B, T, D) that do not depend on token positions; automatic optimization;"
        " blocks that you compile yourself are recompiled for each number of tokens, unless dynamic=True"
    )
    search_space = SearchSpace({"start": Choice((0.125, 0.25, 0.5)), "until": Uniform(0.3, 0.9)}, _pointless)
    sparse_gradients: ClassVar[bool] = True
    control = Control("the baseline for the same time with a learning rate that decays to zero")
    needs_budget: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"start": 1.0, "until": 0.0}

    def __init__(
        self,
        start: Annotated[float, Fraction(above=0)] = 0.0625,
        *,
        until: Annotated[float, Fraction()] = 0.67,
        multiple_of: Annotated[int, Count()] = 16,
        full_first: Annotated[int, Count(at_least=0)] = 1,
        full_last: Annotated[int, Count(at_least=0)] = 1,
        always: Annotated[int, Count(at_least=0)] = 0,
        per_sample: bool = False,
        layers: Layers | None = None,
    ) -> None:
        self.start = start
        self.until = until
        self.multiple_of = multiple_of
        self.full_first = full_first
        self.full_last = full_last
        self.always = always
        self.per_sample = per_sample
        self.layers = layers

    def _reset(self) -> None:
        self._share = Share()
        self._where = ""

    @property
    @override
    def changes_shapes(self) -> bool:
        return not self.neutral

    @override
    def attach(self, session: Session) -> None:
        self._tokens = Tokens(
            session,
            WHO,
            self._choose,
            first=self.full_first,
            stop=-self.full_last or None,
            per_sample=self.per_sample,
            alike="set per_sample=False",
            also=self._check_possible,
        )
        session.chain.add(Stage.TRANSFORM, self._link)

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        stack = self._tokens.find(self.layers)
        if len({id(block) for block in stack.blocks}) < len(stack):
            raise ValueError(
                f"{WHO}: {stack} holds the same block several times, but each block draws its own tokens. Name another"
                f" stack with layers=, or remove {WHO}."
            )
        self._where = f"{len(self._tokens.blocks)} middle blocks of {stack}"

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if self.session.progress.u >= self.until:
            self._share.note_all()
            return proceed(batch)
        return self._tokens.run(step, batch, proceed)

    def _check_possible(self, step: Step, batch: Any) -> None:
        full = self._tokens.longest
        if self._count(full, 0.0) < full:
            return
        raise ValueError(
            f"{WHO}(start={self.start:g}, multiple_of={self.multiple_of}, always={self.always}): the blocks get {full}"
            f" tokens per sample and would keep all of them. Lower start, multiple_of or always, or remove {WHO}."
        )

    def _count(self, full: int, u: float) -> int:
        kept = kept_tokens(u, full=full, start=self.start, until=self.until, multiple_of=self.multiple_of)
        return min(max(kept, self.always), full)

    def _choose(self, at: At) -> Kept | None:
        size, full = at.hidden.shape[:2]
        if at.block >= self._tokens.stack.active - self.full_last:  # the last one that runs, since stacks may grow
            return None
        count = self._count(full, self.session.progress.u)
        self._share.note(count, full)
        if count == full:
            return None
        index = draw(full, count, at.generator(), always=self.always, rows=size if self.per_sample else 1)
        return Kept(index if self.per_sample else index[0])

    @override
    def summary(self) -> str:
        if not self._share.batches:
            return "made no step"
        return f"{self._where} computed {self._share.mean:.1%} of the tokens on average"
