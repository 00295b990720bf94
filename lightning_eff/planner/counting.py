"""Counts the FLOPs, memory traffic and saved bytes of each block in a training step on real or fake tensors."""

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
    """The work of a part of the module in one direction; "wide" tensors have the hidden state's shape.

    Attributes:
        linear_flops: matmuls with a weight, and convolutions. A multiplication and an addition are 2 FLOPs.
        batched_flops: matmuls between activations, as in unfused attention.
        attention_flops: fused attention. Causal attention counts in full, as in torch's counter.
        traffic_bytes: reads and writes of all other operations, each on its own, as in eager mode.
        fused_bytes: reads and writes if one kernel computes everything between two matmuls: the matmuls' activations.
        wide_traffic_bytes: the part of ``traffic_bytes`` from operations that write wide tensors.
        wide_fused_bytes: the wide part of ``fused_bytes``.
        kept_bytes: results of linear layers and fused attention.
        wide_kept_bytes: the wide part of ``kept_bytes``.
        batched_kept_bytes: results of matmuls between activations.
        saved_bytes: tensors that autograd saves for the backward pass, without parameters.
        wide_saved_bytes: the wide part of ``saved_bytes``.
        largest_bytes: the largest tensor written.
        largest_activation_bytes: the largest tensor written that does not have the shape of a parameter.
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
        """Apply ``operation`` to each field of both."""
        return type(self)(*(operation(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))

    @property
    def flops(self) -> float:
        """All FLOPs."""
        return self.linear_flops + self.batched_flops + self.attention_flops


@dataclass
class Region:
    """A block, or the part of the module before or after the blocks.

    Attributes:
        forward: work of the forward pass.
        backward: work of the backward pass.
        parameters: storage keys of the parameters that its forward pass reads.
    """

    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    parameters: set[int] = field(default_factory=set)


def storage_key(tensor: Tensor) -> int:
    """Return a key that is the same for all tensors over one storage."""
    return tensor.untyped_storage()._cdata


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that a kernel reads or writes; an expanded tensor is only as large as its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _fused_attention(name: str, args: tuple[Any, ...]) -> float:
    """Return the FLOPs of fused attention from the shapes (batch, heads, length, width) of its first tensors."""
    shapes = [a.shape for a in args if isinstance(a, Tensor)]
    backward = "backward" in name
    query, key = (shapes[1], shapes[2]) if backward else (shapes[0], shapes[1])
    # two matmuls forward; five backward, including one that recomputes the scores
    return (10 if backward else 4) * query[0] * query[1] * query[2] * key[2] * query[3]


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"training" if name == "train" else name: value for name, value in kwargs.items()}


class _AsOnAccelerators(TorchFunctionMode):
    """Runs dropout as accelerators do: with a mask of one byte per element, and inside the kernel of fused attention."""

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
    """Counts the work of each region: "before", "after", and the index of each block.

    Args:
        module: the module. Its parameters do not count as activations.
        blocks: the blocks in execution order. Without blocks, everything counts as "after".
        hidden_of: returns the hidden state from a block's arguments.
        output_of: returns it from a block's output.
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
        self._keep: list[Any] = []  # keeps storages alive, since a freed storage's key can be used again

    @contextmanager
    def counting(self) -> Iterator["Counter"]:
        """Count the forward pass inside this context; call :meth:`backward` before it ends."""
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
            if self._backward:  # the block is being recomputed
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
        """Assign the work after the gradient of ``tensor`` to region ``at``."""
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
        # copies of weights and their gradients count too; they do not grow with the samples, so the profile separates them
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
        """Whether the tensor has the hidden state's shape, perhaps with flattened leading dimensions, as in matmuls."""
        if self.hidden is None:
            return False
        return tensor.shape == self.hidden.shape or (
            tensor.ndim == 2 and tensor.shape[-1] == self.hidden.shape[-1] and tensor.numel() == self.hidden.numel()
        )
