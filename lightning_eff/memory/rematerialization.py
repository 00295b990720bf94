"""Rematerialization: save less in the forward pass, and recompute blocks in the backward pass (Chen et al. 2016)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Layers
from lightning_eff._core._lightning.names import is_a
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._needs.offers import is_plain
from lightning_eff._core.blocks import BlockStack, refuse_compiled_around
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, needs_blocks, needs_memory_bound
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
from lightning_eff.memory._recompute.selective import Selective, warn_on_cpu

Policy = Literal["full", "sqrt", "selective", "optimal"]


def _from_share(cls: Any, values: Mapping[str, Any], profile: RunProfile) -> Any:
    """Create the technique with ``share`` as the memory budget of the policy that has one."""
    optimal = values["policy"] == "optimal"
    return cls(policy=values["policy"], memory_budget=values["share"] if optimal else None)


COMPRESSING = ("ActivationCompression", "ACTPrecision")  #: lossy, so results depend on which tensors autograd saves
MEASURED = (
    "policy='optimal' plans by measured times, and compression depends on the plan, so the run would not resume exactly. Or use"
    " policy='full', 'sqrt' or 'selective'"
)
FREEZING = ("LayerFreezing", "GreedyLayerwise")  #: frozen blocks store no activations
OF_ALL = (
    "policy='optimal' plans for blocks that store activations, but frozen blocks store none. Or use policy='full', 'sqrt' or"
    " 'selective'"
)


class Rematerialization(Technique):
    """Save memory by recomputing blocks in the backward pass instead of storing their activations.

    Losses, gradients and random numbers are bit-identical to plain training under every policy. Blocks run again with the same
    dropout masks and autocast, and BatchNorm's statistics are updated once. The module's own loop over blocks is unchanged,
    blocks that another technique drops are not recomputed, and validation, test and prediction are plain.

    Use it when activations do not fit into memory, or to fit a larger batch. The policy trades memory for time:

    - ``"full"``: each block is recomputed from its own input. This needs the least memory of a simple rule and one more forward
      pass.
    - ``"sqrt"``: the n blocks form about sqrt(n) segments, each recomputed from its input. The last one is stored.
    - ``"selective"``: the outputs of matrix products and attention are stored, and the rest of a block is recomputed (torch's
      selective checkpointing). Attention with dropout is recomputed too, so that its masks are correct. This is for GPUs. On
      a CPU it saves little memory for much time, and a warning says so.
    - ``"optimal"``: each block is measured on the first batch, before any weight changes, and the fastest plan within
      ``memory_budget`` is used. A plan says which blocks to store, and from where to recompute the others, in nested segments
      (Herrmann et al.). It is logged, and :meth:`draw` plots it. A new plan is made for larger batches than before, and when
      other blocks run. If parameters are sharded, make the first batch the largest. With ``offload``, the plan may also move
      activations to host memory, where the measured bandwidth makes that faster (Beaumont et al.). On a CPU this gains nothing.

    The budget covers the stack of blocks: their inputs, what autograd saves, and the temporary memory of a running block, as
    far as torch sees it. It does not cover parameters, their gradients, or anything outside the blocks.

    It logs ``recomputed_calls``, the forward calls of blocks that the step's backward pass added, and ``input_bytes``, the size
    of the arguments stored for recomputation (not for ``"selective"``). With ``"optimal"``, also ``predicted_peak_bytes`` and
    ``predicted_seconds`` of the forward and backward pass through the blocks. With ``offload``, also ``bytes_to_host``, the
    bytes that the batch moved there.

    Args:
        policy: what is stored, as above.
        memory_budget: the memory for the blocks, required for ``"optimal"`` and only used there. It is bytes as an int,
            ``"8GB"`` or ``"512MiB"``, or a float in (0, 1], the fraction of what storing all blocks takes, including blocks
            that are added later. 1.0 is plain training.
        layers: the blocks, as a dotted path, a pattern (``"block_*"``) or a list of paths. None finds the longest stack.
        offload: whether the plan of ``"optimal"`` may use host memory.

    Raises:
        ValueError: for a value out of range. At setup, if blocks are checkpointed already or shared (with ``"sqrt"`` and
            ``"optimal"``), or if the strategy or manual optimization does not support the policy. At the first batch, if no
            plan fits the budget. ``"optimal"`` is also refused with lossy activation compression: its plans depend on measured
            times, and compression on the plan, so a run would not resume exactly.
        RuntimeError: in a training step, if a block cannot be recomputed: it changes an argument in place, asks for gradients
            within its forward pass, or behaves differently the second time.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[Rematerialization("optimal", memory_budget=0.5)])

    References:
        Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.
        Herrmann et al. 2019, "Optimal checkpointing for heterogeneous chains", HAL-02352969.
        Beaumont et al. 2021, "Efficient Combination of Rematerialization and Offloading for Training DNNs", NeurIPS.
    """

    saves: ClassVar[str] = "activation memory of the blocks, at the cost of recomputing them"
    paper: ClassVar[str] = "Chen et al. 2016, arXiv:1604.06174; Herrmann et al. 2019, HAL-02352969"
    constraints: ClassVar[str] = (
        "needs deterministic blocks; 'sqrt' and 'optimal' do not support FSDPStrategy; 'optimal' needs automatic"
        " optimization"
    )
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"policy": Choice(("full", "sqrt", "selective", "optimal")), "share": Choice((0.3, 0.5, 0.7))},
        lambda profile: needs_blocks(profile) or needs_memory_bound(profile),
        _from_share,
    )
    sparse_gradients: ClassVar[bool] = True
    control: ClassVar[Control] = Control(
        "the baseline for the same time, since gradients are bit-identical; compare time and memory"
    )
    needs_automatic_optimization: ClassVar[bool] = False
    needs: ClassVar[Need] = Need.SAVED
    stage: ClassVar[Stage | None] = Stage.SAVE

    def __init__(
        self,
        policy: Policy = "full",
        *,
        memory_budget: int | float | str | None = None,
        layers: Layers | None = None,
        offload: bool = False,
    ) -> None:
        if (memory_budget is None) == (policy == "optimal"):
            raise ValueError(
                f"Rematerialization(policy={policy!r}, memory_budget={memory_budget!r}): policy='optimal', and no other,"
                " needs a memory_budget. "
                + (
                    "Set memory_budget=0.5 or '8GB'."
                    if memory_budget is None
                    else "Set policy='optimal', or remove it."
                )
            )
        if offload and policy != "optimal":
            raise ValueError(
                f"Rematerialization(policy={policy!r}, offload=True): only the plan of policy='optimal' can offload."
                " Set policy='optimal', or use ActivationOffload."
            )
        self.policy: Policy = policy
        self.offload = offload
        if policy == "optimal":  # the plans of other policies do not depend on measurements
            vars(self)["conflicts"] = {**dict.fromkeys(COMPRESSING, MEASURED), **dict.fromkeys(FREEZING, OF_ALL)}
        self.memory_budget = None if memory_budget is None else parse_budget(memory_budget)
        self.layers = layers

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
                f"Rematerialization(policy={self.policy!r}): FSDPStrategy gathers parameters block by block, but"
                " this policy recomputes several blocks together. Use policy='full' or 'selective', or strategy='ddp'."
            )
        if self.policy == "optimal" and not getattr(strategy, "whole_steps", is_plain(strategy)):
            raise ValueError(
                f"Rematerialization(policy='optimal'): blocks are measured in one process, which {type(strategy).__name__} with"
                " sharded parameters or a pipeline does not support. Use policy='full', 'sqrt' or 'selective', or"
                " HybridParallelStrategy(shard=False) without a pipeline."
            )
        if self.policy == "selective" and getattr(strategy, "splits_backward", False):
            raise ValueError(
                f"Rematerialization(policy='selective'): the schedule of {type(strategy).__name__} splits the backward"
                " pass, but torch returns what is stored only once. Use policy='full' or 'sqrt', or schedule='1F1B', 'GPipe',"
                " 'Interleaved1F1B' or 'LoopedBFS'."
            )
        if self.policy == "optimal" and not session.module.automatic_optimization:
            raise ValueError(
                f"Rematerialization(policy='optimal'): {type(session.module).__name__} has automatic_optimization=False,"
                " so measuring the blocks would step its optimizers. Use policy='full', 'sqrt' or 'selective'."
            )

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        stack = self._stack = session.stack(self.layers, who="Rematerialization", chain=False)
        if self.policy in ("sqrt", "optimal") and len({id(block) for block in stack.blocks}) < len(stack):
            raise ValueError(
                f"Rematerialization(policy={self.policy!r}): {stack} holds the same block several times, but a plan"
                " treats each separately. Use policy='full', or name another stack with layers=."
            )
        refuse_checkpointed(session.module, stack)
        refuse_compiled_around(
            session.module,
            stack.path,
            who="Rematerialization",
            way_out="Compile the blocks themselves, or set torch._functorch.config.activation_memory_budget and remove"
            " Rematerialization.",
        )

    @override
    def on_optimizers(self, session: Session) -> None:
        stack = self._found()
        if any("_call_impl" in vars(block) for block in stack.blocks):
            raise ValueError(
                f"Rematerialization: another technique handles the calls of {stack} already, and both decide what is stored."
                " Remove layers= of the other technique, so that it handles the rest of the step, or remove one of them."
            )
        if self.policy == "selective":
            warn_on_cpu(session.trainer.strategy.root_device)
            self._engine = Selective(stack.blocks)
        else:
            self._offloading = Offloading() if self.offload else None
            self._engine = Recomputation(stack.blocks, self._offloading)
        hand_over(stack, session.patches, self._call)
        self._follow()

    def _found(self) -> BlockStack:
        assert self._stack is not None, "on_model finds the blocks"
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
            self._find(session, together=False)  # other ranks may have smaller batches, and other plans

    @override
    def on_blocks_changed(self, session: Session) -> None:
        if self._engine is None or self._planned == self._found().active:
            return
        if self.policy != "optimal":
            self._follow()
        elif self._batch is not None:
            self._find(session, together=True)

    def _find(self, session: Session, *, together: bool) -> None:
        """Measure the blocks and solve for a plan."""
        assert self._batch is not None and self.memory_budget is not None, "on_batch_start sets it"
        stack = self._found()
        measured = measure(session, stack, *self._batch, self._measuring, together=together)
        if measured is None:  # the step skips this batch; try the next one
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
        """Plot the plan: the treatment of each block, and the bytes held during the step against the budget.

        Args:
            path: the file of the picture. Its suffix is the format: .png, .svg, .pdf.

        Raises:
            RuntimeError: if there is no plan, because the policy is not ``"optimal"`` or no batch has been seen.
            ModuleNotFoundError: if matplotlib is not installed.
        """
        if self.plan is None:
            raise RuntimeError(
                f"Rematerialization(policy={self.policy!r}).draw: there is no plan yet. Set policy='optimal', and call draw"
                " after the first batch."
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
        if looking():  # a pass of another technique, even within one that is measured
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
        assert self._engine is not None, "on_optimizers creates it"
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
            self._follow()  # sharding strategies restore after the blocks were patched

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
        return f"{self.policy}: {self._reruns / max(self._steps, 1):.1f} more forward calls of blocks per step"


def _whole(session: Session) -> bool:
    """Return whether each rank has all parameters, and can therefore act alone."""
    return is_plain(session.trainer.strategy)


def _size(batch: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
