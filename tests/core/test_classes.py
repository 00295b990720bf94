"""Modules that ask what class a layer is of: replaced layers keep it, or the first step refuses them."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_eff as eff
from lightning_eff._core._architecture import run
from tests.models import trainer


class Asking(pl.LightningModule):
    """Layers with something beside their input, or a gate, where the layer is what the module looks for."""

    def __init__(self, asks: Callable[[nn.Module], bool], *, joined: bool = False, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.asks, self.joined = asks, joined
        beside = 4 if joined else 0
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [nn.Linear(8 + beside, 8), *([nn.LayerNorm(8)] if norm else []), nn.ReLU()]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(8, 1)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        for layer in self.layers:
            if self.asks(layer):
                x = torch.cat([x, c], -1) if self.joined else x * c[:, :1]
            x = layer(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, c, y = batch
        return nn.functional.mse_loss(self(x, c), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 1e-2)


def data() -> TensorDataset:
    g = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(12, n, generator=g) for n in (8, 4, 1)))


IDENTITIES: dict[str, Callable[[], list[Any]]] = {
    "LoRA": lambda: [eff.LoRA(2, names=["layers.*"])],
    "DoRA": lambda: [eff.LoRA(2, names=["layers.*"], dora=True)],
    "VeRA": lambda: [eff.VeRA(names=["layers.*"])],
    "HoulsbyAdapters": lambda: [eff.HoulsbyAdapters(2, names=["layers.*"])],
}


@pytest.mark.parametrize("name", IDENTITIES)
@pytest.mark.parametrize("joined", [False, True])
def test_a_layer_is_still_a_linear_layer_and_the_output_the_same(name: str, joined: bool) -> None:
    plain = Asking(lambda m: isinstance(m, nn.Linear), joined=joined)
    x, c, _ = data().tensors
    wanted = plain(x, c)
    net = eff.apply(copy.deepcopy(plain), *IDENTITIES[name]())
    torch.testing.assert_close(net(x, c), wanted, rtol=1e-5, atol=1e-6)
    layer: Any = net.layers[0]
    assert (layer.in_features, layer.out_features) == (12 if joined else 8, 8)
    assert layer.weight.shape == (8, layer.in_features)
    assert layer.bias.shape == (8,)
    trainer(*IDENTITIES[name](), max_steps=2).fit(plain, DataLoader(data(), 4))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_rounded_layer_is_still_a_linear_layer(bits: Any) -> None:
    plain = Asking(lambda m: isinstance(m, nn.Linear) and m.weight.dtype == torch.float32)
    x, c, _ = data().tensors
    net = eff.apply(copy.deepcopy(plain), eff.LoRA(2, names=["layers.*"]), eff.QuantizedBase(bits))
    torch.testing.assert_close(net(x, c), eff.dequantize(net)(x, c))
    assert float((net(x, c) - plain(x, c)).detach().norm() / plain(x, c).detach().norm()) < 0.1


@pytest.mark.parametrize(
    "technique", [eff.LowRankLinear(2, min_features=8), eff.ButterflyLinear(2, rank=1, min_features=8)]
)
def test_layers_whose_weight_changes_keep_their_class(technique: Any) -> None:
    plain = Asking(lambda m: isinstance(m, nn.Linear))
    net = eff.apply(copy.deepcopy(plain), technique)
    x, c, _ = data().tensors
    torch.testing.assert_close(net(x, c), eff.export(net)(x, c), rtol=1e-5, atol=1e-5)
    assert not torch.equal(net(x, c), plain(x, c))


def test_copies_and_pickles_compute_the_same() -> None:
    net = eff.apply(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), eff.LoRA(2))
    x = data().tensors[0]
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(other[0]) is type(net[0])
        assert isinstance(other[0], nn.Linear)
        torch.testing.assert_close(other(x), net(x), rtol=0, atol=0)


REFUSED: dict[str, tuple[Callable[[nn.Module], bool], Callable[[], Any], dict[str, Any], str]] = {
    "exact class": (
        lambda m: type(m) is nn.Linear,
        lambda: eff.LoRA(2, names=["layers.*"]),
        {},
        r"LoRA: Asking computes something else when layers.0 is a LoRALinear instead of a Linear",
    ),
    "exact class, another shape": (
        lambda m: type(m) is nn.Linear,
        lambda: eff.LoRA(2, names=["layers.*"]),
        {"joined": True},
        r"LoRA: Asking computes something else when layers.0 is",
    ),
    "its attributes": (
        lambda m: hasattr(m, "base_layer"),
        lambda: eff.VeRA(names=["layers.*"]),
        {},
        r"VeRA: Asking computes something else when layers.0 is",
    ),
    "a norm": (
        lambda m: isinstance(m, nn.LayerNorm),
        lambda: eff.RMSNormalization(),
        {"norm": True},
        r"RMSNormalization: Asking computes something else when layers.1 is a RMSNorm instead of a LayerNorm",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_module_that_branches_on_the_class_is_refused_in_the_first_step(case: str) -> None:
    asks, technique, settings, message = REFUSED[case]
    net = Asking(asks, **settings)
    with pytest.raises(ValueError, match=message):
        trainer(technique(), max_steps=2).fit(net, DataLoader(data(), 4))


class Late(Asking):
    """Its first step returns nothing, before it calls a layer; the step counts what it does and draws noise."""

    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        if batch_idx == 0:
            return None
        x, c, y = batch
        return super().training_step((x + torch.randn_like(x), c, y), batch_idx)


@pytest.mark.filterwarnings("ignore:.*returned .None")
def test_it_waits_for_a_loss_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="LoRA: Late computes something else"):
        trainer(eff.LoRA(2, names=["layers.*"]), max_steps=3).fit(
            Late(lambda m: type(m) is nn.Linear), DataLoader(data(), 4)
        )
    ends = []
    for looks in (True, False):
        if not looks:
            monkeypatch.setattr(run, "check_classes", lambda step, batch: None)
        net = Late(lambda m: isinstance(m, nn.Linear))
        pl.seed_everything(3, verbose=False)
        trainer(eff.LoRA(2, names=["layers.*"]), max_steps=3).fit(net, DataLoader(data(), 4))
        ends.append((net.steps, torch.cat([p.detach().flatten() for p in net.parameters()])))
    assert ends[0][0] == ends[1][0] == 3
    assert torch.equal(ends[0][1], ends[1][1])


def test_a_penalty_on_the_weights_of_linear_layers_is_no_branch() -> None:
    class Decayed(Asking):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            exact = [m.weight for m in self.modules() if type(m) is nn.Linear]
            return super().training_step(batch, batch_idx) + sum(w.square().sum() for w in exact)

    run = trainer(eff.LoRA(2, names=["layers.*"]), max_steps=2)
    run.fit(Decayed(lambda m: False), DataLoader(data(), 4))
    assert run.global_step == 2


class Manual(Asking):
    """It steps two optimizers by itself, one by a closure, and keeps a moving average of a weight."""

    def __init__(self, asks: Callable[[nn.Module], bool], **settings: Any) -> None:
        super().__init__(asks, **settings)
        self.automatic_optimization = False
        self.average = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.fails_without_steps = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, c, y = batch
        optimizers: Any = self.optimizers()
        scheduler: Any = self.lr_schedulers()
        first, second = optimizers
        before = self.head.bias.detach().clone()
        loss = nn.functional.mse_loss(self(x, c), y)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()

        def closure() -> Tensor:
            second.zero_grad()
            again = nn.functional.mse_loss(self(x, c), y)
            self.manual_backward(again)
            return again

        with second.toggle_model():
            second.step(closure)
        if self.fails_without_steps and torch.equal(before, self.head.bias):
            raise RuntimeError("no step")
        scheduler.step()
        with torch.no_grad():
            self.average.lerp_(self.head.weight[0], 0.5)

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD([p for p in self.layers.parameters() if p.requires_grad], 1e-2, momentum=0.9)
        return [first, torch.optim.Adam(self.head.parameters(), 1e-2)], [torch.optim.lr_scheduler.StepLR(first, 1)]


def only_layers() -> Any:
    return eff.LoRA(2, names=["layers.*"], also=["head"])


@pytest.mark.parametrize("compiled", [False, True])
def test_manual_steps_are_looked_at(compiled: bool) -> None:
    net = Manual(lambda m: type(m) is nn.Linear)
    if compiled:
        for layer in net.layers:
            layer.compile(backend="eager")
    with pytest.raises(ValueError, match=r"LoRA: Manual computes something else when layers\.0 is a LoRALinear"):
        trainer(only_layers(), max_steps=4).fit(net, DataLoader(data(), 4))


def test_the_look_at_a_manual_step_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, looks = [], run.check_classes
    for check in (looks, lambda step, batch: True):
        calls: list[Any] = []
        monkeypatch.setattr(
            run, "check_classes", lambda *args, check=check, calls=calls: calls.append(0) or check(*args)
        )
        net, fit = Manual(lambda m: isinstance(m, nn.Linear)), trainer(only_layers(), max_steps=4)
        pl.seed_everything(3, verbose=False)
        fit.fit(net, DataLoader(data(), 4))
        assert len(calls) == 1  # a step that returns nothing is looked at once
        state = [t for o in fit.optimizers for s in o.state.values() for t in s.values()]
        rates = [group["lr"] for o in fit.optimizers for group in o.param_groups]
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        ends.append(
            (fit.global_step, rates, torch.cat([t.detach().flatten() for t in (*net.parameters(), *state, *grads)]))
        )
    assert ends[0][:2] == ends[1][:2]
    assert torch.equal(ends[0][2], ends[1][2])


def test_a_manual_step_that_fails_without_updates_is_told_of() -> None:
    net = Manual(lambda m: isinstance(m, nn.Linear))
    net.fails_without_steps = True
    with pytest.warns(UserWarning, match="could not check whether Manual tests the class of a replaced layer"):
        trainer(only_layers(), max_steps=4).fit(net, DataLoader(data(), 4))


def test_an_optimizer_of_a_manual_module_with_nothing_left_is_refused_at_setup() -> None:
    net = Manual(lambda m: False)
    with pytest.raises(
        ValueError, match=r"LoRA: it freezes all parameters of optimizer 1 \(Adam: head\).* also=\['head'\]"
    ):
        trainer(eff.LoRA(2, names=["layers.*"]), max_steps=4).fit(net, DataLoader(data(), 4))
