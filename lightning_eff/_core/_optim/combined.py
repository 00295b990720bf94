"""Several optimizers combined into one ``torch.optim.Optimizer``, whose learning rates follow the module's schedulers."""

from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._optim.external_rates import Known, Share, Telling, interpret, settle, watch

_OF_PARAMETERS = ("params", "param_names")
EXTRA = "extra_state"  # key in a state's first group, because torch.distributed.checkpoint keeps only states and groups
_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")


@dataclass(frozen=True)
class Following:
    """How a parameter group follows the module's group for the same parameters.

    Attributes:
        origin: the index of the module's group.
        ratio: the group's learning rate divided by that of the module's group. None for a group without a learning rate, or
            if the module's learning rate is zero.
        full: the group's peak learning rate, which the schedule scales; None as for ``ratio``.
        settings: whether other scheduled values (momenta, betas) are copied too.
    """

    origin: int
    ratio: float | None
    full: float | None
    settings: bool


class Origins(Optimizer):
    """The module's original parameter groups, on which its schedulers act; its steps do nothing."""

    def __init__(self, made: Optimizer) -> None:
        state = {"defaults": made.defaults, "param_groups": list(made.param_groups), "state": defaultdict(dict)}
        super().__setstate__(state)
        self.combined: CombinedOptimizer | None = None

    def settings(self) -> list[dict[str, Any]]:
        """Return the settings of each group, without parameters."""
        return [{k: v for k, v in group.items() if k not in _OF_PARAMETERS} for group in self.param_groups]

    def take(self, settings: list[dict[str, Any]]) -> None:
        """Restore the result of :meth:`settings`."""
        for group, held in zip(self.param_groups, settings, strict=False):
            group.update(held)

    @property
    def _opt_called(self) -> bool:
        """Whether the optimizer has stepped, which schedulers check to warn of steps in the wrong order."""
        return self.combined is None or self.combined._opt_called

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return None if closure is None else closure()


class _Seen:
    """Replaces a step that schedulers have wrapped, which they check."""

    _wrapped_by_lr_sched = True

    def __call__(self, closure: Callable[[], Any] | None = None) -> Any:
        return None if closure is None else closure()


class CombinedOptimizer(Optimizer):
    """Steps its parts one after the other, and appears as one optimizer.

    The parameter groups are the parts' own. The first ones correspond to the module's groups in order, so ``param_groups[1]``
    has parameters of the module's second group. State is looked up in the part that has the parameter. A ``state_dict`` has the
    plain form over all parts. A learning rate that the module or a callback writes into a group counts as the module's: each
    group gets its multiple of it, as with a scheduler (see :mod:`.external_rates`).

    Args:
        parts: optimizers of disjoint parameters, at least one.
        origins: the groups on which schedulers act.
        following: how each group of the parts, in order, follows them.
        home: the part for groups that hooks add for the module's own optimizer; None for the last part.
    """

    _opt_called = False

    def __init__(
        self, parts: list[Optimizer], origins: Origins, following: list[Following], home: Optimizer | None = None
    ) -> None:
        groups = [group for part in parts for group in part.param_groups]
        if len(groups) != len(following):
            raise ValueError(f"CombinedOptimizer: got {len(following)} ways to follow for {len(groups)} groups.")
        groups, self.following = _in_turn(groups, following)
        self.parts, self.origins, self.home = parts, origins, home
        # code that reads the defaults expects them in every group, such as LearningRateMonitor for momenta
        defaults = {k: v for k, v in parts[0].defaults.items() if all(k in group for group in groups)}
        super().__setstate__({"defaults": defaults, "param_groups": groups, "state": _States(self)})
        self._owners: dict[int, Optimizer] = {}
        origins.combined = self
        vars(origins)["step"] = _Seen()
        self._warned = self._absolute = False
        self._telling = Telling()
        self.settle()
        watch(self, self)

    # -- a step

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every part.

        Args:
            closure: computes the loss again, with gradients, and returns it.
        """
        self._opt_called = True
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    @contextmanager
    def moved(self) -> Iterator[None]:
        """Let schedulers act on :attr:`origins`; on exit every group follows them."""
        self.look()
        before = self.origins.settings()
        yield
        changed = [
            {k: v for k, v in group.items() if k in old and k not in (*_OF_PARAMETERS, *_RATES) and v is not old[k]}
            for group, old in zip(self.origins.param_groups, before, strict=True)
        ]
        self.follow()
        for group, how in zip(self.param_groups, self.following, strict=True):
            if how.settings:
                group.update(changed[how.origin])

    def follow(self) -> None:
        """Set every group's learning rate from :attr:`origins`, which the schedulers have set."""
        for group, how in zip(self.param_groups, self.following, strict=True):
            if how.ratio is not None:
                set_rate(group, float(self.origins.param_groups[how.origin]["lr"]) * how.ratio)
        settle(self)

    def settle(self) -> None:
        """Record the present learning rates of all groups as known."""
        self._known, self._known_origins = Known(self.param_groups), Known(self.origins.param_groups)

    def look(self, stepping: bool = False) -> None:
        """Accept learning rates that other code has written into the groups, and adjust all groups."""
        now = self._known.changed(self.param_groups)
        moved = self._known_origins.changed(self.origins.param_groups)  # by schedulers that the module steps itself
        if not now and not moved:
            return
        shares = [None if how.ratio is None else Share(how.origin, how.ratio) for how in self.following]
        if not self._warned and any(shares[i] is None for i in now):
            self._warned = True
            rank_zero_warn(
                f"{' and '.join(type(part).__name__ for part in self.parts)}: a learning rate was written by hand into a"
                " group whose learning rate in configure_optimizers is 0, so the group's own one is overwritten. Give the"
                " optimizer in configure_optimizers its highest learning rate, such as lr=1e-3."
            )
        meant = interpret(shares, self._known.rates, now, self._absolute)
        if now:
            self._telling.say(meant)
        found, self._absolute = meant.rates, meant.absolute
        for origin, rate in found.items():
            set_rate(self.origins.param_groups[origin], rate)
        for group, how in zip(self.param_groups, self.following, strict=True):
            if how.ratio is not None and (how.origin in found or (how.origin in moved and not now)):
                set_rate(group, float(self.origins.param_groups[how.origin]["lr"]) * how.ratio)
        self.settle()

    # -- groups and state

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to :attr:`home`, or to the last part if that is gone; schedulers treat it as the module's."""
        part = next((part for part in self.parts if part is self.home), self.parts[-1])
        count = len(part.param_groups)
        part.add_param_group(param_group)
        for group in part.param_groups[count:]:
            self.param_groups.append(group)
            self.following.append(Following(len(self.origins.param_groups), 1.0, group.get("lr"), settings=True))
            self.origins.param_groups.append(dict(group))
        self._owners.clear()
        self.settle()

    def add_part(self, part: Optimizer, following: list[Following]) -> None:
        """Add ``part`` as the first part, and remove its parameters from the other parts.

        Args:
            part: the new optimizer.
            following: how each of its groups follows the module's.
        """
        moved = [p for group in part.param_groups for p in group["params"]]
        how = {id(group): one for group, one in zip(self.param_groups, self.following, strict=True)}
        for old in self.parts:
            for group in old.param_groups:
                group.update(group_without(group, moved))
            take_groups(old, [group for group in old.param_groups if group["params"]])
        left = [group for group in self.param_groups if group["params"]]
        self.parts[:] = [part, *(old for old in self.parts if old.param_groups)]
        self.param_groups[:], self.following[:] = _in_turn(
            [*part.param_groups, *left], [*following, *(how[id(group)] for group in left)]
        )
        self.defaults = {k: v for k, v in self.defaults.items() if all(k in group for group in self.param_groups)}
        self._owners.clear()
        self.settle()

    def split_group(self, at: int, group: dict[str, Any], ratio: float) -> None:
        """Add ``group`` to the part of group ``at``, some of whose parameters it has taken, with ``ratio`` times its rate."""
        part = next(part for part in self.parts if any(one is self.param_groups[at] for one in part.param_groups))
        how = self.following[at]
        rates = [None if rate is None else rate * ratio for rate in (how.ratio, how.full)]
        part.param_groups.append(group)
        self.param_groups.append(group)
        self.following.append(Following(how.origin, *rates, settings=how.settings))
        self._owners.clear()
        self.settle()

    def part_of(self, parameter: Any) -> Optimizer:
        """Return the part that has ``parameter``, or the first part."""
        if not self._owners:
            self._owners = {id(p): part for part in self.parts for p in _parameters(part.param_groups)}
        return self._owners.get(id(parameter), self.parts[0])

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the plain form over all groups, and the settings of the groups on which schedulers act."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        numbers = {id(p): i for i, p in enumerate(_parameters(self.param_groups))}
        state: dict[Any, Any] = {}
        groups: dict[int, dict[str, Any]] = {}
        others: list[dict[str, Any]] = []
        for part in self.parts:
            found = part.state_dict()
            held = [numbers[id(p)] for p in _parameters(part.param_groups)]
            beside = {k: v for k, v in found["state"].items() if not isinstance(k, int)}
            state.update({held[k]: v for k, v in found["state"].items() if isinstance(k, int)})
            for group, saved in zip(part.param_groups, found["param_groups"], strict=True):
                groups[id(group)] = {**saved, "params": [held[i] for i in saved["params"]]}
            own = {k: v for k, v in found.items() if k not in ("state", "param_groups")}
            others.append({"optimizer": type(part).__name__, "state": beside, "own": own})
        first, *rest = [groups[id(group)] for group in self.param_groups]
        whole = {"state": state, "param_groups": [{**first, EXTRA: self.extra_state(others)}, *rest]}
        for after in self._optimizer_state_dict_post_hooks.values():
            changed: Any = after(self, whole)
            whole = whole if changed is None else changed
        return whole

    def extra_state(self, parts: list[dict[str, Any]] | None = None) -> tuple[dict[str, Any]]:
        """Return what a state holds beside the parameters' states and the groups, as one value for torch's checkpoints."""
        parts = [{"optimizer": type(part).__name__} for part in self.parts] if parts is None else parts
        return ({"parts": parts, "origins": self.origins.settings(), "absolute": self._absolute},)

    def set_extra_state(self, held: dict[str, Any]) -> None:
        """Restore the learning rates that :meth:`extra_state` returned."""
        self.origins.take(held["origins"])
        self._absolute = held.get("absolute", False)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`.

        Raises:
            ValueError: if it has other groups, or is of another optimizer.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed: Any = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        names = [type(part).__name__ for part in self.parts]
        saved_groups = [{k: v for k, v in group.items() if k != EXTRA} for group in state_dict["param_groups"]]
        here, there = ([len(group["params"]) for group in groups] for groups in (self.param_groups, saved_groups))
        first = next((group for group in state_dict["param_groups"] if EXTRA in group), None)
        held = (
            state_dict if first is None else first[EXTRA][0]
        )  # checkpoints of earlier versions have these beside the groups
        others = held.get("parts", ())
        saved = [one["optimizer"] for one in others]
        if here != there or saved != names:
            raise ValueError(
                f"Cannot load the optimizer state of {' and '.join(saved) or 'another optimizer'}, whose groups hold"
                f" {there} parameters, into {' and '.join(names)}, whose groups hold {here}. Resume with the settings of the"
                " run that saved the checkpoint, or load only its weights."
            )
        at = {id(group): i for i, group in enumerate(self.param_groups)}
        # parameters are numbered, or named in a checkpoint of a sharded module, in the order of the groups in both
        keys = {id(p): key for p, key in zip(_parameters(self.param_groups), _parameters(saved_groups), strict=True)}
        order = [[at[id(group)] for group in part.param_groups] for part in self.parts]
        for part, wanted, beside in zip(self.parts, order, others, strict=True):
            numbers = {keys[id(p)]: i for i, p in enumerate(_parameters(part.param_groups))}
            part.load_state_dict(
                {
                    **beside.get("own", {}),  # torch drops empty dicts when it gathers a sharded state
                    "state": {
                        **beside.get("state", {}),
                        **{numbers[k]: v for k, v in state_dict["state"].items() if k in numbers},
                    },
                    "param_groups": [
                        {**saved_groups[i], "params": [numbers[k] for k in saved_groups[i]["params"]]} for i in wanted
                    ],
                }
            )
        for part, wanted in zip(self.parts, order, strict=True):
            for i, group in zip(wanted, part.param_groups, strict=True):
                self.param_groups[i] = group
        self.set_extra_state(held)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("step", "state")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "state": _States(self)})

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the parts, such as ``train()``: a method is called on all parts that have it."""
        held = [] if name.startswith("_") else self.__dict__.get("parts", [])
        found = [getattr(part, name) for part in held if hasattr(part, name)]
        if not found:
            raise AttributeError(
                f"{' and '.join(type(part).__name__ for part in held) or 'The optimizer'} has no {name!r}."
            )
        if not all(callable(one) for one in found):
            return found[0]

        def of_all(*args: Any, **keywords: Any) -> Any:
            values = [method(*args, **keywords) for method in found]
            return next((value for value in values if value is not None), None)

        return of_all

    def __repr__(self) -> str:
        return " and ".join(map(repr, self.parts))


class _States(MutableMapping[Any, Any]):
    """The states of all parts, looked up in the part that has the parameter."""

    def __init__(self, optimizer: CombinedOptimizer) -> None:
        self._optimizer = optimizer

    def __getitem__(self, key: Any) -> Any:
        return self._optimizer.part_of(key).state[key]  # the part creates a missing state

    def __setitem__(self, key: Any, value: Any) -> None:
        self._optimizer.part_of(key).state[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._optimizer.part_of(key).state[key]

    def __contains__(self, key: object) -> bool:
        return any(key in part.state for part in self._optimizer.parts)

    def __iter__(self) -> Iterator[Any]:
        for part in self._optimizer.parts:
            yield from part.state

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._optimizer.parts)

    @override
    def get(self, key: Any, default: Any = None) -> Any:
        return self._optimizer.part_of(key).state.get(key, default)


def _in_turn(groups: list[dict[str, Any]], following: list[Following]) -> tuple[list[dict[str, Any]], list[Following]]:
    """Sort ``groups`` and how they follow: first one group for each of the module's, in the module's order."""
    order = list(range(len(groups)))
    first = {following[i].origin: i for i in reversed(order)}
    order.sort(key=lambda i: (following[i].origin if first[following[i].origin] == i else len(first), i))
    return [groups[i] for i in order], [following[i] for i in order]


def _parameters(groups: list[dict[str, Any]]) -> Iterator[Tensor]:
    for group in groups:
        yield from group["params"]


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set a group's learning rate, in place if it is a tensor, which may be shared."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def take_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Give ``optimizer`` only these groups, and delete its state for other parameters."""
    held = {id(p) for p in _parameters(groups)}
    for p in [p for p in optimizer.state if isinstance(p, Tensor) and id(p) not in held]:
        del optimizer.state[p]
    optimizer.param_groups = groups


def group_without(group: dict[str, Any], parameters: list[Any]) -> dict[str, Any]:
    """Return a copy of ``group`` without ``parameters``."""
    gone = {id(p) for p in parameters}
    return group_of(group, lambda p: id(p) not in gone)


def group_of(group: dict[str, Any], takes: Callable[[Any], bool]) -> dict[str, Any]:
    """Return a copy of ``group`` with only the parameters for which ``takes`` is true."""
    kept = [i for i, p in enumerate(group["params"]) if takes(p)]
    return {**group, **{key: [group[key][i] for i in kept] for key in _OF_PARAMETERS if key in group}}
