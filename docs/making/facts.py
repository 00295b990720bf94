"""Write ``facts.json`` and ``entries.json`` of ``lightning_eff/_catalogue/``: committed results, and the catalogue itself."""

import json
import math
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from torch.optim import Optimizer

from benchmarks import evidence_further
from benchmarks import evidence_page as evidence
from lightning_eff._catalogue.catalogue import as_json
from lightning_eff._catalogue.collecting import collected
from lightning_eff._exports import public
from lightning_eff._exports.techniques import technique_classes
from tests import selection

ROOT = Path(__file__).parent.parent.parent
FILE = ROOT / "lightning_eff" / "_catalogue" / "facts.json"
ENTRIES = FILE.with_name("entries.json")


@cache
def committed() -> dict[str, dict[str, Any]]:
    """Return the committed results by set (claims, weights, compute) and task."""
    found, _, _, weights, compute, _ = evidence.committed()
    return {"bench": found, "weights": weights, "compute": compute}


@cache
def further() -> dict[str, tuple[dict[str, Any], dict[str, Any] | None]]:
    """Return the committed results of single techniques without a recipe by task (``benchmarks.evidence_page.further``)."""
    return evidence.further()


#: The recipes of each set: their techniques and what the papers claim.
SETS = {"bench": evidence.CLAIMS, "weights": evidence.WEIGHTS, "compute": evidence.COMPUTE}


def measurements(name: str) -> list[tuple[str, str, str, dict[str, Any]]]:
    """Return a technique's measurements: the recipe, the task, the paper's claim, and the results.

    A technique without a recipe has its paper's settings and better ones from a search, and no claim.
    """
    found = []
    for part, recipes in SETS.items():
        for recipe, (technique, claim) in recipes.items():
            for task in evidence.TASKS:
                results = committed()[part].get(task)
                if technique == name and results is not None and recipe in results["summary"]:
                    found.append((recipe, task, claim, results))
    for task, (results, searched) in further().items():
        found += [
            (one.name, task, "", results) for one in evidence_further.shown(task, results, searched).get(name, ())
        ]
    return found


def measured() -> dict[str, dict[str, str]]:
    """Return the verdict of each technique on each task with a comparison."""
    found: dict[str, dict[str, str]] = {}
    for name in sorted(public.HOMES):
        for recipe, task, _, results in measurements(name):
            at = f", {results['plan']['budget']['seconds']:g} s" if without_recipe(task, results) else ""
            where = f"{evidence.SHORT[task]}{at}{label(task, recipe, results)}"
            found.setdefault(name, {})[where] = evidence.cell(results["summary"][recipe])
    return found


def speeds() -> dict[str, float]:
    """Return the speed of searchable techniques relative to their baselines, by :func:`agreed`.

    An optimizer represents the technique that replaces the module's optimizer by it.
    """
    shown: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for name in public.HOMES:
        cls = public.found(name)
        technique = "ReplaceOptimizer" if isinstance(cls, type) and issubclass(cls, Optimizer) else name
        for recipe, task, _, results in measurements(name):
            shown.setdefault(technique, {}).setdefault(task, []).append(results["summary"][recipe])
    told = {name: agreed(shown[name].values()) for name in sorted(shown.keys() & techniques())}
    return {name: round(speed, 2) for name, speed in told.items() if round(speed, 2) != 1.0}


def techniques() -> set[str]:
    """Return the names of techniques that a search can try."""
    return {cls.__name__ for cls in technique_classes()}


def agreed(tasks: Iterable[Iterable[Mapping[str, Any]]]) -> float:
    """Return a technique's speed in one number, from the summaries of its arms on each task.

    It is the geometric mean over tasks of the speed with the best settings, since a search tries settings. It is 1 if no task
    shows a difference, if tasks disagree, or if tasks without a difference outweigh the others.
    """
    best = [max(arms, key=lambda arm: arm["speedup"]["estimate"]) for arms in tasks]
    verdicts = {arm["verdict"] for arm in best} & {"faster", "slower"}
    mean = math.exp(fmean(math.log(arm["speedup"]["estimate"]) for arm in best))
    return mean if verdicts == {"faster" if mean > 1 else "slower"} else 1.0


def without_recipe(task: str, results: dict[str, Any]) -> bool:
    """Whether the results of a task belong to techniques without a recipe there."""
    return further().get(task, (None,))[0] is results


def label(task: str, recipe: str, results: dict[str, Any]) -> str:
    """Return the settings of a technique without a recipe after a comma, if they differ from its paper's, else ""."""
    if not without_recipe(task, results):
        return ""
    every = evidence_further.settings(task)
    return next(evidence_further.label(one, every) for one in every if one.name == recipe)


def tests() -> dict[str, str]:
    """Return the test files of techniques whose tests are not in a file with the module's name."""
    off = {}
    for name, home in public.HOMES.items():
        *room, last = home.split(".")[1:]
        if not ROOT.joinpath("tests", *room, f"test_{last}.py").is_file():
            own = selection.own_files(name) if isinstance(public.found(name), type) else []
            if own:
                off[name] = own[0].relative_to(ROOT).as_posix()
    return off


def entries() -> str:
    """Return the text of the catalogue's entries."""
    return as_json(collected()) + "\n"


def text() -> str:
    """Return the file's text."""
    every = {"measured": measured(), "speed": speeds(), "tests": tests()}
    return json.dumps(every, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
