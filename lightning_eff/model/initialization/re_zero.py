"""ReZero: each residual branch begins at zero times itself, and how much of it is added is learnt (Bachlechner et al. 2020).

The rule is ``x + alpha F(x)`` with alpha = 0, which ``_scales.scaled.Scaled`` computes.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from lightning_eff._core.search_space import SearchSpace, Survey
from lightning_eff._core.technique import Control
from lightning_eff.model.initialization._scales.branch_scale import BranchScale, conflicts, pointless


class ReZero(BranchScale):
    """Learn how much of each residual branch is added, from nothing: ``x + alpha F(x)`` with alpha = 0.

    The network begins as its skips, of whatever depth: activations and gradients pass as they are, and depth is learnt. In the
    first step only the alphas, one number for each branch, get gradients from the branches; then all does. The paper takes the
    norms of a transformer out, which such a network can do without; here they stay where the module has them.

    Branches are found before anything has run, by a pass over an input that is made up, in a Trainer as in
    ``lightning_eff.apply``; which they are is said. Alpha multiplies the tensors in which a branch ends: the weight and bias
    of its last map, or of the norm behind that, which keep their names; it is the ``branch_scale`` beside them, and its weight
    does not decay. ``lightning_eff.export`` multiplies it in, and gives the plain module.

    Logged: ``branches``, how many are scaled.

    Args:
        branches: names of the weights in which residual branches end, or of their modules, or patterns of them, e.g.
            ``["blocks.*.proj.weight"]``; None looks for them, and ``[]`` is plain training.
        force: also act on a module that was loaded from a checkpoint, whose function it changes.

    Raises:
        ValueError: for other values; at setup or in ``apply``, where no residual branch is found, or where one ends in
            something that has no weight to be scaled or is used elsewhere too; for a pretrained module without ``force``.

    Sources:
        Bachlechner et al. 2020, arXiv:2003.04887.
    """

    saves: ClassVar[str] = "steps: deep networks begin as shallow ones, with their gradients whole"
    paper: ClassVar[str] = "Bachlechner et al. 2020, arXiv:2003.04887"
    constraints: ClassVar[str] = "modules with residual branches"
    survey: ClassVar[Survey | None] = Survey(
        "initialisation: residual branches with a learnt scale (ReZero)", shen="4.3"
    )
    search_space: ClassVar[SearchSpace | None] = SearchSpace({}, pointless)
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero: a step costs one product"
        " of two numbers more for each that ends a branch"
    )
    conflicts: ClassVar[Mapping[str, str]] = conflicts("ReZero", zero=True)

    def __init__(self, *, branches: Sequence[str] | None = None, force: bool = False) -> None:
        self._take(branches, force)
