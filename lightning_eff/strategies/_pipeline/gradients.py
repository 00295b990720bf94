"""Sums the gradients of parameters that several pipeline ranks hold, since each rank has a part."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_eff.strategies._hybrid.shards import all_reduce_gradients
from lightning_eff.strategies._pipeline.memory import registered

_GROUPS: dict[tuple[int, ...], tuple[Any, ProcessGroup]] = {}


def group_of(members: tuple[int, ...]) -> ProcessGroup:
    """Return a process group of these global ranks, which include this one, for all runs of this process.

    Only its members create it. torch names such a group by its ranks, so it could not be created again after its end. The
    name would lead to the addresses of the first group.
    """
    world, made = _GROUPS.get(members, (None, None))
    if made is None or world is not dist.group.WORLD:
        made = dist.new_group(list(members), use_local_synchronization=True)
        assert isinstance(made, ProcessGroup)
        _GROUPS[members] = dist.group.WORLD, made
    return made


class SharedGradients:
    """Sums gradients over pipeline ranks.

    Args:
        module: the module. Parameters are looked up by name, because sharding replaces them.
        holders: names and group ranks of each parameter that this rank shares, in the same order on all ranks.
        group: the pipeline ranks.
    """

    def __init__(
        self, module: nn.Module, holders: Mapping[tuple[str, ...], tuple[int, ...]], group: ProcessGroup
    ) -> None:
        self.module, self.group = module, group
        self._names: dict[tuple[int, ...], list[tuple[str, ...]]] = {}
        for names, ranks in holders.items():
            self._names.setdefault(ranks, []).append(names)
        everyone = tuple(range(dist.get_world_size(group)))
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        for ranks in sorted(self._names):
            if ranks == everyone:
                self._groups[ranks] = group
            else:
                self._groups[ranks] = group_of(tuple(dist.get_global_rank(group, rank) for rank in ranks))

    def parameters(self) -> list[nn.Parameter]:
        """Return the shared parameters of this rank."""
        return [p for names in self._names.values() for p in self._of(names)]

    def by_name(self) -> dict[str, nn.Parameter]:
        """Return the shared parameters of this rank by first name in the whole module, including frozen ones."""
        return {each[0]: registered(self.module, *each) for names in self._names.values() for each in names}

    def _of(self, names: list[tuple[str, ...]]) -> list[nn.Parameter]:
        return [p for each in names if (p := registered(self.module, *each)).requires_grad]

    def set_aside(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Remove and return gradients that were summed before, from earlier batches of an accumulation window."""
        kept = [(p, p.grad) for p in self.parameters() if p.grad is not None]
        for p, _ in kept:
            p.grad = None
        return kept

    def put_back(self, kept: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Add the removed gradients to the new ones."""
        for p, grad in kept:
            p.grad = grad if p.grad is None else p.grad.add_(grad)

    def reduce(self) -> None:
        """Sum gradients over the ranks; a gradient that no rank has stays None."""
        for ranks in sorted(self._names):
            all_reduce_gradients(self._of(self._names[ranks]), self._groups[ranks])
