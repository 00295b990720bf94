"""torchao's float8 training behind FP8Precision: the same numbers as ours, where torchao is installed (0.18 was tried)."""

import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_eff.precision._linear.maps import LinearMap
from lightning_eff.precision._scaling.ao import TorchAOLinear, takes
from lightning_eff.precision._scaling.linear import Float8Linear
from lightning_eff.precision._scaling.products import emulated
from lightning_eff.precision.fp8 import FP8Precision
from tests.cases import CASES
from tests.models import flat, hugging_face, make_batch, module
from tests.runs import NUM_STEPS, checkpoints, fit, resume_from_every_step

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


def plugin(**kwargs: Any) -> FP8Precision:
    return FP8Precision(**{"backend": "torchao", "skip": ("head",), **kwargs})


def gradients(f: Any, weight: nn.Parameter, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    weight.grad = None
    x, g = torch.randn(7, 5, 64, dtype=dtype).requires_grad_(), torch.randn(7, 5, 48, dtype=dtype)
    y = f(x, weight, None)
    y.backward(g)
    assert x.grad is not None and weight.grad is not None
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_one_map_gives_our_numbers(scaling: Any, dtype: torch.dtype) -> None:
    """But for results that torchao rounds to bfloat16, once or twice: all of rowwise, and dW of bfloat16."""
    plain = nn.Linear(64, 48, bias=False)
    ours = Float8Linear("m", scaling, emulated, fast=True, history=None, recording=lambda: False)
    theirs = TorchAOLinear(LinearMap("m", plain, 64, 48, transposed=False), scaling, fast=True)
    found, expected = gradients(theirs, plain.weight, dtype), gradients(ours, plain.weight, dtype)
    for name, a, b in zip(("y", "dx", "dW"), found, expected, strict=True):
        assert a.dtype == b.dtype
        exact = scaling == "tensorwise" and dtype == torch.float32
        error = float((a.float() - b.float()).norm() / b.float().norm())
        assert error < (1e-6 if exact else 2.0**-8), name
        if dtype == torch.bfloat16 and (name == "y" or (scaling == "tensorwise" and name == "dx")):
            assert torch.equal(a, b), name


def test_a_whole_models_gradient_is_ours() -> None:
    torch.manual_seed(0)
    net, batch = hugging_face("llama"), make_batch("llama", 4)
    keys, parameters = list(net.state_dict()), [id(p) for p in net.parameters()]
    found = []
    for backend in ("torchao", "scaled_mm"):
        p = plugin(backend=backend, base="32-true")
        net.zero_grad()
        p.convert_module(net)
        assert (list(net.state_dict()), [id(q) for q in net.parameters()]) == (keys, parameters)
        net.training_step(batch, 0).backward()
        p.teardown()
        found.append(torch.cat([q.grad.flatten() for q in net.parameters() if q.grad is not None]))
    assert torch.equal(*found)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_trains_and_resumes(scaling: Any, tmp_path: Path) -> None:
    def build() -> list[Any]:
        return [CASES["LatestWeightAveraging"].neutral()]

    assert resume_from_every_step("tiny_gpt", build, tmp_path, plugins=[plugin(scaling=scaling)]) == {}
    for path in checkpoints(tmp_path):
        module("tiny_gpt").load_state_dict(torch.load(path, weights_only=True)["state_dict"], strict=True)


def test_conv1d_and_odd_sizes_run_by_our_own_path(caplog: pytest.LogCaptureFixture) -> None:
    odd = LinearMap("m", nn.Linear(17, 16), 17, 16, transposed=False)
    assert not takes(odd) and takes(LinearMap("m", nn.Linear(32, 16), 32, 16, transposed=False))
    with caplog.at_level(logging.INFO):
        net, t = fit("gpt2", list, plugins=[plugin()])
    assert t.global_step == NUM_STEPS and flat(net).isfinite().all()
    assert (
        "with torch._scaled_mm, since torchao needs an nn.Linear with multiples of 16: model.transformer.h.0"
        in caplog.text
    )
