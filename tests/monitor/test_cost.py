"""The cost of a run against the bill written out by hand; what is not known is told, and not guessed."""

import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_eff.monitor import efficiency_monitor as monitor
from lightning_eff.monitor._cost import Prices, cost_row, run_cost, unseen
from lightning_eff.monitor.efficiency_monitor import EfficiencyMonitor
from tests.models import trainer
from tests.monitor.test_efficiency_monitor import MLP, FakeMeter, Memo, data


class BlindMeter(FakeMeter):
    """A machine without counters."""

    def __init__(self, device: torch.device) -> None:
        self.joules, self.sources = None, []  # pyright: ignore[reportAttributeAccessIssue]

    def start(self) -> None: ...
    def read(self) -> None: ...
    def stop(self) -> None: ...


def bill(prices: Prices, **kwargs: Any) -> dict[str, Any]:
    return run_cost(prices, **{"seconds": 1800.0, "devices": 4, "joules": 7.2e6, "unseen": [], **kwargs})


def test_the_bill_by_hand() -> None:
    """Four devices for half an hour at 2.5 are 5; 2 kWh at 0.3 are 0.6, and 800 g at 400 g each."""
    told = bill(Prices(2.5, 0.3, 400.0))
    assert told["device_hours"] == pytest.approx(2.0)
    assert (told["hours_cost"], told["energy_cost"], told["cost"]) == pytest.approx((5.0, 0.6, 5.6))
    assert told["co2_grams"] == pytest.approx(800.0) and told["cost_leaves_out"] == []
    row = cost_row(Prices(2.5, 0.3), {**told, "energy_joules": 7.2e6})
    assert row == "5.6 (5 for 2 device-hours, 0.6 for 2 kWh)"


def test_what_is_not_known_is_named() -> None:
    dark = unseen([], device="cpu", processes=1, nodes=1)
    told = bill(Prices(2.5, 0.3, 400.0), joules=None, unseen=dark)
    assert told["cost"] == pytest.approx(5.0) and told["energy_cost"] is None and told["co2_grams"] is None
    row = cost_row(Prices(2.5, 0.3), told)
    assert row is not None and row.startswith("at least 5 (") and "without electricity, because this machine" in row
    told = bill(Prices(None, 0.3), joules=None, unseen=dark)
    assert told["cost"] is None and "unknown; without electricity" in (cost_row(Prices(None, 0.3), told) or "")
    told = bill(Prices(2.5), joules=None, unseen=dark)  # nobody asked for electricity, so the bill is whole
    assert told["cost_leaves_out"] == [] and (cost_row(Prices(2.5), told) or "").startswith("5 (")
    assert cost_row(Prices(co2_per_kwh=400.0), told) is None


@pytest.mark.parametrize(
    ("sources", "device", "processes", "nodes", "words"),
    [
        (["RAPL package-0"], "cpu", 1, 1, []),
        (["RAPL package-0"], "cpu", 4, 1, []),  # one host, whose packages every process reads
        (["RAPL package-0"], "cpu", 4, 2, ["other processes"]),
        (["RAPL package-0", "NVML energy counter"], "cuda", 1, 1, []),
        (["NVML energy counter"], "cuda", 1, 1, ["of the host"]),
        (["RAPL package-0"], "cuda", 1, 1, ["accelerator"]),
        (["NVML power, integrated"], "cuda", 8, 1, ["of the host", "other processes"]),
    ],
)
def test_whose_electricity_is_not_seen(
    sources: list[str], device: str, processes: int, nodes: int, words: list[str]
) -> None:
    found = unseen(sources, device=device, processes=processes, nodes=nodes)
    assert len(found) == len(words) and all(word in text for word, text in zip(words, found, strict=True))


def test_a_run_pays_for_all_its_seconds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of three devices pays for the fit from its start to its end, and loggers hear of the bill as it grows."""
    monkeypatch.setattr(monitor, "EnergyMeter", FakeMeter)
    monkeypatch.setattr(pl.Trainer, "world_size", 3)
    memo, seen = Memo(), EfficiencyMonitor(price_per_hour=3600.0, price_per_kwh=0.25, co2_per_kwh=400.0)

    class Sleeps(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            time.sleep(0.05)

    began = time.perf_counter()
    trainer(Sleeps(), seen, max_steps=4, logger=memo, log_every_n_steps=1).fit(MLP(), data())
    whole, told = time.perf_counter() - began, seen.summary()
    assert 3 * 0.2 < told["hours_cost"] < 3 * whole
    assert told["energy_cost"] == pytest.approx(0.5) and told["co2_grams"] == pytest.approx(800.0)
    assert told["cost"] == pytest.approx(told["hours_cost"] + 0.5)
    so_far = [metrics["eff/monitor/cost"] for _, metrics in memo.seen if "eff/monitor/cost" in metrics]
    assert len(so_far) == 4 and so_far == sorted(so_far) and so_far[-1] < told["cost"]
    assert f" {told['cost']:,.4g} ({told['hours_cost']:,.4g} for " in capsys.readouterr().out


def test_without_counters_a_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "EnergyMeter", BlindMeter)
    memo, seen = Memo(), EfficiencyMonitor(price_per_hour=3600.0, price_per_kwh=0.25)
    trainer(seen, max_steps=2, logger=memo, log_every_n_steps=1).fit(MLP(), data())
    told = seen.summary()
    assert told["energy_cost"] is None and told["cost"] == told["hours_cost"] > 0
    assert "at least " in seen.text() and "without electricity" in seen.text()
    assert not any("eff/monitor/energy_cost" in metrics for _, metrics in memo.seen)
    seen = EfficiencyMonitor()
    trainer(seen, max_steps=2).fit(MLP(), data())
    assert seen.summary()["cost"] is None and "\n  cost " not in seen.text()
