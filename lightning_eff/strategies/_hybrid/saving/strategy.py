"""The part of the hybrid strategy that saves and loads: one file as of one process, or a folder of pieces."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._lightning.names import Connected, is_a, like, of_both

if TYPE_CHECKING:
    from lightning_eff.strategies._hybrid.replica import Replica

_KEY = "lightning_eff_hybrid"  # in checkpoints: what random numbers of a pipeline's steps follow from


@of_both
class SavingStrategy(Connected, ModelParallelStrategy):
    """Saves and loads what the processes of a run hold together, through its :class:`Replica`."""

    _replica: "Replica | None"
    #: keys of the plain module's ``state_dict`` that one file does without, and for which nothing is put together
    leaves_out: frozenset[str] = frozenset()

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self._replica is not None
        return {} if self._save_distributed_checkpoint else self._replica.files.state_dict(self.leaves_out)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self._replica is not None
        if self._save_distributed_checkpoint:
            return {}
        inner = optimizer._optimizer if is_a(optimizer, LightningOptimizer) else optimizer
        return self._replica.files.optimizer_state(inner)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        assert self._replica is not None
        if self._replica.pipeline is not None:
            checkpoint[_KEY] = self._replica.pipeline.state_dict()
        if not self._save_distributed_checkpoint:
            self._replica.files.clear_way(Path(self.broadcast(filepath)))
            like(self, Strategy).save_checkpoint(self, checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise TypeError(
                f"{type(self).__name__}.save_checkpoint(storage_options={storage_options!r}): expected None, since folders"
                " of pieces are written by torch.distributed.checkpoint. Take save_distributed_checkpoint=False."
            )
        self._replica.files.save(checkpoint, Path(self.broadcast(filepath)))

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        assert self._replica is not None
        checkpoint = self._replica.files.load(Path(self.broadcast(checkpoint_path)), weights_only, self.checkpoint_io)
        if self._replica.pipeline is not None and _KEY in checkpoint:
            self._replica.pipeline.load_state_dict(checkpoint[_KEY])
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self._replica is not None
        self._replica.files.load_state_dict(checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._replica is not None
        self._replica.files.load_optimizer_states(checkpoint)
