"""Heads without nonlinear layers: logits are the output layer's of the last hidden states, in models of several kinds."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForMaskedLM,
    ElectraConfig,
    ElectraForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

import lightning_eff as eff
from lightning_eff import LinearHead
from tests import families
from tests.cases import Case
from tests.models import VOCAB, Block, HuggingFace, TinyGPT, flat, hugging_face, make_batch, module
from tests.runs import checkpoints, fit, fit_yaml

NONE = "found no nonlinear layers before an output layer of"
CASES = {
    "LinearHead": Case(
        active=lambda: LinearHead(),
        neutral=lambda: LinearHead([]),
        model="bert",
        architecture=True,
        stays="LinearHead replaced .* at .*: no weights of its nonlinear layers return their input",
        refuses={
            **dict.fromkeys(("tiny_gpt", "gpt2", "llama", "vit", "videomae", "t5"), NONE),
            "classifier": "found no output layer in TinyClassifier",
        },
        lost=(TinyGPT, "tiny_gpt", NONE),
    )
}
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 40}


def build(name: str) -> Any:
    torch.manual_seed(0)
    if name == "bert":
        return hugging_face("bert", 2)
    if name == "modernbert":
        return families.module(name)
    if name == "roberta":
        return HuggingFace(RobertaForMaskedLM(RobertaConfig(**SIZES)))
    if name == "electra":
        return HuggingFace(ElectraForMaskedLM(ElectraConfig(embedding_size=32, **SIZES)))
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
    return HuggingFace(DistilBertForMaskedLM(DistilBertConfig(max_position_embeddings=40, **sizes)))


#: by model: the network below the head, the output layer, and the parameters of the layers between
PARTS = {
    "bert": ("bert", "cls.predictions.decoder", "cls.predictions.transform."),
    "modernbert": ("model", "decoder", "head."),
    "roberta": ("roberta", "lm_head.decoder", ("lm_head.dense.", "lm_head.layer_norm.")),
    "electra": ("electra", "generator_lm_head", "generator_predictions."),
    "distilbert": ("distilbert", "vocab_projector", ("vocab_transform.", "vocab_layer_norm.")),
}


@pytest.mark.parametrize("name", [*PARTS])
def test_logits_and_gradients_are_the_output_layer_s_of_hidden_states(name: str) -> None:
    plain = build(name).eval()
    net: Any = eff.apply(build(name), LinearHead()).eval()
    below, last, between = PARTS[name]
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    hidden = plain.model.get_submodule(below)(input_ids=ids).last_hidden_state
    expected = plain.model.get_submodule(last)(hidden)
    got = net.model(input_ids=ids).logits
    torch.testing.assert_close(got, expected)
    assert not torch.allclose(plain.model(input_ids=ids).logits, expected, atol=1e-2)
    for y in (got, expected):
        y.square().mean().backward()
    grads = {path: p.grad for path, p in plain.model.named_parameters()}
    left = dict(net.model.named_parameters())
    assert {path for path in grads if path.startswith(between)} == grads.keys() - left.keys() != set()
    for path, p in left.items():
        torch.testing.assert_close(p.grad, grads[path])


class Own(TinyGPT):
    """A hand-written head; the activation may be a function."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        super().__init__(2)
        self.kind = kind
        self.dense, self.act = nn.Linear(16, 16), nn.GELU()
        if kind == "shared":
            self.other = self.act
        self.narrow, self.wide = nn.Linear(16, 8), nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks or ():
            x = block(x)
        x = self.norm(x)
        if self.kind == "function":
            return self.head(F.gelu(self.dense(x)))
        if self.kind == "added":
            return self.head(x + self.act(self.dense(x)))
        if self.kind == "affine":
            return self.head(self.wide(self.narrow(x)))
        return self.head(self.act(self.dense(x)))


def test_of_a_hand_written_head_the_blocks_norm_stays() -> None:
    net, plain = eff.apply(Own("modules"), LinearHead()).eval(), Own("plain").eval()
    plain.dense, plain.act = nn.Identity(), nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    ids = make_batch("tiny_gpt")["input_ids"]
    torch.testing.assert_close(net(ids), plain(ids))
    assert "norm.weight" in net.state_dict() and "dense.weight" not in net.state_dict()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("function", rf"{NONE} Own\. head: no module outside of the blocks"),
        ("added", rf"{NONE} Own\. head: no module outside of the blocks"),
        ("affine", r"head: narrow, wide is linear already"),
        ("shared", r"head: other is used elsewhere too"),
    ],
)
def test_what_is_no_head_of_modules_is_refused_and_nothing_is_changed(kind: str, message: str) -> None:
    net = Own(kind)
    modules = [*net.modules()]
    with pytest.raises(ValueError, match=message):
        eff.apply(net, LinearHead())
    assert [id(m) for m in net.modules()] == [id(m) for m in modules]


class Offset(nn.Module):
    """A head whose code adds something to the hidden states before its first module."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.act = nn.Linear(16, 16), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.dense(x))


class Late(nn.Module):
    """A network in which code scales the transformed states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, 16), nn.ModuleList(Block(16, 0.0) for _ in range(2))
        self.transform, self.decoder = Offset(), nn.Linear(16, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        if isinstance(self.transform, Offset):
            return self.decoder(self.transform(x))
        return self.decoder(2.0 * self.transform(x))


def test_the_second_pass_finds_code_that_branches_on_the_layers() -> None:
    net = Late()
    with pytest.raises(ValueError, match=r"without transform before decoder, decoder does not get the hidden states"):
        eff.apply(net, LinearHead())
    assert isinstance(net.transform, Offset)


def test_poolers_and_wrong_names_are_refused() -> None:
    net = HuggingFace(BertForSequenceClassification(BertConfig(**SIZES)))
    with pytest.raises(ValueError, match=r"model.classifier: model.bert.pooler changes the shape from \[2, 8, 32\]"):
        eff.apply(net, LinearHead())
    with pytest.raises(ValueError, match=r"matches none of the 1 output layers of HuggingFace; .*decoder"):
        eff.apply(build("bert"), LinearHead(["encoder"]))
    technique = LinearHead(["decoder"])
    eff.apply(build("bert"), technique)
    assert technique.report() == {"removed": 32 * 32 + 32 + 2 * 32}
    with pytest.raises(ValueError, match=r"names='decoder'\): expected a list"):
        LinearHead("decoder")


def test_it_resumes_to_the_bit_and_the_plain_module_does_not_load_it(tmp_path: Path) -> None:
    net, _ = fit("bert", lambda: [LinearHead()], directory=tmp_path)
    again, t = fit("bert", lambda: [LinearHead()], resume=tmp_path / "step=4.ckpt")
    assert t.global_step == 12 and torch.equal(flat(net), flat(again))
    state = torch.load(checkpoints(tmp_path)[-1], weights_only=True)["state_dict"]
    with pytest.raises(RuntimeError, match=r"Missing key.*transform"):
        module("bert").load_state_dict(state)
    eff.apply(module("bert"), LinearHead()).load_state_dict(state)
    assert torch.equal(flat(copy.deepcopy(net)), flat(net))


def test_ties_of_the_output_layer_stay() -> None:
    net: Any = eff.apply(build("roberta"), LinearHead())
    assert net.model.lm_head.decoder.weight is net.model.roberta.embeddings.word_embeddings.weight
    assert net.model.lm_head.bias is net.model.lm_head.decoder.bias


def test_a_config_is_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fit_yaml(tmp_path, "LinearHead", {"names": ["head"]}, max_steps=2, model="TinyGPT", data="Sequences")
    assert f"lightning-eff fit: LinearHead: {NONE} TinyGPT. head: no module outside" in capsys.readouterr().err
