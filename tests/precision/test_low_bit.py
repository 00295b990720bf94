"""Numbers of 1 to 16 bits against NumPy, gradients without bias, and bits per layer against a search of all choices."""

import functools
import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff.precision._linear.maps import linear_maps
from lightning_eff.precision._low_bit import rules
from lightning_eff.precision._low_bit.mixed import CHOICES, MixedBits, allocate, scores
from lightning_eff.precision.int8 import INT8Precision, rounded
from tests.models import flat, loader, module, trainer
from tests.precision import plugin_contract as contract
from tests.processes import launch
from tests.runs import fit

BITS = (1, 2, 3, 8, 16)
MAKES = {
    "dorefa": functools.partial(INT8Precision, rule="dorefa", activation_bits=8),
    "qnn": functools.partial(INT8Precision, rule="qnn"),
    "fixed_point": functools.partial(INT8Precision, rule="fixed_point"),
    "few": functools.partial(INT8Precision, weight_bits=4, activation_bits=6, gradient_bits=5),
    "many": functools.partial(INT8Precision, weight_bits=16, activation_bits=12, gradient_bits=16),
    "auto": functools.partial(INT8Precision, weight_bits="auto", activation_bits="auto", interval=3),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*and are clipped")
every = pytest.mark.parametrize("kind", sorted(MAKES))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def numpy_k(r: np.ndarray, k: int) -> np.ndarray:
    return np.rint(r * (2**k - 1)) / (2**k - 1)


# -- the rules


@pytest.mark.parametrize("k", BITS)
def test_dorefas_weights(k: int) -> None:
    """In float64, with the gradient by hand: that of the maximum falls on the largest weight."""
    w = normal(7, 9).double().requires_grad_()
    got, g = rules.dorefa_weights(w, k), normal(7, 9, seed=1).double()
    a, dy = w.detach().numpy(), g.numpy()
    if k == 1:
        wanted, dw = np.where(a >= 0, 1, -1) * np.abs(a).mean(), dy
    else:
        t = np.tanh(a)
        most = np.abs(t).max()
        wanted = 2 * numpy_k(t / (2 * most) + 0.5, k) - 1
        dt = dy / most
        largest = np.unravel_index(np.abs(t).argmax(), t.shape)
        dt[largest] -= np.sign(t[largest]) * (dy * t).sum() / most**2
        dw = dt * (1 - t**2)
        assert np.abs(wanted).max() == 1 and len(np.unique(wanted)) <= 2**k
    np.testing.assert_allclose(got.detach().numpy(), wanted, atol=1e-12)
    np.testing.assert_allclose(torch.autograd.grad(got, w, g)[0].numpy(), dw, atol=1e-12)
    zeros = torch.zeros(2, 2, requires_grad=True)
    if k > 1:
        assert torch.equal(rules.dorefa_weights(zeros, k), torch.zeros(2, 2))
    assert torch.autograd.grad(rules.dorefa_weights(zeros, k).sum(), zeros)[0].isfinite().all()


@pytest.mark.parametrize("k", BITS)
def test_dorefas_inputs_and_qnns_numbers(k: int) -> None:
    x, g = (1.5 * normal(300).double()).requires_grad_(), normal(300, seed=1).double()
    a = x.detach().numpy()
    d = 2.0 ** (1 - k)
    for rule, low, wanted in (
        (rules.dorefa_inputs, 0, numpy_k(np.clip(a, 0, 1), k)),
        (rules.qnn, -1, np.where(a >= 0, 1, -1) if k == 1 else np.clip(np.rint(a / d) * d, -1, 1 - d)),
    ):
        got = rule(x, k)
        np.testing.assert_allclose(got.detach().numpy(), wanted, atol=1e-12)
        (dx,) = torch.autograd.grad(got, x, g)
        assert torch.equal(dx, g * ((x >= low) & (x <= 1)))


@pytest.mark.parametrize("k", [1, 2, 6])
def test_dorefas_gradients_are_on_its_levels_and_unbiased(k: int) -> None:
    """The mean of 4,000 draws has z^2 of 1 where the noise is not cut off at the ends; without noise it is biased."""
    g, num, n = normal(3, 40).double(), 4000, 2**k - 1
    most = g.abs().amax(1, keepdim=True)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([rules.dorefa_gradients(g, k, generator) for _ in range(num)])
    levels = (drawn / most + 1) / 2 * n
    assert torch.allclose(levels, levels.round()) and levels.min() >= -1e-9 and levels.max() <= n + 1e-9
    inner = g.abs() < most * 0.98
    z = ((drawn.mean(0) - g) / (drawn.std(0) / num**0.5).clamp_min(1e-9))[inner]
    assert z.abs().max() < 4.5 and z.square().mean().item() == pytest.approx(1, abs=0.6)
    nearest = rules.dorefa_gradients(g, k, None)
    assert torch.allclose(nearest, 2 * most * (torch.from_numpy(numpy_k((g / most / 2 + 0.5).numpy(), k)) - 0.5))
    assert float((nearest - g).abs().max() / most.max()) > 0.2 / n, "rounding is not exact"
    g[1] = 0
    assert torch.equal(rules.dorefa_gradients(g, k, generator)[1], torch.zeros(40).double())


@pytest.mark.parametrize("k", [2, 8, 16])
def test_fixed_point_has_one_power_of_two(k: int) -> None:
    for scale in (1e-30, 1.0, 3e20):
        x = normal(50, 3) * scale
        a = x.double().numpy()
        unit = 2.0 ** (np.floor(np.log2(np.abs(a).max())) - (k - 2))
        got = rules.fixed_point(x, k)
        np.testing.assert_array_equal(got.numpy(), np.clip(np.rint(a / unit), -(2 ** (k - 1)), 2 ** (k - 1) - 1) * unit)
        if k > 2:
            g = torch.Generator().manual_seed(0)
            mean = torch.stack([rules.fixed_point(x, k, g).double() for _ in range(2000)]).mean(0).numpy()
            inner = np.abs(a) < (2 ** (k - 1) - 1) * unit
            assert np.abs((mean - a) / unit)[inner].max() < 5 * 0.5 / 2000**0.5
    assert torch.equal(rules.fixed_point(torch.zeros(3), k), torch.zeros(3))
    assert rules.fixed_point(torch.tensor([1.0, torch.inf]), k).isnan().all()


# -- layers


def arithmetic(plugin: INT8Precision) -> Any:
    (m,) = linear_maps(nn.Sequential(nn.Linear(1, 1)))
    return plugin.arithmetic(m)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dorefas_layer(dtype: torch.dtype) -> None:
    """One scale of gradients per sample of 5 tokens; the rounded gradient in both products, the exact one for the bias."""
    x = normal(2, 5, 12).to(dtype).requires_grad_()
    w, b = normal(7, 12, seed=1).requires_grad_(), normal(7, seed=2).requires_grad_()
    grad = normal(2, 5, 7, seed=3).to(dtype)
    plugin = INT8Precision("32-true", rule="dorefa", activation_bits=3, weight_bits=2, stochastic_rounding=False)
    y = arithmetic(plugin)(x, w, b)
    y.backward(grad)
    a, dy = x.detach().double().numpy(), grad.double().numpy()
    x_hat = numpy_k(np.clip(a, 0, 1), 3)
    t = np.tanh(w.detach().double().numpy())
    w_hat = 2 * numpy_k(t / np.abs(t).max() / 2 + 0.5, 2) - 1
    most = np.abs(dy).max((1, 2), keepdims=True)
    g_hat = 2 * most * (numpy_k(dy / most / 2 + 0.5, 6) - 0.5)
    near: Any = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    assert y.dtype == x.grad.dtype == dtype
    np.testing.assert_allclose(y.detach().double().numpy(), x_hat @ w_hat.T + b.detach().numpy(), **near)
    np.testing.assert_allclose(x.grad.double().numpy(), (g_hat @ w_hat) * ((a >= 0) & (a <= 1)), **near)
    np.testing.assert_allclose(b.grad.numpy(), dy.sum((0, 1)), rtol=1e-5, atol=1e-5)
    dw_hat = torch.from_numpy(np.einsum("btn,btk->nk", g_hat, x_hat))
    through = w.detach().double().requires_grad_()
    rules.dorefa_weights(through, 2).backward(dw_hat)
    np.testing.assert_allclose(w.grad.numpy(), through.grad.numpy(), rtol=1e-4, atol=1e-5)


def rows(x: Tensor, bits: int) -> tuple[np.ndarray, np.ndarray]:
    a = x.detach().numpy()
    if bits == 32:
        return a.astype(np.float64), np.ones(len(a), np.float32)
    scale = np.abs(a).max(1) / np.float32(2 ** (bits - 1) - 1)
    return np.rint(a / scale[:, None]).astype(np.int64), scale


@pytest.mark.parametrize("bits", [(4, 6, 3), (2, 2, 2), (16, 16, 16), (4, 16, 8), (8, 32, 12), (32, 32, 32)])
def test_integers_of_other_bits(bits: tuple[int, int, int]) -> None:
    """The three products in NumPy's integers of 64 bits."""
    of_w, of_x, of_g = bits
    x, w, grad = normal(10, 300).requires_grad_(), normal(7, 300, seed=1).requires_grad_(), normal(10, 7, seed=2)
    plugin = INT8Precision(
        "32-true", weight_bits=of_w, activation_bits=of_x, gradient_bits=of_g, stochastic_rounding=False
    )
    y = arithmetic(plugin)(x, w, None)
    y.backward(grad)
    (q_x, s_x), (q_w, s_w) = rows(x, of_x), rows(w, of_w)
    near: Any = {"rtol": 3e-7, "atol": 1e-7}
    np.testing.assert_allclose(y.detach().numpy(), (q_x @ q_w.T).astype(np.float64) * s_x[:, None] * s_w, **near)
    q, s = rows(grad * torch.from_numpy(s_w), of_g)
    np.testing.assert_allclose(x.grad.numpy(), (q @ q_w).astype(np.float64) * s[:, None], **near)
    q, s = rows(grad.t() * torch.from_numpy(s_x), of_g)
    np.testing.assert_allclose(w.grad.numpy(), (q @ q_x).astype(np.float64) * s[:, None], **near)
    if max(bits) <= 16:
        held = contract.saved_by(lambda: arithmetic(plugin)(x, w, None))
        assert sum(t.nbytes for t in held) == x.numel() * (1 + (of_x > 8)) + w.numel() * (1 + (of_w > 8)) + 4 * 17


def test_up_to_eight_bits_run_on_int8_units(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_eff.precision import int8

    calls: list[torch.Size] = []
    monkeypatch.setattr(int8, "_cpu_is_right", lambda: True)
    monkeypatch.setattr(int8, "_int_mm", lambda a, b: calls.append(a.shape) or torch._int_mm(a, b))
    for make, num in ((MAKES["few"], 3), (MAKES["many"], 0)):
        arithmetic(make())(normal(6, 10).requires_grad_(), normal(5, 10).requires_grad_(), None).sum().backward()
        assert len(calls) == num
        calls.clear()


# -- bits per layer


def test_bits_are_the_best_of_all_choices() -> None:
    """With layers of one size the optimum; with others, within one step of it, and never over the budget."""
    g = np.random.default_rng(0)
    for trial in range(20):
        names = "abcd"
        sizes = {name: 1 if trial < 10 else int(g.integers(1, 30)) for name in names}
        found = {
            name: [c * 4.0**-b for b in CHOICES] for name, c in zip(names, np.exp(4 * g.normal(size=4)), strict=True)
        }
        budget = float(g.integers(2, 9)) if trial < 10 else float(g.uniform(2, 8))
        bits = allocate(found, sizes, budget)

        def cost(bits: dict[str, int], found: Any = found) -> float:
            return sum(found[name][CHOICES.index(b)] for name, b in bits.items())

        def used(bits: dict[str, int], sizes: Any = sizes) -> int:
            return sum(sizes[name] * b for name, b in bits.items())

        assert used(bits) <= budget * sum(sizes.values()) + 1e-9
        all_choices = [dict(zip(names, one, strict=True)) for one in itertools.product(CHOICES, repeat=4)]
        best = min(cost(one) for one in all_choices if used(one) <= budget * sum(sizes.values()) + 1e-9)
        if trial < 10:
            assert cost(bits) == pytest.approx(best)
        else:
            assert best <= cost(bits) + 1e-12
            more = [{**bits, name: b + 1} for name, b in bits.items() if b < 8]
            steps = [cost(bits) - cost(one) for one in more if used(one) > budget * sum(sizes.values())]
            assert cost(bits) - best <= max(steps, default=0) + 1e-12


def test_scores_are_the_rows_changes_of_the_loss() -> None:
    x, w, g = normal(6, 10), normal(5, 10, seed=1), normal(6, 5, seed=2)
    of_weight, of_input = scores(x, w, g, rounded)
    for i, b in enumerate(CHOICES):
        for got, (a, c) in ((of_weight, (x, rounded(w, b))), (of_input, (rounded(x, b), w))):
            changed = (a.double() @ c.double().t()) - x.double() @ w.double().t()
            wanted = sum(float((g[r].double() @ changed[r]) ** 2) for r in range(6))
            assert float(got[i]) == pytest.approx(wanted, rel=1e-4)


class Uneven(pl.LightningModule):
    """Linear layers that matter unequally: their outputs count 1, 0.1 and 0.01 times in the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))
        self.head = nn.Linear(32, 1)

    def loss(self, x: Tensor) -> Tensor:
        y = sum(10.0**-i * layer(x) for i, layer in enumerate(self.layers))
        return (y - x.flip(1)).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


def chosen(**settings: Any) -> tuple[INT8Precision, float]:
    """The plugin after three steps, and the mean squared change of the outputs."""
    plugin, net = INT8Precision("32-true", skip=("head",), **settings), Uneven()
    data = normal(64, 32, seed=3)
    trainer(max_steps=3, plugins=[plugin]).fit(net, DataLoader(TensorDataset(data), 16))
    x = data.clone()
    maps = {m.path: plugin._bits(m.path) for m in linear_maps(net)}
    change = torch.zeros(64, 32)
    for i, layer in enumerate(net.layers):
        w, a, _ = maps[f"layers.{i}"]
        change += 10.0**-i * (rounded(x, a) @ rounded(layer.weight.detach(), w).t() - x @ layer.weight.detach().t())
    return plugin, float(change.square().mean())


def test_layers_that_matter_more_get_more_bits() -> None:
    """The outputs change less than a third of what the same bits for all layers, on average, change them."""
    plugin, mixed = chosen(weight_bits="auto", activation_bits="auto", budget=4)
    _, same = chosen(weight_bits=4, activation_bits=4)
    assert plugin._mixed is not None
    for kind in ("weights", "inputs"):
        bits = [plugin._mixed.bits[kind][f"layers.{i}"] for i in range(3)]
        assert bits == sorted(bits, reverse=True) and bits[0] > bits[2] and sum(bits) <= 12
        average = plugin._mixed.average(kind)
        assert average is not None and 3 < average <= 4
    assert mixed < same / 3


def test_measurements_of_ranks_add_up_and_overflow_is_ignored() -> None:
    mixed = MixedBits(4.0, weights=True, inputs=False)
    x, w = normal(6, 10), normal(5, 10).requires_grad_()

    def watch(factor: float) -> None:
        for path in "ab":
            y = x @ w.t()
            mixed.watch(path, x, w, y, rounded)
            y.backward(torch.full((6, 5), factor))

    watch(1.0)
    assert mixed.settle(lambda own: [own, own])
    one = scores(x, w, torch.ones(6, 5), rounded)[0]
    assert mixed._scores["weights"]["a"] == pytest.approx((2 * one).tolist()) and mixed._sizes["inputs"]["a"] == 120
    assert mixed("weights", "a", 8) == mixed("weights", "b", 8) == 4 and mixed("inputs", "a", 8) == 8
    before = mixed.state_dict()
    watch(torch.inf)
    assert mixed.settle(lambda own: [own]) and mixed.state_dict() == before
    assert not mixed.settle(lambda own: [own])


# -- runs


@every
def test_trains_near_the_base_or_at_all(kind: str) -> None:
    net, t = fit("tiny_gpt", list, plugins=[MAKES[kind](base="32-true")])
    plain, _ = fit("tiny_gpt", list)
    assert t.global_step == 12 and flat(net).isfinite().all() and not torch.equal(flat(net), flat(plain))
    if kind in ("few", "many", "fixed_point"):
        assert contract.apart(MAKES[kind], "tiny_gpt", "32-true") < 0.05


@every
def test_resume_equals_uninterrupted(kind: str, tmp_path: Path) -> None:
    contract.resumes(MAKES[kind], tmp_path)


@every
def test_the_same_when_rematerialized(kind: str) -> None:
    contract.the_same_when_rematerialized(MAKES[kind])


@every
def test_leaves_no_trace(kind: str) -> None:
    contract.leaves_no_trace(MAKES[kind], True)


@every
def test_backward_ignores_autocast(kind: str) -> None:
    contract.backward_ignores_autocast(arithmetic(MAKES[kind](stochastic_rounding=False)))


@every
def test_no_rows_and_in_place_changes(kind: str) -> None:
    compute, w = arithmetic(MAKES[kind](base="32-true")), normal(7, 12).requires_grad_()
    compute(torch.randn(0, 12), w, None).sum().backward()
    assert torch.equal(w.grad, torch.zeros(7, 12))
    x = normal(4, 12).requires_grad_()
    nn.functional.relu(compute(x, w, None), inplace=True).sum().backward()
    assert compute(torch.randn(12), w, None).shape == (7,) and x.grad.isfinite().all()


def test_qnn_keeps_weights_in_its_range() -> None:
    pl.seed_everything(1, verbose=False)
    net = module("tiny_gpt")
    with torch.no_grad():
        for m in linear_maps(net):
            m.module.weight.mul_(1e3)
    trainer(max_steps=1, plugins=[MAKES["qnn"](base="32-true")]).fit(net, loader("tiny_gpt"))
    layers = {name: m for name, m in net.named_modules() if isinstance(m, nn.Linear)}
    outside = [name for name, m in layers.items() if not bool((m.weight.abs() <= 1).all())]
    assert outside == ["head"] and len(layers) > 4, "the head is not quantized"


def test_clipped_inputs_are_told_once() -> None:
    make = functools.partial(INT8Precision, "32-true", rule="dorefa", weight_bits=8)
    with pytest.warns(UserWarning, match=r"rule='dorefa'\): \d\d% of the inputs of .* are outside \[0, 1\]") as found:
        fit("tiny_gpt", list, plugins=[make()])
    assert len([w for w in found if "are clipped" in str(w.message)]) == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weight_bits": 0}, r"weight_bits=0\): expected an integer in \[1, 16\] or 32 or 'auto', or None"),
        ({"gradient_bits": "auto"}, r"gradient_bits='auto'\): expected an integer in \[1, 16\] or 32, or None"),
        ({"weight_bits": 1}, r"rule='rows', weight_bits=1\): one bit leaves only zero"),
        ({"rule": "fixed_point", "gradient_bits": 1}, r"rule='fixed_point', gradient_bits=1\): one bit"),
        ({"rule": "qnn", "gradient_bits": 8}, r"rule='qnn', gradient_bits=8\): QNN's rule has no gradients"),
        (
            {"rule": "dorefa", "weight_bits": "auto"},
            r"rule='dorefa', weight_bits='auto'\): this rule changes the scale",
        ),
        ({"budget": 4}, r"INT8Precision\(budget=4\): a budget is an average, but all layers have the same bits"),
        ({"weight_bits": "auto", "budget": 9}, r"budget=9\): expected a number in \[2, 8\]"),
        ({"rule": "haq"}, r"rule='haq'\): expected 'rows', 'dorefa', 'qnn' or 'fixed_point'"),
    ],
)
def test_other_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        INT8Precision(**settings)


def test_describes_its_bits() -> None:
    assert "DoReFa with 1-bit weights, 8-bit inputs and 6-bit gradients" in MAKES["dorefa"]().describe()
    assert "weights auto, inputs auto, gradients 8 bits" in MAKES["auto"]().describe()


def test_two_processes(tmp_path: Path) -> None:
    launch("tests.precision.low_bit_jobs", str(tmp_path), forked=True, timeout=250)
