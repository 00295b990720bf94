"""Stacks of repeated blocks in any module: which there are, and which one is meant."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_eff._core._architecture.record import swap_of

Apart = Callable[[], Collection[str]]


@dataclass(frozen=True)
class Candidate:
    """A container whose children are all of one class; or a run of such ones in an ``nn.Sequential`` with others.

    Attributes:
        path: of the container; of a run with its place in it, ``net[1:5]``.
        container: which.
        block: the blocks' class.
        length: how many there are.
        composite: they are made of several modules.
        start: where in the container a run begins, None where it is the whole.
    """

    path: str
    container: nn.Module
    block: str
    length: int
    composite: bool
    start: int | None = None

    def __str__(self) -> str:
        return f"{self.path!r} ({self.length} x {self.block})"

    @property
    def home(self) -> str:
        """The container's path."""
        return self.path if self.start is None else self.path.rpartition("[")[0]

    @property
    def named_blocks(self) -> dict[str, nn.Module]:
        """The blocks by their dotted paths."""
        children = [(f"{self.home}.{key}", m) for key, m in self.container._modules.items() if m is not None]
        return dict(children if self.start is None else children[self.start : self.start + self.length])


def signature(block: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a block's parameters and buffers: two blocks with the same can be copied onto one another."""
    return [(name, tuple(tensor.shape)) for name, tensor in _named_tensors(block)]


def _named_tensors(block: nn.Module) -> list[tuple[str, Tensor]]:
    return [*block.named_parameters(remove_duplicate=False), *block.named_buffers(remove_duplicate=False)]


def _of_one_width(blocks: list[nn.Module]) -> bool:
    """Whether tensors of the same name have the same shape in all blocks: stages of several widths are no stack."""
    shapes: dict[str, tuple[int, ...]] = {}
    return all(shapes.setdefault(name, shape) == shape for block in blocks for name, shape in signature(block))


def _class_of(block: nn.Module) -> type[nn.Module]:
    """The class that a block was written as: FSDP2 mixes its own into those that it divides, torch.compile wraps them.

    Of a block that was swapped for one of a class derived from its own, it is its own: not all blocks need be swapped.
    """
    block = getattr(block, "_orig_mod", block)
    swap = swap_of(block)
    cls = type(swap.was) if swap is not None and isinstance(block, type(swap.was)) else type(block)
    index = getattr(cls, "_orig_cls_mro_index", None)  # FSDP2's word for where the block's own is
    return cls if index is None else cls.__mro__[index]


def candidates(module: nn.Module) -> list[Candidate]:
    """Every stack of blocks in ``module``, outermost only; those of composite blocks first, then the longest."""
    found: list[Candidate] = []
    for path, container in module.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential) or not path:
            continue
        if any(path.startswith(f"{outer.path}.") for outer in found if outer.composite):
            continue
        blocks = [child for child in container._modules.values() if child is not None]
        classes = {_class_of(block) for block in blocks}
        if len(blocks) < 2 or len(classes) > 1 or not any(True for _ in blocks[0].parameters()):
            continue
        (cls,) = classes
        if not _is_repeated(blocks):
            continue  # stages of different make
        composite = any(True for _ in blocks[0].children())
        found.append(Candidate(path, container, cls.__name__, len(blocks), composite))
    return sorted(found, key=lambda c: (not c.composite, -c.length))


def runs(module: nn.Module) -> list[Candidate]:
    """Runs of composite blocks of one class and one width, in ``nn.Sequential`` that have other modules beside them.

    What such a container computes is its modules one after the other, so that a block there which hands its input on is as
    if it were not there. Those of a single block are among them, and none that lie within a block of a longer one.
    """
    found: list[Candidate] = []
    inside: tuple[str, ...] = ()
    for path, container in module.named_modules():
        if not isinstance(container, nn.Sequential) or not path or path.startswith(inside):
            continue
        children = [child for child in container._modules.values() if child is not None]
        if len({_class_of(child) for child in children}) < 2:
            continue
        start = 0
        while start < len(children):
            stop = start + 1
            while stop < len(children) and _is_repeated(children[start : stop + 1]):
                stop += 1
            if any(True for _ in children[start].children()) and any(True for _ in children[start].parameters()):
                name, length = _class_of(children[start]).__name__, stop - start
                run = Candidate(f"{path}[{start}:{stop}]", container, name, length, composite=True, start=start)
                found.append(run)
                inside += tuple(f"{block}." for block in run.named_blocks) if length > 1 else ()
            start = stop
    return found


def stacks(module: nn.Module) -> list[Candidate]:
    """The stacks of repeated blocks in ``module``, the best first; runs where no container is of composite blocks alone."""
    found = candidates(module)
    return found if any(c.composite for c in found) else [*_long(runs(module)), *found]


def _is_repeated(blocks: list[nn.Module]) -> bool:
    """Whether blocks are of one class and one width."""
    cls = _class_of(blocks[0])
    if any(_class_of(block) is not cls for block in blocks):
        return False
    if issubclass(cls, nn.Sequential | nn.ModuleList):
        return all(signature(block) == signature(blocks[0]) for block in blocks)
    return _of_one_width(blocks)


def _stages(module: nn.Module) -> dict[type[nn.Module], list[Candidate]]:
    """Containers of blocks of one class, whatever their widths and however few, by the class and in the module's order."""
    found: dict[type[nn.Module], list[Candidate]] = {}
    taken: list[str] = []
    for path, container in module.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential) or not path:
            continue
        if any(path.startswith(f"{outer}.") for outer in taken):
            continue
        blocks = [child for child in container._modules.values() if child is not None]
        classes = {_class_of(block) for block in blocks}
        if len(classes) != 1 or not any(True for _ in blocks[0].parameters()):
            continue
        (cls,) = classes
        composite = any(True for _ in blocks[0].children())
        if not composite or issubclass(cls, nn.Sequential | nn.ModuleList):
            continue
        if not _of_one_width(blocks) and any(c.composite for block in blocks for c in candidates(block)):
            continue  # stages, whose blocks come below
        taken.append(path)
        found.setdefault(cls, []).append(Candidate(path, container, cls.__name__, len(blocks), composite))
    return found


def find_stages(
    module: nn.Module, layers: str | Sequence[str] | None, *, who: str, without: Apart = tuple
) -> list[Candidate]:
    """The stacks at the dotted paths ``layers``; or all those in ``module`` of the class that most blocks are of.

    Blocks of a stage may be of several widths, and a stage may be of one block, as in residual networks of images.

    Args:
        module: the LightningModule, or any module.
        layers: a dotted path or several, of ``nn.ModuleList`` or ``nn.Sequential``; None looks for them.
        who: the technique's name, for the message.
        without: asked for the paths of lists that are no stacks, because their blocks run side by side.

    Raises:
        ValueError: as :func:`find_stack`.
    """
    if layers is not None:
        paths = [layers] if isinstance(layers, str) else layers
        return [
            c
            for path in paths
            for c in _most_of_a_class(runs(module), path) or [_named(module, path, who=who, without=without)]
        ]
    apart = without()
    of_class = {cls: [c for c in found if c.path not in apart] for cls, found in _stages(module).items()}
    counts = {cls: sum(c.length for c in found) for cls, found in of_class.items()}
    most = max(counts.values(), default=0)
    best = [cls for cls, count in counts.items() if count == most]
    if most < 2:
        found = _most_of_a_class(runs(module), None)
        return (
            found
            if sum(c.length for c in found) > 1
            else [find_stack(module, None, who=who, in_runs=True, without=without)]
        )
    if len(best) > 1:
        every = listed([c for found in of_class.values() for c in found])
        raise ValueError(
            f"{who}: blocks of the classes {', '.join(cls.__name__ for cls in best)} are equally many in"
            f" {type(module).__name__}. Say which ones by layers=, a path or several. Candidates: {every}."
        )
    return of_class[best[0]]


def _most_of_a_class(found: Sequence[Candidate], home: str | None) -> list[Candidate]:
    """The runs of the class that most blocks are of, among those in the container at ``home``, or in any."""
    among = [run for run in found if home is None or home == run.home]
    counts = {run.block: sum(other.length for other in among if other.block == run.block) for run in among}
    most = max(counts.values(), default=0)
    return [run for run in among if counts[run.block] == most] if list(counts.values()).count(most) == 1 else []


def find_stack(
    module: nn.Module,
    layers: str | None,
    *,
    who: str,
    in_runs: bool = False,
    copies: bool = False,
    without: Apart = tuple,
    ties: Apart = tuple,
    named: bool = False,
) -> Candidate:
    """The stack at the dotted path ``layers``, or the longest one in ``module``.

    Args:
        module: the LightningModule, or any module.
        layers: dotted path of an ``nn.ModuleList`` or ``nn.Sequential``; None looks for the longest.
        who: the technique's name, for the message.
        in_runs: it may be a run of blocks in an ``nn.Sequential`` with others. Such a one is named by its container's path,
            or by its own, and looked for where no container is of composite blocks alone.
        copies: blocks are to be copies of others, for the message.
        without: asked for the paths of lists that are no stacks, because their blocks run side by side.
        ties: the same, asked only where stacks are equally long.
        named: a list at ``layers`` may be none of these either.

    Raises:
        ValueError: if there is none, if the longest is not the only one of its length, or if the path names none; the
            message lists the candidates.
    """
    if layers is not None:
        found = _named(module, layers, who=who, in_runs=in_runs, without=without)
        if not named or found.path not in (apart := without()):
            return found
        chains = [c for c in stacks(module) if c.path not in apart]
        way_out = "Leave layers out, or name a stack" if chains else "Leave layers out"
        raise ValueError(
            f"{who}(layers={layers!r}): the blocks of {found} run side by side, and {who} needs blocks that each feed"
            f" the next one. {way_out}. Stacks: {listed(chains)}."
        )
    every = stacks(module) if in_runs else candidates(module)
    apart = without()
    found = [c for c in every if c.path not in apart]
    if every and not found:
        raise ValueError(side_by_side_only(module, every, who=who))
    if not found:
        unlike = [c for of_class in _stages(module).values() for c in of_class if c.length > 1]
        if unlike:
            way_out = f"To use them anyway, name them: {who}(layers={unlike[0].path!r})."
            raise ValueError(
                f"{who}: found no stack of equal blocks in {type(module).__name__}. The blocks of {listed(unlike)} differ in"
                f" the shapes of their parameters{f', so that none can be a copy. Remove {who}.' if copies else f'. {way_out}'}"
            )
        raise ValueError(
            f"{who}: found no stack of repeated blocks in {type(module).__name__}; expected an nn.ModuleList or"
            f" nn.Sequential of at least two blocks of one class. Give its dotted path as layers=, {_OWN_CONTAINER}, or take"
            " the technique out."
        )
    return _only_longest(found, f"stacks of blocks in {type(module).__name__}", who=who, ties=ties)


def side_by_side_only(module: nn.Module, found: Sequence[Candidate], *, who: str) -> str:
    """What is to be said of a module in whose lists no block is fed by another."""
    return (
        f"{who}: found no stack of blocks in {type(module).__name__}. The blocks of {listed(found)} run side by side, and"
        f" {who} needs blocks that each feed the next one. Remove {who}."
    )


def listed(found: Sequence[Candidate]) -> str:
    """At most five candidates, in words."""
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return (", ".join(map(str, found[:5])) or "none") + more


_OWN_CONTAINER = "put the blocks into one of their own (self.blocks = nn.Sequential(*blocks))"


def _long(found: Sequence[Candidate]) -> list[Candidate]:
    """Those of several blocks, the longest first."""
    return sorted((c for c in found if c.length > 1), key=lambda c: -c.length)


def _only_longest(found: Sequence[Candidate], what: str, *, who: str, ties: Apart = tuple) -> Candidate:
    """The first, which none may equal in length; or the only one of the longest whose blocks follow one another."""
    best = [c for c in found if (c.composite, c.length) == (found[0].composite, found[0].length)]
    if len(best) > 1:
        apart = ties()
        chains = [c for c in best if c.path not in apart]
        if len(chains) == 1:
            return chains[0]
        equal = listed(best)
        raise ValueError(
            f"{who}: {len(best)} {what} are equally long: {equal}. Say which one by layers=, e.g."
            f" layers={best[0].path!r}. All candidates: {listed(found)}."
        )
    return found[0]


def _named(module: nn.Module, layers: str, *, who: str, in_runs: bool = True, without: Apart = tuple) -> Candidate:
    """What :func:`find_stack` finds at a path."""
    there = runs(module) if in_runs else []

    def others() -> str:
        apart = without()
        return listed([c for c in (*candidates(module), *_long(there)) if c.path not in apart])

    for run in there:
        if layers == run.path:
            return run
    container = dict(module.named_modules()).get(layers)
    if not isinstance(container, nn.ModuleList | nn.Sequential) or not layers:
        what = "names no submodule" if container is None else f"is a {type(container).__name__}"
        raise ValueError(
            f"{who}(layers={layers!r}): that path {what} of {type(module).__name__}; expected the dotted path of an"
            f" nn.ModuleList or nn.Sequential of blocks. Candidates: {others()}."
        )
    blocks = [child for child in container._modules.values() if child is not None]
    classes = sorted({_class_of(block).__name__ for block in blocks})
    if len(classes) != 1:
        if within := _long([run for run in there if run.home == layers]):
            return _only_longest(within, f"runs of blocks in {layers!r}", who=who)
        raise ValueError(
            f"{who}(layers={layers!r}): that container holds {classes or 'nothing'}; expected blocks of one class. Name"
            f" another, or {_OWN_CONTAINER}. Candidates: {others()}."
        )
    return Candidate(layers, container, classes[0], len(blocks), any(True for _ in blocks[0].children()))


def refuse_compiled_around(
    module: nn.Module,
    path: str,
    *,
    who: str,
    way_out: str = "Compile the blocks one by one (block.compile()), or take the technique out.",
) -> None:
    """Raise ``ValueError`` if the stack at ``path`` lies within a compiled module: its blocks' own calls are not seen.

    Args:
        module: the root.
        path: dotted, of the stack in it.
        who: the technique that must see them, for the message.
        way_out: what to do instead, for the message.
    """
    home, run, _ = path.partition("[")
    parts = home.split(".")
    for depth in range(len(parts) + bool(run)):  # an nn.Sequential that has others beside them is called as a whole
        outer = ".".join(parts[:depth])
        found = module.get_submodule(outer)
        if (
            "_orig_mod" in found._modules
            or found._compiled_call_impl is not None
            or hasattr(found.forward, "_torchdynamo_orig_callable")
            or getattr(found, "_compiler_ctx", None) is not None  # as Lightning keeps a compiled LightningModule
        ):
            raise ValueError(
                f"{who}: the blocks at {path!r} lie within {outer or 'the LightningModule'!r}, which is compiled as a whole;"
                f" expected blocks that are called one by one. {way_out}"
            )
