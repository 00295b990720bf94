"""LookSAM: what SAM adds to the gradient, found every k-th step and used in all (Liu et al. 2022)."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Step
from lightning_eff._core.technique import Control
from lightning_eff.optim.sharpness._uphill import Uphill, Used, check_rho, norm_of, rivals


@torch.no_grad()
def orthogonal_part(perturbed: Sequence[Tensor], plain: Sequence[Tensor]) -> list[Tensor]:
    """``g_v = g_s - (g_s . g / ||g||^2) g``: what of SAM's gradient ``g_s`` stands upright on ``g``, over all tensors together.

    Args:
        perturbed: ``g_s``, of any shapes.
        plain: ``g``, shaped like ``perturbed``. Where it is zero, ``g_v`` is ``g_s``.
    """
    pairs = [
        (s.flatten().to(torch.promote_types(s.dtype, torch.float32)), g.flatten())
        for s, g in zip(perturbed, plain, strict=True)
    ]
    device = pairs[0][0].device
    # g_s·g and ‖g‖²
    dot = torch.stack([torch.dot(s, g.to(s.dtype)).to(device) for s, g in pairs]).sum()
    square = torch.stack([torch.dot(g.to(s.dtype), g.to(s.dtype)).to(device) for s, g in pairs]).sum()
    share = torch.where(square > 0, dot / square, torch.zeros_like(dot))
    # g_v = g_s − (g_s·g / ‖g‖²) g
    return [s - share.to(s.device, s.dtype) * g for s, g in zip(perturbed, plain, strict=True)]


@torch.no_grad()
def add_direction(gradients: Sequence[Tensor], direction: Sequence[Tensor], *, alpha: float) -> None:
    """``g <- g + alpha ||g|| v`` in place, the norm over all tensors together.

    Args:
        gradients: ``g``.
        direction: ``v = g_v / ||g_v||``, shaped like ``gradients``.
        alpha: how much of it.
    """
    # g + α (‖g‖ / ‖g_v‖) g_v
    length = alpha * norm_of(gradients)
    for g, v in zip(gradients, direction, strict=True):
        g.add_(length.to(g.device, g.dtype) * v)


class LookSAM(Uphill):
    """Find SAM's gradient every ``interval`` steps; in the others turn the plain gradient as it was turned then.

    In optimizer step 0, ``interval``, ... the step runs twice as in SAM, and is made along ``g_s``, the gradient at
    ``w + rho g / ||g||``. Kept of it is the direction ``v`` of its part that stands upright on ``g``, which changes slowly.
    All other steps cost one pass and are made along ``g + alpha ||g|| v``. Over an accumulation window and the ranks of DDP
    ``g`` and ``g_s`` are the means that the optimizer steps along, so that ``v`` is the same on all ranks; for that ``g`` is
    exchanged once more in a perturbed step. It acts before clipping.

    Gradients that torch keeps sparse are left as they are. Where the network's blocks change, the next step is perturbed.

    **It is made for large batches**, of which ``v`` changes slowly. Of small ones it is that one batch's noise, which the steps
    after it then follow, by more than SAM itself would: the ViT of digits in ``benchmarks/vit``, in batches of 64, learns
    nothing with it (in the first 200 steps of its plain training ``kept`` would be 0.05 to 0.13, ``upright`` 0.15 to 0.23).
    Look at these two figures: ``kept`` near 0, or ``upright`` far below ``alpha``, say that
    ``SharpnessAwareMinimization(interval=...)`` is the better choice.

    Logged: ``gradient_norm`` and ``sharpness`` as SAM does, of the last perturbed batch; ``upright``, its ``||g_v|| / ||g||``,
    which is how far SAM itself turned; ``kept``, the cosine in [-1, 1] between ``v`` and the one before, 1 of the first; and
    ``turned``, the steps made so far along a turned gradient.

    Args:
        rho: SAM's radius, >= 0, in units of the weights. 0 is plain training.
        interval: ``k`` >= 1; every k-th optimizer step is perturbed. 1 is SAM.
        alpha: how far the plain gradient is turned, >= 0. 0 is SAM in every ``interval``-th step.
        adaptive: scale the radius of each weight by its size, as ASAM does.

    Raises:
        ValueError: for other values.

    Sources:
        Liu et al. 2022, arXiv:2203.02714.
    """

    saves: ClassVar[str] = (
        "nothing in time beside plain training: most of SAM's generalisation at little more than its cost"
    )
    paper: ClassVar[str] = "Liu et al. 2022, arXiv:2203.02714"
    constraints: ClassVar[str] = (
        "automatic optimization; memory for two more copies of the weights; as SAM in a perturbed step"
    )
    survey: ClassVar[Survey | None] = Survey("LookSAM", zhuang="2.1", shen="5.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"rho": Uniform(0.01, 0.5, log=True), "interval": Choice((2, 5, 10)), "alpha": Uniform(0.3, 1.0)},
        lambda profile: "samples are seen once, where no gain of it is known" if profile.epochs <= 1 else None,
    )
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero, in up to 1 + 1 / interval times the steps"
    )
    conflicts: ClassVar = rivals("SharpnessAwareMinimization")

    def __init__(self, rho: float = 0.05, *, interval: int = 5, alpha: float = 0.7, adaptive: bool = False) -> None:
        check_rho("LookSAM", rho)
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ValueError(
                f"LookSAM({interval=}): expected an integer >= 1, because every interval-th optimizer step is perturbed. 5 is"
                " the paper's; 1 is SAM."
            )
        if not 0.0 <= alpha < math.inf:
            raise ValueError(f"LookSAM({alpha=}): expected a finite number >= 0, how far the plain gradient is turned.")
        self.rho = rho
        self.interval = interval
        self.alpha = alpha
        self.adaptive = adaptive
        self._reset()

    @override
    def _reset(self) -> None:
        super()._reset()
        self._direction: dict[str, Tensor] = {}  # v, by parameter
        self._plain: dict[str, Tensor] = {}  # this rank's g of the micro-batches of a perturbed step so far
        self._decided_at = -1
        self._perturbs = True
        self._turned = 0

    # -- a perturbed step

    @override
    def due(self, step: Step) -> bool:
        if step.global_step != self._decided_at:  # for all micro-batches of the step
            self._decided_at = step.global_step
            self._perturbs = step.global_step % self.interval == 0 or not self._direction
        return self._perturbs

    @override
    def found(self, used: Used) -> None:
        if self.interval > 1:
            share = 1 / self.session.trainer.accumulate_grad_batches
            for name, _, g in used:
                self._plain[name] = g * share + self._plain[name] if name in self._plain else g * share

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_after_backward(trainer, pl_module)
        if self.neutral or self.interval == 1 or trainer.fit_loop.epoch_loop._should_accumulate():
            return
        gradients = {
            name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None and not p.grad.is_sparse
        }
        if self._perturbs:
            self._look(self.session, gradients)
        else:
            names = [name for name in self._direction if name in gradients]
            if names:
                add_direction([gradients[n] for n in names], [self._direction[n] for n in names], alpha=self.alpha)
            self._turned += 1

    @torch.no_grad()
    def _look(self, session: Session, gradients: dict[str, Tensor]) -> None:
        """Keep the direction of ``g_v``; ``gradients`` are ``g_s``."""
        own = [self._plain.get(name, torch.zeros_like(g)) for name, g in gradients.items()]
        self._plain = {}
        if not gradients:
            return
        plain = _mean_over_ranks(session, own)
        g_v = orthogonal_part(list(gradients.values()), plain)
        norm = norm_of(g_v)
        if bool(norm.isfinite()) and bool(norm > 0):
            before = self._direction
            self._direction = {name: v / norm.to(v.device, v.dtype) for name, v in zip(gradients, g_v, strict=True)}
            self._last["upright"] = norm / norm_of(plain).to(norm.device)
            again = [(v, before[name].to(v.device)) for name, v in self._direction.items() if name in before]
            dots = [torch.dot(v.flatten(), past.flatten()).to(norm.device) for v, past in again]
            self._last["kept"] = torch.stack(dots).sum() if dots else 1.0

    @override
    def on_blocks_changed(self, session: Session) -> None:
        self._direction = {}

    # -- what it tells and keeps

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**self._last, "turned": self._turned}

    @override
    def summary(self) -> str:
        if not self._passes:
            return "LookSAM: no step perturbed"
        return (
            f"LookSAM, rho {self.rho:g}: {self._passes:,} second passes, {self._turned:,} steps along turned gradients"
        )

    @override
    def on_optimizers(self, session: Session) -> None:
        devices = {name: p.device for name, p in session.module.named_parameters()}
        for held in (self._direction, self._plain):
            held.update({name: value.to(devices[name]) for name, value in held.items()})

    @override
    def state_dict(self) -> dict[str, Any]:
        session = self._session or self._past
        own = {name: value.detach().cpu() for name, value in self._plain.items()}
        direction = {name: value.detach().cpu() for name, value in self._direction.items()}
        return {
            **super().state_dict(),
            "direction": dict(self._direction),
            # where ranks train by themselves, as under LocalSGD, each has its own
            "directions": [direction] if session is None else session.gather(direction),
            "plain": [own] if session is None else session.gather(own),
            "decided_at": self._decided_at,
            "perturbs": self._perturbs,
            "turned": self._turned,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        session, ranks = self._session, state_dict["plain"]
        self._direction = dict(state_dict["direction"])
        fits = session is not None and len(ranks) == session.replicas.count
        if fits and session is not None:
            self._direction = dict(state_dict["directions"][session.rank])
        self._plain = dict(ranks[session.rank]) if fits and session is not None else {}
        self._decided_at, self._perturbs = state_dict["decided_at"], state_dict["perturbs"]
        self._turned = state_dict["turned"]


def _mean_over_ranks(session: Session, tensors: list[Tensor]) -> list[Tensor]:
    """The mean of ``tensors`` over the ranks, in one exchange for each dtype."""
    if session.replicas.count == 1:
        return tensors
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(t.dtype for t in tensors):  # in the same order on all ranks
        at = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        flat: Any = session.trainer.strategy.reduce(torch.cat([tensors[i].flatten() for i in at]), reduce_op="mean")
        parts = flat.split([tensors[i].numel() for i in at])
        found |= {i: part.view_as(tensors[i]) for i, part in zip(at, parts, strict=True)}
    return [found[i] for i in range(len(tensors))]
