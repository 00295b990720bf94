"""What all preconditioners share: the one place where gradients are rewritten, once for each optimizer step."""

import functools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_eff._core._run.capacity import free_bytes, in_words
from lightning_eff._core._stack.thawing import thawing
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Technique

Gradients = dict[str, Tensor]
Norm = Literal["gradient", "inverse"]


def rivals(*names: str) -> dict[str, str]:
    """``conflicts`` of a preconditioner: with others, by their names, and with what keeps gradients on their rank."""
    return {
        **dict.fromkeys(names, "both multiply the gradient by an inverse of the same curvature"),
        "LocalSGD": "each rank steps along a gradient of its own, and curvature is that of the mean over all ranks",
    }


@torch.no_grad()
def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """The norm over all tensors together, a scalar on the first one's device."""
    norms = [torch.linalg.vector_norm(t) for t in tensors]
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))


def stepped(session: Session, *, waiting: bool = True) -> dict[str, nn.Parameter]:
    """The parameters that the run's optimizers step, by name: those that take gradients, also if their block waits."""
    held = {id(p) for optimizer in session.optimizers for group in optimizer.param_groups for p in group["params"]}

    def taking() -> dict[str, nn.Parameter]:
        return {name: p for name, p in session.module.named_parameters() if p.requires_grad and id(p) in held}

    return thawing(taking, session._stacks)() if waiting else taking()


def check_norm(who: str, norm: str) -> None:
    """Raise ``ValueError`` unless ``norm`` says whose norm a direction has."""
    if norm not in get_args(Norm):
        raise ValueError(
            f'{who}({norm=}): expected "gradient", for a direction of the gradient\'s norm, or "inverse", for that which it has'
            " in the paper."
        )


def dtype_of_rows(of: Tensor) -> torch.dtype:
    """That of the vectors that are kept of a parameter: float32 or finer, and real."""
    return torch.promote_types(of.dtype.to_real(), torch.float32)


def length_of_rows(of: Tensor) -> int:
    """The real numbers of a parameter."""
    return of.numel() * (2 if of.is_complex() else 1)


def check_room(who: str, session: Session, count: int) -> str:
    """What ``count`` vectors of all parameters that are stepped take, in words.

    Raises:
        ValueError: if a device has less than that left; ``who`` begins the message.
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
                f" {in_words(free)} left; expected at most {free * count // num_bytes} vectors, and fewer where training"
                " needs the rest. Keep fewer."
            )
    told = ", ".join(f"{in_words(num_bytes)} on {device}" for device, num_bytes in needed.items())
    return f"{count} vectors of {size:,} parameters take {told}"


class Preconditioner(Technique):
    """A technique that gives the optimizer another gradient in the place of the step's own.

    It does so when accumulated micro-batches and ranks have been added up, a gradient scaler's factor is out, and every
    hook of the module and of other callbacks has seen the gradients; clipping comes after it, and then the step. It is
    given float32 (or finer) gradients by the names of their parameters. Left as they are: parameters without a gradient in
    this step, gradients that torch keeps sparse, and all gradients of a step of which one is not finite, which then is
    that of plain training (a gradient scaler skips it).
    """

    needs_optimizer: ClassVar[bool] = True
    conflicts: ClassVar = rivals()

    def _reset(self) -> None:
        self._names: dict[int, str] = {}
        self._rewritten = self._left = 0
        self._last: dict[str, float | Tensor] = {}

    @abstractmethod
    def precondition(self, session: Session, gradients: Gradients) -> Gradients | None:
        """The direction of each gradient, of its shape and dtype, or None to leave all as they are.

        ``gradients`` may share memory with what the optimizer will use, and must not be written to.
        """

    # -- the run

    @override
    def attach(self, session: Session) -> None:
        self._reset()
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
                f"{type(self).__name__}: got the optimizer LBFGS; expected one that takes a step along one gradient, since"
                " LBFGS asks for many in a step and estimates curvature itself. Use SGD or Adam, or take the technique out."
            )
        if not stepped(session):
            raise ValueError(
                f"{type(self).__name__}: the optimizers of {type(session.module).__name__} step no parameter of it that takes a"
                " gradient; expected one. Give them the module's parameters, or take the technique out."
            )

    @torch.no_grad()
    def _rewrite(self, session: Session, optimizer: Optimizer) -> None:
        scaler = getattr(session.trainer.precision_plugin, "scaler", None)
        if session.asleep or (scaler is not None and not session._backward_done):
            return  # a trial run of a tuner's, or a step whose loss was None, of which nothing was unscaled
        by_itself = scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)  # as fused ones do
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
        """The dense gradients that ``optimizer`` will step along, as they are, by the names of their parameters."""
        found: Gradients = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None or p.grad.is_sparse:
                    continue
                if id(p) not in self._names:
                    self._names = {id(q): name for name, q in session.module.named_parameters()}
                if id(p) in self._names:  # one that lies outside the module has no name, and steps as it would
                    found[self._names[id(p)]] = torch.view_as_real(p.grad) if p.grad.is_complex() else p.grad
        return found

    def _finished(self, gradients: Gradients, directions: Gradients, product: float, norm: Norm) -> Gradients | None:
        """The directions with the norm that they shall have; None if they are not finite.

        ``product`` is the gradient's with the direction, over all parameters.
        """
        length, wanted = norm_of(list(directions.values())), norm_of(list(gradients.values()))
        if not bool(length.isfinite()):
            return None
        self._last["cosine"] = product / max(float(wanted) * float(length), torch.finfo(torch.float64).tiny)
        if norm == "gradient" and float(length) > 0:
            for direction in directions.values():
                direction *= (wanted / length).to(direction.device, direction.dtype)
        return directions

    # -- what it tells and keeps

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**self._last, "rewritten": self._rewritten, "left": self._left}

    @override
    def state_dict(self) -> dict[str, Any]:
        last = {name: float(value) for name, value in self._last.items()}
        return {"rewritten": self._rewritten, "left": self._left, "last": last}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rewritten, self._left = state_dict["rewritten"], state_dict["left"]
        self._last = dict(state_dict["last"])


class Sums:
    """A sum of tensors of one shape that lie on several devices: one transfer from each, however many there are."""

    def __init__(self) -> None:
        self._parts: dict[torch.device, Tensor] = {}

    def add(self, x: Tensor) -> None:
        """One more; it is summed in double precision, or single on MPS, which has no other."""
        x = x.to(torch.float32 if x.device.type == "mps" else torch.float64)
        self._parts[x.device] = self._parts[x.device] + x if x.device in self._parts else x

    def total(self) -> Tensor:
        """The sum, in float64 on the CPU."""
        return torch.stack([part.cpu().double() for part in self._parts.values()]).sum(0)


def _fine(gradient: Tensor) -> Tensor:
    """In float32 or finer."""
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))
