"""Split the mean loss of an unchanged ``training_step`` into samples, and compute it with weights.

A mean loss is ``L = (1/V) sum_r l_r`` over rows ``r`` (samples, or tokens of samples) whose counts sum to ``V``. With
``s_i`` the sum over the rows of sample ``i``, sample ``i`` contributes ``l_i = s_i B / V``. So ``L = (1/B) sum_i l_i``
holds exactly, with padded and ignored tokens too. A ``TorchFunctionMode`` observes the calls of the loss functions in
``torch.nn.functional``, so the module needs no change.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

LOSSES: tuple[Callable[..., Tensor], ...] = (
    F.cross_entropy,
    F.nll_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
)
_SIGNATURES = {fn: inspect.signature(fn) for fn in LOSSES}
_DEFAULTS = {fn: {name: p.default for name, p in found.parameters.items()} for fn, found in _SIGNATURES.items()}
_OF_CLASSES = (F.cross_entropy, F.nll_loss)
_CHUNK = 2**24  # logits split at a time, so that the memory stays small compared with the training pass
_OBSERVED: ContextVar[bool] = ContextVar("observed", default=False)


@contextmanager
def observing() -> Iterator[None]:
    """Mark loss calls as observations of samples' losses. Code that mixes samples must also change these without a gradient."""
    token = _OBSERVED.set(True)
    try:
        yield
    finally:
        _OBSERVED.reset(token)


def observed() -> bool:
    """Return whether the current loss call observes samples' losses, and is not a metric."""
    return _OBSERVED.get()


class LossNotVisible(ValueError):
    """The loss of a ``training_step`` cannot be split into samples."""


@dataclass
class LossCall:
    """One mean-reduced loss call, split into samples.

    Attributes:
        mean: the value that the call returned.
        rows: the loss values ``l_r`` by sample, shape (B, rows per sample).
        counted: each row's weight in the mean's denominator, shape (B, rows per sample); 0 where it is ignored.
        bounds: ``||d s_i / d z_i||`` with ``z`` the call's input, shape (B,), or None if not requested.
    """

    mean: Tensor
    rows: Tensor
    counted: Tensor
    bounds: Tensor | None

    @property
    def sums(self) -> Tensor:
        """``s_i``, shape (B,)."""
        return self.rows.float().sum(dim=1)

    @property
    def counts(self) -> Tensor:
        """Each sample's weight in the mean's denominator, shape (B,)."""
        return self.counted.float().sum(dim=1)

    @property
    def total(self) -> Tensor:
        """``V``, a scalar."""
        return self.counts.sum()


def _by_sample(rows: Tensor, size: int, name: str) -> Tensor:
    rows = rows.reshape(1) if rows.ndim == 0 else rows
    if rows.shape[0] % size:
        raise LossNotVisible(
            f"F.{name} got {tuple(rows.shape)} loss values, which do not split evenly over the {size} samples of the"
            " batch."
        )
    return rows.reshape(size, -1)


def bind_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a call of one of :data:`LOSSES` by name, with defaults; None for any other function.

    ``reduction`` also reflects the legacy arguments ``size_average`` and ``reduce``.
    """
    signature = _SIGNATURES.get(func)
    if signature is None:
        return None
    if func is F.l1_loss and (weight := _lost_weight()) is not None:
        kwargs = {**kwargs, "weight": weight}
    arguments = _bound(_DEFAULTS[func], args, kwargs)
    if arguments is None:  # a wrong call, or a missing argument, for which the signature has the right error
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
    average, reduce = arguments.pop("size_average", None), arguments.pop("reduce", None)
    if average is not None or reduce is not None:
        arguments["reduction"] = "none" if reduce is False else "sum" if average is False else "mean"
    return arguments


def _bound(defaults: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return what ``Signature.bind`` returns, in a tenth of its time; None if the call is wrong."""
    if len(args) > len(defaults) or not kwargs.keys() <= defaults.keys():
        return None
    arguments = defaults.copy()
    given = dict(zip(defaults, args, strict=False))
    if not given.keys().isdisjoint(kwargs):
        return None
    arguments.update(given)
    arguments.update(kwargs)
    return None if any(value is inspect.Parameter.empty for value in arguments.values()) else arguments


def counts_of(fn: Callable[..., Tensor], arguments: dict[str, Any], rows: Tensor) -> Tensor:
    """Return each entry's weight in the mean's denominator, in the shape of ``rows``, the call's unreduced losses."""
    weight = arguments.get("weight")
    if fn in (F.mse_loss, F.l1_loss) and weight is not None:
        return weight.to(rows.dtype).expand_as(rows)
    if fn not in _OF_CLASSES or arguments["target"].is_floating_point():  # class probabilities: the mean is over rows
        return torch.ones_like(rows)
    target = arguments["target"]
    valid = target != arguments["ignore_index"]
    if weight is None:
        return valid.to(rows.dtype).reshape(rows.shape)
    return (weight[target.masked_fill(~valid, 0)] * valid).to(rows.dtype).reshape(rows.shape)


def _parts(fn: Callable[..., Tensor], arguments: dict[str, Any], size: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Split the call into calls on fewer of the ``size`` samples, each with its number of samples."""
    z, target = arguments["input"], arguments["target"]
    if fn not in _OF_CLASSES or z.ndim < 2 or z.shape[0] % size or target.shape[:1] != z.shape[:1]:
        yield arguments, size
        return
    rows, samples = z.shape[0] // size, max(1, _CHUNK * size // max(z.numel(), 1))
    for start in range(0, size, samples):
        part = slice(start * rows, (start + samples) * rows)
        yield {**arguments, "input": z[part], "target": target[part]}, min(samples, size - start)


def _lost_weight() -> Tensor | None:
    """Return the ``weight`` of the running ``F.l1_loss``, because torch 2.13 does not pass it to modes."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("weight")


class _LossMode(TorchFunctionMode):
    """Call :meth:`on_loss` for each loss call whose reduction is in ``reductions``."""

    apart_from_compiled = True  # observes nothing in compiled code, which therefore is not compiled with it
    reductions: tuple[str, ...] = ("mean",)

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        arguments = bind_loss(func, args, kwargs)
        if arguments is None or (arguments["reduction"] not in self.reductions and func is not F.l1_loss):
            return func(*args, **kwargs)
        if arguments["reduction"] not in self.reductions:
            return func(**arguments)
        return self.on_loss(func, arguments)

    def on_loss(self, fn: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
        raise AssertionError("subclasses implement on_loss")


class ObserveLosses(_LossMode):
    """Record each mean-reduced loss call by sample, without changing its value.

    If it is entered again, as by methods that run the step twice, it records only the first pass.

    Args:
        size: the number of samples B. The rows of a call are ordered by sample.
        bounds: also compute the gradient bound of Katharopoulos & Fleuret (2018): the norm of the loss's gradient with
            respect to its input (the logits), by a backward pass through the loss function alone.

    Attributes:
        calls: the recorded calls, in order.
        problem: why a call could not be split, or None. It is not raised immediately, because under DDP the other ranks
            would wait for this one.
    """

    def __init__(self, size: int, *, bounds: bool = False) -> None:
        super().__init__()
        self.size = size
        self.bounds = bounds
        self.calls: list[LossCall] = []
        self.problem: str | None = None
        self._passes = 0

    @override
    def __enter__(self) -> Self:
        self._passes += 1
        super().__enter__()
        return self

    @override
    def on_loss(self, fn: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
        with observing():
            mean = fn(**arguments)
            if self._passes == 1 and self.problem is None:
                try:
                    self.calls.append(self._take_apart(fn, arguments, mean.detach()))
                except LossNotVisible as e:
                    self.problem = str(e)
        return mean

    def _take_apart(self, fn: Callable[..., Tensor], arguments: dict[str, Any], mean: Tensor) -> LossCall:
        name = fn.__name__
        found: list[tuple[Tensor, Tensor, Tensor | None]] = []
        for part, size in _parts(fn, arguments, self.size):
            bound = None
            with torch.enable_grad() if self.bounds else torch.no_grad():
                z = part["input"].detach().requires_grad_(self.bounds)
                rows = fn(**{**part, "input": z, "reduction": "none"})
                by_sample = _by_sample(rows, size, name)
                if self.bounds:
                    (gradient,) = torch.autograd.grad(rows.sum(), z)
                    bound = _by_sample(gradient, size, name).float().norm(dim=1)
            counted = _by_sample(counts_of(fn, part, rows.detach()), size, name)
            found.append((by_sample.detach(), counted, bound))
        rows, counted, bounds = zip(*found, strict=True)
        return LossCall(mean, torch.cat(rows), torch.cat(counted), torch.cat(bounds) if self.bounds else None)


class WeighLosses(_LossMode):
    """Return the weighted mean ``(1/b) sum_j w_j s_j B / V`` for each mean-reduced loss call.

    Args:
        weights: ``w_j``, shape (b,), for the b samples that the code runs on.
        size: the number of samples B from which the b were drawn.
        totals: ``V`` of each call in that larger batch, in the order of the calls.

    Raises:
        LossNotVisible: if the code makes more or fewer calls than ``totals``.
    """

    def __init__(self, weights: Tensor, *, size: int, totals: list[Tensor]) -> None:
        super().__init__()
        self.weights = weights
        self.size = size
        self.totals = totals
        self.num_calls = 0

    @override
    def __enter__(self) -> Self:
        self.num_calls = 0
        super().__enter__()
        return self

    @override
    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        if exc_type is None and self.num_calls != len(self.totals):
            raise LossNotVisible(
                f"training_step made {self.num_calls} mean-reduced loss call(s) on the {len(self.weights)} chosen"
                f" samples, but {len(self.totals)} on all {self.size}."
            )

    @override
    def on_loss(self, fn: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
        index, self.num_calls = self.num_calls, self.num_calls + 1
        if index >= len(self.totals):
            return fn(**arguments)  # __exit__ raises the error
        rows = fn(**{**arguments, "reduction": "none"})
        b = len(self.weights)
        sums = _by_sample(rows, b, fn.__name__).float().sum(dim=1)
        # (1/b) sum_j w_j s_j B / V
        return ((self.weights * sums).sum() * (self.size / (b * self.totals[index]))).to(rows.dtype)


class CutAtLosses(_LossMode):
    """Detach the inputs of loss calls in a forward-only pass, so that gradients can be taken with respect to them.

    From the first loss call on, gradients are enabled, until the caller's ``torch.no_grad`` ends. The network before it keeps
    no graph.

    Attributes:
        inputs: the detached inputs ``z`` of the loss calls, of any reduction.
    """

    reductions = ("mean", "sum", "none")

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []

    @override
    def on_loss(self, fn: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
        torch.set_grad_enabled(True)
        z = arguments["input"].detach().requires_grad_()
        self.inputs.append(z)
        return fn(**{**arguments, "input": z})

    def bounds(self, losses: Tensor) -> Tensor:
        """Return ``||d l_i / d z_i||`` over all inputs, shape (B,), for per-sample ``losses`` of shape (B,).

        Raises:
            LossNotVisible: if the losses depend on no observed loss call, or the rows of an input are not ordered by sample.
        """
        if not self.inputs or not losses.requires_grad:
            names = ", ".join(fn.__name__ for fn in LOSSES)
            raise LossNotVisible(
                f"sample_loss called none of torch.nn.functional's {names}, so the gradient at the logits cannot be"
                " found. Use score='loss', or one of these functions."
            )
        gradients = torch.autograd.grad(losses.sum(), self.inputs, allow_unused=True)
        rows = [_by_sample(g, len(losses), "loss's input").float() for g in gradients if g is not None]
        return torch.cat(rows, dim=1).norm(dim=1)


@dataclass
class SeenCall:
    """One loss call of any reduction and with any target.

    Attributes:
        fn: the function of ``torch.nn.functional``.
        arguments: its arguments by name, including ``input``, ``target`` and ``reduction``.
        output: its result.
    """

    fn: Callable[..., Tensor]
    arguments: dict[str, Any]
    output: Tensor


class SeeLosses(_LossMode):
    """Record each loss call that has a gradient, with its graph, without changing its value.

    Attributes:
        calls: the recorded calls, in order.
    """

    reductions = ("mean", "sum", "none")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[SeenCall] = []

    @override
    def on_loss(self, fn: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
        output = fn(**arguments)
        if output.requires_grad:
            self.calls.append(SeenCall(fn, arguments, output))
        return output


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in a ``training_step``'s output: a tensor, ``output["loss"]``, or None if it skips the step."""
    if isinstance(output, Tensor) or output is None:
        return output
    return output.get("loss")


def check_visible(observed: ObserveLosses, loss: Tensor) -> None:
    """Check that the step's loss is the sum of the observed mean-reduced calls.

    Raises:
        LossNotVisible: if it is not, with the values.
    """
    if observed.problem is not None:
        raise LossNotVisible(observed.problem)
    if not observed.calls:
        names = ", ".join(fn.__name__ for fn in LOSSES)
        raise LossNotVisible(f"training_step called none of torch.nn.functional's {names} with reduction='mean'.")
    seen = torch.stack([call.mean.float() for call in observed.calls]).sum()
    got = loss.detach().float()
    # sums of several losses are rounded in the dtype of the loss
    rtol = max(1e-3, 4 * torch.finfo(loss.dtype).eps)
    if not torch.isclose(got, seen, rtol=rtol, atol=1e-6, equal_nan=True).all():
        raise LossNotVisible(
            f"training_step returned a loss of {got.mean().item():.6g}, but the {len(observed.calls)} mean-reduced loss"
            f" call(s) seen in it sum to {seen.item():.6g}."
        )


def contributions(calls: list[LossCall]) -> Tensor:
    """Return ``l_i = sum_k s_ik B / V_k``, shape (B,). Their mean is the step's loss."""
    return torch.stack([call.sums * (len(call.rows) / call.total) for call in calls]).sum(dim=0)


def mean_by_sample(calls: list[LossCall]) -> Tensor:
    """Return each sample's own mean loss ``sum_k s_ik / n_ik``, shape (B,); 0 if all its rows are ignored."""
    means = [torch.where(c.counts == 0, 0.0, c.sums / torch.where(c.counts == 0, 1.0, c.counts)) for c in calls]
    return torch.stack(means).sum(dim=0)


def gradient_bounds(calls: list[LossCall]) -> Tensor:
    """Return the bound on each sample's gradient norm, up to a constant: ``sqrt(sum_k (||ds_ik/dz|| B/V_k)^2)``, (B,)."""
    scaled = [call.bounds * (len(call.rows) / call.total) for call in calls if call.bounds is not None]
    return torch.stack(scaled).square().sum(dim=0).sqrt()
