"""The examples in the docstrings of public classes: each one runs as it stands."""

import doctest
import inspect
import re
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn

import lightning_eff

CLASSES = {name: found for name in lightning_eff.__all__ if inspect.isclass(found := getattr(lightning_eff, name))}


def examples_of(cls: type) -> str:
    """The section ``Example:`` of a class's own docstring."""
    found = re.search(r"^Example:\n((?: {4}.*\n?|\n)+)", inspect.cleandoc(cls.__doc__ or ""), re.M)
    return inspect.cleandoc(found[1]) if found else ""


def names() -> dict[str, Any]:
    """What every example can use: the public names, Lightning as ``L``, ``torch``, ``nn``, and a small network ``model``."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    public = {name: getattr(lightning_eff, name) for name in lightning_eff.__all__}
    return {**public, "L": lightning, "torch": torch, "nn": nn, "model": model, "lightning_eff": lightning_eff}


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = examples_of(CLASSES[name])
    assert name in text, f"{name}: its docstring needs a section `Example:` with a call of {name}"
    if name == "DeepSpeedEffStrategy":  # its constructor needs the extra
        pytest.importorskip("deepspeed")
    monkeypatch.chdir(tmp_path)
    test = doctest.DocTestParser().get_doctest(text, names(), name, None, 0)
    assert test.examples, f"{name}: the section `Example:` holds no line that begins with >>>"
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert runner.run(test, out=said.append).failed == 0, "".join(said)
