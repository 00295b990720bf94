"""Blocks that do not run for now, thawed while optimizers are configured."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Freezing(Protocol):
    """A stack some of whose blocks are frozen for now."""

    def thaw(self) -> None: ...

    def freeze_inactive(self) -> None: ...


def thawing(original: Callable[..., Any], stacks: Mapping[str, Freezing]) -> Callable[..., Any]:
    """``configure_optimizers`` with all blocks thawed: a filter on requires_grad must not lose those frozen for now."""

    @functools.wraps(original)
    def configure_optimizers() -> Any:
        for stack in stacks.values():
            stack.thaw()
        try:
            return original()
        finally:
            for stack in stacks.values():
                stack.freeze_inactive()

    configure_optimizers.__wrapped__ = inspect.unwrap(original)
    return configure_optimizers
