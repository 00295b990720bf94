"""Random layerwise token dropping (random-LTD): each middle block runs on random tokens of its own (Yao et al. 2022)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_eff._core._tokens.inputs import Kept
from lightning_eff._core._tokens.window import At, Tokens
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data.tokens._draw import draw
from lightning_eff.data.tokens._share import Share

WHO = "RandomLTD"


def kept_tokens(u: float, *, full: int, start: float, until: float, multiple_of: int) -> int:
    """``k(u) = floor(k_0 + (T - k_0) u / until)``, ``k_0 = start T``, rounded down to a multiple; T from ``until`` on.

    Args:
        u: the share of the budget that is used up, in [0, 1].
        full: T, the tokens of a sample.
        start: the share of them that is kept at ``u = 0``, in (0, 1].
        until: the share of the budget at which all are kept.
        multiple_of: tokens, >= 1.

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
        return "no stack of at least three blocks was found, of which one is in the middle"
    if profile.sequence_length is not None and profile.sequence_length < 32:
        return f"sequences of {profile.sequence_length} tokens are too short to leave some out"
    return None


class RandomLTD(Technique):
    """Let each block in the middle of the network run on a random part of the tokens; more and more, in the end on all.

    Of the T tokens of a sample, each middle block is called on ``k(u)``, which it draws for itself at each step; the others
    bypass that block bit for bit as they are, and all go on to the next. ``k`` grows linearly from ``start T`` at the
    beginning to T at the share ``until`` of the budget, in multiples of ``multiple_of``. The first and the last block run on
    all tokens. Masks, positions and rotary tables go along with the tokens that they belong to; the tokens stay in order.
    Every rank, step and micro-batch draws anew, from the seed alone: a resumed run draws what the undisturbed one did, and
    what runs a block again (rematerialization, SAM) sees the same tokens. From ``until`` on, training is plain; validation,
    test and prediction always see all tokens.

    Of a compute that is mostly in the middle blocks, about ``until (1 - start) / 2`` is saved: at the paper's settings a
    third. T is that of the batch at hand. Under :class:`ProgressiveStacking` the last block is the last of those that run.

    On the rings it thins one block of three, which saves little, and shows no gain (docs/evidence.md): it is for deep networks.

    Logged: ``kept``, the tokens of a sample that a middle block ran on in the last step, and ``share``, their share of all.

    Args:
        start: the share of the tokens that is kept at the beginning, in (0, 1]; 1 is plain training.
        until: the share of the budget in [0, 1] from which on all are kept; 0 is plain training.
        multiple_of: tokens, >= 1; numbers below T are multiples of it (hardware is fast at multiples of 8 or more).
        full_first: blocks at the front that run on all tokens, >= 0.
        full_last: blocks at the end that run on all tokens, >= 0.
        always: tokens at the front of each sample that are never left out, >= 0, such as a class token.
        per_sample: draw other tokens for each sample, as the paper does; by default all samples of a micro-batch leave out
            the same places, which needs no masks and tables of each sample's own; blocks that hold their rotary tables
            themselves need that.
        layers: the blocks, as a path, a pattern (``"block_*"``) or a list of paths; None finds the longest stack.

    Raises:
        ValueError: if an argument is out of its range; at setup, if there is no stack, or none of its blocks is in the
            middle; at the first batch, before any weight has changed, if a block cannot be given fewer of its tokens (its
            output goes by where tokens stand, as with relative biases of its own, convolutions and windows), or if
            ``multiple_of`` or ``always`` leaves nothing to drop.

    Sources:
        Yao et al. 2022, arXiv:2211.11586; the schedule is that of DeepSpeed's ``random_ltd``.
    """

    saves: ClassVar[str] = "compute and activations of the tokens that middle blocks leave out: about a third of all"
    paper: ClassVar[str] = "Yao et al. 2022, arXiv:2211.11586"
    constraints: ClassVar[str] = (
        "automatic optimization; a stack of three blocks or more on (B, T, D), of which each token is computed by what is"
        " handed in with it; blocks that one compiles oneself are compiled anew for each number of tokens, unless dynamic=True"
    )
    survey: ClassVar[Survey | None] = Survey("random layerwise token dropping (random-LTD)", shen="3.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"start": Choice((0.125, 0.25, 0.5)), "until": Uniform(0.3, 0.9)}, _pointless
    )
    sparse_gradients: ClassVar[bool] = True
    control: ClassVar[Control] = Control("the baseline for as many seconds with its learning rate decayed to zero")
    conflicts: ClassVar[Mapping[str, str]] = {}
    needs_budget: ClassVar[bool] = True

    def __init__(
        self,
        start: float = 0.0625,
        *,
        until: float = 0.67,
        multiple_of: int = 16,
        full_first: int = 1,
        full_last: int = 1,
        always: int = 0,
        per_sample: bool = False,
        layers: str | Sequence[str] | None = None,
    ) -> None:
        if not 0.0 < start <= 1.0:
            raise ValueError(
                f"{WHO}({start=}): expected a share of the tokens in (0, 1], that with which middle blocks begin. The"
                " paper's is 0.0625 (128 of 2,048); 1 is plain training."
            )
        if not 0.0 <= until <= 1.0:
            raise ValueError(
                f"{WHO}({until=}): expected a fraction of the budget in [0, 1], from which on all tokens are kept."
            )
        counts = {"multiple_of": multiple_of, "full_first": full_first, "full_last": full_last, "always": always}
        for name, value in counts.items():
            least = 1 if name == "multiple_of" else 0
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                what = "blocks" if name.startswith("full") else "tokens"
                raise ValueError(f"{WHO}({name}={value!r}): expected an integer >= {least}, a number of {what}.")
        self.start = start
        self.until = until
        self.multiple_of = multiple_of
        self.full_first = full_first
        self.full_last = full_last
        self.always = always
        self.per_sample = per_sample
        self.layers = layers
        self._reset()

    def _reset(self) -> None:
        self._share = Share()
        self._where = ""

    @property
    @override
    def neutral(self) -> bool:
        return self.start == 1.0 or self.until == 0.0

    @property
    @override
    def changes_shapes(self) -> bool:
        return not self.neutral

    @override
    def attach(self, session: Session) -> None:
        self._reset()
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
                f"{WHO}: {stack} holds the same block several times; expected different ones, because the first and the"
                " last run on all tokens and each other one draws its own. Name another stack by layers=, or take the"
                " technique out."
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
            " tokens of a sample, all of which would be kept from the first step on; expected fewer than that. Lower start,"
            " multiple_of or always, or take the technique out."
        )

    def _count(self, full: int, u: float) -> int:
        kept = kept_tokens(u, full=full, start=self.start, until=self.until, multiple_of=self.multiple_of)
        return min(max(kept, self.always), full)

    def _choose(self, at: At) -> Kept | None:
        size, full = at.hidden.shape[:2]
        if at.block >= self._tokens.stack.active - self.full_last:  # the last of those that run: stacks may be growing
            return None
        count = self._count(full, self.session.progress.u)
        self._share.note(count, full)
        if count == full:
            return None
        index = draw(full, count, at.generator(), always=self.always, rows=size if self.per_sample else 1)
        return Kept(index if self.per_sample else index[0])

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
        return f"{self._share.mean:.1%} of tokens computed on average in {self._where}"

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._share.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._share.load_state_dict(state_dict)
