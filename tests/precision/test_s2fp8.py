"""S2FP8 against a reference in Python's own floats, its property, and what a plugin must keep."""

import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_eff.precision import s2fp8
from lightning_eff.precision._formats.formats import E4M3, E5M2, round_to
from lightning_eff.precision._linear.maps import linear_maps
from lightning_eff.precision.s2fp8 import S2FP8Precision, encode, squeeze, statistics
from tests.models import hugging_face
from tests.plugins import PluginCase
from tests.precision import plugin_contract as contract

PLUGINS = {"S2FP8Precision": PluginCase(build=lambda precision: S2FP8Precision(base=precision))}

# E5M2's finite numbers >= 0 by code
NUMBERS = [math.ldexp(f + (4 if e else 0), max(e, 1) - 17) for e in range(31) for f in range(4)]


def reference(values: list[float]) -> tuple[list[float], float, float]:
    """The numbers that S2FP8 keeps, α and β: log, scale, round by looking at every number of E5M2, and back."""
    logs = [math.log2(abs(v)) for v in values if v]
    mu, m = math.fsum(logs) / len(logs), max(logs)
    alpha = 15 / (m - mu)
    beta = -alpha * mu
    kept = []
    for v in values:
        y = 2 ** (alpha * math.log2(abs(v)) + beta) if v else 0.0
        code = min(range(len(NUMBERS)), key=lambda code: (abs(NUMBERS[code] - y), code % 2))
        back = (2**-beta * NUMBERS[code]) ** (1 / alpha) if NUMBERS[code] else 0.0
        kept.append(math.copysign(back, v))
    return kept, alpha, beta


def lognormal(sigma: float, *shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.exp(sigma * torch.randn(shape, generator=g)) * torch.randn(shape, generator=g).sign()


@pytest.mark.parametrize("sigma", [0.1, 1.0, 5.0])
def test_the_numbers_kept_are_the_references(sigma: float) -> None:
    x = lognormal(sigma, 20, 30)
    x[3] = 0.0
    kept, alpha, beta = reference(x.flatten().tolist())
    found_alpha, found_mu = statistics(x)
    assert found_alpha.item() == pytest.approx(alpha, rel=1e-12)
    assert (-found_alpha * found_mu).item() == pytest.approx(beta, rel=1e-9)
    found = squeeze(x)
    assert found.codes.shape == x.shape and found.codes.dtype == torch.uint8 and found.levels.shape == (256,)
    # to float32's own rounding: a neighbouring code would be a tenth of an octave / α and more away
    torch.testing.assert_close(found.float().flatten(), torch.tensor(kept), rtol=2e-7, atol=0)


@pytest.mark.parametrize(("alpha", "mu"), [(1.0, 0.0), (1.0, -7.0), (0.5, 3.0)])
def test_every_code_from_its_first_to_its_last_number(alpha: float, mu: float) -> None:
    """At, halfway between, and beside all numbers of E5M2, with α and μ for which the halfway points are exact."""
    y = torch.tensor(NUMBERS, dtype=torch.float64)
    y = torch.cat([y, (y[1:] + y[:-1]) / 2])
    x = y.pow(1 / alpha).mul(2.0**mu).float()
    x = torch.cat([x, x.nextafter(torch.tensor(torch.inf)), x.nextafter(torch.tensor(0.0))])
    x = torch.cat([x, -x])
    found = encode(x, torch.tensor(alpha).double(), torch.tensor(mu).double())
    expected = x.double().mul(2.0**-mu).abs().pow(alpha)  # exact or nearly: the powers are 1 and 1/2
    codes = [min(range(124), key=lambda code: (abs(NUMBERS[code] - v), code % 2)) for v in expected.tolist()]
    assert found.codes.tolist() == [
        code + 128 * (v < 0 or str(v) == "-0.0") for code, v in zip(codes, x.tolist(), strict=True)
    ]
    levels = torch.tensor(NUMBERS, dtype=torch.float64).pow(1 / alpha).mul(2.0**mu)
    torch.testing.assert_close(found.levels[:124], levels.float(), rtol=2e-7, atol=0)


@pytest.mark.parametrize(("apart", "tabled"), [(1.3, True), (1.001, False)])
def test_large_tensors_are_coded_as_small_ones(apart: float, tabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boundaries themselves, their neighbours, and the ends of float32; close boundaries leave the table."""
    boundaries = torch.cat([2.0**-30 * apart ** torch.arange(123.0), torch.tensor([torch.inf])])
    near = [boundaries.nextafter(torch.tensor(to)) for to in (0.0, torch.inf)]
    ends = torch.tensor([0.0, 2.0**-149, torch.inf, torch.nan])
    size = torch.cat([boundaries, *near, ends, torch.rand(2**18).pow(9)])
    searched: list[int] = []
    search = torch.bucketize
    monkeypatch.setattr(torch, "bucketize", lambda x, *args, **kw: searched.append(x.numel()) or search(x, *args, **kw))
    found = s2fp8._count_up_to(size, boundaries)
    assert (max(searched) < size.numel()) == tabled
    numbers = ~size.isnan()
    expected = (size[numbers, None] >= boundaries).sum(1)
    assert torch.equal(found[numbers].long(), expected)
    assert found[size.isinf()].eq(124).all()


def test_squeezed_numbers_have_log_mean_0_and_log_maximum_15() -> None:
    x = lognormal(3.0, 50, 40)
    x[0] = 0.0
    alpha, mu = statistics(x)
    log_y = alpha * (x[x != 0].double().abs().log2() - mu)
    assert log_y.mean().item() == pytest.approx(0, abs=1e-12)
    assert log_y.max().item() == pytest.approx(15, abs=1e-12)
    codes = squeeze(x).codes.view(torch.float8_e5m2).float()
    assert codes.abs().max() == 2**15
    largest = x.abs().argmax()
    assert squeeze(x).float().flatten()[largest] == x.flatten()[largest]
    assert squeeze(1e-30 * x).codes.eq(squeeze(x).codes).float().mean() > 0.999  # of any magnitude


def test_a_wide_tensor_loses_nothing_where_scaled_fp8_loses_most() -> None:
    """Lognormal with σ = 5, at 65,536 quantiles: the share that becomes zero.

    Of E5M2 scaled to its largest number, these are the numbers up to half of 2^-16 / 57344 of the largest one.
    """
    normal, num = NormalDist(), 65_536
    z = torch.tensor([normal.inv_cdf((i + 0.5) / num) for i in range(num)], dtype=torch.float64)
    x = torch.exp(5 * z).float()

    def lost(kept: Tensor) -> float:
        return (kept == 0).float().mean().item()

    def below(smallest: float, largest: float) -> float:
        return normal.cdf((math.log(smallest / 2 / largest) + 5 * z[-1].item()) / 5)

    e5m2, e4m3 = (lost(round_to(x * (f.max_value / x.max()), f)) for f in (E5M2, E4M3))
    assert e5m2 == pytest.approx(below(2.0**-16, 57344.0), abs=2 / num) == pytest.approx(0.412, abs=0.001)
    assert e4m3 == pytest.approx(below(2.0**-9, 448.0), abs=2 / num) == pytest.approx(0.957, abs=0.001)
    assert lost(squeeze(x).float()) == 0.0
    narrow = torch.exp(z).float()
    scale = E4M3.max_value / narrow.max()
    errors = squeeze(narrow).float() - narrow, round_to(narrow * scale, E4M3) / scale - narrow
    found, scaled = ((e.norm() / narrow.norm()).item() for e in errors)  # with σ = 1, S2FP8 is as good as scaled E4M3
    assert found == pytest.approx(0.022, abs=0.001) and scaled == pytest.approx(0.026, abs=0.001)


def test_zeros_and_a_single_magnitude_are_exact() -> None:
    assert torch.equal(squeeze(torch.zeros(3, 4)).float(), torch.zeros(3, 4))
    assert squeeze(torch.zeros(0, 4)).float().shape == (0, 4)
    for magnitude in (0.3, 1e-40, 3e38, 1.0):
        x = torch.tensor([magnitude, -magnitude, 0.0, magnitude])
        assert torch.equal(squeeze(x).float(), x)


@pytest.mark.parametrize(("magnitude", "num"), [(1.0, 999), (1.7e-38, 4_000_037), (7e-21, 4_000_037)])
def test_nearly_a_single_magnitude(magnitude: float, num: int) -> None:
    """One number is a rounding step below the rest: m − μ is 1e-10, or, as float64 sums it, zero and below zero."""
    x = torch.full((num,), magnitude)
    x[7], x[8] = x[7].nextafter(torch.tensor(0.0)), 0.0
    found = squeeze(x).float()
    torch.testing.assert_close(found[9:], x[9:], rtol=3e-7, atol=0)
    assert found[8] == 0 and found[7] in (0, x[7], x[9])


def test_zeros_are_not_counted() -> None:
    x = lognormal(1.0, 30)
    assert torch.equal(squeeze(torch.cat([x, torch.zeros(1000)])).float()[:30], squeeze(x).float())


def test_what_is_not_finite_stays_so_and_is_not_counted() -> None:
    x = lognormal(1.0, 30)
    ends = torch.tensor([torch.inf, -torch.inf, torch.nan])
    found = squeeze(torch.cat([x, ends])).float()
    assert torch.equal(found[:30], squeeze(x).float())
    assert found[30:32].tolist() == [math.inf, -math.inf] and found[32].isnan()


def kept(x: Tensor) -> Tensor:
    return torch.tensor(reference(x.flatten().tolist())[0]).view(x.shape)


def arithmetic(plugin: S2FP8Precision) -> Any:
    (m,) = linear_maps(torch.nn.Sequential(torch.nn.Linear(1, 1)))
    return plugin.arithmetic(m)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_the_three_products(bias: bool, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 12, generator=g).to(dtype).requires_grad_()
    w = torch.randn(7, 12, generator=g).requires_grad_()
    b = torch.randn(7, generator=g).requires_grad_() if bias else None
    grad = lognormal(2.0, 2, 5, 7).to(dtype)
    y = arithmetic(S2FP8Precision())(x, w, b)
    y.backward(grad)
    rows, x_hat, w_hat = grad.float().view(10, 7), kept(x.detach().float()).view(10, 12), kept(w.detach())
    g_hat = kept(rows)
    expected = x_hat @ w_hat.t() + (b.detach() if b is not None else 0)
    assert y.dtype == x.grad.dtype == dtype and w.grad.dtype == torch.float32 and y.shape == (2, 5, 7)
    close = (
        {"rtol": 1e-5, "atol": 1e-5 * grad.abs().max().item()}
        if dtype == torch.float32
        else {"rtol": 0.01, "atol": 0.02}
    )
    torch.testing.assert_close(y.view(10, 7).float(), expected, **close)
    torch.testing.assert_close(x.grad.view(10, 12).float(), g_hat @ w_hat, **close)
    torch.testing.assert_close(w.grad, g_hat.t() @ x_hat, rtol=1e-5, atol=1e-5 * grad.abs().max().item())
    if b is not None:
        assert torch.equal(b.grad, rows.sum(0))


def test_a_vector_and_no_rows_and_frozen_operands() -> None:
    compute = arithmetic(S2FP8Precision())
    w = torch.randn(7, 12, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert compute(torch.randn(12), w, None).shape == (7,)
    compute(torch.randn(0, 12), w, None).sum().backward()
    assert torch.equal(w.grad, torch.zeros(7, 12))
    x = torch.randn(3, 12).requires_grad_()
    compute(x, w.detach(), None).sum().backward()
    assert x.grad is not None


def test_gradients_that_are_not_finite_stay_so() -> None:
    x, w = torch.randn(4, 8).requires_grad_(), torch.randn(3, 8).requires_grad_()
    grad = torch.ones(4, 3)
    grad[1, 2] = torch.inf
    arithmetic(S2FP8Precision())(x, w, None).backward(grad)
    assert not x.grad[1].isfinite().any() and x.grad[[0, 2, 3]].isfinite().all()
    assert not w.grad[2].isfinite().any() and w.grad[:2].isfinite().all()


def test_backward_ignores_autocast() -> None:
    contract.backward_ignores_autocast(arithmetic(S2FP8Precision()))


def test_one_byte_an_element_is_saved() -> None:
    x, w = torch.randn(64, 32).requires_grad_(), torch.randn(16, 32).requires_grad_()
    saved = contract.saved_by(lambda: arithmetic(S2FP8Precision())(x, w, None))
    assert sum(t.nbytes for t in saved) == x.numel() + w.numel() + 2 * 256 * 4
    assert not any(t.is_floating_point() for t in saved)


def test_arguments() -> None:
    with pytest.raises(ValueError, match=r"S2FP8Precision\(base='8-true'\): expected one of 32-true"):
        S2FP8Precision("8-true")
    with pytest.raises(ValueError, match=r"S2FP8Precision\(skip='head'\): expected a list of keywords"):
        S2FP8Precision(skip="head")
    assert "emulated" in S2FP8Precision().describe()


@pytest.mark.parametrize(
    ("model", "base"),
    [("tiny_gpt", "bf16-mixed"), ("gpt2", "bf16-mixed"), *((m, "32-true") for m in ("gpt2", "llama", "bert", "vit"))],
)
def test_trains_like_the_base_plugin(model: str, base: str) -> None:
    """After 12 steps the loss is within 2 % of the base's progress from the base's."""
    assert contract.apart(S2FP8Precision, model, base) < 0.02


def test_gpt2s_own_linear_maps_run_in_it() -> None:
    plugin, net = S2FP8Precision(), hugging_face("gpt2", num_layers=2)
    plugin.convert_module(net)
    assert sum("Conv1D" in type(m.module).__name__ for m in plugin._maps) == len(plugin._maps) == 8


def test_fifty_steps() -> None:
    assert contract.apart(S2FP8Precision, "tiny_gpt", "32-true", max_steps=50, samples=200) < 0.05


def test_resume_equals_uninterrupted_from_every_step(tmp_path: Path) -> None:
    contract.resumes(S2FP8Precision, tmp_path)


def test_checkpoints_are_the_plain_modules(tmp_path: Path) -> None:
    contract.checkpoints_are_the_plain_modules(S2FP8Precision, tmp_path)


def test_the_same_when_rematerialized() -> None:
    contract.the_same_when_rematerialized(S2FP8Precision)


def test_inside_compressed_activations() -> None:
    contract.compressed_activations_leave_its_tensors_alone(S2FP8Precision)


@pytest.mark.parametrize("fails", [False, True])
def test_leaves_no_trace(fails: bool) -> None:
    contract.leaves_no_trace(S2FP8Precision, fails)
