"""The catalogue's entries: each technique that the surveys name, and the techniques that they do not name."""

import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache

from lightning_eff._catalogue import data_rows, model_rows, optim_rows
from lightning_eff._catalogue.facts import facts
from lightning_eff._catalogue.row import GROUPS, ROOMS, Row
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
        group: of :data:`GROUPS`.
        name: what the surveys call it; of what stands beside them, the class.
        source: who described it.
        status: "built", "in PyTorch or Lightning", "not built yet" or "left out".
        by: the public classes that do it.
        how: the setting that does it, or what of PyTorch and Lightning does it.
        why: why it is left out.
        kind: "callback", "precision", "strategy" or "optimizer", of the first class.
        saves: what that class saves.
        paper: its sources.
        constraints: where it does not work.
        surveys: the sections of the surveys that it answers to.
        tests: the file of its tests, in the repository.
        measured: what was found of it here, by task; empty where nothing was.
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
        """Whether a text stands anywhere in it, in upper or lower case."""
        return word.casefold() in json.dumps([*asdict(self).values()], ensure_ascii=False).casefold()


def tests_of(name: str) -> str:
    """The file of a class's tests, in the repository."""
    *room, last = public.HOMES[name].split(".")[1:]
    return facts()["tests"].get(name) or "/".join(["tests", *room, f"test_{last}.py"])


def _attached(row: Row, extra: Iterable[str]) -> tuple[str, ...]:
    """The classes that do what a row names: those that it names, and those that say so in their ``survey``."""
    told = [name for name in extra if row.name.casefold() in _survey(name).casefold()]
    return tuple(dict.fromkeys([*(name for name in row.by if name in public.HOMES), *told]))


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


def _room(name: str) -> str:
    """The group of a technique that no row names."""
    if not _survey(name):
        return "beside"
    home = public.HOMES[name].removeprefix("lightning_eff.")
    return next(group for room, group in ROOMS.items() if home.startswith(f"{room}."))


@cache
def entries() -> tuple[Entry, ...]:
    """The whole catalogue: in the surveys' order first, then the techniques that they do not name."""
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
            # a row that names classes, none of which is there, is not built: `how` is then how it will be
            how = "" if row.by and not by else row.how
            found[group].append(_entry(group, row.name, row.source, by, how, row.absent))
    for name in loose:
        if name not in seen:
            cls = public.found(name)
            survey = getattr(cls, "survey", None)
            paper = getattr(cls, "paper", "")
            found[_room(name)].append(_entry(_room(name), survey.row if survey else name, paper, (name,)))
    return tuple(entry for every in found.values() for entry in every)


def chosen(word: str = "", group: str = "") -> tuple[Entry, ...]:
    """Those entries of a group in which a word stands."""
    return tuple(e for e in entries() if e.matches(word) and group in ("", e.group))


def as_json(found: Iterable[Entry]) -> str:
    """Entries as a list of objects."""
    return json.dumps([asdict(entry) for entry in found], indent=1, ensure_ascii=False)


def verdict(entry: Entry) -> str:
    """The results of an entry in a few words."""
    return "; ".join(f"{task}: {told}" for task, told in entry.measured.items()) or (
        "not measured" if entry.by else "–"
    )


def table(found: Iterable[Entry], width: int) -> str:
    """Entries as a table of ``width`` columns (at least about 120), by group."""
    head = ("name in the surveys", "in this package", "what it saves, and its limits", "measured here")
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
