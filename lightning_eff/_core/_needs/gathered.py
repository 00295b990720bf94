"""Mark tensors that a module's code read from a sharded parameter: the whole of it, or this process's shard."""

from torch import Tensor

_OF, _PIECE = "_lightning_eff_gathered_of", "_lightning_eff_piece"


def gathered(whole: Tensor, parameter: Tensor) -> Tensor:
    """Mark ``whole`` as the gathered value of ``parameter``, and return it."""
    return _noted(whole, _OF, parameter)


def piece(local: Tensor) -> Tensor:
    """Mark ``local`` as a shard of a parameter, and return it."""
    return _noted(local, _PIECE, True)


def parameter_of(tensor: Tensor) -> Tensor:
    """Return the parameter from which a tensor, or the base of a view, was gathered; otherwise that tensor itself."""
    root = _root(tensor)
    return getattr(root, _OF, root)


def is_piece(tensor: Tensor) -> bool:
    """Return whether a tensor, or the base of a view, is a shard: a ``DTensor`` (without importing it), or marked as one."""
    return any(cls.__name__ == "DTensor" for cls in type(tensor).__mro__) or hasattr(_root(tensor), _PIECE)


def _root(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def _noted(tensor: Tensor, key: str, value: object) -> Tensor:
    for one in {id(t): t for t in (tensor, _root(tensor))}.values():
        setattr(one, key, value)
    return tensor
