"""Run several tasks in one process in turns of a few steps, so that disturbances slow all of them down equally."""

import threading
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from lightning_eff._core import rng
from lightning_eff.bench.running.placement import on_idle_cores

TURN = 4  # batches


class Stopped(BaseException):
    """This process was interrupted, so all tasks end."""


class Turns:
    """Let one of several threads run at a time.

    In each round every thread has one turn, in a new random order. Effects of one turn on the next, such as a cold cache, then
    affect all threads equally. Each thread finds the global random generators of torch, NumPy and Python as it left them.
    """

    def __init__(self, count: int) -> None:
        self._condition = threading.Condition()
        self._random = Random()  # the order does not affect results
        self._there = list(range(count))
        self._due = self._there[1:]
        self._turn = 0 if count else -1
        self._stopped = False

    def wait(self, me: int) -> None:
        """Wait for this thread's first turn."""
        with self._condition:
            self._condition.wait_for(lambda: self._turn == me or self._stopped)
            if self._stopped:
                raise Stopped

    def pass_on(self, me: int) -> None:
        """End this thread's turn, and wait for its next one."""
        if self._there == [me] and not self._stopped:
            return
        state = rng.capture()
        with self._condition:
            self._next(me)
        self.wait(me)
        rng.restore(state)

    def leave(self, me: int) -> None:
        """Leave the group."""
        with self._condition:
            self._there.remove(me)
            if me in self._due:
                self._due.remove(me)
            if self._turn == me:
                self._next(me)

    def stop(self) -> None:
        """End all waiting threads."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

    def _next(self, me: int) -> None:
        if not self._due:
            self._due = self._random.sample(self._there, len(self._there))
            if len(self._due) > 1 and self._due[0] == me:  # two turns on end would be a longer one
                self._due.append(self._due.pop(0))
        self._turn = self._due.pop(0) if self._due else -1
        self._condition.notify_all()


def in_turns(tasks: Sequence[Callable[[Callable[[], None]], Any]], threads: int = 0) -> list[Any]:
    """Run tasks in turns and return their results.

    Args:
        tasks: functions that get a function which ends their turn. Each one has its own thread.
        threads: the number of torch threads, for which as many of the most idle cores are used; 0 uses all cores.
    """
    turns = Turns(len(tasks))
    results: list[Any] = [None] * len(tasks)
    state = rng.capture()

    def run(me: int) -> None:
        try:
            turns.wait(me)
            rng.restore(state)
            results[me] = tasks[me](lambda: turns.pass_on(me))
        except Stopped:
            pass
        finally:
            turns.leave(me)

    runners = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(tasks))]
    try:
        with on_idle_cores(threads):
            for runner in runners:
                runner.start()
            for runner in runners:
                while runner.is_alive():
                    runner.join(0.5)
    except BaseException:
        turns.stop()
        raise
    finally:
        rng.restore(state)
    return results
