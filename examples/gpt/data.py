"""Bytes of the Python standard library's source files, cut into windows for next-byte prediction."""

import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

# Installed packages and tests are not the library; the last two are generated tables and pages, not written code.
EXCLUDED_DIRS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"})
SPLIT_PERIOD = 20  # Of every 20 files, one is for validation, one for test and 18 are for training.
VAL_FILE, TEST_FILE = 3, 7


def stdlib_files(root: Path | None = None) -> list[Path]:
    """Every ``*.py`` file of the standard library, sorted by its path below ``root``."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    return [root / path for path in sorted(relative) if EXCLUDED_DIRS.isdisjoint(path.parts)]


def read_bytes(files: Iterable[Path], max_bytes: int) -> list[bytes]:
    """The contents of ``files`` in order, up to ``max_bytes`` in all; the last one may be cut."""
    texts: list[bytes] = []
    for path in files:
        if max_bytes <= 0:
            break
        texts.append(path.read_bytes()[:max_bytes])
        max_bytes -= len(texts[-1])
    return texts


class ByteWindows(Dataset[dict[str, Tensor]]):
    """Windows of a text that do not overlap, each with the same window one byte later as its labels.

    Args:
        text: the bytes, concatenated.
        block_size: T, the bytes in a window.
        num_windows: take only this many, evenly spaced over the text; all of them if None, or if there are fewer.
    """

    def __init__(self, text: bytes, block_size: int, num_windows: int | None = None) -> None:
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.block_size = block_size
        available = (len(text) - 1) // block_size
        if available < 1:
            raise ValueError(f"Got a text of {len(text)} bytes, expected at least {block_size + 1}: raise max_bytes.")
        count = available if num_windows is None else min(num_windows, available)
        self.windows = [i * available // count for i in range(count)]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``input_ids`` and ``labels``, both (T,) and int64; ``labels[t]`` is the byte after ``input_ids[t]``."""
        start = self.windows[index] * self.block_size
        window = self.data[start : start + self.block_size + 1].long()
        return {"input_ids": window[:-1], "labels": window[1:]}


class StdlibText(LightningDataModule):
    """Batches ``{"input_ids": (B, T), "labels": (B, T)}`` of the standard library's source text; nothing is downloaded.

    The files are split, not the windows, so that no file is both trained and validated on.

    Args:
        block_size: T, the bytes in a window.
        batch_size: B, the windows in a batch.
        max_bytes: read no more text than this.
        num_eval_windows: windows of the validation text, and of the test text, that an evaluation uses.
        num_workers: loader processes; the text is in memory, so the main process is fast enough.
    """

    def __init__(
        self,
        block_size: int = 256,
        batch_size: int = 16,
        max_bytes: int = 16_000_000,
        num_eval_windows: int = 320,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.block_size = block_size
        self.batch_size = batch_size
        self.max_bytes = max_bytes
        self.num_eval_windows = num_eval_windows
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        texts = read_bytes(stdlib_files(), self.max_bytes)
        groups = [texts[i::SPLIT_PERIOD] for i in range(SPLIT_PERIOD)]
        val, test = b"".join(groups[VAL_FILE]), b"".join(groups[TEST_FILE])
        train = b"".join(text for i, text in enumerate(texts) if i % SPLIT_PERIOD not in (VAL_FILE, TEST_FILE))
        self.train_set = ByteWindows(train, self.block_size)
        self.val_set = ByteWindows(val, self.block_size, self.num_eval_windows)
        self.test_set = ByteWindows(test, self.block_size, self.num_eval_windows)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._loader(self.train_set, train=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._loader(self.val_set, train=False)

    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._loader(self.test_set, train=False)

    def _loader(self, windows: ByteWindows, *, train: bool) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(windows, self.batch_size, shuffle=train, drop_last=train, num_workers=self.num_workers)
