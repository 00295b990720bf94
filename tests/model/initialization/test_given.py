"""Branches and attention that are named: what is found is what is named, and what is not there is answered in words."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_eff as eff
from lightning_eff import LSUV, Fixup, OrthogonalInit, ReZero, TFixup, ZerO, ZeroProjections
from lightning_eff._core.technique import Technique
from tests.model.initialization.begun import begun
from tests.model.initialization.test_orthogonal_init import orthonormal
from tests.models import VOCAB, TinyGPT, hugging_face, make_batch

QKV = "query+key+value"
OF_GPT: Any = {
    "lasts": ["blocks.*.proj", "blocks.*.mlp.2"],
    "branches": [["blocks.*.qkv", "blocks.*.proj"], ["blocks.*.mlp.0.weight", "blocks.*.mlp.2.weight"]],
    "attention": [{QKV: "blocks.*.qkv", "output": "blocks.*.proj"}],
}
OF_GPT2: Any = {
    "lasts": ["*.attn.c_proj", "model.transformer.h.?.mlp.c_proj.weight"],
    "branches": [["*.h.*.c_attn", "*.attn.c_proj"], ["*.mlp.c_fc", "*.mlp.c_proj"]],
    "attention": [{QKV: "*.c_attn", "output": "*.attn.c_proj"}],
}
NETWORKS: dict[str, tuple[Callable[[], Any], Any]] = {
    "tiny_gpt": (lambda: TinyGPT(2, dropout=0.0), OF_GPT),
    "gpt2": (lambda: hugging_face("gpt2", 2), OF_GPT2),
}
TECHNIQUES: dict[str, tuple[Callable[[], Technique], Callable[[Any], Technique]]] = {
    "TFixup": (TFixup, lambda given: TFixup(branches=given["branches"], attention=given["attention"])),
    "OrthogonalInit": (OrthogonalInit, lambda given: OrthogonalInit(attention=given["attention"])),
    "LSUV": (LSUV, lambda given: LSUV(attention=given["attention"])),
    "ZerO": (ZerO, lambda given: ZerO(branches=given["lasts"], attention=given["attention"])),
    "ZeroProjections": (ZeroProjections, lambda given: ZeroProjections(branches=given["lasts"])),
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_what_is_named_is_what_is_found(network: str, technique: str) -> None:
    build, given = NETWORKS[network]
    found, named = TECHNIQUES[technique]
    expected = begun(build, make_batch(network), found()).state_dict()
    for name, value in begun(build, make_batch(network), named(given)).state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_architectures_take_patterns() -> None:
    for one, other in (
        (Fixup(branches=OF_GPT["branches"], head="head"), Fixup()),
        (ReZero(branches=OF_GPT["lasts"]), ReZero()),
    ):
        states = []
        for technique in (one, other):
            torch.manual_seed(0)
            states.append(eff.apply(TinyGPT(2), technique).state_dict())
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


class Unseen(pl.LightningModule):
    """Attention without a softmax, whose queries, keys and values one map makes, added by a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch["input_ids"])
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = torch.maximum(x, self.proj(torch.relu(q @ k.mT) @ v))
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_what_is_not_found_can_be_named() -> None:
    batch = make_batch("tiny_gpt")
    given: Any = [{QKV: "qkv", "output": "proj"}]
    for part in begun(Unseen, batch, OrthogonalInit(attention=given)).qkv.weight.chunk(3):
        orthonormal(part, 1.0)
    together = begun(Unseen, batch, OrthogonalInit()).qkv.weight
    with pytest.raises(AssertionError):  # one map, of which no part is orthonormal by itself
        orthonormal(together[:16], 1.0)
    with pytest.raises(ValueError, match=r"found 0 residual branches.*branches=\[\[...\]\] and attention=\[\{...\}\]"):
        begun(Unseen, batch, TFixup())
    torch.manual_seed(0)
    plain = Unseen()
    m = begun(Unseen, batch, TFixup(branches=[["qkv", "proj"]], attention=given, draw=False))
    torch.testing.assert_close(m.qkv.weight[:32], plain.qkv.weight[:32], rtol=0, atol=0)
    torch.testing.assert_close(m.qkv.weight[32:], 0.67 * plain.qkv.weight[32:])
    torch.testing.assert_close(m.proj.weight, 0.67 * plain.proj.weight)
    with pytest.raises(ValueError, match=r"Name the weights in which they end by branches"):
        begun(Unseen, batch, ZeroProjections())
    m = begun(Unseen, batch, ZeroProjections(branches=["proj"], head=False))
    assert not m.proj.weight.any() and not m.proj.bias.any() and m.head.weight.any()


@pytest.mark.parametrize(
    ("technique", "message"),
    [
        (ZeroProjections(branches=["blocks.0.prj"]), r"has no weight.*Did you mean blocks\.[01]\.proj"),
        (ZerO(branches=["blocks.*.porj"]), r"ZerO\(branches=\['blocks.\*.porj'.*Did you mean blocks\.[01]\.proj"),
        (
            TFixup(branches=[["blocks.*.up", "blocks.*.proj"]]),
            r"branches=\['blocks.\*.up'.*has no weight.*Did you mean",
        ),
        (
            TFixup(branches=[["blocks.0.qkv", "blocks.*.proj"]]),
            r"'blocks.0.qkv' 1, 'blocks.\*.proj' 2.*as many of each",
        ),
        (
            OrthogonalInit(attention=[{QKV: "blocks.*.qvk"}]),
            r"attention=\['blocks.\*.qvk'.*Did you mean blocks\.[01]\.qkv",
        ),
        (LSUV(attention=[{QKV: "blocks.*.proj"}]), r"blocks.0.proj.weight of shape \(16, 16\).*3 equal parts"),
        (
            OrthogonalInit(maps=["blocks.0.qvk.weight"]),
            r"'blocks.0.qvk.weight'.* matches no weight.*Did you mean blocks.0.qkv.weight",
        ),
    ],
)
def test_names_that_are_not_there_are_answered(technique: Technique, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        begun(lambda: TinyGPT(2), make_batch("tiny_gpt"), technique)


@pytest.mark.parametrize(
    "attention", ["qkv", [{"query": "q"}], [{QKV: 3}], [{"query+key": "qk", "value": "v", "outputs": "o"}], ["qkv"]]
)
def test_attention_that_says_too_little_is_refused(attention: Any) -> None:
    with pytest.raises(ValueError, match=r"attention=.*expected a list of mappings of 'query'"):
        OrthogonalInit(attention=attention)
    with pytest.raises(
        ValueError, match="expected a list of names or patterns of the weights in which residual branches end"
    ):
        ZeroProjections(branches="proj")
    with pytest.raises(ValueError, match="expected a list of lists, each with the names of a branch's weights"):
        TFixup(branches=["proj"])  # pyright: ignore[reportArgumentType]
