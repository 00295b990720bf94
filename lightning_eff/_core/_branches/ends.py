"""The tensors in which a residual branch ends: scaled by one number, what the branch adds is scaled by it."""

import re

from torch import nn

from lightning_eff._core._branches.finding import Branch
from lightning_eff._core._branches.graph import SHAPES, End, Graph, Node, kind
from lightning_eff._core._stack.finding import repeated, signature


def tensors_that_end(
    module: nn.Module, graph: Graph, branch: Branch, every: list[Branch], *, who: str
) -> tuple[str, ...]:
    """Names of the parameters that a branch's output is proportional to, all taken together.

    They are the weights of its last maps with their biases, or those of the norms behind these; and what stands in one list
    with them and was not used in the pass, as experts are to which no token was sent.

    Args:
        module: that the pass was of.
        graph: of the pass.
        branch: one of ``every``.
        every: the branches that :func:`~lightning_eff._core._branches.finding.branches` found in it.
        who: the technique's name, for messages.

    Raises:
        ValueError: where a branch ends in a norm without a weight, or in a map that is used elsewhere too; or where equal
            blocks do not have equal branches.
    """
    if every and branch is every[0]:
        refuse_unequal(module, graph, every, who=who)
    names = {name: None for end in branch.last for name in _tensors(module, graph, end, every, who=who)}
    return (*names, *alike_unused(module, graph, [*names]))


def refuse_unequal(module: nn.Module, graph: Graph, every: list[Branch], *, who: str) -> None:
    """Raise ``ValueError`` if branches were found in some blocks of a stack and not in others that are like them.

    Blocks are alike if their class, and the names and shapes of their tensors, are the same. Those that the pass did not run
    say nothing.
    """
    ran = {name for name, _ in graph.leaves.values()}
    ends = {end.weight for branch in every for end in branch.last}
    for stack in repeated(module):
        alike: dict[str, dict[str, set[str]]] = {}
        for path, block in stack.named_blocks.items():
            if any(name.startswith(f"{path}.") for name in ran):
                within = {name.removeprefix(f"{path}.") for name in ends if name.startswith(f"{path}.")}
                places = {re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in within}  # whichever experts were used
                alike.setdefault(f"{type(block)}{signature(block)}", {})[path] = places
        for found in alike.values():
            if len({frozenset(places) for places in found.values()}) > 1:
                most = max(found.values(), key=len)
                short = [
                    f"{path} ({', '.join(sorted(places)) or 'none'})"
                    for path, places in found.items()
                    if places != most
                ]
                raise ValueError(
                    f"{who}: equal blocks of {stack} have unequal residual branches. Most end in"
                    f" {', '.join(sorted(most))}, but these in: {'; '.join(short[:5])}. Name the weights in which branches"
                    f" end, branches=[...], or remove {who}."
                )


def _tensors(module: nn.Module, graph: Graph, end: End, every: list[Branch], *, who: str) -> tuple[str, ...]:
    if end.norms:
        if not end.norms[0]:
            raise ValueError(
                f"{who}: a residual branch ends in a norm behind {end.weight}, of which no weight is seen that could be zero"
                " (none, or one to which 1 is added). Expected branches that end in a map, or in a norm with a weight. Take the"
                " technique out."
            )
        return (*end.norms[0], *end.added)
    ends = {other.node for branch in every for other in branch.last}
    others = [kind(node) for node in graph.uses(end.weight) if node not in ends]
    if others and any("BackwardBackward" in node.name() for node in graph.inputs):
        raise ValueError(
            f"{who}: training_step takes derivatives by itself, so sums in its graph need not be residual ones. Name the"
            f" weights in which branches end, branches=[...], or remove {who}."
        )
    if others:
        raise ValueError(
            f"{who}: {end.weight} ends a residual branch and is used elsewhere too ({', '.join(others)}), where zeros would"
            " do something else. Expected a weight of its own. Take the technique out."
        )
    return (end.weight, *biases_beside(module, end.weight), *_handed(graph, end), *end.added)


def _handed(graph: Graph, end: End) -> list[str]:
    """The biases that a map was handed with its input, whatever they are called."""
    found: list[str] = []
    for f in graph.inputs[end.node]:
        while f not in graph.leaves and kind(f) in SHAPES and len(graph.inputs[f]) == 1:
            f = graph.inputs[f][0]
        if f in graph.leaves and graph.leaves[f][1].ndim == 1:
            found.append(graph.leaves[f][0])
    return found


def alike_unused(module: nn.Module, graph: Graph, names: list[str]) -> list[str]:
    """What the batch left unused and stands in one list with a last map, as experts do to which it sent no token."""
    seen = {name for name, _ in graph.leaves.values()}
    left = {name: p.shape for name, p in module.named_parameters() if name not in seen}
    shapes = {name: p.shape for name, p in module.named_parameters()}
    found: dict[str, None] = {}
    for name in names if left else ():
        parts = name.split(".")
        for i, part in enumerate(parts):
            if part.isdecimal():
                alike = re.compile(r"\.".join([*map(re.escape, parts[:i]), r"\d+", *map(re.escape, parts[i + 1 :])]))
                found |= {other: None for other in left if left[other] == shapes[name] and alike.fullmatch(other)}
    return [*found]


def channels_of(graph: Graph, end: End) -> int | None:
    """Which dimension of a weight are the channels that its map puts out; None where it is not told.

    A product has them last, and what is done to the weight before may exchange the last two.
    """
    if kind(end.node) not in ("Mm", "Addmm", "Bmm", "Baddbmm", "GroupedMm"):
        return None
    (here, *others) = [f for f in graph.inputs[end.node] if graph.weight(f) == end.weight]
    last, ndim = True, next(p.ndim for name, p in graph.leaves.values() if name == end.weight)
    while not others and here not in graph.leaves:
        if kind(here) == "T" or (kind(here) == "Transpose" and _dims(here, ndim) == {ndim - 1, ndim - 2}):
            last = not last
        elif kind(here) not in ("Alias", "Clone", "ToCopy", "Slice", "Select", "Index", "IndexSelect", "Mul"):
            return None
        (here, *others) = [f for f in graph.inputs[here] if graph.weight(f) == end.weight]
    return None if others else ndim - 1 if last else ndim - 2


def _dims(node: Node, ndim: int) -> set[int]:
    """Which dimensions a transposition exchanged, of a tensor of ``ndim`` ones."""
    dims = (int(node._saved_dim0), int(node._saved_dim1))
    return {(dim - 2**64 if dim >= 2**63 else dim) % ndim for dim in dims}


def biases_beside(module: nn.Module, weight: str) -> tuple[str, ...]:
    """The biases of a map, by its weight: in the module that has both; of norms in there, none.

    Where that module has several weights, as experts in one parameter have, a bias has the name of its weight in its own.
    """
    path, _, key = weight.rpartition(".")
    owner = module.get_submodule(path)
    prefix = f"{path}." if path else ""
    own = dict(owner.named_parameters(recurse=False))
    biases = [name for name, p in own.items() if "bias" in name and p.ndim <= 2]
    several = sum("bias" not in name and p.ndim > 1 for name, p in own.items()) > 1
    return tuple(f"{prefix}{name}" for name in biases if not several or name.startswith(key.removesuffix("weight")))
