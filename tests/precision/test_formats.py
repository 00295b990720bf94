"""Rounding to formats, against a reference in exact fractions that lists all numbers of a format from its codes."""

import math
from bisect import bisect_left
from fractions import Fraction
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lightning_eff.precision._formats import formats
from lightning_eff.precision._formats.formats import Format, cast_fp8, round_to

# exponent bits, mantissa bits, whether there is no infinity: written here again, not read from the code under test
WIDTHS = {
    "E4M3": (4, 3, True),
    "E5M2": (5, 2, False),
    "FP8_152": (5, 2, False),
    "FP16_169": (6, 9, False),
    "FP16": (5, 10, False),
    "BF16": (8, 7, False),
}
EIGHT = ("E4M3", "E5M2", "FP8_152")


def fmt(name: str) -> Format:
    return getattr(formats, name)


@cache
def numbers(name: str) -> list[Fraction]:
    """All finite numbers >= 0, by code, and after them the one that the next code would be: where overflow begins."""
    e_bits, m_bits, finite = WIDTHS[name]
    bias, found = 2 ** (e_bits - 1) - 1, []
    for code in range(2 ** (e_bits + m_bits)):
        e, f = code >> m_bits, code & (2**m_bits - 1)
        last = e == 2**e_bits - 1
        value = Fraction(2) ** ((e or 1) - bias - m_bits) * (f + (2**m_bits if e else 0))
        found.append(value)
        if (last and not finite) or (last and f == 2**m_bits - 1):
            return found
    raise AssertionError(name)


def reference(x: float, name: str, saturate: bool) -> float:
    """To the nearest number, and halfway to the even code."""
    if math.isnan(x):
        return x
    values = numbers(name)
    largest = float(values[-2])
    beyond = largest if saturate else (math.nan if WIDTHS[name][2] else math.inf)
    if math.isinf(x):
        return math.copysign(beyond, x)
    size = abs(Fraction(x))
    if size >= values[-1]:
        return math.copysign(beyond, x)
    code = bisect_left(values, size)
    if values[code] != size:
        below, above = size - values[code - 1], values[code] - size
        if below < above or (below == above and code % 2 == 1):
            code -= 1
    return math.copysign(beyond if code == len(values) - 1 else float(values[code]), x)


def same(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise the same number, where NaN is NaN and zeros have signs."""
    return (a.isnan() & b.isnan()) | ((a == b) & (a.signbit() == b.signbit()))


@cache
def probes(name: str) -> Tensor:
    """Numbers of the format, the points halfway between two, and each one's float32 neighbours; both signs.

    Of the formats of 8 bits these are all numbers; of those of 16 bits every 37th, and all near an end.
    """
    values = numbers(name)
    near = 2 ** (WIDTHS[name][1] + 1) + 2
    pairs = [
        (a, b)
        for code, (a, b) in enumerate(pairwise(values))
        if name in EIGHT or code < near or code > len(values) - 40 or code % 37 == 0
    ]
    points = [float(value) for pair in pairs for value in (*pair, sum(pair) / 2)]
    x = torch.tensor(points, dtype=torch.float64).clamp(max=torch.finfo(torch.float32).max).float()
    x = torch.cat([x, x.nextafter(torch.tensor(torch.inf)), x.nextafter(torch.tensor(0.0))])
    smallest = torch.tensor([2.0**-149, 2.0**-127, 2.0**-126, 3e38, torch.inf, torch.nan])
    random = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-12, 12, 2000)
    x = torch.cat([x, smallest, random])
    return torch.cat([x, -x])


@pytest.mark.parametrize("name", WIDTHS)
def test_what_a_format_says_of_itself(name: str) -> None:
    values, found = numbers(name), fmt(name)
    e_bits, m_bits, finite = WIDTHS[name]
    assert (found.exponent_bits, found.mantissa_bits, found.finite) == (e_bits, m_bits, finite)
    assert found.max_value == values[-2]
    assert 2.0 ** (1 - found.bias - found.mantissa_bits) == values[1], "the smallest subnormal number"
    assert 2.0 ** (1 - found.bias) == values[2**m_bits], "the smallest normal number"
    assert 1 + Fraction(found.epsilon) == values[values.index(Fraction(1)) + 1]


@pytest.mark.parametrize("name", EIGHT)
def test_every_one_of_the_256_codes(name: str) -> None:
    """The codes below the last finite one are the reference's numbers; rounding and casting leave each as it is."""
    found, values = fmt(name), numbers(name)
    assert found.dtype is not None
    decoded = torch.arange(256, dtype=torch.uint8).view(found.dtype).float()
    for code in range(256):
        position = code % 128
        if position < len(values) - 1:
            assert decoded[code].item() == (-1 if code >= 128 else 1) * values[position]
        else:  # E4M3: one NaN a sign; E5M2: infinity, then NaN
            assert decoded[code].isinf() if not found.finite and position == len(values) - 1 else decoded[code].isnan()
    finite = decoded[decoded.isfinite()]
    assert len(finite) == 2 * (len(values) - 1)
    for stochastic in (False, True):
        assert same(round_to(finite, found, stochastic=stochastic), finite).all()
    assert same(round_to(decoded, found, saturate=False), decoded).all()
    assert torch.equal(cast_fp8(finite, found.dtype).view(torch.uint8), finite.to(found.dtype).view(torch.uint8))


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("name", WIDTHS)
def test_nearest_everywhere(name: str, saturate: bool) -> None:
    """At, halfway between, and beside all numbers: normal, subnormal, at overflow, infinite, NaN."""
    x = probes(name)
    expected = torch.tensor([reference(v, name, saturate) for v in x.tolist()], dtype=torch.float64).float()
    found = round_to(x, fmt(name), saturate=saturate)
    wrong = ~same(found, expected)
    assert not wrong.any(), [
        (a.item(), b.item(), c.item()) for a, b, c in zip(x, found, expected, strict=True) if a != c
    ]
    assert found.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["E4M3", "E5M2"])
def test_cast_saturates_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    x = probes(name).to(dtype)
    found = cast_fp8(x, fmt(name).dtype)  # pyright: ignore[reportArgumentType]
    expected = torch.tensor([reference(v, name, True) for v in x.tolist()])
    assert found.dtype == fmt(name).dtype and same(found.float(), expected).all()


def test_shapes_and_strides() -> None:
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for view in (x.t(), x[:, ::3], x[2, 3], x[:0]):
        found = round_to(view, formats.E4M3)
        assert found.shape == view.shape and torch.equal(found, round_to(view.detach().clone(), formats.E4M3))
        assert not found.requires_grad


@pytest.mark.parametrize("name", WIDTHS)
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    """The mean of 200,000 draws is within 4.5 standard errors of x, at normal and subnormal points of both signs.

    Each draw is one of the two neighbours. Over the 24 points, z^2 has mean 1 and standard deviation (2/24)^(1/2): the
    mean is held to 1 ± 4 of these, so that errors that are too small are seen too.
    """
    found, values, num = fmt(name), numbers(name), 200_000
    g = torch.Generator().manual_seed(3)
    z2 = []
    first, last = 2**found.mantissa_bits, len(values) - 3
    # BF16's subnormals are float32's too, and would need more of its bits: only normal numbers are drawn on there
    codes = (first, first + 1, last // 2, last) if name == "BF16" else (0, 1, first - 1, first, last // 2, last)
    for code in codes:
        low, high = values[code], values[code + 1]
        for share in (0.1, 0.5, 0.85, 0.3) if name != "BF16" else (0.1, 0.5, 0.85, 0.3, 0.7, 0.99):
            x = torch.tensor(float(low + Fraction(share) * (high - low)), dtype=torch.float32)
            p = float((Fraction(x.item()) - low) / (high - low))
            sign = -1 if len(z2) % 2 else 1
            drawn = sign * round_to((sign * x).expand(num).clone(), found, generator=g, stochastic=True)
            assert set(drawn.unique().tolist()) == {float(low), float(high)}
            ups = (drawn == float(high)).double().mean().item()
            z2.append((ups - p) ** 2 / (p * (1 - p) / num))
    assert max(z2) < 4.5**2, z2
    assert len(z2) == 24
    assert abs(sum(z2) / 24 - 1) < 4 * (2 / 24) ** 0.5, z2


@pytest.mark.parametrize("name", WIDTHS)
def test_stochastic_rounding_draws_from_its_generator_alone(name: str) -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    before = torch.get_rng_state()
    a, b, c = (
        round_to(x, fmt(name), generator=torch.Generator().manual_seed(seed), stochastic=True) for seed in (1, 1, 2)
    )
    assert torch.equal(a, b) and not torch.equal(a, c)
    round_to(x, fmt(name))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", WIDTHS)
def test_stochastic_rounding_at_the_ends(name: str) -> None:
    largest = fmt(name).max_value
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, largest, -largest])
    found = round_to(x, fmt(name), stochastic=True)
    assert same(found, torch.tensor([torch.nan, largest, -largest, 0.0, -0.0, largest, -largest])).all()
    payloads = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    for stochastic in (False, True):
        assert round_to(payloads, fmt(name), stochastic=stochastic).isnan().all()
    beyond = math.nan if fmt(name).finite else math.inf
    found = round_to(x, fmt(name), stochastic=True, saturate=False)
    assert same(found, torch.tensor([torch.nan, beyond, -beyond, 0.0, -0.0, largest, -largest])).all()


def test_refuses_other_types() -> None:
    with pytest.raises(TypeError, match=r"round_to\(x of torch.bfloat16, E4M3\): expected float32"):
        round_to(torch.ones(2, dtype=torch.bfloat16), formats.E4M3)
    with pytest.raises(TypeError, match=r"cast_fp8\(dtype=torch.float16\): expected torch.float8"):
        cast_fp8(torch.ones(2), torch.float16)
    with pytest.raises(TypeError, match=r"cast_fp8\(x of torch.float64\): expected float32"):
        cast_fp8(torch.ones(2, dtype=torch.float64), torch.float8_e5m2)
