"""What a search leaves behind: the recipe as a config, the tuned baseline beside it, the report and the record."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_eff.bench.results import now, write_json
from lightning_eff.tune.concluding import Found
from lightning_eff.tune.config import Choices, Recipes, dumped
from lightning_eff.tune.profiling import told
from lightning_eff.tune.search import Search

SCHEMA = "lightning_eff.tune/1"


def recipe(recipes: Recipes, choices: Choices, steps: int, sentence: str) -> str:
    """A config that ``lightning-eff fit`` runs as it is: the baseline's with the choices, for the budget's steps."""
    config = recipes.whole(choices, steps)
    trainer = dict(config.get("trainer") or {})
    trainer.pop("max_time", None)
    config["trainer"] = {**trainer, "max_steps": steps, "max_epochs": -1}
    lines = [
        "Found by lightning-eff tune.",
        sentence,
        f"max_steps: what the budget of training seconds held on {now()}.",
    ]
    return "".join(f"# {' '.join(line.split())}\n" for line in lines) + dumped({**config, "trainer": config["trainer"]})


def write(
    folder: Path,
    look: Any,
    search: Search,
    found: Found,
    cost: Mapping[str, Any],
    *,
    mode: str,
    target: str,
    budget: float,
) -> dict[str, Any]:
    """Write ``recipe.yaml`` (where there is one), ``baseline_tuned.yaml``, ``report.md`` and ``results.json``.

    Returns:
        The record in ``results.json``.
    """
    tuned = recipe(look.recipes, found.baseline, look.found.steps, "The baseline with its own settings tuned.")
    (folder / "baseline_tuned.yaml").write_text(tuned)
    (folder / "recipe.yaml").unlink(missing_ok=True)  # of a shorter search
    if found.recipe is not None:
        (folder / "recipe.yaml").write_text(recipe(look.recipes, found.recipe, found.steps, found.sentence))
    record = {
        "schema": SCHEMA,
        "finished": now(),
        "target": target,
        "mode": mode,
        "budget_seconds": budget,
        "recipe": None if found.recipe is None else found.recipe.record(),
        "baseline": found.baseline.record(),
        "sentence": found.sentence,
        "summary": dict(found.summary),
        "contributions": [one.told() for one in found.contributions],
        "benches": {name: dict(lines) for name, lines in found.summaries.items()},
        "left_out": dict(look.space.left_out),
        "own_left_out": dict(look.space.own_left_out),
        "trials": search.trials(),
        "cost": dict(cost),
    }
    write_json(folder / "results.json", record)
    (folder / "report.md").write_text("\n".join(report(record, told(look.found))) + "\n")
    return record


def report(record: Mapping[str, Any], profile: list[str]) -> list[str]:
    """The report's lines, in Markdown, of a record and what the profile tells."""
    trials = record["trials"]
    cost = record["cost"]
    energy = "energy not told by this machine" if cost["kwh"] is None else f"{cost['kwh']:.3g} kWh"
    money = "" if cost["money"] is None else f", {cost['money']:.2f} of money"
    lines = [
        "# What tuning found",
        "",
        record["sentence"],
        "",
        f"Cost: {cost['hours']:.3g} hours, {energy}{money}.",
        "",
    ]
    for name, sentences in record["benches"].items():
        lines += [f"## {name.rpartition('-')[0].capitalize()} ([curves, memory, all figures]({name}/report.html))", ""]
        lines += [f"- {sentence}" for sentence in sentences.values()] + [""]
    if record["contributions"]:
        lines += [f"## What each technique adds to {record['target']}", ""]
        lines += [f"- {line}" for line in record["contributions"]]
        lines += [
            "",
            "The target without it, less that with it, turned so that above 0 it helps; with its 95 % interval.",
            "",
        ]
    lines += ["## The search", ""]
    tried: dict[str, int] = {}
    for trial in trials:
        if not trial["free"]:
            for name in trial["choices"]["techniques"]:
                tried[name] = tried.get(name, 0) + 1
    counts = {kind: sum(t["kind"] == kind and not t["free"] for t in trials) for kind in ("baseline", "recipes")}
    lines += [f"{counts['baseline']} trials of the baseline's own settings, {counts['recipes']} of recipes."]
    if tried:
        lines += ["In how many trials each was: " + ", ".join(f"{k} {v}" for k, v in sorted(tried.items())) + "."]
    lines += ["", "| trial | choices | 1/9 | 1/3 | all | ended |", "|---|---|---|---|---|---|"]
    for trial in trials:
        if not trial["free"]:
            values = [f"{v:.5g}" if (v := trial["values"].get(f"1/{part}")) is not None else "" for part in (9, 3, 1)]
            said = Choices(trial["choices"]["own"], trial["choices"]["techniques"]).told()
            lines.append(
                f"| {trial['kind']} {trial['number']} | {said} | {' | '.join(values)} | {_cell(trial['why'])} |"
            )
    refused = {trial["why"] for trial in trials if trial["refused"] or trial["free"]}
    if refused:
        lines += ["", "## Stacks that were refused", "", *(f"- {_cell(why)}" for why in sorted(map(str, refused)))]
    lines += ["", "## Left out, and why", ""]
    lines += [f"- {name}: {_cell(why)}" for name, why in sorted(record["left_out"].items())]
    lines += [f"- the baseline's {name}: {why}" for name, why in sorted(record["own_left_out"].items())]
    return [*lines, "", "## The module", "", *(f"- {line}" for line in profile)]


def _cell(text: Any) -> str:
    return " ".join(str(text or "").split()).replace("|", "/")
