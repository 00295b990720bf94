"""Tensors that are affine functions of saved ones: which are known as such, what is held, and what comes back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_eff.kernels.group_quantization import Packed, dequantize, quantize
from lightning_eff.memory._compression.affine import SAME, AffineNotes, Line, affine
from lightning_eff.memory._compression.bits import Statistics
from lightning_eff.memory._compression.codes import GroupCodes
from lightning_eff.memory._compression.engine import Engine
from lightning_eff.memory._compression.identity import identity
from lightning_eff.memory._compression.saved import SavedTensors
from tests.memory.test_act_engine import error, gradient, small_net


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape or (16, 64), requires_grad=True)


def line_of(run: Callable[[Tensor], Any], x: Tensor) -> Line | None:
    """As what function of ``x`` its result is noted."""
    tensors = SavedTensors(nn.Linear(2, 2))
    with tensors:
        y = run(x)
    if not isinstance(y, Tensor):
        return None
    for source, line in tensors.notes.sources(identity(y)):
        if source == identity(x):
            return line
    return None


@pytest.mark.parametrize(
    ("run", "factor", "offset"),
    [
        (lambda x: x * 0.5, 0.5, 0.0),
        (lambda x: 0.5 * x, 0.5, 0.0),
        (lambda x: 1 + x, 1.0, 1.0),
        (lambda x: x + 2.5, 1.0, 2.5),
        (lambda x: x - 3, 1.0, -3.0),
        (lambda x: 3 - x, -1.0, 3.0),
        (lambda x: -x, -1.0, 0.0),
        (lambda x: x / 4, 0.25, 0.0),
        (lambda x: torch.mul(x, -2), -2.0, 0.0),
        (lambda x: torch.sub(x, 2), 1.0, -2.0),
        (lambda x: torch.rsub(x, 2), -1.0, 2.0),
        (lambda x: x.true_divide(-2), -0.5, 0.0),
        (lambda x: 2 * (1 - 0.5 * x), -1.0, 2.0),
        (lambda x: -((x + 1) / 2), -0.5, -0.5),
    ],
)
def test_what_is_noted_is_what_was_computed(run: Callable[[Tensor], Tensor], factor: float, offset: float) -> None:
    x = leaf()
    assert line_of(run, x) == Line(factor, offset)
    assert torch.allclose(run(x), factor * x + offset, atol=1e-6)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: 2 / x,
        lambda x: torch.add(x, 2, alpha=3),
        lambda x: torch.div(x, 2, rounding_mode="floor"),
        lambda x: x * True,
        lambda x: x + torch.tensor(2.0),
        lambda x: x * x,
        lambda x: x * 0,
        lambda x: x * float("inf"),
        lambda x: x + float("nan"),
        lambda x: x * 1e30,
        lambda x: x[:1, :8] * 2,
        lambda x: x.detach() * 2,
        lambda x: (x * 2).view(-1),
        lambda x: (x * 2).mul_(3),
        lambda x: (x + 1e9) - 1e9,
        lambda x: x.to(torch.bfloat16) * 2,
        lambda x: x[:1].expand(16, 64) * 2,
    ],
)
def test_what_is_not_noted(run: Callable[[Tensor], Tensor]) -> None:
    """Other operations, other elements, what was changed since, and what rounding in between took digits from."""
    assert line_of(run, leaf()) is None


def test_calls_that_are_none() -> None:
    x = leaf()
    assert affine("sub", (3, x), {}) == (x, Line(-1.0, 3.0))
    assert affine("neg", (3,), {}) is None and affine("mul", (x,), {}) is None and affine("mul", (2, 3), {}) is None
    assert affine("div", (2, x), {}) is None and affine("div", (x, 0), {}) is None


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("line", [SAME, Line(0.5, 0.0), Line(1.0, 1.0), Line(-3.0, 0.25), Line(-1.0, 0.0)])
def test_a_line_of_codes_decodes_to_the_line_of_what_they_decode_to(bits: int, line: Line) -> None:
    """Also a falling one, whose scales are negative."""
    packed = quantize(torch.randn(7, 301), bits, 64, seed=3)
    found = GroupCodes(packed).decode(line)
    assert torch.allclose(found, line.factor * dequantize(packed) + line.offset, atol=2e-6)


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))


def test_gelu_holds_two_tensors_instead_of_four() -> None:
    x = leaf(64, 256) * 1.0
    engine = Engine(small_net(), bits=4)
    with engine.forward(0, ()):
        y = _gelu(x)
    one = x.numel() // 2 + 8 * x.numel() // 256
    ledger = engine.ledger
    assert ledger.saved_bytes == 2 * one and ledger.exact_bytes == 4 * 4 * x.numel()
    assert ledger.bits == 2.0  # the average of 4, 4, 0 and 0
    del y


def test_what_comes_back_is_the_line_of_what_comes_back_of_its_source() -> None:
    """The same codes, so the errors of both are one to the factor."""
    x, u, v = leaf(), leaf(), leaf()
    engine = Engine(small_net(), bits=2)
    with engine.forward(5, ()):
        h = x * 1.0
        first, second = (h * u).sum(), ((1 - 2 * h) * v).sum()
    (first + second).backward()
    assert u.grad is not None and v.grad is not None
    assert error(u.grad, x.detach()) > 0.01
    assert torch.allclose(v.grad, 1 - 2 * u.grad, atol=1e-6)


def test_codes_outlive_the_tensor_that_they_were_made_for() -> None:
    u, v = leaf(), leaf()
    engine = Engine(small_net(), bits=8)
    with engine.forward(5, ()):
        h = leaf() * 1.0
        exact = 2 * h.detach()
        first = (h * u).sum()
        second = (2 * h * v).sum()
        del h, first
    assert engine.ledger.by_category["elementwise"] == 2 * (v.numel() + 8 * v.numel() // 256)  # of h, and of v
    second.backward()
    assert v.grad is not None and error(v.grad, exact) < 0.01


def test_a_freed_storages_number_is_no_other_tensors() -> None:
    """Each source and result is freed before the next are made."""
    ws = [leaf(64, 64) for _ in range(12)]
    engine = Engine(small_net(), bits=8)
    with engine.forward(0, ()):
        total = torch.zeros(())
        for i, w in enumerate(ws):
            source = torch.full((64, 64), float(i)).requires_grad_() * 1.0
            torch.exp(2 * source)
            del source
            other = torch.full((64, 64), float(-i)).requires_grad_() * 1.0
            total = total + (w * (other + 0.5)).sum() + (other * 1.0).sum() + w.sum() * 0
            del other
    total.backward()
    for i, w in enumerate(ws):
        assert w.grad is not None and torch.equal(w.grad, torch.full((64, 64), 0.5 - i)), i


def test_a_source_changed_in_place_is_another_tensor() -> None:
    """Noted, changed, saved: the codes of what it is now are not those that the result is a line of."""
    u, v = leaf(), leaf()
    engine = Engine(small_net(), bits=8)
    with engine.forward(0, ()):
        h = leaf() * 1.0
        y = 2 * h
        exact = y.detach().clone()
        with torch.no_grad():
            h.add_(5.0)
        loss = (h * u).sum() + (y * v).sum()
    loss.backward()
    assert v.grad is not None and error(v.grad, exact) < 0.01


def test_a_result_changed_in_place_raises() -> None:
    u, v = leaf(), leaf()
    engine = Engine(small_net(), bits=8)
    with engine.forward(0, ()):
        h = leaf() * 1.0
        y = 2 * h
        loss = (h * u).sum() + (y * v).sum()
    with torch.no_grad():
        y.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with engine.forward(0, ()):  # the source's own change is no matter of the result's
        h = leaf() * 1.0
        y = 2 * h
        first, second = (h * u).sum(), (y * v).sum()
    with torch.no_grad():
        h.add_(1.0)
    second.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()


def test_codes_of_too_few_bits_do_not_serve() -> None:
    """What stands behind the blocks gets 8 bits, though 2 times it is held in 2."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(nn.Linear(64, 64) for _ in range(2)), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return (x * x).sum() + self.head(x / 2).sum()

    module = Net()
    for bits, codes in ((2, 64 * 64 * (3 * 2 + 8) / 8), (8, 64 * 64 * 3)):
        engine = Engine(module, bits=bits)
        with engine.forward(0, ()):
            loss = module(leaf(64, 64) * 1.0)
        groups = 4 if bits == 2 else 3
        assert engine.ledger.saved_bytes == codes + groups * 8 * 16, bits
        del loss


def test_unfit_sources_do_not_serve() -> None:
    u, v = leaf(), leaf()
    engine = Engine(small_net(), bits=4)
    x = torch.randn(16, 64)
    x[0, 0] = float("inf")
    with engine.forward(0, ()):
        h = x.requires_grad_() * 1.0
        loss = (h * u).sum() + ((h + 1.0) * v).sum()
    assert engine.ledger.unfit == 2
    loss.backward()
    assert v.grad is not None and torch.equal(v.grad, x.detach() + 1.0)


def test_names_and_uses_are_those_of_the_source() -> None:
    """The source's gradient statistics include the result's use; its name is the only one, and others' stay."""
    module, x = small_net(nn.Linear(64, 64)), leaf()
    statistics, engine = Statistics(), Engine(module, bits=lambda key, wide: 4)
    seen: list[list[str]] = []
    engine.on_groups, engine.on_shared = statistics.on_groups, statistics.on_shared
    engine.on_output = lambda keys, output: seen.append(keys)
    with engine.forward(0, ()):
        h = x * 1.0
        loss = (h.square() * (2 * h) * x.sin()).sum()
    assert set(statistics.numel) == {":square:0", ":mul:1", ":sin:0", ":mul:2", ":mul:3"}  # 2 h would be :mul:0
    assert statistics.shared == {":square:0": x.numel()}
    assert sum(":square:0" in keys for keys in seen) == 2
    loss.backward()


def test_gradients_are_as_near_as_with_codes_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """GELU between two maps: mean error and bias over 48 passes, with the notes and without."""
    torch.manual_seed(0)
    first, second, x = nn.Linear(32, 256), nn.Linear(256, 8), torch.randn(64, 32)
    net = nn.Sequential(first, second)

    def loss() -> Tensor:
        return second(_gelu(first(x))).square().mean()

    exact = gradient(net, loss)

    def measure() -> tuple[float, float]:
        engine = Engine(net, bits=4)
        found = torch.stack([gradient(net, loss, engine, seed) for seed in range(48)])
        variance = float(found.var(dim=0).sum())
        return variance, float((found.mean(dim=0) - exact).square().sum()) / (variance / 48)

    shared, bias = measure()
    monkeypatch.setattr(AffineNotes, "note", lambda *args: None)
    own, _ = measure()
    assert shared < 1.5 * own
    assert 0.6 < bias < 1.6


def test_a_verdict_on_the_source_is_one_on_the_result() -> None:
    """Where the device answers late, both hold their tensors until it has."""

    class Late:
        def synchronize(self) -> None: ...

    engine = Engine(small_net(), bits=4)
    v = leaf()
    with engine.forward(0, ()):
        h = leaf() * 1.0
        loss = h.square().sum()
        source = engine._find(identity(h))
        assert source is not None and source.codes is not None
        engine._open.append((source, torch.tensor(False), Late()))  # type: ignore[arg-type]
        source._tensor = h.detach()
        y = h - 1.0
        loss = loss + (y * v).sum()
        result = engine._find(identity(y))
        assert result is not None and result.codes is source.codes
        assert result._tensor is not None and len(engine._open) == 2
        engine._settle(0)
        assert result.codes is None and source.codes is None and engine._unfit == 2
    loss.backward()
    assert v.grad is not None and torch.equal(v.grad, y.detach())


def test_packed_is_not_changed() -> None:
    packed = quantize(torch.randn(512), 4, 64, seed=0)
    before = [t.clone() for t in (packed.scale, packed.minimum)]
    GroupCodes(packed).decode(Line(-2.0, 3.0))
    assert isinstance(packed, Packed)
    assert torch.equal(packed.scale, before[0]) and torch.equal(packed.minimum, before[1])
