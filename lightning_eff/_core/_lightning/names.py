"""Lightning's two package names, ``lightning.pytorch`` and ``pytorch_lightning``, and support for both.

The packages have the same code, but their classes are different objects. No other module uses ``isinstance`` with a
Lightning class: it calls :func:`is_a`, which knows both. This module imports neither package. The second one counts only
once other code has imported it.
"""

import copyreg
import importlib
import sys
from abc import ABCMeta
from types import ModuleType
from typing import Any, ClassVar, TypeVar, overload

from typing_extensions import TypeIs, override

from lightning_eff._core._lightning.imports import once_imported

#: The packages by both names: those that this package imports, and their equivalents.
NAMES = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}
OWN, OTHER = "lightning.pytorch", "pytorch_lightning"
#: Lightning's packages on the disk.
ROOTS = ("lightning", "pytorch_lightning", "lightning_fabric")

T = TypeVar("T")
T2 = TypeVar("T2")
C = TypeVar("C", bound=type)


# -- find classes in either package


def _renamed(module: str, package: str) -> str | None:
    """Return the name of Lightning's module ``module`` in ``package``'s family; None if it is not a Lightning module."""
    for names in NAMES.items():
        for name in names:
            if module == name or module.startswith(f"{name}."):
                return names[package == OTHER] + module[len(name) :]
    return None


def is_lightnings(cls: type) -> bool:
    """Return whether Lightning itself defines ``cls``, under either name."""
    return _renamed(cls.__module__, OWN) is not None


def _named(cls: Any, package: str) -> Any:
    """Return ``package``'s version of Lightning's class or function ``cls``; None if missing or not imported."""
    module = _renamed(cls.__module__, package)
    if module is None or package not in sys.modules:
        return None
    return getattr(sys.modules.get(module), cls.__qualname__, None)


def renamed(cls: type, package: str) -> str:
    """Return the dotted path of Lightning's class ``cls`` in ``package``."""
    path = f"{_renamed(cls.__module__, package)}"
    short = path.rpartition(".")[0]  # the public module
    return f"{short if hasattr(sys.modules.get(short), cls.__name__) else path}.{cls.__name__}"


def both(*what: T) -> tuple[T, ...]:
    """Return these Lightning classes or functions, and the other package's, if it is imported."""
    return tuple(dict.fromkeys([*what, *(other for each in what if (other := _named(each, OTHER)) is not None)]))


@overload
def is_a(value: object, kind: type[T], /) -> TypeIs[T]: ...
@overload
def is_a(value: object, kind: type[T], other: type[T2], /) -> TypeIs[T | T2]: ...
@overload
def is_a(value: object, /, *kinds: type) -> bool: ...
def is_a(value: object, *kinds: type) -> bool:
    """``isinstance`` for classes of Lightning: ``value`` may be of the class of that name in either package."""
    return isinstance(value, kinds) or (OTHER in sys.modules and isinstance(value, both(*kinds)))


def is_subclass(cls: type, *kinds: type) -> bool:
    """``issubclass`` for Lightning classes of either package."""
    return issubclass(cls, kinds) or (OTHER in sys.modules and issubclass(cls, both(*kinds)))


def is_exactly(value: object, kind: type) -> bool:
    """Return whether the type of ``value`` is Lightning's ``kind``, of either package, or was made from it by :func:`adapt`."""
    return getattr(type(value), "_adapted", type(value)) in both(kind)


def package_of(value: object) -> str | None:
    """Return the package of an object or class: that of the first of its classes that Lightning defines, or None."""
    for cls in (value if isinstance(value, type) else type(value)).__mro__:
        if is_lightnings(cls):
            return OWN if _renamed(cls.__module__, OWN) == cls.__module__ else OTHER
    return None


def like(of: object, cls: type[T]) -> type[T]:
    """Return Lightning's class ``cls`` in the package of ``of``, such as a trainer or a module."""
    package = package_of(of)
    return cls if package is None else _named(cls, package) or cls


def module_like(of: object, name: str) -> ModuleType:
    """Return Lightning's module ``name``, named as in ``lightning.pytorch``, in the package of ``of``."""
    return importlib.import_module(_renamed(name, package_of(of) or OWN) or name)


def is_overridden(method: str, instance: object, parent: type | None = None) -> bool:
    """Lightning's ``is_overridden`` for modules, data modules and callbacks of either package."""
    from lightning.pytorch import Callback, LightningDataModule, LightningModule
    from lightning_utilities.core.overrides import is_overridden as overridden

    if instance is None:
        return False
    known = (LightningModule, LightningDataModule, Callback) if parent is None else (parent,)
    kinds = [like(instance, kind) for kind in known if is_a(instance, kind)]
    if not kinds:
        raise ValueError(
            f"is_overridden({method!r}): {type(instance).__name__} is not a module, data module or callback."
        )
    return overridden(method, instance, kinds[0])


# -- this package's classes, usable with both packages


class _Adapted(ABCMeta):
    """The metaclass of classes that inherit from one package although they were written for the other."""

    _adapted: Any
    _package: str

    @override
    def mro(cls) -> list[type]:
        found = super().mro()
        own = next(c for c in found if not isinstance(c, _Adapted))
        package = next(c.__dict__["_package"] for c in found if "_package" in c.__dict__)
        first = [c if (other := _named(c, package)) is None else other for c in own.__mro__]
        # super() would reach these classes of the other package
        left_out = {c for c in found if _renamed(c.__module__, package) not in (None, c.__module__)}
        order = dict.fromkeys([*(c for c in found if isinstance(c, _Adapted)), *first, *found])
        return [*(c for c in order if c is not object and c not in left_out), object]


def adapted(cls: C, package: str | None) -> C:
    """Return a class of the same name that inherits from Lightning's classes in ``package``, also for ``super()``.

    It is a subclass of ``cls`` and of ``package``'s classes, and not of the other package's.
    """
    if package is None or package_of(cls) in (None, package):
        return cls
    if is_lightnings(cls):
        return _named(cls, package) or cls
    for made in cls.__subclasses__():
        if isinstance(made, _Adapted) and made.__dict__.get("_adapted") is cls and made._package == package:
            return made  # pyright: ignore[reportReturnType]
    bases = [other for c in cls.__mro__ if (other := _named(c, package)) is not None]
    more = [base for base in bases[:1] if not issubclass(cls, base)]
    # in a private module, so that jsonargparse, which finds subclasses by name, skips it
    names = {"__module__": __name__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return _Adapted(cls.__name__, (cls, *more), {**names, "_package": package, "_adapted": cls})  # pyright: ignore[reportReturnType]


copyreg.pickle(_Adapted, lambda cls: (adapted, (cls._adapted, cls._package)))  # pyright: ignore[reportArgumentType]


def adapt(value: object, of: object) -> None:
    """Make ``value``, such as a plugin, inherit from the package of ``of``, such as a trainer."""
    package = package_of(of)
    if package is not None and package_of(value) != package:
        cls = getattr(type(value), "_adapted", type(value))
        value.__class__ = cls if package_of(cls) == package else adapted(cls, package)


_JOINING: list[Any] = []


def of_both(cls: C) -> C:
    """Make ``cls``, a subclass of a Lightning class, also a subclass of the other package's class.

    The other package's Trainer and command line then accept it. It still inherits behaviour from the first package, unless
    :func:`adapt` changes this.
    """
    _JOINING.append(cls)
    if len(_JOINING) == 1:
        once_imported(OTHER, _join)
    elif OTHER in sys.modules:
        _join()
    return cls


def _join() -> None:
    for cls in _JOINING:
        others = [other for base in cls.__bases__ if (other := _named(base, OTHER)) is not None]
        new = [other for other in others if other not in cls.__mro__]
        if new:
            cls.__bases__ = (*cls.__bases__, *new)


class NoCallback:
    """Mixin of plugins and strategies that says where they belong, if they are given as callbacks.

    Lightning takes any object among the callbacks, and asks each of them for its ``state_key`` before it calls a hook.
    """

    #: the argument of ``Trainer`` that takes them, with a blank for the object
    given_as: ClassVar[str]

    @property
    def state_key(self) -> str:
        """What a callback would be saved under.

        Raises:
            TypeError: always.
        """
        name = getattr(type(self), "_adapted", type(self)).__name__
        right = self.given_as.format(f"{name}(...)")
        raise TypeError(f"Trainer(callbacks=[{name}(...)]): {name} is not a callback. Use Trainer({right}) instead.")


class Connected(NoCallback):
    """Mixin, first among a strategy's bases: the strategy inherits from the package whose Trainer takes it."""

    given_as: ClassVar[str] = "strategy={}"
    _accelerator: Any

    @property
    def accelerator(self) -> Any:
        """The accelerator, which the Trainer sets before it uses the strategy otherwise."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        if accelerator is not None:
            adapt(self, accelerator)
        self._accelerator = accelerator
