"""The comparison of advice with a long measurement: planted differences are seen, and the page has the committed figures."""

import json
import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import advised
from lightning_eff.advice._running.subject import Change, entry
from tests.advice.tasks import Cheaper, Plain, Rows


def test_the_page_has_the_committed_figures() -> None:
    assert advised.page() == advised.PAGE.read_text(), "run python -m benchmarks.advised page"
    results = json.loads(advised.RESULTS.read_text())
    assert set(results["cases"]) <= set(advised.CASES)


def test_stretches_measure_the_change_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 0.0}

    class Timed(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            clock["now"] += self.cost
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(time, "process_time", lambda: clock["now"])
    case = advised.Case("planted", "-", lambda: (Timed(), DataLoader(Rows(), 4)))
    pairs = advised.measured(case, Change((entry(Cheaper, factor=0.25),)), 0.4, 0.0)
    assert len(pairs) == 4 and all(pair == (2.5, 10.0) for pair in pairs), "10 batches of 1 s, and of a quarter"
    plugin: dict[str, Any] = {"precision": "64-true"}
    assert advised.stretch(case, Change(trainer=plugin), 10, time.process_time) == 10.0
    assert torch.get_default_dtype() is torch.float32


def test_a_missed_gain_and_an_invented_one_are_named() -> None:
    def case(planted: str, change: str, *, gains: bool, low: float = 1.0) -> dict[str, Any]:
        return {"planted": planted, "change": change, "gains": gains, "long": {"low": low}}

    results = {
        "found": case("FusedAttention", "FusedAttention", gains=True),
        "other": case("FusedAttention", "fused optimizer", gains=True),
        "invented": case("", "fused optimizer", gains=True),
        "nothing": case("", "fused optimizer", gains=False),
        "overlooked": case("-", "fused optimizer", gains=False, low=1.1),
        "workers": case("loader", "num_workers=2", gains=True),
    }
    assert advised.missed({"cases": results}) == ["other", "invented", "overlooked"]


def test_every_case_builds_a_module_with_batches() -> None:
    for name in ("slow_loader", "by_hand", "nothing"):
        module, loader = advised.CASES[name].build()
        assert isinstance(loader, DataLoader) and module.training_step(next(iter(loader)), 0).requires_grad
    assert isinstance(advised.CASES["nothing"].build()[1].dataset, TensorDataset)
