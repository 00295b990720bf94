"""Decode each sample once, and read it from memory in later epochs (Izsak et al. 2021 keep serialised shards in RAM)."""

import itertools
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset
from tqdm import tqdm
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._arguments.kinds import Fraction, Text
from lightning_eff._core._needs.needs import Need
from lightning_eff._core.search_space import SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data._loader.kept import Kept, Reader, Writer, positions, same
from lightning_eff.data._loader.watching import Watch, WatchedCollate, WatchedStart

WHO = "InMemoryData"
_SEEN = 64  # samples from whose size that of all is estimated
#: samples that are read again after the file is written, and how often: 16 flips of a coin agree once in 65,536 times
_AGAIN, _TIMES = 8, 2
_EACH_EPOCH = 4  # samples that each rank compares when an epoch starts


def _whole(samples: Any) -> Any:
    return samples


class InMemoryData(Technique):
    """Read and decode each training sample once, and take it from memory afterwards.

    Before training it reads the data set with the loader's worker processes, and writes each sample into a memory-mapped file.
    The operating system keeps the file in memory as long as there is room. All workers and all ranks of a machine share it.
    Each read returns a copy, so code that changes a sample in place does not change the next epoch.

    Use it if samples are expensive to read or decode (JPEG, tokenization, network storage) and are seen in several epochs. It
    costs one pass over the data set before training, and disk space for the decoded samples. Batches, their order and random
    numbers stay the same, so the weights are those of plain training bit for bit, and a checkpoint resumes exactly.

    Random augmentation within the data set would be frozen, so it is refused: if reading a sample draws from Python's, NumPy's
    or torch's global generator or from one that the data set holds, changes plain numbers that the data set keeps, or gives
    another result when a few samples are read twice more. When an epoch starts, each rank compares four kept samples with
    fresh ones, and the run ends with an error if the data set has changed. Move random transforms into callbacks such as
    :class:`RandAugment`, or into the collate function.

    It logs ``bytes`` (of the file) and ``samples`` (kept).

    Args:
        keep: the fraction of the samples to keep, from the first one on. The others are read as usual. 0 is plain training.
        folder: an existing folder for the file, on a local disk or in ``/dev/shm``. None takes the system's temporary folder.

    Raises:
        ValueError: for a value out of range. When training starts, for an iterable data set, one without a length, or one whose
            samples are random or do not fit on the disk. When an epoch starts, for samples that changed.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[InMemoryData()])

    References:
        Izsak et al. 2021, "How to Train BERT with an Academic Budget", arXiv:2104.07705.
    """

    saves: ClassVar[str] = "the time to read and decode samples after the first epoch"
    paper: ClassVar[str] = "Izsak et al. 2021, arXiv:2104.07705"
    constraints: ClassVar[str] = "a map-style data set whose samples are not random; disk space for the decoded samples"
    needs: ClassVar[Need] = Need.BATCH
    search_space: ClassVar[SearchSpace | None] = SearchSpace()
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds, because the weights are the same bit for bit"
    )
    needs_automatic_optimization: ClassVar[bool] = False
    sparse_gradients: ClassVar[bool] = True
    compiles: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"keep": 0.0}

    def __init__(
        self, keep: Annotated[float, Fraction()] = 1.0, *, folder: Annotated[str | None, Text()] = None
    ) -> None:
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"{WHO}(folder={folder!r}): there is no such folder. Create it, or omit it.")
        self.keep, self.folder = keep, folder

    @override
    def _reset(self) -> None:
        self._kept: list[tuple[Any, Any]] = []  # each loader with the user's data set
        self._places: dict[int, tuple[Any, Path]] = {}  # by data set, so that it is read once
        self._compared: int | None = None  # the epoch in which kept samples were compared last
        self._bytes = self._samples = 0

    # -- the run

    @override
    def attach(self, session: Session) -> None:
        session.loaders.keep = self._take

    def _take(self, loader: Any) -> None:
        """Give a training loader a data set that reads from the file."""
        dataset = getattr(loader, "dataset", None)
        if (
            not isinstance(loader, DataLoader)
            or isinstance(dataset, IterableDataset)
            or not hasattr(dataset, "__len__")
        ):
            what = f"a {type(dataset).__name__}" if isinstance(loader, DataLoader) else f"a {type(loader).__name__}"
            raise ValueError(
                f"{WHO}: the training loader reads {what}, which has no samples by index. Use a DataLoader with a map-style"
                " data set, or remove the technique."
            )
        if type(dataset) is Kept:
            return
        known = self._places.get(id(dataset))
        if known is None:
            path = self._written(loader, dataset)
            self._places[id(dataset)] = (dataset, path)
        else:
            path = known[1]
        self._kept.append((loader, dataset))
        vars(loader)["dataset"] = Kept(dataset, Reader(path))  # DataLoader refuses a plain assignment

    def _written(self, loader: Any, dataset: Any) -> Path:
        """Write the samples once on each machine, and return the file."""
        trainer = self.session.trainer
        name = trainer.strategy.broadcast(f"lightning_eff_{uuid.uuid4().hex}")
        path = Path(self.folder or tempfile.gettempdir()) / f"{name}_{trainer.node_rank}.samples"
        failure: Exception | None = None
        if trainer.local_rank == 0:
            try:
                self._write(loader, dataset, path)
            except Exception as error:  # the other ranks wait
                self._remove(path)
                failure = error
        told = [problem for problem in self.session.gather(failure and str(failure)) if problem]
        if failure is not None:
            raise failure
        if told:
            raise ValueError(told[0])
        self._bytes, self._samples = path.stat().st_size, self._count(dataset)
        size = f"{self._bytes / 2**30:.2f} GiB" if self._bytes > 2**29 else f"{self._bytes / 2**20:.1f} MiB"
        rank_zero_info(
            f"{WHO}: keeps {self._samples:,} of {len(dataset):,} samples of {_name(dataset)} in {path} ({size})"
        )
        return path

    def _count(self, dataset: Any) -> int:
        return round(self.keep * len(dataset))

    def _write(self, loader: Any, dataset: Any, path: Path) -> None:
        count = self._count(dataset)
        writer, watch = Writer(path), Watch(dataset)
        try:
            shown = self.session.trainer.progress_bar_callback is not None
            for i, sample in enumerate(tqdm(_samples(loader, dataset, count, watch), WHO, count, disable=not shown)):
                if watch.moved:
                    raise _random(dataset, "reading a sample draws random numbers or changes the data set")
                writer.add(sample)
                if i + 1 == min(_SEEN, count):
                    self._check_room(path, writer.bytes / (i + 1) * count)
        finally:
            writer.close()
        for i in positions(count, _AGAIN, 0) * _TIMES:
            if not _unchanged(dataset, Reader(path), i):
                raise _random(dataset, f"sample {i} differs when it is read again")

    def _check_room(self, path: Path, bytes: float) -> None:
        free = shutil.disk_usage(path.parent).free
        if bytes > 0.95 * free:
            share = 0.9 * free / bytes * self.keep
            raise ValueError(
                f"{WHO}(keep={self.keep:g}): the samples need about {bytes / 2**30:.1f} GiB, and {path.parent} has"
                f" {free / 2**30:.1f} GiB left. Use keep={share:.2f}, or another folder."
            )

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._compared != trainer.current_epoch:  # now, because hooks that start an epoch may change the data set
            self._compared = trainer.current_epoch
            self._compare(trainer.current_epoch)

    def _compare(self, epoch: int) -> None:
        """Compare a few kept samples with fresh ones; each rank takes others.

        Raises:
            ValueError: on all ranks, if one differs.
        """
        failure: Exception | None = None
        for dataset, path in self._places.values():
            reader = Reader(path)
            for i in positions(len(reader), _EACH_EPOCH, epoch * self.session.trainer.world_size + self.session.rank):
                try:
                    if failure is None and not _unchanged(dataset, reader, i):
                        failure = _random(dataset, f"sample {i} differs from the kept one in epoch {epoch}")
                except Exception as error:  # the other ranks wait
                    failure = error
        told = [problem for problem in self.session.gather(failure and str(failure)) if problem]
        if failure is not None:
            raise failure
        if told:
            raise ValueError(told[0])

    @override
    def detach(self, session: Session) -> None:
        for loader, dataset in self._kept:
            vars(loader)["dataset"] = dataset
        for _, path in self._places.values():
            if session.trainer.local_rank == 0:
                self._remove(path)
        self._kept, self._places = [], {}

    @staticmethod
    def _remove(path: Path) -> None:
        for file in (path, path.with_suffix(".index")):  # processes that still map it keep what they mapped
            with suppress(OSError):
                file.unlink()

    # -- reports

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"bytes": self._bytes, "samples": self._samples}

    @override
    def summary(self) -> str:
        return f"kept {self._samples:,} samples in memory ({self._bytes / 2**20:,.1f} MiB)"


def _samples(loader: Any, dataset: Any, count: int, watch: Watch) -> Iterator[Any]:
    """Read the first samples in order, with the loader's number of workers, and watch each one."""
    settings: dict[str, Any] = {"collate_fn": WatchedCollate(watch, _whole), "batch_size": None}
    if loader.num_workers:
        settings |= {"num_workers": loader.num_workers, "multiprocessing_context": loader.multiprocessing_context}
        settings["worker_init_fn"] = WatchedStart(watch, loader.worker_init_fn)
    with rng.fork():  # an iterator draws a seed for its workers
        iterator = iter(DataLoader(Subset(dataset, range(count)), **settings))
        watch.begin()
        yield from itertools.islice(iterator, count)


def _unchanged(dataset: Any, reader: Reader, i: int) -> bool:
    """Whether the data set still makes sample ``i`` as it was kept. The run's random state stays the same."""
    with rng.fork():
        return same(reader.read(i), dataset[i])


def _name(dataset: Any) -> str:
    return type(dataset).__name__


def _random(dataset: Any, what: str) -> ValueError:
    return ValueError(
        f"{WHO}: {what} ({_name(dataset)}), so a kept sample would repeat its first augmentation. Move random transforms into"
        " callbacks such as RandAugment or into collate_fn, or remove the technique."
    )
