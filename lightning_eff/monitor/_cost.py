"""Compute the cost of a run in money and CO2, from prices per device-hour and per kWh."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from lightning_eff._core._arguments.kinds import Number

JOULES_PER_KWH = 3.6e6
Price = Annotated[float, Number(at_least=0)]


class Prices(NamedTuple):
    """The prices of a run; None is not requested.

    Attributes:
        per_hour: the price of one device for an hour, in the same currency as ``per_kwh``.
        per_kwh: the price of a kWh of electricity.
        co2_per_kwh: grams of CO2 per kWh.
    """

    per_hour: float | None = None
    per_kwh: float | None = None
    co2_per_kwh: float | None = None

    def check(self, who: str) -> None:
        """Check that all prices are finite numbers >= 0.

        Raises:
            ValueError: for any other value.
        """
        for name, unit, example in (
            ("per_hour", "the price of one device for an hour", "Cloud providers publish theirs"),
            ("per_kwh", "the price of a kWh of electricity", "It is on the electricity bill"),
            ("co2_per_kwh", "grams of CO2 per kWh", "Grid operators publish theirs"),
        ):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and 0 <= value < math.inf):
                argument = name if name.startswith("co2") else f"price_{name}"
                raise ValueError(
                    f"{who}({argument}={value!r}): expected {unit}, a finite number >= 0, or None. {example}."
                )


def unseen(sources: Sequence[str], *, device: str, processes: int, nodes: int) -> list[str]:
    """List the electricity that the energy counters of this process miss; empty if they see all of it.

    Args:
        sources: the names of the counters: ``"RAPL ..."`` for the host, ``"NVML ..."`` for this rank's GPU.
        device: the type of the device that the run computes on, such as ``"cuda"``.
        processes: the number of processes of the run.
        nodes: the number of machines of the run.
    """
    if not sources:
        return ["electricity, because this machine has no readable RAPL or NVML counter"]
    found = []
    if not any(name.startswith("RAPL") for name in sources):
        found.append("electricity of the host, which has no readable RAPL counter")
    if device != "cpu" and not any(name.startswith("NVML") for name in sources):
        found.append("electricity of the accelerator, which has no readable NVML counter")
    if processes > 1 and (nodes > 1 or device != "cpu"):
        found.append("electricity that other processes of the run count themselves")
    return found


def run_cost(
    prices: Prices, *, seconds: float, devices: int, joules: float | None, unseen: Sequence[str]
) -> dict[str, Any]:
    """Compute the money and CO2 of a run; unknown parts are left out and named, never guessed.

    ``hours_cost = per_hour · devices · seconds / 3600`` and ``energy_cost = per_kwh · joules / 3.6e6``.

    Args:
        prices: the prices.
        seconds: the time since fit started, with validation and all else, since rented devices cost money throughout.
        devices: the number of devices that the run holds, >= 1.
        joules: the energy by this process's counters, or None without counters.
        unseen: the electricity that they miss.

    Returns:
        ``device_hours``, ``hours_cost``, ``energy_cost``, their sum ``cost`` and ``co2_grams``, each None if not requested or
        unknown; and ``cost_leaves_out``, which names what ``cost`` and ``co2_grams`` lack.
    """
    kwh = None if joules is None else joules / JOULES_PER_KWH
    device_hours = devices * seconds / 3600
    hours = None if prices.per_hour is None else prices.per_hour * device_hours
    energy = None if prices.per_kwh is None or kwh is None else prices.per_kwh * kwh
    known = [part for part in (hours, energy) if part is not None]
    asks_energy = prices.per_kwh is not None or prices.co2_per_kwh is not None
    return {
        "device_hours": device_hours,
        "hours_cost": hours,
        "energy_cost": energy,
        "cost": sum(known) if known else None,
        "co2_grams": None if prices.co2_per_kwh is None or kwh is None else prices.co2_per_kwh * kwh,
        "cost_leaves_out": list(unseen) if asks_energy else [],
    }


def cost_row(prices: Prices, summary: dict[str, Any]) -> str | None:
    """Return the cost in the closing table, or None without prices."""
    if prices.per_hour is None and prices.per_kwh is None:
        return None
    left_out = summary["cost_leaves_out"] if prices.per_kwh is not None else []
    without = f"; without {', and '.join(left_out)}" if left_out else ""
    if summary["cost"] is None:
        return f"unknown{without}"
    parts = []
    if summary["hours_cost"] is not None:
        parts.append(f"{summary['hours_cost']:,.4g} for {summary['device_hours']:,.3g} device-hours")
    if summary["energy_cost"] is not None:
        parts.append(f"{summary['energy_cost']:,.4g} for {summary['energy_joules'] / JOULES_PER_KWH:,.3g} kWh")
    least = "at least " if left_out else ""
    return f"{least}{summary['cost']:,.4g} ({', '.join(parts)}){without}"
