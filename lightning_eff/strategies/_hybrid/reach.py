"""The strategy's collective operations for modules, which count each sample once even if several ranks see it."""

from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._surveys.items import InSurveys
from lightning_eff.strategies._hybrid import layout as layouts
from lightning_eff.strategies._hybrid.saving.strategy import SavingStrategy
from lightning_eff.strategies._hybrid.shards import all_gather, everywhere

if TYPE_CHECKING:
    from lightning_eff.strategies._hybrid.replica import Replica


class ReachedStrategy(SavingStrategy):
    """The part of the hybrid strategy that modules and callbacks call.

    Operations on samples use the data-parallel ranks. Operations that synchronize processes use all ranks.
    """

    survey = InSurveys()

    _layout: "layouts.Layout | None"
    _replica: "Replica | None"

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        group = layouts.samples_group(self.device_mesh)
        return {"num_replicas": group.size(), "rank": group.rank()}

    def _replicas(self, group: Any) -> Any:
        """Return the data-parallel ranks if ``group`` means all processes and some see the same samples, else None."""
        if everywhere(group) and self._layout is not None and self._layout.shares_samples:
            return layouts.samples_group(self.device_mesh)
        return None

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data-parallel ranks, because the processes of one replica have the same value."""
        if not isinstance(tensor, Tensor):
            return tensor
        return _sync_ddp_if_available(tensor, self._replicas(group) or group, reduce_op=reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather over the data-parallel ranks, so that the result has each sample once."""
        replicas = self._replicas(group)
        if replicas is None:
            return super().all_gather(tensor, group, sync_grads)
        return all_gather(tensor, replicas, sync_grads=sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide over all processes, so that all continue or stop together."""
        self._check_reach("reduce_boolean_decision")
        told = torch.tensor(int(decision), device=self.root_device)
        told = _sync_ddp_if_available(told, None, reduce_op="sum")
        return bool(told == self.world_size) if all else bool(told)

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        self._check_reach("barrier")
        super().barrier(name)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send the object of process ``src`` to all processes."""
        self._check_reach("broadcast")
        return super().broadcast(obj, src)

    def _check_reach(self, name: str) -> None:
        """Raise ``ValueError`` if only some of the processes would take part."""
        if self._replica is not None and self._replica.in_training_step:
            raise ValueError(
                f"{type(self).__name__}: training_step calls the strategy's {name}, which waits for all processes, but pipeline"
                " stages run training_step at different times. Call it in on_train_batch_start or on_train_batch_end, or use"
                " pipeline_parallel_size=1."
            )

    @override
    def on_validation_end(self) -> None:
        self._end_evaluation()
        super().on_validation_end()

    @override
    def on_test_end(self) -> None:
        self._end_evaluation()
        super().on_test_end()

    @override
    def on_predict_end(self) -> None:
        self._end_evaluation()
        super().on_predict_end()

    def _end_evaluation(self) -> None:
        if self._replica is not None:
            self._replica.end_evaluation()
