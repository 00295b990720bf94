"""Checks of the sizes of a network that grows, against the module's full size."""

from collections.abc import Sequence
from itertools import pairwise


def check_multiples(width: Sequence[tuple[float, float]] | None, *, who: str) -> None:
    """Raise ``ValueError`` unless each fraction of ``width`` is a multiple of the one before."""
    for (_, less), (_, more) in pairwise(width or []):
        if abs(more / less - round(more / less)) > 1e-6:
            raise ValueError(
                f"{who}(width={width!r}): {less:g} cannot grow to {more:g}, because hidden units are repeated and"
                f" {more / less:g} is no whole number. Use multiples, such as [(0.0, 0.25), (0.2, 0.5), (0.4, 1.0)]."
            )


def whole(size: int, shares: Sequence[tuple[float, float]], *, who: str, name: str, of: str) -> list[int]:
    """Return each fraction of ``shares`` times ``size``, as whole numbers.

    Raises:
        ValueError: if one is not a whole number, with fractions that are.
    """
    counts = [round(size * share) for _, share in shares]
    if any(abs(size * share - count) > 0.05 or count < 1 for (_, share), count in zip(shares, counts, strict=True)):
        raise ValueError(
            f"{who}({name}={shares}): for {of} these fractions are {[round(size * share, 3) for _, share in shares]}, not"
            f" whole numbers. Use fractions such as {', '.join(f'{n}/{size}' for n in range(1, min(size, 6)))} and 1."
        )
    return counts
