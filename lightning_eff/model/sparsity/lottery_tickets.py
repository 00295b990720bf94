"""LotteryTickets: repeatedly prune the smallest weights and rewind the others (Frankle & Carbin 2018)."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Alias, Count, Fraction
from lightning_eff._core.search_space import Choice, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.sparsity._masks.arguments import Dense, Scope, Weights
from lightning_eff.model.sparsity._masks.masked import RIVALS_IN_STATE, Masked, no_time, rivals
from lightning_eff.model.sparsity._masks.pruning import num_survivors, smallest_masked
from lightning_eff.model.sparsity._random_mask import fixed

WHO = "LotteryTickets"


class LotteryTickets(Masked):
    """Train, prune the smallest weights, reset the others to their early values, and train again, within one fit.

    The budget is divided into ``rounds + 1`` periods of equal length. At the end of each period but the last, the fraction
    ``share`` of the remaining weights with the smallest magnitude is masked. All parameters and buffers, and the optimizer's
    state, are then reset to their values at the fraction ``rewind`` of the first period. After ``r`` rounds, a fraction ``1 -
    (1 - share)^r`` of the weights is zero. Masks only grow.

    Use it to find a sparse network that trains well, or as a reference for cheaper ways to choose masks. **It saves no time:
    it costs** ``rounds`` trainings in addition to the last one, whose products are as dense as before. Learning rates are not
    reset: use a schedule that repeats with each period, or a constant learning rate. A checkpoint also holds the early
    weights and optimizer state.

    It also prunes GANs and other modules that step several optimizers themselves (``automatic_optimization = False``). The
    weights of each optimizer are then pruned by the same fraction, and all networks, buffers and optimizer states are reset,
    as in Chen et al. 2021; ``names=["generator.*"]`` prunes the generator alone. An average of weights that the module itself
    keeps is reset, but not masked.

    It finds weights as ``RigL`` does. It logs ``sparsity``, ``kept`` (elements) and ``rounds`` (so far).

    Args:
        rounds: the number of times it prunes. 0 is plain training.
        share: the fraction of the remaining weights to prune each time. 0.2 is the paper's. Also accepted as ``amount``.
        rewind: the fraction of the first period at which weights are saved for the reset. 0 saves the initial weights; large
            networks need a little more (Frankle et al. 2019).
        scope: where the smallest weights are chosen. "global" compares all weights together (of several optimizers, those of
            each), "layer" each weight separately, as in the paper for small networks.
        names: the weights to mask, see ``RigL``.
        dense: the weights to leave alone, see ``RigL``.

    Raises:
        ValueError: for a value out of range. At setup, if there is nothing to mask or a name matches nothing.

    Example:
        >>> trainer = L.Trainer(max_epochs=50, callbacks=[LotteryTickets(4, share=0.2)])

    References:
        Frankle & Carbin 2018, "The Lottery Ticket Hypothesis: Finding Sparse, Trainable Neural Networks", arXiv:1803.03635.
        Frankle et al. 2019, "Stabilizing the Lottery Ticket Hypothesis", arXiv:1903.01611.
        Chen et al. 2021, "GANs Can Play Lottery Tickets Too", arXiv:2106.00134.
    """

    saves = "no time: it finds a sparse network that trains well, at the cost of several trainings"
    paper = "Frankle & Carbin 2018, arXiv:1803.03635"
    constraints = "an additional copy of weights and optimizer states"
    search_space = SearchSpace({"rounds": Choice((2, 4))}, no_time)
    control = Control("a fixed random mask of the final size for the same time", fixed)
    conflicts: ClassVar[Mapping[str, str]] = {
        **rivals(WHO),
        **RIVALS_IN_STATE,
        "LayerFreezing": "its frozen layers would be reset, and not train again",
    }
    needs_budget: ClassVar[bool] = True
    checkpointed = ("_round", "_then")

    def __init__(
        self,
        rounds: Annotated[int, Count(at_least=0)] = 4,
        *,
        share: Annotated[float, Fraction(above=0, below=1), Alias("amount")] = 0.2,
        rewind: Annotated[float, Fraction(below=1)] = 0.0,
        scope: Scope = "global",
        names: Weights = None,
        dense: Dense = (),
    ) -> None:
        self.rounds, self.share, self.rewind = rounds, share, rewind
        self.scope: Scope = scope
        self._take(sparsity=1.0 - (1.0 - share) ** rounds, names=names, dense=dense)

    @override
    def _reset(self) -> None:
        super()._reset()
        self._round = 0
        self._then: dict[str, Any] | None = None

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
        """Mask the smallest of the remaining weights."""
        masks = smallest_masked(
            self, session, self.scope, lambda n: num_survivors(n, share=self.share, rounds=self._round)
        )
        self.put(masks)
        self.tell_of_empty()

    def _now(self, session: Session) -> dict[str, Any]:
        module = session.module
        held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        states = [
            {n: deepcopy(dict(o.state[p])) for n, p in module.named_parameters() if o.state.get(p)}
            for o in session.optimizers
        ]
        return {"weights": {name: t.detach().clone() for name, t in held.items()}, "states": states}

    @torch.no_grad()
    def _set_back(self, session: Session) -> None:
        """Reset weights, buffers and the optimizers' states, and set masked weights to zero."""
        assert self._then is not None, "they are saved in the first period"
        module = session.module
        for name, t in (*module.named_parameters(), *module.named_buffers()):
            then = self._then["weights"].get(name)
            if then is not None and then.shape == t.shape:  # the shape of a cache may have changed
                t.copy_(then)
        if not module.automatic_optimization:  # gradients of other weights, for a step in a later batch
            module.zero_grad()
        states = self._then["states"]
        if isinstance(states, dict):  # a checkpoint of an earlier version, with one optimizer
            states = [states]
        for optimizer, then in zip(session.optimizers, states, strict=True):
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for name, p in module.named_parameters():
                if id(p) in held:
                    optimizer.state.pop(p, None)
                    if name in then:
                        optimizer.state[p] = deepcopy(then[name])
        self.apply()
        self.clear_state(session, {name: ~mask for name, mask in self.masks.items()})

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "rounds": self._round}
