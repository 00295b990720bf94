"""Stacks whose blocks a module registers as attributes (``block_0`` ... ``block_7``), or in an ``nn.ModuleDict``.

Only names suggest that such blocks belong together. Code that uses one of these stacks must check that its blocks feed each
other.
"""

import re
from collections.abc import Iterator, Sequence

from torch import nn

from lightning_eff._core._stack._candidates.candidate import (
    Candidate,
    alike,
    class_of,
    has_parameters,
    in_order,
    is_composite,
    is_repeated,
    join,
    of_container,
)
from lightning_eff._core._stack._candidates.patterns import matching

_LISTS = nn.ModuleList | nn.Sequential
_NUMBERED = re.compile(r"(.*?)(\d+)")


def by_name(module: nn.Module, lists: Sequence[Candidate]) -> list[Candidate]:
    """Return the outermost blocks of one class and width in ``nn.ModuleDict``, or named by a common prefix and a number.

    Args:
        module: the root.
        lists: the stacks in lists. Their blocks are not searched. Blocks that contain one must all have the same tensors.
    """
    found: list[Candidate] = []
    around = tuple(f"{c.path}." for c in lists if c.composite)
    for path, parent in module.named_modules():
        if isinstance(parent, _LISTS) or f"{path}.".startswith(around):
            continue
        new = [c for c in _within(path, parent) if _are_alike(c, lists)]
        around += tuple(prefix for c in new for prefix in c.prefixes)
        found += new
    return found


def _within(path: str, parent: nn.Module) -> Iterator[Candidate]:
    children = {name: m for name, m in parent._modules.items() if m is not None}
    if isinstance(parent, nn.ModuleDict) and path and _are_blocks([*children.values()]):
        yield of_container(path, parent)
        return
    groups: dict[str, list[str]] = {}
    for name in children:
        numbered = _NUMBERED.fullmatch(name)
        if numbered is not None:
            groups.setdefault(numbered[1], []).append(name)
    for start, names in groups.items():
        names = in_order(names)
        blocks = [children[name] for name in names]
        if _are_blocks(blocks):
            pattern = next(p for p in (f"{start}*", f"{start}[0-9]*", ", ".join(names)) if _means(p, names, children))
            where = ", ".join(join(path, each) for each in pattern.split(", "))
            yield Candidate(
                where, parent, class_of(blocks[0]).__name__, len(names), composite=True, keys=(*names,), home=path
            )


def _means(pattern: str, names: list[str], children: dict[str, nn.Module]) -> bool:
    return "," in pattern or [*matching(pattern, children)] == names


def _are_blocks(blocks: list[nn.Module]) -> bool:
    return (
        len(blocks) > 1
        and len({*map(id, blocks)}) == len(blocks)
        and all(is_composite(block) and has_parameters(block) for block in blocks)
        and not isinstance(blocks[0], nn.ModuleList | nn.ModuleDict)
        and is_repeated(blocks)
    )


def _are_alike(found: Candidate, lists: Sequence[Candidate]) -> bool:
    """Return whether the blocks have the same tensors, or contain no stack; unequal towers are not one stack."""
    return not any(c.composite and c.path.startswith(found.prefixes) for c in lists) or alike(found.blocks)


def outermost(found: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that are not inside the blocks of another one."""
    around = tuple(prefix for c in found if c.by_name for prefix in c.prefixes)
    return [c for c in found if not around or not f"{c.home}.".startswith(around)]
