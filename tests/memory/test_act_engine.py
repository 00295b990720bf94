"""The engine of compressed activations: what it holds, what it gives back, and the gradients that come of it."""

import argparse
import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_eff.memory._compression import engine as _act
from lightning_eff.memory._compression import held as _act_held
from lightning_eff.memory._compression.engine import Engine
from lightning_eff.memory._compression.held import Held, dense, fits, mask
from lightning_eff.memory._compression.saved import Treatment
from tests.models import hugging_face, make_batch


def gradient(module: nn.Module, loss: Callable[[], Tensor], engine: Engine | None = None, seed: int = 1) -> Tensor:
    """All parameters' gradients in one vector."""
    for p in module.parameters():
        p.grad = None
    if engine is None:
        value = loss()
    else:
        with engine.forward(seed, ()):
            value = loss()
    value.backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def small_net(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*(layers or (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))))


# -- one tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x.transpose(1, 2),
        lambda x: x.permute(3, 0, 2, 1),
        lambda x: x[:, 1:, ::2],
        lambda x: x.transpose(0, 3)[1:],
        lambda x: x[:, :1].expand(-1, 7, -1, -1),
        lambda x: x[..., :1].expand(-1, -1, -1, 9),
        lambda x: x[0, 0, 0, 0],
        lambda x: x[:0],
    ],
)
def test_dense_keeps_values_and_order_of_strides(make: Callable[[Tensor], Tensor]) -> None:
    x = make(torch.randn(2, 3, 4, 5))
    y, restore = dense(x)
    again = restore(y)
    assert y.is_contiguous() and torch.equal(again, x)
    if x.numel() == x.untyped_storage().nbytes() // 4:  # neither gaps nor expanded: the very strides
        assert again.stride() == x.stride()
    assert y.numel() <= x.numel()
    assert sorted(range(4)[: x.ndim], key=lambda d: -again.stride(d)) == sorted(
        range(4)[: x.ndim], key=lambda d: -x.stride(d)
    )


def test_expanded_tensors_are_kept_once() -> None:
    y, _ = dense(torch.randn(4, 1, 8).expand(4, 100, 8))
    assert y.numel() == 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_take_one_bit_and_are_exact(dtype: torch.dtype) -> None:
    dropped = F.dropout(torch.ones(7, 1031, dtype=dtype), 0.1)
    for x in (dropped, dropped != 0, dropped.t(), torch.where(dropped == 0, float("-inf"), 0.0).to(dtype)):
        held = mask(x)
        assert held is not None and held.bits == 1
        assert held.num_bytes <= x.numel() // 8 + 16
        assert torch.equal(held.get(), x) and held.get().dtype == x.dtype
    assert mask(torch.arange(3000.0)) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("bits", [2, 8])
def test_tensors_that_are_not_finite_are_kept_exact_and_counted(bad: float, bits: int) -> None:
    x, w = torch.randn(4, 512), torch.randn(4, 512, requires_grad=True)
    x[2, 100] = bad
    engine = Engine(small_net(), bits=bits)
    with engine.forward(0, ()):
        loss = (w * (x.requires_grad_() + 0)).sum()
    assert engine.ledger.unfit == 1 and engine.ledger.by_category["unfit"] == x.numel() * 4
    loss.backward()
    assert torch.allclose(w.grad, x, rtol=0, atol=0, equal_nan=True)


def test_tensors_with_outliers_are_kept_exact_at_two_bits() -> None:
    """One element far out leaves the rest inside a third of a step; a matrix of ones and zeros loses nothing."""
    x = torch.randn(64, 256)
    x[:, 7] = 30
    for bits, fit in ((2, False), (4, True), (8, True)):
        assert bool(fits(x, _act.quantize(x, bits, 256, seed=0))) is fit, bits
    for y in (torch.randn(64, 256), torch.eye(256)[:64], torch.randn(64, 256).exp(), torch.rand(64, 256) ** 8):
        assert fits(y, _act.quantize(y, 2, 256, seed=0))


def test_relu_needs_one_bit_and_stays_exact() -> None:
    net = small_net(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    x = torch.randn(64, 32)
    kept = Engine(net, bits=lambda key, wide: 32)
    exact = gradient(net, lambda: net(x).square().sum())
    assert torch.equal(gradient(net, lambda: net(x).square().sum(), kept), exact)
    # the same tensor is the next layer's input, in which its values count
    assert kept.ledger.by_category["mask"] == 64 * 64 / 8
    assert kept.ledger.by_category["unfit"] >= 64 * 64 * 4


# -- changed in place, saved twice, leaked


def _changes_in_place(x: Tensor, w: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    hidden = x * 2
    out = (hidden * w).sum()
    change(hidden)
    return out


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.add_(1),
        lambda h: h.view(-1)[3:5].mul_(2),
        lambda h: h.detach().zero_(),
        lambda h: h.t().copy_(torch.zeros(32, 16)),
    ],
)
@pytest.mark.parametrize("bits", [2, 32])
def test_a_saved_tensor_changed_in_place_raises_as_in_plain_autograd(
    change: Callable[[Tensor], Any], bits: int
) -> None:
    x, w = torch.randn(16, 32), torch.randn(16, 32, requires_grad=True)
    with pytest.raises(RuntimeError) as plain:
        _changes_in_place(x.requires_grad_(), w, change).backward()
    engine = Engine(small_net(), bits=lambda key, wide: bits)
    with engine.forward(0, ()):
        loss = _changes_in_place(x, w, change)
    with pytest.raises(RuntimeError) as compressed:
        loss.backward()
    for message in (str(plain.value), str(compressed.value)):
        assert "modified by an inplace operation: [torch.FloatTensor [16, 32]]" in message
        assert "is at version 1; expected version 0 instead" in message


def test_parameters_changed_in_place_raise_too() -> None:
    net, x = small_net(), torch.randn(64, 32)
    with Engine(net, bits=4).forward(0, ()):
        loss = net(x).sum()
    with torch.no_grad():
        net[2].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inplace_operations_that_autograd_allows_are_allowed() -> None:
    net = small_net(nn.Linear(32, 64), nn.ReLU(inplace=True), nn.Linear(64, 8), nn.Dropout(0.5, inplace=True))
    x = torch.randn(64, 32)
    torch.manual_seed(0)
    exact = gradient(net, lambda: net(x).square().sum())
    torch.manual_seed(0)
    assert error(gradient(net, lambda: net(x).square().sum(), Engine(net, bits=8)), exact) < 0.02


def test_what_is_saved_several_times_is_held_once() -> None:
    """Three maps of one input, in different views of it; and a number that a freed storage leaves to another."""
    q, k, v = (nn.Linear(32, 32) for _ in range(3))
    net = nn.ModuleList([q, k, v])
    x = torch.randn(8, 64, 32, requires_grad=True)
    engine = Engine(net, bits=8)
    with engine.forward(0, ()):
        h = x * 1.0
        out = [layer(h) for layer in net]
    assert engine.ledger.by_category["linear"] == h.numel() + 8 * h.numel() // 256
    assert engine.ledger.exact_bytes == 4 * h.numel()
    del out
    with engine.forward(0, ()):  # no hit where there is none: each storage is freed before the next is made
        ws = [torch.randn(64, 64, requires_grad=True) for _ in range(8)]
        xs = [torch.full((64, 64), float(i)).requires_grad_() * 1.0 for i in range(8)]
        total = sum((w * (x + 0.0)).sum() for w, x in zip(ws, xs, strict=True))
        del xs
    total.backward()
    for i, w in enumerate(ws):
        assert torch.equal(w.grad, torch.full((64, 64), float(i))), i


def test_outputs_do_not_leak() -> None:
    """Nodes that save their own output make no cycle: memory is given back when the graph is dropped."""
    engine = Engine(small_net(), bits=lambda key, wide: 32)
    x = torch.randn(64, 64, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        before = sum(type(o) is Held for o in gc.get_objects())
        with engine.forward(0, ()):
            y = x.exp().tanh()
        del y
        assert sum(type(o) is Held for o in gc.get_objects()) == before
    finally:
        gc.enable()


def test_a_changed_version_between_two_saves_is_another_tensor() -> None:
    w = torch.randn(2, 16, 32, requires_grad=True)
    engine = Engine(small_net(), bits=8)
    with engine.forward(0, ()):
        h = torch.zeros(16, 32)
        first = (w[0] * F.dropout(h, 0.0)).sum()
        h.fill_(2.0)
        loss = first + (w[1] * h).sum()
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


# -- bits


def test_bits_of_what_stands_outside_the_blocks() -> None:
    """Before them twice the bits, up to 8; behind them 8."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(32, elementwise_affine=False), nn.Linear(32, 32)
            self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x) + 0.0
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    net, x = Net(), torch.randn(64, 32, requires_grad=True)
    for bits, expected in ((2, [4, 2, 2, 8]), (4, [8, 4, 4, 8]), (8, [8, 8, 8, 8])):
        engine, given = Engine(net, bits=bits), []
        engine.on_groups = lambda key, packed: given.append(packed.bits)  # noqa: B023
        with engine.forward(0, ()):
            net(x)
        assert given == expected


# -- gradients


def _gpt2_config(dim: int, length: int, vocab: int, dropout: float = 0.0) -> GPT2Config:
    pdrop: dict[str, Any] = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    sizes: dict[str, Any] = {"n_positions": length, "n_embd": dim, "n_layer": 4, "n_head": 4, "vocab_size": vocab}
    return GPT2Config(**sizes, **pdrop, bos_token_id=0, eos_token_id=0, use_cache=False)


def _text(size: int, length: int, seed: int) -> dict[str, Tensor]:
    data = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long().clamp_max(127)
    starts = torch.randint(0, len(data) - length, (size,), generator=torch.Generator().manual_seed(seed))
    ids = torch.stack([data[s : s + length] for s in starts.tolist()])
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.fixture(scope="module")
def trained_gpt2() -> GPT2LMHeadModel:
    """A GPT-2 of 4 blocks of width 64 after 60 steps on a program's text, 8 windows of 64 bytes each."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = GPT2LMHeadModel(_gpt2_config(64, 64, 128)).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(60):
        optimizer.zero_grad()
        net(**_text(8, 64, step)).loss.backward()
        optimizer.step()
    return net


@pytest.mark.parametrize(("bits", "cosine"), [(8, 0.9999), (4, 0.998), (2, 0.96)])
def test_gradients_of_a_trained_gpt2(trained_gpt2: GPT2LMHeadModel, bits: int, cosine: float) -> None:
    batch = _text(8, 64, 1000)
    exact = gradient(trained_gpt2, lambda: trained_gpt2(**batch).loss).double()
    for seed in range(3):
        found = gradient(trained_gpt2, lambda: trained_gpt2(**batch).loss, Engine(trained_gpt2, bits=bits), seed)
        assert float(F.cosine_similarity(found.double(), exact, dim=0)) >= cosine


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_stochastic_rounding_is_unbiased(name: str, bits: int) -> None:
    """The mean of 32 backward passes is as far from the exact gradient as sampling makes it: ``V / 32``.

    But for norms at 2 bits: their gradient has ``x`` times a mean over the row of ``x``, so that rounding adds
    ``Var / dim`` of the gradient, a part that matters in rows of 32 elements as here. With norms at 8 bits it is gone.
    """
    net, batch, num = hugging_face(name, num_layers=2), make_batch(name, 16), 32
    exact = gradient(net, lambda: net.training_step(batch, 0))

    def mean_and_variance(engine: Engine) -> tuple[float, float]:
        found = torch.stack([gradient(net, lambda: net.training_step(batch, 0), engine, s) for s in range(num)])
        return float((found.mean(dim=0) - exact).square().sum()), float(found.var(dim=0).sum())

    distance, variance = mean_and_variance(Engine(net, bits=bits))
    if bits == 2:
        assert (distance - variance / num) < 0.08 * variance  # the squared bias, of one pass's variance
        distance, variance = mean_and_variance(
            Engine(net, bits=lambda key, wide: 8 if wide or "norm" in key.lower() else 2)
        )
    assert 0.7 * variance / num < distance < 1.6 * variance / num
    assert variance > 0


def test_rounding_to_nearest_is_biased() -> None:
    """What the test above would see: the error of one pass is that of all."""
    net, batch = hugging_face("gpt2", num_layers=2), make_batch("gpt2", 16)
    engine = Engine(net, bits=4, stochastic=False)
    passes = [gradient(net, lambda: net.training_step(batch, 0), engine, s) for s in range(2)]
    assert torch.equal(passes[0], passes[1])
    assert error(passes[0], gradient(net, lambda: net.training_step(batch, 0))) > 0.01


def test_the_forward_pass_is_exact_and_the_global_random_state_is_untouched() -> None:
    net, batch = hugging_face("bert", num_layers=2, dropout=0.1), make_batch("bert")
    torch.manual_seed(3)
    loss, state = net.training_step(batch, 0), torch.get_rng_state()
    torch.manual_seed(3)
    with Engine(net, bits=2).forward(5, batch):
        again = net.training_step(batch, 0)
    assert torch.equal(loss, again) and torch.equal(state, torch.get_rng_state())
    again.backward()
    assert torch.equal(state, torch.get_rng_state())


def test_seeds_decide_the_rounding() -> None:
    net, batch = hugging_face("vit", num_layers=2), make_batch("vit")
    engine = Engine(net, bits=4)
    a, b, c = (gradient(net, lambda: net.training_step(batch, 0), engine, seed) for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_autocast() -> None:
    """In bfloat16 the codes are of bfloat16 tensors, and the copies of weights are exact."""
    net, batch = hugging_face("gpt2", num_layers=2), make_batch("gpt2", 16)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net.training_step(batch, 0)

    exact = gradient(net, loss)
    engine = Engine(net, bits=8)
    assert error(gradient(net, loss, engine), exact) < 0.02
    assert engine.ledger.by_category["weight_copy"] > 0


def test_open_verdicts_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device answers late, both forms are held until it has, and then one."""

    class Event:
        def record(self) -> None: ...

        def synchronize(self) -> None: ...

    class Late(Tensor):
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "Event", Event)
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: real(*a, **k))
    engine = Engine(small_net(), bits=4)
    good, bad = torch.randn(1024), torch.full((1024,), float("nan"))
    held = []
    for x in (good, bad, good * 2):
        late = x.as_subclass(Late)
        monkeypatch.setattr(_act, "dense", lambda x: (x.as_subclass(Tensor), lambda y: y))
        held.append(engine._groups(late, Treatment.GROUPS))
    assert [h._tensor is not None for h in held] == [True, True, True] and engine._unfit == 0
    engine._settle(0)
    assert [h._tensor is not None for h in held] == [False, True, False] and engine._unfit == 1
    assert [h.bits for h in held] == [4, 32, 4]
    assert held[1].get().isnan().all() and error(held[0].get(), good) < 0.2


def test_only_says_where() -> None:
    net, x = small_net(), torch.randn(64, 32, requires_grad=True)
    exact = gradient(net, lambda: net(x).sum())
    engine = Engine(net, bits=2, only=lambda: False)
    assert torch.equal(gradient(net, lambda: net(x).sum(), engine), exact)
    assert engine.ledger.saved_bytes == engine.ledger.exact_bytes > 0


def test_one_module_can_be_copied_while_an_engine_holds_it() -> None:
    net = small_net()
    Engine(net, bits=4)
    copy.deepcopy(net)
    assert _act_held.EXACT_BITS == 32
