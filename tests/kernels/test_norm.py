"""LayerNorm and RMSNorm: forward and backward those of the formulas, whatever the shape and how work is divided."""

import pytest
import torch
from torch import Tensor

from lightning_eff.kernels import _launch
from lightning_eff.kernels.compressed_norm import reference_norm
from lightning_eff.kernels.norm import layer_norm, rms_norm

EPS = 1e-5
NORMS = ["layer", "layer, no bias", "layer, plain", "rms", "rms, plain"]


def norm(kind: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    w, b = (None if "plain" in kind else weight), (bias if kind == "layer" else None)
    return layer_norm(x, w, b, eps=EPS) if kind.startswith("layer") else rms_norm(x, w, eps=EPS)


def exact(kind: str, tensors: list[Tensor], g: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """The output and the gradients in float64."""
    x, weight, bias = (t.detach().double().requires_grad_() for t in tensors)
    w, b = (None if "plain" in kind else weight), (bias if kind == "layer" else None)
    y = reference_norm(x, w, b, eps=EPS, centre=kind.startswith("layer"))[0]
    y.backward(g.double())
    return y.detach(), [x.grad, weight.grad, bias.grad]


def inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, of_weight: torch.dtype) -> list[Tensor]:
    x = (2 * torch.randn(shape) + 0.5).to(device, dtype)
    weight, bias = (1 + torch.rand(shape[-1])).to(device, of_weight), torch.randn(shape[-1]).to(device, of_weight)
    return [t.requires_grad_() for t in (x, weight, bias)]


@pytest.mark.parametrize("way", ["torch", "triton"])
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(
    ("dtype", "of_weight"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)],
    ids=str,
)
def test_forward_and_backward_are_the_formulas(
    way: str, kind: str, dtype: torch.dtype, of_weight: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """Rows that fill neither a power of two nor a tile; one to a tile; and one alone."""
    device = request.getfixturevalue("device") if way == "triton" else torch.device("cpu")
    for shape in ((3, 29, 96), (2, 5000), (7,)):
        tensors = inputs(shape, dtype, device, of_weight)
        g = torch.randn(shape, device=device).to(dtype)
        wanted, gradients = exact(kind, tensors, g)
        y = norm(kind, *tensors)
        # One rounding at the end, and the interpreter's cuts off
        near = 4e-6 if dtype == torch.float32 else 1.5 * torch.finfo(dtype).eps
        assert y.dtype == dtype and y.shape == shape
        assert float((y.detach() - wanted).norm() / wanted.norm()) < near
        y.backward(g)
        for got, truth in zip(tensors, gradients, strict=True):
            assert (got.grad is None) == (truth is None)
            if truth is not None:
                assert got.grad.dtype == got.dtype and got.grad.shape == got.shape
                # torch sums up dw and db of bfloat16 in bfloat16's parts; ours are float32 until the end
                assert float((got.grad - truth).norm() / truth.norm()) < (near if way == "triton" else 2 * near)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_geometry_changes_nothing(kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows to a tile and programs; a last tile that is half empty, and nothing read beyond it."""
    from lightning_eff.kernels import _norm_triton

    tensors = inputs((11, 20), torch.float32, device, torch.float32)
    # Behind the last row stands what would show in the sums
    behind = torch.full((2, 64, 20), float("nan"), device=device)
    behind[0, :11], behind[1, :11] = tensors[0].detach(), torch.randn(11, 20, device=device)
    tensors[0], g = behind[0, :11].requires_grad_(), behind[1, :11]
    _, gradients = exact(kind, tensors, g)
    for tile, programs in ((32, 1), (64, 3), (128, 5), (1024, 4)):
        monkeypatch.setattr(_norm_triton, "TILE", tile)
        monkeypatch.setattr(_launch, "num_programs", lambda device, programs=programs: programs)
        got = torch.autograd.grad(norm(kind, *tensors), tensors[: 3 if kind == "layer" else 2], g)
        for one, truth in zip(got, gradients, strict=False):
            assert float((one - truth).norm() / truth.norm()) < 2e-6


@pytest.mark.parametrize("way", ["torch", "triton"])
def test_hard_rows(way: str, request: pytest.FixtureRequest) -> None:
    """Constant rows, rows of zeros, of a mean of 1000 deviations, and of 1e15, whose squares nearly overflow."""
    device = request.getfixturevalue("device") if way == "triton" else torch.device("cpu")
    for kind in ("layer", "rms"):
        x, weight, bias = inputs((4, 40), torch.float32, device, torch.float32)
        with torch.no_grad():
            x[0], x[1] = 3.0, 0.0
            x[2] += 2000
            x[3] *= 1e15
        g = torch.randn(4, 40, device=device)
        wanted, gradients = exact(kind, [x, weight, bias], g)
        y = norm(kind, x, weight, bias)
        y.backward(g)
        torch.testing.assert_close(y.double(), wanted, rtol=2e-4, atol=2e-4)
        for row in range(4 if way == "triton" else 3):  # torch's backward on a CPU takes r^3, which is 0 in the last
            scale = float(gradients[0][row].abs().max())
            torch.testing.assert_close(x.grad[row].double(), gradients[0][row], rtol=2e-3, atol=2e-3 * scale)


def test_what_backward_keeps(device: torch.device) -> None:
    """The input itself and not a copy, and 8 bytes for each row (RMSNorm: 4), as integers that no one compresses."""
    x, weight, bias = inputs((6, 256), torch.bfloat16, device, torch.float32)
    given = {t.data_ptr() for t in (x, weight, bias)}
    for kind, own in (("layer", 8), ("rms", 4)):
        y = norm(kind, x, weight, bias)
        saved = [t for t in y.grad_fn.saved_tensors if t is not None]
        assert x.data_ptr() in {t.data_ptr() for t in saved}
        others = [t for t in saved if t.data_ptr() not in given]
        assert sum(t.untyped_storage().nbytes() for t in others) == 6 * own
        assert not any(t.is_floating_point() for t in others)


def test_strided_input_and_gradient(device: torch.device) -> None:
    """Transposed ones are read as what they are."""
    x, weight, bias = inputs((12, 8), torch.float32, device, torch.float32)
    g = torch.randn(12, 8, device=device).T
    (straight,) = torch.autograd.grad(norm("layer", x.T, weight[:1].expand(12), bias[:1].expand(12)), x, g)
    (copied,) = torch.autograd.grad(
        norm("layer", x.T.contiguous(), weight[:1].repeat(12), bias[:1].repeat(12)), x, g.contiguous()
    )
    assert torch.equal(straight, copied)


def test_long_rows_and_float64_are_torchs(device: torch.device) -> None:
    for tensor in (torch.randn(1, 8193, device=device), torch.randn(2, 8, device=device).double()):
        y = layer_norm(tensor.requires_grad_())
        assert torch.equal(y, torch.nn.functional.layer_norm(tensor, tensor.shape[-1:]))
        assert "_Norm" not in type(y.grad_fn).__name__


@pytest.mark.parametrize("way", ["torch", "triton"])
def test_the_dtype_is_that_of_x_under_autocast(way: str, request: pytest.FixtureRequest) -> None:
    device = request.getfixturevalue("device") if way == "triton" else torch.device("cpu")
    x, weight, bias = inputs((3, 16), torch.bfloat16, device, torch.float32)
    for kind in ("layer", "rms"):
        with torch.autocast(device.type, torch.float16):
            y = norm(kind, x, weight, bias)
        assert torch.equal(y, norm(kind, x, weight, bias)) and y.dtype == torch.bfloat16


def test_wrong_arguments_are_refused() -> None:
    x, w = torch.randn(3, 64), torch.ones(64)
    with pytest.raises(ValueError, match=r"rms_norm\(weight of shape \(3,\)\): expected \(64,\)"):
        rms_norm(x, torch.ones(3))
    with pytest.raises(ValueError, match="a bias needs a weight"):
        layer_norm(x, None, w)
    with pytest.raises(ValueError, match=r"shape \(0, 64\).*at least one element"):
        layer_norm(x[:0])
    with pytest.raises(TypeError, match=r"torch\.int64"):
        rms_norm(x.long())
