"""Orthonormal maps: what goes in keeps its length, forward and backward (Saxe et al. 2013, arXiv:1312.6120).

The rule is ``_orthogonal.orthogonal``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.initialization._divided.writing import whole
from lightning_eff.model.initialization._maps import MAPS_ARE_RIVALS, UNSEEN, OfMaps, draw_orthogonal, listed, no_maps

WHO = "OrthogonalInit"


class OrthogonalInit(OfMaps):
    """Begin with orthonormal maps: a deep linear network then hands on lengths as they are.

    At the first batch of a fresh fit, one forward pass is looked through for the weights of linear maps and convolutions,
    whatever modules are called. Each becomes a random matrix of orthonormal rows or columns, whichever are fewer: of a
    convolution, (out, in k k); of one map that makes queries, keys and values, each of these apart; of experts and of a
    convolution's groups, each one. Biases, norms and embeddings, and heads that are tied to one, stay as they are.

    What was set is said at the start. All ranks draw the same.

    Logged: ``numbers``, how many were set.

    Args:
        gain: of each map, above 0: 1 suits linear ones, sqrt(2) those that a ReLU follows upon.
        maps: names of weights, or patterns of them, that are set alone; None for all, an empty list for plain training.
        attention: where queries, keys and values of one map are not told apart: for each kind of attention names or patterns
            of the weights that make its query, key and value, and of its output map; roles that one map makes in equal parts
            are joined by +, e.g. ``[{"query+key+value": "blocks.*.qkv", "output": "blocks.*.proj"}]``. None looks for them.
        force: also set weights that were loaded or trained before.

    Raises:
        ValueError: for a ``gain`` that is not above 0; at setup, for a pretrained module without ``force``; at the first batch,
            where there is no map, or none of a name that was given.

    Source:
        Saxe, McClelland, Ganguli 2013, arXiv:1312.6120.
    """

    saves: ClassVar[str] = "steps: deep networks hand on signals and gradients at their length"
    paper: ClassVar[str] = "Saxe et al. 2013, arXiv:1312.6120"
    survey: ClassVar[Survey | None] = Survey("initialisation: orthogonal", shen="4.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"gain": Choice((1.0, 2**0.5))}, no_maps)
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero: a step costs the same"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("LSUV", "TFixup", "ZerO"), MAPS_ARE_RIVALS),
        "ACTPrecision": UNSEEN,
    }

    def __init__(
        self,
        gain: float = 1.0,
        *,
        maps: Sequence[str] | None = None,
        attention: Sequence[Mapping[str, Any]] | None = None,
        force: bool = False,
    ) -> None:
        if not 0.0 < gain < float("inf"):
            raise ValueError(
                f"OrthogonalInit(gain={gain}): expected a number above 0, which lengths are multiplied by. 1 keeps them;"
                " maps=[] is plain training."
            )
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
            f"{WHO}: {len(found)} maps are orthonormal: {listed([*found])}"
            + (f"; queries, keys and values apart in: {listed(fused)}" if fused else "")
        )
        return sum(seen.parameters[name].numel() for name in found)

    @override
    def summary(self) -> str:
        return f"{self._numbers} numbers began in orthonormal maps of gain {self.gain:g}"
