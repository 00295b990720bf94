"""LayerScale: a small learnt factor for each channel of what a residual branch adds (Touvron et al. 2021).

The rule is ``x + diag(lambda) F(x)`` with ``layer_scale`` for the first lambda, which ``_scales.scaled.Scaled`` computes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from typing_extensions import override

from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.technique import Control
from lightning_eff.model.initialization._scales.branch_scale import BranchScale, conflicts, pointless


def layer_scale(blocks: int) -> float:
    """The first lambda for a transformer of so many blocks (CaiT, section 2.1)."""
    return 0.1 if blocks <= 18 else 1e-5 if blocks <= 24 else 1e-6


class LayerScale(BranchScale):
    """Scale each channel of each residual branch by a number that is learnt and small at first: ``x + diag(lambda) F(x)``.

    Deep vision transformers begin near their skips, yet have gradients in all weights, and each channel finds its own share.
    The first value goes by depth, as the paper's: 0.1 up to 18 blocks, 1e-5 up to 24, and 1e-6 beyond.

    Branches are found before anything has run, by a pass over an input that is made up, in a Trainer as in
    ``lightning_eff.apply``; which they are is said. Lambda multiplies the tensors in which a branch ends: the weight and bias
    of its last map, or of the norm behind that, which keep their names; it is the ``branch_scale`` beside them, and does not
    decay. ``lightning_eff.export`` multiplies it in, and gives the plain module.

    Logged: ``branches``, how many are scaled.

    Args:
        init: the first value of each number of lambda; None goes by depth.
        branches: names of the weights in which residual branches end, or of their modules, or patterns of them, e.g.
            ``["blocks.*.proj.weight"]``; None looks for them, and ``[]`` is plain training.
        force: also act on a module that was loaded from a checkpoint, whose function it changes.

    Raises:
        ValueError: for other values; at setup or in ``apply``, where no residual branch is found, or where one ends in
            something that has no weight to be scaled or is used elsewhere too, or whose channels cannot be told; for a
            pretrained module without ``force``.

    Sources:
        Touvron et al. 2021, arXiv:2103.17239 (CaiT).
    """

    saves: ClassVar[str] = "steps: deep vision transformers train at all, and to a better end"
    paper: ClassVar[str] = "Touvron et al. 2021, arXiv:2103.17239"
    constraints: ClassVar[str] = "modules with residual branches"
    survey: ClassVar[Survey | None] = Survey(
        "initialisation: residual branches scaled by channel (LayerScale)", shen="4.3"
    )
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"init": Choice((None, 0.1, 1e-5))}, pointless)
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero: a step costs one product"
        " of two numbers more for each that ends a branch"
    )
    conflicts: ClassVar[Mapping[str, str]] = conflicts("LayerScale", zero=False)

    by_channel: ClassVar[bool] = True

    def __init__(
        self, init: float | None = None, *, branches: Sequence[str] | None = None, force: bool = False
    ) -> None:
        number = isinstance(init, int | float) and not isinstance(init, bool) and math.isfinite(init)
        if init is not None and not number:
            raise ValueError(f"LayerScale({init=}): expected a finite number, or None for one that goes by depth.")
        self.init = init
        self._take(branches, force)

    @override
    def begins_at(self, branches: int, blocks: int) -> float:
        return layer_scale(blocks) if self.init is None else self.init
