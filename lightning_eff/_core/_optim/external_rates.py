"""Learning rates that a module, or another callback, writes into an optimizer's groups by hand while training goes on.

Lightning documents such a warm-up in ``optimizer_step``. A technique that gives some groups a multiple of the module's
learning rate, or sets all of them, would be undone by it. So the groups are compared, before each step, with the learning
rates that were last known in them, and what stands there instead is understood as the module's.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer


class Watch(Protocol):
    """Compares the groups of one optimizer with what is known of them."""

    def look(self, stepping: bool = False) -> None:
        """Take over the learning rates that somebody has written into the groups; ``stepping`` right before a step."""
        ...

    def settle(self) -> None:
        """The groups' learning rates were set by a technique or a scheduler: they are known from now on."""
        ...


_WATCHES = "_rate_watches"  # the attribute of an optimizer that holds them


def watch(optimizer: Optimizer, found: Watch) -> None:
    """Let ``found`` look before every step of ``optimizer``, after a closure that the step is given has run.

    It also looks before the optimizer's state is saved, so that a checkpoint holds no rate that is still to be understood.
    """
    if _WATCHES not in vars(optimizer):
        vars(optimizer)[_WATCHES] = []
        first = optimizer.register_step_pre_hook(_before_step)
        hooks: Any = optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(first.id, last=False)  # before steps are scaled
        optimizer.register_state_dict_pre_hook(_look)
        optimizer.register_load_state_dict_post_hook(settle)
    vars(optimizer)[_WATCHES].append(found)


def watches(optimizer: Optimizer) -> list[Watch]:
    """Those that look before its steps."""
    return vars(optimizer).get(_WATCHES, [])


def unwatch(optimizer: Optimizer, found: Watch) -> None:
    """Let ``found`` look no more."""
    held = watches(optimizer)
    held[:] = [one for one in held if one is not found]


def look(optimizers: Iterable[Optimizer], stepping: bool = False) -> None:
    """Let all watches look now."""
    for optimizer in optimizers:
        _look(optimizer, stepping)


def settle(optimizer: Optimizer) -> None:
    """The learning rates that stand in the groups of ``optimizer`` were not written by hand."""
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
    """A step's arguments with a closure that calls ``act`` as it ends; None, and nothing done, for a step without one.

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
    """The learning rate that was last known of each group; a tensor is read again only after it has changed."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.rates: list[float | None] = []
        self._marks: list[Any] = []
        self.take(groups)

    def take(self, groups: list[dict[str, Any]]) -> None:
        """What stands in ``groups`` is known."""
        self.rates = [None if group.get("lr") is None else float(group["lr"]) for group in groups]
        self._marks = [_mark(group.get("lr")) for group in groups]

    def changed(self, groups: list[dict[str, Any]]) -> dict[int, float]:
        """The learning rates that are others than the known ones, by the index of their group."""
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
        origin: names the group of the module's that it follows.
        ratio: its learning rate by that of the module's group.
    """

    origin: int
    ratio: float


@dataclass(frozen=True)
class Meant:
    """What somebody means who has written learning rates.

    Attributes:
        rates: the module's learning rates, by the group of the module's.
        absolute: whether they were written as such; False for multiples of what stood there.
        guessed: whether the size of the change alone tells that.
        left: the groups that keep what was written into them, as it is in no proportion to the others'.
    """

    rates: dict[int, float]
    absolute: bool
    guessed: bool = False
    left: tuple[int, ...] = ()


class Telling:
    """Says once of each kind how learning rates written by hand are understood, where that might not be what is meant."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, meant: Meant) -> None:
        """Say what ``meant`` leaves in doubt."""
        means = "the module's own" if meant.absolute else "multiples of those that stood there"
        if meant.left:
            self._once(
                "left",
                f"Learning rates were written by hand into optimizer.param_groups{list(meant.left)}, in no proportion to those"
                " of the other groups. They stay as they are and override what a technique has set there.",
            )
        elif meant.guessed:
            self._once(
                "guessed",
                f"Learning rates that are written into optimizer.param_groups are taken for {means}, and every group keeps its"
                " proportion.",
            )

    def _once(self, kind: str, what: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            rank_zero_warn(f"{what} To leave no doubt, return a scheduler from configure_optimizers instead.")


def understood(
    shares: Sequence[Share | None], known: Sequence[float | None], now: Mapping[int, float], absolute: bool = False
) -> Meant:
    """What somebody means who wrote ``now``.

    A value may be the module's learning rate, as in ``group["lr"] = scale * self.lr``, or a multiple of the one that stood
    there, as in ``group["lr"] *= 0.5``. Groups of several ratios tell which: the first leaves them equal, the second keeps
    their proportion. Where all groups have one ratio, the size of the change tells.

    A writer that gives the groups of one origin values of another proportion, or leaves out the first of them, knows them
    apart: these are not in the result, and are to be left as they were written.

    Args:
        shares: what each group follows; None for one that follows nothing.
        known: each group's learning rate before.
        now: those that are others now, by index of the group.
        absolute: what was found of an earlier write, which counts where this one does not tell.
    """
    held: dict[int, list[int]] = {}
    for i, share in enumerate(shares):
        if share is not None and share.ratio > 0 and known[i] is not None:
            held.setdefault(share.origin, []).append(i)
    equal, multiple = dict[int, float](), dict[int, float]()  # the module's learning rate, in either sense
    several: list[int] = []
    for origin, mine in held.items():
        if not any(i in now for i in mine):
            continue
        ratios = {i: share.ratio for i in mine if (share := shares[i]) is not None}
        # a writer may know the first groups alone; and a value that stood there already shows in no group
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
    """Whether ``value`` is rather a multiple of what stood there than the module's learning rate.

    Schedules by hand rarely exceed the module's learning rate, and a warm-up begins near zero, while a decay goes on from what
    stands there.
    """
    module = before / ratio
    if ratio == 1.0 or before <= 0:
        return False
    if ratio > 1:
        return value > module * (1 + 1e-6)
    return 0.45 * before <= value <= before


def _alike(values: Sequence[float]) -> bool:
    return all(math.isclose(value, values[0], rel_tol=1e-6) for value in values)
