"""The recomputation engine against plain autograd: gradients bit for bit, calls as planned, bytes as counted by hand."""

import copy
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_eff._core.blocks import BlockStack, find_stack
from lightning_eff._core.patches import Patches
from lightning_eff.memory._planning.chain import Item, Keep, Segment, Stage
from lightning_eff.memory._planning.plan import Plan, full, keep_all, sqrt
from lightning_eff.memory._recompute.calls import hand_over, without_caches
from lightning_eff.memory._recompute.recomputation import Recomputation
from lightning_eff.memory._recompute.selective import Selective, warn_on_cpu
from tests.models import hugging_face, make_batch, module


def blank(n: int) -> tuple[Stage, ...]:
    return tuple(Stage(str(i), 0.0, 0.0, 0, 0, 0, 0, 0) for i in range(n))


def seg(start: int, end: int, *inner: Item) -> Segment:
    return Segment(start, end, inner or tuple(Keep(i) for i in range(start, end)))


PLANS: dict[str, tuple[Item, ...]] = {
    "full": full(blank(6)).items,
    "sqrt": sqrt(blank(6)).items,
    "one segment": (seg(0, 6),),
    "middle": (Keep(0), seg(1, 4), Keep(4), Keep(5)),
    "nested": (seg(0, 4, seg(0, 2), Keep(2), Keep(3)), Keep(4), Keep(5)),
    "kept first": (seg(0, 5, Keep(0), seg(1, 3), Keep(3), Keep(4)), Keep(5)),
    "two inside": (seg(0, 6, seg(0, 2), seg(2, 4, seg(2, 3), Keep(3)), Keep(4), Keep(5)),),
    "quadratic": (seg(0, 5, seg(0, 4, seg(0, 3, seg(0, 2, seg(0, 1), Keep(1)), Keep(2)), Keep(3)), Keep(4)), Keep(5)),
    "segment at an inner end": (seg(0, 4, seg(0, 2), seg(2, 4)), Keep(4), Keep(5)),
}


@contextmanager
def following(net: Any, items: Sequence[Item] | None) -> Iterator[Recomputation | Selective]:
    """The net's longest stack under a plan, or, for None, under selective checkpointing."""
    stack, patches = BlockStack(find_stack(net, None, who="test")), Patches()
    engine: Recomputation | Selective
    if items is None:
        engine = Selective(stack.blocks)
    else:
        engine = Recomputation(stack.blocks)
        engine.follow(items)
    hand_over(stack, patches, lambda i, run, args, kwargs: engine.call(i, run, *without_caches(args, kwargs)))
    training_step = net.training_step

    def step(batch: Any, batch_idx: int) -> Tensor:
        loss = training_step(batch, batch_idx)
        if isinstance(engine, Recomputation):
            engine.forget()
        return loss

    patches.set(net, "training_step", step)
    try:
        yield engine
    finally:
        patches.restore()


@contextmanager
def counting(net: nn.Module) -> Iterator[list[int]]:
    """How often each block of the longest stack is entered."""
    path = "blocks" if hasattr(net, "blocks") else None
    blocks = list(find_stack(net, path, who="test").container._modules.values())
    calls = [0] * len(blocks)

    def count(index: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            calls[index] += 1

        return hook

    handles = [block.register_forward_pre_hook(count(i)) for i, block in enumerate(blocks) if block is not None]
    yield calls
    for handle in handles:
        handle.remove()


def outcome(net: Any, batch: Any, autocast: bool = False) -> dict[str, Tensor]:
    """Loss, gradients, buffers and random state of one training step, from seed 3."""
    net.zero_grad()
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = net.training_step(batch, 0)
    after_forward = torch.get_rng_state()
    torch.rand(())  # what is drawn in between is not drawn again
    loss.backward()
    found = {f"gradient of {name}": p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    buffers = {f"buffer {name}": b.clone() for name, b in net.named_buffers()}
    random = {"random": torch.get_rng_state(), "random after forward": after_forward}
    return {"loss": loss.detach(), **found, **buffers, **random}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def build(name: str) -> Any:
    torch.manual_seed(1)
    if name == "tiny_gpt":
        net = module(name, num_layers=6, dropout=0.2)
        net.log = lambda *_: None  # there is no trainer
        return net
    return hugging_face(name, num_layers=6, dropout=0.2)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["tiny_gpt", "gpt2", "llama", "bert", "vit"])
def test_every_plan_gives_the_gradients_of_plain_training(name: str, autocast: bool) -> None:
    net, batch = build(name), make_batch(name)
    expected = outcome(net, batch, autocast)
    assert any("gradient" in key for key in expected)
    for items in [*PLANS.values(), None]:
        with following(net, items) as engine:
            assert_same(expected, outcome(net, batch, autocast))
            assert engine.reruns > 0
    assert_same(expected, outcome(net, batch, autocast))


@pytest.mark.parametrize("plan", PLANS)
def test_blocks_run_as_often_as_planned(plan: str) -> None:
    net, batch = build("tiny_gpt"), make_batch("tiny_gpt")
    planned = Plan(blank(6), PLANS[plan]).forward_calls
    with following(net, PLANS[plan]) as engine, counting(net) as calls:
        outcome(net, batch)
    assert tuple(calls) == planned
    assert isinstance(engine, Recomputation)
    assert engine.reruns == sum(planned) - 6


def test_a_rerun_ends_with_the_last_tensor_that_is_needed() -> None:
    """The last product of the last block of a segment need not be computed again: only its input is saved."""
    net, x = Chain([Residual(8) for _ in range(6)]), torch.randn(16, 8)
    done = [0] * 6
    for i, block in enumerate(net.blocks):
        block.down.register_forward_hook(lambda *_, i=i: done.__setitem__(i, done[i] + 1))
    for plan, expected in [("full", [1] * 6), ("one segment", [2, 2, 2, 2, 2, 1]), ("nested", [3, 2, 2, 1, 1, 1])]:
        done[:] = [0] * 6
        with following(net, PLANS[plan]):
            outcome(net, x)
        assert done == expected, plan


# -- bytes, on a chain whose tensors can be counted by hand


class Residual(nn.Module):
    """x + W2 tanh(W1 x): of a chain's bytes, x has ``n`` and the inside, 4 times as wide, ``4 n``, saved once."""

    def __init__(self, dim: int, wider: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, wider * dim), nn.Linear(wider * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Chain(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()


class Live(TorchDispatchMode):
    """Bytes of storages that operations have made and that are alive, without gradients of parameters."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.refs: dict[int, tuple[StorageWeakRef, int]] = {}
        self.hidden: list[StorageWeakRef] = []
        self.peak = 0
        self.handles = [p.register_hook(self.hide) for p in net.parameters()]

    def hide(self, gradient: Tensor) -> None:
        storage = gradient.untyped_storage()
        self.refs.pop(storage._cdata, None)
        self.hidden.append(StorageWeakRef(storage))

    def now(self) -> int:
        self.refs = {key: value for key, value in self.refs.items() if not value[0].expired()}
        return sum(nbytes for _, nbytes in self.refs.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        output = func(*args, **(kwargs or {}))
        self.now()
        hidden = {ref.cdata for ref in self.hidden if not ref.expired()}
        for t in tree_leaves(output):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                if storage._cdata not in before | hidden:
                    self.refs.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, self.now())
        return output

    def __exit__(self, *args: Any) -> None:
        for handle in self.handles:
            handle.remove()
        super().__exit__(*args)


def held_after_forward(net: Chain, x: Tensor) -> int:
    with Live(net) as live:
        loss = net.training_step(x, 0)
        held = live.now()
        loss.backward()
        del loss
        assert live.now() == 0, "something outlives the step"
    return held


def test_what_is_held_is_the_inputs_alone() -> None:
    gc.disable()  # memory must go by itself
    try:
        net, x = Chain([Residual(8) for _ in range(6)]), torch.randn(64, 8)
        n, loss = x.nbytes, 4
        # of a block: the inside, once (tanh and the second product save the same tensor), and its output
        assert held_after_forward(net, x) == 6 * (4 * n + n) + loss
        for items, expected in [
            (PLANS["full"], 6 * n),  # five inputs (the first is the batch) and what the loss keeps
            (PLANS["one segment"], n),
            (PLANS["middle"], (4 * n + n) + n + 2 * (4 * n + n)),
            (PLANS["nested"], n + 2 * (4 * n + n)),
        ]:
            with following(net, items):
                assert held_after_forward(net, x) == expected + loss
    finally:
        gc.enable()


def test_memory_goes_while_the_backward_pass_proceeds() -> None:
    """With each block recomputed from its own input, the peak is that of one block beside the inputs."""
    net, x = Chain([Residual(8) for _ in range(12)]), torch.randn(64, 8)
    n = x.nbytes
    with following(net, full(blank(12)).items), Live(net) as live:
        net.training_step(x, 0).backward()
    # 11 inputs, the output; a gradient that travels; in the block: the inside saved, its gradient, and one step's result
    assert live.peak <= 12 * n + n + 3 * 4 * n + n
    with Live(net) as live:
        net.training_step(x, 0).backward()
    assert live.peak >= 12 * 5 * n


def test_no_cycle_keeps_a_graph_that_nobody_ran_backward() -> None:
    net, x = Chain([Residual(8) for _ in range(6)]), torch.randn(4, 8)
    gc.collect()
    gc.disable()
    try:
        for items in PLANS.values():
            with following(net, items), Live(net) as live:
                loss = net.training_step(x, 0)
                assert live.now() > 0
                del loss
                assert live.now() == 0
    finally:
        gc.enable()


# -- what the user's own loop may do


class Wild(Chain):
    """Between the blocks: a shift of the hidden state, a change in place, two passes, a block skipped."""

    def __init__(self, how: str) -> None:
        super().__init__([Residual(8) for _ in range(6)])
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if self.how == "skip" and i == 2:
                continue
            x = block(x)
            if self.how == "shift" and i % 2:
                x = F.dropout(x + i, 0.5)
            if self.how == "in place" and i % 2:
                x += i
            if self.how == "backwards in between" and i == 3:
                x = self.blocks[1](x)
        return self.forward_again(x) if self.how == "twice" else x

    def forward_again(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("how", ["shift", "in place", "skip", "twice", "backwards in between"])
@pytest.mark.parametrize("plan", PLANS)
def test_the_loop_may_do_what_it_likes(how: str, plan: str) -> None:
    torch.manual_seed(0)
    net, x = Wild(how), torch.randn(16, 8)
    expected = outcome(net, x)
    with following(net, PLANS[plan]):
        assert_same(expected, outcome(net, x))


def test_calls_start_from_the_nearest_input_that_is_kept() -> None:
    """Where the loop changes the hidden state, its new value is kept: no block before it runs again for those after."""
    net, x = Wild("shift"), torch.randn(16, 8)
    with following(net, PLANS["one segment"]) as engine, counting(net) as calls:
        outcome(net, x)
    assert calls == [2] * 6 and engine.reruns == 6


class Asking(Residual):
    """Does as attention does: something else where it is given one tensor twice."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x) if x is y else x + y


class Twice(Chain):
    def __init__(self, shift: int) -> None:
        super().__init__([Asking(8) for _ in range(6)])
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, x)
            x = x + self.shift if self.shift else x  # a block's input is then kept, rather than made by the one before
        return x


@pytest.mark.parametrize("shift", [0, 1])
def test_a_tensor_that_is_passed_twice_stays_one(shift: int) -> None:
    torch.manual_seed(0)
    net, x = Twice(shift), torch.randn(16, 8)
    expected = outcome(net, x)
    for items in PLANS.values():
        with following(net, items):
            assert_same(expected, outcome(net, x))


def test_frozen_blocks_and_inputs_without_gradient() -> None:
    net, x = Chain([Residual(8) for _ in range(6)]), torch.randn(16, 8)
    for frozen in ([0, 1], [2, 3], [5], [0, 2, 4]):
        for i, block in enumerate(net.blocks):
            block.requires_grad_(i not in frozen)
        expected = outcome(net, x)
        for items in PLANS.values():
            with following(net, items):
                assert_same(expected, outcome(net, x))


class WithCarry(nn.Module):
    """A stack whose blocks hand on a tuple, and take a mask and a dictionary that need gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(8))
        self.blocks = nn.ModuleList(self.Inner() for _ in range(6))

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, state: tuple[Tensor, Tensor], *, extra: dict[str, Tensor], scale: float) -> Any:
            x, carried = state
            x = torch.sigmoid(self.layer(x) * extra["gate"] * scale)
            return {"state": (x, carried * x), "seen": carried.exp()}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        extra, state = {"gate": torch.tanh(self.bias)}, (batch, self.bias.exp())
        total = batch.new_zeros(())
        for block in self.blocks:
            out = block(state, extra=extra, scale=0.5)
            state, total = out["state"], total + out["seen"].mean()
        return total + state[0].square().mean() + state[1].mean()


def test_nested_arguments_and_outputs() -> None:
    net, x = WithCarry(), torch.randn(16, 8)
    expected = outcome(net, x)
    for items in PLANS.values():
        with following(net, items):
            assert_same(expected, outcome(net, x))


# -- buffers, caches, modes of training


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))  # changes the buffers that it reads
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1  # another tensor in its place
        return x + F.dropout(torch.tanh(self.norm(self.layer(x))) * self.calls, 0.3, self.training)


def test_buffers_are_changed_once() -> None:
    torch.manual_seed(0)
    start, x = Chain([Normed() for _ in range(6)]).state_dict(), torch.randn(16, 8)

    def after(items: Sequence[Item] | None, plain: bool = False) -> list[dict[str, Tensor]]:
        net = Chain([Normed() for _ in range(6)])
        net.load_state_dict(start)
        with following(net, keep_all(blank(6)).items if plain else items):
            found = [outcome(net, x) for _ in range(3)]
        assert net.get_buffer("blocks.2.norm.num_batches_tracked") == 3
        return found

    expected = after(None, plain=True)
    for items in [*PLANS.values(), None]:
        for a, b in zip(expected, after(items), strict=True):
            assert_same(a, b)


def test_buffers_of_two_forward_passes() -> None:
    """The second pass has moved on when the first one's blocks run again."""
    torch.manual_seed(0)
    start, x = Chain([Normed() for _ in range(6)]).state_dict(), torch.randn(16, 8)

    def after(items: Sequence[Item] | None) -> dict[str, Tensor]:
        net = Chain([Normed() for _ in range(6)])
        net.load_state_dict(start)
        torch.manual_seed(1)
        with following(net, items):
            (net.training_step(x, 0) + net.training_step(2 * x, 0)).backward()
        gradients = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        return {**gradients, **{f"buffer {name}": b.clone() for name, b in net.named_buffers()}}

    expected = after(keep_all(blank(6)).items)
    for items in (PLANS["full"], PLANS["nested"], None):
        assert_same(expected, after(items))


def test_training_flags_are_those_of_the_forward_pass() -> None:
    net, x = Chain([Normed() for _ in range(6)]), torch.randn(16, 8)
    for i in (1, 3):
        net.blocks[i].eval()

    def gradients() -> dict[str, Tensor]:
        net.zero_grad()
        torch.manual_seed(1)
        loss = net.training_step(x, 0)
        flags = [m.training for m in net.modules()]
        net.train(False)
        loss.backward()
        assert not any(m.training for m in net.modules())
        for m, flag in zip(net.modules(), flags, strict=True):
            m.training = flag
        return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}

    start = {name: value.clone() for name, value in net.state_dict().items()}
    expected = gradients()
    for items in (PLANS["full"], PLANS["nested"]):
        net.load_state_dict(start)
        with following(net, items):
            assert_same(expected, gradients())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_caches_of_keys_and_values_are_left_out(name: str) -> None:
    net, batch = build(name), make_batch(name)
    expected = outcome(net, batch)
    net.model.config.use_cache = True
    lengths: list[int] = []
    for block in find_stack(net, None, who="test").container:
        block.register_forward_pre_hook(
            lambda _, args, kwargs: lengths.append(
                sum("Cache" in type(value).__name__ for value in (*args, *kwargs.values()))
            ),
            with_kwargs=True,
        )
    outcome(net, batch)
    assert sum(lengths) == 6, "plain training hands the cache to each block"
    lengths.clear()
    for items in [PLANS["full"], PLANS["nested"], None]:
        with following(net, items):
            assert_same(expected, outcome(net, batch))
    assert len(lengths) > 18 and sum(lengths) == 0


def test_a_default_device_is_entered_again() -> None:
    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.devices = nn.Linear(8, 8), []

        def forward(self, x: Tensor) -> Tensor:
            self.devices.append(torch.empty(0).device.type)
            return torch.tanh(self.layer(x))

    net, x = Chain([Makes() for _ in range(6)]), torch.randn(4, 8)
    with following(net, PLANS["full"]):
        with torch.device("meta"):
            loss = net.training_step(x, 0)
        loss.backward()
    assert [block.devices for block in net.blocks] == [["meta", "meta"]] * 6


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("by_method", [False, True], ids=["torch.compile(block)", "block.compile()"])
def test_compiled_blocks(by_method: bool) -> None:
    class Dropping(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.2)

    torch._dynamo.reset()
    net, x = Chain([Dropping(8) for _ in range(6)]), torch.randn(16, 8)
    if by_method:
        for block in net.blocks:
            block.compile(backend="aot_eager")
    else:
        net.blocks = nn.ModuleList([torch.compile(block, backend="aot_eager") for block in net.blocks])
    expected = outcome(net, x)
    for items in (PLANS["full"], PLANS["nested"], None):
        with following(net, items) as engine:
            assert_same(expected, outcome(net, x))
            assert engine.reruns > 0
    torch._dynamo.reset()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_within_blocks(reentrant: bool) -> None:
    class Checkpointed(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, F.dropout(x, 0.2), use_reentrant=reentrant)

    net, x = Chain([Checkpointed(8) for _ in range(6)]), torch.randn(16, 8, requires_grad=True)
    expected = outcome(net, x)
    for items in PLANS.values():
        with following(net, items):
            assert_same(expected, outcome(net, x))


# -- several passes through one graph


@pytest.mark.parametrize("plan", PLANS)
def test_retain_graph_and_double_backward(plan: str) -> None:
    net, x = Chain([Residual(8) for _ in range(6)]), torch.randn(16, 8, requires_grad=True)

    def passes() -> dict[str, Tensor]:
        net.zero_grad()
        loss = net.training_step(x, 0)
        loss.backward(retain_graph=True, inputs=list(net.parameters()))
        first = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        gradient.square().sum().backward(inputs=list(net.parameters()))
        return {**first, "x": gradient.detach(), **{f"second {n}": p.grad.clone() for n, p in net.named_parameters()}}

    expected = passes()
    with following(net, PLANS[plan]):
        assert_same(expected, passes())


def test_a_retained_graph_holds_no_more_than_before() -> None:
    net, x = Chain([Residual(8) for _ in range(6)]), torch.randn(64, 8)
    with following(net, PLANS["full"]), Live(net) as live:
        loss = net.training_step(x, 0)
        held = live.now()
        loss.backward(retain_graph=True)
        assert live.now() == held


def test_a_part_of_the_graph() -> None:
    """Gradients of some blocks alone, then of others, out of order."""
    net, x = Chain([Residual(8) for _ in range(6)]), torch.randn(16, 8)

    def parts() -> dict[str, Tensor]:
        loss = net.training_step(x, 0)
        found: dict[str, Tensor] = {}
        for i in (4, 0, 5, 2):
            grads = torch.autograd.grad(loss, list(net.blocks[i].parameters()), retain_graph=True)
            found |= {f"{i} {j}": g for j, g in enumerate(grads)}
        return found

    expected = parts()
    for items in PLANS.values():
        with following(net, items):
            assert_same(expected, parts())


def test_saved_tensors_that_are_asked_for_several_times() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
            return grads[0] * ctx.saved_tensors[1], grads[0] * ctx.saved_tensors[0]

    class Custom(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return Square.apply(super().forward(x), torch.tanh(x))

    net, x = Chain([Custom(8) for _ in range(6)]), torch.randn(16, 8)
    expected = outcome(net, x)
    for items in PLANS.values():
        with following(net, items):
            assert_same(expected, outcome(net, x))


# -- what cannot be run again is an error


def check_error(block: Callable[[], nn.Module], match: str, items: Sequence[Item] = PLANS["full"]) -> None:
    net, x = Chain([block() for _ in range(6)]), torch.randn(4, 8)
    with following(net, items), pytest.raises(RuntimeError, match=match):
        net.training_step(x, 0).backward()


def test_a_block_that_changes_its_input() -> None:
    class InPlace(Residual):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1.0
            if x.requires_grad:
                x += 1
            return y + self.down(torch.tanh(self.up(y)))

    check_error(lambda: InPlace(8), r"block 1 \(InPlace\) changed an argument of shape \(4, 8\) in place")


def test_an_input_that_is_changed_afterwards() -> None:
    class Late(Chain):
        def forward(self, x: Tensor) -> Tensor:
            kept = []
            for block in self.blocks:
                kept.append(x)
                x = block(x)
            kept[3] += 1
            return x

    net, x = Late([Residual(8) for _ in range(6)]), torch.randn(4, 8)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        net.training_step(x, 0).backward()
    with following(net, PLANS["full"]), pytest.raises(RuntimeError, match=r"inplace operation: an argument of block 3"):
        net.training_step(x, 0).backward()


def test_a_saved_tensor_that_the_block_changes() -> None:
    class InPlace(Residual):
        def forward(self, x: Tensor) -> Tensor:
            inside = torch.tanh(self.up(x))
            y = self.down(inside)
            inside += 1
            return x + torch.tanh(y)

    net, x = Chain([InPlace(8) for _ in range(6)]), torch.randn(4, 8)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        net.training_step(x, 0).backward()
    check_error(lambda: InPlace(8), r"inplace operation: a tensor of shape \[4, 32\] that block 5")


def test_weights_that_change_before_the_backward_pass() -> None:
    net, x = Chain([Residual(8) for _ in range(6)]), torch.randn(4, 8)
    with following(net, PLANS["one segment"]):
        loss = net.training_step(x, 0)
        with torch.no_grad():
            net.blocks[2].down.bias += 1  # which plain autograd does not need
        with pytest.raises(RuntimeError, match=r"parameters of block 2 .* were changed between"):
            loss.backward()


def test_a_block_that_does_something_else() -> None:
    class Other(Residual):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) if self.calls == 1 else self.other(x)

        def other(self, x: Tensor) -> Tensor:
            return x + self.down(torch.tanh(self.up(x[:2]))).repeat(2, 1)

    class Fewer(Other):
        def other(self, x: Tensor) -> Tensor:
            return x * 2

    check_error(lambda: Other(8), r"block 5 \(Other\) saved a tensor of shape \(2, 8\).*expected the 5 tensors")
    check_error(lambda: Fewer(8), r"block 0 \(Fewer\) saved 0 tensors", PLANS["one segment"])


def test_a_block_that_asks_for_gradients_itself() -> None:
    class Force(Residual):
        def forward(self, x: Tensor) -> Tensor:
            energy = super().forward(x).square().sum()
            return torch.autograd.grad(energy, self.up.weight, create_graph=True)[0].sum() + x

    check_error(lambda: Force(8), "asks for gradients within its own forward pass")


def test_an_exception_leaves_the_random_state_and_the_engine_usable() -> None:
    class Fails(Residual):
        fail = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fail:
                raise KeyError("planted")
            return F.dropout(super().forward(x), 0.5)

    net, x = Chain([Fails(8) for _ in range(6)]), torch.randn(4, 8)
    expected = outcome(net, x)
    with following(net, PLANS["nested"]):
        loss = net.training_step(x, 0)
        Fails.fail = True
        state = torch.get_rng_state()
        with pytest.raises(KeyError, match="planted"):
            loss.backward()
        assert torch.equal(state, torch.get_rng_state())
        with pytest.raises(KeyError, match="planted"):
            net.training_step(x, 0)
        Fails.fail = False
        assert_same(expected, outcome(net, x))


def test_a_copy_of_the_module_is_plain() -> None:
    net, x = Chain([Residual(8) for _ in range(6)]), torch.randn(4, 8)
    with following(net, PLANS["full"]) as engine:
        other = copy.deepcopy(net)
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(2)
        assert not torch.equal(other(x), net(x))
        other(x).mean().backward()
        assert engine.reruns == 0
        assert all(p.grad is None for p in net.parameters())


def test_selective_recomputation_warns_on_a_cpu_alone() -> None:
    with pytest.warns(UserWarning, match=r"policy='selective'\): on a CPU it saves little memory for much time"):
        warn_on_cpu(torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_on_cpu(torch.device("cuda"))
