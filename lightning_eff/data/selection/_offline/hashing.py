"""Hashed n-grams of many documents at once, in NumPy: texts as counts in a few thousand buckets.

A document is a line. Its tokens, after lowering ASCII letters, are the longest runs of word bytes and of other bytes except
white space, as the regular expression ``\\w+|[^\\w\\s]+`` finds them. Word bytes are letters, digits, ``_`` and all bytes from
128 on, which encode other alphabets in UTF-8. The features are the tokens and the pairs of neighbors. With ``t_0 ... t_{n-1}``
the bytes of a token, ``R`` a table of random numbers, and all arithmetic modulo 2^64,

    hash(t) = mix(sum_i R[t_i] P^i),   hash(t u) = mix(M hash(t) + hash(u)),   bucket(h) = floor(h / 2^32) * buckets / 2^32

Sums of prefixes give these for all tokens of a block without a loop.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BLOCK_BYTES = 2**17  # small enough that a block's arrays stay in a core's cache
P = 0x9E3779B97F4A7C15  # odd, so it has an inverse
M = 0xC2B2AE3D27D4EB4F
_INVERSE = pow(P, -1, 2**64)
_WHITE = b" \t\n\r\v\f"

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Words = np.ndarray[Any, np.dtype[np.uint64]]
Numbers = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]


@functools.cache
def _kinds() -> Bytes:
    """The kind of each byte: 0 for white space, 1 for word bytes, 2 for all others."""
    found = np.full(256, 2, dtype=np.uint8)
    word = b"0123456789_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    found[list(word)] = found[128:] = 1
    found[list(_WHITE)] = 0
    return found


@functools.cache
def letters() -> Words:
    """``R``: a random number for each byte, the same for upper and lower case."""
    found = np.random.Generator(np.random.PCG64(0)).integers(0, 2**64, 256, dtype=np.uint64)
    found[65:91] = found[97:123]
    return found


@functools.lru_cache(2)
def _powers(base: int, count: int) -> Words:
    """``base^i`` for i in 0 ... count - 1."""
    found = np.full(count, base, dtype=np.uint64)
    found[0] = 1
    return np.multiply.accumulate(found)


def mix(h: Words) -> Words:
    """Spread differences between numbers over all of their bits."""
    h = h ^ (h >> np.uint64(32))
    h *= np.uint64(0xD6E8FEB86659FD93)
    h ^= h >> np.uint64(32)
    return h


@dataclass(frozen=True)
class Features:
    """The features of a block's documents.

    Attributes:
        tokens: the bucket of each token, shape (n,).
        pairs: the bucket of each token with the next one, shape (n,). The last token of a document has the bucket ``buckets``.
        ends: the number of tokens up to the end of each document, shape (documents,).
    """

    tokens: Integers
    pairs: Integers
    ends: Integers

    def counts(self, buckets: int) -> Integers:
        """Count the features of each bucket, shape (buckets,)."""
        found = np.bincount(self.tokens, minlength=buckets + 1) + np.bincount(self.pairs, minlength=buckets + 1)
        return found[:buckets]

    def sums(self, weights: Numbers) -> Numbers:
        """Sum the ``weights``, shape (buckets + 1,), of each document's features, -inf for one without tokens."""
        each = weights[self.tokens] + weights[self.pairs]
        up_to = np.concatenate([[0.0], np.cumsum(each)])[np.concatenate([[0], self.ends])]
        found = np.diff(up_to)
        found[np.diff(self.ends, prepend=0) == 0] = -np.inf
        return found


def features(block: bytes, buckets: int) -> Features:
    """Compute the features of the documents in ``block``, each of which ends in a newline."""
    text = np.frombuffer(block, dtype=np.uint8)
    kinds = _kinds()[text]
    changes = np.flatnonzero(kinds[1:] != kinds[:-1]) + 1
    begins = np.concatenate([[0], changes])
    token = kinds[begins] != 0
    stops = np.concatenate([changes, [len(text)]])[token]
    starts = begins[token]
    lines = np.flatnonzero(text == 10)
    ends = np.searchsorted(starts, lines)
    if not len(starts):
        nothing = np.empty(0, dtype=np.int64)
        return Features(nothing, nothing, ends)
    size = -(-len(text) // BLOCK_BYTES) * BLOCK_BYTES
    # S_k = sum_{i<k} R[t_i] P^i, so that a token's sum is (S_stop - S_start) P^-start
    up_to = np.empty(len(text) + 1, dtype=np.uint64)
    up_to[0] = 0
    np.multiply(letters()[text], _powers(P, size)[: len(text)], out=up_to[1:])
    np.cumsum(up_to, out=up_to)
    h = mix((up_to[stops] - up_to[starts]) * _powers(_INVERSE, size)[starts])
    pairs = np.full(len(h), buckets, dtype=np.int64)
    pairs[:-1] = _bucket(mix(np.uint64(M) * h[:-1] + h[1:]), buckets)
    last = ends - 1
    pairs[last[last >= 0]] = buckets
    return Features(_bucket(h, buckets), pairs, ends)


def _bucket(h: Words, buckets: int) -> Integers:
    return (((h >> np.uint64(32)) * np.uint64(buckets)) >> np.uint64(32)).astype(np.int64)


def blocks(path: str | Path, start: int, end: int) -> Iterator[bytes]:
    """Yield the whole lines that begin in [start, end) of a file, in blocks that end in a newline."""
    with open(path, "rb") as stream:
        if start:
            stream.seek(start - 1)
            stream.readline()  # belongs to a line that begins before
        while (at := stream.tell()) < end:
            block = stream.read(min(BLOCK_BYTES, end - at))
            if not block:
                return
            if not block.endswith(b"\n"):
                block += stream.readline()
            yield block if block.endswith(b"\n") else block + b"\n"
