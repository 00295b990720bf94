"""Finding the stack of blocks in any module, showing part of it, and leaving it as it was."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_eff._core.blocks import (
    BlockStack,
    candidates,
    copy_block,
    find_stack,
    hidden_of,
    signature,
    split_output,
)
from tests.models import TinyGPT, hugging_face, loader, make_batch, trainer

PATHS = {
    "gpt2": "model.transformer.h",
    "llama": "model.model.layers",
    "bert": "model.bert.encoder.layer",
    "vit": "model.vit.layers",
}


def stack_of(module: nn.Module, layers: str | None = None) -> BlockStack:
    return BlockStack(find_stack(module, layers, who="Test"))


class Residual(nn.Module):
    """``x + linear(x)``, which counts its calls."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.linear, self.kind, self.calls = nn.Linear(dim, dim), "residual", 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.linear(x)


class Mixture(nn.Module):
    """A block with experts inside, more of them than there are blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Residual() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(expert(x) for expert in self.experts)


class Holds(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def repeat(n: int, make: Any = Residual) -> nn.ModuleList:
    return nn.ModuleList(make() for _ in range(n))


# -- finding


@pytest.mark.parametrize("built", ["init", "setup", "configure_model"])
def test_finds_hand_written_blocks_wherever_they_are_built(built: str) -> None:
    net = TinyGPT(num_layers=5, built=built)
    trainer(max_steps=1).fit(net, loader("tiny_gpt"))
    found = find_stack(net, None, who="Test")
    assert (found.path, found.length, found.block) == ("blocks", 5, "Block")
    assert found.container is net.blocks


@pytest.mark.parametrize("name", sorted(PATHS))
def test_finds_hugging_face_blocks(name: str) -> None:
    net = hugging_face(name, num_layers=3)
    assert (find_stack(net, None, who="Test").path, len(stack_of(net))) == (PATHS[name], 3)


def test_t5_has_two_stacks_and_the_error_lists_both() -> None:
    net = hugging_face("t5")
    with pytest.raises(
        ValueError,
        match=r"Test: 2 stacks .* equally long: 'model.encoder.block' \(4 x T5Block\), 'model.decoder.block' \(4 x T5Block"
        r"\).*layers='model.encoder.block'",
    ):
        find_stack(net, None, who="Test")
    assert find_stack(net, "model.decoder.block", who="Test").length == 4


def test_finds_a_sequential() -> None:
    net = Holds(
        body=nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))), head=nn.Linear(4, 2)
    )
    assert find_stack(net, None, who="Test").path == "body"


def test_a_misspelt_path_lists_what_there_is() -> None:
    with pytest.raises(
        ValueError, match=r"layers='blokcs'\): that path names no submodule of TinyGPT.*'blocks' \(4 x Block\)"
    ):
        find_stack(TinyGPT(), "blokcs", who="Test")
    with pytest.raises(ValueError, match=r"layers='embed'\): that path is a Embedding of TinyGPT.*'blocks' \(4 x"):
        find_stack(TinyGPT(), "embed", who="Test")
    with pytest.raises(ValueError, match=r"layers=''\)"):
        find_stack(TinyGPT(), "", who="Test")


def test_no_stack_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"Test: found no stack of repeated blocks in Linear.*layers="):
        find_stack(nn.Linear(2, 2), None, who="Test")
    with pytest.raises(ValueError, match="found no stack"):
        find_stack(Holds(blocks=repeat(1)), None, who="Test")


def test_blocks_of_unequal_shapes_are_taken_where_they_are_named() -> None:
    net = Holds(blocks=nn.ModuleList([Residual(4), Residual(8), Residual(16)]))
    with pytest.raises(
        ValueError, match=r"no stack of equal blocks.*'blocks' \(3 x Residual\) differ in.*layers='blocks'\)"
    ):
        find_stack(net, None, who="Test")
    assert find_stack(net, "blocks", who="Test").length == 3
    with pytest.raises(
        ValueError, match=r"differ in the shapes of their parameters, so that none can be a copy\. Remove Test"
    ):
        find_stack(net, None, who="Test", copies=True)


def test_a_container_of_several_classes_is_no_stack() -> None:
    mixed = Holds(blocks=nn.ModuleList([Residual(), nn.Linear(4, 4), Residual()]))
    with pytest.raises(ValueError, match="found no stack"):
        find_stack(mixed, None, who="Test")
    with pytest.raises(ValueError, match=r"holds \['Linear', 'Residual'\]; expected blocks of one class"):
        find_stack(mixed, "blocks", who="Test")


def test_experts_inside_blocks_are_no_candidates() -> None:
    net = Holds(layers=repeat(3, Mixture))
    assert [c.path for c in candidates(net)] == ["layers"]
    assert find_stack(net, None, who="Test").length == 3
    assert find_stack(net, "layers.1.experts", who="Test").length == 8  # but can be named


def test_blocks_that_fsdp2_has_divided_here_and_not_there_are_one_stack() -> None:
    """In a pipeline: a process divides the blocks of its own stage, and the others' stand beside them as they were."""
    net = Holds(blocks=repeat(4), bare=repeat(5, lambda: nn.Linear(4, 4)))
    divided = type("FSDPResidual", (FSDPModule, Residual), {})  # as fully_shard makes it
    for block in net.blocks[:2]:
        object.__setattr__(block, "__class__", divided)
    found = find_stack(net, None, who="Test")
    assert str(found) == str(find_stack(net, "blocks", who="Test")) == "'blocks' (4 x Residual)"


def test_the_longest_is_taken_and_blocks_go_before_bare_layers() -> None:
    net = Holds(short=repeat(3), long=repeat(5), bare=repeat(9, lambda: nn.Linear(4, 4)))
    assert [c.path for c in candidates(net)] == ["long", "short", "bare"]
    assert find_stack(net, None, who="Test").path == "long"


def test_stages_of_several_widths_are_no_stack_but_their_blocks_are() -> None:
    def stage(dim: int, depth: int) -> nn.Module:
        return Holds(blocks=nn.ModuleList(Residual(dim) for _ in range(depth)), down=nn.Linear(dim, 2 * dim))

    net = Holds(stages=nn.ModuleList([stage(4, 2), stage(8, 6), stage(16, 2)]))
    assert find_stack(net, None, who="Test").path == "stages.1.blocks"


# -- showing a part


def run(net: nn.Module, x: Tensor, code: str) -> Tensor:
    blocks: Any = net.blocks
    if code == "iterate":
        for block in blocks:
            x = block(x)
    elif code == "slice":
        for block in blocks[:4]:
            x = block(x)
    elif code == "count":
        for i in range(len(blocks)):
            x = blocks[i](x)
    else:  # the depth written down, as in many hand-written models
        for i in range(4):
            x = blocks[i](x)
    return x


@pytest.mark.parametrize("code", ["iterate", "slice", "count", "index"])
@pytest.mark.parametrize("container", [nn.ModuleList, nn.Sequential])
def test_a_prefix_is_run_however_the_code_walks_the_blocks(code: str, container: Any) -> None:
    blocks = [Residual() for _ in range(4)]
    net = Holds(blocks=container(blocks) if container is nn.ModuleList else container(*blocks))
    stack, x = stack_of(net), torch.randn(2, 4)
    stack.active = 2
    expected = blocks[1](blocks[0](x))
    calls = [block.calls for block in blocks]
    with stack.view(training=True):
        assert torch.equal(run(net, x, code), expected)
        assert isinstance(net.blocks, container)
    assert [block.calls - before for block, before in zip(blocks, calls, strict=True)] == [1, 1, 0, 0]
    assert type(net.blocks) is container
    assert not any("_shown_by" in m.__dict__ for m in net.modules())
    assert all(type(block) is Residual for block in blocks)
    assert len(net.blocks) == 4 and len(list(net.parameters())) == 8


def test_a_sequential_shows_a_prefix_to_its_own_forward() -> None:
    blocks = nn.Sequential(*(Residual() for _ in range(3)))
    net, x = Holds(blocks=blocks), torch.randn(2, 4)
    stack = stack_of(net)
    stack.active = 1
    with stack.view(training=False):
        assert torch.equal(net.blocks(x), blocks[0](x))


def test_the_view_ends_with_an_exception() -> None:
    net = Holds(blocks=repeat(4))
    original, names = net.blocks._modules, list(net.state_dict())
    stack = stack_of(net)
    stack.active, stack.dropped, x = 3, frozenset({1}), torch.randn(2, 4)
    with pytest.raises(RuntimeError, match="planted"), stack.view(training=True):
        assert len(net.blocks) == 3
        assert net.blocks[1](x) is x
        raise RuntimeError("planted")
    assert net.blocks._modules is original
    assert type(net.blocks) is nn.ModuleList
    assert list(net.state_dict()) == names
    with stack.view(training=True), stack.view(training=False):  # an inner view changes nothing, nor does its end
        assert len(net.blocks) == 3
        with stack.view(training=False):
            pass
        assert len(net.blocks) == 3


def test_evaluation_does_not_drop() -> None:
    net = Holds(blocks=repeat(3))
    stack = stack_of(net)
    stack.dropped, stack.keep = frozenset({0, 2}), [0.5] * 3
    stack.watch(scales=True)
    x = torch.randn(2, 4)
    expected = net.blocks[1](net.blocks[0](x))
    stack.active = 2
    with stack.view(training=False):
        assert torch.equal(run(net, x, "iterate"), expected)
    stack.release()


@pytest.mark.parametrize("away", [False, True])
def test_a_passed_block_hands_on_and_is_itself_in_all_else(away: bool) -> None:
    block = Residual()
    net = Holds(blocks=nn.ModuleList([Residual(), block]))
    stack, x, heard = stack_of(net), torch.randn(2, 4), []
    block.register_forward_hook(lambda *_: heard.append("hook"))
    block.forward = lambda x: x + 1  # type: ignore[method-assign]  # as libraries patch instances
    if away:
        stack.active = 1
    else:
        stack.dropped = frozenset({1})
    with stack.view(training=True):
        assert block(x) is x and block.forward(x) is x
        assert isinstance(block, Residual) and block.kind == "residual" and len(list(block.parameters())) == 2
        copied = copy.deepcopy(net)
        pickled = pickle.loads(pickle.dumps(net.blocks[0]))
        with pytest.raises(AttributeError, match="no attribute 'missing'"):
            _ = block.missing
    assert heard == ([] if away else ["hook"]) and block.calls == 0
    assert torch.equal(block(x), x + 1)
    assert type(pickled) is Residual
    for m in (copied.blocks, copied.blocks[1]):  # made in the step, and of the plain module
        assert type(m) in (nn.ModuleList, Residual) and "_shown_by" not in m.__dict__
    assert len(copied.blocks) == 2


def test_what_is_not_scaled_may_return_anything_and_what_is_may_not() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"x": self.linear(x)}

    net = Holds(blocks=repeat(3, Odd))
    stack, x = stack_of(net), torch.randn(2, 4)
    stack.active = 2
    stack.watch(scales=False)
    with stack.view(training=True):
        assert [sorted(block(x)) for block in net.blocks] == [["x"], ["x"]]
        with pytest.raises(ValueError, match=r"BlockStack: block 1 of .* returns dict, so .*; expected a tensor, or"):
            net.blocks[2](x)
    stack.watch(scales=True)
    with pytest.raises(ValueError, match=r"BlockStack: block 0 of .* returns dict"):
        net.blocks[0](x)
    stack.release()


def test_a_kept_block_that_changes_the_shape_is_an_error() -> None:
    class Widens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    net = Holds(blocks=repeat(2, Widens))
    stack = stack_of(net)
    stack.watch(scales=True)
    with pytest.raises(ValueError, match=r"Block 0 of 'blocks' took .*\(2, 4\) and returned \(2, 8\); expected"):
        net.blocks[0](torch.randn(2, 4))
    stack.release()


def test_hidden_state_and_output() -> None:
    mask, x = torch.ones(2, dtype=torch.bool), torch.randn(2, 4)
    assert hidden_of((mask, x), {}) is x
    assert hidden_of((), {"scale": torch.ones(1), "hidden_states": x}) is x
    with pytest.raises(TypeError, match=r"A block was called with \['Tensor'\] and \[\]; expected a floating-point"):
        hidden_of((mask,), {})
    assert split_output(x) == (x, None)
    assert split_output((x, None)) == (x, (None,))


def test_t5_blocks_carry_the_position_bias_past_a_dropped_block() -> None:
    net = hugging_face("t5")
    stack = stack_of(net, "model.encoder.block")
    stack.watch(scales=True)
    batch = make_batch("t5")
    with stack.view(training=True):
        net.training_step(batch, 0)
    assert stack.carries is True
    stack.dropped, stack.keep = frozenset({1, 3}), [1.0] * 4
    with stack.view(training=True):
        loss = net.training_step(batch, 0)
    loss.backward()
    parent = net.get_submodule("model.encoder")
    parent.block = nn.ModuleList([stack.blocks[0], stack.blocks[2]])  # the reference: taken out by hand
    assert torch.equal(loss, net.training_step(batch, 0))
    parent.block = stack.container
    bias = stack.blocks[0].layer[0].SelfAttention.relative_attention_bias.weight
    assert bias.grad is not None and bias.grad.abs().sum() > 0
    assert all(p.grad is None for i in (1, 3) for p in stack.blocks[i].parameters())
    stack.release()
    assert not any(block._forward_hooks for block in stack.blocks)


# -- freezing and copying


def test_freezing_leaves_alone_what_the_user_froze_and_what_is_shared() -> None:
    net = Holds(blocks=repeat(4))
    blocks: Any = net.blocks
    blocks[3].linear.weight = blocks[0].linear.weight  # shared with a block that runs
    blocks[2].linear.bias.requires_grad_(False)
    flags = {name: p.requires_grad for name, p in net.named_parameters()}
    stack = stack_of(net)
    stack.active = 2
    blocks[2].linear.weight.grad = torch.ones(4, 4)
    stack.freeze_inactive()
    assert blocks[0].linear.weight.requires_grad
    assert not any(p.requires_grad for p in (*blocks[2].parameters(), blocks[3].linear.bias))
    assert blocks[2].linear.weight.grad is None
    stack.active = 3
    stack.freeze_inactive()
    assert blocks[2].linear.weight.requires_grad and not blocks[2].linear.bias.requires_grad
    stack.release()
    assert {name: p.requires_grad for name, p in net.named_parameters()} == flags


def test_copies_parameters_and_buffers_and_says_which() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    source, target = make(), make()
    source(torch.randn(8, 4))
    assert signature(source) == signature(target)
    kept = [id(t) for t in (*target.parameters(), *target.buffers())]
    pairs = copy_block(source, target)
    assert [id(t) for t in (*target.parameters(), *target.buffers())] == kept
    assert all(
        torch.equal(a, b) for a, b in zip(source.state_dict().values(), target.state_dict().values(), strict=True)
    )
    assert [(id(a), id(b)) for a, b in pairs] == list(
        zip(map(id, source.parameters()), map(id, target.parameters()), strict=True)
    )
    assert copy_block(source, source) == []
    assert signature(nn.Linear(2, 3)) != signature(nn.Linear(3, 2))
