"""Learning rates that a module or another callback writes into an optimizer's groups during training.

Lightning documents such a warm-up in ``optimizer_step``. It would undo a technique that gives some groups a multiple of the
module's learning rate, or sets all of them. So before each step the groups are compared with their last known learning
rates, and new values are interpreted as the module's.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer


class Watch(Protocol):
    """Compares the groups of one optimizer with their known learning rates."""

    def look(self, stepping: bool = False) -> None:
        """Accept learning rates that other code has written into the groups; ``stepping`` right before a step."""
        ...

    def settle(self) -> None:
        """Record the groups' learning rates as known, after a technique or a scheduler has set them."""
        ...


_WATCHES = "_rate_watches"  # the attribute of an optimizer with its watches


def watch(optimizer: Optimizer, found: Watch) -> None:
    """Call ``found.look`` before every step of ``optimizer``, and after the step's closure if it has one.

    It is also called before the optimizer's state is saved, so that a checkpoint has no unprocessed learning rate.
    """
    if _WATCHES not in vars(optimizer):
        vars(optimizer)[_WATCHES] = []
        first = optimizer.register_step_pre_hook(_before_step)
        hooks: Any = optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(first.id, last=False)  # before steps are scaled
        optimizer.register_state_dict_pre_hook(_look)
        optimizer.register_load_state_dict_post_hook(settle)
    vars(optimizer)[_WATCHES].append(found)


def is_watch(hook: Any) -> bool:
    """Return whether a step pre-hook is the one of :func:`watch`."""
    return hook is _before_step


def watches(optimizer: Optimizer) -> list[Watch]:
    """Return the watches of an optimizer."""
    return vars(optimizer).get(_WATCHES, [])


def unwatch(optimizer: Optimizer, found: Watch) -> None:
    """Remove the watch ``found``."""
    held = watches(optimizer)
    held[:] = [one for one in held if one is not found]


def look(optimizers: Iterable[Optimizer], stepping: bool = False) -> None:
    """Call all watches of these optimizers."""
    for optimizer in optimizers:
        _look(optimizer, stepping)


def settle(optimizer: Optimizer) -> None:
    """Record the learning rates in the groups of ``optimizer`` as known, because other code did not write them."""
    for one in watches(optimizer):
        one.settle()


def _look(optimizer: Optimizer, stepping: bool = False) -> None:
    for one in watches(optimizer):
        one.look(stepping)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    _look(optimizer, stepping=True)
    return after_closure(args, keywords, lambda: _look(optimizer, stepping=True))


def after_closure(
    args: tuple[Any, ...], keywords: dict[str, Any], act: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return a step's arguments with a closure that calls ``act`` at its end; None for a step without a closure.

    Lightning computes the gradients within the closure, so its hooks, which may write learning rates, run there too.
    """
    optimizer, *rest = args
    positional = bool(rest) and rest[0] is not None
    closure = rest[0] if positional else keywords.get("closure")
    if closure is None:
        return None

    def closing() -> Any:
        loss = closure()
        act()
        return loss

    return ((optimizer, closing, *rest[1:]), keywords) if positional else (args, {**keywords, "closure": closing})


class Known:
    """The last known learning rate of each group; a tensor is read again only after it has changed."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.rates: list[float | None] = []
        self._marks: list[Any] = []
        self.take(groups)

    def take(self, groups: list[dict[str, Any]]) -> None:
        """Record the learning rates in ``groups`` as known."""
        self.rates = [None if group.get("lr") is None else float(group["lr"]) for group in groups]
        self._marks = [_mark(group.get("lr")) for group in groups]

    def changed(self, groups: list[dict[str, Any]]) -> dict[int, float]:
        """Return the learning rates that differ from the known ones, by the index of their group."""
        found: dict[int, float] = {}
        for i, (group, mark) in enumerate(zip(groups, self._marks, strict=False)):
            rate = group.get("lr")
            if rate is None or self.rates[i] is None or mark == _mark(rate):
                continue
            now, before = float(rate), self.rates[i]
            if not math.isclose(now, before or 0.0, rel_tol=1e-7 if isinstance(rate, Tensor) else 1e-12):
                found[i] = now
        return found


def _mark(rate: Any) -> Any:
    return (id(rate), rate._version) if isinstance(rate, Tensor) else rate


@dataclass(frozen=True)
class Share:
    """A group whose learning rate is a multiple of the module's.

    Attributes:
        origin: the module's group that it follows.
        ratio: its learning rate divided by that of the module's group.
    """

    origin: int
    ratio: float


@dataclass(frozen=True)
class Meant:
    """The interpretation of learning rates that other code has written.

    Attributes:
        rates: the module's learning rates, by the module's group.
        absolute: whether the values are learning rates of the module; False for multiples of the previous values.
        guessed: whether only the size of the change decides this.
        left: the groups that keep their written values, because these are not in proportion to the others'.
    """

    rates: dict[int, float]
    absolute: bool
    guessed: bool = False
    left: tuple[int, ...] = ()


class Telling:
    """Warns once per kind if the interpretation of written learning rates is uncertain."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, meant: Meant) -> None:
        """Warn about the uncertain parts of ``meant``."""
        means = "the module's own" if meant.absolute else "multiples of the previous ones"
        if meant.left:
            self._once(
                "left",
                f"Learning rates were written by hand into optimizer.param_groups{list(meant.left)}, not in proportion to those"
                " of the other groups. They are kept and override the values of a technique.",
            )
        elif meant.guessed:
            self._once(
                "guessed",
                f"Learning rates written into optimizer.param_groups are interpreted as {means}, and every group keeps its"
                " proportion.",
            )

    def _once(self, kind: str, what: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            rank_zero_warn(f"{what} To avoid this, return a scheduler from configure_optimizers instead.")


def interpret(
    shares: Sequence[Share | None], known: Sequence[float | None], now: Mapping[int, float], absolute: bool = False
) -> Meant:
    """Interpret the learning rates ``now`` that other code has written.

    A value may be the module's learning rate, as in ``group["lr"] = scale * self.lr``, or a multiple of the previous value, as
    in ``group["lr"] *= 0.5``. Groups of different ratios show which: the first makes them equal, the second keeps their
    proportion. If all groups have one ratio, the size of the change decides.

    Code that gives the groups of one origin values in another proportion, or omits the first of them, distinguishes them. These
    groups are not in the result, and keep their written values.

    Args:
        shares: what each group follows; None for a group that follows nothing.
        known: each group's previous learning rate.
        now: the learning rates that changed, by index of the group.
        absolute: the interpretation of an earlier write, which is used if this one is ambiguous.
    """
    held: dict[int, list[int]] = {}
    for i, share in enumerate(shares):
        if share is not None and share.ratio > 0 and known[i] is not None:
            held.setdefault(share.origin, []).append(i)
    equal, multiple = dict[int, float](), dict[int, float]()  # the module's learning rate in each interpretation
    several: list[int] = []
    for origin, mine in held.items():
        if not any(i in now for i in mine):
            continue
        ratios = {i: share.ratio for i in mine if (share := shares[i]) is not None}
        # the code may know only the first groups, and an unchanged value does not show
        written = mine if mine[0] not in now else [i for i in mine if i in now]
        values = [now.get(i, known[i] or 0.0) for i in written]
        if _alike(values):
            equal[origin] = values[0]
        if _alike([value / ratios[i] for i, value in zip(written, values, strict=True)]):
            multiple[origin] = values[0] / ratios[written[0]]
        if len({ratios[i] for i in written}) > 1:
            several.append(origin)
    told = [origin for origin in several if (origin in equal) != (origin in multiple)]
    if told:
        absolute = told[0] in equal
    elif not absolute:
        pairs = [
            (value, known[i] or 0.0, share.ratio) for i, value in now.items() if (share := _at(shares, i)) is not None
        ]
        absolute = not all(_is_multiple(value, before, ratio) for value, before, ratio in pairs)
    found = equal if absolute else multiple
    touched = {i: share for i in now if (share := _at(shares, i)) is not None and share.origin in held}
    left = tuple(i for i, share in touched.items() if share.origin not in found)
    guessed = not told and not left and any(share.ratio != 1.0 for share in touched.values())
    return Meant(found, absolute, guessed, left)


def _at(shares: Sequence[Share | None], i: int) -> Share | None:
    return shares[i] if i < len(shares) else None


def _is_multiple(value: float, before: float, ratio: float) -> bool:
    """Return whether ``value`` is more likely a multiple of the previous value than the module's learning rate.

    Hand-written schedules rarely exceed the module's learning rate. A warm-up begins near zero, and a decay continues from the
    previous value.
    """
    module = before / ratio
    if ratio == 1.0 or before <= 0:
        return False
    if ratio > 1:
        return value > module * (1 + 1e-6)
    return 0.45 * before <= value <= before


def _alike(values: Sequence[float]) -> bool:
    return all(math.isclose(value, values[0], rel_tol=1e-6) for value in values)
