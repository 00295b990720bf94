"""Instances whose class is derived from a user's class while the program runs, and which can be copied and pickled."""

import copy
import functools
from typing import Any, ClassVar, TypeVar, cast

from torch import nn
from typing_extensions import override

D = TypeVar("D", bound="Derived")


class Derived(nn.Module):
    """A mixin that :func:`derived` puts before the class of a module.

    Class attributes:
        prefix: the derived class's name begins with it, or with the mixin's name if it is empty.
    """

    prefix: ClassVar[str] = ""

    @override
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return blank, type(self).__bases__, self.__dict__


@functools.cache
def _class(mixin: type[D], cls: type[nn.Module]) -> type[D]:
    name = f"{mixin.prefix or mixin.__name__}{cls.__name__}"
    return cast("type[D]", type(name, (mixin, cls), {"__module__": mixin.__module__}))


def blank(mixin: type[D], cls: type[nn.Module]) -> D:
    """An instance of ``mixin`` and ``cls`` without any state."""
    made = _class(mixin, cls)
    return made.__new__(made)


def derived(mixin: type[D], plain: nn.Module, **attributes: Any) -> D:
    """An instance of ``mixin`` and the class of ``plain``, with ``plain``'s parameters and settings, and ``attributes``."""
    made = blank(mixin, type(plain))
    made.__dict__.update({k: copy.copy(v) if isinstance(v, dict | set) else v for k, v in plain.__dict__.items()})
    made.__dict__.update(attributes)
    if isinstance(plain, nn.MultiheadAttention):  # torch's encoder layer reads its weights unless it has hooks
        made.register_forward_pre_hook(_called)
    return made


def _called(module: nn.Module, args: Any) -> None:
    """Do nothing; the hook's presence makes torch call the module."""
