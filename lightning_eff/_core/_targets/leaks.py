"""Detect labels that reach a step's loss in other ways than as targets, where changed targets have no effect.

A mask made from labels, an index, a class weight or an embedding of them uses the plain labels, whatever the targets are.
Two methods detect this. :class:`Leaks` marks every tensor that depends on labels through an operation that is not
followed. :func:`rolled` gives other labels to the same inputs while the targets stay. If the loss then changes, it depends
on labels in another way, such as a Python number or code that torch does not show.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff._core._targets.following import Follower, Kind, Trace, tensors
from lightning_eff._core._targets.operations import CASTING, name_of
from lightning_eff._core.patches import hook_behind

# fmt: off
#: Operations that read a tensor's form, not its values.
_FORM = frozenset((
    "data_ptr", "delete", "device", "dim", "dtype", "element_size", "empty_like", "format", "full_like", "get_device",
    "grad", "grad_fn", "has_names", "hash", "is_complex", "is_contiguous", "is_cpu", "is_cuda", "is_floating_point",
    "is_leaf", "is_meta", "is_mps", "is_nested", "is_pinned", "is_quantized", "is_same_size", "is_sparse", "is_tensor", "iter",
    "itemsize", "layout", "len", "names", "nbytes", "ndim", "ndimension", "nelement", "new_empty", "new_full", "new_ones",
    "new_zeros", "numel", "ones_like", "rand_like", "randint_like", "randn_like", "repr", "requires_grad", "result_type",
    "set", "shape", "size", "stride", "storage_offset", "version", "zeros_like",
))
#: Operations that use only the form of their second argument.
_LIKE = CASTING | frozenset(("expand_as", "reshape_as", "view_as"))
# fmt: on


class Level(IntEnum):
    """How a tensor depends on labels."""

    NOT = 0
    MASK = 1  #: through a mask of ignored labels or of one class, which other labels may share
    VALUE = 2  #: through their values


@dataclass(frozen=True)
class Leak:
    """How a tensor depends on labels, and through which torch operation first.

    Attributes:
        level: how.
        name: the operation's name.
        entry: whether only as token ids that a network embeds, (B, T) -> (B, T, D).
    """

    level: Level
    name: str
    entry: bool = False

    @property
    def rank(self) -> tuple[Level, bool]:
        """The severity."""
        return self.level, not self.entry


_NONE = Leak(Level.NOT, "")


class Leaks:
    """The tensors of one pass that depend on labels through operations that are not followed.

    Args:
        through_inputs: whether labels that reach a loss call through its input or its weights count too.

    Attributes:
        escaped: whether Python numbers were computed from labels, whose use cannot be observed.
        entered: whether labels, as ids, entered a module given to :meth:`entering`.
        fed: whether a loss call on labels has an input computed from the same labels' embeddings. Then they are tokens that
            the network both reads and predicts.
    """

    def __init__(self, *, through_inputs: bool) -> None:
        self.through_inputs = through_inputs
        self.escaped = self.entered = self.fed = False
        self._found: dict[int, tuple[Tensor, Leak]] = {}  # keeps the tensors, because ids of freed ones are reused

    def of(self, value: Any) -> Leak:
        """Return the worst leak of the tensors in ``value``."""
        found = [self._found[id(t)][1] for t in tensors(value) if id(t) in self._found] if self._found else []
        return max(found, key=lambda leak: leak.rank, default=_NONE)

    def knows(self, args: Any, kwargs: Any) -> bool:
        """Return whether one of a call's tensors is marked."""
        return bool(self._found) and any(id(t) in self._found for t in tensors((args, kwargs)))

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, follower: Follower) -> None:
        """Update the marks after a torch call, other than a loss, that has been followed."""
        name = name_of(func)
        if name in _FORM:
            return
        given: Any = (args, kwargs)
        first: Any = args[0] if args else None
        if name in _LIKE and len(args) > 1 and not follower.get(first):
            given = (first,)
        written = first if name == "setitem" else kwargs.get("out")
        leak = self.of(given)
        made = [t for t in (*tensors(output), *tensors(written)) if follower.get(t) is None]
        if made or not any(True for _ in tensors(output)):
            traces = [trace for t in tensors(given) if (trace := follower.get(t)) is not None]
            new = max((_level(trace) for trace in traces), default=Level.NOT)
            entry = name == "embedding" and all(t.ndim > 2 for t in tensors(output))
            leak = max(leak, Leak(new, name, entry and new > Level.NOT), key=lambda leak: leak.rank)
        if leak.level is Level.NOT:
            return
        into = [*tensors(output), *tensors(written)]
        self.escaped |= output is not None and not into
        for t in into:
            if name != "setitem" or follower.get(t) is None:
                self._mark(t, leak)

    def on_loss(self, arguments: Mapping[str, Any], target: Trace | None, output: Tensor, follower: Follower) -> None:
        """Update the marks after a loss call whose target has this trace."""
        leak = self.of(arguments["target"])
        rest = {key: value for key, value in arguments.items() if key != "target"}
        self.fed |= target is not None and self.of(rest).entry
        if self.through_inputs:
            traces = [trace for t in tensors(rest) if (trace := follower.get(t)) is not None]
            found = [leak, self.of(rest), *(Leak(_level(trace), "sub") for trace in traces)]
            leak = max(found, key=lambda leak: leak.level)
        elif target is None:
            leak = max(leak, self.of(rest), key=lambda leak: leak.level)
        if target is not None and target.kind is Kind.PAIRS:
            leak = Leak(Level.VALUE, "eq")
        if leak.level:
            self._mark(output, leak)

    def entering(self, modules: list[nn.Module]) -> list[Any]:
        """Remove the marks from these modules' outputs, where labels that are ids are mixed; return the hooks' handles."""

        def clear(module: nn.Module, args: Any, output: Any) -> None:
            for t in tensors(output):
                if id(t) in self._found and not (isinstance(module, nn.Embedding) and t.ndim < 3):
                    del self._found[id(t)]
                    self.entered = True

        return [hook_behind(module, clear) for module in modules]

    def _mark(self, tensor: Tensor, leak: Leak) -> None:
        for t in (tensor, tensor._base):
            if t is not None and leak.rank > self.of(t).rank:
                self._found[id(t)] = (t, leak)


def _level(trace: Trace) -> Level:
    return Level.MASK if trace.selects and trace.kind is Kind.SINGLE else Level.VALUE


def rolled(labels: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Give each sample another sample's labels, so that most samples' labels change; None if all have the same."""
    size = min(len(y) for y in labels.values())

    def moved(k: int) -> int:
        return sum(
            int((y != y.roll(k, 0)).reshape(len(y), -1).any(dim=1).sum())
            for y in labels.values()
            if y.ndim > 0 and len(y)
        )

    most = max(range(1, min(size, 17)), key=moved, default=0)
    return {path: y.roll(most, 0) for path, y in labels.items()} if most and moved(most) else None


def depends_on_labels(run: Callable[[bool], Tensor | None]) -> bool | None:
    """Return whether a loss changes with labels while its targets stay; None if unknown.

    Args:
        run: returns the loss of one pass from the same random state, with other labels if True.
    """
    try:
        plain, other = run(False), run(True)
    except (RuntimeError, IndexError, ValueError, TypeError, KeyError):  # other labels may be invalid here
        return None
    if plain is None or other is None:
        return None
    if not _differ(plain, other):
        return False
    again = run(False)  # the step may draw other random numbers each time
    return None if again is None or _differ(plain, again) else True


def _differ(a: Tensor, b: Tensor) -> bool:
    eps = max(32 * torch.finfo(a.dtype).eps, 1e-9) if a.is_floating_point() else 0.0
    a, b = a.detach().double(), b.detach().double()
    return bool(((a - b).abs() > eps * (1e-3 + a.abs())).any())


def leaked(who: str, labels: str, by: str | None) -> str:
    """Return the message for labels that reach the loss through the operation ``by``, or in a way that cannot be observed."""
    way = f"by torch's {by!r}, and not only" if by else "not only"
    return (
        f"{who}: the labels {labels} come into the loss {way} as targets of loss calls, so part of the loss would keep the"
        f" plain labels. Compute the loss only by F.cross_entropy, F.nll_loss or F.binary_cross_entropy on the labels, or"
        f" remove {who}."
    )
