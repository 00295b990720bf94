"""Fused attention whose backward pass recomputes its output from queries, keys and values.

Fused attention saves ``q, k, v``, its output ``o`` and the log-sum-exp of each row. Its backward pass computes
``p = exp(q k^T - lse)`` and ``delta = rowsum(do o)``. With rounded ``q`` and ``k`` and an exact ``lse``, the rows of ``p`` no
longer sum to one, and ``delta`` differs from ``rowsum(p dp)``, so the softmax gradient loses its cancellation. Recomputed from
the rounded ``q, k, v``, both are consistent, at the cost of another forward kernel, and neither is stored.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import override

from lightning_eff._core.blocks import untraced_hooks

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_FUSED = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)

OnResult = Callable[[Tensor, int], Any]


class Call(NamedTuple):
    """A call of ``F.scaled_dot_product_attention`` for which torch would use a fused kernel, without dropout.

    Attributes:
        tensors: queries, keys, values and the mask, in the dtype of autocast.
        options: the other arguments, by name.
        backend: the kernel.
    """

    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None]
    options: dict[str, Any]
    backend: SDPBackend

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Call | None":
        """Return the call with these arguments, or None if another kernel runs or nothing would be saved."""
        options: dict[str, Any] = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
        given: list[Tensor | None] = [options.pop(name, None) for name in _NAMES[:4]]
        q, k, v, mask = given
        if len(args) > len(_NAMES) or options.pop("dropout_p", 0.0) or not torch.is_grad_enabled():
            return None
        if q is None or k is None or v is None or not all(t is None or _is_plain(t) for t in given):
            return None
        if not any(t is not None and t.requires_grad for t in given):
            return None
        kind = q.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            q, k, v = _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)
            mask = None if mask is None else _cast(mask, dtype)
        backend = SDPBackend(torch._fused_sdp_choice(q, k, v, mask, **options))  # pyright: ignore[reportPrivateImportUsage]
        return cls((q, k, v, mask), options, backend) if backend in _FUSED else None

    def run(self, on_result: OnResult) -> Tensor:
        """Return the result of the call.

        Args:
            on_result: a function that is called with the result and the bytes of the log-sum-exp, both of which plain autograd
                would save. Its return value is kept as long as the graph.
        """
        (output,) = _Attention.apply(*self.tensors, self.options, self.backend, on_result)  # pyright: ignore[reportGeneralTypeIssues]
        return output


def _is_plain(x: Any) -> bool:
    return type(x) in (Tensor, nn.Parameter) and not is_functorch_wrapped_tensor(x) and not x.is_nested


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` in the dtype that autocast passes on."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


class _Attention(torch.autograd.Function):
    """Attention that saves its arguments.

    Shapes: queries (B, H, T, E), keys (B, H', S, E), values (B, H', S, E'), output (B, H, T, E').
    """

    @staticmethod
    @override
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
        backend: SDPBackend,
        on_result: OnResult,
    ) -> tuple[Tensor]:
        ctx.options, ctx.backend = options, backend
        ctx.save_for_backward(q, k, v, mask)
        with torch.autocast(q.device.type, enabled=False), sdpa_kernel(backend):
            output = F.scaled_dot_product_attention(q, k, v, mask, **options)
        ctx.result = on_result(output, 4 * q.shape[:-1].numel())
        return (output,)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors
        needed = ctx.needs_input_grad[:4]
        # disable the hooks of a forward pass that may contain this backward pass
        with (
            untraced_hooks(_same, _same),
            torch.autocast(saved[0].device.type, enabled=False),
            sdpa_kernel(ctx.backend),
            torch.enable_grad(),
        ):
            inputs = [None if t is None else t.detach().requires_grad_(n) for t, n in zip(saved, needed, strict=True)]
            output = F.scaled_dot_product_attention(*inputs, **ctx.options)  # pyright: ignore[reportArgumentType]
            wanted = [t for t, n in zip(inputs, needed, strict=True) if n and t is not None]
            found = iter(torch.autograd.grad(output, wanted, grad_outputs[0]))
        return (*(next(found) if n else None for n in needed), None, None, None)


def _same(x: Tensor) -> Tensor:
    return x
