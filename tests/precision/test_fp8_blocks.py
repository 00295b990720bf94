"""cuBLASLt's blockwise products: the operands that it gets obey torch's rules, and a trial decides whether a run uses it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_eff.precision._scaling import blocks
from lightning_eff.precision._scaling.blocks import BLOCKS, GROUPS, by_cublas, by_triton, cublas, for_cublas, trial
from lightning_eff.precision._scaling.casts import Codes, cast_pair
from lightning_eff.precision._scaling.products import emulated
from lightning_eff.precision.fp8 import FP8Precision
from tests.precision.test_fp8 import on_cuda

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = ((256, 384, 512), (128, 128, 128), (12, 128, 16), (7, 17, 23), (150, 300, 140), (1, 16, 129))
needs_scaled_mm = pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="this torch has no scaled_mm")


def operands(m: int, k: int, n: int, *, square: bool) -> tuple[Codes, Codes]:
    torch.manual_seed(0)
    a = cast_pair(torch.randn(m, k) * torch.randn(m, 1).mul(2).exp(), E5M2, "blockwise").rows
    b = cast_pair(torch.randn(n, k), E4M3, "blockwise", square=square).rows
    assert a is not None and b is not None
    return a, b


def dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    """Codes (R, K) with one scale per 1 x 128."""
    return codes.double() * scale.double().repeat_interleave(128, 1)[:, : codes.shape[1]]


@pytest.mark.parametrize("square", [True, False])
def test_what_cublas_gets_is_the_product(square: bool) -> None:
    """Layouts as in ScaledBlas.cpp, decoded by their definition."""
    for m, k, n in SIZES:
        a, b = operands(m, k, n, square=square)
        call = for_cublas(a, b)
        (rows, length), columns, grid = call.left.shape, call.right.shape[1], -(-k // 128)
        assert rows % 4 == length % 16 == columns % 16 == 0 and call.right_recipe == (BLOCKS if square else GROUPS)
        assert call.left.is_contiguous() and call.right.t().is_contiguous()
        assert tuple(call.left_scale.shape) == (rows, grid) and call.left_scale.stride(0) == 1
        assert grid == 1 or call.left_scale.stride(1) == rows
        if square:
            padded = -(-grid // 4) * 4
            assert tuple(call.right_scale.shape) == (padded, -(-columns // 128))
            assert call.right_scale.stride(0) == 1 and (columns <= 128 or call.right_scale.stride(1) == padded)
            scale = call.right_scale.t()[:, :grid].repeat_interleave(128, 0)[:columns]
        else:
            assert tuple(call.right_scale.shape) == (columns, grid) and call.right_scale.stride(0) == 1
            assert grid == 1 or call.right_scale.stride(1) == columns
            scale = call.right_scale
        whole = dequantized(call.left, call.left_scale) @ dequantized(call.right.t(), scale).t()
        assert not whole[m:].any() and not whole[:, n:].any()
        torch.testing.assert_close(whole[:m, :n].float(), emulated(a, b, torch.float32, False), rtol=1e-5, atol=1e-3)


@needs_scaled_mm
@pytest.mark.parametrize("square", [True, False])
def test_torch_accepts_that_on_cuda(square: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own checks, on tensors that have a shape and a device but no memory."""
    real: Any = F.scaled_mm

    def checked(*args: Any, **kwargs: Any) -> Tensor:
        def on_cuda(t: Any) -> Any:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") if is_tensor(t) else t

        is_tensor = torch.is_tensor
        with FakeTensorMode():
            y = real(*map(on_cuda, args), **kwargs)
            shape, dtype = tuple(y.shape), y.dtype
        return torch.zeros(shape, dtype=dtype)

    monkeypatch.setattr(F, "scaled_mm", checked)
    for m, k, n in ((256, 512, 384), (10, 1024, 127), (256, 128, 256)):
        a, b = operands(m, k, n, square=square)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            y = by_cublas(a._replace(inverse=a.inverse.contiguous()), b, dtype, False)
            assert tuple(y.shape) == (m, n) and y.dtype == dtype
        for wrong in (b._replace(inverse=b.inverse[:, :0]), b._replace(codes=b.codes.t())):
            with pytest.raises((RuntimeError, ValueError)):
                by_cublas(a, wrong, torch.float32, False)


def test_a_trial_finds_what_is_wrong() -> None:
    cpu = torch.device("cpu")
    assert trial(by_triton, cpu) is None

    def other_scales(a: Codes, b: Codes, dtype: torch.dtype, fast: bool) -> Tensor:
        return by_triton(a, b._replace(inverse=b.inverse.roll(1, 1)), dtype, fast)

    def unknown(*args: Any) -> Tensor:
        raise TypeError("no such argument")

    def refuses(*args: Any) -> Tensor:
        raise NotImplementedError("not on this device\nand more")

    def broken(a: Codes, b: Codes, dtype: torch.dtype, fast: bool) -> Tensor:
        return by_triton(a, b, dtype, fast).mul(torch.nan)

    assert "a trial product is off by" in str(trial(other_scales, cpu))
    assert "a trial product is off by" in str(trial(broken, cpu))
    assert trial(unknown, cpu) == "TypeError: no such argument"
    assert trial(refuses, cpu) == "NotImplementedError: not on this device"


def test_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(F, "scaled_mm", lambda: None, raising=False)
    tried: list[Any] = []
    monkeypatch.setattr(blocks, "trial", lambda product, device: tried.append(product))
    for capability, version, expected in (((9, 0), "12.8", False), ((10, 0), "13.0", False), ((9, 0), "12.9", True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        monkeypatch.setattr(torch.version, "cuda", version)
        assert (cublas(cuda) is None) == expected
    assert tried == [by_cublas]
    monkeypatch.delattr(F, "scaled_mm")
    assert "has no torch.nn.functional.scaled_mm" in str(cublas(cuda))


def test_the_plugin_says_what_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, words, product in (
        (None, "with torch.nn.functional.scaled_mm", by_cublas),
        ("a reason", "in the Triton kernel kernels/fp8_matmul.py (not in cuBLASLt: a reason)", by_triton),
    ):
        monkeypatch.setattr(blocks, "cublas", lambda device, found=found: found)
        p = FP8Precision("blockwise", base="32-true", skip=())
        p.convert_module(on_cuda(monkeypatch))
        assert words in p.describe() and p._product() is product and p._on_hardware
        p.teardown()


def test_cublas_takes_groups_on_the_left() -> None:
    a, b = operands(256, 128, 256, square=True)
    with pytest.raises(ValueError, match=r"for_cublas\(a of shape \(256, 128\).*one scale per 1 x 128. Use by_triton"):
        for_cublas(b, a)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_gives_the_emulated_numbers() -> None:
    device = torch.device("cuda")
    if (reason := cublas(device)) is not None:
        pytest.skip(f"no cuBLASLt: {reason}")
    for square in (True, False):
        for sizes in SIZES:
            a, b = (Codes(c.codes.to(device), c.inverse.to(device)) for c in operands(*sizes, square=square))
            y, expected = by_cublas(a, b, torch.float32, False), emulated(a, b, torch.float32, False)
            assert float((y - expected).norm() / expected.norm()) < 2.0**-12, sizes
