"""Instance attributes and hooks that are set for one run, removed exactly, and absent from copies of the module.

A module has both while a run is under way. A copy of it (``copy.deepcopy``, ``pickle``, ``torch.save``) is a plain module:
neither bound to this run nor too large to save. Examples are a target network, or a network among the hyperparameters of a
checkpoint.
"""

import copyreg
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

_Set = tuple[str, Any, Any]  # name, new value, previous value
_MISSING = object()
_REDUCE = "__reduce_ex__"
_HOOKS = (
    ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)


class Patches:
    """A last-in-first-out record of replaced instance attributes.

    Only the instance's ``__dict__`` changes, so classes and other instances stay unchanged. An attribute that the instance did
    not have is deleted again. A copy of a module made during the run has the module's previous attributes.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[object, _Set]] = []

    def set(self, obj: object, name: str, value: Any) -> None:
        """Set ``obj.name`` to ``value`` until :meth:`restore`.

        Raises:
            TypeError: if the class has a property of that name, because an instance attribute cannot replace it.
        """
        if isinstance(inspect.getattr_static(type(obj), name, None), property):
            raise TypeError(
                f"{type(obj).__name__}.{name} is a property, which an instance attribute does not replace. Patch the method"
                " or attribute that it reads."
            )
        namespace = obj.__dict__
        old = namespace.get(name, _MISSING)
        if isinstance(obj, nn.Module) and callable(value) and not isinstance(value, nn.Module):
            value = _Replaced(value, obj, name, old)
        one = (name, value, old)
        if isinstance(obj, nn.Module):
            _hold(obj, one)
        self._undo.append((obj, one))
        namespace[name] = value

    def restore(self, *, ours_alone: bool = False) -> None:
        """Restore every attribute, newest first. A second call does nothing.

        Args:
            ours_alone: skip attributes that no longer have the value of :meth:`set`, because other code has removed its own
                patch and ours with it.
        """
        while self._undo:
            obj, one = self._undo.pop()
            name, value, old = one
            namespace = obj.__dict__
            if isinstance(obj, nn.Module):
                _release(obj, one)
            if ours_alone and namespace.get(name) is not value:
                continue
            if old is _MISSING:
                namespace.pop(name, None)
            else:
                namespace[name] = old


class Scope(ExitStack):
    """An ``ExitStack`` that takes no time to close while it is empty, because a step closes one several times."""

    @override
    def close(self) -> None:
        if self._exit_callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            super().close()


def hook_before(module: nn.Module, hook: Callable[..., Any], **how: Any) -> RemovableHandle:
    """Register a forward pre-hook, as ``module.register_forward_pre_hook`` does, that copies of the module do not have."""
    return _held(module, module.register_forward_pre_hook(_Hook(hook), **how))


def hook_behind(module: nn.Module, hook: Callable[..., Any], **how: Any) -> RemovableHandle:
    """Register a forward hook, as ``module.register_forward_hook`` does, that copies of the module do not have."""
    return _held(module, module.register_forward_hook(_Hook(hook), **how))


def unwrapped(value: Any) -> Any:
    """Return the callable given to :meth:`Patches.set` if ``value`` is its wrapper; otherwise ``value``."""
    return value.func if isinstance(value, _Replaced) else value


def as_another(reduced: Any) -> Any:
    """Adapt the ``__reduce_ex__`` result of an object that is copied in place of another, because pickle checks the class."""
    function, arguments, *rest = reduced
    if function is copyreg.__newobj__ and len(arguments) == 1:  # pyright: ignore[reportAttributeAccessIssue]
        function, arguments = copyreg._reconstructor, (*arguments, object, None)  # pyright: ignore[reportAttributeAccessIssue]
    return (function, arguments, *rest)


# -- the objects that are on a module during a run


class _Replaced(functools.partial):
    """Calls a callable that was given to :meth:`Patches.set`, and has its attributes.

    If a class copies its instances' attributes itself, the copy gets the previous value or its own method.
    """

    def __new__(cls, value: Callable[..., Any], owner: nn.Module, name: str, old: Any) -> "_Replaced":
        made = super().__new__(cls, value)
        attributes = {key: getattr(value, key) for key in functools.WRAPPER_ASSIGNMENTS if hasattr(value, key)}
        made.__dict__.update(attributes)
        made.__dict__.update(getattr(value, "__dict__", {}))
        made.__dict__["_replaces"] = (owner, name, old)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        owner, name, old = self.__dict__["_replaces"]
        return (getattr, (owner, name)) if old is _MISSING else (operator.getitem, ((old,), 0))


class _Hook(functools.partial):
    """A hook on a module. If a class copies its instances' attributes itself, the copy gets a hook that does nothing."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (nullcontext(), "__exit__")  # accepts any arguments, and can be unpickled anywhere


class _Handle(RemovableHandle):
    """The handle of a hook registered by :func:`hook_before` or :func:`hook_behind`."""

    module: nn.Module | None

    def remove(self) -> None:
        super().remove()
        module, self.module = self.module, None
        if module is not None:
            _release(module, None)


def _held(module: nn.Module, handle: RemovableHandle) -> RemovableHandle:
    handle.__class__ = _Handle
    handle.module = module  # pyright: ignore[reportAttributeAccessIssue]
    _hold(module, None)
    return handle


class _Plainly:
    """Replaces ``__reduce_ex__`` on a module instance, which creates its copies and pickles."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.held: list[_Set | None] = []  # None for a hook

    def __call__(self, protocol: Any) -> Any:
        reduced = type(self.module).__reduce_ex__(self.module, protocol)
        if isinstance(reduced, str) or len(reduced) < 3 or not isinstance(reduced[2], dict):
            return reduced
        function, arguments, state, *rest = reduced
        return (function, arguments, _without_ours(state, self.held), *rest)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (self.module, _REDUCE)


def _without_ours(state: dict[str, Any], held: Sequence[_Set | None]) -> dict[str, Any]:
    """Return a module's attributes without those that are set for one run."""
    plain = {key: value for key, value in state.items() if not isinstance(value, _Plainly)}
    for name, value, old in [one for one in reversed(held) if one is not None]:
        if plain.get(name, _MISSING) is value:
            plain[name] = old
    plain = {key: value for key, value in plain.items() if value is not _MISSING}
    for hooks, *flags in _HOOKS:
        ours = {at for at, hook in plain.get(hooks, {}).items() if isinstance(hook, _Hook)}
        for name in (hooks, *flags) if ours else ():
            plain[name] = type(plain[name])((at, hook) for at, hook in plain[name].items() if at not in ours)
    return plain


def _hold(module: nn.Module, one: _Set | None) -> None:
    stands = module.__dict__.get(_REDUCE)
    if stands is None:
        stands = module.__dict__[_REDUCE] = _Plainly(module)
    if isinstance(stands, _Plainly):
        stands.held.append(one)


def _release(module: nn.Module, one: _Set | None) -> None:
    stands = module.__dict__.get(_REDUCE)
    if isinstance(stands, _Plainly):
        at = next((i for i, other in enumerate(stands.held) if other is one), None)
        if at is not None:
            del stands.held[at]
        if not stands.held:
            del module.__dict__[_REDUCE]
