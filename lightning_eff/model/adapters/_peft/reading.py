"""Torch's encoder layers, which in evaluation pass the weights of their parts to a kernel instead of calling the parts."""

from typing import cast

from torch import Tensor, nn

from lightning_eff._core._stack.walking import modules_of

_READERS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)


class Unread(Tensor):
    """A weight that the kernel does not accept because of its class, so that its module is called."""


def unread(weight: Tensor) -> Tensor:
    """``weight`` as an encoder layer sees it, which then calls the module that owns it."""
    return cast(Tensor, weight.detach().as_subclass(Unread))


def read(root: nn.Module) -> set[int]:
    """Ids of modules inside a layer that may read their weights instead of calling them."""
    return {id(part) for m in modules_of(root) if isinstance(m, _READERS) for part in modules_of(m) if part is not m}
