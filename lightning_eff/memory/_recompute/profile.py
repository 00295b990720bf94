"""Measure the bytes and seconds of each block of a stack on a real batch, as the module's own step calls it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_eff._core.blocks import hidden_of, uncompiled, untraced_hooks
from lightning_eff.memory._planning.chain import Stage
from lightning_eff.memory._recompute.execution_context import random_state, set_random_state
from lightning_eff.memory._recompute.ledger import Ledger, bytes_of, key_of, tensors_in

ROUNDS = 3  #: the number of passes in which each block is timed once
MOST_ROUNDS = 6  #: the number of passes if they differ much
AGREE = 1.05  #: they differ if the median round takes longer than this times the fastest


class _Measured:
    """The measurements of one block; for each timed run, its start, last save, return and end of backward."""

    def __init__(self) -> None:
        self.input = self.output = self.saved = self.forward_peak = self.backward_peak = self.casts = 0
        self.num_saved = 0
        self.kind: Any = None
        self.marks: list[tuple[Any, Any, Any, Any]] = []

    def seconds(self, run: int) -> tuple[float, float, float]:
        """Return the seconds of a timed run: forward, backward, and forward until the last save."""
        began, saved, between, ended = self.marks[run]
        return _seconds(began, between), _seconds(between, ended), _seconds(began, saved)


class Profiler:
    """Measures each block at its calls; pass each call of a block in a step to :meth:`call`.

    Run the step in :meth:`around` once, with autograd on. Each block runs twice, and its bytes are counted. A compiled
    block is counted in its plain form, because a ledger does not see compiled code. Then run it repeatedly until
    :meth:`settled`. In each of these rounds, a block runs forward and backward once, and is timed. A temporary slowdown of
    the machine then affects part of each block's measurements instead of a few blocks.

    Args:
        module: the module that runs, whose parameters and buffers are not counted.
        blocks: the blocks of the stack that it runs.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        self._weights = {key_of(p) for p in module.parameters()}
        self._known = self._weights | {key_of(b) for b in module.buffers()}
        self._found: dict[int, _Measured] = {}
        self._order: list[int] = []
        self._rounds = -1  # before the pass that counts bytes

    @contextmanager
    def around(self) -> Iterator[None]:
        """Run the step inside; what it would save for its backward pass is dropped."""
        self._order.clear()
        with torch.enable_grad(), untraced_hooks(_drop, _never):
            yield
        self._rounds += 1

    def settled(self, *, together: bool) -> bool:
        """Return whether there were enough rounds.

        Args:
            together: whether the step needs other processes, so that all must stop after the same round, ``ROUNDS``.
        """
        if self._rounds < ROUNDS or together or self._rounds >= MOST_ROUNDS:
            return self._rounds >= ROUNDS
        totals = sorted(
            sum(sum(found.seconds(run)[:2]) for found in self._found.values()) for run in range(self._rounds)
        )
        return totals[len(totals) // 2] <= AGREE * totals[0]

    def call(self, index: int, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run block ``index`` as ``run(*args, **kwargs)``, and measure it."""
        self._order.append(index)
        hidden = hidden_of(args, kwargs)
        device = hidden.device
        leaves, spec = tree_flatten((args, kwargs))
        place = next(i for i, leaf in enumerate(leaves) if leaf is hidden)
        parameters = [p for p in self._blocks[index].parameters() if p.requires_grad]
        state = random_state(device)

        def forward() -> tuple[Any, list[Tensor | None]]:
            set_random_state(device, state)
            torch.clear_autocast_cache()
            once = {id(t): t.detach().requires_grad_(t.requires_grad) for t in leaves if isinstance(t, Tensor)}
            new = [once.get(id(leaf), leaf) for leaf in leaves]  # a tensor that is passed twice stays one tensor
            again_args, again_kwargs = tree_unflatten(new, spec)
            output = run(*again_args, **again_kwargs)
            torch.clear_autocast_cache()
            return output, [leaf if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in new]

        def backward(output: Any, inputs: list[Tensor | None]) -> Tensor | None:
            """Return the gradient of the hidden state."""
            ends = [t for t in tensors_in(output) if t.requires_grad and t.grad_fn is not None]
            wanted = [*([] if (x := inputs[place]) is None else [x]), *parameters]
            if not ends or not wanted:
                return None
            grads = torch.autograd.grad(ends, wanted, [torch.ones_like(t) for t in ends], allow_unused=True)
            return None if inputs[place] is None else grads[0]

        if self._rounds < 0:
            found = self._found[index] = _Measured()
            known = self._known | {key_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
            with uncompiled():
                return self._measure_bytes(found, forward, backward, known, parameters, hidden)
        output = self._time(self._found[index], forward, backward, device)
        if not any(isinstance(leaf, Tensor) and leaf.requires_grad and leaf is not hidden for leaf in leaves):
            return output
        set_random_state(device, state)
        return run(*args, **kwargs)  # the saved tensors of the other run are dropped

    def _time(
        self,
        found: _Measured,
        forward: Callable[[], Any],
        backward: Callable[[Any, Any], Tensor | None],
        device: torch.device,
    ) -> Any:
        """Time a run that saves as in a step; return the block's output, and set the random state after its forward pass."""
        count, last = 0, None

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count, last
            count += 1
            if count == found.num_saved:
                last = _mark(device)
            return tensor.detach()

        with untraced_hooks(pack, _itself):
            began = _mark(device)
            output, inputs = forward()
            between = _mark(device)
            state = random_state(device)
            backward(output, inputs)
            found.marks.append((began, between if last is None else last, between, _mark(device)))
        set_random_state(device, state)
        return output

    def _measure_bytes(
        self,
        found: _Measured,
        forward: Callable[[], Any],
        backward: Callable[[Any, Any], Tensor | None],
        known: set[int],
        parameters: list[nn.Parameter],
        hidden: Tensor,
    ) -> Any:
        """Count bytes, and return the block's output from a run that saved nothing."""
        saved: dict[int, int] = {}
        held: list[StorageWeakRef] = []  # so that allocations of the backward pass do not reuse their keys
        ledger = Ledger(self._weights, known)

        def save(tensor: Tensor) -> Tensor:
            found.num_saved += 1
            if ledger.counts(tensor):
                saved[key_of(tensor)] = bytes_of(tensor)
                held.append(StorageWeakRef(tensor.untyped_storage()))
            return tensor.detach()

        with untraced_hooks(save, _itself):
            with _allocator(hidden.device) as taken, ledger:
                output, inputs = forward()
            outputs = {key_of(t): bytes_of(t) for t in tensors_in(output) if ledger.counts(t)}
            found.input, found.output = bytes_of(hidden), sum(outputs.values())
            found.saved, found.casts = sum({**saved, **outputs}.values()), ledger.casts
            saving_peak = max(ledger.peak, taken() - ledger.casts)
            found.kind = ledger.operations
            ledger = Ledger(self._weights, known | saved.keys() | outputs.keys())
            with ExitStack() as scope:
                for p in parameters:  # their gradients do not belong to the chain
                    handle = p.register_hook(ledger.pass_over)
                    scope.callback(handle.remove)
                taken = scope.enter_context(_allocator(hidden.device))
                scope.enter_context(ledger)
                gradient = backward(output, inputs)
            found.kind = tuple(found.kind + ledger.operations)
            of_parameters = sum(bytes_of(p) for p in parameters)
            peak = max(ledger.peak, taken() - of_parameters)
            found.backward_peak = max(0, peak - (0 if gradient is None else bytes_of(gradient)))
        del output, inputs, gradient
        ledger = Ledger(self._weights, known)
        with untraced_hooks(_drop, _never), _allocator(hidden.device) as taken, ledger:
            output, _ = forward()
        found.forward_peak = max(
            0, ledger.peak - found.output, taken() - ledger.casts - found.output, saving_peak - found.saved
        )
        return output

    def check_order(self, path: str) -> None:
        """Check the order of calls after each pass.

        Raises:
            ValueError: if the step did not call each block once, in order.
        """
        if self._order != list(range(len(self._blocks))):
            raise ValueError(
                f"Rematerialization(policy='optimal'): a training step calls the blocks of {path!r} in the order"
                f" {self._order}; expected each of the {len(self._blocks)} once, in order. Use policy='full', or name another"
                " stack with layers=."
            )

    def stages(self, path: str) -> tuple[tuple[Stage, ...], int]:
        """Return the blocks as stages of a chain, and the bytes of the weight copies that autocast keeps.

        Seconds are lower quartiles over all rounds, and over all blocks that ran the same operations on the same shapes,
        since other load on the machine only adds time.
        """
        alike: dict[Any, list[tuple[float, float, float]]] = {}
        for found in self._found.values():
            alike.setdefault(found.kind, []).extend(found.seconds(run) for run in range(len(found.marks)))
        stages: list[Stage] = []
        for index, found in sorted(self._found.items()):
            forward, backward, again = (_quartile(column) for column in zip(*alike[found.kind], strict=True))
            stages.append(
                Stage(
                    name=f"{path}.{index}",
                    forward_seconds=forward,
                    backward_seconds=backward,
                    input_bytes=found.input,
                    saved_bytes=found.saved,
                    output_bytes=found.output,
                    forward_peak_bytes=found.forward_peak,
                    backward_peak_bytes=found.backward_peak,
                    again_seconds=min(again, forward),
                )
            )
        return tuple(stages), sum(found.casts for found in self._found.values())


def _quartile(values: Sequence[float]) -> float:
    return quantiles(values, n=4, method="inclusive")[0]


def _mark(device: torch.device) -> Any:
    """Return a moment in the device's work: a CUDA event, so that nothing waits, or the time when all work is done.

    On a CPU with one thread it is the thread's own time, which other processes do not affect.
    """
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()


def _seconds(began: Any, ended: Any) -> float:
    """Return the seconds between two marks."""
    if isinstance(began, float):
        return ended - began
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


@contextmanager
def _allocator(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the most bytes that CUDA's allocator gave out within the context; 0 elsewhere."""
    if device.type != "cuda":
        yield lambda: 0
        return
    torch.cuda.synchronize(device)
    before, peak = torch.cuda.memory_allocated(device), 0
    torch.cuda.reset_peak_memory_stats(device)
    yield lambda: peak
    peak = torch.cuda.max_memory_allocated(device) - before


def _drop(_: Tensor) -> None:
    """Keep nothing."""


def _never(_: object) -> Tensor:
    raise RuntimeError(
        "Rematerialization(policy='optimal'): the training step computes gradients itself, but blocks are measured in a pass"
        " that saves nothing. Use policy='full', 'sqrt' or 'selective'."
    )


def _itself(tensor: Tensor) -> Tensor:
    return tensor
