"""Normed queries and keys: Qwen3 of a Llama, logits that cannot run away, fused maps of every layout, and refusals."""

import copy
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import lightning_eff as eff
from lightning_eff import QKNorm
from lightning_eff.model.layers._attention.normed import NormedHeads, runs
from lightning_eff.model.layers._attention.parts import handed
from tests import families
from tests.cases import Case, classifier
from tests.models import VOCAB, TinyGPT, flat, hugging_face, make_batch
from tests.runs import fit, fit_yaml

CASES = {
    "QKNorm": Case(
        active=lambda: QKNorm(),
        neutral=lambda: QKNorm(names=[]),
        architecture=True,
        stays="QKNorm replaced Linear at .*: queries and keys are normalised",
        refuses={"classifier": "found no attention in TinyClassifier, because"},
        lost=(classifier, "classifier", "found no attention in TinyClassifier, because"),
    )
}


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def test_a_llama_with_it_is_a_qwen3_with_the_same_weights() -> None:
    """Heads that share keys, norms before rotary embeddings, gains that differ: transformers' own model of it."""
    settings: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6}
    settings |= {"tie_word_embeddings": False, "use_cache": False, "max_position_embeddings": 64}
    torch.manual_seed(0)
    qwen = Qwen3ForCausalLM(Qwen3Config(**settings)).eval()
    llama = eff.apply(LlamaForCausalLM(LlamaConfig(**settings)).eval(), QKNorm())
    with torch.no_grad():
        for p in qwen.parameters():
            p.normal_(0.3, 0.4)
        for i in range(2):
            ours, theirs = llama.model.layers[i].self_attn, qwen.model.layers[i].self_attn
            ours.q_proj.query_gain.copy_(theirs.q_norm.weight)
            ours.k_proj.key_gain.copy_(theirs.k_norm.weight)
    state = qwen.state_dict()
    for key in [*llama.state_dict()]:
        if "gain" not in key:
            llama.state_dict()[key].copy_(state[key.replace(".map.", ".")])
    ids = torch.randint(0, VOCAB, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(llama(ids).logits, qwen(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["gpt2", "modernbert", "vit", "llama", "gpt_neox", "gpt_bigcode", "t5", "bert", "albert"]
)
def test_attention_is_handed_heads_of_one_length_whatever_the_weights(name: str) -> None:
    """So that no logit exceeds sqrt(D), however large the maps are: by Cauchy's inequality."""
    net = families.module(name)
    kinds = {"t5": 10, "albert": 2}
    eff.apply(net, QKNorm())
    made = [m for m in net.modules() if isinstance(m, NormedHeads)]
    roles = [role for m in made for role in m.roles]
    assert roles.count("query") == roles.count("key") >= min(4, kinds.get(name, 4) // 2)
    with torch.no_grad():
        for m in made:
            m.weight.mul_(50)
        with handed() as seen:
            net.eval().model(**families.batch(name, 2))
    assert seen.calls
    for query, key in seen.calls:
        d = query.shape[-1]
        for x in (query, key):
            torch.testing.assert_close(x.square().mean(-1), torch.ones(x.shape[:-1]), rtol=1e-3, atol=1e-3)
        groups = query.shape[1] // key.shape[1]
        logits = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) / math.sqrt(d)
        assert logits.abs().max() <= math.sqrt(d) * 1.001


@pytest.mark.parametrize("name", ["tiny_gpt", "gpt2"])
def test_of_a_fused_map_values_are_left_alone(name: str) -> None:
    net: Any = TinyGPT(1) if name == "tiny_gpt" else hugging_face("gpt2", 1)
    path = "blocks.0.qkv" if name == "tiny_gpt" else "model.transformer.h.0.attn.c_attn"
    plain = net.get_submodule(path)
    made: Any = eff.apply(net, QKNorm()).get_submodule(path)
    d = 8 if name == "tiny_gpt" else 16
    with torch.no_grad():
        made.query_gain.uniform_(0.5, 2)
        made.key_gain.uniform_(0.5, 2)
    x = torch.randn(2, 5, 2 * d)
    q, k, v = plain(x).chunk(3, -1)
    expected = [normed(t.unflatten(-1, (2, d)), g).flatten(-2) for t, g in ((q, made.query_gain), (k, made.key_gain))]
    torch.testing.assert_close(made(x), torch.cat([*expected, v], -1))
    assert made.weight is plain.weight and made.undecayed == ["query_gain", "key_gain"]


def test_gains_are_trained_and_do_not_decay() -> None:
    class Decaying(TinyGPT):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.3)

    from tests.models import loader, trainer

    net = Decaying(2)
    t = trainer(QKNorm(), max_steps=3)
    t.fit(net, loader("tiny_gpt"))
    gains = [p for name, p in net.named_parameters() if name.endswith("_gain")]
    assert len(gains) == 4 and not any((p == 1).all() for p in gains)
    decays = {id(p): group["weight_decay"] for group in t.optimizers[0].param_groups for p in group["params"]}
    assert {decays[id(p)] for p in gains} == {0.0} and set(decays.values()) == {0.0, 0.3}


class Attention(nn.Module):
    """Attention of several makes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.out = kind, nn.Linear(16, 16)
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.kind == "interleaved":  # a head's features do not lie side by side
            q, k, v = (t.unflatten(-1, (4, 4)).permute(0, 3, 1, 2) for t in (q, k, v))
        else:
            q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in (q, k, v))
        if self.kind == "eager":
            y = torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Net(pl.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, 16), nn.Sequential(Attention(kind), Attention(kind))
        self.head = nn.Linear(16, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)))


def test_heads_that_do_not_lie_side_by_side_and_attention_that_is_not_seen_are_refused_and_nothing_is_changed() -> None:
    assert eff.apply(Net("plain"), QKNorm())
    for kind in ("interleaved", "eager"):
        net = Net(kind)
        before = list(net.state_dict())
        with pytest.raises(ValueError, match=r"0 of 2 attentions of Net receive normalised queries and keys"):
            eff.apply(net, QKNorm())
        assert list(net.state_dict()) == before


def test_what_is_refused_says_why() -> None:
    with pytest.raises(ValueError, match=r"a norm follows .*q_proj.weight.* already. Name other"):
        eff.apply(families.module("qwen3"), QKNorm())
    with pytest.raises(ValueError, match="found no attention in HuggingFace"):
        eff.apply(families.module("resnet"), QKNorm())
    with pytest.raises(
        ValueError, match=r"it matches none of the 4 layers of queries or keys of TinyGPT; .*Nearest: .*qkv"
    ):
        eff.apply(TinyGPT(), QKNorm(names=["kqv"]))
    with pytest.raises(
        ValueError,
        match=r"names='qkv'\): expected a list of dotted paths or patterns",
    ):
        QKNorm(names="qkv")
    with pytest.raises(ValueError, match=r"weights of TinyGPT are on the meta device"):
        eff.apply(TinyGPT().to("meta"), QKNorm())
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    with pytest.raises(ValueError, match=r"its weight belongs to MultiheadAttention, not to a layer that is called"):
        eff.apply(nn.Sequential(nn.Embedding(VOCAB, 16), encoder), QKNorm())


def test_attentions_by_name() -> None:
    net = eff.apply(TinyGPT(3), QKNorm(names=["blocks.1.*"]))
    assert [path for path, m in net.named_modules() if isinstance(m, NormedHeads)] == ["blocks.1.qkv"]


def test_stretches() -> None:
    assert runs(torch.tensor([1, 1, 0, 1, 0, 0, 1], dtype=torch.bool)) == [(0, 2), (3, 4), (6, 7)]
    assert runs(torch.zeros(3, dtype=torch.bool)) == []


def test_copies_compute_the_same_and_it_resumes_to_the_bit(tmp_path: Path) -> None:
    net, _ = fit("tiny_gpt", lambda: [QKNorm()], directory=tmp_path)
    ids = make_batch("tiny_gpt")["input_ids"]
    assert torch.equal(copy.deepcopy(net).eval()(ids), net.eval()(ids))
    again, t = fit("tiny_gpt", lambda: [QKNorm()], resume=tmp_path / "step=5.ckpt")
    assert t.global_step == 12 and torch.equal(flat(net), flat(again))


def test_in_a_config(tmp_path: Path) -> None:
    kinds = {"model": "TinyGPT", "data": "Sequences"}
    fit_yaml(tmp_path, "QKNorm", {"names": ["blocks.0.qkv"]}, keeps_state=False, max_steps=3, **kinds)
