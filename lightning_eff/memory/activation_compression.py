"""Compressed activations: an exact forward pass, and a backward pass from quantised copies of what it saved.

ActNN (Chen et al. 2021, arXiv:2104.14129): groups, stochastic rounding; GACT (Liu et al. 2022, arXiv:2206.11357): any
network, bits by measured sensitivity; Mesa (Pan et al. 2021, arXiv:2111.11124): running ranges.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._needs.needs import Need
from lightning_eff._core.batches import num_samples
from lightning_eff._core.losses import loss_of
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, needs_memory_bound
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step, silent, snapshot
from lightning_eff._core.technique import Control, Technique
from lightning_eff.memory._compression.arguments import LEVELS, Bits, Level, Method, check_arguments, check_not_compiled
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
    """Hold what the forward pass saves for the backward pass in 8, 4 or 2 bits an element instead of 16 or 32.

    The forward pass, and so the loss, is exact. A saved tensor is cut into groups of ``group_size`` consecutive elements;
    each keeps its minimum and scale in float32, and each element a code. With stochastic rounding the decoded tensor,
    and so the gradient of every linear map's weight, is right on average.

    Never compressed: parameters, also in the copies that autocast makes; the batch and buffers; the loss's own tensors;
    integers; statistics of norms; tensors of fewer than 256 elements; what custom autograd Functions and checkpoints save;
    what is saved by operations whose derivative has a pole or a jump; and, counted in ``unfit``, tensors that hold NaN or
    infinity or would round too badly. Two-valued tensors, such as dropout masks, and what ReLU saves take one bit,
    exactly. What linear maps and norms behind the blocks (the head's) save gets 8 bits; those before the blocks (the
    embeddings'), and queries and keys of fused attention, twice the bits, up to 8. Fused attention without dropout runs
    again in the backward pass, on the decoded tensors, so that its output and log-sum-exp are not held; that of
    ``nn.MultiheadAttention`` is left to autograd. A tensor that several operations save is compressed once; one that is
    ``a x + b`` of a saved ``x`` (numbers ``a`` and ``b``; half of what GELU's tanh form saves), or that a ``LayerNorm``
    makes of it, needs no codes of its own; and one that is changed in place after it was saved raises as in plain autograd.

    ``bits="auto"`` (GACT) gives each tensor 1, 2, 3, 4 or 8 bits, so that the gradient's expected error is least at an
    average of ``budget`` bits, in which a tensor without codes of its own counts with 0: here also what GELU and SiLU make
    of a saved tensor. Queries, keys and what has 8 bits above have 4 at least. One bit counts four times where a tensor is
    no linear map's input. Sensitivities are measured on the step's batch, at the first step, at a hundredth, a tenth and a
    third of ``interval``, and at every ``interval``-th: one pass for all linear maps' inputs, and one for each other kind
    of tensor, all blocks together; a GPT-2 has a dozen. These passes hold 8 bits, and take two more gradients' memory.

    ``method="mesa"`` codes in 8 bits by running minima and ranges (decay 0.9), one of each head for attention's tensors
    and one of each other tensor, so that hardly anything is kept beside the codes. They are clamped at both ends; a tensor
    of which clamping takes more than 1 % of the variance is kept exact, and counted in ``unfit``. Each process has its own
    ranges, which are part of a checkpoint.

    Logged: ``saved_bytes``, held between forward and backward; ``exact_bytes``, what plain autograd would hold;
    ``ratio``, the latter over the former; ``bits``, the mean of what is held in codes; ``unfit``, see above; the bytes
    held of each category: ``linear_bytes``, ``attention_bytes``, ``norm_bytes``, ``activation_bytes``,
    ``elementwise_bytes``, ``mask_bytes``, and ``kept_bytes`` of all that is exact; with ``offload`` ``host_bytes``, which
    are not among ``saved_bytes``; on CUDA ``allocated_bytes``, by how much the forward pass raised what the allocator has
    handed out. All of the last forward pass of the step.

    Args:
        bits: 8, 4 or 2, or "auto"; 32 compresses nothing, which is plain training.
        method: "group", or "mesa", which needs ``bits=8``.
        group_size: elements, a power of two from 16 to 8192; "mesa" does not use it. Scale and minimum take 64 bits of
            each group.
        stochastic_rounding: round up with the probability that makes the mean right; else to nearest, which is biased.
        budget: with "auto" alone, the average bits of an element, from 1 to 8; None is 3.
        layers: the blocks whose tensors are compressed, as a path, a pattern or a list of paths; None
            compresses those of the whole ``training_step``.
        convolutions_only: compress what convolutions save, and keep all else as it is.
        offload: hold the codes in host memory: copied there and back beside the computing, through pinned memory. Scales,
            minima and masks stay.
        interval: optimizer steps, >= 1, from one measurement to the next with "auto".

    Raises:
        ValueError: if an argument is out of range; at setup, if ``layers`` names no stack of blocks, if a submodule is
            compiled, if the precision plugin compresses too, with ``offload`` on a CPU, or with "auto" under manual
            optimization; in the first step, before any weight changes, if nothing that it saves can be compressed.
    """

    saves: ClassVar[str] = "activation memory: 4, 7 or 12 times less at 8, 4 or 2 bits, or more"
    paper: ClassVar[str] = (
        "Chen et al. 2021, arXiv:2104.14129; Liu et al. 2022, arXiv:2206.11357; Pan et al. 2021, arXiv:2111.11124"
    )
    constraints: ClassVar[str] = "no compiled submodules; time for coding and decoding; noise in the gradient"
    needs: ClassVar[Need] = Need.SAVED
    survey: ClassVar[Survey | None] = Survey("activation compressed training", zhuang="3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"bits": Choice((2, 4, 8))}, needs_memory_bound)
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds, where it fits in memory; where it does not, block checkpointing"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "ACTPrecision": "it compresses activations too",
        "ActivationOffload": "each decides what becomes of a saved tensor, and autograd asks the inner one alone",
    }
    needs_automatic_optimization: ClassVar[bool] = False

    def __init__(
        self,
        bits: Bits = 4,
        *,
        method: Method = "group",
        group_size: int = 256,
        stochastic_rounding: bool = True,
        budget: float | None = None,
        layers: str | Sequence[str] | None = None,
        convolutions_only: bool = False,
        offload: bool = False,
        interval: int = 1000,
    ) -> None:
        check_arguments("ActivationCompression", bits=bits, method=method, group_size=group_size)
        if budget is not None and bits != "auto":
            raise ValueError(
                f"ActivationCompression({bits=}, {budget=}): expected budget=None, because {bits} bits are the same for"
                " every tensor. Use bits='auto' to have an average kept."
            )
        if budget is not None and not CHOICES[0] <= budget <= CHOICES[-1]:
            raise ValueError(
                f"ActivationCompression({budget=}): expected an average from 1 to 8 bits, those a tensor can get."
            )
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ValueError(
                f"ActivationCompression({interval=}): expected an integer >= 1, the steps between measurements."
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
        self._reset()

    @classmethod
    def level(cls, level: Level) -> "ActivationCompression":
        """The technique at one of ActNN's levels (Chen et al. 2021).

        Args:
            level: "L0" compresses nothing; "L1" to 4 bits what convolutions save, and nothing else; "L2" all to 4 bits;
                "L3" to 2 bits on average, by sensitivity; "L4" as "L3", with the codes in host memory.

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

    @property
    @override
    def neutral(self) -> bool:
        return self.bits == EXACT_BITS

    @override
    def check(self, session: Session) -> None:
        if self.bits == "auto" and not session.module.automatic_optimization:
            raise ValueError(
                f"ActivationCompression(bits='auto'): {type(session.module).__name__} has automatic_optimization=False;"
                " expected True, because each pass that measures sensitivities would take the module's optimizer steps"
                " too. Give a number of bits."
            )
        if self.offload and session.trainer.strategy.root_device.type == "cpu":
            raise ValueError(
                "ActivationCompression(offload=True): the module is on the CPU, whose memory is the host's; expected a"
                " device of its own to move codes off. Leave offload out."
            )

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        session.chain.add(Stage.SAVE, self._link)

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
        """Whether what is saved now is of the blocks and of the operations that are to be compressed."""
        assert self._engine is not None, "it asks"
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
        assert engine is not None, "on_model has made it"
        if self._allocation is not None and self._passes == 0 and self._is_due(step):
            self._measure(step, batch, proceed)
        self._passes += 1
        # the first pass may be an error, which loses nothing; one that only scores samples has nothing to save
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
        """Learn what rounding each tensor does to this batch's gradient, and solve for the bits anew.

        What is not finite, as with an overflowing gradient, is not learnt.
        """
        engine, allocation, session = self._engine, self._allocation, self.session
        assert engine is not None and allocation is not None, "on_model has made them"
        began, seed = time.perf_counter(), self._seed(step, 0)
        own, passes = measure(engine, lambda: self._gradient(engine, seed, step, batch, proceed), session.gather)
        found = over_ranks(session.gather(own))
        if found.values and sum(found.values.values()) < float("inf"):
            allocation.learn(found.values, found.numel, found.shared, set(found.wide))
        self._measured += 1
        cost = session.chain.cost
        cost.forward_passes += passes
        cost.backward_passes += passes
        with contextlib.suppress(ValueError):  # a batch without tensors has no number of samples, and need not
            cost.forward_samples += passes * num_samples(batch)
        cost.seconds += time.perf_counter() - began

    def _gradient(self, engine: Engine, seed: int, step: Step, batch: Any, proceed: Proceed) -> list[Tensor | None]:
        """The gradient of every parameter in a pass that leaves no trace; empty where the step has no loss."""
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

    # -- what Lightning and the report see

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
        """The running ranges of every rank, each of which has its own."""
        session = self._session or self._past
        return [own] if session is None else session.gather(own)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._learnt, self._measured = state_dict["allocation"], state_dict["measured"]
        self._last = dict(state_dict["last"])
        self._acts = self._last["exact_bytes"] > 0  # a resumed run may begin with a pass that scores samples
        self._all_ranges = state_dict.get("ranges")

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return dict(self._last)

    @override
    def summary(self) -> str:
        if not self._last["saved_bytes"]:
            return "nothing compressed"
        measured = f", sensitivities measured {self._measured} times" if self._measured else ""
        return (
            f"{self._last['saved_bytes'] / 1e6:,.1f} MB held between forward and backward instead of"
            f" {self._last['exact_bytes'] / 1e6:,.1f} ({self._last['ratio']:.1f} times less), {self._last['bits']:.2f}"
            f" bits an element{measured}"
        )
