"""What a module's code got as it read a parameter that a strategy keeps in pieces: the whole of it, or this process's piece."""

from torch import Tensor

_OF, _PIECE = "_lightning_eff_gathered_of", "_lightning_eff_piece"


def gathered(whole: Tensor, parameter: Tensor) -> Tensor:
    """``whole``, from now on known as what ``parameter`` was read as."""
    return _noted(whole, _OF, parameter)


def piece(local: Tensor) -> Tensor:
    """``local``, from now on known as a piece of a parameter."""
    return _noted(local, _PIECE, True)


def parameter_of(tensor: Tensor) -> Tensor:
    """The parameter that a tensor, or what it is a view of, was read from; where nothing was put together, that itself."""
    root = _root(tensor)
    return getattr(root, _OF, root)


def is_piece(tensor: Tensor) -> bool:
    """Whether a tensor, or what it is a view of, is a piece: a ``DTensor``, which need not be imported to know, or read so."""
    return any(cls.__name__ == "DTensor" for cls in type(tensor).__mro__) or hasattr(_root(tensor), _PIECE)


def _root(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def _noted(tensor: Tensor, key: str, value: object) -> Tensor:
    for one in {id(t): t for t in (tensor, _root(tensor))}.values():
        setattr(one, key, value)
    return tensor
