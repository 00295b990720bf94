"""A stack of repeated blocks that a module may hold, and where its blocks are registered."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from lightning_eff._core._architecture.record import swap_of

Apart = Callable[[], Collection[str]]
Layers = str | Sequence[str] | None


@dataclass(frozen=True)
class Candidate:
    """Blocks of one class that a module registers in a list, in a dict, as attributes, or at any paths.

    Attributes:
        path: what finds the blocks again as ``layers=``: of a container its path, of a run of blocks in it ``net[1:5]``, of
            attributes a pattern (``model.block_*``), of anything else the blocks' paths with commas between them.
        container: the module that the blocks lie in.
        block: the blocks' class.
        length: how many there are.
        composite: they are made of several modules.
        start: where in an ``nn.Sequential`` a run begins, None where there is no run.
        keys: the blocks' dotted paths in ``container``; None for all its children, or the run.
        home: the container's path.
    """

    path: str
    container: nn.Module
    block: str
    length: int
    composite: bool
    start: int | None = None
    keys: tuple[str, ...] | None = None
    home: str = ""

    def __str__(self) -> str:
        first, *others = self.path.split(", ")
        path = f"{first}, ..., {others[-1]}" if len(others) > 2 else self.path
        return f"{path!r} ({self.length} x {self.block})"

    @property
    def in_list(self) -> bool:
        """Whether the blocks are all that a list or an ``nn.Sequential`` holds, so that it can be shown without some."""
        return self.start is None and self.keys is None and isinstance(self.container, nn.ModuleList | nn.Sequential)

    @property
    def by_name(self) -> bool:
        """Whether only names say that these blocks belong together, and in which order."""
        return self.start is None and not self.in_list

    @cached_property
    def slots(self) -> list[tuple[nn.Module, str]]:
        """Where each block is registered: the module that holds it, and its name there."""
        if self.keys is None:
            names = [name for name, m in self.container._modules.items() if m is not None]
            names = names if self.start is None else names[self.start : self.start + self.length]
            return [(self.container, name) for name in names]
        parts = [key.rpartition(".") for key in self.keys]
        return [(self.container.get_submodule(parent), name) for parent, _, name in parts]

    @property
    def parents(self) -> list[nn.Module]:
        """The modules that hold the blocks, each once."""
        return list({id(parent): parent for parent, _ in self.slots}.values())

    @property
    def named_blocks(self) -> dict[str, nn.Module]:
        """The blocks by their dotted paths."""
        keys = self.keys if self.keys is not None else [name for _, name in self.slots]
        blocks = [self.container.get_submodule(key) for key in keys]
        return {join(self.home, key): block for key, block in zip(keys, blocks, strict=True)}

    @property
    def blocks(self) -> list[nn.Module]:
        return [*self.named_blocks.values()]

    @property
    def prefixes(self) -> tuple[str, ...]:
        """What the names of everything in the blocks begin with."""
        return tuple(f"{path}." for path in self.named_blocks)


def join(home: str, key: str) -> str:
    """The path of what is registered as ``key`` in the module at ``home``."""
    return f"{home}.{key}" if home else key


def of_container(path: str, container: nn.Module) -> Candidate:
    """All that ``container`` holds."""
    blocks = [child for child in container._modules.values() if child is not None]
    return Candidate(path, container, class_of(blocks[0]).__name__, len(blocks), is_composite(blocks[0]), home=path)


def signature(block: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a block's parameters and buffers: two blocks with the same can be copied onto one another."""
    return [(name, tuple(tensor.shape)) for name, tensor in _named_tensors(block)]


def _named_tensors(block: nn.Module) -> list[tuple[str, Tensor]]:
    return [*block.named_parameters(remove_duplicate=False), *block.named_buffers(remove_duplicate=False)]


def of_one_width(blocks: Sequence[nn.Module]) -> bool:
    """Whether tensors of the same name have the same shape in all blocks: stages of several widths are no stack."""
    shapes: dict[str, tuple[int, ...]] = {}
    return all(shapes.setdefault(name, shape) == shape for block in blocks for name, shape in signature(block))


def class_of(block: nn.Module) -> type[nn.Module]:
    """The class that a block was written as: FSDP2 mixes its own into those that it divides, torch.compile wraps them.

    Of a block that was swapped for one of a class derived from its own, it is its own: not all blocks need be swapped.
    """
    block = getattr(block, "_orig_mod", block)
    swap = swap_of(block)
    cls = type(swap.was) if swap is not None and isinstance(block, type(swap.was)) else type(block)
    index = getattr(cls, "_orig_cls_mro_index", None)  # FSDP2's word for where the block's own is
    return cls if index is None else cls.__mro__[index]


def is_composite(block: nn.Module) -> bool:
    """Whether a block is made of several modules."""
    return any(True for _ in block.children())


def has_parameters(block: nn.Module) -> bool:
    return any(True for _ in block.parameters())


def is_repeated(blocks: Sequence[nn.Module]) -> bool:
    """Whether blocks are of one class and one width."""
    cls = class_of(blocks[0])
    if any(class_of(block) is not cls for block in blocks):
        return False
    if issubclass(cls, nn.Sequential | nn.ModuleList):
        return alike(blocks)
    return of_one_width(blocks)


def alike(blocks: Sequence[nn.Module]) -> bool:
    """Whether blocks have tensors of the same names and shapes."""
    return all(signature(block) == signature(blocks[0]) for block in blocks)


def in_order(paths: Iterable[str]) -> list[str]:
    """Paths by the numbers in them, ``block_2`` before ``block_10``, and where these are equal as they come."""
    parts = {path: re.split(r"(\d+)", path) for path in paths}
    words = {word: place for place, word in enumerate(dict.fromkeys(w for each in parts.values() for w in each[::2]))}
    return sorted(parts, key=lambda path: [int(p) if i % 2 else words[p] for i, p in enumerate(parts[path])])


def listed(found: Sequence[Candidate]) -> str:
    """At most five candidates, in words."""
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return (", ".join(map(str, found[:5])) or "none") + more
