"""Optimizers that train at other weights than they evaluate, as schedule-free ones: ``train()`` and ``eval()`` are called."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_eff._core._needs.offers import is_plain
from lightning_eff._core.session import Session
from lightning_eff._core.technique import OtherWeights


class Modes:
    """Calls ``train()`` and ``eval()`` of optimizers that have both, where their libraries ask for it.

    While the trainer validates, in every checkpoint's ``state_dict`` and from the end of fit on, the module holds the weights
    of ``eval()``; saving puts those of ``train()`` back bit for bit.

    Args:
        session: the run.
        optimizers: those that may have the two methods.

    Raises:
        ValueError: beside a technique that shows other weights, or under a strategy that shards.
    """

    def __init__(self, session: Session, optimizers: list[Optimizer]) -> None:
        self._held: list[Any] = [o for o in optimizers if has_modes(o)]
        mine = {id(p) for o in self._held for group in o.param_groups for p in group["params"]}
        self._weights = {name: p for name, p in session.module.named_parameters() if id(p) in mine}
        if not self._held:
            return
        who = type(self._held[0]).__name__
        for other in session.working:
            if isinstance(other, OtherWeights):
                raise ValueError(
                    f"ReplaceOptimizer and {type(other).__name__} cannot train together: {who} evaluates at weights of its own,"
                    f" and both replace the weights that are validated and kept. Take {type(other).__name__} out of the"
                    " trainer's callbacks, or use another optimizer."
                )
        strategy = session.trainer.strategy
        if not is_plain(strategy):
            raise ValueError(
                f"ReplaceOptimizer: {who} evaluates at weights of its own, which {type(strategy).__name__} divides; expected a"
                " single device or DDP. Use one of these, or another optimizer."
            )
        original = strategy.lightning_module_state_dict

        def evaluated() -> dict[str, Any]:
            trained, settings = self.weights(), self._settings()
            self.evaluate()
            try:
                return deepcopy(original())  # tied weights stay one tensor
            finally:
                if settings != self._settings():  # else it was so before
                    self.train()
                    self.put(trained)

        session.patches.set(strategy, "lightning_module_state_dict", evaluated)

    def __bool__(self) -> bool:
        return bool(self._held)

    def _settings(self) -> list[str]:
        """What the groups hold beside parameters, the mode among it."""
        groups = [group for o in self._held for group in o.param_groups]
        return [repr({k: v for k, v in group.items() if k != "params"}) for group in groups]

    def train(self) -> None:
        """The weights that gradients are taken at."""
        for optimizer in self._held:
            optimizer.train()

    def evaluate(self) -> None:
        """The weights that are validated."""
        for optimizer in self._held:
            optimizer.eval()

    def weights(self) -> dict[str, Tensor]:
        """Copies of the weights that these optimizers step, by name."""
        return {name: p.detach().clone() for name, p in self._weights.items()}

    @torch.no_grad()
    def put(self, weights: dict[str, Tensor]) -> None:
        """Take over what :meth:`weights` gave."""
        for name, w in weights.items():
            self._weights[name].copy_(w)


def has_modes(optimizer: Optimizer) -> bool:
    """Whether it has ``train()`` and ``eval()``."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
