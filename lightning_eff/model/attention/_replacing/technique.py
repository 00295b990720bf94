"""The base class of techniques that replace every attention call of an unchanged module, without new parameters."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._attention.calls import Call, CannotReplace
from lightning_eff._core._attention.mode import Replacing
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._samples.scoring import agree
from lightning_eff._core.batches import num_samples
from lightning_eff._core.search_space import RunProfile, needs_attention
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step, looking
from lightning_eff._core.technique import Control, Technique

#: Techniques that hide attention calls, or give them other tokens than the sample's.
CONFLICTS: Mapping[str, str] = {
    "RegionalCompilation": "attention inside compiled blocks cannot be replaced",
    "SequencePacking": "the replaced call is the one that separates samples in a row",
}
#: Further conflicts of techniques that do not change the modules themselves.
OUTSIDE: Mapping[str, str] = {
    **CONFLICTS,
    **dict.fromkeys(
        ("ActivationCompression", "ACTPrecision"),
        "it recomputes attention with the kernel of the plain call instead of the replaced one",
    ),
}
#: Further conflicts of techniques that choose among keys by their number.
SOME_KEYS: Mapping[str, str] = dict.fromkeys(
    ("RandomLTD", "TokenDropping"),
    "it chooses keys by their number, which looks like an output that depends on token positions",
)
#: Conflicts of techniques that compute no weight for each pair of tokens.
NO_PAIRS = "it has no weight for each pair of tokens, on which the other acts"
#: The control of methods whose cost is linear in the length.
EXACT = Control("the baseline, with fused exact attention, for as many seconds with its learning rate decayed to zero")


def too_short(profile: RunProfile) -> str | None:
    """Return why attention of linear cost would be pointless, in words."""
    if profile.sequence_length is not None and profile.sequence_length < 512:
        return f"exact attention is faster on sequences of {profile.sequence_length} tokens"
    return needs_attention(profile)


class ReplacedAttention(Technique):
    """Replaces attention in training steps and in evaluation, as long as the Trainer has the technique.

    A subclass computes a call in :meth:`attend`. Several techniques act on each call in turn, by ``turn`` and then by
    class name; what one leaves of the call, such as a narrower mask, goes to the next.

    Class attributes, in addition to those of :class:`Technique`:
        turn: the technique with the largest value acts first.
    """

    needs: ClassVar[Need] = Need.CALLS
    turn: ClassVar[int] = 1
    checkpointed = ("_looked", "_calls", "_seed")

    _calls = 0  # in the last training step
    _looked = False
    _modes: "tuple[Replacing, ...]" = ()  # in the current step
    _seed = 0

    @abstractmethod
    def attend(self, call: Call) -> Tensor:
        """Return the result of the call, (B, H, L, E').

        Raises:
            CannotReplace: with the reason, if it cannot be computed.
        """

    def look_at(self, call: Call) -> None:
        """Look at a call of the first batch, before :meth:`attend`."""

    def looked(self, session: Session) -> None:
        """Act after the look at the first batch, on all ranks."""

    # -- the run

    @property
    def seed(self) -> int:
        """The seed of the run, also in an evaluation after it."""
        return self.session.seed if self.session.fitting else self._seed

    def _mine(self, session: Session) -> "list[ReplacedAttention]":
        found = [t for t in session.working if isinstance(t, ReplacedAttention)]
        return sorted(found, key=lambda t: (t.turn, type(t).__name__))

    @override
    def on_open(self, session: Session) -> None:
        if self is next(t for t in session.working if isinstance(t, ReplacedAttention)):
            session.views.append(lambda training: self._view(session, training))

    @override
    def attach(self, session: Session) -> None:
        self._looked, self._calls = False, 0
        if self is next(t for t in session.working if isinstance(t, ReplacedAttention)):
            session.chain.add(Stage.TRANSFORM, self._link)

    @override
    def on_model(self, session: Session) -> None:
        self._seed = session.seed if session.fitting else self._seed
        for name, m in session.module.named_modules():
            if getattr(m, "_compiled_call_impl", None) is not None or hasattr(m, "_orig_mod"):
                at = f"the module {name!r} ({type(m).__name__})" if name else type(m).__name__
                raise ValueError(
                    f"{type(self).__name__}: {at} is compiled, so its attention cannot be replaced. Train it uncompiled, or"
                    f" remove {type(self).__name__}."
                )

    @contextmanager
    def _view(self, session: Session, training: bool) -> Iterator[None]:
        with ExitStack() as scope:
            for technique in self._mine(session):
                mode = Replacing(technique.attend, type(technique).__name__)
                scope.enter_context(mode)
                if training:
                    technique._modes = (mode,)
                    technique.begin()
            yield

    def begin(self) -> None:
        """Reset what is counted in a training step."""

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        mine = self._mine(self.session)
        if not all(t._looked for t in mine):
            self._look(step, batch, mine)
        output = proceed(batch)
        if not looking():
            for technique in mine:
                technique._calls = technique._modes[0].calls
        return output

    def _look(self, step: Step, batch: Any, mine: "list[ReplacedAttention]") -> None:
        """Check on the first batch, on all ranks alike and without side effects, that attention can be replaced."""
        modes = [t._modes[0] for t in mine]

        def around(run: Proceed, batch: Any) -> Any:
            with ExitStack() as scope:
                for t, mode in zip(mine, modes, strict=True):
                    scope.callback(setattr, mode, "attend", mode.attend)
                    mode.attend = lambda call, t=t: t.look_at(call) or t.attend(call)
                return run(batch)

        problem: ValueError | None = None
        try:
            step.forward_only(batch, num_samples(batch), around, transform=False)
        except CannotReplace as e:
            problem = e
        if problem is None and not modes[-1].calls:
            by_hand = modes[-1].by_hand
            beside = f" ({by_hand} times as a softmax of scores written by hand)" if by_hand else ""
            problem = ValueError(
                f"{type(mine[-1]).__name__}: found no attention call in training_step that can be replaced{beside}. Use"
                " F.scaled_dot_product_attention, or nn.MultiheadAttention with need_weights=False, outside of compiled code"
                " (attn_implementation='sdpa' in Hugging Face's models)."
            )
        agree(self.session, problem)
        if modes[-1].by_hand:
            rank_zero_info(
                f"{type(mine[-1]).__name__}: replaced {modes[-1].calls} calls of attention, but not {modes[-1].by_hand} that"
                " are written as a softmax of scores."
            )
        for technique in mine:
            technique.looked(self.session)
            technique._looked = True
        for mode in modes:
            mode.calls = 0
        for technique in mine:
            technique.begin()

    # -- report and state

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"attentions": self._calls}

    @override
    def summary(self) -> str:
        return f"replaced {self._calls} calls of attention per step" if self._calls else "no step taken"

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "_modes"}
