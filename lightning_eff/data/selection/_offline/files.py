"""Files of sample indices or scores, and fingerprints that tell data sets apart.

A file holds ``num_samples``, the length N of the data set; ``fingerprint``, which identifies the data set, or null; and either
``indices``, shape (m,), distinct integers in 0 ... N - 1, or ``scores``, shape (N,). A ``.json`` file is a mapping with these
names, a ``.npz`` file is NumPy's archive with these names.
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
_LOOKED_AT = 8  # samples that a fingerprint covers


class Told:
    """The content of a file.

    Attributes:
        path: the path of the file.
        values: the indices, int64, shape (m,), or the scores, float64, shape (N,).
        num_samples: the length N of the data set.
        fingerprint: the fingerprint of the data set, or "" if it is unknown.
    """

    def __init__(self, path: str, values: np.ndarray[Any, Any], num_samples: int, fingerprint: str) -> None:
        self.path, self.values, self.num_samples, self.fingerprint = path, values, num_samples, fingerprint

    def problem(self, num_samples: int, fingerprint: str | None) -> str | None:
        """Explain why the file belongs to another data set, or return None if it may belong to this one.

        Args:
            num_samples: the length of this data set.
            fingerprint: its fingerprint, "" if its samples are drawn at random, or None if it was not computed.
        """
        if num_samples != self.num_samples:
            return (
                f"{self.path} belongs to a data set of {self.num_samples:,} samples, but the training data set has"
                f" {num_samples:,}. Make the file again, or train on its data set."
            )
        if fingerprint is None or not self.fingerprint or fingerprint == self.fingerprint:
            return None
        if not fingerprint:
            return (
                f"{self.path} has the fingerprint {self.fingerprint}, but the training data set has none, because its samples"
                " are random. If the file belongs to this data set, remove the fingerprint from the file."
            )
        return (
            f"{self.path} belongs to a data set with the fingerprint {self.fingerprint}, but the training data set has"
            f" {fingerprint}. Make the file again; or, if only transforms or the tokenizer changed, remove the fingerprint from"
            " the file."
        )


def save(path: str | Path, *, num_samples: int, fingerprint: str, **values: Any) -> None:
    """Write ``indices`` or ``scores`` atomically, so that an existing file is always complete."""
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
    """Raise ``ValueError`` unless the name ends in a known suffix."""
    if Path(path).suffix not in SUFFIXES:
        raise ValueError(f"{who}{path}: expected a name that ends in {' or '.join(SUFFIXES)}.")


def read(path: str | Path, name: str, *, who: str) -> Told:
    """Read and check a file's ``name``, "indices" or "scores".

    Raises:
        ValueError: if the file is missing or malformed, or its values do not fit a data set of ``num_samples``.
    """
    file, start = Path(path), f"{who}: {path}"
    check_suffix(file, who=f"{who}: ")
    if not file.is_file():
        raise ValueError(f"{start}: there is no such file. Give a file of {name}, as `lightning-eff select` writes it.")
    content = _content(file, start)
    for key in ("num_samples", name):
        if key not in content:
            raise ValueError(
                f"{start} holds {', '.join(sorted(map(str, content))) or 'nothing'}; expected num_samples and {name}, and"
                " optionally fingerprint."
            )
    size = content["num_samples"]
    if isinstance(size, np.ndarray) and size.ndim == 0:
        size = size.item()
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"{start}: got num_samples={size!r}; expected an integer >= 1, the length of the data set.")
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
            f"{start}: got {name} of shape {found.shape} and type {found.dtype}; expected a row of numbers."
        )
    return found


def _indices(values: Any, size: int, start: str) -> np.ndarray[Any, Any]:
    found = _array(values, "indices", start)
    if found.dtype.kind == "f":
        raise ValueError(f"{start}: got indices of type {found.dtype}; expected integers.")
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= size:
        raise ValueError(
            f"{start}: got indices between {low} and {high:,}; expected all in [0, {size:,}). Check that num_samples is the"
            " length of the data set."
        )
    unique = np.unique(found)
    if len(unique) < len(found):
        raise ValueError(
            f"{start}: {len(found) - len(unique):,} of {len(found):,} indices are repeated; expected each once."
        )
    return unique.astype(np.int64)


def _scores(values: Any, size: int, start: str) -> np.ndarray[Any, Any]:
    found = _array(values, "scores", start).astype(np.float64)
    if len(found) != size:
        raise ValueError(f"{start}: got {len(found):,} scores and num_samples={size:,}; expected one for each sample.")
    bad = np.flatnonzero(~np.isfinite(found))
    if len(bad):
        raise ValueError(
            f"{start}: {len(bad):,} of {len(found):,} scores are NaN or infinite, the first at index {bad[0]}; expected finite"
            " numbers."
        )
    return found


def fingerprint(data_set: Any) -> str:
    """Hash some samples of a data set, or return "" if its samples are random.

    The caller must key the global random state, because a data set may draw from it.
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
    """Add a sample's content to the digest, or only its class if its type is unknown."""
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
