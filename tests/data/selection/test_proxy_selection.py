"""ProxySelection: the first blocks alone score, those of largest loss are trained on, and its errors."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_eff.data.selection.ordered_sgd import OrderedSGD
from lightning_eff.data.selection.proxy_selection import ProxySelection, num_blocks
from lightning_eff.model.growth.progressive_stacking import ProgressiveStacking
from tests.cases import Case, no_blocks
from tests.data.selection.test_ordered_sgd import ResNet
from tests.data.selection.test_selective_backprop import gradient, rows_of, still
from tests.models import TinyClassifier, TinyGPT, loader, make_batch, module, trainer
from tests.runs import fit_yaml

CASES = {
    "ProxySelection": Case(
        active=lambda: ProxySelection(keep=0.5),
        neutral=lambda: ProxySelection(keep=1.0),
        lost=(no_blocks, "classifier", "no stack of repeated blocks"),
    )
}


def blocks_of(net: Any, name: str) -> tuple[Any, str]:
    """The container of the blocks, and the name under which its owner has it."""
    if name == "gpt2":
        return net.model.transformer, "h"
    if name == "llama":
        return net.model.model, "layers"
    if name == "vit":
        return net.model.vit, "layers"
    return net, "blocks"


def hardest_of(net: Any, batch: Any) -> list[int]:
    """The two samples of six of largest mean loss in a module, by its own step on each sample alone."""
    net = copy.deepcopy(net)
    net.log = lambda *args, **kwargs: None
    with torch.no_grad():
        means = [float(net.training_step(rows_of(batch, [i]), 0)) for i in range(6)]
    return sorted(sorted(range(6), key=lambda i: -means[i])[:2])


@pytest.mark.parametrize("name", ["tiny_gpt", "classifier", "gpt2", "llama", "vit", "resnet"])
def test_the_first_blocks_alone_score(name: str) -> None:
    """Those chosen are the hardest of the module that has no more blocks, and the gradient is the whole module's on them."""
    net = {
        "tiny_gpt": lambda: TinyGPT(num_layers=4, dropout=0.0),
        "resnet": ResNet,
        "classifier": lambda: still(name),
    }.get(name, lambda: module(name, num_layers=4))()
    short = copy.deepcopy(net)
    owner, attribute = blocks_of(short, name)
    cut = getattr(owner, attribute)[: num_blocks(0.5, len(getattr(owner, attribute)))]
    setattr(owner, attribute, cut)
    for seed in range(50):  # a batch of which the whole module would choose others
        batch = make_batch("classifier" if name == "resnet" else name, 6, length=12, seed=seed)
        hardest, by_all = (hardest_of(m, batch) for m in (short, net))
        if hardest != by_all:
            break
    assert hardest != by_all
    found = gradient(net, batch, ProxySelection(keep=1 / 3, depth=0.5))
    assert torch.equal(found, gradient(net, rows_of(batch, hardest)))


def test_all_blocks_are_ordered_sgd() -> None:
    net, batch = still("tiny_gpt"), make_batch("tiny_gpt", 6)
    assert torch.equal(
        gradient(net, batch, ProxySelection(keep=0.5, depth=1.0)), gradient(net, batch, OrderedSGD(keep=0.5))
    )


@pytest.mark.parametrize(("depth", "scored"), [(0.25, 1), (0.5, 2), (0.01, 1), (1.0, 4)])
def test_blocks_that_score_are_counted(depth: float, scored: int) -> None:
    """A step calls ``scored`` blocks on all samples, and all four on those chosen."""
    net, calls = TinyGPT(num_layers=4, dropout=0.0), []
    for block in net.blocks:
        block.register_forward_pre_hook(
            lambda m, args: calls.append((net.global_step, len(args[0]), torch.is_grad_enabled()))
        )
    trainer(ProxySelection(depth=depth, keep=0.5), max_steps=2).fit(net, loader("tiny_gpt", 16, 8))
    # the first batch is looked at in whole depth, too
    assert [call[1:] for call in calls if call[0] == 1] == [(8, False)] * scored + [(4, True)] * 4


def test_depth_is_of_the_blocks_that_run() -> None:
    """SideOutputs stacking: of two that run, the first; and the step itself has both."""
    net, calls = TinyGPT(num_layers=4, dropout=0.0), []
    for i, block in enumerate(net.blocks):
        block.register_forward_pre_hook(lambda m, args, i=i: calls.append((i, len(args[0]))))
    stacking = ProgressiveStacking(stages=[(0.0, 2), (0.75, 4)])
    trainer(stacking, ProxySelection(depth=0.5, keep=0.5), max_steps=2).fit(net, loader("tiny_gpt", 16, 8))
    assert calls[-3:] == [(0, 8), (0, 4), (1, 4)]


def test_everything_is_as_before_where_the_pass_fails() -> None:
    class Breaks(TinyGPT):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.global_step == 1 and not torch.is_grad_enabled():
                raise RuntimeError("by hand")
            return super().training_step(batch, batch_idx)

    net = Breaks(num_layers=4)
    classes = [type(b) for b in net.blocks]
    with pytest.raises(RuntimeError, match="by hand"):
        trainer(ProxySelection(), max_steps=3).fit(net, loader("tiny_gpt"))
    assert [type(b) for b in net.blocks] == classes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0.0}, r"keep=0.0\): expected a number in \(0, 1\]"),
        ({"depth": 0.0}, r"depth=0.0\): expected a number in \(0, 1\]"),
        ({"depth": 1.1}, r"depth=1.1\)"),
        ({"sample_loss": 3}, r"sample_loss=3\): expected a function"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"ProxySelection\(" + message):
        ProxySelection(**arguments)


def test_a_path_without_blocks_is_refused_at_setup() -> None:
    with pytest.raises(ValueError, match="ProxySelection"):
        trainer(ProxySelection(layers="head"), max_steps=2).fit(TinyClassifier(), loader("classifier"))


def test_a_sum_of_losses_counts_whole() -> None:
    """An auxiliary loss on the hidden state beside the classes'."""

    class Two(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            z = self(batch[0])
            return F.cross_entropy(z, batch[1]) + F.mse_loss(z, torch.zeros_like(z))

    net, technique = Two(batch_norm=False), ProxySelection(keep=0.5)
    trainer(technique, max_steps=2).fit(net, loader("classifier"))
    assert technique.state_dict()["samples"] == {"seen": 8, "trained": 4}


def test_a_yaml_trains(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "ProxySelection", {"keep": 0.5, "depth": 0.5}, max_steps=4)
