"""The settings with which an object was created, as text."""

import inspect
import numbers
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 8
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def changed_settings(init: Callable[..., None], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments that differ from the defaults of ``init``, by name.

    Args:
        init: an ``__init__``, whose first parameter is the object itself.
        args: the positional arguments, without the object.
        kwargs: the keyword arguments.

    Returns:
        A short text for each, without a reference to the value. Empty if ``init`` does not accept the arguments.
    """
    signature = inspect.signature(init)
    try:
        given = signature.bind(None, *args, **kwargs).arguments
    except TypeError:  # ``init`` raises a better error
        return {}
    own, *_ = signature.parameters
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return {
        name: _text(value)
        for name, value in given.items()
        if name != own and not (name in signature.parameters and _equal(value, signature.parameters[name].default))
    }


def _equal(value: Any, default: Any) -> bool:
    return value is default or (_plain(value) and type(value) is type(default) and value == default)


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_plain, value))
    if isinstance(value, Mapping):
        return all(_plain(key) and _plain(one) for key, one in value.items())
    return isinstance(value, _PLAIN)


def _text(value: Any) -> str:
    if isinstance(value, numbers.Real) and type(value) not in _PLAIN:  # a numpy number
        return repr(int(value) if isinstance(value, numbers.Integral) else float(value))
    if _plain(value):
        return _SHORT.repr(value)
    if isinstance(value, type) or inspect.isroutine(value):
        return str(value.__name__)
    return f"<{type(value).__name__}>"
