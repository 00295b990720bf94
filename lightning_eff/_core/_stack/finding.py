"""Stacks of repeated blocks in any module: which there are, and which one is meant."""

from collections.abc import Sequence

from torch import nn

from lightning_eff._core._stack._candidates.asked_for import AskedFor
from lightning_eff._core._stack._candidates.by_name import by_name
from lightning_eff._core._stack._candidates.by_name import outermost as outermost
from lightning_eff._core._stack._candidates.candidate import (
    Apart,
    class_of,
    has_parameters,
    is_composite,
    is_repeated,
    of_container,
    of_one_width,
)
from lightning_eff._core._stack._candidates.candidate import Candidate as Candidate
from lightning_eff._core._stack._candidates.candidate import Layers as Layers
from lightning_eff._core._stack._candidates.candidate import listed as listed
from lightning_eff._core._stack._candidates.candidate import signature as signature
from lightning_eff._core._stack._candidates.patterns import is_pattern


def candidates(module: nn.Module) -> list[Candidate]:
    """Every stack of blocks in a list of ``module``, outermost only; those of composite blocks first, then the longest."""
    found: list[Candidate] = []
    for path, container in module.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential) or not path:
            continue
        if any(path.startswith(f"{outer.path}.") for outer in found if outer.composite):
            continue
        blocks = [child for child in container._modules.values() if child is not None]
        classes = {class_of(block) for block in blocks}
        if len(blocks) < 2 or len(classes) > 1 or not has_parameters(blocks[0]):
            continue
        if not is_repeated(blocks):
            continue  # stages of different make
        found.append(of_container(path, container))
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
        if len({class_of(child) for child in children}) < 2:
            continue
        start = 0
        while start < len(children):
            stop = start + 1
            while stop < len(children) and is_repeated(children[start : stop + 1]):
                stop += 1
            if is_composite(children[start]) and has_parameters(children[start]):
                name, length, where = class_of(children[start]).__name__, stop - start, f"{path}[{start}:{stop}]"
                run = Candidate(where, container, name, length, composite=True, start=start, home=path)
                found.append(run)
                inside += tuple(f"{block}." for block in run.named_blocks) if length > 1 else ()
            start = stop
    return found


def stacks(module: nn.Module) -> list[Candidate]:
    """The stacks of repeated blocks in ``module``, the best first, as names and shapes show them.

    Runs are among them where no list is of composite blocks alone, but for lists in the blocks of others.
    """
    lists = candidates(module)
    named = by_name(module, lists)
    in_lists = any(c.composite and not c.by_name for c in outermost([*named, *lists]))
    found = [*lists, *named] if in_lists else [*_long(runs(module)), *lists, *named]
    return sorted(found, key=lambda c: (not c.composite, -c.length, c.by_name))


def repeated(module: nn.Module) -> list[Candidate]:
    """As :func:`candidates`, and blocks by name where no list is of composite blocks; none of them has been seen to run."""
    return outermost([c for c in stacks(module) if c.start is None])


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
        classes = {class_of(block) for block in blocks}
        if len(classes) != 1 or not has_parameters(blocks[0]):
            continue
        (cls,) = classes
        if not is_composite(blocks[0]) or issubclass(cls, nn.Sequential | nn.ModuleList):
            continue
        if not of_one_width(blocks) and any(c.composite for block in blocks for c in candidates(block)):
            continue  # stages, whose blocks come below
        taken.append(path)
        found.setdefault(cls, []).append(of_container(path, container))
    return found


def find_stages(module: nn.Module, layers: Layers, *, who: str, without: Apart = tuple) -> list[Candidate]:
    """The stacks that ``layers`` names; or all those in ``module`` of the class that most blocks are of.

    Blocks of a stage may be of several widths, and a stage may be of one block, as in residual networks of images.

    Args:
        module: the LightningModule, or any module.
        layers: dotted paths and patterns, of lists of blocks or of blocks; None looks for them.
        who: the technique's name, for the message.
        without: asked for the paths of lists that are no stacks, because their blocks run side by side.

    Raises:
        ValueError: as :func:`find_stack`.
    """
    if layers is not None:
        return _named_stages(module, layers, who=who, without=without)
    apart = without()
    lists = [c for found in _stages(module).values() for c in found if c.path not in apart]
    named = _not_of_stages([c for c in by_name(module, candidates(module)) if c.path not in apart], lists)
    of_class: dict[type[nn.Module], list[Candidate]] = {}
    for c in outermost([*lists, *named]):
        of_class.setdefault(class_of(c.blocks[0]), []).append(c)
    of_class = {cls: _no_copies(found) for cls, found in of_class.items()}
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


def _not_of_stages(named: Sequence[Candidate], lists: Sequence[Candidate]) -> list[Candidate]:
    """Those of the stacks by name that do not consist of lists of blocks: of ``layer1`` ... ``layer4`` those are meant."""

    def size(found: Sequence[Candidate]) -> int:
        return sum(p.numel() for c in found for block in c.blocks for p in block.parameters())

    return [c for c in named if 2 * size([i for i in lists if f"{i.path}.".startswith(c.prefixes)]) < size([c])]


def _named_stages(module: nn.Module, layers: str | Sequence[str], *, who: str, without: Apart) -> list[Candidate]:
    """What :func:`find_stages` finds at the paths and patterns ``layers``: blocks that are named one by one are one stack."""
    asked = _asked(module, layers, who=who, without=without)
    found: list[Candidate] = []
    single: list[str] = []
    for item in asked.items:
        paths = asked.containers(item)
        for path in paths:
            found += _most_of_a_class(runs(module), path) or [_at(module, path, who=who, without=without)]
        single += [] if paths else [item]
    return [*found, asked.stack(single)] if single else found


def _no_copies(found: list[Candidate]) -> list[Candidate]:
    """Those that train, and those of whose class none trains: averages, targets and teachers stand still beside a network."""

    def trains(c: Candidate) -> bool:
        return any(p.requires_grad for block in c.blocks for p in block.parameters())

    training = {c.block for c in found if trains(c)}
    return [c for c in found if c.block not in training or trains(c)]


def _most_of_a_class(found: Sequence[Candidate], home: str | None) -> list[Candidate]:
    """The runs of the class that most blocks are of, among those in the container at ``home``, or in any."""
    among = [run for run in found if home is None or home == run.home]
    counts = {run.block: sum(other.length for other in among if other.block == run.block) for run in among}
    most = max(counts.values(), default=0)
    return [run for run in among if counts[run.block] == most] if list(counts.values()).count(most) == 1 else []


def find_stack(
    module: nn.Module,
    layers: Layers,
    *,
    who: str,
    in_runs: bool = False,
    copies: bool = False,
    without: Apart = tuple,
    ties: Apart = tuple,
    named: bool = False,
) -> Candidate:
    """The stack that ``layers`` names, or the longest one in ``module``.

    Args:
        module: the LightningModule, or any module.
        layers: the dotted path of a list of blocks, a pattern, or a list of paths and patterns; None looks for the longest.
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
    every = [c for c in stacks(module) if in_runs or c.start is None]
    apart = without()
    found = _no_copies(outermost([c for c in every if c.path not in apart]))
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
            f"{who}: found no stack of repeated blocks in {type(module).__name__}; expected at least two blocks of one class,"
            f" in a list or with numbered names. Name them by a pattern or paths, {who}(layers='block_*'), {_OWN_CONTAINER},"
            " or take the technique out."
        )
    return _only_longest(found, f"stacks of blocks in {type(module).__name__}", who=who, ties=ties)


def side_by_side_only(module: nn.Module, found: Sequence[Candidate], *, who: str) -> str:
    """What is to be said of a module in whose lists no block is fed by another."""
    return (
        f"{who}: found no stack of blocks in {type(module).__name__}. The blocks of {listed(found)} run side by side, and"
        f" {who} needs blocks that each feed the next one. Remove {who}."
    )


_OWN_CONTAINER = "put the blocks into one of their own (self.blocks = nn.Sequential(*blocks))"


def _long(found: Sequence[Candidate]) -> list[Candidate]:
    """Those of several blocks, the longest first."""
    return sorted((c for c in found if c.length > 1), key=lambda c: -c.length)


def _only_longest(found: Sequence[Candidate], what: str, *, who: str, ties: Apart = tuple) -> Candidate:
    """The first, which none may equal in length; or the only one of the longest whose blocks follow one another."""
    best = [c for c in found if (c.composite, c.length) == (found[0].composite, found[0].length)]
    best = [c for c in best if not c.by_name] or best
    if len(best) > 1:
        apart = ties()
        chains = [c for c in best if c.path not in apart]
        if len(chains) == 1:
            return chains[0]
        if not best[0].composite:
            raise ValueError(
                f"{who}: found no {what}, but lists of single layers: {listed(found)}. Name one whose layers feed each other,"
                f" such as {who}(layers={best[0].path!r}), or remove {who}."
            )
        equal = listed(best)
        raise ValueError(
            f"{who}: {len(best)} {what} are equally long: {equal}. Say which one by layers=, e.g."
            f" layers={best[0].path!r}. All candidates: {listed(found)}."
        )
    return found[0]


def _asked(
    module: nn.Module, layers: str | Sequence[str], *, who: str, in_runs: bool = True, without: Apart = tuple
) -> AskedFor:
    def others() -> list[Candidate]:
        apart = without()
        return outermost([c for c in stacks(module) if c.path not in apart and (in_runs or c.start is None)])

    return AskedFor(module, layers, who=who, known=lambda: by_name(module, candidates(module)), others=others)


def _named(
    module: nn.Module, layers: str | Sequence[str], *, who: str, in_runs: bool = True, without: Apart = tuple
) -> Candidate:
    """What :func:`find_stack` finds at paths and patterns."""
    asked = _asked(module, layers, who=who, in_runs=in_runs, without=without)
    if asked.is_container:
        return _at(module, asked.items[0], who=who, in_runs=in_runs, without=without)
    return asked.stack(asked.items)


def _at(module: nn.Module, path: str, *, who: str, in_runs: bool = True, without: Apart = tuple) -> Candidate:
    """The blocks in the container at a path."""
    there = runs(module) if in_runs else []

    def others() -> str:
        apart = without()
        named = by_name(module, candidates(module))
        return listed([c for c in (*candidates(module), *_long(there), *named) if c.path not in apart])

    for run in there:
        if path == run.path:
            return run
    container = dict(module.named_modules()).get(path)
    if not isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        what = "names no submodule" if container is None else f"is a {type(container).__name__}"
        raise ValueError(
            f"{who}(layers={path!r}): that path {what} of {type(module).__name__}; expected the dotted path of an"
            f" nn.ModuleList, nn.Sequential or nn.ModuleDict of blocks, or a pattern. Candidates: {others()}."
        )
    blocks = [child for child in container._modules.values() if child is not None]
    classes = sorted({class_of(block).__name__ for block in blocks})
    if len(classes) != 1:
        if within := _long([run for run in there if run.home == path]):
            return _only_longest(within, f"runs of blocks in {path!r}", who=who)
        raise ValueError(
            f"{who}(layers={path!r}): that container holds {classes or 'nothing'}; expected blocks of one class. Name"
            f" another, or {_OWN_CONTAINER}. Candidates: {others()}."
        )
    return of_container(path, container)


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
    for outer in _around(module, path):
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


def _around(module: nn.Module, path: str) -> list[str]:
    """The paths of the modules whose calls the stack at ``path`` runs in."""
    if is_pattern(path) or ", " in path:
        asked = _asked(module, path, who="")
        blocks = [block.split(".") for item in asked.items for block in asked.paths(item)]
        return list(dict.fromkeys(".".join(parts[:depth]) for parts in blocks for depth in range(len(parts))))
    home, run, _ = path.partition("[")
    parts = home.split(".")
    # an nn.Sequential that has others beside its blocks is called as a whole
    return [".".join(parts[:depth]) for depth in range(len(parts) + bool(run))]
