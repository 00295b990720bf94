"""Saved tensors that stay on their device while others are offloaded."""

from torch import Tensor


class Staying:
    """A saved tensor that stays on the device, detached, because an output that its own node holds is never freed."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = -1 if tensor.is_inference() else tensor._version

    def get(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: if it was changed in place meanwhile.
        """
        if self._version >= 0 and self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" tensor of shape {list(self._tensor.shape)} and {self._tensor.dtype} is at version"
                f" {self._tensor._version}; expected version {self._version} instead. Plain training would fail in the"
                " same way. Change a copy of it instead."
            )
        return self._tensor
