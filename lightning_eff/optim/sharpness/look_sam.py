"""LookSAM: compute what SAM adds to the gradient every k-th step, and use it in all steps (Liu et al. 2022)."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Number
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Step
from lightning_eff._core.technique import Control
from lightning_eff.optim.sharpness._uphill import Rho, Uphill, Used, norm_of, rivals


@torch.no_grad()
def orthogonal_part(perturbed: Sequence[Tensor], plain: Sequence[Tensor]) -> list[Tensor]:
    """``g_v = g_s - (g_s . g / ||g||^2) g``: the part of SAM's gradient ``g_s`` that is orthogonal to ``g``, over all tensors.

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
        alpha: its factor.
    """
    # g + α (‖g‖ / ‖g_v‖) g_v
    length = alpha * norm_of(gradients)
    for g, v in zip(gradients, direction, strict=True):
        g.add_(length.to(g.device, g.dtype) * v)


class LookSAM(Uphill):
    """Compute SAM's gradient every ``interval`` steps, and turn the plain gradient in the same direction in between.

    In optimizer steps 0, ``interval``, ... the step runs twice as in SAM, and uses ``g_s``, the gradient at ``w + rho g /
    ||g||``. The direction ``v`` of its part orthogonal to ``g``, which changes slowly, is kept. All other steps cost one
    pass and use ``g + alpha ||g|| v``. Over an accumulation window and the ranks of DDP, ``g`` and ``g_s`` are the means that
    the optimizer would use, so ``v`` is the same on all ranks. For this, ``g`` is exchanged once more in a perturbed step.
    It acts before gradient clipping.

    Gradients that torch keeps sparse are left alone. After another technique changes the network's blocks, the next step is
    perturbed.

    Use it for large batches, where ``v`` changes slowly. With small batches, ``v`` is mostly the noise of one batch, which
    the next steps then follow: the digits ViT in ``benchmarks/vit``, with batches of 64, learns nothing with it (in the
    first 200 steps of its plain training, ``kept`` would be 0.05 to 0.13 and ``upright`` 0.15 to 0.23). Look at these two
    figures. If ``kept`` is near 0, or ``upright`` far below ``alpha``, use ``SharpnessAwareMinimization(interval=...)``
    instead. It costs little more time than plain training, and memory for two more copies of the weights.

    It logs ``gradient_norm`` and ``sharpness`` of the last perturbed batch, as SAM does; ``upright``, its ``||g_v|| /
    ||g||``, which is how far SAM itself turned; ``kept``, the cosine in [-1, 1] between ``v`` and the previous one (1 for the
    first); and ``turned``, the number of steps made along a turned gradient.

    Args:
        rho: SAM's radius, in units of the weights. 0 is plain training.
        interval: the number of optimizer steps from one perturbed step to the next, ``k`` in the paper. 1 is SAM.
        alpha: how far the plain gradient is turned. 0 is SAM in every ``interval``-th step.
        adaptive: whether to scale the radius of each weight by its size, as in ASAM.

    Raises:
        ValueError: for a value out of range.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[LookSAM(rho=0.05, interval=5, alpha=0.7)])

    References:
        Liu et al. 2022, "Towards Efficient and Scalable Sharpness-Aware Minimization", arXiv:2203.02714.
    """

    saves: ClassVar[str] = (
        "no time compared with plain training: most of SAM's generalization at little more than the cost of a plain step"
    )
    paper: ClassVar[str] = "Liu et al. 2022, arXiv:2203.02714"
    constraints: ClassVar[str] = (
        "needs automatic optimization; keeps two more copies of the weights; a perturbed step is as in SAM"
    )
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"rho": Uniform(0.01, 0.5, log=True), "interval": Choice((2, 5, 10)), "alpha": Uniform(0.3, 1.0)},
        lambda profile: "each sample is seen once, and no gain is known for that case" if profile.epochs <= 1 else None,
    )
    control: ClassVar[Control] = Control(
        "the baseline for the same time with a learning rate that decays to zero, in up to 1 + 1 / interval times the steps"
    )
    conflicts: ClassVar = rivals("SharpnessAwareMinimization")
    checkpointed: ClassVar[tuple[str, ...]] = ("_direction", "_decided_at", "_perturbs", "_turned")

    def __init__(
        self,
        rho: Rho = 0.05,
        *,
        interval: Annotated[int, Count()] = 5,
        alpha: Annotated[float, Number(at_least=0)] = 0.7,
        adaptive: bool = False,
    ) -> None:
        self.rho = rho
        self.interval = interval
        self.alpha = alpha
        self.adaptive = adaptive

    @override
    def _reset(self) -> None:
        super()._reset()
        self._direction: dict[str, Tensor] = {}  # v, by parameter
        self._plain: dict[str, Tensor] = {}  # this rank's g over the micro-batches of a perturbed step so far
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

    # -- reports and state

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**self._last, "turned": self._turned}

    @override
    def summary(self) -> str:
        if not self._passes:
            return "LookSAM: no step was perturbed"
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
        gather = (lambda value: [value]) if session is None else session.gather
        on_host = [{name: v.detach().cpu() for name, v in held.items()} for held in (self._direction, self._plain)]
        # under LocalSGD each rank has its own
        return {**super().state_dict(), "directions": gather(on_host[0]), "plain": gather(on_host[1])}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        session, ranks = self._session, state_dict["plain"]
        self._plain = {}
        if session is not None and len(ranks) == session.replicas.count:
            self._direction = dict(state_dict["directions"][session.rank])
            self._plain = dict(ranks[session.rank])


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
