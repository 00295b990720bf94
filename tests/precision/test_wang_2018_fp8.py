"""FP8 with chunked accumulation against a scalar loop in exact fractions, its property, and what a plugin must keep."""

import functools
from fractions import Fraction
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_eff.precision._formats.formats import FP8_152, FP16_169, round_to
from lightning_eff.precision._linear.maps import linear_maps
from lightning_eff.precision.wang_2018_fp8 import Wang2018FP8Precision, chunked_matmul, to_fp8
from tests.models import TinyGPT, hugging_face, loader, trainer
from tests.plugins import PluginCase
from tests.precision import plugin_contract as contract
from tests.runs import fit

PLUGINS = {
    "Wang2018FP8Precision": PluginCase(
        build=lambda precision: Wang2018FP8Precision(base=precision, accumulate="float32")
    )
}

Quick = functools.partial(Wang2018FP8Precision, accumulate="float32")


def rounded(v: Fraction, mantissa_bits: int, lowest: int) -> Fraction:
    """To the nearest number with that many bits after the first, and halfway to even; exponents from ``lowest`` on."""
    if v == 0:
        return v
    e = abs(v.numerator).bit_length() - v.denominator.bit_length()
    e -= abs(v) < Fraction(2) ** e
    step = Fraction(2) ** (max(e, lowest) - mantissa_bits)
    return round(v / step) * step


def fp8(x: float) -> float:
    return float(max(Fraction(-57344), min(Fraction(57344), rounded(Fraction(x), 2, -14))))


def fp16(v: Fraction) -> Fraction:
    return rounded(v, 9, -30)


def dot(a: list[float], b: list[float], chunk: int) -> float:
    """The paper's loop: each product added to its chunk's sum, each chunk's sum to the total, in FP16."""
    total = Fraction(0)
    for start in range(0, len(a), chunk):
        s = Fraction(0)
        for x, y in zip(a[start : start + chunk], b[start : start + chunk], strict=True):
            s = fp16(s + Fraction(x) * Fraction(y))
        total = fp16(total + s)
    return float(total)


def reference(a: Tensor, b: Tensor, chunk: int) -> Tensor:
    columns = b.t().tolist()
    return torch.tensor([[dot(row, column, chunk) for column in columns] for row in a.tolist()])


def numbers(*shape: int, spread: float = 1.0, seed: int = 0) -> Tensor:
    """1-5-2 numbers over several binades, subnormal ones too where the spread is large."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.exp(spread * torch.randn(shape, generator=g))
    return round_to(x, FP8_152)


@pytest.mark.parametrize("spread", [0.5, 5.0])
@pytest.mark.parametrize(
    ("m", "k", "n", "chunk"),
    [(3, 130, 4, 64), (2, 64, 3, 64), (5, 7, 2, 64), (2, 40, 2, 1), (3, 37, 3, 8), (1, 9, 1, 3)],
)
def test_sums_are_the_scalar_loops_to_the_bit(m: int, k: int, n: int, chunk: int, spread: float) -> None:
    a, b = numbers(m, k, spread=spread), numbers(k, n, spread=spread, seed=1)
    assert torch.equal(chunked_matmul(a, b, chunk), reference(a, b, chunk))


def test_smallest_and_largest_sums() -> None:
    """Products of subnormals are kept; past 1-6-9's largest number a sum is infinite, as are those after it."""
    tiny = torch.full((1, 3), 2.0**-16)
    assert chunked_matmul(tiny, tiny.t(), 64).item() == 3 * 2.0**-32
    large = torch.full((1, 1), 57344.0)
    assert chunked_matmul(large, large, 64).item() == float(fp16(Fraction(57344) ** 2)) == 57344.0**2
    a = torch.tensor([[57344.0, 57344.0, -57344.0, -57344.0]])
    assert chunked_matmul(a, a.abs().t(), 64).item() == torch.inf
    assert chunked_matmul(a, a.abs().t(), 2).isnan().all()  # ∞ − ∞


def test_blocks_of_rows_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = numbers(33, 20), numbers(20, 8, seed=1)
    whole = chunked_matmul(a, b, 4)
    monkeypatch.setattr("lightning_eff.precision.wang_2018_fp8._ELEMENTS", 80)
    assert torch.equal(chunked_matmul(a, b, 4), whole)
    assert chunked_matmul(a[:0], b, 4).shape == (0, 8)


def test_float32_within_chunks() -> None:
    """Each chunk's sum is rounded once: with one chunk that is the exact product, rounded."""
    a, b = numbers(6, 32), numbers(32, 5, seed=1)
    exact = (a.double() @ b.double()).float()  # sums of few bits: float32 holds them
    assert torch.equal(chunked_matmul(a, b, 32, "float32"), round_to(exact, FP16_169))
    sums = [round_to((a[:, i : i + 8].double() @ b[i : i + 8].double()).float(), FP16_169) for i in range(0, 32, 8)]
    total = torch.zeros(6, 5)
    for s in sums:
        total = round_to(total + s, FP16_169)
    assert torch.equal(chunked_matmul(a, b, 8, "float32"), total)


def test_long_sums_need_chunks() -> None:
    """65,536 numbers from U(0, 1): FP16 1-6-9 stalls at 1024, where its step is 2; sums of sums of 64 do not."""
    x = torch.rand(65_536, 1, generator=torch.Generator().manual_seed(0))
    ones, exact = torch.ones(1, 65_536), x.double().sum().item()
    naive = chunked_matmul(ones, x, 1).item()
    assert naive == 1024 and 1 - naive / exact == pytest.approx(0.969, abs=0.001)
    errors = {chunk: abs(chunked_matmul(ones, x, chunk).item() / exact - 1) for chunk in (64, 256)}
    assert all(error < 0.002 for error in errors.values()), errors


def test_operands_are_rounded_to_nearest_and_saturated() -> None:
    x = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-7, 6, 500)
    assert to_fp8(x).float().tolist() == [fp8(v) for v in x.tolist()]
    assert to_fp8(x).dtype == torch.float8_e5m2
    ends = to_fp8(torch.tensor([torch.inf, -torch.inf, torch.nan])).float()
    assert ends[:2].tolist() == [torch.inf, -torch.inf] and ends[2].isnan()


def arithmetic(plugin: Wang2018FP8Precision) -> Any:
    (m,) = linear_maps(nn.Sequential(nn.Linear(1, 1)))
    return plugin.arithmetic(m)


def on_grid(x: Tensor) -> Tensor:
    return torch.tensor([fp8(v) for v in x.flatten().tolist()]).view(x.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_the_three_products(bias: bool, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 12, generator=g).to(dtype).requires_grad_()
    w = torch.randn(7, 12, generator=g).requires_grad_()
    b = torch.randn(7, generator=g).requires_grad_() if bias else None
    grad = (1e-4 * torch.randn(2, 5, 7, generator=g)).to(dtype)
    y = arithmetic(Wang2018FP8Precision(chunk=4, loss_scale=1000.0))(x, w, b)
    y.backward(grad)
    rows = grad.float().view(10, 7)
    x_hat, w_hat, g_hat = on_grid(x.detach().float().view(10, 12)), on_grid(w.detach()), on_grid(rows * 1000)
    expected = reference(x_hat, w_hat.t(), 4) + (b.detach() if b is not None else 0)
    assert torch.equal(y, expected.to(dtype).view(2, 5, 7))
    assert torch.equal(x.grad, (reference(g_hat, w_hat, 4) / 1000).to(dtype).view(2, 5, 12))
    assert torch.equal(w.grad, reference(g_hat.t(), x_hat, 4) / 1000)
    if b is not None:
        assert torch.equal(b.grad, rows.sum(0))


def test_small_gradients_need_the_scale() -> None:
    x, w = torch.randn(4, 8).requires_grad_(), torch.randn(3, 8).requires_grad_()
    for scale, kept in ((1000.0, True), (1.0, False)):
        (dx,) = torch.autograd.grad(
            arithmetic(Wang2018FP8Precision(loss_scale=scale))(x, w, None), x, torch.full((4, 3), 3e-6)
        )
        assert (dx != 0).all() if kept else (dx == 0).all()


def test_the_scale_is_that_of_a_scaled_loss() -> None:
    """By a power of two, so that nothing else rounds: the gradients of a loss 1024 times as large, divided, to the bit."""
    g = torch.Generator().manual_seed(0)
    x, weights = torch.randn(6, 8, generator=g), [torch.randn(8, 8, generator=g) for _ in range(3)]

    def gradients(inside: float, outside: float) -> list[Tensor]:
        compute = arithmetic(Wang2018FP8Precision(loss_scale=inside))
        ws, h = [w.clone().requires_grad_() for w in weights], x
        for w in ws:
            h = torch.tanh(compute(h, w, None))
        (h.square().mean() * outside).backward()
        return [w.grad / outside for w in ws if w.grad is not None]

    for a, b in zip(gradients(1024.0, 1.0), gradients(1.0, 1024.0), strict=True):
        assert torch.equal(a, b) and a.any()


def test_gradients_that_are_not_finite_stay_so() -> None:
    x, w = torch.randn(4, 8).requires_grad_(), torch.randn(3, 8).requires_grad_()
    grad = torch.ones(4, 3)
    grad[1, 2] = torch.inf
    arithmetic(Wang2018FP8Precision())(x, w, None).backward(grad)
    assert not x.grad[1].isfinite().any() and x.grad[[0, 2, 3]].isfinite().all()
    assert not w.grad[2].isfinite().any() and w.grad[:2].isfinite().all()


def test_a_vector_and_no_rows_and_frozen_operands() -> None:
    compute = arithmetic(Wang2018FP8Precision())
    w = torch.randn(7, 12).requires_grad_()
    assert compute(torch.randn(12), w, None).shape == (7,)
    compute(torch.randn(0, 12), w, None).sum().backward()
    assert torch.equal(w.grad, torch.zeros(7, 12))
    x = torch.randn(3, 12).requires_grad_()
    compute(x, w.detach(), None).sum().backward()
    assert x.grad is not None


def test_backward_ignores_autocast() -> None:
    contract.backward_ignores_autocast(arithmetic(Quick()))


def test_one_byte_an_element_is_saved() -> None:
    x, w = torch.randn(64, 32).requires_grad_(), torch.randn(16, 32).requires_grad_()
    saved = contract.saved_by(lambda: arithmetic(Quick())(x, w, None))
    assert sum(t.nbytes for t in saved) == x.numel() + w.numel()


# -- weights in FP16


def stepped(num: int, updates: int, *, size: float = 1e-4, passes: int = 0) -> Tensor:
    """Weights of 1 after updates of −size, each with the plugin's rounding, after so many earlier passes."""
    plugin, p = Wang2018FP8Precision(), nn.Parameter(torch.ones(num))
    plugin._seed, plugin._passes = 5, passes
    frozen = nn.Parameter(torch.full((3,), 1.0001))
    optimizer = torch.optim.SGD([p, frozen], lr=size)
    for _ in range(updates):
        plugin._passes += 1
        p.grad = torch.ones_like(p)
        optimizer.step()
        plugin._round_weights(optimizer)
    assert torch.equal(frozen, torch.full((3,), 1.0001)), "a parameter without a gradient was rounded"
    return p.detach()


def test_small_updates_are_not_lost() -> None:
    """1e-4 is a tenth of the step below 1: nearest rounding would never move; the mean moves by 50 updates, 4 σ."""
    num = 20_000
    p = stepped(num, 50)
    assert torch.equal(p, round_to(p, FP16_169))
    error = p.double().mean().item() - (1 - 50e-4)
    assert abs(error) < 4 * p.double().std().item() / num**0.5
    assert p.unique().numel() > 5


def test_ranks_round_alike_and_steps_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        found.append(stepped(100, 3))
    assert torch.equal(*found)
    half = 2.0**-11  # halfway between 1 and the number below
    assert not torch.equal(stepped(100, 1, size=half), stepped(100, 1, size=half, passes=1))


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam])
def test_momentum_is_in_fp16_for_sgd_alone(cls: Any) -> None:
    """1 + 2^-11 is a quarter of the step above 1: a quarter of the buffers are rounded up."""
    plugin, p = Wang2018FP8Precision(), nn.Parameter(torch.ones(20_000))
    plugin._seed, p.grad = 5, torch.full((20_000,), 1 + 2.0**-11)
    optimizer = cls([p], lr=0.1, **({"momentum": 0.9} if cls is torch.optim.SGD else {}))
    optimizer.step()
    state = {k: v.clone() for k, v in optimizer.state[p].items()}
    plugin._round_weights(optimizer)
    if cls is torch.optim.Adam:
        assert all(torch.equal(value, state[key]) for key, value in optimizer.state[p].items())
        return
    found = optimizer.state[p]["momentum_buffer"]
    assert found.unique().tolist() == [1, 1 + 2.0**-9]
    assert (found > 1).double().mean().item() == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / 20_000) ** 0.5)


class TwoOptimizers(pl.LightningModule):
    """Manual optimisation: both optimizers step in one pass."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net, self.drift = TinyGPT(), nn.ParameterList(nn.Parameter(torch.ones(1000)) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.net.training_step(batch, batch_idx) + sum(p.sum() for p in self.drift)
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # pyright: ignore[reportGeneralTypeIssues]
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        self.net.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
        first, second = self.drift
        adam = torch.optim.Adam(self.net.parameters(), lr=1e-2)
        return [adam, torch.optim.SGD([first], lr=2.0**-11), torch.optim.SGD([second], lr=2.0**-11)]


def test_manual_optimization() -> None:
    pl.seed_everything(0, verbose=False)
    net = TwoOptimizers()
    trainer(max_steps=6, plugins=[Quick(base="bf16-mixed")]).fit(net, loader("tiny_gpt"))
    for name, p in net.named_parameters():
        assert torch.equal(p, round_to(p.detach(), FP16_169)), name
    assert not torch.equal(*net.drift), "both optimizers drew the same numbers"


@pytest.mark.parametrize("base", ["32-true", "bf16-mixed"])
def test_all_parameters_are_in_fp16_after_each_step(base: str) -> None:
    class Look(pl.Callback):
        looked = 0

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            self.looked += 1
            for name, p in pl_module.named_parameters():
                assert torch.equal(p, round_to(p.detach(), FP16_169)), name

    look = Look()
    fit("tiny_gpt", list, plugins=[Quick(base=base)], callbacks=[look], max_steps=3, gradient_clip_val=0.1)
    assert look.looked == 3
    plain, _ = fit("tiny_gpt", list, max_steps=3)
    assert not any(torch.equal(p, round_to(p.detach(), FP16_169)) for p in plain.parameters() if p.ndim > 1)


# -- arguments, and what a plugin must keep


def test_arguments() -> None:
    for chunk in (0, 2.5, True):
        with pytest.raises(ValueError, match=r"Wang2018FP8Precision\(chunk=.*\): expected an integer >= 1"):
            Wang2018FP8Precision(chunk)  # pyright: ignore[reportArgumentType]
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"Wang2018FP8Precision\(loss_scale=.*\): expected a finite number > 0"):
            Wang2018FP8Precision(loss_scale=scale)
    with pytest.raises(ValueError, match=r"\(accumulate='fp16'\): expected 'exact' or 'float32'"):
        Wang2018FP8Precision(accumulate="fp16")  # pyright: ignore[reportArgumentType]
    scaling = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="the base plugin scales the loss too"):
        Wang2018FP8Precision(base=scaling)
    assert "emulated" in Wang2018FP8Precision().describe() and "64" in Wang2018FP8Precision().describe()


def test_refuses_parameters_that_do_not_hold_fp16() -> None:
    net = TinyGPT()
    with pytest.raises(
        ValueError, match=r"the parameter embed.weight is torch.bfloat16, but FP16 1-6-9 needs torch.float32"
    ):
        trainer(max_steps=1, plugins=[Wang2018FP8Precision(base="bf16-true")]).fit(net, loader("tiny_gpt"))
    assert "forward" not in net.get_submodule("blocks.0.proj").__dict__


@pytest.mark.parametrize(
    ("model", "base"),
    [("tiny_gpt", "bf16-mixed"), ("gpt2", "bf16-mixed"), *((m, "32-true") for m in ("llama", "bert", "vit"))],
)
def test_trains_like_the_base_plugin(model: str, base: str) -> None:
    """After 12 steps the loss is within 3 % of the base's progress from the base's."""
    make = Wang2018FP8Precision if model in ("tiny_gpt", "gpt2") else Quick
    assert contract.apart(make, model, base) < 0.03


def test_gpt2s_own_linear_maps_run_in_it() -> None:
    plugin, net = Wang2018FP8Precision(), hugging_face("gpt2", num_layers=2)
    plugin.convert_module(net)
    assert sum("Conv1D" in type(m.module).__name__ for m in plugin._maps) == len(plugin._maps) == 8


def test_fifty_steps() -> None:
    assert contract.apart(Quick, "tiny_gpt", "32-true", max_steps=50, samples=200) < 0.05


def test_resume_equals_uninterrupted_from_every_step(tmp_path: Path) -> None:
    contract.resumes(Quick, tmp_path)


def test_checkpoints_are_the_plain_modules(tmp_path: Path) -> None:
    contract.checkpoints_are_the_plain_modules(Quick, tmp_path)


def test_the_same_when_rematerialized() -> None:
    contract.the_same_when_rematerialized(Quick)


def test_inside_compressed_activations() -> None:
    contract.compressed_activations_leave_its_tensors_alone(Quick)


@pytest.mark.parametrize("fails", [False, True])
def test_leaves_no_trace(fails: bool) -> None:
    contract.leaves_no_trace(Quick, fails)
