"""Scales parameters so that a wrong split becomes visible.

At initialization attention is almost uniform, and many branches are zero. With small queries and keys, attention averages in
the same way for any heads. Behind a weight of zeros every split looks right. So during the check, zero parameters are random,
small scales are larger, and linear layers have outputs of about unit size. Factors are powers of two, so undoing is exact.
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
    """The change of a parameter: ``factors``, powers of two in float32, and ``filled`` if it was zero."""

    factors: Tensor
    filled: Tensor

    def undo(self, param: nn.Parameter) -> None:
        """Restore the values of ``param``, which can be split by now."""
        local = param.to_local() if isinstance(param, DTensor) else param
        shape = param.shape
        local.div_(local_part(self.factors.expand(shape).contiguous(), param))
        local.masked_fill_(local_part(self.filled.expand(shape).contiguous(), param), 0.0)


def _power(ratio: Tensor) -> Tensor:
    return torch.exp2(ratio.clamp(1.0, _LARGEST).log2().round())


def _rows(weight: Tensor, dim: int, rms: float, generator: torch.Generator) -> _Change:
    """Scale the layer to outputs of about unit size, and its output features, along ``1 - dim``, to equal weights."""
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
    """Fill zero parameters, and enlarge small scales and biases."""
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
    """Scale parameters in this context, and restore their values afterwards, split or not.

    Args:
        root: the whole module, with equal parameters on all ranks.
        before: one execution, for the size of the layers' outputs.
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
