"""Saves and loads the checkpoints of a divided module and its optimizers, in any layout."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.optim import Optimizer

from lightning_eff._core._checkpoints.background import Saves
from lightning_eff._core._checkpoints.folders import META, is_sharded, write
from lightning_eff._core._lightning.names import is_exactly
from lightning_eff.strategies._hybrid.saving import checkpoint as formats
from lightning_eff.strategies._hybrid.saving.gathering import Gathering
from lightning_eff.strategies._hybrid.saving.optimizer_state import NamedOptimizer
from lightning_eff.strategies._hybrid.saving.plain import Plain


class Files:
    """Saves and loads one replica.

    Attributes:
        optimizers: the run's optimizers with names of parameters; empty without training.

    Args:
        whole: whether every rank holds the whole module.
    """

    def __init__(
        self,
        module: LightningModule,
        plain: Plain,
        gathering: Gathering,
        device: torch.device,
        *,
        whole: bool,
        who: str,
    ) -> None:
        self._module, self._plain, self._gathering = module, plain, gathering
        self._device, self._whole, self._who = device, whole, who
        self._in_place = False
        self._ended: str | None = None
        self.optimizers: list[NamedOptimizer] = []

    def end(self, *, why_gone: str | None) -> None:
        """Note that the run is over and the module is whole on every rank; optimizer state does not move.

        Args:
            why_gone: message for requests of weights if the module has none, else None.
        """
        self._ended = why_gone or ""

    def state_dict(self, without: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Return the plain module's ``state_dict`` except some keys. In a divided module only rank 0 has it; collective."""
        if self._ended:
            raise RuntimeError(self._ended)
        if self._whole or self._ended is not None:
            return {key: value for key, value in self._module.state_dict().items() if key not in without}
        return formats.consolidate(self._module, self._plain, self._gathering, without=without)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the plain optimizer's ``state_dict``. In a divided module only rank 0 has it; collective."""
        if self._whole:
            return optimizer.state_dict()
        return next(o for o in self.optimizers if o.optimizer is optimizer).consolidate(self._gathering)

    def clear_way(self, path: Path) -> None:
        """Remove a folder of pieces at the path of a new file.

        Raises:
            IsADirectoryError: if ``path`` is another folder.
        """
        if not path.is_dir():
            return
        if not is_sharded(path):
            raise IsADirectoryError(f"The checkpoint path exists and is a directory: {path}")
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)

    def save(self, checkpoint: dict[str, Any], path: Path, saves: Saves | None) -> None:
        """Write a folder of every rank's pieces, in the background if there are ``saves``; collective."""
        if self._ended:
            raise RuntimeError(self._ended)
        pieces, rest = formats.divide(checkpoint, self._module, self._plain, self._gathering, self.optimizers)
        (write if saves is None else saves.save)(pieces, rest, path)

    def load(self, path: Path, weights_only: bool | None, io: CheckpointIO) -> dict[str, Any]:
        """Read a checkpoint of any layout, and load a folder's weights and optimizer state at once; collective.

        Raises:
            FileNotFoundError: if there is no checkpoint.
        """
        self._in_place = is_sharded(path)
        if self._in_place:
            return formats.load_sharded(
                path,
                self._module,
                self._plain,
                self.optimizers,
                strict=self._module.strict_loading,
                weights_only=weights_only,
                device=self._device,
                who=self._who,
            )
        if path.is_dir():
            raise FileNotFoundError(
                f"{self._who}: {path} is a folder without {META}, so it is not a complete checkpoint. Resume from"
                " another checkpoint."
            )
        if path.is_file() and is_exactly(io, TorchCheckpointIO):
            try:  # every rank reads the pieces that it needs
                return torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
        return io.load_checkpoint(path, weights_only=weights_only)

    def load_state_dict(self, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        """Load the weights of a file."""
        if self._in_place:
            return
        if self._whole:
            self._module.load_state_dict(checkpoint["state_dict"], strict=strict)
            return
        formats.load_whole(self._module, self._plain, checkpoint["state_dict"], strict=strict)

    def load_optimizer_states(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer state of a file."""
        if self._in_place:
            return
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_plain(saved, self._device, who=self._who)
