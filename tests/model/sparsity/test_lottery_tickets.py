"""LotteryTickets: survivors are the saved weights bit for bit, masks are nested, and sparsity is 1 - 0.8^r."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_eff import LotteryTickets
from lightning_eff.model.sparsity._masks.pruning import num_survivors
from tests.cases import Case, no_map
from tests.model.sparsity.sparse import Counts, fit_on, sparsity_of
from tests.models import TinyClassifier, TinyGPT, hugging_face, loader, make_batch, trainer
from tests.runs import fit_yaml

CASES = {
    "LotteryTickets": Case(
        active=lambda: LotteryTickets(rounds=2),
        neutral=lambda: LotteryTickets(rounds=0),
        lost=(no_map, "classifier", "no trainable weight of a linear layer or convolution"),
    )
}


class Begun(pl.Callback):
    """Weights, buffers and the optimizer's states as each batch begins, after all techniques."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.states: list[dict[str, Tensor]] = []
        self.masks: list[dict[str, Tensor]] = []

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        technique: Any = next(c for c in trainer.callbacks if isinstance(c, LotteryTickets))  # pyright: ignore[reportAttributeAccessIssue]
        self.weights.append({n: p.detach().clone() for n, p in pl_module.named_parameters()})
        self.masks.append(dict(technique.masks))
        (optimizer,) = trainer.optimizers
        self.states.append(
            {
                f"{n}/{key}": value.clone()
                for n, p in pl_module.named_parameters()
                for key, value in optimizer.state.get(p, {}).items()
                if isinstance(value, Tensor)
            }
        )


@pytest.mark.parametrize(("rewind", "step"), [(0.0, 0), (0.5, 2)])
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_survivors_are_the_saved_weights_and_masks_are_nested(rewind: float, step: int, scope: Any) -> None:
    torch.manual_seed(0)
    begun, counts, technique = Begun(), Counts(), LotteryTickets(rounds=3, rewind=rewind, scope=scope)
    data = loader("tiny_gpt", 64, shuffle=False)
    trainer(technique, begun, counts, max_steps=16).fit(TinyGPT(2, dropout=0.0), data)
    saved, state = begun.weights[step], begun.states[step]
    assert bool(state) == (step > 0)
    for r, at in enumerate((4, 8, 12), start=1):
        masks, before = begun.masks[at], begun.masks[at - 1]
        for name, w in begun.weights[at].items():
            kept = masks.get(name, torch.ones_like(w, dtype=torch.bool))
            assert torch.equal(w, saved[name] * kept), f"{name} is what it was, but for the zeros"
        assert begun.states[at].keys() == state.keys()
        for key, value in begun.states[at].items():
            kept = masks.get(key.partition("/")[0]) if value.ndim else None
            assert torch.equal(value, state[key] if kept is None else state[key] * kept)
        assert all(not bool((masks[n] & ~before[n]).any()) for n in masks), "masks only grow"
        total, left = (sum(f(m) for m in masks.values()) for f in (Tensor.numel, lambda m: int(m.sum())))
        assert left / total == pytest.approx(0.8**r, abs=1e-3)
        trained = counts.weights[at - 1]
        small, large = [], []
        for name, m in masks.items():
            pruned = before[name] & ~m
            small.append(float(trained[name].abs()[pruned].max()))
            large.append(float(trained[name].abs()[m].min()))
            if scope == "layer":
                assert small[-1] <= large[-1] and int(m.sum()) == num_survivors(m.numel(), share=0.2, rounds=r)
        assert scope == "layer" or max(small) <= min(large), "the smallest of all go"
    assert counts.leaks == [] and technique.report()["rounds"] == 3


def test_buffers_are_set_back_too() -> None:
    torch.manual_seed(0)
    net = TinyClassifier()
    trainer(LotteryTickets(rounds=1), max_steps=10).fit(net, loader("classifier"))
    assert int(net.norm.num_batches_tracked) == 5, "of the last period alone"  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit"])
def test_unchanged_modules(name: str) -> None:
    counts = fit_on(hugging_face(name, 2), make_batch(name), LotteryTickets(rounds=1, share=0.5), steps=2)
    assert counts.leaks == [] and sparsity_of(counts) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": -1}, r"LotteryTickets\(rounds=-1\): expected an integer >= 0: the number of times"),
        ({"share": 1.0}, r"share=1.0.: expected a number in \(0, 1\): the fraction of the remaining"),
        ({"rewind": 1.0}, r"rewind=1.0.: expected a number in \[0, 1\)"),
        ({"scope": "row"}, "scope='row'.: expected"),
    ],
)
def test_bad_arguments(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LotteryTickets(**settings)


def test_from_yaml(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "LotteryTickets", {"rounds": 1, "rewind": 0.1}, max_steps=4)
