"""Regional compilation: ``torch.compile`` of each block, once for all blocks that are alike (Ansel et al. 2024, PyTorch
2).
"""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Layers, Text
from lightning_eff._core._branches.side_by_side import seen_chains, side_by_side
from lightning_eff._core.blocks import Candidate, find_stack, refuse_compiled_around
from lightning_eff._core.search_space import Choice, SearchSpace, needs_blocks
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique
from lightning_eff.model.execution._compiled import Calls, CannotCompile, Event, Shapes, without_empty_caches

WHO = "RegionalCompilation"
Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
_SAVES = "compiled code decides itself what to save, and does not tell what a saved tensor is"
_MAPS = "each of its linear layers runs its own code, so every block would be compiled separately"


def stacks_of(module: nn.Module, layers: str | Sequence[str] | None) -> list[Candidate]:
    """Return the stack at the dotted path ``layers``; for None every stack of composite blocks, or else the longest stack.

    Raises:
        ValueError: if there is none, with the candidates.
    """
    if layers is None:
        found = [candidate for candidate in seen_chains(module) if candidate.composite]
        if found:
            return found
    without = functools.partial(side_by_side, module, by_name=True)
    return [find_stack(module, layers, who=WHO, in_runs=True, without=without)]


def check_stack(module: nn.Module, stack: Candidate) -> None:
    """Raise ``ValueError`` if the blocks of ``stack`` are already compiled, or cannot be compiled in one piece."""
    refuse_compiled_around(
        module, stack.path, who=WHO, way_out=f"Compile either the whole or the blocks: remove torch.compile or {WHO}."
    )
    for home, block in stack.named_blocks.items():
        for path, m in block.named_modules():
            name = f"{home}.{path}" if path else home
            if (
                hasattr(m, "_orig_mod")
                or m._compiled_call_impl is not None
                or hasattr(m.forward, "_torchdynamo_orig_callable")
            ):
                raise ValueError(
                    f"{WHO}: {name!r} is already compiled. Remove torch.compile from the module, since {WHO} compiles blocks"
                    f" itself and keeps the names in checkpoints, or remove {WHO}."
                )
            if m is not block and (m._backward_hooks or m._backward_pre_hooks):
                raise ValueError(
                    f"{WHO}: {name!r} has full backward hooks (register_full_backward_hook), which would break compiled code"
                    f" into pieces. Register them on whole blocks or outside of them, or remove {WHO}."
                )


class RegionalCompilation(Technique):
    """Compile the repeated blocks of a network with ``torch.compile``: each kind of block once, whatever the depth.

    Blocks of one class with parameters of the same shapes share one compiled function, with the block itself as an
    input, so compile time does not grow with depth. Compilation happens in the first step and takes tens of seconds
    with torch's own backend, ``inductor``. Afterwards fused kernels make each step faster. A small GPT on one CPU
    thread took a twelfth to a tenth less time per step, with no measurable difference in its loss at equal time. With
    22 s of compiling, a run of a minute was slower (docs/evidence.md). Its authors report more on GPUs.

    The module keeps its structure: there is no wrapper, checkpoints have the same names and load strictly with and
    without this callback, and copies and pickles are plain. Only training steps are compiled, including scoring passes
    within them; validation, test and prediction are plain. Hooks on a block itself stay outside the compiled code and
    see what they always do.

    Results equal plain training up to float32 rounding, because ``inductor`` adds in another order. Random numbers,
    such as dropout's, are also equal unless ``same_random=False``. A resumed run with the same settings equals the
    undisturbed one bit for bit, except in the autotuning modes, which choose kernels by measuring.

    **Shapes.** ``dynamic=False`` compiles again for each combination of shapes. ``dynamic=True`` compiles once for all
    shapes, into somewhat slower code. None, the default, compiles once for the shapes of the first batch and once for
    all others, such as a smaller last batch. If another technique changes shapes during the run
    (:class:`SequenceLengthWarmup`), None means True. If anything else that a block's code reads changes, the block is
    compiled again, and a log line says what changed. A warning says if torch's limit of versions
    (``torch._dynamo.config.recompile_limit``) is reached; after that, new versions run uncompiled.

    Empty key-value caches of Hugging Face models are not passed to compiled blocks. Nothing reads them in training, and
    they would make torch compile each block separately.

    Logged: ``setup_seconds``, the total compile time in this process; ``compilations``, the number of compiled frames,
    0 if this process compiled them before; ``blocks``, the number of blocks that run compiled.

    Args:
        mode: the mode of ``torch.compile``, only for ``inductor``. "reduce-overhead" uses CUDA graphs. None is
            "default".
        layers: the blocks, as a dotted path, a pattern or a list of paths. None takes every stack of
            repeated blocks.
        dynamic: whether one version serves all shapes, as described above.
        backend: the backend of ``torch.compile``. "aot_eager" and "eager" compile nothing and help to find faults. None
            is plain training.
        same_random: whether dropout draws what it draws in plain training. False lets ``inductor`` fuse its own
            generator into kernels; the distribution stays the same.

    Raises:
        ValueError: for a value of the wrong kind. At setup, if no blocks are found, blocks or modules around them are
            already compiled or have full backward hooks, the backend is unknown, or ``inductor`` lacks a C++ compiler
            (on a CPU) or Triton (on CUDA). In the first step, before any weight changes, if it calls no block as a
            whole.
        RuntimeError: in the first step, before any weight changes, if torch's compiler fails on a block.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[RegionalCompilation()])

    References:
        Ansel et al. 2024, "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
        Compilation", doi:10.1145/3620665.3640366.
    """

    saves = "step time, by fused kernels; compile time does not grow with depth"
    paper = "Ansel et al. 2024, doi:10.1145/3620665.3640366 (PyTorch 2)"
    constraints = "a stack of repeated blocks; a compiler for inductor"
    search_space = SearchSpace({"same_random": Choice((True, False))}, needs_blocks)
    control = Control(
        "the baseline for as many seconds, compile time included; results are equal up to rounding, and the baseline can be"
        " compiled too"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("ActivationCompression", "ACTPrecision"), _SAVES),
        **dict.fromkeys(("FP8Precision", "INT8Precision", "S2FP8Precision", "Wang2018FP8Precision"), _MAPS),
    }
    needs_automatic_optimization: ClassVar[bool] = False
    compiles: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"backend": None}
    stage = Stage.SAVE

    def __init__(
        self,
        mode: Mode | None = None,
        *,
        layers: Layers | None = None,
        dynamic: bool | None = None,
        backend: Annotated[str, Text("the name of a backend of torch.compile")] | None = "inductor",
        same_random: bool = True,
    ) -> None:
        if backend != "inductor" and mode is not None:
            raise ValueError(f"{WHO}({mode=}, {backend=}): only inductor has modes. Use mode=None.")
        self.mode: Mode | None = mode
        self.layers, self.dynamic, self.backend, self.same_random = layers, dynamic, backend, same_random

    def _reset(self) -> None:
        self._calls: Calls | None = None
        self._paths: list[str] = []  # the paths of the blocks
        self._first: dict[tuple[int, bool], Shapes] = {}
        self._events: list[Event] = []  # since the last batch
        self._told = 0.0  # seconds that were reported
        self._looked = False  # whether it was checked that blocks are called
        self._figures: dict[str, float] = {"setup_seconds": 0.0, "compilations": 0, "blocks": 0}

    # -- the run

    @override
    def check(self, session: Session) -> None:
        if self.backend is None:
            return
        backends = torch._dynamo.list_backends(exclude_tags=None)
        if self.backend not in backends:
            raise ValueError(
                f"{WHO}(backend={self.backend!r}): torch.compile has no such backend here. Use one of"
                f" {', '.join(sorted(backends))}."
            )
        device = session.trainer.strategy.root_device
        if self.backend == "inductor":
            self._check_compiler(device)

    def _check_compiler(self, device: torch.device) -> None:
        if device.type == "cpu":
            from torch._inductor.cpp_builder import get_cpp_compiler

            try:
                get_cpp_compiler()
            except Exception as error:
                raise ValueError(
                    f"{WHO}: torch's inductor found no C++ compiler, which it needs on a CPU. Put g++ or clang++ on the PATH,"
                    f" set the environment variable CXX, or remove {WHO}."
                ) from error
        elif device.type == "cuda":
            from torch.utils._triton import has_triton

            if not has_triton():
                raise ValueError(
                    f"{WHO}: torch's inductor needs Triton, and a GPU that Triton supports. Install triton, or remove {WHO}."
                )

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        stacks = stacks_of(session.module, self.layers)
        blocks: dict[int, tuple[str, nn.Module]] = {}
        for stack in stacks:
            check_stack(session.module, stack)
            for path, block in stack.named_blocks.items():
                blocks.setdefault(id(block), (path, block))
        changing = [type(t).__name__ for t in session.working if t.changes_shapes]
        dynamic = True if self.dynamic is None and changing else self.dynamic
        self._paths = [path for path, _ in blocks.values()]
        self._calls = Calls(
            [block for _, block in blocks.values()], self._settings(), dynamic=dynamic, on_event=self._events.append
        )
        self._calls.first.update(self._first)
        self._calls.begin()
        for index, (_, block) in enumerate(blocks.values()):
            session.patches.set(block, "_compiled_call_impl", functools.partial(self._call, self._calls, index))
        shapes = f", for any shapes because of {', '.join(changing)}" if dynamic and changing else ""
        rank_zero_info(f"{WHO}: will compile {', '.join(map(str, stacks))} in the first step{shapes}.")

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """Run the step, and check in the first training step that can that it calls blocks."""
        output = proceed(batch)
        if not self._looked and output is not None and torch.is_grad_enabled():
            used = self._calls is None or self._calls.used
            self._looked = bool(used) or not any(t.drops_blocks for t in self.session.working)
            if self._looked and not used:
                raise ValueError(
                    f"{WHO}: training_step called none of the blocks {self._paths[0]!r} .. {self._paths[-1]!r} as a whole, and"
                    f" only such calls are compiled. Call block(x) instead of its forward or its parts, name another stack by"
                    f" layers=, or remove {WHO}."
                )
        return output

    def _settings(self) -> dict[str, Any]:
        if self.backend != "inductor":
            return {"backend": self.backend}
        from torch._inductor import list_mode_options

        options = {**list_mode_options(self.mode or "default"), "fallback_random": self.same_random}
        return {"backend": "inductor", "options": options}

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        calls = self._calls
        if calls is None:
            return
        figures = {"setup_seconds": calls.watch.seconds, "compilations": calls.watch.events, "blocks": len(calls.used)}
        self._figures = figures
        if self._events:
            self._tell(session, calls)
            self._events.clear()
        given_up = calls.given_up()
        if given_up is not None:
            limit = torch._dynamo.config.recompile_limit
            rank_zero_warn(
                f"{WHO}: torch's compiler has reached its limit of versions for the code of {given_up.code}"
                f" (torch._dynamo.config.recompile_limit = {limit}), and runs further ones uncompiled from step"
                f" {session.trainer.global_step} on. This condition no longer holds: {given_up.broken}. Keep it the same from"
                " call to call, give dynamic=True if it is a shape, or raise the limit."
            )

    def _tell(self, session: Session, calls: Calls) -> None:
        """Log what was compiled in this batch, how long it took, and why."""
        seconds, self._told = calls.watch.seconds - self._told, calls.watch.seconds
        kinds = Counter(type(calls.blocks[event.block]).__name__ for event in self._events)
        what = ", ".join(f"{count} x {name}" for name, count in kinds.items())
        where = f"step {session.trainer.global_step}"
        rank_zero_info(f"{WHO}: compiled {what} in {seconds:.1f} s ({where}, {len(calls.used)} blocks run compiled)")
        for event in self._events:
            path = self._paths[event.block]
            if event.broken is not None:
                rank_zero_info(
                    f"{WHO}: {path!r} needed its own version ({where}), because this does not hold for it: {event.broken}"
                )
            if event.breaks:
                rank_zero_info(
                    f"{WHO}: {path!r} is compiled in {event.pieces} pieces, which gains less: {'; '.join(event.breaks)}"
                )

    @override
    def detach(self, session: Session) -> None:
        if self._calls is not None:
            self._calls.end()
            self._first = dict(self._calls.first)
            self._calls = None

    def _call(self, calls: Calls, index: int, *args: Any, **kwargs: Any) -> Any:
        """Call a block: compiled in training, plain in evaluation."""
        block = calls.blocks[index]
        if not (block.training or torch.is_grad_enabled()):
            return block._call_impl(*args, **kwargs)
        try:
            return calls.call(index, *without_empty_caches(args, kwargs))
        except CannotCompile as error:
            raise RuntimeError(
                f"{WHO}(backend={self.backend!r}): torch's compiler failed on {self._paths[index]!r}: {error.why}\nName"
                f" another stack by layers=, try backend='aot_eager' to find the cause, or remove {WHO}."
            ) from error

    # -- report and state

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return dict(self._figures)

    @override
    def summary(self) -> str:
        seconds, blocks = self._figures["setup_seconds"], self._figures["blocks"]
        if not blocks:
            return "no block ran compiled"
        return f"ran {blocks:g} blocks compiled, after {seconds:.1f} s of compiling"

    @override
    def state_dict(self) -> dict[str, Any]:
        first = self._calls.first if self._calls is not None else self._first
        own = [[kind, learning, list(map(list, shapes))] for (kind, learning), shapes in first.items()]
        session = self._session or self._past
        return {"first": [own] if session is None else session.gather(own)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        ranks = state_dict["first"]
        rank = self._session.rank if self._session is not None else 0
        first = ranks[rank] if rank < len(ranks) else ranks[0]
        self._first = {(kind, learning): tuple(map(tuple, shapes)) for kind, learning, shapes in first}
        if self._calls is not None:
            self._calls.first.update(self._first)
