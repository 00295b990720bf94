"""The search space: the baseline's own settings, the techniques, and the settings of each technique."""

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

MANUAL = "the module calls backward and steps its optimizers itself (automatic_optimization=False)"
NOT_INCLUDED = "not included"
MOST = 4  # default number of techniques in a recipe, at most
_PLACES = ((Callback, "callbacks"), (Precision, "plugins"), (Strategy, "strategy"))
_SECTIONS = ("own", "techniques", "most")


@dataclass(frozen=True)
class Candidate:
    """A technique that a recipe may use.

    Attributes:
        name: its name in a config: a class of this package, or a class path.
        cls: the class.
        space: its settings.
    """

    name: str
    cls: Any
    space: SearchSpace

    @property
    def place(self) -> str:
        """Its key under ``trainer`` in a config."""
        return next(place for base, place in _PLACES if is_subclass(self.cls, base))

    @property
    def foreign(self) -> bool:
        """Whether it is the user's own class, and does not declare that it changes the model."""
        return not self.cls.__module__.startswith("lightning_eff.") and not issubclass(self.cls, Architecture)

    def config(self, values: Mapping[str, Any], profile: RunProfile) -> dict[str, Any]:
        """Return the technique with these settings, as in a config."""
        if values:
            self.space.build(self.cls, values, profile)  # raises for wrong values
        arguments = self.space.make(_Recorder(self.cls), values, profile)
        path = (
            self.name if "." in self.name else f"lightning_eff.{self.name}"
        )  # Lightning has classes of some names, too
        return {"class_path": path, **({"init_args": _plain(arguments)} if arguments else {})}

    def expected(self, profile: RunProfile) -> float:
        """Return the expected speed-up from earlier measurements, or 1 without any."""
        if not self.space.measured_on(profile):
            return 1.0
        return speed(self.name) if self.space.measured is None else self.space.measured

    def sets_rates(self, values: Mapping[str, Any], profile: RunProfile) -> bool:
        """Whether it sets the learning rate with these settings."""
        return getattr(self.cls, "sets_rates", False) and self.space.build(self.cls, values, profile).sets_rates

    def describe(self) -> str:
        """Return the technique and its settings in words."""
        settings = "; ".join(f"{name} {in_words(what)}" for name, what in self.space.settings.items())
        return f"{self.name}: {settings or 'no settings'}"


class _Recorder:
    """Replaces a class in a space's ``make``, and returns the arguments of the call."""

    def __init__(self, cls: Any) -> None:
        self._cls = cls

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(inspect.signature(self._cls).bind(*args, **kwargs).arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cls, name)


def _plain(value: Any) -> Any:
    """Return a value in types that YAML has."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


@dataclass(frozen=True)
class Space:
    """The search space.

    Attributes:
        own: the baseline's own settings.
        own_left_out: the settings that cannot be searched, with the reasons.
        techniques: the techniques to try, by name.
        left_out: the techniques that are not tried, with the reasons.
        most: the largest number of techniques in a recipe.
        profile: the profile of the run.
    """

    own: tuple[Own, ...]
    own_left_out: Mapping[str, str]
    techniques: Mapping[str, Candidate]
    left_out: Mapping[str, str]
    most: int
    profile: RunProfile

    def conflict(self, names: Iterable[str]) -> tuple[frozenset[str], str] | None:
        """Return two of these techniques that cannot be combined, and the reason. Return None if all can."""
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
        """Return the space without a technique."""
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
    """Return the search space of a run, from the space that each technique declares.

    Args:
        profile: the profile of the run.
        own: the baseline's own settings.
        own_left_out: the settings that cannot be searched, with the reasons.
        file: the content of a space file.
        include: the only techniques to try, and class paths of other callbacks.
        exclude: the techniques not to try.
        has: the callback classes that the baseline already has.

    Raises:
        UsageError: for an unknown name or setting, with the nearest one, or for a wrong range.
    """
    file = dict(file or {})
    techniques, classes, most = _read(file, include, exclude)
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
    """Check the arguments of :func:`gather` that do not need a profile.

    Raises:
        UsageError: for an unknown name or setting, with the nearest one, or for a wrong range.
    """
    file = dict(file or {})
    techniques, classes, _ = _read(file, include, exclude)
    for name, given in techniques.items():
        if given is not False:
            _space_of(name, classes[name], given)
    for name, given in _mapping("own", file.get("own")).items():
        rest = {k: v for k, v in given.items() if k not in ("key", "in_steps")} if isinstance(given, Mapping) else given
        if given is not False and rest != {}:
            parse_range(f"own.{name}", rest)


def _read(
    file: Mapping[str, Any], include: Sequence[str], exclude: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return the techniques of a space file, all classes by name, and the largest number of techniques in a recipe."""
    _known("section of a space file", file, _SECTIONS)
    techniques = _mapping("techniques", file.get("techniques"))
    exported = {cls.__name__: cls for cls in technique_classes()}
    classes = dict(exported)
    for name in {**dict.fromkeys(include), **dict.fromkeys(exclude), **dict.fromkeys(techniques)}:
        if name not in classes:
            classes[name] = _imported(name, exported)
    most = file.get("most", MOST)
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise UsageError(f"most: got {most!r}; expected an integer >= 1, the largest number of techniques in a recipe.")
    return techniques, classes, most


def _between(cls: Any) -> bool:
    """Whether a technique needs Lightning to call the optimizers' steps."""
    return getattr(cls, "needs_automatic_optimization", False)


def _why_not(
    name: str, cls: Any, given: Mapping[str, Any], include: Sequence[str], exclude: Sequence[str], has: Sequence[str]
) -> str | None:
    if name in exclude:
        return "excluded"
    if given.get(name) is False:
        return "excluded by the space file"
    if include and name not in include and name not in given:
        return NOT_INCLUDED
    if cls.__name__ in has:
        return "the baseline has it already"
    if issubclass(cls, Architecture) and name not in include and name not in given:
        return "it changes the model. Name it with --include, or in a space file as techniques: {NAME: true}"
    return None


def _space_of(name: str, cls: Any, given: Any) -> SearchSpace:
    """Return a technique's own space, updated with the settings in a space file."""
    space = getattr(cls, "search_space", None) or SearchSpace()
    if given in (None, True):
        return space
    known = set(space.settings)
    if space.make == SearchSpace().make:
        known |= set(inspect.signature(cls).parameters)
    settings = _mapping(f"techniques.{name}", given)
    _known(f"setting of {name}", settings, sorted(known))
    ranges = {key: parse_range(f"techniques.{name}.{key}", value) for key, value in settings.items()}
    for key, own in space.settings.items():
        if key in ranges and isinstance(own, Choice) and own.each:
            ranges[key] = _kinds(f"techniques.{name}.{key}", ranges[key], own)
    return replace(space, settings={**space.settings, **ranges})


def _kinds(where: str, given: Range, own: Choice) -> Choice:
    """Return the variants of a technique that a space file names."""
    if isinstance(given, Choice) and set(given.values) <= set(own.values):
        return replace(given, each=True)
    raise UsageError(f"{where}: got {in_words(given)}; expected some of {', '.join(map(repr, own.values))}.")


def _own(
    own: Sequence[Own], left_out: Mapping[str, str], given: Mapping[str, Any]
) -> tuple[tuple[Own, ...], dict[str, str]]:
    found, without = {one.name: one for one in own}, dict(left_out)
    for name, value in given.items():
        known = found.get(name)
        if value is False:
            if known is None and name not in without:
                raise UsageError(
                    f"own.{name}: got false for a setting that is not searched.{did_you_mean(name, found)}"
                )
            found.pop(name, None)
            without[name] = "excluded by the space file"
            continue
        key = value.get("key") if isinstance(value, Mapping) else None
        if known is None and key is None:
            raise UsageError(
                f"own.{name}: this setting was not found in the config. Add its key, such as key:"
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


def parse_range(where: str, given: Any) -> Range:
    """Return a range from a space file: a list, one value, or ``{low:, high:, log:}``.

    Raises:
        UsageError: for anything else.
    """
    expected = "a list of values, one value, or low: and high: with log: true or false"
    if isinstance(given, Mapping) and set(given) == {"values"}:
        given = given["values"]
    if isinstance(given, list | tuple):
        if not given:
            raise UsageError(f"{where}: got an empty list; expected {expected}.")
        return Choice(frozen(given))
    if not isinstance(given, Mapping):
        return Choice((given,))
    if not {"low", "high"} <= set(given) <= {"low", "high", "log"}:
        raise UsageError(f"{where}: got {dict(given)}; expected {expected}.")
    low, high, log = given["low"], given["high"], given.get("log", False)
    numbers = [one for one in (low, high) if isinstance(one, int | float) and not isinstance(one, bool)]
    if len(numbers) < 2 or not isinstance(log, bool):
        raise UsageError(f"{where}: got {dict(given)}; expected numbers for low and high, and true or false for log.")
    try:
        whole = isinstance(low, int) and isinstance(high, int)
        return Integer(low, high, log) if whole else Uniform(float(low), float(high), log)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None


def _imported(name: str, exported: Mapping[str, Any]) -> Any:
    """Return the class at a path outside this package."""
    home, _, last = name.rpartition(".")
    hint = did_you_mean(name, exported)
    expected = "expected a technique (`lightning-eff techniques` lists them) or the class path of a callback"
    try:
        cls = getattr(importlib.import_module(home), last) if home else None
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # such as ./file.py
        raise UsageError(f"Got the technique {name!r}, which cannot be imported ({error}); {expected}.{hint}") from None
    if cls is None:
        raise UsageError(f"Got the unknown technique {name!r}; {expected}.{hint}")
    if not (inspect.isclass(cls) and is_subclass(cls, *(base for base, _ in _PLACES))):
        raise UsageError(f"Got {name!r}, which is not a callback, precision plugin or strategy; {expected}.")
    return cls


def _known(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise UsageError(
                f"Got {name!r}, which is not a {what}.{did_you_mean(str(name), known)} Expected some of"
                f" {', '.join(known) or 'none: it has no settings'}."
            )


def _mapping(where: str, given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UsageError(f"{where}: got {type(given).__name__}; expected a mapping of names.")
    return dict(given)
