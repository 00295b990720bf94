"""A tensor in codes of a few bits and its decoder: by groups, with the codes on its device or in host memory."""

from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from lightning_eff.kernels.group_quantization import Packed, dequantize
from lightning_eff.memory._compression.affine import SAME, Line


class Codes(Protocol):
    """A tensor in codes.

    Attributes:
        bits: the bits per element.
        numel: the number of elements.
        num_bytes: the bytes held on the tensor's device.
        host_bytes: the bytes held in host memory instead.
    """

    @property
    def bits(self) -> int: ...

    @property
    def numel(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def host_bytes(self) -> int: ...

    def decode(self, line: Line = SAME) -> Tensor:
        """Return ``line`` of the tensor, contiguous, in its shape and dtype."""
        ...


class Host(Protocol):
    """The place of codes that leave their device; see :class:`lightning_eff.memory._hosting.host.HostStore`."""

    def put(self, tensor: Tensor) -> Any:
        """Start copying ``tensor`` to host memory; ``get`` of the result brings it back."""
        ...


class GroupCodes:
    """Codes by groups of elements, each with a minimum and a scale.

    Args:
        packed: the compressed tensor.
        host: the destination of the codes. None leaves them on their device, where scales and minima always stay.
    """

    __slots__ = ("_packed", "_ticket", "bits", "host_bytes", "num_bytes", "numel")

    def __init__(self, packed: Packed, host: Host | None = None) -> None:
        self.bits, self.numel = packed.bits, packed.shape.numel()
        self.num_bytes, self.host_bytes, self._ticket = packed.num_bytes, 0, None
        if host is not None:
            self._ticket, self.host_bytes = host.put(packed.codes), packed.codes.numel()
            self.num_bytes -= self.host_bytes
            packed = replace(packed, codes=packed.codes.new_empty(0))
        self._packed = packed

    def decode(self, line: Line = SAME) -> Tensor:
        packed = self._packed
        if self._ticket is not None:
            packed = replace(packed, codes=self._ticket.get())
        if line != SAME:
            # a (minimum + scale code) + b
            scale, minimum = packed.scale * line.factor, packed.minimum * line.factor
            packed = replace(packed, scale=scale, minimum=minimum.add_(line.offset))
        return dequantize(packed)
