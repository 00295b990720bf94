"""T-Fixup: scale values, output projections and MLPs by depth, so that updates stay bounded (Huang et al. 2020)."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._branches.attention import Attention, Part
from lightning_eff._core._branches.ends import alike_unused, biases_beside, refuse_unequal
from lightning_eff._core._branches.finding import Branch, branches
from lightning_eff._core._branches.graph import Graph, kind
from lightning_eff._core.search_space import Choice, SearchSpace, needs_blocks
from lightning_eff._core.session import Session
from lightning_eff.model.initialization._divided.writing import whole
from lightning_eff.model.initialization._given.attention import Attentions, Branches, branches_given
from lightning_eff.model.initialization._maps import SAME_WEIGHTS, UNSEEN, Map, OfMaps, Patterns, listed

WHO = "TFixup"


def encoder_scale(n: int) -> float:
    """Return ``0.67 N^(-1/4)``, for an encoder of N layers."""
    return 0.67 * n**-0.25


def decoder_scale(n: int) -> float:
    """Return ``(9 N)^(-1/4)``, for a decoder of N layers and for embeddings."""
    return (9 * n) ** -0.25


class TFixup(OfMaps):
    """Scale a transformer's values, output projections and MLPs by its depth, so that updates of deep ones stay bounded.

    At the first batch of a fresh fit, one pass finds attention and sums ``x + f(x)``. All linear layers are drawn again
    by Xavier's rule (uniform, with queries, keys and values of one layer as separate matrices), with biases of zero.
    Then the value and output layers of attention, and all layers of residual branches without attention, are scaled:

    - by ``0.67 N^(-1/4)`` in an encoder of N layers. Language models count as encoders, because two branches make a
      layer there.
    - by ``(9 N)^(-1/4)`` in a decoder of N layers that attends to an encoder.

    Queries and keys are not scaled. Embeddings of the width of the blocks are drawn from ``N(0, 1/d)`` and scaled by
    ``(9 N)^(-1/4)``, with N of the decoder if there is one. A head tied to an embedding is set with it.

    Use it to train deep transformers without warm-up. The paper also removes LayerNorm and the warm-up. This callback
    changes neither: norms stay, and behind a norm the scales matter less. A log line says how many norms there are. It
    costs one forward pass.

    Logged: ``numbers``, how many numbers were set.

    Args:
        draw: whether to draw layers and embeddings again. Otherwise the module's own weights are scaled, and queries
            and keys stay.
        embeddings: whether to set embeddings, too.
        maps: the names or patterns of the weights of layers to set. None sets all, and ``[]`` is plain training.
        branches: the weights of each residual branch, attention included: names of weights or modules in their order,
            or patterns, of which the first matches of each form one branch, and so on, such as
            ``[["blocks.*.mlp.0", "blocks.*.mlp.2"]]``. None finds them.
        attention: the weights of each kind of attention, where they are not recognised: names or patterns by role, with
            + between roles that one layer computes in equal parts, and ``"cross": True`` for attention to an encoder,
            such as ``[{"query+key+value": "blocks.*.qkv", "output": "blocks.*.proj"}]``. None finds them.
        force: whether to also set weights that were loaded or trained before.

    Raises:
        ValueError: for a value of the wrong kind. At setup, for a pretrained module without ``force``. At the first
            batch, if no residual branch, no attention, or no layer that matches a given name is found.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[TFixup()])

    References:
        Huang, Perez, Ba, Volkovs 2020, "Improving Transformer Optimization Through Better Initialization", ICML.
    """

    saves = "steps: deep transformers train without warm-up, and without norms"
    paper = "Huang et al. 2020, ICML"
    constraints = "transformers"
    search_space = SearchSpace(
        {"draw": Choice((True, False))},
        needs_blocks,
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("LSUV", "OrthogonalInit", "ZerO"), SAME_WEIGHTS),
        "DataDrivenInit": "both set the embeddings, and the later one would undo the other",
        "ACTPrecision": UNSEEN,
    }

    def __init__(
        self,
        *,
        draw: bool = True,
        embeddings: bool = True,
        maps: Patterns | None = None,
        branches: Branches | None = None,
        attention: Attentions | None = None,
        force: bool = False,
    ) -> None:
        self.draw, self.embeddings, self.branches = draw, embeddings, branches
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
                f"{WHO}: found {len(every)} residual branches x + f(x) and {len(attended)} softmax attention layers in"
                f" training_step of {type(module).__name__}, and needs some of both. Name them by branches=[[...]] and"
                f" attention=[{{...}}], or remove {WHO}."
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
            f"{WHO}: found {layers[0]} encoder layers and {layers[1]} decoder layers; set {len(found)} weights, of which"
            f" {len(scaled)} are scaled: {listed(scaled)}; embeddings: {listed(tables) or 'none'}"
            + (f"; kept {norms} norms, which the paper removes together with the warm-up" if norms else "")
        )

    @override
    def summary(self) -> str:
        return f"{'drew and scaled' if self.draw else 'scaled'} {self._numbers:,} numbers by depth"


def _scales(
    module: nn.Module, graph: Graph, every: list[Branch], attended: list[Attention]
) -> tuple[tuple[int, int], dict[str, float]]:
    """Return how many layers encoder and decoder have, and the factors of the weights in residual branches."""
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
    for one in attended:  # values that a decoder computes from its encoder are not in the branch's own graph
        for end in one.output:
            scales |= {part.weight: scales[end] for part in one.value if end in scales}
    return layers, scales


def _roles(attended: list[Attention]) -> tuple[dict[str, list[Part]], set[str]]:
    """Return the parts that are values, by the weight's name, and the weights that compute queries or keys."""
    values: dict[str, list[Part]] = {}
    for one in attended:
        for part in one.value:
            known = values.setdefault(part.weight, [])
            if not any(torch.equal(part.outputs, other.outputs) for other in known):
                known.append(part)
    return values, {part.weight for one in attended for part in (*one.query, *one.key)}


def _tables(graph: Graph, every: list[Branch], parameters: dict[str, nn.Parameter]) -> list[str]:
    """Return the embeddings whose rows have the width of the stream."""
    widths = {size for branch in every for end in branch.last for size in parameters[end.weight].shape}
    found: dict[str, None] = {}
    for node in graph.order:
        if kind(node).startswith("Embedding"):
            found |= {name: None for f in graph.inputs[node] if (name := graph.weight(f)) is not None}
    return [name for name in found if parameters[name].shape[1] in widths]
