"""Residual branches, by what is added to what: ``y = x + f(x)``, whatever the modules are called."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from lightning_eff._core._branches.graph import SHAPES, End, Graph, Node, kind

_LOGITS = SHAPES | {
    "LogSoftmax",
    "Tanh",
    "Mul",
    "Div",
    "Add",
    "MaskedFill",
}  # between a head and its loss: a softcap, a scale, a mask


@dataclass(frozen=True)
class Branch:
    """A residual branch ``f`` of ``y = x + f(x)``.

    Attributes:
        last: its last maps: several where what is added is itself a sum.
        inner: the weights of its other maps, and of norms on the way, by name, those next to the stream first.
    """

    last: tuple[End, ...]
    inner: tuple[str, ...]


def branches(graph: Graph) -> list[Branch]:
    """The residual branches of the network that a loss was computed by, in the order in which they are computed.

    A sum is residual if one side is made of the other by at least one map; what it is made of may be a sum that the other
    side begins with, as where two branches start at one place. Where the other side is a map itself (a ResNet's
    projection), the branch is the side that is not linear. Sums that stand alone are left out where others follow upon
    each other: those belong to no stream.
    """
    found: dict[Node, _Sum] = {}
    for node in graph.nodes("Add", "Addcmul"):
        sides = graph.inputs[node]
        pair = (sides[0], sides[-1]) if len(sides) > 1 else ()
        for stream, branch in (pair, pair[::-1]) if pair else ():
            made = _residual(graph, stream, branch)
            if made is not None:
                found[node] = made
                break
    first = _streams(graph, found)
    sizes = Counter(first.values())
    alone = max(sizes.values(), default=0) == 1
    return [_branch(graph, made) for node, made in found.items() if alone or sizes[first[node]] > 1]


class _Sum(NamedTuple):
    """A residual sum: its stream, as bits what the branch is made of, and the branch's last maps."""

    stream: Node
    origins: int
    ends: list[End]


def _residual(graph: Graph, stream: Node, branch: Node) -> _Sum | None:
    """The sum, if ``branch`` is a function of ``stream`` or of what that is the sum of."""
    ends = graph.ends(branch)
    if not ends:
        return None
    for starts in (_origins(graph, stream), _before_projection(graph, stream, branch)):
        origins = graph.bits(starts)
        chosen = [end for end in ends if any(graph.comes_of(node, origins) for node in end.inputs)]
        if chosen:
            return _Sum(stream, origins, chosen)
    return None


def _origins(graph: Graph, stream: Node) -> set[Node]:
    """``stream``, and what it is the sum of; no maps, which begin something else."""
    found = graph.below(stream, lambda node: graph.inputs[node] if kind(node) == "Add" or kind(node) in SHAPES else ())
    return {node for node in found if node not in graph.leaves and not graph.map_at(node)}


def _before_projection(graph: Graph, stream: Node, branch: Node) -> set[Node]:
    """Where ``stream`` is one map of something that ``branch`` is no linear function of: that."""
    projections = graph.ends(stream)
    if len(projections) != 1:
        return set()
    starts = {start for node in projections[0].inputs for start in _sources(graph, node)}
    return set() if starts & _sources(graph, branch) else starts


def _sources(graph: Graph, node: Node) -> set[Node]:
    """The nodes down to which ``node`` is computed by maps, norms and other linear operations alone."""
    return {n for n in graph.below(node, graph.linear) if graph.inputs[n] and not graph.linear(n)}


def _streams(graph: Graph, found: dict[Node, _Sum]) -> dict[Node, Node]:
    """For each residual sum, the first one of the stream that it lies on."""
    first: dict[Node, Node] = {}

    def onward(node: Node) -> tuple[Node, ...]:
        inputs = tuple(f for f in graph.inputs[node] if f not in graph.leaves)
        return () if node in first else graph.linear(node) or (inputs if len(inputs) == 1 else ())

    for node, made in found.items():  # in the order of computation
        before = [first[n] for n in graph.below(made.stream, onward) if n in first]
        first[node] = before[0] if before else node
    return first


def _branch(graph: Graph, made: _Sum) -> Branch:
    between: set[Node] = set()
    for start in {node for end in made.ends for node in end.inputs}:
        between |= graph.below(start, lambda node: (f for f in graph.inputs[node] if graph.comes_of(f, made.origins)))
    last, inside = {end.weight for end in made.ends}, dict[str, None]()
    for node in sorted(between, key=graph.order.__getitem__):
        if graph.comes_of(made.stream, graph.bits([node])) or not graph.comes_of(node, made.origins):
            continue
        for f in graph.inputs[node]:
            name = graph.leaves[f][0] if f in graph.leaves else graph.weight(f)
            if name is not None and name not in last:
                inside[name] = None
    return Branch(tuple({end.weight: end for end in made.ends}.values()), tuple(inside))


def heads(graph: Graph) -> list[str]:
    """The weights of the maps whose outputs the losses of classes are taken of, by name."""
    found: dict[str, None] = {}
    for node in graph.nodes("NllLoss", "NllLoss2D", "NllLossNd", "BinaryCrossEntropyWithLogits"):
        reached = graph.below(
            node,
            lambda here, node=node: (
                graph.inputs[here] if here is node or (kind(here) in _LOGITS and not graph.map_at(here)) else ()
            ),
        )
        found |= {at[0]: None for here in reached if (at := graph.map_at(here)) is not None}
    return [*found]
