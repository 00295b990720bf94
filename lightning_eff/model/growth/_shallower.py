"""The first blocks of the network alone, throughout: the control of techniques that run fewer blocks per step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core.blocks import BlockStack, refuse_compiled_around
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique
from lightning_eff.model.growth._untrained import note


class Shallower(Technique):
    """Train, validate, test and predict with the first ``round(kept(L))`` of the ``L`` blocks, at least 1.

    The other blocks keep their initial weights and cost no compute, no gradient and no optimizer state. Checkpoints
    have the plain module's names. Evaluate a run with this callback in the Trainer.

    Logged: ``layers_active``, the number of blocks that run, and ``layers_fraction``, their fraction of all.

    Args:
        kept: a function of ``L`` that returns the number of blocks to run, in (0, L]; it is rounded.
        layers: the blocks, as a dotted path, a pattern (``"block_*"``) or a list of paths. None finds the longest stack.
        stages: whether to take all stacks of the most frequent block class, or several ``layers``. Each stack of ``l``
            blocks then runs the first ``round(kept(L) / L * l)``, at least 1, where ``L`` counts the blocks of all
            stacks.

    Raises:
        ValueError: at setup, if ``kept`` returns a number outside (0, L], or the checkpoint to resume from was trained
            with other blocks.
    """

    saves = "compute, activation and optimizer memory of the last blocks"
    paper = "none: a control"
    control = Control("itself the control of techniques that run fewer blocks per step")
    conflicts: ClassVar[Mapping[str, str]] = {"ProgressiveStacking": "both set how many blocks run"}
    needs_automatic_optimization: ClassVar[bool] = False

    def __init__(
        self, *, kept: Callable[[int], float], layers: str | Sequence[str] | None = None, stages: bool = False
    ) -> None:
        self.kept = kept
        self.layers = layers
        self.stages = stages

    def _reset(self) -> None:
        self._stacks: list[BlockStack] = []
        self._learnt: list[dict[str, Any]] = []
        self._active, self._length = 0, 0
        self._where = ""

    @override
    def on_model(self, session: Session) -> None:
        stacks = self._find(session)
        counts = self._counts(stacks)
        for i, (stack, count) in enumerate(zip(stacks, counts, strict=True)):
            refuse_compiled_around(session.module, stack.path, who="Shallower")
            if len(self._learnt) == len(stacks) and self._learnt[i]["length"] == len(stack):
                stack.load_state_dict(self._learnt[i])
            stack.active = count
            stack.watch(scales=False)
            if session.fitting:
                stack.freeze_inactive()
        if session.fitting:
            self._stacks, self._active, self._length = stacks, sum(counts), sum(map(len, stacks))
            self._where = f"{self._length} blocks of {', '.join(repr(stack.path) for stack in stacks)}"

    def _find(self, session: Session) -> list[BlockStack]:
        if self.stages:
            return session.stages(self.layers, who="Shallower")
        return [session.stack(self.layers, who="Shallower")]

    def _counts(self, stacks: list[BlockStack]) -> list[int]:
        """Return how many blocks of each stack run."""
        length = sum(map(len, stacks))
        kept = self.kept(length)
        if not 0 < kept <= length:
            raise ValueError(
                f"Shallower(kept=...): kept({length}) returned {kept}, which is not in (0, {length}]. Return the number of"
                f" blocks of {', '.join(repr(stack.path) for stack in stacks)} to run."
            )
        return [max(1, round(kept * len(stack) / length)) for stack in stacks]

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        if not session.fitting:
            return
        stacks = self._find(session)
        count = sum(self._counts(stacks))
        trained = sum(map(len, stacks)) if state is None else state["active"]
        if trained != count:
            raise ValueError(
                f"Shallower: the checkpoint was trained with {trained} of {', '.join(map(str, stacks))}, but this run trains"
                f" the first {count}. Resume with the callbacks it was saved with, or load the weights into the module and"
                " start a new fit."
            )

    @override
    def detach(self, session: Session) -> None:
        if self._stacks:
            self._learnt, self._stacks = [stack.state_dict() for stack in self._stacks], []
            if self._active < self._length:
                rank_zero_info(f"{note('Shallower', self._active, self._length, self._where)}.")

    @override
    def state_dict(self) -> dict[str, Any]:
        stacks = [stack.state_dict() for stack in self._stacks] or self._learnt
        return {"active": self._active, "stacks": stacks}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._learnt = state_dict["stacks"]

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"layers_active": self._active, "layers_fraction": self._active / max(self._length, 1)}

    @override
    def summary(self) -> str:
        return f"the first {self._active} of {self._where}, throughout" if self._where else "no block run"
