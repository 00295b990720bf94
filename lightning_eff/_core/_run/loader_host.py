"""What a training loader asks of those around it."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol


class Tuner(Protocol):
    """What makes a loader's iterators with other settings, and looks at what they give."""

    @property
    def otherwise(self) -> bool:
        """Whether the iterator in use is made with other settings than the loader has."""
        ...

    def make(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """An iterator, by ``begin()``."""
        ...

    def fetch(self, following: Callable[[], Any]) -> Any:
        """The batch that ``following()`` gives, or another iterator's in its place."""
        ...


class LoaderHost(Protocol):
    """What a loader asks of the run it belongs to."""

    @property
    def rank(self) -> int:
        """The rank whose state in a checkpoint this process takes up."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, in rank order, on every rank."""
        ...

    def batches_ahead(self) -> int:
        """How many batches Lightning has fetched and not yet trained on."""
        ...

    def epoch_complete(self) -> bool:
        """Whether the last batch of the epoch has been trained on."""
        ...

    def begin_iterations(self) -> None:
        """Call :meth:`ResumableLoader.begin` of all the run's loaders, in their order, as plain Lightning begins them."""
        ...

    def resume_rng(self) -> None:
        """Take up the random state of a resumed run, if that has not been done."""
        ...

    def check_choice(self, loader: Any) -> None:
        """Raise ``ValueError`` if the samples that were chosen do not reach the batches of ``loader``."""
        ...

    def consumed(self, loader: Any) -> bool:
        """Whether ``loader`` has ended once in this epoch, and Lightning cycles it beside longer ones."""
        ...

    @property
    def started(self) -> bool:
        """Whether the run has taken up what a checkpoint says, and trains."""
        ...

    @property
    def waits(self) -> bool:
        """Whether iterators begin only once the run has started, because the checkpoint was saved before it had loaders."""
        ...

    @property
    def looks_ahead(self) -> bool:
        """Whether Lightning fetches a batch ahead of the one that is trained on, since the epoch has no known length."""
        ...

    @property
    def reloaded(self) -> int | None:
        """The epoch in which the loaders were loaded."""
        ...
