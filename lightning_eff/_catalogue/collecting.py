"""Collect the catalogue's entries from the rows of the surveys and from what the classes declare."""

from collections.abc import Iterable

from lightning_eff._catalogue import data_rows, model_rows, optim_rows
from lightning_eff._catalogue.catalogue import ABSENT, BUILT, ELSEWHERE, NOT_YET, Entry
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


def collected() -> tuple[Entry, ...]:
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
