"""Stochastic rounding to bfloat16: exactly the definition's, unbiased, independent of geometry, on both ways."""

import math

import pytest
import torch

from lightning_eff.kernels.stochastic_rounding import draw, generator, reference_stochastic_round, stochastic_round

ways = pytest.mark.parametrize("way", ["torch", "triton"])
HARD = [0.0, -0.0, 1.0, -1.5, 2**-126, 2**-133, 1e-40, -3e-45, 255.9999, -0.9999999, 3.38e38, 65535.0, 1 / 3]


def device_of(way: str, request: pytest.FixtureRequest) -> torch.device:
    return request.getfixturevalue("device") if way == "triton" else torch.device("cpu")


def neighbours(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16's two neighbours of ``x``, the one nearer to zero first; both ``x`` itself where it is one."""
    bits = x.view(torch.int32)
    nearer = (bits & -(1 << 16)).view(torch.float32)
    away = ((bits + 0xFFFF) & -(1 << 16)).view(torch.float32)
    return nearer, away


def test_the_bits_are_those_of_the_definition() -> None:
    x = torch.cat([torch.randn(5000) * torch.logspace(-40, 38, 5000), torch.tensor(HARD)])
    noise = draw(len(x), generator(7, x.device)).int() + (1 << 15)
    assert 0 <= int(noise.min()) < 100 and 2**16 - 100 < int(noise.max()) < 2**16
    expected = reference_stochastic_round(x, noise)
    found = stochastic_round(x, seed=7)
    assert torch.equal(found, expected)
    nearest = x.to(torch.bfloat16)
    assert 0.2 < float((found != nearest).double().mean()) < 0.7


@ways
def test_it_is_one_of_the_neighbours_with_the_right_probability(way: str, request: pytest.FixtureRequest) -> None:
    device = device_of(way, request)
    num = 20_000
    for value in (1.0 + 2**-10, -(1.0 + 3 * 2**-9), 1e-39, 0.1, 255.9):
        x = torch.full((num,), value, device=device)
        found = stochastic_round(x, seed=11).float()
        nearer, away = (float(t) for t in neighbours(torch.tensor([value])))
        assert set(found.unique().tolist()) <= {nearer, away}
        chance = (torch.tensor(value).double().item() - nearer) / (away - nearer)
        share = float((found == away).double().mean())
        assert abs(share - chance) < 4 * math.sqrt(chance * (1 - chance) / num) + 2**-16, (value, share, chance)


@ways
def test_what_bfloat16_holds_stays(way: str, request: pytest.FixtureRequest) -> None:
    device = device_of(way, request)
    x = torch.randn(4099, device=device).to(torch.bfloat16)
    assert torch.equal(stochastic_round(x.float(), seed=3), x)
    odd = torch.tensor([math.inf, -math.inf, math.nan, 0.0], device=device)
    found = stochastic_round(odd, seed=3)
    assert found[0] == math.inf and found[1] == -math.inf and found[2].isnan() and found[3] == 0
    payloads = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32, device=device).view(torch.float32)
    assert stochastic_round(payloads, seed=3).isnan().all()
    assert stochastic_round(torch.empty(0, device=device), seed=0).shape == (0,)


@ways
def test_elements_are_rounded_independently(way: str, request: pytest.FixtureRequest) -> None:
    """Every other value is even odds: the choices of any two of 64 strided places agree in half of the 256 rows."""
    device = device_of(way, request)
    x = torch.full((256, 1024), 1 + 2**-8, device=device)
    up = (stochastic_round(x, seed=2) > 1).double()[:, ::16]
    assert abs(float(up.mean()) - 0.5) < 0.02
    correlation = torch.corrcoef(up.T) - torch.eye(64, dtype=torch.float64, device=device)
    assert float(correlation.abs().max()) < 5.5 / math.sqrt(256)


@ways
def test_seeds_that_differ_in_any_bit_draw_apart(way: str, request: pytest.FixtureRequest) -> None:
    x = torch.full((4096,), 1 + 2**-8, device=device_of(way, request))
    first = (stochastic_round(x, seed=1) > 1).double()
    for bit in (1, 31, 32, 40, 62):
        other = (stochastic_round(x, seed=1 + (1 << bit)) > 1).double()
        assert abs(float(torch.corrcoef(torch.stack([first, other]))[0, 1])) < 5 / math.sqrt(4096), bit


@ways
def test_sums_of_many_small_steps(way: str, request: pytest.FixtureRequest) -> None:
    """1 + 256 steps of 2^-10: to nearest the sum stays 1; stochastically it is right on average."""
    device = device_of(way, request)
    total = torch.ones(2048, device=device, dtype=torch.bfloat16)
    nearest = torch.ones((), dtype=torch.bfloat16)
    for i in range(64):
        total = stochastic_round(total.float() + 2**-10, seed=i)
        nearest = nearest + torch.tensor(2**-10, dtype=torch.bfloat16)
    assert nearest == 1
    mean, error = total.double().mean(), total.double().std() / math.sqrt(2048)
    assert abs(float(mean) - (1 + 64 / 1024)) < 4 * float(error)


def test_triton_does_not_depend_on_geometry(device: torch.device) -> None:
    from lightning_eff.kernels import _stochastic_rounding_triton as way

    x = torch.randn(5000, device=device)
    outs = [torch.empty(5000, dtype=torch.bfloat16, device=device) for _ in range(2)]
    for out, tiles in zip(outs, (1, 4), strict=True):
        way.stochastic_round(x, out, 5, tiles=tiles)
    assert torch.equal(*outs)
    way.stochastic_round(x, outs[0], 6)
    assert not torch.equal(*outs)


def test_arguments() -> None:
    x = torch.ones(4)
    with pytest.raises(TypeError, match="expected float32"):
        stochastic_round(x.double(), seed=0)
    with pytest.raises(ValueError, match="seed=-1"):
        stochastic_round(x, seed=-1)
    with pytest.raises(TypeError, match=r"out of torch\.float16"):
        stochastic_round(x, seed=0, out=x.half())
    with pytest.raises(ValueError, match=r"out of shape \(5,\)"):
        stochastic_round(x, seed=0, out=torch.empty(5, dtype=torch.bfloat16))
