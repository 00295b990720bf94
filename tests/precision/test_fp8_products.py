"""FP8's casts and products against a reference in float64 written from their definition, and CUDA's rules for them."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_eff.precision._scaling import linear as scaled_linear
from lightning_eff.precision._scaling.casts import Codes, cast_pair
from lightning_eff.precision._scaling.linear import Float8Linear
from lightning_eff.precision._scaling.products import (
    Call,
    check_for_cuda,
    emulated,
    for_cuda,
    refusal,
    scaled_mm,
    scaled_mm_for,
    scaled_mm_on_cuda,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALINGS = ("tensorwise", "rowwise", "blockwise")
BITS = {E4M3: (3, 7, 448.0), E5M2: (2, 15, 57344.0)}  # mantissa, bias, largest number


# -- the reference


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Float64 numbers to the nearest ones of a format, ties to even, saturating."""
    mantissa, bias, largest = BITS[dtype]
    exponent = np.maximum(np.frexp(x)[1] - 1, 1 - bias)
    step = np.ldexp(1.0, exponent - mantissa)
    return np.clip(np.round(x / step) * step, -largest, largest)


def as_float8(x: Tensor, dtype: torch.dtype, group: tuple[int, int]) -> np.ndarray:
    """``x`` (R, K) through float8 with a scale for each ``group`` of rows and columns, in float64."""
    a = x.double().numpy()
    result = np.empty_like(a)
    for i in range(0, a.shape[0], group[0]):
        for j in range(0, a.shape[1], group[1]):
            part = np.s_[i : i + group[0], j : j + group[1]]
            scale = np.float32(BITS[dtype][2]) / np.float32(np.abs(a[part]).max())
            scaled = (a[part].astype(np.float32) * scale).astype(np.float64)  # the product is taken in float32
            result[part] = rounded(scaled, dtype) / np.float64(scale)
    return result


ALL = 10**6
GROUPS: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {  # of x and g, and of the weight
    "tensorwise": ((ALL, ALL), (ALL, ALL)),
    "rowwise": ((1, ALL), (1, ALL)),
    "blockwise": ((1, 128), (128, 128)),
}


def reference(x: Tensor, w: Tensor, g: Tensor, scaling: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """y, dx and dW: each operand with its groups along the contraction of its product."""
    along, block = GROUPS[scaling]
    y = as_float8(x, E4M3, along) @ as_float8(w, E4M3, block).T
    dx = as_float8(g, E5M2, along) @ as_float8(w.t(), E4M3, block).T
    dw = as_float8(g.t(), E5M2, along) @ as_float8(x.t(), E4M3, along).T
    return y, dx, dw


def linear(scaling: Any, product: Any = emulated, **settings: Any) -> Float8Linear:
    return Float8Linear("map", scaling, product, fast=True, history=None, recording=lambda: False, **settings)


class Results(NamedTuple):
    y: Tensor
    dx: Tensor
    dw: Tensor


def run(f: Callable[..., Tensor], x: Tensor, w: Tensor, g: Tensor) -> Results:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = f(x, w, None)
    y.backward(g)
    assert x.grad is not None and w.grad is not None
    return Results(y.detach(), x.grad, w.grad)


def operands(m: int = 150, k: int = 300, n: int = 140, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(m, k).to(dtype), torch.randn(n, k) * 0.03, (torch.randn(m, n) * 1e-4).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_products_are_the_definition(scaling: str, dtype: torch.dtype) -> None:
    x, w, g = operands(dtype=dtype)
    found = run(linear(scaling), x, w, g)
    assert [t.dtype for t in found] == [dtype, dtype, torch.float32]
    for name, got, expected in zip(Results._fields, found, reference(x, w, g, scaling), strict=True):
        error = np.linalg.norm(got.double().numpy() - expected) / np.linalg.norm(expected)
        assert error < (1e-6 if got.dtype == torch.float32 else 2.0**-9), name


def by_rows_on_a_cpu() -> bool:
    """Whether torch's product of float8 matrices takes a scale for each row on a CPU, as it does from 2.12 on."""
    x, scale = torch.ones(16, 16).to(E4M3), torch.ones(16, 1)
    try:
        torch._scaled_mm(x, x.T, scale, scale.T, out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def taken(scaling: str) -> None:
    if scaling == "rowwise" and not by_rows_on_a_cpu():
        pytest.skip(f"on a CPU torch {torch.__version__} multiplies float8 with one scale for a tensor only")


@pytest.mark.parametrize("scaling", SCALINGS[:2])
def test_scaled_mm_gives_the_emulated_numbers(scaling: str) -> None:
    taken(scaling)
    for sizes in ((64, 96, 80), (37, 17, 23)):
        x, w, g = operands(*sizes)
        for name, a, b in zip(
            Results._fields, run(linear(scaling, scaled_mm), x, w, g), run(linear(scaling), x, w, g), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * float(b.abs().max()), msg=name)


def test_the_backward_pass_ignores_autocast() -> None:
    """A manual optimization calls it inside the training step."""
    x, w, g = operands()
    plain = run(linear("tensorwise"), x, w, g)
    with torch.autocast("cpu", torch.bfloat16):
        x, w = x.requires_grad_(), w.requires_grad_()
        y = torch.autocast("cpu", enabled=False)(linear("tensorwise").__call__)(x, w, None)
        y.backward(g)
    assert x.grad is not None and w.grad is not None
    assert torch.equal(x.grad, plain.dx) and torch.equal(w.grad, plain.dw)


def test_shapes_dtypes_and_what_is_not_asked_for() -> None:
    torch.manual_seed(0)
    x, w, bias = torch.randn(2, 3, 32), torch.randn(16, 32), torch.randn(16)
    y = linear("rowwise")(x, w, bias)
    assert y.shape == (2, 3, 16)
    assert torch.equal(y[1, 2], linear("rowwise")(x, w, None)[1, 2] + bias)
    assert linear("rowwise")(x[0, 0], w, bias).shape == (16,)
    assert linear("rowwise")(x[:0], w, bias).shape == (0, 3, 16)
    assert linear("tensorwise")(x.double(), w.double(), None).dtype == torch.float64
    frozen = linear("tensorwise")(x.requires_grad_(), w, None)
    frozen.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    w.requires_grad_()
    linear("blockwise")(x.detach(), w, None).sum().backward()
    assert w.grad is not None and w.grad.dtype == torch.float32


@pytest.mark.parametrize("keep_weight", [True, False])
def test_what_is_saved_between_forward_and_backward(keep_weight: bool) -> None:
    """x in one byte an element, and the scales; the weight likewise, or itself."""
    x, w, _ = operands(128, 256, 128)
    x, w = x.requires_grad_(), w.requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear("rowwise", keep_weight=keep_weight)(x, w, None)
    others = [t for t in saved if t.data_ptr() != w.data_ptr()]
    assert (len(saved) == len(others)) == keep_weight
    one = [(E4M3, (256, 128)), (torch.float32, (256, 1))]
    assert [(t.dtype, tuple(t.shape)) for t in others] == (2 * one if keep_weight else one)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_kept_weight_changes_no_bit_and_saves_a_cast(scaling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, g = operands()
    casts: list[tuple[int, ...]] = []
    real = scaled_linear.cast_pair

    def counted(t: Tensor, *args: Any, **kwargs: Any) -> Any:
        casts.append(tuple(t.shape))
        return real(t, *args, **kwargs)

    monkeypatch.setattr(scaled_linear, "cast_pair", counted)
    found = []
    for keep_weight, expected in ((True, 1), (False, 2)):
        casts.clear()
        found.append(run(linear(scaling, keep_weight=keep_weight), x, w, g))
        assert casts.count(tuple(w.shape)) == expected and len(casts) == 2 + expected
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_evaluation_casts_nothing_for_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, _ = operands()
    asked: list[bool] = []
    real = scaled_linear.cast_pair

    def noted(t: Tensor, *args: Any, columns: bool, **kwargs: Any) -> Any:
        asked.append(columns)
        return real(t, *args, columns=columns, **kwargs)

    monkeypatch.setattr(scaled_linear, "cast_pair", noted)
    with torch.no_grad():
        linear("tensorwise")(x.requires_grad_(), w.requires_grad_(), None)
    assert asked == [False, False]


# -- scales


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_zero_and_tiny_amax(scaling: Any, dtype: torch.dtype) -> None:
    x = torch.randn(130, 130)
    x[:128] = 0
    for factor in (1.0, 2.0**-60, 2.0**-95, 0.0, 2.0**-140):
        for square in (False, True):
            pair = cast_pair(x * factor, dtype, scaling, columns=True, square=square)
            assert pair.rows is not None and pair.columns is not None
            for found in (pair.rows, pair.columns):
                values = found.dequantized()
                assert values.isfinite().all() and found.inverse.isfinite().all()
            values = pair.rows.dequantized()
            assert (values[:128] == 0).all()
            if factor >= 2.0**-95:
                largest = (x * factor).abs().max()
                assert math.isclose(float(values.abs().max()), float(largest), rel_tol=1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_what_is_not_finite_stays_so(scaling: str, bad: float) -> None:
    x, w, g = operands(140, 136, 160)
    g[3, 5] = bad
    found = run(linear(scaling), x, w, g)
    assert found.dx[3].isnan().any() and found.dw[5].isnan().any()
    assert found.y.isfinite().all()
    if scaling != "tensorwise":
        assert found.dx[:3].isfinite().all() and found.dw[6:].isfinite().all(), "other rows have other scales"
    x[7, 9] = bad
    assert linear(scaling)(x, w, None)[7].isnan().any()


# -- outliers


def worst(found: Tensor, expected: Tensor, dim: int) -> float:
    """The largest relative error of a row (dim 1) or a column (dim 0)."""
    return float(((found - expected).norm(dim=dim) / expected.norm(dim=dim)).max())


def test_outliers_break_tensorwise_scaling_alone() -> None:
    """Rows of x of very different sizes, and channels of x, whose part of dW is lost."""
    torch.manual_seed(0)
    x, w, g = torch.randn(256, 192), torch.randn(160, 192), torch.randn(256, 160)
    rows, channels = torch.randn(256, 1).mul(3).exp() * x, torch.randn(192).mul(3).exp() * x
    errors = {
        s: (
            worst(linear(s)(rows, w, None), rows @ w.t(), 1),
            worst(run(linear(s), channels, w, g).dw, g.t() @ channels, 0),
            worst(linear(s)(x, w, None), x @ w.t(), 1),
        )
        for s in SCALINGS
    }
    lost_row, lost_channel, plain = errors["tensorwise"]
    assert lost_row > 0.95 and lost_channel > 0.95 and plain < 0.06
    for scaling in ("rowwise", "blockwise"):
        of_rows, of_channels, plain = errors[scaling]
        assert of_rows < 0.055 and of_channels < 0.085 and plain < 0.055, scaling


# -- CUDA's rules


@pytest.mark.parametrize("scaling", SCALINGS[:2])
def test_what_cuda_gets_obeys_its_rules_and_is_the_product(scaling: str) -> None:
    taken(scaling)
    for m, k, n in ((32, 32, 32), (7, 17, 23), (1, 16, 5), (150, 300, 140)):
        a = cast_pair(torch.randn(m, k), E5M2, scaling).rows
        b = cast_pair(torch.randn(n, k), E4M3, scaling, square=True).rows
        assert a is not None and b is not None
        call = for_cuda(a, b, torch.float32)
        check_for_cuda(call)
        assert call.out_dtype == (torch.float32 if scaling == "tensorwise" else torch.bfloat16)
        y = torch._scaled_mm(call.left, call.right, call.left_scale, call.right_scale, out_dtype=torch.float32)
        torch.testing.assert_close(y[:, :n], emulated(a, b, torch.float32, False), rtol=1e-5, atol=1e-4)
        if y.shape[1] > n:
            assert (y[:, n:] == 0).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("scaling", SCALINGS[:2])
def test_a_device_gives_the_emulated_numbers(scaling: str) -> None:
    """But for the fewer bits of a fast accumulation, and of results by rows, which pass through bfloat16."""
    for sizes in ((64, 96, 80), (37, 17, 23), (1, 5, 3), (300, 520, 260)):
        x, w, g = (t.cuda() for t in operands(*sizes))
        found = run(linear(scaling, scaled_mm_for(x.device)), x, w, g)
        for name, a, b in zip(Results._fields, found, run(linear(scaling), x, w, g), strict=True):
            assert a.dtype == b.dtype and float((a - b).norm() / b.norm()) < 2.0**-8, name


@pytest.mark.parametrize("exact_by_rows", [True, False])
@pytest.mark.parametrize("scaling", SCALINGS[:2])
def test_cudas_path_gives_the_emulated_numbers(scaling: str, exact_by_rows: bool) -> None:
    """All of it but the device. Results by rows pass through bfloat16, unless they are scaled afterwards."""
    taken(scaling)
    product = functools.partial(scaled_mm_on_cuda, exact_by_rows=exact_by_rows)
    for sizes in ((64, 96, 80), (37, 17, 23), (1, 5, 3)):
        x, w, g = operands(*sizes)
        found, expected = run(linear(scaling, product), x, w, g), run(linear(scaling), x, w, g)
        for name, a, b in zip(Results._fields, found, expected, strict=True):
            rounds = scaling == "rowwise" and (exact_by_rows or name == "y")
            assert a.dtype == b.dtype
            error = float((a - b).norm() / b.norm())
            assert error < (2.0**-8 if rounds else 1e-6), name


def test_which_path_a_device_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    assert scaled_mm_for(torch.device("cpu")) is scaled_mm
    for capability, version, expected in (
        ((9, 0), "12.9", True),
        ((9, 0), "13.0", True),
        ((9, 0), "12.8", False),
        ((8, 9), "13.0", False),
        ((10, 0), "13.0", False),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        monkeypatch.setattr(torch.version, "cuda", version)
        assert scaled_mm_for(cuda).keywords == {"exact_by_rows": expected}


def good() -> Call:
    a, b = torch.zeros(8, 32).to(E4M3), torch.zeros(48, 32).to(E4M3)
    return Call(a, b.t(), torch.ones(8, 1), torch.ones(1, 48), torch.bfloat16)


BROKEN: dict[str, dict[str, Any]] = {
    "the same length": {"right": torch.zeros(48, 16).to(E4M3).t()},
    "not both E5M2": {"left": torch.zeros(8, 32).to(E5M2), "right": torch.zeros(48, 32).to(E5M2).t()},
    "operands are float8": {"left": torch.zeros(8, 32)},
    "row-major": {"left": torch.zeros(32, 8).to(E4M3).t()},
    "column-major": {"right": torch.zeros(32, 48).to(E4M3)},
    "multiples of 16": {"left": torch.zeros(8, 24).to(E4M3), "right": torch.zeros(48, 24).to(E4M3).t()},
    "K and C are multiples": {"right": torch.zeros(47, 32).to(E4M3).t(), "right_scale": torch.ones(1, 47)},
    "no size is zero": {"left": torch.zeros(0, 32).to(E4M3), "left_scale": torch.ones(0, 1)},
    "scales are float32": {"left_scale": torch.ones(8, 1).bfloat16()},
    "shapes": {"left_scale": torch.ones(8)},
    "contiguous": {"right_scale": torch.ones(1, 96)[:, ::2]},
    "result is bfloat16": {"out_dtype": torch.float32},
    "right operand E4M3": {"right": torch.zeros(48, 32).to(E5M2).t()},
}


@pytest.mark.parametrize("rule", sorted(BROKEN))
def test_a_broken_rule_of_cuda_is_named(rule: str) -> None:
    check_for_cuda(good())
    with pytest.raises(ValueError, match=rf"on CUDA expected that .*{rule}.*Pad and transpose"):
        check_for_cuda(good()._replace(**BROKEN[rule]))


@pytest.mark.parametrize("rule", ["row-major", "column-major", "multiples of 16", "K and C are multiples", "shapes"])
def test_torch_itself_refuses_that_on_cuda(rule: str) -> None:
    """torch's own checks for CUDA, on tensors that have a shape and a device but no memory."""

    def call(given: Call) -> None:
        with FakeTensorMode():
            left, right, *scales = (
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in given[:4]
            )
            torch._scaled_mm(left, right, *scales, out_dtype=given.out_dtype)

    call(good())
    with pytest.raises(RuntimeError):
        call(good()._replace(**BROKEN[rule]))


def test_devices_that_multiply_float8() -> None:
    assert refusal("cuda", (8, 9), hip=False) is None
    assert refusal("cuda", (9, 0), hip=False) is None
    assert refusal("cuda", (12, 0), hip=False) is None
    assert "8.0" in str(refusal("cuda", (8, 0), hip=False))
    assert refusal("cuda", (9, 0), hip=False, blocks=True) is None
    assert "blockwise scales" in str(refusal("cuda", (8, 9), hip=False, blocks=True))
    assert "ROCm" in str(refusal("cuda", (9, 4), hip=True))
    assert "'cpu'" in str(refusal("cpu", None, hip=False))


def test_emulation_is_exact_under_lower_matmul_precision() -> None:
    x, w, g = operands()
    before = torch.get_float32_matmul_precision()
    expected = {s: run(linear(s), x, w, g) for s in SCALINGS}
    torch.set_float32_matmul_precision("medium")
    try:
        for scaling in SCALINGS:
            for a, b in zip(run(linear(scaling), x, w, g), expected[scaling], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))
    finally:
        torch.set_float32_matmul_precision(before)


def test_dequantized_is_what_the_codes_stand_for() -> None:
    for scaling in SCALINGS:
        x = torch.randn(5, 200)
        found = cast_pair(x, E4M3, scaling).rows
        assert isinstance(found, Codes)
        expected = torch.from_numpy(as_float8(x, E4M3, GROUPS[scaling][0]))
        torch.testing.assert_close(found.dequantized().double(), expected, rtol=1e-6, atol=0)
