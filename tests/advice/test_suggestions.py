"""Suggestions follow from the run, say so with its figures, and are techniques that a search would try."""

import re
from dataclasses import replace
from typing import Any

import pytest

import lightning_eff
from lightning_eff._catalogue.facts import facts
from lightning_eff._core.search_space import RunProfile
from lightning_eff._exports import public
from lightning_eff.advice.suggestions import Suggestion, suggestions
from lightning_eff.tune.inspection.profiling import Found
from lightning_eff.tune.space import gather
from tests.models import hugging_face, module

WHY = {
    "num_blocks": "the stack model.blocks",
    "num_matrices": "such as blocks.0.qkv.weight",
    "masked_labels": "85% of batch['labels'] are -100",
}
TEXT = RunProfile(num_blocks=12, sequence_length=512, batch_size=16, visible_loss=True, num_matrices=48)
MASKED = replace(TEXT, num_blocks=4, sequence_length=128, masked_labels=True)
IMAGES = RunProfile(image_side=32, grids=True, batch_size=128, visible_loss=True, epochs=30.0, num_matrices=9)
RUNS = {
    "text": TEXT,
    "masked": MASKED,
    "images": IMAGES,
    "decayed": replace(TEXT, decayed_rate=True),
    "bare": RunProfile(),
}


def found(run: RunProfile, **changes: Any) -> Found:
    last = 0.0 if run.decayed_rate else 1e-3
    fields: dict[str, Any] = {
        "why": WHY,
        "steps": 1000,
        "step_seconds": 0.1,
        "start_seconds": 1.0,
        "validation_seconds": 1.0,
        "samples": run.batch_size,
        "rate": {"peak": 1e-3, "last": last, "at": 0.0},
        "base_rate": 1e-3,
        "decays": (0.01,),
        "callbacks": (),
        "metrics": ("val_loss",),
        "monitor": {},
        "peak_bytes": 0,
        "probe": {},
    }
    return Found(run=run, **{**fields, **changes})


def names(run: RunProfile, **changes: Any) -> list[str]:
    return [one.name for one in suggestions(found(run, **changes))]


def one(name: str, run: RunProfile, **changes: Any) -> Suggestion:
    return next(s for s in suggestions(found(run, **changes)) if s.name == name)


@pytest.mark.parametrize("name", RUNS)
def test_suggestions_are_techniques_that_a_search_would_try(name: str) -> None:
    run = RUNS[name]
    space = gather(run, (), {})
    for suggestion in suggestions(found(run)):
        assert suggestion.name in public.HOMES
        made = suggestion.config["class_path"].removeprefix("lightning_eff.")
        assert made in space.techniques
        arguments = dict(suggestion.config.get("init_args", {}))
        getattr(lightning_eff, made)(**arguments)
        built = eval(suggestion.code, {n: getattr(lightning_eff, n) for n in public.HOMES})
        assert type(built).__name__ == made
        assert re.search(r"\d", suggestion.reason) and suggestion.reason.endswith(".")


@pytest.mark.parametrize("name", RUNS)
def test_the_best_evidence_comes_first_and_is_the_committed_one(name: str) -> None:
    made = suggestions(found(RUNS[name]))
    speeds = [s.speed for s in made]
    assert speeds == sorted(speeds, key=lambda speed: -1.0 if speed is None else -speed)
    committed = {text.rpartition(" ")[0] for of in facts()["measured"].values() for text in of.values()}
    for suggestion in made:
        assert suggestion.speed is not None
        told = re.findall(r"[\d.]+ \[[\d.]+, [\d.]+\]", suggestion.expected)
        assert told and set(told) <= committed


def test_each_kind_of_run_has_its_own() -> None:
    assert names(TEXT) == [
        "ShallowToDeep",
        "SOAP",
        "Muon",
        "ScheduleFree",
        "SequenceLengthWarmup",
        "ExponentialMovingAverage",
        "LearningRateSchedule",
        "RandomLTD",
    ]
    assert names(MASKED)[:5] == ["MaskRateSchedule", "Muon", "SOAP", "SequenceLengthWarmup", "CompoundGrowth"]
    assert set(names(IMAGES)) >= {"SOAP", "Muon", "LabelSmoothing", "BatchSizeWarmup", "ExponentialMovingAverage"}
    assert names(replace(IMAGES, manual_optimization=True)) == ["ExponentialMovingAverage"]


@pytest.mark.parametrize(
    ("name", "run", "without"),
    [
        ("Muon", TEXT, replace(TEXT, num_matrices=0)),
        ("ShallowToDeep", TEXT, replace(TEXT, num_blocks=3)),
        ("SequenceLengthWarmup", TEXT, replace(TEXT, sequence_length=16)),
        ("RandomLTD", TEXT, replace(TEXT, sequence_length=128)),
        ("MaskRateSchedule", MASKED, replace(MASKED, masked_labels=False)),
        ("ExponentialMovingAverage", TEXT, replace(TEXT, decayed_rate=True)),
        ("LearningRateSchedule", TEXT, replace(TEXT, decayed_rate=True)),
        ("ScheduleFree", TEXT, replace(TEXT, decayed_rate=True)),
        ("LabelSmoothing", IMAGES, replace(IMAGES, epochs=2.0)),
        ("LabelSmoothing", IMAGES, replace(IMAGES, image_side=None)),
        ("LabelSmoothing", IMAGES, replace(IMAGES, visible_loss=False)),
        ("BatchSizeWarmup", IMAGES, replace(IMAGES, batch_size=8)),
    ],
)
def test_a_suggestion_needs_its_reason(name: str, run: RunProfile, without: RunProfile) -> None:
    assert name in names(run) and name not in names(without)


def test_reasons_have_the_figures_of_the_run() -> None:
    assert "12 equal blocks (the stack model.blocks)" in one("ShallowToDeep", TEXT).reason
    assert "85% of batch['labels'] are -100" in one("MaskRateSchedule", MASKED).reason
    assert "Sequences have 512 tokens" in one("SequenceLengthWarmup", TEXT).reason
    assert "from 0.001 to 0.001" in one("LearningRateSchedule", TEXT).reason
    assert "ReduceLROnPlateau" in one("LearningRateSchedule", TEXT, schedule="linear").reason
    assert "128 samples" in one("BatchSizeWarmup", IMAGES).reason
    assert "48 trained matrices are hidden" in one("Muon", TEXT).reason
    gpt = module("tiny_gpt")
    told = next(s for s in suggestions(found(TEXT), gpt) if s.name == "Muon").reason
    hidden = sum(p.numel() for n, p in gpt.named_parameters() if n.startswith("blocks.") and p.ndim == 2)
    total = sum(p.numel() for p in gpt.parameters())
    assert (
        told
        == f"16 of 19 trained matrices are hidden. They hold {hidden / total:.0%} of the {total:,} trained parameters."
    )


def test_what_the_run_has_already_is_not_suggested() -> None:
    assert "ScheduleFree" not in names(TEXT, callbacks=("ScheduleFree",))
    assert {"Muon", "SOAP"}.isdisjoint(names(TEXT, callbacks=("ReplaceOptimizer",)))


def test_adapters_are_for_pretrained_weights_that_hardly_fit() -> None:
    tight = replace(TEXT, memory_bound=True)
    pretrained = hugging_face("gpt2")
    pretrained.model.config._name_or_path = "gpt2"
    (lora,) = [s for s in suggestions(found(tight), pretrained) if s.name == "LoRA"]
    assert lora.speed is None and lora.expected == "There is no committed evidence." and "'gpt2'" in lora.reason
    assert "LoRA" in gather(tight, (), {}, include=["LoRA"]).techniques
    assert suggestions(found(tight), pretrained)[-1] == lora
    for run, model in ((TEXT, pretrained), (tight, hugging_face("gpt2")), (tight, None)):
        assert all(s.name != "LoRA" for s in suggestions(found(run), model))


def test_a_result_that_shows_no_difference_promises_none() -> None:
    warmup = one("SequenceLengthWarmup", TEXT)
    assert (
        warmup.speed == 1.0
        and "GPT on source text there was no measurable difference: 0.98 [0.90, 1.06]" in warmup.expected
    )
    muon = one("Muon", TEXT)
    assert (
        muon.speed == 1.14 and "On GPT on source text it was faster: 1.14 [1.06, 1.22] times as fast" in muon.expected
    )
    unlike = one("ScheduleFree", RunProfile())
    assert unlike.expected.startswith("There is no committed evidence on a task like this one. On GPT")
