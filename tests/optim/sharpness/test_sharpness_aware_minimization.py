"""SharpnessAwareMinimization against a loop written by hand, and what it must leave as it was."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import SumMetric

from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Technique
from lightning_eff.optim.sharpness import _uphill
from lightning_eff.optim.sharpness.sharpness_aware_minimization import (
    SharpnessAwareMinimization,
    adaptive_scale,
    perturbation,
)
from tests.cases import Case
from tests.core.nop import Nop
from tests.models import Samples, TinyClassifier, TinyGPT, flat, loader, module, trainer

CASES = {
    "SharpnessAwareMinimization": Case(
        active=lambda: SharpnessAwareMinimization(rho=0.1),
        neutral=lambda: SharpnessAwareMinimization(rho=0.0),
        anywhere=True,
    )
}

MODELS = ["classifier", "tiny_gpt", "gpt2", "llama", "bert", "vit"]


class SeedOnce(pl.Callback):
    """Starts the random stream anew at the first batch, so that a loop outside Lightning can have the same."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 0 and batch_idx == 0:
            torch.manual_seed(100 + trainer.global_rank)


class Watch(pl.Callback):
    """Records, after each batch, the logged loss and the weights."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.weights: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if "train_loss" in trainer.logged_metrics:
            self.losses.append(float(trainer.logged_metrics["train_loss"]))
        self.weights.append(flat(pl_module))


def quiet_step(net: pl.LightningModule, batch: Any) -> Tensor:
    """The module's loss, outside a trainer."""
    net.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    loss = net.training_step(batch, 0)
    del net.log
    return loss["loss"] if isinstance(loss, dict) else loss


def sam_gradient(
    net: pl.LightningModule, batch: Any, *, rho: float, bf16: bool, adaptive: bool = False, mix: float = 1.0
) -> tuple[list[Tensor], float]:
    """By hand: the gradient at ``w + rho g / ||g||`` and the loss at ``w``; all else as after a plain forward pass."""
    params = [p for p in net.parameters() if p.requires_grad]
    names = [n for n, p in net.named_parameters() if p.requires_grad]

    def gradient() -> tuple[list[Tensor], float]:
        context = torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if bf16 else nullcontext()
        with context:
            loss = quiet_step(net, batch)
        kept = [p.grad for p in params]
        for p in params:
            p.grad = None
        loss.backward()
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        for p, g in zip(params, kept, strict=True):
            p.grad = g
        return found, float(loss.detach())

    state = torch.get_rng_state()
    first, loss = gradient()
    after, buffers = torch.get_rng_state(), {k: b.clone() for k, b in net.named_buffers()}
    t = [torch.ones_like(p) for p in params]
    if adaptive:
        t = [
            torch.ones_like(p) if n.endswith("bias") else p.detach().abs() + 0.01
            for n, p in zip(names, params, strict=True)
        ]
    norm = torch.stack([(s * g).norm() for s, g in zip(t, first, strict=True)]).norm()
    old = [p.detach().clone() for p in params]
    with torch.no_grad():
        for p, s, g in zip(params, t, first, strict=True):
            p += s * (s * g) * (rho / (norm + 1e-12))
    torch.set_rng_state(state)
    second, _ = gradient()
    torch.set_rng_state(after)
    with torch.no_grad():
        for p, w in zip(params, old, strict=True):
            p.copy_(w)
        for k, b in net.named_buffers():
            b.copy_(buffers[k])
    return second if mix == 1 else [mix * s + (1 - mix) * f for s, f in zip(second, first, strict=True)], loss


def by_hand(
    net: pl.LightningModule,
    batches: list[Any],
    *,
    rho: float = 0.1,
    accumulate: int = 1,
    clip: float | None = None,
    bf16: bool = False,
    adaptive: bool = False,
    interval: int = 1,
    mix: float = 1.0,
) -> list[float]:
    """Train ``net`` without Lightning, once over ``batches``; the losses at the unperturbed weights."""
    net.train()
    optimizer: Any = net.configure_optimizers()
    params = [p for p in net.parameters() if p.requires_grad]
    torch.manual_seed(100)
    losses, step = [], 0
    for i, batch in enumerate(batches):
        radius = 0.0 if step % interval else rho
        gradients, loss = sam_gradient(net, batch, rho=radius, bf16=bf16, adaptive=adaptive, mix=mix)
        losses.append(loss)
        for p, g in zip(params, gradients, strict=True):
            p.grad = g / accumulate if p.grad is None else p.grad + g / accumulate
        if (i + 1) % accumulate == 0 or i + 1 == len(batches):
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(params, clip)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return losses


def both(
    name: str, make: Callable[[], pl.LightningModule] | None = None
) -> tuple[pl.LightningModule, pl.LightningModule]:
    """Two modules with the same weights."""
    made = []
    for _ in range(2):
        pl.seed_everything(3, verbose=False)
        made.append(make() if make else module(name))
    return made[0], made[1]


def dropping(name: str) -> pl.LightningModule:
    return module(name) if name == "classifier" else module(name, dropout=0.1)


def same(a: pl.LightningModule, b: pl.LightningModule) -> bool:
    """Whether weights and buffers are bit for bit the same."""
    other = b.state_dict()
    return all(torch.equal(value, other[key]) for key, value in a.state_dict().items())


# -- the rule


class Quadratic(pl.LightningModule):
    """``L(w) = w^T H w / 2``, SGD with lr 1."""

    def __init__(self, h: Tensor, w: Tensor) -> None:
        super().__init__()
        self.h, self.w = h, nn.Parameter(w.clone())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return 0.5 * self.w @ self.h @ self.w

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def quadratic() -> tuple[Tensor, Tensor]:
    a = torch.randn(6, 6, dtype=torch.float64)
    return a @ a.T, torch.randn(6, dtype=torch.float64)


def test_update_on_a_quadratic_is_the_gradient_uphill() -> None:
    h, w = quadratic()
    net = Quadratic(h, w)
    trainer(SharpnessAwareMinimization(rho=0.3), max_steps=1).fit(net, DataLoader(torch.zeros(1, 1)))
    g = h @ w
    torch.testing.assert_close(w - net.w.detach(), h @ (w + 0.3 * g / g.norm()), rtol=1e-12, atol=1e-12)


def test_adaptive_update_on_a_quadratic() -> None:
    h, w = quadratic()
    net = Quadratic(h, w)
    trainer(SharpnessAwareMinimization(rho=0.3, adaptive=True), max_steps=1).fit(net, DataLoader(torch.zeros(1, 1)))
    g, t = h @ w, w.abs() + 0.01
    e = 0.3 * t**2 * g / (t * g).norm()
    torch.testing.assert_close(w - net.w.detach(), h @ (w + e), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mix", [0.25, 0.5, 1.0])
def test_a_mixed_update_on_a_quadratic_lies_between_both_gradients(mix: float) -> None:
    h, w = quadratic()
    net, seen = Quadratic(h, w), Watch()
    sam = SharpnessAwareMinimization(rho=0.3, mix=mix)
    trainer(sam, seen, max_steps=1).fit(net, DataLoader(torch.zeros(1, 1)))
    g = h @ w
    expected = mix * (h @ (w + 0.3 * g / g.norm())) + (1 - mix) * g
    torch.testing.assert_close(w - net.w.detach(), expected, rtol=1e-12, atol=1e-12)
    uphill = w + 0.3 * g / g.norm()
    assert float(sam._last["sharpness"]) == pytest.approx(float(uphill @ h @ uphill - w @ g) / 2, rel=1e-9)


@pytest.mark.parametrize("mode", ["plain", "accumulate", "clip", "bf16"])
def test_mixed_equals_the_loop_by_hand(mode: str) -> None:
    settings, arguments = MODES[mode]
    mix = 0.5 if mode == "bf16" else 0.3  # a power of two scales the second pass without rounding in bfloat16
    net, reference = both("classifier")
    batches = loader("classifier", shuffle=False)
    trainer(SeedOnce(), SharpnessAwareMinimization(rho=0.5, mix=mix), max_epochs=1, **settings).fit(net, batches)
    by_hand(reference, list(batches), rho=0.5, mix=mix, **arguments)
    torch.testing.assert_close(flat(net), flat(reference), rtol=1e-5, atol=1e-6)


def test_mixing_in_nothing_is_plain_training() -> None:
    assert SharpnessAwareMinimization(mix=0).neutral


def test_perturbation_has_length_rho_over_all_tensors_together() -> None:
    gradients = [torch.randn(3, 4), torch.randn(5)]
    e, norm = perturbation(gradients, [None, None], rho=0.05)
    assert torch.cat([x.flatten() for x in e]).norm().item() == pytest.approx(0.05, rel=1e-6)
    assert norm.item() == pytest.approx(torch.cat([g.flatten() for g in gradients]).norm().item(), rel=1e-6)


def test_adaptive_perturbation_follows_the_scale_of_a_layer() -> None:
    w, g = torch.randn(50) * 100, torch.randn(50)
    biases = adaptive_scale("layer.bias", w)
    assert biases is None
    scale = adaptive_scale("layer.weight", w)
    scaled_up = adaptive_scale("layer.weight", w * 10)
    assert scale is not None and scaled_up is not None
    (e,), _ = perturbation([g], [scale], rho=0.5)
    (ten,), _ = perturbation([g / 10], [scaled_up], rho=0.5)  # the same function of w / 10
    torch.testing.assert_close(ten, 10 * e, rtol=1e-3, atol=1e-3)


def test_a_gradient_that_is_not_finite_perturbs_nothing() -> None:
    e, norm = perturbation([torch.tensor([1.0, float("inf")]), torch.ones(2)], [None, None], rho=0.05)
    assert not norm.isfinite()
    assert all(torch.equal(x, torch.zeros(2)) for x in e)
    e, _ = perturbation([torch.zeros(2)], [None], rho=0.05)
    assert torch.equal(e[0], torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_lists_give_the_bits_of_a_loop(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = [torch.randn(3, 4, dtype=dtype), torch.randn(5, dtype=dtype), torch.randn(4, 4, dtype=dtype)]
    scales = [None, torch.rand(5, dtype=dtype), torch.rand(4, 4, dtype=dtype)]
    before = [g.clone() for g in gradients]
    lists, norm = perturbation(gradients, scales, rho=0.05)
    asked: list[int] = []
    monkeypatch.setattr(_uphill, "_together", lambda tensors, norm: bool(asked.append(len(tensors))))
    loop, same = perturbation(gradients, scales, rho=0.05)
    assert asked == [3] and torch.equal(norm, same)
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(lists, loop, strict=True))
    assert all(torch.equal(g, was) for g, was in zip(gradients, before, strict=True))  # those of the caller stay


# -- the same as a loop written by hand, to the last bit

MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "accumulate": ({"accumulate_grad_batches": 2}, {"accumulate": 2}),
    "clip": ({"gradient_clip_val": 0.05}, {"clip": 0.05}),
    "bf16": ({"precision": "bf16-mixed"}, {"bf16": True}),
    "all": (
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "precision": "bf16-mixed"},
        {"accumulate": 2, "clip": 0.05, "bf16": True},
    ),
}


#: models and modes in which a technique that is set to be SAM is held against it
AS_SAM = [("classifier", mode) for mode in MODES] + [("gpt2", "plain"), ("gpt2", "all")]


def ends_as_sam(technique: Technique, name: str, mode: str) -> bool:
    """Whether ``technique``, set to be SAM of radius 0.1, ends with SAM's weights and buffers to the bit."""
    nets = both(name, lambda: dropping(name))
    for one, net in zip((technique, SharpnessAwareMinimization(rho=0.1)), nets, strict=True):
        trainer(SeedOnce(), one, max_epochs=1, **MODES[mode][0]).fit(net, loader(name, shuffle=False))
    return same(*nets)


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name in ("classifier", "tiny_gpt") for mode in MODES]
    + [(name, "all") for name in MODELS if name not in ("classifier", "tiny_gpt")],
)
def test_equals_the_loop_by_hand(name: str, mode: str) -> None:
    settings, arguments = MODES[mode]
    net, reference = both(name, lambda: dropping(name))
    batches = loader(name, shuffle=False)
    trainer(SeedOnce(), SharpnessAwareMinimization(rho=0.1), max_epochs=1, **settings).fit(net, batches)
    start = flat(reference)
    by_hand(reference, list(batches), **arguments)
    assert same(net, reference)
    assert not torch.equal(flat(net), start)


@pytest.mark.parametrize("name", ["classifier", "gpt2"])
def test_adaptive_equals_the_loop_by_hand(name: str) -> None:
    net, reference = both(name)
    batches = loader(name, shuffle=False)
    trainer(SeedOnce(), SharpnessAwareMinimization(rho=0.5, adaptive=True), max_epochs=1).fit(net, batches)
    by_hand(reference, list(batches), rho=0.5, adaptive=True)
    torch.testing.assert_close(flat(net), flat(reference), rtol=1e-5, atol=1e-6)


def test_interval_perturbs_only_each_fifth_step_and_counts_what_it_costs() -> None:
    net, reference = both("classifier")
    batches = loader("classifier", samples=48, shuffle=False)
    sam = SharpnessAwareMinimization(rho=0.1, interval=5)
    costs: list[tuple[int, int, int]] = []

    class Costs(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            cost = sam.session.chain.cost
            costs.append((cost.forward_passes, cost.backward_passes, cost.forward_samples))

    t = trainer(SeedOnce(), sam, Costs(), max_epochs=1, accumulate_grad_batches=2)
    t.fit(net, batches)
    by_hand(reference, list(batches), interval=5, accumulate=2)
    assert same(net, reference)
    assert costs == [(n, n, 4 * n) for n in (1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 4)]
    assert "4 second passes" in sam.summary()


@pytest.fixture(scope="module")
def under_ddp(two_processes: dict[str, Any]) -> dict[str, Any]:
    """What two processes end with, by accumulation."""
    return two_processes["sharpness"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ddp_averages_the_gradients_of_both_ranks_own_perturbations(accumulate: int, under_ddp: dict[str, Any]) -> None:
    pl.seed_everything(3, verbose=False)
    net = TinyClassifier().train()
    optimizer = net.configure_optimizers()
    params = list(net.parameters())
    data = Samples("classifier", 32)
    ranks = [list(DataLoader(data, 4, sampler=DistributedSampler(data, 2, r, shuffle=False))) for r in range(2)]
    states = []
    for r in range(2):
        torch.manual_seed(100 + r)
        states.append(torch.get_rng_state())
    for i in range(0, 4, accumulate):
        summed: list[list[Tensor]] = []
        for r in (1, 0):  # rank 0 last: its buffers are those that DDP keeps
            buffers = {k: b.clone() for k, b in net.named_buffers()}
            torch.set_rng_state(states[r])
            own = [torch.zeros_like(p) for p in params]
            for batch in ranks[r][i : i + accumulate]:
                found, _ = sam_gradient(net, batch, rho=0.1, bf16=False)
                own = [a + g / accumulate for a, g in zip(own, found, strict=True)]
            states[r] = torch.get_rng_state()
            summed.append(own)
            if r == 1:
                for k, b in net.named_buffers():
                    b.copy_(buffers[k])
        for p, a, b in zip(params, *summed, strict=True):
            p.grad = (a + b) / 2
        torch.nn.utils.clip_grad_norm_(params, 0.05)
        optimizer.step()
        optimizer.zero_grad()
    saved = under_ddp[str(accumulate)]["ranks"]
    for key, value in net.state_dict().items():
        assert saved[0][key] == value.tolist(), key
        assert saved[1][key] == value.tolist() or "running" in key, key


def test_fp16_scaler_scales_the_first_pass_too() -> None:
    """At 1e-8 of its size the loss has no gradient in fp16 unless it is scaled up."""

    class Small(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return 1e-8 * super().training_step(batch, batch_idx)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(x.half() @ self.head[1].weight.half().T)
            return h.float() * 1e-3

    def plugin(scale: float) -> MixedPrecision:
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000))

    norms = {}
    for scale in (1.0, 2.0**24):
        pl.seed_everything(3, verbose=False)
        sam = SharpnessAwareMinimization(rho=0.1)
        trainer(sam, max_steps=1, plugins=[plugin(scale)]).fit(Small(), loader("classifier", shuffle=False))
        norms[scale] = float(sam.report()["gradient_norm"])
    pl.seed_everything(3, verbose=False)
    net = Small()
    true = torch.autograd.grad(
        1e8 * quiet_step(net, next(iter(loader("classifier", shuffle=False)))), net.head[1].weight
    )
    assert norms[1.0] == 0.0
    assert norms[2.0**24] == pytest.approx(1e-8 * float(true[0].norm()), rel=0.02)


# -- what plain training shows must stay


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["plain", "all"])
def test_a_vanishing_radius_is_plain_training(name: str, mode: str) -> None:
    """With e too small to change a weight, two passes must do what one does: same masks, same stream afterwards."""
    net, plain = both(name, lambda: dropping(name))
    streams = []
    for one, callbacks in ((net, [SharpnessAwareMinimization(rho=1e-30)]), (plain, [])):
        pl.seed_everything(5, verbose=False)
        trainer(*callbacks, max_epochs=2, **MODES[mode][0]).fit(one, loader(name))
        streams.append(torch.get_rng_state())
    assert same(net, plain)
    assert torch.equal(*streams)


def test_radius_zero_attaches_nothing() -> None:
    sam = SharpnessAwareMinimization(rho=0.0)
    assert sam.neutral and not SharpnessAwareMinimization().neutral
    net, plain = both("classifier")
    for one, callbacks in ((net, [sam]), (plain, [])):
        pl.seed_everything(5, verbose=False)
        trainer(*callbacks, max_epochs=2).fit(one, loader("classifier"))
    assert same(net, plain)
    assert sam.summary().endswith("no step was perturbed")


class Moving(TinyClassifier):
    """Its loss depends on what each training step moves: a buffer, as in spectral norm, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("moved", torch.zeros(()))
        self.register_buffer("made_anew", torch.zeros(()))
        self.steps = 0
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.moved += 1
        self.made_anew = self.made_anew + 1
        self.steps += 1
        loss = super().training_step(batch, batch_idx) * self.moved * self.made_anew * self.steps
        self.losses.append(float(loss.detach()))
        return loss


def test_both_passes_start_from_the_same_state_of_the_module() -> None:
    net, plain = both("", Moving)
    for one, callbacks in ((net, [SharpnessAwareMinimization(rho=1e-30)]), (plain, [])):
        pl.seed_everything(5, verbose=False)
        trainer(*callbacks, max_epochs=1).fit(one, loader("classifier"))
    assert same(net, plain)
    assert net.moved == net.made_anew == net.steps == len(net.losses) == 5
    assert net.losses == plain.losses


def test_batch_norm_sees_the_first_pass_only() -> None:
    net, plain = both("classifier")
    trainer(SharpnessAwareMinimization(rho=0.5), max_steps=1).fit(net, loader("classifier", shuffle=False))
    trainer(max_steps=1).fit(plain, loader("classifier", shuffle=False))
    assert torch.equal(net.norm.running_mean, plain.norm.running_mean)
    assert torch.equal(net.norm.running_var, plain.norm.running_var)
    assert net.norm.num_batches_tracked == 1
    assert not torch.equal(flat(net), flat(plain))


def test_metrics_count_once_and_the_logged_loss_is_that_of_the_unperturbed_weights() -> None:
    class Metered(TinyClassifier):
        def __init__(self) -> None:
            super().__init__()
            self.seen = SumMetric()

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            loss = super().training_step(batch, batch_idx)
            self.seen(len(batch[1]))
            self.log("seen", self.seen, on_step=False, on_epoch=True)
            self.log("train_loss", loss)
            return {"loss": loss, "extra": loss.detach()}

    net, reference = both("", Metered)
    batches, watch = loader("classifier", shuffle=False), Watch()
    sam = SharpnessAwareMinimization(rho=0.1)
    t = trainer(SeedOnce(), sam, watch, max_epochs=1, log_every_n_steps=1)
    t.fit(net, batches)
    assert watch.losses == by_hand(reference, list(batches))
    assert t.callback_metrics["seen"] == 20
    assert same(net, reference)
    assert t.logged_metrics["eff/sharpness_aware_minimization/gradient_norm"] > 0
    assert t.logged_metrics["eff/sharpness_aware_minimization/sharpness"] == sam.report()["sharpness"]


def test_sharpness_is_the_rise_of_the_loss() -> None:
    h, w = quadratic()
    sam = SharpnessAwareMinimization(rho=0.3)
    trainer(sam, max_steps=1).fit(Quadratic(h, w), DataLoader(torch.zeros(1, 1)))
    up = w + 0.3 * h @ w / (h @ w).norm()
    assert float(sam.report()["sharpness"]) == pytest.approx(float(0.5 * up @ h @ up - 0.5 * w @ h @ w))
    assert float(sam.report()["gradient_norm"]) == pytest.approx(float((h @ w).norm()))


def test_tied_weights_are_perturbed_once() -> None:
    """GPT-2's embedding is also its head: a perturbation applied twice would have twice the length."""
    net = module("gpt2")
    start = flat(net)
    moved: list[float] = []
    step = net.training_step

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        moved.append(float((flat(net) - start).norm()))
        return step(batch, batch_idx)

    net.training_step = training_step  # type: ignore[method-assign]
    trainer(SharpnessAwareMinimization(rho=0.25), max_steps=1).fit(net, loader("gpt2"))
    assert net.model.lm_head.weight is net.model.transformer.wte.weight
    assert moved[0] == 0.0 and moved[1] == pytest.approx(0.25, rel=1e-4)


def test_frozen_and_unused_parameters_and_those_of_no_optimizer_stay() -> None:
    seen: list[dict[str, Tensor]] = []

    class Partly(TinyClassifier):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.foreign = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(()))
            self.blocks[0].requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append({name: p.detach().clone() for name, p in self.named_parameters()})
            return super().training_step(batch, batch_idx) * self.foreign

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD([p for n, p in self.named_parameters() if n != "foreign"], lr=0.1)

    net = Partly()
    trainer(SharpnessAwareMinimization(rho=0.25), max_steps=1).fit(net, loader("classifier"))
    first, second = seen
    still = {name for name in first if torch.equal(first[name], second[name])}
    assert still == {"unused", "foreign", "blocks.0.0.weight", "blocks.0.0.bias"}


def test_forward_only_passes_of_others_are_not_perturbed() -> None:
    class Scoring(Nop):
        def attach(self, session: Session) -> None:
            session.chain.add(Stage.CHOOSE, self.link)

        def link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
            weights.append(flat(step.module))
            step.forward_only(batch, 4)
            return proceed(batch)

    weights: list[Tensor] = []
    net, watch, sam = module("classifier"), Watch(), SharpnessAwareMinimization(rho=1.0)
    start = flat(net)
    trainer(sam, Scoring(), watch, max_steps=3).fit(net, loader("classifier"))
    assert sam.state_dict()["passes"] == 3
    assert all(torch.equal(a, b) for a, b in zip(weights, [start, *watch.weights[:2]], strict=True))


# -- the weights come back


def test_weights_are_back_before_the_optimizer_steps_and_gradients_are_the_second_ones() -> None:
    net = module("tiny_gpt")
    before = flat(net)
    found: list[bool] = []

    class Look(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
            found.append(torch.equal(flat(pl_module), before))

    trainer(SharpnessAwareMinimization(rho=1.0), Look(), max_steps=1).fit(net, loader("tiny_gpt"))
    assert found == [True]


class FailingBackward(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        FailingBackward.calls += 1
        if FailingBackward.calls == 4:
            raise RuntimeError("backward broke")
        return grad


@pytest.mark.parametrize("where", ["backward", "second pass"])
def test_weights_come_back_exactly_after_an_exception(where: str) -> None:
    calls: list[int] = []

    class Failing(TinyGPT):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            calls.append(batch_idx)
            if where == "second pass" and len(calls) == 4:
                raise RuntimeError("forward broke")
            loss = super().training_step(batch, batch_idx)
            return FailingBackward.apply(loss) if where == "backward" else loss

    FailingBackward.calls = 0
    net, watch = Failing(dropout=0.0), Watch()
    sam = SharpnessAwareMinimization(rho=1.0)
    with pytest.raises(RuntimeError, match="broke"):
        trainer(sam, watch, max_epochs=1).fit(net, loader("tiny_gpt"))
    assert len(watch.weights) == 1
    assert torch.equal(flat(net), watch.weights[0])
    assert "training_step" not in net.__dict__ and "log" not in net.__dict__ and not sam._kept


def test_a_step_that_returns_none_is_skipped_in_either_pass() -> None:
    calls: list[int] = []

    class Skipping(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            calls.append(batch_idx)
            return None if len(calls) in (3, 5) else super().training_step(batch, batch_idx)

    net, watch = Skipping(momentum=0.0), Watch()
    Closure.warning_cache.clear()  # Lightning warns of this once in a process
    with pytest.warns(UserWarning, match="returned `None`"):
        trainer(SharpnessAwareMinimization(rho=1.0), watch, max_steps=4).fit(net, loader("classifier"))
    # call 3: the first pass of the second step; calls 4 and 5: both passes of the third
    assert torch.equal(watch.weights[0], watch.weights[1]) and torch.equal(watch.weights[1], watch.weights[2])
    assert not torch.equal(watch.weights[2], watch.weights[3])
    assert calls == [0, 0, 1, 2, 2, 3, 3]


def test_a_broken_loss_shows_as_in_plain_training() -> None:
    class Breaking(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            loss = loss * float("nan") if self.global_step == 2 else loss
            self.log("train_loss", loss)
            return loss

    net, watch = Breaking(), Watch()
    trainer(SharpnessAwareMinimization(rho=0.1), watch, max_steps=4, log_every_n_steps=1).fit(net, loader("classifier"))
    assert [loss == loss for loss in watch.losses] == [True, True, False, False]
    assert flat(net).isnan().all()


def test_lbfgs_sees_the_perturbed_gradient_at_each_of_its_evaluations() -> None:
    class Searching(Quadratic):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)

    h, w = quadratic()
    net = Searching(h, w)
    trainer(SharpnessAwareMinimization(rho=0.01), max_steps=2).fit(net, DataLoader(torch.zeros(2, 1)))
    v = nn.Parameter(w.clone())
    optimizer = torch.optim.LBFGS([v], lr=0.1, max_iter=4)

    def closure() -> Tensor:
        g = h @ v.detach()
        up = v.detach() + 0.01 * g / g.norm()
        v.grad = h @ up
        return 0.5 * up @ h @ up

    for _ in range(2):
        optimizer.step(closure)
    torch.testing.assert_close(net.w.detach(), v.detach(), rtol=1e-9, atol=1e-9)


# -- arguments and runs that cannot be


@pytest.mark.parametrize("rho", [-0.1, float("nan"), float("inf")])
def test_bad_rho(rho: float) -> None:
    with pytest.raises(ValueError, match=re.escape(f"rho={rho}") + r".*expected a finite number >= 0"):
        SharpnessAwareMinimization(rho=rho)


@pytest.mark.parametrize("interval", [0, -1, 1.5, True])
def test_bad_interval(interval: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"interval={interval}") + r".*integer >= 1"):
        SharpnessAwareMinimization(interval=interval)


def test_manual_optimization_is_refused() -> None:
    net = TinyClassifier()
    net.automatic_optimization = False
    with pytest.raises(ValueError, match=r"SharpnessAwareMinimization.*automatic_optimization=False"):
        trainer(SharpnessAwareMinimization(), max_steps=1).fit(net, loader("classifier"))


def test_a_second_fit_starts_afresh() -> None:
    sam = SharpnessAwareMinimization(rho=0.1)
    for _ in range(2):
        trainer(sam, max_steps=3).fit(module("classifier"), loader("classifier"))
        assert sam.state_dict()["passes"] == 3
