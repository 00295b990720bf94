"""The kinds of arguments that augmentations share, and the names that other libraries have for some of them."""

from typing import Any, get_args

import numpy as np
import pytest
from torch import nn

import lightning_eff as eff
from lightning_eff._core._arguments.batch import BatchKeys, TokenIds
from lightning_eff._core._arguments.kinds import SomeOf
from lightning_eff.data.augmentation._arguments import NetworkOrFunction
from lightning_eff.data.augmentation.images._pixels import Mean, Std
from lightning_eff.data.augmentation.text.eda import Synonyms

MEAN, STD = (get_args(annotated)[1] for annotated in (Mean, Std))


@pytest.mark.parametrize(
    ("kind", "value", "kept"),
    [
        (BatchKeys(), ("x", 0), ["x", 0]),
        (BatchKeys(), [np.int64(2)], [2]),
        (TokenIds(), [], []),
        (TokenIds(), (1, np.int64(2)), [1, 2]),
        (SomeOf(("a", "b")), ["b", "a", "b"], ("b", "a", "b")),
        (SomeOf(("a", "b"), once=True), [], ()),
        (NetworkOrFunction("x", names=("uniform",)), "uniform", "uniform"),
        (MEAN, -1, -1),
        (MEAN, [0.5, np.float64(0)], (0.5, 0.0)),
        (Synonyms(), {3: [3, 4], 5: [5], np.int64(6): (7,)}, {3: [3, 4], 5: [5], 6: [7]}),
    ],
)
def test_values_are_kept_as_plain_python(kind: Any, value: Any, kept: Any) -> None:
    found = kind(value)
    assert found == kept and type(found) is type(kept)
    if isinstance(found, list | tuple):
        assert [type(one) for one in found] == [type(one) for one in kept]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *((BatchKeys(), value) for value in ("x", [], [True], [1.5], {"x"}, 0)),
        *((TokenIds(), value) for value in ("12", [True], [-1], [1.5], {1: 2}, 3)),
        *((SomeOf(("a", "b")), value) for value in ("a", [], ["c"], [1], None)),
        *((SomeOf(("a", "b"), once=True), value) for value in (["a", "a"], ["c"])),
        *((NetworkOrFunction("x", names=("uniform",)), value) for value in ("even", None, 3)),
        *((MEAN, value) for value in ([], "0.5", [0.1, float("nan")], True)),
        *((STD, value) for value in (0, [1.0, 0.0], -1)),
        *((Synonyms(), value) for value in ([1], {-1: [2]}, {1: 2}, {1: "2"}, {1: [-2]})),
    ],
)
def test_other_values_are_refused(kind: Any, value: Any) -> None:
    with pytest.raises(ValueError):
        kind(value)


@pytest.mark.parametrize(
    ("cls", "given", "argument"),
    [
        (eff.LabelSmoothing, {"label_smoothing": 0.2}, "epsilon"),
        (eff.Mixup, {"mixup_alpha": 0.4}, "alpha"),
        (eff.CutMix, {"cutmix_alpha": 0.4}, "alpha"),
        (eff.Cutout, {"p": 0.4}, "prob"),
        (eff.RandomErasing, {"p": 0.4}, "prob"),
        (eff.RandomErasing, {"scale": (0.1, 0.2)}, "area"),
        (eff.RandomCrop, {"padding_mode": "edge"}, "mode"),
        (eff.RandomCrop, {"p": 0.4}, "prob"),
        (eff.RandomFlip, {"p": 0.4}, "prob"),
        (eff.RandAugment, {"num_ops": 3}, "num_operations"),
        (eff.RandAugment, {"p": 0.4}, "prob"),
        (eff.AutoAugment, {"p": 0.4}, "prob"),
        (eff.AugMix, {"mixture_width": 2}, "width"),
        (eff.AugMix, {"chain_depth": 2}, "depth"),
    ],
)
def test_names_of_other_libraries_are_accepted(cls: Any, given: dict[str, Any], argument: str) -> None:
    (value,) = given.values()
    made = cls(**given)
    assert getattr(made, argument) == value
    assert repr(made) == f"{cls.__name__}({argument}={value!r})"


def test_a_technique_keeps_the_network_that_it_is_given() -> None:
    codec = nn.Identity()
    assert eff.StyleMix(codec, decoder=codec).encoder is codec
