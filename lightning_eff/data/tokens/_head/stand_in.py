"""A placeholder tensor for logits: it knows its hidden states and weights, and computes the logits on demand.

Operations that move logits, upcast them, scale them by a number, add a bias of classes or cap them by ``tanh`` return another
placeholder. Its maker computes a cross-entropy. Every other operation gets the logits, computed once by the operations that
the module requested, so unknown operations behave as usual.
"""

import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from lightning_eff._core._targets.operations import name_of
from lightning_eff._core.losses import bind_loss
from lightning_eff.data.tokens._head.calls import PLACE, Call, Maker, Node
from lightning_eff.data.tokens._head.rows import MOVING, Rows, begin, moved

#: Attributes that are known without the logits.
_KNOWN = frozenset((
    "device", "dim", "dtype", "element_size", "get_device", "grad_fn", "is_complex", "is_contiguous", "is_cpu", "is_cuda",
    "is_floating_point", "is_leaf", "is_meta", "is_mps", "is_mtia", "is_nested", "is_quantized", "is_signed", "is_sparse",
    "is_xla", "is_xpu", "itemsize", "layout", "len", "names", "nbytes", "ndim", "ndimension", "nelement", "numel",
    "requires_grad", "shape", "size", "stride", "_base", "_is_view", "_version",
))  # fmt: skip
_MADE_LIKE = frozenset(("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"))
_CASTS = {"bfloat16": torch.bfloat16, "double": torch.float64, "float": torch.float32, "half": torch.float16}
_PRODUCTS, _QUOTIENTS = frozenset(("mul", "multiply", "rmul")), frozenset(("div", "divide", "true_divide", "truediv"))
_SUMS = frozenset(("add", "radd"))
_INPLACE = frozenset(
    f"__i{name}__"
    for name in [
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
        "matmul",
    ]
) | {"__setitem__"}
_WATCHED = frozenset(("grad", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"))


class Logits(Tensor):
    """A placeholder for logits."""

    _node: Node

    @staticmethod
    def __new__(cls: type["Logits"], node: Node) -> "Logits":
        layout = node.rows.layout
        made = Tensor._make_wrapper_subclass(
            cls, layout.shape, strides=layout.stride(), dtype=node.dtype, device=node.call.x.device
        )
        made._node = node
        return made

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, raw = name_of(func), getattr(func, "__name__", "")
        known = name in _KNOWN or (name == "type" and len(args) == 1 and not kwargs)
        if known or (name == "register_hook" and _by_tracker()):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "register_hook" and _of_fsdp(args[-1]):
            node, hook = args[0]._node, args[-1]
            node.call.before.append(hook)
            return None if node.real is None else node.real.register_hook(hook)
        if name in _MADE_LIKE and isinstance(args[0], Logits):
            node = args[0]._node
            return func(torch.empty(0, dtype=node.dtype, device=node.call.x.device), *args[1:], **kwargs)
        stand_ins = list(_stand_ins((args, kwargs)))
        changes = (raw.endswith("_") and not raw.endswith("__")) or raw in _INPLACE or "out" in kwargs
        if len(stand_ins) == 1 and stand_ins[0]._node.followed and not changes:
            made = (
                _loss(func, args, kwargs)
                if func in (F.cross_entropy, F.nll_loss)
                else _followed(name, func, args, kwargs)
            )
            if made is not None:
                return made
        return _computed(name, func, args, kwargs, stand_ins, changes=changes or name == "data")

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Handle an operation that was not seen above, from within C++, below autograd."""

        def plain(value: Any) -> Any:
            if not isinstance(value, Logits):
                return value
            call = value._node.call
            logits = value._node.value()
            call.settled = True
            call.maker.read(value._node, func.__name__)
            return logits.detach()

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Logits(shape={tuple(self.shape)}, dtype={self.dtype}, of {self._node.call.site}, not computed)"


class _Stand(torch.autograd.Function):
    """Makes a placeholder part of the graph; if unseen code asks for its gradient, it is that of the logits."""

    @staticmethod
    def forward(ctx: Any, node: Node, *inputs: Tensor) -> Tensor:
        ctx.node, ctx.inputs = node, inputs
        return Logits(node)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        fresh = {id(ctx.inputs[i]): ctx.inputs[i].detach().requires_grad_() for i in wanted}
        with torch.enable_grad():
            logits = ctx.node.compute(fresh)
        found = torch.autograd.grad(logits, list(fresh.values()), grad_outputs[0], allow_unused=True)
        gradients = dict(zip(fresh, found, strict=True))
        return None, *(gradients.get(id(t)) for t in ctx.inputs)


def stand_in(maker: Maker, site: Any, x: Any, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return a placeholder for ``x weight^T + bias``, or None if this is not supported.

    Args:
        maker: the object that computes losses and hears of reads.
        site: the called layer, for messages.
        x: (..., D), floating-point.
        weight: (V, D).
        bias: (V,), or None.
    """
    x = x._node.value() if isinstance(x, Logits) else x
    inputs = [t for t in (x, weight, bias) if t is not None]
    if any(type(t) not in (Tensor, nn.Parameter) or not t.is_floating_point() for t in inputs):
        return None
    if weight.ndim != 2 or len(weight) < 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1] or not x.numel():
        return None
    if any(t.device != x.device for t in inputs) or is_functorch_wrapped_tensor(x):
        return None
    call = Call(maker, site, x, weight, bias)
    if not call.autocast and any(t.dtype != x.dtype for t in inputs):
        return None
    return _stood(Node(call, begin((*x.shape[:-1], len(weight))), call.dtype))


def _stood(node: Node) -> Tensor:
    made = _Stand.apply(node, *node.call.inputs, *node.others)
    assert isinstance(made, Tensor), "a Function returns the result of its forward"
    node.stand_in = weakref.ref(made)
    return made


def _stand_ins(value: Any) -> Iterator[Logits]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Logits):
            yield leaf


def _by_tracker() -> bool:
    """Return whether torch's own module tracker registers a hook (as ``FlopCounterMode`` does), which changes no gradient."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(6):
        if frame is None or frame.f_globals.get("__name__") == "torch.utils.module_tracker":
            break
        frame = frame.f_back
    else:
        return False
    return frame is not None


def _of_fsdp(hook: Any) -> bool:
    """Return whether FSDP2 waits for the backward pass with this hook, which passes the gradient on unchanged."""
    return type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp.")


def _loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    arguments = bind_loss(func, args, kwargs)
    assert arguments is not None, "it is a loss function"
    given = arguments["input"]
    if not isinstance(given, Logits) or (func is F.nll_loss and not given._node.normal):
        return None
    if given._node.call.differentiable and not torch.is_grad_enabled():
        return None
    return given._node.call.maker.loss(given._node, arguments)


def _followed(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the placeholders that an operation on one makes, or None if it needs the logits."""
    at = next((i for i, arg in enumerate(args) if isinstance(arg, Logits)), None)
    if at is None:
        return None
    node: Node = args[at]._node
    if node.call.differentiable and not torch.is_grad_enabled():
        return None  # a copy without the graph
    step = (func, tuple(PLACE if i == at else arg for i, arg in enumerate(args)), kwargs)
    rest = args[:at] + args[at + 1 :]
    if at == 0 and name in MOVING:
        if any(
            isinstance(value, torch.dtype) for value in (*rest, *kwargs.values())
        ):  # reinterpret the bits as another dtype
            return None
        made = moved(node.rows, name, func, rest, kwargs, node.call.x.device)
        if made is None:
            return None
        if isinstance(made, Rows):
            return _stood(_child(node, step, rows=made))
        return tuple(_stood(_child(node, step, rows=rows, part=part)) for part, rows in enumerate(made))
    if at == 0 and (name in _CASTS or name == "to"):
        return _cast(node, step, name, rest, kwargs)
    if name == "log_softmax" and at == 0 and _over_classes(node.rows, rest, kwargs):
        return _stood(_child(node, step, normal=True))
    if kwargs or (len(rest) != 1 and name != "tanh") or node.normal:
        return None
    if name == "tanh" and not rest and node.cap is None:
        return _stood(_child(node, step, cap=1.0))
    if name in _PRODUCTS or (name in _QUOTIENTS and at == 0):
        return _scaled(node, step, rest[0], divide=name in _QUOTIENTS)
    return _shifted(node, step, rest[0]) if name in _SUMS else None


def _child(node: Node, step: Any, **changed: Any) -> Node:
    kept = {key: getattr(node, key) for key in ("call", "rows", "dtype", "scale", "shift", "cap", "normal", "others")}
    graph = tuple(t for t in tree_leaves(step[1:]) if isinstance(t, Tensor) and t.requires_grad)
    return Node(**{**kept, "parent": node, "step": step, "others": (*node.others, *graph), **changed})


def _over_classes(rows: Rows, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a ``log_softmax`` with these arguments is over the classes, in the logits' own dtype."""
    named = {**dict(zip(("dim", "_stacklevel"), rest, strict=False)), **kwargs}
    dim = named.pop("dim", None)
    if not isinstance(dim, int) or any(key != "_stacklevel" and value is not None for key, value in named.items()):
        return False
    return (
        len(rest) <= 2
        and not any(isinstance(value, torch.dtype) for value in rest)
        and dim % len(rows.shape) == rows.at
    )


def _cast(node: Node, step: Any, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Cast to a dtype that can hold all values of the logits' dtype."""
    dtype, device = _CASTS.get(name), node.call.x.device
    if dtype is None:
        with torch._C.DisableTorchFunction():
            made = torch.empty(0, dtype=node.dtype, device=device).to(*rest, **kwargs)
        dtype, device = made.dtype, made.device
    if device != node.call.x.device or not dtype.is_floating_point:
        return None
    if torch.promote_types(dtype, node.dtype) != dtype:
        return None
    return _stood(_child(node, step, dtype=dtype))


def _is_scalar(value: Any, node: Node) -> bool:
    """Return whether it is a number, or a tensor with one element that keeps the logits' shape."""
    if not isinstance(value, Tensor):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) in (Tensor, nn.Parameter) and value.numel() == 1 and value.ndim <= len(node.rows.shape)


def _scaled(node: Node, step: Any, by: Any, *, divide: bool) -> Tensor | None:
    if not _is_scalar(by, node) or (node.cap is not None and isinstance(by, Tensor)):
        return None
    if not isinstance(by, Tensor) and divide and by == 0:
        return None
    dtype = _joined(node, by)
    if dtype is None:
        return None
    by = by.reshape(()) if isinstance(by, Tensor) else by
    factor = 1 / by if divide else by
    if node.cap is not None:
        return _stood(_child(node, step, cap=node.cap * factor))
    scale = factor if node.scale is None else node.scale * factor
    shift = None if node.shift is None else node.shift * factor
    return _stood(_child(node, step, dtype=dtype, scale=scale, shift=shift))


def _joined(node: Node, by: Any) -> torch.dtype | None:
    """Return the dtype of the logits with a number or a tensor, by torch's promotion."""
    if not isinstance(by, Tensor) or (by.ndim == 0 and by.is_floating_point()):
        return node.dtype
    dtype = torch.promote_types(node.dtype, by.dtype)
    return dtype if dtype.is_floating_point else None


def _shifted(node: Node, step: Any, by: Any) -> Tensor | None:
    """Shift by a bias of classes, which is the same for all rows."""
    rows = node.rows
    if type(by) not in (Tensor, nn.Parameter) or node.cap is not None or by.ndim > len(rows.shape):
        return None
    sizes = (1,) * (len(rows.shape) - by.ndim) + tuple(by.shape)
    dtype = _joined(node, by)
    if dtype is None or any(size != (rows.classes if dim == rows.at else 1) for dim, size in enumerate(sizes)):
        return None
    shift = by.reshape(-1)
    return _stood(_child(node, step, dtype=dtype, shift=shift if node.shift is None else node.shift + shift))


def _computed(
    name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], stand_ins: list[Logits], *, changes: bool
) -> Any:
    """Run the operation on the logits themselves."""
    for one in stand_ins:
        call = one._node.call
        if changes:
            for node in [node for node in call.maker.nodes if node.call is call and node.held]:
                node.value()
            call.settled = True
        one._node.value()

    def plain(value: Any) -> Any:
        return value._node.value() if isinstance(value, Logits) else value

    made = func(*tree_map(plain, args), **tree_map(plain, kwargs))
    for one in stand_ins:
        one._node.call.watched |= name in _WATCHED
        one._node.call.maker.read(one._node, name)
    if changes and isinstance(made, Tensor) and args and isinstance(args[0], Logits) and made is args[0]._node.real:
        return args[0]
    return made
