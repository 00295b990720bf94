"""The replicas of the module in a run. Processes of one replica train on the same samples."""

from typing import Any, TypeVar

from lightning.pytorch import Trainer

from lightning_eff._core._run.processes import gathered

T = TypeVar("T")


class Replicas:
    """The data-parallel replicas of a run.

    Under DDP and FSDP each process is a replica. Tensor and pipeline parallel processes share one.

    Attributes:
        process: this process's global rank.
        processes: the number of processes.
        index: the index of this process's replica.
        count: the number of replicas, over which the samples are divided.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.process, self.processes = trainer.global_rank, trainer.world_size
        told = getattr(trainer.strategy, "distributed_sampler_kwargs", None) if self.processes > 1 else None
        self.index: int = told["rank"] if told else self.process
        self.count: int = told["num_replicas"] if told else self.processes
        self._firsts: list[int] | None = None if self.count != self.processes else [*range(self.processes)]

    def everyone(self, value: T) -> list[T]:
        """Return ``value`` of every process, in order of global ranks, on every process."""
        return gathered(self.processes, value)

    def gather(self, value: T) -> list[T]:
        """Return ``value`` of one process per replica, in order of replicas, on every process."""
        return self.of_replicas(self.everyone(value))

    def of_replicas(self, every: list[Any]) -> list[Any]:
        """Return the values of each replica's first process from a result of :meth:`everyone`."""
        if self._firsts is None:
            indices = self.everyone(self.index)
            self._firsts = [indices.index(replica) for replica in range(self.count)]
        return [every[process] for process in self._firsts]
