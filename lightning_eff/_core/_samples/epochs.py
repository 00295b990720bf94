"""Choose the samples of each epoch, divide them over the ranks, and update Lightning's counts of the epoch."""

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_eff._core._run.stateful_loaders import keeps_state
from lightning_eff._core._samples.chosen import EndlessSampler, interleaved, share
from lightning_eff._core.loaders import ResumableLoader

if TYPE_CHECKING:
    from lightning_eff._core.session import Session

Chooser = Callable[
    [int, Tensor, int, int | None], tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, list[int]] | None
]


class EpochsOfRun:
    """Chooses the samples of each epoch before Lightning begins it.

    Args:
        session: the run, while its patches are being set.
        choose: a function of the epoch's number, the plain order of all ranks, the data set's size and, in mid-epoch, the
            number of samples left. It returns indices and weights, and optionally the size of each batch, for a number of
            batches that is a multiple of the ranks; or None for the plain epoch.
        who: the technique's name.

    Raises:
        ValueError: if another technique chooses samples. Once the loader is known, if its samples cannot be chosen.
    """

    def __init__(self, session: "Session", choose: Chooser, *, who: str) -> None:
        self._session, self._choose, self._who = session, choose, who
        self._loader: ResumableLoader | None = None
        self._pending = self._warned = False
        loaders = session.loaders
        if loaders.taken_by:
            raise ValueError(
                f"{loaders.taken_by} and {who} cannot train together: both choose the samples of an epoch. Remove one of them."
            )
        loaders.taken_by, loaders.take = who, self._take
        loop = session.trainer.fit_loop
        advance, run = loop.on_advance_start, loop.epoch_loop.on_run_start

        def on_advance_start() -> None:
            loop.setup_data()  # as Lightning does first; a reloaded loader is known then
            if not session.asleep:
                self._before_epoch()
            advance()

        def on_run_start(data_fetcher: Any) -> None:
            # a run that resumes at an epoch's end may have to end that epoch first
            if self._pending and loop.epoch_loop.batch_progress.current.state_dict()["ready"] == 0:
                self._begin_epoch()
            run(data_fetcher)

        start = loop.on_run_start

        def on_start() -> None:
            start()
            loader = session.loaders.latest
            if loader is not None and loader.chosen is not None and (count := loader.finished_batches) is not None:
                self._count(count)  # decides whether a validation of that epoch is due

        session.patches.set(loop, "on_run_start", on_start)
        session.patches.set(loop, "on_advance_start", on_advance_start)
        session.patches.set(loop.epoch_loop, "on_run_start", on_run_start)

    # -- the loader

    def _take(self, loader: Any, first: bool) -> None:
        """Check a loader before it is wrapped, the ``first`` or another."""
        problem = ""
        if not first:
            problem = "is one of several"
        elif keeps_state(loader):
            problem = "keeps its own state (state_dict) and its own order"
        elif not isinstance(loader, DataLoader):
            problem = "is not a torch DataLoader"
        elif isinstance(loader.dataset, IterableDataset):
            problem = f"streams an iterable data set ({type(loader.dataset).__name__}), whose samples have no indices"
        if problem:
            raise ValueError(
                f"{self._who}: the training loader ({type(loader).__name__}) {problem}, so its samples cannot be chosen by"
                f" index. Use one torch DataLoader over a data set with __getitem__ and __len__, or remove {self._who}."
            )

    # -- epochs

    def _before_epoch(self) -> None:
        loader = self._session.loaders.latest
        self._loader = loader
        if loader is None or loader.chosen is None:
            return
        self._pending = False
        if not loader.resuming or (loader.finished and not self._session.trainer.fit_loop.is_resuming):
            self._begin_epoch()
        elif (count := loader.finished_batches) is not None:  # the previous epoch was saved at its very end
            self._count(count)
            self._pending = True
        else:
            loader.take_up_chosen()
            self._count(len(loader))

    def _begin_epoch(self) -> None:
        loader, session = self._loader, self._session
        assert loader is not None and loader.chosen is not None
        self._pending = False
        session.loaders.take_up_rng()
        number = self._number()
        loader.take_up_samplers()
        loader.set_epoch(number)
        try:
            plain = loader.chosen.plain()
        except EndlessSampler as error:
            raise ValueError(f"{self._who}: {error}, or remove {self._who}.") from error
        orders = session.gather(plain)
        order, size = interleaved(orders), len(loader.dataset)
        distributed = loader.chosen.distributed
        if distributed is not None and not distributed.drop_last:
            order = order[: len(distributed.dataset)]  # pyright: ignore[reportArgumentType] -- without repeats for even ranks
        what = self._choose(number, order, size, None)
        found = self._checked(None if what is None else what[:2], size)
        sizes = what[2] if what is not None and len(what) == 3 else None
        if sizes is not None and not loader.chosen.batched:
            raise ValueError(
                f"{self._who}: got a DataLoader with batch_size=None, whose indices are whole batches, so the technique cannot"
                " set their sizes. Give the loader a batch_size."
            )
        if found is not None and found[1] is not None and not loader.chosen.batched:
            raise ValueError(
                f"{self._who}: got weights of samples and a DataLoader with batch_size=None, whose indices are whole batches."
                " Give the loader a batch_size."
            )
        chosen = len(order)
        if found is None:
            loader.chosen.choose_own()
        elif sizes is not None:
            batches = [batch.tolist() for batch in found[0].split(sizes)]
            loader.chosen.choose_batches(batches[session.rank :: len(orders)])
        else:
            drop = distributed is not None and distributed.drop_last
            chosen = len(found[0])
            indices, weights = (_share(v, session.rank, len(orders), drop_last=drop) for v in found)
            assert indices is not None
            loader.chosen.choose(indices, weights)
        if not len(loader):
            raise ValueError(
                f"{self._who}: epoch {number} has {chosen} chosen samples, too few for a batch of {loader.batch_size} on each"
                f" of {len(orders)} process(es). Choose more samples, or use smaller batches."
            )
        self._count(len(loader))

    def _number(self) -> int:
        return self._session.trainer.fit_loop.epoch_progress.current.state_dict()["processed"]

    def choose_again(self) -> None:
        """Choose the rest of the running epoch again."""
        loader, session = self._loader, self._session
        if loader is None or loader.chosen is None:
            return
        coming = session.gather(loader.chosen.to_come)
        order, size = interleaved(coming), len(loader.dataset)
        if not len(order):
            return
        number = self._number()
        what = self._choose(number, order, size, len(order))
        found = self._checked(None if what is None else what[:2], size, expected=len(order))
        if found is not None:
            indices, weights = (_share(v, session.rank, len(coming), drop_last=False) for v in found)
            assert indices is not None
            loader.chosen.exchange(indices, weights)

    def _checked(
        self, found: tuple[Tensor, Tensor | None] | None, size: int, *, expected: int | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Check the choice, and raise the same error on all ranks if it is invalid."""
        problem = None if found is None else self._problem(*found, size, expected)
        digest = None if found is None else _digest(*found)
        told = self._session.replicas.everyone((problem, digest))
        problems = [f"{f'Rank {rank}: ' if len(told) > 1 else ''}{p}" for rank, (p, _) in enumerate(told) if p]
        if problems:
            raise ValueError(" ".join(problems))
        if len({digest for _, digest in told}) > 1:
            raise ValueError(
                f"{self._who}: the ranks chose different samples, but the same choice is divided over all. Draw from"
                " session.generator, and keep what is learned about samples in SampleScores."
            )
        return None if found is None else (found[0].long(), found[1])

    def _problem(self, indices: Tensor, weights: Tensor | None, size: int, expected: int | None) -> str | None:
        if indices.ndim != 1 or indices.is_floating_point() or indices.dtype is torch.bool:
            return (
                f"{self._who} chose {indices.dtype} values of shape {tuple(indices.shape)}; expected indices of the data set,"
                " integers of shape (m,)."
            )
        if not len(indices) or int(indices.min()) < 0 or int(indices.max()) >= size:
            got = f"between {int(indices.min())} and {int(indices.max())}" if len(indices) else "none"
            return f"{self._who} chose indices {got}; expected at least one, all in [0, {size})."
        if expected is not None and len(indices) != expected:
            return f"{self._who} chose {len(indices)} samples mid-epoch; expected {expected}, the number left."
        if weights is not None and (
            weights.shape != indices.shape or not bool((weights.isfinite() & (weights >= 0)).all())
        ):
            return (
                f"{self._who} gave weights of shape {tuple(weights.shape)} for {len(indices)} samples; expected one finite"
                " weight >= 0 per sample."
            )
        return None

    # -- Lightning's counts

    def _count(self, batches: int) -> None:
        """Set Lightning's number of batches in the epoch to ``batches``, before limits."""
        trainer = self._session.trainer
        loop, limit = trainer.fit_loop, trainer.limit_train_batches
        count = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        if count == 0:
            raise ValueError(
                f"{self._who}: limit_train_batches={limit} leaves none of the epoch's {batches} batches. Increase it, or give a"
                " number of batches."
            )
        combined, fetcher = loop._combined_loader, loop._data_fetcher
        assert combined is not None and fetcher is not None
        combined.limits = None if combined.limits is None else _set(combined.limits, count)
        fetcher.length, loop.max_batches = count, count
        every = trainer.val_check_interval
        if isinstance(every, float) and trainer.val_check_batch is not None:
            trainer.val_check_batch = max(1, int(count * every))
        elif (
            trainer.check_val_every_n_epoch is not None
            and isinstance(every, int)
            and every > count
            and not self._warned
        ):
            self._warned = True
            rank_zero_warn(
                f"{self._who}: this epoch has {count} batches, and val_check_interval={every} is more, so it is not validated."
                " Use val_check_interval=1.0 (a fraction of the epoch), or check_val_every_n_epoch=None."
            )


def _share(values: Tensor | None, rank: int, world_size: int, *, drop_last: bool) -> Tensor | None:
    return None if values is None else share(values, rank, world_size, drop_last=drop_last)


def _digest(*values: Tensor | None) -> str:
    digest = hashlib.blake2b()
    for value in values:
        digest.update(b"none" if value is None else value.numpy().tobytes())
    return digest.hexdigest()


def _set(limits: list[int | float], count: int) -> list[int | float]:
    """Change the limit in place, because the running iterator holds the same list."""
    limits[0] = count
    return limits
