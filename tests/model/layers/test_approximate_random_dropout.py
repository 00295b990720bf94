"""Patterns: their rate and expectation are dropout's; networks compute what masked ones do, with products really smaller."""

import copy
import math
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import lightning_eff as eff
from lightning_eff import ApproximateRandomDropout
from lightning_eff._core._branches.ffns import FFN, Part
from lightning_eff.model.layers._row_dropout.patterns import Pattern, draw, kept, probabilities
from lightning_eff.model.layers._row_dropout.thinning import Thinned
from tests import families
from tests.cases import Case, classifier
from tests.models import TinyGPT, flat, loader, make_batch, trainer
from tests.runs import fit, fit_yaml, plain

CASES = {
    "ApproximateRandomDropout": Case(
        active=lambda: ApproximateRandomDropout(0.5),
        neutral=lambda: ApproximateRandomDropout(0.0),
        refuses={"classifier": "found no feed-forward network"},
        lost=(classifier, "classifier", "found no feed-forward network"),
    )
}


@pytest.mark.parametrize(("rate", "most"), [(0.5, 4), (0.3, 4), (0.7, 4), (0.5, 2), (0.6, 9), (0.0, 4), (0.75, 4)])
def test_periods_drop_the_rate_on_average_and_are_as_many_as_can_be(rate: float, most: int) -> None:
    d = probabilities(rate, most)
    assert sum(d) == pytest.approx(1.0) and sum(p * (1 - 1 / i) for i, p in enumerate(d, 1)) == pytest.approx(rate)
    if rate not in (0.0, 1 - 1 / most) and most > 2:  # no step along the constraints has a larger entropy
        entropy = -sum(p * math.log(p) for p in d)
        along = torch.linalg.svd(torch.tensor([[1.0] * most, [1 - 1 / i for i in range(1, most + 1)]]).double())[2][2:]
        for direction in along:
            for sign in (1e-3, -1e-3):
                other = [p + sign * float(x) for p, x in zip(d, direction, strict=True)]
                assert -sum(p * math.log(p) for p in other) < entropy


def test_the_expectation_over_patterns_is_dropouts() -> None:
    """Exactly, by going through all of them: each of 13 units is kept with 1 - rate, and counts 1 on average."""
    d = probabilities(0.6, 5)
    often, counted = torch.zeros(13, dtype=torch.float64), torch.zeros(13, dtype=torch.float64)
    for period, p in enumerate(d, start=1):
        for first in range(period):
            mask = torch.zeros(13, dtype=torch.float64)
            kept(mask, 0, 1, Pattern(period, first)).fill_(1.0)
            often += p / period * mask
            counted += p / period * period * mask
    torch.testing.assert_close(often, torch.full_like(often, 0.4))
    torch.testing.assert_close(counted, torch.ones_like(often))


def test_drawn_patterns_are_as_often_as_they_are_likely() -> None:
    d, generator = probabilities(0.5, 4), torch.Generator().manual_seed(0)
    found = Counter(draw(d, generator) for _ in range(20_000))
    assert {p.period for p in found} == {1, 2, 3, 4} and all(0 <= p.first < p.period for p in found)
    for (period, _), count in found.items():
        assert count / 20_000 == pytest.approx(d[period - 1] / period, abs=4 * math.sqrt(0.25 / 20_000))


class Net(nn.Module):
    """A feed-forward network, gated, by one map for gate and value, or neither."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(64, 2 * 96 if kind == "packed" else 96)
        self.gate = nn.Linear(64, 96) if kind == "gated" else None
        self.down = nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.kind == "packed":
            gate, h = h.chunk(2, -1)
            return self.down(nn.functional.silu(gate) * h)
        if self.gate is not None:
            return self.down(nn.functional.silu(self.gate(x)) * h)
        return self.down(nn.functional.gelu(h))


def thinned(net: Net, pattern: Pattern) -> Thinned:
    groups = 2 if net.kind == "packed" else 1
    names = ["up", "gate"] if net.kind == "gated" else ["up"]
    parts = [
        part for n in names for part in (Part(f"{n}.bias", 0, groups, False), Part(f"{n}.weight", 0, groups, False))
    ]
    made = Thinned(net, [FFN(96, (*parts, Part("down.weight", 1, 1, True)))])
    made.patterns = [pattern]
    return made


@pytest.mark.parametrize("kind", ["plain", "gated", "packed"])
def test_it_is_masked_dropout_of_the_same_pattern_with_smaller_products(kind: str) -> None:
    """Values and gradients against a dense network whose hidden activations are masked and counted by hand."""
    torch.manual_seed(0)
    net = Net(kind).double()
    dense, x = copy.deepcopy(net), torch.randn(5, 64, dtype=torch.float64)
    pattern = Pattern(4, 3)
    mask = torch.zeros(96, dtype=torch.float64)
    mask[3::4] = 4.0
    dense.down.register_forward_pre_hook(lambda m, args: (args[0] * mask,))
    made = thinned(net, pattern)
    with made.view(True), FlopCounterMode(display=False) as thin:
        y = net(x)
        y.square().sum().backward()
    with FlopCounterMode(display=False) as whole:
        expected = dense(x)
        expected.square().sum().backward()
    torch.testing.assert_close(y, expected)
    for p, wanted in zip(net.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p.grad, wanted.grad)
    assert thin.get_total_flops() * 4 == whole.get_total_flops()
    with made.masked():
        torch.testing.assert_close(net(x), expected)
    with made.view(False):
        assert type(net.up).forward is nn.Linear.forward
        torch.testing.assert_close(net(x), copy.deepcopy(net)(x))


class Counting(pl.Callback):
    """FLOPs of each step's forward and backward pass, and the share that was kept."""

    def __init__(self) -> None:
        self.flops: list[int] = []
        self.kept: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.counter = FlopCounterMode(display=False)
        self.counter.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        self.counter.__exit__(None, None, None)
        self.flops.append(self.counter.get_total_flops())
        technique: Any = trainer.callbacks[0]  # pyright: ignore[reportAttributeAccessIssue]
        self.kept.append(float(technique.report()["kept"]))


def test_a_runs_products_are_those_of_what_is_kept() -> None:
    """Of a GPT of two blocks: a step's FLOPs fall by the dropped units' share of the feed-forward networks'."""
    counting = Counting()
    net = TinyGPT(2, dropout=0.0)
    trainer(ApproximateRandomDropout(0.5), counting, max_steps=12).fit(net, loader("tiny_gpt"))
    ffn = 2 * 3 * 2 * 2 * (4 * 32) * 16 * 64  # blocks x (forward + 2 backward) x maps x 2 x tokens x d x hidden
    reference = Counting()
    trainer(ApproximateRandomDropout(0.0), reference, max_steps=1).fit(TinyGPT(2, dropout=0.0), loader("tiny_gpt"))
    (whole,) = set(reference.flops)
    assert len(set(counting.kept)) > 3 and min(counting.kept) < 0.5
    for flops, share in list(zip(counting.flops, counting.kept, strict=True))[1:]:
        assert flops == pytest.approx(whole - (1 - share) * ffn, rel=1e-6)


def test_the_rate_of_a_run_is_the_one_asked_for() -> None:
    seen = Counting()
    t = trainer(ApproximateRandomDropout(0.6, most=5), seen, max_steps=60)
    t.fit(TinyGPT(2, dim=8, dropout=0.0), loader("tiny_gpt"))
    assert sum(seen.kept) / len(seen.kept) == pytest.approx(0.4, abs=4 * 0.25 / math.sqrt(2 * 60))


@pytest.mark.parametrize(("name", "count"), [("gpt2", 4), ("qwen3", 4), ("modernbert", 4), ("vit", 4), ("t5", 6)])
def test_hugging_faces_networks(name: str, count: int) -> None:
    net, technique = families.module(name), ApproximateRandomDropout(0.5)
    before = {path: type(m) for path, m in net.named_modules()}
    trainer(technique, max_steps=2).fit(net, DataLoader([families.batch(name, 2)] * 2, batch_size=None))  # pyright: ignore[reportArgumentType]
    assert technique.report()["networks"] == count and 0.2 < technique.report()["kept"] <= 1.0
    assert {path: type(m) for path, m in net.named_modules()} == before


def test_the_look_leaves_no_trace_and_evaluation_is_plain() -> None:
    validated: Any = {"max_steps": 2, "limit_val_batches": 2, "val_check_interval": 2}
    net, t = fit("tiny_gpt", lambda: [ApproximateRandomDropout(0.5)], **validated)
    batch = make_batch("tiny_gpt", 8, seed=5)
    logits = net.eval()(batch["input_ids"]).flatten(0, 1)
    wanted = nn.functional.cross_entropy(logits, batch["labels"].flatten())
    assert float(t.callback_metrics["val_loss"]) == pytest.approx(float(wanted.detach()), rel=1e-5)
    whole = 1e-9  # so seldom that no pattern of 12 steps drops anything: the run is plain training, and the look shows nothing
    net, _ = fit("tiny_gpt", lambda: [ApproximateRandomDropout(whole)])
    assert torch.equal(flat(net), flat(plain("tiny_gpt")[0]))


def test_copies_made_within_a_step_are_of_the_plain_module() -> None:
    """Also of maps whose class is made by another technique, which looks at its own bases to be copied."""
    net = eff.apply(TinyGPT(2, dropout=0.0), eff.ReZero())
    maps = {"blocks.0.mlp.0.weight": (0, False), "blocks.0.mlp.2.weight": (1, True)}
    parts = [Part(name, dim, 1, last) for name, (dim, last) in maps.items()]
    made = Thinned(net, [FFN(64, (Part("blocks.0.mlp.0.bias", 0, 1, False), *parts))])
    made.patterns = [Pattern(2, 0)]
    with made.view(True):
        twin = copy.deepcopy(net)
        assert [type(m) for m in twin.modules()] != [type(m) for m in net.modules()]
    assert [type(m) for m in twin.modules()] == [type(m) for m in net.modules()]
    assert twin.state_dict().keys() == net.state_dict().keys()
    assert all(sorted(a.__dict__) == sorted(b.__dict__) for a, b in zip(twin.modules(), net.modules(), strict=True))


def test_what_cannot_be_says_why() -> None:
    for settings, message in (
        ({"rate": 0.8}, r"rate=0.8, most=4\): periods of 4 drop at most 0.75 .*a larger `most`"),
        ({"rate": -0.1}, "rate=-0.1"),
        ({"rate": True}, "rate=True"),
        ({"most": 1}, r"most=1\): expected an integer >= 2"),
        ({"ffn": ["mlp"]}, r"ffn=\['mlp'\]\): expected lists of at least two"),
    ):
        with pytest.raises(ValueError, match=message):
            ApproximateRandomDropout(**settings)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"most=65\): .*\(64 hidden units\) has fewer units than the longest period"):
        fit("tiny_gpt", lambda: [ApproximateRandomDropout(0.5, most=65)], max_steps=1)
    data = DataLoader([families.batch("qwen3_moe", 2)], batch_size=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="found no feed-forward network"):
        trainer(ApproximateRandomDropout(), max_steps=1).fit(families.module("qwen3_moe"), data)


class Summed(TinyGPT):
    """Its hidden units are divided by their sum."""

    def __init__(self) -> None:
        super().__init__(2)
        for block in self.blocks or ():
            block.mlp[1] = nn.Softmax(-1)  # pyright: ignore[reportIndexIssue, reportArgumentType]


def test_a_step_that_shows_no_loss_is_refused() -> None:
    """Under manual optimization, losses are seen where ``manual_backward`` gets them."""

    class Hidden(TinyGPT):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            super().training_step(batch, batch_idx).backward()
            optimizer.step()

    net = Hidden()
    before = flat(net).clone()
    with pytest.raises(
        ValueError, match=r"^ApproximateRandomDropout: .* self\.manual_backward on no loss .* Call it there"
    ):
        trainer(ApproximateRandomDropout(0.5), max_steps=1).fit(net, loader("tiny_gpt"))
    assert torch.equal(flat(net), before)


def test_networks_that_mix_their_units_are_refused() -> None:
    names = [["blocks.*.mlp.0", "blocks.*.mlp.2"]]
    with pytest.raises(ValueError, match="returns other values with half of the hidden units"):
        trainer(ApproximateRandomDropout(ffn=names), max_steps=1).fit(Summed(), loader("tiny_gpt"))
    with pytest.raises(ValueError, match="Softmax precedes it"):
        trainer(ApproximateRandomDropout(), max_steps=1).fit(Summed(), loader("tiny_gpt"))


def test_in_a_config(tmp_path: Path) -> None:
    kinds = {"model": "TinyGPT", "data": "Sequences"}
    fit_yaml(tmp_path, "ApproximateRandomDropout", {"rate": 0.5, "most": 3}, keeps_state=True, max_steps=3, **kinds)
