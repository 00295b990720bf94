"""Export a bench's results as CSV and to any Lightning logger."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

RUN = ("arm", "seed", "status", "seconds", "wall_seconds", "setup_seconds", "warmup_seconds", "caused_seconds")
RUN += ("validation_seconds", "extra_seconds", "steps", "samples", "tokens", "peak_memory_bytes", "energy_joules")
POINT = ("seconds", "wall_seconds", "step", "samples", "tokens", "metric")
BOUNDED = ("difference", "speedup", "throughput", "memory", "energy")
PLAIN = (
    "verdict",
    "seeds_needed",
    "equivalent_seconds",
    "equivalent_bound",
    "price_gap",
    "extra_share",
    "caused_share",
)


def write_csvs(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write ``arms.csv``, ``runs.csv`` and ``points.csv``, with a row per arm, run and evaluation.

    Args:
        results: results of the bench's schema, with their summary.
        folder: the folder, which is created.
    """
    kinds = {arm["name"]: arm for arm in results["plan"]["arms"]}
    runs = [
        {
            "kind": kinds[run["arm"]]["kind"],
            **{name: run.get(name) for name in RUN},
            "final": run["points"][-1]["metric"] if run["points"] else None,
        }
        for run in results["runs"]
    ]
    points = [
        {"arm": run["arm"], "seed": run["seed"], **{name: point[name] for name in POINT}}
        for run in results["runs"]
        for point in run["points"]
    ]
    arms = [{"arm": name, "kind": arm["kind"], **figures(results["summary"][name])} for name, arm in kinds.items()]
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, rows in (("arms", arms), ("runs", runs), ("points", points)):
        files.append(folder / f"{name}.csv")
        with files[-1].open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, fieldnames=list(rows[0]) if rows else ["arm"])
            writer.writeheader()
            writer.writerows(rows)
    return files


def figures(own: dict[str, Any]) -> dict[str, Any]:
    """Return an arm's summary as one flat row, with None for unknown figures."""
    row: dict[str, Any] = {"final_mean": own["final"]["mean"], "final_std": own["final"]["std"]}
    for name in BOUNDED:
        interval = own[name] or {}
        row |= {
            name: interval.get("estimate"),
            f"{name}_low": interval.get("low"),
            f"{name}_high": interval.get("high"),
        }
    return row | {name: own[name] for name in PLAIN}


def log(every: Mapping[str, dict[str, Any]], logger: Logger) -> None:
    """Log the plan as hyperparameters, each run's curve by optimizer step, and the figures of each arm.

    Metrics are named ``<arm>/seed<seed>/<target>`` and ``<arm>/<figure>``. With several budgets they begin with ``<budget>/``.

    Args:
        every: the results with their summaries, by budget. The name of a single one is ignored.
        logger: the logger, which is finalized afterwards.
    """
    for budget, results in every.items():
        head, plan = f"{budget}/" if len(every) > 1 else "", results["plan"]
        settings = {
            "target": plan["target"],
            "budget_seconds": plan["budget"]["seconds"],
            "clock": plan["budget"]["clock"],
        }
        settings |= {"seeds": str(plan["seeds"]), "title": results["title"]}
        logger.log_hyperparams({f"{head}{name}": value for name, value in settings.items()})
        for run in results["runs"]:
            name = f"{head}{run['arm']}/seed{run['seed']}"
            for point in run["points"]:
                metrics = {f"{name}/{plan['target']}": point["metric"], f"{name}/seconds": point["seconds"]}
                known = {key: float(value) for key, value in metrics.items() if value is not None}
                logger.log_metrics(known, step=point["step"])
        for arm, own in results["summary"].items():
            known = {f"{head}{arm}/{k}": float(v) for k, v in figures(own).items() if isinstance(v, int | float)}
            logger.log_metrics(known, step=0)
    logger.save()
    logger.finalize("success")
