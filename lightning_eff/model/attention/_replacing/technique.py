"""The base class of techniques that compute every attention of an unchanged module otherwise, without parameters."""

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
from lightning_eff._core.search_space import RunProfile
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step, looking
from lightning_eff._core.technique import Technique

#: With these attention is not where it can be taken hold of, or what it is handed is not what its tokens are.
CONFLICTS: Mapping[str, str] = {
    "RegionalCompilation": "attention inside of compiled blocks cannot be seen",
    "SequencePacking": "samples that share a row are told apart in the very call that is replaced",
}
#: With these, too, what is not changed inside of modules.
OUTSIDE: Mapping[str, str] = {
    **CONFLICTS,
    **dict.fromkeys(
        ("ActivationCompression", "ACTPrecision"),
        "its attention runs again by the kernel of the plain call, which is not the one that is computed",
    ),
}
#: And with these, what chooses among keys by how many there are.
SOME_KEYS: Mapping[str, str] = dict.fromkeys(
    ("RandomLTD", "TokenDropping"),
    "it chooses keys by how many there are, which cannot be told from an output that goes by where tokens stand",
)
NO_DROPOUT = "it drops {:.0%} of its weights, and {} has none to drop: set the dropout of attention to 0"


def no_sequences(profile: RunProfile) -> str | None:
    """Why another attention would be tried in vain."""
    return None if profile.sequence_length is not None or profile.image_side is not None else "samples are no sequences"


class ReplacedAttention(Technique):
    """Computes attention otherwise in training steps and in evaluation, as long as the Trainer has the technique.

    A subclass says in :meth:`attend` what it makes of a call. Several together act on each call in turn, by ``turn`` and then
    by class name; what is left of the call, a narrower mask for one, goes to the next.

    Class attributes, beside those of :class:`Technique`:
        turn: who comes first has the largest.
    """

    needs: ClassVar[Need] = Need.CALLS
    turn: ClassVar[int] = 1

    _calls = 0  # of the last training step
    _looked = False
    _modes: "tuple[Replacing, ...]" = ()  # of the step that is under way
    _seed = 0

    @abstractmethod
    def attend(self, call: Call) -> Tensor:
        """What the call returns, (B, H, L, E').

        Raises:
            CannotReplace: with the reason, if it cannot be done.
        """

    def look_at(self, call: Call) -> None:
        """A call of the look at the first batch, before :meth:`attend`."""

    def looked(self, session: Session) -> None:
        """The look at the first batch is over, on all ranks."""

    # -- the run

    @property
    def seed(self) -> int:
        """The run's, also in an evaluation after it."""
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
                    f"{type(self).__name__}: {at} is compiled, and attention in compiled code cannot be seen; expected a"
                    " module that is not. Train it uncompiled, or take the technique out."
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
        """A training step begins: what is counted of it starts anew."""

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
        """See in the first batch, alike on all ranks, by a pass that leaves no trace, that attention can be replaced."""
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
            beside = f" ({by_hand} times scores went through a softmax that is written by hand)" if by_hand else ""
            problem = ValueError(
                f"{type(mine[-1]).__name__}: saw no attention in training_step{beside}; expected calls of"
                " F.scaled_dot_product_attention, or nn.MultiheadAttention with need_weights=False, outside of compiled code."
                " Hugging Face's models take attn_implementation='sdpa'; flex_attention cannot be replaced. Or take the"
                " technique out."
            )
        agree(self.session, problem)
        if modes[-1].by_hand:
            rank_zero_info(
                f"{type(mine[-1]).__name__}: {modes[-1].calls} calls of attention are replaced; left as they are:"
                f" {modes[-1].by_hand} that are written as a softmax of scores."
            )
        for technique in mine:
            technique.looked(self.session)
            technique._looked = True
        for mode in modes:
            mode.calls = 0
        for technique in mine:
            technique.begin()

    # -- what is told

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"attentions": self._calls}

    @override
    def summary(self) -> str:
        return f"{self._calls} calls of attention a step" if self._calls else "no step taken"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"looked": self._looked, "calls": self._calls, "seed": self._seed}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._looked, self._calls, self._seed = state_dict["looked"], state_dict["calls"], state_dict["seed"]

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "_modes"}
