"""Resume a loader from its own state, and check that this brings back its batches."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_eff._core import rng
from lightning_eff._core._loaders.asked import Asked, Latest, packed, unpacked
from lightning_eff._core._loaders.batch_indices import sketch
from lightning_eff._core._loaders.batch_order import shut_down
from lightning_eff._core._loaders.proxy import LoaderProxy
from lightning_eff._core._run.loader_host import LoaderHost
from lightning_eff._core._run.stateful_loaders import (
    begin_epoch_from,
    generator_in_state,
    is_nodes,
    load,
    own_state,
    wait_for_first,
    why_other,
)

END = object()


class OwnStateLoader(LoaderProxy):
    """A loader that may keep its own state.

    A checkpoint holds the state from before the batch that was trained on last. A resumed run makes this batch again. If it is
    another one, the loader's state does not determine its batches, and the epoch is repeated instead.
    """

    _host: LoaderHost
    _asks: Latest
    _iterations: int
    _position: int

    @abstractmethod
    def following(self) -> Any:
        """Return the iterator's next batch, or :data:`END`."""

    @abstractmethod
    def _begin(self, replays: list[Any] | None = None) -> Iterator[Any]: ...

    def _set_pieces(self, began: dict[str, Any]) -> None:
        """Restore what determined the order of the batches when the epoch began."""
        self._pieces.set_epochs(began["epochs"])
        self._pieces.set_generators(began["generators"])
        self._pieces.set_numbers(began.get("numbers", {}))
        self._pieces.set_held(began.get("held", []))

    def _restore_own(self, began: dict[str, Any], state: dict[str, Any]) -> None:
        """Create an iterator that goes on where the checkpoint was saved, in the random state of the epoch's beginning."""
        if "latest" not in state and state.get("loader") is not None:  # saved by an earlier version
            self._iterator = self._begin_from(state["loader"])
            return
        loader, count, latest = self._loader, self._position, state.get("latest")
        why, lost = why_other(loader)
        # most states tell the beginning of an epoch from the end of the one before only after a batch
        if not why and count > 1 and latest is not None:
            self._iterator = self._begin_from(latest["loader"])
            if self._makes_again(latest, began):
                return
            shut_down(self.__dict__["_iterator"])
            self._iterations -= 1
            why = (
                "its state does not include all that its batches depend on, such as random numbers of worker processes"
            )
        if count > 1 and latest is not None:
            rank_zero_info(
                f"{type(loader).__name__}: the training loader's own state does not bring back its batches, because {why}. The"
                f" {count:,} batches of this epoch before the checkpoint are loaded again, so that the run resumes exactly."
            )
        # nodes over a stream may have the state of the epoch before until they have read a sample
        mid_epoch, check = began.get("mid_epoch", False), latest if count else state.get("coming")
        for mid_epoch in (True, False) if is_nodes(loader) else (mid_epoch,):  # noqa: B020 -- the last one stays
            self._repeat_epoch(began, mid_epoch)
            given = all(self.following() is not END for _ in range(count - (check is not None)))
            if given and (check is None or self._makes_again(check, began)):
                break
            shut_down(self.__dict__["_iterator"])
            self._iterations -= 1
        else:
            self._iterations += 1
            lost = True
        if not count and check is not None:  # that batch is still to come
            self._iterations -= 1
            self._repeat_epoch(began, mid_epoch)
        if lost and (count or check is not None):
            self._warn()

    def _repeat_epoch(self, began: dict[str, Any], mid_epoch: bool) -> None:
        begin_epoch_from(self._loader, began.get("loader"), mid_epoch=mid_epoch)
        self._set_pieces(began)
        rng.restore(began["rng"])
        self._iterator = self._begin_from(None)

    def _begin_from(self, own: Any) -> Iterator[Any]:
        if own is not None:
            load(self._loader, own)
        iterator = self._begin()
        wait_for_first(self._loader, iterator)
        return iterator

    def _makes_again(self, latest: dict[str, Any], began: dict[str, Any]) -> bool:
        """Make the last batch before the checkpoint again, and return whether it is the same."""
        # an iteration may begin with its first batch, and then draws in the random state of the epoch's first one
        begun = nullcontext() if self._position <= 1 else generator_in_state(self._loader, began["rng"])
        with rng.fork(latest["rng"]), begun:
            batch = self.following()
        made = [] if batch is END else sketch(batch)
        if batch is END or repr(made) != repr(latest["sketch"]):
            return False
        self._asks.note(Asked(True, latest["rng"], packed(self._loader, latest["loader"]), made))
        return True

    def _warn(self) -> None:
        how = (
            "Give its samplers and data random generators of their own"
            if self._keeps
            else "Give the loader state_dict() and load_state_dict()"
        )
        rank_zero_warn(
            f"{type(self._loader).__name__}: the training loader does not repeat the batches of the interrupted epoch, so this"
            f" run resumes with other batches than an uninterrupted run. {how}, or resume from a checkpoint at the end of an"
            " epoch."
        )

    def own_state(self) -> dict[str, Any] | None:
        """Return the wrapped loader's own state before any batch that Lightning fetched ahead; None if it has none."""
        if not self._keeps:
            return None
        _, fetched = self._split()
        return unpacked(fetched[0].own) if fetched else own_state(self._loader)

    def _split(self) -> tuple[Asked | None, list[Asked]]:
        return self._asks.split(self._host.batches_ahead(), self._position, alone=self._host.alone)
