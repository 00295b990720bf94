"""The first blocks of the network alone, throughout: the control of techniques that run fewer blocks at a step."""

from collections.abc import Callable, Mapping
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

    The other blocks keep their first weights and cost no compute, no gradient and no optimizer state; checkpoints have
    the plain module's names. Evaluate a run with this callback in the Trainer.

    Logged: ``layers_active``, how many blocks run, and ``layers_fraction``, their share of all.

    Args:
        kept: given ``L``, how many blocks to run, in (0, L]; it is rounded.
        layers: dotted path of the ``nn.ModuleList`` or ``nn.Sequential`` of blocks; None finds the longest.

    Raises:
        ValueError: at setup, if ``kept`` returns a number outside (0, L], or the checkpoint to resume from was trained
            with other blocks.
    """

    saves: ClassVar[str] = "compute, activation and optimizer memory of the last blocks"
    paper: ClassVar[str] = "none: a control"
    control: ClassVar[Control] = Control("itself the control of techniques that run fewer blocks at a step")
    conflicts: ClassVar[Mapping[str, str]] = {"ProgressiveStacking": "both say how many blocks the network has"}
    needs_automatic_optimization: ClassVar[bool] = False

    def __init__(self, *, kept: Callable[[int], float], layers: str | None = None) -> None:
        self.kept = kept
        self.layers = layers
        self._reset()

    def _reset(self) -> None:
        self._stack: BlockStack | None = None
        self._learnt: dict[str, Any] | None = None
        self._active, self._length = 0, 0
        self._where = ""

    @override
    def attach(self, session: Session) -> None:
        self._reset()

    @override
    def on_model(self, session: Session) -> None:
        stack = session.stack(self.layers, who="Shallower")
        refuse_compiled_around(session.module, stack.path, who="Shallower")
        if self._learnt is not None and self._learnt["length"] == len(stack):
            stack.load_state_dict(self._learnt)
        stack.active = self._count(stack)
        stack.watch(scales=False)
        if session.fitting:
            self._stack, self._active, self._length = stack, stack.active, len(stack)
            self._where = f"{len(stack)} blocks of {stack.path!r}"
            stack.freeze_inactive()

    def _count(self, stack: BlockStack) -> int:
        kept = self.kept(len(stack))
        if not 0 < kept <= len(stack):
            raise ValueError(
                f"Shallower: kept({len(stack)}) returned {kept}; expected a number in (0, {len(stack)}], how many of"
                f" the blocks of {stack.path!r} to run. Give another function."
            )
        return max(1, round(kept))

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        if not session.fitting:
            return
        stack = session.stack(self.layers, who="Shallower")
        count, trained = self._count(stack), len(stack) if state is None else state["active"]
        if trained != count:
            raise ValueError(
                f"Shallower: the checkpoint was trained with {trained} of {stack}; expected one trained with the first"
                f" {count}. Resume with the callbacks it was saved with, or load the weights into the module and start a"
                " new fit."
            )

    @override
    def detach(self, session: Session) -> None:
        if self._stack is not None:
            self._learnt, self._stack = self._stack.state_dict(), None
            if self._active < self._length:
                rank_zero_info(f"{note('Shallower', self._active, self._length, self._where)}.")

    @override
    def state_dict(self) -> dict[str, Any]:
        stack = self._learnt if self._stack is None else self._stack.state_dict()
        return {"active": self._active, "stack": stack}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._learnt = state_dict["stack"]

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"layers_active": self._active, "layers_fraction": self._active / max(self._length, 1)}

    @override
    def summary(self) -> str:
        return f"the first {self._active} of {self._where}, throughout" if self._where else "no block run"
