"""Compound growth: depth, the width of feed-forward networks and length grow together (CompoundGrow, Gu et al. 2020)."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._branches.ffns import FFN, Part, check_names
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core.blocks import BlockStack
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey, Uniform, needs_blocks
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control
from lightning_eff.model.growth._ffn.looking import narrowed
from lightning_eff.model.growth._ffn.width import Width
from lightning_eff.model.growth._sizes.depth import blocks_of, check_length, copied, copy_with_state, show_trained
from lightning_eff.model.growth._sizes.length import Length
from lightning_eff.model.growth._sizes.shares import Shares, check_multiples, checked_shares, share_at, whole
from lightning_eff.model.growth._untrained import Growing, note

WHO, _HALF = "CompoundGrowth", ((0.0, 0.5), (0.3, 1.0))
_WHOLE = ("OrthogonalInit", "TFixup", "ZerO", "LSUV", "KFAC", "Lookahead", "OptimizerOffload")
_FP8 = ("FP8Precision", "INT8Precision", "S2FP8Precision", "Wang2018FP8Precision")
_HIDING = ("ReZero", "SkipInit", "LayerScale", "Fixup", "VeRA", *_FP8)


def _small_models(technique: "CompoundGrowth") -> dict[str, Callback]:
    """The model of each stage but the last, throughout."""
    axes = {"depth": technique.depth, "width": technique.width, "length": technique.length}
    if technique.neutral or all(shares is None or len(shares) == 1 for shares in axes.values()):
        return {}
    fractions = sorted({fraction for shares in axes.values() for fraction, _ in shares or ()})
    arms: dict[str, Callback] = {}
    for u in fractions[:-1]:
        now = {name: share_at(shares, u) for name, shares in axes.items() if shares is not None}
        text = ", ".join(f"{share:g} of the {name}" for name, share in now.items())
        stages: dict[str, Any] = {name: [(0.0, now[name])] if name in now else None for name in axes}
        arms[f"{text} throughout"] = CompoundGrowth(
            **stages, layers=technique.layers, ffn=technique.ffn, mode=technique.mode, keys=technique.keys
        )
    return arms


def _from_shares(cls: Any, values: Mapping[str, Any], profile: RunProfile) -> Any:
    """``first`` of the blocks, as near as their number allows, and of the other sizes, until ``until``."""
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
    """Train a network that is less deep, less wide and sees shorter sequences at first, and let all three grow.

    Each of ``depth``, ``width`` and ``length`` is a list of pairs (fraction of the budget, share of the full size), or None
    for what is full throughout. The module is built at its full size and keeps it: every checkpoint has the plain module's
    names and shapes.

    - Depth grows by stacking: when ``L`` blocks grow to more, new block ``j`` begins as a copy of block ``j mod L``, as in
      :class:`ProgressiveStacking`. Blocks that do not run cost nothing, and have no gradient and no optimizer state.
    - Width is the number of hidden units of the feed-forward networks ``x + W_2 f(W_1 x)``. When they become ``k`` times as
      many, ``W_1`` and its bias are repeated and ``W_2`` is repeated and divided by ``k``, so the network's function is
      kept. Units that are not there yet cost no products and no optimizer state; their gradients are zero and never used, and
      their weights in ``W_2`` are 0, so that the plain module computes what was trained at any moment.
    - Sequences are split into shorter ones (``mode="reshape"``) or cut; validation, test and prediction see them in full. This
      takes the place of the paper's pooled embeddings.

    Feed-forward networks are found on the first batch, by what each residual branch is computed from, with one gate or none,
    in one map or two; and it is tried that they keep their function. That costs three forward passes. ``ffn`` names them where
    they are not found; experts of a mixture are refused. Copies of a hidden unit would get the same gradients for ever, so
    ``noise`` tells them apart: it sums to 0 over the copies, and changes the function in second order only.

    A run that ends before all blocks run leaves blocks that were never trained: loaded without this callback the module is
    another one than was evaluated. It is warned of, and checkpoints say it.

    Growth happens between optimizer steps, never within an accumulation window.

    Logged: ``depth``, ``width`` and ``length``, the shares of the last step, of those that grow.

    Args:
        depth: pairs (fraction of the budget in [0, 1), share of the blocks in (0, 1]), both growing, from fraction 0.
        width: likewise, of the hidden units; each share a multiple of the one before.
        length: likewise, of the tokens of a sequence.
        layers: the blocks, as a path, a pattern (``"block_*"``) or a list of paths; None finds the longest stack.
        ffn: feed-forward networks by name, each a list of its maps that ends with the one back to the stream; ``*`` stands for
            a block's number: ``[["blocks.*.mlp.0", "blocks.*.mlp.2"]]``. None finds them.
        copy_optimizer_state: new blocks and hidden units get the state of what they copy, as it would be had they been there
            all along (Adam's moments, momentum); otherwise theirs starts anew, as does state of another form (low-bit or
            factored moments), together with that of the units copied.
        noise: of the copies' ``W_1``, relative to its root mean square, >= 0; at 0 they are exact.
        mode: of length: "reshape" keeps every token, "truncate" the first ones.
        keys: of length: names or positions of the tensors to cut along dimension 1, where shapes do not tell.

    Raises:
        ValueError: if an argument is out of its range or goes past the module's size; at setup, if the share of the blocks
            is no whole number, or they are of different make or within a compiled module; on the first batch, before any
            weight has changed, if no feed-forward network is found (with what was found in its place), its hidden units
            cannot be tiled to the shares, it does not treat each by itself, or sequences are not found or do not split.

    Sources:
        Gu et al. 2020, arXiv:2010.12562.
    """

    saves: ClassVar[str] = "compute, activations and optimizer memory of blocks and hidden units that are not there yet"
    paper: ClassVar[str] = "Gu et al. 2020, arXiv:2010.12562"
    constraints: ClassVar[str] = (
        "blocks of one class and shape; feed-forward networks with a whole number of hidden units at each share, called as"
        " modules; stacking lifts the loss at a switch; automatic optimization"
    )
    survey: ClassVar[Survey | None] = Survey("CompoundGrow", zhuang="2.1", shen="4.4")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
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
    control: ClassVar[Control] = Control(
        "the small model throughout, of every stage but the last: as deep, as wide and on sequences as long as there",
        _small_models,
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "ProgressiveStacking": "both say how many blocks the network has",
        "SequenceLengthWarmup": "both say how long sequences are",
        "RegionalCompilation": "blocks whose widths change would be compiled anew each time",
        **dict.fromkeys(_WHOLE, "it goes by whole parameters, of which some hidden units are not there yet"),
        **dict.fromkeys(_HIDING, "its maps are not seen to be those of feed-forward networks"),
    }
    needs_budget: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = True

    def __init__(
        self,
        *,
        depth: Sequence[tuple[float, float]] | None = _HALF,
        width: Sequence[tuple[float, float]] | None = _HALF,
        length: Sequence[tuple[float, float]] | None = None,
        layers: str | Sequence[str] | None = None,
        ffn: Sequence[Sequence[str]] | None = None,
        copy_optimizer_state: bool = True,
        noise: float = 1e-3,
        mode: Literal["reshape", "truncate"] = "reshape",
        keys: list[str | int] | None = None,
    ) -> None:
        self.depth = checked_shares(depth, who=WHO, name="depth", of="the blocks")
        self.width = checked_shares(width, who=WHO, name="width", of="the hidden units")
        self.length = checked_shares(length, who=WHO, name="length", of="the tokens of a sequence")
        check_multiples(self.width, who=WHO)
        check_names(ffn, who=WHO)
        if isinstance(noise, bool) or not isinstance(noise, int | float) or not 0.0 <= noise < 1.0:
            raise ValueError(f"{WHO}({noise=}): expected a number in [0, 1), relative to the weights' size.")
        self.layers = layers
        self.ffn = None if ffn is None else [list(names) for names in ffn]
        self.copy_optimizer_state = copy_optimizer_state
        self.noise = noise
        self._length = Length(mode=mode, keys=keys, who=WHO)
        self.mode: Literal["reshape", "truncate"] = mode
        self.keys = self._length.keys
        self._reset()

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
        self._reset()
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
        """What a step costs follows from how many hidden units there are."""
        assert self._width is not None
        hidden = [ffn.hidden for ffn in self._width.ffns]
        session.sizes["hidden units"] = sum(map(self._width.units, hidden)), sum(hidden)

    def _view(self, training: bool) -> AbstractContextManager[None]:
        return nullcontext() if self._width is None else self._width.view(training)

    @override
    def on_optimizers(self, session: Session) -> None:
        if self._width is not None:
            self._width.watch(session.optimizers)

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        if state is None:
            if not session.fitting:  # a plain checkpoint, or one of weights alone
                return
            raise ValueError(
                f"{WHO}: the checkpoint was saved without it, so it was trained at full size (or holds weights only); expected"
                " one that says how much of the module was trained. Go on without the technique, or load the weights into the"
                " module and start a new fit."
            )
        if self.depth is not None and state.get("stack") is not None:
            check_length(session, self.layers, state["stack"], who=WHO)

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
            self._length_share = share_at(self.length, u)
        grown = False
        if self._stack is not None and self.depth is not None:
            target = self._counts[[share for _, share in self.depth].index(share_at(self.depth, u))]
            for count in self._counts:
                if self._stack.active < count <= target:
                    self._stack_up_to(session, self._stack, count)
                    grown = True
            if grown:
                self._stack.freeze_inactive()
                session.rewrap()
        if self._width is not None and self.width is not None:
            for _, share in self.width:
                if self._share < share <= share_at(self.width, u):
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
        """Find the feed-forward networks, and let them be narrow."""
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
            f"{WHO}: {len(found.ffns)} feed-forward networks of {' or '.join(map(str, units))} hidden units, such as"
            f" {found.ffns[0]}."
        )
        session.blocks_changed(self)

    def _stack_up_to(self, session: Session, stack: BlockStack, count: int) -> None:
        """Let ``count`` blocks run, the new ones copies of those that ran until now."""
        for j in range(stack.active, count):
            # block j := block (j mod L)
            source = stack.blocks[j % stack.active]
            copy_with_state(source, stack.blocks[j], session.optimizers, copies_state=self.copy_optimizer_state)
        self._active = stack.active = count
        self._switches.append((session.trainer.global_step, f"{count} blocks"))

    @override
    def on_blocks_changed(self, session: Session) -> None:
        if self._width is not None:
            self._width.clear()  # weights were overwritten, those of absent units perhaps, too

    # -- state and report

    @override
    def short(self) -> str | None:
        """What is to be said of a module that holds blocks which were never trained; None of any other."""
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
