"""Any two techniques train together and resume exactly, or are refused at setup with the reason; so with each plugin.

Few large stacks hold every allowed pair at least once, and are looked at as pairs are; what fails is cut down to the names
that fail together. Those are tried each time in which most pairs stand for the first time, two of five; all of them behind
the ``slow`` marker. That techniques act shows in their figures; that each still changes weights beside others is looked at
behind the marker, in the stacks where most of these stand, and with ``--technique`` beside each of its partners. One by one,
the pairs run behind the marker, too.
"""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.cases import ALL, CASES
from tests.covering import Stack, watched
from tests.plugins import PLUGINS
from tests.runs import fit
from tests.selection import chosen, slow_ones_run
from tests.stacks import MODEL, Stacked, Stacks, declared, model_of, stacked, verify

NAMES = sorted([*CASES, *PLUGINS])
REFUSED = declared(CASES, PLUGINS)
# what they do shows in the weights
SEEN = [name for name in NAMES if name in PLUGINS or not (CASES[name].exact or CASES[name].rounds)]
FIRST = 7  # stacks that are tried each time
LOOKS = 1  # stacks in which each of them is left out, to see whether that shows: a run for each


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "stack" in metafunc.fixturenames:
        name = chosen(metafunc.config)
        stacks = stacked(CASES, PLUGINS, set(REFUSED), SEEN, name, LOOKS if name is None else None)
        marked = [
            pytest.param(
                stack, id=f"{'' if stack.model == MODEL else stack.model + '-'}{i:02}", marks=_slow(stacks, i, name)
            )
            for i, stack in enumerate(stacks)
        ]
        metafunc.parametrize("stack", marked)
    if metafunc.definition.name == test_pair_trains_and_resumes.__name__:
        every = combinations(NAMES, 2) if slow_ones_run(metafunc.config) else ()
        metafunc.parametrize(("a", "b"), [two for two in every if _together(*two)])


def _slow(stacks: list[Stacked], i: int, name: str | None) -> Any:
    """The first are tried each time, of those on a module apart one, and all when asked for."""
    again = i >= FIRST if stacks[i].model == MODEL else stacks[i - 1].model == stacks[i].model
    return pytest.mark.slow if again and name is None else ()


def _tried(stack: Stacked, root: Path, watched: dict[str, Stack]) -> None:
    stacks = Stacks(CASES, PLUGINS, root, model=stack.model, monitored=stack.monitored)
    verify(stacks, stack.names, watched, unmoved=stack.exact)


@pytest.mark.timeout(900)  # the largest take a minute or two of a processor
def test_stack_trains_and_resumes(stack: Stacked, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    _tried(stack, tmp_path, {} if chosen(request.config) is None else stack.seen)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_stack_trains_otherwise_without_each(stack: Stacked, tmp_path: Path) -> None:
    if stack.seen:
        _tried(stack, tmp_path, stack.seen)


def _together(a: str, b: str) -> bool:
    model = model_of((a, b), CASES)
    return frozenset((a, b)) not in REFUSED and not any(
        model in CASES[name].refuses for name in (a, b) if name in CASES
    )


@pytest.mark.slow
def test_pair_trains_and_resumes(a: str, b: str, tmp_path: Path) -> None:
    verify(Stacks(CASES, PLUGINS, tmp_path, model=model_of((a, b), CASES)), (a, b), watched([(a, b)], SEEN)[0])


WITH_STAND_INS = sorted(tuple(sorted(pair)) for pair in declared(ALL, PLUGINS) if not pair <= PLUGINS.keys())


@pytest.mark.parametrize(("a", "b"), WITH_STAND_INS)
def test_pair_is_refused(a: str, b: str) -> None:
    """At setup, in either order, with the reason and the way out."""
    if {a, b} & PLUGINS.keys():
        plugin, name = (a, b) if a in PLUGINS else (b, a)
        case = PLUGINS[plugin]
        message = rf"{name}: the precision plugin {plugin} .+: .+\. Remove one of them"
        with pytest.raises(ValueError, match=message):
            fit("tiny_gpt", lambda: [ALL[name].active()], plugins=[case.build(case.precisions[0])])
        return
    for first, second in ((a, b), (b, a)):
        with pytest.raises(ValueError, match=f"{first} and {second} cannot train together: .+ Remove one of them"):
            fit("tiny_gpt", lambda pair=(first, second): [ALL[name].active() for name in pair])


@pytest.mark.parametrize("name", sorted(ALL))
def test_conflicts_are_with_what_there_is(name: str) -> None:
    """A name that nothing has would refuse nothing, in silence."""
    plugins: Any = [plugin.build(plugin.precisions[0]) for plugin in PLUGINS.values()]
    known = {*ALL, *(cls.__name__ for plugin in plugins for cls in type(plugin).__mro__)}
    conflicts = ALL[name].active().conflicts
    assert set(conflicts) <= known
    for why in conflicts.values():
        assert why[0].islower() or why.split(maxsplit=1)[0] in known, f"stands within a sentence: {why}"
        assert not why.endswith("."), f"stands within a sentence: {why}"


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_same_technique_twice_is_refused(name: str) -> None:
    """By Lightning itself as the Trainer is made, since the two would share one state; else by us at setup."""
    with pytest.raises(
        (ValueError, RuntimeError), match=f"more than one stateful callback of type `{name}`|{name} and"
    ):
        fit("tiny_gpt", lambda: [CASES[name].active(), CASES[name].active()])
