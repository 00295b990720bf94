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
        outermost: whether its methods come before those of all other mixins, also of later ones.
    """

    prefix: ClassVar[str] = ""
    outermost: ClassVar[bool] = False

    @override
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        kinds: list[type] = []
        cls: type = type(self)
        while "_derived" in vars(cls):  # of several techniques
            kind, cls = cls.__bases__
            kinds.append(kind)
        return blank, (*kinds, cls), self.__dict__


@functools.cache
def _class(mixin: type[D], cls: type[nn.Module]) -> type[D]:
    if issubclass(cls, mixin):  # its attributes say what each technique does
        return cls
    if issubclass(cls, Derived) and cls.outermost:
        outer, inner = cls.__bases__
        return cast("type[D]", _class(outer, _class(mixin, inner)))
    name = f"{mixin.prefix or mixin.__name__}{cls.__name__}"
    return cast("type[D]", type(name, (mixin, cls), {"__module__": mixin.__module__, "_derived": True}))


def blank(mixin: type[D], *others: type[nn.Module]) -> D:
    """An instance of ``mixin``, of further mixins and of a class, from the outermost on, without any state."""
    *mixins, cls = others
    for kind in reversed(mixins):
        cls = _class(cast("type[Derived]", kind), cls)
    made = _class(mixin, cls)
    return made.__new__(made)


def derived(mixin: type[D], plain: nn.Module, **attributes: Any) -> D:
    """An instance of ``mixin`` and the class of ``plain``, with ``plain``'s parameters and settings, and ``attributes``."""
    made = blank(mixin, type(plain))
    made.__dict__.update({k: copy.copy(v) if isinstance(v, dict | set) else v for k, v in plain.__dict__.items()})
    made.__dict__.update(attributes)
    if isinstance(plain, nn.MultiheadAttention) and not isinstance(
        plain, Derived
    ):  # torch's encoder layer reads its weights unless it has hooks
        made.register_forward_pre_hook(_called)
    return made


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks other than the one that :func:`derived` registers."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hook is not _called for registered in hooks for hook in registered.values())


def _called(module: nn.Module, args: Any) -> None:
    """Do nothing; the hook's presence makes torch call the module."""
