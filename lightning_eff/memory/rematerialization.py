"""Rematerialisation: save less in the forward pass, and run blocks again in the backward pass (Chen et al. 2016)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_eff._core._lightning.names import is_a
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._needs.offers import is_plain
from lightning_eff._core.blocks import BlockStack, refuse_compiled_around
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, needs_blocks, needs_memory_bound
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step, looking
from lightning_eff._core.technique import Control, Technique
from lightning_eff.memory._hosting.bandwidth import measure_bandwidth
from lightning_eff.memory._planning import chain as _chain
from lightning_eff.memory._planning import plan as _plan
from lightning_eff.memory._planning.chain import Item
from lightning_eff.memory._planning.plan import Plan
from lightning_eff.memory._recompute.calls import hand_over, refuse_checkpointed, without_caches
from lightning_eff.memory._recompute.offloading import Offloading
from lightning_eff.memory._recompute.optimum import agreed, measure, parse_budget, plan_from, plan_state, solve, tell
from lightning_eff.memory._recompute.profile import Profiler
from lightning_eff.memory._recompute.recomputation import Recomputation
from lightning_eff.memory._recompute.selective import Selective

Policy = Literal["full", "sqrt", "selective", "optimal"]


def _from_share(cls: Any, values: Mapping[str, Any], profile: RunProfile) -> Any:
    """``share`` of what storing all takes is the budget of the policy that has one."""
    optimal = values["policy"] == "optimal"
    return cls(policy=values["policy"], memory_budget=values["share"] if optimal else None)


COMPRESSING = ("ActivationCompression", "ACTPrecision")  #: with loss: numbers depend on which tensors autograd saves
MEASURED = (
    "its plan for policy='optimal' is made of measured times, and anew where the network or the batches grow, and what is"
    " compressed depends on it, so that a resumed run would be another one; expected policy='full', 'sqrt' or 'selective'"
)
FREEZING = ("LayerFreezing", "GreedyLayerwise")  #: frozen blocks keep no activations
OF_ALL = (
    "the plan for policy='optimal' is made for blocks that keep activations, of which frozen blocks keep none; expected"
    " policy='full', 'sqrt' or 'selective'"
)


class Rematerialization(Technique):
    """Keep less of the blocks between forward and backward, and run them again when their backward pass needs it.

    Losses, gradients and random numbers are bit for bit those of plain training, whatever the policy: blocks run again
    with the same dropout masks, in the same autocast, without touching BatchNorm's statistics twice. The user's own loop
    over the blocks stays as it is; blocks that another technique drops are not run again, and evaluation is plain.

    - ``"full"``: every block is run again from its own input.
    - ``"sqrt"``: about sqrt(n) segments of blocks, each run again from its input; the last one is kept.
    - ``"selective"``: what matrix products and attention return is kept, the rest of a block is computed again (torch's
      selective checkpointing). Attention with dropout is run again too, so that its masks are right.
    - ``"optimal"``: each block is measured on the first batch, before any weight has changed, and the fastest plan that
      fits ``memory_budget`` is run: which blocks to keep, which to run again and from where, segments within segments
      (Herrmann et al.). The plan is printed, and drawn by :meth:`draw`. It is made anew for batches larger than those
      seen before (not where parameters are sharded: let the first batch be the largest), and when other blocks run.
      With ``offload`` the plan may also move what blocks save, or segments start from, to host memory and back, where the
      measured bandwidth of copies makes that faster (Beaumont et al.). On a CPU nothing is gained by it.

    The budget counts what the stack of blocks holds: inputs, what autograd saves, and the temporary memory of a block
    that runs, as far as torch sees it. Parameters, their gradients, and what lies outside the blocks are not counted.

    Logged: ``recomputed_calls``, forward calls of blocks that the step's backward pass added; ``input_bytes``, what is
    kept of the arguments of blocks that run again (not with ``"selective"``); with ``"optimal"`` also
    ``predicted_peak_bytes`` and ``predicted_seconds`` of forward and backward passes through the blocks; with ``offload``
    ``bytes_to_host``, what the batch sent there.

    Args:
        policy: what is kept, see above.
        memory_budget: for ``"optimal"``, and only there: bytes as an int, ``"8GB"`` or ``"512MiB"``, or as a float in
            (0, 1] the fraction of what storing all blocks takes; where the network grows, all that it will have. 1.0 is
            plain training.
        layers: the blocks, as a path, a pattern (``"block_*"``) or a list of paths; None finds the longest stack.
        offload: for ``"optimal"``, and only there: let the plan use host memory.

    Raises:
        ValueError: if an argument is out of its range; at setup, if blocks are checkpointed already, are shared (with
            ``"sqrt"`` and ``"optimal"``), or if the strategy or manual optimization does not allow the policy; at the
            first batch, if no plan fits the budget. Beside what compresses activations with loss, ``"optimal"`` is refused:
            its plans follow measured times, and compression what is kept, so that a run would not resume exactly.
        RuntimeError: in a training step, if a block cannot be run again: it changes an argument in place, asks for
            gradients within its forward pass, or does something else the second time.

    Sources:
        Chen et al. 2016, arXiv:1604.06174; Herrmann et al. 2019, HAL-02352969; Beaumont et al. 2021, NeurIPS.
    """

    saves: ClassVar[str] = "activation memory of the blocks, for at most one more forward pass of them"
    paper: ClassVar[str] = "Chen et al. 2016, arXiv:1604.06174; Herrmann et al. 2019, HAL-02352969"
    constraints: ClassVar[str] = (
        "blocks that do the same when they run again; 'sqrt' and 'optimal' not under FSDPStrategy; 'optimal' with"
        " automatic optimization"
    )
    survey: ClassVar[Survey | None] = Survey("rematerialization", zhuang="3", shen="6")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"policy": Choice(("full", "sqrt", "selective", "optimal")), "share": Choice((0.3, 0.5, 0.7))},
        lambda profile: needs_blocks(profile) or needs_memory_bound(profile),
        _from_share,
    )
    sparse_gradients: ClassVar[bool] = True
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds: the gradients are the same, so what counts is time and memory, and what the"
        " memory is then used for"
    )
    needs_automatic_optimization: ClassVar[bool] = False
    needs: ClassVar[Need] = Need.SAVED

    def __init__(
        self,
        policy: Policy = "full",
        *,
        memory_budget: int | float | str | None = None,
        layers: str | Sequence[str] | None = None,
        offload: bool = False,
    ) -> None:
        if policy not in get_args(Policy):
            raise ValueError(
                f"Rematerialization(policy={policy!r}): expected one of {', '.join(map(repr, get_args(Policy)))}."
            )
        if (memory_budget is None) == (policy == "optimal"):
            raise ValueError(
                f"Rematerialization(policy={policy!r}, memory_budget={memory_budget!r}): expected a memory_budget with"
                " policy='optimal', and with it alone, because the other policies do not look at one. "
                + ("Give one, such as 0.5 or '8GB'." if memory_budget is None else "Set policy='optimal'.")
            )
        if offload and policy != "optimal":
            raise ValueError(
                f"Rematerialization(policy={policy!r}, offload=True): expected offload=True with policy='optimal' alone,"
                " because it is a choice of its plan. Set policy='optimal', or use ActivationOffload."
            )
        self.policy: Policy = policy
        self.offload = offload
        if policy == "optimal":  # the other policies' plans are the same whenever they are made
            vars(self)["conflicts"] = {**dict.fromkeys(COMPRESSING, MEASURED), **dict.fromkeys(FREEZING, OF_ALL)}
        self.memory_budget = None if memory_budget is None else parse_budget(memory_budget)
        self.layers = layers
        self._reset()

    def _reset(self) -> None:
        self.plan: Plan | None = None
        self._offloading: Offloading | None = None
        self._bandwidth: float | None = None
        self._casts = 0
        self._size = 0
        self._planned = 0
        self._batch: tuple[Any, int] | None = None
        self._stack: BlockStack | None = None
        self._engine: Recomputation | Selective | None = None
        self._profiler: Profiler | None = None
        self._saving = False
        self._reruns = self._steps = self._last = self._input_bytes = self._to_host = 0

    @property
    @override
    def neutral(self) -> bool:
        return isinstance(self.memory_budget, float) and self.memory_budget == 1.0

    @override
    def check(self, session: Session) -> None:
        strategy = session.trainer.strategy
        if is_a(strategy, FSDPStrategy) and self.policy in ("sqrt", "optimal"):
            raise ValueError(
                f"Rematerialization(policy={self.policy!r}): got FSDPStrategy; expected a strategy under which a block's"
                " parameters can be had for a run out of turn, because several blocks run again together. Use"
                " policy='full' or 'selective', or strategy='ddp'."
            )
        if self.policy == "optimal" and not getattr(strategy, "whole_steps", is_plain(strategy)):
            raise ValueError(
                f"Rematerialization(policy='optimal'): got {type(strategy).__name__} with sharded parameters or a pipeline;"
                " expected processes that can each run training_step by themselves, because blocks are measured in such a"
                " run. Use policy='full', 'sqrt' or 'selective', or HybridParallelStrategy(shard=False) without a pipeline."
            )
        if self.policy == "selective" and getattr(strategy, "splits_backward", False):
            raise ValueError(
                f"Rematerialization(policy='selective'): got {type(strategy).__name__} with a schedule that splits the"
                " backward pass; expected one backward pass for each forward pass, because torch gives what is kept once"
                " only. Use policy='full' or 'sqrt', or schedule='1F1B', 'GPipe', 'Interleaved1F1B' or 'LoopedBFS'."
            )
        if self.policy == "optimal" and not session.module.automatic_optimization:
            raise ValueError(
                f"Rematerialization(policy='optimal'): {type(session.module).__name__} has automatic_optimization=False;"
                " expected True, because the blocks are measured in a run of training_step that must not step the"
                " optimizer. Use another policy."
            )

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        session.chain.add(Stage.SAVE, self._link)

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        stack = self._stack = session.stack(self.layers, who="Rematerialization", chain=False)
        if self.policy in ("sqrt", "optimal") and len({id(block) for block in stack.blocks}) < len(stack):
            raise ValueError(
                f"Rematerialization(policy={self.policy!r}): {stack} holds the same block several times; expected"
                " different ones, because a plan names each. Use policy='full', or name another stack by layers=."
            )
        refuse_checkpointed(session.module, stack)
        refuse_compiled_around(
            session.module,
            stack.path,
            who="Rematerialization",
            way_out="Compile the blocks themselves, or set torch._functorch.config.activation_memory_budget and take"
            " Rematerialization out.",
        )

    @override
    def on_optimizers(self, session: Session) -> None:
        stack = self._found()
        if any("_call_impl" in vars(block) for block in stack.blocks):
            raise ValueError(
                f"Rematerialization: another technique handles the calls of {stack} already; expected to be the only one,"
                " because both decide what is kept of a block. Leave the other's layers= out, so that it handles the rest"
                " of the step, or take one of them out."
            )
        if self.policy == "selective":
            self._engine = Selective(stack.blocks)
        else:
            self._offloading = Offloading() if self.offload else None
            self._engine = Recomputation(stack.blocks, self._offloading)
        hand_over(stack, session.patches, self._call)
        self._follow()

    def _found(self) -> BlockStack:
        assert self._stack is not None, "on_model has found the blocks"
        return self._stack

    def _follow(self) -> None:
        """Let the engine follow the policy for the blocks that run now."""
        if not isinstance(self._engine, Recomputation):
            return
        items: Sequence[Item] = ()
        if self.policy == "optimal":
            items = () if self.plan is None else self.plan.items
        else:
            blank = tuple(_chain.Stage(str(i), 0.0, 0.0, 0, 0, 0, 0, 0) for i in range(self._found().active))
            items = (_plan.full if self.policy == "full" else _plan.sqrt)(blank).items
        self._engine.follow(items)
        if self._offloading is not None:
            self._offloading.follow(self.plan)

    # -- the plan

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        if self.policy != "optimal":
            return
        self._batch = (batch, batch_idx)
        if self.plan is None or self._planned != self._found().active:
            self._find(session, together=True)
        elif _size(batch) > self._size and _whole(session):
            self._find(session, together=False)  # other ranks may have smaller batches; plans may differ among them

    @override
    def on_blocks_changed(self, session: Session) -> None:
        if self._engine is None or self._planned == self._found().active:
            return
        if self.policy != "optimal":
            self._follow()
        elif self._batch is not None:
            self._find(session, together=True)

    def _find(self, session: Session, *, together: bool) -> None:
        """Measure and solve."""
        assert self._batch is not None and self.memory_budget is not None, "on_batch_start has set it"
        stack = self._found()
        measured = measure(session, stack, *self._batch, self._measuring, together=together)
        if measured is None:  # the step skips this batch, and the next one is looked at
            return
        stages, casts = measured
        if together:
            stages, casts = agreed(session, stages, casts)
        if self.offload and self._bandwidth is None:
            bandwidth = min(measure_bandwidth(session.module.device))
            self._bandwidth = session.trainer.strategy.broadcast(bandwidth) if together else bandwidth
        self.plan = solve(stages, casts, self.memory_budget, num_blocks=len(stack), bandwidth=self._bandwidth)
        self._casts = casts
        self._size, self._planned = max(self._size, _size(self._batch[0])), stack.active
        self._follow()
        tell(self.plan, casts, stack.path)

    @contextmanager
    def _measuring(self, profiler: Profiler) -> Iterator[None]:
        self._profiler = profiler
        try:
            yield
        finally:
            self._profiler = None

    def draw(self, path: str | Path) -> None:
        """Draw the plan: what happens to each block, and the bytes held over the step against the budget.

        Args:
            path: of the picture; its ending says the format: .png, .svg, .pdf.

        Raises:
            RuntimeError: there is no plan: the policy is not ``"optimal"``, or no batch has been seen.
            ModuleNotFoundError: matplotlib is not installed.
        """
        if self.plan is None:
            raise RuntimeError(
                f"Rematerialization(policy={self.policy!r}).draw: there is no plan yet; expected policy='optimal' and a"
                " fit that has seen its first batch. Draw it in or after the fit."
            )
        self.plan.draw(path)

    # -- the step

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        self._saving = True
        if isinstance(self._engine, Recomputation):
            self._engine.begin()
        if self._offloading is not None:
            self._offloading.begin()
            self.session.when_step_ends(self._offloading.begin)
        try:
            return proceed(batch)
        finally:
            self._saving = False
            if isinstance(self._engine, Recomputation):
                self._engine.forget()

    def _call(self, index: int, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if looking():  # a pass of others, be it within one that is measured
            return run(*args, **kwargs)
        if self._profiler is not None:
            args, kwargs = without_caches(args, kwargs)
            return self._profiler.call(index, run, args, kwargs)
        if not self._saving or self._engine is None or not torch.is_grad_enabled():
            return run(*args, **kwargs)
        args, kwargs = without_caches(args, kwargs)
        return self._engine.call(index, run, args, kwargs)

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        assert self._engine is not None, "on_optimizers has made it"
        self._batch = None
        self._last, self._engine.reruns = self._engine.reruns, 0
        if isinstance(self._engine, Recomputation):
            self._input_bytes = self._engine.input_bytes
        if self._offloading is not None:
            self._to_host, self._offloading.store.bytes_to_host = self._offloading.store.bytes_to_host, 0
        self._reruns += self._last
        self._steps += 1

    @override
    def detach(self, session: Session) -> None:
        if self._offloading is not None:
            self._offloading.store.release()
        self._stack = self._engine = self._profiler = self._batch = self._offloading = None

    # -- state and report

    @override
    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"reruns": self._reruns, "steps": self._steps}
        if self.plan is not None:
            state |= {"plan": plan_state(self.plan), "casts": self._casts, "size": self._size}
            state |= {"planned": self._planned, "budget": self.memory_budget, "bandwidth": self._bandwidth}
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._reruns, self._steps = state_dict["reruns"], state_dict["steps"]
        alike = (state_dict.get("budget"), state_dict.get("bandwidth") is not None) == (
            self.memory_budget,
            self.offload,
        )
        if "plan" in state_dict and alike:
            self._bandwidth = state_dict["bandwidth"]
            self.plan, self._casts = plan_from(state_dict["plan"]), state_dict["casts"]
            self._size, self._planned = state_dict["size"], state_dict["planned"]
            self._follow()  # strategies that shard restore when the blocks have been handed over already

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        found: dict[str, float | int | Tensor] = {"recomputed_calls": self._last}
        if self.policy != "selective":
            found["input_bytes"] = self._input_bytes
        if self.plan is not None:
            found["predicted_peak_bytes"] = self.plan.peak_bytes + self._casts
            found["predicted_seconds"] = self.plan.seconds
        if self.offload:
            found["bytes_to_host"] = self._to_host
        return found

    @override
    def summary(self) -> str:
        return f"{self.policy}: {self._reruns / max(self._steps, 1):.1f} more forward calls of blocks a step"


def _whole(session: Session) -> bool:
    """Whether each rank has all parameters, and so need not do what the others do."""
    return is_plain(session.trainer.strategy)


def _size(batch: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
