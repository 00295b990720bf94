"""benchmarks.memory in small: every kind of arm runs, one that fails is recorded, and the measures are what they say."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.memory import __main__ as memory
from benchmarks.memory import measure, policies
from benchmarks.memory.measure import Arm, Peak, Turn, largest_batch, run
from benchmarks.memory.models import chains, tasks

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_peak_counts_what_is_held_at_once() -> None:
    with Peak() as peak:
        a = torch.empty(1000)
        b = torch.empty(3000)
        del a, b
        c = torch.empty(2000)
    assert peak.bytes == 4 * 4000 and c.nbytes == 8000


def test_a_step_holds_what_autograd_saves() -> None:
    """Twice the batch, and so twice of all but the gradients; full rematerialisation holds less."""
    task = chains(tiny=True)["equal"]
    model = task.build()
    one, two = (run(task, model, Arm("plain"), size, 1, "32-true") for size in (8, 16))
    gradients = sum(p.nbytes for p in model.parameters())
    assert len(one.seconds) == 1 and min(one.seconds) > 0
    assert one.beyond_bytes > gradients
    assert two.beyond_bytes == pytest.approx(2 * one.beyond_bytes, abs=2 * gradients)
    full = run(task, model, memory.arms()["full"], 16, 1, "32-true")
    assert full.beyond_bytes < 0.6 * two.beyond_bytes


def test_the_largest_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    limit = 0

    def fake(task: Any, model: Any, arm: Any, batch_size: int, *args: Any) -> Turn:
        tried.append(batch_size)
        return Turn(seconds=[1.0]) if batch_size <= limit else Turn(error="out of memory", no_memory=True)

    monkeypatch.setattr(measure, "run", fake)
    for limit, start in ((37, 1), (37, 16), (37, 512), (1, 16), (0, 16), (1000, 16)):
        tried.clear()
        row = largest_batch(tasks(tiny=True)["gpt2"], Arm("plain"), start, "32-true", lambda text: None)
        assert limit - limit // 16 <= row["largest_batch"] <= limit and len(tried) < 20, (limit, start, tried)


def test_the_benchmark_in_small(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = ["full", "optimal 0.75", "optimal 0.35", "compress 4"]
    out = tmp_path / "memory"
    memory.main(["--tiny", "--model", "gpt2", "--arms", *names, "--steps", "1", "--out", str(out)])
    text = out.with_suffix(".json").read_text()
    found = json.loads(text)
    rows = {row["arm"]: row for row in found["times"]}
    assert list(rows) == names
    assert "expected at least" in rows["optimal 0.35"]["error"], "the smallest plan of so small a chain takes more"
    for name in ("full", "optimal 0.75", "compress 4"):
        row = rows[name]
        assert row["ratio"]["min"] > 0 and row["items_per_second"] > 0
        assert 0 < row["beyond_bytes"] < 0.85 * row["plain_beyond_bytes"], name
    assert len(found["kernels"]) == 12 and not any("error" in row for row in found["kernels"])
    assert all(row["of_copy"]["median"] > 0 for row in found["kernels"])
    assert found["torch"] == torch.__version__ and found["limits"] == []
    for private in (platform.node(), os.getcwd(), str(tmp_path)):
        assert private not in text
    table = out.with_suffix(".txt").read_text()
    assert all(name in table for name in (*names, "quantize 4", "unpack mask"))
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_policies_on_one_anothers_budgets() -> None:
    given = ["--tiny", "--chains", "widening", "--no-compile", "--rounds", "1", "--steps", "1"]
    rows = {row["arm"]: row for row in policies.main(given)["rows"]}
    for name in ("full", "sqrt"):
        ours = rows[f"optimal, as {name}"]
        assert ours["plan_peak_bytes"] <= ours["budget_bytes"] == rows[name]["budget_bytes"] < ours["storing_all_bytes"]
