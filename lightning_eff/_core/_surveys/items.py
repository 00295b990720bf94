"""The items of two surveys of efficient training, from ``surveys.yaml``: the only place that says which section has what."""

import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Item:
    """A technique of the surveys, or a related method that neither names.

    Attributes:
        name: its name in the surveys.
        source: the authors who described it, and the year.
        zhuang: the section of Zhuang et al. 2023, "A Survey on Efficient Training of Transformers" (arXiv:2302.01107), or "".
        shen: the section of Shen et al. 2024, "On Efficient Training of Large-Scale Deep Learning Models"
            (arXiv:2304.03589), or "".
        by: the public classes that implement it. It counts as built as soon as one of them is exported.
        how: the setting to use, or the part of PyTorch or Lightning that implements it.
        absent: the reason why it is left out for good, or an empty text.
    """

    name: str
    source: str
    zhuang: str = ""
    shen: str = ""
    by: tuple[str, ...] = ()
    how: str = ""
    absent: str = ""


@dataclass(frozen=True)
class Survey:
    """The items of the two surveys that a technique implements.

    Attributes:
        row: their names.
        zhuang: the sections of Zhuang et al. 2023 that describe them, or None.
        shen: the sections of Shen et al. 2024, or None.
    """

    row: str
    zhuang: str | None = None
    shen: str | None = None

    def __str__(self) -> str:
        return f"{self.row} ({sections(self.zhuang, self.shen)})"


def sections(zhuang: str | None, shen: str | None) -> str:
    """Format the sections of both surveys."""
    where = [f"{who} {section}" for who, section in (("Zhuang", zhuang), ("Shen", shen)) if section]
    return "; ".join(where) or "in neither survey"


@cache
def items() -> dict[str, tuple[Item, ...]]:
    """Return the items of both surveys by group, in the surveys' order."""
    import yaml  # only the catalogue and its readers need it

    groups = yaml.safe_load(pkgutil.get_data("lightning_eff._core._surveys", "surveys.yaml") or b"")
    return {group: tuple(Item(**row | {"by": (*row.get("by", ()),)}) for row in rows) for group, rows in groups.items()}


def survey(name: str) -> Survey | None:
    """Return what the surveys say about a public class, or None if they do not name it."""
    found = [item for rows in items().values() for item in rows if name in item.by]
    if not found:
        return None
    return Survey(
        ", ".join(item.name for item in found),
        _joined(item.zhuang for item in found),
        _joined(item.shen for item in found),
    )


def _joined(values: Iterable[str]) -> str | None:
    return ", ".join(sorted({*values} - {""})) or None


class InSurveys:
    """A class attribute: what the surveys say about the class, or None."""

    def __get__(self, instance: object, owner: type) -> Survey | None:
        return survey(owner.__name__)
