"""A hook that refuses calls that continue from a cache, where an n-gram would miss earlier tokens."""

import inspect
import re
from typing import Any

from torch import Tensor, nn

#: Names of arguments with keys and values of earlier tokens, or with the number of these tokens.
_NAMES = re.compile(r"past|cache|^(start|input)_pos$")


def holds(value: Any) -> bool:
    """Whether a cache, or a count of its tokens, shows that there were earlier tokens."""
    if value is None or isinstance(value, bool):
        return False
    if callable(length := getattr(value, "get_seq_length", None)):
        return int(length()) > 0  # pyright: ignore[reportArgumentType] -- Hugging Face's own
    if isinstance(value, dict):
        return any(map(holds, value.values()))
    if isinstance(value, list | tuple):
        return any(map(holds, value))
    if isinstance(value, Tensor) and not value.is_floating_point():
        return value.numel() > 0 and int(value.flatten()[0]) > 0  # positions
    if isinstance(value, Tensor):
        return value.numel() > 0
    return not isinstance(value, int | float | str) or (not isinstance(value, str) and value > 0)


class RefuseCache:
    """A forward pre-hook with keywords for a module that contains an embedding of n-grams.

    Args:
        module: the module.

    Raises:
        ValueError: if a call continues from a cache that holds tokens.
    """

    def __init__(self, module: nn.Module) -> None:
        self.arguments = tuple(inspect.signature(type(module).forward).parameters)[1:]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, value in (*zip(self.arguments, args, strict=False), *kwargs.items()):
            if _NAMES.search(name) and holds(value):
                raise ValueError(
                    f"NgramEmbedding: {type(module).__name__} is called with {name}, which holds earlier tokens, and n-grams"
                    " need their ids. Call it with all ids and without a cache, such as generate(..., use_cache=False)."
                )
