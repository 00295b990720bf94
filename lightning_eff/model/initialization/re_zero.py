"""ReZero: a learnt factor on each residual branch that starts at zero (Bachlechner et al. 2020).

The rule is ``x + alpha F(x)`` with alpha = 0, which ``_scales.scaled.Scaled`` computes.
"""

from collections.abc import Mapping
from typing import ClassVar

from lightning_eff._core.search_space import SearchSpace, needs_blocks
from lightning_eff.model.initialization._given.names import Ends
from lightning_eff.model.initialization._scales.branch_scale import BranchScale, conflicts


class ReZero(BranchScale):
    """Multiply each residual branch by a learnt number that starts at zero: ``x + alpha F(x)``.

    Every block starts as the identity, so activations and gradients pass through a network of any depth unchanged. In
    the first step only the alphas, one number per branch, get gradients from the branches; afterwards all weights do.

    Use it for deep residual networks and transformers. It costs one product per number of the layers that end a branch.
    The paper also removes the norms of a transformer; here they stay.

    Branches are found before training starts, by a pass on made-up inputs, in a Trainer as in
    ``lightning_eff.apply``; a log line lists them. Alpha multiplies the tensors in which a branch ends: the weight and
    bias of its last layer, or of the norm behind it. They keep their names; alpha is the parameter ``branch_scale``
    beside them and has no weight decay. ``lightning_eff.export`` multiplies it in and returns the plain module.

    Logged: ``branches``, how many branches are scaled.

    Args:
        branches: the names or patterns of the weights in which residual branches end, or of their modules, such as
            ``["blocks.*.proj.weight"]``. None finds them, and ``[]`` is plain training.
        force: whether to also change a module that was loaded from a checkpoint, which changes its function.

    Raises:
        ValueError: for a value of the wrong kind. At setup or in ``apply``, if no residual branch is found, one ends in
            something without a weight or in a weight that is used elsewhere too, or the module is pretrained and
            ``force`` is not set.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[ReZero()])

    References:
        Bachlechner et al. 2020, "ReZero is All You Need: Fast Convergence at Large Depth", arXiv:2003.04887.
    """

    saves = "steps: deep networks start as identities, with undamped gradients"
    paper = "Bachlechner et al. 2020, arXiv:2003.04887"
    search_space = SearchSpace({}, needs_blocks)
    conflicts: ClassVar[Mapping[str, str]] = conflicts("ReZero", zero=True)

    def __init__(self, *, branches: Ends | None = None, force: bool = False) -> None:
        self._take(branches, force)
