"""Attention without biases that do nothing: outputs stay, whatever the biases are, and models where they count are refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

import lightning_eff as eff
from lightning_eff import RemoveQKVBias
from lightning_eff.model.layers._attention.rebiased import PartlyBiased, RebiasedLinear
from tests import families
from tests.cases import Case, classifier
from tests.models import VOCAB, HuggingFace, TinyGPT, flat, make_batch
from tests.runs import fit, fit_yaml

NONE = "have no bias to remove"
CASES = {
    "RemoveQKVBias": Case(
        active=lambda: RemoveQKVBias(),
        neutral=lambda: RemoveQKVBias([]),
        architecture=True,
        refuses={"llama": NONE, "classifier": "found no attention in TinyClassifier, because"},
        lost=(classifier, "classifier", "found no attention in TinyClassifier, because"),
    )
}


def with_biases(net: Any, seed: int = 0) -> Any:
    """With large ones everywhere."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.ndim == 1 and name.endswith("bias"):
                p.copy_(torch.randn(p.shape, generator=g))
    return net


def logits(net: Any, name: str) -> Tensor:
    with torch.no_grad():
        if name == "tiny_gpt":
            return net.eval()(make_batch("tiny_gpt")["input_ids"])
        return net.eval().model(**families.batch(name, 2)).logits


def build(name: str) -> Any:
    torch.manual_seed(0)
    return with_biases(TinyGPT(2) if name == "tiny_gpt" else families.module(name))


def removed(plain: nn.Module, net: nn.Module) -> int:
    return sum(p.numel() for p in plain.parameters()) - sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("of", [["key"], ["value"], ["key", "value"]])
@pytest.mark.parametrize("name", ["tiny_gpt", "gpt2", "vit", "bert", "opt_like", "albert"])
def test_outputs_stay_what_they_are(name: str, of: list[str]) -> None:
    name = "bart" if name == "opt_like" else name  # an encoder-decoder, with attention across
    plain = build(name)
    net = eff.apply(copy.deepcopy(plain), RemoveQKVBias(of))
    torch.testing.assert_close(logits(net, name), logits(plain, name), rtol=1e-4, atol=1e-4)
    heads = {"tiny_gpt": 2 * 16, "gpt2": 4 * 32, "vit": 4 * 32, "bert": 4 * 32, "bart": (2 + 2 * 4) * 32, "albert": 32}[
        name
    ]
    assert removed(plain, net) == heads * len(of)
    exported = eff.export(net)
    assert exported.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(logits(exported, name), logits(plain, name), rtol=1e-4, atol=1e-4)


def test_of_a_fused_map_the_queries_biases_stay() -> None:
    plain = build("tiny_gpt")
    net = eff.apply(copy.deepcopy(plain), RemoveQKVBias())
    made, was = net.blocks[0].qkv, plain.blocks[0].qkv
    assert isinstance(made, PartlyBiased) and torch.equal(made.bias_left, was.bias[:16])
    assert not made.bias[16:].any()
    taker, old = net.blocks[0].proj, plain.blocks[0].proj
    assert type(taker) is RebiasedLinear and taker.weight is net.blocks[0].proj.weight
    torch.testing.assert_close(taker.bias, old.bias + old.weight @ was.bias[32:])
    x = torch.randn(3, 16)
    torch.testing.assert_close(made(x)[:, :16], was(x)[:, :16])


@pytest.mark.parametrize("of", [["key"], ["value"]])
def test_gradients_of_what_is_left_are_the_same(of: list[str]) -> None:
    """But of the map behind attention, whose inputs are without the biases of values."""
    plain = build("vit")
    net = eff.apply(copy.deepcopy(plain), RemoveQKVBias(of))
    batch = families.batch("vit", 3)
    for m in (plain, net):
        m.eval().model(**batch).loss.backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    for name, p in net.named_parameters():
        if of == ["key"] or not name.endswith("o_proj.weight"):
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-3, atol=1e-5)


def qwen2() -> HuggingFace:
    settings: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    return HuggingFace(Qwen2ForCausalLM(Qwen2Config(**settings)))


def test_where_keys_are_turned_by_their_places_it_refuses_and_changes_nothing() -> None:
    """Qwen2: rotary embeddings behind keys with a bias, which is zero at first and so would not show by itself."""
    net = qwen2()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"of=\['key'\]\): without these biases, .*o_proj of HuggingFace would compute something else"
    ):
        eff.apply(net, RemoveQKVBias(["key"]))
    after = net.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[key], value) for key, value in before.items())
    with pytest.raises(ValueError, match=r"cannot move to .*o_proj .*, which has no bias. Give of=\['key'\]"):
        eff.apply(qwen2(), RemoveQKVBias(["value"]))


class Normed(nn.Module):
    """Attention with keys of length one, or that are values too."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.shared, self.q, self.k, self.v, self.o = shared, *(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        v = k if self.shared else self.v(x)
        k = k if self.shared else F.normalize(k, dim=-1)
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in (q, k, v))
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("shared", [False, True])
def test_where_keys_are_normed_or_are_values_too_it_refuses(shared: bool) -> None:
    net = nn.Sequential(nn.Embedding(VOCAB, 16), Normed(shared), Normed(shared))
    with pytest.raises(ValueError, match="would compute something else"):
        eff.apply(net, RemoveQKVBias(["key"]))
    assert net[1].k.bias is not None  # pyright: ignore[reportAttributeAccessIssue]


def test_what_is_refused_says_why() -> None:
    for name, message in (
        ("qwen3", NONE),
        ("modernbert", NONE),
        ("resnet", "found no attention in HuggingFace"),
    ):
        with pytest.raises(ValueError, match=message):
            eff.apply(families.module(name), RemoveQKVBias())
    with pytest.raises(
        ValueError, match=r"expected a list of some of 'key' and 'value', each once.* A query's bias changes the output"
    ):
        RemoveQKVBias(["query"])
    for wrong in ("key", ["keys"], ["key", "key"], 3):
        with pytest.raises(ValueError, match="expected a list of some of 'key' and 'value', each once"):
            RemoveQKVBias(wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match=r"it matches none of the 4 layers of keys or values of TinyGPT; .*Nearest: .*qkv"
    ):
        eff.apply(TinyGPT(), RemoveQKVBias(names=["vkq"]))
    net = eff.apply(TinyGPT(3), RemoveQKVBias(names=["blocks.1.*"]))
    assert [path for path, m in net.named_modules() if isinstance(m, PartlyBiased)] == ["blocks.1.qkv"]


def test_it_resumes_to_the_bit_and_export_goes_on(tmp_path: Path) -> None:
    net, _ = fit("tiny_gpt", lambda: [RemoveQKVBias()], directory=tmp_path)
    again, t = fit("tiny_gpt", lambda: [RemoveQKVBias()], resume=tmp_path / "step=5.ckpt")
    assert t.global_step == 12 and torch.equal(flat(net), flat(again))
    exported = eff.export(net)
    torch.testing.assert_close(logits(exported, "tiny_gpt"), logits(net, "tiny_gpt"), rtol=1e-5, atol=1e-5)


def test_a_run_that_never_trained_leaves_biases_where_they_were() -> None:
    net = build("tiny_gpt")
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with pytest.raises(ValueError, match="found no convolution in"):
        eff.apply(net, RemoveQKVBias(), eff.LowRankConv())
    after = net.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[key], value) for key, value in before.items())


def test_in_a_config(tmp_path: Path) -> None:
    kinds = {"model": "TinyGPT", "data": "Sequences"}
    fit_yaml(tmp_path, "RemoveQKVBias", {"of": ["key"]}, keeps_state=False, max_steps=3, **kinds)
