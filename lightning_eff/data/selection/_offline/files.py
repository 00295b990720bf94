"""Files that say something of a data set's samples by their indices, and the fingerprint that tells data sets apart.

A file holds ``num_samples``, the data set's length N; ``fingerprint``, by which another data set of that length is told
apart, or null where it is not known; and either ``indices``, shape (m,), some of 0 ... N - 1, each once, or ``scores``, shape
(N,). As ``.json`` it is a mapping of these names, as ``.npz`` NumPy's archive of arrays by these names.
"""

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SUFFIXES = (".json", ".npz")
_LOOKED_AT = 8  # samples that make a fingerprint


class Told:
    """What a file says.

    Attributes:
        path: of the file.
        values: the indices, int64, shape (m,), or the scores, float64, shape (N,).
        num_samples: the data set's length N.
        fingerprint: of the data set; empty where it is not known.
    """

    def __init__(self, path: str, values: np.ndarray[Any, Any], num_samples: int, fingerprint: str) -> None:
        self.path, self.values, self.num_samples, self.fingerprint = path, values, num_samples, fingerprint

    def problem(self, num_samples: int, fingerprint: str | None) -> str | None:
        """Why it is not of the data set of this length and fingerprint; None where nothing speaks against it.

        Args:
            num_samples: the data set's length.
            fingerprint: of the data set; empty where its samples are drawn at random, None where nobody looked.
        """
        if num_samples != self.num_samples:
            return (
                f"{self.path} is of a data set of {self.num_samples:,} samples, and this one has {num_samples:,}; expected a"
                " file of the very data set that is trained on. Make it anew, or train on that data set."
            )
        if fingerprint is None or not self.fingerprint or fingerprint == self.fingerprint:
            return None
        if not fingerprint:
            return (
                f"{self.path} has the fingerprint {self.fingerprint}, and this data set has none, because its samples are other"
                " ones each time they are looked at; expected the data set that the file was made of. If it is that one, take"
                " the fingerprint out of the file."
            )
        return (
            f"{self.path} is of a data set with the fingerprint {self.fingerprint}, and this one, of as many samples, has"
            f" {fingerprint}; expected a file of the very data set that is trained on. Make it anew; where the samples are the"
            " same ones in another form (other transforms, another tokenizer), take the fingerprint out of the file."
        )


def save(path: str | Path, *, num_samples: int, fingerprint: str, **values: Any) -> None:
    """Write ``indices`` or ``scores``, in one move, so that a file that is there is whole."""
    ((name, array),) = values.items()
    file = Path(path)
    check_suffix(file, who="")
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    if file.suffix == ".json":
        content = {"num_samples": num_samples, "fingerprint": fingerprint or None, name: np.asarray(array).tolist()}
        part.write_text(json.dumps(content) + "\n")
    else:
        with part.open("wb") as stream:
            arrays: dict[str, Any] = {name: np.asarray(array)}
            np.savez_compressed(stream, num_samples=num_samples, fingerprint=fingerprint, **arrays)
    os.replace(part, file)


def check_suffix(path: str | Path, *, who: str) -> None:
    """Raise ``ValueError`` for a name that no such file has."""
    if Path(path).suffix not in SUFFIXES:
        raise ValueError(f"{who}{path}: expected a name that ends in {' or '.join(SUFFIXES)}.")


def read(path: str | Path, name: str, *, who: str) -> Told:
    """The file's ``name``, "indices" or "scores", checked.

    Raises:
        ValueError: if it is not there, of another form, or if its values are none of a data set of ``num_samples``.
    """
    file, start = Path(path), f"{who}: {path}"
    check_suffix(file, who=f"{who}: ")
    if not file.is_file():
        raise ValueError(
            f"{start}: there is no such file; expected one with {name}, as `lightning-eff select` makes it."
        )
    content = _content(file, start)
    for key in ("num_samples", name):
        if key not in content:
            raise ValueError(
                f"{start} holds {', '.join(sorted(map(str, content))) or 'nothing'}; expected num_samples, {name} and, where it"
                " is known, fingerprint."
            )
    size = content["num_samples"]
    if isinstance(size, np.ndarray) and size.ndim == 0:
        size = size.item()
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"{start}: got num_samples={size!r}; expected an integer >= 1, the data set's length.")
    check = _indices if name == "indices" else _scores
    values = check(content[name], size, start)
    return Told(str(path), values, size, str(content.get("fingerprint") or ""))


def _content(file: Path, start: str) -> Mapping[str, Any]:
    try:
        if file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as archive:
                return {key: archive[key] for key in archive.files}
        content = json.loads(file.read_text())
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{start} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{start} holds a {type(content).__name__}; expected a mapping with num_samples.")
    return content


def _array(values: Any, name: str, start: str) -> np.ndarray[Any, Any]:
    try:
        found = np.asarray(values)
    except ValueError:
        found = np.asarray(None)
    if found.ndim != 1 or not len(found) or found.dtype.kind not in "iuf":
        raise ValueError(
            f"{start}: got {name} of shape {found.shape} and type {found.dtype}; expected numbers in a row."
        )
    return found


def _indices(values: Any, size: int, start: str) -> np.ndarray[Any, Any]:
    found = _array(values, "indices", start)
    if found.dtype.kind == "f":
        raise ValueError(f"{start}: got indices of type {found.dtype}; expected integers.")
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= size:
        raise ValueError(
            f"{start}: got indices between {low} and {high:,}; expected all in [0, {size:,}), of the data set's"
            f" {size:,} samples. Is num_samples right?"
        )
    unique = np.unique(found)
    if len(unique) < len(found):
        raise ValueError(
            f"{start}: {len(found) - len(unique):,} of {len(found):,} indices stand twice; expected each once."
        )
    return unique.astype(np.int64)


def _scores(values: Any, size: int, start: str) -> np.ndarray[Any, Any]:
    found = _array(values, "scores", start).astype(np.float64)
    if len(found) != size:
        raise ValueError(f"{start}: got {len(found):,} scores and num_samples={size:,}; expected one for each sample.")
    bad = np.flatnonzero(~np.isfinite(found))
    if len(bad):
        raise ValueError(
            f"{start}: {len(bad):,} of {len(found):,} scores are nan or infinite, the first at index {bad[0]}; expected finite"
            " numbers, which put samples in an order."
        )
    return found


def fingerprint(data_set: Any) -> str:
    """A few letters that follow from some of a data set's samples, as it gives them; empty where they are drawn at random.

    Whoever calls it keys the global random state, since a data set may draw from it.
    """
    size = len(data_set)
    looked = sorted({round(k * (size - 1) / (_LOOKED_AT - 1)) for k in range(_LOOKED_AT)})
    once, again = (_digest([data_set[i] for i in looked]) for _ in range(2))
    return once if once == again else ""


def _digest(value: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    _take_in(digest, value)
    return digest.hexdigest()


def _take_in(digest: Any, value: Any) -> None:
    """A sample's content, whatever it is made of; of objects of unknown make their class alone."""
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        value = value.detach().cpu()
        value = np.asarray(value.float() if str(value.dtype) == "torch.bfloat16" else value)
    if isinstance(value, np.ndarray | np.generic):
        value = np.asarray(value)
        digest.update(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, bytes):
        digest.update(value)
    elif isinstance(value, str | int | float | bool) or value is None:
        digest.update(repr(value).encode())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            digest.update(repr(key).encode())
            _take_in(digest, item)
    elif isinstance(value, Sequence):
        digest.update(f"[{len(value)}]".encode())
        for item in value:
            _take_in(digest, item)
    elif hasattr(value, "tobytes"):  # an image
        digest.update(value.tobytes())
    else:
        digest.update(type(value).__qualname__.encode())
