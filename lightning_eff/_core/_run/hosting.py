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
        """This process's global rank."""
        ...

    @property
    def ends_epoch_first(self) -> bool:
        """Whether a resumed run has yet to end the epoch in which its checkpoint was saved."""
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
