"""Unfreeze blocks that do not run yet while optimizers are configured."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Freezing(Protocol):
    """A stack with blocks that are frozen for now."""

    def thaw(self) -> None: ...

    def freeze_inactive(self) -> None: ...


def thawing(original: Callable[..., Any], stacks: Mapping[str, Freezing]) -> Callable[..., Any]:
    """Wrap ``configure_optimizers`` to run with all blocks unfrozen, because it may filter by ``requires_grad``."""

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
