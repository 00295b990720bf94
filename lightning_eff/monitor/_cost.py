"""What a run costs in money and CO2: an hour's price for each device, a kWh's price and a kWh's grams."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

JOULES_PER_KWH = 3.6e6


class Prices(NamedTuple):
    """What is paid; None is not asked for.

    Attributes:
        per_hour: of one device, in the user's own currency, as is ``per_kwh``.
        co2_per_kwh: grams.
    """

    per_hour: float | None = None
    per_kwh: float | None = None
    co2_per_kwh: float | None = None

    def check(self, who: str) -> None:
        """Raises: ValueError: for what is no finite number >= 0."""
        for name, unit, example in (
            ("per_hour", "the price of one device's hour", "Providers of rented machines publish theirs"),
            ("per_kwh", "the price of a kWh of electricity", "It stands on the electricity bill"),
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
    """Whose electricity the energy counters of this process do not see, in words; empty where they see it all.

    Args:
        sources: names of the counters that were read: ``"RAPL ..."`` for the host, ``"NVML ..."`` for this rank's GPU.
        device: type of the device that the run computes on, such as ``"cuda"``.
    """
    if not sources:
        return ["electricity, which this machine tells nothing of by RAPL or NVML"]
    found = []
    if not any(name.startswith("RAPL") for name in sources):
        found.append("electricity of the host, which tells nothing by RAPL")
    if device != "cpu" and not any(name.startswith("NVML") for name in sources):
        found.append("electricity of the accelerator, which tells nothing by NVML")
    if processes > 1 and (nodes > 1 or device != "cpu"):
        found.append("electricity that the other processes of the run count for themselves")
    return found


def run_cost(
    prices: Prices, *, seconds: float, devices: int, joules: float | None, unseen: Sequence[str]
) -> dict[str, Any]:
    """Money and CO2 of a run; what is not known is left out and named, never guessed.

    ``hours_cost = per_hour · devices · seconds / 3600`` and ``energy_cost = per_kwh · joules / 3.6e6``.

    Args:
        seconds: since the fit started, with validation and all else: what is rented is paid for.
        devices: that the run holds, >= 1.
        joules: by this process's counters; None where nothing tells.
        unseen: whose electricity they do not see.

    Returns:
        ``device_hours``, ``hours_cost``, ``energy_cost``, their sum ``cost`` and ``co2_grams``, each None where it was
        not asked for or is not known; ``cost_leaves_out``, in words, what ``cost`` and ``co2_grams`` lack.
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
    """The closing table's line on money, or None where no price was given."""
    if prices.per_hour is None and prices.per_kwh is None:
        return None
    left_out = summary["cost_leaves_out"] if prices.per_kwh is not None else []
    without = f"; without {', and '.join(left_out)}" if left_out else ""
    if summary["cost"] is None:
        return f"not known{without}"
    parts = []
    if summary["hours_cost"] is not None:
        parts.append(f"{summary['hours_cost']:,.4g} for {summary['device_hours']:,.3g} device-hours")
    if summary["energy_cost"] is not None:
        parts.append(f"{summary['energy_cost']:,.4g} for {summary['energy_joules'] / JOULES_PER_KWH:,.3g} kWh")
    least = "at least " if left_out else ""
    return f"{least}{summary['cost']:,.4g} ({', '.join(parts)}){without}"
