"""AdamW in bfloat16: torch's step in float32, then each value rounded to one of its neighbours, right on average."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_eff.kernels.bf16_adamw import adamw_, reference_adamw
from tests.kernels.test_stochastic_rounding import device_of, neighbours, ways

SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def operands(num: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(num)
    p, grad, m = (torch.randn(num, generator=g) for _ in range(3))
    v = torch.rand(num, generator=g)
    bf16 = torch.bfloat16
    return p.to(device, bf16), grad.to(device, dtype), m.to(device, bf16), v.to(device, bf16)


@pytest.mark.parametrize("step", [1, 7])
def test_the_reference_is_torchs_adamw(step: int) -> None:
    p, g, m, v = (t.float() for t in operands(100, torch.device("cpu"), torch.float32))
    weight = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.AdamW([weight], foreach=False, **SETTINGS)
    optimizer.state[weight] = {"step": torch.tensor(step - 1.0), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    weight.grad = g
    optimizer.step()
    new = reference_adamw(p, g, m, v, step=step, **SETTINGS)
    state = optimizer.state[weight]
    for found, expected in zip(new, (weight.detach(), state["exp_avg"], state["exp_avg_sq"]), strict=True):
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-7)


@ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_value_is_a_neighbour_of_the_exact_one(
    way: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    device = device_of(way, request)
    p, g, m, v = operands(3001, device, dtype)
    exact = reference_adamw(p, g, m, v, step=3, **SETTINGS)
    adamw_(p, g, m, v, step=3, seed=5, **SETTINGS)
    for name, found, value in zip("pmv", (p, m, v), exact, strict=True):
        nearer, away = neighbours(value)
        # the kernel's float32 value may differ in its last bits, and so fall beyond a neighbour that was all but reached
        good = (found.float() == nearer) | (found.float() == away)
        assert float((~good).double().mean()) < 2e-3, name
        assert float((found.float() - value).abs().max() / value.abs().max()) < 2**-7
        signed = (found.double() - value.double()) / value.double().abs().clamp_min(1e-6)
        assert abs(float(signed.mean())) < 4 * float(signed.std()) / math.sqrt(3001), name
        assert not torch.equal(found, value.to(torch.bfloat16)), "rounded to nearest"


@ways
def test_the_three_are_rounded_by_numbers_of_their_own(way: str, request: pytest.FixtureRequest) -> None:
    device = device_of(way, request)
    value = torch.full((4096,), 1.0, device=device, dtype=torch.bfloat16)
    p, m, v = value.clone(), value.clone(), value.clone()
    settings = {"lr": 0.0, "betas": (0.996, 0.996), "eps": 1e-8, "weight_decay": 0.0}
    adamw_(p, torch.full((4096,), 1.5, device=device), m, v, step=2, seed=9, **settings)
    a, b = (m != 1).double(), (v != 1).double()
    assert 0.1 < float(a.mean()) < 0.9 and 0.1 < float(b.mean()) < 0.95
    correlation = float(torch.corrcoef(torch.stack([a, b]))[0, 1])
    assert abs(correlation) < 0.06
    assert torch.equal(p, value)  # nothing to round


def test_triton_does_not_depend_on_geometry(device: torch.device) -> None:
    from lightning_eff.kernels import _bf16_adamw_triton as way

    found = []
    for tiles in (1, 4):
        p, g, m, v = operands(5000, device, torch.bfloat16)
        way.adamw_(p, g, m, v, 0.999, 0.01, 0.9, 0.99, 0.5, 1e-8, 4, tiles=tiles)
        found.append((p, m, v))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_arguments() -> None:
    p, g, m, v = operands(8, torch.device("cpu"), torch.float32)
    with pytest.raises(TypeError, match=r"m of torch\.float32"):
        adamw_(p, g, m.float(), v, step=1, seed=0, **SETTINGS)
    with pytest.raises(ValueError, match=r"v of shape \(4,\)"):
        adamw_(p, g, m, v[:4], step=1, seed=0, **SETTINGS)
    with pytest.raises(ValueError, match=r"g of shape \(4,\)"):
        adamw_(p, g[:4], m, v, step=1, seed=0, **SETTINGS)
