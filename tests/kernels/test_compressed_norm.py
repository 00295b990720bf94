"""Norms with a compressed output: forward as torch's, backward the formulas', without bias, in the bytes promised."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_eff.kernels.compressed_norm import compressed_layer_norm, compressed_rms_norm, reference_norm

EPS = 1e-5
NORMS = ["layer", "layer, no bias", "layer, plain", "rms", "rms, plain"]


def norm(kind: str, x: Tensor, weight: Tensor, bias: Tensor, **settings: Any) -> Tensor:
    if kind.startswith("rms"):
        return compressed_rms_norm(x, None if "plain" in kind else weight, eps=EPS, **settings)
    w, b = (None if "plain" in kind else weight), (bias if kind == "layer" else None)
    return compressed_layer_norm(x, w, b, eps=EPS, **settings)


def plain(kind: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    w, b = (None if "plain" in kind else weight), (bias if kind == "layer" else None)
    return reference_norm(x, w, b, eps=EPS, centre=kind.startswith("layer"))[0]


def inputs(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    x = (2 * torch.randn(shape) + 0.5).to(device, dtype)
    weight = (1 + torch.rand(shape[-1])).to(device, dtype)
    return [t.requires_grad_() for t in (x, weight, torch.randn(shape[-1]).to(device, dtype))]


@pytest.mark.parametrize("kind", NORMS)
def test_uncompressed_it_is_the_norm(kind: str) -> None:
    tensors = inputs(kind, (2, 3, 8), torch.float64, torch.device("cpu"))
    assert torch.autograd.gradcheck(lambda *t: norm(kind, *t, bits=None), tensors)
    torch.testing.assert_close(norm(kind, *tensors, bits=None), plain(kind, *tensors))


@pytest.mark.parametrize("kind", NORMS)
def test_forward_is_torchs_to_the_bit(kind: str) -> None:
    x, weight, bias = inputs(kind, (9, 48), torch.float32, torch.device("cpu"))
    w, b = (None if "plain" in kind else weight), (bias if kind == "layer" else None)
    if kind.startswith("layer"):
        wanted = torch.nn.functional.layer_norm(x, (48,), w, b, EPS)
    else:
        wanted = torch.nn.functional.rms_norm(x, (48,), w, EPS)
    assert torch.equal(norm(kind, x, weight, bias, bits=4, seed=1), wanted)


@pytest.mark.parametrize("way", ["torch", "triton"])
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_near_the_exact_ones(
    way: str, kind: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """Forward to rounding; gradients as near as the bits allow. 192 is three groups, no power of two; 100 is not fused."""
    device = request.getfixturevalue("device") if way == "triton" else torch.device("cpu")
    for size in (192, 100):
        x, weight, bias = inputs(kind, (3, 5, size) if way == "torch" else (1, 3, size), dtype, device)
        exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
        wanted = plain(kind, *exact)
        g = torch.randn(wanted.shape, device=device).to(dtype)
        wanted.backward(g.double())
        for bits, near in ((8, 0.02), (4, 0.3)):
            y = norm(kind, x, weight, bias, bits=bits, group_size=64, seed=2)
            digit = torch.finfo(dtype).eps
            limit = 2 * digit * float(wanted.detach().abs().max()) + 1e-5
            assert y.dtype == dtype and float((y - wanted).detach().abs().max()) <= limit
            x.grad = weight.grad = bias.grad = None
            y.backward(g)
            for got, truth in zip((x, weight, bias), exact, strict=True):
                assert (got.grad is None) == (truth.grad is None)
                if truth.grad is not None:
                    assert got.grad.dtype == dtype and got.grad.shape == got.shape
                    assert float((got.grad - truth.grad).norm() / truth.grad.norm()) < near + 2 * digit


@pytest.mark.parametrize("way", ["torch", "triton"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_the_gradients_have_no_bias(way: str, kind: str, request: pytest.FixtureRequest) -> None:
    """At 2 bits, the mean error over copies is that of one copy by the square root of their number, up to dx's own bias."""
    device = request.getfixturevalue("device") if way == "triton" else torch.device("cpu")
    (x, weight, bias), copies = inputs(kind, (1, 64), torch.float32, device), 400 if way == "torch" else 24
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    g = torch.randn(1, 64, device=device)
    plain(kind, *exact).backward(g.double())
    many = x.detach().expand(copies, 64).clone().requires_grad_()
    norm(kind, many, weight, bias, bits=2, group_size=64, seed=5).backward(g.expand(copies, 64))
    errors = many.grad.double() - exact[0].grad
    assert float(errors.norm() / copies**0.5 / exact[0].grad.norm()) > 0.02, "rounding to 2 bits does show in one copy"
    # dw = sum g n, unbiased; the variance of a rounded element is f (1 - f) of a step squared
    _, n, r = (t.flatten() for t in reference_norm(x.detach(), None, None, eps=EPS, centre=kind == "layer"))
    step = (n.max() - n.min()) / 3
    f = (n - n.min()) / step % 1
    variance, d = step**2 * f * (1 - f), g.flatten().double()
    sigma = (d * variance.sqrt()).norm() / copies**0.5
    assert 0.5 * sigma < float((weight.grad.double() / copies - exact[1].grad).norm()) < 1.5 * sigma
    # dx = r (.. - n mean(n w g)), of which the product of n_i with itself has the mean n_i^2 + its variance
    bias_of_dx = -r * variance * exact[1].detach() * d / 64
    assert float((errors.mean(0) - bias_of_dx).norm() / (errors.std(0).norm() / copies**0.5)) < 1.4


@pytest.mark.parametrize("way", ["torch", "triton"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_bytes_kept(way: str, kind: str, request: pytest.FixtureRequest) -> None:
    device = request.getfixturevalue("device") if way == "triton" else torch.device("cpu")
    x, weight, bias = inputs(kind, (6, 256), torch.float32, device)
    for bits in (2, 4, 8):
        y = norm(kind, x, weight, bias, bits=bits, seed=1)
        own = [t for t in y.grad_fn.saved_tensors if t is not None and t is not weight and t is not bias]
        own = {
            t.untyped_storage().data_ptr(): t for t in own if t.data_ptr() not in (weight.data_ptr(), bias.data_ptr())
        }
        assert sum(t.untyped_storage().nbytes() for t in own.values()) == 6 * (256 * bits // 8 + 8 + 4)
        assert not any(t.is_floating_point() for t in own.values()), "what compresses saved floats skips it"


def test_rows_far_from_zero_keep_their_gradient() -> None:
    """A mean of 1000 deviations: what the normalised output is kept for. Four bits of the input would lose everything."""
    x = (1000 + torch.randn(4, 256)).requires_grad_()
    exact = x.detach().double().requires_grad_()
    g = torch.randn(4, 256)
    reference_norm(exact, None, None, eps=EPS, centre=True)[0].backward(g.double())
    compressed_layer_norm(x, bits=4, seed=1).backward(g)
    assert float((x.grad - exact.grad).norm() / exact.grad.norm()) < 0.1


def test_wrong_arguments_are_refused() -> None:
    x, w = torch.randn(3, 64), torch.ones(64)
    with pytest.raises(ValueError, match=r"compressed_rms_norm\(weight of shape \(3,\)\): expected \(64,\)"):
        compressed_rms_norm(x, torch.ones(3))
    with pytest.raises(ValueError, match="a bias needs a weight"):
        compressed_layer_norm(x, None, w)
    with pytest.raises(ValueError, match="bits=5"):
        compressed_layer_norm(x, w, bits=5)
    with pytest.raises(ValueError, match=r"shape \(0, 64\).*at least one element"):
        compressed_layer_norm(x[:0])
    with pytest.raises(TypeError, match=r"torch\.float64"):
        compressed_rms_norm(x.double())


def test_weights_with_gaps_are_read_as_they_are(device: torch.device) -> None:
    x, wide = torch.randn(4, 64, device=device), torch.rand(128, device=device)
    weight, bias = wide[::2].requires_grad_(), wide[1::2].requires_grad_()
    g = torch.randn(4, 64, device=device)
    found = norm("layer", x.requires_grad_(), weight, bias, bits=8, group_size=64)
    assert torch.allclose(found, plain("layer", x, weight, bias).float(), atol=1e-5)
    dx, dw = torch.autograd.grad(found, (x, weight), g)
    there = [t.detach().contiguous().requires_grad_() for t in (x, weight, bias)]
    expected = torch.autograd.grad(norm("layer", *there, bits=8, group_size=64), there[:2], g)
    assert torch.allclose(dx, expected[0], atol=1e-5) and torch.allclose(dw, expected[1], atol=1e-5)
