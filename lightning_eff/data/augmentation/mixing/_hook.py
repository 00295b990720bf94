"""What a block returns, seen and changed from outside."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_eff._core.patches import Patches
from lightning_eff._core.steps import Proceed


class OutputHook:
    """Lets ``change`` say what a block returns, outside of whatever stands around its forward pass, compiled or not.

    Args:
        block: the module.
        change: of its output, what it returns instead; None leaves it.

    Attributes:
        calls: of the block, in the last pass that :meth:`around` ran.
    """

    def __init__(self, block: nn.Module, change: Callable[[Any], Any]) -> None:
        self.block, self.change = block, change
        self.calls = 0
        self._passing = False
        self._handle: RemovableHandle | None = None
        self._patches = Patches()

    def around(self, run: Proceed, batch: Any) -> Any:
        """``run(batch)`` with the hook on, which stays on for what the backward pass runs again."""
        self.on()
        self.calls, self._passing = 0, True
        try:
            return run(batch)
        except BaseException:
            self.off()
            raise
        finally:
            self._passing = False

    def on(self) -> "OutputHook":
        self.off()
        compiled = self.block._compiled_call_impl
        if compiled is None:
            self._handle = self.block.register_forward_hook(lambda block, args, output: self._changed(output))
        else:  # the compiler would take a hook into its graph
            self._patches.set(
                self.block, "_compiled_call_impl", lambda *args, **kwargs: self._instead(compiled(*args, **kwargs))
            )
        return self

    def off(self) -> None:
        self._patches.restore()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _changed(self, output: Any) -> Any:
        self.calls += self._passing
        return self.change(output)

    def _instead(self, output: Any) -> Any:
        changed = self._changed(output)
        return output if changed is None else changed
