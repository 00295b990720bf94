"""INT8 against a reference in NumPy's integers, unbiased gradients by number, and what a plugin must keep."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_eff.precision import int8
from lightning_eff.precision._linear.maps import linear_maps
from lightning_eff.precision.int8 import INT8Precision, int8_matmul, padded, quantize
from tests.models import hugging_face
from tests.plugins import PluginCase
from tests.precision import plugin_contract as contract

PLUGINS = {"INT8Precision": PluginCase(build=lambda precision: INT8Precision(base=precision))}


def integers(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=g)


def product(a: Tensor, b: Tensor) -> Tensor:
    return torch.from_numpy(a.numpy().astype(np.int64) @ b.numpy().astype(np.int64))


SHAPES = [(1, 1, 1), (3, 7, 5), (17, 8, 16), (20, 1041, 3), (5, 4096, 9), (2, 3000, 2), (32, 1, 16), (1, 16, 4)]


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_exact(shape: tuple[int, int, int], emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if emulated:
        monkeypatch.setattr(int8, "_cpu_is_right", lambda: False)
    m, k, n = shape
    for a, b in ((integers(m, k), integers(k, n, seed=1)), (integers(k, m).t(), integers(n, k).t())):
        found = int8_matmul(a, b)
        assert found.dtype == torch.int32 and torch.equal(found.long(), product(a, b))
    most = torch.full((m, k), 127, dtype=torch.int8)
    assert (int8_matmul(most, -most[:1].t()) == -k * 127**2).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_padding_for_cuda(shape: tuple[int, int, int]) -> None:
    """What CUDA's product wants: more than 16 rows, multiples of 8."""

    def picky(a: Tensor, b: Tensor) -> Tensor:
        assert a.shape[0] > 16 and a.shape[1] == b.shape[0] and not any(size % 8 for size in (*a.shape, *b.shape))
        assert a.is_contiguous() and b.t().is_contiguous()
        return torch._int_mm(a, b)

    m, k, n = shape
    for a in (integers(m, k), integers(k, m).t()):
        for b in (integers(k, n, seed=1), integers(n, k, seed=1).t()):
            assert torch.equal(padded(a, b, picky).long(), product(a, b))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [*SHAPES, (68, 32, 64), (300, 40, 1000)])
def test_products_on_a_device_are_exact(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    for a in (integers(m, k), integers(k, m).t()):
        for b in (integers(k, n, seed=1), integers(n, k, seed=1).t()):
            assert torch.equal(int8_matmul(a.cuda(), b.cuda()).cpu().long(), product(a, b))


def test_a_product_that_saturates_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors without int8 instructions shift one operand to 0 .. 255 and add pairs of products in 16 bits."""

    def saturating(a: Tensor, b: Tensor) -> Tensor:
        pairs = (a.int() + 128).unflatten(1, (-1, 2)).unsqueeze(-1) * b.int().unflatten(0, (-1, 2))
        return pairs.sum(2).clamp(-(2**15), 2**15 - 1).sum(1) - 128 * b.int().sum(0)

    right = int8._cpu_is_right.__wrapped__
    small = integers(4, 8) // 4, integers(8, 3, seed=1) // 4
    assert right() and torch.equal(saturating(*small).long(), product(*small))
    monkeypatch.setattr(int8, "_int_mm", saturating)
    assert not right()


def reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers and scales by row: largest magnitude over 127, to nearest and halfway to even."""
    a = x.detach().float().numpy()
    scale = np.abs(a).max(1) / np.float32(127)
    return torch.from_numpy(np.rint(a / scale[:, None]).astype(np.int8)), torch.from_numpy(scale)


def test_rows_are_quantised_to_nearest() -> None:
    x = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-30, 30, 40).unsqueeze(1)
    found, expected = quantize(x), reference(x)
    assert torch.equal(found.q, expected[0]) and torch.equal(found.scale, expected[1])
    assert (found.q.int().abs().amax(1) == 127).all()
    halves = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert quantize(halves).q.tolist() == [[127, 0, 2, 2, 0, -2]]


def test_rows_of_zeros_and_what_is_not_finite() -> None:
    x = torch.tensor(
        [[0.0, 0.0, 0.0], [1.0, torch.inf, 0.0], [1.0, torch.nan, 2.0], [1.0, 2.0, 0.0], [1e-45, 0.0, 0.0]]
    )
    for generator in (None, torch.Generator().manual_seed(0)):
        q, scale = quantize(x, generator)
        back = q.float() * scale.unsqueeze(1)
        assert torch.equal(back[0], torch.zeros(3)) and back[3].isfinite().all() and back[4].isfinite().all()
        assert not back[1:3].isfinite().any()


def test_stochastic_rounding_is_unbiased() -> None:
    """Over 4,000 draws each of 200 numbers has its mean to 4.5 standard errors, and all together z^2 of 1 ± 0.4."""
    g = torch.Generator().manual_seed(0)
    x, num = torch.randn(1, 200, generator=g), 4000
    q, scale = quantize(x.expand(num, 200).contiguous(), torch.Generator().manual_seed(1))
    t = (x / scale[0]).double()
    p = t - t.floor()
    z = (q.double().mean(0) - t[0]) / (p[0] * (1 - p[0]) / num).sqrt()
    z = z[(p[0] > 0.02) & (p[0] < 0.98)]
    assert z.abs().max() < 4.5 and len(z) > 150
    assert z.square().mean().item() == pytest.approx(1, abs=4 * (2 / len(z)) ** 0.5)
    assert set(torch.unique(q.double() - t.floor()).tolist()) <= {0.0, 1.0}
    assert (
        quantize(torch.tensor([[3.0, 0.0, -3.0]] * 50), g).q == torch.tensor([127, 0, -127])
    ).all()  # exact ones stay


def arithmetic(plugin: INT8Precision) -> Any:
    (m,) = linear_maps(nn.Sequential(nn.Linear(1, 1)))
    return plugin.arithmetic(m)


def worth(q: Tensor, scale: Tensor) -> Tensor:
    return q.double() * scale.double().unsqueeze(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_the_three_products(bias: bool, dtype: torch.dtype) -> None:
    """Gradients to nearest: bit for bit NumPy's integers with the same scales."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 12, generator=g).to(dtype).requires_grad_()
    w = torch.randn(7, 12, generator=g).requires_grad_()
    b = torch.randn(7, generator=g).requires_grad_() if bias else None
    grad = torch.randn(2, 5, 7, generator=g).to(dtype)
    y = arithmetic(INT8Precision("32-true", stochastic_rounding=False))(x, w, b)
    y.backward(grad)
    rows = grad.float().view(10, 7)
    (q_x, s_x), (q_w, s_w) = reference(x.view(10, 12)), reference(w)
    expected = product(q_x, q_w.t()).float() * s_x[:, None] * s_w + (b.detach() if b is not None else 0)
    assert torch.equal(y, expected.to(dtype).view(2, 5, 7))
    q, s = reference(rows * s_w)
    assert torch.equal(x.grad, (product(q, q_w).float() * s[:, None]).to(dtype).view(2, 5, 12))
    q, s = reference(rows.t() * s_x)
    assert torch.equal(w.grad, product(q, q_x).float() * s[:, None])
    if b is not None:
        assert torch.equal(b.grad, rows.sum(0))
    # and so near the plain products
    x_hat, w_hat = worth(q_x, s_x), worth(q_w, s_w)
    assert ((y.view(10, 7) - nn.functional.linear(x.view(10, 12).float(), w, b)).norm() / y.norm()).item() < 0.02
    assert ((w.grad - rows.double().t() @ x_hat).norm() / w.grad.norm()).item() < 0.02
    assert ((x.grad.view(10, 12) - rows.double() @ w_hat).norm() / x.grad.norm()).item() < 0.02


def test_gradients_are_unbiased_given_the_operands() -> None:
    """The mean of dx and dW over 3,000 backward passes is ``g Ŵ`` and ``gᵀ x̂``: z² is 1 on average, and none large.

    Rounding to nearest fails the same test.
    """
    num, g = 3000, torch.Generator().manual_seed(0)
    x, w = torch.randn(6, 10, generator=g), torch.randn(5, 10, generator=g)
    grad = torch.randn(6, 5, generator=g) * torch.exp(2 * torch.randn(6, 5, generator=g))
    x_hat, w_hat = worth(*reference(x)), worth(*reference(w))
    expected = torch.cat([(grad.double() @ w_hat).flatten(), (grad.double().t() @ x_hat).flatten()])

    def z(stochastic: bool) -> Tensor:
        torch.manual_seed(0)
        plugin = INT8Precision("32-true", stochastic_rounding=stochastic)
        compute, drawn = arithmetic(plugin), torch.empty(num, 110, dtype=torch.float64)
        for i in range(num):
            with plugin.train_step_context():
                a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
                dx, dw = torch.autograd.grad(compute(a, b, None), (a, b), grad)
                drawn[i] = torch.cat([dx.flatten(), dw.flatten()])
            plugin._passes += 1  # as the Trainer's backward pass does
        return (drawn.mean(0) - expected) / (drawn.std(0) / num**0.5).clamp(min=1e-6)

    found = z(True)
    assert found.abs().max() < 4.5
    assert found.square().mean().item() == pytest.approx(1, abs=0.6)  # 110 numbers, some of them dependent
    assert z(False).abs().max() > 1000


def test_each_use_draws_anew_in_backward_alone() -> None:
    plugin = INT8Precision("32-true")
    compute, x, w = arithmetic(plugin), torch.randn(6, 10), torch.randn(5, 10)
    torch.manual_seed(0)
    plugin.seed()
    before = torch.get_rng_state()

    def gradient() -> Tensor:
        a = w.clone().requires_grad_()
        y = compute(x, a, None)
        compute(x, a, None)  # as if it were run again
        return torch.autograd.grad(y, a, torch.linspace(-1, 1, 30).view(6, 5))[0]

    with plugin.train_step_context():
        first, second = gradient(), gradient()
    assert not torch.equal(first, second)
    with plugin.train_step_context():
        assert torch.equal(gradient(), first)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("emulated", [False, True])
def test_backward_ignores_autocast(emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "_cpu_is_right", lambda: not emulated)
    contract.backward_ignores_autocast(arithmetic(INT8Precision(stochastic_rounding=False)))


def test_products_run_on_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All three of a map; where the processor's are not right, none."""
    calls: list[torch.Size] = []
    monkeypatch.setattr(int8, "_int_mm", lambda a, b: calls.append(a.shape) or torch._int_mm(a, b))
    for right, expected in ((True, [(6, 10), (6, 5), (5, 6)]), (False, [])):
        monkeypatch.setattr(int8, "_cpu_is_right", lambda right=right: right)
        x, w = torch.randn(6, 10).requires_grad_(), torch.randn(5, 10).requires_grad_()
        arithmetic(INT8Precision())(x, w, None).sum().backward()
        assert calls == expected
        calls.clear()


def test_a_vector_and_no_rows_and_frozen_operands() -> None:
    compute = arithmetic(INT8Precision())
    w = torch.randn(7, 12).requires_grad_()
    assert compute(torch.randn(12), w, None).shape == (7,)
    compute(torch.randn(0, 12), w, None).sum().backward()
    assert torch.equal(w.grad, torch.zeros(7, 12))
    x = torch.randn(3, 12).requires_grad_()
    compute(x, w.detach(), None).sum().backward()
    assert x.grad is not None


def test_gradients_that_are_not_finite_stay_so() -> None:
    for value in (torch.inf, torch.nan):
        x, w = torch.randn(4, 8).requires_grad_(), torch.randn(3, 8).requires_grad_()
        grad = torch.ones(4, 3)
        grad[1, 2] = value
        arithmetic(INT8Precision())(x, w, None).backward(grad)
        assert not x.grad[1].isfinite().any() and x.grad[[0, 2, 3]].isfinite().all()
        assert not w.grad[2].isfinite().any() and w.grad[:2].isfinite().all()


def test_one_byte_an_element_is_saved() -> None:
    x, w = torch.randn(64, 32).requires_grad_(), torch.randn(16, 32).requires_grad_()
    saved = contract.saved_by(lambda: arithmetic(INT8Precision())(x, w, None))
    assert sum(t.nbytes for t in saved) == x.numel() + w.numel() + 4 * (64 + 16)
    assert not any(t.is_floating_point() for t in saved)


def test_arguments() -> None:
    with pytest.raises(ValueError, match=r"INT8Precision\(base='int8'\): expected one of 32-true"):
        INT8Precision("int8")
    with pytest.raises(ValueError, match=r"INT8Precision\(stochastic_rounding=1\): expected True or False"):
        INT8Precision(stochastic_rounding=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"INT8Precision\(skip='head'\): expected a list of keywords"):
        INT8Precision(skip="head")
    assert INT8Precision().precision == "bf16-mixed"
    assert "stochastically" in INT8Precision().describe()
    assert "to nearest" in INT8Precision(stochastic_rounding=False).describe()


@pytest.mark.parametrize("base", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("model", ["tiny_gpt", "gpt2", "llama", "bert", "vit"])
def test_trains_like_the_base_plugin(model: str, base: str) -> None:
    """After 12 steps the loss is within 2 % of the base's progress from the base's."""
    assert contract.apart(INT8Precision, model, base) < 0.02


def test_gpt2s_own_linear_maps_run_in_it() -> None:
    plugin, net = INT8Precision(), hugging_face("gpt2", num_layers=2)
    plugin.convert_module(net)
    assert sum("Conv1D" in type(m.module).__name__ for m in plugin._maps) == len(plugin._maps) == 8


@pytest.mark.parametrize("stochastic", [True, False])
def test_fifty_steps(stochastic: bool) -> None:
    make = functools.partial(INT8Precision, stochastic_rounding=stochastic)
    assert contract.apart(make, "tiny_gpt", "32-true", max_steps=50, samples=200) < 0.05


def test_resume_equals_uninterrupted_from_every_step(tmp_path: Path) -> None:
    contract.resumes(INT8Precision, tmp_path)


def test_checkpoints_are_the_plain_modules(tmp_path: Path) -> None:
    contract.checkpoints_are_the_plain_modules(INT8Precision, tmp_path)


def test_the_same_when_rematerialized() -> None:
    contract.the_same_when_rematerialized(INT8Precision)


def test_inside_compressed_activations() -> None:
    contract.compressed_activations_leave_its_tensors_alone(INT8Precision)


@pytest.mark.parametrize("fails", [False, True])
def test_leaves_no_trace(fails: bool) -> None:
    contract.leaves_no_trace(INT8Precision, fails)
