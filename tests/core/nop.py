"""The least technique: it changes nothing, and brings all that the core gives any technique."""

from lightning_eff._core.technique import Technique


class Nop(Technique):
    """Changes nothing."""

    saves = "nothing"
    paper = "none"


class Other(Nop):
    """Another one that changes nothing."""
