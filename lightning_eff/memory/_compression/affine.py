"""Tensors that are ``a x + b`` of another tensor, and share the codes of ``x``.

Decoded, ``x`` is ``minimum + scale code``, so ``a x + b`` is ``(a minimum + b) + (a scale) code``. For GELU's tanh form,
``0.5 x (1 + tanh(...))``, autograd saves ``x``, the tangent ``t``, ``0.5 x`` and ``1 + t``. Two of them need no codes.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn, strided
from torch._C._functorch import is_functorch_wrapped_tensor

from lightning_eff.memory._compression.identity import Identity, Storages, identity

_MULTIPLY = frozenset(("mul", "multiply", "__mul__", "__rmul__"))
_ADD = frozenset(("add", "__add__", "__radd__"))
_SUBTRACT = frozenset(("sub", "subtract", "__sub__"))
_SUBTRACT_FROM = frozenset(("rsub", "__rsub__"))
_DIVIDE = frozenset(("div", "divide", "true_divide", "__truediv__"))
_NEGATE = frozenset(("neg", "negative", "__neg__"))
OPERATIONS = _MULTIPLY | _ADD | _SUBTRACT | _SUBTRACT_FROM | _DIVIDE | _NEGATE
LARGEST = 2.0**40  # larger numbers, and factors below its inverse, are ignored, because products would leave float32
MOST_CANCELLED = 16.0  # an offset that cancels to less than this fraction of its terms is dominated by rounding


class Line(NamedTuple):
    """``y = factor x + offset``."""

    factor: float
    offset: float

    def after(self, first: "Line") -> "Line | None":
        """Return ``first`` followed by this; None if the offsets cancel so far that intermediate rounding would matter."""
        shifted = self.factor * first.offset
        offset = shifted + self.offset
        if abs(offset) * MOST_CANCELLED < abs(shifted):
            return None
        return _line(self.factor * first.factor, offset)


SAME = Line(1.0, 0.0)


def affine(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Line] | None:
    """Return the tensor argument of an operation and the line that it applies; None if it is not ``a x + b``.

    Args:
        name: the name of the operation.
        args: its arguments. Only one tensor, and one Python number for binary operations, are supported.
        kwargs: any keyword (``alpha``, ``out``, ``rounding_mode``) makes it another operation.
    """
    if kwargs:
        return None
    if name in _NEGATE:
        return (args[0], Line(-1.0, 0.0)) if len(args) == 1 and isinstance(args[0], Tensor) else None
    if len(args) != 2:
        return None
    first = isinstance(args[0], Tensor)
    x, number = args if first else (args[1], args[0])
    if not isinstance(x, Tensor) or type(number) not in (int, float):
        return None
    line = None
    if name in _MULTIPLY:
        line = _line(number, 0.0)
    elif name in _ADD:
        line = _line(1.0, number)
    elif name in _SUBTRACT_FROM:
        line = _line(-1.0, number) if first else None
    elif name in _SUBTRACT:
        line = _line(1.0, -number) if first else _line(-1.0, number)
    elif name in _DIVIDE and first and number:
        line = _line(1.0 / number, 0.0)
    return None if line is None else (x, line)


def _line(factor: float, offset: float) -> Line | None:
    if 1 / LARGEST <= abs(factor) <= LARGEST and abs(offset) <= LARGEST:
        return Line(float(factor), float(offset))
    return None


class AffineNotes:
    """Record which tensors of a forward pass are affine functions of others.

    Args:
        smallest: the smallest number of elements of a recorded tensor.
    """

    def __init__(self, smallest: int) -> None:
        self._smallest = smallest
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._sources: dict[Identity, tuple[Identity, Line]] = {}
        self._storages = Storages()

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> None:
        """Record that an operation of ``OPERATIONS`` returned ``y``, which has not been changed in place."""
        if type(y) is not Tensor or not y.requires_grad or y.numel() < self._smallest:
            return
        found = affine(name, args, kwargs)
        if found is None:
            return
        x, line = found
        plain = type(x) in (Tensor, nn.Parameter) and x.layout is strided and x.is_floating_point()
        if not plain or x.dtype != y.dtype or x.shape != y.shape or x.stride() != y.stride():
            return
        if is_functorch_wrapped_tensor(y):  # it has no storage of its own
            return
        self._storages.keep(x)
        self._storages.keep(y)
        self._sources[identity(y)] = identity(x), line

    def sources(self, y: Identity) -> Iterator[tuple[Identity, Line]]:
        """Yield the tensors of which ``y`` is an affine function, the nearest first, and the lines."""
        line = SAME
        while y in self._sources:
            y, step = self._sources[y]
            then = line.after(step)
            if then is None:
                return
            line = then
            yield y, line
