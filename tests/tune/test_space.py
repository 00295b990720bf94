"""The conditional space of a search: what is in it, what is not and why, and what it makes of choices."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Callback
from torch import nn

from lightning_eff import FusedLinearCrossEntropy, LearningRateSchedule, SequenceLengthWarmup
from lightning_eff._catalogue.facts import speed
from lightning_eff._cli.errors import UsageError
from lightning_eff._core.search_space import Choice, Integer, RunProfile, SearchSpace, Uniform
from lightning_eff.tune.config import Choices, Recipes, merged
from lightning_eff.tune.inspection.probing import probe, refused, usual
from lightning_eff.tune.own import Own
from lightning_eff.tune.proposals.proposing import Proposer
from lightning_eff.tune.space import Candidate, Space, gather, parse_range
from tests.test_search_spaces import RICH
from tests.tune.tasks import Here, config

TEXT = RunProfile(num_blocks=4, sequence_length=128, batch_size=8, visible_loss=True, epochs=2.0, num_matrices=8)
RATE = Own("rate", Uniform(1e-4, 1e-2, log=True), 1e-3, "model.init_args.lr")
WARM_UP = Own("warm_up", Uniform(0.0, 0.3), 0.1, "model.init_args.warmup_steps", in_steps=True)


class Mine(Callback):
    """A callback that is no technique of the package."""

    def __init__(self, strength: float = 0.5) -> None:
        self.strength = strength


def space(own: tuple[Own, ...] = (RATE,), **more: Any) -> Space:
    return gather(TEXT, own, {}, **more)


def test_techniques_are_in_it_by_what_they_say_of_themselves() -> None:
    found = space()
    assert {"SequenceLengthWarmup", "ProgressiveStacking", "ReplaceOptimizer"} <= set(found.techniques)
    assert found.left_out["ProgressiveResizing"] == "samples are not images"
    assert found.left_out["LocalSGD"] == "there is one process"
    assert "it changes the model" in found.left_out["NgramEmbedding"]
    assert not set(found.techniques) & set(found.left_out)


def test_including_excluding_and_a_space_file() -> None:
    only = space(include=["ReplaceOptimizer", "tests.tune.test_space.Mine"])
    assert set(only.techniques) == {"ReplaceOptimizer", "tests.tune.test_space.Mine"}
    assert only.left_out["SequenceLengthWarmup"] == "not included"
    assert space(exclude=["ReplaceOptimizer"]).left_out["ReplaceOptimizer"] == "excluded"
    assert space(has=["ReplaceOptimizer"]).left_out["ReplaceOptimizer"] == "the baseline has it already"
    file = {
        "techniques": {
            "ReplaceOptimizer": {"lr": {"low": 0.01, "high": 0.02}, "optimizer": "SOAP"},
            "Lookahead": False,
            "NgramEmbedding": True,
        },
        "own": {"rate": [0.1, 0.2], "dropout": {"key": "model.init_args.dropout", "values": [0.0, 0.1]}},
        "most": 2,
    }
    told = space(file=file)
    assert told.techniques["ReplaceOptimizer"].space.settings["lr"] == Uniform(0.01, 0.02)
    assert told.techniques["ReplaceOptimizer"].space.settings["momentum"] == Choice((0.8, 0.9, 0.95))
    assert told.techniques["ReplaceOptimizer"].space.settings["optimizer"] == Choice(("SOAP",), each=True)
    assert told.left_out["Lookahead"] == "excluded by the space file" and "NgramEmbedding" in told.techniques
    assert told.most == 2 and [one.name for one in told.own] == ["rate", "dropout"]
    assert told.own[0].range == Choice((0.1, 0.2)) and told.own[0].key == RATE.key
    assert space(file={"own": {"rate": False}}).own == ()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"include": ["ReplaceOptimiser"]}, "unknown technique.*Did you mean 'ReplaceOptimizer'"),
        ({"exclude": ["Muom"]}, "unknown technique"),
        ({"include": ["tests.tune.test_space.Yours"]}, "which cannot be imported"),
        ({"include": ["tests.tune.tasks.config"]}, "is not a callback"),
        ({"file": {"technique": {}}}, "not a section of a space file. Did you mean 'techniques'"),
        ({"file": {"techniques": ["Lookahead"]}}, "techniques: got list; expected a mapping"),
        ({"file": {"techniques": {"Lookahead": {"intervall": [5]}}}}, "Did you mean 'interval'"),
        ({"file": {"techniques": {"Lookahead": {"alpha": {"low": 1}}}}}, "techniques.Lookahead.alpha: got {'low': 1}"),
        (
            {"file": {"techniques": {"ReplaceOptimizer": {"optimizer": ["Muon", "Lion"]}}}},
            "techniques.ReplaceOptimizer.optimizer: got .*Lion.*; expected some of 'Muon', 'SOAP'",
        ),
        ({"file": {"own": {"dropout": [0.1]}}}, "own.dropout: this setting was not found in the config. Add its key"),
        ({"file": {"own": {"rat": False}}}, "Did you mean 'rate'"),
        ({"file": {"most": 0}}, "most: got 0"),
    ],
)
def test_what_is_unknown_is_said_with_the_nearest_name(more: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        space(**more)


def test_ranges() -> None:
    assert parse_range("a", [1, 2]) == Choice((1, 2)) and parse_range("a", 3) == Choice((3,))
    assert parse_range("a", {"low": 1, "high": 8, "log": True}) == Integer(1, 8, log=True)
    assert parse_range("a", {"low": 0, "high": 0.5}) == Uniform(0.0, 0.5)
    for wrong in ([], {"low": 2, "high": 1}, {"low": "a", "high": "b"}, {"low": 0, "high": 1, "log": 2}, {"x": 1}):
        with pytest.raises(UsageError, match=r"^a: "):
            parse_range("a", wrong)


def test_declared_conflicts_are_known_beforehand() -> None:
    found = space()
    assert found.conflict(["ReplaceOptimizer", "RandomLTD", "SequenceLengthWarmup"]) is None
    assert found.conflict(["LinearScaling", "Lookahead", "BatchSizeWarmup"]) == (
        frozenset({"LinearScaling", "BatchSizeWarmup"}),
        "both scale the learning rate with the batch. BatchSizeWarmup alone scales it from its first batch",
    )
    rates = found.conflict(["LearningRateSchedule", "ScheduleFree"])
    assert rates is not None and rates[0] == {"LearningRateSchedule", "ScheduleFree"}
    less = found.without("Lookahead", "refused: because")
    assert "Lookahead" not in less.techniques and less.left_out["Lookahead"] == "refused: because"


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        *((name, TEXT) for name in sorted(space().techniques)),
        *((name, RICH) for name in sorted(gather(RICH, (RATE,), {}).techniques.keys() - space().techniques.keys())),
    ],
)
def test_the_usual_settings_of_each_technique_are_a_config_of_it(name: str, profile: RunProfile) -> None:
    found = gather(profile, (RATE,), {})
    one = found.techniques[name]
    told = one.config(usual(one), profile)
    assert told["class_path"] == f"lightning_eff.{name}"
    again = yaml.safe_load(yaml.safe_dump(told))
    assert again == told
    one.cls(**told.get("init_args", {}))


def test_what_no_config_can_say_is_refused_in_words(tmp_path: Path) -> None:
    """As an error that a probe and a trial take for the technique's refusal, not one that ends the search."""
    one = Candidate(
        "tests.tune.test_space.Mine", Mine, SearchSpace(make=lambda cls, values, profile: cls(nn.Identity()))
    )
    recipes = Recipes((str(config(tmp_path)),), replace(space(), techniques={one.name: one}), scheduled=True)
    choices = Choices({}, {one.name: {}})
    with pytest.raises(ValueError, match=r"YAML cannot hold Identity\(\) of type Identity\. Use numbers"):
        recipes.arm("mine", choices, 10, tmp_path)
    run: Any = Here()
    why = refused(recipes, one.name, run, tmp_path, target="val_loss", steps=10, seed=0, threads=1)
    assert why is not None and why.startswith("YAML cannot hold")


def test_what_was_measured_to_pay_is_tried_first() -> None:
    """Where the time for it does not suffice for all, the first recipes' techniques have been tried."""
    measured = {"Lookahead": 0.5, "BatchSizeWarmup": 1.0, "ScheduleFree": 1.5, "ReplaceOptimizer": 2.0}
    whole = space(include=list(measured))
    of = {
        name: replace(one, space=replace(one.space, measured=measured[name])) for name, one in whole.techniques.items()
    }
    tried: list[str] = []
    found = probe(replace(whole, techniques=of), tried.append, over=lambda: len(tried) >= 3)
    assert tried == ["ReplaceOptimizer", "ScheduleFree", "BatchSizeWarmup"] == list(found)


def test_what_is_expected_is_what_was_measured_where_it_was_measured() -> None:
    """The committed results say it of the package's own; a technique may say it of itself, and of which runs."""
    one = space(include=["ReplaceOptimizer"]).techniques["ReplaceOptimizer"]
    plain = space().profile
    assert one.expected(plain) == speed("ReplaceOptimizer") > 1.2 and speed("ReformersFriend") == 1.0
    assert replace(one, name="mine.ReplaceOptimizer").expected(plain) == 1.0, "another's class of that name"
    assert replace(one, space=replace(one.space, measured=3.0)).expected(plain) == 3.0
    of_head = FusedLinearCrossEntropy.search_space
    assert of_head is not None
    fused = Candidate("FusedLinearCrossEntropy", FusedLinearCrossEntropy, of_head)
    assert fused.expected(replace(plain, masked_labels=True)) > 2 and fused.expected(plain) == 1.0


def test_a_search_begins_with_the_settings_that_paid() -> None:
    """Of ``ShallowToDeep`` those were the module's own rate; its papers' rates cost on two tasks."""
    assert usual(space(include=["ShallowToDeep"]).techniques["ShallowToDeep"])["rate"] is None


def test_no_two_ways_to_step_begin_together() -> None:
    """A preconditioner pays alone, and so do Muon and short sequences: the first stack of several is of the latter two."""
    measured = {"ReplaceOptimizer": 2.0, "KFAC": 1.5, "SequenceLengthWarmup": 1.2, "ScheduleFree": 0.9}
    whole = space(include=list(measured))
    of = {
        name: replace(one, space=replace(one.space, settings={}, measured=measured[name]))
        for name, one in whole.techniques.items()
    }
    proposer = Proposer(replace(whole, techniques=of), "min", 0)
    begun = [list(proposer.drawn("recipes", number, None, {}).techniques) for number in range(4)]
    alone, two, *others = begun
    assert alone == ["ReplaceOptimizer"] and two == [*alone, "SequenceLengthWarmup"]
    assert others == [["KFAC"], ["SequenceLengthWarmup"]], "each of the others alone"


def test_a_config_has_the_baseline_s_settings_and_the_techniques_above_it(tmp_path: Path) -> None:
    file = Path(config(tmp_path))
    file.write_text(file.read_text().replace("devices: 1", "devices: 1, callbacks: [{class_path: Timer}]"))
    recipes = Recipes([str(file)], space((RATE, WARM_UP)), scheduled=True)
    shares = {"start": 0.25, "until": 0.5, "mode": "truncate"}
    choices = Choices({"rate": 0.002, "warm_up": 0.1}, {"SequenceLengthWarmup": shares})
    over = recipes.overlay(choices, 200)
    assert over["model"] == {"init_args": {"lr": 0.002, "warmup_steps": 20}}
    timer, own = over["trainer"]["callbacks"]
    assert timer == {"class_path": "Timer"} and own["class_path"] == "lightning_eff.SequenceLengthWarmup"
    assert SequenceLengthWarmup(**own["init_args"]).start == 32, "a quarter of 128"
    whole = recipes.whole(choices, 200)
    assert whole["model"] == {"class_path": "tests.tune.tasks.Regression", **over["model"]}
    arm = recipes.arm("x", choices, 200, tmp_path / "configs")
    assert yaml.safe_load(Path(arm.source[1]).read_text()) == over
    assert recipes.arm("x", Choices(), 200, tmp_path / "configs").source == (str(file),)


def test_a_rate_that_does_not_decay_is_decayed_in_every_arm(tmp_path: Path) -> None:
    outside = (Own("rate", RATE.range, 1e-3, None), Own("warm_up", WARM_UP.range, None, None))
    recipes = Recipes([config(tmp_path)], space(outside), scheduled=False)
    settings, schedule = recipes.overlay(Choices({"rate": 0.002, "warm_up": 0.1}), 200)["trainer"]["callbacks"]
    assert settings == {"class_path": "lightning_eff.tune.settings.OptimizerSettings", "init_args": {"rate": 0.002}}
    assert schedule["class_path"] == "lightning_eff.LearningRateSchedule"
    assert vars(LearningRateSchedule(**schedule["init_args"]).shape)["warmup"] == 0.1
    own = {"shape": "rex", "warmup": 0.0, "final": 0.0}
    (one,) = recipes.overlay(Choices(techniques={"LearningRateSchedule": own}), 200)["trainer"]["callbacks"]
    assert one["init_args"] == own, "a recipe's own takes its place"
    for rate, count in (("cosine", 1), (None, 2)):  # that technique sets rates, but for the last of these
        grown = {"ShallowToDeep": {"first": 0.5, "until": 0.3, "rate": rate}}
        assert len(recipes.overlay(Choices(techniques=grown), 200)["trainer"]["callbacks"]) == count


def test_choices_have_one_key_each() -> None:
    one = Choices({"rate": 0.1, "batch": 8}, {"A": {"x": 1, "y": 2}})
    assert one.key == Choices({"batch": 8, "rate": 0.1}, {"A": {"y": 2, "x": 1}}).key
    assert len({one.key, Choices({"rate": 0.1}, one.techniques).key, one.without("A").key}) == 3
    assert Choices().describe() == "unchanged"


def test_configs_are_merged_as_lightning_does() -> None:
    base = {"model": {"class_path": "A", "init_args": {"x": 1, "y": 2}}, "data": "D"}
    assert merged(base, {"model": {"init_args": {"x": 3}}})["model"]["init_args"] == {"x": 3, "y": 2}
    assert merged(base, {"model": {"class_path": "B", "init_args": {"z": 1}}})["model"] == {
        "class_path": "B",
        "init_args": {"z": 1},
    }
    assert merged(base, {"data": {"init_args": {"n": 1}}})["data"] == {"class_path": "D", "init_args": {"n": 1}}
