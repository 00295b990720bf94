"""Torch's own encoder layers, which in evaluation hand the weights of their parts to one kernel instead of calling them."""

from typing import cast

from torch import Tensor, nn

_READERS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)


class Unread(Tensor):
    """A weight that the kernel does not take, since it is of a class of its own: so the module that has it is called."""


def unread(weight: Tensor) -> Tensor:
    """``weight`` for the eyes of an encoder layer, which then calls the module that it belongs to."""
    return cast(Tensor, weight.detach().as_subclass(Unread))


def read(root: nn.Module) -> set[int]:
    """Ids of the modules that lie in a layer which may read them instead of calling them."""
    return {id(part) for m in root.modules() if isinstance(m, _READERS) for part in m.modules() if part is not m}
