"""Which processes of a run train on the same samples: those that share one replica of the module."""

from typing import Any, TypeVar

from lightning.pytorch import Trainer

from lightning_eff._core._run.processes import gathered

T = TypeVar("T")


class Replicas:
    """The data-parallel replicas of a run: each process under DDP and FSDP; tensor and pipeline parallel processes share one.

    Attributes:
        process: this process's global rank.
        processes: how many there are.
        index: the replica that this process belongs to.
        count: how many replicas there are, which is how many parts the samples are divided into.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.process, self.processes = trainer.global_rank, trainer.world_size
        told = getattr(trainer.strategy, "distributed_sampler_kwargs", None) if self.processes > 1 else None
        self.index: int = told["rank"] if told else self.process
        self.count: int = told["num_replicas"] if told else self.processes
        self._firsts: list[int] | None = None if self.count != self.processes else [*range(self.processes)]

    def everyone(self, value: T) -> list[T]:
        """``value`` of every process, in order of global ranks, on every process."""
        return gathered(self.processes, value)

    def gather(self, value: T) -> list[T]:
        """``value`` of one process of each replica, in order of replicas, on every process."""
        return self.of_replicas(self.everyone(value))

    def of_replicas(self, every: list[Any]) -> list[Any]:
        """Of what :meth:`everyone` gave, what the first process of each replica said."""
        if self._firsts is None:
            indices = self.everyone(self.index)
            self._firsts = [indices.index(replica) for replica in range(self.count)]
        return [every[process] for process in self._firsts]
