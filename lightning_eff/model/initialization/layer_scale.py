"""LayerScale: a small learnt factor for each channel of a residual branch's output (Touvron et al. 2021).

The rule is ``x + diag(lambda) F(x)`` with ``layer_scale`` for the first lambda, which ``_scales.scaled.Scaled``
computes.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from typing_extensions import override

from lightning_eff._core._arguments.kinds import Alias, Number
from lightning_eff._core.search_space import Choice, SearchSpace, needs_blocks
from lightning_eff.model.initialization._given.names import Ends
from lightning_eff.model.initialization._scales.branch_scale import BranchScale, conflicts


def layer_scale(blocks: int) -> float:
    """Return the first lambda for a transformer of so many blocks (CaiT, section 2.1)."""
    return 0.1 if blocks <= 18 else 1e-5 if blocks <= 24 else 1e-6


class LayerScale(BranchScale):
    """Scale each channel of each residual branch by a learnt number that starts small: ``x + diag(lambda) F(x)``.

    Blocks start close to the identity, yet all weights have gradients, and each channel learns its own scale. By
    default the first value depends on the depth, as in the paper: 0.1 up to 18 blocks, 1e-5 up to 24, and 1e-6 beyond.

    Use it for deep vision transformers. It costs one product per number of the layers that end a branch.

    Branches are found before training starts, by a pass on made-up inputs, in a Trainer as in
    ``lightning_eff.apply``; a log line lists them. Lambda multiplies the tensors in which a branch ends: the weight and
    bias of its last layer, or of the norm behind it. They keep their names; lambda is the parameter ``branch_scale``
    beside them and has no weight decay. ``lightning_eff.export`` multiplies it in and returns the plain module.

    Logged: ``branches``, how many branches are scaled.

    Args:
        init: the first value of lambda. None chooses it by depth. Also accepted as ``init_values``.
        branches: the names or patterns of the weights in which residual branches end, or of their modules, such as
            ``["blocks.*.proj.weight"]``. None finds them, and ``[]`` is plain training.
        force: whether to also change a module that was loaded from a checkpoint, which changes its function.

    Raises:
        ValueError: for a value of the wrong kind. At setup or in ``apply``, if no residual branch is found, one ends in
            something without a weight, in a weight that is used elsewhere too or in unknown channels, or the module is
            pretrained and ``force`` is not set.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[LayerScale(1e-5)])

    References:
        Touvron et al. 2021, "Going Deeper with Image Transformers" (CaiT), arXiv:2103.17239.
    """

    saves = "steps: deep vision transformers become trainable, and end better"
    paper = "Touvron et al. 2021, arXiv:2103.17239"
    search_space = SearchSpace({"init": Choice((None, 0.1, 1e-5))}, needs_blocks)
    conflicts: ClassVar[Mapping[str, str]] = conflicts("LayerScale", zero=False)

    by_channel: ClassVar[bool] = True

    def __init__(
        self,
        init: Annotated[float | None, Number(), Alias("init_values")] = None,
        *,
        branches: Ends | None = None,
        force: bool = False,
    ) -> None:
        self.init = init
        self._take(branches, force)

    @override
    def begins_at(self, branches: int, blocks: int) -> float:
        return layer_scale(blocks) if self.init is None else self.init
