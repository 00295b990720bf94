"""Transformers of any depth begin with updates of a bounded size: values, outputs and MLPs are scaled (Huang et al. 2020)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._branches.attention import Attention, Part
from lightning_eff._core._branches.ends import alike_unused, biases_beside, refuse_unequal
from lightning_eff._core._branches.finding import Branch, branches
from lightning_eff._core._branches.graph import Graph, kind
from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.initialization._divided.writing import whole
from lightning_eff.model.initialization._given.attention import branches_given, check_whole_branches
from lightning_eff.model.initialization._maps import MAPS_ARE_RIVALS, UNSEEN, Map, OfMaps, listed

WHO = "TFixup"


def encoder_scale(n: int) -> float:
    """``0.67 N^(-1/4)`` for an encoder of N layers."""
    return 0.67 * n**-0.25


def decoder_scale(n: int) -> float:
    """``(9 N)^(-1/4)`` for a decoder of N layers, and for the tables that a network looks up."""
    return (9 * n) ** -0.25


class TFixup(OfMaps):
    """Scale the values, output maps and MLPs of a transformer by its depth, so that deep ones begin with updates as small.

    At the first batch of a fresh fit, one pass is looked through for attention and for sums ``x + f(x)``, whatever modules are
    called. All linear maps are drawn anew by Xavier's rule (uniform; queries, keys and values of one map apart), with biases of
    zero. Then the value and output maps of attention and all maps of the branches without attention are scaled: by
    ``0.67 N^(-1/4)`` in an encoder of N layers, and in a network of blocks without attention to another one, a language
    model's too, since two branches make a layer there as they do in an encoder; by ``(9 N)^(-1/4)`` in a decoder of N layers
    that attends to an encoder. Queries and keys are not scaled. Tables that are looked up, of the width of the blocks, are
    drawn from ``N(0, 1/d)`` and scaled by ``(9 N)^(-1/4)``, with N of the decoder where there is one; a head that is tied to
    one is set with it.

    The source takes LayerNorm out of the network, and the warm-up out of the schedule. This technique changes neither: norms
    stay as the module has them, behind which scales do less, and so does the module's own schedule. It says so where norms are.

    Logged: ``numbers``, how many were set.

    Args:
        draw: whether maps and tables are drawn anew; otherwise the module's own are scaled, and queries and keys stay.
        embeddings: whether tables are set, too.
        maps: names of weights of maps, or patterns of them, that are set alone; None for all, an empty list for plain training.
        branches: for each residual branch the names of its weights, or of their modules, in their order, the last one at the
            end, or patterns of them, of which the first that each fits are one branch, and so on, e.g.
            ``[["blocks.*.mlp.0", "blocks.*.mlp.2"]]``, those of attention too; None looks for them.
        attention: for each kind of attention, the names or patterns
            of the weights that make its query, key and value, and of its output map; roles that one map makes in equal parts
            are joined by +, and ``"cross": True`` says that it attends to an encoder, e.g.
            ``[{"query+key+value": "blocks.*.qkv", "output": "blocks.*.proj"}]``. None looks for them.
        force: also set weights that were loaded or trained before.

    Raises:
        ValueError: at setup, for a pretrained module without ``force``; at the first batch, where no residual branch or no
            attention is found, or no map of a name that was given.

    Source:
        Huang, Perez, Ba, Volkovs 2020, "Improving Transformer Optimization Through Better Initialization", ICML.
    """

    saves: ClassVar[str] = "steps: deep transformers train without a warm-up, and without norms"
    paper: ClassVar[str] = "Huang et al. 2020, ICML"
    constraints: ClassVar[str] = "transformers"
    survey: ClassVar[Survey | None] = Survey("initialisation: scaled by depth (T-Fixup)", shen="4.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"draw": Choice((True, False))},
        pointless=lambda profile: None if profile.num_blocks else "there is no stack of blocks with residual branches",
    )
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero: a step costs the same"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("LSUV", "OrthogonalInit", "ZerO"), MAPS_ARE_RIVALS),
        "DataDrivenInit": "both say what embeddings begin at, and the later one would undo the other",
        "ACTPrecision": UNSEEN,
    }

    def __init__(
        self,
        *,
        draw: bool = True,
        embeddings: bool = True,
        maps: Sequence[str] | None = None,
        branches: Sequence[Sequence[str]] | None = None,
        attention: Sequence[Mapping[str, Any]] | None = None,
        force: bool = False,
    ) -> None:
        self.draw, self.embeddings, self.branches = draw, embeddings, check_whole_branches(branches, who=WHO)
        self._take(maps, attention, force)

    @override
    def initialize(self, session: Session, batch: Any, batch_idx: int) -> int | None:
        seen = self.look(session, batch, batch_idx)
        if seen is None:
            return None
        module, (graph, attended, found, parameters) = session.module, seen
        every = branches(graph) if self.branches is None else branches_given(module, self.branches, who=WHO)
        if not every or not attended:
            raise ValueError(
                f"{WHO}: training_step of {type(module).__name__} shows {len(every)} residual branches x + f(x) and"
                f" {len(attended)} softmax attentions in autograd's graph; expected a transformer, with some of both. Name them"
                " by branches=[[...]] and attention=[{...}], or take the technique out."
            )
        if self.branches is None:
            refuse_unequal(module, graph, every, who=WHO)
        layers, scales = _scales(module, graph, every, attended)
        values, pointed = _roles(attended)
        numbers = 0
        for name, one in found.items():
            scale = scales.get(name)
            if self.draw:
                for bias in biases_beside(module, name):
                    parameters[bias].detach().zero_()
                    numbers += parameters[bias].numel()
            if self.draw or scale is not None:
                numbers += parameters[name].numel()
                with whole(parameters[name]) as weight:
                    if self.draw:
                        self._draw(session, one, weight)
                    if scale is not None and name in values:
                        for part in values[name]:
                            part.put(weight, scale * part.of(weight))
                    elif scale is not None and name not in pointed:
                        weight *= scale
        tables = _tables(graph, every, parameters) if self.embeddings else []
        for name in tables:
            with whole(parameters[name]) as table:
                numbers += self._table(session, module, name, table, decoder_scale(layers[1] or layers[0]))
        self._say(module, found, scales, layers, tables)
        return numbers

    @override
    def check_names(self, module: nn.Module) -> None:
        super().check_names(module)
        branches_given(module, self.branches or (), who=WHO)

    def _draw(self, session: Session, one: Map, weight: Tensor) -> None:
        generator = session.generator(WHO, one.name)
        for matrix, put in one.split(weight):
            put(nn.init.xavier_uniform_(torch.empty(matrix.shape), generator=generator).to(matrix))

    def _table(self, session: Session, module: nn.Module, name: str, table: Tensor, scale: float) -> int:
        if self.draw:
            drawn = (
                torch.randn(table.shape, generator=session.generator(WHO, name), dtype=torch.float32)
                * table.shape[1] ** -0.5
            )
            table.copy_(drawn)
            padding = getattr(module.get_submodule(name.rpartition(".")[0]), "padding_idx", None)
            if isinstance(padding, int):
                table[padding] = 0.0
        table *= scale
        return table.numel()

    def _say(
        self,
        module: nn.Module,
        found: dict[str, Map],
        scales: dict[str, float],
        layers: tuple[int, int],
        tables: list[str],
    ) -> None:
        norms = sum("norm" in type(m).__name__.lower() for m in module.modules())
        scaled = [name for name in found if name in scales]
        rank_zero_info(
            f"{WHO}: {layers[0]} layers of an encoder's kind and {layers[1]} of a decoder's; {len(found)} maps, of which"
            f" {len(scaled)} lie in branches: {listed(scaled)}; tables: {listed(tables) or 'none'}"
            + (f"; the source takes norms and warm-up out, which are left as they are: {norms} norms" if norms else "")
        )

    @override
    def summary(self) -> str:
        return f"{self._numbers} numbers began {'drawn and ' if self.draw else ''}scaled by depth"


def _scales(
    module: nn.Module, graph: Graph, every: list[Branch], attended: list[Attention]
) -> tuple[tuple[int, int], dict[str, float]]:
    """How many layers encoder and decoder have, and by what the weights in branches are multiplied."""
    crossing = {name for one in attended if one.cross for name in one.output}
    decoding = {branch.stream for branch in every if any(end.weight in crossing for end in branch.last)}
    within = {name for branch in every if branch.stream in decoding for name in (e.weight for e in branch.last)}
    own = [one for one in attended if not one.cross and not within.intersection(one.output)]
    layers = len(own), sum(one.cross for one in attended)
    scales: dict[str, float] = {}
    for branch in every:
        scale = decoder_scale(layers[1]) if branch.stream in decoding else encoder_scale(max(layers[0], 1))
        names = [*branch.inner, *(end.weight for end in branch.last)]
        for name in (*names, *alike_unused(module, graph, names)):
            scales.setdefault(name, scale)
    for one in attended:  # what a decoder's attention makes of its encoder is not made of the branch's own stream
        for end in one.output:
            scales |= {part.weight: scales[end] for part in one.value if end in scales}
    return layers, scales


def _roles(attended: list[Attention]) -> tuple[dict[str, list[Part]], set[str]]:
    """The parts of maps that are values, by the weight, and the weights that make queries or keys."""
    values: dict[str, list[Part]] = {}
    for one in attended:
        for part in one.value:
            known = values.setdefault(part.weight, [])
            if not any(torch.equal(part.outputs, other.outputs) for other in known):
                known.append(part)
    return values, {part.weight for one in attended for part in (*one.query, *one.key)}


def _tables(graph: Graph, every: list[Branch], parameters: dict[str, nn.Parameter]) -> list[str]:
    """The tables that are looked up and whose rows have the width of the stream."""
    widths = {size for branch in every for end in branch.last for size in parameters[end.weight].shape}
    found: dict[str, None] = {}
    for node in graph.order:
        if kind(node).startswith("Embedding"):
            found |= {name: None for f in graph.inputs[node] if (name := graph.weight(f)) is not None}
    return [name for name in found if parameters[name].shape[1] in widths]
