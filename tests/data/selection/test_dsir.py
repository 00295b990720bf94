"""DSIR: hashed n-grams of blocks are those of single documents by hand, and documents are drawn as often as they weigh."""

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_eff.data.selection._offline import dsir, hashing
from lightning_eff.data.selection._offline.dsir import Part, Weighing, gumbel_top_k, log_ratios, parts

TOKEN = re.compile(rb"[0-9A-Za-z_\x80-\xff]+|[^ \t\n\r\v\f0-9A-Za-z_\x80-\xff]+")
TEXT = Path(dsir.__file__).read_bytes() + "Über\xa0 naïve\n\n \n((x)) X  x\n\x00\n".encode() + b"no end"
TARGET = Path(hashing.__file__).read_bytes()
BUCKETS = 500


def mix(h: int) -> int:
    h ^= h >> 32
    h = h * 0xD6E8FEB86659FD93 % 2**64
    return h ^ (h >> 32)


def by_hand(line: bytes, buckets: int = BUCKETS) -> Counter[int]:
    """The buckets of a document's tokens and pairs, one by one."""
    table = [int(x) for x in hashing.letters()]
    hashes = [
        mix(sum(table[c] * pow(hashing.P, i, 2**64) for i, c in enumerate(token)) % 2**64)
        for token in TOKEN.findall(line)
    ]
    pairs = [mix((hashing.M * a + b) % 2**64) for a, b in itertools.pairwise(hashes)]
    return Counter((h >> 32) * buckets >> 32 for h in hashes + pairs)


def lines(text: bytes) -> list[bytes]:
    found = text.split(b"\n")
    return found if found[-1] else found[:-1]


def weights_by_hand(raw: list[bytes], target: list[bytes]) -> list[float]:
    p, q = Counter[int](), Counter[int]()
    for texts, counts in ((target, p), (raw, q)):
        for text in texts:
            counts.update(by_hand(text))
    ratio = {
        j: np.log(p[j] / p.total() + dsir.SMOOTHING) - np.log(q[j] / q.total() + dsir.SMOOTHING) for j in range(BUCKETS)
    }
    documents = [by_hand(text) for text in raw]
    return [sum(c * ratio[j] for j, c in d.items()) if d else -np.inf for d in documents]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and parts that end in the middle of lines."""
    monkeypatch.setattr(hashing, "BLOCK_BYTES", 256)
    hashing._powers.cache_clear()
    monkeypatch.setattr(dsir, "PART_BYTES", 1001)


class InThisProcess:
    """In place of a pool of processes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "InThisProcess":
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def submit(self, fn: Any, *args: Any) -> Any:
        from concurrent.futures import Future

        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dsir, "ProcessPoolExecutor", InThisProcess)


def text(folder: Path, name: str, content: bytes) -> str:
    path = folder / name
    path.write_bytes(content)
    return str(path)


def test_log_weights_are_those_of_a_loop_over_documents(alone: None, tmp_path: Path) -> None:
    raw, target = text(tmp_path, "raw.txt", TEXT), text(tmp_path, "target.txt", TARGET)
    told: list[tuple[str, int]] = []
    found = Weighing(
        [raw, target], [target], tmp_path / "w", buckets=BUCKETS, tell=lambda what, size: told.append((what, size))
    )
    weights = found.run()
    wanted = weights_by_hand(lines(TEXT) + lines(TARGET), lines(TARGET))
    assert len(weights) == len(wanted) and np.isneginf(weights).sum() == wanted.count(-np.inf) > 2
    np.testing.assert_allclose(weights, wanted, rtol=1e-9, atol=1e-9)
    assert sum(size for _, size in told) == found.bytes == 3 * len(TARGET) + 2 * len(TEXT)


def test_the_target_itself_weighs_nothing(alone: None, tmp_path: Path) -> None:
    """log w = 0 exactly where the raw text is the target."""
    raw = text(tmp_path, "raw.txt", TEXT)
    weights = Weighing([raw], [raw], tmp_path / "w", buckets=BUCKETS).run()
    assert (weights[np.isfinite(weights)] == 0).all() and np.isfinite(weights).sum() > 100


def test_documents_like_the_target_are_drawn(alone: None, tmp_path: Path) -> None:
    cats = [b"the cat sat on the mat %d" % (i % 3) for i in range(60)]
    stocks = [b"stocks fell as rates rose %d" % (i % 3) for i in range(60)]
    mixed = [line for pair in zip(cats, stocks, strict=True) for line in pair]
    raw, target = text(tmp_path, "r.txt", b"\n".join(mixed)), text(tmp_path, "t.txt", b"\n".join(stocks[:9]))
    weights = Weighing([raw], [target], tmp_path / "w").run()
    assert gumbel_top_k(weights, 60, 0).tolist() == [*range(1, 120, 2)]


def test_inclusion_is_a_softmax_where_one_of_two_is_drawn() -> None:
    log_w = np.array([0.3, -0.8])
    drawn = np.bincount([int(gumbel_top_k(log_w, 1, seed)[0]) for seed in range(4000)]) / 4000
    p = np.exp(log_w) / np.exp(log_w).sum()
    assert np.abs(drawn - p).max() < 4 * np.sqrt(p[0] * p[1] / 4000)
    assert gumbel_top_k(np.array([0.0, -np.inf, 1.0]), 2, 1).tolist() == [0, 2]


def test_parts_hold_each_line_once(tmp_path: Path) -> None:
    path = text(tmp_path, "raw.txt", TEXT)
    pieces = [b"".join(part.texts()) for part in parts([path], "text", 9)]
    assert len(pieces) > 5 and b"".join(pieces) == TEXT + b"\n"
    assert all(piece.endswith(b"\n") for piece in pieces if piece)


def test_lines_of_json_are_their_texts(tmp_path: Path) -> None:
    texts = ["one two", "two\nlines ß", ""]
    path = text(tmp_path, "raw.jsonl", "".join(json.dumps({"body": t, "text": 7}) + "\n" for t in texts).encode())
    (part,) = parts([path], "body", 9)
    assert b"".join(part.texts()).decode() == "one two\ntwo lines ß\n\n"
    with pytest.raises(ValueError, match=r"not a JSON object with a text under 'text' .*with --field"):
        list(parts([path], "text", 9)[0].texts())
    assert parts([text(tmp_path, "raw.txt", b"{}\n")], "body", 9)[0].field == ""


def test_what_was_done_is_taken_up(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, target = text(tmp_path, "raw.txt", TEXT), text(tmp_path, "target.txt", TARGET)
    whole = Weighing([raw], [target], tmp_path / "w", buckets=BUCKETS).run()
    done = sorted((tmp_path / "w").glob("*.npy"))
    done[0].unlink(), done[-1].unlink(), done[-2].unlink()
    calls: list[Part] = []
    for name in ("count", "weigh"):
        own = getattr(dsir, name)
        monkeypatch.setattr(dsir, name, lambda part, *more, own=own: (calls.append(part), own(part, *more))[1])
    again = Weighing([raw], [target], tmp_path / "w", buckets=BUCKETS).run()
    assert len(calls) == 3 and np.array_equal(whole, again)
    text(tmp_path, "target.txt", TARGET[:900])
    other = Weighing([raw], [target], tmp_path / "w", buckets=BUCKETS)
    assert not np.array_equal(other.run(), whole) and len(calls) > 10, "of another text, nothing is taken up"
    other.clear()
    assert not (tmp_path / "w").exists()


def test_processes_find_the_same(tmp_path: Path) -> None:
    raw, target = text(tmp_path, "raw.txt", TEXT), text(tmp_path, "target.txt", TARGET)
    weights = Weighing([raw], [target], tmp_path / "w", buckets=BUCKETS, jobs=2).run()
    np.testing.assert_allclose(weights, weights_by_hand(lines(TEXT), lines(TARGET)), rtol=1e-9, atol=1e-9)


def test_ratios_end_in_a_zero_for_pairs_over_the_end_of_a_document() -> None:
    ratios = log_ratios(np.array([3, 1]), np.array([1, 1]))
    np.testing.assert_allclose(ratios, [np.log(0.75 / 0.5), np.log(0.25 / 0.5), 0], rtol=1e-6)
