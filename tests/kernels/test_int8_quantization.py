"""Quantisation to int8 by row: the formula, no bias, zeros stay zero, no dependence on geometry, and errors."""

import math

import pytest
import torch
from torch import Tensor

from lightning_eff.kernels.int8_quantization import quantize_rows

WAYS = ["torch", "triton"]


def device_of(way: str, request: pytest.FixtureRequest) -> torch.device:
    return request.getfixturevalue("device") if way == "triton" else torch.device("cpu")


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x / s`` and ``s`` in float64."""
    s = x.double().abs().amax(1) / 127
    return x.double() / s[:, None].clamp_min(1e-300), s


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("columns", [1, 30, 1024, 2100])
def test_codes_are_the_formulas(columns: int, way: str, request: pytest.FixtureRequest) -> None:
    device = device_of(way, request)
    x = torch.randn(3, columns, device=device) * 10 ** torch.linspace(-20, 20, 3, device=device)[:, None]
    factor = torch.rand(columns, device=device) + 0.5
    for given, whole in ((None, x), (factor, x * factor)):
        q, s = quantize_rows(x, factor=given)
        t, wanted = scaled(whole)
        assert q.dtype == torch.int8 and q.shape == x.shape
        torch.testing.assert_close(s.double(), wanted, rtol=1e-6, atol=0)
        assert float((q - t).abs().max()) < 0.5 + 1e-4
        drawn = quantize_rows(x, factor=given, seed=3)[0]
        assert float((drawn - t).abs().max()) < 1 + 1e-4
        assert torch.equal(quantize_rows(x, factor=given, seed=3)[0], drawn)
        assert columns < 9 or not torch.equal(quantize_rows(x, factor=given, seed=4)[0], drawn)
    strided = x.t().contiguous().t()
    assert torch.equal(quantize_rows(strided, seed=3)[0], quantize_rows(x, seed=3)[0])


@pytest.mark.parametrize("way", WAYS)
def test_stochastic_rounding_has_no_bias(way: str, request: pytest.FixtureRequest) -> None:
    device = device_of(way, request)
    x, copies, rows = torch.randn(25, device=device), 40, 10
    q, s = quantize_rows(x.repeat(rows, copies), seed=1)
    f = scaled(x[None])[0][0] % 1
    drawn = q.double().view(rows * copies, 25)
    error = drawn.mean(0) - x.double() / s[0].double()
    assert bool((error.abs() < 5 * (f * (1 - f) / len(drawn)).sqrt() + 3 / len(drawn)).all())
    assert abs(float(error.mean())) < 5 * math.sqrt(1 / 6 / drawn.numel())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")  # numpy, in the interpreter
def test_rows_that_are_hard(seed: int | None, way: str, request: pytest.FixtureRequest) -> None:
    device = device_of(way, request)
    x = torch.tensor([3.0, 0.0, -3.0] * 10, device=device)
    rows = torch.stack([x, 0 * x, x / 3 * 1e38, x / 3 * 1e-30])
    q, s = quantize_rows(rows, seed=seed)
    assert torch.equal(q[1], torch.zeros_like(q[1])) and s[1] == 0
    assert all(torch.equal(q[i], (rows[i].sign() * 127).to(torch.int8)) for i in (0, 2, 3))
    for bad in (math.nan, math.inf, -math.inf):
        broken = rows.clone()
        broken[2, 17] = bad
        q, s = quantize_rows(broken, seed=seed)
        assert s.isfinite().tolist() == [True, True, False, True]
        assert torch.equal(q[0], (rows[0].sign() * 127).to(torch.int8))


def test_triton_does_not_depend_on_geometry(device: torch.device) -> None:
    from lightning_eff.kernels import _int8_quantization_triton as way

    for columns in (4096, 2500):
        x, factor = torch.randn(3, columns, device=device), torch.rand(columns, device=device)
        found = []
        for most in (1, 4):
            q, s = torch.empty(x.shape, dtype=torch.int8, device=device), torch.empty(3, device=device)
            way.quantize_rows(x, factor, q, s, 5, most_tiles=most)
            found.append((q, s))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\)\): expected a matrix"):
        quantize_rows(torch.ones(3))
    with pytest.raises(ValueError, match=r"seed=-1\): expected an integer in \[0, 2\^63\)"):
        quantize_rows(torch.ones(3, 3), seed=-1)
