"""Runs that are compared share the idlest cores; processes that they start have all cores."""

import itertools
import multiprocessing
import os
import threading
from multiprocessing.process import BaseProcess

import pytest

from lightning_eff.bench.running import placement
from lightning_eff.bench.running.turns import in_turns


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """A machine of four cores, of which 0 and 3 are the busiest; and which cores each thread may use."""
    masks: dict[int, set[int]] = {}
    looks = itertools.count()

    def busy() -> dict[int, float]:
        n = next(looks)
        return {0: 100.0 + 9 * n, 1: 500.0 + 2 * n, 2: 300.0 + n, 3: 7.0 * n}

    monkeypatch.setattr(placement, "busy_ticks", busy)
    monkeypatch.setattr(placement, "LOOK", 0.0)
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: masks.get(threading.get_ident(), {0, 1, 2, 3}), raising=False
    )
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda pid, mask: masks.update({threading.get_ident(): set(mask)}), raising=False
    )
    return masks


@pytest.mark.parametrize(("count", "chosen"), [(1, {2}), (2, {1, 2}), (3, {1, 2, 3}), (4, None), (0, None), (9, None)])
def test_the_idlest_cores(four_cores: dict[int, set[int]], count: int, chosen: set[int] | None) -> None:
    start, me = BaseProcess.start, threading.get_ident()
    with placement.on_idle_cores(count):
        assert four_cores.get(me) == chosen
        assert (BaseProcess.start is start) == (chosen is None)
    assert four_cores.get(me, {0, 1, 2, 3}) == {0, 1, 2, 3} and BaseProcess.start is start


def test_nothing_is_done_where_the_system_does_not_tell(
    four_cores: dict[int, set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "busy_ticks", dict)
    with placement.on_idle_cores(1):
        assert not four_cores


def _cores(queue: "multiprocessing.Queue[list[int]]") -> None:
    queue.put(sorted(os.sched_getaffinity(0)))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no affinity of threads to cores")
def test_threads_are_held_and_the_processes_they_start_are_not() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    expected = 1 if len(allowed) > 1 else len(allowed)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()

    def task(pass_on):
        pass_on()
        mine = sorted(os.sched_getaffinity(0))
        process = context.Process(target=_cores, args=(queue,))
        process.start()
        theirs = queue.get(timeout=60)
        process.join()
        assert sorted(os.sched_getaffinity(0)) == mine
        pass_on()
        return mine, theirs

    told = in_turns([task, task], threads=1)
    assert told[0] == told[1] and len(told[0][0]) == expected and told[0][1] == allowed
    assert sorted(os.sched_getaffinity(0)) == allowed
