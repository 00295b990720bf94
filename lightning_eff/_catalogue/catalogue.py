"""The catalogue's entries: each technique that the surveys name, and the techniques that they do not name."""

import json
import pkgutil
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache

from lightning_eff._catalogue.groups import GROUPS

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


@cache
def entries() -> tuple[Entry, ...]:
    """Return the whole catalogue from ``entries.json``, which ``python -m docs.making facts`` writes.

    The file saves a reader of the table the import of all classes. :func:`.collecting.collected` collects them anew.
    """
    records = json.loads(pkgutil.get_data("lightning_eff._catalogue", "entries.json") or b"")
    return tuple(Entry(**{**record, "by": tuple(record["by"])}) for record in records)


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
    where = f"; {entry.surveys}" if entry.group != "beside" else ""
    name = f"{entry.name} ({entry.paper or entry.source}{where})"
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
