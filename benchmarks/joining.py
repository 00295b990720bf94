"""Benches of one task that were run at different times, as one: with further arms, or with further seeds of the same."""

import math
import statistics
from collections.abc import Mapping
from typing import Any

import yaml

ROUNDING = 0.25  #: of the spread over seeds: how far apart the same run may end on processors that round differently


def joined(results: dict[str, Any], later: dict[str, Any] | None) -> dict[str, Any]:
    """Results with the arms of ``later``, in the place of arms of the same name; the baseline stays as it is.

    An arm of ``later`` that took the prices of these results (``--reference``) keeps the rates that they were told from, so
    that its intervals are as wide as those prices are uncertain.

    Args:
        results: of one bench.
        later: of another on the same machine, at the same budget and prices; None for none.

    Raises:
        ValueError: if the two differ in target or budget, or the baseline does not end in both as it does in the other.
    """
    if later is None:
        return results
    plan, other = results["plan"], later["plan"]
    for key in ("target", "budget", "seeds", "schedule", "threads"):
        if plan[key] != other[key]:
            raise ValueError(f"benches with {key} {plan[key]} and {other[key]} cannot be joined; expected the same.")
    baseline = plan["arms"][0]["name"]
    ends, again = _ends(results, baseline), _ends(later, other["arms"][0]["name"])
    if ends != again:
        raise ValueError(
            f"the baseline ends at {ends} in one bench and at {again} in the other; expected the same runs. Make both on one"
            " machine, at the same prices."
        )
    new = {arm["name"] for arm in other["arms"][1:]}
    arms = [arm for arm in plan["arms"] if arm["name"] not in new] + other["arms"][1:]
    order = {arm["name"]: i for i, arm in enumerate(arms)}
    runs = [run for run in results["runs"] if run["arm"] not in new] + [
        run for run in later["runs"] if run["arm"] in new
    ]
    tuned = [name for name in order if name in {*(plan.get("tuned") or ()), *(other.get("tuned") or ())}]
    before = results["calibration"]
    calibration = {
        **before,
        **{name: _rated(c, before.get(name)) for name, c in later["calibration"].items() if name in new},
    }
    return {
        **results,
        "plan": {**plan, "arms": arms, "tuned": tuned or None},
        "calibration": calibration,
        "runs": sorted(runs, key=lambda run: (plan["seeds"].index(run["seed"]), order[run["arm"]])),
    }


def _rated(calibration: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """A calibration with the rates that its prices were told from: those of the bench whose prices it took."""
    if before is None or _prices(calibration) != _prices(before):
        return calibration
    return {**calibration, "rates": before["rates"]}


def _prices(calibration: dict[str, Any]) -> dict[str, float]:
    """Seconds of each kind of step."""
    return {price["kind"]: price["seconds"] for price in calibration["prices"]}


def _agree(own: dict[str, float], again: dict[str, float]) -> bool:
    """Whether two benches of an arm count in the same prices.

    A search before the first step, or a draw of the layers that are left out, takes steps of kinds that hang on the seed: one
    bench met them and the other did not. What both met must cost the same.
    """
    both = own.keys() & again.keys()
    return bool(both) and all(own[kind] == again[kind] for kind in both)


def _said(arm: dict[str, Any]) -> dict[str, Any]:
    """An arm with what its configs say, whatever their comments and the words that describe it."""
    said = {key: value for key, value in arm.items() if key != "description"}
    return {**said, "configs": [yaml.safe_load(text) for text in arm.get("configs") or ()]}


def _ends(results: dict[str, Any], arm: str) -> dict[int, float | None]:
    """Where the runs of an arm ended, by seed; None where one has no point."""
    runs = [run for run in results["runs"] if run["arm"] == arm]
    return {run["seed"]: run["points"][-1]["metric"] if run["points"] else None for run in runs}


def spread(ends: Mapping[int, float | None]) -> float:
    """The standard deviation over seeds, of those that ended at a number; 0 where fewer than two did."""
    values = [end for end in ends.values() if end is not None and math.isfinite(end)]
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _near(one: float | None, other: float | None, apart: float) -> bool:
    """Whether two ends are at most so far apart; one that is not there, or no number, is near to none but its like."""
    if one is None or other is None:
        return one is other
    return (math.isnan(one) and math.isnan(other)) or one == other or abs(one - other) <= apart


def together(results: dict[str, Any], later: dict[str, Any] | None) -> dict[str, Any]:
    """Two benches as one: by :func:`joined` where their seeds are the same, by :func:`with_seeds` elsewhere."""
    if later is None:
        return results
    same = results["plan"]["seeds"] == later["plan"]["seeds"]
    return joined(results, later) if same else with_seeds(results, later)


def with_seeds(results: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Results with further seeds of their arms, of a bench that took their prices (``--reference``).

    An arm that the results do not have, such as the baseline at another budget, comes along. Of a run that both have, the
    earlier stays. Calibration and plan stay as they are but for the seeds, so that intervals are as wide as before by the
    prices' uncertainty, and narrower by the seeds'.

    Time is counted in the prices of the results, wherever the further runs were made. On another processor sums round
    differently, which training enlarges: there a run of both need not end the same to the last bit, but within
    :data:`ROUNDING` of the arm's standard deviation over seeds, and each run that comes along says its ``cpu``.

    Args:
        results: of one bench.
        more: of another, at the same budget and prices, with other seeds.

    Raises:
        ValueError: if the two differ in target, budget, schedule or threads, or an arm of both in its configs or in the price
            of a kind of step that both met, or a run of both ends differently.
    """
    plan, other = results["plan"], more["plan"]
    for key in ("target", "budget", "schedule", "threads"):
        if plan[key] != other[key]:
            raise ValueError(f"benches with {key} {plan[key]} and {other[key]} cannot be joined; expected the same.")
    cpu = more["machine"]["cpu"]
    elsewhere = cpu if cpu != results["machine"]["cpu"] else None
    before = {arm["name"]: arm for arm in plan["arms"]}
    for arm in other["arms"]:
        name = arm["name"]
        if name not in before:
            continue
        if _said(arm) != _said(before[name]):
            raise ValueError(f"{name} differs between the benches: {before[name]} and {arm}; expected the same arm.")
        own, again = results["calibration"].get(name), more["calibration"].get(name)
        if own is not None and again is not None and not _agree(_prices(own), _prices(again)):
            raise ValueError(f"{name} has other prices in the other bench; run it with --reference and these results.")
        ends, anew = _ends(results, name), _ends(more, name)
        apart = 0.0 if elsewhere is None else ROUNDING * spread(ends)
        if unlike := {s: (ends[s], anew[s]) for s in ends if s in anew and not _near(ends[s], anew[s], apart)}:
            raise ValueError(f"{name} ends differently in the two benches: {unlike} (by seed); expected the same runs.")
    arms = plan["arms"] + [arm for arm in other["arms"] if arm["name"] not in before]
    order = {arm["name"]: i for i, arm in enumerate(arms)}
    seeds = sorted({*plan["seeds"], *other["seeds"]})
    had = {(run["arm"], run["seed"]) for run in results["runs"]}
    new = [run for run in more["runs"] if (run["arm"], run["seed"]) not in had]
    runs = results["runs"] + (new if elsewhere is None else [{**run, "cpu": elsewhere} for run in new])
    return {
        **results,
        "plan": {**plan, "arms": arms, "seeds": seeds},
        "calibration": {**more["calibration"], **results["calibration"]},
        "runs": sorted(runs, key=lambda run: (seeds.index(run["seed"]), order[run["arm"]])),
    }
