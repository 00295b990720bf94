"""Regional compilation: ``torch.compile`` of each block, once for all blocks that are alike (Ansel et al. 2024, PyTorch 2)."""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._branches.side_by_side import seen_chains, side_by_side
from lightning_eff._core.blocks import Candidate, find_stack, refuse_compiled_around
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique
from lightning_eff.model.execution._compiled import Calls, CannotCompile, Event, Shapes, without_empty_caches

WHO = "RegionalCompilation"
Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

_SAVES = "compiled code chooses itself what to save, and nothing says then what a saved tensor is"

_MAPS = "each of its linear maps runs code of its own, so that every block would be compiled by itself"


def _pointless(profile: RunProfile) -> str | None:
    return "there is no stack of blocks" if profile.num_blocks < 2 else None


def stacks_of(module: nn.Module, layers: str | Sequence[str] | None) -> list[Candidate]:
    """The stack at the dotted path ``layers``; or every stack whose blocks are made of several modules, else the longest.

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
    """Raise ``ValueError`` if the blocks of ``stack`` are compiled already, or cannot be compiled in one piece."""
    refuse_compiled_around(
        module, stack.path, who=WHO, way_out=f"Compile the whole or the blocks: take torch.compile or {WHO} out."
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
                    f"{WHO}: {name!r} is compiled already; expected plain blocks, since {WHO} compiles them itself and keeps"
                    f" checkpoints' names. Take torch.compile out of the module, or take {WHO} out."
                )
            if m is not block and (m._backward_hooks or m._backward_pre_hooks):
                raise ValueError(
                    f"{WHO}: {name!r} has full backward hooks (register_full_backward_hook), at which compiled code would"
                    f" break into pieces; expected them on whole blocks or outside of them. Register them there, or take {WHO}"
                    " out."
                )


class RegionalCompilation(Technique):
    """Run the blocks as compiled code: each kind of block is compiled once, whatever the depth.

    Blocks of one class and with parameters of the same shapes share one compiled code (``torch.compile`` on the call of a
    block, with the block itself as an input), so that what compiling takes does not grow with depth. It takes place in the
    first step, in tens of seconds for torch's own backend, ``inductor``. From then on a step's time falls by what fusing all
    that lies between matrix products saves: a twelfth to a tenth of the time of a small GPT on one thread of a CPU, which
    showed no difference in its loss at equal time; with compiling counted, 22 s of a minute, it is slower (docs/evidence.md).
    Its authors report more on GPUs.

    The module stays what it is: no wrapper, the same names in checkpoints, which load strictly with and without the
    technique; copies and pickles of it are plain. Training steps alone are compiled, scoring passes within them included;
    validation, test and prediction are plain. Hooks on a block itself stay outside of the compiled code and see what they
    always do.

    The numbers are those of plain training up to float32's rounding, since ``inductor`` adds up in another order, and so
    are the random numbers, such as dropout's, unless ``same_random=False``. A resumed run with the same settings is the
    undisturbed one bit for bit: which code runs depends on shapes and settings, and not on what came before. Exceptions are
    the autotuning modes, which choose kernels by measuring.

    **Shapes.** ``dynamic=False`` compiles anew for each combination of shapes. ``dynamic=True`` compiles once for all, for
    somewhat slower code. None, the default, has code of its own for the shapes of the first batch and one that takes any for
    all others, such as a last batch that is smaller; where another technique changes the shapes over the run
    (:class:`SequenceLengthWarmup`), it is True from the start. Each change of anything else that a block's code reads
    compiles it anew; what that was is told, and so is where torch's limit of versions (``torch._dynamo.config.
    recompile_limit``) is reached, beyond which it runs what is new plainly.

    Hugging Face's caches of keys and values that hold nothing are not handed to compiled blocks: nothing reads them in
    training, and each block would be compiled by itself.

    Logged: ``setup_seconds``, what compiling has taken in all, and in this process; ``compilations``, how many frames were
    compiled, none where this process has done so before; ``blocks``, how many run compiled.

    Args:
        mode: ``torch.compile``'s, for ``inductor`` alone: "default", "reduce-overhead" (CUDA graphs), "max-autotune" or
            "max-autotune-no-cudagraphs"; None is "default".
        layers: the blocks, as a path, a pattern (``"block_*"``) or a list of paths; None takes every stack of repeated blocks.
        dynamic: see above.
        backend: of ``torch.compile``, by name: "inductor"; "aot_eager" and "eager" compile nothing and find faults; None is
            plain training.
        same_random: let dropout draw what it draws in plain training. False lets ``inductor`` fuse a generator of its own
            into its kernels, which is another run of the same distribution.

    Raises:
        ValueError: for other values; at setup, if no blocks are found, blocks or what is around them are compiled already or
            hold full backward hooks, the backend is unknown, or ``inductor`` has no C++ compiler (on a CPU) or no Triton (on
            CUDA); in the first step, before any weight changes, if it calls none of the blocks as a whole.
        RuntimeError: in the first step, before any weight changes, if torch's compiler fails on a block, with its reason.

    Sources:
        Ansel et al. 2024, doi:10.1145/3620665.3640366 (PyTorch 2).
    """

    saves: ClassVar[str] = "time of each step, by fused kernels; set-up that does not grow with depth"
    paper: ClassVar[str] = "Ansel et al. 2024, doi:10.1145/3620665.3640366 (PyTorch 2)"
    constraints: ClassVar[str] = "a stack of repeated blocks; a compiler for inductor"
    survey: ClassVar[Survey | None] = None
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"same_random": Choice((True, False))}, _pointless)
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds, set-up included: the numbers are the same to rounding, and it can be compiled too"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("ActivationCompression", "ACTPrecision"), _SAVES),
        **dict.fromkeys(("FP8Precision", "INT8Precision", "S2FP8Precision", "Wang2018FP8Precision"), _MAPS),
    }
    needs_automatic_optimization: ClassVar[bool] = False
    compiles: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = True

    def __init__(
        self,
        mode: Mode | None = None,
        *,
        layers: str | Sequence[str] | None = None,
        dynamic: bool | None = None,
        backend: str | None = "inductor",
        same_random: bool = True,
    ) -> None:
        if mode is not None and mode not in MODES:
            raise ValueError(f"{WHO}({mode=}): expected one of {', '.join(map(repr, MODES))}, or None for 'default'.")
        if dynamic is not None and not isinstance(dynamic, bool):
            raise ValueError(
                f"{WHO}({dynamic=}): expected True (one version for all shapes), False (one for each) or None (one for the"
                " first shapes, one for all others)."
            )
        if backend is not None and not isinstance(backend, str):
            raise ValueError(
                f"{WHO}({backend=}): expected a backend of torch.compile by name, or None for plain training."
            )
        if backend != "inductor" and mode is not None:
            raise ValueError(f"{WHO}({mode=}, {backend=}): expected mode=None, since modes are inductor's.")
        if not isinstance(same_random, bool):
            raise ValueError(f"{WHO}({same_random=}): expected True or False.")
        self.mode: Mode | None = mode
        self.layers, self.dynamic, self.backend, self.same_random = layers, dynamic, backend, same_random
        self._reset()

    def _reset(self) -> None:
        self._calls: Calls | None = None
        self._paths: list[str] = []  # of the blocks
        self._first: dict[tuple[int, bool], Shapes] = {}
        self._events: list[Event] = []  # since the last batch
        self._told = 0.0  # of the seconds
        self._looked = False  # whether blocks are called
        self._figures: dict[str, float] = {"setup_seconds": 0.0, "compilations": 0, "blocks": 0}

    @property
    @override
    def neutral(self) -> bool:
        return self.backend is None

    # -- the run

    @override
    def check(self, session: Session) -> None:
        if self.backend is None:
            return
        backends = torch._dynamo.list_backends(exclude_tags=None)
        if self.backend not in backends:
            raise ValueError(
                f"{WHO}(backend={self.backend!r}): torch.compile has no such backend here; expected one of"
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
                    f"{WHO}: torch's inductor finds no C++ compiler, which it needs on a CPU; expected g++ or clang++ on the"
                    " PATH, or its path in the environment variable CXX. Install one, or take the technique out."
                ) from error
        elif device.type == "cuda":
            from torch.utils._triton import has_triton

            if not has_triton():
                raise ValueError(
                    f"{WHO}: torch's inductor needs Triton on CUDA, and a GPU that it supports; expected both. Install"
                    " triton, or take the technique out."
                )

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        session.chain.add(Stage.SAVE, self._link)

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
        rank_zero_info(f"{WHO}: compiles {', '.join(map(str, stacks))} in the first step{shapes}")

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """The step as it is; the first that is trained on must call blocks, or the first that drops not all of them."""
        output = proceed(batch)
        if not self._looked and output is not None and torch.is_grad_enabled():
            used = self._calls is None or self._calls.used
            self._looked = bool(used) or not any(t.drops_blocks for t in self.session.working)
            if self._looked and not used:
                raise ValueError(
                    f"{WHO}: training_step called none of the blocks {self._paths[0]!r} .. {self._paths[-1]!r}; expected each"
                    " step to call them as a whole, block(x), and not their forward or their parts, since it is such calls that"
                    f" are compiled. Let the module do so, name another stack by layers=, or take {WHO} out."
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
                f"{WHO}: torch's compiler has made as many versions of the code of {given_up.code} as it may"
                f" (torch._dynamo.config.recompile_limit = {limit}), and runs what differs from all of them uncompiled from"
                f" step {session.trainer.global_step} on: slower, with the same numbers. What held before and does not hold"
                f" now: {given_up.broken}. Keep that the same from call to call, give dynamic=True where it is a shape, or"
                " raise the limit."
            )

    def _tell(self, session: Session, calls: Calls) -> None:
        """Say what was compiled in this batch, how long that took, and what made it necessary."""
        seconds, self._told = calls.watch.seconds - self._told, calls.watch.seconds
        kinds = Counter(type(calls.blocks[event.block]).__name__ for event in self._events)
        what = ", ".join(f"{count} x {name}" for name, count in kinds.items())
        where = f"step {session.trainer.global_step}"
        rank_zero_info(f"{WHO}: compiled {what} in {seconds:.1f} s ({where}, {len(calls.used)} blocks run compiled)")
        for event in self._events:
            path = self._paths[event.block]
            if event.broken is not None:
                rank_zero_info(
                    f"{WHO}: {path!r} took a version of its own ({where}), since this does not hold for it: {event.broken}"
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
        """A block's call: compiled in training, plain in evaluation."""
        block = calls.blocks[index]
        if not (block.training or torch.is_grad_enabled()):
            return block._call_impl(*args, **kwargs)
        try:
            return calls.call(index, *without_empty_caches(args, kwargs))
        except CannotCompile as error:
            raise RuntimeError(
                f"{WHO}(backend={self.backend!r}): torch's compiler failed on {self._paths[index]!r}: {error.why}\nExpected"
                " code that it can compile. Name another stack by layers=, see what backend='aot_eager' says of it, or take"
                f" {WHO} out."
            ) from error

    # -- what it tells

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return dict(self._figures)

    @override
    def summary(self) -> str:
        seconds, blocks = self._figures["setup_seconds"], self._figures["blocks"]
        if not blocks:
            return "no block has run compiled"
        return f"{blocks:g} blocks ran compiled, after {seconds:.1f} s of set-up"

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
