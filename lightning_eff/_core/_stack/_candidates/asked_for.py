"""The blocks that ``layers=`` selects: a dotted path, a pattern, or a list of paths and patterns."""

from collections.abc import Callable, Sequence

from torch import nn

from lightning_eff._core._stack._candidates.candidate import (
    Candidate,
    class_of,
    is_composite,
    is_repeated,
    listed,
    of_container,
)
from lightning_eff._core._stack._candidates.patterns import is_pattern, is_run, matching

Known = Callable[[], Sequence[Candidate]]


class AskedFor:
    """The modules that ``layers=`` names.

    Args:
        module: the root.
        layers: the user's argument.
        who: the technique's name, for messages.
        known: returns the stacks found in the module.
        others: returns the stacks that a message may recommend.
    """

    def __init__(
        self, module: nn.Module, layers: str | Sequence[str], *, who: str, known: Known, others: Known
    ) -> None:
        self._module, self._layers, self._who, self._known, self._others = module, layers, who, known, others
        self._named = dict(module.named_modules())
        self.items = as_items(layers)
        if not self.items or not all(isinstance(item, str) and item for item in self.items):
            raise self._error("expected a path, a pattern, or a list of these", None)

    @property
    def is_container(self) -> bool:
        """Whether it is exactly the path of one module or of a run of blocks."""
        (item, *others) = self.items
        listed = item in self._named and not self._is_block(item)
        return not others and not is_pattern(item) and (isinstance(self._layers, str) or listed)

    def paths(self, item: str) -> list[str]:
        """Return the submodules that one path or pattern selects."""
        found = matching(item, (path for path in self._named if path)) if is_pattern(item) else [item]
        if not found:
            raise self._error(f"the pattern {item!r} matches no submodule of {type(self._module).__name__}")
        if found[0] not in self._named:
            raise self._error(f"{item!r} names no submodule of {type(self._module).__name__}")
        return found

    def containers(self, item: str) -> list[str]:
        """Return the paths that ``item`` selects if each is a list of blocks, or may be a run of them; otherwise none."""
        if not is_pattern(item):
            return [item] if self.is_container or is_run(item) or not self._is_block(self.paths(item)[0]) else []
        paths = self.paths(item)
        modules = [self._named[path] for path in paths]
        lists = all(isinstance(m, nn.ModuleList | nn.ModuleDict) for m in modules)
        stages = all(isinstance(m, nn.Sequential) for m in modules) and not is_repeated(modules)
        return paths if lists or stages else []

    def _is_block(self, item: str) -> bool:
        """Return whether one path among several is a block, and not a list or an ``nn.Sequential`` of blocks."""
        m = self._named[item]
        if isinstance(m, nn.Sequential):
            classes = {class_of(child) for child in m.children()}
            return len(classes) > 1 and not any(is_composite(child) for child in m.children())
        return not isinstance(m, nn.ModuleList | nn.ModuleDict)

    def stack(self, items: Sequence[str]) -> Candidate:
        """Return the blocks at ``items``, in order; a list or a dict is replaced by its blocks."""
        blocks: dict[str, nn.Module] = {}
        for path in (path for item in items for path in self.paths(item)):
            m = self._named[path]
            inner = m.named_children() if isinstance(m, nn.ModuleList | nn.ModuleDict) else ()
            blocks |= {f"{path}.{key}": child for key, child in inner} or {path: m}
        nested = next(((a, b) for a in blocks for b in blocks if b.startswith(f"{a}.")), None)
        if nested is not None:
            raise self._error(f"{nested[1]!r} is a part of {nested[0]!r}, so they are no blocks of one stack")
        if len({*map(id, blocks.values())}) < len(blocks):
            raise self._error("several of the paths name the same module")
        classes = sorted({class_of(block).__name__ for block in blocks.values()})
        if len(classes) > 1:
            raise self._error(f"that names modules of several classes ({', '.join(classes[:5])}), not blocks of one")
        return self._same(blocks) or Candidate(
            ", ".join(blocks),
            self._module,
            classes[0],
            len(blocks),
            is_composite(next(iter(blocks.values()))),
            keys=(*blocks,),
        )

    def _same(self, blocks: dict[str, nn.Module]) -> Candidate | None:
        """Return the known stack with exactly these blocks in this order, so that all techniques share one."""
        home = next(iter(blocks)).rpartition(".")[0]
        parent = self._module.get_submodule(home)
        if home and isinstance(parent, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            whole = of_container(home, parent)
            if [*whole.named_blocks] == [*blocks]:
                return whole
        return next((c for c in self._known() if [*c.named_blocks] == [*blocks]), None)

    def _error(self, what: str, way_out: str | None = "") -> ValueError:
        found = self._others()
        names = f" Candidates: {listed(found)}." if found else ""
        example = found[0].path if found else "block_*"
        return ValueError(
            f"{self._who}(layers={self._layers!r}): {what}. Name the blocks by their list, by a pattern or by a list of paths,"
            f" such as layers={example!r}.{names}"
        )


def as_items(layers: str | Sequence[str]) -> list[str]:
    """Return the paths and patterns in the user's argument; in a string they are separated by commas."""
    if isinstance(layers, str):
        return [item.strip() for item in layers.split(",")]
    return [*layers] if isinstance(layers, Sequence) else []
