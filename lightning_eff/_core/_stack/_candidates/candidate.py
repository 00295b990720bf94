"""A possible stack of repeated blocks, and where its blocks are registered."""

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
        path: selects the blocks as ``layers=``: the path of a container, ``net[1:5]`` for a run of blocks in it, a pattern
            for attributes (``model.block_*``), or the blocks' paths separated by commas.
        container: the module that contains the blocks.
        block: the blocks' class.
        length: the number of blocks.
        composite: whether each block consists of several modules.
        start: where a run begins in an ``nn.Sequential``; None if it is not a run.
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
        """Whether a list or an ``nn.Sequential`` contains only the blocks, so that it can be shown without some."""
        return self.start is None and self.keys is None and isinstance(self.container, nn.ModuleList | nn.Sequential)

    @property
    def by_name(self) -> bool:
        """Whether only names suggest that these blocks belong together, and in which order."""
        return self.start is None and not self.in_list

    @cached_property
    def slots(self) -> list[tuple[nn.Module, str]]:
        """Where each block is registered: its parent module, and its name there."""
        if self.keys is None:
            names = [name for name, m in self.container._modules.items() if m is not None]
            names = names if self.start is None else names[self.start : self.start + self.length]
            return [(self.container, name) for name in names]
        parts = [key.rpartition(".") for key in self.keys]
        return [(self.container.get_submodule(parent), name) for parent, _, name in parts]

    @property
    def parents(self) -> list[nn.Module]:
        """The blocks' parent modules, each once."""
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
        """The prefixes of the names of everything in the blocks."""
        return tuple(f"{path}." for path in self.named_blocks)


def join(home: str, key: str) -> str:
    """Return the path of the child ``key`` of the module at ``home``."""
    return f"{home}.{key}" if home else key


def of_container(path: str, container: nn.Module) -> Candidate:
    """Return the candidate with all children of ``container``."""
    blocks = [child for child in container._modules.values() if child is not None]
    return Candidate(path, container, class_of(blocks[0]).__name__, len(blocks), is_composite(blocks[0]), home=path)


def signature(block: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of a block's parameters and buffers. Blocks with equal signatures can be copied."""
    return [(name, tuple(tensor.shape)) for name, tensor in _named_tensors(block)]


def _named_tensors(block: nn.Module) -> list[tuple[str, Tensor]]:
    return [*block.named_parameters(remove_duplicate=False), *block.named_buffers(remove_duplicate=False)]


def of_one_width(blocks: Sequence[nn.Module]) -> bool:
    """Return whether tensors of the same name have the same shape in all blocks; stages of several widths are not a stack."""
    shapes: dict[str, tuple[int, ...]] = {}
    return all(shapes.setdefault(name, shape) == shape for block in blocks for name, shape in signature(block))


def class_of(block: nn.Module) -> type[nn.Module]:
    """Return the class as which a block was written, without the mixins of FSDP2 or the wrapper of torch.compile.

    For a block that was replaced by an instance of a derived class, by one technique or several, it is the original class,
    because only some blocks may have been replaced.
    """
    block = getattr(block, "_orig_mod", block)
    while (swap := swap_of(block)) is not None and isinstance(block, type(swap.was)):
        block = swap.was
    cls = type(block)
    index = getattr(cls, "_orig_cls_mro_index", None)  # set by FSDP2: the position of the block's own class
    return cls if index is None else cls.__mro__[index]


def is_composite(block: nn.Module) -> bool:
    """Return whether a block consists of several modules."""
    return any(True for _ in block.children())


def has_parameters(block: nn.Module) -> bool:
    return any(True for _ in block.parameters())


def is_repeated(blocks: Sequence[nn.Module]) -> bool:
    """Return whether blocks have one class and one width."""
    cls = class_of(blocks[0])
    if any(class_of(block) is not cls for block in blocks):
        return False
    if issubclass(cls, nn.Sequential | nn.ModuleList):
        return alike(blocks)
    return of_one_width(blocks)


def alike(blocks: Sequence[nn.Module]) -> bool:
    """Return whether blocks have tensors of the same names and shapes."""
    return all(signature(block) == signature(blocks[0]) for block in blocks)


def in_order(paths: Iterable[str]) -> list[str]:
    """Sort paths by the numbers in them, ``block_2`` before ``block_10``; the order of equal ones is kept."""
    parts = {path: re.split(r"(\d+)", path) for path in paths}
    words = {word: place for place, word in enumerate(dict.fromkeys(w for each in parts.values() for w in each[::2]))}
    return sorted(parts, key=lambda path: [int(p) if i % 2 else words[p] for i, p in enumerate(parts[path])])


def listed(found: Sequence[Candidate]) -> str:
    """Return at most five candidates as text."""
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return (", ".join(map(str, found[:5])) or "none") + more
