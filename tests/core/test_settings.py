"""What a technique's ``repr`` shows."""

import copy
import inspect
import pickle

import pytest
from torch import nn

from lightning_eff import LabelSmoothing, LearningRateSchedule, LoRA, Muon, ReplaceOptimizer
from lightning_eff._core.technique import Technique


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (LabelSmoothing, "LabelSmoothing()"),
        (lambda: LabelSmoothing(epsilon=0.1), "LabelSmoothing()"),
        (lambda: LabelSmoothing(epsilon=0.2), "LabelSmoothing(epsilon=0.2)"),
        (lambda: LoRA(4, names=["a", "b"]), "LoRA(rank=4, names=['a', 'b'])"),
        (lambda: ReplaceOptimizer(Muon, lr=0.02), "ReplaceOptimizer(optimizer=Muon, lr=0.02)"),
        (
            lambda: ReplaceOptimizer("lion", lr=1e-4, weight_decay=0.1),
            "ReplaceOptimizer(optimizer='lion', lr=0.0001, weight_decay=0.1)",
        ),
        (lambda: LearningRateSchedule(shape="cosine"), "LearningRateSchedule(shape='cosine')"),
    ],
)
def test_only_settings_that_are_not_the_defaults_are_shown(made: object, shown: str) -> None:
    technique = made()  # pyright: ignore[reportCallIssue]
    assert repr(technique) == repr(copy.deepcopy(technique)) == shown


def test_a_pickled_technique_shows_its_settings() -> None:
    assert repr(pickle.loads(pickle.dumps(LoRA(4)))) == "LoRA(rank=4)"


class Guided(Technique):
    def __init__(self, teacher: nn.Module, names: tuple[str, ...] = ()) -> None:
        self.teacher, self.names = teacher, names


def test_models_are_shown_by_their_class_and_not_kept() -> None:
    guided = Guided(nn.Linear(2, 2), names=("a",))
    assert repr(guided) == "Guided(teacher=<Linear>, names=('a',))"
    assert all(type(text) is str for text in guided._made_with.values())


def test_a_wrong_argument_is_the_constructors_own_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'epsilom'"):
        LabelSmoothing(epsilom=0.1)  # pyright: ignore[reportCallIssue]


def test_a_technique_without_arguments_takes_none() -> None:
    class Bare(Technique):
        pass

    assert not inspect.signature(Bare).parameters and repr(Bare()) == "Bare()"
