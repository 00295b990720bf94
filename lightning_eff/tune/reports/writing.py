"""Writes the results of a search: the recipe and the tuned baseline as configs, the report and the record."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_eff.bench.results import now, write_json
from lightning_eff.tune.concluding import Conclusion
from lightning_eff.tune.config import Choices, Recipes, dumped
from lightning_eff.tune.confirm import Contribution
from lightning_eff.tune.inspection.profiling import describe
from lightning_eff.tune.reports.page import page
from lightning_eff.tune.reports.prose import report
from lightning_eff.tune.search import Search

SCHEMA = "lightning_eff.tune/1"


def recipe(recipes: Recipes, choices: Choices, steps: int, sentence: str) -> str:
    """Return a config for ``lightning-eff fit``: the baseline with these choices, for the steps that the budget holds."""
    config = recipes.whole(choices, steps)
    trainer = dict(config.get("trainer") or {})
    trainer.pop("max_time", None)
    config["trainer"] = {**trainer, "max_steps": steps, "max_epochs": -1}
    lines = [
        "Found by lightning-eff tune.",
        sentence,
        f"max_steps: the steps that the budget of training seconds held on {now()}.",
    ]
    return "".join(f"# {' '.join(line.split())}\n" for line in lines) + dumped({**config, "trainer": config["trainer"]})


def write(
    folder: Path,
    look: Any,
    search: Search,
    found: Conclusion,
    cost: Mapping[str, Any],
    *,
    mode: str,
    target: str,
    budget: float,
    memory: int | None = None,
) -> dict[str, Any]:
    """Write ``recipe.yaml`` (if a recipe won), ``baseline_tuned.yaml``, the report and ``results.json``.

    ``report.md`` has the report in words, and ``report.html`` has it with pictures.

    Returns:
        The record in ``results.json``.
    """
    tuned = recipe(look.recipes, found.baseline, found.baseline_steps, "The baseline with its own settings tuned.")
    (folder / "baseline_tuned.yaml").write_text(tuned)
    (folder / "recipe.yaml").unlink(missing_ok=True)  # from a shorter search
    text = None
    if found.recipe is not None:
        text = recipe(look.recipes, found.recipe, found.steps, found.sentence)
        (folder / "recipe.yaml").write_text(text)
    record = {
        "schema": SCHEMA,
        "finished": now(),
        "target": target,
        "mode": mode,
        "budget_seconds": budget,
        "memory_bytes": memory,
        "recipe": None if found.recipe is None else found.recipe.record(),
        "baseline": found.baseline.record(),
        "sentence": found.sentence,
        "summary": dict(found.summary),
        "contributions": [one.describe() for one in found.contributions],
        "contribution_figures": [_figures(one) for one in found.contributions],
        "benches": {name: dict(lines) for name, lines in found.summaries.items()},
        "left_out": dict(look.space.left_out),
        "own_left_out": dict(look.space.own_left_out),
        "trials": search.trials(),
        "history": search.history(),
        "cost": dict(cost),
    }
    write_json(folder / "results.json", record)
    profile = describe(look.found)
    (folder / "report.md").write_text("\n".join(report(record, profile)) + "\n")
    files = {name: folder / name / "results.json" for name in record["benches"]}
    benches = {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}
    (folder / "report.html").write_text(page(record, benches, profile, text), encoding="utf-8", newline="\n")
    return record


def _figures(one: Contribution) -> dict[str, Any]:
    bounds = one.interval
    return {
        "name": one.name,
        "estimate": bounds and bounds.estimate,
        "low": bounds and bounds.low,
        "high": bounds and bounds.high,
        "dropped": one.dropped,
    }
