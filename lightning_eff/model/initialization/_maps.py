"""The linear maps and convolutions of a network, each as the matrices (out, in) that it is made of."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._branches.attention import Attention, attentions, output_dim
from lightning_eff._core._branches.ends import alike_unused
from lightning_eff._core._branches.graph import Graph, kind
from lightning_eff._core._branches.pieces import take_apart
from lightning_eff._core.search_space import RunProfile
from lightning_eff._core.session import Session
from lightning_eff.model.initialization._given.attention import Given, attentions_given, check_attention
from lightning_eff.model.initialization._once import Initialization, Turn, traced
from lightning_eff.model.initialization._orthogonal import orthogonal

MAPS_ARE_RIVALS = "both say what maps begin at, and the later one would undo the other"
UNSEEN = "its attention is not seen to be one, so that queries, keys and values of one map are not told apart"


@dataclass(frozen=True)
class Map:
    """A weight that a loss was computed with, as what it multiplies by.

    Attributes:
        name: of the weight.
        dim: along which dimension its outputs lie: 0, or the last of matrices that are handed on as they are.
        stack: it is (k, ..., ...), a matrix for each of k experts.
        groups: of a convolution: as many maps side by side.
        parts: which outputs are one map each, where several are fused: queries, keys and values; empty for one.
    """

    name: str
    dim: int = 0
    stack: bool = False
    groups: int = 1
    parts: tuple[Tensor, ...] = ()

    def split(self, weight: Tensor) -> Iterator[tuple[Tensor, Callable[[Tensor], Any]]]:
        """Each matrix, of shape (out, in) or (out, in, ...) of a convolution, and how it is written back."""
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
    """The maps that a loss was computed with, by the weight's name, in the order in which they come.

    What is an embedding, too, is left out. What the batch left unused and stands in one list with a map is there as well, as
    experts are to which it sent no token.
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
    """Parts that have no output in common, and the rest; none where it is all one map."""
    if not fused or all(bool(part.all()) for part in fused) or bool((torch.stack(fused).sum(0) > 1).any()):
        return ()
    rest = ~torch.stack(fused).any(0)
    return (*fused, *((rest,) if bool(rest.any()) else ()))


def _groups(module: nn.Module, name: str) -> int:
    return int(getattr(module.get_submodule(name.rpartition(".")[0]), "groups", 1))


def _alike(name: str) -> re.Pattern[str]:
    """Names that differ in the numbers of their components alone."""
    return re.compile(r"\.".join(r"\d+" if part.isdecimal() else re.escape(part) for part in name.split(".")))


def chosen(maps: dict[str, Map], patterns: Sequence[str] | None, *, who: str, module: nn.Module) -> dict[str, Map]:
    """Those whose names one of the patterns fits; all, for None.

    Raises:
        ValueError: if there is none, or a pattern fits none.
    """
    if patterns is None:
        found, unfit = maps, []
    else:
        found = {name: one for name, one in maps.items() if any(fnmatchcase(name, p) for p in patterns)}
        unfit = [p for p in patterns if not any(fnmatchcase(name, p) for name in maps)]
    if not found or unfit:
        near = get_close_matches(unfit[0], [*maps], n=3, cutoff=0.5) if unfit else []
        next_to = f" Next to {unfit[0]!r} are {', '.join(near)}." if near else ""
        asked = "" if patterns is None else f" of maps={[*patterns]}, where {unfit} fit none,"
        raise ValueError(
            f"{who}: training_step of {type(module).__name__} calls no linear map or convolution{asked} whose weight is seen in"
            f" autograd's graph. Expected some of: {', '.join(maps) or 'none are found'}.{next_to} Name others, or take it out."
        )
    return found


def checked(maps: Sequence[str] | None, *, who: str) -> tuple[str, ...] | None:
    """The patterns as they were given.

    Raises:
        ValueError: if they are one text.
    """
    if isinstance(maps, str):
        raise ValueError(f"{who}(maps={maps!r}): expected a list of names or patterns of weights, such as ['{maps}'].")
    return None if maps is None else tuple(maps)


def listed(names: Sequence[str], most: int = 12) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def draw_orthogonal(one: Map, weight: Tensor, *, gain: float, generator: torch.Generator) -> None:
    """Let each matrix that ``weight`` is made of be orthonormal, times ``gain``."""
    for matrix, put in one.split(weight):
        put(orthogonal(matrix.shape, gain=gain, generator=generator).to(matrix))


def no_maps(profile: RunProfile) -> str | None:
    """Why there is nothing to be set, in words."""
    return None if profile.num_matrices else "there are no hidden maps"


class Seen(NamedTuple):
    """What a pass over a batch showed.

    Attributes:
        graph: of its loss.
        attended: its attentions.
        maps: those that are to be set.
        parameters: by name.
    """

    graph: Graph
    attended: list[Attention]
    maps: dict[str, Map]
    parameters: dict[str, nn.Parameter]


class OfMaps(Initialization):
    """A technique that sets the weights of all maps, or of those that are named.

    Attributes:
        maps: names or patterns of weights; None for all, and none is plain training.
        attention: for each kind of attention, the names of its maps by what they make; None looks for them.
    """

    turn: ClassVar[Turn] = Turn.MAPS
    maps: tuple[str, ...] | None
    attention: list[dict[str, Any]] | None

    def _take(self, maps: Sequence[str] | None, attention: Given | None, force: bool) -> None:
        """Check and keep the arguments that all have."""
        if not isinstance(force, bool):
            raise ValueError(f"{type(self).__name__}({force=}): expected True or False.")
        self.maps, self.force = checked(maps, who=type(self).__name__), force
        self.attention = check_attention(attention, who=type(self).__name__)

    @property
    @override
    def neutral(self) -> bool:
        return self.maps == ()

    @override
    def check_names(self, module: nn.Module) -> None:
        attentions_given(module, self.attention or (), who=type(self).__name__)

    def look(self, session: Session, batch: Any, batch_idx: int) -> Seen | None:
        """What the module's step on a batch is made of; None for one that it passes over.

        Raises:
            ValueError: if there is no map, or none of a name that was given.
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
