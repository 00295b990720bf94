"""Checkpoints of any layout go on in any other one, and those of one file are the plain module's."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint

from tests.strategies.hybrid_jobs import Settings, fit, made, run_case
from tests.strategies.launch import launch

JOBS = "tests.strategies.hybrid_jobs"
LAYOUTS: dict[str, Settings] = {
    "dp2_pp2": {"pipeline_parallel_size": 2},
    "tp2_dp2": {"tensor_parallel_size": 2},
    "pp4": {"pipeline_parallel_size": 4, "shard": False},
    "tp2_pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "schedule": "Interleaved1F1B"},
    "copies": {"shard": 2},
}
MODEL = "gpt2"
EIGHT = {"model": MODEL, "steps": 6, "devices": 4}


def saving(layouts: list[str]) -> dict[str, Settings]:
    """A file and a folder of each layout, saved half-way."""
    return {
        f"{name}.{kind}": {
            **EIGHT,
            "save": f"{name}.{kind}",
            "strategy": {**LAYOUTS[name], "save_distributed_checkpoint": kind == "folder"},
        }
        for name in layouts
        for kind in ("file", "folder")
    }


def resuming(pairs: list[tuple[str, str]]) -> dict[str, Settings]:
    """Checkpoint -> layout."""
    return {f"{saved} in {name}": {**EIGHT, "resume": saved, "strategy": LAYOUTS[name]} for saved, name in pairs}


def alone(**case: Any) -> list[float]:
    return run_case({"model": MODEL, "steps": 6, "strategy": "auto", "devices": 1, **case}, case.pop("directory", ""))


def check(tmp_path: Path, pairs: list[tuple[str, str]], layouts: list[str]) -> None:
    """Save in ``layouts``, go on with ``pairs`` in four processes, and with all of them in this one alone."""
    whole = alone(directory=str(tmp_path), save="plain.file")
    found = launch(JOBS, "run_cases", str(tmp_path), saving(layouts) | resuming(pairs), world_size=4)
    for name, losses in found.items():
        expected = whole if " in " not in name else whole[3:]
        assert losses == pytest.approx(expected, abs=1e-5), name
    for name in layouts:
        plain, file = (torch.load(tmp_path / f"{n}.file", weights_only=True) for n in ("plain", name))
        _same_checkpoint(file, plain, name)
        made(MODEL).load_state_dict(file["state_dict"], strict=True)
        _consolidated_by_lightning(tmp_path / f"{name}.folder", file)
        for kind in ("file", "folder"):
            resumed = run_case(
                {"model": MODEL, "steps": 6, "strategy": {}, "devices": 1, "resume": f"{name}.{kind}"}, str(tmp_path)
            )
            assert resumed == pytest.approx(whole[3:], abs=1e-5), f"{name}.{kind} in one process"
        resumed = alone(directory=str(tmp_path), resume=f"{name}.file")
        assert resumed == pytest.approx(whole[3:], abs=1e-5), f"{name}.file in a plain Trainer"


def _consolidated_by_lightning(folder: Path, file: dict[str, Any]) -> None:
    """What Lightning's own tool makes of a folder has the weights that the file has."""
    whole = _load_distributed_checkpoint(folder)  # what lightning.fabric.utilities.consolidate_checkpoint saves
    found = whole["state_dict"]
    assert found.keys() == file["state_dict"].keys()
    assert all(torch.equal(found[key], value) for key, value in file["state_dict"].items())


def _same_checkpoint(file: dict[str, Any], plain: dict[str, Any], name: str) -> None:
    assert file["state_dict"].keys() == plain["state_dict"].keys()
    for key, value in plain["state_dict"].items():
        torch.testing.assert_close(file["state_dict"][key], value, atol=1e-5, rtol=0, msg=f"{name}: {key}")
    (ours,), (theirs,) = file["optimizer_states"], plain["optimizer_states"]
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert ours["state"][number].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(
                ours["state"][number][key], value, atol=1e-6, rtol=1e-4, msg=f"{name}: {number} {key}"
            )


def test_checkpoints_go_on_in_another_layout(tmp_path: Path) -> None:
    pairs = [
        ("dp2_pp2.folder", "tp2_dp2"),
        ("tp2_dp2.file", "dp2_pp2"),
        ("tp2_dp2.folder", "pp4"),
        ("plain.file", "dp2_pp2"),
        ("dp2_pp2.file", "copies"),
        ("copies.folder", "tp2_dp2"),
        ("copies.folder", "copies"),
    ]
    check(tmp_path, pairs, ["dp2_pp2", "tp2_dp2", "copies"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_dropout_of_a_pipeline_goes_on_as_it_would_have(tmp_path: Path) -> None:
    """In the same layout, to the bit. Without a pipeline it is as in any Lightning run: random numbers begin anew."""
    dropping = {**EIGHT, "module": {"dropout": 0.2}}
    layouts = ("dp2_pp2", "pp4", "tp2_pp2")
    cases: dict[str, Settings] = {}
    for name in layouts:
        cases[name] = {**dropping, "strategy": LAYOUTS[name], "save": f"{name}.dropout"}
        cases[f"{name}, resumed"] = {**dropping, "strategy": LAYOUTS[name], "resume": f"{name}.dropout"}
    found = launch(JOBS, "run_cases", str(tmp_path), cases, world_size=4)
    plain = alone(directory=str(tmp_path))
    for name in layouts:
        assert found[f"{name}, resumed"] == found[name][3:], name
        assert found[name] != pytest.approx(plain, abs=1e-3), "nothing was dropped"


@pytest.mark.slow  # 4 layouts x 8 checkpoints and the plain one: minutes
@pytest.mark.timeout(3600)
def test_checkpoints_of_every_layout_go_on_in_every_other(tmp_path: Path) -> None:
    saved = [f"{name}.{kind}" for name in LAYOUTS for kind in ("file", "folder")] + ["plain.file"]
    check(tmp_path, list(itertools.product(saved, LAYOUTS)), list(LAYOUTS))


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    alone(directory=str(tmp_path), save="plain.file")
    model = made(MODEL)

    def two_groups() -> torch.optim.Optimizer:
        first, *rest = model.parameters()
        return torch.optim.AdamW([{"params": [first]}, {"params": rest}])

    model.configure_optimizers = two_groups
    with pytest.raises(ValueError, match=r"groups of .* parameters"):
        fit(
            model,
            MODEL,
            "hybrid",
            devices=1,
            batch_size=8,
            steps=6,
            samples=24,
            ckpt_path=str(tmp_path / "plain.file"),
        )


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"without meta\.pt"):
        run_case({"model": MODEL, "steps": 2, "strategy": {}, "devices": 1, "resume": "empty"}, str(tmp_path))
