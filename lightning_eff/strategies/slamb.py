"""SLAMB: LAMB whose ranks send a random tenth of their momenta per step (Xu et al. 2023, ICML).

On each of N ranks, for a tensor w with the rank's own gradient g, and the same random mask M on all ranks:

    m = b1 m + (1 - b1) g
    v = b2 v + (1 - b2) g^2
    r = b3 r                                  # freshness of each element
    m = mean of m over ranks,  r = 1          # where M is
    u = m^ / (sqrt(v^) + eps) + lambda w
    w = w - (r phi(M) + (1 - r) phi(not M) / sqrt(N)) lr u

with ``phi(S) = |w_S| / |u_S|`` over a set of elements, and ``^`` for division by ``1 - b^t``.
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Each, Fraction, Number
from lightning_eff._core._optim.combined import CombinedOptimizer, Following, Origins, group_of
from lightning_eff._core._optim.scheduled import optimizers_of, put_around, reference_rates, schedulers_of
from lightning_eff._core.optimizers import rewrite_configured
from lightning_eff._core.search_space import Choice, SearchSpace, needs_processes
from lightning_eff._core.session import Session
from lightning_eff._core.technique import LOCAL_STEPS, Control
from lightning_eff.strategies._communication.apart import Apart
from lightning_eff.strategies._communication.exchange import Traffic
from lightning_eff.strategies._communication.sparse_lamb import SparseLamb

WHO = "SLAMB"
_SOURCES = ("Adam", "AdamW", "LAMB")
_FORMS = ("amsgrad", "maximize", "differentiable")


class SLAMB(Apart):
    """Train DDP ranks with LAMB, and exchange only a random part of the momenta in each step.

    Gradients stay on their rank. Each rank updates its own moments, and each step averages the first moments of the same
    random elements over ranks, a tenth of them by default. Elements that were averaged recently count as fresh. Fresh elements
    use LAMB's trust ratio over the averaged elements. Stale elements use a separate ratio, and a learning rate that is
    smaller by sqrt(N) for N ranks. As its freshness decays, an element moves from the first rate to the second. Every
    ``interval`` steps, ranks average their weights. Vectors and tensors below ``min_size`` elements are averaged whole in
    every step.

    It replaces the module's optimizer, which must be Adam, AdamW or :class:`LAMB`. It keeps its parameter groups, lr, betas,
    eps, weight decay and learning rate schedulers. Weight decay is part of the update, as in LAMB. **Learning rates are
    LAMB's**, because a trust ratio scales each step. On one process, and in the first ``warmup_steps`` steps, in which DDP
    averages gradients, the update is LAMB's for all tensors, with trust ratios within ``trust_range``.

    Use it for large batches where steps wait for the network. Each step sends ``ratio`` of DDP's bytes, and an averaging
    of the weights as many as one step of DDP. Drawing masks and gathering elements takes time on each rank, and each rank
    holds one more copy of the weights (the freshness). The exchange begins after the backward pass, so the two do not
    overlap. The paper reports BERT and Swin at batches of thousands; its effect is not measured here.

    Between averagings, the module holds the mean over ranks during validation and after the fit, and so does every
    checkpoint's ``state_dict``. It loads into the plain module and resumes in plain DDP, with the moments of rank 0. The
    callback's state holds each rank's optimizer state and, between averagings, each rank's weights, so a checkpoint grows up
    to N times. Resuming with the same number of ranks is bit for bit the uninterrupted run. With another number, all ranks
    start from the mean of the weights and from the optimizer state of rank 0.

    Gradient clipping acts on each rank's own gradient. BatchNorm statistics are those of rank 0, as in DDP, which still
    sends buffers at every step. It follows the authors' code, with these differences. Ranks average weights at the end of
    each interval instead of after its first step. The weight decay is in the norms, as in LAMB and in the authors' simpler
    optimizer. The callback logs ``local_steps``, ``averagings`` and ``sent_bytes`` (the bytes that this rank sent in the last
    step for momenta and weights, with a ring).

    Args:
        ratio: the fraction of elements that is averaged in each step. 0 is plain training with the module's own optimizer.
        interval: the number of steps between two averagings of the weights. The authors advise 100 for large data sets and 50
            for small ones.
        decay: b3, the decay factor of freshness per step, below 1. The authors tune it first.
        warmup_steps: the number of steps at the start of the run in which DDP averages gradients.
        min_size: the number of elements below which a tensor is averaged whole.
        trust_range: the smallest and the largest trust ratio.

    Raises:
        ValueError: for a value out of range. At setup, under a strategy other than DDP or a single device, with a
            communication hook in DDP, with a gradient scaler, or for another optimizer.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[SLAMB(0.1, interval=100)])

    References:
        Xu et al. 2023, "SLAMB: Accelerated Large Batch Training with Sparse Communication", ICML,
        PMLR 202:38801-38825, https://openreview.net/pdf?id=cMmjBH5LqW.
    """

    saves = "communication: a tenth of DDP's bytes per step, and one exchange of weights every `interval` steps"
    paper = "Xu et al. 2023, PMLR 202"
    constraints = "DDP; Adam, AdamW or LAMB; checkpoints up to N ranks as large; no fp16 scaler"
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"ratio": Choice((0.05, 0.1, 0.2)), "decay": Choice((0.95, 0.99)), "interval": Choice((50, 100))},
        needs_processes,
    )
    control = Control(
        "LAMB with the same settings under DDP for the same time, and the baseline under DDP for the same time"
    )
    sparse_gradients: ClassVar[bool] = False
    neutral_at: ClassVar[Mapping[str, Any]] = {"ratio": 0.0}
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys((name for name in LOCAL_STEPS if name != WHO), "both decide when ranks average their weights"),
        **dict.fromkeys(
            ("EightBitOptimizer", "ReplaceOptimizer", "ScheduleFree"), "both replace the module's optimizer"
        ),
        **dict.fromkeys(
            ("OptimizerOffload", "StochasticRoundingBF16"),
            "it needs an optimizer of torch.optim, and SLAMB brings its own",
        ),
        "OptimizerInBackward": "it steps one tensor at a time, and SLAMB exchanges the momenta of all together",
        "LatestWeightAveraging": "it would take snapshots of each rank's own weights, and only those of rank 0 would be saved",
    }

    def __init__(
        self,
        ratio: Annotated[float, Fraction()] = 0.1,
        *,
        interval: Annotated[int, Count()] = 100,
        decay: Annotated[float, Fraction(below=1)] = 0.99,
        warmup_steps: Annotated[int, Count(at_least=0)] = 0,
        min_size: Annotated[int, Count()] = 9000,
        trust_range: Annotated[tuple[float, float], Each(Number(at_least=0), length=2)] = (0.01, 1000.0),
    ) -> None:
        if trust_range[0] > trust_range[1]:
            raise ValueError(f"{WHO}({trust_range=}): the smallest ratio is above the largest. Exchange them.")
        self.ratio, self.decay, self.min_size = ratio, decay, min_size
        self.trust_range = (float(trust_range[0]), float(trust_range[1]))
        self._take(interval, warmup_steps)

    @override
    def _reset(self) -> None:
        super()._reset()
        self._lambs: list[SparseLamb] = []
        self._sent = 0.0

    # -- the optimizer

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        if session.fitting and state is None:
            raise ValueError(
                f"{WHO}: the checkpoint was saved without it, with the state of another optimizer. Resume without {WHO}, or"
                " start a new fit from the checkpoint's weights."
            )

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        configure = session.module.configure_optimizers

        def configure_optimizers() -> Any:
            configured = configure()
            if not optimizers_of(configured):
                raise ValueError(
                    f"{WHO}: {type(session.module).__name__}.configure_optimizers returned no optimizer. Return"
                    f" torch.optim.AdamW, or remove {WHO}."
                )
            schedulers = schedulers_of(configured)
            return rewrite_configured(configured, lambda own: self._replaced(session, own, schedulers))

        session.patches.set(session.module, "configure_optimizers", configure_optimizers)

    def _replaced(self, session: Session, own: Optimizer, schedulers: list[Any]) -> Optimizer:
        _check_source(own)
        around = [one for one in schedulers if getattr(one, "optimizer", None) is own]
        references, origins = reference_rates(own, around), Origins(own)
        groups = [group_of(group, lambda p: True) for group in own.param_groups]
        for group in groups:
            group |= {k: float(v) for k, v in group.items() if k in ("lr", "initial_lr") and isinstance(v, Tensor)}
        ratio, decay, size = self.ratio, self.decay, self.min_size
        lamb = SparseLamb(groups, ratio=ratio, decay=decay, trust_range=self.trust_range, min_size=size)
        following = [
            Following(at, 1.0 if rate is not None else None, rate, settings=True) for at, rate in enumerate(references)
        ]
        combined = CombinedOptimizer([lamb], origins, following)
        put_around(combined, own, around)
        if around:
            combined.follow()
        self._lambs.append(lamb)
        tensors = [p for group in groups for p in group["params"]]
        sparse = [p.numel() for p in tensors if p.ndim > 1 and p.numel() >= size]
        how = (
            f"Each step averages {ratio:g} of the momenta of {len(sparse)} tensors ({sum(sparse):,} weights), and those of the"
            f" other {len(tensors) - len(sparse)} whole."
        )
        alone = session.trainer.world_size == 1
        rank_zero_info(f"{WHO}: replaced {type(own).__name__}. {'On one process, it is LAMB.' if alone else how}")
        return combined

    # -- the run

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        super().on_batch_start(session, batch, batch_idx)
        local = self._distributed and self._steps >= self.warmup_steps
        for at, lamb in enumerate(self._lambs):
            lamb.ranks = session.trainer.world_size if local else 1
            lamb.seed = partial(_seed, session, self._steps, at)

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        if session.trainer.global_step > self._seen:
            self._sent = sum(lamb.traffic.sent for lamb in self._lambs)
        super().on_batch_end(session, batch_idx)

    @override
    def _average(self, session: Session) -> None:
        super()._average(session)
        if self._distributed:
            traffic = Traffic()
            num_bytes = sum(p.numel() * p.element_size() for p in self._parameters(session).values())
            traffic.all_reduce(num_bytes, session.trainer.world_size)
            self._sent += traffic.sent

    @override
    def detach(self, session: Session) -> None:
        super().detach(session)
        self._lambs = []

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "sent_bytes": self._sent}

    @override
    def summary(self) -> str:
        return (
            f"{self.local_steps} of {self._steps} steps exchanged {self.ratio:g} of the momenta, with {self._averagings}"
            " averagings of the weights"
        )


def _seed(session: Session, step: int, optimizer: int, index: int) -> int:
    return session.generator(WHO, step, optimizer, index).initial_seed()


def _check_source(own: Optimizer) -> None:
    """Raise ``ValueError`` unless ``own`` is an optimizer whose settings are LAMB's."""
    if type(own).__name__ not in _SOURCES or not type(own).__module__.startswith(("torch.optim", "lightning_eff.")):
        raise ValueError(
            f"{WHO}: configure_optimizers returned {type(own).__name__}, and {WHO} replaces Adam, AdamW or LAMB. Return one of"
            " them, for its lr, betas, eps and weight_decay."
        )
    for group in own.param_groups:
        for name in _FORMS:
            if group.get(name):
                raise ValueError(f"{WHO}: {type(own).__name__}({name}=True) has no form in LAMB. Remove {name}=True.")
        if any(p.is_complex() for p in group["params"]):
            raise ValueError(f"{WHO}: {type(own).__name__} has complex parameters. Use real ones (torch.view_as_real).")
