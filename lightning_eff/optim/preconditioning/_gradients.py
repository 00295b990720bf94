"""Shared by preconditioners: the one place where gradients are rewritten, once per optimizer step."""

import functools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_eff._core._run.free_memory import free_bytes, in_words
from lightning_eff._core._stack.unfreezing import thawing
from lightning_eff._core.session import Session
from lightning_eff._core.technique import LOCAL_STEPS, Technique

Gradients = dict[str, Tensor]
Norm = Literal["gradient", "inverse"]


def rivals(*names: str) -> dict[str, str]:
    """The ``conflicts`` of a preconditioner with others, by name, and with strategies that do not average gradients."""
    return {
        **dict.fromkeys(names, "both multiply the gradient by an inverse of the same curvature"),
        **dict.fromkeys(
            LOCAL_STEPS, "each rank uses its own gradient, and the curvature is that of the mean over all ranks"
        ),
    }


@torch.no_grad()
def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """The norm over all tensors together, a scalar on the first one's device."""
    norms = [torch.linalg.vector_norm(t) for t in tensors]
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))


def stepped(session: Session, *, waiting: bool = True) -> dict[str, nn.Parameter]:
    """The parameters that the run's optimizers train, by name, including those of blocks that grow in later."""
    held = {id(p) for optimizer in session.optimizers for group in optimizer.param_groups for p in group["params"]}

    def taking() -> dict[str, nn.Parameter]:
        return {name: p for name, p in session.module.named_parameters() if p.requires_grad and id(p) in held}

    return thawing(taking, session._stacks)() if waiting else taking()


def dtype_of_rows(of: Tensor) -> torch.dtype:
    """The dtype of vectors kept for a parameter: real, and float32 or finer."""
    return torch.promote_types(of.dtype.to_real(), torch.float32)


def length_of_rows(of: Tensor) -> int:
    """The number of real numbers in a parameter."""
    return of.numel() * (2 if of.is_complex() else 1)


def check_room(who: str, session: Session, count: int) -> str:
    """The memory of ``count`` vectors of all trained parameters, as text.

    Raises:
        ValueError: if a device has less memory left; ``who`` begins the message.
    """
    needed, parameters = dict[torch.device, int](), stepped(session)
    size = sum(p.numel() for p in parameters.values())
    for p in parameters.values():
        needed[p.device] = needed.get(p.device, 0) + count * length_of_rows(p) * dtype_of_rows(p).itemsize
    for device, num_bytes in needed.items():
        free = free_bytes(device)
        if free is not None and device.type == "cpu":
            free //= session.trainer.num_devices  # as many processes share it
        if free is not None and num_bytes > free:
            raise ValueError(
                f"{who}: {count} vectors of {size:,} parameters are {in_words(num_bytes)} on {device}, which has"
                f" {in_words(free)} left. Keep at most {free * count // num_bytes} vectors, or fewer if training needs the"
                " rest."
            )
    told = ", ".join(f"{in_words(num_bytes)} on {device}" for device, num_bytes in needed.items())
    return f"{count} vectors of {size:,} parameters take {told}"


class Preconditioner(Technique):
    """A technique that replaces the gradients before the optimizer uses them.

    It acts after micro-batches and ranks have been summed, a gradient scaler's factor has been removed, and every hook of the
    module and of other callbacks has seen the gradients. Clipping and the step come after it. A subclass gets gradients in
    float32 or finer, by parameter name. It skips parameters without a gradient in this step and sparse gradients. It skips the
    whole step if a gradient is not finite, like a gradient scaler.
    """

    needs_optimizer: ClassVar[bool] = True
    conflicts: ClassVar = rivals()
    checkpointed: ClassVar[tuple[str, ...]] = ("_rewritten", "_left", "_last")

    def _reset(self) -> None:
        self._names: dict[int, str] = {}
        self._rewritten = self._left = 0
        self._last: dict[str, float | Tensor] = {}

    @abstractmethod
    def precondition(self, session: Session, gradients: Gradients) -> Gradients | None:
        """The new gradients, of the same shapes and dtypes, or None to leave all of them alone.

        ``gradients`` may share memory with the optimizer's gradients, and must not be changed.
        """

    # -- the run

    @override
    def attach(self, session: Session) -> None:
        clip = session.module.configure_gradient_clipping

        @functools.wraps(clip)
        def configure_gradient_clipping(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self._rewrite(session, getattr(optimizer, "_optimizer", optimizer))
            clip(optimizer, *args, **kwargs)

        session.patches.set(session.module, "configure_gradient_clipping", configure_gradient_clipping)

    @override
    def on_optimizers(self, session: Session) -> None:
        if any(isinstance(optimizer, LBFGS) for optimizer in session.optimizers):
            raise ValueError(
                f"{type(self).__name__}: the optimizer LBFGS evaluates many gradients per step and estimates curvature itself."
                f" Use SGD or Adam, or remove {type(self).__name__}."
            )
        if not stepped(session):
            raise ValueError(
                f"{type(self).__name__}: the optimizers of {type(session.module).__name__} have no parameter of it that"
                f" requires a gradient. Give them the module's parameters, or remove {type(self).__name__}."
            )

    @torch.no_grad()
    def _rewrite(self, session: Session, optimizer: Optimizer) -> None:
        scaler = getattr(session.trainer.precision_plugin, "scaler", None)
        if session.asleep or (scaler is not None and not session._backward_done):
            return  # a tuner's trial run, or a step whose loss was None, so nothing was unscaled
        by_itself = scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)  # fused ones do
        factor = scaler.get_scale() if scaler is not None and by_itself else 1.0
        own = self._held(session, optimizer)
        if not own:
            return
        gradients = {name: _fine(g) / factor if factor != 1.0 else _fine(g) for name, g in own.items()}
        norm = norm_of(list(gradients.values()))
        directions = self.precondition(session, gradients) if bool(norm.isfinite()) else None
        if directions is None:
            self._left += 1
            return
        self._last |= {"gradient_norm": norm, "direction_norm": norm_of(list(directions.values()))}
        for name, direction in directions.items():
            own[name].copy_(direction if factor == 1.0 else direction * factor)
        self._rewritten += 1

    def _held(self, session: Session, optimizer: Optimizer) -> Gradients:
        """The dense gradients that ``optimizer`` will use, by parameter name."""
        found: Gradients = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None or p.grad.is_sparse:
                    continue
                if id(p) not in self._names:
                    self._names = {id(q): name for name, q in session.module.named_parameters()}
                if id(p) in self._names:  # a parameter outside the module has no name, and is left alone
                    found[self._names[id(p)]] = torch.view_as_real(p.grad) if p.grad.is_complex() else p.grad
        return found

    def _finished(self, gradients: Gradients, directions: Gradients, product: float, norm: Norm) -> Gradients | None:
        """The directions with the requested norm; None if they are not finite.

        ``product`` is the product of the gradient and the direction, over all parameters.
        """
        length, wanted = norm_of(list(directions.values())), norm_of(list(gradients.values()))
        if not bool(length.isfinite()):
            return None
        self._last["cosine"] = product / max(float(wanted) * float(length), torch.finfo(torch.float64).tiny)
        if norm == "gradient" and float(length) > 0:
            for direction in directions.values():
                direction *= (wanted / length).to(direction.device, direction.dtype)
        return directions

    # -- reports and state

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**self._last, "rewritten": self._rewritten, "left": self._left}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "last": {name: float(value) for name, value in self._last.items()}}


class Sums:
    """A sum of tensors of one shape on several devices, with one transfer per device."""

    def __init__(self) -> None:
        self._parts: dict[torch.device, Tensor] = {}

    def add(self, x: Tensor) -> None:
        """Add a tensor, in float64, or in float32 on MPS, which has no float64."""
        x = x.to(torch.float32 if x.device.type == "mps" else torch.float64)
        self._parts[x.device] = self._parts[x.device] + x if x.device in self._parts else x

    def total(self) -> Tensor:
        """The sum, in float64 on the CPU."""
        return torch.stack([part.cpu().double() for part in self._parts.values()]).sum(0)


def _fine(gradient: Tensor) -> Tensor:
    """The gradient in float32 or finer."""
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))
