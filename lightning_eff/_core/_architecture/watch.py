"""Check that a module's forward pass calls the replacements, and does not use their parameters directly."""

import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_eff._core._architecture.record import Swap, swapped
from lightning_eff._core._stack.walking import modules_of, parameters_by_name, without_collections
from lightning_eff._core.patches import Patches

#: Functions of a weight and another tensor. Penalties on weights alone, such as ``w.pow(2).sum()``, are allowed.
_USES = {
    *("linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum"),
    *("embedding", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "multi_head_attention_forward"),
}
_VIEWS = {"t", "transpose", "permute", "T", "mT", "swapaxes", "contiguous"}


class BypassWatch(TorchFunctionMode):
    """Raises an error if code uses a parameter of a replacement while neither the replacement nor another owner runs.

    Then the replacement would silently have no effect. Examples are a ``forward`` that computes ``F.linear(x,
    self.fc.weight)``, ``nn.MultiheadAttention`` with its ``out_proj``, and a module that keeps the plain module in a list. The
    mode is entered around one pass; compiled code is not observed.

    Parameters that a replacement names in ``as_before`` keep their meaning, so other modules may use them. An example is an
    embedding's weight from which a head computes logits.

    Args:
        module: the module tree.

    Attributes:
        ran: whether a replacement, or another owner of its parameters, was called.

    Raises:
        ValueError: in the pass.
    """

    apart_from_compiled = True

    @without_collections()
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
            for name, p in parameters_by_name(m):
                if name in getattr(m, "as_before", ()):
                    continue
                self._of[id(p)] = path, swap, name
                self._owners.setdefault(id(p), set()).add(id(m))
            watched[id(m)] = m
        for m in modules_of(module):
            for p in m._parameters.values():
                if id(p) in self._of:
                    self._owners[id(p)].add(id(m))
                    watched[id(m)] = m
        self._watched = list(watched.values())

    @override
    @without_collections()
    def __enter__(self) -> Self:
        for m in self._watched:
            if not isinstance(inspect.getattr_static(type(m), "forward"), property):  # otherwise the block does not run
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
            self._views.append(result)  # so that its id is not reused
        return result

    def _look(self, name: str, tensors: list[Tensor]) -> None:
        if all(id(t) in self._of for t in tensors):
            return
        for t in tensors:
            if id(t) in self._of and not any(self._running.get(owner) for owner in self._owners[id(t)]):
                path, swap, parameter = self._of[id(t)]
                raise ValueError(
                    f"{swap.by}: {self._who} uses {path}.{parameter} directly ({name}) and does not call {path}, so {swap.by}"
                    f" would have no effect there. Leave {path} out of it, or call self.{path}(...) in the forward pass."
                )


def _name(func: Any) -> str:
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name
