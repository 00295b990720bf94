"""The residual sums of a block's own code, replaced while it runs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from typing_extensions import override

_SUMS = frozenset({torch.add, Tensor.add, Tensor.add_})

Sum = Callable[[Tensor], Tensor]
"""Returns the sum for the output of a branch."""


class Sums(TorchFunctionMode):
    """Computes the residual sums ``x + F(x)`` and ``h + G(h)`` of a block by other functions of the branches' outputs.

    The first sum has the very tensor ``entered`` as a term, and each other one the result of the one before. ``x += F(x)``
    makes a new tensor here.

    Args:
        entered: the block's input.
        sums: the functions, in the order in which the sums are computed.

    Attributes:
        count: how many sums were computed so far.
        left: the result of the last one, a term of the next one. It may be set to another tensor, such as its norm.
    """

    apart_from_compiled = True

    def __init__(self, entered: Tensor, *sums: Sum) -> None:
        super().__init__()
        self._sums = sums
        self.count = 0
        self.left = entered

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _SUMS and len(args) == 2 and not kwargs and self.count < len(self._sums):
            a, b = args
            branch = b if a is self.left else a if b is self.left else None
            if isinstance(branch, Tensor) and branch is not self.left and branch.shape == self.left.shape:
                compute = self._sums[self.count]
                self.count += 1
                self.left = compute(branch)
                return self.left
        return func(*args, **(kwargs or {}))


def replaced(args: tuple[Any, ...], kwargs: dict[str, Any], old: Tensor, new: Tensor) -> tuple[Any, Any]:
    """Return the arguments of a call with ``new`` in all places of ``old``."""
    leaves, spec = tree_flatten((args, kwargs))
    return tree_unflatten([new if leaf is old else leaf for leaf in leaves], spec)


class Output:
    """The form of a module's output, to make a stand-in of the same form that takes no memory."""

    def __init__(self, output: Any) -> None:
        leaves, self._spec = tree_flatten(output)
        self._leaves: list[Any] = [
            (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        self._tensors = [isinstance(leaf, Tensor) for leaf in leaves]

    def stand_in(self) -> Any:
        """Return an output of zeros."""
        spec: TreeSpec = self._spec
        return tree_unflatten(
            [
                torch.zeros((), dtype=leaf[1], device=leaf[2]).expand(leaf[0]) if tensor else leaf
                for leaf, tensor in zip(self._leaves, self._tensors, strict=True)
            ],
            spec,
        )


Run = Callable[..., Any]
Around = Callable[[nn.Module, Run, tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def calls_of(modules: Iterable[nn.Module], around: Around) -> Iterator[None]:
    """Redirect the calls of ``modules``, hooks included, to ``around(module, run, args, kwargs)`` until the context ends."""
    put: list[tuple[dict[str, Any], str, Any]] = []

    def redirect(m: nn.Module) -> None:
        name = "_call_impl" if getattr(m, "_compiled_call_impl", None) is None else "_compiled_call_impl"
        run = getattr(m, name)
        put.append((m.__dict__, name, m.__dict__.get(name)))
        m.__dict__[name] = lambda *args, **kwargs: around(m, run, args, kwargs)

    try:
        for m in modules:
            redirect(m)
        yield
    finally:
        for namespace, name, had in reversed(put):
            if had is None:
                del namespace[name]
            else:
                namespace[name] = had
