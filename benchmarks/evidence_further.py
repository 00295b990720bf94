"""Single techniques without a recipe: their settings, in ``benchmarks/further.yaml``, and what these gave."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Setting:
    """A technique with some settings.

    Attributes:
        name: of the arm.
        of: the technique.
        told: the settings in words.
        callback: what a config says of it.
    """

    name: str
    of: str
    told: str
    callback: dict[str, Any]


def settings(task: str) -> list[Setting]:
    """What applies to a task: first its own, then those of all tasks; none where it has none of its own.

    In the file of all tasks, ``tasks`` names those that a technique applies to, where it does not to every one.
    """
    file = ROOT / "benchmarks" / task / "further.yaml"
    if not file.is_file():
        return []
    own, common = map(_said, (file, ROOT / "benchmarks" / "further.yaml"))
    every = own | {name: said for name, said in common.items() if name not in own}
    return [
        Setting(name, **{key: value for key, value in said.items() if key != "tasks"})
        for name, said in every.items()
        if task in said.get("tasks", (task,))
    ]


@cache  # asked for again and again, and seconds in reading
def _said(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text())


def papers(every: Iterable[Setting]) -> list[str]:
    """The names of each technique's first settings, which are its paper's."""
    first: dict[str, str] = {}
    for one in every:
        first.setdefault(one.of, one.name)
    return list(first.values())


def to_run(every: Iterable[Setting], searched: Mapping[str, Any] | None) -> list[str]:
    """What is held against the baseline: the paper's settings of each technique, and those that a search found better."""
    every = list(every)
    wanted = set(papers(every))
    if searched is not None:
        wanted |= {best for best, _ in found(every, searched).values()}
    return [one.name for one in every if one.name in wanted]


def found(every: Iterable[Setting], searched: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """Of each technique of a search, which settings ended best, and of how many."""
    ends: dict[str, dict[str, float]] = {}
    for one in every:
        if mean := searched["summary"].get(one.name, {}).get("final", {}).get("mean"):
            ends.setdefault(one.of, {})[one.name] = mean
    return {of: (min(means, key=lambda name: means[name]), len(means)) for of, means in ends.items()}


def shown(task: str, results: Mapping[str, Any], searched: Mapping[str, Any] | None) -> dict[str, list[Setting]]:
    """Of each technique that was held against the baseline, its paper's settings, and those that the search found better.

    Which they are is told by the search's seed, and not by how they ended against the baseline.
    """
    every = settings(task)
    wanted, told = to_run(every, searched), {}
    for one in every:
        if one.name in wanted and one.name in results["summary"]:
            told.setdefault(one.of, []).append(one)
    return told


def label(one: Setting, every: Iterable[Setting]) -> str:
    """The settings of an arm in words behind a comma, where they are not its paper's."""
    return "" if one.name in papers(every) else f", {one.told}"


def overlays(task: str, wanted: Iterable[str], folder: Path) -> list[Path]:
    """Configs of some of a task's settings, to be laid over its baseline, written into ``folder``."""
    wanted = list(wanted)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for one in settings(task):
        if one.name in wanted:
            path = folder / f"{one.name}.yaml"
            config = {"trainer": {"callbacks": [one.callback]}}
            path.write_text(f"# {one.told}\n" + yaml.safe_dump(config, sort_keys=False))
            paths.append(path)
    return paths


def rows(
    task: str, results: Mapping[str, Any], searched: Mapping[str, Any] | None
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Each technique and setting that was compared with the baseline: the technique, the settings, and the arm's summary."""
    best = found(settings(task), searched) if searched is not None else {}
    for one in settings(task):
        if (told := results["summary"].get(one.name)) is None:
            continue
        which, count = best.get(one.of, ("", 0))
        yield one.of, one.told + (f" (best of {count})" if one.name == which and count > 1 else ""), told
