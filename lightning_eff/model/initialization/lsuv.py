"""Layer-sequential unit variance: orthonormal layers, divided by the standard deviation of their outputs (Mishkin & Matas
2015).
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Number
from lightning_eff._core._needs.needs import Reasons
from lightning_eff._core._needs.offers import is_plain
from lightning_eff._core.passes import loss_of, unseen
from lightning_eff._core.search_space import Choice, SearchSpace, needs_matrices
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.initialization._given.attention import Attentions
from lightning_eff.model.initialization._maps import (
    SAME_WEIGHTS,
    UNSEEN,
    Map,
    OfMaps,
    Patterns,
    draw_orthogonal,
    listed,
)
from lightning_eff.model.initialization._once import TOGETHER

WHO = "LSUV"
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_grouped_mm")
_SMALLEST = 1e-12  # a variance below it counts as zero


class _Reached(Exception):
    """The layer's output is known, so the rest of the step need not run."""


class Output(TorchDispatchMode):
    """Records the first output of one weight's layer, whatever module calls it, and ends the step there."""

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
    """Start with layers whose outputs have variance 1: orthonormal matrices, each scaled by its output on the first batch.

    At the first batch of a fresh fit, linear layers and convolutions become orthonormal, as with
    :class:`OrthogonalInit`. Then each layer, from the first to the last, is divided by the standard deviation of its
    output on that batch, until the variance is within ``tolerance`` of 1. For this the step runs up to that layer, in
    evaluation mode. Queries, keys and values that one layer computes are scaled separately. Experts, and layers whose
    output does not vary, stay orthonormal.

    Use it for deep networks without norms. Each division costs up to one forward pass, which is counted. Under DDP the
    first process's batch decides, and all processes get its weights. A log line lists what was set.

    Logged: ``numbers``, how many numbers were set.

    Args:
        tolerance: the largest accepted distance of a variance from 1. 0.1 is the paper's.
        iterations: the largest number of divisions per layer.
        maps: the names or patterns of the weights to set. None sets all, and ``[]`` is plain training.
        attention: the weights of each kind of attention, where queries, keys and values of one layer are not
            recognised: names or patterns by role, with + between roles that one layer computes in equal parts, such as
            ``[{"query+key+value": "blocks.*.qkv", "output": "blocks.*.proj"}]``. None finds them.
        force: whether to also set weights that were loaded or trained before.

    Raises:
        ValueError: for a value out of range. At setup, for a pretrained module without ``force``. At the first batch,
            if there is no linear layer or convolution, or none that matches a given name.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[LSUV()])

    References:
        Mishkin & Matas 2015, "All You Need Is a Good Init", arXiv:1511.06422.
    """

    saves = "steps: no layer starts with signals that are too small or too large"
    paper = "Mishkin & Matas 2015, arXiv:1511.06422"
    search_space = SearchSpace({"tolerance": Choice((0.1, 0.02))}, needs_matrices)
    control = Control(
        "the baseline for as many seconds, including the passes at the start, with its learning rate decayed to zero"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("OrthogonalInit", "TFixup", "ZerO"), SAME_WEIGHTS),
        "ACTPrecision": UNSEEN,
    }
    needs_all: ClassVar[bool] = True
    refuses: ClassVar[Reasons] = TOGETHER

    def __init__(
        self,
        tolerance: Annotated[float, Number(above=0)] = 0.1,
        *,
        iterations: Annotated[int, Count()] = 10,
        maps: Patterns | None = None,
        attention: Attentions | None = None,
        force: bool = False,
    ) -> None:
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
            f"{WHO}: made {len(found)} weights orthonormal with outputs of variance 1: {listed([*found])}"
            + (f"; not scaled, because outputs do not vary or are not seen: {listed(self._left)}" if self._left else "")
        )
        return sum(parameters[name].numel() for name in found)

    def _scaled(self, session: Session, batch: Any, batch_idx: int, one: Map, weight: Tensor) -> bool:
        """Divide a layer until its outputs have variance 1, and return whether they do."""
        parts = [part.nonzero().flatten().to(weight.device) for part in one.parts] or [None]
        for turn in range(self.iterations + 1):
            output = _output(session, batch, batch_idx, weight)
            if one.stack or output is None:
                return False
            size = weight.shape[-1] if one.dim else weight.shape[0]
            if output.shape[-1] != size:  # a part of the weight was used by itself
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
        left = f"; {len(self._left)} layers are only orthonormal" if self._left else ""
        return f"set {self._numbers:,} numbers, in layers with outputs of variance 1{left}"


def _variance(output: Tensor, part: Tensor | None) -> float:
    return (output if part is None else output[..., part]).double().var(correction=0).item()


def _output(session: Session, batch: Any, batch_idx: int, weight: Tensor) -> Tensor | None:
    """Return a layer's output on a batch, with its channels last; None if it is not seen."""
    with unseen(session), torch.autocast(weight.device.type, enabled=False), Output(weight) as seen:
        try:
            loss_of(session, batch, batch_idx, whole=True)
        except _Reached:
            session.chain.cost.forward_passes += 1
    if seen.found is None or seen.channels_last:
        return seen.found
    return seen.found.movedim(1, -1)


def _as_first(session: Session, tensor: Tensor) -> None:
    """Give all processes the first one's values."""
    strategy = session.trainer.strategy
    if session.trainer.world_size > 1 and is_plain(strategy):
        torch.distributed.broadcast(tensor, 0)
    elif session.trainer.world_size > 1:  # the strategy has not yet moved the module to the device from which it sends
        tensor.copy_(strategy.broadcast(tensor.cpu()))
