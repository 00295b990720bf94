"""Find the dimensions of parameters that are wider than in the base, and the function of each parameter."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_eff._core._architecture.linear_maps import is_conv1d
from lightning_eff._core._branches.attention import Attention, attentions
from lightning_eff._core._branches.ends import biases_beside
from lightning_eff._core._branches.graph import NORMS, SHAPES, Graph, Node, kind
from lightning_eff._core._branches.probing import graph_of
from lightning_eff.model.initialization._maps import Map, listed, maps_of
from lightning_eff.model.initialization.transfer._rules import Role

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_DENSE = (nn.Linear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)  # weights of shape (out, in)


def roles_of(module: nn.Module, base: nn.Module, *, who: str, scores: bool = True) -> dict[str, Role]:
    """Return the roles of all parameters whose shape differs from the base's, by name.

    A forward pass on generated inputs shows how parameters are used. The module's class decides for parameters without a use.

    Args:
        module: the module.
        base: the narrow one.
        who: the technique's name.
        scores: whether the layers of queries correct the scores of wider attention heads.

    Raises:
        ValueError: if the two do not have the same parameters, if a width changes what only the module's code could correct,
            or if no pass runs.
    """
    shapes = _matched(module, base, who=who)
    changed = {name for name, p in module.named_parameters() if p.shape != shapes[name]}
    if not changed:
        return {}
    graph = graph_of(module, who=who)
    attended = attentions(graph)
    maps = maps_of(graph, module, attended)
    looked_up = {graph.weight(f) for n in graph.order if kind(n).startswith("Embedding") for f in graph.inputs[n]}
    contracted = set(_contracted(graph))
    roles: dict[str, Role] = {}
    for name, p in module.named_parameters():
        if name not in changed:
            continue
        shape, narrow = tuple(p.shape), shapes[name]
        axes = None if name in looked_up else _axes(module, name, p, maps)
        if axes is not None:
            roles[name] = _of_map(module, base, name, axes, (shape, narrow), who=who)
        else:
            roles[name] = _of_vector(module, name, (shape, narrow), contracted=name in contracted, who=who)
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    for name, p in module.named_parameters():
        if name not in changed or not (name in looked_up or id(p) in tables):
            continue
        for vector in _before_tied_head(module, graph, name, who=who):
            roles[vector] = replace(roles[vector], multiplier=1 / roles[name].r_out)
    for name, multiplier in (_queries(module, base, attended, who=who) if scores else {}).items():
        roles[name] = replace(roles[name], multiplier=multiplier)
    return roles


def _matched(module: nn.Module, base: nn.Module, *, who: str) -> dict[str, tuple[int, ...]]:
    """Return the base's shapes by name."""
    shapes = {name: tuple(p.shape) for name, p in base.named_parameters()}
    here = {name: p.ndim for name, p in module.named_parameters()}
    other = sorted(here.keys() ^ shapes.keys())
    if other:
        raise ValueError(
            f"{who}(base=...): {type(module).__name__} and its base differ in the parameters {listed(other, 5)}. Give the same"
            " module with another width, and with the same depth and settings otherwise."
        )
    ranks = [name for name, shape in shapes.items() if len(shape) != here[name]]
    if ranks:
        raise ValueError(
            f"{who}(base=...): {listed(ranks, 5)} have another number of dimensions than in the base. Give the same module with"
            " another width."
        )
    return shapes


def _axes(module: nn.Module, name: str, p: Tensor, maps: Mapping[str, Map]) -> tuple[int, int] | None:
    """Return the dimensions of a weight along outputs and inputs; None if it is not the weight of a linear layer."""
    owner, one = module.get_submodule(name.rpartition(".")[0]), maps.get(name)
    if isinstance(owner, _CONVOLUTIONS) and p.ndim > 2:
        return (1, 0) if isinstance(owner, _TRANSPOSED) else (0, 1)
    if one is not None:
        first = int(one.stack)
        return (first + 1, first) if one.dim else (first, first + 1)
    if p.ndim == 2 and isinstance(owner, _DENSE):
        return 0, 1
    return (1, 0) if p.ndim == 2 and is_conv1d(owner) else None


def _of_map(
    module: nn.Module, base: nn.Module, name: str, axes: tuple[int, int], shapes: tuple[Any, Any], *, who: str
) -> Role:
    wide, narrow = shapes
    rest = [i for i, (n, b) in enumerate(zip(wide, narrow, strict=True)) if n != b and i not in axes]
    if rest:
        raise ValueError(
            f"{who}(base=...): {name} has the shape {wide}, and {narrow} in the base, which differ in dimension {rest[0]}. It"
            " is neither the inputs nor the outputs of the layer. Give a base with the same kernels and number of experts."
        )
    out, inside = axes
    path = name.rpartition(".")[0]
    # a transposed convolution has (in, out / groups); the others, whose inputs are divided, (out, in / groups)
    parts = [
        m.groups if isinstance(m, _TRANSPOSED) else 1 for m in (module.get_submodule(path), base.get_submodule(path))
    ]
    outputs = wide[out] * parts[0], narrow[out] * parts[1]
    inputs = wide[inside] // parts[0], narrow[inside] // parts[1]
    if inputs[0] == inputs[1]:
        return Role("input", inputs, outputs)
    return Role("output" if outputs[0] == outputs[1] else "hidden", inputs, outputs)


def _of_vector(module: nn.Module, name: str, shapes: tuple[Any, Any], *, contracted: bool, who: str) -> Role:
    wide, narrow = shapes
    at = [i for i, (n, b) in enumerate(zip(wide, narrow, strict=True)) if n != b]
    if len(at) > 1:
        raise ValueError(
            f"{who}(base=...): {name} has the shape {wide}, and {narrow} in the base, and it is not seen how"
            f" {type(module).__name__} uses it. Use it as the weight of a linear layer, a convolution or an embedding, or"
            " give a base in which only one of its dimensions differs."
        )
    owner = module.get_submodule(name.rpartition(".")[0])
    if at == [0] and isinstance(owner, nn.Embedding) and len(wide) == 2:
        raise ValueError(
            f"{who}(base=...): {name} has {wide[0]} rows, and {narrow[0]} in the base. Give a base with the same vocabulary."
        )
    pair = wide[at[0]], narrow[at[0]]
    return Role("output", pair, (1, 1)) if contracted else Role("input", (1, 1), pair)


def _contracted(graph: Graph) -> Iterator[str]:
    """Yield the vectors that are multiplied with hidden states and summed over, as a head with one output is."""
    for node in graph.nodes("Mv", "Dot"):
        for f in graph.inputs[node]:
            while f not in graph.leaves and kind(f) in SHAPES and len(graph.inputs[f]) == 1:
                f = graph.inputs[f][0]
            if f in graph.leaves:
                yield graph.leaves[f][0]


def _before_tied_head(module: nn.Module, graph: Graph, name: str, *, who: str) -> list[str]:
    """Return the gain (and bias) right before a head that shares its weight with the embedding ``name``.

    As an embedding, the weight keeps its size and learning rate at any width. As a head, its outputs are then too large by the
    ratio of widths. The gain before it takes the factor over. The list is empty if the embedding is no head.

    Raises:
        ValueError: if there is no such gain, or it has another use, or the pass does not show the head.
    """
    heads = [node for node in graph.uses(name) if (at := graph.map_at(node)) is not None and at[0] == name]
    table = module.get_parameter(name)
    unseen = [path for path, m in module.named_modules() if isinstance(m, nn.Linear) and m.weight is table]
    if unseen and not heads:
        raise ValueError(
            f"{who}: {name} is an embedding and also the weight of {unseen[0]}, which a forward pass on made-up inputs does not"
            f" use. Give {type(module).__name__} an example_input_array with which its forward computes {unseen[0]}."
        )
    users: dict[Node, set[Node]] = {}
    for node, inputs in graph.inputs.items():
        for f in inputs:
            users.setdefault(f, set()).add(node)
    found: dict[str, None] = {}
    for head in heads:
        gain = _gain(graph, head, users)
        if not gain:
            raise ValueError(
                f"{who}: {name} is an embedding and also the weight of a head, whose outputs must shrink as the width grows."
                " No norm with a trained gain stands right before the head to take the factor over. Do not tie them, or put"
                " such a norm before the head."
            )
        found |= dict.fromkeys(gain)
    return [*found]


def _gain(graph: Graph, head: Node, users: Mapping[Node, set[Node]]) -> list[str]:
    """Return the names of the parameters to which the inputs of ``head`` are proportional, and that only ``head`` gets."""
    at = graph.map_at(head)
    here = at[1][0] if at is not None and len(at[1]) == 1 else None
    above: Node = head
    names: list[str] = []
    while here is not None and users[here] == {above}:
        vectors = [f for f in graph.inputs[here] if f in graph.leaves and graph.leaves[f][1].ndim == 1]
        rest = [f for f in graph.inputs[here] if f not in graph.fixed]
        names += [graph.leaves[f][0] for f in vectors]
        if any(users[f] != {here} for f in vectors):
            return []
        if vectors and (kind(here) in NORMS or kind(here) == "Mul"):
            return names
        if len(rest) != 1 or not (kind(here) in SHAPES or (kind(here) == "Add" and vectors)):
            return []
        above, here = here, rest[0]
    return []


def _queries(module: nn.Module, base: nn.Module, attended: list[Attention], *, who: str) -> dict[str, float]:
    """Return the multipliers of the layers of queries, where heads are wider than in the base.

    muP divides scores by d instead of sqrt(d), for heads of width d. Relative to the base this is a factor sqrt(d_base / d).

    Raises:
        ValueError: if no layer computes only queries, to take the factor over.
    """
    if not attended:
        return {}
    narrow = attentions(graph_of(base, who=who))
    widths = [one.width for one in attended], [one.width for one in narrow]
    if len(attended) != len(narrow) or None in widths[0] or None in widths[1]:
        rank_zero_warn(
            f"{who}: could not compare the width of attention heads with the base's. Scores are right only if heads are as wide"
            " as in the base, so that a wider model has more of them."
        )
        return {}
    found: dict[str, float] = {}
    for one, width in zip(attended, widths[1], strict=True):
        if one.width == width or not one.width or not width:
            continue
        keys = {part.weight for part in (*one.key, *one.value)}
        fit = one.query and all(part.whole and part.weight not in keys for part in one.query)
        if one.normed or not fit:
            why = "a norm follows its queries" if one.normed else "no layer computes its queries alone"
            raise ValueError(
                f"{who}(base=...): attention heads are {one.width} wide, and {width} in the base. Scores must then be divided"
                f" by their width instead of its square root, which is not possible from outside, because {why}. Give a base"
                f" with heads of width {one.width}, so that only their number differs, or keep the scores by attention='keep'."
            )
        multiplier = (width / one.width) ** 0.5
        for part in one.query:
            for name in (part.weight, *biases_beside(module, part.weight)):
                found[name] = multiplier
    return found
