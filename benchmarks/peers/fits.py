"""A Trainer's fit whose steps can be called one by one, so that two fits take turns.

Each fit runs in a thread of its own and waits after every batch. Only one thread works at a time.
"""

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from benchmarks.peers.case import Arm
from benchmarks.peers.modules import of_optimizer

STEPS = 20_000  #: of the run that a fit believes in; it is ended long before
__all__ = ["Fit", "fit_arm"]


class _Ended(Exception):
    """Raised in the fit's thread to end it."""


class _Same(Dataset[Any]):
    def __init__(self, batch: Any, length: int) -> None:
        self.batch, self.length = batch, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.batch


class _Turn:
    """What a fit's thread and its caller share."""

    def __init__(self) -> None:
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.scope: contextlib.AbstractContextManager[Any] | None = None
        self.entered = False
        self.ended = False
        self.error: BaseException | None = None

    def wait(self) -> None:
        """Called in the fit's thread between batches."""
        if self.entered and self.scope is not None:
            self.scope.__exit__(None, None, None)
            self.scope, self.entered = None, False
        self.done.release()
        self.go.acquire()
        if self.ended:
            raise _Ended
        if self.scope is not None:
            self.scope.__enter__()
            self.entered = True


class _Pause(Callback):
    def __init__(self, turn: _Turn, batches: int) -> None:
        self.turn, self.batches, self.count = turn, batches, 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.count += 1
        if self.count % self.batches == 0:
            self.turn.wait()


class Fit:
    """One call is one batch of a fit, or ``batches`` of them.

    Args:
        module: to train.
        batch: of every step.
        callbacks: of the Trainer.
        batches: in one call, where steps differ from each other in a cycle.
        steps: that the run is said to have.
        options: further arguments of the Trainer.
    """

    def __init__(
        self,
        module: LightningModule,
        batch: Any,
        callbacks: Sequence[Callback] = (),
        batches: int = 1,
        steps: int = STEPS,
        **options: Any,
    ) -> None:
        turn = self._turn = _Turn()
        self.module = module
        self.trainer = trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            callbacks=[*callbacks, _Pause(turn, batches)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        loader = DataLoader(_Same(batch, steps), batch_size=None)

        def work() -> None:
            torch.set_num_threads(1)  # a thread begins with the library's own number
            try:
                turn.go.acquire()
                if not turn.ended:
                    trainer.fit(module, loader)
            except _Ended:
                pass
            except BaseException as error:
                turn.error = error
            turn.ended = True
            turn.done.release()

        threading.Thread(target=work, daemon=True).start()
        self._finish = weakref.finalize(self, _end, turn)

    def __call__(self) -> None:
        if not self._turn.ended:
            self._turn.go.release()
            self._turn.done.acquire()
        if self._turn.ended:
            raise RuntimeError("The fit has ended. Its steps cannot be called any more.") from self._turn.error

    def within(self, scope: contextlib.AbstractContextManager[Any]) -> None:
        """Run one call inside ``scope``, which is entered and left in the fit's thread."""
        self._turn.scope = scope
        self()

    def close(self) -> None:
        """End the fit."""
        self._finish()


def _end(turn: _Turn) -> None:
    if not turn.ended:
        turn.ended = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # techniques say that the run ended early
            turn.go.release()
            turn.done.acquire()


def fit_arm(
    module: LightningModule,
    batch: Any,
    callbacks: Sequence[Callback] = (),
    state: Callable[[Fit], Iterable[torch.Tensor]] | None = None,
    **options: Any,
) -> Arm:
    """An arm whose step is one batch of a fit.

    Args:
        module: to train.
        batch: of every step.
        callbacks: of the Trainer.
        state: lists what the arm keeps beside the weights; by default the optimizers' states.
        options: further arguments of the Trainer.
    """
    fit = Fit(module, batch, callbacks, **options)
    return Arm(fit, lambda: (state or optimizer_state)(fit))


def optimizer_state(fit: Fit) -> list[torch.Tensor]:
    """The tensors in the states of the fit's optimizers."""
    return [value for optimizer in fit.trainer.optimizers for value in of_optimizer(optimizer)]
