"""The cost of a search in hours, electricity and money. Resumed and killed searches keep their earlier cost."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from lightning_eff.bench.results import write_json
from lightning_eff.monitor._cost import JOULES_PER_KWH, Prices, run_cost, unseen
from lightning_eff.monitor.energy import EnergyMeter

EVERY = 30.0  # seconds between two saves


class Ledger:
    """Counts time and energy within a ``with`` block. It saves them to disk, so that a killed search keeps its cost.

    It saves at every message and every half minute, because a confirming bench may take hours. It saves nothing before the
    search has a profile, because the folder of such a search may still be reused for another one.

    Args:
        folder: the folder of the search, with the earlier counts.
        prices: the price of an hour and of a kWh.
        machines: the number of machines that are paid by the hour.
        device: the type of the device that the runs compute on.
        meter: makes a meter of this machine's energy. None uses the machine's own counters, and those of the device.
    """

    def __init__(
        self,
        folder: Path,
        prices: Prices,
        *,
        machines: int = 1,
        device: str = "cpu",
        meter: Callable[[], EnergyMeter] | None = None,
    ) -> None:
        self._file, self._profile = folder / "cost.json", folder / "profile.json"
        self._prices, self._machines, self._device = prices, machines, device
        # by name, because nothing computes on the device yet
        self._meter = EnergyMeter(torch.device(device)) if meter is None else meter()
        self._lock, self._over = threading.Lock(), threading.Event()
        self._keeper = threading.Thread(target=self._keep_on, daemon=True)
        self._before: dict[str, Any] = {"hours": 0.0, "kwh": None}
        self._began = time.monotonic()

    @property
    def before(self) -> float:
        """The seconds before the search was resumed."""
        return 3600 * self._before["hours"]

    def __enter__(self) -> Self:
        if self._file.is_file():
            self._before = json.loads(self._file.read_text())
        self._began = time.monotonic()
        self._meter.start()
        self._keeper.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._keeper.join()
        self.keep()
        self._meter.stop()

    def _keep_on(self) -> None:
        while not self._over.wait(EVERY):
            with suppress(OSError):  # the next save may work
                self.keep()

    def keep(self) -> dict[str, Any]:
        """Save the cost so far, and return it.

        Returns:
            ``hours``, ``kwh`` (None without an energy counter), ``money`` (None if no part of it is known), its parts
            ``hours_cost`` and ``energy_cost``, and ``leaves_out``, the missing parts in words.
        """
        with self._lock:
            return self._kept()

    def _kept(self) -> dict[str, Any]:
        joules = self._meter.read()
        hours = self._before["hours"] + (time.monotonic() - self._began) / 3600
        kwh = self._before["kwh"] if joules is None else (self._before["kwh"] or 0.0) + joules / JOULES_PER_KWH
        dark = unseen(self._meter.sources, device=self._device, processes=self._machines, nodes=self._machines)
        cost = run_cost(
            self._prices,
            seconds=3600 * hours,
            devices=self._machines,
            joules=None if kwh is None else kwh * JOULES_PER_KWH,
            unseen=dark,
        )
        record = {
            "hours": hours,
            "kwh": kwh,
            "money": cost["cost"],
            "hours_cost": cost["hours_cost"],
            "energy_cost": cost["energy_cost"],
            "leaves_out": list(cost["cost_leaves_out"]),
        }
        if self._profile.is_file():
            write_json(self._file, record)
        return record


def in_words(cost: dict[str, Any]) -> str:
    """Return a cost as a sentence."""
    energy = "energy unknown on this machine" if cost["kwh"] is None else f"{cost['kwh']:.3g} kWh"
    parts = [
        f"{cost[name]:,.4g} for {what}"
        for name, what in (("hours_cost", "time"), ("energy_cost", "electricity"))
        if cost[name] is not None
    ]
    if cost["money"] is None:
        lacks = " and ".join(cost["leaves_out"])
        money = f"money unknown, without {lacks}" if lacks else "no price was given"
    else:
        least = "at least " if cost["leaves_out"] else ""
        money = f"{least}{cost['money']:,.4g} of money ({', '.join(parts)})"
        money += f", without {' and '.join(cost['leaves_out'])}" if cost["leaves_out"] else ""
    return f"{cost['hours']:.3g} hours, {energy}, {money}."
