"""Training without dropout: it equals the module built without it, whatever the module calls its probabilities."""

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff import DisableDropout
from lightning_eff.model.simplification._dropouts.calls import Dropouts
from tests.cases import Case, no_map
from tests.models import TinyClassifier, TinyGPT, flat, hugging_face, loader, trainer
from tests.runs import fit, fit_yaml

NONE = "has no dropout to disable: no dropout module with p > 0, and no call of dropout on this batch"
CASES = {
    "DisableDropout": Case(
        active=lambda: DisableDropout(),
        neutral=lambda: DisableDropout(until=0.0),
        refuses=dict.fromkeys(("gpt2", "llama", "bert", "vit", "videomae", "t5"), NONE),
        lost=(no_map, "classifier", NONE),
    )
}
P = 0.3


class Hidden(TinyClassifier):
    """Dropout of one kind, the rest without."""

    def __init__(self, kind: str, p: float = P) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.head = nn.Sequential(nn.Identity(), nn.Linear(8, 3))
        self.kind, self.scale, self.config = kind, p, SimpleNamespace(drop=p, scale=p)
        self.attention = nn.MultiheadAttention(8, 2, dropout=p, batch_first=True) if kind == "heads" else None
        self.net = nn.LSTM(8, 8, 2, dropout=p, batch_first=True) if kind == "lstm" else None
        self.chance = p

    def forward(self, x: Tensor) -> Tensor:
        x, many = self.norm(self.blocks(x)), x[:, None].expand(-1, 5, -1)
        p = self.chance
        if self.kind == "attribute":
            x = F.dropout(x * self.scale, p, self.training)
        elif self.kind == "config":
            x = torch.dropout(x, self.config.drop, self.training) * self.config.scale
        elif self.kind == "fused":
            x = F.scaled_dot_product_attention(many, many, many, dropout_p=p if self.training else 0.0).mean(1)
        elif self.attention is not None:
            x = self.attention(many, many, many)[0].mean(1)
        elif self.net is not None:
            x = self.net(many)[0].mean(1)
        elif self.kind == "alpha":
            x = F.alpha_dropout(x, p, self.training)
        elif self.kind == "literal":
            x = F.dropout(x, 0.25, self.training)
        elif self.kind == "derived":
            x = F.dropout(x, 1.0 - self.scale, self.training)
        return self.head(x)


def run(net: pl.LightningModule, *callbacks: Any, **kwargs: Any) -> Tensor:
    pl.seed_everything(3, verbose=False)
    trainer(*callbacks, max_steps=6, **kwargs).fit(net, loader("classifier"))
    return flat(net)


def without(kind: str) -> Hidden:
    """The same weights and scales, built with all probabilities at zero."""
    net = Hidden(kind)
    net.chance = net.config.drop = 0.0
    for m in net.modules():
        if isinstance(m, nn.MultiheadAttention | nn.LSTM):
            m.dropout = 0.0
    return net


@pytest.mark.parametrize("kind", ["attribute", "config", "fused", "heads", "lstm", "alpha"])
def test_it_trains_as_the_module_that_was_built_without(kind: str) -> None:
    """Attributes of the same value that are no probability, such as scale, stay."""
    net, expected = Hidden(kind), run(without(kind))
    assert not torch.equal(run(Hidden(kind)), expected)
    technique = DisableDropout()
    assert torch.equal(run(net, technique), expected)
    assert net.chance == net.scale == net.config.drop == net.config.scale == P
    assert technique.summary() == "trained without dropout at 1 attributes"


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "t5"])
def test_hugging_face_models_train_as_with_a_config_without_dropout(name: str) -> None:
    found = []
    for p, callbacks in ((0.0, []), (0.2, [DisableDropout()]), (0.2, [])):
        pl.seed_everything(0, verbose=False)
        net = hugging_face(name, 2, p)
        pl.seed_everything(1, verbose=False)
        trainer(*callbacks, max_steps=4).fit(net, loader(name))
        found.append(flat(net))
    assert torch.equal(found[1], found[0]) and not torch.equal(found[2], found[0])


@pytest.mark.parametrize(("kind", "p"), [("literal", "0.25"), ("derived", "0.7")])
def test_what_is_in_no_attribute_is_refused_before_a_step(kind: str, p: str) -> None:
    net = Hidden(kind)
    before = flat(net)
    message = rf"the module \(Hidden\) calls dropout with p={p} at test_disable_dropout.py:\d+, and no attribute holds"
    with pytest.raises(ValueError, match=message):
        run(net, DisableDropout())
    assert torch.equal(flat(net), before) and net.chance == P


class Seldom(TinyClassifier):
    """A branch with a functional dropout of its own runs from the third batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.rare, self.count = P, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        out = self(batch[0])
        out = F.dropout(out, self.rare, self.training) if self.count > 3 else out
        return F.cross_entropy(out, batch[1])


def test_branches_that_start_later_are_found_when_batches_are_looked_at_again() -> None:
    technique, seen = DisableDropout(), []

    class Log(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
            seen.append((pl_module.rare, technique.report()["disabled"]))

    run(Seldom(), technique, Log())
    assert seen == [(P, 1)] * 3 + [(0.0, 2)] * 3


def test_dropout_returns_after_until() -> None:
    technique, calls = DisableDropout(until=0.5), []

    class Watched(TinyGPT):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with Dropouts() as dropouts:
                loss = super().training_step(batch, batch_idx)
            calls.append(len(dropouts.calls))
            return loss

    trainer(technique, max_steps=8).fit(Watched(2), loader("tiny_gpt"))
    assert calls[-4:] == [4] * 4 and len(calls) == 8 + 2 * 3  # two passes aside on batches 1, 2 and 4
    assert [n for n in calls if n] == [4] * (4 + 3)


def test_a_copy_made_in_the_fit_and_validation_and_hyperparameters_have_the_module_s_own() -> None:
    copies: list[Any] = []

    class Copying(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
            assert pl_module.config.drop == 0.0
            copies.extend([copy.deepcopy(pl_module), given.drop, pickle.loads(pickle.dumps(technique))])

    net, technique = Hidden("config"), DisableDropout()
    given = net.config
    run(net, technique, Copying())
    assert (
        copies[0].config.drop == P and copies[1] == P and net.config is given and repr(copies[2]) == "DisableDropout()"
    )


class Adversarial(TinyClassifier):
    """Manual optimization."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        optimizer.step()


def test_under_manual_optimization_it_trains_as_the_module_without() -> None:
    plain: Any = Adversarial()
    plain.head[0].p = 0.0
    assert torch.equal(run(Adversarial(), DisableDropout()), run(plain))


def test_it_resumes_to_the_bit(tmp_path: Path) -> None:
    net, _ = fit("tiny_gpt", lambda: [DisableDropout(until=0.6)], directory=tmp_path)
    for step in (3, 9):
        again, t = fit("tiny_gpt", lambda: [DisableDropout(until=0.6)], resume=tmp_path / f"step={step}.ckpt")
        assert t.global_step == 12 and torch.equal(flat(net), flat(again))


def test_noise_that_the_module_draws_besides_stays_the_same() -> None:
    class Noisy(Hidden):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step((batch[0] + torch.randn_like(batch[0]), batch[1]), batch_idx)

    def net(p: float) -> Hidden:
        made = Noisy("attribute")
        made.chance = p
        return made

    assert torch.equal(run(net(P), DisableDropout()), run(net(0.0)))


def test_wrong_values_and_budgets_and_modules_without_dropout_are_refused() -> None:
    with pytest.raises(ValueError, match=NONE):
        run(no_map(), DisableDropout())
    with pytest.raises(ValueError, match=r"DisableDropout\(until=1.5\)"):
        DisableDropout(until=1.5)
    with pytest.raises(ValueError, match="max_steps"):
        trainer(DisableDropout(until=0.5), max_epochs=-1).fit(TinyGPT(2), loader("tiny_gpt"))


def test_in_a_config(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "DisableDropout", {"until": 0.5}, max_steps=3, model="TinyGPT", data="Sequences")
