"""Divides the modules that a technique could act on into those that it takes and those that it leaves."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from torch import nn

from lightning_eff._core._architecture.naming import by_reason, check_met, meets

M = TypeVar("M", bound=nn.Module)


class ByName:
    """A mixin, first among the bases, for techniques that act on modules that the user may name.

    Attributes:
        names: patterns of paths; None looks for modules, and an empty list is plain training.
    """

    neutral_at: ClassVar[Mapping[str, Any]] = {"names": []}

    names: list[str] | None

    def _take_names(self, names: Sequence[str] | None) -> None:
        self.names = None if names is None else list(names)


def is_named(path: str, names: Sequence[str] | None) -> bool:
    """Whether one of ``names`` means the module at ``path``; False where there are no names."""
    return names is not None and any(meets(path, name) for name in names)


def select(
    every: Mapping[str, M],
    names: Sequence[str] | None,
    unfit: Callable[[str, M], str | None],
    *,
    who: str,
    what: str,
    root: nn.Module,
) -> tuple[dict[str, M], dict[str, str]]:
    """The modules to act on by path, and why others that were meant are left.

    Args:
        every: the candidates by path.
        names: the paths or patterns that the user gave; None means every candidate.
        unfit: given a path and a module, why the technique cannot act on it; None or an empty string where it can.
        who: the technique.
        what: the candidates, in the plural.
        root: the module that holds them.

    Raises:
        ValueError: for a name that means no candidate, and for a named module that is unfit.
    """
    if names is not None and every:
        check_met(names, every, who=who, what=what, root=type(root).__name__)
    chosen: dict[str, M] = {}
    left: dict[str, str] = {}
    for path, m in every.items():
        named = is_named(path, names)
        if names is not None and not named:
            continue
        reason = unfit(path, m)
        if reason and named:
            raise ValueError(
                f"{who}(names=...): {path} ({type(m).__name__}) cannot be changed: {reason}. Leave it out of `names`."
            )
        if reason:
            left[path] = reason
        else:
            chosen[path] = m
    return chosen, left


def check_any(
    chosen: Mapping[str, nn.Module], left: Mapping[str, str], *, who: str, what: str, root: nn.Module
) -> None:
    """Raise ``ValueError`` if every candidate is left, with the reasons; ``what`` is a candidate, in the singular."""
    if left and not chosen:
        raise ValueError(
            f"{who}: no {what} of {type(root).__name__} can be changed.{by_reason(left)} Give other settings, or remove the"
            " callback."
        )
