"""Find the tensors that scale a residual branch's output proportionally."""

import re

from torch import nn

from lightning_eff._core._branches.finding import Branch, vectors_of
from lightning_eff._core._branches.graph import End, Graph, Node, kind
from lightning_eff._core._stack.finding import repeated, signature


def tensors_that_end(
    module: nn.Module, graph: Graph, branch: Branch, every: list[Branch], *, who: str
) -> tuple[str, ...]:
    """Return the names of the parameters to which a branch's output is proportional, all taken together.

    They are the weights and biases of its last linear layers, or of norms after these. Unused parameters in the same list are
    included, such as experts that got no token.

    Args:
        module: the module of the pass.
        graph: the graph of the pass.
        branch: one of ``every``.
        every: the branches that :func:`~lightning_eff._core._branches.finding.branches` found in it.
        who: the technique's name, for messages.

    Raises:
        ValueError: if a branch ends in a norm without a weight, or in a layer that is also used elsewhere; or if equal blocks
            have different branches.
    """
    if every and branch is every[0]:
        refuse_unequal(module, graph, every, who=who)
    names = {name: None for end in branch.last for name in _tensors(module, graph, end, every, who=who)}
    return (*names, *alike_unused(module, graph, [*names]))


def refuse_unequal(module: nn.Module, graph: Graph, every: list[Branch], *, who: str) -> None:
    """Raise ``ValueError`` if branches were found in some blocks of a stack but not in other blocks of the same structure.

    Blocks have the same structure if their classes, and the names and shapes of their tensors, are equal. Blocks that did not
    run in the pass are ignored.
    """
    ran = {name for name, _ in graph.leaves.values()}
    ends = {end.weight for branch in every for end in branch.last}
    for stack in repeated(module):
        alike: dict[str, dict[str, set[str]]] = {}
        for path, block in stack.named_blocks.items():
            if any(name.startswith(f"{path}.") for name in ran):
                within = {name.removeprefix(f"{path}.") for name in ends if name.startswith(f"{path}.")}
                places = {re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in within}  # the same for all experts
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
                f"{who}: a residual branch ends in a norm after {end.weight} without a weight that could be zero (none, or one"
                " to which 1 is added); expected branches that end in a linear layer, or in a norm with a weight. Remove"
                f" {who}."
            )
        return (*end.norms[0], *end.added)
    ends = {other.node for branch in every for other in branch.last}
    others = [kind(node) for node in graph.uses(end.weight) if node not in ends]
    if others and any("BackwardBackward" in node.name() for node in graph.inputs):
        raise ValueError(
            f"{who}: training_step takes derivatives by itself, so sums in its graph may not be residual. Name the weights in"
            f" which branches end, branches=[...], or remove {who}."
        )
    if others:
        raise ValueError(
            f"{who}: {end.weight} ends a residual branch and is used elsewhere too ({', '.join(others)}), where zeros would"
            f" have another effect. Remove {who}."
        )
    return (end.weight, *biases_beside(module, end.weight), *vectors_of(graph, end.node), *end.added)


def alike_unused(module: nn.Module, graph: Graph, names: list[str]) -> list[str]:
    """Return parameters that the batch did not use and that are in one list with a last layer, such as unused experts."""
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
    """Return the dimension of a weight along its layer's output channels; None if unknown.

    In a product they come last, but a transposition of the weight may exchange the last two dimensions.
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
    """Return the dimensions that a transposition exchanged, of a tensor with ``ndim`` dimensions."""
    dims = (int(node._saved_dim0), int(node._saved_dim1))
    return {(dim - 2**64 if dim >= 2**63 else dim) % ndim for dim in dims}


def biases_beside(module: nn.Module, weight: str) -> tuple[str, ...]:
    """Return the biases in the module that has ``weight``; norms inside are excluded.

    If the module has several weights, as experts in one parameter do, a bias belongs to the weight whose name it starts with.
    """
    path, _, key = weight.rpartition(".")
    owner = module.get_submodule(path)
    prefix = f"{path}." if path else ""
    own = dict(owner.named_parameters(recurse=False))
    biases = [name for name, p in own.items() if "bias" in name and p.ndim <= 2]
    several = sum("bias" not in name and p.ndim > 1 for name, p in own.items()) > 1
    return tuple(f"{prefix}{name}" for name in biases if not several or name.startswith(key.removesuffix("weight")))
