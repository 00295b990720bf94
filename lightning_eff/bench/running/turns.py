"""Several runs in one process that take turns of a few steps, so that what slows the machine slows them alike."""

import threading
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from lightning_eff._core import rng
from lightning_eff.bench.running.placement import on_idle_cores

TURN = 4  # batches


class Stopped(BaseException):
    """The others of a group of runs are to end, since this process was interrupted."""


class Turns:
    """Passes the word round among threads; only the one that has it runs.

    All have their turns once before anyone has the next, in an order that is drawn anew for each round: what one leaves
    to the next, such as a cold cache, falls upon all of them alike. Torch's, NumPy's and Python's global generators are
    one thread's at a time: each finds them as it left them.
    """

    def __init__(self, count: int) -> None:
        self._condition = threading.Condition()
        self._random = Random()  # of this alone: orders are nobody's result
        self._there = list(range(count))
        self._due = self._there[1:]
        self._turn = 0 if count else -1
        self._stopped = False

    def wait(self, me: int) -> None:
        """Wait for my first turn."""
        with self._condition:
            self._condition.wait_for(lambda: self._turn == me or self._stopped)
            if self._stopped:
                raise Stopped

    def pass_on(self, me: int) -> None:
        """Let the others have their turns, and wait until mine comes again."""
        if self._there == [me] and not self._stopped:
            return
        state = rng.capture()
        with self._condition:
            self._next(me)
        self.wait(me)
        rng.restore(state)

    def leave(self, me: int) -> None:
        """I am done."""
        with self._condition:
            self._there.remove(me)
            if me in self._due:
                self._due.remove(me)
            if self._turn == me:
                self._next(me)

    def stop(self) -> None:
        """End all that wait."""
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
    """What each task returns; a task is given the function by which it passes its turn on.

    Args:
        tasks: as many threads are started.
        threads: torch's threads in each, for as many of the idlest cores, which are the same for all; 0 leaves that to
            the system.
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
