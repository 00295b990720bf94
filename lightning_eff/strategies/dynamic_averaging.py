"""Dynamic averaging: ranks average their weights when one has moved too far from those they had in common (Kamp et al. 2018).

With ``r`` the weights of the last averaging, every b local steps: if ``||w_i - r||^2 > Delta`` on any rank i, then
``w_i <- (1/N) sum_j w_j`` on all ranks. As long as no rank exceeds it, ``1/N sum_i ||w_i - mean_j w_j||^2 <= Delta``.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Either, Number, OneOf
from lightning_eff._core.search_space import Choice, SearchSpace, needs_processes
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.strategies._communication.reference import ApartFromReference, differences


@torch.no_grad()
def squared_norm(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the squared norm over all tensors (float32 or float64) together, a float32 scalar on the first one's device."""
    norms = [torch.linalg.vector_norm(x).float() for x in tensors.values()]
    return torch.stack([n.to(norms[0].device) for n in norms]).square().sum()


class DynamicAveraging(ApartFromReference):
    """Average the weights of DDP ranks only when one of them has moved too far from the weights they last had in common.

    The first ``warmup_steps`` steps are plain DDP. After that, each rank steps with its own gradients, optimizer and
    optimizer state. Every ``interval`` local steps, each rank computes the squared distance of its weights from those of the
    last averaging. If the largest distance exceeds ``threshold``, all ranks average their weights. So ranks exchange
    weights often while they move fast, and rarely later. With ``threshold=0`` this is :class:`LocalSGD`.

    Use it where steps wait for the network, and where a fixed interval would be too rare at the start or too frequent at
    the end. A check sends 4 bytes. An averaging sends as many bytes as the gradients of one step. Each rank holds
    one more copy of the trained weights. The paper averages only some of the ranks if that is enough. Here all ranks
    average, because a collective exchange has all of them take part.

    The distance grows with the size of the model and the learning rate, so ``threshold`` has no default. Log ``distance``
    in a short run, and start with a value that it reaches within 10 to 50 steps.

    The module holds the mean over ranks during validation and after the fit, and so does every checkpoint's
    ``state_dict``. It loads into the plain module and resumes in plain DDP. The callback's state holds each rank's
    optimizer state and, between averagings, each rank's weights and the weights of the last averaging. Resuming with the
    same number of ranks is bit for bit the uninterrupted run. With another number, all ranks start from the mean and
    from the optimizer state of rank 0.

    Gradient clipping acts on each rank's own gradient. BatchNorm statistics are those of rank 0, as in DDP, which still
    sends buffers at every step. On one process this is plain training. If another technique overwrites weights, as growth
    does, the next check averages. The callback logs ``local_steps``, ``averagings`` and ``distance`` (the largest
    squared distance at the last check).

    Args:
        threshold: Delta, the squared distance above which ranks average, at least 0. ``math.inf`` averages only at
            the end of the fit.
        interval: b, the number of local steps between two checks.
        warmup_steps: the number of plain DDP steps at the start of the run. ``math.inf`` is plain DDP throughout.

    Raises:
        ValueError: for a value out of range. At setup, under a strategy other than DDP or a single device, with a
            communication hook in DDP, or with a gradient scaler, because ranks would skip different steps.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[DynamicAveraging(threshold=0.5, warmup_steps=1000)])

    References:
        Kamp et al. 2018, "Efficient Decentralized Deep Learning by Dynamic Model Averaging", arXiv:1807.03210.
    """

    saves = "communication: ranks exchange weights only when one has moved far"
    paper = "Kamp et al. 2018, arXiv:1807.03210"
    constraints = "DDP; checkpoints up to N ranks as large; no fp16 scaler; on one process it is plain training"
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"threshold": Choice((0.01, 0.1, 1.0, 10.0)), "interval": Choice((1, 10))}, needs_processes
    )
    control = Control("LocalSGD with an interval that averages as often; and the baseline under DDP for the same time")
    conflicts: ClassVar[Mapping[str, str]] = ApartFromReference.conflicts

    def __init__(
        self,
        threshold: Annotated[float, Either(Number(at_least=0), OneOf(math.inf))],
        *,
        interval: Annotated[int, Count()] = 10,
        warmup_steps: Annotated[int | float, Either(Count(at_least=0), OneOf(math.inf))] = 0,
    ) -> None:
        self.threshold = threshold
        self._take(interval, warmup_steps)

    @override
    def _reset(self) -> None:
        super()._reset()
        self._met = 0  # local steps until the last averaging
        self._distance = 0.0

    @property
    @override
    def _apart(self) -> bool:
        return self.local_steps > self._met

    @override
    def due(self, session: Session) -> bool:
        if self.local_steps % self.interval or not self._several(session):
            return False
        parameters = self._parameters(session)
        if self._reference.keys() != {name for name, p in parameters.items() if p.numel()}:
            return True  # other weights are trained now, or another technique has overwritten them
        distance = squared_norm(differences(self._reference, parameters)).nan_to_num(nan=math.inf)
        dist.all_reduce(distance, op=dist.ReduceOp.MAX)
        self._distance = float(distance)
        return self._distance > self.threshold

    @override
    def _average(self, session: Session) -> None:
        super()._average(session)
        self._met, self._reference = self.local_steps, {}

    # -- reports and state

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "met": self._met, "distance": self._distance}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._pending is not None:
            self._met, self._distance = state_dict["met"], state_dict["distance"]

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "distance": self._distance}

    @override
    def summary(self) -> str:
        return (
            f"{self.local_steps} of {self._steps} steps were local, with {self._averagings} averagings of the weights, the"
            f" last check at a squared distance of {self._distance:.3g}"
        )
