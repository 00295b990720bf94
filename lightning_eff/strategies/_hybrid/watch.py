"""Watches all processes of a run: when one fails or dies, all others stop with a message that names its rank.

Without it, a process that waits for a dead one can wait for the whole timeout of the process group, and its error only names
an address. So each process has a thread with a separate connection to the store of the process group at ``MASTER_PORT``. The
thread checks by process id whether the processes of its machine (or container) live. It writes a sign of life of its machine
to the store, and reads failures. A silent process is not dead while its id lives, because native code can block Python for
minutes. A machine counts as lost only if none of its processes gives a sign of life.

SIGTERM to any rank ends the run on all ranks after the same training step.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import _get_default_store
from typing_extensions import override

from lightning_eff._core._lightning.names import is_a
from lightning_eff._core._run.error_text import causes
from lightning_eff._core.patches import Patches

_FAILED, _TERMINATED = "failed", "terminated"
_INTERVAL_SECONDS = 1.0
_GRACE_SECONDS = 8.0
_DISCONNECTED_SECONDS = 6.0  # silence that is enough after a failed message to another process
_WORDS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "timed out", "timeout", "socket")
_MADE = [0]  # watches of this process; their keys in the store must differ


@dataclass(frozen=True)
class Process:
    """The identity of a process.

    Attributes:
        host: name of its machine.
        pid: process id.
        started: start time in the system's ticks, or "" if unknown.
        space: key of the machine or container in which the process id is valid.
    """

    host: str
    pid: int
    started: str
    space: str

    @classmethod
    def this(cls) -> "Process":
        host = socket.gethostname()
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            space = f"{host} {boot} {os.readlink('/proc/self/ns/pid')}"
        except OSError:  # not Linux, where containers are
            space = host
        state = _state(os.getpid())
        return cls(host, os.getpid(), state[1] if state else "", space)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def alive(self) -> bool:
        """Whether it runs; call this only within its space."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        state = _state(self.pid)
        return state is None or (state[0] not in ("Z", "X") and state[1] == self.started)


def _state(pid: int) -> tuple[str, str] | None:
    """Return the letter of a process's state and its start time, or None if the system does not report them."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]


class Watch:
    """One process's part of the watch, created on all ranks together.

    Args:
        timeout: seconds without a sign of life after which the processes of a machine count as dead.
        who: name of the caller in messages.
    """

    def __init__(self, timeout: float, *, who: str) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.timeout, self.who = timeout, who
        self._group = dist.group.WORLD
        told: list[Any] = [None] * self.world
        dist.all_gather_object(told, (Process.this(), _MADE[0]))
        self._processes: list[Process] = [process for process, _ in told]
        _MADE[0] = number = 1 + max(made for _, made in told)
        store: Store = cast("Any", _get_default_store()).clone()  # a separate connection
        store.set_timeout(timedelta(seconds=60))
        self._store: Store = PrefixStore(f"{who}/watch/{number}", store)
        spaces = list(dict.fromkeys(process.space for process in self._processes))
        self._space = spaces.index(self._processes[self.rank].space)
        self._members = [[r for r, p in enumerate(self._processes) if p.space == space] for space in spaces]
        self._run = 0
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._told = threading.Event()
        self._disconnected = False
        self.verdict: str | None = None
        self.signalled, self.asked = threading.Event(), threading.Event()
        self.agreed = False
        self._patches = Patches()

    @property
    def current(self) -> bool:
        """Whether the process group is still the same."""
        return self._group is dist.group.WORLD

    def start(self, trainer: Trainer | None = None) -> None:
        """Start the watch on all ranks together, and handle SIGTERM before ``trainer`` registers its handlers."""
        if self._thread is not None:
            return
        self._run += 1
        self.signalled, self.asked, self.agreed = threading.Event(), threading.Event(), False
        if trainer is not None:
            self._answer_sigterm(trainer)
        self._stop, self._told, self.verdict = threading.Event(), threading.Event(), None
        self._disconnected = False
        self._thread = threading.Thread(target=self._watch, name=f"{self.who} watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the watch of this run."""
        self._patches.restore()
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * _INTERVAL_SECONDS)
        self._thread = None

    # -- the thread

    def _key(self, name: str) -> str:
        return f"{self._run}/{name}"

    def _watch(self) -> None:
        others = [rank for rank in self._members[self._space] if rank != self.rank]
        next_space = (self._space + 1) % len(self._members)
        watches = next_space != self._space and self._members[self._space][0] == self.rank
        seen, silence, lost, before = -1, 0.0, 0, time.monotonic()
        while not self._stop.wait(_INTERVAL_SECONDS):
            now = time.monotonic()
            awake, before = (
                min(now - before, 2 * _INTERVAL_SECONDS),
                now,
            )  # less than the elapsed time if Python was blocked
            try:
                self._store.add(self._key(f"beat/{self._space}"), 1)
                if self._store.check([self._key(_FAILED)]):
                    self._store.set(self._key(f"told/{self.rank}"), "1")
                    self._conclude(self._store.get(self._key(_FAILED)).decode())
                    return
                lost = 0
                if self.signalled.is_set():
                    self._store.compare_set(self._key(_TERMINATED), "", self._named(self.rank))
                if self.rank == 0 and self._store.check([self._key(_TERMINATED)]):
                    self.asked.set()
                if dead := self._dead(others):
                    self._post(dead)
                if watches:
                    beats = self._store.add(self._key(f"beat/{next_space}"), 0)
                    silence = silence + awake if beats == seen else 0.0
                    seen = beats
                    if silence > self._limit:
                        self._post(self._silent(self._members[next_space], silence))
            except Exception:  # whatever the store's connection raises
                lost += 1
                if lost < 2 or self._stop.is_set():
                    continue
                self._conclude(
                    self._dead(others) or "the store at MASTER_ADDR:MASTER_PORT cannot be reached: rank 0 is gone"
                )
                return

    @property
    def _limit(self) -> float:
        return min(self.timeout, _DISCONNECTED_SECONDS) if self._disconnected else self.timeout

    def _dead(self, ranks: list[int]) -> str | None:
        """Return a message about the first dead process among ``ranks`` of this machine, or None."""
        for rank in ranks:
            if not self._processes[rank].alive():
                return f"{self._named(rank)} died without a message: it was killed, or ran out of memory"
        return None

    def _named(self, rank: int) -> str:
        return f"rank {rank} ({self._processes[rank]})"

    def _silent(self, ranks: list[int], seconds: float) -> str:
        rest = f", and {'' if len(ranks) == 2 else 'all of '}{_listed(ranks[1:])} there," if len(ranks) > 1 else ""
        return f"{self._named(ranks[0])}{rest} gave no sign of life for {seconds:.0f} s"

    def _post(self, problem: str) -> None:
        self._store.compare_set(self._key(_FAILED), "", problem)

    def _conclude(self, problem: str) -> None:
        """Wake the main thread, and end the process if the main thread stays blocked."""
        self.verdict = problem
        if not self._own:
            print(self.message(), file=sys.stderr, flush=True)
        self._told.set()
        _abort()
        if not self._stop.wait(_GRACE_SECONDS):
            os._exit(1)

    # -- the main thread

    @property
    def _own(self) -> bool:
        return self.verdict is None or self.verdict.startswith(f"rank {self.rank} ")

    def message(self) -> str:
        """Return the message of this process when it stops because of another one."""
        what = str(self.verdict).removesuffix(".")
        return (
            f"{self.who}: {what}. This process (rank {self.rank}) stops too. Read the output of that rank, and"
            " resume from the last checkpoint: trainer.fit(..., ckpt_path=...)."
        )

    def failed(self, error: BaseException) -> str | None:
        """Report an exception of this process to all others, or find the rank that caused it.

        Returns:
            The message to stop with if another rank is the cause, else None.
        """
        if self._thread is None:
            return None
        if is_a(error, SIGTERMException):
            return self._terminated()
        with _undisturbed():
            return self._failed(error)

    def _failed(self, error: BaseException) -> str | None:
        consequence = _of_messages(error)
        if self.verdict is None and consequence:
            self._disconnected = True
            self._told.wait(min(self.timeout, _DISCONNECTED_SECONDS) + 4 * _INTERVAL_SECONDS)
        if self.verdict is None:
            what = "lost its connection to another rank, which reported nothing" if consequence else "failed"
            text = f"rank {self.rank} {what}: {type(error).__name__}: {str(error) or 'no message'}"
            try:
                self._post(text[:4000])
                self._wait_until_told()
            except Exception as unreachable:  # other ranks notice it themselves
                print(f"{self.who}: could not report this to the other ranks: {unreachable}", file=sys.stderr)
        message = self.message() if consequence and not self._own else None
        self._stop.set()
        return message

    # -- SIGTERM

    def _answer_sigterm(self, trainer: Trainer) -> None:
        """Ask all ranks to stop after the same training step.

        Lightning's handler sends a message, which ranks without the signal mistake for another one. Lightning's loop asks
        rank 0 before each training batch whether to stop, so the signal's rank informs rank 0 through the store.
        """
        connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
        agree = loop._broadcast_sigterm_tensor

        def received(signum: int, _: Any) -> None:
            if not self.signalled.is_set() and (launcher := trainer.strategy.launcher) is not None:
                cast("Any", launcher).kill(signum)  # forwards it to the processes that it started
            self.signalled.set()
            if self.rank == 0:
                self.asked.set()
            if trainer.state.fn != TrainerFn.FITTING:  # no loop asks, so this rank stops and informs the others
                connector.received_sigterm = True

        def stopping() -> None:
            connector.received_sigterm = connector.received_sigterm or self.asked.is_set()
            try:
                agree()
            except BaseException:
                self.agreed = True
                raise

        self._patches.set(connector, "_sigterm_notifier_fn", received)
        self._patches.set(loop, "_broadcast_sigterm_tensor", stopping)

    def _terminated(self) -> str | None:
        """Find out which rank received SIGTERM.

        Returns:
            The message to stop with if only another rank received it, or None if this rank did too.
        """
        self.signalled.wait(2 * _INTERVAL_SECONDS)  # a scheduler signals all ranks, but not at once
        first = "a rank"
        try:
            if self.signalled.is_set():
                self._store.compare_set(self._key(_TERMINATED), "", self._named(self.rank))
            self._store.wait([self._key(_TERMINATED)], timedelta(seconds=4 * _INTERVAL_SECONDS))
            first = self._store.get(self._key(_TERMINATED)).decode()
            if not self.agreed:  # other ranks can wait for this one
                self._post(f"{first} received SIGTERM")
            self._store.set(self._key(f"told/{self.rank}"), "1")
            self._wait_until_told()
        except Exception as unreachable:
            print(f"{self.who}: could not ask which rank received SIGTERM: {unreachable}", file=sys.stderr)
        self._stop.set()
        message = (
            f"{self.who}: {first} received SIGTERM, so all ranks stop. This process is rank {self.rank}. Resume from"
            " the last checkpoint: trainer.fit(..., ckpt_path=...)."
        )
        if not self.signalled.is_set():
            return message
        print(message, file=sys.stderr, flush=True)
        return None

    def _wait_until_told(self) -> None:
        """Wait on rank 0, which can host the store, until all ranks have read the cause or do not answer."""
        others = [self._key(f"told/{rank}") for rank in range(self.world) if rank != self.rank]
        end = time.monotonic() + 4 * _INTERVAL_SECONDS
        while self.rank == 0 and time.monotonic() < end and not all(self._store.check([key]) for key in others):
            time.sleep(0.05)


def _listed(ranks: list[int]) -> str:
    """Format ranks, such as "ranks 1 to 7" or "ranks 1, 4, 5"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Delay SIGTERM, with which a launcher ends the rest of a run.

    Lightning answers it with a message to all ranks. That message would fail too, and its error would hide the cause.
    """
    before = signal.getsignal(signal.SIGTERM)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _of_messages(error: BaseException | None) -> bool:
    """Whether an error or one of its causes is that of a failed message between processes."""
    messages = (str(one).lower() for one in causes(error) if isinstance(one, RuntimeError | OSError))
    return any(word in text for text in messages for word in _WORDS)


def _abort() -> None:
    """Abort waiting NCCL messages; gloo's end when the other process ends."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()


class WatchedLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, which reports exceptions to the watch, also if another launcher starts the processes.

    Args:
        watch: returns the strategy's watch, if it exists.
    """

    def __init__(self, environment: Any, num_processes: int, num_nodes: int, watch: Callable[[], Watch | None]) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._watch = watch

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return self.cluster_environment.creates_processes_externally

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                watch = self._watch()
                message = None if watch is None else watch.failed(error)
                if message is not None:
                    raise RuntimeError(message) from error
                raise

        return super().launch(watched, *args, trainer=trainer, **kwargs)
