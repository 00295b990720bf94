"""Finds effects of a step other than its loss: tensors that blocks store elsewhere, and state that changes.

Blocks of other stages do not run, so tensors that they would put into a list or an attribute are missing. Counters and
averages of ``training_step`` change with each micro-batch on each stage. The checks find both even if the loss does not
depend on them yet.
"""

import gc
import math
import weakref
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import FrameType, FunctionType, MethodType
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torchmetrics import Metric

from lightning_eff._core import rng
from lightning_eff._core._lightning.names import ROOTS
from lightning_eff._core.steps import silent
from lightning_eff.strategies._pipeline._losses.probing import perturbed
from lightning_eff.strategies._pipeline.runner import loss_of
from lightning_eff.strategies._pipeline.shared_state import Step
from lightning_eff.strategies._pipeline.stack import Stack
from lightning_eff.strategies._pipeline.streams import Stream
from lightning_eff.strategies._pipeline.view import Marks, uncut
from lightning_eff.strategies._side_outputs.places import Values

_DEEP = 4
_SAME = 1e-6  # allowed difference of equal losses, relative to losses above 1
_OURS = ("lightning_eff.", "torchmetrics.")
_THEIRS = ("torch.", "torchao.", "torchvision.", *(f"{root}." for root in ROOTS))
_LEFT = ("torch", *ROOTS, "builtins", "logging", "threading")
_PLAIN = {*nn.Module().__dict__, *pl.LightningModule().__dict__}


class _Sentinel:
    """An object that lives as long as a node of the graph."""


class _Mark(torch.autograd.Function):
    """Copies a hidden state, which gives it a separate node in the graph."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor, sentinel: Any) -> Tensor:
        ctx.sentinel = sentinel
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


class Graph(Marks):
    """Marks the input of each block, and finds tensors stored elsewhere after the last block.

    Attributes:
        alive: for each block, whether something still holds its part of the graph.
        found: place of a tensor that depends on a block's input.
    """

    def __init__(self, module: nn.Module, num_blocks: int) -> None:
        self.module, self.last = module, num_blocks - 1
        self.alive: dict[int, weakref.ref[Any]] = {}
        self.found: str | None = None
        self._sent: list[weakref.ref[Tensor]] = []

    def entered(self, index: int, hidden: Tensor) -> Tensor:
        sentinel = _Sentinel()
        self.alive[index] = weakref.ref(sentinel)
        anchor = torch.zeros((), device=hidden.device, requires_grad=True)
        return cast("Tensor", _Mark.apply(hidden, anchor, sentinel))

    def left(self, index: int, beside: Values) -> None:
        self._sent += [weakref.ref(value) for value in beside if value is not None]
        if index == self.last and torch.is_grad_enabled():
            sent = self.sent()
            left = (name for name, value in everything(self.module) if id(value) not in sent and self.blocks(value))
            self.found = next(left, None)

    def sent(self) -> set[int]:
        """Return the ids of the tensors that are sent with the hidden state, as far as they still exist."""
        return {id(value) for ref in self._sent if (value := ref()) is not None}

    def blocks(self, value: Any) -> set[int]:
        """Return the blocks on whose input a tensor depends."""
        if not isinstance(value, Tensor) or value.grad_fn is None:
            return set()
        mine = {id(ref()): index for index, ref in self.alive.items() if ref() is not None}
        found: set[int] = set()
        seen: set[Any] = set()
        todo: list[Any] = [value.grad_fn]
        while todo:
            node = todo.pop()
            if node is not None and node not in seen:
                seen.add(node)
                todo.extend(following for following, _ in node.next_functions)
                index = mine.get(id(getattr(node, "sentinel", None)))
                if index is not None:
                    found.add(index)
        return found

    def kept(self) -> bool:
        """Whether something still holds a tensor of a block after the step, other than the computation after all blocks."""
        if all(ref() is None for ref in self.alive.values()):
            return False
        gc.collect()
        if all(ref() is None for ref in self.alive.values()):
            return False
        tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and t.grad_fn is not None]
        sent = self.sent()
        for tensor in tensors:
            if id(tensor) in sent:
                continue
            blocks = self.blocks(tensor)
            if blocks and self.last not in blocks and _held(tensor, tensors):
                return True
        return False


def everything(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield all attributes of a module's submodules, values held by their hooks, and items of containers, by name."""
    seen: set[int] = set()
    for path, m in module.named_modules():
        where = f"{path}." if path else ""
        for key, value in m.__dict__.get("_block", m).__dict__.items():  # for a stand-in, the block's attributes
            if key.endswith("_hooks") and isinstance(value, dict):
                for hook in value.values():
                    yield from _inside(f"a hook of {path or 'the module'!r}", hook, seen, _DEEP)
            elif key not in _PLAIN:
                yield from _inside(f"{where}{key}", value, seen, _DEEP)


def _inside(name: str, value: Any, seen: set[int], deep: int) -> Iterator[tuple[str, Any]]:
    yield name, value
    if (
        deep == 0
        or isinstance(value, str | bytes | int | float | Tensor | nn.Module | type | None)
        or id(value) in seen
    ):
        return
    seen.add(id(value))
    items: list[tuple[str, Any]] = []
    if _from_here(value):  # techniques' wrappers around the module's methods
        items = [(name, getattr(value, "__wrapped__", None))]
    elif isinstance(value, dict):
        items = [(f"{name}[{key!r}]", item) for key, item in [*value.items()][:1000]]
    elif isinstance(value, list | tuple | set | frozenset | deque):
        items = [(f"{name}[{i}]", item) for i, item in enumerate([*value][:1000])]
    elif isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        items = [(f"{free!r} in {name}", cell.cell_contents) for free, cell in cells if _filled(cell)]
        items += [(f"a default of {name}", item) for item in value.__defaults__ or ()]
    elif isinstance(value, MethodType):
        items = [(name, value.__func__), (name, value.__self__)]
    elif isinstance(value, partial):
        items = [(name, value.func), *((name, item) for item in (*value.args, *value.keywords.values()))]
    elif type(value).__module__.partition(".")[0] not in _LEFT:
        items = [(f"{name}.{key}", item) for key, item in getattr(value, "__dict__", {}).items()]
    for inner, item in items:
        yield from _inside(inner, item, seen, deep - 1)


def _from_here(value: Any) -> bool:
    inner = value.func if isinstance(value, partial) else getattr(value, "__func__", value)
    where = inner.__globals__.get("__name__", "") if isinstance(inner, FunctionType) else type(inner).__module__
    return where.startswith(_OURS[0])


def _held(tensor: Tensor, beside: list[Tensor]) -> bool:
    """Whether anything except a graph, a frame and the list ``beside`` refers to a tensor."""
    return any(other is not beside and not isinstance(other, FrameType) for other in gc.get_referrers(tensor))


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return checksums of parameters, buffers and plain attributes by name, without those of metrics and norms."""
    found: dict[str, Any] = {}
    skipped = [path for path, m in module.named_modules() if isinstance(m, Metric | _NormBase) or _from(m, _OURS)]
    for path, m in module.named_modules():
        if any(path == other or path.startswith(f"{other}.") for other in skipped if other):
            continue
        where = f"{path}." if path else ""
        for name, t in (*m._parameters.items(), *m._buffers.items()):
            if t is not None:
                found[f"{where}{name}"] = _number(t)
    for name, value in everything(module):
        if any(name.startswith(f"{other}.") for other in skipped if other):
            continue
        if isinstance(value, Tensor):
            found[name] = _number(value)
        elif isinstance(value, int | float | str | None):
            found[name] = repr(value)
        elif isinstance(value, list | dict | set | deque):
            found[name] = len(value)
    return found


def _number(t: Tensor) -> Any:
    t = t.detach()
    if t.is_meta or t.numel() == 0:
        return None
    if t.is_complex():
        t = torch.view_as_real(t)
    exact = torch.float64 if t.device.type != "mps" else torch.float32
    flat = t.reshape(-1).to(exact)
    weights = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=exact)
    values = (float(flat.sum()), float(flat.abs().sum()), float((flat * weights).sum()))
    return tuple("nan" if math.isnan(value) else value for value in values)


def _from(module: nn.Module, packages: tuple[str, ...]) -> bool:
    return f"{type(module).__module__}.".startswith(packages)


def check_sideways(
    module: nn.Module, stack: Stack, step: Step, batch: Any, stream: Stream, *, divided: bool, who: str
) -> None:
    """Run the uncut step twice, and check its effects.

    Args:
        divided: whether a batch has several micro-batches.

    Raises:
        ValueError: if blocks store tensors with gradients elsewhere, or if state of the module changes with each step. With
            several micro-batches, this includes state of torch's modules on which the loss depends (a spectral norm).
    """
    graph = Graph(module, len(stack.blocks))
    with rng.fork(), torch.enable_grad():
        inside = {id(p) for block in stack.blocks for p in block.parameters()}
        # with other weights, since a teacher that starts as its student's copy does not move at first
        with silent(cast("Any", module)), perturbed(module, inside, 1.0):
            versions = {name: p._version for name, p in module.named_parameters()}
            with uncut(stack, stream):
                step(batch)  # can fill caches
            changed = [name for name, p in module.named_parameters() if p._version != versions[name]]
            before = state_of(module)
            with uncut(stack, stream):
                first = loss_of(step(batch), who=who)
                first = first if changed and divided else first.detach()
            after = state_of(module)
            with uncut(stack, stream, marks=graph):
                losses = [float(first.detach()), float(loss_of(step(batch), who=who).detach())]
            spoilt = first.requires_grad and not _has_backward(first)
            del first
        kept = graph.found is None and graph.kept()
    if spoilt:
        raise ValueError(
            f"{who}: the forward pass changes {', '.join(map(repr, sorted(changed)[:5]))} in place (a clamp of weights), but"
            " the backward passes of earlier micro-batches need the old values. Change the weights in on_train_batch_end, or"
            " use num_microbatches=1 or pipeline_parallel_size=1."
        )
    if graph.found is not None or kept:
        where = f"in {graph.found}" if graph.found else "in a list, a dict or a closure outside the module"
        raise ValueError(
            f"{who}: blocks of {stack.path!r} leave tensors with gradients {where}, which are not sent to other pipeline"
            " stages. Blocks of other stages do not run, so a step that uses these tensors would train on a part of them."
            " Return what is smaller than the hidden state, such as a router's loss, from the block, or append it to a list"
            " that a module has. Store the rest detached (.detach(); in Hugging Face models output_hidden_states=False), or"
            " use pipeline_parallel_size=1."
        )
    _check_state(module, before, after, losses if divided else [], who=who)


def _has_backward(loss: Tensor) -> bool:
    """Whether a backward pass from the loss is still possible; gradients of parameters do not change."""
    leaves = [leaf for leaf in _leaves(loss) if leaf.requires_grad]
    try:
        torch.autograd.grad(loss, leaves, allow_unused=True)
    except RuntimeError:
        return False
    return True


def _leaves(loss: Tensor) -> list[Tensor]:
    seen: set[Any] = set()
    found: list[Tensor] = []
    todo: list[Any] = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo.extend(following for following, _ in node.next_functions)
            if hasattr(node, "variable"):
                found.append(node.variable)
    return found


def _check_state(
    module: nn.Module, before: dict[str, Any], after: dict[str, Any], losses: list[float], *, who: str
) -> None:
    moved = [name for name, value in after.items() if name in before and before[name] != value]
    grown = [name for name in moved if isinstance(after[name], int)]
    weights = dict(module.named_parameters(remove_duplicate=False))
    theirs = [
        name for name in moved if name not in weights and name not in grown and _from(_owner(module, name), _THEIRS)
    ]
    mine = [name for name in moved if name not in grown and name not in theirs]
    if mine:
        raise ValueError(
            f"{who}: training_step changes {', '.join(map(repr, sorted(mine)[:5]))} each time it runs (a counter, a moving"
            " average, a teacher's weights). In a pipeline it runs once per micro-batch and stage, and only the last stage"
            " finishes it, so this state would differ between ranks. Change it once per batch, in on_train_batch_end or"
            " on_before_zero_grad, or use pipeline_parallel_size=1."
        )
    if theirs and losses and abs(losses[0] - losses[1]) > _SAME * max(1.0, abs(losses[0])):
        raise ValueError(
            f"{who}: {', '.join(map(repr, sorted(theirs)[:5]))} change each time training_step runs, and its loss depends on"
            " them (a spectral norm's vectors, a quantizer's ranges). A pipeline runs it once per micro-batch, so the result"
            " would differ from that of one process. Use num_microbatches=1, or pipeline_parallel_size=1."
        )
    for names, what in ((grown, "grow"), (theirs, "change")):
        if names:
            rank_zero_info(
                f"{who}: {', '.join(map(repr, sorted(names)[:5]))} {what} each time training_step runs, which in a pipeline is"
                " once per micro-batch."
            )


def _owner(module: nn.Module, name: str) -> nn.Module:
    while "." in name:
        name = name.rpartition(".")[0]
        try:
            return module.get_submodule(name)
        except AttributeError:
            continue
    return module
