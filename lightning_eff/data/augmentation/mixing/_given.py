"""Networks that the user gives in addition to the trained one: run on a batch, and left unchanged."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff._core import rng
from lightning_eff._core.steps import in_evaluation


class Given:
    """Runs a network, or any function of a tensor, in evaluation mode, by default without gradients.

    A module is moved to the device of its input until :meth:`put_back`. Its input is cast to the dtype of its weights. The
    global random state is left unchanged.

    Args:
        network: a module or function of one tensor.
    """

    def __init__(self, network: Callable[[Tensor], Any]) -> None:
        self.network = network
        self._came_from: torch.device | None = None

    def __call__(self, x: Tensor, *, gradient: bool = False) -> Any:
        """Return the network's output for ``x``. With ``gradient`` it can be differentiated with respect to ``x``."""
        with ExitStack() as stack:
            if isinstance(self.network, nn.Module):
                held = [t for t in (*self.network.parameters(), *self.network.buffers()) if t.is_floating_point()]
                if held and held[0].device != x.device:
                    self._came_from = self._came_from or held[0].device
                    self.network.to(x.device)
                x = x.to(held[0].dtype) if held else x
                stack.enter_context(in_evaluation(self.network.modules()))
            stack.enter_context(torch.set_grad_enabled(gradient))
            stack.enter_context(rng.fork())
            return self.network(x)

    def put_back(self) -> None:
        """Move a module back to its original device."""
        if self._came_from is not None and isinstance(self.network, nn.Module):
            self.network.to(self._came_from)
            self._came_from = None
