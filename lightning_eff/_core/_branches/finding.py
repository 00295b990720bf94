"""Residual branches, by what is added to what: ``y = x + f(x)``, whatever the modules are called."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from lightning_eff._core._branches.graph import NORMS, SHAPES, End, Graph, Node, kind

_PRODUCTS = ("Bmm", "Baddbmm", "Mm")
_WEIGHTS = ("Softmax", "SafeSoftmax", "Sigmoid", "Relu", "Exp", "Softplus", "Elu")  # of attention
_SCALES = SHAPES | {"Mul", "Div", "Add", "Sub", "Sum", "Neg", "MaskedFill", "Where", "Tanh", "Clamp", "ClampMin"}
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
        stream: which stream it is added to, by a number: an encoder has one, its decoder another.
        depth: how many maps follow upon each other on the longest way through it, the last one among them.
    """

    last: tuple[End, ...]
    inner: tuple[str, ...]
    stream: int = 0
    depth: int = 1


def branches(graph: Graph) -> list[Branch]:
    """The residual branches of the network that a loss was computed by, in the order in which they are computed.

    A sum is residual if one side is made of the other by at least one map; what it is made of may be a sum that the other
    side begins with, as where two branches start at one place. Where the other side is a map itself (a ResNet's
    projection), the branch is the side that is not linear. Sums that stand alone are left out where others follow upon
    each other: those belong to no stream. Nor do sums of attention scores, as in RealFormer, which are no hidden state.
    """
    found: dict[Node, _Sum] = {}
    scores = _scores(graph)
    for node in graph.nodes("Add", "Addcmul"):
        if node in scores:
            continue
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
    numbers = {node: i for i, node in enumerate(sizes)}
    return [
        _branch(graph, made, numbers[first[node]]) for node, made in found.items() if alone or sizes[first[node]] > 1
    ]


def _scores(graph: Graph) -> set[Node]:
    """The nodes from which attention weights are made: below a factor of a product, behind a softmax or its like.

    A residual stream goes into a product by way of a map or a norm, or as it is.
    """
    found: set[Node] = set()
    for node in graph.nodes(*_PRODUCTS):
        if graph.map_at(node) is not None:
            continue
        for factor in graph.inputs[node]:
            reached = graph.below(factor, lambda n: graph.inputs[n] if kind(n) in _SCALES else ())
            for weights in (n for n in reached if kind(n) in _WEIGHTS):
                found |= graph.below(graph.inputs[weights][0], lambda n: graph.inputs[n] if kind(n) in _SCALES else ())
    return found


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
    """``stream``, and what it is the sum of, or a norm of that; no maps among these, which begin something else."""

    def onward(node: Node) -> tuple[Node, ...]:
        if kind(node) in NORMS:
            return graph.inputs[node][:1]
        return graph.inputs[node] if kind(node) == "Add" or kind(node) in SHAPES else ()

    found = graph.below(stream, onward)
    return {node for node in found if node not in graph.leaves and (node == stream or not graph.map_at(node))}


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


def _branch(graph: Graph, made: _Sum, stream: int) -> Branch:
    between: set[Node] = set()
    for start in {node for end in made.ends for node in end.inputs}:
        between |= graph.below(start, lambda node: (f for f in graph.inputs[node] if graph.comes_of(f, made.origins)))
    last, inside = {end.weight for end in made.ends}, dict[str, None]()
    depths: dict[Node, int] = {}
    for node in sorted(between, key=graph.order.__getitem__):
        if graph.comes_of(made.stream, graph.bits([node])) or not graph.comes_of(node, made.origins):
            continue
        depths[node] = max((depths.get(f, 0) for f in graph.inputs[node]), default=0) + (graph.map_at(node) is not None)
        for f in graph.inputs[node]:
            name = graph.leaves[f][0] if f in graph.leaves else graph.weight(f)
            if name is not None and name not in last:
                inside[name] = None
    depth = 1 + max((depths.get(node, 0) for end in made.ends for node in end.inputs), default=0)
    return Branch(tuple({end.weight: end for end in made.ends}.values()), tuple(inside), stream, depth)


def outputs(graph: Graph, node: Node) -> list[str]:
    """The weights of the maps whose outputs are what ``node`` has computed, but for a scale, a bias or a mask, by name."""

    def through(here: Node) -> tuple[Node, ...]:
        inputs = tuple(f for f in graph.inputs[here] if f not in graph.fixed)
        return inputs if len(inputs) == 1 and kind(here) in _LOGITS and not graph.map_at(here) else ()

    return [*dict.fromkeys(at[0] for here in graph.below(node, through) if (at := graph.map_at(here)) is not None)]


class Head(NamedTuple):
    """A map whose outputs a loss of classes is taken of: its weight's name, its node, and names of what is added to it."""

    weight: str
    node: Node
    biases: tuple[str, ...]


def heads_of(graph: Graph) -> list[Head]:
    """The maps whose outputs the losses of classes are taken of, each weight once."""
    found: dict[str, Head] = {}
    for node in graph.nodes("NllLoss", "NllLoss2D", "NllLossNd", "BinaryCrossEntropyWithLogits"):
        reached = graph.below(
            node,
            lambda here, node=node: (
                graph.inputs[here] if here is node or (kind(here) in _LOGITS and not graph.map_at(here)) else ()
            ),
        )
        added = [name for here in reached if kind(here) == "Add" for name in _vectors(graph, here)]
        for here in reached:
            if (at := graph.map_at(here)) is not None:
                found.setdefault(at[0], Head(at[0], here, (*_vectors(graph, here), *added)))
    return [*found.values()]


def _vectors(graph: Graph, node: Node) -> list[str]:
    """Names of the parameters of one dimension that a node was handed, in any dtype."""
    found: list[str] = []
    for f in graph.inputs[node]:
        here = f
        while here not in graph.leaves and kind(here) in SHAPES and len(graph.inputs[here]) == 1:
            here = graph.inputs[here][0]
        if here in graph.leaves and graph.leaves[here][1].ndim == 1:
            found.append(graph.leaves[here][0])
    return found


def heads(graph: Graph) -> list[str]:
    """The weights of :func:`heads_of`, by name."""
    return [head.weight for head in heads_of(graph)]
