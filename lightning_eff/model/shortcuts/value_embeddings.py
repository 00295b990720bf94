"""ValueEmbeddings: mix rows of further token tables into the values of attention (Jordan et al. 2024, modded-nanogpt).

The rule is ``V'_n = lambda_{n,1} V_n + lambda_{n,2} U_k[x]`` for the values V_n of block n and the ids x. Block k and the k-th
of the last blocks share the table U_k: 0 1 2 ... 0 1 2.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._arguments.kinds import Count, Each, Either, Fraction, Layers, Names, Number, Text
from lightning_eff._core.search_space import Choice, SearchSpace, needs_sequences
from lightning_eff.model.shortcuts._carried import Carried
from lightning_eff.model.shortcuts._fed import chain, weights
from lightning_eff.model.shortcuts._looked_up import Source, source_of, tabled
from lightning_eff.model.shortcuts._technique import CONFLICTS, Shortcuts
from lightning_eff.model.shortcuts._valued import ValueFeed, value_modules

WHO = "ValueEmbeddings"
LAMBDAS = "table_lambdas"


def mixed_values(value: Tensor, rows: Tensor, lambdas: Tensor) -> Tensor:
    """Return ``lambda_{n,1} V_n + lambda_{n,2} U_k[x]``.

    Args:
        value: V_n, shape (B, H, S, E).
        rows: U_k[x], the same shape.
        lambdas: shape (2,).
    """
    return lambdas[0] * value + lambdas[1] * rows


def blocks_of(attend: Sequence[int], tables: int) -> list[list[int]]:
    """Return the blocks of each of at most ``tables`` tables: the k-th block that attends, and the k-th of the last ones."""
    count = min(tables, len(attend) // 2)
    return [[attend[k], attend[len(attend) - count + k]] for k in range(count)]


class FromTable(ValueFeed):
    """An attention's part in the rule.

    Args:
        carried: the pass's rows of each table.
        table: k.
        first: whether no earlier block reads a table.
        last: whether no later block reads this one.
        ends: whether no later block reads a table.
    """

    who = WHO

    def __init__(self, carried: Carried, table: int, *, first: bool, last: bool, ends: bool) -> None:
        self.carried, self.table = carried, table
        self.first, self.last, self.ends = first, last, ends

    @override
    def enter(self, module: nn.Module, value: Tensor) -> Tensor:
        if self.first and self.carried.over:
            raise ValueError(
                f"{WHO}: attention ran without a look-up of tokens since its last pass, so the ids of its values are unknown."
                f" Give the module ids instead of embeddings, look them up once per pass, or remove {WHO}."
            )
        lambdas = weights(module, LAMBDAS)
        rows = self.carried.get(self.table, value, lambdas, last=self.last)
        if self.ends:
            self.carried.end()
        return mixed_values(value, rows.to(value.dtype), lambdas)


class ValueEmbeddings(Shortcuts):
    """Mix rows of further token tables into the values that some attentions read, by two learned numbers per attention.

    Attention in the first and the last blocks can then move the token's identity without carrying it through the residual
    stream. Each table is an embedding of the vocabulary that is as wide as the values, and two blocks share it. Tables add many
    parameters but no products: with three tables, a model's embeddings take up to four times the memory. The mix is computed
    within the call of attention, as in ``ValueResiduals``, so masks, dropout and grouped heads stay as they are. A pass at
    setup finds the look-up whose ids belong to the values, and verifies by gradients that they do.

    Use it to pretrain language models whose training time is limited and memory is not. The source starts with ``init=0.5``,
    which changes the function: use ``init=0`` to train on from a pretrained module, which then first computes the same as
    before, bit for bit. Tables and numbers are trained by the module's optimizer, without weight decay. The source trains its
    tables with a learning rate 10 to 100 times that of matrices under Adam. **It changes the model**: checkpoints load into
    ``lightning_eff.apply(plain, ValueEmbeddings(...))``, and ``export`` refuses. Generation must pass all ids, because a call
    that continues from a key-value cache is refused. It logs ``connections``, the number of attentions that read a table, and
    ``parameters`` of the tables.

    Args:
        tables: the number of tables, for as many of the first blocks and of the last ones. At most half as many as blocks are
            made. Or the indices of the blocks that read each table, such as ``[[0, 10], [1, 11]]``. 0 is plain training.
        init: the first lambda_{n,2}, in [0, 1]. The first lambda_{n,1} is ``1 - init``.
        std: the standard deviation of the first rows, normal with mean 0.
        embeddings: the ``nn.Embedding`` modules that look up tokens, as paths, their last parts, or patterns. None finds them.
        layers: the blocks, as a dotted path, a pattern or a list of paths. None finds the longest stack.

    Raises:
        ValueError: for a value out of range. At setup or in ``apply``, if no token embedding or no stack of blocks is found.
            Also if blocks do not run once each on the output of the one before, or some have several attentions. Attention
            must be ``scaled_dot_product_attention``, or ``nn.MultiheadAttention`` without weights. The values of the first
            block must follow from one look-up, id by id, which is not so in modules that embed two texts. In a step, if a
            call has more values than ids, as with a cache, or embeddings are given instead of ids. Also if blocks are
            recomputed with ``use_reentrant=True``.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[ValueEmbeddings()])

    References:
        Jordan et al. 2024, modded-nanogpt, github.com/KellerJordan/modded-nanogpt (records from December 2024 on).
        Zhou et al. 2024, "Value Residual Learning", arXiv:2410.17897 (the mix of values).
    """

    saves = "steps: values of attention see the token directly; costs tables of parameters without products"
    paper = "Jordan et al. 2024, github.com/KellerJordan/modded-nanogpt; Zhou et al. 2024, arXiv:2410.17897"
    constraints = (
        "models that look up tokens with one nn.Embedding, and whose self-attention is scaled_dot_product_attention or"
        " nn.MultiheadAttention, not compiled; no cache in generation"
    )
    search_space = SearchSpace({"init": Choice((0.0, 0.5)), "tables": Choice((1, 3))}, needs_sequences)
    stays = "a plain attention has no place for values from a table"
    conflicts: ClassVar[Mapping[str, str]] = {
        **CONFLICTS,
        **dict.fromkeys(
            ("DOTAAttention", "Fastformer", "GatedPositionalAttention", "Linformer", "PrefixTuning"),
            "it gives attention other keys and values before they could be mixed",
        ),
        "ParameterSharing": "it gives some blocks parameters that the others do not have",
        "PromptTuning": "it looks up values by ids, and prompts have no ids",
        "RegionalCompilation": "compiled code hides the attention whose values are mixed",
        "SeqMix": "it mixes token embeddings, and the tables would have the rows of one of both texts",
        "SequencePacking": "it tries single blocks without a look-up of tokens",
    }
    neutral_at: ClassVar[Mapping[str, Any]] = {"tables": 0}

    def __init__(
        self,
        tables: Annotated[
            int | Sequence[Sequence[int]],
            Either(Count(at_least=0), Each(Each(Count(at_least=0), distinct=True))),
        ] = 3,
        *,
        init: Annotated[float, Fraction()] = 0.5,
        std: Annotated[float, Number(at_least=0)] = 1.0,
        embeddings: Annotated[
            str | Sequence[str] | None, Either(Text("a dotted path"), Names("dotted paths", empty=False))
        ] = None,
        layers: Layers | None = None,
    ) -> None:
        if init == std == 0:
            raise ValueError(
                f"{WHO}({init=:g}, {std=:g}): neither the tables nor their factors would get a gradient. Give init or std"
                " another value than 0."
            )
        self.tables, self.init, self.std = tables, init, std
        self.embeddings, self.layers = embeddings, layers

    _size = 0

    @override
    def change(self, surgeon: Surgeon) -> None:
        found = chain(surgeon, self.layers, who=WHO)
        source = source_of(surgeon, found, self.embeddings, who=WHO)
        readers = self._readers(source)
        carried = Carried(WHO, f"Pass all ids in each call, without a cache (use_cache=False), or remove {WHO}")
        order = sorted((i, k) for k, blocks in enumerate(readers) for i in blocks)
        feeds: dict[str, tuple[ValueFeed, Mapping[str, nn.Parameter]]] = {}
        for n, (i, k) in enumerate(order):
            feed = FromTable(carried, k, first=n == 0, last=i == max(readers[k]), ends=n == len(order) - 1)
            feeds[source.attentions[i][0]] = feed, {LAMBDAS: nn.Parameter(torch.tensor([1.0 - self.init, self.init]))}
        value_modules(surgeon, feeds)
        shapes = [source.attentions[blocks[0]][1].call.value.shape for blocks in readers]

        def build(plain: nn.Module) -> nn.Module:
            assert isinstance(plain, nn.Embedding)
            rows = [torch.randn(plain.num_embeddings, s[1] * s[3]) * self.std for s in shapes]
            self._size = sum(t.numel() for t in rows)
            heads = [s[1] for s in shapes]
            return tabled(plain, carried, list(zip(heads, rows, strict=True)), batch_first=source.batch_first)

        surgeon.swap(lambda path, m: path == source.path, build, what="a token embedding", numbers=True)
        self._count = len(order)
        first = f" With init={self.init:g} the module first computes something else." if self.init else ""
        rank_zero_info(
            f"{WHO}: {self._count} attentions in {found} read values mixed with those of {len(readers)} tables of"
            f" {self._size:,} parameters, looked up by {source.path}.{first}"
        )

    def _readers(self, source: Source) -> list[list[int]]:
        """Return the blocks that read each table."""
        possible = sorted(source.attentions)
        readers = (
            blocks_of(possible, self.tables) if isinstance(self.tables, int) else [sorted(one) for one in self.tables]
        )
        every = [i for blocks in readers for i in blocks]
        wrong = [i for i in every if i not in possible or every.count(i) > 1]
        if wrong or not every:
            raise ValueError(
                f"{WHO}(tables={self.tables!r}): {f'block {wrong[0]}' if wrong else 'a stack of one block'} cannot read them;"
                f" expected each of the blocks that attend at most once, which are {', '.join(map(str, possible))}. Give the"
                " blocks of each table, such as tables=[[0, 1]]."
            )
        for blocks in readers:
            (path, place), *others = (source.attentions[i] for i in blocks)
            for other, its in others:
                if its.call.value.shape != place.call.value.shape:
                    raise ValueError(
                        f"{WHO}: {path} has values of shape {tuple(place.call.value.shape)} and {other} of"
                        f" {tuple(its.call.value.shape)}, which cannot share a table. Give them separate tables, such as"
                        f" tables={[[i] for i in blocks]}."
                    )
        return readers

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "parameters": self._size}
