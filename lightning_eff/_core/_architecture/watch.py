"""Whether a module's forward pass goes through what was swapped in, or uses its parameters past it."""

import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_eff._core._architecture.record import Swap, swapped
from lightning_eff._core.patches import Patches

#: What computes with a weight and another tensor; penalties on weights alone, such as ``w.pow(2).sum()``, are no bypass.
_USES = {
    *("linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum"),
    *("embedding", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "multi_head_attention_forward"),
}
_VIEWS = {"t", "transpose", "permute", "T", "mT", "swapaxes", "contiguous"}


class BypassWatch(TorchFunctionMode):
    """Raises where code uses a parameter of a swapped module while neither that module nor another owner runs.

    So do a ``forward`` that computes ``F.linear(x, self.fc.weight)``, ``nn.MultiheadAttention`` with its ``out_proj``, and one
    that holds the plain module in a list: what was put in would have no effect, and nothing would say so. It stands around
    one pass; compiled code is not looked into.
    Parameters that a replacement names in ``as_before`` mean by themselves what they meant before, so that others may use
    them: an embedding's weight, of which a head makes logits.

    Args:
        module: the module tree.

    Attributes:
        ran: a swapped module, or another owner of its parameters, was called.

    Raises:
        ValueError: in the pass.
    """

    apart_from_compiled = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.ran = False
        self._of: dict[int, tuple[str, Swap, str]] = {}
        self._running: dict[int, int] = {}
        self._owners: dict[int, set[int]] = {}
        self._patches = Patches()
        self._views: list[Any] = []
        self._who = type(module).__name__
        watched: dict[int, nn.Module] = {}
        for path, m, swap in swapped(module):
            for name, p in m.named_parameters():
                if name in getattr(m, "as_before", ()):
                    continue
                self._of[id(p)] = path, swap, name
                self._owners.setdefault(id(p), set()).add(id(m))
            watched[id(m)] = m
        for m in module.modules():
            for p in m.parameters(recurse=False):
                if id(p) in self._of:
                    self._owners[id(p)].add(id(m))
                    watched[id(m)] = m
        self._watched = list(watched.values())

    @override
    def __enter__(self) -> Self:
        for m in self._watched:
            if not isinstance(inspect.getattr_static(type(m), "forward"), property):  # else a block that does not run
                self._patches.set(m, "forward", self._noting(m))
        return super().__enter__()

    @override
    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._patches.restore()
        self._running.clear()
        self._views.clear()

    def _noting(self, m: nn.Module) -> Callable[..., Any]:
        forward = m.forward

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.ran = True
            self._running[id(m)] = self._running.get(id(m), 0) + 1
            try:
                return forward(*args, **kwargs)
            finally:
                self._running[id(m)] -= 1

        return noted

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        if name in _USES:
            self._look(name, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
        result = func(*args, **kwargs)
        if name in _VIEWS and args and id(args[0]) in self._of:
            self._of[id(result)], self._owners[id(result)] = self._of[id(args[0])], self._owners[id(args[0])]
            self._views.append(result)  # so that its id is not given to another
        return result

    def _look(self, name: str, tensors: list[Tensor]) -> None:
        if all(id(t) in self._of for t in tensors):
            return
        for t in tensors:
            if id(t) in self._of and not any(self._running.get(owner) for owner in self._owners[id(t)]):
                path, swap, parameter = self._of[id(t)]
                raise ValueError(
                    f"{swap.by}: {self._who} uses {path}.{parameter} itself ({name}) and does not call {path}, so what"
                    f" {swap.by}"
                    f" put there would have no effect. Leave {path} out of it, or let the forward pass call self.{path}(...)."
                )


def _name(func: Any) -> str:
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name
