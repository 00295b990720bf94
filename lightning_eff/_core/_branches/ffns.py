"""Find feed-forward networks ``x + W_2 f(W_1 x)`` in any module, from its graph or by the names that the user gives."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from torch import nn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Each, Kind, Names
from lightning_eff._core._branches.finding import branches, vectors_of
from lightning_eff._core._branches.graph import SHAPES, End, Graph, Node, kind

# operations on each hidden unit separately
_ACTIVATIONS = (
    "Mul Div Add Sub Neg Abs Pow Exp Erf Tanh Sigmoid Gelu Silu Relu LeakyRelu Elu Celu Selu Mish Softplus LogSigmoid"
    " Hardtanh Hardsigmoid Hardswish Threshold Clamp ClampMin ClampMax Maximum Minimum Where MaskedFill Glu"
)
_BY_UNIT = SHAPES | frozenset(_ACTIVATIONS.split())
_GATHERS = ("Index", "IndexSelect", "Gather")
_TURNS = ("T", "Transpose", "Permute")


class Part(NamedTuple):
    """A parameter with the hidden units along one of its dimensions.

    Attributes:
        name: its dotted name in the module.
        dim: that dimension.
        groups: how often it contains them: 2 in a layer that computes a gate and the gated value, one after the other.
        last: whether it is the layer from the hidden units back to the stream.
    """

    name: str
    dim: int
    groups: int
    last: bool


@dataclass(frozen=True)
class FFN:
    """A feed-forward network.

    Attributes:
        hidden: the number of its hidden units.
        parts: its parameters with hidden units; the last layer's weight comes last.
    """

    hidden: int
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return f"{' + '.join(part.name for part in self.parts)} ({self.hidden} hidden units)"


def find_ffns(graph: Graph) -> tuple[list[FFN], dict[str, str]]:
    """Return the feed-forward networks among the residual branches in the graph of a loss.

    A branch is one if only operations on each hidden unit separately lie between its last layer and those before.

    Returns:
        The networks found. And for the last layers of other branches, by weight name, why they are none.
    """
    found: dict[str, FFN] = {}
    maps: dict[str, set[Node]] = {}
    refused: dict[str, str] = {}
    for branch in branches(graph):
        for end in branch.last:
            ffn = _ffn(graph, end, maps)
            if isinstance(ffn, str):
                refused[end.weight] = ffn
            elif found.setdefault(end.weight, ffn) != ffn:
                refused[end.weight] = "it is used in two ways"
    for last, ffn in found.items():
        for part in ffn.parts:
            if part.name in maps and set(graph.uses(part.name)) != maps[part.name]:
                refused[last] = f"{part.name} is also used elsewhere"
    return [ffn for last, ffn in found.items() if last not in refused], refused


def _ffn(graph: Graph, end: End, maps: dict[str, set[Node]]) -> FFN | str:
    """Return the network that ends in ``end``, or why there is none; the nodes of its layers are added to ``maps``."""
    shapes = {name: tuple(tensor.shape) for name, tensor in graph.leaves.values()}
    if len(shapes[end.weight]) != 2:
        return f"its weight has the shape {shapes[end.weight]}, so it is not a plain linear layer"
    first: dict[str, Node] = {}
    vectors: dict[str, None] = {}
    seen: set[Node] = set(end.inputs)
    stack = list(end.inputs)
    while stack:
        node = stack.pop()
        if node in graph.leaves:
            vectors[graph.leaves[node][0]] = None
            continue
        at = graph.map_at(node)
        if at is not None:
            if len(shapes[at[0]]) != 2:
                return f"the layer before it, {at[0]}, has the shape {shapes[at[0]]}, so it is not a plain linear layer"
            if any(_gathered(graph, f) for f in at[1]):
                return f"{at[0]} belongs to an expert, which sees only the tokens routed to it"
            first[at[0]] = node
            vectors |= dict.fromkeys(vectors_of(graph, node))
            continue
        if kind(node) not in _BY_UNIT:
            return f"{kind(node)} precedes it, which does not act on each hidden unit separately"
        onward = [f for f in graph.inputs[node] if f not in seen]
        seen.update(onward)
        stack += onward
    if not 1 <= len(first) <= 3:
        return f"{len(first)} linear layers precede it" if first else "no linear layer precedes it"
    layouts = [[*_layouts(shapes[name], shapes[end.weight])] for name in first]
    down = {layout.down for found in layouts for layout in found}
    if len(down) > 1:
        down = {int(_out_first(graph, end.node, end.weight))}
    parts: list[Part] = []
    hidden = shapes[end.weight][next(iter(down), 0)]
    for (name, node), found in zip(first.items(), layouts, strict=True):
        fit = [layout for layout in found if layout.down in down]
        if len(fit) > 1:
            fit = [layout for layout in fit if layout.up == 1 - int(_out_first(graph, node, name))]
        if not fit:
            return f"{name} {shapes[name]} does not fit between the stream and {shapes[end.weight]}"
        parts.append(Part(name, fit[0].up, fit[0].groups, last=False))
    groups = {part.groups for part in parts}
    for name in vectors:
        size = shapes[name]
        if len(size) == 1 and any(size[0] == g * hidden for g in groups | {1}):
            parts.append(Part(name, 0, size[0] // hidden, last=False))
        elif size and size != (1,):
            return f"{name} {size} acts on its {hidden} hidden units in an unknown way"
    for name, node in (*first.items(), (end.weight, end.node)):
        maps.setdefault(name, set()).add(node)
    parts.sort(key=lambda part: part.name)  # the graph's order is not the module's
    return FFN(hidden, (*parts, Part(end.weight, down.pop(), 1, last=True)))


def _gathered(graph: Graph, node: Node) -> bool:
    """Return whether a tensor consists of selected rows of another."""
    while kind(node) in SHAPES and node not in graph.leaves:
        if kind(node) in _GATHERS:
            return True
        node = graph.inputs[node][0]
    return False


class _Layout(NamedTuple):
    """The dimensions of the first and of the last layer's weight along the hidden units, and how often the first has them."""

    up: int
    down: int
    groups: int


def _layouts(up: Sequence[int], down: Sequence[int]) -> Iterator[_Layout]:
    """Yield how two layers may lead from the stream to hidden units and back."""
    for i in (0, 1):
        for j in (1, 0):
            for groups in (1, 2):
                if up[i] == groups * down[j] and up[1 - i] == down[1 - j]:
                    yield _Layout(i, j, groups)


def _out_first(graph: Graph, node: Node, name: str) -> bool:
    """Return whether the weight of a layer is stored as (out, in)."""
    here = next(f for f in reversed(graph.inputs[node]) if graph.weight(f) == name)
    turns = 0
    while here not in graph.leaves:
        turns += kind(here) in _TURNS
        here = next(f for f in graph.inputs[here] if graph.weight(f) == name)
    return turns % 2 == 1 or kind(node) == "Linear"


@dataclass(frozen=True, repr=False)
class LayersOfFFNs(Kind):
    """Lists of names as :func:`given_ffns` accepts them, converted to a list of lists."""

    hint: str = field(default="Write ffn=[['blocks.*.mlp.0', 'blocks.*.mlp.2']].", repr=False)

    @property
    @override
    def expected(self) -> str:
        return "lists of at least two names of linear layers, with the one back to the stream last"

    @override
    def __call__(self, value: Any) -> list[list[str]]:
        found = [list(names) for names in Each(Names(empty=False))(value)]
        if min(map(len, found)) < 2:
            raise ValueError
        return found


#: the feed-forward networks that a technique acts on; None finds them
FFNs = Annotated[Sequence[Sequence[str]], LayersOfFFNs()]


def ffns_of(
    module: nn.Module, graph: Graph, names: Sequence[Sequence[str]] | None, *, who: str, way_out: str
) -> list[FFN]:
    """Return the feed-forward networks that the user names, or those of the module's graph.

    Args:
        module: the root.
        graph: the graph of its loss.
        names: as in :func:`given_ffns`; None takes those of the graph.
        who: the technique's name, for messages.
        way_out: what to do if there is none, as the end of a sentence.

    Raises:
        ValueError: if there is none, or a name does not match.
    """
    if names is not None:
        return given_ffns(module, names, who=who)
    ffns, refused = find_ffns(graph)
    if not ffns:
        why = "; ".join(f"{name}: {reason}" for name, reason in refused.items()) or "there are no residual branches"
        raise ValueError(
            f"{who}: found no feed-forward network x + W_2 f(W_1 x) in {type(module).__name__} ({why}). Name them, such as"
            f" ffn=[['blocks.*.fc1', 'blocks.*.fc2']], or {way_out}."
        )
    return ffns


def given_ffns(module: nn.Module, names: Sequence[Sequence[str]], *, who: str) -> list[FFN]:
    """Return the feed-forward networks that the user names, each as a list of layers with the last one at the end.

    Args:
        module: the root.
        names: dotted paths of modules with a ``weight``, or of parameters; ``*`` matches the same text throughout a list.
        who: the technique's name, for messages.

    Raises:
        ValueError: if a name is not a linear layer, or the layers of a list do not fit together; with the layers found.
    """
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    found: list[FFN] = []
    for entry in names:
        patterns = [
            re.compile(re.escape(name).replace(r"\*", "(?P<star>.+)", 1).replace(r"\*", "(?P=star)")) for name in entry
        ]
        chosen: dict[str, list[str]] = {}
        for pattern in patterns:
            for name, shape in shapes.items():
                for text in (name, name.removesuffix(".weight")):
                    match = pattern.fullmatch(text)
                    if match and len(shape) == 2:
                        listed = chosen.setdefault(match.groupdict().get("star", ""), [])
                        if name not in listed:
                            listed.append(name)
        whole = [maps for maps in chosen.values() if len(maps) == len(entry)]
        if not whole:
            maps = [name for name, shape in shapes.items() if len(shape) == 2]
            raise ValueError(
                f"{who}(ffn=...): {list(entry)} are not all linear layers of {type(module).__name__}; expected names of weights"
                f" with two dimensions, or of their modules. Candidates: {', '.join(maps) or 'none'}."
            )
        found += [_given(shapes, maps, who=who) for maps in whole]
    return found


def _given(shapes: dict[str, tuple[int, ...]], maps: list[str], *, who: str) -> FFN:
    *first, last = maps
    layouts = [[*_layouts(shapes[name], shapes[last])] for name in first]
    common = [j for j in (1, 0) if all(any(layout.down == j for layout in found) for found in layouts)]
    if not first or not common:
        raise ValueError(
            f"{who}(ffn=...): {', '.join(f'{name} {shapes[name]}' for name in maps)} do not fit together; expected linear"
            " layers from the stream to hidden units, and last the one back to the stream."
        )
    hidden = shapes[last][common[0]]
    parts: list[Part] = []
    for name, found in zip(first, layouts, strict=True):
        layout = next(layout for layout in found if layout.down == common[0])
        parts.append(Part(name, layout.up, layout.groups, last=False))
        bias = re.sub("weight$", "bias", name)
        if shapes.get(bias) == (layout.groups * hidden,):
            parts.append(Part(bias, 0, layout.groups, last=False))
    return FFN(hidden, (*parts, Part(last, common[0], 1, last=True)))
