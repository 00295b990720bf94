"""What blocks leave next to their hidden state: where it is found, read and put, and what is refused later."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_eff.strategies._side_outputs.places import Place, SideOutputs
from tests.mixtures import built
from tests.models import make_batch


class Block(nn.Module):
    """Leaves something in each way."""

    def __init__(self, shared: list[Tensor]) -> None:
        super().__init__()
        self.linear, self.shared, self.last, self.number = nn.Linear(8, 8), shared, torch.zeros(()), 0.0

    def forward(self, x: Tensor, times: int = 1) -> tuple[Tensor, Tensor, Tensor | None]:
        y = self.linear(x)
        self.shared.extend(y.mean() * i for i in range(1, times + 1))
        if times:
            self.last = y.std()
        self.whole = y * 2  # as large as the hidden state
        self.noted = y.max().detach()
        return y, y.min(), None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared: list[Tensor] = []
        self.blocks = nn.ModuleList(Block(self.shared) for _ in range(2))


def learnt() -> tuple[Net, SideOutputs]:
    torch.manual_seed(0)
    net = Net()
    beside = SideOutputs(net, who="Test")
    for index, block in enumerate(net.blocks):
        before = beside.before(index, learn=True)
        assert before is not None
        hidden, *rest = block(torch.randn(2, 3, 8), times=index + 1)
        beside.learn(index, before, hidden, rest)
    return net, beside


def test_places_are_found_once_and_only_those_that_can_be_sent() -> None:
    """Neither what is detached, nor as large as the hidden state; a list that several modules have counts once."""
    _, beside = learnt()
    assert beside.places == {
        0: (Place("output", "", 1), Place("list", "", "shared"), Place("attribute", "blocks.0", "last")),
        1: (
            Place("output", "", 1),
            Place("list", "", "shared"),
            Place("list", "", "shared", 1),
            Place("attribute", "blocks.1", "last"),
        ),
    }
    assert str(beside) == "output 1 of a block, shared, blocks.0.last and others"


def test_what_is_put_is_what_was_left() -> None:
    net, beside = learnt()
    before = beside.before(1)
    hidden, *rest = net.blocks[1](torch.randn(2, 3, 8), times=2)
    values = beside.left(1, before, rest)
    assert [v is w for v, w in zip(values, (rest[0], *net.shared[-2:], net.blocks[1].last), strict=True)] == [True] * 4
    assert beside.outputs(1, values) == {1: rest[0]}
    zeros = [torch.zeros_like(hidden[0, 0, 0]) for _ in values]
    beside.replace(1, before, zeros)
    assert (
        net.blocks[1].last is zeros[3]
        and [t is z for t, z in zip(net.shared[-2:], zeros[1:3], strict=True)] == [True] * 2
    )
    del net.shared[-2:]
    number = len(net.shared)
    beside.put(1, values)
    assert len(net.shared) == number + 2 and net.shared[-1] is values[2] and net.blocks[1].last is values[3]


def test_each_block_has_its_part_of_what_is_sent() -> None:
    _, beside = learnt()
    values = {0: [torch.tensor(float(i)) for i in range(3)], 1: [torch.tensor(float(i)) for i in range(3, 7)]}
    flat = beside.flat(values, 2)
    assert [float(t) for t in flat if t is not None] == [0, 1, 2, 3, 4, 5, 6]
    again = beside.by_block(flat, 2)
    assert {i: [float(t) for t in part if t is not None] for i, part in again.items()} == {
        0: [0, 1, 2],
        1: [3, 4, 5, 6],
    }
    assert len(beside.flat(values, 1)) == 3 and beside.flat({}, 1) == [None] * 3


def test_a_block_that_leaves_more_or_less_later_is_refused() -> None:
    net, beside = learnt()
    before = beside.before(0)
    _, *rest = net.blocks[0](torch.randn(2, 3, 8), times=2)
    with pytest.raises(ValueError, match="Test: block 0 appends 2 tensors to shared, but appended 1 in the first step"):
        beside.left(0, before, rest)
    before = beside.before(0)
    _, *rest = net.blocks[0](torch.randn(2, 3, 8), times=0)
    values = beside.left(0, before, rest)
    assert [value is None for value in values] == [False, True, True]
    with pytest.raises(ValueError, match="Test: block 0 left no tensor in shared, as it did in the first step"):
        beside.refuse_missing({0: values}, 1)


def test_new_places_are_refused_and_known_or_detached_ones_are_not() -> None:
    torch.manual_seed(0)
    net = Net()
    beside = SideOutputs(net, who="Test")
    x = torch.randn(2, 3, 8)

    def called(index: int, times: int) -> tuple[Any, Tensor, list[Any]]:
        before = beside.before(index, learn=True)
        hidden, *rest = net.blocks[index](x, times=times)
        return before, hidden, rest

    before, hidden, rest = called(0, 0)
    beside.refuse_new([0], before, hidden)  # nothing has been learnt
    for index in range(2):
        beside.learn(index, *called(index, 0))
    before, hidden, rest = called(0, 0)
    beside.refuse_new([0], before, hidden)
    beside.refuse_new_outputs(0, hidden, rest)
    before, hidden, rest = called(1, 1)
    with pytest.raises(
        ValueError, match=r"^Test: blocks leave a tensor with a gradient in shared, but left none there"
    ):
        beside.refuse_new([1], before, hidden)
    beside.refuse_new_outputs(1, hidden, [rest[0], x.sum()])
    with pytest.raises(ValueError, match="gradient in output 2 of a block, but left none there in the first step"):
        beside.refuse_new_outputs(1, hidden, [rest[0], hidden.sum()])


def test_a_list_that_begins_anew_in_each_pass_is_the_same_place() -> None:
    net, beside = learnt()
    fresh: list[Any] = []
    net.shared = fresh
    block: Any = net.blocks[0]
    block.shared = fresh
    before = beside.before(0)
    _, *rest = net.blocks[0](torch.randn(2, 3, 8))
    assert beside.left(0, before, rest)[1] is fresh[0]


def test_routers_that_transformers_records() -> None:
    net, found = built("mixtral"), []
    blocks: Any = net.get_submodule("model.model.layers")
    beside = SideOutputs(net, who="Test")

    def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
        found.append(beside.before(len(found) // 2, learn=True))

    def leave(block: nn.Module, args: Any, output: Tensor) -> None:
        index = len(found) // 2
        beside.learn(index, found[-1], output, ())
        found.append(beside.left(index, found[-1], ()))

    for block in blocks:
        block.register_forward_pre_hook(enter, with_kwargs=True)
        block.register_forward_hook(leave)
    output = net.get_submodule("model")(**make_batch("llama"))
    assert beside.places == {i: (Place("record", "", "router_logits"),) for i in range(4)}
    assert [left[0] is logits for left, logits in zip(found[1::2], output.router_logits, strict=True)] == [True] * 4
