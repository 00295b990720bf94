"""Instance attributes that are replaced for the length of a run, and put back exactly."""

import inspect
from typing import Any

_MISSING = object()


class Patches:
    """A last-in-first-out record of replaced instance attributes.

    Only the instance's ``__dict__`` is touched, so classes and other instances never change, and an attribute that
    the instance did not have is deleted again rather than set to what the class says.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[dict[str, Any], str, Any, Any]] = []

    def set(self, obj: object, name: str, value: Any) -> None:
        """Set ``obj.name`` to ``value`` until :meth:`restore`.

        Raises:
            TypeError: if the class has a property of that name, which an instance attribute does not replace.
        """
        if isinstance(inspect.getattr_static(type(obj), name, None), property):
            raise TypeError(
                f"{type(obj).__name__}.{name} is a property; expected a method or a plain attribute, since an instance"
                " attribute does not replace a property. Patch what it reads."
            )
        namespace = obj.__dict__
        self._undo.append((namespace, name, value, namespace.get(name, _MISSING)))
        namespace[name] = value

    def restore(self, *, ours_alone: bool = False) -> None:
        """Put every attribute back, newest first. Calling it twice does nothing more.

        Args:
            ours_alone: leave what is no longer as :meth:`set` made it: others took theirs out, and ours with it, before.
        """
        while self._undo:
            namespace, name, value, old = self._undo.pop()
            if ours_alone and namespace.get(name) is not value:
                continue
            if old is _MISSING:
                namespace.pop(name, None)
            else:
                namespace[name] = old
