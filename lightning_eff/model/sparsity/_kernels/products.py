"""Linear layers whose products with a masked weight run sparse kernels where those run, and are dense elsewhere.

Masks are chosen elsewhere, and the kernels only multiply. The gradient of a weight is always a dense product, because it is
needed for all elements, or because torch has no kernel that computes only some.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lightning_eff._core._architecture.linear_maps import LinearMap, linear_maps, unfit
from lightning_eff._core._stack.partial_views import Worn, worn, worn_by
from lightning_eff._core.session import Session

#: Which products multiply masked weights.
Backend = Literal["auto", "sparse", "dense"]
_HALF = (torch.float16, torch.bfloat16)


class Packed(ABC):
    """A masked weight ``W`` of (out, in), packed for sparse kernels.

    Attributes:
        multiple: what divides the number of rows ``n`` of each product.
    """

    multiple: int

    @abstractmethod
    def times(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x W^T + bias``, (n, out), for contiguous ``x`` of (n, in); it is no view."""

    @abstractmethod
    def back(self, g: Tensor) -> Tensor | None:
        """Return ``g W``, (n, in), for contiguous ``g`` of (n, out). None if no kernel computes it."""


@dataclass(frozen=True)
class Kernels:
    """The sparse kernels of a technique.

    Attributes:
        name: what messages call them.
        unavailable: returns why they do not run on a device, or None.
        unfit: returns why they do not take a weight, given its name, its layer and the type of the product, or None.
        pack: packs a masked weight, given its name, the weight as (out, in) in half precision, and whether a backward pass
            follows.
    """

    name: str
    unavailable: Callable[[torch.device], str | None]
    unfit: Callable[[str, LinearMap, torch.dtype], str | None]
    pack: Callable[[str, Tensor, bool], Packed]


class SparseProducts:
    """Multiplies masked weights by sparse kernels.

    A product is dense if something else has changed the weight since it was masked, in compiled code, and within torch.func.

    Args:
        kernels: the kernels; None only with "dense".
        backend: "auto" runs them where they run, "sparse" requires that they run for some weight, "dense" runs none.
        who: the technique.

    Attributes:
        ran: the names of the weights that kernels have multiplied.
    """

    def __init__(self, kernels: Kernels | None = None, backend: Backend = "dense", *, who: str = "") -> None:
        self.kernels, self.backend, self.who = kernels, backend, who
        self.ran: set[str] = set()
        self._layers: list[tuple[nn.Module, _Layer]] = []
        self._clean: dict[str, int] = {}  # the version of each weight when it was masked
        self._packed: dict[str, tuple[torch.dtype, bool, Packed]] = {}

    def __reduce__(self) -> Any:
        return SparseProducts, (), {"ran": self.ran}  # a copy of the technique belongs to no module

    def find(self, session: Session, parameters: Mapping[str, nn.Parameter]) -> None:
        """Choose the layers whose masked weights the kernels multiply, and say once which, and why others are not.

        Raises:
            ValueError: with "sparse", if there is none.
        """
        self._layers = []
        if self.backend == "dense" or self.kernels is None:
            return
        name = self.kernels.name
        why = self.kernels.unavailable(session.trainer.strategy.root_device)
        reasons = why or self._sorted(session, parameters)
        found = {layer.name for _, layer in self._layers}
        if not found and self.backend == "sparse":
            raise ValueError(
                f"{self.who}(backend='sparse'): {name} multiply none of the {len(parameters)} masked weights: {reasons}. Give"
                " backend='auto' for dense products where they do not run."
            )
        if not found:
            rank_zero_info(f"{self.who}: masked weights are multiplied densely: {reasons}.")
        else:
            rest = f" The others are multiplied densely: {reasons}." if reasons else ""
            rank_zero_info(f"{self.who}: {name} multiply {len(found)} of {len(parameters)} masked weights.{rest}")

    def _sorted(self, session: Session, parameters: Mapping[str, nn.Parameter]) -> str:
        """Choose the layers, and return why the kernels do not multiply the other weights, by reason."""
        names, left = {id(p): name for name, p in parameters.items()}, dict[str, dict[str, None]]()
        maps = [(m, names[id(m.module.weight)]) for m in linear_maps(session.module) if id(m.module.weight) in names]
        for m, name in maps:
            reason = self._unfit(session, name, parameters[name], m)
            if reason is None:
                self._layers.append((m.module, _Layer(self, name, parameters[name], m.transposed)))
            else:
                left.setdefault(reason, {})[name] = None
        if others := [name for name in parameters if name not in {name for _, name in maps}]:
            left["no nn.Linear or Conv1D has it"] = dict.fromkeys(others)
        told = {reason: [*[*some][:5], *(["..."] if len(some) > 5 else [])] for reason, some in left.items()}
        return "; ".join(f"{', '.join(some)} ({reason})" for reason, some in told.items())

    def _unfit(self, session: Session, name: str, p: nn.Parameter, m: LinearMap) -> str | None:
        if reason := unfit(m):
            return reason
        if "forward" in m.module.__dict__ or isinstance(m.module, Worn):
            return "its layer computes in a way of its own"
        if hasattr(p, "device_mesh"):
            return "it is sharded"
        device = session.trainer.strategy.root_device
        with session.trainer.precision_plugin.forward_context():
            dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else p.dtype
        if dtype not in _HALF:
            return f"it is multiplied in {str(dtype).removeprefix('torch.')}, not in float16 or bfloat16"
        assert self.kernels is not None
        return self.kernels.unfit(name, m, dtype)

    @contextmanager
    def worn(self) -> Iterator[None]:
        """Let the layers use the kernels until the context ends."""
        with worn(_Sparse, [m for m, _ in self._layers], [layer for _, layer in self._layers]):
            yield

    def masked(self, name: str, p: Tensor) -> None:
        """Take note that a weight has been masked just now."""
        if self._layers:
            self._packed.pop(name, None)
            self._clean[name] = p._version

    def clear(self) -> None:
        """Forget all packed weights, because the module no longer has the masked ones."""
        self._packed.clear()
        self._clean.clear()

    def release(self) -> None:
        """Forget the module."""
        self.clear()
        self._layers = []

    def packed(self, layer: "_Layer", dtype: torch.dtype) -> Packed | None:
        """Return the packed weight, or None if something else has changed the weight since it was masked."""
        name, p, training = layer.name, layer.parameter, torch.is_grad_enabled()
        if p._version != self._clean.get(name):
            return None
        held = self._packed.get(name)
        if held is None or held[0] != dtype or (training and not held[1]):
            assert self.kernels is not None
            with torch.no_grad():
                w = p.detach().to(dtype)
                held = dtype, training, self.kernels.pack(name, w.t() if layer.transposed else w, training)
            self._packed[name] = held
        self.ran.add(name)
        return held[2]


@dataclass(frozen=True)
class _Layer:
    """A linear layer's part in this.

    Attributes:
        products: those that it belongs to.
        name: of its weight.
        parameter: its weight.
        transposed: whether the weight is (in, out).
    """

    products: SparseProducts
    name: str
    parameter: nn.Parameter
    transposed: bool

    def run(self, m: nn.Module, x: Tensor) -> Tensor | None:
        """Return the layer's output, or None if its own ``forward`` has to compute it."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return None
        if m.weight is not self.parameter or type(x) not in (Tensor, nn.Parameter) or not x.numel():
            return None
        device = x.device.type
        mixed = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if mixed else self.parameter.dtype
        if dtype not in _HALF or (x.dtype != dtype and not (mixed and x.dtype in (*_HALF, torch.float32))):
            return None
        packed = self.products.packed(self, dtype)
        if packed is None:
            return None
        with torch.autocast(device, enabled=False):
            rows = x.reshape(-1, x.shape[-1]).to(dtype)
            y: Any = _Product.apply(whole(rows, packed.multiple), self.parameter, m.bias, packed, self.transposed)
        # outside, because views that a Function makes must not be changed in place
        return y[: len(rows)].view(*x.shape[:-1], y.shape[-1])


class _Sparse(Worn):
    """A linear layer that uses the kernels."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (x,) = (*args, *kwargs.values())  # nn.Linear calls it input, Conv1D x
        y = worn_by(self).run(self, x)
        return super().forward(x) if y is None else y  # pyright: ignore[reportAttributeAccessIssue]


class _Product(torch.autograd.Function):
    """``x W^T + b`` and its gradients, for a weight of which ``packed`` holds the elements that are not zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, packed: Packed, transposed: bool) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.packed, ctx.transposed = packed, transposed
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return packed.times(x.contiguous(), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,) = grads
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_weight, of_bias = ctx.dtypes
        dx = dw = db = None
        with torch.autocast(g.device.type, enabled=False):
            if needs_x:
                # a gradient that is differentiated again is a function of the weight itself
                dx = None if torch.is_grad_enabled() else ctx.packed.back(g.contiguous())
                if dx is None:
                    w = weight.to(g.dtype)
                    dx = g @ (w.t() if ctx.transposed else w)
            if needs_weight:
                dw = (x.t() @ g if ctx.transposed else g.t() @ x).to(of_weight)
            if needs_bias:
                db = g.sum(0).to(of_bias)
        return dx, dw, db, None, None


def whole(x: Tensor, multiple: int) -> Tensor:
    """Return ``x``, (n, k), with rows of zeros behind it, so that ``multiple`` divides their number."""
    more = -len(x) % multiple
    return F.pad(x, (0, 0, 0, more)) if more else x


def below(device: torch.device, what: str) -> str | None:
    """Return why ``what``, which needs a CUDA device of compute capability 8.0 or more, does not run on a device, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        kind = "ROCm device" if device.type == "cuda" else device.type.upper()
        return f"{what} need a CUDA device, and this is a {kind}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"{what} need compute capability 8.0, and the device has {major}.{minor}"
    return None


def failed_trial(run: Callable[[], tuple[Tensor, Tensor]]) -> str | None:
    """Return why kernels are not used, given a function that returns their result for whole numbers, and the right one."""
    try:
        found, right = run()
    except Exception as error:  # whatever a library of another version raises
        return f"a trial product failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None if torch.equal(found, right) else "a trial product gave wrong numbers"
