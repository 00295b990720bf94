"""The study of sample selection: its corrupted data, its recipes and its verdicts."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import lightning_eff
from benchmarks.selection import SUBJECT
from benchmarks.spoilt.data import SpoiltDigits
from benchmarks.study import BASELINE, config_of, page
from examples.vit.data import Digits

ARMS = (BASELINE, *SUBJECT.arms)


def sets(**kwargs: Any) -> tuple[Digits, SpoiltDigits]:
    plain, spoilt = Digits(), SpoiltDigits(**kwargs)
    plain.setup("fit")
    spoilt.setup("fit")
    return plain, spoilt


def test_one_label_in_five_is_wrong_and_validation_is_clean() -> None:
    plain, spoilt = sets(wrong=0.2)
    (images, labels), (same, others) = plain.train_set.tensors, spoilt.train_set.tensors
    assert torch.equal(images, same)
    assert int((labels != others).sum()) == round(0.2 * len(labels))
    assert set(others.tolist()) <= set(range(10))
    assert all(torch.equal(a, b) for a, b in zip(plain.val_set.tensors, spoilt.val_set.tensors, strict=True))


def test_half_of_the_rows_are_copies_of_few_images() -> None:
    plain, spoilt = sets(repeated=0.5, copied=32)
    images, labels = spoilt.train_set.tensors
    assert len(labels) == len(plain.train_set.tensors[1])
    _, counts = torch.unique(images.flatten(1), dim=0, return_counts=True)
    often = counts[counts > 15]
    assert len(often) == 32 and abs(int(often.sum()) - len(labels) // 2 - 32) <= 1
    assert int((counts <= 2).sum()) >= len(labels) // 2 - 40


@pytest.mark.parametrize(("name", "value"), [("wrong", 1.0), ("repeated", -0.1), ("copied", 0)])
def test_bad_arguments(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"SpoiltDigits\\({name}="):
        SpoiltDigits(**{name: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("task", SUBJECT.tasks)
def test_every_arm_has_a_recipe_that_can_be_built(task: str) -> None:
    files = {path.stem for path in (SUBJECT.folder / "recipes").glob("*.yaml")}
    assert files == {*ARMS} - {BASELINE}
    for arm in ARMS:
        config = config_of(SUBJECT.folder, task, arm, 0.01)
        assert config["model"]["init_args"]["lr"] == 0.01
        for callback in config["trainer"].get("callbacks", []):
            module, _, name = callback["class_path"].rpartition(".")
            holder = lightning_eff if module == "lightning_eff" else importlib.import_module(module)
            assert not getattr(holder, name)(**callback["init_args"]).neutral


def test_the_page_is_that_of_the_results() -> None:
    kept = json.loads(SUBJECT.results.read_text())
    assert SUBJECT.page.read_text() == page(SUBJECT, kept)
    assert {*kept["tasks"]} == {*SUBJECT.tasks}
    for task in kept["tasks"].values():
        assert {run["arm"] for run in task["runs"]} <= {*ARMS}
        assert all(yaml.safe_load(json.dumps(run))["points"] for run in task["runs"])
    assert Path(SUBJECT.page).name == "selection.md"
