"""The base of techniques that train the first blocks of a stack and add copies of them."""

from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core.blocks import BlockStack, copy_block, hidden_of
from lightning_eff._core.optimizers import copy_state, keeps_state
from lightning_eff._core.passes import call_of, loss_of, unseen
from lightning_eff._core.session import Session
from lightning_eff.model.growth._identity import (
    Call,
    is_identity,
    make_identities,
    used_outside,
    zeros_for_identity,
)
from lightning_eff.model.growth._sizes.depth import blocks_of, check_copies, show_trained
from lightning_eff.model.growth._sizes.stages import size_at
from lightning_eff.model.growth._untrained import Growing, note


class Stacking(Growing):
    """Runs the first blocks of a stack, by ``stages``, and starts new ones as copies, by :meth:`source`.

    A subclass sets ``stages``, ``layers`` and ``copy_optimizer_state``, and may set ``init`` and ``finish``. They mean
    what ProgressiveStacking documents.
    """

    needs_automatic_optimization: ClassVar[bool] = False
    saves = "compute, activation memory and optimizer memory of the blocks that do not run yet"
    stages: list[tuple[float, int]]
    layers: str | Sequence[str] | None
    copy_optimizer_state: bool
    init: str = "stack"
    finish: str | None = None

    @property
    def rests(self) -> bool:
        """Whether there is nothing to do if all blocks run throughout."""
        return True

    @abstractmethod
    def source(self, block: int, count: int) -> int:
        """Return the block that the new ``block`` copies, where ``count`` blocks run so far."""

    def check_stack(self, stack: BlockStack) -> None:
        """Raise ``ValueError`` if this stack cannot grow as asked; set ``stages`` here if they follow from the stack."""

    def _reset(self) -> None:
        self._stack: BlockStack | None = None
        self._learnt: dict[str, Any] | None = None
        self._active: int | None = None
        self._switches: list[tuple[int, int]] = []
        self._zeros: list[str] | None = None
        self._identities = False  # whether the blocks that do not run pass their input on
        self._ran = self._told = False
        self._where = ""

    # -- set-up

    @override
    def check(self, session: Session) -> None:
        asked = "init='identity'" if self.init == "identity" else "finish='identity'" if self.finish else None
        if asked and not session.module.automatic_optimization:
            raise ValueError(
                f"{type(self).__name__}({asked}): {type(session.module).__name__} has automatic_optimization=False, so an"
                " extra pass through training_step would also step the optimizer. Use init='stack' and finish=None, or"
                " automatic optimization."
            )

    @override
    def attach(self, session: Session) -> None:
        self._active = self.stages[0][1]

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            show_trained(session, self.layers, self._learnt, self._active, who=type(self).__name__)
            return
        stack = self._stack = blocks_of(session, self.layers, who=type(self).__name__)
        self.check_stack(stack)
        for stage, (_, count) in enumerate(self.stages):
            if count > len(stack):
                raise ValueError(
                    f"{type(self).__name__}(stages={self.stages}): stage {stage} needs {count} blocks, but {stack} has"
                    f" {len(stack)}. Build the module with {self.stages[-1][1]} blocks, its final depth, or lower the"
                    " counts."
                )
        last = self.stages[-1][1]
        check_copies(
            stack,
            ((self.source(j, active), j) for (_, active), (_, n) in pairwise(self.stages) for j in range(active, n)),
            who=type(self).__name__,
        )
        if last < len(stack):
            rank_zero_info(
                f"{type(self).__name__}: the last stage runs {last} of {len(stack)} blocks of {stack.path!r}; the others"
                " never run in this fit."
            )
        if self._learnt is not None:
            stack.load_state_dict(self._learnt)
        assert self._active is not None
        stack.active, self._where = self._active, f"{len(stack)} blocks of {stack.path!r}"
        if self.rests and len(self.stages) == 1 and last == len(stack) and stack.active == last:
            session.rest(self)  # the whole network runs throughout
            return
        stack.watch(scales=False)
        stack.freeze_inactive()

    @override
    def on_optimizers(self, session: Session) -> None:
        stack = self._grown()
        if not self.copy_optimizer_state or stack.active >= self.stages[-1][1]:
            return
        for p in (p for block in stack.blocks[: self.stages[-1][1]] for p in block.parameters()):
            for optimizer in session.optimizers:
                held = any(p is other for group in optimizer.param_groups for other in group["params"])
                if held and keeps_state(optimizer, p) is False:
                    raise ValueError(
                        f"{type(self).__name__}(copy_optimizer_state=True): {type(optimizer).__name__} keeps no state for"
                        f" the parameters in {stack} (SGD has none without momentum). Set copy_optimizer_state=False."
                    )
                if held:
                    return

    # -- growth

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        if batch_idx % session.trainer.accumulate_grad_batches:
            return
        stack, target = self._grown(), size_at(self.stages, session.progress.u)
        self._ran = True
        if self.finish == "identity" and not self._identities and stack.active < len(stack):
            self._make_the_others_identities(session, batch, batch_idx)
        if self.init == "identity" and self._zeros is None and stack.active < self.stages[-1][1]:
            self._zeros = self._try_identity(session, batch, batch_idx)
        if target <= stack.active:
            return
        for _, count in self.stages:
            if stack.active < count <= target:
                self._grow(session, count, batch, batch_idx)
        stack.freeze_inactive()
        session.rewrap()
        session.blocks_changed(self)

    def _grow(self, session: Session, count: int, batch: Any, batch_idx: int) -> None:
        """Run ``count`` blocks from now on; new ones start as copies."""
        stack = self._grown()
        pairs = [
            pair
            for j in range(stack.active, count)
            for pair in copy_block(stack.blocks[self.source(j, stack.active)], stack.blocks[j])
        ]
        new = stack.blocks[stack.active : count]
        fresh = self._zero(session, new, batch, batch_idx) if self.init == "identity" else frozenset()
        for source, target in pairs:
            for optimizer in session.optimizers:
                optimizer.state.pop(target, None)
            if self.copy_optimizer_state and id(target) not in fresh:
                copy_state(session.optimizers, source, target)
        self._switches.append((session.trainer.global_step, count))
        self._active = stack.active = count

    def _zero(self, session: Session, blocks: list[nn.Module], batch: Any, batch_idx: int) -> frozenset[int]:
        """Make ``blocks`` the identity, and return the ids of the parameters that were zeroed."""
        stack = self._grown()
        with unseen(session):
            call = call_of(session, stack.blocks[stack.active - 1], batch, batch_idx)
            finite = bool(hidden_of(*call).isfinite().all())  # a diverged run says nothing about the block
            self._zeros, fresh = make_identities(
                blocks,
                self._zeros or [],
                is_identity=lambda block: not any(session.gather(finite and not is_identity(block, call))),
                find=lambda block: self._find_zeros(session, block, call),
            )
        return fresh

    def _make_the_others_identities(self, session: Session, batch: Any, batch_idx: int) -> None:
        """Make the waiting blocks the identity, and check that the plain module then computes what is trained."""
        stack = self._grown()
        waiting = stack.blocks[stack.active :]
        before = [(p, p.detach().clone()) for block in waiting for p in block.parameters()]
        self._zero(session, waiting, batch, batch_idx)
        losses: list[float | None] = []
        for whole in (False, True):
            with unseen(session):
                losses.append(loss_of(session, batch, batch_idx, whole=whole))
        trained, plain = losses
        apart = trained is not None and plain is not None and abs(plain - trained) > 1e-5 * max(1.0, abs(trained))
        if any(session.gather(apart)):
            with torch.no_grad():
                for p, value in before:
                    p.copy_(value)
            raise ValueError(
                f"{type(self).__name__}(finish='identity'): the loss of the first batch is {trained} with the"
                f" {stack.active} blocks of {stack} that run but {plain} with all of them, so the loss uses more of a block"
                " than its hidden state (such as a router's loss). Use finish=None, and evaluate with this callback in the"
                " Trainer."
            )
        self._identities = True
        session.blocks_changed(self)

    def _try_identity(self, session: Session, batch: Any, batch_idx: int) -> list[str]:
        """Find which weights must be 0 for a block to be the identity, on the first block that does not run yet."""
        stack = self._grown()
        with unseen(session):
            call = call_of(session, stack.blocks[stack.active - 1], batch, batch_idx)
            return self._find_zeros(session, stack.blocks[stack.active], call)

    def _find_zeros(self, session: Session, block: nn.Module, call: Call) -> list[str]:
        used = used_outside(session.module, [block])
        found = zeros_for_identity(block, lambda: is_identity(block, call), keep=used)
        found = session.trainer.strategy.broadcast(found)
        if found is None:
            asked, way_out = ("init", "init='stack'") if self.init == "identity" else ("finish", "finish=None")
            raise ValueError(
                f"{type(self).__name__}({asked}='identity'): a block of {self._grown()} changes its input even with all its"
                f" own weights zero, so it is not a pre-norm residual block h + f(norm(h)). Use {way_out}."
            )
        return found

    def _grown(self) -> BlockStack:
        assert self._stack is not None, "on_model has found the blocks"
        return self._stack

    # -- state and report

    @override
    def short(self) -> str | None:
        """Describe a module with blocks that were never trained; None for any other."""
        stack = self.stack_state()
        if stack is None or self._active is None or self._active >= stack["length"] or self._identities:
            return None
        return note(type(self).__name__, self._active, stack["length"], self._where)

    @override
    def state_dict(self) -> dict[str, Any]:
        stack = self.stack_state()
        if stack is None:
            return {}
        state, short = {"active": self._active, "zeros": self._zeros, "identities": self._identities}, self.short()
        state |= {"switches": [list(switch) for switch in self._switches], "stack": stack}
        return state if short is None else {**state, "note": short}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._active, self._learnt, self._zeros = state_dict["active"], state_dict["stack"], state_dict["zeros"]
        self._identities = state_dict.get("identities", False)
        self._switches = [(step, count) for step, count in state_dict["switches"]]

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        if self._active is None:
            return {}
        length = len(self._stack) if self._stack is not None else (self._learnt or {}).get("length", self._active)
        return {"layers_active": self._active, "layers_fraction": self._active / length}

    @override
    def summary(self) -> str:
        grown = "".join(f" -> {count} (step {step:,})" for step, count in self._switches)
        return f"{self.stages[0][1]}{grown} of {self._where}"
