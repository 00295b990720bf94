"""Progressive stacking: train a prefix of the blocks, and let it grow by copies of itself (Gong et al. 2019)."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core.blocks import BlockStack, copy_block, hidden_of, signature
from lightning_eff._core.optimizers import copy_state, keeps_state
from lightning_eff._core.passes import call_of, unseen
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, Uniform, needs_blocks
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique
from lightning_eff.model._identity import Call, is_identity, zeros_for_identity


def source_of(block: int, *, count: int) -> int:
    """The block ``j mod L`` that a new block ``j >= L`` copies, where ``L = count`` blocks run so far."""
    return block % count


def target_count(stages: Sequence[tuple[float, int]], u: float) -> int:
    """How many blocks run at ``u`` in [0, 1]: the count of the last stage whose fraction is not beyond it."""
    return next(count for fraction, count in reversed(stages) if u >= fraction - 1e-9)


def _small_models(technique: "ProgressiveStacking") -> dict[str, Callback]:
    """The model of each stage but the last, throughout."""
    return {
        f"{count} block{'s' * (count > 1)} throughout": ProgressiveStacking(
            stages=[(0.0, count)], layers=technique.layers
        )
        for _, count in technique.stages[:-1]
    }


def _doubling(cls: Any, values: Mapping[str, Any], profile: RunProfile) -> Any:
    """Stages that double from the share ``first`` of all blocks on, the last of them at ``until`` of the budget."""
    counts = [max(round(values["first"] * profile.num_blocks), 1)]
    while counts[-1] < profile.num_blocks:
        counts.append(min(2 * counts[-1], profile.num_blocks))
    stages = [(values["until"] * i / max(len(counts) - 1, 1), count) for i, count in enumerate(counts)]
    return cls(stages=stages, init=values["init"], copy_optimizer_state=values["copy_optimizer_state"])


class ProgressiveStacking(Technique):
    """Train the first few blocks of a deep network, and add copies of them as training goes on.

    From each fraction ``u`` of the budget on, ``count`` blocks run. When ``L`` blocks grow to more, each new block
    ``j`` starts as a copy of block ``j mod L``. The module is built at its full depth and keeps it: blocks that do not
    run yet cost no compute, no activation memory, no gradient and no optimizer state, every checkpoint has the plain
    module's names, and validation, test and prediction under this callback run the blocks that training has reached. A
    run that ends before its last stage leaves blocks that were never trained: evaluate it with this callback in the
    Trainer.

    ``init="stack"`` copies whole blocks, which changes the network's function at the switch, and usually lifts the loss
    for a while. ``init="identity"`` also zeroes what must be zero of the copy (of a pre-norm block, its output
    projections) for the new block to hand its input on, so the function is kept. Whether the blocks can do that is
    tried on the first batch; it costs one extra forward pass there and at each switch.

    Growth happens between optimizer steps, never within an accumulation window. Under manual optimization it happens
    between batches.

    Logged: ``layers_active``, how many blocks run, and ``layers_fraction``, their share of all.

    Args:
        stages: pairs (fraction of the budget in [0, 1), number of blocks >= 1), both growing; the first fraction is 0.
        layers: dotted path of the ``nn.ModuleList`` or ``nn.Sequential`` of blocks; None finds the longest.
        copy_optimizer_state: give a new block the optimizer state of the block that it copies (Adam's moments and
            step); otherwise, and for what ``init="identity"`` zeroes, the state starts anew. Where it cannot be found
            out whether the optimizer keeps state by parameter (it wraps another, or needs a closure), what is there is
            copied.
        init: "stack" copies the blocks, "identity" makes the copies preserve the function.

    Raises:
        ValueError: if the stages do not start at 0, shrink, or are malformed, or ``init`` is neither; at setup, if the
            module has fewer blocks, blocks of different make, or an optimizer without state to copy; on the first
            batch, if the blocks cannot be the identity.

    Sources:
        Gong et al. 2019, "Efficient Training of BERT by Progressively Stacking"; Du et al. 2024, arXiv:2405.15319.
    """

    saves: ClassVar[str] = "compute, activation and optimizer memory of the blocks that do not run yet"
    paper: ClassVar[str] = "Gong et al. 2019 (ICML); Du et al. 2024, arXiv:2405.15319"
    constraints: ClassVar[str] = (
        "blocks of one class and shape; stacking lifts the loss at a switch; init='identity' needs pre-norm residual"
        " blocks and automatic optimization"
    )
    survey: ClassVar[Survey | None] = Survey("progressive stacking", zhuang="2.1", shen="4.4")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {
            "first": Choice((0.25, 0.5)),  # of all blocks
            "until": Uniform(0.1, 0.7),
            "init": Choice(("stack", "identity")),
            "copy_optimizer_state": Choice((True, False)),
        },
        needs_blocks,
        _doubling,
    )
    control: ClassVar[Control] = Control(
        "the small model throughout, at every number of blocks of the stages but the last", _small_models
    )
    needs_automatic_optimization: ClassVar[bool] = False
    needs_budget: ClassVar[bool] = True

    def __init__(
        self,
        *,
        stages: Sequence[tuple[float, int]] = ((0.0, 3), (0.25, 6), (0.5, 12)),
        layers: str | None = None,
        copy_optimizer_state: bool = True,
        init: str = "stack",
    ) -> None:
        if init not in ("stack", "identity"):
            raise ValueError(
                f"ProgressiveStacking(init={init!r}): expected 'stack', which copies blocks, or 'identity', whose"
                " copies preserve the function."
            )
        self.stages = _checked(stages)
        self.layers = layers
        self.copy_optimizer_state = copy_optimizer_state
        self.init = init
        self._reset()

    def _reset(self) -> None:
        self._stack: BlockStack | None = None
        self._learnt: dict[str, Any] | None = None
        self._active: int | None = None
        self._switches: list[tuple[int, int]] = []
        self._zeros: list[str] | None = None
        self._where = ""

    # -- set-up

    @override
    def check(self, session: Session) -> None:
        if self.init == "identity" and not session.module.automatic_optimization:
            raise ValueError(
                f"ProgressiveStacking(init='identity'): {type(session.module).__name__} has"
                " automatic_optimization=False; expected True, because training_step is run once more, forward only, to"
                " see what a block is called with, and under manual optimization it would also step. Use init='stack'"
                " or automatic optimization."
            )

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        self._active = self.stages[0][1]

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            self._show_active(session)
            return
        stack = self._stack = session.stack(self.layers, who="ProgressiveStacking")
        for stage, (_, count) in enumerate(self.stages):
            if count > len(stack):
                raise ValueError(
                    f"ProgressiveStacking(stages={self.stages}): stage {stage} asks for {count} blocks, and {stack} has"
                    f" {len(stack)}; expected at most that many, because the module is built at its final depth and"
                    f" trained a prefix at a time. Build it with {self.stages[-1][1]} blocks or lower the counts."
                )
        last = self.stages[-1][1]
        for index, block in enumerate(stack.blocks[:last]):
            if signature(block) != signature(stack.blocks[0]):
                differ = sorted({name for name, _ in set(signature(block)) ^ set(signature(stack.blocks[0]))})
                raise ValueError(
                    f"ProgressiveStacking: block {index} of {stack} has other parameters or buffers than block 0 at"
                    f" {differ}; expected the same names and shapes in each, because new blocks are copies. Name"
                    " another stack by layers=, or take the technique out."
                )
        if last < len(stack):
            rank_zero_info(
                f"ProgressiveStacking: the last stage runs {last} of {len(stack)} blocks of {stack.path!r}; the rest"
                " never runs in this fit."
            )
        if self._learnt is not None:
            stack.load_state_dict(self._learnt)
        assert self._active is not None
        stack.active, self._where = self._active, f"{len(stack)} blocks of {stack.path!r}"
        stack.watch(scales=False)
        stack.freeze_inactive()

    def _show_active(self, session: Session) -> None:
        """Evaluate what training has reached, here or in the checkpoint; a callback that saw neither shows it all."""
        if self._active is None or self._learnt is None or self._active == self._learnt["length"]:
            return
        stack = session.stack(self.layers, who="ProgressiveStacking")
        if len(stack) != self._learnt["length"]:  # another module than the trained one
            return
        stack.load_state_dict(self._learnt)
        stack.active = self._active
        stack.watch(scales=False)
        rank_zero_info(f"ProgressiveStacking: runs the first {stack.active} of {stack}, as many as were trained.")

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
                        f"ProgressiveStacking(copy_optimizer_state=True): {type(optimizer).__name__} keeps no state of"
                        f" the parameters in {stack}; expected some to copy (SGD has none without momentum). Set"
                        " copy_optimizer_state=False."
                    )
                if held:
                    return

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        if state is None:
            if not session.fitting:  # a plain checkpoint, or one of weights alone
                return
            raise ValueError(
                "ProgressiveStacking: the checkpoint was saved without it, so it was trained at full depth (or holds"
                " weights only); expected one that says how many blocks were trained. Go on without the technique, or"
                " load the weights into the module and start a new fit."
            )
        stack = session.stack(self.layers, who="ProgressiveStacking")
        length = state["stack"]["length"]
        if length != len(stack):
            raise ValueError(
                f"ProgressiveStacking: the checkpoint is of a module with {length} blocks, and {stack} has"
                f" {len(stack)}; expected the same depth. Build the module with {length} blocks, or start a new fit."
            )

    # -- growth

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        if batch_idx % session.trainer.accumulate_grad_batches:
            return
        stack, target = self._grown(), target_count(self.stages, session.progress.u)
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
        """Let ``count`` blocks run, the new ones made from those that ran until now."""
        stack = self._grown()
        pairs = [
            pair
            for j in range(stack.active, count)
            # block j := block (j mod L)
            for pair in copy_block(stack.blocks[source_of(j, count=stack.active)], stack.blocks[j])
        ]
        fresh = self._zero(session, count, batch, batch_idx) if self.init == "identity" else frozenset()
        for source, target in pairs:
            for optimizer in session.optimizers:
                optimizer.state.pop(target, None)
            if self.copy_optimizer_state and id(target) not in fresh:
                copy_state(session.optimizers, source, target)
        self._switches.append((session.trainer.global_step, count))
        self._active = stack.active = count

    @torch.no_grad()
    def _zero(self, session: Session, count: int, batch: Any, batch_idx: int) -> frozenset[int]:
        """Make the new blocks the identity; the ids of the parameters that are 0 for it."""
        stack = self._grown()
        fresh: set[int] = set()
        with unseen(session):
            call = call_of(session, stack.blocks[stack.active - 1], batch, batch_idx)
            finite = bool(hidden_of(*call).isfinite().all())  # what has diverged tells nothing
            for block in stack.blocks[stack.active : count]:
                parameters = dict(block.named_parameters())
                values = {name: parameters[name].detach().clone() for name in self._zeros or ()}
                for name in values:
                    parameters[name].zero_()
                # weights that were 0 when the run began may not be so now
                if any(session.gather(finite and not is_identity(block, call))):
                    for name, value in values.items():
                        parameters[name].copy_(value)
                    self._zeros = self._find_zeros(session, block, call)
                    for name in self._zeros:
                        parameters[name].zero_()
                fresh |= {id(parameters[name]) for name in self._zeros or ()}
        return frozenset(fresh)

    def _try_identity(self, session: Session, batch: Any, batch_idx: int) -> list[str]:
        """What must be 0 of a block for it to be the identity, found on the first that does not run yet."""
        stack = self._grown()
        with unseen(session):
            call = call_of(session, stack.blocks[stack.active - 1], batch, batch_idx)
            return self._find_zeros(session, stack.blocks[stack.active], call)

    def _find_zeros(self, session: Session, block: nn.Module, call: Call) -> list[str]:
        inside = {id(m) for m in block.modules()}
        others = (m for m in session.module.modules() if id(m) not in inside)
        used = frozenset(id(p) for m in others for p in m.parameters(recurse=False))
        found = zeros_for_identity(block, lambda: is_identity(block, call), keep=used)
        found = session.trainer.strategy.broadcast(found)
        if found is None:
            raise ValueError(
                f"ProgressiveStacking(init='identity'): a block of {self._grown()} does not hand its input on even with"
                " all its own weights zero; expected pre-norm residual blocks, h + f(norm(h)). Post-norm blocks, such"
                " as BERT's, normalise the sum itself. Use init='stack'."
            )
        return found

    def _grown(self) -> BlockStack:
        assert self._stack is not None, "on_model has found the blocks"
        return self._stack

    # -- state and report

    @override
    def detach(self, session: Session) -> None:
        if self._stack is not None:
            self._learnt, self._stack = self._stack.state_dict(), None

    @override
    def state_dict(self) -> dict[str, Any]:
        stack = self._learnt if self._stack is None else self._stack.state_dict()
        if stack is None:
            return {}
        switches = [list(switch) for switch in self._switches]
        return {"active": self._active, "switches": switches, "zeros": self._zeros, "stack": stack}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._active, self._learnt, self._zeros = state_dict["active"], state_dict["stack"], state_dict["zeros"]
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


def _checked(stages: Any) -> list[tuple[float, int]]:
    """``stages`` as a list of pairs, or a ``ValueError`` that says what is wrong with them."""

    def fail(why: str) -> ValueError:
        return ValueError(
            f"ProgressiveStacking(stages={stages!r}): {why}; expected pairs (fraction of the budget in [0, 1), number"
            " of blocks >= 1), both growing, the first fraction 0, e.g. [(0.0, 3), (0.25, 6), (0.5, 12)]."
        )

    if isinstance(stages, str) or not isinstance(stages, Sequence) or not stages:
        raise fail(f"got {type(stages).__name__}" if stages else "there is no stage")
    pairs: list[tuple[float, int]] = []
    for stage in stages:
        if not isinstance(stage, Sequence) or isinstance(stage, str) or len(stage) != 2:
            raise fail(f"{stage!r} is no pair")
        fraction, count = stage
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0.0 <= fraction < 1.0:
            raise fail(f"the fraction {fraction!r} is not in [0, 1)")
        if isinstance(count, bool) or not isinstance(count, int | float) or count != int(count) or count < 1:
            raise fail(f"{count!r} is no number of blocks")
        pairs.append((float(fraction), int(count)))
    if pairs[0][0] != 0.0:
        raise fail(f"the first stage starts at {pairs[0][0]}, and nothing says how many blocks run before")
    for (before, fewer), (after, more) in pairwise(pairs):
        if after <= before:
            raise fail(f"the fraction {after} does not come after {before}")
        if more <= fewer:
            raise fail(f"{fewer} blocks shrink to {more}" if more < fewer else f"{more} blocks do not grow")
    return pairs
