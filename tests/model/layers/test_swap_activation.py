"""Activations exchanged: each function against its equation, gated networks of as many weights, and where neither goes."""

import copy
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_eff as eff
from lightning_eff import SwapActivation
from lightning_eff.model.layers._activations.functions import ELEMENTWISE, gated_width, isrlu, swiglu
from lightning_eff.model.layers._activations.gated import Activation
from tests import families
from tests.cases import Case, no_map
from tests.models import TinyGPT, flat, loader, make_batch, module, trainer
from tests.runs import checkpoints, fit, fit_yaml

CASES = {
    "SwapActivation": Case(
        active=lambda: SwapActivation("relu2"),
        neutral=lambda: SwapActivation("relu2", names=[]),
        architecture=True,
        stays="SwapActivation replaced GELU at .*: it computes another function",
        on_classifier=lambda: SwapActivation("relu2", names=["blocks.*.1"]),
        lost=(no_map, "classifier", "Scaled has no activation module to act on"),
    )
}
FAMILIES = ("gpt2", "qwen3", "modernbert", "vit", "resnet")

# -- the functions

X = torch.linspace(-5.0, 5.0, 201, dtype=torch.float64)
BY_HAND = {
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "gelu": lambda x: x * 0.5 * (1.0 + math.erf(x / math.sqrt(2.0))),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1.0 + math.exp(-x)),
    "elu": lambda x: x if x > 0 else math.exp(x) - 1.0,
    "selu": lambda x: 1.0507009873554805 * (x if x > 0 else 1.6732632423543772 * (math.exp(x) - 1.0)),
    "isrlu": lambda x: x if x >= 0 else x / math.sqrt(1.0 + x * x),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_functions_are_their_equations(name: str) -> None:
    expected = torch.tensor([BY_HAND[name](x) for x in X.tolist()], dtype=torch.float64)
    torch.testing.assert_close(ELEMENTWISE[name](X), expected)


def test_isrlu_ends_where_it_says_and_has_the_slope_of_its_paper() -> None:
    for alpha in (0.25, 1.0, 4.0):
        x = X.clone().requires_grad_()
        isrlu(x, alpha).sum().backward()
        slope = torch.where(X >= 0, torch.ones_like(X), (1.0 + alpha * X**2) ** -1.5)
        assert x.grad is not None
        torch.testing.assert_close(x.grad, slope)
        assert isrlu(torch.tensor(-1e6, dtype=torch.float64), alpha).item() == pytest.approx(-1 / math.sqrt(alpha))


def test_selu_keeps_a_normal_distribution_and_gelus_approximation_its_distance() -> None:
    x = torch.randn(2_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = ELEMENTWISE["selu"](x)
    assert abs(float(y.mean())) < 4e-3 and float(y.var()) == pytest.approx(1.0, abs=5e-3)
    assert float((ELEMENTWISE["gelu"](X) - ELEMENTWISE["gelu_tanh"](X)).abs().max()) == pytest.approx(4.73e-4, abs=1e-5)


def test_swiglu_is_one_half_gated_by_the_other() -> None:
    a, b = torch.randn(2, 3, 5, dtype=torch.float64)
    torch.testing.assert_close(swiglu(torch.cat([a, b], -1)), a * torch.sigmoid(a) * b)


@pytest.mark.parametrize(("width", "multiple", "expected"), [(96, 1, 64), (64, 8, 40), (3072, 64, 2048), (4, 8, 8)])
def test_two_thirds_of_the_width(width: int, multiple: int, expected: int) -> None:
    assert gated_width(width, multiple) == expected
    if (width, multiple) == (96, 1):
        assert 3 * 24 * expected == 2 * 24 * width  # d_ff = 2/3 4 d has as many weights


# -- on modules


def logits(net: Any, name: str) -> Tensor:
    with torch.no_grad():
        found = net.eval().model(**families.batch(name, 2))
    return getattr(found, "logits", found.loss)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_with_another_function_is_the_model_that_was_written_with_it(name: str) -> None:
    """Against hooks that compute the function of what each activation is given."""
    net = eff.apply(families.module(name), SwapActivation("isrlu"))
    plain = families.module(name)
    made = [path for path, m in net.named_modules() if isinstance(m, Activation)]
    assert made and len(made) == (1 if name == "resnet" else families.FAMILIES[name].settings["num_hidden_layers"]) + (
        name == "modernbert"  # and one in its head
    )
    for path in made:
        plain.get_submodule(path).register_forward_hook(lambda m, args, y: isrlu(args[0]))
    torch.testing.assert_close(logits(net, name), logits(plain, name))
    assert not torch.equal(logits(net, name), logits(families.module(name), name))
    marks = {key for key in net.state_dict() if key not in plain.state_dict()}
    assert marks == {f"{path}.lightning_eff_mark" for path in made}


@pytest.mark.parametrize("name", ["gpt2", "vit", "bert", "tiny_gpt"])
def test_feed_forward_networks_become_gated_with_as_many_weights(name: str) -> None:
    def build() -> Any:
        return TinyGPT(2, dim=24, dropout=0.1) if name == "tiny_gpt" else families.module(name)

    plain = build()
    net: Any = eff.apply(build(), SwapActivation("swiglu", multiple=1))
    acts = [path for path, m in net.named_modules() if isinstance(m, Activation)]
    blocks = 2 if name == "tiny_gpt" else 4
    assert len(acts) == blocks
    weights, expected = ([p for p in m.parameters() if p.ndim == 2] for m in (net, plain))
    change = sum(p.numel() for p in weights) / sum(p.numel() for p in expected) - 1
    assert abs(change) < (1e-9 if name == "tiny_gpt" else 0.02)  # of 64 units, two thirds are 43
    io: dict[str, Tensor] = {}
    first, last = {
        "gpt2": ("model.transformer.h.1.mlp.c_fc", "model.transformer.h.1.mlp.c_proj"),
        "vit": ("", ""),
        "bert": ("model.bert.encoder.layer.1.intermediate.dense", "model.bert.encoder.layer.1.output.dense"),
        "tiny_gpt": ("blocks.1.mlp.0", "blocks.1.mlp.2"),
    }[name]
    if not first:
        maps = [path for path, m in net.named_modules() if type(m) is nn.Linear and path.split(".")[-4:-3] != ["x"]]
        first = next(p for p in maps if net.get_submodule(p).out_features == 86)
        last = next(p for p in maps if net.get_submodule(p).in_features == 43)
    net.get_submodule(first).register_forward_pre_hook(lambda m, args: io.update(x=args[0]))
    net.get_submodule(last).register_forward_hook(lambda m, args, y: io.update(y=y))
    net.eval()
    with torch.no_grad():
        net(make_batch("tiny_gpt")["input_ids"]) if name == "tiny_gpt" else net.model(**families.batch(name, 2))
        up, down = net.get_submodule(first), net.get_submodule(last)
        w1, w2 = up.weight.chunk(2)
        b1, b2 = up.bias.chunk(2)
        x = io["x"]
        expected_y = F.linear(F.silu(x @ w1.T + b1) * (x @ w2.T + b2), down.weight, down.bias)
    torch.testing.assert_close(io["y"], expected_y)
    old = plain.get_submodule(first).weight
    assert float(up.weight.detach().std()) == pytest.approx(float(old.detach().std()), rel=0.1) and not up.bias.any()
    net.train()


def test_networks_that_are_gated_already_are_refused_for_gates_and_keep_them_for_other_functions() -> None:
    for name in ("qwen3", "modernbert"):
        with pytest.raises(ValueError, match=r"no activation module to act on.*may be gated already"):
            eff.apply(families.module(name), SwapActivation("swiglu", names=None))
    net = eff.apply(families.module("qwen3"), SwapActivation("gelu"))
    assert sum(isinstance(m, Activation) for m in net.modules()) == 4


class Chain(nn.Module):
    """Residual blocks of several makes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.act, self.drop = kind, nn.ReLU(), nn.Dropout(0.3)
        self.a, self.b, self.c = nn.Linear(12, 24), nn.Linear(24, 12), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        if self.kind == "dropped":
            return x + self.b(self.drop(self.act(hidden)))
        if self.kind == "read twice":
            return x + self.b(self.act(self.c(hidden)) + hidden)
        if self.kind == "function":
            return x + self.b(F.relu(hidden))
        return x + self.b(self.act(self.c(self.act(hidden))))


def test_what_stands_between_two_maps_is_told_by_what_they_hand_on() -> None:
    net = eff.apply(nn.Sequential(nn.Linear(5, 12), Chain("dropped"), Chain("dropped")), SwapActivation("swiglu"))
    assert isinstance(net[1].act, Activation) and net[1].a.out_features == 32 and net[1].b.in_features == 16  # pyright: ignore[reportAttributeAccessIssue]
    assert net.train()(torch.randn(3, 5)).shape == (3, 12)
    for kind, why in (
        ("read twice", "it may be gated already"),
        ("chained", "another activation shares a layer next to it"),
    ):
        with pytest.raises(ValueError, match=rf"no activation module to act on\. .*{why}"):
            eff.apply(nn.Sequential(nn.Linear(5, 12), Chain(kind), Chain(kind)), SwapActivation("swiglu"))
    with pytest.raises(ValueError, match=r"Replace functions such as F.relu in forward by modules"):
        module = Chain("function")
        del module.act
        eff.apply(nn.Sequential(nn.Linear(5, 12), module), SwapActivation("relu2"))


def test_one_activation_for_all_blocks() -> None:
    shared = nn.GELU()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act, self.down = nn.Linear(12, 48), shared, nn.Linear(48, 12)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.act(self.up(x)))

    net = eff.apply(nn.Sequential(nn.Linear(4, 12), Block(), Block()), SwapActivation("swiglu"))
    assert net[1].act is net[2].act and net[1].up.out_features == net[2].up.out_features == 64  # pyright: ignore[reportAttributeAccessIssue]
    assert net(torch.randn(3, 4)).shape == (3, 12)


def test_what_is_left_is_told(caplog: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.PReLU(), nn.Tanh(), nn.ReLU(), nn.GELU(approximate="tanh"))
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        made = eff.apply(copy.deepcopy(net), SwapActivation("gelu"))
    assert [type(m).__name__ for m in made] == ["Linear", "GELU", "PReLU", "Tanh", "Activation", "Activation"]
    assert "1 (it is gelu already)" in caplog.text
    with pytest.raises(ValueError, match=r"1 \(GELU\) cannot be changed: it is gelu already. Leave it out"):
        eff.apply(copy.deepcopy(net), SwapActivation("gelu", names=["1"]))
    with pytest.raises(ValueError, match=r"2 \(PReLU\) cannot be changed: it has parameters, which would be lost"):
        eff.apply(copy.deepcopy(net), SwapActivation("gelu", names=["2"]))
    made = eff.apply(copy.deepcopy(net), SwapActivation("gelu", names=["3"]))
    assert isinstance(made[3], Activation) and type(made[4]) is nn.ReLU
    encoder = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, activation=nn.ReLU(), batch_first=True))
    with pytest.raises(
        ValueError, match=r"0.activation: the nn.TransformerEncoderLayer.* reads it in evaluation instead of"
    ):
        eff.apply(encoder, SwapActivation("relu2"))


# -- runs and checkpoints


def test_a_plain_module_does_not_load_what_computes_another_function(tmp_path: Path) -> None:
    fit("tiny_gpt", lambda: [SwapActivation("relu2")], directory=tmp_path, max_steps=1)
    state = torch.load(checkpoints(tmp_path)[0], weights_only=True)["state_dict"]
    with pytest.raises(RuntimeError, match=r"Unexpected key.*lightning_eff_mark"):
        module("tiny_gpt").load_state_dict(state)
    eff.apply(TinyGPT(), SwapActivation("relu2")).load_state_dict(state)
    with pytest.raises(ValueError, match=r"blocks.0.mlp.1 of the checkpoint is not isrlu \(its mark is 1\)"):
        eff.apply(TinyGPT(), SwapActivation("isrlu")).load_state_dict(state)


def test_marks_outlive_dtypes() -> None:
    net = eff.apply(TinyGPT(1), SwapActivation("isrlu")).to(torch.bfloat16)
    eff.apply(TinyGPT(1), SwapActivation("isrlu")).load_state_dict(net.state_dict())
    assert net(make_batch("tiny_gpt")["input_ids"]).dtype == torch.bfloat16


@pytest.mark.parametrize("to", ["swiglu", "selu"])
def test_it_trains_and_resumes_to_the_bit(to: str, tmp_path: Path) -> None:
    net, _ = fit("tiny_gpt", lambda: [SwapActivation(to)], directory=tmp_path)
    again, t = fit("tiny_gpt", lambda: [SwapActivation(to)], resume=tmp_path / "step=5.ckpt")
    assert t.global_step == 12 and torch.equal(flat(net), flat(again))


def test_swiglu_learns() -> None:
    net, losses = TinyGPT(2, dim=32, dropout=0.0), families.Losses()
    technique = SwapActivation("swiglu")
    trainer(technique, losses, max_steps=60).fit(net, loader("tiny_gpt"))
    assert sum(losses.losses[-5:]) < 0.7 * sum(losses.losses[:5]) and technique.report() == {"swapped": 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"to": "swish"}, r"to='swish'\): expected 'relu', 'relu2', .* or 'swiglu'"),
        (
            {"to": "relu", "names": "act"},
            r"names='act'\): expected a list of dotted paths or patterns, or None: dotted paths",
        ),
        ({"to": "swiglu", "multiple": 0}, r"multiple=0\): expected an integer >= 1"),
    ],
)
def test_other_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SwapActivation(**settings)


def test_a_name_that_means_none_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"it matches none of the 4 activations of HuggingFace; .*Nearest: .*mlp.act"):
        eff.apply(families.module("gpt2"), SwapActivation("relu", names=["mlp.atc"]))


def test_in_a_config(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "SwapActivation", {"to": "elu", "names": ["blocks.*.1"]}, keeps_state=False, max_steps=3)
