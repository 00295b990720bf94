"""The interfaces through which a training loader reaches its run."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol


class Tuner(Protocol):
    """Creates a loader's iterators with other settings, and observes their batches."""

    @property
    def otherwise(self) -> bool:
        """Whether the current iterator was created with other settings than the loader has."""
        ...

    def make(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return an iterator, created by ``begin()``."""
        ...

    def fetch(self, following: Callable[[], Any]) -> Any:
        """Return the batch of ``following()``, or another iterator's in its place."""
        ...


class LoaderHost(Protocol):
    """The run as its loaders see it."""

    @property
    def rank(self) -> int:
        """The rank whose state in a checkpoint this process restores."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Return ``value`` of every rank, in rank order, on every rank."""
        ...

    def batches_ahead(self) -> int:
        """Return how many batches Lightning has fetched and not yet trained on."""
        ...

    def epoch_complete(self) -> bool:
        """Return whether the last batch of the epoch has been trained on."""
        ...

    def begin_iterations(self) -> None:
        """Call :meth:`ResumableLoader.begin` on all the run's loaders, in the order of plain Lightning."""
        ...

    def resume_rng(self) -> None:
        """Restore the random state of a resumed run, if still due."""
        ...

    def check_choice(self, loader: Any) -> None:
        """Raise ``ValueError`` if the chosen samples do not reach the batches of ``loader``."""
        ...

    def consumed(self, loader: Any) -> bool:
        """Return whether ``loader`` has ended once in this epoch, and Lightning cycles it together with longer ones."""
        ...

    @property
    def alone(self) -> bool:
        """Whether there is one training loader."""
        ...

    @property
    def started(self) -> bool:
        """Whether training has started, with the state of a checkpoint restored."""
        ...

    @property
    def waits(self) -> bool:
        """Whether iterators begin only when training has started, because the checkpoint was saved before it had loaders."""
        ...

    @property
    def looks_ahead(self) -> bool:
        """Whether Lightning fetches one batch ahead, because the epoch has no known length."""
        ...

    @property
    def reloaded(self) -> int | None:
        """The epoch in which the loaders were loaded."""
        ...
