"""The training loaders of one run: wrapped when Lightning loads them, started together, and restored at the end."""

from collections.abc import Callable
from copy import copy
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader

from lightning_eff._core.loaders import ResumableLoader
from lightning_eff._core.progress import in_flight


class TrainLoaders:
    """The host of the run's :class:`ResumableLoader` objects.

    Args:
        trainer: the trainer.
        gather: returns ``value`` of every rank, in rank order, on every rank.
        take_up_rng: see the attribute.

    Attributes:
        rank: the rank whose state in a checkpoint this process restores: its own, unless the layout changed.
        states: the loaders' states in a checkpoint, in order. They are restored when the loaders are wrapped.
        taken_by: the technique that chooses the samples of an epoch, or "".
        told_to: a technique that must know the samples of each step, or "".
        keep: called with each loader before it is wrapped; set by the technique that keeps its samples.
        take: checks a loader before it is wrapped; set by the technique that chooses.
        tune: called with each wrapped loader; set by the technique that chooses its settings.
        take_up_rng: called before the loaders or a sampler begin an iteration.
        started: whether training has begun, and a resumed run has its random state.
        waits: whether iterators begin only when training has started.
    """

    def __init__(self, trainer: Trainer, gather: Callable[[Any], list[Any]], take_up_rng: Callable[[], None]) -> None:
        self.rank = trainer.global_rank
        self.states: list[dict[str, Any]] = []
        self.taken_by = ""
        self.told_to = ""
        self.keep: Callable[[Any], None] | None = None
        self.take: Callable[[Any, bool], None] | None = None
        self.tune: Callable[[ResumableLoader], None] | None = None
        self.take_up_rng = take_up_rng
        self.started = self.waits = False
        self._trainer, self._gather = trainer, gather
        self._loaders: list[ResumableLoader] = []
        self._past: list[ResumableLoader] = []  # unwrapped loaders, for a checkpoint that is saved after the run
        self._users: list[Any] = []  # the user's loaders, in order
        self._combined: CombinedLoader | None = None
        self._iterations: dict[int, int] = {}
        self._asking = self._reloaded = False

    def asking(self, setup_data: Callable[[], None]) -> Callable[[], None]:
        """Wrap the fit loop's ``setup_data``, so that the loaders it requests from the strategy are known to be for training.

        Lightning's tuners also request validation loaders while the trainer is in training, and training loaders again.
        """
        loop = self._trainer.fit_loop

        def asking_setup_data() -> None:
            if loop._combined_loader is not None and not loop._should_reload_train_dl:
                return
            begun = self._begin_round()
            self._asking = True
            try:
                setup_data()
            finally:
                self._asking = False
                self._combined = loop._combined_loader
            epochs = [loader.reloaded for loader in self._loaders if loader.reloaded is not None]
            if epochs:  # Lightning counts from the epoch in which the run resumes
                loop._last_train_dl_reload_epoch = epochs[0]
            self._reloaded = begun and self.started

        return asking_setup_data

    def beginning(self, on_run_start: Callable[[Any], None]) -> Callable[[Any], None]:
        """Wrap the epoch loop's ``on_run_start`` to create iterators in a resumed run where an uninterrupted one does."""
        loop = self._trainer.fit_loop

        def beginning_on_run_start(data_fetcher: Any) -> None:
            epoch = loop.epoch_loop
            if loop.is_resuming and self.started:
                finished = any(loader.finished and loader.chosen is None for loader in self._loaders)
                if finished and epoch.restarted_on_train_batch_end and epoch.batch_progress.is_last_batch:
                    # Lightning resets these counts only if it knows the epoch's length
                    epoch.batch_progress.reset_on_run()
                    epoch.scheduler_progress.reset_on_run()
                    epoch.automatic_optimization.optim_progress.reset_on_run()
                    epoch.val_loop.batch_progress.total.reset()
                if (finished or self._reloaded) and epoch.batch_progress.current.state_dict()["ready"] == 0:
                    iter(data_fetcher)
            self._reloaded = False
            on_run_start(data_fetcher)

        return beginning_on_run_start

    def wrap(self, process: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap the strategy's ``process_dataloader`` to put a :class:`ResumableLoader` around each training loader."""

        def process_dataloader(dataloader: Any) -> Any:
            dataloader = process(dataloader)
            if not self._asking:
                return dataloader
            if self.keep is not None:
                self.keep(dataloader)
            if self.take is not None:
                self.take(dataloader, not self._loaders)
            # a loader that is used twice has a separate position in each place
            again = any(dataloader is user for user in self._users)
            loader = ResumableLoader(
                _twin(dataloader) if again else dataloader,
                self,
                choosable=self.take is not None,
                iterations=self._iterations.get(id(dataloader), 0),
            )
            if len(self._loaders) < len(self.states):
                loader.load_state_dict(self.states[len(self._loaders)])
            self._loaders.append(loader)
            self._users.append(dataloader)
            if self.tune is not None:
                self.tune(loader)
            return loader

        return process_dataloader

    def _begin_round(self) -> bool:
        """Release the previous loaders when Lightning or a tuner loads them again; return False if there are none."""
        if not self._loaders:
            return False
        for loader in self._loaders:
            loader.go_on_after_epoch()
        self._iterations = {
            id(user): loader.iterations for user, loader in zip(self._users, self._loaders, strict=True)
        }
        self.unwrap()
        self.states = []
        return True

    def take_up(self, states: list[dict[str, Any]], rank: int) -> None:
        """Restore the states of ``rank`` from a checkpoint, in future loaders and in those already requested."""
        self.states, self.rank = states, rank
        self.waits = not states  # the checkpoint was saved before there were loaders, as by Lightning's tuners
        for loader, state in zip(self._loaders, states, strict=False):
            loader.load_state_dict(state)
        for loader in self._loaders[len(states) :]:  # a Lightning tuner began it, from another random state
            loader.wait()
        fetcher = self._trainer.fit_loop._data_fetcher
        if self._loaders and fetcher is not None and getattr(fetcher, "batches", None):
            iter(fetcher)  # the batch fetched ahead belongs to another epoch

    def unwrap(self) -> None:
        """Restore the user's loaders."""
        for loader in reversed(self._loaders):
            loader.unwrap()
        combined, users = self._combined, self._users
        if combined is None:
            combined = self._trainer.fit_loop._combined_loader
        if combined is not None and len(combined.flattened) == len(users):
            combined.flattened = [
                user if held is loader else held
                for held, loader, user in zip(combined.flattened, self._loaders, users, strict=True)
            ]
        self._past = self._loaders
        self._loaders, self._users, self._combined = [], [], None

    @property
    def indices(self) -> Any:
        """The data set indices of the current batch's samples (a list), or None if the loader does not provide them."""
        return self._loaders[0].indices if len(self._loaders) == 1 else None

    @property
    def num_samples(self) -> int | None:
        """The number of samples in the data set, or None if the samples of a batch are unknown."""
        return self._loaders[0].num_samples if len(self._loaders) == 1 else None

    @property
    def weights(self) -> Any:
        """The weights of the current batch's samples, (B,), or None."""
        return self._loaders[0].weights if len(self._loaders) == 1 else None

    @property
    def weighted(self) -> bool:
        """Whether a technique weighted the samples of this epoch, even if the current batch's weights are unknown."""
        return any(loader.chosen is not None and loader.chosen.weighted for loader in self._loaders)

    @property
    def latest(self) -> ResumableLoader | None:
        """The loader that was wrapped last, or None."""
        return self._loaders[-1] if self._loaders else None

    # -- the interface for loaders

    def gather(self, value: Any) -> list[Any]:
        """Return ``value`` of every rank, in rank order, on every rank."""
        return self._gather(value)

    def batches_ahead(self) -> int:
        """Return how many batches Lightning has fetched and not yet trained on."""
        return len(getattr(self._trainer.fit_loop._data_fetcher, "batches", [])) + in_flight(self._trainer)

    def epoch_complete(self) -> bool:
        """Return whether the last batch of the epoch has been trained on."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        counts = progress.current.state_dict()
        return progress.is_last_batch and counts["processed"] == counts["ready"]

    def begin_iterations(self) -> None:
        """Begin the iterations that are still due."""
        self.resume_rng()
        cycled = getattr(getattr(self._trainer.fit_loop._combined_loader, "_iterator", None), "_consumed", [])
        for place, loader in enumerate(self._loaders):
            if loader.consumed and place < len(cycled):
                cycled[place] = True
            loader.begin()

    def resume_rng(self) -> None:
        """Restore the random state of a resumed run once it trains."""
        if self.started:
            self.take_up_rng()

    def consumed(self, loader: Any) -> bool:
        """Return whether ``loader`` has ended once in this epoch, and Lightning cycles it together with longer ones."""
        cycled = getattr(getattr(self._trainer.fit_loop._combined_loader, "_iterator", None), "_consumed", [])
        place = next((i for i, mine in enumerate(self._loaders) if mine is loader), len(cycled))
        return bool(cycled[place]) if place < len(cycled) else False

    @property
    def looks_ahead(self) -> bool:
        """Whether Lightning fetches one batch ahead, because the epoch has no known length."""
        fetcher = self._trainer.fit_loop._data_fetcher
        return fetcher is not None and fetcher.length is None

    @property
    def reloaded(self) -> int | None:
        """The epoch in which the loaders were loaded."""
        epoch = self._trainer.fit_loop._last_train_dl_reload_epoch
        return int(epoch) if epoch >= 0 else None

    def check_choice(self, loader: Any) -> None:
        """Raise ``ValueError`` if the chosen samples do not reach the batches of ``loader``."""
        if loader.uses_sampler:
            return
        kind = type(loader.wrapped).__name__
        raise ValueError(
            f"{self.taken_by}: {kind}.__iter__ does not take its batches from the loader's own sampler, so the chosen samples"
            f" do not reach the training. Pass a plain torch.utils.data.DataLoader, or remove {self.taken_by}."
        )

    @property
    def why_unknown(self) -> str:
        """Why the indices of the current batch are unknown, as a clause for a message."""
        if len(self._loaders) != 1:
            return f"the run has {len(self._loaders)} training loaders, and indices are known only with one"
        loader = self._loaders[0].wrapped
        if self._loaders[0].iterates_itself:
            return (
                f"{type(loader).__name__}.__iter__ does not yield the batch objects of its DataLoader, but for example"
                " merged, copied or changed batches"
            )
        return f"the training loader ({type(loader).__name__}) does not load its batches by sampled indices"

    def states_in(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """Remove and return the loaders' states in Lightning's loop ``state``, and leave there what a plain Trainer would save.

        A plain Trainer refuses states of loaders that keep none. So it gets the loaders' own states only if all of them have
        one.
        """
        states = state.pop("combined_loader", [])
        if not self._loaders:
            states = [loader.state_dict() for loader in self._past]
        own = [loader.own_state() for loader in (self._loaders or self._past) if loader.has_state]
        if own and None not in own:
            state["combined_loader"] = own
        return states

    @property
    def alone(self) -> bool:
        """Whether there is one training loader."""
        return len(self._loaders) == 1


def _twin(loader: Any) -> Any:
    """Return a loader over the same data and samplers, without this package's changes."""
    twin = copy(loader)
    getattr(twin, "__dict__", {}).pop("_get_iterator", None)
    return twin
