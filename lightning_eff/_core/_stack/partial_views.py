"""The classes that replace those of a module's blocks and lists while only some blocks run.

The module tree stays whole. Code that walks it (``modules()``, ``named_children()``, ``parameters()``, a library that hooks all
modules of a kind) finds every block. Code that walks the *sequence* (iteration, ``len``, indices, slices) finds the network
that runs. A block that does not run returns its input, whichever way it is reached.
"""

import functools
import operator
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from lightning_eff._core.patches import as_another

_BY = "_shown_by"


class Shows(Protocol):
    """Knows which blocks run."""

    blocks: list[nn.Module]

    @property
    def active(self) -> int: ...

    def walk(self) -> Iterator[nn.Module]:
        """Yield the blocks over which the module's own code iterates."""
        ...

    def is_away(self, block: nn.Module) -> bool:
        """Return whether the block is hidden, rather than skipped in its place."""
        ...

    def pass_on(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of a block that does not run."""
        ...

    def is_still(self, block: nn.Module) -> bool:
        """Return whether no gradient flows into the block, or through it."""
        ...


def _cut(value: Any) -> Any:
    """Detach every tensor in ``value``, also in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return value.detach() if value.requires_grad else value
    if type(value) in (tuple, list):
        return type(value)(_cut(item) for item in value)
    if type(value) is dict:
        return {key: _cut(item) for key, item in value.items()}
    return value


class InPlaceOf(nn.Module):
    """Takes a block's place in a container. It has no parameters, and other attributes come from the block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.__dict__["_block"] = block  # not registered

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"], name)


class _Worn:
    """Mixed into a module's class for one step. A copy or pickle made meanwhile is of the plain module."""

    _plain: ClassVar[type[nn.Module]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Skip the module class's own method, which may register subclasses or wrap their methods, as in transformers."""

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
    """A container whose sequence is the running blocks; code that indexes up to the full depth gets the others too."""

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
    """A block that does not run and returns its input, which its forward hooks get as its output.

    The hooks of a hidden block are not called.
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

    @property  # takes precedence over a forward that is set on the instance
    def forward(self) -> Any:
        assert isinstance(self, nn.Module)
        return functools.partial(_forward, self.__dict__[_BY], self)


class Still(_Worn):
    """A block without gradients: its inputs have no graph, so nothing in it is kept for a backward pass.

    This wraps all that the block's class does in its call, such as transformers' checkpointing.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*_cut(args), **_cut(kwargs))  # pyright: ignore[reportAttributeAccessIssue]


def _forward(stack: Shows, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return stack.pass_on(block, args, kwargs)


@functools.cache
def _worn(mixin: type, cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (mixin, cls), {"_plain": cls, "__module__": cls.__module__})


def put_on(module: nn.Module, mixin: type[_Worn], by: Shows) -> None:
    """Make ``module`` an instance of ``mixin`` and its own class, until :func:`take_off`."""
    module.__dict__[_BY] = by
    object.__setattr__(module, "__class__", _worn(mixin, type(module)))


def take_off(module: nn.Module) -> None:
    """Restore the class of ``module``."""
    assert isinstance(module, _Worn)
    object.__setattr__(module, "__class__", module._plain)
    del module.__dict__[_BY]


Worn = _Worn


def worn_by(module: Worn) -> Any:
    """Return the object that was given to :func:`put_on`."""
    return module.__dict__[_BY]  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def worn(kind: type[Worn], modules: Iterable[nn.Module], values: Iterable[Any]) -> Iterator[None]:
    """Let each module run the ``forward`` of ``kind`` until the context ends.

    Args:
        kind: the class with the other ``forward``, in which ``worn_by`` gives the module's value.
        modules: the modules; one that already computes in another way is skipped.
        values: one for each module.
    """
    changed = [(m, value) for m, value in zip(modules, values, strict=True) if not isinstance(m, Worn)]
    for m, value in changed:
        put_on(m, kind, value)
    try:
        yield
    finally:
        for m, _ in changed:
            take_off(m)
