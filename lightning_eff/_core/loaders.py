"""The training loader: which samples each batch holds, and resuming mid-epoch from a checkpoint.

The loader's order and its use of the global random state stay those of plain Lightning: nothing is reseeded, and iterators
are created when plain Lightning creates them. A checkpoint records the random state and the sampler's epoch from which the
epoch's iteration began. A resumed run starts the iteration from this state and skips the used batches, without changing the
global state. A loader with its own ``state_dict`` resumes from that instead where the recorded state may not determine
its data, unless its state turns out not to determine them either.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import deepcopy
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_eff._core import rng
from lightning_eff._core._loaders.asked import Asked, Latest, own_before, packed, unpacked
from lightning_eff._core._loaders.batch_indices import fetched, is_direct, sketch
from lightning_eff._core._loaders.batch_order import begin_workers, iterates_itself, shut_down
from lightning_eff._core._loaders.draws import Draws
from lightning_eff._core._loaders.own_state import END, OwnStateLoader
from lightning_eff._core._run.loader_host import LoaderHost, Tuner
from lightning_eff._core._run.stateful_loaders import (
    begin_epoch,
    finish_epoch,
    generator_in_state,
    is_nodes,
    is_torchdata,
    stop_threads,
)


class ResumableLoader(OwnStateLoader):
    """A training loader as Lightning sees it; everything but iteration comes from the wrapped loader.

    Lightning recognises by ``state_dict`` and ``load_state_dict`` that it can resume mid-epoch. Two kinds of loaders cannot be
    repeated exactly. The first has random augmentation in *persistent* worker processes, whose generators outlive an epoch. The
    second has its own iteration, with state that is not in plain numbers. A resumed run warns about it.

    Args:
        loader: the loader after Lightning has injected its samplers: a ``DataLoader``, or any iterable.
        host: the run. It gathers the state of all ranks, and rank 0 saves it.
        choosable: whether a technique chooses the samples of each epoch.
        iterations: how many iterations the same loader object has begun in this run.

    Attributes:
        chosen: the choice of samples, or None.
        tuner: creates the iterators with other settings, or None.
    """

    def __init__(self, loader: Any, host: LoaderHost, *, choosable: bool = False, iterations: int = 0) -> None:
        super().__init__(loader, choosable=choosable)
        self._host, self._iterations = host, iterations
        self._position, self._waiting, self._ended = 0, False, False
        self._asks = Latest()
        self._sketches: deque[list[float]] = deque(maxlen=4)
        self._redo: deque[dict[str, Any]] = deque()
        self._draws = Draws(watch=False)
        self.tuner: Tuner | None = None

    # -- chosen samples

    @property
    def resuming(self) -> bool:
        """Whether the next iteration continues from a checkpoint."""
        return self._resume is not None

    @property
    def finished(self) -> bool:
        """Whether the checkpoint was saved at the end of an epoch, so that the next iteration begins another."""
        return self._resume is not None and self._resume["began"] is None

    @property
    def finished_batches(self) -> int | None:
        """The length in batches of the epoch at whose end the checkpoint was saved; None mid-epoch."""
        return self._resume["length"] if self._resume is not None and self.finished else None

    def take_up_chosen(self) -> None:
        """Restore the choice of samples that the checkpoint holds for this epoch."""
        state = None if self._resume is None else self._resume["chosen"]
        if self.chosen is not None and state is not None:
            with rng.fork():
                self.chosen.plain()  # as in the uninterrupted run, for samplers that count
            self.chosen.load_state_dict(state)

    def take_up_samplers(self) -> None:
        """Restore the samplers' random state from the checkpoint, before the next iteration begins."""
        state = self._resume
        if state is not None:
            self._pieces.set_seeds(state["seeds"])
            self._pieces.set_generators(state["generators"])
            self._pieces.set_held(state.get("held", []))
            self._resume = {**state, "generators": [], "held": []}  # from now on they draw for this run

    def set_epoch(self, number: int) -> None:
        """Set the samplers' epoch, as Lightning does."""
        for sampler in self._pieces.epoch_samplers():
            sampler.set_epoch(number)

    # -- iteration

    def __iter__(self) -> Iterator[Any]:
        # Plain Lightning's iterator begins here. A resumed one begins when its first batch is requested, because the random
        # state is restored by then. So does one whose samples are chosen first.
        self._asks.forget_end()  # Lightning asks a cycled loader twice for one batch
        stop_threads(self._loader)
        self._waiting = True
        self._position, self._began, self._origin, self._ended = 0, None, None, False
        self._redo.clear()
        waits = self._host.waits and not self._host.started
        if self.chosen is None and not waits and (self._resume is None or (self.finished and self._host.started)):
            self._host.resume_rng()
            self.begin()
        return self

    def __next__(self) -> Any:
        if self._ended:
            self._asks.note(Asked(gave=False))
            raise StopIteration
        self._host.resume_rng()
        if self._waiting:
            self._host.begin_iterations()
        if self._waiting:
            raise StopIteration  # Lightning looks ahead; the epoch begins once the run has resumed
        state, before = self._resume, self._redo.popleft() if self._redo else None
        own = self._own_before() if self._keeps else None
        if before is not None:  # this batch was fetched before the checkpoint was saved
            with rng.fork(before), self._drawing_as_then(state):
                batch = self.following()
        else:
            before = rng.look() if self._keeps or self._host.looks_ahead else None
            if state is not None:
                with self._drawing_as_then(state):
                    batch = self._fetch()
            else:
                batch = self._fetch()
        if state is not None and not self._redo:
            self._go_on_with(state["generators"])
        gave = batch is not END
        self._asks.note(Asked(gave, before, own, sketch(batch) if gave and self._keeps else []))
        if not gave:
            self._ended = True
            raise StopIteration
        self._position += 1
        if self._repeats:
            self._sketches.append(sketch(batch))
        if self.chosen is not None and self._position == 1:
            self._host.check_choice(self)
        return batch

    def _own_before(self) -> bytes:
        state = self._resume
        if state is not None and "latest" not in state and state.get("loader") is not None and not self._redo:
            # litdata changes a state that was loaded if it is asked for one before it has given a batch
            return packed(self._loader, state["loader"])
        return own_before(self._loader, begun=self._position > 0)

    def _fetch(self) -> Any:
        return self.following() if self.tuner is None else self.tuner.fetch(self.following)

    def following(self) -> Any:
        """Return the iterator's next batch, or :data:`END`."""
        iterator = self.__dict__["_iterator"]
        if self._direct:
            batch, self._origin = fetched(iterator, lambda: next(iterator, END))
        else:
            batch = self._draws.fetch(self._position, lambda: next(iterator, END))
            self._origin = None if self._made is None else self._made.origin(batch)
        return batch

    def _drawing_as_then(self, state: dict[str, Any] | None) -> AbstractContextManager[Any]:
        """Restore the random state for the first fetch of a resumed iteration, because some loaders draw only then."""
        if state is None or not self._keeps or state["began"] is None:
            return nullcontext()
        return generator_in_state(self._loader, state["began"]["rng"])

    def begin(self) -> None:
        """Create the loader's iterator if it is still due; a resumed epoch starts at its next batch."""
        if not self._waiting or (self.finished and not self._host.started):
            return
        self._waiting = False
        state = self._resume
        if state is not None:
            self._iterations = state["iterations"]
            self._pieces.set_seeds(state["seeds"])
        if state is None or state["began"] is None:
            own = self._native if state is None else state.get("loader")
            if state is not None:
                self.go_on_after_epoch()
            elif self._keeps and self._native is None:
                begin_epoch(self._loader)
            if self._keeps and own is None:
                with suppress(ValueError):  # raised again with the first batch, because Lightning hides errors here
                    own = unpacked(own_before(self._loader, begun=False))
            self._began = {
                "loader": own,  # at the end of the epoch before, or mid-epoch if a plain Trainer saved it
                "mid_epoch": self._native is not None,
                "rng": rng.capture(),
                "generators": self._pieces.generators(),
                "epochs": self._pieces.epochs(),
                "numbers": self._pieces.numbers(),
                "held": self._pieces.held(),
            }
            self._native = None
            self._iterator = self._begin()
            if is_nodes(self._loader):  # their state tells the beginning of an epoch from the end of the one before
                self._began.update(loader=unpacked(own_before(self._loader, begun=False)), mid_epoch=True)
            return
        self._began = state["began"]
        self._iterations -= 1
        self._position = state["position"]
        self._redo.extend(state["redo"])
        self._begin_again(state["sampler_began"], state)
        if not self._redo and (not self._keeps or "latest" in state):
            self._go_on_with(state["generators"])

    def _go_on_with(self, generators: list[Any]) -> None:
        """End the resumption: the iterator is where the checkpoint was saved."""
        self._resume = None
        if not is_nodes(self._loader):  # its threads have drawn what they draw, and may be ahead
            self._pieces.set_generators(generators)

    def wait(self) -> None:
        """Begin again when the next batch is requested. No batch of the current iterator has been trained on."""
        if not self._waiting:
            shut_down(self.__dict__["_iterator"])
            self._waiting = True
            self._iterations -= 1

    def go_on_after_epoch(self) -> None:
        """Bring the loader to its state at the end of the epoch with which the checkpoint was saved."""
        state = self._resume
        if state is None or state["began"] is not None:
            return
        self._iterations = state["iterations"]
        self._pieces.set_seeds(state["seeds"])
        self._pieces.set_generators(state["generators"])
        self._pieces.set_numbers(state.get("numbers", {}))
        self._pieces.set_held(state.get("held", []))
        if state.get("loader") is not None:
            finish_epoch(self._loader, state["loader"])
            self._pieces.set_generators(state["generators"])
        if self._pieces.outlives_epochs:
            self._warn()
        self._resume = None

    def begin_again(self, *, skip: bool) -> None:
        """Create a new iterator mid-epoch that continues with the next batch, without changing the global random state.

        Args:
            skip: whether the sampler skips used batches, so that worker processes do not load them. For iterators with workers
                and data that draws no random numbers and keeps no state.
        """
        shut_down(self.__dict__["_iterator"])
        if getattr(self._loader, "persistent_workers", False):
            self._loader._iterator = None
        self._iterations -= 1
        began = None
        if self._recorder is not None:
            self._recorder.pass_over, began = self._position if skip else 0, self._recorder.began
            self._recorder.replays = self._recorder.draws.saved()
        drawn = self._pieces.data.states()
        self._begin_again(began, None, skip=skip)
        self._pieces.data.set(drawn)

    def _begin_again(
        self, sampler_began: dict[str, Any] | None, state: dict[str, Any] | None, *, skip: bool = False
    ) -> None:
        """Create an iterator as the epoch's was created, and advance it to the current position."""
        began = self._began
        assert began is not None
        self._set_pieces(began)
        with rng.fork(began["rng"]):
            if state is not None and self._keeps:
                self._restore_own(began, state)
                return
            if self._recorder is not None:
                self._recorder.begin_from = sampler_began
                if state is not None:
                    self._recorder.replays = state.get("sampler_draws")
            replays = self._draws.saved() if state is None else state.get("draws")
            self._iterator = self._begin(replays)
            if not skip:
                self._pass_over(self._position, state)

    def _begin(self, replays: list[Any] | None = None) -> Iterator[Any]:
        """Return ``iter(loader)``, drawing the same random numbers as in an uninterrupted run."""
        loader, first = self._loader, self._iterations == 0
        self._iterations += 1

        def begin() -> Iterator[Any]:
            if first or not getattr(loader, "persistent_workers", False) or loader._iterator is not None:
                return iter(loader)
            with self._without_seed():  # without an interruption the first epoch's workers would live, and draw no seed
                if not is_torchdata(loader):
                    return iter(loader)
                begin_workers(loader)
                return iter(loader)

        iterator = begin() if self.tuner is None else self.tuner.make(begin)
        self._direct = is_direct(iterator)
        self._repeats = not self._direct and not self._keeps
        in_workers = isinstance(loader, DataLoader) and not iterates_itself(loader) and loader.num_workers > 0
        self._draws.watch = self._repeats and not in_workers
        if self._repeats:
            self._draws.begin(rng.capture(), replays)
            self._sketches.clear()
        return iterator

    @contextmanager
    def _without_seed(self) -> Iterator[None]:
        """Draw the seed of worker processes from a separate generator."""
        generator = self._loader.generator
        self._loader.generator = torch.Generator()
        try:
            yield
        finally:
            self._loader.generator = generator

    def _pass_over(self, count: int, state: dict[str, Any] | None) -> None:
        """Advance the iterator until it has returned ``count`` batches."""
        iterator, last = self.__dict__["_iterator"], None
        if is_direct(iterator) and iterator._num_workers == 0 and not (self._redo and self._pieces.data):
            # fetch only indices: the random state that samples are drawn from is restored separately
            for _ in range(count):
                iterator._next_index()
                iterator._sampler_iter.take()
            return
        for position in range(count):  # worker processes, streams and the user's code hold state, so load the batches
            self._position = position
            last = self.following()
            if last is END:
                break
        self._position = count
        expected = [] if state is None else state.get("sketch", [])
        other = last is END or (expected and repr(sketch(last)) != repr(expected))
        if other or self._pieces.outlives_epochs or (state is not None and not state.get("whole", True)):
            self._warn()

    # -- saved with the run

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iteration on every rank."""
        began = None if self._host.epoch_complete() else self._began
        otherwise = self.tuner is not None and self.tuner.otherwise and began is not None
        latest, fetched = self._split()
        position, recorder = self._position - len(fetched), self._recorder
        if began is not None and recorder is not None and recorder.epochs is not None:
            began = {**began, "epochs": recorder.epochs}
        sketches = list(self._sketches)[: len(self._sketches) - len(fetched)] if self._repeats else []
        state = {
            "position": position,
            "iterations": self._iterations,
            "seeds": [getattr(sampler, "seed", None) for sampler in self._pieces.epoch_samplers()],
            # if samplers were read further ahead than in the user's setting, repeating the epoch restores their state
            "generators": [] if otherwise else self._pieces.generators(),
            "numbers": self._pieces.numbers(),
            "held": [] if began is not None else self._pieces.held(),
            "began": began,
            "sampler_began": recorder.began if recorder is not None else None,
            "sampler_draws": recorder.draws.saved() if recorder is not None and began is not None else [],
            "redo": [rng.for_checkpoint(asked.before) for asked in fetched if asked.before is not None],
            "draws": self._draws.saved(before=position) if self._repeats and began is not None else [],
            "whole": self._draws.whole and (recorder is None or recorder.draws.whole),
            "sketch": sketches[-1] if sketches else [],
            "latest": None if latest is None or not self._keeps else latest.saved(),
            "coming": fetched[0].saved() if fetched and position == 0 and is_nodes(self._loader) else None,
            "consumed": began is not None and self._host.consumed(self),
            "reloaded": self._host.reloaded,
            "chosen": None if self.chosen is None else self.chosen.state_dict(),
            "length": len(self) if self.chosen is not None else None,
            "loader": self.own_state(),
        }
        return {"ranks": self._host.gather(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there at the next ``iter``."""
        if "ranks" not in state:  # the loader's own, as a plain Trainer saves it
            self.unwrap()
            self._recorder, self._made, self._keeps, self._native = None, None, True, deepcopy(state)
            self._loader.load_state_dict(state)
            return
        ranks, rank = state["ranks"], self._host.rank
        found = ranks[rank] if rank < len(ranks) else None
        if found is not None and (found.get("chosen") is None) != (self.chosen is None) and found["began"] is not None:
            found = None  # that epoch had other samples, so its position does not apply
        if found is not None and "redo" not in found:  # saved by an earlier version
            found = {**found, "redo": [] if found["before_fetch"] is None else [found["before_fetch"]]}
        self._resume = found
        if found is not None and self.__dict__["_iterator"] is not None:  # it began before the checkpoint was loaded
            shut_down(self.__dict__["_iterator"])
            self.__dict__["_iterator"], self._waiting, self._position = None, True, 0

    @property
    def consumed(self) -> bool:
        """Whether a cycled loader had ended once in the epoch that is resumed."""
        return self._resume is not None and self._resume["began"] is not None and self._resume.get("consumed", False)

    @property
    def reloaded(self) -> int | None:
        """The epoch in which the resumed run last loaded its loaders."""
        return None if self._resume is None else self._resume.get("reloaded")
