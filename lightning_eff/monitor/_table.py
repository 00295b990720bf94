"""The closing tables of a run."""

import math
from collections.abc import Sequence
from typing import Any

from lightning_eff.monitor._cost import Prices, cost_row


def closing(title: str, lines: Sequence[tuple[str, str]]) -> str:
    """Return lines of name and text below a title, with the texts in one column."""
    width = max(len(name) for name, _ in lines)
    return "\n".join(["", title, *(f"  {name:<{width}}  {value}" for name, value in lines), ""])


def rows(prices: Prices, s: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of the closing table, as name and text, from the monitor's summary ``s``."""
    rated = f"over {s['rated_seconds']:.1f} s of training"
    found = [
        (f"{unit}/s", f"{s[f'{unit}_per_second']:,.0f} {rated}")
        for unit in ("samples", "tokens")
        if s[f"{unit}_per_second"] is not None
    ]
    found.append(("model FLOPs", _flops_row(s)))
    if s["extra_flops"]:
        share = s["hardware_flops_per_second"] / s["flops_per_second"] if s["flops_per_second"] else math.nan
        found.append(("hardware FLOPs", f"{share:.2f} times the model FLOPs, with extra and recomputed passes"))
    whole = max(sum(s["phases"].values()), 1e-9)
    phases = ", ".join(f"{name} {value:.1f} ({value / whole:.0%})" for name, value in s["phases"].items() if value > 0)
    found.append(("seconds", phases or "unknown: FLOPs were counted in every step"))
    if s["validation_seconds"]:
        found.append(("validation", f"{s['validation_seconds']:.1f} s"))
    found.append(
        ("memory", ", ".join(f"{name} {_mib(value)}" for name, value in s["memory"].items() if value is not None))
    )
    resident = "resident memory of the process" + ("" if s["peak_reset"] else " since it started")
    found.append(
        ("peak memory", f"{_mib(s['peak_bytes'])} {resident if s['peak_kind'] == 'resident' else 'allocated'}")
    )
    if s["energy_joules"] is None:
        found.append(("energy", "unknown: this machine has no readable RAPL or NVML counter"))
    else:
        co2 = "" if s["co2_grams"] is None else f", {s['co2_grams']:,.3g} g of CO2"
        found.append(("energy", f"{s['energy_joules']:,.0f} J{co2} ({', '.join(s['energy_sources'])})"))
    money = cost_row(prices, s)
    if money is not None:
        found.append(("cost", money))
    found.append(
        ("monitor", f"counted FLOPs in {s['counted_batches']:,} batches, {s['counting_seconds']:.1f} s, excluded above")
    )
    return found


def _flops_row(s: dict[str, Any]) -> str:
    if s["flops_unknown"] is not None:
        return f"not counted: {s['flops_unknown']}"
    if s["flops_per_second"] is None:
        return "unknown: FLOPs were counted in every step, so none was timed"
    text = f"{s['flops_per_second'] / 1e12:,.3g} TFLOP/s on each device, "
    if s["mfu"] is None:
        text += "MFU unknown, because the peak of this device is unknown. Set EfficiencyMonitor(peak=...)"
    else:
        peak = f"{s['peak_flops'] / 1e12:,.4g} TFLOP/s in {s['peak_dtype']} ({s['peak_source']})"
        text += f"MFU {s['mfu']:.1%} of {peak}"
    if s["flops_left_out"]:
        text += f"; without {', '.join(s['flops_left_out'])}, whose FLOPs are unknown"
    return text


def _mib(value: int) -> str:
    return f"{value / 2**20:,.1f} MiB"
