"""A proxy of a user's training loader that records its sampler."""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_eff._core._loaders.batch_indices import MadeBatches, Watched
from lightning_eff._core._loaders.batch_order import (
    Pieces,
    has_length,
    holders,
    iterates_itself,
    put_sampler,
    record,
    sampler_name,
    shut_down,
)
from lightning_eff._core._run.recording_sampler import RecordingSampler, users_own
from lightning_eff._core._run.stateful_loaders import has_state, keeps_state
from lightning_eff._core._samples.chosen import ChosenBatches, as_list

_OWN: tuple[str, ...] = (
    "chosen",
    "tuner",
    "_loader",
    "_host",
    "_recorder",
    "_made",
    "_watched",
    "_pieces",
    "_direct",
    "_draws",
    "_keeps",
    "_native",
    "_repeats",
    "_iterator",
    "_waiting",
    "_origin",
    "_position",
    "_iterations",
    "_began",
    "_asks",
    "_ended",
    "_redo",
    "_sketches",
    "_resume",
)


class LoaderProxy:
    """A loader whose sampler is recorded. Everything except iteration is the loader's own.

    Args:
        loader: the loader after Lightning has put in its samplers, a ``DataLoader`` or any iterable.
        choosable: whether a technique chooses the samples of its epochs.

    Attributes:
        chosen: the sampler of chosen samples, or None.
    """

    _recorder: RecordingSampler | None
    _made: MadeBatches | None
    _origin: tuple[Any, int] | None
    chosen: ChosenBatches | None

    def __init__(self, loader: Any, *, choosable: bool) -> None:
        self.__dict__.update({**dict.fromkeys(_OWN), "_loader": loader, "_watched": []})
        self._keeps = keeps_state(loader)
        self._pieces = Pieces(loader)
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and not self._keeps:
            inner = users_own(getattr(loader, sampler_name(loader)))
            if choosable:
                data: Any = loader.dataset
                size = len(data) if has_length(data) else 0
                self.chosen = ChosenBatches(inner, batched=loader.batch_sampler is not None, size=size)
            sources = holders(loader)
            self._recorder = record(sources, inner if self.chosen is None else self.chosen, self._pieces.epochs)
            if iterates_itself(loader):
                self._made = MadeBatches()
                self._watched = [Watched(holder, self._made) for holder in sources]

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_iterator" and value is None:  # Lightning's own, at the end of a run
            self._end_workers()
        if name in _OWN:
            self.__dict__[name] = value
        else:
            setattr(self._loader, name, value)

    def _end_workers(self) -> None:
        """Shut down the workers of the last iteration, because waiting for them at garbage collection would hang."""
        kept = getattr(self._loader, "_iterator", None)
        if kept is not None:
            shut_down(kept)
            self._loader._iterator = None

    @property
    def wrapped(self) -> Any:
        """The loader inside."""
        return self._loader

    def unwrap(self) -> Any:
        """Restore and return the original loader."""
        loader = self._loader
        if self._recorder is not None:
            own = users_own(self._recorder)
            for holder in holders(loader):
                put_sampler(holder, own)
        for watched in self._watched:
            watched.remove()
        self._watched, self._made = [], None
        iterator = self.__dict__["_iterator"]
        if iterator is not None and iterator is not getattr(loader, "_iterator", None):
            shut_down(iterator)  # its workers, but not the loader's persistent ones
        self.__dict__["_iterator"] = None
        return loader

    @property
    def indices(self) -> Any:
        """The data set indices of the last batch, as a list (one index without batches), or None if they are unknown."""
        return None if self._origin is None else as_list(self._origin[0])

    @property
    def weights(self) -> Any:
        """The chosen weights, (B,), of the samples of the last batch, or None."""
        return None if self.chosen is None or self._origin is None else self.chosen.weights(self._origin[1])

    @property
    def num_samples(self) -> int | None:
        """The number of samples in the data set, or None if the :attr:`indices` of batches are unknown."""
        if self._recorder is None or not has_length(self._loader) or not has_length(self._loader.dataset):
            return None  # without a length, Lightning fetches one batch ahead
        return len(self._loader.dataset)

    @property
    def iterates_itself(self) -> bool:
        """Whether the user's own code determines the iteration."""
        return iterates_itself(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def has_state(self) -> bool:
        """Whether the wrapped loader has its own state."""
        return has_state(self._loader)

    @property
    def iterations(self) -> int:
        """The number of iterations that the loader has begun in this run."""
        return self._iterations

    @property
    def uses_sampler(self) -> bool:
        """Whether an iteration has taken indices from the loader's sampler."""
        return self._recorder is not None and self._recorder.emissions > 0
