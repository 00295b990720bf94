"""MetaInit: the gradient quotient against whole Hessians, norms alone move, and the search leaves nothing else behind."""

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.data import DataLoader

from lightning_eff import MetaInit
from lightning_eff.model.initialization.meta_init import _Search, gradient_quotient, norm_slopes
from tests.cases import Case
from tests.model.initialization.begun import Convolutions, begun
from tests.model.initialization.test_zero_projections import Encoder, tokens
from tests.models import TinyClassifier, TinyGPT, flat, hugging_face, make_batch, trainer
from tests.runs import fit_yaml


def vectors() -> pl.LightningModule:
    """It has no weight of two dimensions."""

    class Scaled(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy((batch[0] * self.scale)[:, :3], batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    return Scaled()


CASES = {
    "MetaInit": Case(
        active=lambda: MetaInit(steps=3, lr=0.02),
        neutral=lambda: MetaInit(steps=0),
        lost=(vectors, "classifier", "none of the .* has two or more dimensions and is not zero"),
    )
}


class Tall(pl.LightningModule):
    """Maps with tanh in between and no norms, which begin far too large."""

    def __init__(self, depth: int = 8, dim: int = 16, gain: float = 3.0) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))
        self.head = nn.Linear(dim, 4)
        for m in self.maps:
            nn.init.normal_(m.weight, std=gain * dim**-0.5)  # pyright: ignore[reportArgumentType]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for m in self.maps:
            x = torch.tanh(m(x))
        return F.cross_entropy(self.head(x), batch[1])


def features() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(32, 16, generator=g), torch.randint(0, 4, (32,), generator=g)]


# -- the rule


@pytest.mark.parametrize("c", [0.25, 1.0, 3.0])
def test_of_a_parabola_it_is_the_curvature(c: float) -> None:
    w = torch.randn(50, dtype=torch.float64, requires_grad=True)
    quotient = gradient_quotient(c / 2 * w.square().sum(), [w], eps=1e-12)
    assert quotient.item() == pytest.approx(c, rel=1e-6)


def by_hessian(loss: Any, w: Tensor, eps: float) -> float:
    """The quotient of a function of one vector by its whole Hessian, number by number."""
    g, h = torch.autograd.functional.jacobian(loss, w), torch.autograd.functional.hessian(loss, w)
    hg = h @ g
    return sum(
        abs((gi - hi) / (gi + (eps if gi >= 0 else -eps)) - 1) for gi, hi in zip(g.tolist(), hg.tolist(), strict=True)
    ) / len(g)


def network(w: Tensor) -> Tensor:
    """A network of 5 inputs, 4 hidden and 3 outputs, of one vector."""
    x = torch.linspace(-1, 1, 10, dtype=torch.float64).view(2, 5)
    one, two = w[:20].view(4, 5), w[20:].view(3, 4)
    return F.cross_entropy(torch.tanh(x @ one.mT) @ two.mT, torch.tensor([0, 2]))


@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_against_the_whole_hessian(eps: float) -> None:
    w = torch.randn(32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours = gradient_quotient(network(w.requires_grad_()), [w], eps=eps).item()
    assert ours == pytest.approx(by_hessian(network, w.detach(), eps), rel=1e-9)


def test_slopes_against_differences() -> None:
    w = torch.randn(32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one, two = w[:20].clone().requires_grad_(), w[20:].clone().requires_grad_()
    quotient = gradient_quotient(network(torch.cat([one, two])), [one, two], eps=0.1)
    h = 1e-6
    for at, slope in enumerate(norm_slopes(quotient, [one, two])):
        ends: list[float] = []
        for sign in (1, -1):
            parts = [one.detach(), two.detach()]
            parts[at] = parts[at] * (1 + sign * h / parts[at].norm())
            ends.append(by_hessian(network, torch.cat(parts), 0.1))
        assert slope == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-4)


# -- the search


LITTLE = 1e-4  # so that each step lets the quotient fall


def norms_after(steps: int, **settings: Any) -> dict[str, float]:
    m = begun(Tall, features(), MetaInit(steps=steps, lr=LITTLE, batches=1, **settings))
    return {name: p.detach().double().norm().item() for name, p in m.named_parameters() if p.ndim > 1}


def test_a_step_moves_each_norm_by_the_rate_and_momentum_adds_up() -> None:
    torch.manual_seed(0)
    m, batch = Tall(), features()
    named = {name: p for name, p in m.named_parameters() if p.ndim > 1}
    parameters = [*m.parameters()]
    slopes = norm_slopes(gradient_quotient(m.training_step(batch, 0), parameters, eps=1e-5), [*named.values()])
    before = {name: p.detach().double().norm().item() for name, p in named.items()}
    moved = norms_after(1)
    for name, slope in zip(named, slopes, strict=True):
        assert moved[name] - before[name] == pytest.approx(-LITTLE if slope > 0 else LITTLE, rel=0.01)
    twice = norms_after(2)
    speeds = {round((twice[name] - moved[name]) / (moved[name] - before[name]), 1) for name in named}
    assert speeds <= {1.9, -0.1} and 1.9 in speeds  # 0.9 m - lr s, with the sign as before or turned
    assert {round(abs(norms_after(2, momentum=0.0)[n] - moved[n]) / LITTLE, 1) for n in named} == {1.0}


@pytest.mark.parametrize("batches", [0, 1])
def test_directions_stay_and_the_quotient_falls(batches: int, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    plain, ours = dict(Tall().named_parameters()), MetaInit(steps=60, lr=0.02, batches=batches)
    with caplog.at_level(logging.INFO):
        m = begun(Tall, features(), ours)
    for name, p in m.named_parameters():
        if p.ndim == 1:
            assert torch.equal(p, plain[name])
        else:
            ratio = (p / plain[name]).detach()
            torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-5, atol=0)
            assert ratio.mean() > 0 and abs(ratio.mean() - 1) > 1e-3
    report = ours.report()
    assert report["quotient"] < 0.3 * report["quotient_before"] and report["numbers"] == 8 * 256 + 64
    again = gradient_quotient(m.training_step(features(), 0), [*m.parameters()], eps=1e-5).item()
    assert batches == 0 or again == pytest.approx(report["quotient"], rel=1e-3)
    assert caplog.text.count("left") == 10 and "the gradient quotient went from" in caplog.text


def test_norms_stay_above_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[float] = []
    monkeypatch.setattr(_Search, "scale", lambda search: met.extend(search.norms.values()))
    begun(lambda: Tall(gain=0.01), features(), MetaInit(steps=10, lr=1.0))
    assert len(met) >= 90 and min(met) > 0


def test_a_quotient_that_does_not_fall_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        begun(lambda: Tall(gain=0.3), features(), MetaInit(steps=2, lr=20.0, batches=1))
    assert "did not fall" in caplog.text and "smaller lr than 20, since norms were between" in caplog.text


class Before(pl.Callback):
    """What a search must leave alone, as a batch begins."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.random = torch.get_rng_state()
        self.buffers = {name: b.clone() for name, b in pl_module.named_buffers()}
        self.modes = [m.training for m in pl_module.modules()]
        self.grads = [p.grad is None for p in pl_module.parameters()]
        self.needs = [p.requires_grad for p in pl_module.parameters()]
        self.vectors = {name: p.detach().clone() for name, p in pl_module.named_parameters() if p.ndim == 1}


class Drawing(TinyClassifier):
    """It draws, counts and has a frozen map, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Buffer(torch.zeros(()))
        self.blocks[0].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += 1
        return super().training_step((batch[0] + 0.01 * torch.randn_like(batch[0]), batch[1]), batch_idx)


def test_buffers_random_state_modes_and_vectors_stay() -> None:
    one, other, m = Before(), Before(), Drawing()
    data: DataLoader[Any] = DataLoader([list(make_batch("classifier"))], batch_size=None)  # pyright: ignore[reportArgumentType]
    trainer(one, MetaInit(steps=4, lr=0.01), other, max_steps=1).fit(m, data)
    assert torch.equal(one.random, other.random)
    assert one.modes == other.modes and one.grads == other.grads and one.needs == other.needs
    for before, after in ((one.buffers, other.buffers), (one.vectors, other.vectors)):
        assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "t5", "tiny_gpt", "encoder", "convolutions"])
def test_unchanged_modules(name: str) -> None:
    builds: dict[str, tuple[Any, Any]] = {
        "tiny_gpt": (lambda: TinyGPT(2), make_batch("tiny_gpt")),
        "encoder": (Encoder, tokens()),
        "convolutions": (Convolutions, [torch.randn(2, 3, 6, 6), torch.tensor([0, 1])]),
    }
    build, batch = builds.get(name) or (lambda: hugging_face(name, 2, dropout=0.1), make_batch(name))
    ours = MetaInit(steps=2, lr=1e-3)
    m, other = (begun(build, batch, one) for one in (ours, MetaInit(steps=2, lr=1e-3)))
    assert 0 < ours.report()["quotient"] < 1e5
    assert all(torch.equal(p, q) for p, q in zip(m.parameters(), other.parameters(), strict=True))


def test_what_has_no_second_derivative_by_default_is_computed_otherwise() -> None:
    x = torch.randn(2, 2, 8, 4, requires_grad=True)
    (g,) = torch.autograd.grad(F.scaled_dot_product_attention(x, x, x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(g.sum(), x)

    class Recurrent(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(61, 8, sparse=True)
            self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 61)
            self.sparse: list[bool] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            y = self.head(self.lstm(self.table(batch["input_ids"]))[0])
            return F.cross_entropy(y.flatten(0, 1), batch["labels"].flatten())

    ours = MetaInit(steps=2, lr=1e-3)
    m = begun(Recurrent, make_batch("tiny_gpt"), ours)
    assert m.table.sparse and ours.report()["numbers"] == 61 * 8 * 2 + 2 * 32 * 8


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * gradient * ctx.saved_tensors[0]


class Constant(torch.autograd.Function):
    """Its backward pass computes by what autograd does not see, as a kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * gradient.detach() * ctx.saved_tensors[0].detach()


class Rightly(Constant):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * gradient * ctx.saved_tensors[0]


class ByHand(Tall):
    square: Any = Rightly

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([self.square.apply(batch[0] + self.maps[0].bias), batch[1]], batch_idx)


def test_what_cannot_be_differentiated_again_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert begun(ByHand, features(), MetaInit(steps=2, lr=0.01)) is not None
    for function in (Once, Constant):
        monkeypatch.setattr(ByHand, "square", function)
        with pytest.raises(ValueError, match=f"loss of ByHand cannot .* of {function.__name__} has no derivative"):
            begun(ByHand, features(), MetaInit(steps=2))


def test_a_step_that_takes_no_noise_is_told_to_use_data() -> None:
    """An autoencoder's pixels are targets in [0, 1]."""

    class Autoencoder(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            pixels = batch[0]
            reconstructed = self(pixels).mean(1, keepdim=True).expand_as(pixels).sigmoid()
            return F.binary_cross_entropy(reconstructed, pixels)

    one = torch.rand(4, 8), torch.zeros(4, dtype=torch.long)
    data: Any = DataLoader([one] * 4, batch_size=None)  # pyright: ignore[reportArgumentType]
    net = Autoencoder()
    before = flat(net).clone()
    with pytest.raises(ValueError, match=r"^MetaInit\(batches=0\): .* between 0 and 1\)\. Set batches=1"):
        trainer(MetaInit(steps=2)).fit(net, data)
    assert torch.equal(flat(net), before)
    trainer(MetaInit(steps=2, batches=1)).fit(net, data)


def test_what_is_not_finite_is_refused_and_weights_are_as_they_were() -> None:
    class Breaking(Tall):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            moved = (self.maps[0].weight.detach() - self.first).abs().max() > 0.03  # pyright: ignore[reportAttributeAccessIssue]
            return super().training_step(batch, batch_idx) * (float("nan") if moved else 1.0)

    torch.manual_seed(0)
    m = Breaking()
    m.first = m.maps[0].weight.detach().clone()  # pyright: ignore[reportAttributeAccessIssue]
    before = [p.detach().clone() for p in m.parameters()]
    m.configure_optimizers = lambda: torch.optim.SGD(m.parameters(), 0.0)  # pyright: ignore[reportAttributeAccessIssue]
    data: DataLoader[Any] = DataLoader([features()], batch_size=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="is not finite at step"):
        trainer(MetaInit(steps=50), max_steps=1).fit(m, data)
    assert all(torch.equal(p, q) for p, q in zip(m.parameters(), before, strict=True))


def test_weights_of_few_bits_are_searched_in_float32() -> None:
    torch.manual_seed(0)
    m = Tall()
    plain = {name: p.detach().bfloat16() for name, p in m.named_parameters()}
    m.configure_optimizers = lambda: torch.optim.SGD(m.parameters(), 0.0)  # pyright: ignore[reportAttributeAccessIssue]
    data: DataLoader[Any] = DataLoader([features()], batch_size=None)  # pyright: ignore[reportArgumentType]
    ours = MetaInit(steps=50, lr=0.02, batches=1)
    trainer(ours, max_steps=1, precision="bf16-true").fit(m, data)
    assert ours.report()["quotient"] < 0.8 * ours.report()["quotient_before"]
    for name, p in m.named_parameters():
        assert p.dtype == torch.bfloat16
        if p.ndim > 1:
            assert F.cosine_similarity(p.flatten().float(), plain[name].flatten().float(), dim=0) > 0.9999


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": -1}, "steps=-1.: expected an integer >= 0"),
        ({"steps": True}, "steps=True.: expected an integer >= 0"),
        ({"batches": 0.5}, "batches=0.5.: expected an integer >= 0"),
        ({"lr": 0.0}, "lr=0.0.: expected a finite number > 0"),
        ({"momentum": 1.0}, "momentum=1.0.: expected a number in"),
        ({"eps": 0.0}, "eps=0.0.: expected a finite number > 0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MetaInit(**settings)


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_yaml(tmp_path, "MetaInit", {"steps": 2, "lr": 0.01}, model="TinyGPT", data="Sequences", max_steps=1)
    assert "which brought the gradient quotient from" in capsys.readouterr().out
