"""NgramEmbedding: add a table of n-grams to the token embedding (Huang et al. 2025, arXiv:2501.16975).

``_ngrams.table.ngram_rows`` holds the rule, and ``_ngrams.row_adam`` the table's optimizer.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._arguments.kinds import Count, Each, Either, Names, Number, Text
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._optim.moved_parameters import join
from lightning_eff._core._optim.scheduled import schedulers_of
from lightning_eff._core._optim.sparse import dense_views
from lightning_eff._core._stack.compiled import compiled_around
from lightning_eff._core._tokens.embeddings import token_embeddings
from lightning_eff._core.losses import loss_of
from lightning_eff._core.optimizers import evaluates_anew, rewrite_configured
from lightning_eff._core.patches import hook_before
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform, needs_sequences
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique
from lightning_eff.model.layers._ngrams.caches import RefuseCache
from lightning_eff.model.layers._ngrams.gradients import dense_for
from lightning_eff.model.layers._ngrams.order import check_order, check_untransposed
from lightning_eff.model.layers._ngrams.row_adam import RowAdam
from lightning_eff.model.layers._ngrams.table import PRIME, Ngrams, NgramTable, beside

WHO = "NgramEmbedding"
RATE = 0.02
LEAST_ROWS, ROWS_PER_TOKEN = 65_536, 5


def _under_the_modules_optimizer(technique: Any) -> Mapping[str, Technique]:
    if technique.neutral or technique.optimizer == "module":
        return {}
    same = {"embeddings": technique.embeddings, "batch_first": technique.batch_first}
    return {"module's optimizer": NgramEmbedding(technique.n, technique.buckets, optimizer="module", **same)}


def _orders(n: int | Sequence[int]) -> tuple[int, ...]:
    return (n,) if isinstance(n, int) else tuple(n)


def _named(orders: Sequence[int]) -> str:
    return " and ".join(f"{n}-grams" for n in orders)


class NgramEmbedding(Architecture):
    """Add to each token's embedding a learned row for the n-gram that ends with the token.

    A bigram's row gives the model what a first layer would have to learn. The table adds many parameters but no products: it
    may be many times as large as a small model. The row at position t depends on the ids at t - n + 1 to t, never on later
    ones, also in models that see both sides; a mask token counts like any other id. N-grams cross the borders of packed
    documents, as causal attention does. The first n - 1 positions have no row, and neither have n-grams with the embedding's
    ``padding_idx``. The table starts at zero, so the module first computes the same as before. Look-ups use the table's own
    dtype, also under mixed precision. Modules that look up one weight, such as T5's encoder and decoder, share a table. A
    token embedding keeps its class and its ``weight``, which may be tied to a head; the table is its ``ngrams.weight``.

    A table of at least ``vocabulary ** n`` rows has a row for each n-gram. A smaller one is hashed, and colliding n-grams
    share a row. N-grams of several orders share a table, with separate rows for each order.

    Each step updates only the rows of the batch's n-grams, with the rule of ``torch.optim.SparseAdam``, as part of the
    module's optimizer. The table's learning rate follows the module's schedulers in proportion, without weight decay. On a
    single device the gradients are sparse, so the step cost does not depend on the size of the table; gradient clipping
    includes them. Under DDP, together with techniques or hooks that read gradients, and in a module that is compiled as a
    whole, gradients are dense and the steps are the same. A log line says which, and why.

    Use it for language models whose training time is limited and memory is not. **It changes the model**: checkpoints load
    into ``lightning_eff.apply(plain, NgramEmbedding(...))``, and ``export`` refuses unless n is 1. Generation must pass all
    ids, because a call that continues from a key-value cache is refused. ``inputs_embeds`` that you compute yourself get no
    n-grams, and training that never looks up tokens is an error. It logs ``parameters`` of the tables. With
    ``optimizer="rows"`` it also logs ``rows_stepped`` in the last step, ``rate``, the table's learning rate, and ``sparse``
    (1 or 0).

    Args:
        n: the number of tokens in an n-gram. Several numbers add their rows: [2, 3] is bigrams and trigrams.
        buckets: the largest number of rows per order. None is five rows per token, and at least 65,536. 0 is plain training.
        lr: the learning rate of the table's optimizer, before the module's schedule. None is 0.02, which is good for a
            byte-level GPT.
        optimizer: the optimizer of the table. "rows" is its own, "module" is the module's optimizer, as in the control.
        embeddings: the ``nn.Embedding`` modules that look up tokens, as paths, their last parts, or patterns. None finds
            them.
        batch_first: whether the ids have shape (B, T) instead of (T, B). None assumes (B, T), and raises an error if a part
            of the module or the first batch suggests (T, B).

    Raises:
        ValueError: for a value out of range. At setup, if no token embedding is found, the strategy divides parameters, or no
            single gradient-based optimizer has the embedding. In the first step, if the embedding is not called or gets ids
            of shape (T, B). In any call with flattened ids or a cache.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[NgramEmbedding([2, 3], lr=0.02)])

    References: Huang et al. 2025, "Over-Tokenized Transformer: Vocabulary is Generally Worth Scaling", arXiv:2501.16975.
        Pagnoni et al. 2024, "Byte Latent Transformer: Patches Scale Better Than Tokens", arXiv:2412.09871 (hashed byte
        n-grams). Jordan et al. 2024, modded-nanogpt's speed-run records (bigrams).
    """

    saves = "steps: a table of parameters without products; costs its memory three times with Adam"
    paper = "Huang et al. 2025, arXiv:2501.16975; Pagnoni et al. 2024, arXiv:2412.09871"
    constraints = "models that look up tokens with nn.Embedding; no cache in generation"
    search_space = SearchSpace(
        {"n": Choice((2, [2, 3], [2, 3, 4])), "lr": Uniform(0.003, 0.1, log=True)}, needs_sequences
    )
    control = Control(
        "the same table under the module's optimizer, and a baseline with as many additional parameters in its layers, each for"
        " the same time",
        _under_the_modules_optimizer,
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "OptimizerOffload": "it moves a single optimizer of torch.optim to the host, and here two step as one",
        "StochasticRoundingBF16": "it replaces the step of a single optimizer of torch.optim, and here two step as one",
    }
    change_at = Change.ADAPT
    needs: ClassVar[Need] = Need.WHOLE
    sparse_gradients: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"buckets": 0}

    def __init__(
        self,
        n: Annotated[int | Sequence[int], Either(Count(), Each(Count()))] = 2,
        buckets: Annotated[int | None, Count(at_least=0, below=PRIME)] = None,
        *,
        lr: Annotated[float | None, Number(above=0)] = None,
        optimizer: Literal["rows", "module"] = "rows",
        embeddings: Annotated[
            str | Sequence[str] | None, Either(Text("a dotted path"), Names("dotted paths", empty=False))
        ] = None,
        batch_first: bool | None = None,
    ) -> None:
        if len(set(_orders(n))) < len(_orders(n)):
            raise ValueError(
                f"{WHO}({n=}): the same number of tokens is given twice. Give each once, such as n=[2, 3]."
            )
        if lr is not None and optimizer == "module":
            raise ValueError(
                f"{WHO}({lr=}, optimizer='module'): the module's optimizer has its own learning rate. Leave lr out."
            )
        self.n, self.buckets, self.lr, self.optimizer = n, buckets, lr, optimizer
        self.embeddings, self.batch_first = embeddings, batch_first
        if optimizer == "module":
            self.conflicts = {}  # pyright: ignore[reportAttributeAccessIssue] -- of this instance alone

    def _reset(self) -> None:
        self._found: list[Ngrams] = []
        self._rows: RowAdam | None = None
        self._dense_for = ""
        self._looked = False
        self._last: dict[str, float | int] = {}

    @override
    def settings(self) -> dict[str, Any]:
        """The settings that decide the module's function; the table's optimizer is not one of them."""
        names = self.embeddings if self.embeddings is None or isinstance(self.embeddings, str) else [*self.embeddings]
        n = self.n if isinstance(self.n, int) else list(self.n)
        return {"n": n, "buckets": self.buckets, "embeddings": names, "batch_first": self.batch_first}

    # -- the change

    @override
    def change(self, surgeon: Surgeon) -> None:
        found = token_embeddings(surgeon.root, self.embeddings, who=WHO)
        if self.batch_first is None and self._longest > 1:
            check_order(surgeon.root, who=WHO)
        chosen = {id(m) for m in found.values()}
        tables: dict[int, NgramTable] = {}

        def build(plain: nn.Module) -> nn.Module:
            assert isinstance(plain, nn.Embedding)
            rows = self._rows_for(plain)
            table = NgramTable(sum(rows), plain.embedding_dim)
            if id(plain.weight) in tables:
                table.weight = tables[id(plain.weight)].weight
            tables.setdefault(id(plain.weight), table)
            return beside(plain, table, _orders(self.n), rows, batch_first=self.batch_first is not False)

        surgeon.swap(lambda path, m: id(m) in chosen, build, what="a token embedding")
        made = _found_in(surgeon.root)
        if self._longest > 1:
            for m in surgeon.root.modules():
                if not isinstance(m, Ngrams) and any(part in made for part in m.modules()):
                    surgeon.before(m, RefuseCache(m))
        rank_zero_info(f"{WHO}: {_described(surgeon.root, found)}")

    @property
    def _longest(self) -> int:
        return max(_orders(self.n))

    def _rows_for(self, plain: nn.Embedding) -> list[int]:
        vocabulary = plain.num_embeddings
        most = max(LEAST_ROWS, ROWS_PER_TOKEN * vocabulary) if self.buckets is None else self.buckets
        return [min(vocabulary**n, most) for n in _orders(self.n)]

    # -- the run

    @override
    def on_open(self, session: Session) -> None:
        super().on_open(session)
        if session.fitting:  # wraps the assignment of new parameters to groups by any architecture
            configure = session.module.configure_optimizers

            def configure_optimizers() -> Any:
                self._found = _found_in(session.module)
                configured = configure()
                return self._joined(session.module, configured) if self.optimizer == "rows" else configured

            session.patches.set(session.module, "configure_optimizers", configure_optimizers)

    @override
    def attach(self, session: Session) -> None:
        session.chain.add(Stage.SAVE, self._look)

    @override
    def on_model(self, session: Session) -> None:
        self._found = _found_in(session.module)
        if not session.fitting or self.optimizer != "rows":
            return
        self._dense_for = dense_for(session)
        for m in self._found:
            m.ngrams.sparse = not self._dense_for
        if not self._dense_for:
            plugin = session.trainer.strategy.precision_plugin
            main_params = plugin.main_params
            session.patches.set(plugin, "main_params", lambda optimizer: dense_views(main_params(optimizer)))
        layout = f"dense, because {self._dense_for}" if self._dense_for else "sparse"
        rank_zero_info(f"{WHO}: the table's gradients are {layout}.")

    def _joined(self, module: pl.LightningModule, configured: Any) -> Any:
        schedulers = schedulers_of(configured)
        weights = list({id(m.ngrams.weight): m.ngrams.weight for m in self._found}.values())
        homes: list[Optimizer] = []

        def make(parameters: list[Tensor]) -> Optimizer:
            self._rows = RowAdam(parameters, lr=RATE if self.lr is None else self.lr)
            return self._rows

        def joined(own: Optimizer) -> Optimizer:
            held = {id(p) for group in own.param_groups for p in group["params"]}
            if not any(id(w) in held for w in weights):
                beside_it = [m for m in self._found if id(m.weight) in held]
                if not beside_it:
                    return own
                group = next(g for g in own.param_groups if any(p is beside_it[0].weight for p in g["params"]))
                group["params"].extend(
                    weights
                )  # taken out again later; this decides whose learning rate the table follows
            homes.append(own)
            if evaluates_anew(own):
                raise ValueError(
                    f"{WHO}: the module's {type(own).__name__} evaluates the loss within its step, which two optimizers that"
                    f" step as one cannot do. Use an optimizer such as AdamW, or {WHO}(optimizer='module')."
                )
            around = [one for one in schedulers if getattr(one, "optimizer", None) is own]
            return join(own, around, weights, make, who=WHO)

        rewritten = rewrite_configured(configured, joined)
        if len(homes) != 1 and configured is not None:
            names = ", ".join(type(one).__name__ for one in homes) or "none"
            raise ValueError(
                f"{WHO}: expected one optimizer of {type(module).__name__}.configure_optimizers to have the token embedding,"
                f" found {names}. Give the embedding to one optimizer."
            )
        return rewritten

    def _look(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """Verify in the first step that the embedding is called, with ids in the expected order."""
        looked, self._looked = self._looked, True
        if looked or compiled_around(step.module, self._found):
            return proceed(batch)
        seen: list[Tensor] = []
        handles = [
            hook_before(m, lambda _, args, kwargs: seen.append((*args, *kwargs.values())[0]), with_kwargs=True)
            for m in self._found
        ]
        try:
            output = proceed(batch)
        finally:
            for handle in handles:
                handle.remove()
        if not seen and loss_of(output) is None:  # a skipped step shows nothing
            self._looked = False
            return output
        if not seen:
            raise ValueError(
                f"{WHO}: the training step never calls the token embedding, so the table has no effect. Pass ids instead of"
                f" inputs_embeds, or name the embedding that it calls with {WHO}(embeddings=[...])."
            )
        if self.batch_first is None and self._longest > 1:
            check_untransposed(seen[0], batch, who=WHO)
        return output

    @override
    def detach(self, session: Session) -> None:
        self._last = self._quantities()
        for m in self._found:
            m.ngrams.sparse = False
        self._found, self._rows = [], None
        super().detach(session)

    # -- reports

    def _quantities(self) -> dict[str, float | int]:
        if not self._found:
            return self._last
        found: dict[str, float | int] = {"parameters": _added(self._found)}
        if self._rows is not None:
            rate = float(self._rows.param_groups[0]["lr"])
            found |= {"rows_stepped": self._rows.rows, "rate": rate, "sparse": int(not self._dense_for)}
        return found

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return dict(self._quantities())

    @override
    def summary(self) -> str:
        found = self._quantities()
        if not found:
            return "added no table"
        return f"{found['parameters']:,} parameters in tables of {_named(_orders(self.n))}, with optimizer={self.optimizer!r}"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.neutral else {"optimizer": self.optimizer}

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        super().check_checkpoint(session, state)
        if session.fitting and (state or {}).get("optimizer", self.optimizer) != self.optimizer:
            raise ValueError(
                f"{WHO}(optimizer={self.optimizer!r}): the checkpoint was saved with {(state or {})['optimizer']!r}, so its"
                " optimizer state does not fit. Resume with that setting."
            )


def _found_in(root: nn.Module) -> list[Ngrams]:
    return [m for m in root.modules() if isinstance(m, Ngrams)]


def _added(found: Sequence[Ngrams]) -> int:
    return sum({id(m.ngrams.weight): m.ngrams.weight.numel() for m in found}.values())


def _described(root: nn.Module, found: Mapping[str, nn.Embedding]) -> str:
    """The added rows, parameters and bytes, by embedding."""
    made = [(path, m) for path, m in root.named_modules() if isinstance(m, Ngrams)]
    lines = [
        f"{path} ({m.num_embeddings:,} x {m.embedding_dim}) has {rows:,} rows of {n}-grams, "
        + ("one for each n-gram" if m.exact(order) else "hashed")
        for path, m in made
        for order, (n, rows) in enumerate(zip(m.orders, m.rows, strict=True))
        if path in found
    ]
    tables = {id(m.ngrams.weight): m.ngrams.weight for _, m in made}
    whole, added = sum(p.numel() for p in root.parameters()), sum(p.numel() for p in tables.values())
    size = sum(p.numel() * p.element_size() for p in tables.values())
    return (
        f"{'; '.join(lines)}. This adds {added:,} parameters to {whole - added:,}: {size / 2**20:,.1f} MiB, and twice that in"
        " optimizer state."
    )
