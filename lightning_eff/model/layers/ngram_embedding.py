"""A table of n-grams beside the token embedding: parameters that cost no products (Huang et al. 2025, arXiv:2501.16975).

The rule is ``_ngrams.table.ngram_rows``; the table's optimizer is ``_ngrams.row_adam``.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._architecture.technique import Architecture, Change
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._optim.joined import join
from lightning_eff._core._optim.scheduled import schedulers_of
from lightning_eff._core._optim.sparse import dense_views
from lightning_eff._core._stack.compiled import compiled_around
from lightning_eff._core._tokens.embeddings import token_embeddings
from lightning_eff._core.losses import loss_of
from lightning_eff._core.optimizers import evaluates_anew, rewrite_configured
from lightning_eff._core.patches import hook_before
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, Uniform
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


def _orders(n: Any) -> tuple[int, ...]:
    """The orders of n-grams that ``n`` names; none where it is neither an integer nor several."""
    several = (n,) if isinstance(n, int) else tuple(n) if isinstance(n, list | tuple) else ()
    return several if all(isinstance(order, int) and not isinstance(order, bool) for order in several) else ()


def _named(orders: Sequence[int]) -> str:
    return " and ".join(f"{n}-grams" for n in orders)


def _pointless(profile: RunProfile) -> str | None:
    return "samples are no sequences of tokens" if profile.sequence_length is None else None


class NgramEmbedding(Architecture):
    """Add to the embedding of each token the row that the n-gram which ends with it has in a table.

    A bigram's row says what a first layer would have to find out: parameters that are looked up and cost no products, in
    number many times those of a small model. The row of position t is that of the ids at t - n + 1 to t and of no later ones,
    also in models that see both sides, whose masked ids are ids as others are. N-grams reach over the borders of packed
    documents, as the model's own causal attention does there. The first n - 1 positions have none, nor have n-grams with the
    embedding's ``padding_idx``. The table is zero at first, where the module computes what the plain one does; look-ups
    are in its own dtype, under mixed precision too. Modules that look up one weight (a T5's encoder and decoder) share a table.
    A token embedding keeps its ``weight``, to which heads may be tied, and its class; the table is its ``ngrams.weight``.

    A table of ``vocabulary ** n`` rows or more is exact; a smaller one is hashed, and n-grams that meet share a row. N-grams
    of several orders share a table, in which each order has rows of its own.

    Each step moves the rows of the batch's n-grams alone, by an Adam of its own (``torch.optim.SparseAdam``'s rule) that steps
    with the module's optimizer as one: its rate follows the module's schedulers in proportion, and it does not decay
    weights. On a single device gradients are sparse too, and so no step's cost goes with the size of the table; clipping
    sees them. Under DDP, beside techniques and hooks that read gradients, and in a module that is compiled as a whole they are
    dense, with the same steps; which and why is printed.

    It is another model: export gives a ``ValueError`` but for n=1, and a checkpoint loads into ``lightning_eff.apply(plain,
    NgramEmbedding(...))``. Generation must hand over all ids: what goes on from a cache of keys and values is refused.
    ``inputs_embeds`` of one's own making have no n-grams; where training never looks tokens up, that is an error.

    Logged: ``parameters`` of the tables; with rows stepped apart ``rows_stepped`` of the last step, ``rate``, and ``sparse``
    (1 or 0).

    Args:
        n: tokens of an n-gram, >= 1; or several such numbers, [2, 3] for bigrams and trigrams, whose rows are added up.
        buckets: rows of each of them at most; None for the larger of 65,536 and five for each token. 0 is plain training.
        lr: the rate of the table's optimizer, > 0, before the module's schedule; None for 0.02, that of a byte GPT.
        optimizer: "rows" for the table's own one, or "module" to leave it to the module's optimizer, as the control does.
        embeddings: paths, last parts of them or patterns, of the ``nn.Embedding`` that look tokens up; None finds it.
        batch_first: whether these get ids of (B, T) or (T, B); None for (B, T), and an error where parts of the module are
            set to (T, B), or the first batch shows it.

    Raises:
        ValueError: for other values; at setup, where the token embedding is not found, under strategies that divide
            parameters, or where no single optimizer steps the table by gradients alone; in the first step, where the embedding
            is not called or gets ids the other way round; in any call with ids that are flattened, or with a cache.

    Sources:
        Huang et al. 2025, arXiv:2501.16975 (n-grams of the input alone); Pagnoni et al. 2024, arXiv:2412.09871 (of bytes,
        hashed); modded-nanogpt's records (bigrams).
    """

    saves: ClassVar[str] = "steps: a table of parameters that cost no products; costs its memory, three times with Adam"
    paper: ClassVar[str] = "Huang et al. 2025, arXiv:2501.16975; Pagnoni et al. 2024, arXiv:2412.09871"
    constraints: ClassVar[str] = "models of tokens that look them up by nn.Embedding; no cache in generation"
    survey: ClassVar[Survey | None] = None
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"n": Choice((2, [2, 3], [2, 3, 4])), "lr": Uniform(0.003, 0.1, log=True)}, _pointless
    )
    control: ClassVar[Control] = Control(
        "the same table under the module's own optimizer, and a baseline that has as many parameters more in its layers, each"
        " for as many seconds",
        _under_the_modules_optimizer,
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "OptimizerOffload": "it moves one optimizer of torch.optim's own to the host, and here two step as one",
        "StochasticRoundingBF16": "it makes each step of one of torch.optim's own optimizers, and here two step as one",
    }
    change_at: ClassVar[Change] = Change.ADAPT
    needs: ClassVar[Need] = Need.WHOLE
    sparse_gradients: ClassVar[bool] = True

    def __init__(
        self,
        n: int | Sequence[int] = 2,
        buckets: int | None = None,
        *,
        lr: float | None = None,
        optimizer: Literal["rows", "module"] = "rows",
        embeddings: str | Sequence[str] | None = None,
        batch_first: bool | None = None,
    ) -> None:
        orders = _orders(n)
        if not orders or len(set(orders)) < len(orders) or any(order < 1 for order in orders):
            raise ValueError(
                f"{WHO}({n=}): expected an integer >= 1, tokens of an n-gram, or several different ones, such as [2, 3]."
            )
        whole = isinstance(buckets, int) and not isinstance(buckets, bool)
        if buckets is not None and not (whole and 0 <= buckets < PRIME):
            raise ValueError(f"{WHO}({buckets=}): expected rows of a table, from 0 (none) to {PRIME - 1}, or None.")
        if optimizer not in ("rows", "module"):
            raise ValueError(f"{WHO}({optimizer=}): expected 'rows' or 'module'.")
        number = isinstance(lr, int | float) and not isinstance(lr, bool)
        if lr is not None and not (number and 0.0 < lr < math.inf):
            raise ValueError(f"{WHO}({lr=}): expected a finite rate > 0, or None for {RATE}.")
        if lr is not None and optimizer == "module":
            raise ValueError(
                f"{WHO}({lr=}, optimizer='module'): the module's optimizer has its own rate. Leave lr out."
            )
        if embeddings is not None and not (embeddings and all(isinstance(e, str) and e for e in embeddings)):
            raise ValueError(f"{WHO}({embeddings=}): expected paths of nn.Embedding, such as ['token'], or None.")
        if not (batch_first is None or isinstance(batch_first, bool)):
            raise ValueError(f"{WHO}({batch_first=}): expected True for (B, T), False for (T, B), or None.")
        self.n, self.buckets, self.lr, self.optimizer = n if isinstance(n, int) else orders, buckets, lr, optimizer
        self.embeddings, self.batch_first = embeddings, batch_first
        if optimizer == "module":
            self.conflicts = {}  # pyright: ignore[reportAttributeAccessIssue] -- of this instance alone
        self._reset()

    def _reset(self) -> None:
        self._found: list[Ngrams] = []
        self._rows: RowAdam | None = None
        self._dense_for = ""
        self._looked = False
        self._last: dict[str, float | int] = {}

    @property
    @override
    def neutral(self) -> bool:
        return self.buckets == 0

    @override
    def settings(self) -> dict[str, Any]:
        """What the module's function goes by; how the table is stepped is the run's affair."""
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
        if session.fitting:  # around what gives new parameters their groups, whichever architecture did that
            configure = session.module.configure_optimizers

            def configure_optimizers() -> Any:
                self._found = _found_in(session.module)
                configured = configure()
                return self._joined(session.module, configured) if self.optimizer == "rows" else configured

            session.patches.set(session.module, "configure_optimizers", configure_optimizers)

    @override
    def attach(self, session: Session) -> None:
        self._reset()
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
        layout = f"dense, since {self._dense_for}" if self._dense_for else "sparse"
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
                group["params"].extend(weights)  # to be taken out again: whose rate it follows
            homes.append(own)
            if evaluates_anew(own):
                raise ValueError(
                    f"{WHO}: the module's {type(own).__name__} evaluates the loss anew within its step, which two optimizers"
                    f" that step as one cannot do; expected one that needs gradients alone, such as AdamW. Or {WHO}("
                    "optimizer='module')."
                )
            around = [one for one in schedulers if getattr(one, "optimizer", None) is own]
            return join(own, around, weights, make, who=WHO)

        rewritten = rewrite_configured(configured, joined)
        if len(homes) != 1 and configured is not None:
            names = ", ".join(type(one).__name__ for one in homes) or "none"
            raise ValueError(
                f"{WHO}: of the optimizers of {type(module).__name__}.configure_optimizers, {names} step the token embedding or"
                " its table; expected one, whose rate the table's follows. Let one optimizer have the embedding."
            )
        return rewritten

    def _look(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """In the first step, see that the embedding is called, and with ids in the order that is meant."""
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
        if not seen and loss_of(output) is None:  # a step that is skipped tells nothing
            self._looked = False
            return output
        if not seen:
            raise ValueError(
                f"{WHO}: the training step never calls the token embedding, so the table has no effect; expected it to look up"
                " ids. Hand the model ids and not inputs_embeds of another make, or name the embedding that it calls,"
                f" {WHO}(embeddings=[...])."
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

    # -- what is told

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
            return "no table was made"
        return f"{found['parameters']:,} parameters in tables of {_named(_orders(self.n))}, stepped by {self.optimizer}"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.neutral else {"optimizer": self.optimizer}

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        super().check_checkpoint(session, state)
        if session.fitting and (state or {}).get("optimizer", self.optimizer) != self.optimizer:
            raise ValueError(
                f"{WHO}(optimizer={self.optimizer!r}): the checkpoint was saved with {(state or {})['optimizer']!r}, and its"
                " optimizer's state is of other groups; expected the same. Resume with that setting."
            )


def _found_in(root: nn.Module) -> list[Ngrams]:
    return [m for m in root.modules() if isinstance(m, Ngrams)]


def _added(found: Sequence[Ngrams]) -> int:
    return sum({id(m.ngrams.weight): m.ngrams.weight.numel() for m in found}.values())


def _described(root: nn.Module, found: Mapping[str, nn.Embedding]) -> str:
    """What was added where: rows, parameters and bytes."""
    made = [(path, m) for path, m in root.named_modules() if isinstance(m, Ngrams)]
    lines = [
        f"{path} ({m.num_embeddings:,} x {m.embedding_dim}) has {rows:,} rows of {n}-grams, "
        + ("one for each" if m.exact(order) else "hashed")
        for path, m in made
        for order, (n, rows) in enumerate(zip(m.orders, m.rows, strict=True))
        if path in found
    ]
    tables = {id(m.ngrams.weight): m.ngrams.weight for _, m in made}
    whole, added = sum(p.numel() for p in root.parameters()), sum(p.numel() for p in tables.values())
    size = sum(p.numel() * p.element_size() for p in tables.values())
    return (
        f"{'; '.join(lines)}. {added:,} parameters beside {whole - added:,}, {size / 2**20:,.1f} MiB and twice that in Adam's"
        " states; a token costs a row's additions for each order, and no products."
    )
