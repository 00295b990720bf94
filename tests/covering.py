"""Few large sets in which every allowed pair of names stands together, and the smallest part of a set that fails.

A covering design in the sense of combinatorial testing: sets are built greedily, as AETG builds its rows (Cohen et al.
1997), and a failing one is cut down by delta debugging (Zeller and Hildebrandt 2002). Both are the same whenever they are
computed.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import combinations, pairwise

Pair = frozenset[str]
Stack = tuple[str, ...]


def pairs(names: Iterable[str]) -> set[Pair]:
    """Every two of ``names``."""
    return {frozenset(two) for two in combinations(sorted(set(names)), 2)}


def design(names: Collection[str], refused: Collection[Pair], wanted: Collection[Pair] | None = None) -> list[Stack]:
    """Stacks without a refused pair, so that every two names that are not refused stand together in at least one.

    Args:
        names: any order; a name that is refused with all others has a stack of its own.
        refused: pairs that may stand together in none.
        wanted: pairs that are to stand together, and no others need to; all, if None.

    Returns:
        The stacks, each sorted.
    """
    ordered = sorted(set(names))
    index = {name: i for i, name in enumerate(ordered)}
    enemies, left = [0] * len(ordered), [0] * len(ordered)  # bit j of entry i: the pair of the names i and j
    for pair in (pair for pair in refused if pair <= index.keys()):
        _mark(enemies, index, pair)
    for pair in (pairs(ordered) if wanted is None else set(wanted)) - set(refused):
        _mark(left, index, pair)
    stacks: list[int] = []
    while any(left):
        seeds = sorted(range(len(ordered)), key=lambda i: -left[i].bit_count())[:SEEDS]
        stack = max((_grown(seed, enemies, left) for seed in seeds), key=lambda bits: _gain(bits, left))
        stacks.append(stack)
        left = [row & ~stack if stack >> i & 1 else row for i, row in enumerate(left)]
    if wanted is None:
        stacks += [1 << i for i in range(len(ordered)) if not any(stack >> i & 1 for stack in stacks)]
    return [tuple(name for i, name in enumerate(ordered) if stack >> i & 1) for stack in stacks]


SEEDS = 4  # from how many names a stack is grown, of which the best is kept


def _mark(rows: list[int], index: dict[str, int], pair: Pair) -> None:
    i, j = (index[name] for name in pair)
    rows[i] |= 1 << j
    rows[j] |= 1 << i


def _gain(stack: int, left: Sequence[int]) -> int:
    return sum((row & stack).bit_count() for i, row in enumerate(left) if stack >> i & 1)


def _grown(seed: int, enemies: Sequence[int], left: Sequence[int]) -> int:
    """From ``seed`` on, each time the name that has most pairs left with those that stand, while any has one.

    Of names with equal gain, the one that shuts fewest others out; then the first.
    """
    stack = 1 << seed
    candidates = (1 << len(left)) - 1 & ~stack & ~enemies[seed]
    while candidates:
        best, most = -1, (0, 0)
        for i in range(len(left)):
            if candidates >> i & 1:
                value = (left[i] & stack).bit_count(), -(enemies[i] & candidates).bit_count()
                if value[0] and (best < 0 or value > most):
                    best, most = i, value
        if best < 0:
            break
        stack |= 1 << best
        candidates &= ~(1 << best) & ~enemies[best]
    return stack


def gathered(names: Collection[str], refused: Collection[Pair]) -> list[Stack]:
    """Few stacks without a refused pair, in one of which each name stands: those that most refuse are placed first."""
    enemies = {name: {other for pair in refused if name in pair for other in pair - {name}} for name in names}
    stacks: list[list[str]] = []
    for name in sorted(names, key=lambda name: (-len(enemies[name]), name)):
        free = [stack for stack in stacks if not enemies[name] & set(stack)]
        if free:
            free[0].append(name)
        else:
            stacks.append([name])
    return [tuple(sorted(stack)) for stack in stacks]


def watched(
    stacks: Sequence[Stack], names: Iterable[str], wanted: Collection[Pair] | None = None, most: int | None = None
) -> list[dict[str, Stack]]:
    """For each stack the names that are to be looked at in it, each with the partners that it is looked at beside there.

    Few: a name is looked at where most partners stand beside it that it was not yet looked at with.

    Args:
        stacks: what :func:`design` gave.
        names: those that can be looked at.
        wanted: the pairs that :func:`design` was given.
        most: in how many stacks each is looked at, those in which most partners stand; None until it was beside them all.
    """
    found: list[dict[str, Stack]] = [{} for _ in stacks]
    for name in sorted(set(names)):
        beside = [set(stack) - {name} if name in stack else set[str]() for stack in stacks]
        left = {other for some in beside for other in some if wanted is None or frozenset((name, other)) in wanted}
        times = 0
        while left and times != most:
            times += 1
            at = max(range(len(stacks)), key=lambda i: len(left & beside[i]))
            found[at][name] = tuple(sorted(left & beside[at]))
            left -= beside[at]
    for stack, some in zip(stacks, found, strict=True):
        some |= {name: () for name in stack if len(stack) == 1 and name in names}
    return found


def smallest(names: Sequence[str], fails: Callable[[Stack], bool], seconds: float = math.inf) -> Stack:
    """A smallest part of ``names`` that fails: without any one of its names it does not (ddmin).

    Args:
        names: fail together.
        fails: of some of the names, in their order; never asked twice about the same.
        seconds: after which no part is tried any more, and the smallest one that was found by then is returned.
    """
    known: dict[Stack, bool] = {tuple(names): True}
    end = time.monotonic() + seconds

    def failing(some: Sequence[str]) -> bool:
        key = tuple(some)
        if key not in known and time.monotonic() < end:
            known[key] = bool(key) and fails(key)
        return known.get(key, False)

    current, parts = list(names), 2
    while len(current) > 1:
        bounds = [round(i * len(current) / parts) for i in range(parts + 1)]
        chunks = [current[a:b] for a, b in pairwise(bounds)]
        rests = [[name for name in current if name not in chunk] for chunk in chunks]
        if (part := next(filter(failing, chunks), None)) is not None:
            current, parts = part, 2
        elif (rest := next(filter(failing, rests), None)) is not None:
            current, parts = rest, max(parts - 1, 2)
        elif parts < len(current):
            parts = min(2 * parts, len(current))
        else:
            break
    return tuple(current)
