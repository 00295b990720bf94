"""The training loader: which samples each batch holds, and going on in mid-epoch where a checkpoint left off.

The loader's own order and its use of the global random state stay those of plain Lightning: nothing is reseeded. What is
recorded is the random state (and the sampler's epoch) from which an epoch's iteration began. To resume, the iteration
begins from that state again, the batches already used are passed over, and the global state is left untouched by it.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset

from lightning_eff._core import rng


class RecordingSampler:
    """A sampler or batch sampler that remembers the indices it emitted, in order, until they are asked for."""

    def __init__(self, inner: Iterable[Any]) -> None:
        self.inner = inner
        self.emitted: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        self.emitted.clear()
        for index in self.inner:
            self.emitted.append(index)
            yield index

    def __len__(self) -> int:
        return len(self.inner)  # pyright: ignore[reportArgumentType]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("inner", "emitted"):
            raise AttributeError(name)
        return getattr(self.inner, name)


_OWN = ("_loader", "_position", "_began", "_resume", "_indices", "_recorder", "_host")


class LoaderHost(Protocol):
    """What a loader asks of the run it belongs to."""

    @property
    def rank(self) -> int:
        """This process's global rank."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, in rank order, on every rank."""
        ...

    def batches_ahead(self) -> int:
        """How many batches Lightning has fetched and not yet trained on."""
        ...

    def before_first_fetch(self) -> None:
        """Called before an iteration's first batch is made."""
        ...


class ResumableLoader:
    """A training loader as Lightning sees it; everything but iteration is the wrapped loader's own.

    Lightning recognises ``state_dict`` and ``load_state_dict`` and saves them with its loops.

    Args:
        loader: the loader after Lightning has put in its samplers: a ``DataLoader``, or any iterable.
        host: the run; the state of all ranks is gathered through it and saved by rank 0.
    """

    def __init__(self, loader: Any, host: LoaderHost) -> None:
        recorder: RecordingSampler | None = None
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            recorder = RecordingSampler(getattr(loader, name))
            loader.__dict__[name] = recorder  # DataLoader.__setattr__ refuses; undone by `unwrap`
        self.__dict__.update(
            _loader=loader,
            _position=0,
            _began=None,
            _resume=None,
            _indices=None,
            _recorder=recorder,
            _host=host,
        )

    # -- the wrapped loader, for everyone else

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            self.__dict__[name] = value
        else:
            setattr(self._loader, name, value)

    def unwrap(self) -> Any:
        """The loader as it was before."""
        if self._recorder is not None:
            name = "sampler" if self._loader.batch_sampler is None else "batch_sampler"
            self._loader.__dict__[name] = self._recorder.inner
        return self._loader

    @property
    def indices(self) -> Any:
        """What the sampler emitted for the batch last handed out: a list of dataset indices, or None if not known."""
        return self._indices

    # -- iteration

    def __iter__(self) -> Iterator[Any]:
        # The loader's own iterator is made when the first batch is asked for: by then a sampler's epoch is set, and the
        # random state of a resumed run is restored.
        state, self._resume = self._resume, None
        self._position, self._began = 0, None
        return self._iterate(state)

    def _iterate(self, state: dict[str, Any] | None) -> Iterator[Any]:
        self._host.before_first_fetch()
        if state is None:
            self._began = {"rng": rng.capture(), "epochs": [getattr(s, "epoch", None) for s in self._epoch_samplers()]}
            iterator = iter(self._loader)
        else:
            self._began = state["began"]
            for sampler, epoch in zip(self._epoch_samplers(), self._began["epochs"], strict=False):
                if epoch is not None:
                    sampler.set_epoch(epoch)
            with rng.fork(self._began["rng"]):
                iterator = iter(self._loader)
                self._pass_over(iterator, state["position"])
            self._position = state["position"]
        for batch in iterator:
            self._position += 1
            self._indices = self._recorder.emitted.popleft() if self._recorder is not None else None
            yield batch

    def _pass_over(self, iterator: Iterator[Any], count: int) -> None:
        """Bring ``iterator`` to where it has handed out ``count`` batches."""
        single = self._recorder is not None and self._loader.num_workers == 0
        for _ in range(count):
            if single:  # indices alone: samples are made from the global state, which is restored by itself
                iterator._next_index()  # pyright: ignore[reportAttributeAccessIssue]
            else:  # worker processes and iterable data sets hold state of their own: run them through
                next(iterator)
            if self._recorder is not None:
                self._recorder.emitted.popleft()

    def _epoch_samplers(self) -> list[Any]:
        sampler = getattr(self._loader, "sampler", None)
        nested = getattr(getattr(self._loader, "batch_sampler", None), "sampler", None)
        found = {id(s): s for s in (sampler, nested) if callable(getattr(s, "set_epoch", None))}
        return list(found.values())

    def __len__(self) -> int:
        return len(self._loader)

    # -- saved by Lightning with its loops

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration is, for every rank."""
        position = max(self._position - self._host.batches_ahead(), 0)
        return {"ranks": self._host.gather({"position": position, "began": self._began})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there at the next ``iter``, unless that epoch was complete."""
        ranks, rank = state.get("ranks", []), self._host.rank
        own = ranks[rank] if rank < len(ranks) else None
        if own is None or own["began"] is None or own["position"] == 0:
            return
        try:
            complete = own["position"] >= len(self)
        except TypeError:  # no length: the data set tells only by running out
            complete = False
        self._resume = None if complete else own
