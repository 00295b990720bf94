"""Match patterns of dotted paths, and suggest similar paths."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase


def meets(path: str, pattern: str) -> bool:
    """Return whether ``pattern`` is the path, a pattern of it, or one of its last parts."""
    return path == pattern or fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}")


def nearest(pattern: str, paths: Iterable[str]) -> list[str]:
    """Return at most four paths, or beginnings or ends of paths, similar to ``pattern``."""
    found: dict[str, None] = {}
    for path in paths:
        components = path.split(".")
        found |= dict.fromkeys(".".join(components[:i]) for i in range(1, len(components) + 1))
        found |= dict.fromkeys(".".join(components[-i:]) for i in range(1, len(components)))
    names = [name for name in found if not name.isdecimal()]
    plain = pattern.replace("*", "").strip(".")
    near = difflib.get_close_matches(plain, names, n=4, cutoff=0.4)
    near += [name for name in names if plain and plain in name and name not in near]
    return near[:4]


def check_names(names: Sequence[str] | None, *, who: str, what: str, example: str) -> list[str] | None:
    """Return the argument ``names`` as a list.

    Raises:
        ValueError: if it is neither None nor a list of names.
    """
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(n, str) and n for n in names):
        raise ValueError(
            f"{who}({names=}): expected dotted paths of {what}, their last parts or patterns, such as [{example!r}]. None"
            " finds them automatically; [] is plain training."
        )
    return list(names)


def check_met(
    names: Sequence[str], paths: Iterable[str], *, who: str, what: str, root: str, argument: str = "names"
) -> None:
    """Raise ``ValueError`` for a name that matches none of ``paths``, with the most similar ones.

    Args:
        names: patterns, see :func:`meets`.
        paths: the paths that could be meant.
        who: the technique.
        what: a plural noun for the paths.
        root: the class of the module.
        argument: the technique's argument that has the names.
    """
    known = list(paths)
    for name in names:
        if any(meets(path, name) for path in known):
            continue
        near = nearest(name, known) or known[:4]
        shown = f"[{name!r}]" if len(names) == 1 else f"[{name!r}, ...]"
        raise ValueError(
            f"{who}({argument}={shown}): it matches none of the {len(known)} {what} of {root}; expected a dotted path, its"
            f" last part, or a pattern. Nearest: {', '.join(near) or 'none'}."
        )


def by_reason(left: Mapping[str, str]) -> str:
    """Return a sentence for each reason with at most three skipped names, each after a space."""
    names: dict[str, list[str]] = {}
    for name, reason in left.items():
        names.setdefault(reason, []).append(name)
    return "".join(
        f" {', '.join(some[:3])}{f' and {len(some) - 3} more' if len(some) > 3 else ''}: {reason}."
        for reason, some in names.items()
    )
