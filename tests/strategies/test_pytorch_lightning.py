"""Strategies under ``pytorch_lightning``, in two processes."""

from pathlib import Path
from typing import Any

import pytest

from tests.strategies.launch import launch

NAMES = ["lightning.pytorch", "pytorch_lightning"]


@pytest.mark.timeout(600)
def test_strategies_train_alike_under_both_names_and_resume(tmp_path: Path) -> None:
    found: dict[str, Any] = launch("tests.strategies.pl_jobs", "under_both", str(tmp_path), world_size=2, timeout=560)
    assert found.pop("resumed"), "a resumed run ended with other weights"
    assert found == {key: [True, NAMES] for key in ("by name", "compressed", "hybrid")}
