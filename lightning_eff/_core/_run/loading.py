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
        taken_by: the technique that says which samples an epoch has, if one does.
        told_to: a technique that must know which samples each step has, if one does.
        take: checks a loader before it is wrapped; set by that technique.
        tune: told of each loader as it is wrapped; set by the technique that chooses its settings.
        take_up_rng: called before the loaders begin an iteration, or a sampler does.
        ends_epoch_first: the epoch that a resumed run goes on with is over for loaders that gave its last batch.

    Args:
        trainer: the trainer.
        gather: ``value`` of every rank, in rank order, on every rank.
        take_up_rng: see above.
    """

    def __init__(self, trainer: Trainer, gather: Callable[[Any], list[Any]], take_up_rng: Callable[[], None]) -> None:
        self.rank = trainer.global_rank
        self.states: list[dict[str, Any]] = []
        self.taken_by = ""
        self.told_to = ""
        self.take: Callable[[Any, bool], None] | None = None
        self.tune: Callable[[ResumableLoader], None] | None = None
        self.take_up_rng = take_up_rng
        self.ends_epoch_first = False
        self._trainer, self._gather = trainer, gather
        self._loaders: list[ResumableLoader] = []
        self._asking = self._another = False

    def asking(self, setup_data: Callable[[], None]) -> Callable[[], None]:
        """The fit loop's ``setup_data``, known to be under way: what it asks the strategy for are training loaders.

        Lightning's tuners ask for those of validation while the trainer is in training, and anew for those of training.
        """

        def asking_setup_data() -> None:
            self._asking = self._another = True
            try:
                setup_data()
            finally:
                self._asking = False

        return asking_setup_data

    def wrap(self, process: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The strategy's ``process_dataloader``, with a :class:`ResumableLoader` around what trains."""

        def process_dataloader(dataloader: Any) -> Any:
            dataloader = process(dataloader)
            if not self._asking:
                return dataloader
            if self._another:
                self._begin_round()
            if self.take is not None:
                self.take(dataloader, not self._loaders)
            loader = ResumableLoader(dataloader, self, choosable=self.take is not None)
            if len(self._loaders) < len(self.states):
                loader.load_state_dict(self.states[len(self._loaders)])
            self._loaders.append(loader)
            if self.tune is not None:
                self.tune(loader)
            return loader

        return process_dataloader

    def _begin_round(self) -> None:
        """Let go of the loaders of before, where Lightning or one of its tuners loads them anew."""
        self._another = False
        if self._loaders:
            self.unwrap()
            self.states = []

    def take_up(self, states: list[dict[str, Any]]) -> None:
        """Go on from what a checkpoint says: loaders to come, and those that a strategy has asked for before it is restored."""
        self.states = states
        for loader, state in zip(self._loaders, states, strict=False):
            loader.load_state_dict(state)

    def unwrap(self) -> None:
        """Put the user's loaders back as they were."""
        for loader in self._loaders:
            loader.unwrap()
        self._loaders = []

    @property
    def indices(self) -> Any:
        """The data set indices of the current batch's samples (a list), or None where the loader does not tell."""
        return self._loaders[0].indices if len(self._loaders) == 1 else None

    @property
    def num_samples(self) -> int | None:
        """How many samples the data set has, or None where it cannot be told which of them a batch has."""
        return self._loaders[0].num_samples if len(self._loaders) == 1 else None

    @property
    def weights(self) -> Any:
        """The weights of the current batch's samples, (B,), or None."""
        return self._loaders[0].weights if len(self._loaders) == 1 else None

    @property
    def latest(self) -> ResumableLoader | None:
        """The loader that was wrapped last."""
        return self._loaders[-1] if self._loaders else None

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
        self.take_up_rng()
        for loader in self._loaders:
            loader.begin()

    def states_in(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """Take the loaders' states out of what Lightning saves of its loop, and leave what a plain Trainer would save.

        That is nothing, since it would refuse states of loaders that keep none, unless all that do tell theirs.
        """
        states = state.pop("combined_loader", [])
        own = [loader.own_state() for loader in self._loaders if loader.has_state]
        if own and None not in own:
            state["combined_loader"] = own
        return states

    @property
    def alone(self) -> bool:
        """Whether there is one training loader."""
        return len(self._loaders) == 1
