"""The linear layers and convolutions of a network, each as the matrices (out, in) of which its weight consists."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Names
from lightning_eff._core._branches.attention import Attention, attentions, output_dim
from lightning_eff._core._branches.ends import alike_unused
from lightning_eff._core._branches.graph import Graph, kind
from lightning_eff._core._branches.sharded_step import take_apart
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.initialization._given.attention import Given, attentions_given
from lightning_eff.model.initialization._once import Initialization, Turn, traced

#: Names of weights, or patterns of them.
Patterns = Annotated[
    Sequence[str], Names("names or patterns of weights", hint="Example: ['blocks.*.weight']; [] is plain training.")
]
SAME_WEIGHTS = "both set the same weights, and the later one would undo the other"
UNSEEN = "its attention is not recognised, so queries, keys and values that one layer computes cannot be separated"


@dataclass(frozen=True)
class Map:
    """A weight that a loss was computed with, as the matrices by which it multiplies.

    Attributes:
        name: the name of the weight.
        dim: the dimension of its outputs: 0, or the last for weights of shape (in, out).
        stack: whether it is (k, ..., ...), one matrix for each of k experts.
        groups: the groups of a convolution.
        parts: the outputs of each part, where queries, keys and values are fused; empty for one part.
    """

    name: str
    dim: int = 0
    stack: bool = False
    groups: int = 1
    parts: tuple[Tensor, ...] = ()

    def split(self, weight: Tensor) -> Iterator[tuple[Tensor, Callable[[Tensor], Any]]]:
        """Yield each matrix, (out, in) or (out, in, ...) for a convolution, with the function that writes it back."""
        whole = weight.unbind(0) if self.stack else weight.chunk(self.groups, dim=0)
        for one in whole:
            turned = one.mT if self.dim else one
            if not self.parts:
                yield turned, turned.copy_
                continue
            for part in self.parts:
                index = part.nonzero().flatten().to(weight.device)
                yield (
                    turned.index_select(0, index),
                    lambda new, turned=turned, index=index: turned.index_copy_(0, index, new),
                )


def maps_of(graph: Graph, module: nn.Module, found: Sequence[Attention] | None = None) -> dict[str, Map]:
    """Return the linear layers and convolutions that a loss was computed with, by the weight's name, in the order of use.

    Weights that are also embeddings are left out. Weights that the batch did not use are included if they stand in a
    list with a used one, such as experts that received no token.
    """
    found = attentions(graph) if found is None else found
    looked_up = {graph.weight(f) for n in graph.order if kind(n).startswith("Embedding") for f in graph.inputs[n]}
    parts: dict[str, dict[tuple[bool, ...], Tensor]] = {}
    for one in found:
        for part in (*one.query, *one.key, *one.value):
            parts.setdefault(part.weight, {})[tuple(part.outputs.tolist())] = part.outputs
    shapes = dict(module.named_parameters())
    maps: dict[str, Map] = {}
    for node in graph.order:
        at = graph.map_at(node)
        if at is None or at[0] in maps or at[0] in looked_up:
            continue
        weight = shapes[at[0]]
        convolution = "Convolution" in kind(node)
        stack = weight.ndim == 3 and not convolution
        dim = output_dim(graph, at[0], node) or 0
        groups = _groups(module, at[0]) if convolution else 1
        fused = [*parts.get(at[0], {}).values()]
        maps[at[0]] = Map(at[0], dim, stack, groups, () if convolution else _apart(fused))
    for name in alike_unused(module, graph, [*maps]):
        like = next(one for one in maps.values() if _alike(one.name).fullmatch(name))
        maps[name] = Map(name, like.dim, like.stack, like.groups)
    return maps


def _apart(fused: list[Tensor]) -> tuple[Tensor, ...]:
    """Return parts that have no output in common, and the rest; none if everything is one part."""
    if not fused or all(bool(part.all()) for part in fused) or bool((torch.stack(fused).sum(0) > 1).any()):
        return ()
    rest = ~torch.stack(fused).any(0)
    return (*fused, *((rest,) if bool(rest.any()) else ()))


def _groups(module: nn.Module, name: str) -> int:
    return int(getattr(module.get_submodule(name.rpartition(".")[0]), "groups", 1))


def _alike(name: str) -> re.Pattern[str]:
    """Return a pattern of names that differ only in the numbers of their components."""
    return re.compile(r"\.".join(r"\d+" if part.isdecimal() else re.escape(part) for part in name.split(".")))


def chosen(maps: dict[str, Map], patterns: Sequence[str] | None, *, who: str, module: nn.Module) -> dict[str, Map]:
    """Return those whose names match one of the patterns; all, for None.

    Raises:
        ValueError: if there is none, or a pattern matches none.
    """
    if patterns is None:
        found, unfit = maps, []
    else:
        found = {name: one for name, one in maps.items() if any(fnmatchcase(name, p) for p in patterns)}
        unfit = [p for p in patterns if not any(fnmatchcase(name, p) for name in maps)]
    if not found or unfit:
        if not maps:
            raise ValueError(
                f"{who}: training_step of {type(module).__name__} uses no linear layer or convolution whose weight takes a"
                f" gradient. Remove {who}."
            )
        near = get_close_matches(unfit[0], [*maps], n=3, cutoff=0.5) if unfit else []
        use = f"Did you mean {', '.join(near)}?" if near else f"Use some of {', '.join([*maps][:5])}."
        raise ValueError(
            f"{who}(maps={[*(patterns or ())]}): {unfit or 'nothing'} matches no weight of a linear layer or convolution that"
            f" training_step of {type(module).__name__} uses. {use}"
        )
    return found


def listed(names: Sequence[str], most: int = 12) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def orthogonal(shape: Sequence[int], *, gain: float, generator: torch.Generator) -> Tensor:
    """Return a random W of ``shape`` (m, ...), as a matrix (m, n): ``W^T W = gain^2 I`` if m >= n, else
    ``W W^T = gain^2 I``.

    It is uniform over such matrices: Q of a Gaussian matrix's QR decomposition, with a positive diagonal of R. Float32,
    on the CPU.
    """
    m, n = shape[0], max(torch.Size(shape[1:]).numel(), 1)
    a = torch.randn(max(m, n), min(m, n), generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(a)
    q = q * r.diagonal().sign()
    return (gain * (q if m >= n else q.mT)).reshape(*shape).float()


def draw_orthogonal(one: Map, weight: Tensor, *, gain: float, generator: torch.Generator) -> None:
    """Set each matrix of ``weight`` to an orthonormal one, times ``gain``."""
    for matrix, put in one.split(weight):
        put(orthogonal(matrix.shape, gain=gain, generator=generator).to(matrix))


class Seen(NamedTuple):
    """The findings of a pass on a batch.

    Attributes:
        graph: the graph of its loss.
        attended: its attention layers.
        maps: the weights to set.
        parameters: by name.
    """

    graph: Graph
    attended: list[Attention]
    maps: dict[str, Map]
    parameters: dict[str, nn.Parameter]


class OfMaps(Initialization):
    """A technique that sets the weights of linear layers and convolutions, all or those that are named.

    Attributes:
        maps: names or patterns of weights; None for all. An empty list is plain training.
        attention: for each kind of attention, the names of its weights by role; None finds them.
    """

    turn: ClassVar[Turn] = Turn.MAPS
    neutral_at: ClassVar[Mapping[str, Any]] = {"maps": ()}
    control = Control("the baseline for as many seconds with its learning rate decayed to zero: a step costs the same")
    maps: tuple[str, ...] | None
    attention: Given | None

    def _take(self, maps: Sequence[str] | None, attention: Given | None, force: bool) -> None:
        """Keep the arguments that all have."""
        self.maps, self.force = None if maps is None else tuple(maps), force
        self.attention = attention

    @override
    def check_names(self, module: nn.Module) -> None:
        attentions_given(module, self.attention or (), who=type(self).__name__)

    def look(self, session: Session, batch: Any, batch_idx: int) -> Seen | None:
        """Look at the module's step on a batch; None for a batch that the step skips.

        Raises:
            ValueError: if there is no weight to set, or none that matches a given name.
        """
        who = type(self).__name__
        graph = traced(session, batch, batch_idx, who=who)
        if graph is None:
            return None
        given = self.attention
        attended = attentions(graph) if given is None else attentions_given(session.module, given, who=who)
        found = chosen(maps_of(graph, session.module, attended), self.maps, who=who, module=session.module)
        take_apart(session)
        return Seen(graph, attended, found, dict(session.module.named_parameters()))
