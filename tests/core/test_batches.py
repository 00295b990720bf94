"""Batches of any make: samples counted and chosen, and what is not a sample's left alone."""

import copy
import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding, BatchFeature
from transformers.modeling_outputs import BaseModelOutput

from lightning_eff._core.batches import (
    check_indexed,
    join,
    map_tensors,
    num_samples,
    num_tokens,
    sample_of,
    select,
    tensors,
)

X = torch.arange(20).reshape(5, 4)
Y = torch.arange(5) * 10
INDEX = torch.tensor([3, 0, 3])
X2, Y2 = torch.stack([X[3], X[0], X[3]]), torch.tensor([30, 0, 30])

Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Record:
    x: Tensor
    y: Tensor
    note: str = "kept"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    made: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "made", self.x[:, 0] * 0)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if hasattr(a, "items"):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(u, v) for u, v in zip(a, b, strict=True))
    return a == b


MASK = torch.ones(4, 4)
BATCHES: dict[str, tuple[Any, Any]] = {
    "tensor": (X, X2),
    "tuple": ((X, Y), (X2, Y2)),
    "list": ([X, Y], [X2, Y2]),
    "dict": ({"x": X, "y": Y}, {"x": X2, "y": Y2}),
    "namedtuple": (Pair(X, Y), Pair(X2, Y2)),
    "nested": ({"in": {"x": X, "m": [X, (Y,)]}, "y": Y}, {"in": {"x": X2, "m": [X2, (Y2,)]}, "y": Y2}),
    "shared": ({"x": X, "mask": MASK, "scale": torch.tensor(2.0)}, {"x": X2, "mask": MASK, "scale": torch.tensor(2.0)}),
    "strings": ({"x": X, "name": list("abcde"), "split": "train"}, {"x": X2, "name": list("dad"), "split": "train"}),
    "tuple_of_strings": ((X, tuple("abcde")), (X2, tuple("dad"))),
    "records": ({"x": X, "meta": [{"id": i} for i in range(5)]}, {"x": X2, "meta": [{"id": i} for i in (3, 0, 3)]}),
    "ragged": (
        {"x": X, "boxes": [torch.full((i, 2), i) for i in range(1, 5)] + [torch.zeros(7, 2)]},
        {"x": X2, "boxes": [torch.full((4, 2), 4), torch.full((1, 2), 1), torch.full((4, 2), 4)]},
    ),
    "numpy": (
        {"x": X, "a": np.arange(5.0), "n": np.arange(3)},
        {"x": X2, "a": np.array([3.0, 0, 3]), "n": np.arange(3)},
    ),
    "ordered": (OrderedDict(y=Y, x=X), OrderedDict(y=Y2, x=X2)),
    "default": (defaultdict(list, x=X), defaultdict(list, x=X2)),
    "encoding": (BatchEncoding({"input_ids": X, "labels": Y}), BatchEncoding({"input_ids": X2, "labels": Y2})),
    "feature": (BatchFeature({"pixel_values": X}), BatchFeature({"pixel_values": X2})),
    "output": (BaseModelOutput(last_hidden_state=X), BaseModelOutput(last_hidden_state=X2)),
    "two_of_two": ((X[:2], Y[:2]), (X[[1, 1, 0]], Y[[1, 1, 0]])),
    "none": ({"x": X, "y": None}, {"x": X2, "y": None}),
}


@pytest.mark.parametrize("name", BATCHES)
def test_samples_are_chosen_in_batches_of_any_make(name: str) -> None:
    batch, expected = copy.deepcopy(BATCHES[name][0]), BATCHES[name][1]
    index = torch.tensor([1, 1, 0]) if name == "two_of_two" else INDEX
    assert num_samples(batch) == (2 if name == "two_of_two" else 5)
    found = select(batch, index)
    assert type(found) is type(expected)
    assert same(found, expected), found
    assert same(select(batch, torch.arange(num_samples(batch))), batch)
    assert same(batch, BATCHES[name][0]), "the batch itself was changed"


def objects(*counts: int) -> list[dict[str, Tensor]]:
    """The targets of a detector: of each image, as many boxes and labels as it has objects."""
    return [{"boxes": torch.full((n, 4), i), "labels": torch.full((n,), i)} for i, n in enumerate(counts)]


IMAGES = [torch.full((3, 8 + i, 8), i) for i in range(3)]
LISTED = {  # batches of three samples, by what shows that their lists have one item per sample
    "by chance as many objects": {"image": torch.arange(3), "objects": objects(1, 3, 2)},
    "by chance as many channels": [IMAGES, objects(1, 3, 2)],
    "as many objects everywhere, beside others": [[torch.zeros(2), torch.ones(1), torch.ones(2)], objects(3, 3, 3)],
    "as many boxes": {"image": torch.arange(3), "boxes": [torch.zeros(3, 4), torch.ones(2, 4), torch.ones(3, 4)]},
}


@pytest.mark.parametrize("name", LISTED)
def test_lists_with_one_item_per_sample_are_never_columns(name: str) -> None:
    batch = LISTED[name]
    lists = [value for value in (batch.values() if isinstance(batch, dict) else batch) if isinstance(value, list)]
    found = select(batch, torch.tensor([2, 0]), 3)
    chosen = [value for value in (found.values() if isinstance(found, dict) else found) if isinstance(value, list)]
    assert lists
    for old, new in zip(lists, chosen, strict=True):
        assert same(new, [old[2], old[0]])
    inside = sample_of(batch, 3)
    assert set(inside.values()) == {0, 1, 2} and len(inside) == sum(len(tensors(value)) for value in lists)
    assert all(f"[{sample}]" in path for path, sample in inside.items())
    check_indexed(batch, 3)


@pytest.mark.parametrize("name", [name for name in LISTED if "everywhere" not in name])  # there, a part says no size
def test_lists_with_one_item_per_sample_are_joined(name: str) -> None:
    batch = LISTED[name]
    parts = [select(batch, torch.tensor(index), 3) for index in ([0], [0, 1, 2], [2, 0])]
    assert [num_samples(part) for part in parts] == [1, 3, 2]
    assert same(join(parts), select(batch, torch.tensor([0, 0, 1, 2, 2, 0]), 3))


def test_columns_as_many_as_samples_stay_columns() -> None:
    mask = torch.zeros(7, 7)
    batch = [torch.arange(4), torch.arange(8).reshape(4, 2), mask, [torch.arange(4), torch.zeros(4, 3)]]
    assert sample_of(batch, 4) == {}
    assert same(select(batch, torch.tensor([1]))[:2], [torch.tensor([1]), torch.tensor([[2, 3]])])
    views = [{"x": torch.zeros(2, 3)}, {"x": torch.ones(2, 3)}]  # of each sample
    assert same(select(views, torch.tensor([1]), 2), [{"x": torch.zeros(1, 3)}, {"x": torch.ones(1, 3)}])


def test_lists_of_one_length_count_samples() -> None:
    assert num_samples((IMAGES, objects(1, 3, 2))) == 3
    assert num_samples((IMAGES[:2], objects(5, 3))) == 2, "channels are most"
    assert num_samples([[X[:4], X[:4]], [X, X]]) == 4, "of two loaders"
    assert num_samples([X, Y]) == 5


def test_dataclasses() -> None:
    found = select(Record(X, Y), INDEX)
    assert isinstance(found, Record)
    assert torch.equal(found.x, X2) and torch.equal(found.y, Y2) and found.note == "kept"
    frozen = select(Frozen(X), INDEX)
    assert torch.equal(frozen.x, X2) and torch.equal(frozen.made, torch.zeros(3, dtype=torch.long))
    assert num_samples(Record(X, Y)) == 5


def test_gradients_go_through() -> None:
    x = torch.ones(5, 2, requires_grad=True)
    select({"x": x}, INDEX)["x"].sum().backward()
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [1, 0, 0, 2, 0]


def test_packed_sequences_are_refused() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    with pytest.raises(ValueError, match="PackedSequence, whose samples are interleaved; expected padded tensors"):
        select({"x": packed, "y": torch.ones(2), "z": torch.ones(2)}, torch.tensor([0]))


class Graphs:
    """A batch of graphs as torch-geometric makes them: its tensors are attributes, and ``to`` moves them."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes, self.num_graphs = nodes, 5

    def to(self, device: torch.device) -> "Graphs":
        return Graphs(self.nodes.to(device))


@pytest.mark.parametrize("batch", [Graphs(X), (Graphs(X), Y), {"graph": [Graphs(X)], "y": Y}])
def test_samples_are_not_taken_out_of_an_object_that_keeps_its_tensors(batch: Any) -> None:
    with pytest.raises(ValueError, match="Got a batch with an object of class Graphs, from which samples cannot be"):
        select(batch, INDEX, 5)
    with pytest.raises(ValueError, match=r"got a batch with an object of class Graphs, .* Collate samples into these"):
        check_indexed(batch, 5)


class Inside:
    """The user's own batch, whose tensors lie in a container."""

    def __init__(self, held: Any) -> None:
        self.held = held


class Slots:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


@pytest.mark.parametrize("batch", [Inside({"x": X}), Inside(Inside([Y])), Slots(X), {"a": Inside({"x": X}), "y": Y}])
def test_samples_are_not_taken_out_of_containers_in_an_object(batch: Any) -> None:
    with pytest.raises(
        ValueError, match=r"Got a batch with an object of class (Inside|Slots), from which samples cannot be"
    ):
        select(batch, INDEX, 5)
    with pytest.raises(ValueError, match=r"got a batch with an object of class (Inside|Slots)"):
        check_indexed(batch, 5)


def test_an_object_without_tensors_is_shared_by_all_samples() -> None:
    shared = Inside({"name": "a"})
    assert select({"x": X, "shared": shared}, INDEX, 5)["shared"] is shared


@pytest.mark.parametrize("batch", [None, "text", {"a": 1}, [torch.tensor(1.0)], []])
def test_a_batch_without_samples_is_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match=f"batch of type {type(batch).__name__} without a tensor .* Collate the batch"):
        num_samples(batch)


def test_the_size_most_tensors_share_counts() -> None:
    assert num_samples({"weights": torch.ones(3), "x": X, "y": Y}) == 5
    assert num_samples((X, torch.ones(7))) == 5, "the first on a tie"


def test_paths_of_tensors() -> None:
    batch = {"a": X, "b": [Y, {"c": Y}], "r": Record(X, Y)}
    assert [path for path, _ in tensors(batch)] == ["['a']", "['b'][0]", "['b'][1]['c']", "['r'].x", "['r'].y"]
    assert tensors(X)[0][0] == ""
    assert tensors(MappingProxyType({"a": Y}))[0][0] == "['a']"


def test_map_tensors() -> None:
    found = map_tensors({"a": X, "b": [Y, "text"]}, lambda t: t + 1)
    assert same(found, {"a": X + 1, "b": [Y + 1, "text"]})


def test_num_tokens() -> None:
    assert num_tokens({"mask": torch.ones(2, 3, dtype=torch.bool), "ids": torch.ones(2, 7, dtype=torch.long)}) == 14
    assert num_tokens((torch.ones(2, 3), torch.ones(2, dtype=torch.long))) == 0
