"""Sharpness-aware minimisation: step along the gradient at ``w + e``, uphill of ``w`` (Foret et al. 2020)."""

import contextlib
import math
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core.batches import num_samples
from lightning_eff._core.losses import loss_of
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step, silent, snapshot
from lightning_eff._core.technique import Control, Technique

ETA = 0.01  # keeps T_w away from zero; the value of Kwon et al.'s code


@torch.no_grad()
def adaptive_scale(name: str, weight: Tensor) -> Tensor | None:
    """The diagonal of ASAM's ``T_w`` for one parameter: ``|w| + eta``, and None (the identity) for biases."""
    return None if "bias" in name.rpartition(".")[2] else weight.detach().abs() + ETA


@torch.no_grad()
def perturbation(
    gradients: Sequence[Tensor], scales: Sequence[Tensor | None], *, rho: float
) -> tuple[list[Tensor], Tensor]:
    """The ascent step ``e = rho T^2 g / ||T g||``, the norm taken over all tensors together.

    Args:
        gradients: ``g``, of any shapes.
        scales: the diagonal of ``T`` for each of ``gradients``, of the same shape; None is the identity, as in SAM.
        rho: the length of the step, measured as ``||T^-1 e||``.

    Returns:
        ``e``, shaped like ``gradients``, and ``||T g||``, a scalar. Where the norm is not finite, ``e`` is 0.
    """
    # T g
    scaled = [g if t is None else t * g for g, t in zip(gradients, scales, strict=True)]
    # ||T g||, for half precision summed in float32
    norms = [torch.linalg.vector_norm(s, dtype=torch.promote_types(s.dtype, torch.float32)) for s in scaled]
    norm = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    # e = rho T (T g) / ||T g||
    factor = rho / (norm + 1e-12)
    e = [
        s * factor.to(s.device) if t is None else t * s * factor.to(s.device)
        for s, t in zip(scaled, scales, strict=True)
    ]
    return [torch.where(norm.isfinite().to(x.device), x, torch.zeros_like(x)) for x in e], norm


class SharpnessAwareMinimization(Technique):
    """Update ``w`` along the gradient at ``w + e``, where ``e = rho g / ||g||`` climbs from ``w`` (SAM).

    ``training_step`` runs twice on the same batch, with the same random numbers and from the same buffers, metrics and
    attributes of the module. The first pass, at ``w``, is that of plain training: it logs, updates metrics and
    BatchNorm statistics, and gives ``g``. The second, at ``w + e``, leaves no trace but its gradient, which
    accumulation, clipping and the optimizer treat as any other. The weights are then put back bit for bit, before the
    optimizer steps and also after an exception. What ``training_step`` returns to Lightning, and thus to other
    callbacks as ``outputs``, is the second pass's.

    Each micro-batch is perturbed along its own gradient, and under DDP each rank along that of its own samples, without
    communication, as in the paper (m-SAM; m is the micro-batch of one rank). Where ``||g||`` is not finite the second
    pass runs at ``w``, so that a broken loss or gradient shows as in plain training. An optimizer that evaluates its
    closure several times a step, such as LBFGS, sees the perturbed loss and gradient at each evaluation.

    Logged: ``gradient_norm`` is ``||T g||``, ``sharpness`` is ``L(w + e) - L(w)``, both of the last perturbed batch.

    Args:
        rho: the radius, >= 0, in units of the weights. 0 is plain training. ASAM wants about ten times SAM's: its
            authors use 0.5 to 1.
        adaptive: scale the radius of each weight by its size, so that it does not depend on how the layers are scaled
            (ASAM, Kwon et al. 2021): ``e = rho T^2 g / ||T g||`` with ``T = |w| + 0.01``, for biases ``T = 1``.
        interval: optimizer steps, >= 1; only each ``interval``-th step is perturbed, starting with the first, and the
            others cost nothing extra.

    Raises:
        ValueError: if ``rho`` is negative or not finite, or ``interval`` is no integer >= 1.

    Sources:
        Foret et al. 2020, arXiv:2010.01412; Kwon et al. 2021, arXiv:2102.11600.
    """

    saves: ClassVar[str] = "nothing in time: better generalisation, at up to twice the cost of a step"
    paper: ClassVar[str] = "Foret et al. 2020, arXiv:2010.01412"
    constraints: ClassVar[str] = (
        "automatic optimization; training_step runs twice, so what it writes or prints comes twice; memory for one more"
        " copy of the weights; activation checkpointing only with use_reentrant=False"
    )
    survey: ClassVar[Survey | None] = Survey("sharpness-aware minimization", zhuang="2.1", shen="5.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {
            "rho": Uniform(0.01, 0.5, log=True),
            "adaptive": Choice((False, True)),
            "interval": Choice((1, 2, 5, 10)),
        },
        lambda profile: "samples are seen once, where no gain of it is known" if profile.epochs <= 1 else None,
    )
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero, in up to twice the steps"
    )

    def __init__(self, *, rho: float = 0.05, adaptive: bool = False, interval: int = 1) -> None:
        if not 0.0 <= rho < math.inf:
            raise ValueError(
                f"SharpnessAwareMinimization(rho={rho}): expected a finite number >= 0, the distance at which the"
                " gradient is taken. 0.05 is the paper's; 0 is plain training."
            )
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ValueError(
                f"SharpnessAwareMinimization(interval={interval!r}): expected an integer >= 1, because every"
                " interval-th optimizer step is perturbed. 1 perturbs every step."
            )
        self.rho = rho
        self.adaptive = adaptive
        self.interval = interval
        self._reset()

    def _reset(self) -> None:
        self._passes = 0
        self._last: dict[str, float | Tensor] = {}
        self._kept: list[tuple[Tensor, Tensor]] = []

    @property
    @override
    def neutral(self) -> bool:
        return self.rho == 0.0

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        session.chain.add(Stage.PERTURB, self._link)

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if step.global_step % self.interval:
            return proceed(batch)
        module, cost = step.module, self.session.chain.cost
        random_state = rng.capture()
        to_start = snapshot(module)
        output = proceed(batch)
        loss = loss_of(output)
        if loss is None:
            return output
        began = time.perf_counter()
        self._climb(step, loss)
        loss, output = loss.detach(), None  # nothing of the first pass is kept in memory
        with rng.fork(random_state), silent(module, to_start):
            output = proceed(batch)
        perturbed = loss_of(output)
        if perturbed is not None:
            self._last["sharpness"] = perturbed.detach() - loss
        self._passes += 1
        cost.forward_passes += 1
        cost.backward_passes += 1
        with contextlib.suppress(ValueError):  # a batch without tensors has no number of samples, and need not
            cost.forward_samples += num_samples(batch)
        cost.seconds += time.perf_counter() - began
        return output

    def _climb(self, step: Step, loss: Tensor) -> None:
        """Move the weights to ``w + e`` until the step is over."""
        session, module = self.session, step.module
        held = {id(p) for optimizer in session.optimizers for group in optimizer.param_groups for p in group["params"]}
        named = [(name, w) for name, w in module.named_parameters() if w.requires_grad and id(w) in held]
        scaler = getattr(session.trainer.precision_plugin, "scaler", None)
        factor = None if scaler is None else scaler.scale(torch.ones((), device=loss.device))
        # Lightning's own backward passes run outside autocast too; .grad and DDP's hooks are not touched
        device = module.device.type
        plain = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()
        with plain:
            scaled = loss if factor is None else loss * factor
            found = torch.autograd.grad(scaled, [w for _, w in named], allow_unused=True)
        used = [
            (name, w, g.to_dense() if g.is_sparse else g)
            for (name, w), g in zip(named, found, strict=True)
            if g is not None
        ]
        if not used:
            return
        scales = [adaptive_scale(name, w) if self.adaptive else None for name, w, _ in used]
        e, norm = perturbation([g for _, _, g in used], scales, rho=self.rho)
        self._last["gradient_norm"] = norm if factor is None else norm / factor
        self._kept = [(w, w.detach().clone()) for _, w, _ in used]
        session.when_step_ends(self._descend)
        with torch.no_grad():
            for (_, w, _), x in zip(used, e, strict=True):
                w.add_(x)

    @torch.no_grad()
    def _descend(self) -> None:
        """Put the weights back to ``w`` exactly."""
        while self._kept:
            w, value = self._kept.pop()
            w.copy_(value)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return dict(self._last)

    @override
    def summary(self) -> str:
        name = "ASAM" if self.adaptive else "SAM"
        if not self._passes:
            return f"{name}: no step perturbed"
        last = float(self._last["sharpness"]) if "sharpness" in self._last else math.nan
        return f"{name}, rho {self.rho:g}: {self._passes:,} second passes, loss {last:+.2g} uphill in the last"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"passes": self._passes, "last": {name: float(value) for name, value in self._last.items()}}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._passes = state_dict["passes"]
        self._last = dict(state_dict["last"])
