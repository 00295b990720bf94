"""Calls of a stack's blocks, handed to whoever decides what is kept of them."""

import functools
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_eff._core.blocks import BlockStack
from lightning_eff._core.patches import Patches

Handle = Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""``handle(index, run, args, kwargs)`` returns what block ``index`` shall return; ``run`` is the plain call."""


class _Handed:
    """Stands on a block's instance for its own ``_call_impl``."""

    def __init__(self, index: int, run: Callable[..., Any], handle: Handle) -> None:
        self._index, self._run, self._handle = index, run, handle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._handle(self._index, self._run, args, kwargs)


def hand_over(stack: BlockStack, patches: Patches, handle: Handle) -> None:
    """Let each call of a block of ``stack``, with the hooks on the block, go through ``handle`` until the run ends.

    A block that is in the stack several times has the index of its first place.
    """
    seen: set[int] = set()
    for index, block in enumerate(stack.blocks):
        if id(block) not in seen:
            seen.add(id(block))
            # nn.Module.__call__ looks for the compiled call first, and for both on the instance
            name = "_call_impl" if getattr(block, "_compiled_call_impl", None) is None else "_compiled_call_impl"
            patches.set(block, name, _Handed(index, getattr(block, name), handle))


def without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block's call without Hugging Face's caches of keys and values.

    A block adds to its cache as it runs, and would do so twice; nothing reads the cache in training. The same is done by
    transformers where its own checkpointing is on.
    """
    if not any(map(_is_cache, args)) and not any(map(_is_cache, kwargs.values())):
        return args, kwargs
    _tell()
    kwargs = {key: None if _is_cache(value) else value for key, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return tuple(None if _is_cache(value) else value for value in args), kwargs


@functools.cache
def _cache_class(cls: type) -> bool:
    return any(base.__name__ == "Cache" and base.__module__.startswith("transformers.") for base in cls.__mro__)


def _is_cache(value: Any) -> bool:
    return value is not None and _cache_class(type(value))


@functools.cache
def _tell() -> None:
    rank_zero_info(
        "Rematerialization: blocks get past_key_values=None in training steps, because a block that runs again would add"
        " to the cache twice. Set use_cache=False in the model's configuration to save the cache altogether."
    )


def refuse_checkpointed(module: nn.Module, stack: BlockStack) -> None:
    """What is checkpointed already would run a third time, and keep less than the policy says."""
    for path, m in module.named_modules():
        if getattr(m, "gradient_checkpointing", False) is True:
            raise ValueError(
                f"Rematerialization: {path or type(module).__name__!r} has gradient_checkpointing on; expected it off,"
                f" because {stack} would be run again twice. Switch it off on the model, or take Rematerialization out."
            )
    for block in stack.blocks:
        for m in block.modules():
            if hasattr(m, "_checkpoint_wrapped_module"):
                raise ValueError(
                    f"Rematerialization: {stack} has blocks in torch's checkpoint_wrapper; expected plain ones, because"
                    " they would be run again twice. Take the wrapper or Rematerialization out."
                )
