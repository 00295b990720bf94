"""Find residual branches, ``y = x + f(x)``, from sums in the graph, whatever the modules are called."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from lightning_eff._core._branches.graph import NORMS, SHAPES, End, Graph, Node, kind

_PRODUCTS = ("Bmm", "Baddbmm", "Mm")
_WEIGHTS = ("Softmax", "SafeSoftmax", "Sigmoid", "Relu", "Exp", "Softplus", "Elu")  # compute attention weights
_SCALES = SHAPES | {"Mul", "Div", "Add", "Sub", "Sum", "Neg", "MaskedFill", "Where", "Tanh", "Clamp", "ClampMin"}
_LOGITS = SHAPES | {
    "LogSoftmax",
    "Tanh",
    "Mul",
    "Div",
    "Add",
    "MaskedFill",
}  # operations between a head and its loss: a softcap, a scale, a mask


@dataclass(frozen=True)
class Branch:
    """A residual branch ``f`` of ``y = x + f(x)``.

    Attributes:
        last: its last linear layers; several if the added tensor is itself a sum.
        inner: the names of the weights of its other layers and of norms inside, those next to the stream first.
        stream: the number of the stream to which it is added: an encoder has one, its decoder another.
        depth: the number of layers on the longest way through it, including the last one.
    """

    last: tuple[End, ...]
    inner: tuple[str, ...]
    stream: int = 0
    depth: int = 1


def branches(graph: Graph) -> list[Branch]:
    """Return the residual branches in the graph of a loss, in the order of computation.

    A sum is residual if one side is computed from the other by at least one linear layer. The start may also be a sum with
    which the other side begins, as where two branches start at one place. If the other side is a linear layer itself (a
    ResNet's projection), the branch is the nonlinear side. Isolated sums are skipped if other sums follow each other, because
    they belong to no stream. Sums of attention scores, as in RealFormer, are skipped too, because they are not hidden states.
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
    """Return the nodes of attention scores: before a softmax or a similar function in a factor of a product.

    A residual stream enters a product through a layer or a norm, or directly.
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
    """A residual sum: its stream, the origins of the branch as bits, and the branch's last layers."""

    stream: Node
    origins: int
    ends: list[End]


def _residual(graph: Graph, stream: Node, branch: Node) -> _Sum | None:
    """Return the sum if ``branch`` is a function of ``stream`` or of its summands; otherwise None."""
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
    """Return ``stream``, and its summands or the norm's input; linear layers among these are excluded."""

    def onward(node: Node) -> tuple[Node, ...]:
        if kind(node) in NORMS:
            return graph.inputs[node][:1]
        return graph.inputs[node] if kind(node) == "Add" or kind(node) in SHAPES else ()

    found = graph.below(stream, onward)
    return {node for node in found if node not in graph.leaves and (node == stream or not graph.map_at(node))}


def _before_projection(graph: Graph, stream: Node, branch: Node) -> set[Node]:
    """Return the input of ``stream`` if that is one linear layer, and ``branch`` is not linear in the input."""
    projections = graph.ends(stream)
    if len(projections) != 1:
        return set()
    starts = {start for node in projections[0].inputs for start in _sources(graph, node)}
    return set() if starts & _sources(graph, branch) else starts


def _sources(graph: Graph, node: Node) -> set[Node]:
    """Return the nodes from which ``node`` is computed only by layers, norms and other linear operations."""
    return {n for n in graph.below(node, graph.linear) if graph.inputs[n] and not graph.linear(n)}


def _streams(graph: Graph, found: dict[Node, _Sum]) -> dict[Node, Node]:
    """Return for each residual sum the first one of its stream."""
    first: dict[Node, Node] = {}

    def onward(node: Node) -> tuple[Node, ...]:
        inputs = tuple(f for f in graph.inputs[node] if f not in graph.leaves)
        return () if node in first else graph.linear(node) or (inputs if len(inputs) == 1 else ())

    for node, made in found.items():  # ordered by computation
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
    """Return the names of the weights of the layers whose outputs ``node`` is, up to a scale, a bias or a mask."""

    def through(here: Node) -> tuple[Node, ...]:
        inputs = tuple(f for f in graph.inputs[here] if f not in graph.fixed)
        return inputs if len(inputs) == 1 and kind(here) in _LOGITS and not graph.map_at(here) else ()

    return [*dict.fromkeys(at[0] for here in graph.below(node, through) if (at := graph.map_at(here)) is not None)]


class Head(NamedTuple):
    """A linear layer whose outputs a classification loss uses: its weight's name, its node, and names of added biases."""

    weight: str
    node: Node
    biases: tuple[str, ...]


def heads_of(graph: Graph) -> list[Head]:
    """Return the linear layers whose outputs classification losses use, each weight once."""
    found: dict[str, Head] = {}
    for node in graph.nodes("NllLoss", "NllLoss2D", "NllLossNd", "BinaryCrossEntropyWithLogits"):
        reached = graph.below(
            node,
            lambda here, node=node: (
                graph.inputs[here] if here is node or (kind(here) in _LOGITS and not graph.map_at(here)) else ()
            ),
        )
        added = [name for here in reached if kind(here) == "Add" for name in vectors_of(graph, here)]
        for here in reached:
            if (at := graph.map_at(here)) is not None:
                found.setdefault(at[0], Head(at[0], here, (*vectors_of(graph, here), *added)))
    return [*found.values()]


def vectors_of(graph: Graph, node: Node) -> list[str]:
    """Return names of the one-dimensional parameters among a node's arguments, in any dtype."""
    found: list[str] = []
    for f in graph.inputs[node]:
        here = f
        while here not in graph.leaves and kind(here) in SHAPES and len(graph.inputs[here]) == 1:
            here = graph.inputs[here][0]
        if here in graph.leaves and graph.leaves[here][1].ndim == 1:
            found.append(graph.leaves[here][0])
    return found


def heads(graph: Graph) -> list[str]:
    """Return the names of the weights of :func:`heads_of`."""
    return [head.weight for head in heads_of(graph)]
