"""Attention that a module computes by hand, computed by torch's fused attention instead."""

import math
import sys
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_eff._core._lightning.names import of_both
from lightning_eff._core.patches import Patches

WHO = "FusedAttention"
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
_SCALES: dict[Any, Callable[[float], float]] = {}
for _f in (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, Tensor.__imul__, torch.multiply):
    _SCALES[_f] = lambda number: number
for _f in (torch.div, Tensor.div, Tensor.__truediv__, Tensor.div_, Tensor.__itruediv__, torch.true_divide):
    _SCALES[_f] = lambda number: 1 / number
_ADDS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__)
_FILLS = (torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_)
_SOFTMAX = (torch.softmax, Tensor.softmax, F.softmax)
_SAME_DTYPE = (Tensor.to, Tensor.float, Tensor.type_as, Tensor.half, Tensor.bfloat16, Tensor.contiguous)
_METADATA = ("__get__", "size", "dim", "ndimension", "stride", "is_floating_point", "numel", "is_contiguous", "__len__")


class Pending(Tensor):
    """Scores or weights of attention that are not computed yet. Any operation but attention's own computes them."""

    _call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
    _value: Tensor | None
    query: Tensor
    key: Tensor  # (..., D, S)
    scale: float
    mask: Tensor | None
    weights: bool
    dropout: float
    fused: bool
    site: str
    grad_mode: bool
    filled: Tensor | None  # which scores a finite number has replaced
    versions: tuple[tuple[Tensor, int], ...]  # of the tensors that are read later
    autocast: torch.dtype | None

    @staticmethod
    def made(
        like: "Pending | None", shape: torch.Size, dtype: torch.dtype, device: torch.device, **state: Any
    ) -> "Pending":
        """A tensor of this shape without content."""
        names = (
            "query",
            "key",
            "scale",
            "mask",
            "weights",
            "dropout",
            "site",
            "grad_mode",
            "filled",
            "versions",
            "autocast",
        )
        before = {name: getattr(like, name) for name in names} if like is not None else {}
        state = {**before, "_value": None, "fused": False, **state}
        gradient = state["grad_mode"] and any(t.requires_grad for t in (state["query"], state["key"]))
        tensor: Any = Tensor._make_wrapper_subclass(Pending, shape, dtype=dtype, device=device, requires_grad=gradient)
        for name, value in state.items():
            object.__setattr__(tensor, name, value)
        if gradient:  # no gradient arrives here, unless an operation took the tensor without telling its class
            with torch._C.DisableTorchFunctionSubclass():
                tensor.register_hook(_lost)
        return tensor

    def plain(self) -> Tensor:
        """Its content, computed as the module's own code does.

        Raises:
            RuntimeError: for weights after dropout, whose random mask was drawn inside torch's kernel.
        """
        if self.fused and self.dropout:
            raise RuntimeError(
                f"{WHO}: the attention weights at {self.site} are also used elsewhere after dropout. Fused attention does not"
                f" return them. Remove {WHO}."
            )
        if self._value is None:
            self.check()
            function, args, kwargs = self._call
            kind = self.query.device.type
            mixed = torch.autocast(kind, self.autocast or torch.bfloat16, enabled=self.autocast is not None)
            with torch.set_grad_enabled(self.grad_mode), mixed:
                found = function(*_plain(args), **_plain(kwargs))
            object.__setattr__(self, "_value", found)
        assert self._value is not None
        return self._value

    def check(self) -> None:
        """Raise ``RuntimeError`` if a tensor that is read now was changed in place after the user's code read it."""
        if any(t._version != version for t, version in self.versions):
            raise RuntimeError(
                f"{WHO}: a tensor that the attention at {self.site} reads was changed in place afterwards. Remove {WHO}."
            )

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _METADATA and func is not Tensor.requires_grad.__get__:  # pyright: ignore[reportAttributeAccessIssue]
            name = getattr(getattr(func, "__self__", None), "__name__", "shape")
            if name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_sparse", "names", "is_nested"):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
        found = _followed(func, args, kwargs)
        return func(*_plain(args), **_plain(kwargs)) if found is None else found

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_plain(args), **_plain(kwargs or {}))


def _lost(gradient: Tensor) -> None:
    raise RuntimeError(
        f"{WHO}: an operation that torch does not show read attention scores, such as an autograd.Function. Remove {WHO}."
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Pending):
        return value.plain()
    if isinstance(value, tuple | list):
        return type(value)(map(_plain, value))
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _followed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The result of an operation of attention on pending scores or weights; None for any other operation."""
    first, second = (*args, None, None)[:2]
    if func in _ADDS and not isinstance(first, Pending) and isinstance(second, Pending):
        first, second = second, first
    if func in _SCALES and not isinstance(first, Pending) and isinstance(second, Pending):
        if _SCALES[func](2.0) != 2.0:
            return None
        first, second = second, first
    if not isinstance(first, Pending):
        return None

    def then(**state: Any) -> Pending:
        dtype = state.pop("dtype", first.dtype)
        state["versions"] = (*first.versions, *_versions(args))
        state["autocast"] = _mixed(first)
        return Pending.made(first, first.shape, dtype, first.device, _call=(func, args, kwargs), **state)

    if func in _PRODUCTS or func is torch.einsum:
        return _attended(first, second) if first.weights and isinstance(second, Tensor) and func in _PRODUCTS else None
    if func in _SAME_DTYPE:
        wanted = {Tensor.float: torch.float32, Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16}.get(func)
        wanted = second.dtype if isinstance(second, Tensor) else second if isinstance(second, torch.dtype) else wanted
        alone = len(args) + len(kwargs) <= (1 if func in (Tensor.float, Tensor.contiguous) else 2)
        return first if alone and wanted in (None, first.dtype) and (wanted or func is Tensor.contiguous) else None
    if func is F.dropout and first.weights:
        p, training = _dropout(args, kwargs)
        return first if not training or p == 0 else None if first.dropout else then(dropout=p)
    if first.weights:
        return None
    if func in _SCALES and len(args) == 2 and not kwargs and isinstance(second, int | float) and second > 0:
        by = _SCALES[func](float(second))
        return then(scale=first.scale * by, mask=None if first.mask is None else first.mask * by)
    if func in _ADDS and len(args) == 2 and not kwargs and isinstance(second, Tensor):
        able = _fits(second, first) and second.is_floating_point() and first.filled is None
        return then(mask=_added(first.mask, second)) if able else None
    if func in _FILLS and len(args) == 3 and not kwargs:
        return _filled(first, second, args[2], then)
    if func in _SOFTMAX:
        dim = kwargs.get("dim", second)
        dtype = kwargs.get("dtype", args[2] if func is not F.softmax and len(args) > 2 else None)
        if dim in (-1, first.ndim - 1) and dtype in (None, first.dtype):
            return then(weights=True, dtype=first.dtype if _mixed(first) is None else torch.float32)
    return None


def _filled(scores: Pending, hidden: Any, value: Any, then: Callable[..., Pending]) -> Pending | None:
    """Scores with ``value`` where ``hidden``, as a mask that is added; None where adding is not the same.

    A row that is hidden as a whole by a finite number has equal weights and no gradient, which no added mask gives.
    """
    if not isinstance(value, int | float) or value >= -1e3:
        return None
    if not isinstance(hidden, Tensor) or hidden.dtype != torch.bool or not _fits(hidden, scores):
        return None
    every = scores.filled
    if value != -math.inf:
        if scores.mask is not None and every is None:
            return None
        every = hidden if every is None else every | hidden
        if bool(every.all(-1).any()):
            return None
    zeros = torch.zeros(hidden.shape, dtype=scores.query.dtype, device=hidden.device)
    return then(mask=_added(scores.mask, zeros.masked_fill(hidden, value)), filled=every)


def _versions(args: tuple[Any, ...]) -> tuple[tuple[Tensor, int], ...]:
    return tuple((t, t._version) for t in args if type(t) is Tensor)


def _dropout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, bool]:
    given = {**dict(zip(("input", "p", "training", "inplace"), args, strict=False)), **kwargs}
    return float(given.get("p", 0.5)), bool(given.get("training", True))


def _added(mask: Tensor | None, more: Tensor) -> Tensor:
    return more if mask is None else mask + more


def _fits(mask: Tensor, scores: Tensor) -> bool:
    try:
        return type(mask) is not Pending and torch.broadcast_shapes(mask.shape, scores.shape) == scores.shape
    except RuntimeError:
        return False


def _attended(weights: Pending, value: Tensor) -> Tensor | None:
    """Torch's fused attention in place of weights times values."""
    query, key = weights.query, weights.key.transpose(-2, -1)
    alike = query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    alike &= _mixed(query) is not None or query.dtype == key.dtype == value.dtype
    if not alike or type(value) is not Tensor or value.shape[-2] != key.shape[-2]:
        return None
    weights.check()
    mask = weights.mask
    if mask is not None:
        mask = mask[(None,) * (query.ndim - mask.ndim)].to(_mixed(query) or query.dtype)
    object.__setattr__(weights, "fused", True)
    if _MODES:
        _MODES[-1].sites[weights.site] = _MODES[-1].sites.get(weights.site, 0) + 1
    return F.scaled_dot_product_attention(query, key, value, mask, weights.dropout, scale=weights.scale)


def _mixed(of: Tensor) -> torch.dtype | None:
    """The dtype in which autocast computes products; None outside of it."""
    kind = of.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and of.dtype != torch.float64 else None


_MODES: list["ByHand"] = []


class ByHand(TorchFunctionMode):
    """Finds attention that is computed by hand and computes it by torch's fused attention.

    Attributes:
        sites: how many calls were replaced, by the place in the user's code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sites: dict[str, int] = {}

    @override
    def __enter__(self) -> Self:
        _MODES.append(self)
        return super().__enter__()

    @override
    def __exit__(self, *error: Any) -> None:
        _MODES.remove(self)
        super().__exit__(*error)

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS and len(args) == 2 and not kwargs:
            q, k = args
            if _may_be_scores(q, k):
                shape = torch.Size((*q.shape[:-1], k.shape[-1]))
                call = (func, args, {})
                state = {"query": q, "key": k, "scale": 1.0, "mask": None, "weights": False, "dropout": 0.0}
                state |= {"site": _place(), "grad_mode": torch.is_grad_enabled(), "filled": None}
                state |= {"versions": _versions(args), "autocast": _mixed(q)}
                return Pending.made(None, shape, _mixed(q) or q.dtype, q.device, _call=call, **state)
        return func(*args, **kwargs)


def _may_be_scores(q: Any, k: Any) -> bool:
    """Whether a product could be that of queries and keys: two batches of matrices, alike in size."""
    if type(q) is not Tensor or type(k) is not Tensor or q.ndim < 3 or q.ndim != k.ndim:
        return False
    if not q.is_floating_point() or not k.is_floating_point() or q.shape[:-2] != k.shape[:-2]:
        return False
    return q.shape[-1] == k.shape[-2] and q.shape[-1] <= 512 and math.prod(q.shape) > 0


def _place() -> str:
    """File and line of the code outside torch that computes."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and "/torch/" not in name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown code"


@of_both
class FusedAttention(Callback):
    """Compute attention that the module's own code writes out by torch's fused attention, in training.

    It recognises ``softmax(q @ k.transpose(-2, -1) * scale + mask) @ v``, with masks that are added or filled in and dropout of
    the weights. Loss and gradients are equal up to rounding. Weights that other code reads are computed for it as before. To
    change the code itself, call ``F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)``.

    Raises:
        ValueError: after the first step, if no such attention was found.
        RuntimeError: if other code reads weights after dropout.
    """

    def __init__(self) -> None:
        self._patches = Patches()
        self._checked = False
        self.sites: dict[str, int] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        original = pl_module.training_step
        self._checked = False

        def training_step(*args: Any, **kwargs: Any) -> Any:
            mode = ByHand()
            with mode:
                output = _plain(original(*args, **kwargs))
            self.sites = mode.sites
            if not self._checked and not self.sites:
                raise ValueError(f"{WHO}: found no attention that is computed by hand in the first step. Remove {WHO}.")
            self._checked = True
            return output

        training_step.__wrapped__ = original  # pyright: ignore[reportFunctionMemberAccess]
        self._patches.set(pl_module, "training_step", training_step)

    def chosen(self) -> dict[str, Any]:
        """Where attention was replaced."""
        return {"attention": sorted(self.sites)}

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._patches.restore()
