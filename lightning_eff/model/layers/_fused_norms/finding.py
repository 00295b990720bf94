"""Finds LayerNorm and RMSNorm in any module: torch's by class, others by what they compute."""

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff._core import rng
from lightning_eff._core._architecture.record import tensors_of
from lightning_eff.kernels.norm import MAX_FUSED, layer_norm, rms_norm

#: The tolerance between a module and the formula, in float32.
_NEAR = 1e-5


@dataclass(frozen=True)
class Kind:
    """What a norm computes: ``n g + b`` with ``n`` of the formulas in ``kernels.norm``.

    Attributes:
        centred: whether it is LayerNorm; otherwise it is RMSNorm.
        eps: None for the machine epsilon of the input's dtype, the default of ``nn.RMSNorm``.
        added: added to the weight to give ``g``: 1 in Gemma's norms.
        weight: the name of the parameter; None for ``g`` of 1.
        bias: the name of the parameter; None for ``b`` of 0.
    """

    centred: bool
    eps: float | None
    added: float
    weight: str | None
    bias: str | None

    def __call__(self, m: nn.Module, x: Tensor) -> Tensor:
        """The norm of ``x`` over its last dimension, by one kernel if there is one for its device."""
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        gain: Tensor | None = None if self.weight is None else m._parameters[self.weight]
        bias: Tensor | None = None if self.bias is None else m._parameters[self.bias]
        if gain is not None and self.added:
            gain = gain.float() + self.added
        if self.centred:
            return layer_norm(x, torch.ones_like(bias) if gain is None and bias is not None else gain, bias, eps=eps)
        return rms_norm(x, gain, eps=eps)


def norms(root: nn.Module) -> dict[str, tuple[nn.Module, Kind | str]]:
    """The norms of ``root`` by path, each with its kind or the reason why it is skipped."""
    found: dict[str, tuple[nn.Module, Kind | str]] = {}
    for path, m in root.named_modules():
        if not path or not _may_be(m):
            continue
        kind = kind_of(m)
        if kind is not None:
            found[path] = m, kind
    return found


def _may_be(m: nn.Module) -> bool:
    """Whether a module is one of torch's norms, or is called a norm and has nothing but one or two vectors."""
    if isinstance(m, nn.LayerNorm | nn.RMSNorm):
        return True
    own = [p for p in m._parameters.values() if p is not None]
    holds = any(True for _ in m.children()) or any(b is not None for b in m._buffers.values())
    return "norm" in type(m).__name__.lower() and not holds and len(own) in (1, 2) and all(p.ndim == 1 for p in own)


def kind_of(m: nn.Module) -> Kind | str | None:
    """What a module computes, or why no kernel computes it; None if it does not normalise rows."""
    if isinstance(m, nn.LayerNorm | nn.RMSNorm) and len(m.normalized_shape) != 1:
        return f"it normalises over {len(m.normalized_shape)} dimensions, and the kernels only over the last one"
    if type(m).forward is nn.LayerNorm.forward:
        assert isinstance(m, nn.LayerNorm)
        names = ["weight" if m.weight is not None else None, "bias" if m.bias is not None else None]
        return _fitting(m, m.normalized_shape[0], Kind(True, m.eps, 0.0, names[0], names[1]))
    if type(m).forward is nn.RMSNorm.forward:
        assert isinstance(m, nn.RMSNorm)
        return _fitting(m, m.normalized_shape[0], Kind(False, m.eps, 0.0, None if m.weight is None else "weight", None))
    vectors = {name: p for name, p in m._parameters.items() if p is not None}
    sizes = {len(p) for p in vectors.values()}
    if len(sizes) != 1:
        return None
    if any(p.is_meta for p in vectors.values()):
        return "it is on the meta device, so its function cannot be checked"
    size = sizes.pop()
    seen = next((kind for kind in _kinds(m, list(vectors)) if _computes(m, kind, size)), None)
    return None if seen is None else _fitting(m, size, seen)


def _fitting(m: nn.Module, size: int, kind: Kind) -> Kind | str:
    if size > MAX_FUSED:
        return f"its rows have {size:,} elements, and the kernels take at most {MAX_FUSED:,}"
    if "forward" in m.__dict__:
        return "its instance has its own forward"
    return kind


def _kinds(m: nn.Module, vectors: list[str]) -> Iterator[Kind]:
    """The norms that the module may compute, from its parameters and its small numbers."""
    numbers = {value for value in vars(m).values() if isinstance(value, float) and 0.0 < value < 1e-2}
    for eps in sorted(numbers) or [1e-6, 1e-5]:
        for added in (0.0, 1.0):
            if len(vectors) == 1:
                yield Kind(False, eps, added, vectors[0], None)
            for weight in vectors:
                bias = next((name for name in vectors if name != weight), None)
                yield Kind(True, eps, added, weight, bias)


def _computes(m: nn.Module, kind: Kind, size: int) -> bool:
    """Whether a copy of ``m`` computes ``kind``, on rows so small that epsilon matters and on large ones."""
    required = [p for p in inspect.signature(m.forward).parameters.values() if p.default is p.empty]
    if len(required) != 1:
        return False
    memo: dict[int, Any] = {id(t): None for t in tensors_of(m).values()}
    twin = copy.deepcopy(m, memo)
    generator = torch.Generator().manual_seed(0)
    for name in [n for n, p in m._parameters.items() if p is not None]:
        twin._parameters[name] = nn.Parameter(torch.randn(size, generator=generator))
    rows = torch.randn(4, size, generator=generator) + 0.5
    with torch.no_grad(), rng.fork(), torch.autocast("cpu", enabled=False):
        for scale in (1e-3, 1.0, 30.0):
            try:
                y = twin(scale * rows)
            except Exception:  # it takes other inputs, so it does not normalise rows
                return False
            if not isinstance(y, Tensor) or y.shape != rows.shape:
                return False
            if not torch.allclose(y, kind(twin, scale * rows), rtol=_NEAR, atol=_NEAR):
                return False
    return True
