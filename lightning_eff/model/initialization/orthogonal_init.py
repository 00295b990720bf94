"""Orthogonal initialization: layers keep the length of signals, forward and backward (Saxe et al. 2013, arXiv:1312.6120).

The rule is ``_maps.orthogonal``.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Number
from lightning_eff._core.search_space import Choice, SearchSpace, needs_matrices
from lightning_eff._core.session import Session
from lightning_eff.model.initialization._divided.writing import whole
from lightning_eff.model.initialization._given.attention import Attentions
from lightning_eff.model.initialization._maps import SAME_WEIGHTS, UNSEEN, OfMaps, Patterns, draw_orthogonal, listed

WHO = "OrthogonalInit"


class OrthogonalInit(OfMaps):
    """Start linear layers and convolutions from random orthonormal matrices.

    At the first batch of a fresh fit, one forward pass finds the weights of linear layers and convolutions. Each
    becomes a random matrix with orthonormal rows or columns, whichever are fewer. A convolution counts as (out, in k
    k). Queries, keys and values that one layer computes are separate matrices, and so are experts and the groups of a
    convolution. Biases, norms, embeddings and heads tied to an embedding stay unchanged.

    Use it for deep networks without norms, in which signals would shrink or grow from layer to layer. It costs one
    forward pass. All ranks draw the same numbers, and a log line lists what was set.

    Logged: ``numbers``, how many numbers were set.

    Args:
        gain: the factor on each matrix. 1 suits linear layers, and sqrt(2) layers followed by a ReLU.
        maps: the names or patterns of the weights to set. None sets all, and ``[]`` is plain training.
        attention: the weights of each kind of attention, where queries, keys and values of one layer are not
            recognised: names or patterns by role, with + between roles that one layer computes in equal parts, such as
            ``[{"query+key+value": "blocks.*.qkv", "output": "blocks.*.proj"}]``. None finds them.
        force: whether to also set weights that were loaded or trained before.

    Raises:
        ValueError: for a value out of range. At setup, for a pretrained module without ``force``. At the first batch,
            if there is no linear layer or convolution, or none that matches a given name.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[OrthogonalInit(gain=2**0.5)])

    References:
        Saxe, McClelland, Ganguli 2013, "Exact Solutions to the Nonlinear Dynamics of Learning in Deep Linear Neural
        Networks", arXiv:1312.6120.
    """

    saves = "steps: deep networks keep the length of signals and gradients"
    paper = "Saxe et al. 2013, arXiv:1312.6120"
    search_space = SearchSpace({"gain": Choice((1.0, 2**0.5))}, needs_matrices)
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("LSUV", "TFixup", "ZerO"), SAME_WEIGHTS),
        "ACTPrecision": UNSEEN,
    }

    def __init__(
        self,
        gain: Annotated[float, Number(above=0, hint="1 keeps lengths.")] = 1.0,
        *,
        maps: Patterns | None = None,
        attention: Attentions | None = None,
        force: bool = False,
    ) -> None:
        self.gain = gain
        self._take(maps, attention, force)

    @override
    def initialize(self, session: Session, batch: Any, batch_idx: int) -> int | None:
        seen = self.look(session, batch, batch_idx)
        if seen is None:
            return None
        found = seen.maps
        for name, one in found.items():
            with whole(seen.parameters[name]) as weight:
                draw_orthogonal(one, weight, gain=self.gain, generator=session.generator(WHO, name))
        fused = [name for name, one in found.items() if one.parts]
        rank_zero_info(
            f"{WHO}: made {len(found)} weights orthonormal: {listed([*found])}"
            + (f"; with separate queries, keys and values in: {listed(fused)}" if fused else "")
        )
        return sum(seen.parameters[name].numel() for name in found)

    @override
    def summary(self) -> str:
        return f"set {self._numbers:,} numbers, in orthonormal matrices of gain {self.gain:g}"
