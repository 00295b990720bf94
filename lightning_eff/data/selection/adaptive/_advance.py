"""Advance the module's own learning rate schedulers by effective steps."""

import math
from typing import Any

from lightning_eff._core.session import Session


class Advance:
    """Counts effective steps, and advances the module's schedulers by them.

    Lightning advances a scheduler once per step (or epoch, or every few of them). If a step counts for more than one, this
    class advances the scheduler again. It never holds one back. A run ends once its schedulers have reached the end of its
    budget.

    Attributes:
        steps: the effective steps so far.
        epochs: the effective epochs so far.
    """

    def __init__(self) -> None:
        self.steps = self.epochs = 0.0
        self._made = 0
        self._extra: list[int] = []

    def after(self, session: Session, gain: float, *, epoch_over: bool) -> None:
        """Count an optimizer step as ``gain`` effective steps."""
        trainer = session.trainer
        self._made += 1
        self.steps += gain
        batches = trainer.num_training_batches
        if math.isfinite(batches):
            self.epochs += gain / max(1, math.ceil(batches / trainer.accumulate_grad_batches))
        configs = trainer.lr_scheduler_configs
        self._extra += [0] * (len(configs) - len(self._extra))
        moved = False
        for at, config in enumerate(configs):
            if config.reduce_on_plateau:
                continue
            by_step = config.interval == "step"
            if not by_step and not epoch_over:
                continue
            made = self._made if by_step else trainer.current_epoch + 1
            counts = self.steps if by_step else self.epochs
            end = trainer.max_steps if by_step else trainer.max_epochs or -1
            if end > 0:
                counts = min(counts, end)
            due = math.floor(counts / config.frequency + 1e-9) - made // config.frequency - self._extra[at]
            for _ in range(due):
                session.module.lr_scheduler_step(config.scheduler, None)
            self._extra[at] += max(0, due)
            moved = moved or self._extra[at] > 0
        if moved and self._at_end(session):
            trainer.should_stop = True

    def _at_end(self, session: Session) -> bool:
        trainer = session.trainer
        by_steps = trainer.max_steps > 0 and self.steps >= trainer.max_steps - 1e-9
        return by_steps or ((trainer.max_epochs or -1) > 0 and self.epochs >= (trainer.max_epochs or 0) - 1e-9)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "epochs": self.epochs, "made": self._made, "extra": list(self._extra)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.epochs, self._made = state["steps"], state["epochs"], state["made"]
        self._extra = list(state["extra"])
