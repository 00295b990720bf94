"""Group quantisation: codes as the float64 reference's, errors within a step, no bias, one pass, no dependence on geometry."""

import math

import pytest
import torch
from torch import Tensor

from lightning_eff.kernels import _group_quantization_torch as torch_way
from lightning_eff.kernels import group_quantization
from lightning_eff.kernels.group_quantization import (
    Packed,
    dequantize,
    quantize,
    reference_dequantize,
    reference_quantize,
)

ALL_BITS = [1, 2, 3, 4, 8]
SHAPES = [(1,), (63,), (64,), (5, 13), (3, 7, 31), (0, 4)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def noise_of(x: Tensor, seed: int) -> Tensor:
    """The ``u`` of each element on a CPU, from what the module's docstring says."""
    index = (torch.arange(x.numel()) + torch_way.offset(seed)) % torch_way.PERIOD
    return torch_way.noise(x.device, stochastic=True)[index].view(x.shape)


def same(packed: Packed, reference: Packed) -> None:
    """Equal up to codes on the boundary between two, of which there are few, and to float32's last digit."""
    torch.testing.assert_close(packed.scale, reference.scale, rtol=3e-7, atol=0)
    assert torch.equal(packed.minimum, reference.minimum)
    assert (packed.shape, packed.dtype, packed.bits) == (reference.shape, reference.dtype, reference.bits)
    assert packed.codes.shape == reference.codes.shape
    other = packed.codes != reference.codes
    assert int(other.sum()) <= 2 + packed.codes.numel() // 500
    step = reference.scale.repeat_interleave(packed.group_size)[: packed.shape.numel()].view(packed.shape)
    got, wanted = reference_dequantize(packed).double(), reference_dequantize(reference).double()
    assert bool(((got - wanted).abs() <= 1.01 * step + rounding(wanted, packed.dtype)).all())


def rounding(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32's error where terms cancel, and the spacing of ``dtype``: the interpreter cuts off, hardware rounds."""
    largest = x.abs().double().max() if x.numel() else 0
    return torch.finfo(dtype).eps * x.abs().double() + 3e-7 * largest


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_plain_torch_gives_the_references_codes(bits: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (3 * torch.randn(shape) + 1).to(dtype)
    for seed in (None, 7):
        packed = quantize(x, bits, 64, seed=seed)
        same(packed, reference_quantize(x, bits, 64, None if seed is None else noise_of(x, seed)))
        decoded = dequantize(packed)
        assert decoded.dtype == dtype and decoded.shape == shape and decoded.is_contiguous()
        wanted = reference_dequantize(packed)
        assert bool(((decoded.double() - wanted.double()).abs() <= rounding(wanted, dtype)).all())


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_gives_the_references_codes(bits: int, dtype: torch.dtype, device: torch.device) -> None:
    for shape in SHAPES:
        x = (3 * torch.randn(shape) + 1).to(dtype).to(device)
        packed = quantize(x, bits, 64)
        same(packed, reference_quantize(x, bits, 64, None))
        decoded, wanted = dequantize(packed), reference_dequantize(packed)
        assert decoded.dtype == dtype and decoded.shape == shape
        assert bool(((decoded.double() - wanted.double()).abs() <= rounding(wanted, dtype)).all())


@pytest.mark.parametrize("bits", ALL_BITS)
def test_triton_codes_do_not_depend_on_geometry(bits: int, device: torch.device) -> None:
    from lightning_eff.kernels import _group_quantization_triton as triton_way

    x = torch.randn(400, device=device)
    few = triton_way.quantize(x, bits, 64, 5, block=512)
    many = triton_way.quantize(x, bits, 64, 5, block=64)
    assert all(torch.equal(a, b) for a, b in zip(few, many, strict=True))
    # A group's codes come from its own counters: the first half alone has the same
    half = triton_way.quantize(x[:192].clone(), bits, 64, 5)[0]
    assert torch.equal(half, few[0][: len(half)])
    outs = [torch.empty_like(x) for _ in range(2)]
    for out, block in zip(outs, (512, 64), strict=True):
        triton_way.dequantize(*few, out, bits, 64, block=block)
    assert torch.equal(*outs)


@pytest.mark.parametrize("way", ["torch", "triton"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_stochastic_rounding_has_no_bias(bits: int, way: str, request: pytest.FixtureRequest) -> None:
    """The mean over seeds, and over copies in one tensor, is the exact tensor within 5 standard errors."""
    device = request.getfixturevalue("device") if way == "triton" else torch.device("cpu")
    x = torch.randn(4, 64, device=device)
    seeds, copies = (400, 1) if way == "torch" else (3, 100)
    packed = [quantize(x.expand(copies, 4, 64), bits, 64, seed=seed) for seed in range(seeds)]
    step = packed[0].scale[:4, None]
    errors = torch.cat([(dequantize(p) - x) / step for p in packed]).double()
    assert float(errors.abs().max()) < 1 + 1e-4
    f = ((x - x.amin(1, keepdim=True)) / step).double() % 1
    sigma = (f * (1 - f) / len(errors)).sqrt()
    assert bool((errors.mean(0).abs() < 5 * sigma + 3 / len(errors)).all())
    assert abs(float(errors.mean())) < 4 * math.sqrt(1 / 6 / errors.numel())
    assert float(errors.var()) == pytest.approx(float((f * (1 - f)).mean()), rel=0.05)


def test_triton_draws_independent_uniform_numbers(device: torch.device) -> None:
    """At half a step above a code, the 8 elements that share a Philox call are rounded up independently."""
    x = torch.full((256, 64), 0.5, device=device)
    x[:, 0], x[:, 32] = 0, 15  # columns 0 and 32 set the range; 15 steps of 1
    up = torch.stack([dequantize(quantize(x, 4, 64, seed=seed)) for seed in range(4)]).round()
    up = up.view(-1, 8, 8)[..., 1:].transpose(1, 2).reshape(-1, 8)  # rows: counters; columns: the octants
    assert set(up.unique().tolist()) == {0.0, 1.0}
    assert float((up.mean(0) - 0.5).abs().max()) < 4 * 0.5 / math.sqrt(len(up))
    correlation = torch.corrcoef(up.T) - torch.eye(8, device=device)
    assert float(correlation.abs().max()) < 4.5 / math.sqrt(len(up))


def test_the_table_of_noise_is_uniform_and_shared_far_apart_only() -> None:
    table = torch_way.noise(torch.device("cpu"), stochastic=True)
    period = torch_way.PERIOD
    wanted = (torch.arange(period).double() + 0.5).div(period).clamp(max=torch_way.LARGEST).float()
    assert torch.equal(table[:period].sort().values, wanted)
    assert torch.equal(table[period:], table[: len(table) - period])  # as long as a piece is shorter than the period
    assert all(period % k for k in range(2, math.isqrt(period) + 1)), "a prime"
    assert len({torch_way.offset(seed) for seed in range(1000)}) > 990
    centred = table[:period].double() - 0.5
    for lag in (1, 2, 255, 256, 257, 1024):
        correlation = float(centred @ centred.roll(lag)) / float(centred @ centred)
        assert abs(correlation) < 4.5 / math.sqrt(period)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_the_greatest_noise_does_not_carry_the_greatest_code_over(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would become 0 and decode to the minimum. Ranges from 1e-30 to 1e38, the last with a subnormal reciprocal."""
    table = torch.full_like(torch_way.noise(torch.device("cpu"), stochastic=True), torch_way.LARGEST)
    monkeypatch.setattr(torch_way, "noise", lambda device, stochastic: table)
    x = torch.rand(3000, 16) * torch.logspace(-30, 38, 3000)[:, None]
    decoded = dequantize(quantize(x, bits, 16, seed=1))
    largest = x.argmax(1, keepdim=True)
    torch.testing.assert_close(decoded.gather(1, largest), x.gather(1, largest), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_pieces_and_threads_do_not_show(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(20 * 64 + 17)
    whole = quantize(x, bits, 64, seed=3)
    monkeypatch.setattr(torch_way, "PIECE", 3 * 64)
    pieces = quantize(x, bits, 64, seed=3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    threads = quantize(x, bits, 64, seed=3)
    for other in (pieces, threads):
        assert torch.equal(whole.codes, other.codes) and torch.equal(whole.scale, other.scale)
        assert torch.equal(dequantize(whole), dequantize(other))


@pytest.mark.parametrize("way", ["torch", "triton"])
def test_groups_that_are_hard(way: str, request: pytest.FixtureRequest) -> None:
    device = request.getfixturevalue("device") if way == "triton" else torch.device("cpu")
    torch.manual_seed(0)
    rows = {
        "constant": torch.full((64,), -1.2345678),
        "zero": torch.zeros(64),
        "far from zero": 1e6 + torch.rand(64),
        "tiny": torch.rand(64) * 1e-30,
        "subnormal": torch.rand(64) * 1e-40,
        "huge": torch.randn(64) * 1e37,
        "one outlier": torch.cat([torch.randn(63), torch.tensor([1e8])]),
    }
    x = torch.stack(list(rows.values())).to(device)
    for bits in ALL_BITS:
        for seed in (None, 0, 2**63 - 1):
            decoded = dequantize(quantize(x, bits, 64, seed=seed))
            assert torch.equal(decoded[:2], x[:2]), "a constant group is exact"
            step = (x.amax(1) - x.amin(1)).double() / (2**bits - 1)
            allowed = step * (0.501 if seed is None else 1.001) + 1e-36 + 2e-7 * x.abs().amax(1)
            worst = (decoded.double() - x.double()).abs().amax(1)
            assert bool((worst <= allowed).all()), dict(zip(rows, (worst / allowed).tolist(), strict=True))


@pytest.mark.parametrize("way", ["torch", "triton"])
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")  # numpy, in the interpreter
def test_what_is_not_finite_shows(way: str, request: pytest.FixtureRequest) -> None:
    """NaN and infinity make their own group's scale or minimum not finite, and no other's."""
    device = request.getfixturevalue("device") if way == "triton" else torch.device("cpu")
    for bad in (math.nan, math.inf, -math.inf):
        for seed in (None, 1):
            x = torch.randn(4, 64, device=device)
            x[2, 17] = bad
            packed = quantize(x, 4, 64, seed=seed)
            finite = packed.scale.isfinite() & packed.minimum.isfinite()
            assert finite.tolist() == [True, True, False, True]
            clean = dequantize(packed)[[0, 1, 3]]
            assert float((clean - x[[0, 1, 3]]).abs().max()) < 1
    packed = quantize(torch.tensor([-3e38, 3e38], device=device), 4, 64)
    assert not packed.scale.isfinite().any(), "a range beyond float32"


@pytest.mark.parametrize("way", ["torch", "triton"])
def test_elements_are_taken_in_logical_order(way: str, request: pytest.FixtureRequest) -> None:
    device = request.getfixturevalue("device") if way == "triton" else torch.device("cpu")
    x = torch.randn(8, 6, 16, device=device).transpose(0, 2)[..., ::2]
    assert not x.is_contiguous()
    for seed in (None, 4):
        packed, plain = quantize(x, 8, 64, seed=seed), quantize(x.contiguous(), 8, 64, seed=seed)
        assert torch.equal(packed.codes, plain.codes)
        decoded = dequantize(packed)
        assert decoded.is_contiguous() and float((decoded - x).abs().max()) < 0.05


def test_bytes_and_freedom_from_the_graph() -> None:
    x = torch.randn(40, 64, requires_grad=True)
    for bits in ALL_BITS:
        packed = quantize(2 * x, bits, 256, seed=1)
        assert packed.num_bytes == 2560 * bits // 8 + 2 * 4 * 10
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (packed.codes, packed.scale)}
        held[packed.minimum.untyped_storage().data_ptr()] = packed.minimum.untyped_storage().nbytes()
        assert sum(held.values()) == packed.num_bytes
        assert not packed.codes.requires_grad and not packed.scale.requires_grad and not packed.minimum.requires_grad
        assert not dequantize(packed).requires_grad
    with torch.inference_mode():
        quantize(torch.randn(7, 128), 4, 128, seed=1)
    assert dequantize(quantize(torch.randn(7, 128), 4, 128, seed=1)).shape == (7, 128)


def test_wrong_arguments_are_refused() -> None:
    x = torch.randn(64)
    for bits in (0, 5, 16):
        with pytest.raises(ValueError, match=rf"bits={bits}.*expected one of \(1, 2, 3, 4, 8\)"):
            quantize(x, bits)
    for size in (8, 100, 16384):
        with pytest.raises(ValueError, match=rf"group_size={size}.*power of two from 16 to 8192"):
            quantize(x, 4, size)
    for seed in (-1, 2**63):
        with pytest.raises(ValueError, match=r"integer in \[0, 2\^63\)"):
            quantize(x, 4, seed=seed)
    for dtype in (torch.float64, torch.int32, torch.bool):
        with pytest.raises(TypeError, match=rf"{dtype}.*expected float32"):
            quantize(x.to(dtype), 4)


def test_cuda_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_quantization._launch, "uses_triton", lambda x: True)
    monkeypatch.setitem(__import__("sys").modules, "triton", None)
    with pytest.raises(ImportError, match=r"triton is not installed.*pip install -c constraints\.txt '\.\[triton\]'"):
        quantize(torch.randn(64), 4)
