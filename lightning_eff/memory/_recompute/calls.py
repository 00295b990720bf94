"""Calls of a stack's blocks, redirected to the engine that decides which tensors are stored."""

import functools
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_eff._core.blocks import BlockStack, Candidate
from lightning_eff._core.patches import Patches

Handle = Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""``handle(index, run, args, kwargs)`` returns the output of block ``index``; ``run`` is the plain call."""


class _Handed:
    """Replaces a block's own ``_call_impl`` on its instance."""

    def __init__(self, index: int, run: Callable[..., Any], handle: Handle) -> None:
        self._index, self._run, self._handle = index, run, handle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._handle(self._index, self._run, args, kwargs)


def hand_over(stack: BlockStack, patches: Patches, handle: Handle) -> None:
    """Redirect each call of a block of ``stack``, with the block's hooks, to ``handle`` until the run ends.

    A block that is in the stack several times has the index of its first place.
    """
    seen: set[int] = set()
    for index, block in enumerate(stack.blocks):
        if id(block) not in seen:
            seen.add(id(block))
            # nn.Module.__call__ looks for the compiled call first, on the instance
            name = "_call_impl" if getattr(block, "_compiled_call_impl", None) is None else "_compiled_call_impl"
            patches.set(block, name, _Handed(index, getattr(block, name), handle))


def without_caches(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, who: str = "Rematerialization"
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Remove Hugging Face's caches of keys and values from the arguments of a block's call.

    A block adds to its cache as it runs, and a recomputed one would do so twice. Nothing reads the cache in training.
    transformers does the same when its own checkpointing is on.
    """
    if not any(map(_is_cache, args)) and not any(map(_is_cache, kwargs.values())):
        return args, kwargs
    _log_once(who)
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
def _log_once(who: str) -> None:
    rank_zero_info(
        f"{who}: blocks get past_key_values=None in training steps, since a recomputed block would add to the"
        " cache twice. Set use_cache=False in the model's configuration."
    )


def refuse_checkpointed(module: nn.Module, stack: BlockStack | Candidate, *, who: str = "Rematerialization") -> None:
    """Check that blocks are not checkpointed already, since they would run a third time.

    Raises:
        ValueError: if they are.
    """
    for path, m in module.named_modules():
        if getattr(m, "gradient_checkpointing", False) is True:
            raise ValueError(
                f"{who}: {path or type(module).__name__!r} has gradient_checkpointing enabled, so"
                f" {stack} would be recomputed twice. Disable it on the model, or remove {who}."
            )
    for block in stack.blocks:
        for m in block.modules():
            if hasattr(m, "_checkpoint_wrapped_module"):
                raise ValueError(
                    f"{who}: {stack} has blocks in torch's checkpoint_wrapper, so they would be recomputed"
                    f" twice. Remove the wrapper or {who}."
                )
