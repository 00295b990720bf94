"""The course of a run that grows in stages, each begun with a search for depth and resolution."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._stack.unused_parameters import look_for_unused, refuse_reentrant, refuse_static_graph
from lightning_eff._core.blocks import BlockStack
from lightning_eff._core.passes import loss_of, unseen
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff.model.growth._progressive.growing import (
    Growth,
    Momentum,
    check_blocks,
    decayed,
    interpolated,
    skipped,
)
from lightning_eff.model.growth._progressive.inputs import Inputs, Kind
from lightning_eff.model.growth._progressive.search import (
    Candidate,
    balance,
    best_of,
    candidates_of,
    ladder,
    rung,
    rungs,
)
from lightning_eff.model.growth._sizes.depth import blocks_of, show_trained
from lightning_eff.model.growth._untrained import Growing

WHO = "AutoProg"
_LOOKS = 5  # the evaluations of a search, evenly spaced over its second half
_STATE = ("active", "stage", "now", "base", "looks", "alpha", "followed", "share", "ran_blocks", "steps", "passes")


def due(v: float) -> int:
    """Return how many of a search's evaluations are due at its fraction ``v``: the first at 0.5, the last at 1."""
    return min(max(math.floor((v - 0.5) / 0.5 * (_LOOKS - 1) + 1e-6) + 1, 0), _LOOKS)


class Progressive(Growing):
    """The course of a run of :class:`AutoProg`, which holds and documents the arguments."""

    num_stages: int
    depth: float
    resolution: float
    until: float
    search: float
    alpha: float | None
    half_life: float
    inputs: Kind
    layers: str | Sequence[str] | None
    copy_optimizer_state: bool
    multiple_of: int
    keys: list[str | int] | None

    def _reset(self) -> None:
        self._stack: BlockStack | None = None
        self._momentum: Momentum | None = None
        self._learnt: dict[str, Any] | None = None
        self._saved: dict[str, Tensor] = {}  # averages of a checkpoint
        self._inputs = Inputs(kind=self.inputs, multiple_of=self.multiple_of, keys=self.keys, who=WHO)
        self._depths: list[int] = []
        self._active: int | None = None
        self._stage = 0
        self._now: Candidate | None = None  # the choice of the last search
        self._base = 0  # the depth from which the network grew, during a search; else 0
        self._losses: list[list[float]] = []  # of each evaluation, in the candidates' order
        self._looks = 0  # evaluations of this search that were due
        self._alpha: float | None = None
        self._followed: tuple[int, float] | None = None  # step and fraction of the budget of the last update
        self._share, self._ran_blocks = 1.0, 0  # of the last step
        self._steps = self._passes = 0
        self._switches: list[tuple[int, str]] = []
        self._unused = False  # whether this technique switched on find_unused_parameters
        self._ran = self._told = False
        self._where = ""

    # -- set-up

    @override
    def check(self, session: Session) -> None:
        refuse_static_graph(session, who=WHO)

    @override
    def attach(self, session: Session) -> None:
        if self.resolution < 1.0:
            session.chain.add(Stage.TRANSFORM, self._make_smaller)
            session.chain.add(Stage.SAVE, self._renew)

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            show_trained(session, self.layers, self._learnt, self._active, who=WHO)
            return
        stack = self._stack = blocks_of(session, self.layers, who=WHO)
        check_blocks(stack, who=WHO)
        refuse_reentrant(session, [stack], who=WHO)
        self._depths = rungs(len(stack), self.depth, self.num_stages)
        if len(self._depths) < 2:
            raise ValueError(
                f"{WHO}(depth={self.depth}): {self.depth:g} of the {len(stack)} blocks of {stack} is all of them, so nothing"
                f" can grow. Lower depth, or remove {WHO}."
            )
        self._momentum, self._where = Momentum(session.module), f"{len(stack)} blocks of {stack.path!r}"
        if self._learnt is not None:
            stack.load_state_dict(self._learnt)
            self._momentum.held = self._saved
        elif self.search:
            self._base, self._active = self._depths[0], len(stack)
        else:
            self._now = (self._depths[0], self._shares()[0])
            self._active = self._depths[0]
        assert self._active is not None
        stack.active = self._active
        stack.watch(scales=False, skips=True, who=type(self).__name__)  # a search skips blocks
        stack.freeze_inactive()
        self._unused = bool(self._base) and look_for_unused(session)

    @override
    def on_optimizers(self, session: Session) -> None:
        assert self._momentum is not None
        self._momentum.to({name: p.device for name, p in session.module.named_parameters()})

    def _shares(self) -> list[float]:
        return ladder(self.resolution, self.num_stages) if self.resolution < 1.0 else [1.0]

    def _candidates(self) -> tuple[list[int], list[float]]:
        shares = self._shares() if self._inputs.smaller else [1.0]
        return candidates_of(self._depths, shares, self._now)

    # -- what a step sees

    def _make_smaller(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        small = self._inputs.enter(self.session, batch, self._share)
        if torch.is_grad_enabled():  # blocks may be run again in the backward pass
            self.session.when_step_ends(self._inputs.leave)
            return proceed(small)
        try:
            return proceed(small)
        finally:
            self._inputs.leave()

    def _renew(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        self._inputs.renew()
        return proceed(batch)

    # -- the course of the run

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        assert self._stack is not None, "on_model has found the blocks"
        if not self._inputs.looked:
            self._inputs.look(session, batch, batch_idx, self._shares())
        if batch_idx % session.trainer.accumulate_grad_batches == 0:
            self._ran = True
            self._follow(session)
            self._advance(session, batch, batch_idx)
            self._steps += bool(self._base)
        self._stack.absent = frozenset()
        if self._base:  # the same for all micro-batches of an optimizer step, and on all ranks
            numbers = session.generator(self.name(), session.trainer.global_step)
            depths, shares = self._candidates()
            count, self._share = (c[int(torch.randint(len(c), (), generator=numbers))] for c in (depths, shares))
            self._stack.absent = skipped(interpolated(self._base, self._stack.active), int(count))
        elif self._now is not None:
            self._share = self._now[1] if self._inputs.smaller else 1.0
        self._ran_blocks = self._stack.active - len(self._stack.absent)

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        assert self._stack is not None
        self._stack.absent = frozenset()  # validation uses all of a search's network

    def _follow(self, session: Session) -> None:
        """Update the averages with the weights of the step before; the last stage needs none."""
        assert self._momentum is not None
        step, u = session.trainer.global_step, session.progress.u
        if self._stage == self.num_stages - 1:
            self._momentum.held = {}
        elif self._followed is None or step > self._followed[0]:
            elapsed = u - self._followed[1] if self._followed else 0.0
            self._momentum.follow(decayed(max(elapsed, 0.0), self.half_life))
            self._followed = (step, u)

    def _advance(self, session: Session, batch: Any, batch_idx: int) -> None:
        """End a search that is complete, and begin the stage that is due."""
        u, apart = session.progress.u, self.until / (self.num_stages - 1)
        if self._base:
            v = (u - self._stage * apart) / (self.search / (self.num_stages - 1))
            if due(v) > self._looks:
                self._looks = due(v)
                self._evaluate(session, batch, batch_idx)
            if self._looks == _LOOKS:
                self._decide(session)
        stage = min(int(u / apart + 1e-9), self.num_stages - 1)
        if not self._base and stage > self._stage:
            self._begin(session, stage)

    def _begin(self, session: Session, stage: int) -> None:
        stack, shares = self._stack, self._shares()
        assert stack is not None
        self._stage = stage
        if stage == self.num_stages - 1:
            chosen = (len(stack), 1.0)
        elif not self.search:
            chosen = (
                rung(len(stack), ladder(self.depth, self.num_stages)[stage]),
                shares[min(stage, len(shares) - 1)],
            )
        else:
            depths, resolutions = self._candidates()
            if len(depths) * len(resolutions) > 1:
                self._base, self._losses, self._looks = stack.active, [], 0
                self._grow(session, depths[-1])
                return
            chosen = (depths[0], resolutions[0])
        self._now = chosen
        self._grow(session, chosen[0])
        self._note(session)

    def _grow(self, session: Session, depth: int) -> None:
        """Run ``depth`` blocks, and switch the strategy to a search or back."""
        assert self._stack is not None
        self._growth(session).grow(interpolated(self._stack.active, depth))
        self._changed(session)

    def _growth(self, session: Session) -> Growth:
        assert self._stack is not None and self._momentum is not None
        return Growth(self._stack, session.optimizers, self._momentum, copies_state=self.copy_optimizer_state)

    def _changed(self, session: Session) -> None:
        assert self._stack is not None
        self._active = self._stack.active
        self._stack.freeze_inactive()
        if self._base:
            self._unused = look_for_unused(session)
        elif self._unused:
            look_for_unused(session, look=False)
            self._unused = False
        session.rewrap()
        session.blocks_changed(self)

    def _note(self, session: Session) -> None:
        assert self._now is not None
        count, r = self._now
        size = f" at {r:g} of the resolution" if self._inputs.smaller else ""
        self._switches.append((session.trainer.global_step, f"{count} block{'s' * (count > 1)}{size}"))

    # -- the search

    def _evaluate(self, session: Session, batch: Any, batch_idx: int) -> None:
        """Record the loss of each candidate on this batch with averaged weights, as the mean over ranks."""
        stack, momentum = self._stack, self._momentum
        assert stack is not None and momentum is not None
        depths, shares = self._candidates()
        sources = interpolated(self._base, stack.active)
        own: list[float | None] = []
        with momentum.shown():
            for r in shares:
                with self._inputs.at(session, batch, r) as small:
                    for count in depths:
                        with stack.without(skipped(sources, count)), unseen(session):
                            own.append(loss_of(session, small, batch_idx, whole=False))
        self._passes += len(own)
        told = [row for row in session.gather(own) if None not in row]  # without steps that return no loss
        if told:
            self._losses.append([sum(column) / len(told) for column in zip(*told, strict=True)])

    def _decide(self, session: Session) -> None:
        """Continue with the best candidate."""
        stack = self._stack
        assert stack is not None
        depths, shares = self._candidates()
        every = [(count, r) for r in shares for count in depths]
        times = {c: c[0] / len(stack) * self._inputs.cost(c[1]) for c in every}
        told = zip(every, zip(*self._losses, strict=True), strict=True) if self._losses else ()
        means = {c: sum(row) / len(row) for c, row in told}
        losses = {c: loss for c, loss in means.items() if math.isfinite(loss)}
        if losses:
            self._alpha = balance(losses, times, self._alpha) if self.alpha is None else self.alpha
            self._now = best_of(losses, times, self._alpha)
        else:  # no loss was seen, or all have diverged
            self._now = min(every, key=lambda c: (times[c], c))
        self._growth(session).leave_out(skipped(interpolated(self._base, stack.active), self._now[0]))
        self._base = 0
        self._changed(session)
        self._note(session)
        text = ", ".join(f"{count} at {r:g}: {loss:.4g}" for (count, r), loss in losses.items()) or "none seen"
        rank_zero_info(f"{WHO}: chose {self._switches[-1][1]} (losses by blocks and resolution: {text}).")

    # -- state and report

    @override
    def short(self) -> str | None:
        """Describe a module of which only a part runs; None for any other."""
        stack = self.stack_state()
        if stack is None or self._active is None or self._active >= stack["length"]:
            return None
        return (
            f"{WHO}: training has reached the first {self._active} of the {self._where or 'blocks'}. Without {WHO} in the"
            f" Trainer, the module runs all {stack['length']}, and computes something else than was trained and validated"
        )

    def keep(self, session: Session) -> None:
        self._inputs.leave()
        super().keep(session)

    @override
    def state_dict(self) -> dict[str, Any]:
        stack = self.stack_state()
        if stack is None:
            return {}
        momentum = self._momentum.held if self._momentum is not None else self._saved
        state: dict[str, Any] = {name: getattr(self, f"_{name}") for name in _STATE}
        state |= {"stack": stack, "momentum": momentum, "losses": [list(row) for row in self._losses]}
        state["switches"] = [list(switch) for switch in self._switches]
        short = self.short()
        return state if short is None else {**state, "note": short}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in _STATE:
            value = state_dict[name]
            setattr(self, f"_{name}", tuple(value) if isinstance(value, list) else value)
        self._learnt, self._saved = state_dict["stack"], dict(state_dict["momentum"])
        self._losses = [list(row) for row in state_dict["losses"]]
        self._switches = [(step, text) for step, text in state_dict["switches"]]

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        stack = self.stack_state()
        if stack is None or self._active is None:
            return {}
        return {
            "depth": (self._ran_blocks or self._active) / stack["length"],
            "resolution": self._share,
            "searching": int(bool(self._base)),
            "alpha": (self.alpha or 0.0) if self._alpha is None else self._alpha,
            "search_steps": self._steps,
            "search_passes": self._passes,
        }

    @override
    def summary(self) -> str:
        grown = " -> ".join(f"{text} (step {step:,})" for step, text in self._switches)
        cost = f"searched in {self._steps:,} steps with {self._passes:,} forward passes" if self.search else "no search"
        return f"{grown or 'did not grow'}, of {self._where or 'no block'}; {cost}"
