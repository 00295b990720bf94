"""Optimizer states on the host: the plain optimizer's steps, whatever else touches weights, and what moves."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from lightning_eff.memory._hosting.update import HostUpdate, check_optimizer
from lightning_eff.memory.optimizer_offload import OptimizerOffload
from lightning_eff.model.growth.progressive_stacking import ProgressiveStacking
from tests.cases import Case
from tests.models import TinyClassifier, TinyGPT, flat, loader, module, on_gpu, trainer
from tests.runs import MODES, NUM_STEPS, checkpoints, differences, final_state, fit


def with_lbfgs() -> pl.LightningModule:
    module = TinyClassifier()
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())  # type: ignore[method-assign]
    return module


CASES = {
    "OptimizerOffload": Case(
        active=lambda: OptimizerOffload(),
        neutral=lambda: OptimizerOffload(),
        exact=True,
        figure="bytes_to_host",
        neutral_by_machine=True,
        lost=(with_lbfgs, "classifier", "LBFGS evaluates"),
    )
}

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

Build = Callable[[], pl.LightningModule]


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """What differs of two final states: bit for bit on a CPU; a GPU's arithmetic is not the host's, where ours steps."""
    names = differences(a, b)
    if not on_gpu():
        return names
    shapes = {name for name in names if name not in a or name not in b or a[name].shape != b[name].shape}
    return [name for name in names if name in shapes or not close(seen(name, a[name]), seen(name, b[name]))]


def seen(name: str, value: Tensor) -> Tensor:
    """Without the keys' bias: softmax does not see it, so its gradient is rounding alone, of which Adam makes whole steps."""
    if name.endswith("qkv.bias"):
        value = torch.cat([*value.chunk(3)][::2])
    return value.double()


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= 1e-3 * b.norm() + 1e-7 * b.numel() ** 0.5)


def both(build: Build, callbacks: Callable[[], Sequence[pl.Callback]] = list, data: str = "classifier", **kwargs: Any):
    """What differs at the end of a run with the technique from the same run without; and the technique."""
    found = []
    technique = OptimizerOffload()
    for extra in ([], [technique]):
        pl.seed_everything(1, verbose=False)
        net = build()
        settings = {"max_steps": 8, **kwargs}
        t = trainer(*callbacks(), *extra, **settings)
        t.fit(net, loader(data), loader(data, 8, shuffle=False) if settings.get("limit_val_batches") else None)
        found.append(final_state(net, t))
    return differing(*found), technique


# -- the plain optimizer's steps, bit for bit


@pytest.mark.parametrize("mode", sorted(MODES))
def test_trains_as_plain(mode: str) -> None:
    whole = final_state(*fit("tiny_gpt", list, **MODES[mode]))
    assert differing(whole, final_state(*fit("tiny_gpt", lambda: [OptimizerOffload()], **MODES[mode]))) == []


def test_trains_gpt2_as_plain() -> None:
    whole = final_state(*fit("gpt2", list))
    assert differing(whole, final_state(*fit("gpt2", lambda: [OptimizerOffload()]))) == []


def _configured(make: Callable[[pl.LightningModule], Any]) -> Build:
    class Net(TinyClassifier):
        def configure_optimizers(self) -> Any:
            return make(self)

    return Net


def _groups(net: nn.Module) -> list[dict[str, Any]]:
    named = list(net.named_parameters())
    return [
        {"params": [p for name, p in named if "weight" in name], "weight_decay": 0.1},
        {"params": [p for name, p in named if "weight" not in name], "lr": 0.003},
    ]


def _matrices(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.ndim == 2]


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda net: SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD without state": lambda net: SGD(net.parameters(), lr=0.05),
    "fused SGD": lambda net: SGD(net.parameters(), lr=0.05, momentum=0.9, fused=True),
    "AdamW of two groups": lambda net: AdamW(_groups(net), lr=0.01, amsgrad=True),
    "fused AdamW": lambda net: AdamW(net.parameters(), lr=0.01, fused=True),
    "foreach Adam": lambda net: Adam(net.parameters(), lr=0.01, foreach=True),
    "AdamW with a tensor as lr": lambda net: AdamW(net.parameters(), lr=torch.tensor(0.01)),
    "Adagrad, which makes its state at once": lambda net: torch.optim.Adagrad(
        net.parameters(), lr=0.05, initial_accumulator_value=0.1
    ),
    "Adafactor": lambda net: torch.optim.Adafactor(net.parameters(), lr=0.05),
    "Adadelta": lambda net: torch.optim.Adadelta(net.parameters()),
    "Adamax": lambda net: torch.optim.Adamax(net.parameters()),
    "ASGD": lambda net: torch.optim.ASGD(net.parameters(), t0=2),
    "Muon": lambda net: torch.optim.Muon(_matrices(net), lr=0.01),
    "NAdam": lambda net: torch.optim.NAdam(net.parameters()),
    "RAdam": lambda net: torch.optim.RAdam(net.parameters()),
    "RMSprop": lambda net: torch.optim.RMSprop(net.parameters(), momentum=0.5, centered=True),
    "Rprop": lambda net: torch.optim.Rprop(net.parameters()),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_supported_optimizer(name: str) -> None:
    found, technique = both(_configured(OPTIMIZERS[name]))
    assert found == []
    assert technique.report()["bytes_to_device"] > 0


class _Sparse(TinyClassifier):
    def __init__(self) -> None:
        super().__init__(batch_norm=False)
        self.table = nn.Embedding(20, 8, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x) + self.table((x[:, 0] * 3).long().clamp(0, 19)))

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SparseAdam(list(self.table.parameters()), lr=0.1)


def test_sparse_gradients() -> None:
    assert both(_Sparse)[0] == []


SCHEDULES: dict[str, Callable[[nn.Module], Any]] = {
    "list": lambda net: ([o := AdamW(net.parameters(), lr=0.01)], [LambdaLR(o, lambda step: 0.9**step)]),
    "each step": lambda net: {
        "optimizer": (o := AdamW(net.parameters(), lr=0.01)),
        "lr_scheduler": {"scheduler": OneCycleLR(o, max_lr=0.1, total_steps=20), "interval": "step"},
    },
    "on plateau": lambda net: {
        "optimizer": (o := SGD(net.parameters(), lr=0.1, momentum=0.9)),
        "lr_scheduler": {"scheduler": ReduceLROnPlateau(o, patience=0), "monitor": "val_loss"},
    },
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_act_as_before(name: str) -> None:
    """And no warning says that the scheduler came before the step, or that the step was overridden: they are errors."""
    assert both(_configured(SCHEDULES[name]), max_steps=15, limit_val_batches=1)[0] == []


class _Adversaries(TinyClassifier):
    """Two optimizers, stepped by hand, that share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        optimizer = optimizers[batch_idx % 2]
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [SGD(self.parameters(), lr=0.1, momentum=0.5), AdamW(self.head.parameters(), lr=0.01)]


def test_two_optimizers_by_hand_that_share_parameters() -> None:
    assert both(_Adversaries)[0] == []


def test_frozen_and_unused_parameters() -> None:
    class Net(TinyClassifier):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.ones(5))
            self.blocks[0].requires_grad_(False)

        def configure_optimizers(self) -> Optimizer:
            return AdamW(self.parameters(), lr=0.01, weight_decay=0.1)

    found, technique = both(Net)
    assert found == []
    trained = sum(p.numel() for name, p in Net().named_parameters() if p.requires_grad and name != "unused")
    assert technique.report()["bytes_to_device"] == 4 * trained


def test_a_gradient_scaler() -> None:
    def plugin() -> MixedPrecision:
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2))

    found = []
    for callbacks in ([], [OptimizerOffload()]):
        pl.seed_everything(1, verbose=False)
        net = module("classifier")
        t = trainer(*callbacks, max_steps=12, plugins=[plugin()], gradient_clip_val=0.5)
        t.fit(net, loader("classifier"))
        found.append(final_state(net, t))
    assert differing(*found) == []


# -- what else touches weights, gradients or states


class _Touch(pl.Callback):
    def __init__(self, touch: Callable[[Tensor], Any]) -> None:
        self.touch = touch

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step % 3 == 1:
            with torch.no_grad():
                for p in pl_module.parameters():
                    self.touch(p)


def _replace(p: Tensor) -> None:
    p.data = p.data * 0.5


@pytest.mark.parametrize(
    "touch",
    [lambda p: p.clamp_(-0.2, 0.2), lambda p: p.data.clamp_(-0.2, 0.2), _replace, lambda p: p.data.mul_(0.999)],
    ids=["in place", "past autograd", "replaced", "a little"],
)
def test_weights_that_others_change_stay_changed(touch: Callable[[Tensor], Any]) -> None:
    found, _ = both(TinyClassifier, lambda: [_Touch(touch)])
    assert found == []


def test_the_optimizers_own_hooks_see_the_modules_parameters() -> None:
    class Net(TinyClassifier):
        def configure_optimizers(self) -> Optimizer:
            optimizer = AdamW(self.parameters(), lr=0.05)
            mine = set(self.parameters())

            def note(o: Optimizer, args: Any, kwargs: Any) -> None:
                assert args[0] is o and {p for group in o.param_groups for p in group["params"]} == mine

            def clamp(o: Optimizer, args: Any, kwargs: Any) -> None:
                note(o, args, kwargs)
                with torch.no_grad():
                    for p in mine:
                        p.clamp_(-0.3, 0.3)

            optimizer.register_step_pre_hook(note)
            optimizer.register_step_post_hook(clamp)
            return optimizer

    assert both(Net)[0] == []


def test_states_that_others_copy() -> None:
    """Growth copies optimizer states between blocks."""

    def growth() -> ProgressiveStacking:
        return ProgressiveStacking(stages=[(0.0, 1), (0.25, 2), (0.6, 4)])

    whole = final_state(*fit("tiny_gpt", lambda: [growth()]))
    assert differing(whole, final_state(*fit("tiny_gpt", lambda: [growth(), OptimizerOffload()]))) == []


# -- checkpoints


def test_resumes_with_and_without(tmp_path: Path) -> None:
    def build() -> list[Any]:
        return [OptimizerOffload()]

    whole = final_state(*fit("tiny_gpt", build, directory=tmp_path / "with"))
    fit("tiny_gpt", lambda: [_Nothing()], directory=tmp_path / "without")
    for name in ("with", "without"):
        path = checkpoints(tmp_path / name)[4]
        for techniques in (build, lambda: [_Nothing()]):
            assert differing(whole, final_state(*fit("tiny_gpt", techniques, resume=path))) == [], name
        checkpoint = torch.load(path, weights_only=True)
        module("tiny_gpt").load_state_dict(checkpoint["state_dict"], strict=True)
    ours, plain = (
        torch.load(checkpoints(tmp_path / name)[4], weights_only=True)["optimizer_states"][0]
        for name in ("with", "without")
    )
    assert ours["param_groups"] == plain["param_groups"]
    assert {i: {k: v.dtype for k, v in state.items()} for i, state in ours["state"].items()} == {
        i: {k: v.dtype for k, v in state.items()} for i, state in plain["state"].items()
    }
    assert len(checkpoints(tmp_path / "with")) == NUM_STEPS


class _Nothing(OptimizerOffload):
    """Resumes exactly, as techniques do, and leaves the optimizer alone."""

    def on_optimizers(self, session: Any) -> None:
        pass


# -- bytes


def test_gradients_go_over_and_parameters_come_back() -> None:
    rows: list[dict[str, Any]] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            rows.append(dict(technique.report()))

    technique = OptimizerOffload()
    net, _ = fit("tiny_gpt", lambda: [technique], callbacks=[Watch()], max_steps=4)
    size = sum(p.numel() * 4 for p in net.parameters())
    assert [row["bytes_to_host"] for row in rows] == [2 * size, size, size, size], "the parameters once, then gradients"
    assert [row["bytes_to_device"] for row in rows] == [size] * 4
    count = len(list(net.parameters()))
    assert all(row["state_bytes"] == 2 * size + 4 * count for row in rows), "two moments, and each one's step"
    assert all(row["seconds"] > 0 for row in rows)


def test_states_lie_on_the_host_apart_from_the_parameters() -> None:
    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, net: Any, *args: Any) -> None:
            (optimizer,) = trainer.optimizers
            (update,) = technique._updates
            assert set(optimizer.state) == set(net.parameters())
            for twin in update._twins.values():
                assert twin.host.device.type == "cpu"
                assert torch.equal(twin.host, twin.parameter.cpu())
                assert twin.host.data_ptr() != twin.parameter.data_ptr()

    technique = OptimizerOffload()
    fit("tiny_gpt", lambda: [technique], callbacks=[Watch()], max_steps=2)


def test_parameters_from_an_accelerator_get_the_fused_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within rounding of the plain step; the groups keep what the user said of it."""
    used: list[Any] = []
    fused = torch._fused_adamw_
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *args, **kwargs: (used.append(args), fused(*args, **kwargs))[1])
    results = []
    for accelerated in (False, True):
        monkeypatch.setattr(HostUpdate, "on_accelerator", accelerated)
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
        optimizer = AdamW(layer.parameters(), lr=0.1)
        update = HostUpdate(optimizer, pin_memory=False)
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.ones(4, 8)).square().sum().backward()
            update.step()
        assert [group["fused"] for group in optimizer.param_groups] == [None]
        assert len(used) == (3 if accelerated else 0)
        results.append(flat(layer))
    torch.testing.assert_close(*results)


# -- errors


class _Mine(AdamW):
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda net: torch.optim.LBFGS(net.parameters()), "LBFGS evaluates its closure on the device"),
        (lambda net: _Mine(net.parameters()), "_Mine is not supported. Use one of torch.optim's own"),
        (
            lambda net: AdamW(net.parameters(), capturable=True),
            "AdamW has capturable=True, but .* Remove capturable=True",
        ),
        (
            lambda net: SGD(net.parameters(), differentiable=True),
            "SGD has differentiable=True, .* Remove differentiable=True",
        ),
    ],
    ids=["LBFGS", "own", "capturable", "differentiable"],
)
def test_other_optimizers_are_refused_at_setup(make: Callable[[nn.Module], Optimizer], message: str) -> None:
    net = _configured(make)()
    before = flat(net)
    with pytest.raises(ValueError, match=f"OptimizerOffload: {message}"):
        trainer(OptimizerOffload(), max_steps=3).fit(net, loader("classifier"))
    assert torch.equal(flat(net), before)


def test_an_optimizer_that_unscales_itself_is_refused() -> None:
    optimizer = AdamW([nn.Parameter(torch.zeros(3))], fused=True)
    check_optimizer(optimizer, scaled=False)
    with pytest.raises(ValueError, match=r"fused=True under a gradient scaler.*Remove fused=True"):
        check_optimizer(optimizer, scaled=True)


def test_a_tensor_on_the_device_as_a_setting_is_refused() -> None:
    optimizer = AdamW([nn.Parameter(torch.zeros(3))], lr=0.1)
    optimizer.param_groups[0]["lr"] = torch.zeros((), device="meta")
    with pytest.raises(ValueError, match="a tensor on meta as lr"):
        check_optimizer(optimizer, scaled=False)


def test_parameters_of_other_classes_are_refused() -> None:
    class Quantised(nn.Parameter):
        pass

    with pytest.raises(ValueError, match="holds a Quantised on cpu, but only plain parameters are supported"):
        check_optimizer(SGD([Quantised(torch.zeros(3))], lr=0.1), scaled=False)


def test_an_exception_in_the_step_leaves_the_optimizer_whole() -> None:
    layer = nn.Linear(3, 3)
    optimizer = SGD(layer.parameters(), lr=0.1, momentum=0.9)
    update = HostUpdate(optimizer, pin_memory=False)

    def step() -> None:
        raise KeyError("planted")

    layer(torch.ones(1, 3)).sum().backward()
    update.step()
    state, update._step = dict(optimizer.state), step
    with pytest.raises(KeyError, match="planted"):
        update.step()
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in layer.parameters()]
    assert set(optimizer.state) == set(state) == set(layer.parameters())


@pytest.mark.skipif(on_gpu(), reason="of a CPU")
def test_says_once_that_nothing_is_gained_on_a_cpu() -> None:
    with pytest.warns(PossibleUserWarning) as caught:
        fit("tiny_gpt", lambda: [OptimizerOffload()], max_steps=3)
    assert sum("nothing is gained on a CPU" in str(w.message) for w in caught) == 1


# -- no trace


@pytest.mark.parametrize("fails", [False, True])
def test_leaves_no_trace(fails: bool) -> None:
    made: list[tuple[Optimizer, Any]] = []

    class Net(TinyGPT):
        def configure_optimizers(self) -> Any:
            optimizer = AdamW(self.parameters(), lr=0.01)
            schedule = LambdaLR(optimizer, lambda step: 1.0)
            made.append((optimizer, optimizer.__dict__.get("step")))
            return [optimizer], [schedule]

        def on_train_batch_end(self, *args: Any) -> None:
            if fails and self.trainer.global_step == 2:
                raise KeyError("planted")

    net = Net()
    t = trainer(OptimizerOffload(), max_steps=4)
    if fails:
        with pytest.raises(KeyError, match="planted"):
            t.fit(net, loader("tiny_gpt"))
    else:
        t.fit(net, loader("tiny_gpt"))
    ((optimizer, step),) = made
    assert optimizer.__dict__["step"] is step
    assert "load_state_dict" not in optimizer.__dict__
    assert "load_optimizer_state_dict" not in t.strategy.__dict__
    assert set(optimizer.state) == set(net.parameters())


@cuda
def test_cuda_states_are_on_the_host() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024).cuda() for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = [AdamW(layer.parameters(), lr=1e-3) for layer in layers]
    update = HostUpdate(optimizers[1], pin_memory=True)
    check_optimizer(optimizers[1], scaled=False)
    x = torch.randn(64, 1024, device="cuda")
    held: list[int] = []
    for layer, step in zip(layers, (optimizers[0].step, update.step), strict=True):
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            layer.zero_grad()
            layer(x).square().mean().backward()
            step()
        layer.zero_grad()
        held.append(torch.cuda.memory_allocated() - before)
    size = sum(p.numel() * 4 for p in layers[0].parameters())
    assert held[0] >= 2 * size and held[1] < 0.1 * size
    assert update.state_bytes >= 2 * size
    assert all(v.device.type == "cpu" for state in optimizers[1].state.values() for v in state.values())
    torch.testing.assert_close(flat(layers[0]), flat(layers[1]))
    saved = optimizers[1].state_dict()
    update.load_state_dict(saved)
    assert all(v.device.type == "cpu" for state in optimizers[1].state.values() for v in state.values())
