"""Linear and cross-entropy in one: the value and gradients of the plain layer, in memory that holds no whole logits."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_eff.kernels.linear_cross_entropy import (
    linear_cross_entropy,
    reference_linear_cross_entropy,
    rows_per_chunk,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(
    rows: int, size: int, classes: int, dtype: torch.dtype, device: torch.device, ignored: float = 0.3
) -> tuple[list[Tensor], Tensor]:
    """``x``, ``weight`` and ``bias``, whose logits have a deviation of about 3; and targets, some of them ignored."""
    x, bias = torch.randn(rows, size), torch.randn(classes)
    weight = 3 * torch.randn(classes, size) / size**0.5
    target = torch.randint(0, classes, (rows,))
    target[0], target[-1] = classes - 1, 0
    target[1:-1][torch.rand(rows - 2) < ignored] = -100
    return [t.to(device, dtype).requires_grad_() for t in (x, weight, bias)], target.to(device)


def exactly(
    tensors: list[Tensor], target: Tensor, row_grad: Tensor, smoothing: float, bias: bool
) -> tuple[Tensor, list[Tensor | None]]:
    """Each row's loss, and the gradients of their sum weighted by ``row_grad``, in float64."""
    x, w, b = (t.detach().double().requires_grad_() for t in tensors)
    loss = reference_linear_cross_entropy(x, w, target, b if bias else None, label_smoothing=smoothing)
    (loss * row_grad.double()).sum().backward()
    return loss.detach(), [x.grad, w.grad, b.grad]


@pytest.mark.parametrize("way", ["torch", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("smoothing", "bias"), [(0.0, False), (0.1, True)])
def test_loss_and_gradients_are_the_exact_ones(
    way: str, dtype: torch.dtype, smoothing: float, bias: bool, request: pytest.FixtureRequest
) -> None:
    """To rounding, whatever the dtype, reduction and chunk; 77 classes fill no block, and 13 rows no chunk of 4."""
    device = request.getfixturevalue("device") if way == "triton" else torch.device("cpu")
    tensors, target = inputs(13, 24, 77, dtype, device)
    kept = int((target >= 0).sum())
    assert 4 < kept < 13
    # Logits and their gradients are rounded to the dtype, once each, on the way
    near = 2e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for reduction, chunk in (("mean", 4), ("sum", 13), ("none", 5), ("mean", None)):
        g = torch.randn(13, device=device) if reduction == "none" else torch.full((13,), 3.0, device=device)
        row_grad = g / kept if reduction == "mean" else g
        losses, gradients = exactly(tensors, target, row_grad, smoothing, bias)
        wanted = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / kept}[reduction]
        for t in tensors:
            t.grad = None
        x, w, b = tensors
        settings: dict[str, Any] = {"reduction": reduction, "chunk": chunk, "label_smoothing": smoothing}
        loss = linear_cross_entropy(x, w, target, b if bias else None, **settings)
        assert loss.dtype == torch.float32 and loss.shape == wanted.shape
        assert float((loss.detach() - wanted).norm() / wanted.norm()) < near
        loss.backward(g if reduction == "none" else g[0])
        for got, truth in zip(tensors, gradients, strict=True):
            assert (got.grad is None) == (truth is None)
            if truth is not None:
                assert got.grad.dtype == dtype and got.grad.shape == got.shape
                assert float((got.grad.double() - truth).norm() / truth.norm()) < near
        assert not x.grad[target < 0].any(), "an ignored row has no gradient"


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_it_is_torchs_in_float64(reduction: str) -> None:
    """Value and derivatives, of a batch of sequences, another ignored class among them."""
    (x, w, b), _ = inputs(6, 4, 9, torch.float64, torch.device("cpu"))
    target, settings = torch.tensor([[0, 8, 2], [7, 2, 3]]), {"reduction": reduction, "ignore_index": 2}

    def ours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return linear_cross_entropy(x.view(2, 3, 4), w, target, b, label_smoothing=0.2, chunk=2, **settings)

    theirs = F.cross_entropy(F.linear(x, w, b), target.view(-1), label_smoothing=0.2, **settings)
    loss = ours(x, w, b)
    torch.testing.assert_close(loss, theirs.view(2, 3) if reduction == "none" else theirs)
    for got, wanted in zip(*(torch.autograd.grad(total.sum(), (x, w, b)) for total in (loss, theirs)), strict=True):
        torch.testing.assert_close(got, wanted)
    if reduction == "none":  # several backwards through one forward
        assert torch.autograd.gradcheck(ours, (x, w, b))


@pytest.mark.parametrize("way", ["torch", "triton"])
def test_hard_logits(way: str, request: pytest.FixtureRequest) -> None:
    """Logits of 1e4, classes that a bias of -inf forbids, a block of them first, and a certain class."""
    device = request.getfixturevalue("device") if way == "triton" else torch.device("cpu")
    (x, w, b), target = inputs(4, 8, 70, torch.float32, device, ignored=0.0)
    with torch.no_grad():
        x[0] *= 1e4
        b[:40] = b[60:] = float("-inf")
        w[50] = 100 * x[1]
    target[:] = torch.tensor([41, 50, 45, 59])
    if way == "triton":
        from lightning_eff.kernels import _linear_cross_entropy_triton as kernels

        logits = F.linear(x, w, b).detach()
        for block in (16, 64, 128):  # geometry changes nothing
            behind = torch.full((5, 80), float("nan"), device=device)
            z = behind[:4, :70].copy_(logits)
            loss = kernels.loss_and_gradient(z, target, smoothing=0.0, gradient=True, row_grad=None, block=block)
            wanted = F.cross_entropy(logits.double(), target, reduction="none")
            torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=1e-6)
            exact = logits.double().softmax(1) - F.one_hot(target, 70)
            torch.testing.assert_close(z.double(), exact, rtol=1e-5, atol=1e-6)
            assert behind[4].isnan().all() and behind[:, 70:].isnan().all(), "written beyond the row"
    row_grad = torch.ones(4, device=device)
    losses, gradients = exactly([x, w, b], target, row_grad, 0.0, True)
    loss = linear_cross_entropy(x, w, target, b, reduction="sum")
    loss.backward()
    torch.testing.assert_close(loss.double(), losses.sum(), rtol=1e-6, atol=1e-6)
    for got, truth in zip((x, w, b), gradients, strict=True):
        assert float((got.grad - truth).norm() / truth.norm()) < 1e-5


@pytest.mark.parametrize("way", ["torch", "triton"])
def test_strided_tensors(way: str, request: pytest.FixtureRequest) -> None:
    """Every second row, a transposed weight, and an expanded gradient are read as what they are."""
    device = request.getfixturevalue("device") if way == "triton" else torch.device("cpu")
    (x, w, b), target = inputs(10, 8, 17, torch.float32, device, ignored=0.0)
    results = []
    for one, two, three in ((x[::2], w.T.contiguous().T, target[::2]), (x[::2].clone(), w, target[::2].clone())):
        loss = linear_cross_entropy(one, two, three, b[:1].expand(17), reduction="none")
        results.append((loss, *torch.autograd.grad(loss, (x, w, b), torch.ones((), device=device).expand(5))))
    for strided, straight in zip(*results, strict=True):
        torch.testing.assert_close(strided, straight)


@pytest.mark.parametrize("way", ["torch", "triton"])
def test_all_rows_ignored(way: str, request: pytest.FixtureRequest) -> None:
    """As torch: no mean, a sum of zero, no gradient."""
    device = request.getfixturevalue("device") if way == "triton" else torch.device("cpu")
    (x, w, b), target = inputs(3, 8, 17, torch.float32, device)
    target[:] = -100
    for reduction in ("mean", "sum", "none"):
        loss = linear_cross_entropy(x, w, target, b, reduction=reduction)
        torch.testing.assert_close(
            loss, F.cross_entropy(F.linear(x, w, b), target, reduction=reduction), equal_nan=True
        )
        loss.sum().backward()
        assert not any(t.grad.any() for t in (x, w, b))


def test_ignored_rows_are_not_computed() -> None:
    """All work is that of the rows that are kept: three matmuls of 2 n D V operations for "mean", four for "none"."""
    from torch.utils.flop_counter import FlopCounterMode

    (x, w, _), target = inputs(64, 16, 48, torch.float32, torch.device("cpu"), ignored=0.8)
    kept = int((target >= 0).sum())
    assert kept < 32
    for reduction, matmuls in (("mean", 3), ("none", 4)):
        with FlopCounterMode(display=False) as counter:
            linear_cross_entropy(x, w, target, reduction=reduction, chunk=8).sum().backward()
        assert counter.get_total_flops() == matmuls * 2 * kept * 16 * 48
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            linear_cross_entropy(x, w, target, reduction=reduction)
        assert counter.get_total_flops() == 2 * kept * 16 * 48, "without gradients, forward alone"
    w.requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(x, w, target).backward()
    assert counter.get_total_flops() == 2 * 2 * kept * 16 * 48, "a frozen head has no gradient"


def peak_bytes(work: Any) -> int:
    """The most that ``work`` held at once of what it allocated, as torch's CPU allocator reports it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    held = most = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_memory(reduction: str) -> None:
    """The gradients, and two buffers of a chunk of logits; the plain layer holds three times the logits of all rows."""
    (x, w, _), target = inputs(1024, 32, 4096, torch.float32, torch.device("cpu"), ignored=0.0)

    def plain() -> None:
        F.cross_entropy(F.linear(x, w), target, reduction=reduction).sum().backward()

    def ours() -> None:
        linear_cross_entropy(x, w, target, reduction=reduction, chunk=16).sum().backward()

    logits, gradients, chunk = 4 * 1024 * 4096, 4 * 32 * (1024 + 4096), 4 * 16 * 4096
    assert peak_bytes(plain) > 2 * logits
    x.grad = w.grad = None
    most = peak_bytes(ours)
    assert gradients + chunk < most < gradients + 2.2 * chunk + 4 * 4 * 1024 < logits / 10


@pytest.mark.parametrize(
    ("rows", "classes", "width", "itemsize", "expected"),
    [
        (16384, 50257, 768, 2, 2432),  # 256 MiB of logits: 2670 rows at most, in seven chunks
        (16384, 32000, 4096, 2, 4096),  # as large as dW: more than is useful
        (16384, 128256, 4096, 2, 4096),  # 1 GiB
        (16384, 256000, 2304, 2, 2048),  # 1 GiB
        (16384, 256000, 2304, 4, 1024),
        (5000, 1000, 64, 2, 2560),  # two chunks of about equal size
        (100, 50257, 768, 2, 128),
        (0, 50257, 768, 2, 128),
        (16384, 4_000_000, 64, 4, 512),  # no fewer than these
    ],
)
def test_rows_per_chunk_on_a_gpu(rows: int, classes: int, width: int, itemsize: int, expected: int) -> None:
    found = rows_per_chunk(rows, classes, width, itemsize)
    assert found == expected and found % 128 == 0
    assert found <= 512 + 127 or found * classes * itemsize <= 2**30 * 1.05


def test_the_weights_gradient_is_written_once_and_then_added_to() -> None:
    """No zeros are written first, and no pass over it multiplies and another one converts."""
    (x, w, _), target = inputs(24, 16, 40, torch.float32, torch.device("cpu"), ignored=0.0)
    found: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if torch.is_tensor(result) and result.shape == w.shape:
                found.append(func.overloadpacket.__name__)
            return result

    with Names():
        loss = linear_cross_entropy(x, w, target, chunk=8)
    assert [name for name in found if name in ("mm", "addmm", "zeros_like", "add_")] == ["mm", "addmm", "addmm"]
    found.clear()
    with Names():
        loss.backward()
    assert [name for name in found if name not in ("detach", "split", "view", "new_empty_strided")] == ["mul"]


@pytest.mark.parametrize("gap", [0, 3, 7])
def test_memory_between_rows_is_kept(gap: int, device: torch.device) -> None:
    """Whether the kernel reads up to the next multiple of 16 or not: 50 logits in rows of 64, 53 or 57."""
    from lightning_eff.kernels import _linear_cross_entropy_triton as kernels

    stride = 64 if gap == 0 else 50 + gap
    for rows, last in ((4, 64), (4, 50)):
        memory = torch.full((3 * stride + last,), 7.5, device=device)
        z = memory.as_strided((rows, 50), (stride, 1))
        z.normal_()
        assert kernels.width_of(z) == (64 if stride == last == 64 else 50)
        target = torch.tensor([0, 49, 7, 3], device=device)
        logits = z.double().clone()
        loss = kernels.loss_and_gradient(z, target, smoothing=0.1, gradient=True, row_grad=None)
        wanted = F.cross_entropy(logits, target, reduction="none", label_smoothing=0.1)
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=1e-6)
        exact = logits.softmax(1) - 0.9 * F.one_hot(target, 50) - 0.1 / 50
        torch.testing.assert_close(z.double(), exact, rtol=1e-5, atol=1e-6)
        between = torch.ones_like(memory, dtype=torch.bool)
        between.as_strided((rows, 50), (stride, 1)).fill_(False)
        assert (memory[between] == 7.5).all()


def test_small_gradients_survive_float16() -> None:
    """Of 20000 rows' mean, scaled by 2^14: no probability is lost that a gradient scaler would have saved."""
    (x, w, _), target = inputs(20_000, 8, 40, torch.float16, torch.device("cpu"), ignored=0.0)
    linear_cross_entropy(x, w, target).backward(torch.tensor(2.0**14))
    _, gradients = exactly([x, w, w[:, 0]], target, torch.full((20_000,), 2.0**14 / 20_000), 0.0, False)
    for got, truth in zip((x, w), gradients, strict=False):
        assert float((got.grad - truth).norm() / truth.norm()) < 2e-3


def test_what_arrives_in_backward_is_not_rounded() -> None:
    """A third is no number of bfloat16: the gradient is multiplied in float32 and rounded once."""
    (x, w, _), target = inputs(64, 32, 40, torch.bfloat16, torch.device("cpu"))
    (whole,) = torch.autograd.grad(linear_cross_entropy(x, w, target, reduction="sum"), x)
    third = torch.tensor(1 / 3)
    (part,) = torch.autograd.grad(linear_cross_entropy(x, w, target, reduction="sum"), x, third)
    assert torch.equal(part, (whole.float() * third).bfloat16())


def test_the_weights_gradient_is_summed_in_float32() -> None:
    """Of 512 chunks of bfloat16 rows: summed in bfloat16, it would be off by about a hundredth."""
    (x, w, _), target = inputs(2048, 8, 12, torch.bfloat16, torch.device("cpu"), ignored=0.0)
    linear_cross_entropy(x, w, target, reduction="sum", chunk=4).backward()
    _, gradients = exactly([x, w, w[:, 0]], target, torch.ones(2048), 0.0, False)
    assert float((w.grad - gradients[1]).norm() / gradients[1].norm()) < 3e-3


def test_autocast() -> None:
    """Matmuls in bfloat16, as the plain layer's; the weight's gradient is float32 and not rounded to bfloat16."""
    (x, w, b), target = inputs(64, 32, 50, torch.float32, torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        plain = F.cross_entropy(F.linear(x, w, b), target)
        loss = linear_cross_entropy(x, w, target, b)
        other = linear_cross_entropy(x.bfloat16(), w, target, b)  # what the layer before has made
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, plain, rtol=1e-2, atol=0)
    assert torch.equal(loss, other)
    assert abs(float((loss - F.cross_entropy(F.linear(x, w, b), target)).detach())) > 1e-6, (
        "it is not the float32 layer"
    )
    per_row = linear_cross_entropy(x, w, target, b, reduction="none")
    (outside,) = torch.autograd.grad(per_row.sum(), x, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        (inside,) = torch.autograd.grad(per_row.sum(), x)
    assert torch.equal(inside, outside), "backward's matmuls have forward's dtype, wherever it is called"
    loss.backward()
    assert {t.grad.dtype for t in (x, w, b)} == {torch.float32}
    assert not torch.equal(w.grad, w.grad.bfloat16().float())


def test_weights_tied_to_an_embedding() -> None:
    """Both uses add to one gradient, over two steps of accumulation."""
    table = torch.nn.Embedding(40, 16)
    tokens = torch.randint(0, 40, (2, 9))
    wanted = torch.zeros(40, 16)
    for step in range(2):
        hidden = table(tokens + 0 * step)[:, :-1]
        (gradient,) = torch.autograd.grad(
            F.cross_entropy((hidden @ table.weight.T).flatten(0, 1), tokens[:, 1:].flatten()), table.weight
        )
        wanted += gradient
        linear_cross_entropy(table(tokens)[:, :-1], table.weight, tokens[:, 1:], chunk=5).backward()
    torch.testing.assert_close(table.weight.grad, wanted)


def test_several_backwards_and_not_twice_differentiable() -> None:
    (x, w, _), target = inputs(5, 8, 11, torch.float32, torch.device("cpu"))
    for reduction in ("mean", "sum", "none"):
        loss = linear_cross_entropy(x, w, target, reduction=reduction).sum()
        x.grad = w.grad = None
        loss.backward(retain_graph=True)
        once = x.grad.clone(), w.grad.clone()
        loss.backward(torch.tensor(2.0), retain_graph=True)
        torch.testing.assert_close(x.grad, 3 * once[0])
        torch.testing.assert_close(w.grad, 3 * once[1])
    loss = linear_cross_entropy(x, w, target)
    loss.backward(retain_graph=True)
    with torch.no_grad():
        w += 1
    with pytest.raises(RuntimeError, match=r"second backward.*changed in place"):
        loss.backward()
    for reduction in ("mean", "none"):
        loss = linear_cross_entropy(x, w, target, reduction=reduction).sum()
        with pytest.raises(RuntimeError, match=r"create_graph=True.*cannot be differentiated"):
            torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_capped_logits(reduction: str, dtype: torch.dtype) -> None:
    """Of ``c tanh(x W^T + b)``, the loss and gradients in float64; and what is not capped differs."""
    (x, w, b), target = inputs(13, 24, 77, dtype, torch.device("cpu"))
    twins = [t.detach().double().requires_grad_() for t in (x, w, b)]
    losses = reference_linear_cross_entropy(twins[0], twins[1], target, twins[2], label_smoothing=0.1, cap=2.5)
    wanted = losses if reduction == "none" else losses.sum() / (target >= 0).sum()
    settings: dict[str, Any] = {"label_smoothing": 0.1, "reduction": reduction, "chunk": 5}
    loss = linear_cross_entropy(x, w, target, b, cap=2.5, **settings)
    wanted.sum().backward()
    loss.sum().backward()
    near = 2e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    assert float((loss.detach() - wanted.detach()).norm() / wanted.detach().norm()) < near
    for got, twin in zip((x, w, b), twins, strict=True):
        assert float((got.grad.double() - twin.grad).norm() / twin.grad.norm()) < near
    plain = linear_cross_entropy(x, w, target, b, **settings)
    assert float((plain - loss).detach().abs().sum()) > 0.1


def test_what_waits_for_backward_is_not_compressed() -> None:
    """Who compresses what autograd saves would otherwise round the gradients themselves."""
    (x, w, _), target = inputs(8, 16, 11, torch.float32, torch.device("cpu"))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear_cross_entropy(x, w, target)
    assert not saved


def test_wrong_arguments_are_refused() -> None:
    (x, w, b), target = inputs(5, 8, 11, torch.float32, torch.device("cpu"), ignored=0.0)
    for wrong in (11, -1):
        with pytest.raises(IndexError, match=rf"target with {wrong}\): expected classes from 0 to 10"):
            linear_cross_entropy(x, w, target.index_fill(0, torch.tensor([2]), wrong))
    with pytest.raises(ValueError, match=r"reduction='average'.*expected one of"):
        linear_cross_entropy(x, w, target, reduction="average")
    with pytest.raises(ValueError, match=r"label_smoothing=1\.5"):
        linear_cross_entropy(x, w, target, label_smoothing=1.5)
    with pytest.raises(ValueError, match="chunk=0"):
        linear_cross_entropy(x, w, target, chunk=0)
    with pytest.raises(ValueError, match=r"weight of shape \(8, 11\)\): expected \(\.\.\., D\) and \(V, D\)"):
        linear_cross_entropy(x, w.T, target)
    with pytest.raises(ValueError, match=r"bias of shape \(5,\)\): expected \(11,\)"):
        linear_cross_entropy(x, w, target, b[:5])
    with pytest.raises(ValueError, match=r"target of torch\.float32, shape \(5, 11\)"):
        linear_cross_entropy(x, w, torch.rand(5, 11))
    with pytest.raises(TypeError, match="of one floating-point dtype"):
        linear_cross_entropy(x.bfloat16(), w, target)
    with pytest.raises(TypeError, match="on one device, cpu as x"):
        linear_cross_entropy(x, w, target.to("meta"))


def test_triton_takes_no_float64(device: torch.device) -> None:
    (x, w, _), target = inputs(5, 8, 11, torch.float64, device)
    with pytest.raises(TypeError, match=r"float64\): expected float32, bfloat16 or float16 on CUDA"):
        linear_cross_entropy(x, w, target)
