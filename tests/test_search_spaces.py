"""What techniques declare for a search."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_eff._core.search_space import Choice, Integer, RunProfile, SearchSpace, Uniform
from lightning_eff._exports.techniques import technique_classes
from lightning_eff.optim.optimizers._replacing.making import making
from tests.cases import CASES, STAND_INS

CLASSES = {cls.__name__: cls for cls in technique_classes()}
#: A run on which everything could gain something.
RICH = RunProfile(
    num_blocks=12,
    sequence_length=512,
    image_side=224,
    grids=True,
    batch_size=32,
    visible_loss=True,
    epochs=3.0,
    decayed_rate=False,
    memory_bound=True,
    accelerator="cuda",
    float8=True,
    int8=True,
    world_size=8,
    optimizer_states=True,
    masked_labels=True,
    num_matrices=48,
)
STUDY = {"S2FP8Precision", "Wang2018FP8Precision", "HybridParallelStrategy"}
POINTLESS = {"ExactResume", "GradientNoiseScale"}  # makes no training more efficient
POINTLESS |= {"AdaScale", "MuP"}  # carry a tuned learning rate to other batches and widths
POINTLESS |= {"GraSP", "LotteryTickets", "RigL", "SET", "SNIP"}  # masked products take as long as dense ones
POINTLESS |= {"BlockSparsity", "EarlyBird", "ReSprop"}
POINTLESS |= {"SuperMix", "StyleMix", "TrainLargeThenCompress"}  # teacher, codec and large network are the user's


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_technique_says_what_a_search_would_try(name: str) -> None:
    cls = CLASSES[name]
    assert isinstance(cls.search_space, SearchSpace)
    why = cls.search_space.pointless(RICH)
    assert (why is not None) == (name in STUDY | POINTLESS), why


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_corner_of_a_search_space_is_a_technique_that_acts(name: str) -> None:
    space = CLASSES[name].search_space
    corners = list(space.corners())
    assert len({tuple(map(repr, corner.values())) for corner in corners}) == len(corners)
    for corner in corners:
        built = space.build(CLASSES[name], corner, RICH)
        assert type(built) is CLASSES[name]
        if not CASES[name].neutral_by_machine:
            assert not built.neutral, corner


def test_settings_are_arguments_or_are_made_into_some() -> None:
    for name, cls in CLASSES.items():
        space: SearchSpace = cls.search_space
        if space.make is SearchSpace().make:
            assert set(space.settings) <= set(inspect.signature(cls).parameters), name


@pytest.mark.parametrize("name", sorted(STAND_INS))
def test_stand_ins_are_not_searched(name: str) -> None:
    assert type(STAND_INS[name].active()).search_space is None


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("ProgressiveStacking", {"num_blocks": 1}),
        ("ProgressiveLayerDropping", {"num_blocks": 0}),
        ("Rematerialization", {"num_blocks": 0}),
        ("Rematerialization", {"memory_bound": False}),
        ("SequenceLengthWarmup", {"sequence_length": None}),
        ("SequenceLengthWarmup", {"sequence_length": 16}),
        ("ProgressiveResizing", {"image_side": None}),
        ("ProgressiveResizing", {"image_side": 8}),
        ("ImportanceSampling", {"visible_loss": False}),
        ("SelectiveBackprop", {"batch_size": 1}),
        ("SharpnessAwareMinimization", {"epochs": 0.3}),
        ("LatestWeightAveraging", {"decayed_rate": True}),
        ("PatchDropout", {"grids": False}),
        ("PartialTokenTraining", {"grids": False}),
        ("PatchDropout", {"num_blocks": 1}),
        ("MaskRateSchedule", {"masked_labels": False}),
        ("ReplaceOptimizer", {"num_matrices": 0}),
        ("ActivationOffload", {"accelerator": "cpu"}),
        ("OptimizerOffload", {"optimizer_states": False}),
        ("ActivationCompression", {"memory_bound": False}),
        ("LocalSGD", {"world_size": 1}),
        ("DiLoCo", {"world_size": 1}),
        ("DynamicAveraging", {"world_size": 1}),
        ("CompressedDDPStrategy", {"world_size": 1}),
        ("DeepSpeedEffStrategy", {"accelerator": "cpu"}),
        ("FP8Precision", {"float8": False}),
        ("INT8Precision", {"int8": False}),
    ],
)
def test_what_makes_a_technique_pointless_is_said(name: str, lacking: dict[str, Any]) -> None:
    assert CLASSES[name].search_space.pointless(RICH) is None
    why = CLASSES[name].search_space.pointless(replace(RICH, **lacking))
    assert why and why[0].islower() and not why.endswith(".")


def test_stages_double_up_to_the_full_depth() -> None:
    space = CLASSES["ProgressiveStacking"].search_space
    values = {"first": 0.25, "until": 0.4, "init": "stack", "copy_optimizer_state": True}
    built = space.build(CLASSES["ProgressiveStacking"], values, RICH)
    assert [count for _, count in built.stages] == [3, 6, 12]
    assert [u for u, _ in built.stages] == pytest.approx([0.0, 0.2, 0.4])
    short = space.build(CLASSES["ProgressiveStacking"], values, replace(RICH, num_blocks=6))
    assert [count for _, count in short.stages] == [2, 4, 6]


def test_matrices_are_stepped_by_either_optimizer_at_a_rate_of_its_own() -> None:
    space = CLASSES["ReplaceOptimizer"].search_space
    values = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.05}
    for name, defaults in (
        ("Muon", {"lr": 0.02, "momentum": 0.9}),
        ("SOAP", {"lr": 0.01, "betas": (0.9, 0.95)}),
    ):
        built = space.build(CLASSES["ReplaceOptimizer"], {"optimizer": name, **values}, RICH)
        made = making(built.optimizer)([torch.nn.Parameter(torch.zeros(4, 4))])
        assert type(made).__name__ == name
        got = {key: tuple(v) if isinstance(v := made.defaults[key], list) else v for key in defaults}
        assert got == defaults and made.defaults["weight_decay"] == 0.05


def test_a_value_out_of_its_range_is_refused() -> None:
    space = SearchSpace({"a": Uniform(0.1, 1.0, log=True), "b": Choice((1, 2)), "c": Integer(3, 9)})
    assert len(list(space.corners())) == 8
    for wrong in ({"a": 0.05, "b": 1, "c": 3}, {"a": 0.5, "b": 3, "c": 3}, {"a": 0.5, "b": 1, "c": 2.5}):
        with pytest.raises(ValueError, match="expected one of"):
            space.build(dict, wrong, RICH)
    with pytest.raises(ValueError, match=r"got \['a'\]; expected \['a', 'b', 'c'\]"):
        space.build(dict, {"a": 0.5}, RICH)
    assert space.build(dict, {"a": 0.5, "b": 1, "c": 4}, RICH) == {"a": 0.5, "b": 1, "c": 4}


@pytest.mark.parametrize(("low", "high", "log"), [(1.0, 1.0, False), (0.0, 1.0, True), (float("nan"), 1.0, False)])
def test_ranges_are_ranges(low: float, high: float, log: bool) -> None:
    with pytest.raises(ValueError, match="expected low < high"):
        Uniform(low, high, log)
    with pytest.raises(ValueError, match="expected low < high"):
        Integer(3, 3)
