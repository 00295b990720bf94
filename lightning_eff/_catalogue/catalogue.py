"""The catalogue's entries: the techniques of the surveys, and this package's other techniques."""

import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache

from lightning_eff._catalogue import data_rows, model_rows, optim_rows
from lightning_eff._catalogue.facts import facts
from lightning_eff._catalogue.row import FOLDERS, GROUPS, Row
from lightning_eff._catalogue.strategies import trains_under
from lightning_eff._exports import public
from lightning_eff._exports.techniques import technique_classes

ROWS: dict[str, tuple[Row, ...]] = {
    group: getattr(part, group.upper())
    for group in GROUPS
    for part in (data_rows, model_rows, optim_rows)
    if hasattr(part, group.upper())
}
BUILT, ELSEWHERE, NOT_YET, ABSENT = "built", "in PyTorch or Lightning", "not built yet", "left out"


@dataclass(frozen=True)
class Entry:
    """One line of the catalogue.

    Attributes:
        group: a key of :data:`GROUPS`.
        name: the name in the surveys, or the class if they do not name it.
        source: the authors who described it.
        status: "built", "in PyTorch or Lightning", "not built yet" or "left out".
        by: the public classes that implement it.
        how: the setting to use, or the part of PyTorch or Lightning that implements it.
        why: the reason why it is left out.
        kind: the kind of the first class: "callback", "precision", "strategy" or "optimizer".
        saves: the saving of that class.
        paper: its sources.
        constraints: its limits.
        surveys: the sections of the surveys that describe it.
        tests: the path of its tests in the repository.
        measured: the measured speed-ups and verdicts by task.
    """

    group: str
    name: str
    source: str
    status: str
    by: tuple[str, ...] = ()
    how: str = ""
    why: str = ""
    kind: str = ""
    saves: str = ""
    paper: str = ""
    constraints: str = ""
    surveys: str = ""
    tests: str = ""
    measured: dict[str, str] = field(default_factory=dict)

    def matches(self, word: str) -> bool:
        """Return whether any field contains a text, regardless of case."""
        return word.casefold() in json.dumps([*asdict(self).values()], ensure_ascii=False).casefold()


def tests_of(name: str) -> str:
    """Return the path of a class's tests in the repository."""
    *folders, last = public.HOMES[name].split(".")[1:]
    return facts()["tests"].get(name) or "/".join(["tests", *folders, f"test_{last}.py"])


def _attached(row: Row, extra: Iterable[str]) -> tuple[str, ...]:
    """Return the classes that implement a row: those that it names, and those whose ``survey`` names the row."""
    others = [name for name in extra if row.name.casefold() in _survey(name).casefold()]
    return tuple(dict.fromkeys([*(name for name in row.by if name in public.HOMES), *others]))


def _survey(name: str) -> str:
    survey = getattr(public.found(name), "survey", None)
    return str(survey) if survey is not None else ""


def _entry(group: str, name: str, source: str, by: tuple[str, ...], how: str = "", why: str = "") -> Entry:
    if not by:
        return Entry(group, name, source, ABSENT if why else ELSEWHERE if how else NOT_YET, how=how, why=why)
    cls = public.found(by[0])
    return Entry(
        group,
        name,
        source,
        BUILT,
        by,
        how,
        kind=getattr(cls, "kind", "optimizer"),
        saves=getattr(cls, "saves", ""),
        paper=getattr(cls, "paper", source),
        constraints="; ".join(filter(None, (getattr(cls, "constraints", ""), trains_under(cls)))),
        surveys=_survey(by[0]),
        tests=tests_of(by[0]),
        measured=facts()["measured"].get(by[0], {}),
    )


def _group(name: str) -> str:
    """Return the group of a technique that no row names."""
    if not _survey(name):
        return "beside"
    home = public.HOMES[name].removeprefix("lightning_eff.")
    return next(group for folder, group in FOLDERS.items() if home.startswith(f"{folder}."))


@cache
def entries() -> tuple[Entry, ...]:
    """Return the whole catalogue: in the surveys' order, then the techniques that they do not name."""
    exported = [cls.__name__ for cls in technique_classes()]
    optimizers = [name for name in public.HOMES if public.HOMES[name].startswith("lightning_eff.optim.optimizers.")]
    named = {name for rows in ROWS.values() for row in rows for name in row.by}
    loose = [name for name in dict.fromkeys([*exported, *optimizers]) if name not in named]
    found: dict[str, list[Entry]] = {group: [] for group in GROUPS}
    seen: set[str] = set()
    for group, rows in ROWS.items():
        for row in rows:
            by = _attached(row, loose)
            seen |= {*by}
            # a row whose classes do not exist yet is not built, and its `how` describes the future
            how = "" if row.by and not by else row.how
            found[group].append(_entry(group, row.name, row.source, by, how, row.absent))
    for name in loose:
        if name not in seen:
            cls = public.found(name)
            survey = getattr(cls, "survey", None)
            paper = getattr(cls, "paper", "")
            found[_group(name)].append(_entry(_group(name), survey.row if survey else name, paper, (name,)))
    return tuple(entry for every in found.values() for entry in every)


def chosen(word: str = "", group: str = "") -> tuple[Entry, ...]:
    """Return the entries of a group that contain a word."""
    return tuple(e for e in entries() if e.matches(word) and group in ("", e.group))


def as_json(found: Iterable[Entry]) -> str:
    """Return entries as a JSON list of objects."""
    return json.dumps([asdict(entry) for entry in found], indent=1, ensure_ascii=False)


def verdict(entry: Entry) -> str:
    """Return the results of an entry in a few words."""
    return "; ".join(f"{task}: {result}" for task, result in entry.measured.items()) or (
        "not measured" if entry.by else "–"
    )


def table(found: Iterable[Entry], width: int) -> str:
    """Format entries as a table by group, ``width`` characters wide (at least about 120)."""
    head = ("name in the surveys", "in this package", "savings and limits", "measured here")
    by_group: dict[str, list[tuple[str, ...]]] = {}
    for entry in found:
        by_group.setdefault(entry.group, []).extend(_lines(entry))
    first = max([len(name) for rows in by_group.values() for row in rows for name in row[1].split()] or [20])
    left = max(width - first - 6, 84)
    widths = [left // 4, first, left // 2, left - left // 4 - left // 2]
    lines = []
    for group, rows in by_group.items():
        lines += ["", GROUPS[group], *_printed([head, tuple("-" * w for w in widths), *rows], widths)]
    return "\n".join(lines[1:])


def _lines(entry: Entry) -> Iterator[tuple[str, ...]]:
    name = f"{entry.name} ({entry.paper or entry.source})"
    if not entry.by:
        yield name, entry.status, entry.why or entry.how or "–", "–"
        return
    limits = f"; {entry.constraints}" if entry.constraints else ""
    setting = f" {entry.how}" if entry.how else ""
    for number, cls in enumerate(entry.by):
        first = (name, f"{cls}{setting} ({entry.kind})", entry.saves + limits, verdict(entry))
        yield first if number == 0 else ("", f"and {cls}", "", "")


def _printed(rows: Iterable[tuple[str, ...]], widths: list[int]) -> Iterator[str]:
    for row in rows:
        cells = [textwrap.wrap(text, w) or [""] for text, w in zip(row, widths, strict=True)]
        for i in range(max(map(len, cells))):
            line = "  ".join((cell[i] if i < len(cell) else "").ljust(w) for cell, w in zip(cells, widths, strict=True))
            yield line.rstrip()
