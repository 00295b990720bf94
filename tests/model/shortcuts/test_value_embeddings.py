"""ValueEmbeddings against attention that is written by hand; whose ids they are, how they start, and what is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_eff as eff
from lightning_eff import SeqMix, ValueEmbeddings, ValueResiduals
from lightning_eff.model.shortcuts.value_embeddings import blocks_of
from tests.cases import Case, classifier
from tests.model.attention.nets import Net, reference
from tests.model.shortcuts.nets import alike, draw, embedded, gradients, headed, loss_of, net, tokens
from tests.models import VOCAB, loader, make_batch, module, trainer

CASES = {
    "ValueEmbeddings": Case(
        active=lambda: ValueEmbeddings(),
        neutral=lambda: ValueEmbeddings(0),
        architecture=True,
        stays="a plain attention has no place for values from a table",
        refuses={
            "classifier": "has no token embedding",
            "vit": "has no token embedding",
            "translator": "follow from 2 of 2 look-ups of tokens",
        },
        lost=(classifier, "classifier", "has no token embedding"),
    )
}


def split(t: Tensor) -> Tensor:
    return t.unflatten(-1, (2, -1)).transpose(1, 2)


@pytest.mark.parametrize(
    ("tables", "readers"),
    [(3, {0: 0, 1: 1, 3: 0, 4: 1}), (1, {0: 0, 4: 0}), ([[2], [1, 4, 3]], {2: 0, 1: 1, 3: 1, 4: 1})],
)
def test_the_rule_mixes_rows_of_tables_into_values(tables: Any, readers: dict[int, int]) -> None:
    plain, at = net(), tokens()
    ours = eff.apply(copy.deepcopy(plain), ValueEmbeddings(tables, init=0.3))
    named = dict(ours.named_parameters())
    new = {name: p for name, p in named.items() if name not in dict(plain.named_parameters())}
    assert new.keys() == {f"blocks.{i}.table_lambdas" for i in readers} | {
        f"embed.value_table_{k}" for k in readers.values()
    }
    assert all(torch.equal(p, torch.tensor([0.7, 0.3]).double()) for n, p in new.items() if "lambdas" in n)
    draw(ours, "table_lambdas")
    mine = {name: p.detach().clone().requires_grad_() for name, p in new.items()}
    found = gradients(ours, loss_of(ours, at))
    x = embedded(plain, at[0])
    for i, block in enumerate(plain.blocks or ()):
        own: Any = block
        q, k, v = map(split, own.qkv(own.norm1(x)).chunk(3, -1))
        if i in readers:
            one, two = mine[f"blocks.{i}.table_lambdas"]
            v = one * v + two * split(mine[f"embed.value_table_{readers[i]}"][at[0]])
        y = reference(q, k, v, None, causal=True, scale=8**-0.5)
        x = x + own.proj(y.transpose(1, 2).flatten(2))
        x = x + own.mlp(own.norm2(x))
    loss = headed(plain, x, at[1])
    wanted = gradients(plain, loss)
    alike(found, wanted | dict(zip(mine, torch.autograd.grad(loss, [*mine.values()]), strict=True)))


def test_tables_are_shared_as_in_the_speedrun() -> None:
    assert blocks_of(range(12), 3) == [[0, 9], [1, 10], [2, 11]]
    assert blocks_of([1, 3, 5, 7], 3) == [[1, 5], [3, 7]]  # of four blocks that attend


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_it_starts_as_the_plain_module_if_asked(name: str) -> None:
    plain: Any = module(name).eval()
    batch = make_batch(name, 2)
    loss = plain.training_step(batch, 0)
    ours = eff.apply(copy.deepcopy(plain), ValueEmbeddings(init=0.0))
    start = ours.training_step(batch, 0)
    assert torch.equal(start, loss)
    start.backward()
    new = {n: p for n, p in ours.named_parameters() if n not in dict(plain.named_parameters())}
    heads = 1 if name == "llama" else 2  # grouped heads have fewer values
    assert [tuple(p.shape) for n, p in new.items() if "value_table" in n] == [(VOCAB, heads * 16)] * 2
    factors = [p for n, p in new.items() if "lambdas" in n]
    assert len(factors) == 4 and all(p.grad is not None and p.grad.abs().min() > 0 for p in factors)
    assert not torch.equal(eff.apply(copy.deepcopy(plain), ValueEmbeddings()).training_step(batch, 0), loss)


def test_first_rows_are_normal_and_without_weight_decay() -> None:
    tables = [p for n, p in eff.apply(net(), ValueEmbeddings(std=0.5)).named_parameters() if "value_table" in n]
    assert all(abs(p.std() - 0.5) < 0.05 and p.mean().abs() < 0.05 for p in tables)
    t = trainer(ValueEmbeddings(), max_steps=1)
    t.fit(module("tiny_gpt"), loader("tiny_gpt"))
    decays = {id(p): g["weight_decay"] for g in t.optimizers[0].param_groups for p in g["params"]}
    found = {n: decays[id(p)] for n, p in t.lightning_module.named_parameters()}
    assert {n for n, decay in found.items() if decay == 0.0} == {
        n for n in found if "value_table" in n or "lambdas" in n
    }


class Transposing(Net):
    """Its embedding gets ids (T, B)."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids.T).transpose(0, 1)))


@pytest.mark.parametrize("shape", [(2, 7), (5, 5)])
@pytest.mark.parametrize("kind", ["causal", "module", "encoder"])
def test_rows_are_those_of_each_values_own_id(kind: str, shape: tuple[int, int]) -> None:
    """Also in modules whose ids come in another order, with as many samples as tokens."""
    ids = torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(1))
    found: list[Tensor] = []
    for cls in (Net, Transposing):
        torch.manual_seed(0)
        ours = eff.apply(cls(kind).eval(), ValueEmbeddings(), batch={"input_ids": ids, "labels": ids})
        draw(ours, "table_lambdas", "value_table_0")
        found.append(ours(ids))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@torch.no_grad()
def test_a_cache_and_embeddings_instead_of_ids_are_refused() -> None:
    ours: Any = eff.apply(module("llama").eval(), ValueEmbeddings())
    ids = make_batch("llama", 2)["input_ids"][:, :9]
    first = ours.model(ids[:, :6], use_cache=True)
    assert torch.equal(first.logits, ours.model(ids[:, :6]).logits)
    with pytest.raises(
        ValueError, match=r"has shape \(2, 1, 1, 16\), but .* \(2, 1, 7, 16\)\. Pass all ids in each call"
    ):
        ours.model(ids[:, 6:7], past_key_values=first.past_key_values, use_cache=True)
    ours.model(ids)
    with pytest.raises(ValueError, match="attention ran without a look-up of tokens since its last pass"):
        ours.model(inputs_embeds=ours.model.get_input_embeddings().weight[ids])
    ours.model(ids)


class Twice(Net):
    """It looks up two texts before its blocks run on each."""

    def forward(self, ids: Tensor) -> Tensor:
        one, other = self.embed(ids), self.embed(ids.flip(0))
        return self.head(self.blocks(one) + self.blocks(other))


class Mixing(Net):
    """Each token is first the mean of all."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.blocks(x.mean(1, keepdim=True) + 0.0 * x))


class Prefixed(Net):
    """A token without an id stands before the others."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.blocks(torch.cat([torch.zeros_like(x[:, :1]), x], 1))[:, 1:])


class ByWeight(Net):
    """It looks up tokens in the embedding's weight."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed.weight[ids]))


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Twice, "ran in the order"),
        (Mixing, r"each depend on all tokens, in .*embeddings="),
        (Prefixed, r"of shape \(2, 2, 9, 8\) are not those of its ids of shape \(2, 8\), one by one"),
        (ByWeight, "were not seen to follow from a look-up of tokens"),
    ],
)
def test_values_that_are_not_of_single_ids_are_refused(cls: type[Net], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        eff.apply(cls("causal"), ValueEmbeddings())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init": 0, "std": 0}, r"ValueEmbeddings\(init=0, std=0\): neither .* gradient"),
        ({"tables": [[0, 5]]}, r"block 5 cannot read them; .* which are 0, 1, 2, 3, 4"),
        ({"tables": [[0, 1], [1, 2]]}, r"block 1 cannot read them; .* at most once"),
        ({"tables": [[0, 0]]}, r"ValueEmbeddings\(tables=\[\[0, 0\]\]\)"),
        ({"tables": -1}, r"ValueEmbeddings\(tables=-1\)"),
        ({"init": 1.5}, r"ValueEmbeddings\(init=1.5\)"),
        ({"embeddings": "sauce"}, r"no nn.Embedding is named 'sauce'"),
        ({"embeddings": "position"}, "were not seen to follow|do not follow"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        eff.apply(net(), ValueEmbeddings(**settings))


def test_it_stacks_with_the_mix_of_first_values_in_any_order() -> None:
    plain, at = net(), tokens()
    both = ValueEmbeddings(), ValueResiduals()
    one, other = (eff.apply(copy.deepcopy(plain), *order) for order in (both, both[::-1]))
    alike(gradients(one, loss_of(one, at)), gradients(other, loss_of(other, at)))
    with pytest.raises(ValueError, match="it mixes token embeddings"):
        trainer(ValueEmbeddings(), SeqMix(), max_steps=1).fit(module("tiny_gpt"), loader("tiny_gpt"))


def test_a_copy_looks_up_for_itself() -> None:
    ours = eff.apply(net(), ValueEmbeddings())
    other = copy.deepcopy(ours)
    ids, labels = tokens()
    expected = gradients(ours, loss_of(ours, (ids, labels)))
    loss = loss_of(other, (ids, labels))
    loss_of(ours, (labels, ids))  # between the copy's forward and backward pass
    alike(gradients(other, loss), expected)
