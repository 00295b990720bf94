"""Compressed activations: an exact forward pass, and a backward pass on quantized copies of the saved tensors.

ActNN (Chen et al. 2021, arXiv:2104.14129): groups and stochastic rounding. GACT (Liu et al. 2022, arXiv:2206.11357): any
network, bits by measured sensitivity. Mesa (Pan et al. 2021, arXiv:2111.11124): running ranges.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._arguments.kinds import Count, Layers, Number
from lightning_eff._core._needs.needs import Need
from lightning_eff._core.losses import loss_of
from lightning_eff._core.search_space import Choice, SearchSpace, needs_memory_bound
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step, silent, snapshot
from lightning_eff._core.technique import Control, Technique
from lightning_eff.memory._compression.arguments import (
    LEVELS,
    Bits,
    GroupSize,
    Level,
    Method,
    check_method,
    check_not_compiled,
)
from lightning_eff.memory._compression.bits import CHOICES, Allocation
from lightning_eff.memory._compression.engine import Engine
from lightning_eff.memory._compression.held import EXACT_BITS
from lightning_eff.memory._compression.ranges import RunningRanges, of_rank
from lightning_eff.memory._compression.report import refuse_idle
from lightning_eff.memory._compression.report import report as report_of
from lightning_eff.memory._compression.saved import CONVOLUTIONS
from lightning_eff.memory._compression.sensitivities import measure, over_ranks
from lightning_eff.memory._hosting.host import HostStore

DEFAULT_BUDGET = 3.0


class ActivationCompression(Technique):
    """Store the activations for the backward pass in 8, 4 or 2 bits per element instead of 16 or 32.

    The forward pass, and so the loss, is exact. A saved tensor is divided into groups of ``group_size`` consecutive elements.
    Each group stores its minimum and scale in float32, and each element a code. With stochastic rounding, decoded tensors are
    correct on average, and so are the weight gradients of linear layers.

    Use it when activations do not fit into memory. Encoding and decoding take time, and the gradient becomes noisier with fewer
    bits. If recomputation is fast enough, :class:`Rematerialization` is exact.

    These tensors are not compressed: parameters and their autocast copies, the batch, buffers, the loss's own tensors,
    integers, statistics of norms, tensors of fewer than 256 elements, and what custom autograd Functions, checkpoints and
    operations with a pole or jump in their derivative save. Tensors that contain NaN or infinity, or would round too badly, are
    also kept exactly, and counted in ``unfit``. Dropout masks and the input of ReLU need one bit and stay exact. The linear
    layers and norms behind the blocks get 8 bits. Those before the blocks, and queries and keys of fused attention, get twice
    the bits, up to 8. Fused attention without dropout is recomputed in the backward pass from the decoded tensors, except in
    ``nn.MultiheadAttention``. A tensor that several operations save is compressed once. Tensors that are ``a x + b`` of another
    saved tensor, or the output of ``LayerNorm`` on one, need no separate codes. A tensor that is changed in place after it
    was saved raises an error, as in plain autograd.

    ``bits="auto"`` (GACT) chooses 1, 2, 3, 4 or 8 bits per tensor, to minimize the expected error of the gradient at an average
    of ``budget`` bits. Tensors without their own codes count as 0 bits, here including the outputs of GELU and SiLU. Queries,
    keys and the tensors with 8 bits above get at least 4. One bit counts four times in the error, except for inputs of linear
    layers. Sensitivities are measured on a batch of the run: at the first step, after a hundredth, a tenth and a third of
    ``interval``, and then at every ``interval``-th step. This takes one pass for all inputs of linear layers and one per other
    kind of tensor (a dozen in GPT-2). These passes use 8 bits and the memory of two more gradients.

    ``method="mesa"`` uses 8 bits with a running minimum and range (decay 0.9), one per attention head and one per other tensor,
    so almost nothing is stored besides the codes. Codes are clamped at both ends. A tensor that loses more than 1 % of its
    variance to clamping is kept exactly, and counted in ``unfit``. Each process has its own ranges, and checkpoints store them.

    It logs, for the last forward pass of the step: ``saved_bytes``, the bytes held between forward and backward;
    ``exact_bytes``, those of plain autograd; ``ratio``, the second over the first; ``bits``, the mean over coded tensors;
    ``unfit``; the held bytes by category (``linear_bytes``, ``attention_bytes``, ``norm_bytes``, ``activation_bytes``,
    ``elementwise_bytes``, ``mask_bytes``, and ``kept_bytes`` for exact tensors); ``host_bytes`` with ``offload``, which are
    not part of ``saved_bytes``; and on CUDA ``allocated_bytes``, the growth of the allocator's memory in the forward pass.

    Args:
        bits: the bits per element. "auto" chooses them for each tensor, and 32 is plain training.
        method: how ranges are found. "group" stores a minimum and scale per group; "mesa" uses running ranges and 8 bits.
        group_size: the number of elements that share a minimum and a scale, which take 64 bits. Not used by "mesa".
        stochastic_rounding: whether to round up or down at random, which is correct on average. Rounding to nearest is biased.
        budget: the average bits per element for ``bits="auto"``. None is 3.
        layers: the blocks whose tensors are compressed, as a dotted path, a pattern or a list of paths. None
            compresses the whole ``training_step``.
        convolutions_only: whether to compress only what convolutions save.
        offload: whether to store the codes in host memory. They are copied asynchronously through pinned memory. Scales,
            minima and masks stay on the device.
        interval: the number of optimizer steps between two measurements for ``bits="auto"``.

    Raises:
        ValueError: for a value out of range. At setup, if ``layers`` names no stack of blocks, a submodule is compiled, the
            precision plugin compresses too, for ``offload`` on a CPU, or for "auto" with manual optimization. In the first
            step, before any weight changes, if nothing can be compressed.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[ActivationCompression(4)])

    References:
        Chen et al. 2021, "ActNN: Reducing Training Memory Footprint via 2-Bit Activation Compressed Training",
        arXiv:2104.14129. Liu et al. 2022, "GACT", arXiv:2206.11357. Pan et al. 2021, "Mesa", arXiv:2111.11124.
    """

    saves: ClassVar[str] = "activation memory: at least 4, 7 or 12 times less at 8, 4 or 2 bits"
    paper: ClassVar[str] = (
        "Chen et al. 2021, arXiv:2104.14129; Liu et al. 2022, arXiv:2206.11357; Pan et al. 2021, arXiv:2111.11124"
    )
    constraints: ClassVar[str] = "no compiled submodules; costs time for encoding and decoding; adds gradient noise"
    needs: ClassVar[Need] = Need.SAVED
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"bits": Choice((2, 4, 8))}, needs_memory_bound)
    control: ClassVar[Control] = Control(
        "the baseline for the same time if it fits into memory, or else block checkpointing"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "ACTPrecision": "it compresses activations too",
        "ActivationOffload": "both handle saved tensors, and autograd asks only the inner one",
    }
    needs_automatic_optimization: ClassVar[bool] = False
    neutral_at: ClassVar[Mapping[str, Any]] = {"bits": EXACT_BITS}
    stage: ClassVar[Stage | None] = Stage.SAVE

    def __init__(
        self,
        bits: Bits = 4,
        *,
        method: Method = "group",
        group_size: GroupSize = 256,
        stochastic_rounding: bool = True,
        budget: Annotated[float, Number(at_least=CHOICES[0], at_most=CHOICES[-1])] | None = None,
        layers: Layers | None = None,
        convolutions_only: bool = False,
        offload: bool = False,
        interval: Annotated[int, Count()] = 1000,
    ) -> None:
        check_method("ActivationCompression", bits=bits, method=method)
        if budget is not None and bits != "auto":
            raise ValueError(
                f"ActivationCompression({bits=}, {budget=}): a budget is an average, but {bits} bits apply to every"
                " tensor. Set bits='auto', or remove budget."
            )
        self.bits = bits
        self.method = method
        self.group_size = group_size
        self.stochastic_rounding = stochastic_rounding
        self.budget = DEFAULT_BUDGET if budget is None and bits == "auto" else budget
        self.layers = layers
        self.convolutions_only = convolutions_only
        self.offload = offload
        self.interval = interval

    @classmethod
    def level(cls, level: Level) -> "ActivationCompression":
        """Create the technique at one of ActNN's levels (Chen et al. 2021).

        Args:
            level: "L0" compresses nothing, "L1" only what convolutions save (4 bits), "L2" everything (4 bits), "L3" to 2
                bits on average by sensitivity, and "L4" like "L3" with the codes in host memory.

        Raises:
            ValueError: for any other level.
        """
        if level not in LEVELS:
            raise ValueError(f"ActivationCompression.level({level!r}): expected one of {', '.join(LEVELS)}.")
        return cls(**LEVELS[level])

    def _reset(self) -> None:
        self._engine: Engine | None = None
        self._allocation: Allocation | None = None
        self._learnt: dict[str, Any] | None = None
        self._ranges: RunningRanges | None = None
        self._all_ranges: list[dict[str, Tensor]] | None = None
        self._host: HostStore | None = None
        self._acts = False
        self._inside = 0
        self._passes = 0
        self._measured = 0
        self._last: dict[str, float | int] = report_of(None, offload=self.offload)

    @override
    def check(self, session: Session) -> None:
        if self.bits == "auto" and not session.module.automatic_optimization:
            raise ValueError(
                f"ActivationCompression(bits='auto'): {type(session.module).__name__} has automatic_optimization=False, so"
                " the passes that measure sensitivities would step its optimizers. Set a number of bits, such as bits=4."
            )
        if self.offload and session.trainer.strategy.root_device.type == "cpu":
            raise ValueError(
                "ActivationCompression(offload=True): the module is on the CPU, so there is no device to offload from."
                " Remove offload=True."
            )

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        check_not_compiled("ActivationCompression", session.module)
        if self.layers is not None:
            for block in {
                id(b): b for b in session.stack(self.layers, who="ActivationCompression", chain=False).blocks
            }.values():
                session.patches.set(block, "_call_impl", self._noting(block))
        if self.method == "mesa":
            past = None if self._all_ranges is None else of_rank(self._all_ranges, session.rank)
            self._ranges = RunningRanges(past)
        self._host = HostStore() if self.offload else None
        engine = self._engine = Engine(
            session.module,
            bits=4,
            group_size=self.group_size,
            ranges=self._ranges,
            host=self._host,
            stochastic=self.stochastic_rounding,
            only=self._is_asked if self.layers is not None or self.convolutions_only else None,
        )
        if isinstance(self.bits, int):
            engine.bits = self.bits
        else:
            assert self.budget is not None, "set with bits='auto'"
            self._allocation = Allocation(self.budget, engine.tensors.family)
            if self._learnt is not None:
                self._allocation.load_state_dict(self._learnt)
            engine.bits = self._allocation
            engine.tensors.derivations.curved = True

    def _is_asked(self) -> bool:
        """Return whether the current operation belongs to the blocks and operations to compress."""
        assert self._engine is not None, "the engine calls this"
        if self.layers is not None and not self._inside:
            return False
        return not self.convolutions_only or self._engine.tensors.operation in CONVOLUTIONS

    def _noting(self, block: nn.Module) -> Callable[..., Any]:
        call = block._call_impl

        def noting(*args: Any, **kwargs: Any) -> Any:
            self._inside += 1
            try:
                return call(*args, **kwargs)
            finally:
                self._inside -= 1

        return noting

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        self._passes = 0

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        engine = self._engine
        assert engine is not None, "on_model creates it"
        if self._allocation is not None and self._passes == 0 and self._is_due(step):
            self._measure(step, batch, proceed)
        self._passes += 1
        # if the first pass is refused, nothing is lost; a pass that only scores samples saves nothing
        put_back = None if self._acts or not torch.is_grad_enabled() else snapshot(step.module)
        with engine.forward(self._seed(step, self._passes), batch):
            output = proceed(batch)
        if put_back is not None and engine.ledger.exact_bytes:
            try:
                refuse_idle("ActivationCompression", engine.ledger)
            except ValueError:
                put_back()
                raise
            self._acts = True
        self._last = report_of(engine, offload=self.offload)
        return output

    def _seed(self, step: Step, number: int) -> int:
        session = self.session
        key = (self.name(), session.rank, step.global_step, step.batch_idx, number)
        return session.generator(*key).initial_seed()

    # -- sensitivities

    def _is_due(self, step: Step) -> bool:
        first = step.batch_idx % self.session.trainer.accumulate_grad_batches == 0 or not self._measured
        due = step.global_step % self.interval == 0 or step.global_step in (self.interval // n for n in (100, 10, 3))
        return first and (due or not self._measured)

    def _measure(self, step: Step, batch: Any, proceed: Proceed) -> None:
        """Measure the effect of rounding each tensor on this batch's gradient, and solve for the bits again.

        Non-finite results, as from an overflowing gradient, are ignored.
        """
        engine, allocation, session = self._engine, self._allocation, self.session
        assert engine is not None and allocation is not None, "on_model creates them"
        began, seed = time.perf_counter(), self._seed(step, 0)
        own, passes = measure(engine, lambda: self._gradient(engine, seed, step, batch, proceed), session.gather)
        found = over_ranks(session.gather(own))
        if found.values and sum(found.values.values()) < float("inf"):
            allocation.learn(found.values, found.numel, found.shared, set(found.wide))
        self._measured += 1
        session.chain.cost.add(batch, forward=passes, backward=passes, since=began)

    def _gradient(self, engine: Engine, seed: int, step: Step, batch: Any, proceed: Proceed) -> list[Tensor | None]:
        """Return the gradient of every parameter in a pass without side effects; empty if the step has no loss."""
        module = step.module
        with rng.fork(), silent(module):
            with engine.forward(seed, batch):
                loss = loss_of(proceed(batch))
            if loss is None or not loss.requires_grad:
                return []
            scaler = getattr(self.session.trainer.precision_plugin, "scaler", None)
            device = module.device.type
            plain = contextlib.nullcontext()
            if torch.is_autocast_enabled(device):
                plain = torch.autocast(device, enabled=False)
            with plain:
                scaled = loss if scaler is None else scaler.scale(loss)
                weights = [p for p in module.parameters() if p.requires_grad]
                return list(torch.autograd.grad(scaled, weights, allow_unused=True))

    # -- state and reports

    @override
    def detach(self, session: Session) -> None:
        if self._allocation is not None:
            self._learnt = self._allocation.state_dict()
        if self._host is not None:
            self._host.release()
        self._engine = self._allocation = self._host = None

    @override
    def state_dict(self) -> dict[str, Any]:
        learnt = self._learnt if self._allocation is None else self._allocation.state_dict()
        state = {"allocation": learnt, "measured": self._measured, "last": dict(self._last)}
        if self.method == "mesa":
            state["ranges"] = self._all_ranges if self._ranges is None else self._gathered(self._ranges.state_dict())
        return state

    def _gathered(self, own: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Gather the running ranges of all ranks."""
        session = self._session or self._past
        return [own] if session is None else session.gather(own)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._learnt, self._measured = state_dict["allocation"], state_dict["measured"]
        self._last = dict(state_dict["last"])
        self._acts = self._last["exact_bytes"] > 0  # a resumed run may begin with a pass that only scores samples
        self._all_ranges = state_dict.get("ranges")

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return dict(self._last)

    @override
    def summary(self) -> str:
        if not self._last["saved_bytes"]:
            return "compressed nothing"
        measured = f"; measured sensitivities {self._measured} times" if self._measured else ""
        return (
            f"held {self._last['saved_bytes'] / 1e6:,.1f} MB of activations instead of"
            f" {self._last['exact_bytes'] / 1e6:,.1f} ({self._last['ratio']:.1f} times less), at {self._last['bits']:.2f}"
            f" bits per element{measured}"
        )
