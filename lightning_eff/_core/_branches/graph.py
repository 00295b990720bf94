"""The autograd graph of a loss as a graph of operations, with their inputs and weights.

Names of nodes are autograd's: ``aten`` operations with the suffix ``Backward0``. A node's inputs are in the order of the
operation's differentiable arguments. A *map* is a linear layer or a convolution.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

Node = Any  # torch.autograd.graph.Node, whose attributes torch does not type


def _named(text: str) -> frozenset[str]:
    return frozenset(text.split())


SHAPES = _named(
    "View UnsafeView ReshapeAlias AsStrided Alias Clone Copy CopySlices ToCopy Repeat Expand Transpose T Permute Movedim"
    " Unsqueeze Squeeze Flatten Unflatten Roll Flip ConstantPadNd Slice Select Split SplitWithSizes Chunk Unbind Cat Stack"
    " Index IndexSelect Gather Scatter ScatterAdd IndexAdd IndexPut MaskedScatter NativeDropout FusedDropout"
)
PRODUCTS = _named("Mul Div Bmm Addcmul")
LINEAR = SHAPES | PRODUCTS | _named("Add Sub Neg Sum Mean AvgPool2D AdaptiveAvgPool2D Lerp MaskedFill Where")
MAPS = _named(
    "Addmm Mm Bmm Baddbmm Linear GroupedMm Convolution ConvolutionOverrideable MkldnnConvolution CudnnConvolution"
)
NORMS = _named("NativeLayerNorm NativeGroupNorm NativeBatchNorm CudnnBatchNorm MiopenBatchNorm FusedRmsNorm RmsNorm")
_DATA = MAPS | _named("Embedding EmbeddingBag Index IndexSelect Gather")  # combine parameters with the batch
_ROOTS = _named("Rsqrt Sqrt Reciprocal Std LinalgVectorNorm Norm Pow")
ATTENTION = "ScaledDotProduct"
LARGEST = 40_000  # nodes; the ancestors are one bit per pair of nodes, which then takes 200 MB


class TooLarge(ValueError):
    """A graph with too many operations to search."""


class End(NamedTuple):
    """A map of whose output a tensor is a linear function.

    Attributes:
        weight: the name of its weight.
        node: the node that computes it.
        inputs: the nodes of its inputs.
        norms: names of weights and biases of the norms in between; an empty tuple for a norm without any.
        added: names of parameters added in between.
    """

    weight: str
    node: Node
    inputs: tuple[Node, ...]
    norms: tuple[tuple[str, ...], ...]
    added: tuple[str, ...]


class _Way(NamedTuple):
    """The state of a search for maps: the node, and the parameters passed so far."""

    node: Node
    norms: tuple[tuple[str, ...], ...] = ()
    added: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()  # since the last norm; they are the weights of the next norm


def kind(node: Node) -> str:
    """Return the operation of a node, without autograd's prefix and suffix."""
    return node.name().rpartition("::")[2].partition("Backward")[0]


def behind(edge: tuple[Node | None, int]) -> Node | None:
    """Return the node of an input, without FSDP2's wrapper of a module's inputs."""
    node, place = edge
    while node is not None and kind(node) == "RegisterPostBackwardFunction":
        node, place = node.next_functions[place]
    return node


class Graph:
    """The graph from which a loss was computed.

    Args:
        loss: shape (), with its graph.
        module: provides the parameters' names. Parameters without gradients are not in the graph.
        names: the names of the leaf tensors by ``id``, if those are not the module's parameters.

    Raises:
        TooLarge: if it has more than :data:`LARGEST` nodes, as in a recurrence over a long sequence.
    """

    def __init__(self, loss: Tensor, module: nn.Module, names: Mapping[int, str] | None = None) -> None:
        self.loss = loss
        names = {id(p): name for name, p in module.named_parameters()} if names is None else names
        self.inputs: dict[Node, tuple[Node, ...]] = {}
        self.leaves: dict[Node, tuple[str, Tensor]] = {}
        self.order: dict[Node, int] = {}
        self._ends: dict[Node, tuple[End, ...]] = {}
        self._weights: dict[Node, str | None] = {}
        root = loss.grad_fn
        stack: list[tuple[Node, bool]] = [] if root is None else [(root, False)]
        while stack:
            node, done = stack.pop()
            if done:
                self.order.setdefault(node, len(self.order))
                continue
            if node in self.inputs:
                continue
            self.inputs[node] = tuple(f for edge in node.next_functions if (f := behind(edge)) is not None)
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) in names:
                self.leaves[node] = (names[id(variable)], variable)
            stack.append((node, True))
            stack += [(f, False) for f in reversed(self.inputs[node])]
        if len(self.order) > LARGEST:
            raise TooLarge(f"{len(self.order)} operations in one pass; expected at most {LARGEST}")
        self.fixed: set[Node] = set(self.leaves)  #: nodes computed only from parameters, independent of the batch
        self._of: dict[Node, int] = {}
        for node, place in self.order.items():
            if self.inputs[node] and kind(node) not in _DATA and self.fixed.issuperset(self.inputs[node]):
                self.fixed.add(node)
            bits = 1 << place
            for f in self.inputs[node]:
                bits |= self._of[f]
            self._of[node] = bits

    def bits(self, nodes: Iterable[Node]) -> int:
        """Return a set of nodes as an integer with one bit per node."""
        found = 0
        for node in nodes:
            found |= 1 << self.order[node]
        return found

    def comes_of(self, node: Node, bits: int) -> bool:
        """Return whether ``node`` is in a set of nodes, or was computed from one of them."""
        return bool(self._of[node] & bits)

    def below(self, node: Node, through: Callable[[Node], Iterable[Node]]) -> set[Node]:
        """Return ``node`` and all nodes reachable from it by ``through``."""
        seen, stack = {node}, [node]
        while stack:
            for other in through(stack.pop()):
                if other not in seen:
                    seen.add(other)
                    stack.append(other)
        return seen

    def nodes(self, *kinds: str) -> Iterator[Node]:
        """Yield the nodes of these operations, in the order of computation."""
        return (node for node in self.order if kind(node) in kinds)

    def weight(self, node: Node) -> str | None:
        """Return the parameter with two or more dimensions that a node is, up to changes of shape, dtype and scale."""
        if node not in self._weights:
            here: Node | None = node
            while here is not None and here not in self.leaves:
                if kind(here) not in SHAPES and kind(here) not in ("Mul", "WeightNormInterface"):
                    here = None
                    break
                big = [f for f in self.inputs[here] if not self._is_scale(f)]
                here = big[0] if len(big) == 1 else None
            found = None if here is None else self.leaves[here]
            self._weights[node] = found[0] if found is not None and found[1].ndim > 1 else None
        return self._weights[node]

    def _is_scale(self, node: Node) -> bool:
        """Return whether a node is a parameter with at most one dimension, up to changes of its shape."""
        while node not in self.leaves:
            if kind(node) not in SHAPES or len(self.inputs[node]) != 1:
                return False
            node = self.inputs[node][0]
        return self.leaves[node][1].ndim <= 1

    def uses(self, name: str) -> list[Node]:
        """Return the operations, other than changes of shape and scale, that use a parameter with two or more dimensions."""
        return [
            node
            for node in self.order
            if kind(node) not in SHAPES
            and self.weight(node) != name  # not a multiple of it
            and any(self.weight(f) == name for f in self.inputs[node])
        ]

    def map_at(self, node: Node) -> tuple[str, tuple[Node, ...]] | None:
        """Return the weight of the map that a node computes, and the node's other inputs; None if it is not a map."""
        if kind(node) not in MAPS and not isinstance(node, BackwardCFunction):  # the latter may be a custom product
            return None
        weights = [(f, name) for f in self.inputs[node] if (name := self.weight(f)) is not None]
        if not weights:
            return None
        rest = tuple(f for f in self.inputs[node] if f is not weights[-1][0] and f not in self.fixed)
        return weights[-1][1], rest

    def ends(self, node: Node) -> tuple[End, ...]:
        """Return the maps in whose outputs ``node`` is linear, up to norms. Attention counts as linear in its values."""
        if node not in self._ends:
            found: dict[Node, End] = {}
            first = _Way(node)
            seen, stack = {first}, [first]
            while stack:
                way = stack.pop()
                at = self.map_at(way.node)
                if at is not None:
                    found.setdefault(way.node, End(at[0], way.node, at[1], way.norms, way.added))
                    continue
                onward = [other for other in self._linear(way) if other not in seen]
                seen.update(onward)
                stack += onward
            self._ends[node] = tuple(found.values())
        return self._ends[node]

    def linear(self, node: Node) -> tuple[Node, ...]:
        """Return the inputs in which a node's output is linear, if any. Norms and sums count as linear."""
        at = self.map_at(node)
        inputs = tuple(f for f in self.inputs[node] if f not in self.fixed) if at is None else at[1]
        if (
            at is None
            and kind(node) not in NORMS
            and (kind(node) not in LINEAR or (kind(node) in PRODUCTS and len(inputs) > 1))
        ):
            return ()
        return inputs[:1] if kind(node) in NORMS else inputs

    def _small(self, node: Node) -> tuple[str, ...]:
        """Return names of the parameters that are direct inputs of a node."""
        return tuple(self.leaves[f][0] for f in self.inputs[node] if f in self.leaves)

    def _linear(self, way: _Way) -> Iterator[_Way]:
        """Yield the next steps from a linear operation. A hand-written norm divides by a root."""
        node, norms, added, scales = way
        inputs, what = tuple(f for f in self.inputs[node] if f not in self.fixed), kind(node)
        if what in NORMS:
            yield _Way(inputs[0], (*norms, self._small(node)), added)
        elif what.startswith(ATTENTION) and len(inputs) >= 3:
            yield _Way(inputs[2], norms, added)
        elif what in LINEAR:
            if what in PRODUCTS:
                scales = (*scales, *self._small(node))
                if any(kind(self._plain(f)) in _ROOTS for f in inputs):
                    norms, scales = (*norms, scales), ()
                    inputs = tuple(f for f in inputs if kind(self._plain(f)) not in _ROOTS)
            elif what in ("Add", "Sub"):
                added = (*added, *self._small(node))
            for f in inputs:
                yield _Way(f, norms, added, scales)

    def _plain(self, node: Node) -> Node:
        """Return the first node on the way down that is not a change of shape or the addition of a constant."""
        while (kind(node) in SHAPES or kind(node) in ("Add", "ClampMin", "Clamp")) and len(self.inputs[node]) == 1:
            node = self.inputs[node][0]
        return node
