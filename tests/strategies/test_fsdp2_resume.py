"""Resumed runs under Lightning's FSDP2 equal uninterrupted ones bit for bit, from a file and from a folder."""

from pathlib import Path

import pytest

from tests.strategies import launch
from tests.strategies.fsdp2_resume_jobs import ENDS

#: Those that change the optimizer, and some that hold state.
NAMES = [
    *(f"optimizer {name}" for name in ("muon", "soap", "shampoo", "adan", "lion")),
    "ExponentialMovingAverage",
    "GradientNoiseScale",
    "LearningRateSchedule",
]


@pytest.mark.parametrize("form", ENDS)
def test_weights_and_losses_are_those_of_an_uninterrupted_run(form: str, tmp_path: Path) -> None:
    pairs = [[name, form] for name in NAMES]
    found = launch.launch("tests.strategies.fsdp2_resume_jobs", "all_of", pairs, str(tmp_path), world_size=2)
    assert found == {f"{name} {form}": [{"2": [], "3": []}] * 2 for name in NAMES}
