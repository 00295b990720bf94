"""Find the last linear layer of a network, which computes the logits of its loss, and its input."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff._core.losses import bind_loss
from lightning_eff._core.patches import hook_behind


class SeeTargets(TorchFunctionMode):
    """Records the arguments of a step's first loss call.

    Attributes:
        classes: the number of classes of its input, 1 if the input has one dimension, 0 if there was no call.
        labels: its target if that is one class per sample, else None.
        seen: a description of its target.
    """

    apart_from_compiled = True

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.classes = 0
        self.labels: list[int] | None = None
        self.seen = "no loss call of torch.nn.functional"

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        arguments = bind_loss(func, args, kwargs) if not self.classes else None
        if arguments is not None:
            z, target = arguments["input"], arguments["target"]
            of_classes = func in (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss)
            self.classes = 1 if z.ndim < 2 else z.shape[1] if of_classes else z.shape[-1]
            self.seen = f"a target of shape {tuple(target.shape)} and type {target.dtype}"
            if not target.is_floating_point() and target.numel() == self.size:
                self.labels = target.detach().flatten().tolist()
        return func(*args, **kwargs)


def linear_maps(module: nn.Module) -> dict[str, nn.Module]:
    """All linear layers of a module by their paths."""
    return {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear)}


def named_head(module: nn.Module, path: str, *, who: str) -> nn.Module:
    """Find the linear layer at ``path``.

    Raises:
        ValueError: if there is none, with a list of candidates.
    """
    maps = linear_maps(module)
    if path not in maps:
        raise ValueError(f"{who}(head={path!r}): there is no nn.Linear at this path. Choose one of {listed(maps)}.")
    return maps[path]


def listed(maps: dict[str, nn.Module], most: int = 5) -> str:
    """List the last ``most`` paths."""
    names = list(maps)
    return ("..., " if len(names) > most else "") + (", ".join(names[-most:]) or "none: the module has no nn.Linear")


class CalledMaps:
    """Records the calls of linear layers in their order, with the last size of each output.

    Args:
        module: the module to watch until :meth:`remove`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.calls: list[tuple[nn.Module, int]] = []
        self._handles: list[RemovableHandle] = [hook_behind(m, self._note) for m in linear_maps(module).values()]

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self.calls.append((module, output.shape[-1]))

    def last(self, size: int) -> nn.Module | None:
        """The layer that was called last among those whose output has this last size."""
        return next((module for module, last in reversed(self.calls) if last == size), None)

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()


def own_rows(x: Tensor, size: int) -> Tensor | None:
    """Reshape ``x``, (B, ..., d) or (B n, d), to (B, n, d) by sample, or return None if it has another layout."""
    return None if x.ndim < 2 or x.shape[0] % size else x.reshape(size, -1, x.shape[-1])
