"""ReSprop: threshold 0 is plain training, an infinite one the previous gradient; a backward pass by hand between."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff import FusedLinearCrossEntropy, LoRA, ReSprop
from lightning_eff._core.session import Session
from lightning_eff.model.sparsity.re_sprop import hybrid, next_threshold
from tests.cases import Case, no_map
from tests.families import module as family
from tests.models import TinyGPT, hugging_face, make_batch, trainer
from tests.runs import differences, final_state, fit, fit_yaml, plain

CASES = {
    "ReSprop": Case(
        active=lambda: ReSprop(sparsity=0.8, warmup=0.2),
        neutral=lambda: ReSprop(sparsity=0.0),
        lost=(no_map, "classifier", "no trainable weight of a linear layer or convolution that could be reused"),
    )
}


# -- the rules


def test_a_gradient_is_the_previous_one_where_they_differ_little() -> None:
    torch.manual_seed(0)
    g, h = torch.randn(6, 5, 7), torch.randn(5, 7)
    for threshold in (0.0, 0.3, 1.0, math.inf):
        out, reused = hybrid(g, h, threshold)
        for b in range(len(g)):
            for i in range(5):
                for j in range(7):
                    d = float(g[b, i, j]) - float(h[i, j])
                    expected = float(h[i, j]) + (d if abs(d) > threshold else 0.0)
                    assert float(out[b, i, j]) == pytest.approx(expected, abs=1e-6)
        assert float(reused.float().mean()) == pytest.approx(float(((g - h).abs() <= threshold).float().mean()))
    assert torch.equal(hybrid(g, h, 0.0)[0], g)
    assert torch.equal(hybrid(g, h, math.inf)[0], h.expand_as(g))


def test_thresholds_come_to_the_share_that_is_asked_for() -> None:
    torch.manual_seed(0)
    threshold, shares = torch.tensor(1e-7), []
    for _ in range(60):
        _, reused = hybrid(torch.randn(64, 50), torch.randn(50), threshold)
        shares.append(float(reused.float().mean()))
        threshold = next_threshold(threshold, reused.float().mean(), 0.7)
    # a difference of two is N(0, 2), of which a share of 0.7 is within 1.47; the threshold goes to and fro about it
    assert min(shares[40:]) < 0.7 < max(shares[40:])
    assert 1.47 / 2 <= float(threshold) <= 2 * 1.47


# -- the run


class Two(pl.LightningModule):
    """Two maps and a tanh, by plain SGD."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 6), nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.two(torch.tanh(self.one(batch[0]))), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def by_hand(net: Two, batches: list[Any], sample: list[dict[str, int]], threshold: float) -> dict[str, Tensor]:
    """The weights after these steps, every product written down."""
    w = {name: p.detach().clone().double() for name, p in net.named_parameters()}
    previous: dict[str, Tensor] = {}
    for (x, y), drawn in zip(batches, sample, strict=True):
        x = x.double()
        hidden = torch.tanh(x @ w["one.weight"].T + w["one.bias"])
        logits = hidden @ w["two.weight"].T + w["two.bias"]
        g2 = (logits.softmax(1) - F.one_hot(y, 3)) / len(x)
        r2 = g2 if "two" not in previous else torch.where((g2 - previous["two"]).abs() > threshold, g2, previous["two"])
        g1 = (r2 @ w["two.weight"]) * (1 - hidden**2)
        r1 = g1 if "one" not in previous else torch.where((g1 - previous["one"]).abs() > threshold, g1, previous["one"])
        previous = {"one": g1[drawn["one"]], "two": g2[drawn["two"]]}
        w["two.weight"] -= 0.1 * r2.T @ hidden
        w["two.bias"] -= 0.1 * r2.sum(0)
        w["one.weight"] -= 0.1 * r1.T @ x
        w["one.bias"] -= 0.1 * r1.sum(0)
    return w


@pytest.mark.parametrize("threshold", [0.0, 0.01, 0.05, math.inf])
def test_steps_are_those_of_a_backward_pass_by_hand(threshold: float) -> None:
    torch.manual_seed(0)
    net, batches = Two(), [make_batch("classifier", 16, seed) for seed in range(4)]
    start = Two()
    start.load_state_dict(net.state_dict())
    sample: list[dict[str, int]] = []
    shares: list[float] = []

    class Noted(ReSprop):
        def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
            super().on_batch_start(session, batch, batch_idx)
            sample.append({path: int(r * 16) for path, r in self._drawn.items()})

        def on_batch_end(self, session: Session, batch_idx: int) -> None:
            super().on_batch_end(session, batch_idx)
            shares.append(float(self.report()["reused"]))

    data: DataLoader[Any] = DataLoader(batches, batch_size=None)  # pyright: ignore[reportArgumentType]
    trainer(Noted(threshold=threshold), max_steps=4).fit(net, data)
    expected = by_hand(start, batches, sample, threshold)
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.detach().double(), expected[name], rtol=1e-5, atol=1e-6)
    assert shares[0] == 0.0 and len({*map(str, sample)}) > 1
    if threshold == math.inf:
        assert shares[1:] == [1.0] * 3


@pytest.mark.parametrize("model", ["classifier", "tiny_gpt"])
def test_threshold_zero_is_plain_training_bit_for_bit(model: str) -> None:
    technique = ReSprop(threshold=0.0)
    whole = final_state(*fit(model, lambda: [technique]))
    assert not technique.neutral and technique.report()["maps"] > 0
    assert differences(whole, plain(model)[1]) == []


def test_the_share_rises_to_what_is_asked_for() -> None:
    shares: list[float] = []

    class Noted(ReSprop):
        def on_batch_end(self, session: Session, batch_idx: int) -> None:
            super().on_batch_end(session, batch_idx)
            shares.append(float(self.report()["reused"]))

    torch.manual_seed(0)
    net = TinyGPT(2, dropout=0.0)
    data: DataLoader[Any] = DataLoader([make_batch("tiny_gpt")] * 40, batch_size=None)  # pyright: ignore[reportArgumentType]
    trainer(Noted(sparsity=0.9, warmup=0.5), max_steps=40).fit(net, data)
    assert sum(shares[25:]) / 15 == pytest.approx(0.9, abs=0.05)
    assert sum(shares[8:12]) / 4 == pytest.approx(0.45, abs=0.2)


@pytest.mark.parametrize("name", ["gpt2", "resnet", "qwen3_moe", "vit"])
def test_unchanged_modules(name: str) -> None:
    net: Any = hugging_face("gpt2", 2) if name == "gpt2" else family(name)
    technique = ReSprop(threshold=math.inf)
    batch = make_batch("vit" if name in ("resnet", "vit") else "gpt2")
    data: DataLoader[Any] = DataLoader([batch] * 2, batch_size=None)  # pyright: ignore[reportArgumentType]
    trainer(technique, max_steps=2).fit(net, data)
    assert float(technique.report()["reused"]) == 1.0
    maps = {type(m).__name__ for m in net.modules()} & {"Conv1D", "Conv2d", "Linear"}
    assert technique.report()["maps"] >= 8 and maps


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant: bool) -> None:
    ends: list[dict[str, Tensor]] = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        net = hugging_face("gpt2", 2)
        if checkpointed:
            net.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
        data: DataLoader[Any] = DataLoader([make_batch("gpt2")] * 3, batch_size=None)  # pyright: ignore[reportArgumentType]
        trainer(ReSprop(threshold=1e-4), max_steps=3).fit(net, data)
        ends.append({name: p.detach().clone() for name, p in net.named_parameters()})
    assert all(torch.equal(ends[1][name], p) for name, p in ends[0].items())


class Shared(Two):
    """One map is called twice in a pass."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.two(torch.tanh(self.one(batch[0])))
        return F.cross_entropy(self.two(torch.tanh(self.one(F.pad(hidden, (0, 5))))), batch[1])


def test_each_call_of_a_map_is_compared_with_the_same_call_of_the_pass_before() -> None:
    class Noted(ReSprop):
        def _backward(self, path: str, call: str, g: Tensor) -> Tensor:
            out = super()._backward(path, call, g)
            seen.append((call, g, out, self._previous.get(call)))
            return out

    seen: list[tuple[str, Tensor, Tensor, Tensor | None]] = []
    data: DataLoader[Any] = DataLoader([make_batch("classifier", 6)] * 2, batch_size=None)  # pyright: ignore[reportArgumentType]
    trainer(Noted(threshold=math.inf), max_steps=2).fit(Shared(), data)
    order = ["two#1", "one#1", "two#0", "one#0"]
    assert [call for call, *_ in seen] == order * 2
    for (_, before, _, _), (_, _, out, h) in zip(seen[:4], seen[4:], strict=True):
        assert h is not None and torch.equal(out, h.expand_as(out))
        assert any(torch.equal(h, sample) for sample in before)


def test_a_head_without_logits_is_left_alone() -> None:
    ends: list[dict[str, Tensor]] = []
    for techniques in ((ReSprop, FusedLinearCrossEntropy), (FusedLinearCrossEntropy, ReSprop)):
        torch.manual_seed(0)
        net, made = TinyGPT(2, dropout=0.0), [technique() for technique in techniques]
        data: DataLoader[Any] = DataLoader([make_batch("tiny_gpt")] * 3, batch_size=None)  # pyright: ignore[reportArgumentType]
        trainer(*made, max_steps=3).fit(net, data)
        assert [m.report()["maps"] for m in made if isinstance(m, ReSprop)] == [8]  # 4 in each block
        assert [m.report()["reads"] for m in made if isinstance(m, FusedLinearCrossEntropy)] == [0]
        ends.append({name: p.detach().clone() for name, p in net.named_parameters()})
    assert all(torch.equal(ends[1][name], p) for name, p in ends[0].items())


def test_maps_are_those_that_others_have_made_in_either_order() -> None:
    ends: list[dict[str, Tensor]] = []
    for order in (1, -1):
        torch.manual_seed(0)
        net, technique = TinyGPT(2, dropout=0.0), ReSprop(threshold=math.inf)
        data: DataLoader[Any] = DataLoader([make_batch("tiny_gpt")] * 3, batch_size=None)  # pyright: ignore[reportArgumentType]
        trainer(*[technique, LoRA(2, names=["qkv"])][::order], max_steps=3).fit(net, data)
        ends.append({name: p.detach().clone() for name, p in net.named_parameters()})
        assert technique.report()["maps"] == 4  # two factors in each block
    assert all(torch.equal(ends[1][name], p) for name, p in ends[0].items())


def test_maps_that_are_not_called_and_other_shapes() -> None:
    class Functional(Two):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            hidden = torch.tanh(F.linear(batch[0], self.one.weight, self.one.bias))
            return F.cross_entropy(F.linear(hidden, self.two.weight, self.two.bias), batch[1])

    data: DataLoader[Any] = DataLoader([make_batch("classifier")] * 2, batch_size=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="ReSprop: none of the 2 layers of Functional, such as one, had a gradient"):
        trainer(ReSprop(), max_steps=2).fit(Functional(), data)
    batch = make_batch("tiny_gpt")
    short = {name: value[:, :8] for name, value in batch.items()}
    for batches, maps in (([batch, short], 0), ([batch, batch], 9)):
        technique = ReSprop(threshold=1.0)
        data = DataLoader(batches, batch_size=None)  # pyright: ignore[reportArgumentType]
        trainer(technique, max_steps=2).fit(TinyGPT(2), data)
        assert technique.report()["maps"] == maps


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparsity": 1.0}, r"ReSprop\(sparsity=1.0\): expected a number in \[0, 1\): the fraction of the gradient"),
        ({"warmup": 2.0}, r"warmup=2.0.: expected a number in \[0, 1\]"),
        ({"threshold": -1.0}, "threshold=-1.0.: expected a finite number >= 0 or inf"),
        ({"threshold": math.nan}, "threshold=nan.: expected a finite number >= 0"),
        ({"names": "head"}, "expected a list of dotted paths"),
    ],
)
def test_bad_arguments(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReSprop(**settings)


def test_what_cannot_be_met_is_refused_at_setup() -> None:
    net = Two()
    net.one.compile()
    data: DataLoader[Any] = DataLoader([make_batch("classifier")], batch_size=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="layers of Two are in compiled code"):
        trainer(ReSprop(), max_steps=1).fit(net, data)
    with pytest.raises(ValueError, match=r"names=\['tow', ...\].*Nearest: two"):
        trainer(ReSprop(names=["tow"]), max_steps=1).fit(Two(), data)


def test_from_yaml(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "ReSprop", {"sparsity": 0.5, "warmup": 0.0}, max_steps=3)
