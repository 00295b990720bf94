"""DiLoCo: ranks train separately for many steps, then an outer optimizer steps by the mean of their changes (Douillard 2023).

With the ranks' weights ``theta_i`` after H inner steps from the same ``theta``, the outer step is Nesterov's:

    Delta = 1/N sum_i (theta - theta_i),    b <- mu b + Delta,    theta <- theta - eta (Delta + mu b)
"""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Either, Fraction, Number, OneOf
from lightning_eff._core.search_space import Choice, SearchSpace, needs_processes
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.strategies._communication.codecs import BFloat16Codec, Codec, QuantizedCodec
from lightning_eff.strategies._communication.exchange import (
    Residuals,
    Traffic,
    as_real,
    mean_of_matrices,
    plain_mean,
    redistribute,
)
from lightning_eff.strategies._communication.gathering import gather_on_first
from lightning_eff.strategies._communication.reference import ApartFromReference, differences, on_devices

WHO = "DiLoCo"
_BUCKET = 1024  # elements that share a scale
_CODECS: Mapping[str, Callable[[], Codec]] = {
    "bfloat16": BFloat16Codec,
    "int8": lambda: QuantizedCodec(8, _BUCKET),
    "int4": lambda: QuantizedCodec(4, _BUCKET),
}


@torch.no_grad()
def outer_step(theta: Tensor, delta: Tensor, momentum: Tensor, *, lr: float, mu: float) -> Tensor:
    """Return the outer weights after a step of Nesterov's momentum, in the dtype of ``delta``.

    Args:
        theta: the weights with which the period began, of any shape.
        delta: the mean outer gradient, in the same shape.
        momentum: ``b`` in the same shape, which is updated in place.
        lr: eta, the outer learning rate.
        mu: the outer momentum.
    """
    momentum.mul_(mu).add_(delta)
    return theta.to(delta.dtype) - lr * (delta + mu * momentum)


class DiLoCo(ApartFromReference):
    """Train DDP ranks separately for ``interval`` steps, then step an outer Nesterov optimizer by the mean of their changes.

    Each rank trains with the module's own optimizer (the inner one), whose state stays on the rank. After ``interval``
    steps, the outer gradient is the mean over ranks of the weights at the start of the period minus those at its end. The
    outer optimizer, SGD with Nesterov momentum, then moves all ranks to the same new weights. With ``outer_lr=1`` and
    ``outer_momentum=0`` this is :class:`LocalSGD` up to rounding. The first ``warmup_steps`` steps are plain DDP. The
    paper starts from a pretrained model.

    Use it where the network between ranks is so slow that they can only exchange weights every few hundred steps. An outer
    step sends as many bytes as the gradients of one step of DDP in float32, so ``1 / interval`` of DDP's traffic remains.
    ``outer_dtype`` sends fewer: about 1/2 with bfloat16, 1/4 with int8 and 1/8 with int4. Matrices are then rounded
    twice, each rank's change and the mean, with error feedback: each rounding error is added to the next outer gradient.
    int8 and int4 round at random without bias, with a scale per 1024 elements. bfloat16 rounds to nearest. Vectors, such as
    norms and biases, are sent in full. All ranks receive the same bytes, so their weights are equal bit for bit.

    Each rank holds two more copies of the trained weights (the start of the period and the outer momentum), and with
    a smaller ``outer_dtype`` up to 1.5 more in float32 (the rounding errors).

    Between outer steps, the module holds the mean over ranks during validation, and so does every checkpoint's
    ``state_dict``, which loads into the plain module. The same holds if the fit ends between outer steps, so let the
    number of steps be a multiple of ``interval``. The callback's state holds the outer momentum, each rank's optimizer state
    and rounding errors and, between outer steps, the weights at the start of the period and each rank's own. Resuming with
    the same number of ranks is bit for bit the uninterrupted run. With another number, all ranks start from the mean
    and from the optimizer state of rank 0, and the outer optimizer goes on.

    Gradient clipping acts on each rank's own gradient. BatchNorm statistics are those of rank 0, as in DDP, which still
    sends buffers at every step. On one process this is plain training; :class:`Lookahead` steps away from a single rank's
    weights. If another technique overwrites weights, as growth does, ranks average their weights once, and the outer
    momentum starts again. The callback logs ``local_steps``, ``averagings`` (the number of outer steps) and ``sent_bytes``
    (bytes that a rank sent in the last outer step, with ring and pairwise algorithms).

    Args:
        interval: H, the number of inner steps between two outer steps. 500 is the paper's.
        outer_lr: eta, the outer learning rate, above 0. 0.7 is the paper's.
        outer_momentum: mu, the outer momentum, in [0, 1). 0.9 is the paper's.
        outer_dtype: how outer gradients are sent. "float32" sends float64 parameters as float64.
        warmup_steps: the number of plain DDP steps at the start of the run. ``math.inf`` is plain DDP throughout.

    Raises:
        ValueError: for a value out of range. At setup, under a strategy other than DDP or a single device, with a
            communication hook in DDP, or with a gradient scaler, because ranks would skip different steps.

    Example:
        >>> trainer = L.Trainer(max_steps=50_000, callbacks=[DiLoCo(interval=500, outer_dtype="int8")])

    References:
        Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv:2311.08105.
        Outer gradients of few bits: Douillard et al. 2025, "Streaming DiLoCo with overlapping communication",
        arXiv:2501.18512. They use a floating-point format of 4 bits.
    """

    saves = "communication: one exchange of weights every `interval` steps, of 4 to 32 bits per weight"
    paper = "Douillard et al. 2023, arXiv:2311.08105"
    constraints = "DDP; checkpoints up to N ranks as large; no fp16 scaler; on one process it is plain training"
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"interval": Choice((50, 100, 500)), "outer_lr": Choice((0.3, 0.7, 1.0)), "outer_momentum": Choice((0.8, 0.9))},
        needs_processes,
    )
    control = Control(
        "LocalSGD with the same interval, which communicates as much without an outer optimizer; and the baseline under DDP"
        " for the same time"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **ApartFromReference.conflicts,
        "DynamicAveraging": "both decide when ranks average their weights",
    }

    def __init__(
        self,
        interval: Annotated[int, Count()] = 500,
        *,
        outer_lr: Annotated[float, Number(above=0)] = 0.7,
        outer_momentum: Annotated[float, Fraction(below=1)] = 0.9,
        outer_dtype: Literal["float32", "bfloat16", "int8", "int4"] = "float32",
        warmup_steps: Annotated[int | float, Either(Count(at_least=0), OneOf(math.inf))] = 0,
    ) -> None:
        self.outer_lr, self.outer_momentum, self.outer_dtype = outer_lr, outer_momentum, outer_dtype
        self._take(interval, warmup_steps)

    @override
    def _reset(self) -> None:
        super()._reset()
        self._momentum: dict[str, Tensor] = {}  # b, by parameter
        self._residuals = Residuals()
        self._sent = 0.0

    @override
    @torch.no_grad()
    def meet(self, session: Session) -> None:
        if not self._several(session):
            return
        parameters = self._parameters(session)
        new = {name: p for name, p in parameters.items() if name not in self._reference and p.numel()}
        self.mean(session, new)
        reference = {name: old for name, old in self._reference.items() if name in parameters}
        for name, delta in self._outer_gradients(session, differences(reference, parameters)).items():
            momentum = self._momentum.setdefault(name, torch.zeros_like(delta))
            theta = outer_step(reference[name], delta, momentum, lr=self.outer_lr, mu=self.outer_momentum)
            as_real(parameters[name].detach()).copy_(theta)
        self._averagings += 1
        self._reference = {}

    def _outer_gradients(self, session: Session, deltas: dict[str, Tensor]) -> dict[str, Tensor]:
        """Replace this rank's changes by their means over all ranks, and return them."""
        traffic = Traffic()
        if not deltas:
            pass
        elif self.outer_dtype == "float32":
            plain_mean([*deltas.values()], group=None, traffic=traffic)
        else:
            mean_of_matrices(
                deltas,
                _CODECS[self.outer_dtype](),
                residuals=self._residuals,
                seed=lambda key: session.generator(WHO, key, self._steps, session.rank).initial_seed(),
                traffic=traffic,
            )
        self._sent = traffic.sent
        return deltas

    @override
    def on_blocks_changed(self, session: Session) -> None:
        super().on_blocks_changed(session)
        self._momentum, self._residuals = {}, Residuals()

    # -- reports and state

    @override
    def _restore(self, session: Session, saved: dict[str, Any]) -> None:
        super()._restore(session, saved)
        self._momentum, self._sent = on_devices(session, saved["momentum"]), saved["sent"]
        if self.outer_dtype != "float32" and saved["residuals"]:
            ranks = [Residuals(*kept) for kept in saved["residuals"]]
            mine = redistribute(ranks, session.rank, session.trainer.world_size)
            self._residuals = Residuals(on_devices(session, mine.worker), on_devices(session, mine.server))

    @override
    def state_dict(self) -> dict[str, Any]:
        found = {
            **super().state_dict(),
            "momentum": on_devices(None, self._momentum),
            "sent": self._sent,
            "residuals": [],
        }
        session = self._session or self._past
        if session is not None and self._residuals.worker:
            kept = self._residuals.to("cpu")
            ranks = gather_on_first((kept.worker, kept.server), session.trainer.strategy.root_device)
            found["residuals"] = [list(rank) for rank in ranks or ()]
        return found

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "sent_bytes": self._sent}

    @override
    def summary(self) -> str:
        return f"{self.local_steps} of {self._steps} steps were local, with {self._averagings} outer steps"
