"""Casts to float8: the same bits by every way, every code and every halfway case, in one or two reads."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_eff.kernels.fp8_cast import MAX, Codes, Pair, cast, reference_cast

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
formats = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
WAYS = ("tensor", "rows", "groups", "blocks")
SIZES = ((200, 150), (1, 300), (257, 1), (128, 256))


def same(found: Codes | None, expected: Codes | None) -> None:
    """Bit for bit, but for the sign of NaN."""
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return
    assert found.codes.shape == expected.codes.shape and found.codes.dtype == expected.codes.dtype
    assert found.codes.is_contiguous()
    assert found.inverse.is_contiguous() or found.inverse.stride(0) == 1, "groups are stored by columns"
    torch.testing.assert_close(found.inverse, expected.inverse, rtol=0, atol=0, equal_nan=True)
    a, b = (c.codes.view(torch.uint8) for c in (found, expected))
    differ = (a != b) & ~(found.codes.float().isnan() & expected.codes.float().isnan())
    assert not differ.any(), f"{int(differ.sum())} codes differ"


def same_pair(found: Pair, expected: Pair) -> None:
    same(found.rows, expected.rows)
    same(found.columns, expected.columns)
    for a, b in ((found.scale, expected.scale), (found.amax, expected.amax)):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def hard(rows: int, columns: int) -> Tensor:
    """Numbers of very many sizes: float32's subnormals, zeros and ones near the largest, in groups of their own."""
    torch.manual_seed(rows)
    x = torch.randn(rows, columns) * torch.randn(rows, columns).mul(4).exp()
    x *= torch.tensor([1.0, 2.0**-60, 2.0**-130, 2.0**90, 0.0])[torch.arange(rows) // 3 % 5][:, None]
    x[:, columns // 2 :: 7] = 0
    return x


@formats
@pytest.mark.parametrize("by", WAYS)
def test_the_kernel_gives_the_references_bits(by: Any, dtype: torch.dtype, device: torch.device) -> None:
    for rows, columns in SIZES:
        x = hard(rows, columns).to(device)
        same_pair(cast(x, dtype, by, columns=True), reference_cast(x, dtype, by, columns=True))
    for kind in (torch.bfloat16, torch.float16):
        x = torch.randn(130, 140, device=device).to(kind)
        same_pair(cast(x, dtype, by, columns=True), reference_cast(x, dtype, by, columns=True))


@pytest.mark.parametrize("by", WAYS)
def test_what_is_not_asked_for_and_strides(by: Any, device: torch.device) -> None:
    x = torch.randn(140, 130, device=device)
    both = reference_cast(x, E4M3, by, columns=True)
    rows, columns = cast(x, E4M3, by), cast(x, E4M3, by, rows=False, columns=True)
    assert rows.columns is None and columns.rows is None
    same(rows.rows, both.rows)
    same(columns.columns, both.columns)
    turned = x.t().contiguous().t()  # by columns in memory
    same_pair(cast(turned, E4M3, by, columns=True), both)
    same(cast(turned, E4M3, by).rows, both.rows)
    same(cast(torch.cat([x, x], 1)[:, ::2], E4M3, by).rows, reference_cast(torch.cat([x, x], 1)[:, ::2], E4M3, by).rows)
    double = cast(x.double(), E4M3, by).rows
    same(double, both.rows)


@formats
def test_every_code_and_every_halfway_case(dtype: torch.dtype, device: torch.device) -> None:
    """With the scale 1: each number of the format, the middles between neighbours and what is next to these."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = codes[codes.isfinite()].unique()
    middles = (values[1:] + values[:-1]) / 2
    bits = middles.view(torch.int32)
    near = torch.cat([(bits + 1).view(torch.float32), (bits - 1).view(torch.float32)])
    beyond = MAX[dtype] * torch.tensor([1.01, -1.01, 1.07, 2.0, -1e30])
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-38, 1e-12])
    x = torch.cat([values, middles, near, beyond, special])
    x = torch.nn.functional.pad(x, (0, -len(x) % 8)).view(8, -1).to(device)
    one = torch.ones((), device=device)
    expected = reference_cast(x, dtype, "tensor", scale=one)
    found = cast(x, dtype, "tensor", scale=one)
    same_pair(found, expected)
    assert found.rows is not None
    exact = found.rows.codes.float().view(-1)[: len(values)]
    assert torch.equal(exact.cpu(), values), "a number of the format stays"
    same(cast(x, dtype, "groups").rows, reference_cast(x, dtype, "groups").rows)


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning")  # numpy's
@formats
@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_visible(by: Any, dtype: torch.dtype, bad: float, device: torch.device) -> None:
    x = torch.randn(150, 140, device=device)
    x[3, 5] = bad
    found, expected = cast(x, dtype, by, columns=True), reference_cast(x, dtype, by, columns=True)
    same_pair(found, expected)
    assert found.rows is not None and found.columns is not None
    assert found.rows.dequantized()[3, 5].isnan() and found.columns.dequantized()[5, 3].isnan()
    if by in ("rows", "groups"):
        assert found.rows.dequantized()[4:].isfinite().all() and found.columns.dequantized()[6:].isfinite().all()


@formats
def test_a_peak_is_used_and_the_amax_noted(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(150, 140, device=device)
    for peak in (-1.0, 0.0, 1.5, 1e6):
        known = torch.tensor(peak, device=device)
        found = cast(x, dtype, "tensor", columns=True, peak=known)
        same_pair(found, reference_cast(x, dtype, "tensor", columns=True, peak=known))
        assert found.amax == x.abs().max()
    x[140, 2] = math.nan
    for peak in (-1.0, 1.5):
        found = cast(x, dtype, "tensor", columns=True, peak=torch.tensor(peak, device=device))
        assert found.rows is not None and found.columns is not None and found.amax is not None
        assert (
            found.amax.isnan() and found.rows.dequantized().isnan().all() and found.columns.dequantized().isnan().all()
        )


@formats
def test_one_read_and_two_give_the_same(dtype: torch.dtype, device: torch.device) -> None:
    from lightning_eff.kernels import _fp8_cast_triton as way

    x = hard(40, 200).to(device)
    found = [way.cast(x, dtype, "rows", True, False, None, None, longest_row=n).rows for n in (way.LONGEST_ROW, 100)]
    same(*found)
    same(found[0], cast(x, dtype, "rows", columns=True).rows)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter is wrong in the instruction's place")
@formats
def test_bits_and_the_devices_instruction_give_the_same(dtype: torch.dtype, device: torch.device) -> None:
    from lightning_eff.kernels import _fp8_cast_triton as way

    if torch.cuda.get_device_capability(device) < way.NATIVE:
        pytest.skip("the device has no such instruction")
    x = hard(300, 200).to(device)
    for by in WAYS:
        same_pair(*(way.cast(x, dtype, by, True, True, None, None, native=native) for native in (False, True)))


def test_arguments() -> None:
    x = torch.ones(3, 4)
    with pytest.raises(TypeError, match=r"dtype=torch\.float16"):
        cast(x, torch.float16, "rows")
    with pytest.raises(ValueError, match="by='row'"):
        cast(x, E4M3, "row")  # pyright: ignore[reportArgumentType]
    for bad in (x[0], x[:0], x[:, :0]):
        with pytest.raises(ValueError, match=r"of shape \("):
            cast(bad, E4M3, "rows")
    one = torch.ones(())
    for wrong in (
        {"by": "rows", "scale": one},
        {"by": "groups", "peak": one},
        {"by": "tensor", "scale": one, "peak": one},
    ):
        with pytest.raises(ValueError, match="at most one of them"):
            cast(x, E4M3, **wrong)
