"""Find the linear layers that a step calls, and replace the outputs of some of them by placeholders.

A layer is an ``nn.Linear``, or a product with a parameter of the module, such as ``F.linear(x, self.embed.weight)`` or
``x @ self.embed.weight.T``. In a first pass, all of them return placeholders, so that even there no logits are stored. The
layers whose outputs reach a cross-entropy are recorded, and only these return placeholders in later steps. For an
``nn.Linear``, its instance's ``forward`` is replaced meanwhile; only products need a torch function mode.
"""

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_eff._core._needs.gathered import is_piece, parameter_of
from lightning_eff._core.losses import LOSSES
from lightning_eff._core.patches import Patches
from lightning_eff.data.tokens._head.calls import Maker
from lightning_eff.data.tokens._head.stand_in import Logits, stand_in


@dataclass(frozen=True, eq=False)
class Site:
    """A linear layer of the module.

    Attributes:
        name: its path, or that of its parameter for a product.
        module: the ``nn.Linear``; None for a product.
        weight: the parameter; None if an ``nn.Linear`` computes its weight.
        classes: V, the number of outputs.
        inputs: D, the number of inputs.
    """

    name: str
    module: nn.Linear | None
    weight: nn.Parameter | None
    classes: int
    inputs: int

    def __str__(self) -> str:
        return self.name

    @property
    def key(self) -> int:
        """The key that distinguishes it from other layers."""
        return id(self.weight if self.module is None else self.module)

    @property
    def saved(self) -> list[Any]:
        """The arguments for :func:`site_at`."""
        return [self.name, self.module is not None, self.classes, self.inputs]


def site_at(root: nn.Module, name: str, called: bool, classes: int, inputs: int) -> Site:
    """Return the layer of this name: an ``nn.Linear``, or, if it is not called, a parameter."""
    module = root.get_submodule(name) if called else None
    if module is not None and not is_plain(module):
        name, module = f"{name}.weight", None  # what its own forward does around the product stays
    if module is None:  # as it is registered, which reading the attribute may not give
        path, _, key = name.rpartition(".")
        weight = root.get_submodule(path)._parameters.get(key)
        if weight is None:
            raise ValueError(f"FusedLinearCrossEntropy: the module has no parameter {name!r} any more.")
    else:
        weight = module._parameters.get("weight")
    assert module is None or isinstance(module, nn.Linear), "checkpoints are of the same module"
    return Site(name, module, weight, classes, inputs)


class Maps(TorchFunctionMode):
    """Lets calls of linear layers return placeholders while it is active.

    Args:
        root: the LightningModule.
        maker: the creator of placeholders.
        products: the parameters whose products are replaced; None for all layers.

    Attributes:
        losses: if all layers are watched, the loss calls whose input comes from none of them.
        divided: the names of parameters that are multiplied with in pieces.
    """

    def __init__(self, root: nn.Module, maker: Maker, products: Collection[nn.Parameter] | None = None) -> None:
        super().__init__()
        self.maker = maker
        self.all = products is None
        self.losses: list[str] = []
        self.divided: dict[str, None] = {}
        self._paths = {id(m): path for path, m in root.named_modules()}
        self._names = {id(p): name for name, p in root.named_parameters()}
        self._sites: dict[int, Site] = {}
        self._wanted = {id(p) for p in products or ()}

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = _READ.get(func)
        if self.all and func in LOSSES and not any(isinstance(arg, Logits) for arg in (*args, *kwargs.values())):
            self.losses.append(f"F.{func.__name__} at {reader()}")
        if read is not None and (self.all or torch.is_grad_enabled()) and not torch.compiler.is_compiling():
            product = read(*args, **kwargs)
            if product is not None and is_piece(product[1]):
                self._note_divided(product[1])
                product = None
            site = None if product is None else self._site(func, product[1])
            if product is not None and site is not None:
                made = stand_in(self.maker, site, *product)
                if made is not None:
                    return made
        return func(*args, **kwargs)

    def _note_divided(self, weight: Tensor) -> None:
        name = self._names.get(id(weight if weight._base is None else weight._base))
        if name is not None:
            self.divided.setdefault(name)

    def _site(self, func: Any, weight: Tensor) -> Site | None:
        root = parameter_of(weight)
        if not self.all and id(root) not in self._wanted:
            return None
        module = _linear(sys._getframe(2)) if func is F.linear and self.all else None
        if module is not None and id(module) not in self._paths:
            module = None
        if module is None and id(root) not in self._names:
            return None
        key = id(root if module is None else module)
        if key not in self._sites:
            name = self._names[key] if module is None else self._paths[key]
            self._sites[key] = Site(name, module, root if isinstance(root, nn.Parameter) else None, *weight.shape)
        return self._sites[key]


Product = tuple[Any, Tensor, Tensor | None]


def _of_linear(input: Any, weight: Any, bias: Any = None) -> Product | None:
    return (input, weight, bias) if isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor)) else None


def _of_matmul(input: Any, other: Any, **kwargs: Any) -> Product | None:
    if kwargs or not isinstance(input, Tensor) or not isinstance(other, Tensor) or other.ndim != 2 or input.ndim < 2:
        return None
    return (input, other.t(), None) if _of_parameter(other) else None


def _of_addmm(input: Any, mat1: Any, mat2: Any, **kwargs: Any) -> Product | None:
    """Recognize Hugging Face's Conv1D."""
    if kwargs or not all(isinstance(t, Tensor) for t in (input, mat1, mat2)) or input.shape != mat2.shape[1:]:
        return None
    return (mat1, mat2.t(), input) if _of_parameter(mat2) else None


def _of_parameter(weight: Tensor) -> bool:
    return isinstance(parameter_of(weight), nn.Parameter)


_READ: dict[Any, Callable[..., Product | None]] = {
    F.linear: _of_linear,
    torch.addmm: _of_addmm,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _of_matmul),
}


def _linear(frame: FrameType | None) -> nn.Linear | None:
    """Return the ``nn.Linear`` whose ``forward`` called torch, looking through this package's frames."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("lightning_eff."):
        frame = frame.f_back
    if frame is None or frame.f_code is not nn.Linear.forward.__code__:
        return None
    found = frame.f_locals.get("self")
    return found if is_plain(found) else None


def is_plain(module: Any) -> bool:
    """Return whether a module is an ``nn.Linear`` whose output is that of ``nn.Linear.forward``, with no code around it."""
    own = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return own and "forward" not in vars(module)


def reader() -> str:
    """Return the file, line and function in the user's code, outside torch and this package, of the running call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("lightning_eff", "torch"):
        frame = frame.f_back
    if frame is None:
        return "torch"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


class Window:
    """Lets some layers return placeholders, from :meth:`open` to :meth:`close`.

    Args:
        root: the LightningModule.
        maker: the creator of placeholders.
        sites: the layers.
    """

    def __init__(self, root: nn.Module, maker: Maker, sites: Collection[Site]) -> None:
        self._maker = maker
        self._modules = [(site, site.module) for site in sites if site.module is not None]
        products = [site.weight for site in sites if site.module is None and site.weight is not None]
        self._mode = Maps(root, maker, products) if products else None
        self._patches = Patches()
        self._open = False

    def open(self) -> bool:
        """Begin, and return whether it had not begun already."""
        if self._open:
            return False
        self._open = True
        for site, module in self._modules:
            self._patches.set(module, "forward", self._forward(site, module))
        if self._mode is not None:
            self._mode.__enter__()
        return True

    def close(self) -> None:
        """Restore everything."""
        if not self._open:
            return
        self._open = False
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
        self._patches.restore()

    def _forward(self, site: Site, module: nn.Linear) -> Callable[[Any], Tensor]:
        def forward(input: Any) -> Tensor:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                made = stand_in(self._maker, site, input, module.weight, module.bias)
                if made is not None:
                    return made
            return type(module).forward(module, input)

        return forward
