"""Optimizers of every make: whether they keep state, copying it, and the forms of ``configure_optimizers``."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

from lightning_eff._core.optimizers import copy_state, keeps_state, rewrite_configured
from tests.models import TinyClassifier, loader, trainer

Make = Callable[[Sequence[Any]], Optimizer]

STATEFUL: dict[str, Make] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "adamw amsgrad": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "adamw tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1), foreach=False),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
    "rmsprop centered": lambda params: torch.optim.RMSprop(params, lr=0.1, centered=True, momentum=0.5),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "muon": lambda params: torch.optim.Muon(params, lr=0.1),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.1),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.1),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=1.0),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.1),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
}
ALL = {**STATEFUL, "sgd": lambda params: torch.optim.SGD(params, lr=0.1)}
every = pytest.mark.parametrize("name", sorted(ALL))


def parameters(count: int = 2) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(4, 3)) for _ in range(count)]


def train(optimizer: Optimizer, params: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> None:
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.clone()
    optimizer.step()


def contents(optimizer: Optimizer) -> Any:
    """The optimizer's state and settings, and everything on the instance but what torch keeps for itself."""
    return copy.deepcopy(optimizer.state_dict()), {
        key: (id(value), copy.copy(value) if isinstance(value, list | dict) else None)
        for key, value in optimizer.__dict__.items()
    }


def assert_untouched(optimizer: Optimizer, before: Any) -> None:
    state, attributes = contents(optimizer)
    torch.testing.assert_close(state, before[0], rtol=0, atol=0)
    assert attributes == before[1]


# -- keeps_state


@every
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("scheduled", [False, True])
def test_keeps_state(name: str, stepped: bool, scheduled: bool) -> None:
    params = parameters()
    optimizer = ALL[name](params)
    if scheduled:
        scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    if stepped:
        train(optimizer, params, [torch.randn(4, 3) for _ in params])
        if scheduled:
            scheduler.step()
    calls.clear()
    before, values = contents(optimizer), [p.detach().clone() for p in params]
    grads = [None if p.grad is None else p.grad.clone() for p in params]
    assert keeps_state(optimizer, params[1]) is (name in STATEFUL)
    assert_untouched(optimizer, before)
    assert calls == []
    assert all(torch.equal(p, value) for p, value in zip(params, values, strict=True))
    assert [p.grad is None for p in params] == [grad is None for grad in grads]


def test_looks_at_the_parameters_own_group() -> None:
    a, b, c = parameters(3)
    optimizer = torch.optim.SGD([{"params": [a], "momentum": 0.9}, {"params": [b]}], lr=0.1)
    assert keeps_state(optimizer, a) is True
    assert keeps_state(optimizer, b) is False
    assert keeps_state(optimizer, c) is False


@pytest.mark.parametrize("shape", [(), (5,), (3, 2), (2, 2, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.zeros(shape, dtype=dtype))
    assert keeps_state(torch.optim.AdamW([p]), p) is True
    assert keeps_state(torch.optim.SGD([p], lr=0.1), p) is False


def test_state_that_is_made_with_the_optimizer() -> None:
    class Early(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            for p in self.param_groups[0]["params"]:
                self.state[p]["sum"] = torch.zeros_like(p)

        def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            for p in self.param_groups[0]["params"]:
                self.state[p]["sum"] += p.grad

    params = parameters()
    assert keeps_state(Early(params), params[0]) is True


def test_an_empty_place_is_no_state() -> None:
    class Empty(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            for p in self.param_groups[0]["params"]:
                self.state[p]["momentum_buffer"] = None

    params = parameters()
    optimizer = Empty(params, lr=0.1)
    assert keeps_state(optimizer, params[0]) is False
    optimizer.step()
    assert keeps_state(optimizer, params[0]) is False


def test_what_cannot_be_found_out() -> None:
    params = parameters()
    assert keeps_state(torch.optim.LBFGS(params), params[0]) is None  # needs a closure
    assert keeps_state(torch.optim.SparseAdam(params), params[0]) is None  # needs sparse gradients
    whole = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    assert keeps_state(torch.optim.SGD([whole], lr=0.1), whole) is None

    class Wraps(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.inner = torch.optim.AdamW(self.param_groups)

    assert keeps_state(Wraps(params), params[0]) is None


# -- copy_state


@every
@pytest.mark.parametrize("layout", ["one group", "two groups", "scheduled"])
def test_a_copied_state_takes_the_same_steps(name: str, layout: str) -> None:
    torch.manual_seed(3)
    a, b = parameters()
    groups: Any = [{"params": [a]}, {"params": [b]}] if layout == "two groups" else [a, b]
    optimizer = ALL[name](groups)
    scheduler = OneCycleLR(optimizer, 0.1, total_steps=20, cycle_momentum=False) if layout == "scheduled" else None
    for _ in range(3):
        train(optimizer, [a, b], [torch.randn(4, 3), torch.randn(4, 3)])
        if scheduler is not None:
            scheduler.step()
    alone = copy.deepcopy([a, optimizer.state_dict()["state"].get(0)])
    with torch.no_grad():
        b.copy_(a)
    assert copy_state([optimizer], a, b) is (name in STATEFUL)
    torch.testing.assert_close([a, optimizer.state_dict()["state"].get(0)], alone, rtol=0, atol=0)
    shared = {v.data_ptr() for v in optimizer.state[a].values() if isinstance(v, Tensor)}
    assert not shared & {v.data_ptr() for v in optimizer.state[b].values() if isinstance(v, Tensor)}
    for _ in range(3):
        grad = torch.randn(4, 3)
        train(optimizer, [a, b], [grad, grad])
        assert torch.equal(a, b)
    train(optimizer, [a, b], [grad, -grad])
    assert not torch.equal(a, b)


@pytest.mark.parametrize("name", sorted(STATEFUL.keys() - {"asgd"}))  # its state is a mean that steps do not use
def test_without_the_copy_the_steps_differ(name: str) -> None:
    """What the test before guards: a parameter that starts with no or another state moves otherwise."""
    torch.manual_seed(3)
    a, b = parameters()
    optimizer = STATEFUL[name]([a, b])
    for _ in range(3):
        train(optimizer, [a, b], [torch.randn(4, 3), 10 * torch.randn(4, 3)])
    with torch.no_grad():
        b.copy_(a)
    for _ in range(3):
        grad = torch.randn(4, 3)
        train(optimizer, [a, b], [grad, grad])
    assert not torch.equal(a, b)


def test_a_copied_state_survives_saving() -> None:
    a, b = parameters()
    optimizer = torch.optim.AdamW([a, b], lr=0.1)
    a.grad = torch.randn(4, 3)
    optimizer.step()
    assert b not in optimizer.state
    assert copy_state([optimizer], a, b)
    other = torch.optim.AdamW(parameters(), lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    assert other.state_dict()["state"].keys() == {0, 1}
    torch.testing.assert_close(other.state_dict()["state"][1], optimizer.state_dict()["state"][0], rtol=0, atol=0)


def test_nothing_to_copy() -> None:
    a, b, c = parameters(3)
    first, second = torch.optim.AdamW([a], lr=0.1), torch.optim.AdamW([b, c], lr=0.1)
    assert not copy_state([first, second], b, c)  # none has stepped
    assert len(second.state) == 0
    train(first, [a], [torch.ones(4, 3)])
    assert not copy_state([first, second], a, b)  # different optimizers hold them
    assert len(second.state) == 0
    train(second, [b, c], [torch.ones(4, 3), torch.zeros(4, 3)])
    assert copy_state([first, second], b, c)
    assert torch.equal(second.state[c]["exp_avg"], second.state[b]["exp_avg"])
    assert not copy_state([], b, c)


def test_state_in_nested_containers() -> None:
    a, b = parameters()
    optimizer = torch.optim.SGD([a, b], lr=0.1)
    optimizer.state[a] = {"factors": [torch.ones(2), {"root": torch.zeros(2)}], "count": 3}
    assert copy_state([optimizer], a, b)
    optimizer.state[b]["factors"][0].add_(1)
    optimizer.state[b]["factors"][1]["root"].add_(1)
    assert optimizer.state[a]["factors"][0].tolist() == [1, 1]
    assert optimizer.state[a]["factors"][1]["root"].tolist() == [0, 0]
    assert optimizer.state[b]["count"] == 3


# -- rewrite_configured


def _forms() -> dict[str, Callable[[list[nn.Parameter]], Any]]:
    def sgd(p: nn.Parameter) -> Optimizer:
        return torch.optim.SGD([p], lr=0.1)

    def scheduled(p: nn.Parameter) -> dict[str, Any]:
        optimizer = sgd(p)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1), "interval": "step"}}

    def pair(params: list[nn.Parameter]) -> Any:
        optimizers = [sgd(p) for p in params]
        return optimizers, [StepLR(o, 1) for o in optimizers]

    return {
        "one": lambda params: sgd(params[0]),
        "list of one": lambda params: [sgd(params[0])],
        "two": lambda params: [sgd(p) for p in params],
        "tuple": lambda params: tuple(sgd(p) for p in params),
        "three": lambda params: [sgd(p) for p in (*params, nn.Parameter(torch.zeros(1)))],
        "dict": lambda params: scheduled(params[0]),
        "dict without scheduler": lambda params: {"optimizer": sgd(params[0])},
        "dicts": lambda params: [scheduled(p) for p in params],
        "tuple of dicts": lambda params: tuple(scheduled(p) for p in params),
        "pair": pair,
        "pair as list": lambda params: list(pair(params)),
        "pair with one scheduler": lambda params: (lambda p: (p[0], p[1][0]))(pair(params[:1])),
        "pair without schedulers": lambda params: ([sgd(p) for p in params], []),
    }


@pytest.mark.parametrize("form", sorted(_forms()))
def test_every_form_is_rewritten(form: str) -> None:
    from lightning.pytorch.core.optimizer import _configure_optimizers

    configured = _forms()[form](parameters())
    found, configs, _ = _configure_optimizers(configured)
    seen: list[Optimizer] = []

    def double(optimizer: Optimizer) -> Optimizer:
        seen.append(optimizer)
        optimizer.param_groups[0]["lr"] *= 2
        return optimizer

    result = rewrite_configured(configured, double)
    again, configs_again, _ = _configure_optimizers(result)
    assert seen == found == again
    assert configs_again == configs
    assert [o.param_groups[0]["lr"] for o in again] == [0.2] * len(found)
    assert type(result) is type(configured)


@pytest.mark.parametrize("form", sorted(_forms()))
def test_another_optimizer_takes_its_place(form: str) -> None:
    from lightning.pytorch.core.optimizer import _configure_optimizers

    configured = _forms()[form](parameters())
    before = _configure_optimizers(configured)[0]
    result = rewrite_configured(configured, lambda o: torch.optim.AdamW(o.param_groups, lr=0.5))
    scheduler = any("scheduler" in str(key) for key in (configured if isinstance(configured, dict) else ()))
    after = [result["optimizer"]] if scheduler else _configure_optimizers(result)[0]
    assert [type(o) for o in after] == [torch.optim.AdamW] * len(before)
    assert _configure_optimizers(configured)[0] == before, "what was returned is not changed in place"


def test_none_and_wrong_forms() -> None:
    assert rewrite_configured(None, lambda o: o) is None
    with pytest.raises(TypeError, match=r"configure_optimizers returned float; expected an optimizer, a list"):
        rewrite_configured(0.1, lambda o: o)
    with pytest.raises(TypeError, match=r"returned a dict with .*'optim'.*expected the key 'optimizer'"):
        rewrite_configured({"optim": 1}, lambda o: o)


def test_lightning_trains_with_what_was_rewritten() -> None:
    class Net(TinyClassifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.0)
            return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1000)}

    def faster(optimizer: Optimizer) -> Optimizer:
        optimizer.param_groups[0]["lr"] = 0.5
        return optimizer

    net = Net()
    start = net.head[1].weight.detach().clone()
    configured = net.configure_optimizers()
    net.configure_optimizers = lambda: rewrite_configured(configured, faster)
    pl.seed_everything(0, verbose=False)
    trainer(max_steps=3).fit(net, loader("classifier"))
    assert not torch.equal(net.head[1].weight, start)
