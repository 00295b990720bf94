"""benchmarks.memory in small: the measures are what they say, an arm that fails is recorded, largest batches are found soon."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from benchmarks.memory import measure, policies
from benchmarks.memory.arms import arms
from benchmarks.memory.measure import Arm, Peak, Turn, compare, largest_batch, run
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
    full = run(task, model, arms()["full"], 16, 1, "32-true")
    assert full.beyond_bytes < 0.6 * two.beyond_bytes


def test_the_largest_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    limit = 0

    def fake(task: Any, model: Any, arm: Any, batch_size: int, *args: Any, **kwargs: Any) -> Turn:
        tried.append(batch_size)
        return Turn(seconds=[1.0]) if batch_size <= limit else Turn(error="out of memory", no_memory=True)

    monkeypatch.setattr(measure, "run", fake)
    for limit, start in ((37, 1), (37, 16), (37, 512), (1, 16), (0, 16), (1000, 16)):
        tried.clear()
        row = largest_batch(tasks(tiny=True)["gpt2"], Arm("plain"), start, "32-true", lambda text: None)
        assert limit - limit // 16 <= row["largest_batch"] <= limit and len(tried) < 20, (limit, start, tried)


def test_the_largest_batch_is_predicted_from_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory grows with the batch as it does on a GPU, a few runs find its end."""
    tried: list[int] = []
    fixed, each, total = 2_000, 310, 81_000

    def fake(task: Any, model: Any, arm: Any, batch_size: int, *args: Any, **kwargs: Any) -> Turn:
        tried.append(batch_size)
        peak = fixed + each * batch_size
        return Turn(seconds=[1.0], peak_bytes=peak) if peak <= total else Turn(error="out of memory", no_memory=True)

    monkeypatch.setattr(measure, "run", fake)
    monkeypatch.setattr(measure, "device_bytes", lambda: total)
    for each in (310, 31, 3, 60_000):
        tried.clear()
        limit = (total - fixed) // each
        row = largest_batch(tasks(tiny=True)["gpt2"], Arm("plain"), 16, "32-true", lambda text: None)
        assert limit - limit // 16 <= row["largest_batch"] <= limit and len(tried) <= 7, (limit, tried)


def test_arms_are_compared_and_failures_recorded() -> None:
    names = ["full", "optimal 0.75", "optimal 0.35", "compress 4"]
    chosen = [arms(tiny=True)[name] for name in names]
    found = compare(tasks(tiny=True)["gpt2"], chosen, 2, 1, 1, "32-true", lambda text: None)
    rows = {row["arm"]: row for row in found}
    assert list(rows) == names
    assert "this batch needs at least" in rows["optimal 0.35"]["error"], (
        "the smallest plan of so small a chain takes more"
    )
    for name in ("full", "optimal 0.75", "compress 4"):
        row = rows[name]
        assert row["ratio"]["min"] > 0 and row["items_per_second"] > 0
        assert 0 < row["beyond_bytes"] < 0.85 * row["plain_beyond_bytes"], name


def test_the_batch_lies_on_the_device_before_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, a step would else wait for a copy from memory that is not pinned."""
    seen: list[torch.device] = []

    class Look(Callback):
        def __init__(self, *args: Any) -> None: ...

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen.extend(value.device for value in batch.values())

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            pl_module.training_step = lambda batch, batch_idx: None

    monkeypatch.setattr(measure, "Watch", Look)
    monkeypatch.setattr(measure, "DEVICE", torch.device("meta"))
    monkeypatch.setattr(
        "lightning.pytorch.strategies.Strategy.batch_to_device", lambda self, batch, *args, **kwargs: batch
    )
    task = tasks(tiny=True)["gpt2"]
    turn = run(task, task.build(), Arm("plain"), 2, 1, "32-true")
    assert seen and {device.type for device in seen} == {"meta"}, turn.error


@pytest.mark.slow  # most of a minute
def test_policies_on_one_anothers_budgets() -> None:
    given = ["--tiny", "--chains", "widening", "--no-compile", "--rounds", "1", "--steps", "1"]
    rows = {row["arm"]: row for row in policies.main(given)["rows"]}
    for name in ("full", "sqrt"):
        ours = rows[f"optimal, as {name}"]
        assert ours["plan_peak_bytes"] <= ours["budget_bytes"] == rows[name]["budget_bytes"] < ours["storing_all_bytes"]
