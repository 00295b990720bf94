"""Tensors that later blocks use, in modules that recompute their blocks, run several passes, or write in place."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_eff as eff
from lightning_eff import EmbeddingShortcuts, UShapedSkips, ValueEmbeddings, ValueResiduals
from tests.model.shortcuts.nets import (
    Recomputed,
    again,
    alike,
    draw,
    gradients,
    in_place,
    loss_of,
    plainly,
    reentrantly,
    tokens,
)
from tests.models import make_batch, module

EACH = [EmbeddingShortcuts, lambda: UShapedSkips(), lambda: ValueResiduals(), lambda: ValueEmbeddings()]
NAMES = ("shortcut_lambdas", "skip_weight", "value_lambdas", "table_lambdas")


def made(technique: Callable[[], Any], call: Callable[[Any, Tensor], Tensor]) -> Any:
    torch.manual_seed(0)
    net = eff.apply(Recomputed(plainly).double(), technique())
    net.call = call  # pyright: ignore[reportAttributeAccessIssue]
    draw(net, *NAMES)
    return net


@pytest.mark.parametrize("technique", EACH)
def test_recomputed_blocks_have_the_same_gradients(technique: Callable[[], Any]) -> None:
    at = tokens()
    for _ in range(2):  # a second pass follows a backward pass
        net = made(technique, again)
        loss_of(net, at)  # without a backward pass
        loss = loss_of(net, at)
        loss.backward()
        expected = made(technique, plainly)
        alike(
            {n: p.grad for n, p in net.named_parameters()},
            {n: g for n, g in gradients(expected, loss_of(expected, at)).items() if n != "loss"},
        )


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("technique", EACH)
def test_each_of_several_passes_is_recomputed_with_its_own_tensors(technique: Callable[[], Any], frozen: bool) -> None:
    """Those of a frozen first block take no gradient. A pass for evaluation comes between the others and their backward."""
    ids, labels = tokens()
    found: list[dict[str, Tensor]] = []
    for call in (plainly, again):
        net = made(technique, call)
        for name, p in net.named_parameters():
            p.requires_grad_(not frozen or not name.startswith(("embed", "position", "blocks.0")))
        losses = loss_of(net, (ids, labels)), loss_of(net, (labels, ids))
        with torch.no_grad():
            loss_of(net, (ids.flip(0), labels))
        (losses[0] + 2.0 * losses[1]).backward()
        found.append({n: p.grad for n, p in net.named_parameters() if p.grad is not None})
    alike(*found)


@pytest.mark.parametrize("technique", EACH)
def test_a_pass_is_forgotten_with_its_graph(technique: Callable[[], Any]) -> None:
    net = made(technique, again)
    feeds = [f for m in net.modules() for f in (*getattr(m, "feeds", ()), *getattr(m, "value_feeds", ()))]
    losses = [loss_of(net, tokens()) for _ in range(4)]
    assert len(feeds[-1].carried._waiting) == 3
    torch.stack(losses).sum().backward()
    del losses
    loss_of(net, tokens())
    assert not feeds[-1].carried._waiting


@pytest.mark.parametrize("technique", EACH)
def test_reentrant_checkpoints_are_refused(technique: Callable[[], Any]) -> None:
    net = made(technique, reentrantly)
    with pytest.raises(ValueError, match=r"would be lost\. Set use_reentrant=False"):
        loss_of(net, tokens()).backward()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("technique", EACH[:2])
def test_checkpointing_of_hugging_face_is_around_the_block_and_exact(
    technique: Callable[[], Any], reentrant: bool
) -> None:
    batch, plain = make_batch("llama", 2), module("llama").double()
    ours: list[Any] = [eff.apply(copy.deepcopy(plain), technique()) for _ in range(2)]
    ours[1].model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
    for net in ours:
        draw(net, *NAMES)
        net.train().model(**batch).loss.backward()
    alike(*({n: p.grad for n, p in net.named_parameters()} for net in ours))


def test_a_hidden_state_that_is_changed_in_place_is_refused() -> None:
    for technique in (lambda: EmbeddingShortcuts([2]), lambda: UShapedSkips(1)):
        net = made(technique, in_place)
        with pytest.raises(ValueError, match="changed a hidden state in place"):
            loss_of(net, tokens())
        with torch.inference_mode():  # there it was copied, because nothing tells
            loss_of(net, tokens())


def test_evaluation_keeps_nothing() -> None:
    for technique in EACH:
        net = made(technique, plainly).eval()
        with torch.no_grad():
            loss_of(net, tokens())
        feeds = [f for m in net.modules() for f in (*getattr(m, "feeds", ()), *getattr(m, "value_feeds", ()))]
        assert feeds and all(not f.carried._last.kept for f in feeds)
