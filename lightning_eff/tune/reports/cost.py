"""What a search costs in hours, electricity and money, over all times that it was gone on with, killed ones too."""

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

EVERY = 30.0  # seconds after which the counts are kept anew, whatever the search is at


class Ledger:
    """Counts time and energy from ``with`` to its end, and keeps them on disk, so that a search that is killed has its cost.

    They are kept as often as there is something to tell and every half minute: a bench that confirms may take hours.
    Nothing is kept before the search has a profile: until then its folder may be begun anew.

    Args:
        folder: of the search, which has the counts of before.
        prices: of an hour and a kWh.
        machines: that are paid for by the hour.
        device: type of the device that the runs compute on.
        meter: of this machine's energy; None for its own counters, the device's among them.
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
        # the device by its name: nothing computes there yet, by which a meter would find it
        self._meter = EnergyMeter(torch.device(device)) if meter is None else meter()
        self._lock, self._over = threading.Lock(), threading.Event()
        self._keeper = threading.Thread(target=self._keep_on, daemon=True)
        self._before: dict[str, Any] = {"hours": 0.0, "kwh": None}
        self._began = time.monotonic()

    @property
    def before(self) -> float:
        """Seconds of the times before this one."""
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
            with suppress(OSError):  # the next one may do
                self.keep()

    def keep(self) -> dict[str, Any]:
        """Write down what there is so far, and return it.

        Returns:
            ``hours``, ``kwh`` (None where no machine's counter told), ``money`` (None without a price, or where nothing that
            has one is known), its parts ``hours_cost`` and ``energy_cost``, and ``leaves_out``, in words, what it lacks.
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
    """A cost in a sentence."""
    energy = "energy not told by this machine" if cost["kwh"] is None else f"{cost['kwh']:.3g} kWh"
    parts = [
        f"{cost[name]:,.4g} for {what}"
        for name, what in (("hours_cost", "time"), ("energy_cost", "electricity"))
        if cost[name] is not None
    ]
    if cost["money"] is None:
        lacks = " and ".join(cost["leaves_out"])
        money = f"money not known, without {lacks}" if lacks else "no money told, since no price was given"
    else:
        least = "at least " if cost["leaves_out"] else ""
        money = f"{least}{cost['money']:,.4g} of money ({', '.join(parts)})"
        money += f", without {' and '.join(cost['leaves_out'])}" if cost["leaves_out"] else ""
    return f"{cost['hours']:.3g} hours, {energy}, {money}."
