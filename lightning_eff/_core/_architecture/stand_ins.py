"""Replacements of linear layers and convolutions that stay instances of the class that they replace.

Modules test ``isinstance(layer, nn.Linear)`` or read ``layer.in_features``, and compute something else otherwise. For
example, scvi-tools' layers append covariates only to the input of each ``nn.Linear``.
"""

import functools
from typing import Any, cast

from torch import nn
from torch.nn.modules.conv import _ConvNd

_SIMPLE = (bool, int, float, str, tuple, type(None))


class StandsIn:
    """A mixin for the class of a replacement, together with the class of the replaced layer."""

    def reset_parameters(self) -> None:
        """Do nothing, because inner modules hold the parameters and reset them."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Create the run-time class again in the process that loads a pickle."""
        _, own, plain = type(self).__bases__
        return _blank, (own, plain), self.__dict__


def stands_in(module: nn.Module) -> bool:
    """Return whether ``module`` is a replacement that is an instance of the class that it replaces."""
    return isinstance(module, StandsIn)


def keep_class(new: nn.Module, plain: nn.Module) -> None:
    """Make ``new`` also an instance of the class of ``plain``, with the settings of ``plain``.

    It does nothing if ``plain`` is not a torch linear layer or convolution, or if ``new`` has no ``weight`` attribute.
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
    """Return an instance without any state."""
    made = _stand_in(own, plain)
    return made.__new__(made)
