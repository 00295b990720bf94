"""Several runs in one process that take turns of a few steps, so that what slows the machine slows them alike."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from lightning_eff._core import rng

TURN = 4  # batches


class Stopped(BaseException):
    """The others of a group of runs are to end, since this process was interrupted."""


class Turns:
    """Passes the word round among threads; only the one that has it runs.

    Torch's, NumPy's and Python's global generators are one thread's at a time: each finds them as it left them.
    """

    def __init__(self, count: int) -> None:
        self._condition = threading.Condition()
        self._order = list(range(count))
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
        if self._order == [me] and not self._stopped:
            return
        state = rng.capture()
        with self._condition:
            self._next(me)
        self.wait(me)
        rng.restore(state)

    def leave(self, me: int) -> None:
        """I am done."""
        with self._condition:
            if self._turn == me:
                self._next(me)
            self._order.remove(me)

    def stop(self) -> None:
        """End all that wait."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

    def _next(self, me: int) -> None:
        self._turn = self._order[(self._order.index(me) + 1) % len(self._order)]
        self._condition.notify_all()


def in_turns(tasks: Sequence[Callable[[Callable[[], None]], Any]]) -> list[Any]:
    """What each task returns; a task is given the function by which it passes its turn on."""
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

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(tasks))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)
    except BaseException:
        turns.stop()
        raise
    finally:
        rng.restore(state)
    return results
