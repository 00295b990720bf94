"""Which parameter a tensor is that a strategy put together of pieces, as a module's code read the parameter."""

from torch import Tensor

_OF = "_lightning_eff_gathered_of"


def gathered(whole: Tensor, parameter: Tensor) -> Tensor:
    """``whole``, from now on known as what ``parameter`` was read as."""
    for tensor in (whole, whole._base):
        if tensor is not None:
            setattr(tensor, _OF, parameter)
    return whole


def parameter_of(tensor: Tensor) -> Tensor:
    """The parameter that a tensor, or what it is a view of, was read from; where nothing was put together, that itself."""
    root = tensor if tensor._base is None else tensor._base
    return getattr(root, _OF, root)
