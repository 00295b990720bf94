"""Published packages train with the techniques, or are refused for a true reason; and the page says what was found."""

import dataclasses
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.published import outcomes, page
from tests.published.package import Package
from tests.published.techniques import TRIED

ROOT = Path(__file__).parent.parent.parent
PYTHON = ROOT / "build" / "published" / "venv" / "bin" / "python"


def test_at_least_six_packages_are_tried_with_25_techniques() -> None:
    rows = [row for row in outcomes.committed()["packages"].values() if "techniques" in row]
    assert len(rows) >= 6
    assert all(len(row["techniques"]) >= 25 and row["techniques"].keys() <= TRIED.keys() for row in rows)


@pytest.mark.parametrize("name", outcomes.names())
def test_every_refusal_is_one_that_the_package_expects(name: str) -> None:
    package = outcomes.package(name)
    assert package.refused.keys() | package.idle.keys() | package.known.keys() <= TRIED.keys()
    found = outcomes.committed()["packages"][package.distribution].get("techniques", {})
    refused = {technique: one["reason"] for technique, one in found.items() if one["outcome"] == "refused"}
    failed = {technique for technique, one in found.items() if one["outcome"] == "failed"}
    assert all(re.search(package.refused[technique], reason) for technique, reason in refused.items())
    assert not {technique for technique in refused if TRIED[technique].anywhere}, "every module has what it acts on"
    assert not found or failed == package.known.keys()


def test_the_page_is_written_from_the_outcomes() -> None:
    assert page.FILE.read_text() == page.text(outcomes.committed()), "run `python -m tests.published page`"


def test_a_refusal_that_is_not_expected_is_a_failure() -> None:
    from tests.published import engine

    package = Package("some", "a model", build=lambda: (None, None), refused={"LoRA": "no linear layer"})
    wrong, right = (
        ValueError("LoRA: got strategy X; expected a single device"),
        ValueError("LoRA: found no linear layer"),
    )
    assert engine._judged(package, "LoRA", wrong).outcome == "failed"
    assert engine._judged(package, "LoRA", right).outcome == "refused"
    assert engine._judged(package, "BitFit", ValueError("BitFit: found no bias")).outcome == "failed"
    assert engine._judged(package, "LoRA", RuntimeError("mat1 and mat2")).outcome == "failed"


def test_nothing_done_and_a_trace_are_failures(tmp_path: Path) -> None:
    import torch
    from lightning.pytorch import Callback
    from torch.utils.data import DataLoader, TensorDataset

    from tests.models import TinyClassifier
    from tests.published import engine

    class Leaves(Callback):
        def on_train_start(self, trainer, pl_module):
            with torch.no_grad():
                next(pl_module.parameters()).add_(1.0)

        def on_fit_end(self, trainer, pl_module):
            pl_module.left_here = True

    def build():
        data = TensorDataset(torch.randn(24, 8), torch.randint(0, 3, (24,)))
        return TinyClassifier(), DataLoader(data, batch_size=4, shuffle=True)

    check = engine.Check(Package("some", "a model", build), tmp_path)
    exact = dataclasses.replace(TRIED["ExactResume"], exact=False)
    with pytest.raises(engine.Failed, match="does nothing"):
        check._try("LoRA", exact)
    with pytest.raises(engine.Failed, match=r"trace.*left_here"):
        check._try("LoRA", dataclasses.replace(exact, build=Leaves))
    with pytest.raises(engine.Failed, match="changes what is trained"):
        check._try("LoRA", dataclasses.replace(exact, build=Leaves, exact=True))
    check._try("ExactResume", TRIED["ExactResume"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", outcomes.names())
def test_a_package_trains(name: str, tmp_path: Path) -> None:
    """In the environment of ``make published``, since packages may not share that of the suite."""
    if not PYTHON.exists():
        pytest.skip("NOT TRIED: build/published/venv is not there. Run `make published`.")
    package = outcomes.package(name)
    asked = f"from tests.published import installing, outcomes; print(installing.missing(outcomes.package({name!r})))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    missing = subprocess.run(
        [PYTHON, "-W", "ignore", "-c", asked], cwd=ROOT, capture_output=True, text=True, check=True
    )
    if why := missing.stdout.strip():
        pytest.skip(f"NOT TRIED: {why}")
    command = [PYTHON, "-W", "ignore", "-m", "tests.published", "one", name, str(tmp_path / "found.json")]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    found = json.loads((tmp_path / "found.json").read_text())
    assert "failed" not in found, found
    failed = {
        technique: one["reason"]
        for technique, one in {**found["techniques"], **found["own_fit"]}.items()
        if one["outcome"] == "failed" and technique not in package.known
    }
    assert failed == {}
