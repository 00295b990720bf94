"""The last linear map of a network, which makes the logits of its loss, and what comes into it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff._core.losses import bind_loss
from lightning_eff._core.patches import hook_behind


class SeeTargets(TorchFunctionMode):
    """Note what the first loss call of a step is given.

    Attributes:
        classes: the last size of its input, over classes; 1 where the input has one dimension. 0 where there was no call.
        labels: its target where that is one class for each sample, else None.
        seen: what its target was, in words.
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
    """Every module that multiplies its input with a matrix, by its path."""
    return {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear)}


def named_head(module: nn.Module, path: str, *, who: str) -> nn.Module:
    """The linear map at ``path``.

    Raises:
        ValueError: if there is none there, with those that there are.
    """
    maps = linear_maps(module)
    if path not in maps:
        raise ValueError(f"{who}(head={path!r}): there is no nn.Linear at this path; expected one of {listed(maps)}.")
    return maps[path]


def listed(maps: dict[str, nn.Module], most: int = 12) -> str:
    """Their paths, the last ones where there are many."""
    names = list(maps)
    return ("..., " if len(names) > most else "") + (", ".join(names[-most:]) or "none: the module has no nn.Linear")


class CalledMaps:
    """Which linear maps are called, in their order, each with the last size of what it gives.

    Args:
        module: whose maps are watched until :meth:`remove`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.calls: list[tuple[nn.Module, int]] = []
        self._handles: list[RemovableHandle] = [hook_behind(m, self._note) for m in linear_maps(module).values()]

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self.calls.append((module, output.shape[-1]))

    def last(self, size: int) -> nn.Module | None:
        """The one that was called last of those whose output has this last size."""
        return next((module for module, last in reversed(self.calls) if last == size), None)

    def remove(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()


def own_rows(x: Tensor, size: int) -> Tensor | None:
    """``x``, (B, ..., d) or (B n, d) with the batch first, by sample, (B, n, d); None if it does not lie so."""
    return None if x.ndim < 2 or x.shape[0] % size else x.reshape(size, -1, x.shape[-1])
