"""Compound growth: grow depth, feed-forward width and sequence length together (CompoundGrow, Gu et al. 2020)."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, ClassVar, Literal

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Fraction, Layers
from lightning_eff._core._arguments.stages import Stages
from lightning_eff._core._branches.ffns import FFN, FFNs, Part
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core.blocks import BlockStack
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Uniform, needs_blocks
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control
from lightning_eff.model.growth._ffn.looking import narrowed
from lightning_eff.model.growth._ffn.width import Width
from lightning_eff.model.growth._sizes.depth import blocks_of, copied, copy_with_state, show_trained
from lightning_eff.model.growth._sizes.length import Keys, Length
from lightning_eff.model.growth._sizes.shares import check_multiples, whole
from lightning_eff.model.growth._sizes.stages import size_at
from lightning_eff.model.growth._untrained import Growing, note

Shares = list[tuple[float, float]]

WHO, _HALF = "CompoundGrowth", ((0.0, 0.5), (0.3, 1.0))
_WHOLE = ("OrthogonalInit", "TFixup", "ZerO", "LSUV", "KFAC", "Lookahead", "OptimizerOffload")
_FP8 = ("FP8Precision", "INT8Precision", "S2FP8Precision", "Wang2018FP8Precision")
_HIDING = ("ReZero", "SkipInit", "LayerScale", "Fixup", "VeRA", *_FP8)


def _small_models(technique: "CompoundGrowth") -> dict[str, Callback]:
    """Make the control runs: the model of each stage but the last, throughout."""
    axes = {"depth": technique.depth, "width": technique.width, "length": technique.length}
    if technique.neutral or all(shares is None or len(shares) == 1 for shares in axes.values()):
        return {}
    fractions = sorted({fraction for shares in axes.values() for fraction, _ in shares or ()})
    arms: dict[str, Callback] = {}
    for u in fractions[:-1]:
        now = {name: size_at(shares, u) for name, shares in axes.items() if shares is not None}
        text = ", ".join(f"{share:g} of the {name}" for name, share in now.items())
        stages: dict[str, Any] = {name: [(0.0, now[name])] if name in now else None for name in axes}
        arms[f"{text} throughout"] = CompoundGrowth(
            **stages, layers=technique.layers, ffn=technique.ffn, mode=technique.mode, keys=technique.keys
        )
    return arms


def _from_shares(cls: Any, values: Mapping[str, Any], profile: RunProfile) -> Any:
    """Make the technique: grow from ``first`` of the blocks, rounded, and from the other sizes, until ``until``."""
    first = max(round(values["first"] * profile.num_blocks), 1) / max(profile.num_blocks, 1)
    until = values["until"]

    def axis(share: float) -> list[tuple[float, float]] | None:
        return [(0.0, share), (until, 1.0)] if share < 1.0 else None

    tokens = profile.sequence_length
    return cls(
        depth=axis(first),
        width=axis(values["width"]),
        length=axis(values["length"]) if tokens and tokens % 4 == 0 and tokens >= 32 else None,
        copy_optimizer_state=values["copy_optimizer_state"],
    )


class CompoundGrowth(Growing):
    """Train a smaller network on shorter sequences first, and grow its depth, width and sequence length together.

    Each of ``depth``, ``width`` and ``length`` is a list of pairs (fraction of the budget, fraction of the full size),
    or None to use the full size throughout. The module is built at its full size and keeps it: every checkpoint has the
    plain module's names and shapes.

    - Depth grows by stacking, as in :class:`ProgressiveStacking`: when ``L`` blocks grow to more, new block ``j``
      starts as a copy of block ``j mod L``. Blocks that do not run cost no compute and have no gradient and no
      optimizer state.
    - Width is the number of hidden units of the feed-forward networks ``x + W_2 f(W_1 x)``. When it grows ``k``-fold,
      ``W_1`` and its bias are repeated, and ``W_2`` is repeated and divided by ``k``, so the function is kept. Absent
      units cost no compute and no optimizer state. Their gradients are zero and their weights in ``W_2`` are 0, so the
      plain module computes what was trained at any moment.
    - Sequences are split into shorter ones (``mode="reshape"``) or truncated, instead of the paper's pooled embeddings.
      Validation, test and prediction use full sequences.

    Use it to pretrain transformers on long sequences. The loss rises for a while when blocks are added. Width grows without
    changing the function of the network.

    Feed-forward networks are found on the first batch, with or without a gate, from what each residual branch is
    computed from. Three forward passes check that repeating units keeps their function. ``ffn`` names the networks
    where they are not found; experts of a mixture are refused. Copies of a hidden unit would receive equal gradients
    forever, so ``noise`` makes them differ: it sums to 0 over the copies and changes the function only in second order.

    If a run ends before all blocks run, the other blocks were never trained. Loaded without this callback, the module
    computes something else than was evaluated. A warning and a note in the checkpoint say so. The network grows between
    optimizer steps, never within an accumulation window.

    Logged: ``depth``, ``width`` and ``length``, the fractions of the last step, for those that grow.

    Args:
        depth: the pairs (fraction of the budget, fraction of the blocks).
        width: the pairs (fraction of the budget, fraction of the hidden units), each a multiple of the one before.
        length: the pairs (fraction of the budget, fraction of a sequence's tokens).
        layers: the blocks, as a dotted path, a pattern (``"block_*"``) or a list of paths. None finds the longest stack.
        ffn: the feed-forward networks by name, each a list of its linear layers that ends with the output layer. ``*``
            stands for a block's number: ``[["blocks.*.mlp.0", "blocks.*.mlp.2"]]``. None finds them.
        copy_optimizer_state: whether new blocks and hidden units copy the state of their sources (Adam's moments,
            momentum), as if they had been there from the start. Otherwise their state starts empty. State of another
            form (low-bit or factored moments) always starts empty, also for the source units.
        noise: the size of the noise on copies of ``W_1``, relative to its root mean square. At 0 copies are exact.
        mode: how sequences are shortened. "reshape" keeps every token, and "truncate" keeps the first ones.
        keys: the names or positions of the tensors to shorten along dimension 1, where shapes do not tell.

    Raises:
        ValueError: for a value out of range. At setup, if the fraction of the blocks is not a whole number, or the
            blocks differ or lie within a compiled module. On the first batch, before any weight has changed, if no
            feed-forward network is found, its hidden units cannot be repeated, or sequences are not found or cannot be
            split.

    Example:
        >>> growth = CompoundGrowth(depth=[(0.0, 0.5), (0.3, 1.0)], width=[(0.0, 0.25), (0.3, 1.0)])
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[growth])

    References:
        Gu et al. 2020, "On the Transformer Growth for Progressive BERT Training", arXiv:2010.12562.
    """

    saves = "compute, activation memory and optimizer memory of blocks and hidden units that are not used yet"
    paper = "Gu et al. 2020, arXiv:2010.12562"
    constraints = (
        "blocks of one class and shape; feed-forward networks with a whole number of hidden units at each stage, called as"
        " modules; the loss rises when blocks are added; automatic optimization"
    )
    search_space = SearchSpace(
        {
            "first": Choice((0.25, 0.5)),  # of all blocks
            "width": Choice((0.25, 0.5, 1.0)),
            "length": Choice((0.5, 1.0)),
            "until": Uniform(0.1, 0.7),
            "copy_optimizer_state": Choice((True, False)),
        },
        needs_blocks,
        _from_shares,
    )
    control = Control(
        "the small model throughout, once for each stage but the last: its depth, width and sequence length",
        _small_models,
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "ProgressiveStacking": "both set how many blocks run",
        "SequenceLengthWarmup": "both set the length of sequences",
        "RegionalCompilation": "blocks would be recompiled each time their width changes",
        **dict.fromkeys(_WHOLE, "it works on whole parameters, and some of their hidden units are not used yet"),
        **dict.fromkeys(_HIDING, "it hides the linear layers of the feed-forward networks"),
    }

    def __init__(
        self,
        *,
        depth: Annotated[Sequence[tuple[float, float]], Stages("fraction of the blocks")] | None = _HALF,
        width: Annotated[Sequence[tuple[float, float]], Stages("fraction of the hidden units")] | None = _HALF,
        length: Annotated[Sequence[tuple[float, float]], Stages("fraction of the tokens")] | None = None,
        layers: Layers | None = None,
        ffn: FFNs | None = None,
        copy_optimizer_state: bool = True,
        noise: Annotated[float, Fraction(below=1)] = 1e-3,
        mode: Literal["reshape", "truncate"] = "reshape",
        keys: Keys | None = None,
    ) -> None:
        check_multiples(width, who=WHO)
        self.depth = None if depth is None else list(depth)
        self.width = None if width is None else list(width)
        self.length = None if length is None else list(length)
        self.layers = layers
        self.ffn = ffn
        self.copy_optimizer_state = copy_optimizer_state
        self.noise = noise
        self.mode: Literal["reshape", "truncate"] = mode
        self.keys = keys

    def _reset(self) -> None:
        self._stack: BlockStack | None = None
        self._width: Width | None = None
        self._learnt: dict[str, Any] | None = None
        self._active: int | None = None
        self._counts: list[int] = []
        self._share = self.width[0][1] if self.width else 1.0
        self._length_share = self.length[0][1] if self.length else 1.0
        self._switches: list[tuple[int, str]] = []
        self._ran = self._told = False
        self._where = ""
        self._length = Length(mode=self.mode, keys=self.keys, who=WHO)

    @property
    @override
    def neutral(self) -> bool:
        return all(shares is None or shares == [(0.0, 1.0)] for shares in (self.depth, self.width, self.length))

    @property
    @override
    def changes_shapes(self) -> bool:
        return self.length is not None and len(self.length) > 1

    # -- set-up

    @override
    def attach(self, session: Session) -> None:
        if self.length is not None:
            session.chain.add(Stage.TRANSFORM, self._shorten)

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            show_trained(session, self.layers, self._learnt and self._learnt["stack"], self._active, who=WHO)
            return
        learnt = self._learnt or {}
        if self.depth is not None:
            self._find_blocks(session, self.depth)
        if learnt.get("ffns"):
            self._take_up_width(session, learnt)
        session.views.append(self._view)

    def _find_blocks(self, session: Session, depth: Shares) -> None:
        stack = self._stack = blocks_of(session, self.layers, who=WHO)
        self._counts = copied(stack, whole(len(stack), depth, who=WHO, name="depth", of=str(stack)), who=WHO)
        if self._learnt is not None and self._learnt["stack"] is not None:
            stack.load_state_dict(self._learnt["stack"])
        self._active = stack.active = self._active or self._counts[0]
        self._where = f"{len(stack)} blocks of {stack.path!r}"
        stack.watch(scales=False)
        stack.freeze_inactive()

    def _take_up_width(self, session: Session, learnt: Mapping[str, Any]) -> None:
        ffns = [FFN(hidden, tuple(Part(*part) for part in parts)) for hidden, parts in learnt["ffns"]]
        self._width = Width(session.module, ffns, self._share)
        self._tell_size(session)

    def _tell_size(self, session: Session) -> None:
        """Report the number of hidden units, from which the cost of a step follows."""
        assert self._width is not None
        hidden = [ffn.hidden for ffn in self._width.ffns]
        session.sizes["hidden units"] = sum(map(self._width.units, hidden)), sum(hidden)

    def _view(self, training: bool) -> AbstractContextManager[None]:
        return nullcontext() if self._width is None else self._width.view(training)

    @override
    def on_optimizers(self, session: Session) -> None:
        if self._width is not None:
            self._width.watch(session.optimizers)

    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        if state is None or self.depth is not None:
            super().check_checkpoint(session, state)

    # -- what a step sees

    def _shorten(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        assert self.length is not None
        shares = [share for _, share in self.length]
        return proceed(self._length.short(self.session, batch, self._length_share, shares))

    # -- growth

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        if batch_idx % session.trainer.accumulate_grad_batches:
            return
        u = session.progress.u
        if self.width is not None and self._width is None:
            self._look(session, batch, batch_idx, self.width)
        self._ran = True
        step = session.trainer.global_step
        if self.length is not None:
            self._length_share = size_at(self.length, u)
        grown = False
        if self._stack is not None and self.depth is not None:
            target = self._counts[[share for _, share in self.depth].index(size_at(self.depth, u))]
            for count in self._counts:
                if self._stack.active < count <= target:
                    self._stack_up_to(session, self._stack, count)
                    grown = True
            if grown:
                self._stack.freeze_inactive()
                session.rewrap()
        if self._width is not None and self.width is not None:
            for _, share in self.width:
                if self._share < share <= size_at(self.width, u):
                    self._width.grow(
                        share,
                        session.optimizers,
                        copy_state=self.copy_optimizer_state,
                        noise=self.noise,
                        generator=lambda name: session.generator(self.name(), step, name),
                    )
                    self._share, grown = share, True
                    self._tell_size(session)
                    self._switches.append((step, f"{share:g} of the hidden units"))
        if grown:
            session.blocks_changed(self)

    def _look(self, session: Session, batch: Any, batch_idx: int, shares: Shares) -> None:
        """Find the feed-forward networks and narrow them."""
        found = on_all_ranks(
            session,
            lambda: narrowed(session, batch, batch_idx, shares=[share for _, share in shares], names=self.ffn, who=WHO),
        )
        if found is None:
            return
        self._width = found
        self._width.watch(session.optimizers)
        self._tell_size(session)
        units = sorted({ffn.hidden for ffn in found.ffns})
        rank_zero_info(
            f"{WHO}: found {len(found.ffns)} feed-forward networks of {' or '.join(map(str, units))} hidden units, such as"
            f" {found.ffns[0]}."
        )
        session.blocks_changed(self)

    def _stack_up_to(self, session: Session, stack: BlockStack, count: int) -> None:
        """Run ``count`` blocks from now on; new ones start as copies."""
        for j in range(stack.active, count):
            # block j := block (j mod L)
            source = stack.blocks[j % stack.active]
            copy_with_state(source, stack.blocks[j], session.optimizers, copies_state=self.copy_optimizer_state)
        self._active = stack.active = count
        self._switches.append((session.trainer.global_step, f"{count} blocks"))

    @override
    def on_blocks_changed(self, session: Session) -> None:
        if self._width is not None:
            self._width.clear()  # weights were overwritten, perhaps also those of absent units

    # -- state and report

    @override
    def short(self) -> str | None:
        """Describe a module with blocks that were never trained; None for any other."""
        stack = self._stack_state()
        if stack is None or self._active is None or self._active >= stack["length"]:
            return None
        return note(WHO, self._active, stack["length"], self._where)

    def _stack_state(self) -> dict[str, Any] | None:
        if self._stack is not None:
            return self._stack.state_dict()
        return self._learnt["stack"] if self._learnt else None

    @override
    def keep(self, session: Session) -> None:
        if self._width is not None:
            self._width.release()
        if session.fitting:
            self._learnt = {"stack": self._stack_state(), "ffns": self._ffns()}
            self._stack, self._width = None, None

    def _ffns(self) -> list[Any]:
        if self._width is not None:
            return [[ffn.hidden, [list(part) for part in ffn.parts]] for ffn in self._width.ffns]
        return self._learnt["ffns"] if self._learnt else []

    @override
    def state_dict(self) -> dict[str, Any]:
        short = self.short()
        state = {
            "active": self._active,
            "share": self._share,
            "switches": [list(switch) for switch in self._switches],
            "stack": self._stack_state(),
            "ffns": self._ffns(),
        }
        return state if short is None else {**state, "note": short}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._active, self._share = state_dict["active"], state_dict["share"]
        self._switches = [(step, text) for step, text in state_dict["switches"]]
        self._learnt = {"stack": state_dict["stack"], "ffns": state_dict["ffns"]}

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        told: dict[str, float | int | Tensor] = {}
        stack = self._stack_state()
        if self.depth is not None and stack is not None and self._active is not None:
            told["depth"] = self._active / stack["length"]
        if self.width is not None:
            told["width"] = self._share
        if self.length is not None:
            told["length"] = self._length_share
        return told

    @override
    def summary(self) -> str:
        began = [f"{shares[0][1]:g} of the {name}" for name, shares in self._axes().items()]
        grown = "".join(f" -> {text} (step {step:,})" for step, text in self._switches)
        return f"{', '.join(began)}{grown}" + (f", of {self._where}" if self._where else "")

    def _axes(self) -> dict[str, Shares]:
        axes = {"depth": self.depth, "width": self.width, "length": self.length}
        return {name: shares for name, shares in axes.items() if shares is not None}
