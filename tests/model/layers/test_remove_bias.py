"""Blocks without biases: what is left computes as the plain module with biases of zero, in all that it learns too."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_eff as eff
from lightning_eff import RemoveBias
from tests import families
from tests.cases import Case, no_map
from tests.models import TinyGPT, flat, make_batch, module
from tests.runs import checkpoints, fit, fit_yaml

NONE = r"found no such layer with a bias in repeated blocks of"
CASES = {
    "RemoveBias": Case(
        active=lambda: RemoveBias(),
        neutral=lambda: RemoveBias([]),
        architecture=True,
        refuses={"llama": NONE, "t5": NONE},
        lost=(no_map, "classifier", NONE),
    )
}


def zeroed(net: Any, in_blocks: bool = True) -> Any:
    """The biases of linear layers and norms in blocks at zero, and the others large."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, m in net.named_modules():
            ours = isinstance(m, nn.Linear | nn.LayerNorm) or type(m).__name__ == "Conv1D"
            inside = any(part.isdecimal() for part in path.split("."))
            for name, p in m.named_parameters(recurse=False):
                if name == "bias":
                    p.copy_(torch.zeros(p.shape) if ours and inside else torch.randn(p.shape, generator=g))
    return net


def logits(net: Any, name: str) -> Tensor:
    if name == "tiny_gpt":
        return net.eval()(make_batch("tiny_gpt")["input_ids"])
    return net.eval().model(**families.batch(name, 2)).logits


def build(name: str) -> Any:
    torch.manual_seed(0)
    return TinyGPT(2) if name == "tiny_gpt" else families.module(name)


@pytest.mark.parametrize("name", ["tiny_gpt", "gpt2", "vit", "bert", "bart"])
def test_it_computes_and_learns_as_with_biases_of_zero(name: str) -> None:
    plain = zeroed(build(name))
    net = eff.apply(build(name), RemoveBias())  # its own biases are dropped, whatever they are
    state = plain.state_dict()
    net.load_state_dict({name: state[name] for name in net.state_dict()})
    got, expected = logits(net, name), logits(plain, name)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for y in (got, expected):
        y.square().mean().backward()
    grads = {path: p.grad for path, p in plain.named_parameters()}
    for path, p in net.named_parameters():
        torch.testing.assert_close(p.grad, grads[path], rtol=1e-4, atol=1e-5)
    gone = grads.keys() - {path for path, _ in net.named_parameters()}
    inside = {path for path in grads if path.endswith(".bias") and any(part.isdecimal() for part in path.split("."))}
    assert gone == inside != set()


@pytest.mark.parametrize("name", ["tiny_gpt", "gpt2", "bert"])
def test_export_gives_the_plain_module_with_biases_of_zero(name: str) -> None:
    plain, net = build(name), eff.apply(build(name), RemoveBias())
    exported = eff.export(copy.deepcopy(net))
    assert exported.state_dict().keys() == plain.state_dict().keys()
    assert {type(m) for m in exported.modules()} == {type(m) for m in plain.modules()}
    torch.testing.assert_close(logits(exported, name), logits(net, name), rtol=1e-5, atol=1e-6)
    assert not any(
        p.any()
        for path, p in exported.named_parameters()
        if path.endswith("bias") and path not in dict(net.named_parameters())
    )


def test_kinds_and_names() -> None:
    def biases(net: nn.Module) -> set[str]:
        return {path for path, _ in net.named_parameters() if path.endswith(".bias")}

    every = biases(TinyGPT(2))
    assert biases(eff.apply(TinyGPT(2), RemoveBias())) == {"norm.bias"}
    norms = {path for path in every if "norm" in path}
    assert biases(eff.apply(TinyGPT(2), RemoveBias(["linear"]))) == norms
    assert biases(eff.apply(TinyGPT(2), RemoveBias(["norm"]))) == (every - norms) | {"norm.bias"}
    assert biases(eff.apply(TinyGPT(2), RemoveBias(names=["norm"]))) == every - {"norm.bias"}
    assert biases(eff.apply(TinyGPT(2), RemoveBias(names=["blocks.1.mlp.*"]))) == {
        path for path in every if not path.startswith("blocks.1.mlp")
    }
    technique = RemoveBias()
    eff.apply(TinyGPT(2, dim=16), technique)
    assert technique.report() == {"removed": 2 * (2 * 16 + 3 * 16 + 16 + 4 * 16 + 16)}


class Own(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.bias


def test_what_cannot_lose_its_bias_says_why() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    net = nn.Sequential(encoder)
    with pytest.raises(
        ValueError, match=r"no layer with a bias of Sequential can be changed\..*reads it in evaluation"
    ):
        eff.apply(net, RemoveBias())
    with pytest.raises(
        ValueError, match=r"0.layers.0.linear1 \(Linear\) cannot be changed: the nn.TransformerEncoderLayer"
    ):
        eff.apply(net, RemoveBias(names=["linear1"]))
    with pytest.raises(ValueError, match=r"out_proj .*cannot be changed: its weight is used by nn.MultiheadAttention"):
        eff.apply(net, RemoveBias(names=["out_proj"]))
    with pytest.raises(ValueError, match=r"0 \(Own\) cannot be changed: it is a subclass of nn.LayerNorm with its own"):
        eff.apply(nn.Sequential(Own(8), nn.Linear(8, 8)), RemoveBias(names=["0"]))
    shared = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    shared[1].bias = shared[0].bias
    with pytest.raises(ValueError, match=r"0 \(Linear\) cannot be changed: several modules share its bias"):
        eff.apply(shared, RemoveBias(names=["0"]))
    free = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"cannot be changed: it is parametrized"):
        eff.apply(free, RemoveBias(names=["0"]))
    with pytest.raises(ValueError, match=r"it matches none of the 25 layers with a bias of TinyGPT; .*Nearest"):
        eff.apply(TinyGPT(), RemoveBias(names=["mlq"]))
    with pytest.raises(ValueError, match=r"Name layers elsewhere, such as names=\['1'\]"):
        eff.apply(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 8)), RemoveBias())
    for wrong in ("linear", ["conv"], ["norm", "norm"]):
        with pytest.raises(
            ValueError, match=r"expected a list of some of 'linear' and 'norm'.* Biases of convolutions"
        ):
            RemoveBias(wrong)  # pyright: ignore[reportArgumentType]


def test_tied_weights_stay_tied() -> None:
    net: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net[1].weight = net[0].weight
    made: Any = eff.apply(net, RemoveBias(names=["0"]))
    assert made[0].weight is made[1].weight and made[0].bias is None and made[1].bias is not None


def test_it_resumes_to_the_bit_and_export_goes_on(tmp_path: Path) -> None:
    net, _ = fit("tiny_gpt", lambda: [RemoveBias()], directory=tmp_path)
    again, t = fit("tiny_gpt", lambda: [RemoveBias()], resume=tmp_path / "step=5.ckpt")
    assert t.global_step == 12 and torch.equal(flat(net), flat(again))
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        module("tiny_gpt").load_state_dict(torch.load(checkpoints(tmp_path)[0], weights_only=True)["state_dict"])
    torch.testing.assert_close(logits(eff.export(net), "tiny_gpt"), logits(net, "tiny_gpt"), rtol=1e-5, atol=1e-5)


def test_in_a_config(tmp_path: Path) -> None:
    fit_yaml(
        tmp_path, "RemoveBias", {"of": ["norm"]}, keeps_state=False, max_steps=3, model="TinyGPT", data="Sequences"
    )
