"""The training loader: which samples each batch holds, and going on in mid-epoch where a checkpoint left off.

The loader's own order and its use of the global random state stay those of plain Lightning: nothing is reseeded. What is
recorded is the random state (and the sampler's epoch) from which an epoch's iteration began. To resume, the iteration
begins from that state again, the batches already used are passed over, and the global state is left untouched by it. Loaders
that keep their own state (``state_dict``) are resumed from that instead, where their data may be no function of the state
in which an epoch began.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_eff._core import rng
from lightning_eff._core._run.hosting import LoaderHost, Tuner
from lightning_eff._core._run.own_state import (
    begin_epoch,
    finish_epoch,
    generator_in_state,
    has_state,
    keeps_state,
    own_state,
)
from lightning_eff._core._run.recording import RecordingSampler, users_own
from lightning_eff._core._samples.chosen import ChosenBatches

_OWN: tuple[str, ...] = (
    "chosen",
    "tuner",
    "_loader",
    "_host",
    "_recorder",
    "_keeps",
    "_native",
    "_iterator",
    "_waiting",
    "_indices",
    "_position",
    "_iterations",
    "_began",
    "_before_fetch",
    "_own_before",
    "_resume",
)


class ResumableLoader:
    """A training loader as Lightning sees it; everything but iteration is the wrapped loader's own.

    Lightning recognises by ``state_dict`` and ``load_state_dict`` that it can go on in mid-epoch. What cannot be repeated
    exactly: random augmentation inside *persistent* worker processes, whose generators live on from epoch to epoch, and
    samplers that draw from the global random state between batches rather than as they begin. A loader that keeps its own
    state is resumed exactly as far as that goes; the random state of its worker processes is in no such state.

    Args:
        loader: the loader after Lightning has put in its samplers: a ``DataLoader``, or any iterable.
        host: the run; the state of all ranks is gathered through it and saved by rank 0.
        choosable: whether a technique says which samples its epochs have.

    Attributes:
        chosen: what says it; None where nothing does.
        tuner: makes its iterators with other settings; None leaves them to the loader.
    """

    def __init__(self, loader: Any, host: LoaderHost, *, choosable: bool = False) -> None:
        recorder: RecordingSampler | None = None
        chosen: ChosenBatches | None = None
        keeps = keeps_state(loader)
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and not keeps:
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            inner = getattr(loader, name)
            chosen = ChosenBatches(inner, batched=name == "batch_sampler") if choosable else None
            recorder = RecordingSampler(inner if chosen is None else chosen)
            loader.__dict__[name] = recorder  # DataLoader.__setattr__ refuses; undone by `unwrap`
        own: dict[str, Any] = {
            "_loader": loader,
            "_host": host,
            "_recorder": recorder,
            "_native": False,
            "chosen": chosen,
            "_position": 0,
            "_iterations": 0,
        }
        self.__dict__.update({**dict.fromkeys(_OWN), **own})
        self._keeps = keeps
        self.tuner: Tuner | None = None

    # -- the wrapped loader, for everyone else

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
        """End what the wrapped loader keeps of its last iteration: collected as garbage, its workers are waited for in vain."""
        kept = getattr(self._loader, "_iterator", None)
        if kept is not None:
            shut_down(kept)
            self._loader._iterator = None

    @property
    def wrapped(self) -> Any:
        """The loader inside."""
        return self._loader

    def unwrap(self) -> Any:
        """The loader as it was before."""
        if self._recorder is not None:
            name = "sampler" if self._loader.batch_sampler is None else "batch_sampler"
            self._loader.__dict__[name] = users_own(self._recorder)
        return self._loader

    @property
    def indices(self) -> Any:
        """What the sampler emitted for the batch last handed out: a list of dataset indices, or None if not known."""
        return self._indices

    @property
    def weights(self) -> Any:
        """The weights, (B,), that were chosen for the samples of the batch last handed out, or None."""
        return None if self.chosen is None else self.chosen.weights(self._position - 1)

    @property
    def num_samples(self) -> int | None:
        """How many samples the data set has, where :attr:`indices` tells those of each batch; None where it does not."""
        if self._recorder is None or not _has_length(self._loader) or not _has_length(self._loader.dataset):
            return None  # without a length, Lightning fetches a batch ahead of the one that is trained on
        return len(self._loader.dataset)

    # -- samples that are chosen

    @property
    def resuming(self) -> bool:
        """Whether the next iteration goes on where a checkpoint was saved."""
        return self._resume is not None

    @property
    def finished(self) -> bool:
        """Whether the checkpoint was saved at the very end of an epoch."""
        return self._resume is not None and self._resume["began"] is None

    @property
    def finished_batches(self) -> int | None:
        """How many batches the epoch had at the very end of which the checkpoint was saved; None in mid-epoch."""
        state = self._resume
        return state["length"] if state is not None and state["began"] is None else None

    def take_up_chosen(self) -> None:
        """Let the epoch have what the checkpoint says was chosen for it."""
        state = None if self._resume is None else self._resume["chosen"]
        if self.chosen is not None and state is not None:
            with rng.fork():
                self.chosen.plain()  # as the undisturbed run did, for samplers that count
            self.chosen.load_state_dict(state)

    def take_up_samplers(self) -> None:
        """Let samplers draw on as the checkpoint says, before the iteration that follows begins."""
        state = self._resume
        if state is not None:
            self._set_seeds(state)
            self._set_generators(state["generators"])
            self._resume = {**state, "generators": []}  # what they draw from now on is of this run

    def set_epoch(self, number: int) -> None:
        """Tell the samplers the epoch's number, as Lightning does."""
        for sampler in self._epoch_samplers():
            sampler.set_epoch(number)

    # -- iteration

    def __iter__(self) -> Iterator[Any]:
        # The loader's own iterator is made when the first batch is asked for: by then a sampler's epoch is set, and the
        # random state of a resumed run is restored.
        self._waiting = True
        self._position, self._began, self._before_fetch = 0, None, None
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        if self._waiting and self.finished and self._host.ends_epoch_first:
            return  # Lightning fetches ahead of what it has yet to do at the end of the epoch
        if self._waiting:
            self._host.begin_iterations()
        fetches_ahead = not _has_length(self._loader)
        while True:
            state = self._resume
            if fetches_ahead and self._keeps:
                self._own_before = own_state(self._loader)
            if state is not None and state["before_fetch"] is not None:  # this batch had been fetched before the save
                self._before_fetch = state["before_fetch"]
                with rng.fork(self._before_fetch), self._drawing_as_then(state):
                    batch = next(self._iterator)
            else:
                if fetches_ahead:
                    self._before_fetch = rng.capture()
                with self._drawing_as_then(state):
                    batch = self.following() if self.tuner is None else self.tuner.fetch(self.following)
            if state is not None:
                self._resume = None
                self._set_generators(state["generators"])
            if batch is _END:
                return
            self._position += 1
            self._indices = self._recorder.emitted.popleft() if self._recorder is not None else None
            yield batch

    def following(self) -> Any:
        """What the iterator gives next: a batch, or where there is none :data:`_END`."""
        return next(self._iterator, _END)

    def _drawing_as_then(self, state: dict[str, Any] | None) -> AbstractContextManager[Any]:
        """Around the first fetch of a resumed iteration: some loaders make their iterator, and draw for it, only then."""
        if state is None or not self._keeps or state["began"] is None:
            return nullcontext()
        return generator_in_state(self._loader, state["began"]["rng"])

    def begin(self) -> None:
        """Make the loader's iterator if one is waited for, in a resumed epoch at the batch that comes next."""
        if not self._waiting:
            return
        self._waiting = False
        state = self._resume
        if state is not None:
            self._iterations = state["iterations"]
            self._set_seeds(state)
        own = None if state is None else state.get("loader")
        if state is None or state["began"] is None:
            if state is not None:
                self._set_generators(state["generators"])
                self._resume = None
            if own is not None:
                finish_epoch(self._loader, own)
            elif self._keeps and not self._native:
                begin_epoch(self._loader)
            self._native = False
            self._began = {
                "rng": rng.capture(),
                "generators": [g.get_state() for g in self._generators()],
                "epochs": [getattr(s, "epoch", None) for s in self._epoch_samplers()],
            }
            self._iterator = self._begin()
            return
        self._began = state["began"]
        self._iterations -= 1
        self._position = state["position"]
        self._begin_again(state["sampler_began"], own)
        if state["before_fetch"] is None and not self._keeps:
            self._set_generators(state["generators"])
            self._resume = None

    def begin_again(self, *, skip: bool) -> None:
        """In mid-epoch, let a new iterator go on with the batch that comes next; the global random state stays.

        Args:
            skip: whether its sampler leaves out what has been used, so that worker processes make none of it: for iterators
                with workers, over data that draws no random numbers and keeps no state.
        """
        shut_down(self._iterator)
        if getattr(self._loader, "persistent_workers", False):
            self._loader._iterator = None
        self._iterations -= 1
        began = None
        if self._recorder is not None:
            self._recorder.pass_over, began = self._position if skip else 0, self._recorder.began
        self._begin_again(began, None, skip=skip)

    def _begin_again(
        self, sampler_began: dict[str, Any] | None, own: dict[str, Any] | None, *, skip: bool = False
    ) -> None:
        """Make an iterator as the epoch's was made, and bring it to the position."""
        began = self._began
        assert began is not None
        for sampler, epoch in zip(self._epoch_samplers(), began["epochs"], strict=False):
            if epoch is not None:
                sampler.set_epoch(epoch)
        self._set_generators(began["generators"])
        with rng.fork(began["rng"]):
            if self._recorder is not None:
                self._recorder.begin_from = sampler_began
            if own is not None:
                self._loader.load_state_dict(own)
                with generator_in_state(self._loader, began["rng"]):
                    self._iterator = self._begin()
                return
            self._iterator = self._begin()
            if not skip:
                self._pass_over(self._iterator, self._position)

    def _begin(self) -> Iterator[Any]:
        """``iter(loader)``, drawing from the random state what it would draw in an undisturbed run."""
        loader, first = self._loader, self._iterations == 0
        self._iterations += 1

        def begin() -> Iterator[Any]:
            if first or not getattr(loader, "persistent_workers", False) or loader._iterator is not None:
                return iter(loader)
            with self._without_seed():  # undisturbed, the workers of the first epoch would live, and no seed be drawn
                return iter(loader)

        return begin() if self.tuner is None else self.tuner.make(begin)

    @contextmanager
    def _without_seed(self) -> Iterator[None]:
        """The seed of worker processes is drawn from a generator of its own."""
        generator = self._loader.generator
        self._loader.generator = torch.Generator()
        try:
            yield
        finally:
            self._loader.generator = generator

    def _pass_over(self, iterator: Iterator[Any], count: int) -> None:
        """Bring ``iterator`` to where it has handed out ``count`` batches."""
        single = self._recorder is not None and getattr(iterator, "_num_workers", None) == 0
        for _ in range(count):
            if single:  # indices alone: samples are made from the global state, which is restored by itself
                iterator._next_index()  # pyright: ignore[reportAttributeAccessIssue]
            else:  # worker processes and iterable data sets hold state of their own: run them through
                next(iterator)
            if self._recorder is not None:
                self._recorder.emitted.popleft()

    def _samplers(self) -> list[Any]:
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        found = [getattr(self._loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
        return [users_own(sampler) for sampler in found if sampler is not None]

    def _epoch_samplers(self) -> list[Any]:
        return list({id(s): s for s in self._samplers() if callable(getattr(s, "set_epoch", None))}.values())

    def _generators(self) -> list[torch.Generator]:
        found = [getattr(owner, "generator", None) for owner in (self._loader, *self._samplers())]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def _set_seeds(self, state: dict[str, Any]) -> None:
        for sampler, seed in zip(self._epoch_samplers(), state["seeds"], strict=False):
            if seed is not None:  # a distributed sampler's, which Lightning takes from the process's seed
                sampler.seed = seed

    def _set_generators(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators(), states, strict=False):
            generator.set_state(state)

    def __len__(self) -> int:
        return len(self._loader)

    # -- saved with the run

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration is, for every rank."""
        ahead = self._host.batches_ahead()
        began = None if self._host.epoch_complete() else self._began
        otherwise = self.tuner is not None and self.tuner.otherwise and began is not None
        state = {
            "position": max(self._position - ahead, 0),
            "iterations": self._iterations,
            "seeds": [getattr(sampler, "seed", None) for sampler in self._epoch_samplers()],
            # where samplers were asked further ahead than the user's setting asks, repeating them tells where they are
            "generators": [] if otherwise else [g.get_state() for g in self._generators()],
            "began": began,
            "sampler_began": self._recorder.began if self._recorder is not None else None,
            "before_fetch": self._before_fetch if ahead else None,
            "chosen": None if self.chosen is None else self.chosen.state_dict(),
            "length": len(self) if self.chosen is not None else None,
            "loader": self.own_state(),
        }
        return {"ranks": self._host.gather(state)}

    @property
    def has_state(self) -> bool:
        """Whether the wrapped loader has a state of its own."""
        return has_state(self._loader)

    def own_state(self) -> dict[str, Any] | None:
        """What the wrapped loader tells of itself, before the batch that Lightning may have fetched ahead; None if unknown."""
        if not self._keeps:
            return None
        return self._own_before if self._host.batches_ahead() else own_state(self._loader)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there at the next ``iter``."""
        if "ranks" not in state:  # the loader's own, as a plain Trainer saves it
            self.unwrap()
            self._recorder, self._keeps, self._native = None, True, True
            self._loader.load_state_dict(state)
            return
        ranks, rank = state["ranks"], self._host.rank
        found = ranks[rank] if rank < len(ranks) else None
        if found is not None and (found.get("chosen") is None) != (self.chosen is None) and found["began"] is not None:
            found = None  # its epoch had other samples: the position in it says nothing
        self._resume = found


_END = object()


def shut_down(iterator: Any) -> None:
    """End the worker processes of an iterator, if it has any."""
    stop = getattr(iterator, "_shutdown_workers", None)
    if callable(stop):
        stop()


def _has_length(loader: Any) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True
