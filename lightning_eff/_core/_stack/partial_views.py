"""What a module's own code sees of its blocks while only part of them runs: classes that stand in for theirs meanwhile.

The tree of modules stays whole: whatever walks it (``modules()``, ``named_children()``, ``parameters()``, a library that
sets hooks on all modules of a kind) finds every block. Whatever walks the *sequence* (iteration, ``len``, indices,
slices) finds the network that runs. A block that does not run hands its input on, however it has been reached.
"""

import functools
import operator
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from lightning_eff._core.patches import as_another

_BY = "_shown_by"


class Shows(Protocol):
    """Who knows which blocks run."""

    blocks: list[nn.Module]

    @property
    def active(self) -> int: ...

    def walk(self) -> Iterator[nn.Module]:
        """The blocks that the module's own code goes through."""
        ...

    def is_away(self, block: nn.Module) -> bool:
        """Whether the block is as if it were not there, rather than passed over in its place."""
        ...

    def pass_on(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a block that does not run returns."""
        ...

    def is_still(self, block: nn.Module) -> bool:
        """Whether no gradient goes into the block, nor past it."""
        ...


def _cut(value: Any) -> Any:
    """``value`` with every tensor in it without its graph; tuples, lists and dicts are looked into."""
    if isinstance(value, Tensor):
        return value.detach() if value.requires_grad else value
    if type(value) in (tuple, list):
        return type(value)(_cut(item) for item in value)
    if type(value) is dict:
        return {key: _cut(item) for key, item in value.items()}
    return value


class InPlaceOf(nn.Module):
    """Stands in a container for a block: owns no parameters, and attributes that it has not are the block's."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.__dict__["_block"] = block  # not registered

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"], name)


class _Worn:
    """Mixed into a module's class for the length of a step; a copy or a pickle made meanwhile is of the plain module."""

    _plain: ClassVar[type[nn.Module]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Not the module's class's own, which may register subclasses or wrap their methods, as transformers does."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        worn, by = type(self), self.__dict__[_BY]
        take_off(self)  # pyright: ignore[reportArgumentType] -- so that the module's class sees itself
        try:
            function, arguments, *rest = self.__reduce_ex__(protocol)  # pyright: ignore[reportGeneralTypeIssues]
            rest = [dict(part) if part is self.__dict__ else part for part in rest]
        finally:
            object.__setattr__(self, "__class__", worn)
            self.__dict__[_BY] = by
        return as_another((function, arguments, *rest))


class Sequence(_Worn):
    """A container whose sequence is the blocks that run; code that counts to the full depth gets the others, too."""

    __dict__: dict[str, Any]

    def __iter__(self) -> Iterator[nn.Module]:
        return self._shows().walk()

    def __len__(self) -> int:
        return self._shows().active

    def __getitem__(self, index: Any) -> Any:
        stack = self._shows()
        if isinstance(index, slice):
            chosen = [stack.blocks[i] for i in range(stack.active)[index]]
            if issubclass(self._plain, nn.Sequential):
                keys = list(self.__dict__["_modules"])[: stack.active][index]
                return self._plain(OrderedDict(zip(keys, chosen, strict=True)))
            return self._plain(chosen)
        at = operator.index(index)
        at += stack.active if at < 0 else 0
        if not 0 <= at < len(stack.blocks):
            raise IndexError(f"index {index} is out of range: {stack.active} blocks run")
        return stack.blocks[at]

    def _shows(self) -> Shows:
        return self.__dict__[_BY]


class Passing(_Worn):
    """A block that is not called and hands its input on; those that record its output, by hooks, are given that.

    A block that is as if it were not there has no output to record.
    """

    __dict__: dict[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stack: Shows = self.__dict__[_BY]
        assert isinstance(self, nn.Module)
        if stack.is_still(self):
            args, kwargs = _cut(args), _cut(kwargs)
        output = stack.pass_on(self, args, kwargs)
        if not stack.is_away(self):
            for key, hook in list(self._forward_hooks.items()):
                more = (kwargs,) if key in self._forward_hooks_with_kwargs else ()
                changed = hook(self, args, *more, output)
                output = output if changed is None else changed
        return output

    @property  # which goes before a forward that is set on the instance
    def forward(self) -> Any:
        assert isinstance(self, nn.Module)
        return functools.partial(_forward, self.__dict__[_BY], self)


class Still(_Worn):
    """A block that takes no gradient: what it is called with has no graph, so nothing of it is kept for a backward pass.

    That stands around whatever the block's class does in its calls, such as transformers' checkpointing.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*_cut(args), **_cut(kwargs))  # pyright: ignore[reportAttributeAccessIssue]


def _forward(stack: Shows, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return stack.pass_on(block, args, kwargs)


@functools.cache
def _worn(mixin: type, cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (mixin, cls), {"_plain": cls, "__module__": cls.__module__})


def put_on(module: nn.Module, mixin: type[_Worn], by: Shows) -> None:
    """Let ``module`` be of ``mixin`` and of its own class, until :func:`take_off`."""
    module.__dict__[_BY] = by
    object.__setattr__(module, "__class__", _worn(mixin, type(module)))


def take_off(module: nn.Module) -> None:
    """Let ``module`` be of its own class again."""
    assert isinstance(module, _Worn)
    object.__setattr__(module, "__class__", module._plain)
    del module.__dict__[_BY]


Worn = _Worn


def worn_by(module: Worn) -> Any:
    """Who was given to :func:`put_on`."""
    return module.__dict__[_BY]  # pyright: ignore[reportAttributeAccessIssue]
