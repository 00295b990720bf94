"""Blocks inserted between others that start from a moving average of the weights (momentum growth, Li et al. 2022)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_eff._core.blocks import BlockStack, signature
from lightning_eff._core.optimizers import copy_state
from lightning_eff._core.passes import restoring
from lightning_eff.model.growth._sizes.depth import check_distinct


def interpolated(count: int, grown: int) -> list[int]:
    """Return for each of ``grown`` blocks which of ``count`` blocks it comes from; copies stand behind their source.

    With ``grown = q count + r``, the first ``count - r`` blocks become ``q`` each, and the last ``r`` become ``q + 1``.
    """
    q, r = divmod(grown, count)
    return [i for i in range(count) for _ in range(q + (i >= count - r))]


def added(sources: Sequence[int]) -> list[int]:
    """Return which blocks of :func:`interpolated` are new: all but the first that comes from its source."""
    return [j for j in range(1, len(sources)) if sources[j] == sources[j - 1]]


def skipped(sources: Sequence[int], depth: int) -> frozenset[int]:
    """Return which blocks the sub-network of ``depth`` blocks skips: the first of the new ones."""
    return frozenset(added(sources)[: len(sources) - depth])


def decayed(elapsed: float, half_life: float) -> float:
    """Return ``m = 2^(-elapsed / half_life)``, the weight of the old average."""
    return 2.0 ** (-elapsed / half_life)


class Momentum:
    """Keeps ``w' = m w' + (1 - m) w``, the moving average of a module's weights by name, in single precision or higher."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.held: dict[str, Tensor] = {}
        self._names = {id(p): name for name, p in module.named_parameters()}

    def name(self, parameter: Tensor) -> str:
        """Return the name under which a parameter of the module is kept."""
        return self._names[id(parameter)]

    @torch.no_grad()
    def follow(self, m: float) -> None:
        """Update the averages with the weights that train now; new weights start their own."""
        old: list[Tensor] = []
        present: list[Tensor] = []
        for name, w in self._module.named_parameters():
            if name in self.held:
                old.append(self.held[name])
                present.append(w.detach().to(self.held[name].dtype))
            elif w.requires_grad and w.is_floating_point():
                self.held[name] = w.detach().to(torch.promote_types(w.dtype, torch.float32), copy=True)
        if old:
            torch._foreach_lerp_(old, present, 1.0 - m)  # pyright: ignore[reportPrivateImportUsage]

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Put the averages into the module until the context ends."""
        there = {name: p for name, p in self._module.named_parameters() if name in self.held}
        with restoring(there.values()):
            with torch.no_grad():
                for name, p in there.items():
                    p.copy_(self.held[name])
            yield

    def to(self, devices: Mapping[str, torch.device]) -> None:
        """Move averages from a checkpoint to the devices of the module's weights."""
        self.held = {name: value.to(devices[name]) for name, value in self.held.items() if name in devices}


class Growth:
    """Moves the blocks of a stack, with their optimizer state and their averages.

    Args:
        stack: the stack of blocks.
        optimizers: those of the run.
        momentum: the averages.
        copies_state: whether new blocks copy the optimizer state of their source.
    """

    def __init__(
        self, stack: BlockStack, optimizers: Sequence[Optimizer], momentum: Momentum, *, copies_state: bool
    ) -> None:
        self._stack = stack
        self._optimizers = [*optimizers]
        self._momentum = momentum
        self._copies_state = copies_state

    def grow(self, sources: Sequence[int]) -> None:
        """Run as many blocks as there are ``sources``: block ``j`` is ``sources[j]``, or starts from its average."""
        new = {*added(sources)}
        for j in reversed(range(len(sources))):  # sources stand at or before j, so none is overwritten
            if j in new:
                self._become(j, sources[j], average=True, state=self._copies_state)
            elif sources[j] != j:
                self._become(j, sources[j], average=False, state=True)
        self._stack.active = len(sources)

    def leave_out(self, blocks: frozenset[int]) -> None:
        """Remove ``blocks`` from the network: the others move up, and those at the end do not run."""
        kept = [j for j in range(self._stack.active) if j not in blocks]
        for i, j in enumerate(kept):  # each source stands behind its target
            if i != j:
                self._become(i, j, average=False, state=True)
        for block in self._stack.blocks[len(kept) : self._stack.active]:
            for p in block.parameters():
                self._momentum.held.pop(self._momentum.name(p), None)
                for optimizer in self._optimizers:
                    optimizer.state.pop(p, None)
        self._stack.active = len(kept)

    @torch.no_grad()
    def _become(self, j: int, i: int, *, average: bool, state: bool) -> None:
        """Set block ``j`` to block ``i`` or to its average, with or without its optimizer state, and copy its average."""
        source, target, held = self._stack.blocks[i], self._stack.blocks[j], self._momentum.held
        parameters, buffers = dict(target.named_parameters()), dict(target.named_buffers())
        for name, buffer in source.named_buffers():
            if name in buffers:
                buffers[name].copy_(buffer)
        for name, w in source.named_parameters():
            if name not in parameters:
                continue
            p = parameters[name]
            averaged = held.get(self._momentum.name(w))
            # w_j = w'_i where block j is new
            p.copy_(averaged if average and averaged is not None else w)
            held.pop(self._momentum.name(p), None)
            if averaged is not None:
                held[self._momentum.name(p)] = averaged.clone()
            for optimizer in self._optimizers:
                optimizer.state.pop(p, None)
            if state:
                copy_state(self._optimizers, w, p)


def check_blocks(stack: BlockStack, *, who: str) -> None:
    """Raise ``ValueError`` unless blocks can take each other's place.

    The first block, which stays where it is, may have parameters that the others lack (T5's table of positions). It may
    also lack some of theirs (ModernBERT's has no norm before its attention), which then keep their initial values.
    """
    check_distinct([stack], who=who, why="new blocks are inserted between others")
    owners: dict[int, int] = {}
    for index, block in enumerate(stack.blocks):
        shared = next((name for name, p in block.named_parameters() if owners.setdefault(id(p), index) != index), None)
        if shared is not None:
            raise ValueError(
                f"{who}: blocks of {stack} share the parameter {shared!r}, but new blocks are inserted between others. Name"
                f" another stack by layers=, or remove {who}."
            )
    first, second = (dict(signature(stack.blocks[min(index, len(stack) - 1)])) for index in (0, 1))
    both = set(first) & set(second)
    wrong = {0: {name for name in both if first[name] != second[name]}}
    if both not in (set(first), set(second)):
        wrong[0] |= set(first) ^ set(second)
    wrong |= {
        i: {name for name, _ in set(signature(stack.blocks[i])) ^ set(second.items())} for i in range(1, len(stack))
    }
    for index, names in wrong.items():
        if names:
            raise ValueError(
                f"{who}: the parameters or buffers of blocks {index} and 1 of {stack} differ at {sorted(names)[:5]}, but"
                f" blocks take each other's place when it grows. Name another stack by layers=, or remove {who}."
            )
