"""Find the linear layers of queries, keys, values and outputs of attention, also where one layer computes several.

Attention is a fused ``scaled_dot_product_attention``, or a product of values with a softmax of products. Gradients show which
outputs of a layer are its queries: gradients that come only from the queries reach only these rows.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_eff._core._branches.graph import ATTENTION, SHAPES, End, Graph, Node, behind, kind

ROLES = ("query", "key", "value")
_BATCHED = ("Bmm", "Baddbmm", "Mm")
_SOFTMAX = ("Softmax", "SafeSoftmax")
_OF_SCORES = SHAPES | {"Mul", "Div", "Add", "Sub", "MaskedFill", "Where", "Tanh"}


class Part(NamedTuple):
    """Some outputs of a linear layer.

    Attributes:
        weight: the name of the layer's weight.
        dim: the weight's dimension along the outputs.
        outputs: which outputs, bool, of shape (out,), on the CPU.
    """

    weight: str
    dim: int
    outputs: Tensor

    @property
    def whole(self) -> bool:
        """Whether it contains all outputs of the layer."""
        return bool(self.outputs.all())

    def of(self, tensor: Tensor) -> Tensor:
        """Return a copy of this part of the weight, or of its bias of shape (out,)."""
        return tensor.index_select(min(self.dim, tensor.ndim - 1), self.outputs.nonzero().flatten().to(tensor.device))

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Write ``values``, in the shape that :meth:`of` returns, into the weight or its bias."""
        tensor.index_copy_(min(self.dim, tensor.ndim - 1), self.outputs.nonzero().flatten().to(tensor.device), values)


@dataclass(frozen=True)
class Attention:
    """One attention: the linear layers of its queries, keys and values, and those that get its result.

    Attributes:
        query: parts of layers.
        key: parts of layers.
        value: parts of layers.
        output: names of weights.
        cross: whether keys come from other data than queries, as in a decoder's attention to its encoder.
        width: consecutive features per query head; None if unknown.
        normed: whether a norm follows the layers of queries or keys.
    """

    query: tuple[Part, ...]
    key: tuple[Part, ...]
    value: tuple[Part, ...]
    output: tuple[str, ...]
    cross: bool
    width: int | None = None
    normed: bool = False


class _Seen(NamedTuple):
    """The position of an attention in the graph: by role, the operation that uses it, and at which argument."""

    node: Node
    at: dict[str, tuple[Node, int]]


def attentions(graph: Graph) -> list[Attention]:
    """Return all attentions in the graph of a loss, in order. This takes three backward passes if there are any.

    Parts are empty for queries, keys or values that are not outputs of a linear layer.
    """
    seen = [*_seen(graph)]
    if not seen:
        return []
    ends = {(i, role): graph.ends(_input(*one.at[role])) for i, one in enumerate(seen) for role in ROLES}
    reached = {
        role: _reached(graph, seen, role, [e for (_, r), es in ends.items() if r == role for e in es]) for role in ROLES
    }
    outputs, sources = _outputs(graph, seen), _sources(graph)

    def parts(i: int, role: str) -> tuple[Part, ...]:
        names = dict.fromkeys(end.weight for end in ends[i, role])
        return tuple(reached[role][name] for name in names if name in reached[role])

    found: list[Attention] = []
    for i, one in enumerate(seen):
        query, key = (_input(*one.at[role]) for role in ROLES[:2])
        cross = any(graph.comes_of(query, source) != graph.comes_of(key, source) for source in sources)
        normed = any(end.norms for role in ROLES[:2] for end in ends[i, role])
        made, width = tuple(outputs[one.node]), _width(*one.at["query"])
        found.append(Attention(parts(i, "query"), parts(i, "key"), parts(i, "value"), made, cross, width, normed))
    return found


def _input(node: Node, place: int) -> Node:
    return behind(node.next_functions[place])


def _width(node: Node, place: int) -> int | None:
    """Return the last dimension of the queries in a node's argument, from the tensors saved for backward; None if unknown."""
    if kind(node).startswith(ATTENTION):
        kept = getattr(node, "_saved_query", None)
        return kept.shape[-1] if isinstance(kept, Tensor) else None
    # the second factor of a product has as many rows
    kept = getattr(node, "_saved_mat2", getattr(node, "_saved_batch2", None))
    first = place == len(node.next_functions) - 2
    return kept.shape[-2] if first and isinstance(kept, Tensor) else None


def _seen(graph: Graph) -> Iterator[_Seen]:
    for node in graph.order:
        functions = node.next_functions
        if kind(node).startswith(ATTENTION):
            if len(functions) >= 3 and all(f is not None for f, _ in functions[:3]):
                yield _Seen(node, {role: (node, place) for place, role in enumerate(ROLES)})
        elif (two := _product(graph, node)) is not None:
            for weights, values in (two, two[::-1]):
                scores = _scores(graph, _input(node, weights))
                if scores is not None and _scores(graph, _input(node, values)) is None:
                    product, (query, key) = scores
                    yield _Seen(node, {"query": (product, query), "key": (product, key), "value": (node, values)})
                    break


def _product(graph: Graph, node: Node) -> tuple[int, int] | None:
    """Return the arguments of the two factors of a product in which neither is a weight."""
    if kind(node) not in _BATCHED or graph.map_at(node) is not None:
        return None
    made = [behind(edge) for edge in node.next_functions]
    two = [i for i, f in enumerate(made) if f is not None and f not in graph.fixed][-2:]
    return (two[0], two[1]) if len(two) == 2 else None


def _scores(graph: Graph, node: Node) -> tuple[Node, tuple[int, int]] | None:
    """Return the product in the softmax that computes attention weights; None if ``node`` has no such weights."""
    onward = SHAPES | {"Mul", "Div", "Add", "Sub", "Sum"}
    reached = graph.below(node, lambda n: graph.inputs[n] if kind(n) in onward else ())
    for softmax in (n for n in reached if kind(n) in _SOFTMAX):
        start = graph.inputs[softmax][0]
        for n in graph.below(start, lambda n: graph.inputs[n] if kind(n) in _OF_SCORES else ()):
            if (two := _product(graph, n)) is not None:
                return n, two
    return None


def _reached(graph: Graph, seen: list[_Seen], role: str, ends: list[End]) -> dict[str, Part]:
    """Return by weight name which outputs of the layers at ``ends`` get gradients that come only from ``role``."""
    variables = {name: variable for name, variable in graph.leaves.values() if name in {end.weight for end in ends}}
    if not variables:
        return {}
    cut: dict[Node, set[int]] = {}  # arguments of a node at which gradients stop
    fed: set[Node] = set()
    for one in seen:
        node, place = one.at[role]
        fed.add(node)
        for other in {one.node, *(n for n, _ in one.at.values())}:
            cut[other] = {*range(len(other.next_functions))} - ({place} if other is node else set())
    for end in ends:
        cut[end.node] = {i for i, edge in enumerate(end.node.next_functions) if behind(edge) in end.inputs}
    with ExitStack() as scope:
        for node, places in cut.items():
            scope.callback(node.register_hook(_cutting(places)).remove)
        for node in fed:
            scope.callback(node.register_prehook(_feeding).remove)
        for variable in variables.values():
            if not variable.requires_grad:  # the parameter is frozen outside of the observed pass
                scope.callback(variable.requires_grad_, False)
                variable.requires_grad_(True)
        zero = torch.zeros_like(graph.loss)
        found = torch.autograd.grad(graph.loss, [*variables.values()], zero, retain_graph=True, allow_unused=True)
    at = {end.weight: end.node for end in ends}
    return {name: _part(graph, name, at[name], g) for name, g in zip(variables, found, strict=True) if g is not None}


def _cutting(places: set[int]) -> Any:
    def hook(grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor | None, ...]) -> Any:
        return tuple(torch.zeros_like(g) if i in places and g is not None else g for i, g in enumerate(grad_inputs))

    return hook


def _feeding(grad_outputs: tuple[Tensor | None, ...]) -> Any:
    first, *rest = grad_outputs
    if first is None:
        return None
    # random numbers do not cancel in sums, and are the same each time
    fed = torch.randn(first.shape, generator=torch.Generator().manual_seed(0)).to(first)
    return (fed, *rest)


def _part(graph: Graph, name: str, node: Node, gradient: Tensor) -> Part:
    by_dim = [gradient.ne(0).movedim(dim, 0).flatten(1).any(dim=1).cpu() for dim in range(min(gradient.ndim, 2))]
    dim = output_dim(graph, name, node)
    if dim is None:
        dim = 1 if len(by_dim) > 1 and by_dim[0].all() and not by_dim[1].all() else 0
    return Part(name, dim, by_dim[dim])


def output_dim(graph: Graph, name: str, node: Node) -> int | None:
    """Return the dimension of a weight along its layer's outputs: 0 for ``x W^T``, 1 for ``x W``; None if unknown."""
    if kind(node) not in ("Mm", "Addmm", "Bmm", "Baddbmm", "GroupedMm"):
        return 0 if kind(node) == "Linear" or "Convolution" in kind(node) else None
    here = graph.inputs[node][-1]
    if graph.weight(here) != name:
        return None
    turned = False
    while here not in graph.leaves:
        if kind(here) in ("T", "Transpose", "Permute"):
            turned = not turned
        onward = [f for f in graph.inputs[here] if graph.weight(f) == name]
        if len(onward) != 1:
            return None
        here = onward[0]
    return 0 if turned else 1


def _outputs(graph: Graph, seen: list[_Seen]) -> dict[Node, dict[str, None]]:
    """Return, by attention node, the weights of the layers that get its result, also through gates."""
    found: dict[Node, dict[str, None]] = {one.node: {} for one in seen}
    for node in graph.order:
        at = graph.map_at(node)
        if at is None:
            continue

        def onward(n: Node) -> tuple[Node, ...]:
            return () if n in found or n in graph.fixed or graph.map_at(n) is not None or _joins(n) else graph.inputs[n]

        for start in at[1]:
            for n in graph.below(start, onward):
                if n in found:
                    found[n][at[0]] = None
    return found


def _joins(node: Node) -> bool:
    """Return whether a node is a sum of two tensors, such as a stream and a branch."""
    return (
        kind(node) in ("Add", "Addcmul")
        and len(node.next_functions) > 1
        and None not in {f for f, _ in node.next_functions}
    )


def _sources(graph: Graph) -> list[int]:
    """Return the nodes at which data enters, as bits: embeddings, and layers of inputs without weights before them."""
    return [
        graph.bits([node])
        for node in graph.order
        if kind(node).startswith("Embedding") or ((at := graph.map_at(node)) is not None and not at[1])
    ]
