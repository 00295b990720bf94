"""Weights and states in bfloat16 whose updates are right on average, whichever of torch's optimizers makes them."""

import math
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff._core.optimizers import PER_PARAMETER
from lightning_eff.precision import stochastic_rounding_bf16 as _module
from lightning_eff.precision.stochastic_rounding_bf16 import StochasticRoundingBF16, _update
from tests.kernels.test_stochastic_rounding import neighbours
from tests.models import flat, loader, module, trainer
from tests.plugins import PluginCase
from tests.runs import NUM_STEPS, fit

PLUGINS = {
    "StochasticRoundingBF16": PluginCase(
        build=lambda precision: StochasticRoundingBF16(),
        precisions=("bf16-true",),
        restores_dtypes=True,
    )
}

SUPPORTED = [name for name in PER_PARAMETER if name != "SparseAdam" and hasattr(torch.optim, name)]
SETTINGS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}}


def build(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)(parameters, lr=0.01, **SETTINGS.get(name, {}))


def weights(dtype: torch.dtype) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=g).bfloat16().to(dtype)) for shape in ((16, 24), (24, 8))]


def gradients(step: int, dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=g).bfloat16().to(dtype) for shape in ((16, 24), (24, 8))]


@pytest.mark.parametrize("name", SUPPORTED)
def test_each_new_weight_is_a_neighbour_of_the_float32_step(name: str) -> None:
    """Two steps; the second from the same bfloat16 weights and states in both, so that one rounding lies between."""
    ours, plain = weights(torch.bfloat16), weights(torch.float32)
    optimizer, reference = build(name, ours), build(name, plain)
    for step in range(2):
        for p, q, g in zip(ours, plain, gradients(step, torch.bfloat16), strict=True):
            p.grad, q.grad = g, g.float()
            q.data.copy_(p)
            for key, value in optimizer.state.get(p, {}).items():
                reference.state[q][key] = value.float().clone() if isinstance(value, Tensor) else value
        with torch.no_grad():
            _update(optimizer, step, {})
        reference.step()
        for p, q in zip(ours, plain, strict=True):
            assert p.dtype == torch.bfloat16
            for found, value in ((p, q), *((v, reference.state[q][k]) for k, v in optimizer.state.get(p, {}).items())):
                if isinstance(found, Tensor) and found.shape == p.shape:
                    assert found.dtype == torch.bfloat16
                    nearer, away = neighbours(value.detach().float())
                    good = (found.float() == nearer) | (found.float() == away)
                    assert float((~good).double().mean()) < 0.01  # float32's last bits may differ


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
def test_updates_are_right_on_average(name: str) -> None:
    """Steps of a hundredth of a unit in the last place: to nearest none would be made."""
    num, steps = 4096, 40
    p = nn.Parameter(torch.ones(num, dtype=torch.bfloat16))
    q = nn.Parameter(torch.ones(num))
    settings = {"lr": 1e-4 if name != "RMSprop" else 2e-5, "weight_decay": 0.0}
    optimizer, reference = (getattr(torch.optim, name)([t], **settings) for t in (p, q))
    for step in range(steps):
        p.grad, q.grad = torch.ones(num, dtype=torch.bfloat16), torch.ones(num)
        with torch.no_grad():
            _update(optimizer, 1000 + step, {})
        reference.step()
    moved, expected = 1 - p.detach().double(), float((1 - q.detach().double()).mean())
    error = float(moved.std()) / math.sqrt(num)
    assert 0.001 < expected < 0.01 and abs(float(moved.mean()) - expected) < 4 * error + 0.01 * expected
    assert set(p.detach().unique().tolist()) <= {1 - k * 2**-8 for k in range(9)}


def test_states_are_right_on_average_and_parameters_are_rounded_apart() -> None:
    """Adagrad's sums, which grow by a fortieth of a unit in the last place, of two parameters that are alike."""
    num, steps = 2048, 40
    pair = [nn.Parameter(torch.ones(num, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = torch.optim.Adagrad(pair, lr=1e-3, initial_accumulator_value=1.0)
    for step in range(steps):
        for p in pair:
            p.grad = torch.full((num,), 2**-6.5, dtype=torch.bfloat16)
        with torch.no_grad():
            _update(optimizer, 7 + step, {})
    sums = [optimizer.state[p]["sum"].double() for p in pair]
    expected = 1 + steps * float(torch.tensor(2**-6.5).bfloat16()) ** 2
    for found in sums:
        assert abs(float(found.mean()) - expected) < 4 * float(found.std()) / math.sqrt(num)
    assert abs(float(torch.corrcoef(torch.stack(sums))[0, 1])) < 0.1


def test_parts_of_the_weights_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for chunk in (2**24, 1):
        monkeypatch.setattr(_module, "CHUNK", chunk)
        ours = weights(torch.bfloat16)
        optimizer = build("Adagrad", ours)
        for p, g in zip(ours, gradients(0, torch.bfloat16), strict=True):
            p.grad = g
        with torch.no_grad():
            _update(optimizer, 5, {})
        found.append(ours)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not torch.equal(found[0][0], weights(torch.bfloat16)[0])


class Regression(pl.LightningModule):
    """A linear map fitted to another one with a rate that bfloat16, rounded to nearest, cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.map = nn.Linear(16, 16, bias=False)
        nn.init.ones_(self.map.weight)  # from which a step of 2e-4 is a tenth of one in the last place
        self.target = torch.randn(16, 16)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        y = batch @ self.target.to(batch)
        return (self.map(batch) - y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=2e-4, weight_decay=0.0)


def distance(**kwargs: Any) -> float:
    net = Regression()
    torch.manual_seed(4)
    data = DataLoader(torch.randn(64, 8, 16).flatten(0, 1), batch_size=32)  # pyright: ignore[reportArgumentType]
    trainer(max_steps=600, **kwargs).fit(net, data)
    return float((net.map.weight.detach().float() - net.target.float()).square().mean())


def test_trains_as_float32_where_rounding_to_nearest_gets_stuck() -> None:
    exact, ours = distance(), distance(plugins=[StochasticRoundingBF16()])
    nearest = distance(precision="bf16-true")
    begun = float((1 - Regression().target).square().mean())
    assert abs(ours - exact) < 0.05 * (begun - exact), (begun, exact, ours, nearest)
    assert nearest == begun


@pytest.mark.parametrize("model", ["gpt2", "llama", "bert", "vit"])
def test_trains_hugging_face_models_in_bfloat16_alone(model: str) -> None:
    net, t = fit(model, list, plugins=[StochasticRoundingBF16()])
    assert t.global_step == NUM_STEPS and t.precision == "bf16-true" and flat(net).isfinite().all()
    assert {p.dtype for p in net.parameters()} == {torch.float32}  # again
    assert torch.equal(flat(net).bfloat16().float(), flat(net))
    for state in t.optimizers[0].state.values():
        assert {v.dtype for v in state.values() if v.ndim} == {torch.bfloat16}
    nearest, _ = fit(model, list, precision="bf16-true")
    assert not torch.equal(flat(nearest), flat(net))


def test_schedulers_hooks_and_several_optimizers_see_plain_steps() -> None:
    seen: list[tuple[int, bool]] = []

    class Two(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.other = nn.Linear(16, 16)

        def configure_optimizers(self) -> Any:
            first = torch.optim.SGD(self.map.parameters(), lr=0.1, momentum=0.9)
            second = torch.optim.AdamW(self.other.parameters(), lr=0.1)
            own = list(self.map.parameters())
            first.register_step_post_hook(
                lambda o, *args: seen.append((len(args), o.param_groups[0]["params"][0] is own[0]))
            )
            return [first, second], [torch.optim.lr_scheduler.StepLR(o, 1) for o in (first, second)]

        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            for o in self.optimizers():  # type: ignore[union-attr]
                o.zero_grad()
            self.manual_backward((self.map(batch) + self.other(batch)).square().mean())
            for o in self.optimizers():  # type: ignore[union-attr]
                o.step()
            for s in self.lr_schedulers():  # type: ignore[union-attr]
                s.step()

    net = Two()
    before = [p.detach().bfloat16().clone() for p in net.parameters()]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        t = trainer(max_steps=6, plugins=[StochasticRoundingBF16()])
        t.fit(net, DataLoader(torch.randn(12, 16), batch_size=4))  # pyright: ignore[reportArgumentType]
    assert seen == [(2, True)] * 3
    assert all(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS is not known to treat each parameter separately"),
        (lambda p: torch.optim.SparseAdam(p), "SparseAdam is not known"),
        (lambda p: torch.optim.AdamW(p, fused=True), "AdamW has fused=True, but .* Remove fused=True"),
        (lambda p: torch.optim.Adam(p, capturable=True), "Adam has capturable=True"),
        (lambda p: type("Mine", (torch.optim.SGD,), {})(p, lr=0.1), "Mine is not known"),
    ],
)
def test_other_optimizers_are_refused_at_setup(make: Any, message: str) -> None:
    net = module("classifier")
    net.configure_optimizers = lambda: make(net.parameters())  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=f"StochasticRoundingBF16: the optimizer {message}"):
        trainer(max_steps=1, plugins=[StochasticRoundingBF16()]).fit(net, loader("classifier"))
