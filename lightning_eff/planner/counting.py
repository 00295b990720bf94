"""Counts what a training step computes, moves and keeps, block by block, while it runs on real or fake tensors."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from lightning_eff._core.blocks import uncompiled, untraced_hooks

_aten = torch.ops.aten
_LINEAR = {_aten.mm, _aten.addmm, _aten._scaled_mm, _aten.convolution, _aten.convolution_backward}
_BATCHED = {_aten.bmm, _aten.baddbmm}
_FREE = {_aten.detach, _aten.alias, _aten._unsafe_view, _aten.empty, _aten.empty_like, _aten.empty_strided}


@dataclass
class Work:
    """What a part of the module does in one direction.

    Attributes:
        linear_flops: of matmuls with a weight, and of convolutions; 2 for a multiplication and an addition.
        batched_flops: of matmuls between activations (attention written out).
        attention_flops: of fused attention; a causal one counts in full, as torch's own counter counts it.
        traffic_bytes: read and written by everything that is no matmul, each operation by itself, as eager mode does.
        fused_bytes: read and written if everything between two matmuls were one kernel: the activations that go into
            matmuls and come out of them.
        wide_traffic_bytes: the part of ``traffic_bytes`` whose operations write tensors of the hidden state's shape.
        wide_fused_bytes: the part of ``fused_bytes`` that is of that shape.
        kept_bytes: results of linear layers and of fused attention.
        wide_kept_bytes: the part of them of the hidden state's shape.
        batched_kept_bytes: results of matmuls between activations.
        saved_bytes: kept by autograd from the forward pass to the backward pass, parameters excepted.
        wide_saved_bytes: the part of them of the hidden state's shape.
        largest_bytes: the largest tensor written.
        largest_activation_bytes: the largest one that has no parameter's shape.
    """

    linear_flops: float = 0.0
    batched_flops: float = 0.0
    attention_flops: float = 0.0
    traffic_bytes: float = 0.0
    fused_bytes: float = 0.0
    wide_traffic_bytes: float = 0.0
    wide_fused_bytes: float = 0.0
    kept_bytes: float = 0.0
    wide_kept_bytes: float = 0.0
    batched_kept_bytes: float = 0.0
    saved_bytes: float = 0.0
    wide_saved_bytes: float = 0.0
    largest_bytes: float = 0.0
    largest_activation_bytes: float = 0.0

    def combined(self, other: Self, operation: Callable[[float, float], float]) -> Self:
        """Field by field."""
        return type(self)(*(operation(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))

    @property
    def flops(self) -> float:
        """All of them."""
        return self.linear_flops + self.batched_flops + self.attention_flops


@dataclass
class Region:
    """A block, or the part of the module before or after the blocks.

    Attributes:
        forward: work of the forward pass.
        backward: work of the backward pass.
        parameters: storage keys of the parameters that its forward pass read.
    """

    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    parameters: set[int] = field(default_factory=set)


def storage_key(tensor: Tensor) -> int:
    """The same for all tensors over one storage."""
    return tensor.untyped_storage()._cdata


def _bytes(tensor: Tensor) -> int:
    """What a kernel has to read or write: an expanded tensor is as small as its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _fused_attention(name: str, args: tuple[Any, ...]) -> float:
    """FLOPs of a fused attention by the shapes (batch, heads, length, width) of its first tensors."""
    shapes = [a.shape for a in args if isinstance(a, Tensor)]
    backward = "backward" in name
    query, key = (shapes[1], shapes[2]) if backward else (shapes[0], shapes[1])
    # two matmuls forward; backward five, one of which computes the scores again
    return (10 if backward else 4) * query[0] * query[1] * query[2] * key[2] * query[3]


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"training" if name == "train" else name: value for name, value in kwargs.items()}


class _AsOnAccelerators(TorchFunctionMode):
    """Dropout as accelerators do it: with a mask of one byte an element, and within the kernel of fused attention."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is nn.functional.scaled_dot_product_attention:
            kwargs.pop("dropout_p", None)
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        elif func in (nn.functional.dropout, torch.dropout):
            given = inspect.signature(nn.functional.dropout).bind(*args, **_renamed(kwargs))
            given.apply_defaults()
            x, p, training = (given.arguments[name] for name in ("input", "p", "training"))
            return torch.native_dropout(x, p, True)[0] if training and p else x
        return func(*args, **kwargs)


class Counter(TorchDispatchMode):
    """Counts into ``regions``: "before", "after" and the index of each block.

    Args:
        module: whose parameters are not activations.
        blocks: the stack, in the order in which it runs; may be empty, and everything counts as "after".
        hidden_of: finds the hidden state in a block's arguments.
        output_of: finds it in a block's output.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: list[nn.Module],
        hidden_of: Callable[[tuple[Any, ...], dict[str, Any]], Tensor],
        output_of: Callable[[Any], Tensor],
    ) -> None:
        super().__init__()
        self.regions: dict[int | str, Region] = {"before": Region(), "after": Region()}
        self.regions.update({i: Region() for i in range(len(blocks))})
        self.hidden: Tensor | None = None
        self._parameters = {storage_key(p) for p in module.parameters()}
        self._shapes = {tuple(sorted(p.shape)) for p in module.parameters()}  # of weights and their gradients
        self._blocks, self._hidden_of, self._output_of = blocks, hidden_of, output_of
        self._at: int | str = "before" if blocks else "after"
        self._backward = False
        self._saved: set[int] = set()
        self._keep: list[Any] = []  # a storage that was freed would give its key to another

    @contextmanager
    def counting(self) -> Iterator["Counter"]:
        """The forward pass goes in here; :meth:`backward` runs the other, before this is left."""
        handles = []
        for i, block in enumerate(self._blocks):
            handles.append(block.register_forward_pre_hook(self._enter(i), with_kwargs=True))
            handles.append(block.register_forward_hook(self._leave(i)))
        try:
            with (
                uncompiled(),
                _AsOnAccelerators(),
                untraced_hooks(self._pack, lambda t: t),
                self,
            ):
                yield self
        finally:
            for handle in handles:
                handle.remove()

    def backward(self, loss: Tensor) -> None:
        """Count the backward pass of ``loss``."""
        self._backward, self._at = True, "after"
        loss.backward()

    def _enter(self, index: int) -> Any:
        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._backward:  # a block that is run again for its backward pass
                return
            self._at = index
            if index == 0:
                self.hidden = self._hidden_of(args, kwargs)
                self._turn(self.hidden, "before")

        return hook

    def _leave(self, index: int) -> Any:
        def hook(block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._backward:
                return
            self._turn(self._output_of(output), index)
            if index == len(self._blocks) - 1:
                self._at = "after"

        return hook

    def _turn(self, tensor: Tensor, at: int | str) -> None:
        """Once the gradient of ``tensor`` is known, what follows belongs to ``at``."""
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: setattr(self, "_at", at))

    def _wide(self, tensor: Tensor) -> bool:
        return self.hidden is not None and tensor.shape == self.hidden.shape

    def _pack(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key not in self._parameters and key not in self._saved and not self._backward:
            self._saved.add(key)
            work, size = self.regions[self._at].forward, tensor.untyped_storage().nbytes()
            self._keep.append(tensor.untyped_storage())
            work.saved_bytes += size
            work.wide_saved_bytes += size if self._wide(tensor) else 0
        return tensor

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", None)
        if packet is None or packet in _FREE or func.namespace != "aten" or func.is_view:
            return out
        region = self.regions[self._at]
        work = region.backward if self._backward else region.forward
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        written = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if not self._backward:
            region.parameters |= {key for t in read if (key := storage_key(t)) in self._parameters}
        work.largest_bytes = max([work.largest_bytes, *(_bytes(t) for t in written)])
        others = [_bytes(t) for t in written if tuple(sorted(t.shape)) not in self._shapes]
        work.largest_activation_bytes = max([work.largest_activation_bytes, *others])
        name = str(packet)
        attention = "scaled_dot_product" in name or "flash_attention" in name or "efficient_attention" in name
        if packet in _LINEAR or packet in _BATCHED or attention:
            self._matmul(work, packet, attention, args, kwargs, out, [*read, *written], written)
        else:
            size = sum(_bytes(t) for t in read) + sum(_bytes(t) for t in written)
            work.traffic_bytes += size
            work.wide_traffic_bytes += size if any(self._wide(t) for t in written) else 0
        return out

    def _matmul(
        self,
        work: Work,
        packet: Any,
        attention: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        tensors: list[Tensor],
        written: list[Tensor],
    ) -> None:
        flops = (
            _fused_attention(str(packet), args) if attention else flop_registry[packet](*args, **kwargs, out_val=out)
        )
        if attention:
            work.attention_flops += flops
        elif packet in _BATCHED:
            work.batched_flops += flops
        else:
            work.linear_flops += flops
        # copies of weights and their gradients count here, too; they do not grow with the samples, and so can be told apart
        activations = [t for t in tensors if storage_key(t) not in self._parameters]
        for t in activations:
            work.fused_bytes += _bytes(t)
            work.wide_fused_bytes += _bytes(t) if self._flat_wide(t) else 0
        if packet in _BATCHED:
            work.batched_kept_bytes += sum(_bytes(t) for t in written)
        else:
            for t in written:
                work.kept_bytes += _bytes(t)
                work.wide_kept_bytes += _bytes(t) if self._flat_wide(t) else 0

    def _flat_wide(self, tensor: Tensor) -> bool:
        """Of the hidden state's shape, its leading dimensions perhaps made one, as matmuls see it."""
        if self.hidden is None:
            return False
        return tensor.shape == self.hidden.shape or (
            tensor.ndim == 2 and tensor.shape[-1] == self.hidden.shape[-1] and tensor.numel() == self.hidden.numel()
        )
