"""EmbeddingShortcuts against blocks that are run by hand; how they start, and what is refused."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_eff as eff
from lightning_eff import EmbeddingShortcuts, UShapedSkips
from tests.cases import Case, no_blocks
from tests.model.shortcuts.nets import alike, draw, embedded, gradients, headed, loss_of, net, tokens
from tests.models import TinyGPT, make_batch, module

CASES = {
    "EmbeddingShortcuts": Case(
        active=lambda: EmbeddingShortcuts(),
        neutral=lambda: EmbeddingShortcuts([]),
        architecture=True,
        stays="a plain block has no place for the embedding",
        lost=(no_blocks, "classifier", "found no stack of"),
    )
}


def by_hand(plain: Any, lambdas: dict[int, Tensor], ids: Tensor) -> Tensor:
    x_0 = x = embedded(plain, ids)
    for i, block in enumerate(plain.blocks):
        x = block(lambdas[i][0] * x + lambdas[i][1] * x_0 if i in lambdas else x)
    return x


@pytest.mark.parametrize("blocks", [None, [3], [1, 2, 4]])
def test_the_rule_is_a_weighted_sum_with_the_embedding_before_each_block(blocks: list[int] | None) -> None:
    plain, at = net(), tokens()
    ours = eff.apply(copy.deepcopy(plain), EmbeddingShortcuts(blocks))
    draw(ours, "shortcut_lambdas")
    named = dict(ours.named_parameters())
    found = gradients(ours, loss_of(ours, at))
    lambdas = {i: named.get(f"blocks.{i}.shortcut_lambdas") for i in range(5)}
    hand = {i: t.detach().clone().requires_grad_() for i, t in lambdas.items() if t is not None}
    assert sorted(hand) == (blocks or [0, 1, 2, 3, 4])
    loss = headed(plain, by_hand(plain, hand, at[0]), at[1])
    expected = gradients(plain, loss)
    for i, t in hand.items():
        expected[f"blocks.{i}.shortcut_lambdas"] = torch.autograd.grad(loss, t, retain_graph=True)[0]
    alike(found, expected)


@pytest.mark.parametrize("name", ["translator", "gpt2", "llama", "bert", "vit", "classifier"])
def test_it_starts_as_the_plain_module_and_learns(name: str) -> None:
    plain: Any = module(name).eval()
    batch = make_batch(name, 2)
    ours = eff.apply(copy.deepcopy(plain), EmbeddingShortcuts())
    loss = ours.training_step(batch, 0)
    assert torch.equal(loss, plain.training_step(batch, 0))
    loss.backward()
    new = {n: p for n, p in ours.named_parameters() if n not in dict(plain.named_parameters())}
    assert len(new) == (3 if name == "classifier" else 4)
    assert all(p.grad is not None and p.grad.abs().min() > 0 for p in new.values())
    assert {n for n in ours.state_dict() if n not in plain.state_dict()} == {*new}


def test_skips_come_before_the_shortcut_as_in_the_source() -> None:
    plain, at = net(4), tokens()
    ours = eff.apply(copy.deepcopy(plain), UShapedSkips(), EmbeddingShortcuts())
    draw(ours, "shortcut_lambdas", "skip_weight")
    named = dict(ours.named_parameters())
    outputs: list[Tensor] = []
    x_0 = x = embedded(plain, at[0])
    for i, block in enumerate(plain.blocks or ()):
        x = x + named[f"blocks.{i}.skip_weight"] * outputs.pop() if i >= 2 else x
        lambdas = named[f"blocks.{i}.shortcut_lambdas"]
        x = block(lambdas[0] * x + lambdas[1] * x_0)
        outputs += [x] if i < 2 else []
    torch.testing.assert_close(loss_of(ours, at), headed(plain, x, at[1]), rtol=1e-12, atol=0)


def test_copies_and_pickles_have_connections_of_their_own() -> None:
    at = tokens()
    ours = eff.apply(net(4), EmbeddingShortcuts(), UShapedSkips())
    draw(ours, "shortcut_lambdas", "skip_weight")
    loss = loss_of(ours, at)  # what it keeps is no leaf, which torch does not copy
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(loss_of(other, at), loss)
        with torch.no_grad():
            other.embed.weight[:, 0].add_(1.0)
        assert not torch.equal(loss_of(other, at), loss)
        assert torch.equal(loss_of(ours, at), loss)


class Parallel(TinyGPT):
    """Its blocks all read the embedding."""

    def forward(self, ids: Tensor) -> Tensor:
        x = embedded(self, ids)
        return self.head(self.norm(torch.stack([block(x) for block in self.blocks or ()]).sum(0)))


class Twice(TinyGPT):
    """It runs its blocks twice."""

    def forward(self, ids: Tensor) -> Tensor:
        x = embedded(self, ids)
        for block in [*(self.blocks or ()), *(self.blocks or ())]:
            x = block(x)
        return self.head(self.norm(x))


class Shorter(TinyGPT):
    """It drops tokens between its blocks."""

    def forward(self, ids: Tensor) -> Tensor:
        x = embedded(self, ids)
        for block in self.blocks or ():
            x = block(x)[:, :-1]
        return self.head(self.norm(x))


class Fails(TinyGPT):
    def forward(self, ids: Tensor) -> Tensor:
        raise RuntimeError("planted")


@pytest.mark.parametrize(
    ("plain", "says"),
    [
        (Parallel, "run side by side|ran in the order|not seen to feed"),
        (Twice, r"ran in the order \[0, 1, 2, 3, 0"),
        (Shorter, "have hidden states of several shapes"),
        (Fails, r"could not check .* raised RuntimeError \(planted\).* Give a batch"),
        (lambda: nn.Sequential(nn.Linear(3, 3)), "found no stack of repeated blocks"),
    ],
)
def test_what_is_no_chain_is_refused(plain: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        eff.apply(plain(), EmbeddingShortcuts())


def test_blocks_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks=\[1, 4\]\): block 4 cannot have .* from 0 to 3"):
        eff.apply(net(4), EmbeddingShortcuts([1, 4]))
    with pytest.raises(ValueError, match=r"EmbeddingShortcuts\(blocks=\[-1\]"):
        EmbeddingShortcuts([-1])
