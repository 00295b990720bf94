"""Layer-sequential unit variance: orthonormal maps, divided by the deviation of what they put out (Mishkin & Matas 2015)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_eff._core._needs.offers import is_plain
from lightning_eff._core.passes import loss_of, unseen
from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.initialization._maps import (
    MAPS_ARE_RIVALS,
    UNSEEN,
    Map,
    OfMaps,
    draw_orthogonal,
    listed,
    no_maps,
)

WHO = "LSUV"
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_grouped_mm")
_SMALLEST = 1e-12  # a variance below it is none


class _Reached(Exception):
    """The map's output is known: what comes after is not computed."""


class Output(TorchDispatchMode):
    """Within, what one weight's map puts out first, whatever module calls it; the step ends there."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.memory, self.found = weight.untyped_storage().data_ptr(), None
        self.channels_last = True

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in _PRODUCTS and any(self._is(value) for value in args):
            self.found, self.channels_last = output.detach(), name != "convolution"
            raise _Reached
        return output

    def _is(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage().data_ptr() == self.memory


class LSUV(OfMaps):
    """Begin with maps that put out numbers of variance 1: orthonormal ones, each scaled by what the first batch makes of it.

    At the first batch of a fresh fit, linear maps and convolutions become orthonormal, as by :class:`OrthogonalInit`. Then,
    from the first to the last, each is divided by the standard deviation of its output on that batch, again and again until
    the variance is within ``tolerance`` of 1; the step runs as far as that map, in evaluation mode. Queries, keys and values
    that one map makes are scaled each by its own. Under DDP that batch is the first process's, whose weights all then have.
    Maps whose output does not vary, and experts, stay orthonormal.

    What was set is said at the start. A pass is counted for each division.

    Logged: ``numbers``, how many were set.

    Args:
        tolerance: how far a variance may be from 1, above 0.
        iterations: how often a map is divided at most, at least 1.
        maps: names of weights, or patterns of them, that are set alone; None for all, an empty list for plain training.
        attention: where queries, keys and values of one map are not told apart: for each kind of attention names or patterns
            of the weights that make its query, key and value, and of its output map; roles that one map makes in equal parts
            are joined by +, e.g. ``[{"query+key+value": "blocks.*.qkv", "output": "blocks.*.proj"}]``. None looks for them.
        force: also set weights that were loaded or trained before.

    Raises:
        ValueError: for arguments outside of these ranges; at setup, for a pretrained module without ``force``; at the first
            batch, where there is no map, or none of a name that was given.

    Source:
        Mishkin & Matas 2015, "All you need is a good init", arXiv:1511.06422.
    """

    saves: ClassVar[str] = "steps: no layer begins with signals too small or too large"
    paper: ClassVar[str] = "Mishkin & Matas 2015, arXiv:1511.06422"
    survey: ClassVar[Survey | None] = Survey("initialisation: layer-sequential unit variance (LSUV)", shen="4.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"tolerance": Choice((0.1, 0.02))}, no_maps)
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero, the passes at the start included"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("OrthogonalInit", "TFixup", "ZerO"), MAPS_ARE_RIVALS),
        "ACTPrecision": UNSEEN,
    }
    needs_all: ClassVar[bool] = True

    def __init__(
        self,
        tolerance: float = 0.1,
        *,
        iterations: int = 10,
        maps: Sequence[str] | None = None,
        attention: Sequence[Mapping[str, Any]] | None = None,
        force: bool = False,
    ) -> None:
        if not 0.0 < tolerance < float("inf"):
            raise ValueError(
                f"LSUV(tolerance={tolerance}): expected how far a variance may be from 1, above 0. 0.1 is the source's."
            )
        if iterations < 1:
            raise ValueError(
                f"LSUV(iterations={iterations}): expected at least 1 division of each map. maps=[] is plain training."
            )
        self.tolerance, self.iterations = tolerance, iterations
        self._take(maps, attention, force)
        self._left: list[str] = []

    @override
    def initialize(self, session: Session, batch: Any, batch_idx: int) -> int | None:
        seen = self.look(session, batch, batch_idx)
        if seen is None:
            return None
        found, parameters = seen.maps, seen.parameters
        for name, one in found.items():
            draw_orthogonal(one, parameters[name].data, gain=1.0, generator=session.generator(WHO, name))
        self._left = [
            name
            for name, one in found.items()
            if not self._scaled(session, batch, batch_idx, one, parameters[name].data)
        ]
        for name in found:
            _as_first(session, parameters[name].data)
        rank_zero_info(
            f"{WHO}: {len(found)} maps are orthonormal, and put out a variance of 1: {listed([*found])}"
            + (
                f"; but for these, whose outputs do not vary or are not seen apart: {listed(self._left)}"
                if self._left
                else ""
            )
        )
        return sum(parameters[name].numel() for name in found)

    def _scaled(self, session: Session, batch: Any, batch_idx: int, one: Map, weight: Tensor) -> bool:
        """Divide a map until its outputs have variance 1; whether they do."""
        parts = [part.nonzero().flatten().to(weight.device) for part in one.parts] or [None]
        for turn in range(self.iterations + 1):
            output = _output(session, batch, batch_idx, weight)
            if one.stack or output is None:
                return False
            size = weight.shape[-1] if one.dim else weight.shape[0]
            if output.shape[-1] != size:  # a part of the weight is a map of its own
                return False
            variances = [_variance(output, part) for part in parts]
            if any(not _SMALLEST < v < float("inf") for v in variances):
                return False
            if all(abs(v - 1.0) < self.tolerance for v in variances):
                return True
            if turn < self.iterations:
                for part, v in zip(parts, variances, strict=True):  # W <- W / sqrt(Var(W x))
                    at = (slice(None),) * (weight.ndim - 1 if one.dim else 0) + (slice(None) if part is None else part,)
                    weight[at] = weight[at] / v**0.5
        return False

    @override
    def summary(self) -> str:
        left = f"; {len(self._left)} maps stayed orthonormal alone" if self._left else ""
        return f"{self._numbers} numbers began in maps that put out a variance of 1{left}"


def _variance(output: Tensor, part: Tensor | None) -> float:
    return (output if part is None else output[..., part]).double().var(correction=0).item()


def _output(session: Session, batch: Any, batch_idx: int, weight: Tensor) -> Tensor | None:
    """What the map puts out on a batch, its outputs last; None where it is not seen."""
    with unseen(session), torch.autocast(weight.device.type, enabled=False), Output(weight) as seen:
        try:
            loss_of(session, batch, batch_idx, whole=True)
        except _Reached:
            session.chain.cost.forward_passes += 1
    if seen.found is None or seen.channels_last:
        return seen.found
    return seen.found.movedim(1, -1)


def _as_first(session: Session, tensor: Tensor) -> None:
    """Give all processes the first one's."""
    strategy = session.trainer.strategy
    if session.trainer.world_size > 1 and is_plain(strategy):
        torch.distributed.broadcast(tensor, 0)
    elif session.trainer.world_size > 1:  # before the strategy moves the module to where its messages go from
        tensor.copy_(strategy.broadcast(tensor.cpu()))
