"""Hooks around blocks that may be compiled. torch's hooks would be compiled with the block."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_eff._core import rng
from lightning_eff._core._stack.calls import hidden_of, split_output
from lightning_eff._core._stack.compiled import uncompiled
from lightning_eff._core._stack.residual import adds_to
from lightning_eff._core.patches import hook_before, hook_behind
from lightning_eff._core.steps import snapshot


class Handle(Protocol):
    """Removes a hook."""

    def remove(self) -> None: ...


def hooked(
    block: nn.Module, leave: Callable[..., Any], enter: Callable[..., Any] = lambda block, args, kwargs: None
) -> list[Handle]:
    """Call ``enter(block, args, kwargs)`` before each call of ``block``, and ``leave(block, args, kwargs, output)`` after."""
    if block._compiled_call_impl is not None:
        return [_Around(block, enter, leave)]
    return [
        hook_before(block, enter, with_kwargs=True),
        hook_behind(block, leave, with_kwargs=True, prepend=True),
    ]


class _Around:
    """Wraps the compiled call of a block, outside of compiled code."""

    def __init__(self, block: nn.Module, enter: Callable[..., Any], leave: Callable[..., Any]) -> None:
        self._namespace: dict[str, Any] = vars(block)
        compiled: Any = block._compiled_call_impl
        self._before = compiled

        self._over = False

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._over:  # a later wrapper still calls this one
                return compiled(*args, **kwargs)
            enter(block, args, kwargs)
            output = compiled(*args, **kwargs)
            leave(block, args, kwargs, output)
            return output

        self._made = self._namespace["_compiled_call_impl"] = call

    def remove(self) -> None:
        self._over = True
        if self._namespace.get("_compiled_call_impl") is self._made:
            self._namespace["_compiled_call_impl"] = self._before


def adds_plainly(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
    """Return :func:`adds_to` for another call without the compiler, whose graph shows the block's own operations."""
    args, kwargs = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
    put_back = snapshot(block)
    try:
        with rng.fork(), uncompiled():
            output = block.forward(*args, **kwargs)
    finally:
        put_back()
    return adds_to(hidden_of(args, kwargs), split_output(output)[0])
