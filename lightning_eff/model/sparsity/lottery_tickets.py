"""Lottery tickets: prune the smallest weights, begin again from the first ones, and so on (Frankle & Carbin 2018)."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.sparsity._masks.masked import RIVALS_IN_STATE, Masked, no_time, rivals
from lightning_eff.model.sparsity._masks.pruning import Scope, check_scope, num_survivors, smallest_masked
from lightning_eff.model.sparsity._random_mask import fixed

WHO = "LotteryTickets"


class LotteryTickets(Masked):
    """Within one fit, train, prune the smallest weights, set the others back to what they were, and train again.

    The budget is divided into ``rounds + 1`` periods of equal length. At the end of each but the last, the share ``share`` of
    the weights that are left is masked, those of the smallest magnitude; then all parameters and buffers, and the optimizer's
    state, are set back to what they were when the share ``rewind`` of the first period was used. After ``r`` rounds
    ``1 - (1 - share)^r`` of the weights is zero. Masks only grow.

    **It saves no time: it costs** ``rounds`` trainings more than the last one, whose products are as dense as any. It is how
    tickets are looked for, and a yardstick for what chooses masks at less cost. Rates are not set back: give a schedule that
    repeats with each period, or a constant rate. A checkpoint holds the weights of then, and the optimizer's state, once more.

    The weights are found as by ``RigL``.

    Logged: ``sparsity``, ``kept`` (numbers), ``rounds`` (so far).

    Args:
        rounds: how often is pruned, >= 1. 0 is plain training.
        share: of the weights that are left, what is pruned each time, in (0, 1). 0.2 is the paper's.
        rewind: the share of the first period at which weights are remembered, in [0, 1). 0 is the first weights; large networks
            need a little more (Frankle et al. 2019).
        scope: "global", the smallest of all weights together; "layer", of each by itself, as the paper for small networks.
        names: see ``RigL``.
        dense: see ``RigL``.

    Raises:
        ValueError: for other values; at setup, if there is nothing to mask, or a name means nothing.

    Sources:
        Frankle & Carbin 2018, arXiv:1803.03635; Frankle et al. 2019, arXiv:1903.01611.
    """

    saves: ClassVar[str] = "no time: it finds a sparse network that trains, at the cost of several trainings"
    paper: ClassVar[str] = "Frankle & Carbin 2018, arXiv:1803.03635"
    constraints: ClassVar[str] = "one more copy of weights and optimizer states"
    survey: ClassVar[Survey | None] = Survey("lottery tickets, iterative magnitude pruning", zhuang="2.1", shen="4.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"rounds": Choice((2, 4))}, no_time)
    control: ClassVar[Control] = Control(
        "a random mask of the size that is reached, which stays, for as many seconds", fixed
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **rivals(WHO),
        **RIVALS_IN_STATE,
        "LayerFreezing": "what it has frozen would be set back, and not train again",
    }
    needs_budget: ClassVar[bool] = True

    def __init__(
        self,
        rounds: int = 4,
        *,
        share: float = 0.2,
        rewind: float = 0.0,
        scope: Scope = "global",
        names: Sequence[str] | None = None,
        dense: Sequence[str] = (),
    ) -> None:
        if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 0:
            raise ValueError(f"{WHO}({rounds=}): expected how often is pruned, >= 1; 0 is plain training.")
        if not 0.0 < share < 1.0:
            raise ValueError(
                f"{WHO}({share=}): expected the share that is pruned each time, in (0, 1). 0.2 is the paper's."
            )
        if not 0.0 <= rewind < 1.0:
            raise ValueError(
                f"{WHO}({rewind=}): expected a share of the first period, in [0, 1); 0 is the first weights."
            )
        self.rounds, self.share, self.rewind = rounds, share, rewind
        self.scope: Scope = check_scope(scope, who=WHO)
        self._take(sparsity=1.0 - (1.0 - share) ** rounds, names=names, dense=dense)

    @override
    def _reset(self) -> None:
        super()._reset()
        self._round = 0
        self._then: dict[str, Any] | None = None

    @property
    def remembered(self) -> Mapping[str, Tensor]:
        """The parameters and buffers that survivors are set back to, by name; empty until they are remembered."""
        return {} if self._then is None else self._then["weights"]

    @override
    def asked(self) -> dict[str, Any]:
        return {"rounds": self.rounds, "share": self.share, "rewind": self.rewind, "scope": self.scope}

    @override
    def begin(self, session: Session, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return {name: torch.ones(weight.shape, dtype=torch.bool) for name, weight in self.weights.items()}

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        super().on_batch_start(session, batch, batch_idx)
        period = session.progress.u * (self.rounds + 1) + 1e-9
        if self._then is None and (period >= self.rewind or int(period) > 0):
            self._then = self._now(session)
        done = min(int(period), self.rounds)
        if done > self._round:
            self._round = done
            self._prune(session)
            self._set_back(session)
            session.blocks_changed(self)

    def _prune(self, session: Session) -> None:
        """Mask the smallest of those that are left."""
        masks = smallest_masked(
            self, session, self.scope, lambda n: num_survivors(n, share=self.share, rounds=self._round)
        )
        self.put(masks)
        self.tell_of_empty()

    def _now(self, session: Session) -> dict[str, Any]:
        module = session.module
        held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        states: dict[str, Any] = {}
        for optimizer in session.optimizers:
            for name, p in module.named_parameters():
                if optimizer.state.get(p):
                    states[name] = deepcopy(dict(optimizer.state[p]))
        return {"weights": {name: t.detach().clone() for name, t in held.items()}, "states": states}

    @torch.no_grad()
    def _set_back(self, session: Session) -> None:
        """Weights, buffers and the optimizer's state are what they were, and masked weights zero."""
        assert self._then is not None, "remembered no later than at the end of the first period"
        module = session.module
        for name, t in (*module.named_parameters(), *module.named_buffers()):
            then = self._then["weights"].get(name)
            if then is not None and then.shape == t.shape:  # a cache may have become another one
                t.copy_(then)
        for optimizer in session.optimizers:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for name, p in module.named_parameters():
                if id(p) in held:
                    optimizer.state.pop(p, None)
                    if name in self._then["states"]:
                        optimizer.state[p] = deepcopy(self._then["states"][name])
        self.apply()
        self.clear_state(session, {name: ~mask for name, mask in self.masks.items()})

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "rounds": self._round}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "round": self._round, "then": self._then}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._round, self._then = state_dict["round"], state_dict["then"]
