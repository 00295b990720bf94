"""Calls ``train()`` and ``eval()`` of optimizers that train and evaluate at different weights, such as schedule-free ones."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_eff._core._needs.offers import is_plain
from lightning_eff._core.session import Session
from lightning_eff._core.technique import OtherWeights


class Modes:
    """Calls ``train()`` and ``eval()`` of optimizers that have both, as their libraries require.

    The module has the weights of ``eval()`` during validation, in every checkpoint's ``state_dict``, and after the fit. After
    saving, the weights of ``train()`` return bit for bit.

    Args:
        session: the run.
        optimizers: the optimizers, with or without the two methods.

    Raises:
        ValueError: with a technique that shows other weights, or under a strategy that shards.
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
                    f"ReplaceOptimizer and {type(other).__name__} cannot train together: {who} evaluates at other weights,"
                    f" and both replace the weights for validation. Remove {type(other).__name__} from the"
                    " trainer's callbacks, or use another optimizer."
                )
        strategy = session.trainer.strategy
        if not is_plain(strategy):
            raise ValueError(
                f"ReplaceOptimizer: {who} evaluates at other weights, which {type(strategy).__name__} divides. Use a single"
                " device, DDP, or another optimizer."
            )
        original = strategy.lightning_module_state_dict

        def evaluated() -> dict[str, Any]:
            trained, settings = self.weights(), self._settings()
            self.evaluate()
            try:
                return deepcopy(original())  # tied weights stay one tensor
            finally:
                if settings != self._settings():  # otherwise nothing changed
                    self.train()
                    self.put(trained)

        session.patches.set(strategy, "lightning_module_state_dict", evaluated)

    def __bool__(self) -> bool:
        return bool(self._held)

    def _settings(self) -> list[str]:
        """Return the groups' settings, including the mode."""
        groups = [group for o in self._held for group in o.param_groups]
        return [repr({k: v for k, v in group.items() if k != "params"}) for group in groups]

    def train(self) -> None:
        """Switch to the weights for gradients."""
        for optimizer in self._held:
            optimizer.train()

    def evaluate(self) -> None:
        """Switch to the weights for validation."""
        for optimizer in self._held:
            optimizer.eval()

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the weights that these optimizers step, by name."""
        return {name: p.detach().clone() for name, p in self._weights.items()}

    @torch.no_grad()
    def put(self, weights: dict[str, Tensor]) -> None:
        """Restore the copies from :meth:`weights`."""
        for name, w in weights.items():
            self._weights[name].copy_(w)


def has_modes(optimizer: Optimizer) -> bool:
    """Whether it has ``train()`` and ``eval()``."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
