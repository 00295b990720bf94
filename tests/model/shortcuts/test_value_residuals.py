"""ValueResiduals against attention that is written by hand; every kind of attention, caches, and what is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_eff as eff
from lightning_eff import ValueResiduals, WindowPattern
from tests.cases import Case, classifier
from tests.model.attention.nets import Net, reference
from tests.model.shortcuts.nets import alike, draw, embedded, gradients, headed, loss_of, net, tokens
from tests.models import VOCAB, make_batch, module

CASES = {
    "ValueResiduals": Case(
        active=lambda: ValueResiduals(),
        neutral=lambda: ValueResiduals(blocks=[]),
        architecture=True,
        stays="a plain attention has no place for the values of another one",
        refuses={"classifier": "found no attention in TinyClassifier"},
        lost=(classifier, "classifier", "found no attention in TinyClassifier"),
    )
}


def split(t: Tensor) -> Tensor:
    return t.unflatten(-1, (2, -1)).transpose(1, 2)


@pytest.mark.parametrize("blocks", [None, [2, 4]])
def test_the_rule_mixes_the_first_values_into_all(blocks: list[int] | None) -> None:
    plain, at = net(), tokens()
    ours = eff.apply(copy.deepcopy(plain), ValueResiduals(0.3, blocks=blocks))
    named = dict(ours.named_parameters())
    new = {i: named[f"blocks.{i}.value_lambdas"] for i in blocks or [1, 2, 3, 4]}
    assert len(named) == len([*plain.parameters()]) + len(new)
    assert all(torch.equal(p, torch.tensor([0.3, 0.7]).double()) for p in new.values())
    draw(ours, "value_lambdas")
    lambdas = {i: p.detach().clone().requires_grad_() for i, p in new.items()}
    found = gradients(ours, loss_of(ours, at))
    x, first = embedded(plain, at[0]), torch.empty(0)
    for i, block in enumerate(plain.blocks or ()):
        own: Any = block
        q, k, v = map(split, own.qkv(own.norm1(x)).chunk(3, -1))
        first = v if i == 0 else first
        if i in lambdas:
            v = lambdas[i][0] * first + lambdas[i][1] * v
        y = reference(q, k, v, None, causal=True, scale=8**-0.5)
        x = x + own.proj(y.transpose(1, 2).flatten(2))
        x = x + own.mlp(own.norm2(x))
    loss = headed(plain, x, at[1])
    wanted = gradients(plain, loss)
    for i, p in lambdas.items():
        wanted[f"blocks.{i}.value_lambdas"] = torch.autograd.grad(loss, p, retain_graph=True)[0]
    alike(found, wanted)


@pytest.mark.parametrize("name", ["translator", "gpt2", "llama", "bert", "vit"])
def test_it_starts_as_the_plain_module_if_asked(name: str) -> None:
    plain: Any = module(name).eval()
    batch = make_batch(name, 2)
    loss = plain.training_step(batch, 0)
    ours = eff.apply(copy.deepcopy(plain), ValueResiduals(0.0))
    start = ours.training_step(batch, 0)
    assert torch.equal(start, loss)
    start.backward()
    new = [p for n, p in ours.named_parameters() if "value_lambdas" in n]
    assert len(new) == 3 and all(p.grad is not None and p.grad.abs().min() > 0 for p in new)
    assert not torch.equal(eff.apply(copy.deepcopy(plain), ValueResiduals()).training_step(batch, 0), loss)


@pytest.mark.parametrize("kind", ["plain", "causal", "heads in front", "module", "encoder"])
def test_hand_written_attention_reads_only_the_first_values_if_told_so(kind: str) -> None:
    """With lambda = (1, 0), the second block's own values have no effect, and the first block's have."""
    torch.manual_seed(0)
    plain = Net(kind).eval()
    ids = torch.randint(0, VOCAB, (2, 7))
    ours = eff.apply(copy.deepcopy(plain), ValueResiduals(1.0)).eval()
    weights = [p for n, p in ours.named_parameters() if p.shape in ((48, 16), (16 * 3, 16))]
    assert len(weights) >= 2
    with torch.no_grad():
        start = ours(ids)
        assert (start - plain(ids)).abs().max() > 1e-4
        second = [p for n, p in ours.named_parameters() if ("qkv.weight" in n or "in_proj_weight" in n) and ".1." in n][
            -1
        ]
        second[32:].normal_()
        torch.testing.assert_close(ours(ids), start, rtol=0, atol=0)


def test_decoders_with_cross_attention_mix_each_kind_with_its_own() -> None:
    plain = module("t5").eval()
    with pytest.raises(ValueError, match=r"equally long.*layers="):
        eff.apply(copy.deepcopy(plain), ValueResiduals())
    ours = eff.apply(copy.deepcopy(plain), ValueResiduals(layers="model.decoder.block"))
    new = [n for n, _ in ours.named_parameters() if "value_lambdas" in n]
    assert [n.partition("layer.")[2] for n in new] == [
        "0.SelfAttention.value_lambdas",
        "1.EncDecAttention.value_lambdas",
    ] * 3


@torch.no_grad()
def test_generation_with_a_cache_equals_that_without() -> None:
    ours: Any = eff.apply(module("llama").eval(), ValueResiduals())
    draw(ours, "value_lambdas")
    ids = make_batch("llama", 2)["input_ids"][:, :9]
    whole = ours.model(ids).logits[:, -1]
    step = ours.model(ids[:, :6], use_cache=True)
    for i in range(6, 9):
        step = ours.model(ids[:, i : i + 1], past_key_values=step.past_key_values, use_cache=True)
    torch.testing.assert_close(step.logits[:, -1], whole, rtol=1e-4, atol=1e-5)


class Shared(nn.Module):
    """An attention that a block calls twice."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.attention(x, x, x, need_weights=False)[0]
        return x


def test_attention_that_runs_twice_in_a_block_is_refused() -> None:
    plain = Net()
    plain.blocks = nn.Sequential(Shared(), Shared())
    with pytest.raises(ValueError, match="attends several times in a pass"):
        eff.apply(plain, ValueResiduals())
    with pytest.raises(ValueError, match=r"blocks=\[0\]\): block 0 cannot have .* from 1 to 4"):
        eff.apply(net(), ValueResiduals(blocks=[0]))
    with pytest.raises(ValueError, match=r"ValueResiduals\(init=1.5\)"):
        ValueResiduals(1.5)


def test_a_batch_that_is_given_runs_the_modules_own_step() -> None:
    found = eff.apply(module("tiny_gpt"), ValueResiduals(), batch=make_batch("tiny_gpt"))
    assert sum(name.endswith("lambdas") for name, _ in found.named_parameters()) == 3


def test_multihead_attention_takes_values_and_windows_together() -> None:
    plain = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True), 2, enable_nested_tensor=False
    )
    x = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(0))
    one = eff.apply(copy.deepcopy(plain), ValueResiduals(), WindowPattern(3, pattern="S"))
    other = eff.apply(copy.deepcopy(plain), WindowPattern(3, pattern="S"), ValueResiduals())
    with torch.no_grad():
        found = one(x)
    torch.testing.assert_close(found, other(x))
    whole, mixed = (eff.apply(copy.deepcopy(plain), t)(x) for t in (ValueResiduals(), WindowPattern(3, pattern="S")))
    assert not torch.allclose(found, whole) and not torch.allclose(found, mixed)
