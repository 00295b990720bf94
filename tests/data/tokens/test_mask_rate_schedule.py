"""MaskRateSchedule: each batch has exactly the schedule's share of masked tokens, by BERT's rule, from any loader's own."""

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff import MaskRateSchedule
from lightning_eff.data.tokens.mask_rate_schedule import Rule, mask_rate, remask
from tests.cases import Case, classifier
from tests.models import make_batch, module, trainer

CASES = {
    "MaskRateSchedule": Case(
        active=lambda: MaskRateSchedule(start=0.5, end=0.2, mask_token_id=0),
        neutral=lambda: MaskRateSchedule(until=0.0),
        model="bert",
        refuses={
            **dict.fromkeys(("gpt2", "llama", "tiny_gpt"), "all of the labels 'labels' count"),
            "vit": "found no tokens 'input_ids' and labels 'labels'",
        },
        lost=(classifier, "classifier", "found no tokens 'input_ids' and labels 'labels'"),
    )
}
MASK, VOCAB, IGNORE = 99, 90, -100


def masked(share: float, size: int = 16, length: int = 64, seed: int = 0) -> dict[str, Tensor]:
    """Tokens from 3 up, of which this share is masked by BERT's rule; 1 begins each, and the end is padded with 2."""
    g = torch.Generator().manual_seed(seed)
    text = torch.randint(3, VOCAB, (size, length), generator=g)
    text[:, 0], text[:, -4:] = 1, 2
    attention = torch.ones_like(text)
    attention[:, -4:] = 0
    chosen = (torch.rand(size, length, generator=g) < share) & (attention == 1)
    chosen[:, 0] = False
    fate = torch.rand(size, length, generator=g)
    noise = torch.randint(3, VOCAB, (size, length), generator=g)
    hidden = torch.where(fate < 0.8, MASK, torch.where(fate < 0.9, noise, text))
    return {
        "input_ids": torch.where(chosen, hidden, text),
        "labels": torch.where(chosen, text, IGNORE),
        "attention_mask": attention,
        "text": text,
    }


class Spy(pl.LightningModule):
    """Keeps its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.batches = nn.Parameter(torch.zeros(())), []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches.append(batch)
        return self.w * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def seen(technique: MaskRateSchedule, batches: list[Any], **settings: Any) -> list[Any]:
    net = Spy()
    settings = {"max_steps": len(batches), **settings}
    trainer(technique, **settings).fit(net, DataLoader(batches, batch_size=None))
    return net.batches


def share(batch: dict[str, Tensor]) -> float:
    return float((batch["labels"] != IGNORE).sum()) / float((batch["text"] > 2).sum())


def schedule(**kwargs: Any) -> MaskRateSchedule:
    return MaskRateSchedule(**{"special_tokens": [1, 2], **kwargs})


def test_the_rule() -> None:
    rates = [mask_rate(u, start=0.3, end=0.15, until=0.5) for u in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert rates == pytest.approx([0.3, 0.225, 0.15, 0.15, 0.15])


@pytest.mark.parametrize("own", [0.15, 0.2, 0.4])
def test_rates_are_the_schedules_to_a_token(own: float) -> None:
    """Whether the loader masks less or more than that; and what is masked is what the text says."""
    batches = [masked(own, seed=seed) for seed in range(8)]
    technique = schedule(start=0.4, end=0.15, until=0.75)
    got = seen(technique, batches)
    count = 16 * 59
    for step, (batch, original) in enumerate(zip(got, batches, strict=True)):
        rate = mask_rate(step / 8, start=0.4, end=0.15, until=0.75)
        assert abs(share(batch) - rate) <= 0.5 / count + 1e-9
        chosen = batch["labels"] != IGNORE
        assert torch.equal(batch["labels"][chosen], original["text"][chosen])
        assert torch.equal(batch["input_ids"][~chosen], original["text"][~chosen])
        assert not chosen[:, 0].any() and not chosen[:, -4:].any(), "special tokens and padding"
        both = chosen & (original["labels"] != IGNORE)
        assert torch.equal(batch["input_ids"][both], original["input_ids"][both]), "masks that stay are the loader's"
    assert technique.report()["rate"] == pytest.approx(share(got[-1]))
    assert technique.report()["loader_rate"] == pytest.approx(share(batches[-1]))
    assert "of the tokens in the last batch" in technique.summary()


@pytest.mark.parametrize("vocab_size", [None, 1000])
def test_further_masks_follow_berts_rule(vocab_size: int | None) -> None:
    batch = masked(0.15, 400, 128)
    few = batch["labels"] != IGNORE
    rule = Rule(MASK, 0.8, 0.1, vocab_size)
    g = torch.Generator().manual_seed(1)
    ids, labels = remask(batch["input_ids"], batch["labels"], batch["text"] > 2, 0.5, rule, g)
    new = (labels != IGNORE) & ~few
    n = int(new.sum())
    hidden, kept = ids[new] == MASK, ids[new] == batch["text"][new]
    others = ids[new][~hidden & ~kept]
    for found, wanted in ((hidden, 0.8), (kept, 0.1), (~hidden & ~kept, 0.1)):
        wanted += 0.1 / 87 * (1 if found is kept else -1 if found is not hidden else 0) * (vocab_size is None)
        assert abs(float(found.float().mean()) - wanted) < 6 * math.sqrt(wanted * (1 - wanted) / n)
    assert (int(others.max()) > VOCAB) == (vocab_size is not None)
    every = remask(batch["input_ids"], batch["labels"], batch["text"] > 2, 0.5, Rule(MASK, 1.0, 0.0), g)
    assert (every[0][(every[1] != IGNORE) & ~few] == MASK).all()


def test_nothing_to_do_is_the_very_batch() -> None:
    batch = masked(0.3)
    n = int((batch["labels"] != IGNORE).sum())
    maskable = batch["text"] > 2
    ids, labels = remask(
        batch["input_ids"], batch["labels"], maskable, n / int(maskable.sum()), Rule(MASK), torch.Generator()
    )
    assert ids is batch["input_ids"] and labels is batch["labels"]
    ids, _ = remask(batch["input_ids"], batch["labels"], maskable, 0.9, Rule(None), torch.Generator())
    assert ids is batch["input_ids"], "without a mask token nothing more is masked"


def test_draws_follow_from_the_step_and_nothing_global() -> None:
    batches = [masked(0.15)] * 4
    before = torch.get_rng_state()
    first, second = seen(schedule(start=0.3, end=0.3), batches), seen(schedule(start=0.3, end=0.3), batches)
    pl.seed_everything(7, verbose=False)
    other = seen(schedule(start=0.3, end=0.3), batches)
    for a, b, c in zip(first, second, other, strict=True):
        assert torch.equal(a["input_ids"], b["input_ids"]) and not torch.equal(a["labels"], c["labels"])
    assert not torch.equal(first[0]["labels"], first[1]["labels"])
    torch.set_rng_state(before)


def test_the_mask_token_is_seen_in_the_batch_or_named() -> None:
    technique = schedule()
    seen(technique, [masked(0.15)])
    assert technique.state_dict()["mask_token"] == MASK
    scattered = masked(0.15)
    g = torch.Generator().manual_seed(9)
    scattered["input_ids"] = scattered["input_ids"].where(
        scattered["labels"] == IGNORE, torch.randint(3, VOCAB, (16, 64), generator=g)
    )
    with pytest.raises(ValueError, match=r"masks 1\d% .*no token is in most masked positions.*mask_token_id="):
        seen(schedule(), [scattered])
    got = seen(schedule(mask_token_id=MASK), [scattered])
    assert share(got[0]) == pytest.approx(0.3, abs=1e-3)
    full = masked(0.3)  # masks are only taken back, for which none need be known
    full["input_ids"] = full["input_ids"].where(full["labels"] == IGNORE, scattered["text"].roll(1, 0))
    got = seen(schedule(), [full] * 4)
    assert share(got[-1]) == pytest.approx(0.3 - 0.15 * 3 / 4, abs=1e-3)


def test_batches_of_other_makes() -> None:
    batch = masked(0.15)
    pairs = [(batch["input_ids"], batch["labels"])] * 2
    got = seen(MaskRateSchedule(keys=[0, 1], special_tokens=[1, 2]), pairs)
    assert float((got[0][1] != IGNORE).float().sum()) == round(0.3 * 16 * 59)
    odd = [{"x": batch["input_ids"], "y": batch["labels"].where(batch["labels"] != IGNORE, 0)}] * 2
    got = seen(MaskRateSchedule(keys=["x", "y"], special_tokens=[1, 2], ignore_index=0), odd)
    assert float((got[0]["y"] != 0).float().sum()) == round(0.3 * 16 * 59)


def test_special_tokens_are_those_that_a_config_names() -> None:
    net = module("bert")
    net.model.config.eos_token_id = [5, 7]  # several, as some configs have
    technique = MaskRateSchedule(start=0.9, end=0.9, mask_token_id=60)
    batches: list[Any] = []
    original = net.training_step

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        batches.append(batch)
        return original(batch, batch_idx)

    net.training_step = training_step
    batch = make_batch("bert")
    batch["labels"][:, 1::2] = -100
    trainer(technique, max_steps=1).fit(net, DataLoader([batch], batch_size=None))
    fives = (batch["input_ids"] == 5) & (batch["labels"] == -100)
    assert fives.any() and (batches[0]["labels"][fives] == -100).all()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"tokens": torch.ones(2, 8, dtype=torch.int64)}, r"found no tokens 'input_ids' and labels.*\['tokens'\] \(2, 8\)"),
        ({"input_ids": torch.ones(2, 8).long(), "labels": torch.ones(2, 8).long()}, "all of the labels 'labels' count"),
        ({"input_ids": torch.ones(2, 8).long(), "labels": torch.full((2, 8), -100)}, "none of the labels 'labels' count"),
        (
            {"input_ids": torch.ones(2, 8).long(), "labels": torch.ones(2, 8).long().index_fill(1, torch.tensor([0]), -100)},
            "equal the labels 'labels' wherever these count",
        ),
        (masked(0.5), r"the loader masks 5\d% of .*more than start\. Raise start"),
    ],
)  # fmt: skip
def test_what_is_no_such_batch_is_refused(batch: Any, message: str) -> None:
    net = Spy()
    with pytest.raises(ValueError, match=f"MaskRateSchedule.*{message}"):
        trainer(schedule(), max_steps=2).fit(net, DataLoader([batch], batch_size=None))
    assert not net.batches


@pytest.mark.parametrize(
    "arguments",
    [
        {"start": 0.1},
        {"start": 1.0},
        {"end": 0.0},
        {"until": 1.5},
        {"hidden": 0.95},
        {"mask_token_id": -1},
        {"vocab_size": 2.5},
        {"special_tokens": "12"},
        {"keys": ["input_ids"]},
        {"keys": "ids"},
    ],
)
def test_bad_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"MaskRateSchedule\(.*{next(iter(arguments))}=.*(expected|must)"):
        MaskRateSchedule(**arguments)


def test_control_arms_hold_both_rates_throughout() -> None:
    arms = MaskRateSchedule.control.arms(schedule(start=0.4, end=0.2))
    rates = {name: (arm.start, arm.end, arm.special_tokens) for name, arm in arms.items()}  # pyright: ignore[reportAttributeAccessIssue]
    assert rates == {"20% throughout": (0.2, 0.2, [1, 2]), "40% throughout": (0.4, 0.4, [1, 2])}
