"""Samples in one memory-mapped file: written once, and read by all processes of a machine without decoding them again."""

import mmap
import operator
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

_ALIGN = 64


def _flat(value: Any) -> np.ndarray[Any, Any] | None:
    """Return the bytes of a dense CPU tensor or of an array, or None for anything else."""
    if (
        type(value) is Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.requires_grad
    ):
        return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return None


def _kind(value: Any) -> tuple[Any, ...]:
    return ("tensor" if isinstance(value, Tensor) else "array", value.dtype, tuple(value.shape))


class Writer:
    """Writes samples behind each other. A sample is any structure of tensors, arrays and objects that can be pickled.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.bytes = path, 0
        self._file = path.open("wb")
        self._kinds: dict[Any, int] = {}
        self._rows: list[tuple[int, int]] = []  # the kind of each sample, and where it begins

    def add(self, sample: Any) -> None:
        """Write a sample."""
        leaves, spec = pytree.tree_flatten(sample)
        flat = [_flat(leaf) for leaf in leaves]
        others = [leaf for leaf, part in zip(leaves, flat, strict=True) if part is None]
        packed = pickle.dumps(others, protocol=5) if others else b""
        parts = tuple(None if part is None else _kind(leaf) for leaf, part in zip(leaves, flat, strict=True))
        kind = (spec, parts, len(packed))
        self._rows.append((self._kinds.setdefault(kind, len(self._kinds)), self.bytes))
        for part in (np.frombuffer(packed, np.uint8), *(part for part in flat if part is not None)):
            self._file.write(part)  # pyright: ignore[reportArgumentType] -- before Python 3.12, buffers have no type
            self._file.write(b"\0" * (-len(part) % _ALIGN))
            self.bytes += len(part) + (-len(part) % _ALIGN)

    def close(self) -> None:
        """Write the index beside the file."""
        self._file.write(b"\0")  # an empty file cannot be mapped
        self._file.close()
        index = np.array(self._rows, dtype=np.int64).reshape(-1, 2)
        _index(self.path).write_bytes(pickle.dumps(([*self._kinds], index), protocol=5))


def _index(path: Path) -> Path:
    return path.with_suffix(".index")


class Reader:
    """Reads what a :class:`Writer` wrote. Each read returns a copy. Copies in other processes map the same file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kinds, self._rows = pickle.loads(_index(path).read_bytes())
        self._map: mmap.mmap | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])

    def read(self, i: int) -> Any:
        """Return sample ``i``."""
        if self._map is None:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        number, at = map(int, self._rows[i])
        spec, parts, size = self._kinds[number]
        others = iter(pickle.loads(self._map[at : at + size])) if size else iter(())
        at += size + (-size % _ALIGN)
        leaves = []
        for part in parts:
            if part is None:
                leaves.append(next(others))
                continue
            what, dtype, shape = part
            count = int(np.prod(shape))
            size = count * dtype.itemsize
            data = bytearray(self._map[at : at + size])  # a copy that may be written to
            at += size + (-size % _ALIGN)
            if what == "array":
                leaves.append(np.frombuffer(data, dtype).reshape(shape))
            else:
                leaves.append(
                    (torch.frombuffer(data, dtype=dtype) if count else torch.empty(0, dtype=dtype)).view(shape)
                )
        return pytree.tree_unflatten(leaves, spec)


class Kept(Dataset[Any]):
    """A data set whose first samples come from a file. Everything else is that of the data set within.

    Args:
        inner: the user's data set.
        reader: has the samples ``0 ... n - 1``.
    """

    def __init__(self, inner: Any, reader: Reader) -> None:
        vars(self).update(_inner=inner, _reader=reader)

    def __getitem__(self, index: Any) -> Any:
        try:
            i = operator.index(index)
        except TypeError:  # a slice, or the indices of a whole batch
            return self._inner[index]
        size = len(self._inner)
        i = i + size if i < 0 else i
        return self._reader.read(i) if 0 <= i < len(self._reader) else self._inner[index]

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # such as __getitems__, which would go around the file
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)  # such as an epoch, on which later samples depend

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, (self._inner, self._reader)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride] -- isinstance sees the data set within
        return type(self._inner)


def same(a: Any, b: Any) -> bool:
    """Whether two samples are equal to the bit."""
    (left, spec), (right, other) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    if spec != other:
        return False
    return all(_same(x, y) for x, y in zip(left, right, strict=True))


def _same(x: Any, y: Any) -> bool:
    one, two = _flat(x), _flat(y)
    if one is None or two is None:
        return (one is None) == (two is None) and pickle.dumps(x) == pickle.dumps(y)
    return _kind(x) == _kind(y) and np.array_equal(one, two)


def positions(size: int, count: int, seed: int) -> list[int]:
    """Draw ``count`` different places in a data set, or all if it has fewer."""
    return sorted(random.Random(seed).sample(range(size), min(size, count)))
