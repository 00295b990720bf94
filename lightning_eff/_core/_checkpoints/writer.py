"""A background thread that writes folders of pieces, one at a time, while training continues."""

import contextlib
import functools
import os
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_eff._core._checkpoints.folders import write
from lightning_eff._core._checkpoints.staging import staged

_BEFORE_REQUEUE = "hpc_ckpt_"  # begins Lightning's names of checkpoints after which a SLURM job is requeued and ends


def one_thread() -> Executor:
    """Return an executor that does one task after another in the background."""
    return ThreadPoolExecutor(1, "lightning_eff_checkpoints")


class FolderWriter:
    """Stages the pieces of a checkpoint in host memory, and writes them in a background thread of each rank.

    The threads communicate in a gloo group of their own, so collective operations of training do not meet theirs. A second
    save waits for the first, so there is one copy at a time. Older checkpoints are removed behind the save in progress, and
    only if it succeeds, so that there is always a whole one.

    Args:
        timeout: that of the group; None means torch's.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._group: Any = None
        self._executor: Executor | None = None
        self._tasks: list[Future[None]] = []
        self._path: Path | None = None
        self._will_exist: dict[str, bool] = {}

    def save(self, pieces: dict[str, Any], rest: dict[str, Any], path: Path) -> None:
        """Save the present state to the folder ``path``: it is copied now, and written later; collective.

        Args:
            pieces: this rank's tensors, which may be DTensors.
            rest: everything else, of which rank 0's is saved.
            path: the same on all ranks.

        Raises:
            RuntimeError: on every rank, if an earlier save failed.
        """
        self.wait()
        if self._executor is None:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
            self._executor = one_thread()
        if dist.get_rank() == 0:
            with contextlib.suppress(OSError):  # the thread tells every rank of it
                path.parent.mkdir(parents=True, exist_ok=True)
        rest = staged(rest) if dist.get_rank() == 0 else {}
        self._path = path
        self._submit(functools.partial(write, staged(pieces), rest, path, self._group), path, exists=True)
        if path.name.startswith(_BEFORE_REQUEUE):
            self.wait()

    def then(self, path: Path, do: Callable[[], None], *, exists: bool) -> None:
        """Call ``do``, which removes or makes ``path``, when the save in progress has succeeded. Call it on all ranks.

        Args:
            path: what ``do`` changes.
            do: must not communicate.
            exists: whether ``path`` exists afterwards.
        """
        if not self._tasks:
            do()
            return
        before = [*self._tasks]

        def do_if_saved() -> None:
            if all(task.exception() is None for task in before):
                do()

        self._submit(do_if_saved, path, exists=exists)

    def will_exist(self, path: str | os.PathLike[str]) -> bool | None:
        """Return whether ``path`` exists once the work in progress is done; None if that does not concern it."""
        return self._will_exist.get(os.path.abspath(path))

    def _submit(self, work: Callable[[], None], path: Path, *, exists: bool) -> None:
        assert self._executor is not None
        self._tasks.append(self._executor.submit(work))
        self._will_exist[os.path.abspath(path)] = exists

    def wait(self) -> None:
        """Wait until nothing is in progress; collective.

        Raises:
            RuntimeError: on every rank, if it failed on one.
        """
        if not self._tasks:
            return
        error, path = self._finished(), self._path
        told: list[Any] = [None] * dist.get_world_size(self._group)
        try:
            dist.all_gather_object(told, None if error is None else _text(error), group=self._group)
        except Exception:
            if error is None:
                raise
        if error is not None:
            raise RuntimeError(_failed(path, _text(error))) from error
        for rank, text in enumerate(told):
            if text is not None:
                raise RuntimeError(_failed(path, f"{text} (on rank {rank})"))

    def _finished(self) -> BaseException | None:
        """Wait for this rank's thread, and return the first error."""
        tasks, self._tasks = self._tasks, []
        errors = [error for task in tasks if (error := task.exception()) is not None]
        self._will_exist.clear()
        for error in errors:
            traceback.clear_frames(error.__traceback__)  # which hold the copies
        return errors[0] if errors else None

    def end(self) -> None:
        """Wait, and end the thread; collective.

        Raises:
            RuntimeError: on every rank, if the last save failed.
        """
        try:
            self.wait()
        finally:
            self.close()

    def close(self) -> None:
        """Wait for this rank's thread, and end it. After an error in the run, a second one is a warning."""
        error = self._finished()
        if error is not None:
            warnings.warn(_failed(self._path, _text(error)), stacklevel=2)
        if self._executor is not None:
            self._executor.shutdown()
            if dist.is_initialized():
                dist.destroy_process_group(self._group)
        self._executor = self._group = None


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _failed(path: Path | None, why: str) -> str:
    return (
        f"AsyncCheckpointIO: the background thread could not write the checkpoint {path}: {why}. Checkpoints from before are"
        " complete, so fix the cause and resume from the last one."
    )
