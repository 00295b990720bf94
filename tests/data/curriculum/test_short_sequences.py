"""ShortSequences, the control of the length warm-up: the short length at every step, the full one in validation."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_eff import SequenceLengthWarmup
from lightning_eff.data.curriculum.sequence_length_warmup import ShortSequences
from tests.cases import Case, classifier
from tests.models import LENGTH, loader, module, trainer

CASES = {
    "ShortSequences": Case(
        active=lambda: ShortSequences(start=8),
        neutral=lambda: ShortSequences(start=32),
        lost=(classifier, "classifier", "keys="),
    )
}


def control_of(technique: SequenceLengthWarmup) -> tuple[str, ShortSequences]:
    ((name, arm),) = technique.control.arms(technique).items()
    assert isinstance(arm, ShortSequences)
    return name, arm


def shapes(technique: SequenceLengthWarmup, **kwargs: Any) -> dict[str, list[tuple[int, ...]]]:
    """The shapes of the token ids that ``training_step`` and ``validation_step`` get, and the extra passes."""
    net: Any = module("tiny_gpt")
    found: dict[str, list[tuple[int, ...]]] = {"training": [], "validation": [], "extra": []}
    for name in ("training", "validation"):
        step = getattr(net, f"{name}_step")

        def own(batch: Any, batch_idx: int, name: str = name, step: Any = step) -> Any:
            found[name].append(tuple(batch["input_ids"].shape))
            return step(batch, batch_idx)

        setattr(net, f"{name}_step", own)

    class Cost(pl.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            found["extra"].append((technique.session.chain.cost.forward_passes,))

    settings = {"max_steps": 12, "limit_val_batches": 1, **kwargs}
    trainer(technique, Cost(), **settings).fit(net, loader("tiny_gpt"), loader("tiny_gpt", 4))
    return found


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({"start": 8, "until": 0.3}, (16, 8)),
        ({"start": 8, "until": 1.0, "mode": "truncate"}, (4, 8)),
        ({"start": 24, "until": 0.5, "mode": "truncate", "multiple_of": 12}, (4, 24)),
        ({"start": 12, "until": 0.5, "multiple_of": 4}, (8, 16)),  # 12 does not divide 32
    ],
)
def test_the_first_length_of_the_warm_up_throughout(settings: dict[str, Any], shape: tuple[int, int]) -> None:
    warm_up = SequenceLengthWarmup(**settings)
    _, short = control_of(warm_up)
    grown = shapes(warm_up)
    assert grown["training"][0] == shape
    assert settings["until"] == 1.0 or grown["training"][-1] == (4, LENGTH)
    found = shapes(short)
    assert found["training"] == [shape] * 12
    assert found["validation"] and set(found["validation"]) == {(4, LENGTH)}
    assert found["extra"] == [(0,)]
    assert short.report() == {"length": shape[1]}
    assert short.summary() == f"{shape[1]} for 12 steps"


def test_short_also_where_the_budget_is_used_up() -> None:
    _, short = control_of(SequenceLengthWarmup(start=8))
    assert [short.length_of(LENGTH, u) for u in (0.0, 0.3, 0.999, 1.0)] == [8] * 4
    assert short.length_of(8, 0.5) == 8


def test_arms_have_the_recipes_own_arguments() -> None:
    name, short = control_of(
        SequenceLengthWarmup(start=12, until=0.7, multiple_of=4, mode="truncate", keys=["input_ids", "labels"])
    )
    assert name == "12 tokens throughout"
    assert (short.start, short.multiple_of, short.mode, short.keys) == (12, 4, "truncate", ["input_ids", "labels"])
    name, short = control_of(SequenceLengthWarmup(start=1, multiple_of=1))
    assert name == "1 token throughout"
    assert (short.start, short.multiple_of, short.mode, short.keys) == (1, 1, "reshape", None)
    neutral = SequenceLengthWarmup(until=0.0)
    assert neutral.control.arms(neutral) == {}
    assert short.control.arms(short) == {} and short.name() == "short_sequences"


def test_needs_no_budget() -> None:
    _, short = control_of(SequenceLengthWarmup(start=8))

    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = trainer.global_step >= 3

    net: Any = module("tiny_gpt")
    t = trainer(short, Stop(), max_steps=-1, max_epochs=-1)
    t.fit(net, loader("tiny_gpt"))
    assert t.global_step >= 3 and short.summary() == f"8 for {t.global_step} steps"
    assert all(torch.isfinite(p).all() for p in net.parameters())
