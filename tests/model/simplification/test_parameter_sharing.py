"""Shared parameters: outputs and gradients are ALBERT's, optimizers hold each once, and the plain module loads them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AlbertConfig, AlbertModel, BertConfig, BertModel

import lightning_eff as eff
from lightning_eff import LoRA, ParameterSharing, ReZero
from lightning_eff._core._architecture.technique import change
from lightning_eff.model.simplification.parameter_sharing import first_of_group
from tests.cases import Case, no_blocks
from tests.models import VOCAB, HuggingFace, TinyGPT, flat, make_batch, module
from tests.runs import checkpoints, fit, fit_yaml

CASES = {
    "ParameterSharing": Case(
        active=lambda: ParameterSharing(),
        neutral=lambda: ParameterSharing(names=[]),
        architecture=True,
        own_optimizer=True,
        refuses={"t5": "2 stacks of blocks in HuggingFace are equally long"},
        lost=(no_blocks, "classifier", "found no stack"),
    )
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
#: names in a BERT layer, and in ALBERT's
NAMES = {
    "attention.self.": "attention.",
    "attention.output.LayerNorm.": "attention.LayerNorm.",
    "attention.output.": "attention.",
    "intermediate.dense.": "ffn.",
    "output.dense.": "ffn_output.",
    "output.LayerNorm.": "full_layer_layer_norm.",
}


def albert_name(name: str) -> str:
    old = next(old for old in NAMES if name.startswith(old))
    return NAMES[old] + name.removeprefix(old)


@pytest.mark.parametrize("groups", [1, 2])
def test_outputs_and_gradients_are_those_of_albert(groups: int) -> None:
    torch.manual_seed(0)
    bert = BertModel(BertConfig(**SIZES), add_pooling_layer=False).double().eval()
    albert = AlbertModel(AlbertConfig(embedding_size=16, num_hidden_groups=groups, **SIZES), add_pooling_layer=False)
    albert = albert.double().eval()
    net = eff.apply(bert, ParameterSharing(groups))
    albert.embeddings.load_state_dict(net.embeddings.state_dict(), strict=False)
    with torch.no_grad():
        albert.encoder.embedding_hidden_mapping_in.weight.copy_(torch.eye(16))
        albert.encoder.embedding_hidden_mapping_in.bias.zero_()
    of: dict[str, str] = {}
    for group in range(groups):
        layer: Any = albert.encoder.albert_layer_groups[group].albert_layers[0]
        first = net.encoder.layer[group * 4 // groups]
        layer.load_state_dict({albert_name(name): t for name, t in first.state_dict().items()})
        prefix = f"encoder.albert_layer_groups.{group}.albert_layers.0."
        of |= {f"encoder.layer.{group * 4 // groups}.{n}": prefix + albert_name(n) for n, _ in first.named_parameters()}
    ids = torch.randint(VOCAB, (2, 9))
    got, expected = (m(input_ids=ids).last_hidden_state for m in (net, albert))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    for y in (got, expected):
        y.pow(3).sum().backward()
    grads = {name: p.grad for name, p in albert.named_parameters()}
    ours = {name: p for name, p in net.named_parameters() if name.startswith("encoder")}
    assert ours.keys() == of.keys()
    for name, p in ours.items():
        torch.testing.assert_close(p.grad, grads[of[name]], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 6])
def test_groups_are_those_of_the_paper(groups: int) -> None:
    for index in range(12):
        group = int(index / (12 / groups))
        assert first_of_group(index, 12, groups) == group * 12 // groups


def test_an_optimizer_holds_each_once_and_a_checkpoint_loads_into_the_plain_module(tmp_path: Path) -> None:
    net: Any
    net, t = fit("tiny_gpt", lambda: [ParameterSharing(2)], directory=tmp_path)
    again, _ = fit("tiny_gpt", lambda: [ParameterSharing(2)], resume=tmp_path / "step=4.ckpt")
    assert torch.equal(flat(net), flat(again))
    plain: Any = module("tiny_gpt")
    block = sum(p.numel() for p in plain.blocks[0].parameters())
    held = [p for group in t.optimizers[0].param_groups for p in group["params"]]
    assert len(held) == len({*map(id, held)})
    assert sum(p.numel() for p in held) == sum(p.numel() for p in plain.parameters()) - 2 * block
    last = checkpoints(tmp_path)[-1]
    state = torch.load(last, weights_only=True)["state_dict"]
    assert state.keys() == plain.state_dict().keys()
    assert len({t.untyped_storage().data_ptr() for t in state.values()}) == len(state) - 2 * len(
        net.blocks[0].state_dict()
    )
    ids = make_batch("tiny_gpt")["input_ids"]
    plain.load_state_dict(state)
    exported: Any = eff.export(net)
    for other in (plain, exported, copy.deepcopy(net)):
        assert torch.equal(other.eval()(ids), net.eval()(ids))
    assert exported.blocks[1].proj.weight is not exported.blocks[0].proj.weight
    assert len([*exported.parameters()]) == len([*plain.parameters()])
    assert copy.deepcopy(net).blocks[1].proj.weight is not net.blocks[0].proj.weight
    with torch.no_grad():
        for p in exported.blocks[1].parameters():
            p.zero_()
    assert float(net.blocks[0].proj.weight.detach().norm()) > 0


def test_names_choose_and_everything_can_be_undone() -> None:
    technique = ParameterSharing(names=["mlp.*", "norm2.bias"])
    net: Any = eff.apply(TinyGPT(4), technique)
    a, b = net.blocks[0], net.blocks[3]
    assert a.mlp[0].weight is b.mlp[0].weight and a.qkv.weight is not b.qkv.weight
    assert a.norm2.bias is b.norm2.bias and a.norm2.weight is not b.norm2.weight
    assert technique.report() == {"removed": 3 * (16 + sum(p.numel() for p in a.mlp.parameters()))}

    net = TinyGPT(4)
    had = {name: id(p) for name, p in net.named_parameters()}
    changed = change(net, [ParameterSharing()], seed=0)
    assert len([*net.named_parameters()]) < len(had)
    changed.undo()
    assert {name: id(p) for name, p in net.named_parameters()} == had


@pytest.mark.parametrize("technique", [lambda: ReZero(), lambda: LoRA(2)], ids=["ReZero", "LoRA"])
def test_parameters_that_others_add_are_shared_and_exported(technique: Any) -> None:
    torch.manual_seed(0)
    net: Any = eff.apply(TinyGPT(4), technique(), ParameterSharing(2))
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn_like(p))
    ids = make_batch("tiny_gpt")["input_ids"]
    first, second = ([*net.blocks[i].parameters()] for i in (0, 1))
    assert all(a is b for a, b in zip(first, second, strict=True))
    exported: Tensor = eff.export(net).eval()(ids)
    torch.testing.assert_close(exported, net.eval()(ids), rtol=1e-4, atol=1e-4)


def test_what_cannot_be_shared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for groups in (3, 4, 5):
        with pytest.raises(ValueError, match=rf"groups={groups}\): .*blocks.* has 4 blocks; expected a proper divisor"):
            eff.apply(TinyGPT(4), ParameterSharing(groups))
    with pytest.raises(
        ValueError, match=r"matches none of the 12 parameters of a block of TinyGPT; .*Nearest: norm1.weight"
    ):
        eff.apply(TinyGPT(4), ParameterSharing(names=["query.*"]))
    with pytest.raises(ValueError, match=r"groups=0\): expected an integer >= 1"):
        ParameterSharing(0)
    net: Any = TinyGPT(2)
    for block in net.blocks:
        block.proj.weight = net.blocks[0].proj.weight
    with pytest.raises(ValueError, match="share these parameters already"):
        eff.apply(net, ParameterSharing(names=["proj.weight"]))
    with pytest.raises(SystemExit):
        fit_yaml(tmp_path, "ParameterSharing", {"groups": 3}, max_steps=2, model="TinyGPT", data="Sequences")
    assert "lightning-eff fit: ParameterSharing(groups=3): 'blocks' (4 x Block) has 4 blocks" in capsys.readouterr().err


def test_heads_outside_of_blocks_stay_tied() -> None:
    net: Any = eff.apply(HuggingFace(module("gpt2").model), ParameterSharing())  # pyright: ignore[reportArgumentType]
    assert net.model.lm_head.weight is net.model.transformer.wte.weight
