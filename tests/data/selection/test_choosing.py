"""Techniques that score samples from a later step on: the run's first step tells what that one would be refused for."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_eff import AutoAssist, LossBiasedSampling, OrderedSGD, SelectiveBackprop
from lightning_eff._core.losses import LossNotVisible
from lightning_eff._core.technique import Technique
from tests.models import TinyClassifier, flat, loader, trainer

LATER: Mapping[str, Callable[..., Technique]] = {
    "AutoAssist": lambda **kwargs: AutoAssist(start=0.5, **kwargs),
    "LossBiasedSampling": lambda **kwargs: LossBiasedSampling(presample=2.0, start=0.5, **kwargs),
    "OrderedSGD": lambda **kwargs: OrderedSGD(keep=[(0.0, 1.0), (0.5, 0.5)], **kwargs),
    "SelectiveBackprop": lambda **kwargs: SelectiveBackprop(start=0.5, **kwargs),
}


class TwoLosses(TinyClassifier):
    """Its loss is a weighted sum of two; it skips the first ``skips`` batches, and notes each pass."""

    def __init__(self, second: float = 0.3, skips: int = 0) -> None:
        super().__init__()
        self.second, self.skips = second, skips
        self.__dict__["_passes"] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        self._passes.append((batch_idx, len(batch[0]), torch.is_grad_enabled()))
        if batch_idx < self.skips:
            return None
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return loss + self.second * F.cross_entropy(self(batch[0]), 2 - batch[1]) if self.second else loss


def told(net: Any, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1], reduction="none")


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("skips", [0, 2])
def test_a_loss_that_cannot_be_seen_is_told_in_the_first_step(name: str, skips: int) -> None:
    net = TwoLosses(skips=skips)
    before = flat(net).clone()
    t = trainer(LATER[name](), max_steps=8)
    with pytest.raises(LossNotVisible, match=rf"{name}: .* 2 mean-reduced loss call\(s\) .*Give sample_loss="):
        t.fit(net, loader("classifier"))
    assert (t.global_step, net._passes[-1][0]) == (skips, skips), "the first batch whose step returns a loss"
    assert torch.equal(flat(net), before)


def test_the_papers_schedule_finds_out_too() -> None:
    t = trainer(OrderedSGD(), max_steps=8)
    with pytest.raises(LossNotVisible, match=r"OrderedSGD: .* sum to"):
        t.fit(TwoLosses(), loader("classifier"))
    assert t.global_step == 0


@pytest.mark.parametrize("name", LATER)
def test_a_batch_of_one_sample_is_told_in_the_first_step(name: str) -> None:
    t = trainer(LATER[name](), max_steps=8)
    with pytest.raises(ValueError, match=f"{name}: got a batch of 1 sample; expected several"):
        t.fit(TinyClassifier(), loader("classifier", 4, 1))
    assert t.global_step == 0


@pytest.mark.parametrize("name", LATER)
def test_looking_ahead_costs_the_first_step_alone_and_changes_nothing(name: str) -> None:
    def until_start(technique: Technique | None) -> tuple[TwoLosses, Tensor, Tensor]:
        torch.manual_seed(0)
        net, found = TwoLosses(second=0.0), list[Tensor]()
        t = trainer(*([] if technique is None else [technique]), max_steps=4)
        net.on_train_batch_start = lambda batch, batch_idx: (  # type: ignore[method-assign]
            found.extend([flat(net).clone(), torch.get_rng_state()]) if batch_idx == 2 else None
        )
        t.fit(net, loader("classifier", 16))
        return net, found[0], found[1]

    net, weights, generator = until_start(LATER[name]())
    _, plain, same = until_start(None)
    assert torch.equal(weights, plain)
    assert torch.equal(generator, same)
    looks = [batch_idx for batch_idx, _, grad in net._passes if not grad and batch_idx < 2]
    assert looks == [0, 0, 0, 0], "three passes with others in the place of some samples, one for the losses"


@pytest.mark.parametrize("name", LATER)
def test_sample_loss_stands_in_for_one_that_cannot_be_seen(name: str) -> None:
    technique = LATER[name](sample_loss=told)
    trainer(technique, max_steps=4).fit(TwoLosses(), loader("classifier", 16))
    assert technique.report()["active"] == 1
