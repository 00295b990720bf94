"""Lightning's ``AsyncCheckpointIO`` for strategies that write folders of pieces.

Lightning 2.6 ignores the plugin there in silence: these strategies do not use a ``CheckpointIO``. Under
``ModelParallelStrategy``, it does not wait for one-file checkpoints at the end of a fit either.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy

from lightning_eff._core._checkpoints.writer import FolderWriter
from lightning_eff._core._lightning.names import is_a, like
from lightning_eff._core.patches import Patches


def is_async(strategy: Strategy) -> bool:
    """Whether the Trainer's plugins have Lightning's ``AsyncCheckpointIO``."""
    return is_a(strategy.checkpoint_io, AsyncCheckpointIO)


def refuse_deepspeed(strategy: Strategy) -> None:
    """Raise ``ValueError`` if ``strategy`` is DeepSpeed, which writes its checkpoints itself, and has the plugin."""
    if is_a(strategy, DeepSpeedStrategy) and is_async(strategy):
        raise ValueError(
            f"Trainer(plugins=[AsyncCheckpointIO()]): under {type(strategy).__name__}, DeepSpeed writes checkpoints itself and"
            " does not use the plugin, so training would wait for them. Remove the plugin, or use HybridParallelStrategy("
            "save_distributed_checkpoint=True)."
        )


class Saves:
    """The background saves of one run under a strategy; see :class:`FolderWriter`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._patches = trainer, Patches()
        self._writer = FolderWriter(getattr(trainer.strategy, "_timeout", None))
        for callback in trainer.checkpoint_callbacks:
            if is_a(callback, ModelCheckpoint):
                self._patches.set(callback, "file_exists", self._asked(callback.file_exists))
                self._patches.set(callback, "_link_checkpoint", self._linking(callback._link_checkpoint))

    def _asked(self, file_exists: Callable[..., bool]) -> Callable[..., bool]:
        """Wrap a callback's question for names that are taken, so that names do not depend on the thread's progress."""

        def will_exist(filepath: Any, trainer: Trainer) -> bool:
            exists, planned = file_exists(filepath, trainer), self._writer.will_exist(filepath)
            return trainer.strategy.reduce_boolean_decision(exists if planned is None else planned, all=False)

        return will_exist

    def _linking(self, link: Callable[..., None]) -> Callable[..., None]:
        """Wrap what makes ``save_last="link"``, so that a link never leads to a folder that is not there yet."""

        def link_when_saved(trainer: Trainer, filepath: str, linkpath: str) -> None:
            alone = SimpleNamespace(barrier=lambda *_: None)  # in the thread, rank 0 does not wait for the others
            here = SimpleNamespace(is_global_zero=trainer.is_global_zero, strategy=alone)
            self._writer.then(Path(linkpath), lambda: link(here, filepath, linkpath), exists=True)

        return link_when_saved

    def save(self, pieces: dict[str, Any], rest: dict[str, Any], path: Path) -> None:
        """Copy the state and write it to the folder ``path`` in the background; collective."""
        self._writer.save(pieces, rest, path)

    def remove(self, path: Any, remove: Callable[[Any], None]) -> None:
        """Call ``remove(path)`` when the save in progress has succeeded."""
        self._writer.then(Path(path), lambda: remove(path), exists=False)

    def wait(self) -> None:
        """Wait for the save in progress; collective."""
        self._writer.wait()

    def end(self) -> None:
        """Wait for the last save, and raise its error; collective."""
        try:
            self._writer.end()
        finally:
            self._patches.restore()

    def close(self) -> None:
        """Wait for this rank's thread after an error in the run. A second call does nothing."""
        self._writer.close()
        self._patches.restore()


# -- Lightning's own strategies


class LightningSaves:
    """Makes one of Lightning's strategies use ``AsyncCheckpointIO`` for folders of pieces, for one run.

    Other strategies, and runs without the plugin, are left as they are.

    Args:
        trainer: of the run.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._saves: Saves | None = None
        self._io: Any = None

    def begin(self, patches: Patches) -> None:
        """Replace methods of the strategy.

        Raises:
            ValueError: under a strategy that cannot write in the background.
        """
        strategy = self._trainer.strategy
        refuse_deepspeed(strategy)
        key = _key_of_weights(strategy)
        if key is None or not is_async(strategy):
            return
        self._io = strategy.checkpoint_io
        if _writes_folders(strategy):
            self._saves = Saves(self._trainer)
            self._patch_saving(strategy, key, self._saves, patches)
        teardown = strategy.teardown

        def waiting_teardown() -> None:
            try:
                if self._saves is not None:
                    self._saves.end()
            finally:
                teardown()
            io, self._io = self._io, None
            io.teardown()

        patches.set(strategy, "teardown", waiting_teardown)

    def _patch_saving(self, strategy: Any, key: str, saves: Saves, patches: Patches) -> None:
        save, load, remove = strategy.save_checkpoint, strategy.load_checkpoint, strategy.remove_checkpoint

        def save_checkpoint(checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
            if storage_options is not None:
                return save(checkpoint, filepath, storage_options)  # which refuses them
            pieces = {key: checkpoint.pop("state_dict")}
            for i, state in enumerate(checkpoint.pop("optimizer_states", [])):
                pieces[f"optimizer_{i}"] = state
            saves.save(pieces, checkpoint, Path(strategy.broadcast(filepath)))

        def load_checkpoint(*args: Any, **kwargs: Any) -> dict[str, Any]:
            saves.wait()
            return load(*args, **kwargs)

        patches.set(strategy, "save_checkpoint", save_checkpoint)
        patches.set(strategy, "load_checkpoint", load_checkpoint)
        patches.set(strategy, "remove_checkpoint", lambda filepath: saves.remove(filepath, remove))

    def close(self) -> None:
        """Wait for this rank's saves after an error in the run, which a second error does not hide."""
        if self._saves is not None:
            self._saves.close()
        if self._io is not None:
            try:
                self._io.teardown()
            except Exception as error:
                warnings.warn(f"AsyncCheckpointIO: a checkpoint could not be written: {error}", stacklevel=2)
        self._saves = self._io = None


def _key_of_weights(strategy: Strategy) -> str | None:
    """Return the name of the weights in Lightning's folders; None for strategies that save otherwise or by themselves."""
    for kind, key in ((ModelParallelStrategy, "state_dict"), (FSDPStrategy, "model")):
        if is_a(strategy, kind):
            if type(strategy).save_checkpoint is like(strategy, kind).save_checkpoint:
                return key
            if is_async(strategy) and not hasattr(strategy, "saves_in_background"):
                raise ValueError(
                    f"Trainer(plugins=[AsyncCheckpointIO()]): {type(strategy).__name__}.save_checkpoint replaces that of"
                    f" {kind.__name__}, so its folders cannot be written in the background. Remove the plugin, or the method."
                )
    return None


def _writes_folders(strategy: Any) -> bool:
    if is_a(strategy, FSDPStrategy):
        return strategy._state_dict_type == "sharded"
    return strategy._save_distributed_checkpoint
