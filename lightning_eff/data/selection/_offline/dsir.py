"""DSIR: select documents of a large text that resemble a target text, by importance resampling (Xie et al. 2023).

Each document ``z`` of the raw text is weighted by how much more likely its features are in the target than in the raw text.
``c_j(z)`` counts its features in bucket j, and ``p``, ``q`` are the fractions of the buckets in target and raw text:

    log w(z) = sum_j c_j(z) log(p_j / q_j)

Documents are drawn without replacement in proportion to their weights: the k largest ``log w + Gumbel noise``.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from lightning_eff.data.selection._offline.hashing import Integers, Numbers, blocks, features

SMOOTHING = 1e-8  # of the fractions, as in the authors' code, for buckets that are empty in one of the texts
PART_BYTES = 2**25  # of text that a process takes at a time, and that an interruption may lose


def log_ratios(target: Integers, raw: Integers) -> Numbers:
    """Compute ``log((p_j + e) / (q_j + e))`` from counts, shape (buckets,), and append a 0, shape (buckets + 1,)."""
    p, q = (counts / max(1, counts.sum()) for counts in (target, raw))
    return np.append(np.log(p + SMOOTHING) - np.log(q + SMOOTHING), 0.0)


def gumbel_top_k(log_weights: Numbers, k: int, seed: int) -> Integers:
    """Draw ``k`` indices without replacement in proportion to ``exp(log_weights)``, in ascending order, shape (k,).

    Args:
        log_weights: shape (n,). -inf is never drawn.
        k: at least 1, at most the number of finite weights.
        seed: the seed of the noise.
    """
    # argtop_k(log w_i + G_i) with G_i ~ Gumbel(0, 1)
    keys = log_weights + np.random.default_rng(seed).gumbel(size=len(log_weights))
    return np.sort(np.argpartition(-keys, k - 1)[:k])


@dataclass(frozen=True)
class Part:
    """Some lines of a text.

    Attributes:
        path: the path of the file.
        start: the byte from which its lines begin.
        end: the byte before which they begin.
        field: the field of a JSON object per line that holds the text, or "" if the lines are the text.
        buckets: the number of buckets.
    """

    path: str
    start: int
    end: int
    field: str
    buckets: int

    def texts(self) -> Iterator[bytes]:
        """Yield its documents in blocks, each document ending in a newline."""
        for block in blocks(self.path, self.start, self.end):
            yield self._unpacked(block) if self.field else block

    def _unpacked(self, block: bytes) -> bytes:
        try:
            texts = [json.loads(line)[self.field] for line in block.split(b"\n")[:-1]]
            return "".join(" ".join(text.split("\n")) + "\n" for text in texts).encode(errors="replace")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.path}: a line between bytes {self.start:,} and {self.end:,} is not a JSON object with a text under"
                f" {self.field!r} ({type(error).__name__}: {error}). Name the right field with --field."
            ) from error


def count(part: Part) -> tuple[Integers]:
    """Count the features of each bucket in a part, shape (buckets,)."""
    return (np.sum([features(b, part.buckets).counts(part.buckets) for b in part.texts()] or [_none(part)], axis=0),)


def _none(part: Part) -> Integers:
    return np.zeros(part.buckets, dtype=np.int64)


def weigh(part: Part, ratios: Numbers) -> tuple[Numbers]:
    """Compute ``log w`` of each document of a part, shape (documents,), -inf for one without tokens."""
    return (np.concatenate([features(b, part.buckets).sums(ratios) for b in part.texts()] or [np.empty(0)]),)


def parts(paths: Sequence[str], field: str, buckets: int) -> list[Part]:
    """Cut texts into parts, in their order."""
    found: list[Part] = []
    for path in paths:
        size = os.path.getsize(path)
        own = field if Path(path).suffix == ".jsonl" else ""
        found += [
            Part(path, start, min(start + PART_BYTES, size), own, buckets) for start in range(0, size, PART_BYTES)
        ]
    return found


@dataclass
class Weighing:
    """Computes the weights of all documents of a raw text in several processes, and continues after an interruption.

    Args:
        raw: the text files to select from, in the order in which their lines are counted. ``.jsonl`` files have an object per
            line.
        target: the text files that the selection should resemble.
        folder: the folder of intermediate results. Those of other texts or settings are deleted.
        field: the field of the objects in ``.jsonl`` files.
        buckets: the number of buckets.
        jobs: the number of processes.
        tell: a function that gets the name and the bytes of each finished part.
    """

    raw: Sequence[str]
    target: Sequence[str]
    folder: Path
    field: str = "text"
    buckets: int = 10_000
    jobs: int = 1
    tell: Callable[[str, int], None] = lambda what, size: None

    def run(self) -> Numbers:
        """Compute ``log w`` of each document, shape (documents,)."""
        self._take_up()
        raw, target = (parts(paths, self.field, self.buckets) for paths in (self.raw, self.target))
        with ProcessPoolExecutor(self.jobs, mp_context=get_context("spawn")) as pool:
            counts = [
                np.sum(list(self._each(pool, name, count, of)), axis=0)
                for name, of in (("target", target), ("raw", raw))
            ]
            return np.concatenate([*self._each(pool, "weights", weigh, raw, log_ratios(*counts))])

    @property
    def bytes(self) -> int:
        """The bytes to read: the raw text counts twice."""
        return sum(os.path.getsize(path) for path in (*self.target, *self.raw, *self.raw))

    def _each(
        self, pool: ProcessPoolExecutor, name: str, do: Callable[..., tuple[Any]], of: Sequence[Part], *more: Any
    ) -> Iterator[Any]:
        """Yield the result of ``do`` for each part in order, computed or loaded."""
        files = [self.folder / f"{name}-{i:06}.npy" for i in range(len(of))]
        waiting = {
            i: pool.submit(_kept, do, part, file, *more)
            for i, (part, file) in enumerate(zip(of, files, strict=True))
            if not file.is_file()
        }
        try:
            for i, file in enumerate(files):
                if i in waiting:
                    waiting.pop(i).result()
                self.tell(name, of[i].end - of[i].start)
                yield np.load(file)
        finally:
            for future in waiting.values():
                future.cancel()

    def _take_up(self) -> None:
        """Keep the folder's results if they belong to these texts and settings, and delete all others."""
        texts = [[(p, os.path.getsize(p), os.stat(p).st_mtime_ns) for p in paths] for paths in (self.raw, self.target)]
        told = [texts, self.field, self.buckets, PART_BYTES]
        digest = hashlib.blake2b(json.dumps(told).encode(), digest_size=16).hexdigest()
        self.folder.mkdir(parents=True, exist_ok=True)
        of = self.folder / "of.txt"
        if not of.is_file() or of.read_text() != digest:
            self.clear()
            self.folder.mkdir(parents=True, exist_ok=True)
            of.write_text(digest)

    def clear(self) -> None:
        """Delete the intermediate results."""
        if self.folder.is_dir():
            for file in (*self.folder.glob("*.npy"), *self.folder.glob("*.part"), self.folder / "of.txt"):
                file.unlink(missing_ok=True)
            self.folder.rmdir()


def _kept(do: Callable[..., tuple[Any]], part: Part, file: Path, *more: Any) -> None:
    """Compute ``do`` in a process and write it to a file that exists only when it is complete."""
    (found,) = do(part, *more)
    half = file.with_suffix(".part")
    with half.open("wb") as stream:
        np.save(stream, found)
    os.replace(half, file)
