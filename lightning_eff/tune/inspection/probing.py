"""Tries each technique alone for two steps on the user's module. Those that do not run are left out, with the reason."""

import math
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightning_eff._core.search_space import Choice, Integer, Range
from lightning_eff.bench.arms import Arm
from lightning_eff.bench.pace import Pace
from lightning_eff.bench.running.jobs import KILLED, Job
from lightning_eff.bench.running.places import Places
from lightning_eff.tune.config import Choices, Recipes
from lightning_eff.tune.space import Candidate, Space
from lightning_eff.tune.timing import in_words

STEPS = 2
SLOW = "its set-up takes more than"  # the beginning of the reason for a technique that did not make two steps in time
#: Python's errors whose message is only a key, a name or nothing.
_SAY_LITTLE = (
    "KeyError",
    "IndexError",
    "AttributeError",
    "NameError",
    "AssertionError",
    "ZeroDivisionError",
    "StopIteration",
)


def middle(what: Range) -> Any:
    """Return the middle of a range, or the first value of a choice."""
    if isinstance(what, Choice):
        return what.values[0]
    value = math.sqrt(what.low * what.high) if what.log else (what.low + what.high) / 2
    return round(value) if isinstance(what, Integer) else value


def usual(one: Candidate) -> dict[str, Any]:
    """Return a technique's settings from the middle of their ranges."""
    return {name: middle(what) for name, what in one.space.settings.items()}


def probe(
    space: Space,
    why_not: Callable[[str], str | None],
    *,
    jobs: int = 1,
    known: dict[str, str | None] | None = None,
    tell: Callable[[str, str | None], None] | None = None,
    over: Callable[[], bool] = lambda: False,
) -> dict[str, str | None]:
    """Return for each technique why two steps of it do not run. None means that they run.

    The techniques that gained in earlier measurements come first, because the search tries them first. Techniques that are not
    reached in time are missing from the result. They stay in the space, and their first trial shows whether they run.

    Args:
        space: the techniques.
        why_not: tries one technique, like :func:`refused`.
        jobs: the number of parallel tries.
        known: earlier results.
        tell: called with each name and its result.
        over: whether the time for this is over.
    """
    found = dict(known or {})
    expected = {n: one.expected(space.profile) for n, one in space.techniques.items() if n not in found}
    left = sorted(expected, key=lambda name: -expected[name])

    def tried(name: str) -> tuple[str, str | None] | None:
        if over():
            return None
        return name, why_not(name)

    with ThreadPoolExecutor(jobs) as pool:
        for done in pool.map(tried, left):
            if done is not None:
                found[done[0]] = done[1]
                if tell is not None:
                    tell(*done)
    return found


def refused(
    recipes: Recipes,
    name: str,
    places: Places,
    folder: Path,
    *,
    target: str,
    steps: int,
    seed: int,
    threads: int,
    limit: float | None = None,
) -> str | None:
    """Return why two steps of a technique do not run, or None.

    Args:
        recipes: writes choices as configs.
        name: the technique.
        places: the processes in which it runs.
        folder: the folder for configs.
        target: the validation metric.
        steps: the steps of a whole run, for schedules.
        seed: the seed of the run.
        threads: the number of torch threads.
        limit: the seconds that it may take.
    """
    one = recipes.space.techniques[name]
    try:
        arm = recipes.arm(name, Choices(techniques={name: usual(one)}), steps, folder)
    except (ValueError, TypeError) as error:  # its constructor refuses these settings
        return str(error)
    why = failure(arm, one.cls.__name__, places, target=target, steps=steps, seed=seed, threads=threads, limit=limit)
    if limit is not None and str(why).startswith(KILLED):
        return f"{SLOW} {in_words(limit)}, and each of its runs would. Name it with --include to try it"
    return why


def failure(
    arm: Arm,
    name: str,
    places: Places,
    *,
    target: str,
    steps: int,
    seed: int,
    threads: int,
    limit: float | None = None,
) -> str | None:
    """Return why two steps of an arm do not run, or None. The arguments are those of :func:`refused`."""
    pace = Pace(target, steps=max(steps, STEPS), sweep=STEPS)
    (record,) = places.do([Job(arm, seed, pace, f"probe-{name}", threads, limit)])
    return None if record["status"] == "finished" else reason(record)


def reason(record: dict[str, Any]) -> str:
    """Return why a job did not finish, in one line, without the name of an error whose message is enough."""
    text = " ".join(str(record["error"]).split())
    head, colon, rest = text.partition(": ")
    if record["status"] != "crashed" or not colon or not rest or not head.isidentifier():
        return text
    return text if head in _SAY_LITTLE else rest


def after(space: Space, found: Mapping[str, str | None], named: Collection[str] = ()) -> Space:
    """Return the space without the techniques that did not run.

    Args:
        space: the techniques.
        found: the results of :func:`probe`.
        named: the techniques that the user named. They may be slow to set up.
    """
    for name, why in found.items():
        if why is None or name not in space.techniques:
            continue
        slow = why.startswith(SLOW)
        if not (slow and name in named):
            space = space.without(name, why if slow else f"refused: {why}")
    return space
