"""The training loaders of one run: wrapped as Lightning takes them up, begun together, put back at the end."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lightning_eff._core.loaders import ResumableLoader
from lightning_eff._core.progress import in_flight


class TrainLoaders:
    """The host of the run's :class:`ResumableLoader` objects.

    Attributes:
        rank: this process's global rank.
        states: what a checkpoint says of the loaders, in their order, which take it up as they are wrapped.

    Args:
        trainer: the trainer.
        gather: ``value`` of every rank, in rank order, on every rank.
        before: called before the loaders begin an iteration.
    """

    def __init__(self, trainer: Trainer, gather: Callable[[Any], list[Any]], before: Callable[[], None]) -> None:
        self.rank = trainer.global_rank
        self.states: list[dict[str, Any]] = []
        self._trainer, self._gather, self._before = trainer, gather, before
        self._loaders: list[ResumableLoader] = []

    def wrap(self, process: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The strategy's ``process_dataloader``, with a :class:`ResumableLoader` around what trains."""

        def process_dataloader(dataloader: Any) -> Any:
            dataloader = process(dataloader)
            stateful = hasattr(dataloader, "state_dict") and hasattr(dataloader, "load_state_dict")
            if not self._trainer.training or stateful:
                return dataloader
            loader = ResumableLoader(dataloader, self)
            if len(self._loaders) < len(self.states):
                loader.load_state_dict(self.states[len(self._loaders)])
            self._loaders.append(loader)
            return loader

        return process_dataloader

    def unwrap(self) -> None:
        """Put the user's loaders back as they were."""
        for loader in self._loaders:
            loader.unwrap()
        self._loaders = []

    @property
    def indices(self) -> Any:
        """The data set indices of the current batch's samples (a list), or None where the loader does not tell."""
        return self._loaders[0].indices if len(self._loaders) == 1 else None

    # -- what a loader asks of its run

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, in rank order, on every rank."""
        return self._gather(value)

    def batches_ahead(self) -> int:
        """How many batches Lightning has fetched and not yet trained on."""
        return len(getattr(self._trainer.fit_loop._data_fetcher, "batches", [])) + in_flight(self._trainer)

    def epoch_complete(self) -> bool:
        """Whether the last batch of the epoch has been trained on."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        counts = progress.current.state_dict()
        return progress.is_last_batch and counts["processed"] == counts["ready"]

    def begin_iterations(self) -> None:
        """Begin the loaders that are waited for."""
        self._before()
        for loader in self._loaders:
            loader.begin()
