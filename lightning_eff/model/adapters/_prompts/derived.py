"""Instances whose class is derived from a user's class while the program runs, and which can be copied and pickled."""

import functools
from typing import Any, TypeVar, cast

from torch import nn
from typing_extensions import override

D = TypeVar("D", bound="Derived")


class Derived(nn.Module):
    """A mixin that :func:`derived` puts before a user's class."""

    @override
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _blank, type(self).__bases__, self.__dict__


@functools.cache
def _class(mixin: type[D], cls: type[nn.Module]) -> type[D]:
    return cast("type[D]", type(f"Prompted{cls.__name__}", (mixin, cls), {"__module__": mixin.__module__}))


def _blank(mixin: type[D], cls: type[nn.Module]) -> D:
    made = _class(mixin, cls)
    return made.__new__(made)


def derived(mixin: type[D], plain: nn.Module, **attributes: Any) -> D:
    """An instance of ``mixin`` and the class of ``plain``, with ``plain``'s parameters and settings, and ``attributes``."""
    made = _blank(mixin, type(plain))
    made.__dict__.update(plain.__dict__)
    made.__dict__.update(_parameters=dict(plain._parameters), **attributes)
    return made
