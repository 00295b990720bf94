"""Count the FLOPs of one training step, from torch's own record of the operators that ran.

Recording does not change results. Dispatch modes (``torch.utils.flop_counter.FlopCounterMode``) do: torch takes other
code paths while a mode is active (``prod``'s backward pass), and the counter decomposes some operators (``silu``'s), so
results differ by rounding errors.
"""

import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import (
    _add_execution_trace_observer,
    _disable_execution_trace_observer,
    _enable_execution_trace_observer,
    _remove_execution_trace_observer,
)
from torch.autograd.profiler import record_function
from torch.utils.flop_counter import flop_registry

aten: Any = torch.ops.aten

# Operators that multiply matrices and have no formula; the parts of composite operators are counted instead
_UNKNOWN = (
    "rnn", "lstm", "gru", "grouped_mm", "int_mm", "cdist", "mkldnn_linear", "_trilinear", "scaled_dot_product", "scaled_mm"
)  # fmt: skip
_HARMLESS = {"aten", "prim", "prims", "c10d", "_c10d_functional", "profiler", "inductor", "rngprims", "debugprims"}
_OPERATOR = re.compile(r"\w+::\w+")
_HEAD = re.compile(r'"nodes":\s*\[\s*')  # the head of a record, before its entries
_BETWEEN = re.compile(r"[\s,]*")  # two entries
_BACKWARD = "lightning_eff: backward"
_COMPILING = "(dynamo_timed)"  # the suffix of what torch.compile traces on tensors without data
_COMPILED = "## Call CompiledFxGraph"  # the prefix of a compiled graph


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Count attention like torch on GPUs: ``Q K^T`` and ``P V``, including the masked half."""
    b, h, q, d = query.shape
    return 2 * b * h * q * key.shape[-2] * (d + value.shape[-1])


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Count attention's backward pass like torch on GPUs: the scores again, and two products for each of the forward's."""
    b, h, q, d = query.shape
    k, dv = key.shape[-2], value.shape[-1]
    # Q K^T again; dP = dO V^T and dV = P^T dO; dQ = dS K and dK = dS^T Q
    return 2 * b * h * q * k * (d + 2 * dv + 2 * d)


_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
_BY_NAME = {
    str(packet).replace(".", "::"): packet for packet in _FORMULAS if isinstance(packet, torch._ops.OpOverloadPacket)
}


@dataclass
class _Node:
    """An entry of the record: an operator, or a named region of the program.

    Attributes:
        number: its position in the order in which entries began.
        parent: the number of the entry in which it began.
        graph: whether it ran while a graph was built.
        call: its recorded arguments, results and schema, if there is a formula for it.
    """

    number: int
    parent: int
    name: str
    thread: int
    graph: bool
    call: tuple[dict[str, Any], dict[str, Any], str] | None
    children: list["_Node"] = field(default_factory=list)


class Counter:
    """Count the FLOPs of the code inside it, separately for forward, backward and recomputation.

    Args:
        backward: whether the code is a backward pass.

    Attributes:
        flops: FLOPs by ``"forward"``, ``"backward"`` and ``"again"``, the second forward pass of activation checkpointing.
            Known when the context ends. None if another record was active, or the record cannot be read.
        unknown: the names of operators that compute, but have no known formula.
    """

    def __init__(self, *, backward: bool = False) -> None:
        self.flops: dict[str, int] | None = None
        self.unknown: set[str] = set()
        self._backward = backward
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "Counter":
        folder = tempfile.TemporaryDirectory()
        path = Path(folder.name) / "operators.json"
        with _without_notes():
            _add_execution_trace_observer(str(path))
            if path.exists():  # otherwise another observer is active
                self._folder = folder
                _enable_execution_trace_observer()
        if self._folder is None:
            folder.cleanup()
        return self

    def __exit__(self, *error: Any) -> None:
        folder, self._folder = self._folder, None
        if folder is None:
            return
        with folder:
            with _without_notes():
                _disable_execution_trace_observer()
                _remove_execution_trace_observer()
            if error[0] is None:
                text = (Path(folder.name) / "operators.json").read_text(encoding="utf-8", errors="replace")
                with suppress(ValueError):  # names that users give regions of their program may break it
                    self._read(list(_nodes(text)))

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Mark a backward pass within the counted code."""
        with record_function(_BACKWARD):
            yield

    # -- reading the record

    def _read(self, entries: list[_Node]) -> None:
        self.flops = {"forward": 0, "backward": 0, "again": 0}
        nodes = {node.number: node for node in sorted(entries, key=lambda node: node.number)}
        roots: list[_Node] = []
        for node in nodes.values():
            (nodes[node.parent].children if node.parent in nodes and node.parent != node.number else roots).append(node)
        backward = [_span(node, nodes) for node in nodes.values() if node.name == _BACKWARD]
        for root in roots:
            self._count(root, backward)

    def _count(self, node: _Node, backward: list[tuple[int, float]]) -> bool:
        """Count what ``node`` computes; return whether something was counted, or named as unknown."""
        if node.name.endswith(_COMPILING):
            return False
        flops = _flops(node)
        if flops is not None:
            assert self.flops is not None
            late = self._backward or any(begin < node.number < end for begin, end in backward)
            # backward passes build no graph; what builds one during them is a recomputed forward pass
            self.flops["forward" if not late else ("again" if _graph(node) else "backward")] += flops
            return True
        counted = [self._count(child, backward) for child in node.children]
        if any(counted):
            return True
        if _computes(node.name):
            compiled = node.name.startswith(_COMPILED)
            self.unknown.add("a compiled function" if compiled else node.name.replace("::", "."))
            return True
        return False


def _nodes(text: str) -> Iterator[_Node]:
    """Yield the entries of a record one at a time, and keep only the needed part of each.

    Parsed as a whole, a record is several hundred thousand small objects, which slows down the garbage collector.

    Raises:
        ValueError: if the record is not JSON.
    """
    decoder = json.JSONDecoder(strict=False)
    head = _HEAD.search(text)
    if head is None:
        raise ValueError(f"The record of operators has no list of nodes. It begins with {text[:80]!r}.")
    at = head.end()
    while not text.startswith("]", at):
        raw, at = decoder.raw_decode(text, at)
        yield _node(raw)
        between = _BETWEEN.match(text, at)
        assert between is not None
        at = between.end()


def _node(raw: dict[str, Any]) -> _Node:
    more = {attribute["name"]: attribute["value"] for attribute in raw["attrs"]}
    name = raw["name"]
    graph = int(more.get("seq_id", -1)) >= 0 and more.get("scope") == 0  # an operator; graph nodes have a number too
    call = (raw["inputs"], raw["outputs"], more.get("op_schema", "")) if name in _BY_NAME else None
    return _Node(int(raw["id"]), int(raw["ctrl_deps"]), name, int(more.get("tid", 0)), graph, call)


def _span(label: _Node, nodes: dict[int, _Node]) -> tuple[int, float]:
    """Return the range of numbers of the entries that began while ``label`` ran, on any thread."""
    inside = {label.number}
    for number, node in nodes.items():
        if number > label.number and node.thread == label.thread:
            if node.parent not in inside:
                return label.number, number
            inside.add(number)
    return label.number, math.inf


def _graph(node: _Node) -> bool:
    return node.graph or any(_graph(child) for child in node.children)


def _computes(name: str) -> bool:
    """Return whether an operator without counted parts may have computed something that should be counted."""
    if name.startswith(_COMPILED) or name in _BY_NAME:
        return True
    if _OPERATOR.fullmatch(name) is None:
        return False
    space, _, op = name.partition("::")
    return space not in _HARMLESS or any(part in op for part in _UNKNOWN)


def _flops(node: _Node) -> int | None:
    """Return the FLOPs of one call, or None if there is no matching formula."""
    if node.call is None:
        return None
    try:
        inputs, outputs, schema = node.call
        given = _values(inputs)
        arguments = torch._C.parse_schema(schema).arguments
        args = [x for x, argument in zip(given, arguments, strict=True) if not argument.kwarg_only]
        kwargs = {a.name: x for x, a in zip(given, arguments, strict=True) if a.kwarg_only and a.name != "out"}
        out = _values(outputs)
        return int(_FORMULAS[_BY_NAME[node.name]](*args, out_val=out[0] if len(out) == 1 else tuple(out), **kwargs))
    except Exception:  # a formula of torch that fails counts as unknown
        return None


def _values(recorded: dict[str, list[Any]]) -> list[Any]:
    """Return arguments or results, with tensors on the meta device and plain values unchanged."""
    return [
        torch.empty(shape, device="meta") if kind.startswith("Tensor(") and "nullptr" not in kind
        else None if kind.startswith("Tensor(") or kind == "None"
        else value
        for value, shape, kind in zip(recorded["values"], recorded["shapes"], recorded["types"], strict=True)
    ]  # fmt: skip


@contextmanager
def _without_notes() -> Iterator[None]:
    """Hide the lines that torch writes when a record begins and ends; other output is delayed."""
    try:
        kept = os.dup(2)
    except OSError:  # there is no such stream
        yield
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            file.seek(0)
            for line in file:
                if b"execution_trace_observer.cpp" not in line:
                    os.write(2, line)
            os.close(kept)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the elements of ``tensors``; tied weights count once."""
    local = [part for t in tensors for part in _stored(getattr(t, "_local_tensor", t))]
    return sum({(t.data_ptr() or id(t), t.numel()): t.numel() * t.element_size() for t in local}.values())


def _stored(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that make up a sparse tensor, after its rows are summed; a dense one is itself."""
    if tensor.layout != torch.sparse_coo:
        return (tensor,)
    rows = tensor.detach().coalesce()
    return rows.indices(), rows.values()


def optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """List every tensor in the optimizers' states."""
    return [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, Tensor)
    ]


def compiled(module: nn.Module) -> bool:
    """Return whether a part of ``module`` is compiled, where no counter sees the operators."""
    return any(
        type(m).__name__ == "OptimizedModule" or getattr(m, "_compiled_call_impl", None) is not None
        for m in module.modules()
    )


@dataclass
class Kind:
    """One kind of step.

    Attributes:
        forward: FLOPs of a forward pass on this device.
        backward: FLOPs of a backward pass; None if not seen yet.
        again: FLOPs that the backward pass recomputes.
        activation_bytes: bytes held when the backward pass begins; None if not seen yet or not counted.
    """

    forward: int
    backward: int | None
    again: int
    activation_bytes: int | None
