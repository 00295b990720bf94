"""Find the attention calls of an unchanged module: fused, in torch's module, or as a softmax over scores."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_eff._core._attention.calls import as_term
from lightning_eff._core._attention.window import band, windowed_attention, within
from lightning_eff._core._targets.edges import backward_by_edges, grad_by_edges

_FUSED = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_SEEN = frozenset({*_SOFTMAX, *_BACKWARD, F.scaled_dot_product_attention, F.multi_head_attention_forward})
_MODULE = inspect.signature(F.multi_head_attention_forward)


class WindowedAttention(TorchFunctionMode):
    """Limits self-attention to a window of keys while it is entered.

    It sees ``F.scaled_dot_product_attention`` with as many queries as keys, ``F.multi_head_attention_forward`` (and so
    ``nn.MultiheadAttention``) with queries and keys from one tensor, and a softmax over the last dimension of scores (B, H, L,
    L). It also sees calls that gradient checkpointing runs again, if the backward pass begins while it is entered.

    Args:
        window: a function of the number L of keys that returns the window. L or more leaves the call unchanged.

    Attributes:
        lengths: L of each call.
        windows: the window of each call.
        others: the number of calls left unchanged because they are not self-attention.
    """

    apart_from_compiled = True  # sees nothing in compiled code, so nothing is compiled with it

    def __init__(self, window: Callable[[int], int]) -> None:
        super().__init__()
        self.window = window
        self.lengths: list[int] = []
        self.windows: list[int] = []
        self.others = 0

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _SEEN or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func in (Tensor.backward, torch.autograd.backward):
            with self:  # torch has left the mode, but checkpointed calls must be seen too
                return backward_by_edges(*args, **kwargs)
        if func is torch.autograd.grad:
            with self:
                return grad_by_edges(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._fused(args, kwargs)
        if func is F.multi_head_attention_forward:
            return self._of_module(args, kwargs)
        if func in _SOFTMAX:
            return self._softmax(func, args, kwargs)
        return func(*args, **kwargs)

    def _seen(self, length: int) -> int | None:
        """The window of a call of this length, or None if it covers all keys."""
        window = self.window(length)
        self.lengths.append(length)
        self.windows.append(min(window, length))
        return window if window < length else None

    def _fused(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        given: dict[str, Any] = {**dict(zip(_FUSED, args, strict=False)), **kwargs}
        q, k, v = given.pop("query"), given.pop("key"), given.pop("value")
        if q.shape[-2] != k.shape[-2]:
            self.others += 1
            return F.scaled_dot_product_attention(*args, **kwargs)
        window = self._seen(q.shape[-2])
        if window is None:
            return F.scaled_dot_product_attention(*args, **kwargs)
        mask, is_causal = given.pop("attn_mask", None), given.pop("is_causal", False)
        return windowed_attention(q, k, v, mask, window=window, is_causal=is_causal, **given)

    def _softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        scores = args[0] if args else kwargs["input"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        square = isinstance(scores, Tensor) and scores.ndim == 4 and scores.shape[-1] == scores.shape[-2]
        if not square or dim not in (-1, 3) or not scores.is_floating_point():
            return func(*args, **kwargs)
        window = self._seen(scores.shape[-1])
        if window is None:
            return func(*args, **kwargs)
        scores = within(scores, band(scores.shape[-1], window, scores.device))
        return func(scores, *args[1:], **{name: value for name, value in kwargs.items() if name != "input"})

    def _of_module(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) < 2 or args[0] is not args[1]:
            self.others += 1
            return F.multi_head_attention_forward(*args, **kwargs)
        query: Tensor = args[0]  # (L, B, D), or (L, D)
        window = self._seen(query.shape[0])
        if window is None:
            return F.multi_head_attention_forward(*args, **kwargs)
        given = _MODULE.bind(*args, **kwargs).arguments
        length, heads = query.shape[0], given["num_heads"]
        size = query.shape[1] if query.ndim == 3 else 1
        seen = band(length, window, query.device)
        mask, padding = (as_term(given.get(name), query) for name in ("attn_mask", "key_padding_mask"))
        if mask is None:
            whole = torch.zeros(1, 1, length, length, dtype=query.dtype, device=query.device)
            whole = whole.masked_fill(~seen.tril(), -torch.inf) if given.get("is_causal") else whole
        else:
            whole = mask.view(1, 1, length, length) if mask.ndim == 2 else mask.view(size, heads, length, length)
        if padding is not None:
            whole = whole + padding.view(size, 1, 1, length)
        whole = within(whole, seen).expand(size, heads, length, length).flatten(0, 1)
        new = {"attn_mask": whole, "key_padding_mask": None, "is_causal": False}
        return F.multi_head_attention_forward(**{**given, **new})
