"""One pass of a ``training_step``, in which loss calls on followed labels are changed."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_eff._core._targets.calls import Change, TargetCall
from lightning_eff._core._targets.edges import backward_by_edges
from lightning_eff._core._targets.following import Follower, Trace
from lightning_eff._core._targets.leaks import Leaks
from lightning_eff._core.losses import LOSSES, bind_loss, observed
from lightning_eff._core.steps import looking

_SYMMETRIC = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
_BACKWARD = (Tensor.backward, torch.autograd.backward)
_LOOKED_AT = frozenset((*LOSSES, *_BACKWARD))


class Window(TorchFunctionMode):
    """Hands the loss calls on followed labels to ``change``, while it is entered."""

    apart_from_compiled = True  # sees nothing in compiled code, which need not be compiled with it

    def __init__(self, change: Change, shapes: Mapping[str, torch.Size], *, scored: bool = False) -> None:
        super().__init__()
        self.scored = scored
        self.change = change
        self.shapes = shapes
        self.follower = Follower()
        self.made: list[tuple[TargetCall, Tensor]] = []  # calls that were changed, and what they returned
        self.elsewhere: list[str] = []  # calls on targets that are not made of labels
        self.still: list[str] = []  # calls without a gradient in a pass with one: metrics
        self.learning = torch.is_grad_enabled()
        self.looks = looking()  # it is one of a pass that only looks
        self.over = False  # another pass of the step has begun, with a window of its own
        self.targeted = False  # whether calls were changed, once it has been left
        self.factors: Callable[[], tuple[float, ...]] = tuple  # of the part of the batch that runs
        self.leaks: Leaks | None = None  # where labels that are no targets are looked for

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.over or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        leaks = self.leaks
        known = func in _LOOKED_AT or self.follower.knows(args, kwargs)
        if not known and (leaks is None or not leaks.knows(args, kwargs)):  # as almost all are
            return func(*args, **kwargs)
        if func in _BACKWARD:
            with self:  # torch has put the mode aside, and what checkpoints run again is to be seen, too
                return backward_by_edges(*args, **kwargs)
        arguments = bind_loss(func, args, kwargs)
        if arguments is None:
            output = self.follower.follow(func, args, kwargs, func(*args, **kwargs))
            if leaks is not None:
                leaks.note(func, args, kwargs, output, self.follower)
            return output
        return self._on_loss(func, arguments)

    def _on_loss(self, fn: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
        trace = self.follower.get(arguments["target"])
        if trace is None and fn in _SYMMETRIC and self.follower.get(arguments["input"]) is not None:
            arguments = {**arguments, "input": arguments["target"], "target": arguments["input"]}
            trace = self.follower.get(arguments["target"])
        output = self._changed(fn, arguments, trace)
        if self.leaks is not None:
            self.leaks.on_loss(arguments, trace, output, self.follower)
        return output

    def _changed(self, fn: Callable[..., Tensor], arguments: dict[str, Any], trace: Trace | None) -> Tensor:
        if trace is None:
            self.elsewhere.append(fn.__name__)
            return fn(**arguments)
        if not self._is_meant(fn, arguments):
            return fn(**arguments)
        shape = self.shapes[trace.label]
        call = TargetCall(fn, arguments, trace.label, shape, trace.places, tuple(trace.others), self.factors())
        output = self.change(call)
        if (output.ndim > 0) != (call.reduction == "none"):
            raise ValueError(
                f"The change of an F.{fn.__name__} with reduction={call.reduction!r} returned a tensor of shape"
                f" {tuple(output.shape)}; expected {'the losses of its elements' if output.ndim == 0 else 'a scalar'},"
                " as the call itself returns. Reduce by call.reduce(losses, counted)."
            )
        self.made.append((call, output))
        return output

    def _is_meant(self, fn: Callable[..., Tensor], arguments: dict[str, Any]) -> bool:
        """Whether a loss call on labels is one that is changed: here alone stands of which passes they are.

        Changed is what is trained on: in a training pass, calls with a gradient. Beside them there are metrics, and passes
        that only look, :meth:`Step.forward_only`, which some technique runs within this one: what it reads there are scores
        and losses of the plain step, for reasons of its own, and whoever changes calls would take them for its own batch's
        (SAF would store them, and count one call too many). Who looks at samples' losses to choose among them is apart: where
        samples are mixtures, their plain labels are not those of what would be trained on, so whoever mixes changes these too.
        """
        if self.scored and observed():
            return True
        if looking() != self.looks:
            return False
        if self.learning and not (arguments["input"].requires_grad and torch.is_grad_enabled()):
            if not observed():
                self.still.append(fn.__name__)
            return False
        return True
