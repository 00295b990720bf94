"""Find the stacks of repeated blocks in any module, and choose one."""

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
from lightning_eff._core._stack.walking import modules_by_path


def candidates(module: nn.Module) -> list[Candidate]:
    """Return the outermost stacks in lists of ``module``: those of composite blocks first, then the longest."""
    found: list[Candidate] = []
    for path, container in modules_by_path(module):
        if not isinstance(container, nn.ModuleList | nn.Sequential) or not path:
            continue
        if any(path.startswith(f"{outer.path}.") for outer in found if outer.composite):
            continue
        blocks = [child for child in container._modules.values() if child is not None]
        classes = {class_of(block) for block in blocks}
        if len(blocks) < 2 or len(classes) > 1 or not has_parameters(blocks[0]):
            continue
        if not is_repeated(blocks):
            continue  # stages of different structure
        found.append(of_container(path, container))
    return sorted(found, key=lambda c: (not c.composite, -c.length))


def runs(module: nn.Module) -> list[Candidate]:
    """Return runs of composite blocks of one class and one width in ``nn.Sequential`` containers with other modules.

    Such a container calls its modules one after the other, so a block in it that returns its input has no effect. Runs of a
    single block are included; runs inside a block of a longer one are not.
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
    """Return the stacks of repeated blocks in ``module``, best first, judged by names and shapes.

    Runs are included if no list consists of composite blocks, except lists inside the blocks of others.
    """
    lists = candidates(module)
    named = by_name(module, lists)
    in_lists = any(c.composite and not c.by_name for c in outermost([*named, *lists]))
    found = [*lists, *named] if in_lists else [*_long(runs(module)), *lists, *named]
    return sorted(found, key=lambda c: (not c.composite, -c.length, c.by_name))


def repeated(module: nn.Module) -> list[Candidate]:
    """Return :func:`candidates`, and blocks by name if no list has composite blocks. None of them has been observed to run."""
    return outermost([c for c in stacks(module) if c.start is None])


def _stages(module: nn.Module) -> dict[type[nn.Module], list[Candidate]]:
    """Return containers of blocks of one class, of any widths and number, by class and in the module's order."""
    found: dict[type[nn.Module], list[Candidate]] = {}
    taken: list[str] = []
    for path, container in modules_by_path(module):
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
            continue  # stages, whose blocks are found later
        taken.append(path)
        found.setdefault(cls, []).append(of_container(path, container))
    return found


def find_stages(module: nn.Module, layers: Layers, *, who: str, without: Apart = tuple) -> list[Candidate]:
    """Return the stacks that ``layers`` names, or all stacks in ``module`` of the most frequent block class.

    Blocks of a stage may have several widths, and a stage may have one block, as in residual networks for images.

    Args:
        module: the LightningModule, or any module.
        layers: dotted paths and patterns of blocks or lists of blocks; None finds them automatically.
        who: the technique's name, for messages.
        without: returns the paths of lists that are not stacks, because their blocks run side by side.

    Raises:
        ValueError: as in :func:`find_stack`.
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
            f"{who}: {type(module).__name__} has equally many blocks of the classes"
            f" {', '.join(cls.__name__ for cls in best)}. Set layers= to one or several paths. Candidates: {every}."
        )
    return of_class[best[0]]


def _not_of_stages(named: Sequence[Candidate], lists: Sequence[Candidate]) -> list[Candidate]:
    """Return the stacks by name that do not mainly consist of lists of blocks, as ``layer1`` ... ``layer4`` do."""

    def size(found: Sequence[Candidate]) -> int:
        return sum(p.numel() for c in found for block in c.blocks for p in block.parameters())

    return [c for c in named if 2 * size([i for i in lists if f"{i.path}.".startswith(c.prefixes)]) < size([c])]


def _named_stages(module: nn.Module, layers: str | Sequence[str], *, who: str, without: Apart) -> list[Candidate]:
    """Return the stacks at the paths and patterns ``layers``; blocks named individually form one stack."""
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
    """Return the stacks that train, and those of classes of which none trains; a frozen one may be an average or a teacher."""

    def trains(c: Candidate) -> bool:
        return any(p.requires_grad for block in c.blocks for p in block.parameters())

    training = {c.block for c in found if trains(c)}
    return [c for c in found if c.block not in training or trains(c)]


def _most_of_a_class(found: Sequence[Candidate], home: str | None) -> list[Candidate]:
    """Return the runs of the most frequent block class in the container at ``home``, or in any."""
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
    """Return the stack that ``layers`` names, or the longest one in ``module``.

    Args:
        module: the LightningModule, or any module.
        layers: the dotted path of a list of blocks, a pattern, or a list of paths and patterns; None finds the longest.
        who: the technique's name, for messages.
        in_runs: whether it may be a run of blocks in an ``nn.Sequential`` with other modules. A run is named by its
            container's path or by its own, and found automatically if no container consists of composite blocks.
        copies: whether blocks must be copies of others, for messages.
        without: returns the paths of lists that are not stacks, because their blocks run side by side.
        ties: the same, called only if stacks are equally long.
        named: whether a list at ``layers`` must not be one of these either.

    Raises:
        ValueError: if there is none, if several are longest, or if the path names none. The message lists the candidates.
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
            " or remove the technique."
        )
    return _only_longest(found, f"stacks of blocks in {type(module).__name__}", who=who, ties=ties)


def side_by_side_only(module: nn.Module, found: Sequence[Candidate], *, who: str) -> str:
    """Return the message for a module in whose lists no block feeds another."""
    return (
        f"{who}: found no stack of blocks in {type(module).__name__}. The blocks of {listed(found)} run side by side, and"
        f" {who} needs blocks that each feed the next one. Remove {who}."
    )


_OWN_CONTAINER = "put the blocks into their own container (self.blocks = nn.Sequential(*blocks))"


def _long(found: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates with several blocks, longest first."""
    return sorted((c for c in found if c.length > 1), key=lambda c: -c.length)


def _only_longest(found: Sequence[Candidate], what: str, *, who: str, ties: Apart = tuple) -> Candidate:
    """Return the first candidate if no other is as long, or the only one of the longest whose blocks feed each other."""
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
            f"{who}: {len(best)} {what} are equally long: {equal}. Choose one by layers=, such as"
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
    """Return the stack at the paths and patterns ``layers``."""
    asked = _asked(module, layers, who=who, in_runs=in_runs, without=without)
    if asked.is_container:
        return _at(module, asked.items[0], who=who, in_runs=in_runs, without=without)
    return asked.stack(asked.items)


def _at(module: nn.Module, path: str, *, who: str, in_runs: bool = True, without: Apart = tuple) -> Candidate:
    """Return the blocks in the container at ``path``."""
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
    way_out: str = "Compile the blocks one by one (block.compile()), or remove the technique.",
) -> None:
    """Raise ``ValueError`` if the stack at ``path`` is inside a compiled module, where calls of its blocks cannot be observed.

    Args:
        module: the root.
        path: the dotted path of the stack.
        who: the technique, for messages.
        way_out: the fix, for messages.
    """
    for outer in _around(module, path):
        found = module.get_submodule(outer)
        if (
            "_orig_mod" in found._modules
            or found._compiled_call_impl is not None
            or hasattr(found.forward, "_torchdynamo_orig_callable")
            or getattr(found, "_compiler_ctx", None) is not None  # set by Lightning on a compiled LightningModule
        ):
            raise ValueError(
                f"{who}: the blocks at {path!r} are inside {outer or 'the LightningModule'!r}, which is compiled as a whole;"
                f" expected blocks that are called one by one. {way_out}"
            )


def _around(module: nn.Module, path: str) -> list[str]:
    """Return the paths of the modules whose calls run the stack at ``path``."""
    if is_pattern(path) or ", " in path:
        asked = _asked(module, path, who="")
        blocks = [block.split(".") for item in asked.items for block in asked.paths(item)]
        return list(dict.fromkeys(".".join(parts[:depth]) for parts in blocks for depth in range(len(parts))))
    home, run, _ = path.partition("[")
    parts = home.split(".")
    # an nn.Sequential with other modules is called as a whole
    return [".".join(parts[:depth]) for depth in range(len(parts) + bool(run))]
