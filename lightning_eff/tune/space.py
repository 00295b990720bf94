"""The conditional space of a search: which techniques are on, with which settings, beside the baseline's own settings."""

import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy

from lightning_eff._catalogue.facts import speed
from lightning_eff._cli.errors import UsageError, did_you_mean
from lightning_eff._core._architecture.technique import Architecture
from lightning_eff._core._lightning.names import is_subclass
from lightning_eff._core.search_space import Choice, Integer, Range, RunProfile, SearchSpace, Uniform, frozen
from lightning_eff._exports.techniques import technique_classes
from lightning_eff.tune.own import Own, in_words

MANUAL = "the module itself calls backward and steps its optimizers (automatic_optimization=False)"
NOT_INCLUDED = "not included"
MOST = 4  # techniques in a recipe, where the space file says nothing
_PLACES = ((Callback, "callbacks"), (Precision, "plugins"), (Strategy, "strategy"))
_SECTIONS = ("own", "techniques", "most")


@dataclass(frozen=True)
class Candidate:
    """A technique that may stand in a recipe.

    Attributes:
        name: as a config names it: of a class of this package, or a class path.
        cls: the class.
        space: its settings.
    """

    name: str
    cls: Any
    space: SearchSpace

    @property
    def place(self) -> str:
        """Its place under ``trainer`` in a config."""
        return next(place for base, place in _PLACES if is_subclass(self.cls, base))

    @property
    def foreign(self) -> bool:
        """Whether it is of the user's own, and does not say that it makes another model."""
        return not self.cls.__module__.startswith("lightning_eff.") and not issubclass(self.cls, Architecture)

    def config(self, values: Mapping[str, Any], profile: RunProfile) -> dict[str, Any]:
        """The technique with these settings as a config has it."""
        if values:
            self.space.build(self.cls, values, profile)  # says what is wrong with them
        arguments = self.space.make(_Recorder(self.cls), values, profile)
        path = (
            self.name if "." in self.name else f"lightning_eff.{self.name}"
        )  # Lightning has classes of some names, too
        return {"class_path": path, **({"init_args": _plain(arguments)} if arguments else {})}

    def expected(self, profile: RunProfile) -> float:
        """How many times as fast as its baseline a run is expected to be, from what was measured: 1 where nothing is known."""
        if not self.space.measured_on(profile):
            return 1.0
        return speed(self.name) if self.space.measured is None else self.space.measured

    def sets_rates(self, values: Mapping[str, Any], profile: RunProfile) -> bool:
        """Whether it leads the learning rates, with these settings."""
        return getattr(self.cls, "sets_rates", False) and self.space.build(self.cls, values, profile).sets_rates

    def told(self) -> str:
        """In words."""
        settings = "; ".join(f"{name} {in_words(what)}" for name, what in self.space.settings.items())
        return f"{self.name}: {settings or 'as it is'}"


class _Recorder:
    """Stands for a class in a space's ``make``, and returns the arguments that it is called with."""

    def __init__(self, cls: Any) -> None:
        self._cls = cls

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(inspect.signature(self._cls).bind(*args, **kwargs).arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cls, name)


def _plain(value: Any) -> Any:
    """As YAML can say it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


@dataclass(frozen=True)
class Space:
    """All that a search may try.

    Attributes:
        own: the baseline's own settings.
        own_left_out: those that cannot be searched, with the reason.
        techniques: by name.
        left_out: techniques that are not tried, with the reason.
        most: techniques in a recipe.
        profile: of the run.
    """

    own: tuple[Own, ...]
    own_left_out: Mapping[str, str]
    techniques: Mapping[str, Candidate]
    left_out: Mapping[str, str]
    most: int
    profile: RunProfile

    def conflict(self, names: Iterable[str]) -> tuple[frozenset[str], str] | None:
        """Two of these techniques that say of themselves that they cannot train together, and why; or None."""
        chosen = sorted(names)
        for i, first in enumerate(chosen):
            for second in chosen[:i]:
                why = self._pair(first, second)
                if why is not None:
                    return frozenset((first, second)), why
        return None

    def _pair(self, first: str, second: str) -> str | None:
        ones = self.techniques[first], self.techniques[second]
        for a, b in (ones, ones[::-1]):
            names = {base.__name__ for base in b.cls.__mro__}
            for name, why in getattr(a.cls, "conflicts", {}).items():
                if name in names:
                    return why
        if all(one.place == "strategy" for one in ones):
            return "a Trainer has one strategy"
        if all(one.place == "plugins" for one in ones):
            return "a Trainer has one precision"
        if all(getattr(one.cls, "sets_rates", False) for one in ones):
            return "both set the learning rate"
        return None

    def without(self, name: str, why: str) -> "Space":
        """The same, but for a technique."""
        kept = {key: value for key, value in self.techniques.items() if key != name}
        return replace(self, techniques=kept, left_out={**self.left_out, name: why})


def gather(
    profile: RunProfile,
    own: Sequence[Own],
    own_left_out: Mapping[str, str],
    *,
    file: Mapping[str, Any] | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    has: Sequence[str] = (),
) -> Space:
    """The space of a run, from what each technique says of itself.

    Args:
        profile: of the run.
        own: the baseline's own settings, as they were found.
        own_left_out: those that were not.
        file: what a space file says.
        include: techniques of this package that alone are tried, and class paths of others.
        exclude: techniques that are not tried.
        has: classes of callbacks that the baseline has already.

    Raises:
        UsageError: for a name or a setting that is unknown, with the nearest one, or a range that is none.
    """
    file = dict(file or {})
    techniques, classes, most = _told(file, include, exclude)
    left_out: dict[str, str] = {}
    found: dict[str, Candidate] = {}
    for name, cls in classes.items():
        why, one = _why_not(name, cls, techniques, include, exclude, has), None
        if why is None:
            one = Candidate(name, cls, _space_of(name, cls, techniques.get(name)))
            why = MANUAL if profile.manual_optimization and _between(cls) else one.space.pointless(profile)
        if why is not None or one is None:
            left_out[name] = str(why)
        else:
            found[name] = one
    return Space(
        *_own(own, own_left_out, _mapping("own", file.get("own"))),
        techniques=found,
        left_out=left_out,
        most=most,
        profile=profile,
    )


def check(file: Mapping[str, Any] | None, *, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
    """Whatever of :func:`gather`'s errors can be told before a run is looked at.

    Raises:
        UsageError: for a name or a setting that is unknown, with the nearest one, or a range that is none.
    """
    file = dict(file or {})
    techniques, classes, _ = _told(file, include, exclude)
    for name, told in techniques.items():
        if told is not False:
            _space_of(name, classes[name], told)
    for name, told in _mapping("own", file.get("own")).items():
        rest = {k: v for k, v in told.items() if k not in ("key", "in_steps")} if isinstance(told, Mapping) else told
        if told is not False and rest != {}:
            parse_range(f"own.{name}", rest)


def _told(
    file: Mapping[str, Any], include: Sequence[str], exclude: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """What a space file says of techniques, the classes that there are by their names, and how many a recipe may have."""
    _known("section of a space file", file, _SECTIONS)
    techniques = _mapping("techniques", file.get("techniques"))
    exported = {cls.__name__: cls for cls in technique_classes()}
    classes = dict(exported)
    for name in {**dict.fromkeys(include), **dict.fromkeys(exclude), **dict.fromkeys(techniques)}:
        if name not in classes:
            classes[name] = _imported(name, exported)
    most = file.get("most", MOST)
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise UsageError(f"most: got {most!r}; expected an integer >= 1, the techniques that a recipe may have.")
    return techniques, classes, most


def _between(cls: Any) -> bool:
    """Whether a technique comes between a module's step and its optimizers', which Lightning must call then."""
    return getattr(cls, "needs_automatic_optimization", False)


def _why_not(
    name: str, cls: Any, told: Mapping[str, Any], include: Sequence[str], exclude: Sequence[str], has: Sequence[str]
) -> str | None:
    if name in exclude:
        return "excluded"
    if told.get(name) is False:
        return "excluded by the space file"
    if include and name not in include and name not in told:
        return NOT_INCLUDED
    if cls.__name__ in has:
        return "the baseline has it already"
    if issubclass(cls, Architecture) and name not in include and name not in told:
        return "it makes another model of it; name it by --include, or in a space file as techniques: {NAME: true}"
    return None


def _space_of(name: str, cls: Any, told: Any) -> SearchSpace:
    """A technique's own space, with what a space file says of its settings."""
    space = getattr(cls, "search_space", None) or SearchSpace()
    if told in (None, True):
        return space
    known = set(space.settings)
    if space.make == SearchSpace().make:
        known |= set(inspect.signature(cls).parameters)
    settings = _mapping(f"techniques.{name}", told)
    _known(f"setting of {name}", settings, sorted(known))
    ranges = {key: parse_range(f"techniques.{name}.{key}", value) for key, value in settings.items()}
    for key, own in space.settings.items():
        if key in ranges and isinstance(own, Choice) and own.each:
            ranges[key] = _kinds(f"techniques.{name}.{key}", ranges[key], own)
    return replace(space, settings={**space.settings, **ranges})


def _kinds(where: str, told: Range, own: Choice) -> Choice:
    """Of the kinds that a technique comes in, those that a space file names."""
    if isinstance(told, Choice) and set(told.values) <= set(own.values):
        return replace(told, each=True)
    raise UsageError(f"{where}: got {in_words(told)}; expected some of {', '.join(map(repr, own.values))}.")


def _own(
    own: Sequence[Own], left_out: Mapping[str, str], told: Mapping[str, Any]
) -> tuple[tuple[Own, ...], dict[str, str]]:
    found, without = {one.name: one for one in own}, dict(left_out)
    for name, value in told.items():
        known = found.get(name)
        if value is False:
            if known is None and name not in without:
                raise UsageError(f"own.{name}: got false for what is not searched.{did_you_mean(name, found)}")
            found.pop(name, None)
            without[name] = "excluded by the space file"
            continue
        key = value.get("key") if isinstance(value, Mapping) else None
        if known is None and key is None:
            raise UsageError(
                f"own.{name}: got no key for a setting that was not found by itself; expected key: the config's, such as"
                f" model.init_args.{name}.{did_you_mean(name, found)}"
            )
        rest = {k: v for k, v in value.items() if k not in ("key", "in_steps")} if isinstance(value, Mapping) else value
        in_steps = bool(value.get("in_steps", False)) if isinstance(value, Mapping) else False
        what = parse_range(f"own.{name}", rest) if rest or known is None else known.range
        if known is not None and key is None:
            found[name] = replace(known, range=what)
        else:
            found[name] = Own(name, what, known.value if known else None, key, in_steps)
            without.pop(name, None)
    return tuple(found.values()), without


def parse_range(where: str, told: Any) -> Range:
    """A range as a space file says it: a list, one value, or ``{low:, high:, log:}``.

    Raises:
        UsageError: for anything else.
    """
    expected = "a list of values, one value, or low: and high: with log: true or false"
    if isinstance(told, Mapping) and set(told) == {"values"}:
        told = told["values"]
    if isinstance(told, list | tuple):
        if not told:
            raise UsageError(f"{where}: got an empty list; expected {expected}.")
        return Choice(frozen(told))
    if not isinstance(told, Mapping):
        return Choice((told,))
    if not {"low", "high"} <= set(told) <= {"low", "high", "log"}:
        raise UsageError(f"{where}: got {dict(told)}; expected {expected}.")
    low, high, log = told["low"], told["high"], told.get("log", False)
    numbers = [one for one in (low, high) if isinstance(one, int | float) and not isinstance(one, bool)]
    if len(numbers) < 2 or not isinstance(log, bool):
        raise UsageError(f"{where}: got {dict(told)}; expected numbers for low and high, and true or false for log.")
    try:
        whole = isinstance(low, int) and isinstance(high, int)
        return Integer(low, high, log) if whole else Uniform(float(low), float(high), log)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None


def _imported(name: str, exported: Mapping[str, Any]) -> Any:
    """A class that is no technique of the package, by its path."""
    home, _, last = name.rpartition(".")
    hint = did_you_mean(name, exported)
    expected = "expected a technique (`lightning-eff techniques` lists them) or the class path of a callback"
    try:
        cls = getattr(importlib.import_module(home), last) if home else None
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # such as ./file.py
        raise UsageError(f"Got the technique {name!r}, which is not found ({error}); {expected}.{hint}") from None
    if cls is None:
        raise UsageError(f"Got the technique {name!r}, which there is not; {expected}.{hint}")
    if not (inspect.isclass(cls) and is_subclass(cls, *(base for base, _ in _PLACES))):
        raise UsageError(f"Got {name!r}, which is no callback, precision plugin or strategy; {expected}.")
    return cls


def _known(what: str, told: Iterable[str], known: Sequence[str]) -> None:
    for name in told:
        if name not in known:
            raise UsageError(
                f"Got {name!r}, which is no {what}.{did_you_mean(str(name), known)} Expected some of"
                f" {', '.join(known) or 'none: there is nothing to set'}."
            )


def _mapping(where: str, told: Any) -> dict[str, Any]:
    if told is None:
        return {}
    if not isinstance(told, Mapping):
        raise UsageError(f"{where}: got {type(told).__name__}; expected a mapping of names.")
    return dict(told)
