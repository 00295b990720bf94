"""Parameters at sizes at which an error shows: near initialisation attention is uniform and many a branch is zero.

With small queries and keys, attention averages alike whatever a head is, and behind a weight of zeros every split is
right. While splits are checked, parameters that are all zero are random, small scales are larger, and linear layers
have outputs of about unit size. What is multiplied is multiplied by powers of two, so taking it back is exact.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_eff._core._architecture.linear_maps import is_conv1d
from lightning_eff.strategies._tensor.styles import is_linear
from lightning_eff.strategies._tensor.trace import Record
from lightning_eff.strategies._tensor.verify import local_part

_SEED = 21
_SMALL, _TYPICAL = 0.1, 0.5  # root mean squares of scales and biases
_FILLED = 0.2  # standard deviation of a vector that was all zero
_LARGEST = 2.0**12  # factor
_HIGHEST = 2.0**10  # weight, far from what float16 can hold


@dataclass(frozen=True)
class _Change:
    """What was done to a parameter: multiplied by ``factors``, powers of two in float32; where ``filled`` it was zero."""

    factors: Tensor
    filled: Tensor

    def undo(self, param: nn.Parameter) -> None:
        """Give ``param``, the whole one or one split since, its own values."""
        local = param.to_local() if isinstance(param, DTensor) else param
        shape = param.shape
        local.div_(local_part(self.factors.expand(shape).contiguous(), param))
        local.masked_fill_(local_part(self.filled.expand(shape).contiguous(), param), 0.0)


def _power(ratio: Tensor) -> Tensor:
    return torch.exp2(ratio.clamp(1.0, _LARGEST).log2().round())


def _rows(weight: Tensor, dim: int, rms: float, generator: torch.Generator) -> _Change:
    """Give the layer outputs of about unit size, and its output features, along ``1 - dim``, weights of one size."""
    norms = weight.float().norm(dim=dim, keepdim=True)
    largest = norms.max()
    filled = norms == 0.0
    if float(largest) == 0.0:
        largest = torch.ones_like(largest)
    factors = torch.where(filled, 1.0, _power(largest / norms.where(~filled, largest)))
    if rms > 0.0:
        factors = factors * _power(torch.tensor(1.0 / rms, device=factors.device))
    if bool(filled.any()):
        noise = torch.randn(weight.shape, generator=generator).to(weight)
        weight.add_(filled * noise * (largest * weight.shape[dim] ** -0.5))
    highest = weight.float().abs().amax(dim=dim, keepdim=True).clamp(min=1e-30)
    factors = torch.minimum(factors, torch.exp2((_HIGHEST / highest).clamp(min=1.0).log2().floor()))
    weight.mul_(factors)
    return _Change(factors, filled)


def _change(param: Tensor, generator: torch.Generator) -> _Change:
    """Fill what is all zero; make small scales and biases larger."""
    size = param.float().square().mean().sqrt()
    filled = size == 0.0
    small = param.ndim == 1 and not bool(filled) and bool(size < _SMALL)
    factors = _power(_TYPICAL / size) if small else torch.ones_like(size)
    if bool(filled):
        noise = torch.randn(param.shape, generator=generator).to(param)
        param.add_(noise * (_FILLED if param.ndim < 2 else param.shape[-1] ** -0.5))
    param.mul_(factors)
    return _Change(factors, filled)


@contextmanager
def exercised(root: nn.Module, before: Record) -> Iterator[None]:
    """Within this context parameters have telling sizes; afterwards they have their own values, split or not.

    Args:
        root: whole, with equal parameters on all ranks.
        before: one execution, for the size of layers' outputs.
    """
    outputs: dict[str, float] = {}
    for call in before.calls:
        outputs[call.path] = max(outputs.get(call.path, 0.0), call.rms)
    del before  # with its graph
    layers = {
        f"{path}.weight": (0 if is_conv1d(module) else 1, outputs[path])
        for path, module in root.named_modules()
        if is_linear(module) and path in outputs
    }
    generator = torch.Generator().manual_seed(_SEED)
    changes: dict[str, _Change] = {}
    with torch.no_grad():
        for name, param in root.named_parameters():
            if type(param) is not nn.Parameter or not param.is_floating_point() or not param.numel():
                continue
            changes[name] = _rows(param, *layers[name], generator) if name in layers else _change(param, generator)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, param in root.named_parameters():
                if name in changes:
                    changes[name].undo(param)
