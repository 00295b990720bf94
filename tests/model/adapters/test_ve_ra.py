"""VeRA against peft itself, and by hand: the same layers, steps and folders; what is merged, and what checkpoints hold."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_eff as eff
from lightning_eff import VeRA
from tests import families
from tests.cases import Case, no_map
from tests.models import TinyGPT, loader, make_batch, trainer
from tests.runs import fit_yaml

CASES = {
    "VeRA": Case(
        active=lambda: VeRA(rank=12),
        neutral=lambda: VeRA(names=[]),
        architecture=True,
        partial=True,
        lost=(no_map, "classifier", "has no linear layer to act on"),
    )
}
# peft asks transformers' models for it by the name of before, and finds by itself which maps are transposed
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to"),
]
FAMILIES = ("gpt2", "qwen3", "modernbert", "vit", "t5", "qwen3_moe")


def logits(net: Any, name: str) -> Tensor:
    with torch.no_grad():
        return net.eval()(**families.batch(name, 2)).logits


def shaken(net: nn.Module) -> nn.Module:
    """What trains is moved, as by training."""
    torch.manual_seed(3)
    with torch.no_grad():
        for p in net.parameters():
            if p.requires_grad:
                p.add_(0.3 * torch.randn_like(p))
    return net


# -- against peft


@pytest.mark.parametrize("name", FAMILIES)
def test_unchanged_at_first_merged_as_unmerged_and_read_by_peft(name: str, tmp_path: Path) -> None:
    """b = 0 is the plain function; export merges; and peft, given the folder, computes the same."""
    plain = families.module(name)
    net = eff.apply(copy.deepcopy(plain), VeRA(rank=40))
    assert torch.equal(logits(net.model, name), logits(plain.model, name))
    shaken(net)
    learnt = logits(net.model, name)
    assert (learnt - logits(plain.model, name)).abs().max() > 1e-3
    exported = eff.export(net)
    assert exported.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(logits(exported.model, name), learnt, rtol=1e-5, atol=1e-5)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(plain.model), eff.export_adapter(net.model, tmp_path))  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(logits(loaded, name), learnt, rtol=1e-6, atol=1e-6)


def test_steps_are_those_of_peft_itself() -> None:
    """The same model under ``peft.get_peft_model``, with projections of the same key, under torch's AdamW in a loop."""
    ours = families.module("gpt2")
    config = peft.VeraConfig(
        r=24,
        target_modules=["c_attn", "c_proj", "c_fc"],
        fan_in_fan_out=True,
        projection_prng_key=5,
        d_initial=0.2,
    )
    theirs: Any = peft.get_peft_model(copy.deepcopy(ours.model), config)
    optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=ours.lr)
    for batch in loader("gpt2", shuffle=False):
        optimizer.zero_grad()
        theirs(**batch).loss.backward()
        optimizer.step()
    technique = VeRA(rank=24, key=5, d_initial=0.2)
    trainer(technique, max_steps=5).fit(ours, loader("gpt2", shuffle=False))
    moved = 0
    for name, p in theirs.named_parameters():
        mine = ours.model.get_parameter(name.removeprefix("base_model.model."))
        torch.testing.assert_close(mine, p, rtol=1e-6, atol=1e-7)
        moved += p.requires_grad
    assert moved == 2 * 16
    layer: Any = ours.model.transformer.h[3].attn.c_attn
    assert torch.equal(layer.vera_A["default"], theirs.base_model.vera_A["default"])
    assert technique.report()["trained"] == 4 * (4 * 24 + 96 + 32 + 128 + 32)


def test_a_map_is_the_papers_and_all_share_the_projections() -> None:
    """By hand: ``h = W x + bias + b * B (d * A x)``, and gradients of b and d alone; a rank above the map's is one too."""
    net: Any = eff.apply(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7)), VeRA(rank=9))
    shaken(net)
    for layer, k, n in ((net[0], 6, 5), (net[2], 5, 7)):
        a, b = layer.vera_A["default"], layer.vera_B["default"]
        assert a.shape == (9, 6) and b.shape == (7, 9) and a is net[0].vera_A["default"]
        scale_b, scale_d = layer.vera_lambda_b["default"], layer.vera_lambda_d["default"]
        base, x = layer.base_layer, torch.randn(3, k)
        expected = F.linear(x, base.weight, base.bias) + scale_b * ((scale_d * (x @ a[:, :k].T)) @ b[:n].T)
        torch.testing.assert_close(layer(x), expected)
    net(torch.randn(3, 6)).square().sum().backward()
    with_gradients = {name for name, p in net.named_parameters() if p.grad is not None}
    assert with_gradients == {f"{i}.vera_lambda_{v}.default" for i in (0, 2) for v in "bd"}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # of the plain encoder, which reads
def test_torchs_own_encoder_calls_what_it_would_read_in_evaluation() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    plain = nn.Sequential(nn.TransformerEncoder(layer, 2))
    net = shaken(eff.apply(copy.deepcopy(plain), VeRA(rank=8)))
    x = torch.randn(2, 5, 16)
    learnt = net.train()(x)
    for one in (net, eff.export(net)):
        with torch.no_grad():
            torch.testing.assert_close(one.eval()(x), learnt, rtol=1e-4, atol=1e-5)
    assert (learnt - plain.eval()(x)).abs().max() > 1e-3


def test_beside_a_quantized_base() -> None:
    net = eff.apply(TinyGPT(2, dim=64), VeRA(rank=8), eff.QuantizedBase(4))
    assert sum(type(m).__name__ == "QuantizedLinear" for m in net.modules()) == 8
    x = make_batch("tiny_gpt")["input_ids"]
    shaken(net)
    merged = eff.export(eff.dequantize(net))
    torch.testing.assert_close(merged.eval()(x), net.eval()(x), rtol=1e-5, atol=1e-5)


# -- checkpoints


def test_a_checkpoint_is_the_vectors_and_the_projections_are_drawn_anew(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = TinyGPT(2)
    plain = copy.deepcopy(net)
    t = trainer(VeRA(rank=32, also=["head"]), max_steps=2)
    t.fit(net, loader("tiny_gpt"))
    t.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert {name.split(".")[-2] for name in saved} == {"vera_lambda_b", "vera_lambda_d", "head"}
    torch.manual_seed(99)
    other = eff.apply(plain, VeRA(rank=32, also=["head"]))
    missing, unexpected = other.load_state_dict(saved, strict=False)
    assert not unexpected and not any("vera" in name for name in missing)
    x = make_batch("tiny_gpt")["input_ids"]
    assert torch.equal(other.eval()(x), net.eval()(x))
    another = eff.apply(TinyGPT(2), VeRA(rank=32, key=1))
    first: Any = another.get_submodule("blocks.0.qkv")
    assert not torch.equal(first.vera_A["default"], other.get_submodule("blocks.0.qkv").vera_A["default"])  # pyright: ignore[reportIndexIssue, reportArgumentType]


# -- what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, r"rank=0\): expected an integer >= 1"),
        ({"d_initial": 0.0}, r"d_initial=0.0\): from 0, b gets no gradient"),
        ({"dropout": 1.0}, r"dropout=1.0\): expected a number in \[0, 1\): the probability"),
        ({"key": -1}, r"key=-1\): expected an integer >= 0"),
        ({"names": "q_proj"}, r"names='q_proj'\): expected a list of dotted paths or patterns, or None"),
    ],
)
def test_other_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VeRA(**settings)


def test_what_cannot_be_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"no linear layer of TinyGPT is named 'qvk'; .*Nearest: .*qkv"):
        eff.apply(TinyGPT(2), VeRA(names=["qvk"]))
    with pytest.raises(ValueError, match=r"VeRA\(rank=256\): found no linear layer in .* to adapt"):
        eff.apply(families.module("resnet"), VeRA())
    rounded = eff.apply(TinyGPT(2, dim=64), VeRA(rank=8), eff.QuantizedBase(4))
    with pytest.raises(ValueError, match=r"base weight is quantised|rounded to few bits"):
        eff.export(rounded)


def test_in_a_config(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "VeRA", {"rank": 8}, max_steps=3)


def test_projections_follow_vectors_that_were_cast() -> None:
    """As true half precision casts them, which leaves buffers in float32."""
    net = eff.apply(nn.Sequential(nn.Linear(6, 5)), VeRA(rank=3, names=["0"]))
    layer: Any = net[0]
    with torch.no_grad():
        layer.vera_lambda_b["default"].normal_()
    for p in net.parameters():
        p.data = p.data.bfloat16()
    x = torch.randn(4, 6, dtype=torch.bfloat16)
    a, b = layer.vera_A["default"][:, :6].bfloat16(), layer.vera_B["default"][:5].bfloat16()
    d, scale = layer.vera_lambda_d["default"], layer.vera_lambda_b["default"]
    weight, bias = layer.get_base_layer().weight, layer.get_base_layer().bias
    wanted = x @ weight.T + bias + scale * ((d * (x @ a.T)) @ b.T)
    assert a.dtype == torch.bfloat16 and layer.vera_A["default"].dtype == torch.float32
    torch.testing.assert_close(net(x), wanted, rtol=2e-2, atol=2e-2)
