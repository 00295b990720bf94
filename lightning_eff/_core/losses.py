"""What each sample contributes to the mean loss of an unchanged ``training_step``, and that mean with weights.

A mean loss is ``L = (1/V) sum_r l_r`` over rows ``r`` (samples, or tokens of samples) that count ``V`` in all. With
``s_i`` the sum over the rows of sample ``i``, sample ``i`` contributes ``l_i = s_i B / V``, so that ``L = (1/B) sum_i l_i``
exactly, with padded and ignored tokens too. Calls of the loss functions of ``torch.nn.functional`` are seen through a
``TorchFunctionMode``, so the module need not know.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

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


class LossNotVisible(RuntimeError):
    """The loss of a ``training_step`` cannot be taken apart by sample."""


@dataclass
class LossCall:
    """One mean-reduced loss call: its value, and by sample the sum ``s_i``, the rows counted ``n_i`` and the bound.

    Attributes:
        mean: the value that the call returned.
        sums: ``s_i``, shape (B,).
        counts: how much each sample counts in the mean's denominator, shape (B,); ``V`` is its sum.
        bounds: ``||d s_i / d z_i||`` with ``z`` the call's input, shape (B,), where asked for.
    """

    mean: Tensor
    sums: Tensor
    counts: Tensor
    bounds: Tensor | None

    @property
    def total(self) -> Tensor:
        """``V``, a scalar."""
        return self.counts.sum()


def _by_sample(rows: Tensor, size: int, name: str) -> Tensor:
    if rows.ndim == 0 or rows.shape[0] % size:
        raise LossNotVisible(
            f"F.{name} got {tuple(rows.shape)} loss values, which do not split evenly over the {size} samples of the"
            " batch."
        )
    return rows.reshape(size, -1)


def _counts(fn: Callable[..., Tensor], arguments: dict[str, Any], rows: Tensor) -> Tensor:
    """What each entry of ``rows`` counts in the mean's denominator."""
    if fn not in (F.cross_entropy, F.nll_loss):
        return torch.ones_like(rows)
    target, weight = arguments["target"], arguments.get("weight")
    if target.is_floating_point():  # class probabilities: the mean is over rows
        return torch.ones_like(rows)
    valid = target != arguments["ignore_index"]
    if weight is None:
        return valid.to(rows.dtype).reshape(rows.shape)
    return (weight[target.clamp_min(0)] * valid).to(rows.dtype).reshape(rows.shape)


class _LossMode(TorchFunctionMode):
    """Calls :meth:`on_loss` for each mean-reduced loss call of the code run under it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        signature = _SIGNATURES.get(func) if func in LOSSES else None
        if signature is None:
            return func(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        legacy = arguments.pop("size_average", None) is not None, arguments.pop("reduce", None) is not None
        if arguments["reduction"] != "mean" or any(legacy) or arguments["input"].ndim == 0:
            return func(*args, **kwargs)
        return self.on_loss(func, arguments)

    def on_loss(self, fn: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
        raise AssertionError("subclasses decide what a loss call returns")


class ObserveLosses(_LossMode):
    """Record each mean-reduced loss call, by sample, and leave its value as it is.

    Args:
        size: the number of samples B; a call's rows are taken to lie sample by sample.
        bounds: also find the gradient bound of Katharopoulos & Fleuret (2018): the norm of the loss's gradient with
            respect to its input (the logits), by a backward pass through the loss function alone.
    """

    def __init__(self, size: int, *, bounds: bool = False) -> None:
        super().__init__()
        self.size = size
        self.bounds = bounds
        self.calls: list[LossCall] = []

    def on_loss(self, fn: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
        mean = fn(**arguments)
        name = fn.__name__
        with torch.enable_grad() if self.bounds else torch.no_grad():
            z = arguments["input"].detach().requires_grad_(self.bounds)
            rows = fn(**{**arguments, "input": z, "reduction": "none"})
            by_sample = _by_sample(rows, self.size, name)
            sums = by_sample.sum(dim=1)
            bound = None
            if self.bounds:
                (gradient,) = torch.autograd.grad(sums.sum(), z)
                bound = _by_sample(gradient, self.size, name).float().norm(dim=1)
        counts = _by_sample(_counts(fn, arguments, rows.detach()), self.size, name).sum(dim=1)
        self.calls.append(LossCall(mean.detach(), sums.detach().float(), counts.float(), bound))
        return mean


class WeighLosses(_LossMode):
    """Return, for each mean-reduced loss call, the weighted mean ``(1/b) sum_j w_j s_j B / V`` instead.

    Args:
        weights: ``w_j``, shape (b,), for the b samples that the code under this mode is run on.
        size: the number B of samples that the b were drawn from.
        totals: ``V`` of each call in that larger batch, in the order of the calls.
    """

    def __init__(self, weights: Tensor, *, size: int, totals: list[Tensor]) -> None:
        super().__init__()
        self.weights = weights
        self.size = size
        self.totals = totals
        self.num_calls = 0

    def on_loss(self, fn: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
        if self.num_calls >= len(self.totals):
            raise LossNotVisible(
                f"training_step made more loss calls on the {len(self.weights)} chosen samples than the"
                f" {len(self.totals)} it made on all {self.size}."
            )
        rows = fn(**{**arguments, "reduction": "none"})
        b = len(self.weights)
        sums = _by_sample(rows, b, fn.__name__).sum(dim=1)
        total = self.totals[self.num_calls]
        self.num_calls += 1
        return (self.weights.to(sums.dtype) * sums).sum() * (self.size / (b * total.to(sums.dtype)))


def loss_of(output: Any) -> Tensor | None:
    """The loss in what a ``training_step`` returned: a tensor, ``output["loss"]``, or None where the step is skipped."""
    if isinstance(output, Tensor) or output is None:
        return output
    return output.get("loss")


def check_visible(calls: list[LossCall], loss: Tensor | None) -> None:
    """Check that the step's loss is the sum of the mean-reduced calls seen.

    Raises:
        LossNotVisible: if it is not, with what was seen.
    """
    if loss is None:
        raise LossNotVisible("training_step returned None.")
    if not calls:
        names = ", ".join(fn.__name__ for fn in LOSSES)
        raise LossNotVisible(f"training_step called none of torch.nn.functional's {names} with reduction='mean'.")
    seen = torch.stack([call.mean.float() for call in calls]).sum()
    got = loss.detach().float()
    if not torch.isclose(got, seen, rtol=1e-3, atol=1e-6, equal_nan=True):
        raise LossNotVisible(
            f"training_step returned a loss of {got.item():.6g}, but the {len(calls)} loss call(s) seen in it sum to"
            f" {seen.item():.6g}."
        )


def contributions(calls: list[LossCall]) -> Tensor:
    """``l_i = sum_k s_ik B / V_k``, shape (B,): their mean is the step's loss."""
    return torch.stack([call.sums * (len(call.sums) / call.total) for call in calls]).sum(dim=0)


def mean_by_sample(calls: list[LossCall]) -> Tensor:
    """Each sample's own mean loss ``sum_k s_ik / n_ik``, shape (B,); 0 where nothing of it counts."""
    return torch.stack([call.sums / call.counts.clamp_min(torch.finfo(call.counts.dtype).tiny) for call in calls]).sum(0)


def gradient_bounds(calls: list[LossCall]) -> Tensor:
    """The bound on each sample's gradient norm, up to a constant: ``sqrt(sum_k (||ds_ik/dz|| B / V_k)^2)``, shape (B,)."""
    scaled = [call.bounds * (len(call.sums) / call.total) for call in calls if call.bounds is not None]
    return torch.stack(scaled).square().sum(dim=0).sqrt()
