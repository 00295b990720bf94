"""Replacements of linear layers and convolutions that stay instances of the class that they replace.

Modules ask ``isinstance(layer, nn.Linear)``, or read ``layer.in_features``, and compute something else where the answer
is another one. scvi-tools' layers put covariates beside the input of each ``nn.Linear``, and of nothing else.
"""

import functools
from typing import Any, cast

from torch import nn
from torch.nn.modules.conv import _ConvNd

_SIMPLE = (bool, int, float, str, tuple, type(None))


class StandsIn:
    """What a replacement's class is mixed with, beside the class of the layer that it replaces."""

    def reset_parameters(self) -> None:
        """Do nothing: the parameters are those of inner modules, which reset them."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Classes that are made at run time are made again in the process that loads a pickle."""
        _, own, plain = type(self).__bases__
        return _blank, (own, plain), self.__dict__


def stands_in(module: nn.Module) -> bool:
    """Whether ``module`` is an instance of the class that it replaces, and not a plain layer of it."""
    return isinstance(module, StandsIn)


def keep_class(new: nn.Module, plain: nn.Module) -> None:
    """Let ``new`` be an instance of the class of ``plain``, too, with the settings that ``plain`` has.

    It stays as it is where ``plain`` is no linear layer or convolution of torch's, or ``new`` has no ``weight`` to show.
    """
    cls = type(plain)
    if not isinstance(plain, nn.Linear | _ConvNd) or not cls.forward.__module__.startswith("torch.nn.modules."):
        return
    if isinstance(new, cls) or not all(hasattr(new, name) for name in plain._parameters):
        return
    for name, value in plain.__dict__.items():
        if not name.startswith("_") and isinstance(value, _SIMPLE) and not hasattr(new, name):
            setattr(new, name, value)
    own = type(new)
    new.__class__ = _stand_in(own, cls)


@functools.cache
def _stand_in(own: type[nn.Module], plain: type[nn.Module]) -> type[nn.Module]:
    members: dict[str, Any] = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    reset = getattr(own, "reset_parameters", None)
    if reset is not None:
        members["reset_parameters"] = reset
    return cast("type[nn.Module]", type(own.__name__, (StandsIn, own, plain), members))


def _blank(own: type[nn.Module], plain: type[nn.Module]) -> nn.Module:
    """An instance without any state."""
    made = _stand_in(own, plain)
    return made.__new__(made)
