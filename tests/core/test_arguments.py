"""Declared arguments: what each kind takes, and the one form of message."""

import copy
import inspect
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch

from lightning_eff._core._arguments.batch import BatchKeys
from lightning_eff._core._arguments.declared import aliases_of, arguments_of, declared
from lightning_eff._core._arguments.kinds import (
    Alias,
    Count,
    Each,
    Either,
    Fraction,
    Function,
    Layers,
    Names,
    Number,
    OneOf,
    Text,
)
from lightning_eff._core.technique import Technique


class Plain:
    """A class with declared arguments.

    Args:
        keep: the fraction of each batch to train on, in (0, 1]. 1 is plain training.
        steps: optimizer steps
            between two selections.
        rho: the radius.
        mode: what to do.
        betas: two decays.
    """

    @declared
    def __init__(
        self,
        keep: Annotated[float, Fraction(above=0), Alias("p")] = 0.5,
        *,
        steps: Annotated[int, Count(at_least=2)] = 4,
        rho: Annotated[float | None, Number(above=0, hint="The paper's is 0.05.")] = None,
        mode: Literal["min", "max"] = "min",
        adaptive: bool = False,
        names: Annotated[Sequence[str], Names("dotted paths")] | None = None,
        head: Annotated[str | None, Text("a dotted path of a submodule")] = None,
        betas: Annotated[tuple[float, float], Each(Fraction(below=1), length=2)] = (0.9, 0.99),
        loss: Annotated[Any, Function("(module, batch)")] = None,
        interval: Annotated[int | str, Either(OneOf("epoch"), Count())] = "epoch",
        labels: Annotated[Sequence[str | int], BatchKeys()] | None = None,
    ) -> None:
        self.settings = {
            "keep": keep,
            "steps": steps,
            "rho": rho,
            "adaptive": adaptive,
            "names": names,
            "interval": interval,
            "labels": labels,
        }
        self.betas = betas


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        (
            "keep",
            0,
            "Plain(keep=0): expected a number in (0, 1]: the fraction of each batch to train on. The default is 0.5.",
        ),
        ("keep", math.nan, "Plain(keep=nan): expected a number in (0, 1]"),
        ("keep", True, "Plain(keep=True): expected a number in (0, 1]"),
        ("keep", np.bool_(True), "expected a number in (0, 1]"),
        ("keep", None, "Plain(keep=None): expected a number in (0, 1]"),
        (
            "keep",
            "0.5",
            "Plain(keep='0.5'): expected a number in (0, 1]: the fraction of each batch to train on. Write it without",
        ),
        ("keep", torch.ones(2), "expected a number in (0, 1]"),
        ("keep", 1 + 1e-9, "expected a number in (0, 1]"),
        (
            "steps",
            1,
            "Plain(steps=1): expected an integer >= 2: optimizer steps between two selections. The default is 4.",
        ),
        ("steps", 3.0, "Plain(steps=3.0): expected an integer >= 2"),
        ("rho", math.inf, "Plain(rho=inf): expected a finite number > 0, or None: the radius. The paper's is 0.05."),
        ("mode", "mean", "Plain(mode='mean'): expected 'min' or 'max': what to do. The default is 'min'."),
        ("adaptive", "yes", "Plain(adaptive='yes'): expected True or False. The default is False."),
        ("adaptive", 1, "Plain(adaptive=1): expected True or False"),
        ("names", "fc", "Plain(names='fc'): expected a list of dotted paths, or None. Write ['fc']."),
        ("names", [1], "Plain(names=[1]): expected a list of dotted paths"),
        ("head", "", "Plain(head=''): expected a dotted path of a submodule, or None."),
        (
            "betas",
            (0.9,),
            "Plain(betas=(0.9,)): expected 2 values, each a number in [0, 1): two decays. The default is (0.9, 0.99).",
        ),
        ("betas", (0.9, 1.0), "Plain(betas=(0.9, 1.0)): expected 2 values"),
        ("betas", 0.9, "Plain(betas=0.9): expected 2 values"),
        ("interval", 0, "Plain(interval=0): expected 'epoch' or an integer >= 1. The default is 'epoch'."),
        ("interval", "batch", "Plain(interval='batch'): expected 'epoch' or an integer >= 1"),
        ("labels", "y", "Plain(labels='y'): expected a list of names or positions in the batch, or None. Write ['y']."),
        ("labels", [], "Plain(labels=[]): expected a list of names or positions in the batch, or None. For example ["),
        ("labels", [True], "Plain(labels=[True]): expected a list of names or positions"),
        ("loss", 3, "Plain(loss=3): expected a function of (module, batch)."),
    ],
)
def test_other_values_are_refused_in_one_form(argument: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Plain(**{argument: value})
    assert message in str(caught.value)
    assert "nothing" not in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "value", "kept"),
    [
        ("keep", 1, 1),
        ("keep", np.float32(0.25), 0.25),
        ("keep", torch.tensor(0.25), 0.25),
        ("steps", np.int64(3), 3),
        ("rho", None, None),
        ("adaptive", np.bool_(True), True),
        ("names", ("a", "b"), ("a", "b")),
        ("names", [], []),
        ("labels", ("y", np.int64(1)), ["y", 1]),
        ("interval", np.int32(7), 7),
        ("interval", "epoch", "epoch"),
    ],
)
def test_values_are_kept_as_plain_python(argument: str, value: Any, kept: Any) -> None:
    found = Plain(**{argument: value}).settings[argument]
    assert found == kept
    assert type(found) is type(kept)


@pytest.mark.parametrize("value", ["", "block_*", "model.layers", ["a", "b"]])
def test_layers_are_paths_or_patterns(value: Any) -> None:
    """The empty path is the module's own, where it is a sequence of blocks itself."""
    (kind,) = Layers.__metadata__  # pyright: ignore[reportAttributeAccessIssue]
    assert kind(value) == value
    for other in ([], [""], 3):
        with pytest.raises(ValueError):
            kind(other)


def test_sequences_are_kept_as_tuples() -> None:
    assert Plain(betas=[0.5, np.float64(0.75)]).betas == (0.5, 0.75)  # pyright: ignore[reportArgumentType]


def test_the_signature_stays() -> None:
    signature = inspect.signature(Plain)
    assert list(signature.parameters)[:2] == ["keep", "steps"]
    assert str(signature.parameters["keep"].annotation).endswith("[float, Fraction(above=0), Alias(name='p')]")
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        Plain(other=1)  # pyright: ignore[reportCallIssue]


def test_an_argument_has_other_names() -> None:
    assert Plain(p=0.25).settings["keep"] == 0.25  # pyright: ignore[reportCallIssue]
    assert aliases_of(Plain) == {"p": "keep"}
    with pytest.raises(TypeError, match=r"Plain\(keep=..., p=...\): these are two names of one argument"):
        Plain(0.5, keep=0.5, p=0.25)  # pyright: ignore[reportCallIssue]


class Declaring(Technique):
    def __init__(self, keep: Annotated[float, Fraction(), Alias("p")] = 0.5) -> None:
        self.keep = keep


class Inheriting(Declaring):
    pass


class HandingOn(Plain):
    """A class of a user's own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)


def test_a_subclass_that_hands_arguments_on_has_its_bases_messages() -> None:
    with pytest.raises(
        ValueError, match=r"HandingOn\(keep=2\): expected a number .*: the fraction of each .* default is 0\.5"
    ):
        HandingOn(keep=2)


def test_techniques_are_checked_without_asking() -> None:
    for cls in (Declaring, Inheriting):
        with pytest.raises(ValueError, match=rf"{cls.__name__}\(keep=2\): expected a number in \[0, 1\]"):
            cls(2)
        assert repr(cls(p=np.float64(0.25))) == f"{cls.__name__}(keep=0.25)"  # pyright: ignore[reportCallIssue]
        assert copy.deepcopy(cls(0.25)).keep == 0.25
        assert set(arguments_of(cls)) == {"keep"}
