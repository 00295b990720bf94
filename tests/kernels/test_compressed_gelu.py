"""GELU with a compressed derivative: forward as torch's, backward the formula's, without bias, in the bytes promised."""

import pytest
import torch
from torch import Tensor

from lightning_eff.kernels.compressed_gelu import compressed_gelu, reference_gelu

FORMS = ["none", "tanh"]


def saved_bytes(y: Tensor) -> int:
    """Bytes that the autograd Function that made ``y`` keeps."""
    return sum(t.untyped_storage().nbytes() for t in {t.data_ptr(): t for t in y.grad_fn.saved_tensors}.values())


@pytest.mark.parametrize("form", FORMS)
def test_uncompressed_it_is_gelu(form: str) -> None:
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: compressed_gelu(x, approximate=form, bits=None), (x,))
    y = compressed_gelu(x, approximate=form, bits=None)
    assert torch.equal(y, torch.nn.functional.gelu(x, approximate=form))
    reference, derivative = reference_gelu(x, approximate=form)
    torch.testing.assert_close(y, reference)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, derivative)


@pytest.mark.parametrize("way", ["torch", "triton"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_is_exact_and_backward_within_a_step(
    way: str, form: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    device = request.getfixturevalue("device") if way == "triton" else torch.device("cpu")
    digit = torch.finfo(dtype).eps
    for bits, seed in ((8, None), (4, 3), (2, 3)):
        x = (2 * torch.randn(9, 70)).to(dtype).to(device).T.requires_grad_()
        y = compressed_gelu(x, approximate=form, bits=bits, group_size=64, seed=seed)
        wanted, derivative = reference_gelu(x, approximate=form)
        assert y.dtype == dtype and y.shape == x.shape
        assert float((y.detach() - wanted).abs().max()) <= 2 * digit * float(wanted.abs().max()) + 1e-6
        g = torch.randn(y.shape, device=device).to(dtype)
        (dx,) = torch.autograd.grad(y, x, g)
        assert dx.dtype == dtype and dx.shape == x.shape
        step = 1.26 / (2**bits - 1)  # y' lies in [-0.13, 1.13]
        error = ((dx - derivative * g) / g.double().clamp(min=1e-30).where(g > 0, g.double().clamp(max=-1e-30))).abs()
        allowed = step * (0.5 if seed is None else 1) + 3 * digit
        assert float(error.max()) <= allowed * 1.001
        assert float(error.mean()) <= allowed / 2


@pytest.mark.parametrize("way", ["torch", "triton"])
def test_the_gradient_has_no_bias(way: str, request: pytest.FixtureRequest) -> None:
    """Over copies: the mean error of dx is sampling error, as it is not when ``x`` itself is rounded."""
    device = request.getfixturevalue("device") if way == "triton" else torch.device("cpu")
    x, copies = (2 * torch.randn(64, device=device)), 400
    leaf = x.expand(copies, 64).clone().requires_grad_()
    compressed_gelu(leaf, bits=2, group_size=64, seed=11).sum().backward()
    errors = (leaf.grad - reference_gelu(x)[1]).double()
    standard = errors.std(0) / copies**0.5
    assert bool((errors.mean(0).abs() < 5 * standard + 3 / copies).all())
    assert float(errors.mean().abs()) < 4 * float(errors.std()) / errors.numel() ** 0.5


@pytest.mark.parametrize("way", ["torch", "triton"])
def test_bytes_kept(way: str, request: pytest.FixtureRequest) -> None:
    device = request.getfixturevalue("device") if way == "triton" else torch.device("cpu")
    x = torch.randn(16, 256, device=device, requires_grad=True)
    for bits in (2, 4, 8):
        y = compressed_gelu(x, bits=bits, seed=1)
        assert saved_bytes(y) == 4096 * bits // 8 + 8 * 16
        assert not any(t.is_floating_point() for t in y.grad_fn.saved_tensors), "what compresses saved floats skips it"
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_wrong_arguments_are_refused() -> None:
    x = torch.randn(64)
    with pytest.raises(ValueError, match=r"approximate='fast'.*'none', 'tanh'"):
        compressed_gelu(x, approximate="fast")
    with pytest.raises(ValueError, match="bits=3"):
        compressed_gelu(x, bits=3)
    with pytest.raises(TypeError, match=r"torch\.float64"):
        compressed_gelu(x.double())
