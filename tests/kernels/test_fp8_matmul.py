"""Blockwise-scaled float8 products: the reference's numbers, whatever the sizes, the formats and the tiles."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_eff.kernels.fp8_cast import By, Codes, cast, reference_cast
from lightning_eff.kernels.fp8_matmul import CAPABILITY, check, matmul, reference_matmul
from lightning_eff.precision._scaling.blocks import by_triton
from lightning_eff.precision._scaling.linear import Float8Linear
from lightning_eff.precision._scaling.products import emulated
from tests.runs import largest

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TENSOR_CORE = 2.0**-12  # Hopper sums 128 products in about 14 bits (DeepSeek-V3, section 3.5.2)


@pytest.fixture
def kernel(device: torch.device) -> torch.device:
    """Where the kernel can run: a GPU without such tensor cores will not do."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        pytest.skip("the GPU has no tensor cores for it")
    return device


def codes(x: Tensor, dtype: torch.dtype, by: By) -> Codes:
    found = reference_cast(x, dtype, by).rows
    assert found is not None
    return found


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("a_dtype", "b_dtype", "a_by", "b_by"),
    [
        (E4M3, E4M3, "groups", "blocks"),  # y
        (E5M2, E4M3, "groups", "blocks"),  # dx
        (E5M2, E4M3, "groups", "groups"),  # dW
        (E4M3, E5M2, "blocks", "groups"),
        (E4M3, E4M3, "blocks", "blocks"),
    ],
)
def test_the_kernel_gives_the_references_numbers(
    a_dtype: torch.dtype, b_dtype: torch.dtype, a_by: Any, b_by: Any, kernel: torch.device
) -> None:
    torch.manual_seed(0)
    for m, n, k in ((150, 140, 300), (64, 128, 128), (1, 5, 3), (200, 260, 16), (129, 1, 256)):
        # sizes that change from block to block, so that a scale in the wrong place shows
        a = torch.randn(m, k) * torch.randn(m, -(-k // 128)).mul(2).exp().repeat_interleave(128, 1)[:, :k]
        b = (
            torch.randn(n, k)
            * torch.randn(-(-n // 128), -(-k // 128))
            .mul(2)
            .exp()
            .repeat_interleave(128, 0)
            .repeat_interleave(128, 1)[:n, :k]
        )
        left, right = codes(a.to(kernel), a_dtype, a_by), codes(b.to(kernel), b_dtype, b_by)
        exact = left.dequantized().double() @ right.dequantized().double().t()
        found = matmul(left, right, torch.float32)
        assert found.shape == (m, n) and found.dtype == torch.float32
        assert error(found, exact) < (TENSOR_CORE if kernel.type == "cuda" else 1e-6), (m, n, k)
        assert error(reference_matmul(left, right, torch.float32), exact) < 1e-6


def test_tiles_change_nothing_but_the_order(kernel: torch.device) -> None:
    from lightning_eff.kernels import _fp8_matmul_triton as way

    torch.manual_seed(0)
    a, b = (
        codes(torch.randn(300, 260).to(kernel), E4M3, "groups"),
        codes(torch.randn(270, 260).to(kernel), E4M3, "blocks"),
    )
    found = []
    for configuration in {*way.WITH_BLOCKS, *way.WITH_GROUPS}:
        y = torch.full((300, 270), math.nan, device=kernel)
        way.matmul(a, b, y, configuration=configuration)
        found.append(y)
    # the interpreter's products are a BLAS's, which orders its sums by the tile's shape and the processor
    # a GPU orders them by the instruction, so what is chosen by timing changes no bit
    of_order = 0.0 if kernel.type == "cuda" else torch.finfo(torch.float32).eps
    assert largest(error(y, found[0]) for y in found) <= of_order


def test_scales_by_rows_or_columns_are_the_same(kernel: torch.device) -> None:
    torch.manual_seed(0)
    a, b = (codes(torch.randn(n, 260).to(kernel), E4M3, "groups") for n in (70, 90))
    by_rows = [c._replace(inverse=c.inverse.contiguous()) for c in (a, b)]
    assert a.inverse.stride() == (1, 70) and by_rows[0].inverse.stride() == (3, 1)
    assert torch.equal(matmul(a, b, torch.float32), matmul(*by_rows, torch.float32))


def test_results_in_other_types(kernel: torch.device) -> None:
    torch.manual_seed(0)
    a, b = (
        codes(torch.randn(70, 200).to(kernel), E4M3, "groups"),
        codes(torch.randn(60, 200).to(kernel), E4M3, "blocks"),
    )
    whole = matmul(a, b, torch.float32)
    of_bfloat16 = 2.0**-8 if kernel.type == "cuda" else 2.0**-7  # the interpreter cuts it off, where a GPU rounds
    for dtype, step in ((torch.bfloat16, of_bfloat16), (torch.float16, 2.0**-11), (torch.float64, 0.0)):
        found = matmul(a, b, dtype)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), whole.double(), rtol=step, atol=0)


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_stays_visible_and_where_it_is(bad: float, kernel: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(150, 300)
    x[3, 140] = bad
    y = matmul(
        codes(x.to(kernel), E4M3, "groups"), codes(torch.randn(40, 300).to(kernel), E4M3, "blocks"), torch.float32
    )
    # the interpreter takes the code of NaN in E4M3 for a number, whose product with the infinite inverse is infinite
    assert y[3].isnan().all() if kernel.type == "cuda" else not y[3].isfinite().any()
    y[3] = 0
    assert y.isfinite().all()


def test_zeros_and_tiny_numbers(kernel: torch.device) -> None:
    torch.manual_seed(0)
    b = codes(torch.randn(40, 300).to(kernel), E4M3, "blocks")
    assert (matmul(codes(torch.zeros(9, 300, device=kernel), E4M3, "groups"), b, torch.float32) == 0).all()
    for factor in (2.0**-90, 2.0**60):
        a = codes((torch.randn(9, 300) * factor).to(kernel), E5M2, "groups")
        expected = reference_matmul(a, b, torch.float32)
        assert error(matmul(a, b, torch.float32), expected) < TENSOR_CORE


def test_a_linear_map_by_the_kernels_is_the_emulated_one(kernel: torch.device) -> None:
    """Casts and the three products, forward and backward."""
    torch.manual_seed(0)
    x, w, g = torch.randn(140, 300), torch.randn(150, 300) * 0.03, torch.randn(140, 150) * 1e-4
    found = []
    for product in (by_triton, emulated):
        linear = Float8Linear("map", "blockwise", product, fast=True, history=None, recording=lambda: False)
        of_x, of_w = (t.to(kernel).clone().requires_grad_() for t in (x, w))
        y = linear(of_x, of_w, None)
        y.backward(g.to(kernel))
        assert of_x.grad is not None and of_w.grad is not None
        found.append((y.detach(), of_x.grad, of_w.grad))
    for a, b in zip(*found, strict=True):
        assert error(a, b) < (TENSOR_CORE if kernel.type == "cuda" else 1e-6)
    exact = (x @ w.t(), g @ w, g.t() @ x)
    for a, b in zip(found[0], exact, strict=True):
        assert 0.01 < error(a.cpu(), b) < 0.08, "nothing ran in float8"


def test_a_gpu_without_such_tensor_cores_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    a = codes(torch.randn(4, 8), E4M3, "groups")

    class OnCuda(torch.Tensor):
        is_cuda = True  # pyright: ignore[reportAssignmentType]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    there = Codes(a.codes.as_subclass(OnCuda), a.inverse)
    with pytest.raises(ValueError, match=r"capability 8\.9\): expected 9\.0 \(Hopper\) or later"):
        matmul(there, there, torch.float32)


def test_arguments() -> None:
    a, b = codes(torch.randn(200, 300), E4M3, "groups"), codes(torch.randn(140, 300), E4M3, "blocks")
    check(a, b)
    with pytest.raises(TypeError, match=r"b of torch\.float32"):
        matmul(a, b._replace(codes=b.codes.float()), torch.float32)
    with pytest.raises(ValueError, match="expected one length of the contraction"):
        matmul(a, codes(torch.randn(140, 299), E4M3, "blocks"), torch.float32)
    by_rows = cast(torch.randn(140, 300), E4M3, "rows").rows
    assert by_rows is not None
    for wrong in (
        by_rows,
        b._replace(inverse=b.inverse.double()),
        b._replace(inverse=b.inverse.t()),
    ):
        with pytest.raises(ValueError, match=r"b with torch.*scales.*expected float32 of shape \(140, 3\)"):
            matmul(a, wrong, torch.float32)
    for codes_of_b in (b.codes[:0], b.codes.t(), b.codes[0]):
        with pytest.raises(ValueError, match="contiguous and not empty"):
            matmul(a, b._replace(codes=codes_of_b), torch.float32)
