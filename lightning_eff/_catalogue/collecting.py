"""Collect the catalogue's entries from the items of the surveys and from what the classes declare."""

from lightning_eff._catalogue.catalogue import ABSENT, BUILT, ELSEWHERE, NOT_YET, Entry
from lightning_eff._catalogue.facts import facts
from lightning_eff._catalogue.groups import GROUPS
from lightning_eff._catalogue.strategies import trains_under
from lightning_eff._core._surveys.items import Item, items, sections
from lightning_eff._exports import public
from lightning_eff._exports.techniques import technique_classes


def tests_of(name: str) -> str:
    """Return the path of a class's tests in the repository."""
    *folders, last = public.HOMES[name].split(".")[1:]
    return facts()["tests"].get(name) or "/".join(["tests", *folders, f"test_{last}.py"])


def _entry(group: str, item: Item) -> Entry:
    by = tuple(name for name in item.by if name in public.HOMES)
    where = sections(item.zhuang, item.shen)
    # an item whose classes do not exist yet is not built, and its `how` describes the future
    how = "" if item.by and not by else item.how
    if not by:
        status = ABSENT if item.absent else ELSEWHERE if how else NOT_YET
        return Entry(group, item.name, item.source, status, how=how, why=item.absent, surveys=where)
    cls = public.found(by[0])
    return Entry(
        group,
        item.name,
        item.source,
        BUILT,
        by,
        how,
        kind=getattr(cls, "kind", "optimizer"),
        saves=getattr(cls, "saves", ""),
        paper=getattr(cls, "paper", item.source),
        constraints="; ".join(filter(None, (getattr(cls, "constraints", ""), trains_under(cls)))),
        surveys=where,
        tests=tests_of(by[0]),
        measured=facts()["measured"].get(by[0], {}),
    )


def collected() -> tuple[Entry, ...]:
    """Return the whole catalogue: in the surveys' order, then the techniques that they do not name."""
    named = {name for rows in items().values() for item in rows for name in item.by}
    optimizers = [name for name in public.HOMES if public.HOMES[name].startswith("lightning_eff.optim.optimizers.")]
    loose = dict.fromkeys([*(cls.__name__ for cls in technique_classes()), *optimizers])
    beside = (Item(name, getattr(public.found(name), "paper", ""), by=(name,)) for name in loose if name not in named)
    found = {**items(), "beside": beside}
    return tuple(_entry(group, item) for group in GROUPS for item in found[group])
