"""The first layer that reads an image, and the mean and covariance of its inputs."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff._core._branches.graph import Graph
from lightning_eff._core.batches import num_samples
from lightning_eff._core.passes import unseen
from lightning_eff._core.patches import hook_before
from lightning_eff._core.session import Session
from lightning_eff._core.steps import takes_index


class _Stop(Exception):
    """The first layer was reached, so the rest of the step need not run."""


@dataclass(frozen=True)
class FirstMap:
    """A layer whose input no other layer computed.

    Attributes:
        name: the name of its weight.
        owner: an ``nn.Linear``, an ``nn.Conv2d`` or an ``nn.Conv3d`` without groups.
    """

    name: str
    owner: nn.Module

    @property
    def weight(self) -> Tensor:
        """The weight, of shape (out, ...)."""
        return self.owner.weight  # pyright: ignore[reportReturnType]

    @property
    def bias(self) -> Tensor | None:
        """The bias, of shape (out,), or None."""
        return self.owner.bias  # pyright: ignore[reportReturnType]

    def patches(self, x: Tensor) -> Tensor:
        """Return the vectors of an input by which the rows of the weight are multiplied: shape (n, p), without padding."""
        owner = self.owner
        if isinstance(owner, nn.Linear):
            return x.flatten(0, -2)
        assert isinstance(owner, nn.Conv2d | nn.Conv3d)
        if isinstance(owner, nn.Conv2d):
            found = F.unfold(x.float(), owner.kernel_size, owner.dilation, 0, owner.stride)  # pyright: ignore[reportArgumentType]
            return found.mT.flatten(0, 1)
        for dim, (size, step) in enumerate(zip(owner.kernel_size, owner.stride, strict=True), start=2):
            x = x.unfold(dim, size, step)
        return x.movedim(1, 4).flatten(4).flatten(0, 3)

    def moments(self, session: Session, batches: Iterable[Any]) -> tuple[Tensor, Tensor, int]:
        """Return the mean (p,) and the sum of outer products (p, p) of all patches, in float64 on the CPU, and their
        number.

        The step runs up to this layer.
        """
        size = self.weight[0].numel()
        first, second, count = torch.zeros(size).double(), torch.zeros(size, size).double(), 0
        seen: list[Tensor] = []

        def note(_: nn.Module, args: tuple[Any, ...]) -> None:
            seen.append(args[0].detach())
            raise _Stop

        original = session.own_step
        handle = hook_before(self.owner, note)
        try:
            with unseen(session):
                for index, batch in enumerate(batches):
                    with suppress(_Stop):
                        original(batch, *((index,) if takes_index(original) else ()))
                    for x in seen:
                        rows = self.patches(x).to(torch.float64 if x.device.type != "mps" else torch.float32)
                        first += rows.sum(dim=0).double().cpu()
                        second += (rows.mT @ rows).double().cpu()
                        count += len(rows)
                    seen.clear()
        finally:
            handle.remove()
        return first / max(count, 1), second, count


class _Inputs:
    """The first inputs of layers."""

    def __init__(self) -> None:
        self.first: dict[str, tuple[nn.Module, Tensor]] = {}

    def chosen(self, graph: Graph, batch: Any) -> FirstMap | None:
        """Return the first layer of the graph that reads images, or patches of them, and no other layer's output."""
        for node in graph.order:
            at = graph.map_at(node)
            if at is None or at[1] or at[0] not in self.first:
                continue
            owner, x = self.first[at[0]]
            if x.is_floating_point() and x.ndim >= 3 and _fits(owner, x) and x.shape[0] % num_samples(batch) == 0:
                return FirstMap(at[0], owner)
        return None


def _fits(owner: nn.Module, x: Tensor) -> bool:
    if isinstance(owner, nn.Conv2d):
        return x.ndim == 4 and owner.groups == 1
    if isinstance(owner, nn.Conv3d):
        return x.ndim == 5 and owner.groups == 1 and set(owner.dilation) == {1}
    return True


@contextmanager
def first_map(module: nn.Module) -> Iterator[_Inputs]:
    """Record the first input of each linear layer and of each convolution in two or three dimensions."""
    found = _Inputs()
    with ExitStack() as scope:
        for path, owner in module.named_modules():
            if isinstance(owner, nn.Linear | nn.Conv2d | nn.Conv3d) and "weight" in owner._parameters:
                name = f"{path}.weight" if path else "weight"

                def note(owner: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
                    if args and isinstance(args[0], Tensor):
                        found.first.setdefault(name, (owner, args[0].detach()))

                scope.callback(hook_before(owner, note).remove)
        yield found
