"""UShapedSkips against blocks that are run by hand; how they start, and what is refused."""

import copy
from typing import Any

import pytest
import torch

import lightning_eff as eff
from lightning_eff import UShapedSkips
from tests.cases import Case, no_blocks
from tests.model.shortcuts.nets import alike, draw, embedded, gradients, headed, loss_of, net, tokens
from tests.models import make_batch, module

CASES = {
    "UShapedSkips": Case(
        active=lambda: UShapedSkips(),
        neutral=lambda: UShapedSkips(0),
        architecture=True,
        stays="a plain block has no place for the output of another one",
        lost=(no_blocks, "classifier", "found no stack of"),
    )
}


@pytest.mark.parametrize(
    ("blocks", "pairs", "expected"),
    [(5, None, {3: 1, 4: 0}), (6, None, {3: 2, 4: 1, 5: 0}), (6, 1, {5: 0}), (3, 9, {2: 0})],
)
def test_the_rule_adds_the_mirror_image_of_each_block(blocks: int, pairs: int | None, expected: dict[int, int]) -> None:
    plain, at = net(blocks), tokens()
    ours = eff.apply(copy.deepcopy(plain), UShapedSkips(pairs))
    named = dict(ours.named_parameters())
    assert {n: p.item() for n, p in named.items() if "skip" in n} == {f"blocks.{j}.skip_weight": 1.0 for j in expected}
    draw(ours, "skip_weight")
    weights = {j: named[f"blocks.{j}.skip_weight"].detach().clone().requires_grad_() for j in expected}
    found = gradients(ours, loss_of(ours, at))
    x, outputs = embedded(plain, at[0]), []
    for j, block in enumerate(plain.blocks or ()):
        x = block(x + weights[j] * outputs[expected[j]] if j in expected else x)
        outputs.append(x)
    loss = headed(plain, x, at[1])
    wanted = gradients(plain, loss)
    for j, w in weights.items():
        wanted[f"blocks.{j}.skip_weight"] = torch.autograd.grad(loss, w, retain_graph=True)[0]
    alike(found, wanted)


@pytest.mark.parametrize("name", ["translator", "gpt2", "llama", "bert", "vit", "classifier"])
def test_it_starts_as_the_plain_module_if_asked(name: str) -> None:
    plain: Any = module(name).eval()
    batch = make_batch(name, 2)
    loss = plain.training_step(batch, 0)
    ours = eff.apply(copy.deepcopy(plain), UShapedSkips(init=0.0))
    start = ours.training_step(batch, 0)
    assert torch.equal(start, loss)
    start.backward()
    assert all(p.grad is not None and p.grad != 0 for n, p in ours.named_parameters() if "skip" in n)
    assert not torch.equal(eff.apply(copy.deepcopy(plain), UShapedSkips()).training_step(batch, 0), loss)


def test_few_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has 2 blocks, and UShapedSkips needs 3 or more"):
        eff.apply(net(2), UShapedSkips())
