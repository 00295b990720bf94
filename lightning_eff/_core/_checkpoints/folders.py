"""Folders of every rank's pieces, in the structure of Lightning's sharded checkpoints.

A folder is written under another name, and gets its own name when it is complete. So a folder with the name of a checkpoint
is a whole one at any time, and an older checkpoint of that name stays until then.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

META = "meta.pt"  # everything except the pieces


def is_sharded(path: Path) -> bool:
    """Whether ``path`` is a folder of pieces."""
    return path.is_dir() and (path / META).is_file()


def write(pieces: dict[str, Any], rest: dict[str, Any], path: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write every rank's pieces, and the rest of rank 0's checkpoint, to the folder ``path``; collective over ``group``.

    Raises:
        Exception: on every rank, if a rank fails. Then ``path`` is as it was.
    """
    from torch.distributed.checkpoint.state_dict_saver import save  # slow to import, and few runs need it

    part = path.with_name(f".{path.name}.part")

    def begin() -> None:
        shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
        part.mkdir(parents=True)

    def finish() -> None:
        with (part / META).open("wb") as file:
            torch.save(rest, file)
            file.flush()
            os.fsync(file.fileno())
        _put(part, path)

    try:
        _on_first(begin, group)
        save(pieces, checkpoint_id=part, process_group=group)
        _on_first(finish, group)
    except BaseException:
        if dist.get_rank() == 0:
            shutil.rmtree(part, ignore_errors=True)
        raise


def _put(part: Path, path: Path) -> None:
    """Rename the complete folder ``part`` to ``path``, in the place of what is there."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    if not path.is_dir():
        part.rename(path)
        return
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    path.rename(old)
    part.rename(path)
    shutil.rmtree(old)  # a run that resumed from here keeps the files that it has in memory


def _on_first(do: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Call ``do`` on rank 0; if it fails, every rank raises. Returns on every rank when it is done."""
    told: list[str | None] = [None]
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            do()
        except Exception as failed:
            error, told = failed, [f"{type(failed).__name__}: {failed}"]
    dist.broadcast_object_list(told, src=0, group=group)
    if error is not None:
        raise error
    if told[0] is not None:
        raise RuntimeError(f"rank 0 failed with {told[0]}")
