"""One pass of a ``training_step`` in which loss calls on followed labels are changed."""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_eff._core._targets.calls import Change, TargetCall
from lightning_eff._core._targets.edges import backward_by_edges
from lightning_eff._core._targets.followed import enter, foreign, leave
from lightning_eff._core._targets.following import Follower, Trace
from lightning_eff._core._targets.leaks import Leaks
from lightning_eff._core.losses import LOSSES, bind_loss, observed
from lightning_eff._core.steps import looking

_SYMMETRIC = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
_BACKWARD = (Tensor.backward, torch.autograd.backward)
_LOOKED_AT = frozenset((*LOSSES, *_BACKWARD))


class Window(TorchFunctionMode):
    """Passes the loss calls on followed labels to ``change`` while it is entered."""

    apart_from_compiled = True  # observes nothing in compiled code, which therefore is not compiled with it

    def __init__(self, change: Change, shapes: Mapping[str, torch.Size], *, scored: bool = False) -> None:
        super().__init__()
        self.scored = scored
        self.change = change
        self.shapes = shapes
        self.samples: Mapping[str, int] = {}  # of labels in a list with one item per sample, by path
        self.follower = Follower()
        self.made: list[tuple[TargetCall, Tensor]] = []  # changed calls and their results
        self.elsewhere: list[str] = []  # calls whose targets do not come from labels
        self.still: list[str] = []  # calls without a gradient in a training pass: metrics
        self.learning = torch.is_grad_enabled()
        self.looks = looking()  # whether this is an observation pass
        self.over = False  # whether another pass of the step has begun, with its own window
        self.targeted = False  # whether calls were changed, set after the pass
        self.factors: Callable[[], tuple[float, ...]] = tuple  # the factors of the current part of the batch
        self.foreign = False  # whether a loss call had tensors of classes that handle torch's calls themselves
        self.leaks: Leaks | None = None  # finds labels used in other ways than as targets

    @override
    def __enter__(self) -> Self:
        if not self.follower.by_class:
            return super().__enter__()
        enter(self)
        return self

    @override
    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        if self.follower.by_class:
            leave(self)
        else:
            super().__exit__(exc_type, exc_val, exc_tb)

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.over or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        leaks = self.leaks
        if (  # true of almost all calls
            func not in _LOOKED_AT
            and not self.follower.knows(args, kwargs)
            and (leaks is None or not leaks.knows(args, kwargs))
        ):
            return func(*args, **kwargs)
        self.foreign |= any(map(foreign, types))
        return self.on_call(func, args, kwargs)

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a torch call on followed tensors, or of a loss call, which is changed if it is on labels."""
        if func in _BACKWARD:
            with self:  # torch has suspended the mode, which must also see recomputed calls
                return backward_by_edges(*args, **kwargs)
        arguments = bind_loss(func, args, kwargs)
        if arguments is None:
            output = self.follower.follow(func, args, kwargs, func(*args, **kwargs))
            if self.leaks is not None:
                self.leaks.note(func, args, kwargs, output, self.follower)
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
        others, factors = tuple(trace.others), self.factors()
        sample = self.samples.get(trace.label)
        call = TargetCall(fn, arguments, trace.label, shape, trace.places, others, factors, trace.whole, sample)
        output = self.change(call)
        if (output.ndim > 0) != (call.reduction == "none"):
            raise ValueError(
                f"The change of an F.{fn.__name__} with reduction={call.reduction!r} returned a tensor of shape"
                f" {tuple(output.shape)}; expected {'the losses of its elements' if output.ndim == 0 else 'a scalar'},"
                " like the call itself. Reduce by call.reduce(losses, counted)."
            )
        self.made.append((call, output))
        return output

    def _is_meant(self, fn: Callable[..., Tensor], arguments: dict[str, Any]) -> bool:
        """Return whether a loss call on labels is changed; this method alone decides for which passes.

        In a training pass, only calls with a gradient are changed. Calls without one are metrics. Calls in an observation pass
        (:meth:`Step.forward_only`) that another technique runs within this one are not changed either. That technique reads
        scores and losses of the plain step, and changed calls would be counted as this batch's own. Code that reads samples'
        losses to choose among them is the exception. If samples are mixtures, it must see the losses that would be trained on,
        so techniques that mix change these calls too.
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
