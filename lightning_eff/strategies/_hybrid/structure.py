"""Records and undoes changes to submodules when a module is divided: classes, hooks and attributes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_MISSING = object()
_TENSORS = ("_parameters", "_buffers")


def put_in_order(namespace: dict[str, Any], keys: list[str]) -> None:
    """Sort a dict in place: ``keys`` first, in their order, then the others."""
    in_order = {key: namespace[key] for key in keys if key in namespace} | namespace
    namespace.clear()
    namespace.update(in_order)


class Structure:
    """Records the changes to a module within :meth:`noting`, and undoes exactly these."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._undo: list[tuple[dict[str, Any], str, Any]] = []
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []
        self._orders: list[tuple[dict[str, Any], list[str]]] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record changes to the submodules in this context, even if an exception ends it."""
        before = [
            (m, type(m), dict(m.__dict__), {k: dict(v) for k, v in m.__dict__.items() if isinstance(v, dict)})
            for m in self._module.modules()
        ]
        try:
            yield
        finally:
            for module, cls, namespace, inner in before:
                if type(module) is not cls:
                    self._classes.append((module, cls))
                self._note(module.__dict__, namespace, skip=_TENSORS)
                for key, was in inner.items():
                    now = module.__dict__.get(key)
                    if key not in _TENSORS and isinstance(now, dict) and now is namespace[key]:
                        self._note(now, was)
                        if list(now) != list(was):
                            self._orders.append((now, list(was)))

    def _note(self, now: dict[str, Any], was: dict[str, Any], skip: tuple[str, ...] = ()) -> None:
        for key in now.keys() | was.keys():
            if key not in skip and now.get(key, _MISSING) is not was.get(key, _MISSING):
                self._undo.append((now, key, was.get(key, _MISSING)))

    def restore(self) -> None:
        """Undo the recorded changes, newest first, and keep later changes by others."""
        while self._undo:
            namespace, key, old = self._undo.pop()
            if old is _MISSING:
                namespace.pop(key, None)
            else:
                namespace[key] = old
        while self._orders:
            put_in_order(*self._orders.pop())
        while self._classes:
            module, cls = self._classes.pop()
            object.__setattr__(module, "__class__", cls)
