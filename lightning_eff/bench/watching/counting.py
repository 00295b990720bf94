"""What one training step computes and keeps: FLOPs by torch's counter, bytes that wait for the backward pass."""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

aten: Any = torch.ops.aten

# Operators that multiply matrices inside, and for which torch's counter has no formula
_UNKNOWN = ("rnn", "lstm", "gru", "grouped_mm", "int_mm", "cdist", "mkldnn_linear", "_trilinear", "scaled_dot_product")
_HARMLESS = {"aten", "prim", "prims", "c10d", "_c10d_functional", "profiler", "inductor", "rngprims", "debugprims"}


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """As torch counts attention on GPUs: ``Q K^T`` and ``P V``, the masked half too."""
    return sdpa_flop_count(query, key, value)


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """As torch counts it on GPUs: the scores again, and two products for each of the forward's."""
    b, h, q, d = query
    k, dv = key[2], value[3]
    # Q K^T again; dP = dO V^T and dV = P^T dO; dQ = dS K and dK = dS^T Q
    return 2 * b * h * q * k * (d + 2 * dv + 2 * d)


_ON_CPU = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


class _NoModules:
    """Takes the place of the counter's module tracker, whose global hooks a training step is better off without."""

    parents = ("Global",)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: object) -> None:
        pass


class Counter(FlopCounterMode):
    """FLOPs of what runs inside it, apart for forward, backward and what a backward pass computes a second time.

    Attributes:
        backward: set while a backward pass runs.
        flops: by ``"forward"``, ``"backward"`` and ``"again"``, activation checkpointing's second forward pass.
        unknown: names of operators that compute, and for which no formula is known.
    """

    def __init__(self, *, backward: bool = False) -> None:
        super().__init__(display=False, custom_mapping=_ON_CPU)
        self.mod_tracker: Any = _NoModules()
        self.backward = backward
        self.flops = {"forward": 0, "backward": 0, "again": 0}
        self.unknown: set[str] = set()

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        before = self.get_total_flops()
        counted: Any = super()._count_flops  # pyright: ignore[reportAttributeAccessIssue]
        out = counted(func_packet, out, args, kwargs)
        # backward passes run without a graph of their own; what is computed with one is a forward pass repeated
        part = "forward" if not self.backward else ("again" if torch.is_grad_enabled() else "backward")
        self.flops[part] += self.get_total_flops() - before
        if func_packet not in self.flop_registry:
            name = str(func_packet)
            space, _, op = name.rpartition(".")
            if space.split(".")[0] not in _HARMLESS or any(part in op for part in _UNKNOWN):
                self.unknown.add(name)
        return out


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The memory behind ``tensors``: bytes by address, each piece once. Of a sharded tensor, this rank's part."""
    found: dict[int, int] = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        try:
            storage = local.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
        except (NotImplementedError, RuntimeError):  # sparse tensors, and subclasses without a storage
            address, size = id(local), local.numel() * local.element_size()
        if address:
            found[address] = size
    return found


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the elements of ``tensors``, those at the same place (tied weights) once."""
    local = [getattr(t, "_local_tensor", t) for t in tensors]
    return sum({(t.data_ptr() or id(t), t.numel()): t.numel() * t.element_size() for t in local}.values())


def optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """Every tensor in the optimizers' states."""
    return [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, Tensor)
    ]


def compiled(module: nn.Module) -> bool:
    """Whether a part of ``module`` is compiled: what runs in it no counter sees."""
    return any(
        type(m).__name__ == "OptimizedModule" or getattr(m, "_compiled_call_impl", None) is not None
        for m in module.modules()
    )


@dataclass
class Kind:
    """One kind of step: FLOPs on this device of a forward pass, a backward pass (None: not yet seen) and what the
    backward pass computes a second time; bytes kept for it."""

    forward: int
    backward: int | None
    again: int
    activation_bytes: int


class ForwardCount(ExitStack):
    """Counts what runs inside it: FLOPs, and (if ``activations``) bytes that are kept for the backward pass.

    Args:
        apart: tensors whose memory is not counted: parameters, buffers and the batch.
        activations: count bytes too.
    """

    def __init__(self, apart: Iterable[Tensor], *, activations: bool) -> None:
        super().__init__()
        self.counter = Counter()
        self._apart = storages(apart) if activations else {}
        self._kept: dict[int, int] = {}
        self._activations = activations

    def __enter__(self) -> "ForwardCount":
        super().__enter__()
        # else a compiled function that is first met in here would stay uncompiled for good
        self.enter_context(torch.compiler.set_stance("force_eager"))
        if self._activations:
            self.enter_context(saved_tensors_hooks(self._keep, lambda tensor: tensor))
        self.enter_context(self.counter)
        return self

    def _keep(self, tensor: Tensor) -> Tensor:
        self._kept.update(storages([tensor]))
        return tensor.detach()  # the tensor itself would hold the graph that holds it

    @property
    def activation_bytes(self) -> int:
        return sum(size for address, size in self._kept.items() if address not in self._apart)
