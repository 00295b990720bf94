"""Shared by sharpness-aware techniques: the ascent step, and the two passes of a training step."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._arguments.kinds import Fraction, Number
from lightning_eff._core.losses import loss_of
from lightning_eff._core.steps import Proceed, Stage, Step, silent, snapshot
from lightning_eff._core.technique import Technique

ETA = 0.01  # keeps T_w away from zero; the value of Kwon et al.'s code

#: the distance at which the gradient is taken; the types of arguments that several techniques have
Rho = Annotated[float, Number(at_least=0, hint="0.05 is SAM's; 0 is plain training.")]
Share = Annotated[float, Fraction(above=0)]
Used = list[tuple[str, nn.Parameter, Tensor]]


@torch.no_grad()
def adaptive_scale(name: str, weight: Tensor) -> Tensor | None:
    """The diagonal of ASAM's ``T_w`` for one parameter: ``|w| + eta``, and None (the identity) for biases."""
    return None if "bias" in name.rpartition(".")[2] else weight.detach().abs().add_(ETA)


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
    norm = norm_of(scaled)
    # e = rho T (T g) / ||T g||
    factor = rho / (norm + 1e-12)
    if _together(scaled, norm):
        own = [(s, t) for s, t in zip(scaled, scales, strict=True) if t is not None]
        if own:
            torch._foreach_mul_([s for s, _ in own], [t for _, t in own])  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_mul_([s for s, _ in own], factor)  # pyright: ignore[reportPrivateImportUsage]
        of_gradients = [s for s, t in zip(scaled, scales, strict=True) if t is None]
        made = iter(torch._foreach_mul(of_gradients, factor) if of_gradients else ())  # pyright: ignore[reportPrivateImportUsage]
        e = [next(made) if t is None else s for s, t in zip(scaled, scales, strict=True)]
    else:
        e = [
            s * factor.to(s.device) if t is None else t * s * factor.to(s.device)
            for s, t in zip(scaled, scales, strict=True)
        ]
    finite = norm.isfinite()
    if norm.device.type == "cpu" and type(norm) is Tensor and finite:
        return e, norm
    return [torch.where(finite.to(x.device), x, torch.zeros_like(x)) for x in e], norm


def _together(tensors: Sequence[Tensor], norm: Tensor) -> bool:
    """Whether torch's operations on lists take all ``tensors``: plain ones of one dtype, on the device of ``norm``."""
    kinds = {(type(t), t.dtype, t.device) for t in tensors}
    return kinds == {(Tensor, tensors[0].dtype, norm.device)}


def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """The norm over all tensors together, a scalar; half precision is summed in float32."""
    if all(type(t) is Tensor and t.dtype == torch.float32 and t.device == tensors[0].device for t in tensors):
        norms = torch._foreach_norm(list(tensors))  # pyright: ignore[reportPrivateImportUsage]
    else:
        norms = [torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors]
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))


def rivals(*names: str) -> dict[str, str]:
    """The ``conflicts`` with other techniques that take the gradient at other weights, by name."""
    return dict.fromkeys(names, "both take the gradient at other weights than the trained ones")


#: the ``conflicts`` between techniques that choose among a batch's samples
CHOOSERS = dict.fromkeys(("ImportanceSampling", "RandomSubset", "SelectiveBackprop"), "both choose the samples")


class Uphill(Technique):
    """A technique that runs each step twice: at ``w``, which gives ``g``, and at ``w + e``, whose gradient is applied.

    Both passes have the same random numbers, and start from the same buffers, metrics and attributes of the module. The
    first pass is that of plain training, with its logs. The second leaves only its gradient, which accumulation, clipping and
    the optimizer treat as usual. The weights are restored bit for bit when the step's backward pass is over. A subclass
    decides in :meth:`due` which steps are perturbed, and may override the parts of the passes.

    Attributes:
        stage: the stage of the step chain at which the passes run.
        rho: the radius.
        adaptive: whether the radius scales with the size of the weights, as in ASAM.
    """

    needs_optimizer: ClassVar[bool] = True
    stage: ClassVar[Stage | None] = Stage.PERTURB
    neutral_at: ClassVar[Mapping[str, Any]] = {"rho": 0.0}
    checkpointed: ClassVar[tuple[str, ...]] = ("_passes", "_last")
    rho: float
    adaptive: bool = False

    def _reset(self) -> None:
        self._passes = 0
        self._last: dict[str, float | Tensor] = {}
        self._kept: list[tuple[Tensor, Tensor]] = []

    # -- what subclasses say

    def due(self, step: Step) -> bool:
        """Whether this step is perturbed; other steps run once, as in plain training."""
        return True

    def first(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """The pass at ``w``."""
        return proceed(batch)

    def ascended(self, step: Step, named: list[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
        """The parameters that are perturbed."""
        return named

    def found(self, used: Used) -> None:
        """Look at the gradients at ``w``, by parameter, times the gradient scaler's factor if there is one."""

    def second(self, step: Step, batch: Any, proceed: Proceed) -> tuple[Any, Any]:
        """The pass at ``w + e``: its output, and the batch that it ran on."""
        return proceed(batch), batch

    def risen(self, rise: Tensor) -> None:
        """Note that the second pass's loss is ``rise`` above the first's."""
        self._last["sharpness"] = rise

    @property
    def radius(self) -> float:
        """The length of the ascent."""
        return self.rho

    # -- the passes

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if not self.due(step):
            return proceed(batch)
        module, cost = step.module, self.session.chain.cost
        random_state = rng.capture()
        to_start = snapshot(module)
        output = self.first(step, batch, proceed)
        loss = loss_of(output)
        if loss is None:
            return output
        began = time.perf_counter()
        self._climb(step, loss)
        loss, output = loss.detach(), None  # nothing of the first pass is kept in memory
        with rng.fork(random_state), silent(module, to_start):
            output, batch = self.second(step, batch, proceed)
        perturbed = loss_of(output)
        if perturbed is not None:
            self.risen(perturbed.detach() - loss)
        self._passes += 1
        cost.add(batch, backward=1, since=began)
        return output

    def _climb(self, step: Step, loss: Tensor) -> None:
        """Move the weights to ``w + e`` until the step is over."""
        session, module = self.session, step.module
        held = {id(p) for optimizer in session.optimizers for group in optimizer.param_groups for p in group["params"]}
        named = [(name, w) for name, w in module.named_parameters() if w.requires_grad and id(w) in held]
        named = self.ascended(step, named)
        scaler = getattr(session.trainer.precision_plugin, "scaler", None)
        factor = None if scaler is None else scaler.scale(torch.ones((), device=loss.device))
        # like Lightning's own backward pass, this runs outside autocast; it leaves .grad and DDP's hooks alone
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
        self.found(used)
        scales = [adaptive_scale(name, w) if self.adaptive else None for name, w, _ in used]
        e, norm = perturbation([g for _, _, g in used], scales, rho=self.radius)
        self._last["gradient_norm"] = norm if factor is None else norm / factor
        self._kept = [(w, w.detach().clone()) for _, w, _ in used]
        weights = [w.detach() for _, w, _ in used]
        session.when_step_ends(self._descend)
        if _together(weights, norm) and _together(e, norm):
            torch._foreach_add_(weights, e)  # pyright: ignore[reportPrivateImportUsage]
        else:
            with torch.no_grad():
                for (_, w, _), x in zip(used, e, strict=True):
                    w.add_(x)

    @torch.no_grad()
    def _descend(self) -> None:
        """Put the weights back to ``w`` exactly."""
        while self._kept:
            w, value = self._kept.pop()
            w.copy_(value)

    # -- reports and state

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return dict(self._last)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "last": {name: float(value) for name, value in self._last.items()}}
