"""SkipInit: a learnt multiplier at the end of each residual branch, at zero or 1/sqrt(d) at first (De & Smith 2020).

The rule is ``x + alpha F(x)`` with alpha = 0, or with ``skip_init_scale``, which ``_scales.scaled.Scaled`` computes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from typing_extensions import override

from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.technique import Control
from lightning_eff.model.initialization._scales.branch_scale import BranchScale, conflicts, pointless


def skip_init_scale(branches: int) -> float:
    """alpha = 1/sqrt(d), for d residual branches."""
    return 1.0 / math.sqrt(branches)


class SkipInit(BranchScale):
    """Put a multiplier at the end of each residual branch, ``x + alpha F(x)``, that begins so that branches hardly count.

    It is what BatchNorm does for a deep residual network, whose branches it makes small beside the skips: with alpha in its
    place, networks without any norm train at depths of a thousand, at rates somewhat below. The rule is ReZero's; here alpha
    may begin at 1/sqrt(d) too, with d the number of residual branches, where the stream's variance grows e-fold at
    most. Norms stay where the module has them.

    Branches are found before anything has run, by a pass over an input that is made up, in a Trainer as in
    ``lightning_eff.apply``; which they are is said. Alpha multiplies the tensors in which a branch ends: the weight and bias
    of its last map, or of the norm behind that, which keep their names; it is the ``branch_scale`` beside them, and its weight
    does not decay. ``lightning_eff.export`` multiplies it in, and gives the plain module.

    Logged: ``branches``, how many are scaled.

    Args:
        alpha: the first value: a number, or "depth" for 1/sqrt(d).
        branches: names of the weights in which residual branches end, or of their modules, or patterns of them, e.g.
            ``["blocks.*.two.weight"]``; None looks for them, and ``[]`` is plain training.
        force: also act on a module that was loaded from a checkpoint, whose function it changes.

    Raises:
        ValueError: for other values; at setup or in ``apply``, where no residual branch is found, or where one ends in
            something that has no weight to be scaled or is used elsewhere too; for a pretrained module without ``force``.

    Sources:
        De & Smith 2020, arXiv:2002.10444.
    """

    saves: ClassVar[str] = "steps: deep networks begin as shallow ones, with their gradients whole"
    paper: ClassVar[str] = "De & Smith 2020, arXiv:2002.10444"
    constraints: ClassVar[str] = "modules with residual branches"
    survey: ClassVar[Survey | None] = Survey(
        "initialisation: residual branches with a learnt scale (SkipInit)", shen="4.3"
    )
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"alpha": Choice((0.0, "depth"))}, pointless)
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero: a step costs one product"
        " of two numbers more for each that ends a branch"
    )
    conflicts: ClassVar[Mapping[str, str]] = conflicts("SkipInit", zero=True)

    def __init__(self, alpha: float | str = 0.0, *, branches: Sequence[str] | None = None, force: bool = False) -> None:
        number = isinstance(alpha, int | float) and not isinstance(alpha, bool) and math.isfinite(alpha)
        if not number and alpha != "depth":
            raise ValueError(f"SkipInit({alpha=}): expected a finite number, or 'depth' for 1/sqrt(d) of d branches.")
        self.alpha = alpha
        self._take(branches, force)

    @override
    def begins_at(self, branches: int, blocks: int) -> float:
        return self.alpha if isinstance(self.alpha, int | float) else skip_init_scale(branches)
