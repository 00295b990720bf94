"""SkipInit: a learnt factor on each residual branch that starts at zero or 1/sqrt(d) (De & Smith 2020).

The rule is ``x + alpha F(x)`` with alpha = 0, or with ``skip_init_scale``, which ``_scales.scaled.Scaled`` computes.
"""

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from typing_extensions import override

from lightning_eff._core._arguments.kinds import Either, Number, OneOf
from lightning_eff._core.search_space import Choice, SearchSpace, needs_blocks
from lightning_eff.model.initialization._given.names import Ends
from lightning_eff.model.initialization._scales.branch_scale import BranchScale, conflicts


def skip_init_scale(branches: int) -> float:
    """Return alpha = 1/sqrt(d), for d residual branches."""
    return 1.0 / math.sqrt(branches)


class SkipInit(BranchScale):
    """Multiply each residual branch by a learnt number that starts small: ``x + alpha F(x)``.

    BatchNorm makes the branches of a deep residual network small compared with the skip connection. Alpha does the same
    without a norm, so networks without norms train at depths of a thousand layers, at somewhat lower learning rates.
    The rule is that of :class:`ReZero`, but alpha may also start at 1/sqrt(d), with d the number of residual branches;
    then the variance of the residual stream grows at most e-fold.

    Use it for deep residual networks that you build without norms; norms that the module has stay. It costs one product
    per number of the layers that end a branch.

    Branches are found before training starts, by a pass on made-up inputs, in a Trainer as in
    ``lightning_eff.apply``; a log line lists them. Alpha multiplies the tensors in which a branch ends: the weight and
    bias of its last layer, or of the norm behind it. They keep their names; alpha is the parameter ``branch_scale``
    beside them and has no weight decay. ``lightning_eff.export`` multiplies it in and returns the plain module.

    Logged: ``branches``, how many branches are scaled.

    Args:
        alpha: the first value of the factor. "depth" is 1/sqrt(d).
        branches: the names or patterns of the weights in which residual branches end, or of their modules, such as
            ``["blocks.*.two.weight"]``. None finds them, and ``[]`` is plain training.
        force: whether to also change a module that was loaded from a checkpoint, which changes its function.

    Raises:
        ValueError: for a value of the wrong kind. At setup or in ``apply``, if no residual branch is found, one ends in
            something without a weight or in a weight that is used elsewhere too, or the module is pretrained and
            ``force`` is not set.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[SkipInit("depth")])

    References:
        De & Smith 2020, "Batch Normalization Biases Residual Blocks Towards the Identity Function in Deep Networks",
        arXiv:2002.10444.
    """

    saves = "steps: deep networks start as identities, with undamped gradients"
    paper = "De & Smith 2020, arXiv:2002.10444"
    search_space = SearchSpace({"alpha": Choice((0.0, "depth"))}, needs_blocks)
    conflicts: ClassVar[Mapping[str, str]] = conflicts("SkipInit", zero=True)

    def __init__(
        self,
        alpha: Annotated[float | Literal["depth"], Either(Number(), OneOf("depth"))] = 0.0,
        *,
        branches: Ends | None = None,
        force: bool = False,
    ) -> None:
        self.alpha = alpha
        self._take(branches, force)

    @override
    def begins_at(self, branches: int, blocks: int) -> float:
        return self.alpha if isinstance(self.alpha, int | float) else skip_init_scale(branches)
