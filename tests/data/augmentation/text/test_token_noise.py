"""TokenNoise: how often tokens change, into what, and what never changes: labels, padding and special tokens."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_eff as eff
from lightning_eff.data.augmentation.text.token_noise import noised
from tests.cases import Case, classifier
from tests.data.augmentation.modules import Ids, chi_squared, train
from tests.models import hugging_face, make_batch, module, trainer
from tests.runs import fit_yaml

_NONE = "found no tokens in the batch"

CASES = {
    "TokenNoise": Case(
        active=lambda: eff.TokenNoise(rate=0.3),
        neutral=lambda: eff.TokenNoise(rate=0.0),
        refuses={"vit": _NONE, "classifier": _NONE},
        lost=(classifier, "classifier", _NONE),
    )
}


def texts(size: int, length: int, seed: int = 0) -> Tensor:
    """Tokens of which each is half as frequent as the one before."""
    weights = 0.5 ** torch.arange(6).double()
    g = torch.Generator().manual_seed(seed)
    return torch.multinomial(weights, size * length, replacement=True, generator=g).reshape(size, length)


@pytest.mark.parametrize("rate", [0.1, 0.3, 1.0])
def test_noise_is_of_the_unigram_frequencies(rate: float) -> None:
    """``gamma`` of the tokens are draws of ``q``, by itself at each place: ``P(x -> y) = gamma q(y)`` for another ``y``."""
    ids = texts(200, 500)
    made = noised(ids, torch.ones_like(ids, dtype=torch.bool), rate, None, torch.Generator().manual_seed(1))
    n = ids.flatten().bincount(minlength=6).double()
    q = n / n.sum()
    found = torch.stack([made[ids == x].bincount(minlength=6).double() for x in range(6)])
    expected = n[:, None] * (rate * q + (1 - rate) * torch.eye(6, dtype=torch.float64))
    for x in range(6):
        assert abs(chi_squared(found[x], expected[x])) < 4
    if rate < 1:  # at each place by itself: also of two neighbours
        blank = noised(ids, torch.ones_like(ids, dtype=torch.bool), rate, 99, torch.Generator().manual_seed(1)) == 99
        both = float((blank[:, 1:] & blank[:, :-1]).double().mean())
        assert abs(both - rate**2) < 5 * (rate**2 * (1 - rate**2) / blank.numel()) ** 0.5 * 2


def test_blanks() -> None:
    ids, g = texts(100, 100), torch.Generator().manual_seed(1)
    open_ = ids != 0
    made = noised(ids, open_, 0.25, 7, g)
    assert torch.equal(made[~open_], ids[~open_]) and set(made[made != ids].tolist()) == {7}
    count, n = int((made == 7).sum()), int(open_.sum())
    assert abs(count - 0.25 * n) < 4 * (n * 0.25 * 0.75) ** 0.5
    assert torch.equal(noised(ids, torch.zeros_like(open_), 1.0, None, g), ids), "there is nothing to draw from"


class Seen(pl.LightningModule):
    """A language model on any batch that ``take`` makes tokens and labels of, remembering it."""

    def __init__(self, take: Any = lambda b: (b["input_ids"], b["labels"])) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.take = nn.Embedding(64, 8), nn.Linear(8, 64), take
        self.given: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.given.append(batch)
        ids, labels = self.take(batch)
        return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), labels.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_labels_padding_and_special_tokens_stay() -> None:
    batch = make_batch("padded", 8)
    technique, net = eff.TokenNoise(rate=1.0, special_tokens=[5]), Seen()
    train(net, technique, data=[batch])
    got = net.given[-1]
    kept = (batch["attention_mask"] == 0) | (batch["input_ids"] == 5)
    assert torch.equal(got["labels"], batch["labels"]) and torch.equal(got["attention_mask"], batch["attention_mask"])
    assert torch.equal(got["input_ids"][kept], batch["input_ids"][kept]) and bool(kept.any())
    changed = got["input_ids"] != batch["input_ids"]
    assert set(got["input_ids"][changed].tolist()) <= set(batch["input_ids"][~kept].tolist())
    assert technique.report()["share"] == pytest.approx(float(changed.float().mean()), abs=1e-6) and bool(changed.any())


def test_one_tensor_that_is_tokens_and_labels_has_noise_in_the_tokens_alone() -> None:
    ids = make_batch("tiny_gpt", 4)["input_ids"]
    net = Seen()
    train(net, eff.TokenNoise(rate=0.5), data=[{"input_ids": ids, "labels": ids}])
    assert torch.equal(net.given[-1]["labels"], ids) and not torch.equal(net.given[-1]["input_ids"], ids)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_hugging_face(name: str) -> None:
    """Special tokens of the config stay, labels are what they were, and evaluation sees no noise."""
    net, batch = hugging_face(name), make_batch(name)
    given: list[Any] = []
    forward = net.model.forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        given.append((kwargs["input_ids"].clone(), kwargs["labels"].clone(), net.training))
        return forward(*args, **kwargs)

    net.model.forward = spy
    train(net, eff.TokenNoise(rate=0.5), data=[batch] * 2, limit_val_batches=1, val_check_interval=2)
    ids, labels, _ = given[-2]
    at = batch["input_ids"] == 0  # which the config names
    assert torch.equal(ids[at], batch["input_ids"][at]) and torch.equal(labels, batch["labels"])
    assert 0.2 < float((ids != batch["input_ids"])[~at].float().mean()) < 0.7
    assert all(torch.equal(ids, batch["input_ids"]) for ids, _, training in given if not training)


def test_a_classifier_of_texts() -> None:
    data = [{"input_ids": torch.randint(0, 11, (4, 50)), "labels": torch.arange(4)} for _ in range(3)]
    technique = eff.TokenNoise(rate=0.5)
    train(Ids(), technique, data=data)
    assert 0.2 < float(technique.report()["share"]) < 0.7 and "changed 3 of 3 batches" in technique.summary()


def test_draws_follow_from_seed_and_step_and_end_with_until() -> None:
    def run() -> list[Tensor]:
        pl.seed_everything(0, verbose=False)
        net = Seen()
        train(net, eff.TokenNoise(rate=0.5, until=0.5), data=[make_batch("tiny_gpt", 4)] * 8)
        return [b["input_ids"] for b in net.given[-8:]]

    first, plain = run(), make_batch("tiny_gpt", 4)["input_ids"]
    assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
    assert not torch.equal(first[0], first[1])
    assert [torch.equal(ids, plain) for ids in first] == [False] * 4 + [True] * 4


@pytest.mark.parametrize(
    ("take", "batch", "message"),
    [
        (lambda b: (b["x"], b["x"]), {"x": torch.ones(2, 5).long()}, r"\['x'\] are also the labels of training_step"),
        (
            lambda b: (b[0], b[2]),
            (torch.ones(2, 5).long(), torch.ones(2, 5).long(), torch.ones(2, 5).long()),
            "cannot tell which are the tokens",
        ),
        (
            lambda b: (b[0].argmax(-1), b[1]),
            (torch.ones(2, 5, 3), torch.zeros(2, 5, 1).long()),
            rf"{_NONE}: \[0\] \(2, 5, 3\) float32",
        ),
    ],
    ids=["the labels", "several", "none"],
)
def test_what_cannot_be_noised_is_refused(take: Any, batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^TokenNoise: .*{message}"):
        train(Seen(take), eff.TokenNoise(), data=[batch])


def test_a_blank_must_be_known() -> None:
    with pytest.raises(ValueError, match=r"TokenNoise\(noise='blank'\): no config in TinyGPT has a mask_token_id"):
        train(module("tiny_gpt"), eff.TokenNoise(noise="blank"), data=[make_batch("tiny_gpt")])
    technique = eff.TokenNoise(noise="blank", blank_token_id=3, rate=0.5)
    net = Seen()
    train(net, technique, data=[make_batch("tiny_gpt")])
    ids = make_batch("tiny_gpt")["input_ids"]
    changed = net.given[-1]["input_ids"] != ids
    assert bool(changed.any()) and set(net.given[-1]["input_ids"][changed].tolist()) == {3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rate": 1.5}, r"rate=1.5\): expected a number in \[0, 1\]"),
        ({"noise": "swap"}, r"noise='swap'\): expected 'unigram' or 'blank'"),
        ({"blank_token_id": -1}, r"blank_token_id=-1\): expected an integer >= 0"),
        ({"blank_token_id": 3}, r"noise='unigram', blank_token_id=3\): only noise='blank' has a blank token"),
        (
            {"special_tokens": [1, "a"]},
            r"special_tokens=\[1, 'a'\]\): expected a list of token ids, each an integer >= 0",
        ),
        ({"keys": "input_ids"}, r"keys='input_ids'\): expected a list"),
        ({"labels": "labels"}, r"labels='labels'\): expected a list"),
        ({"until": -1}, r"until=-1\): expected a number in"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^TokenNoise\({message}"):
        eff.TokenNoise(**arguments)


def test_yaml(tmp_path: Path) -> None:
    names: Any = {"model": "tests.models.TinyGPT", "data": "tests.data.augmentation.modules.Texts"}
    fit_yaml(tmp_path, "TokenNoise", {"rate": 0.2, "special_tokens": [0]}, max_steps=4, **names)


class Columns(pl.LightningModule):
    """A table: each column of categories has its own embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(n, 4) for n in (3, 9, 5)])
        self.head = nn.Linear(12, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(torch.cat([table(x[:, i]) for i, table in enumerate(self.tables)], -1)), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Edges(Columns):
    """Graphs: the ends (2, E) of edges between all their nodes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        edges, y = batch
        return F.cross_entropy(self.head.weight.T.mean(0) + edges.float().mean() * self.head.bias.expand(len(y), -1), y)


def _edges(items: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.cat([x.expand(3, 3) for x, _ in items])[:, :2].T, torch.tensor([int(y) for _, y in items])


@pytest.mark.parametrize("technique", [eff.TokenNoise(), eff.EDA(operations=["swap"])])
@pytest.mark.parametrize(
    ("module", "collate", "message"),
    [
        (Columns, None, r"no nn\.Embedding was called on the tokens \(4, 3\).*Name other tokens with keys="),
        (Edges, _edges, r"found no tokens in the batch: \[0\] \(2, 12\) int64"),
    ],
)
def test_integers_that_are_no_tokens_are_left(technique: Any, module: Any, collate: Any, message: str) -> None:
    data = [(torch.tensor([i % 3, i % 9, i % 5]), torch.tensor(i % 2)) for i in range(12)]
    net = module()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match=f"^{type(technique).__name__}: {message}"):
        train_on = DataLoader(data, 4, collate_fn=collate)  # pyright: ignore[reportArgumentType]
        trainer(copy.deepcopy(technique), max_steps=3).fit(net, train_on)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
