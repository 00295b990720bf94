"""Memory for the temporary tensors of one step."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


class Scratch:
    """Memory that is allocated once per step and used for one chunk after another.

    On a CPU, a fresh page costs more than the operation that fills it, and large tensors get fresh pages each time.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.device], Tensor] = {}

    def get(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor with undefined values, which is valid until the next call with the same name."""
        size = prod(shape) * dtype.itemsize
        held = self._held.get((name, device))
        if held is None or held.numel() < size:
            self._held.pop((name, device), None)
            del held  # before the larger one is made
            held = self._held[name, device] = torch.empty(size, dtype=torch.uint8, device=device)
        return held[:size].view(dtype).view(*shape)
