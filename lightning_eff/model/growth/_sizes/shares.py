"""What grows, as the user says it: pairs (fraction of the budget, share of the module's full size)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

Shares = list[tuple[float, float]]


def share_at(shares: Shares, u: float) -> float:
    """The share at ``u`` in [0, 1]: that of the last pair whose fraction is not beyond it."""
    return next(share for fraction, share in reversed(shares) if u >= fraction - 1e-9)


def checked_shares(given: Any, *, who: str, name: str, of: str) -> Shares | None:
    """``given`` as a list of pairs, or None as it is.

    Args:
        given: the argument.
        who: the technique's name, for the message.
        name: the argument's name.
        of: of what the shares are, in words.

    Raises:
        ValueError: if they are malformed, do not begin at 0, shrink, or go past the module's size.
    """
    if given is None:
        return None

    def fail(why: str) -> ValueError:
        return ValueError(
            f"{who}({name}={given!r}): {why}; expected None, or pairs (fraction of the budget in [0, 1), share of {of} in"
            " (0, 1]), both growing, the first fraction 0, e.g. [(0.0, 0.5), (0.3, 1.0)]."
        )

    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise fail("there is no pair" if not given else f"got {type(given).__name__}")
    pairs: Shares = []
    for pair in given:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise fail(f"{pair!r} is no pair")
        fraction, share = pair
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0.0 <= fraction < 1.0:
            raise fail(f"the fraction {fraction!r} is not in [0, 1)")
        if isinstance(share, bool) or not isinstance(share, int | float) or not share > 0:
            raise fail(f"{share!r} is no share")
        if share > 1:
            raise fail(f"{share!r} is past the module's size, which is built in full and trained a part at first")
        pairs.append((float(fraction), float(share)))
    if pairs[0][0] != 0.0:
        raise fail(f"the first fraction is {pairs[0][0]}, and nothing says how much there is before")
    for (before, less), (after, more) in pairwise(pairs):
        if after <= before:
            raise fail(f"the fraction {after} does not come after {before}")
        if more <= less:
            raise fail(f"{less:g} shrinks to {more:g}" if more < less else f"{more:g} does not grow")
    return pairs


def check_multiples(width: Shares | None, *, who: str) -> None:
    """Raise ``ValueError`` unless each share of ``width`` is a multiple of the one before."""
    for (_, less), (_, more) in pairwise(width or []):
        if abs(more / less - round(more / less)) > 1e-6:
            raise ValueError(
                f"{who}(width={width!r}): {less:g} is to grow to {more:g}, {more / less:g} times as many hidden units;"
                " expected a whole multiple, since they are repeated, e.g. [(0.0, 0.25), (0.2, 0.5), (0.4, 1.0)]."
            )


def whole(size: int, shares: Shares, *, who: str, name: str, of: str) -> list[int]:
    """Each of ``shares`` of ``size``, as whole numbers.

    Raises:
        ValueError: if one is none, with the shares that are possible.
    """
    counts = [round(size * share) for _, share in shares]
    if any(abs(size * share - count) > 0.05 or count < 1 for (_, share), count in zip(shares, counts, strict=True)):
        raise ValueError(
            f"{who}({name}={shares}): of {of} these are {[round(size * share, 3) for _, share in shares]}; expected whole"
            f" numbers, such as the shares {', '.join(f'{n}/{size}' for n in range(1, min(size, 6)))} and 1."
        )
    return counts
