"""A resumed run calls the hooks that the undisturbed one would: order, arguments, rates, random state, logged values."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests import processes
from tests.core.hook_traces import SavesIn, Trace, Traced, model_checkpoint, resumed_differences

pytestmark = pytest.mark.filterwarnings(
    "ignore:ReduceLROnPlateau conditioned", "ignore:Checkpoint directory", "ignore:The dirpath has changed"
)

#: Checkpoint schedules: ModelCheckpoint's settings, and the Trainer's.
SCHEDULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "steps": ({"every_n_train_steps": 1}, {}),
    "epochs": ({"every_n_epochs": 1, "save_on_train_epoch_end": True}, {}),
    "validation": ({"every_n_epochs": 1, "save_on_train_epoch_end": False}, {}),
    "monitored": ({"monitor": "val_loss"}, {}),
    "within_epochs": ({"every_n_epochs": 1}, {"val_check_interval": 2}),
    "steps_and_validation_within": ({"every_n_train_steps": 1}, {"val_check_interval": 2}),
    "every_second_epoch": ({"every_n_train_steps": 2}, {"check_val_every_n_epoch": 2, "max_epochs": 4}),
    "every_second_validation": ({"every_n_epochs": 1}, {"check_val_every_n_epoch": 2, "max_epochs": 4}),
    "windows": ({"every_n_train_steps": 1}, {"accumulate_grad_batches": 4}),
    "no_validation": ({"every_n_train_steps": 1}, {"validates": False}),
    "epochs_without_validation": ({"every_n_epochs": 1}, {"validates": False}),
    "last": ({"every_n_train_steps": 3, "save_last": True, "save_top_k": 1}, {}),
    "max_steps": ({"every_n_train_steps": 1}, {"max_epochs": -1, "max_steps": 9}),
    "max_steps_validation": ({"every_n_epochs": 1}, {"max_epochs": -1, "max_steps": 9, "val_check_interval": 3}),
    "validation_by_steps": ({"every_n_train_steps": 2}, {"check_val_every_n_epoch": None, "val_check_interval": 4}),
    "plateau_by_steps": ({"every_n_train_steps": 1}, {"scheduler": "plateau_step:loss", "accumulate_grad_batches": 2}),
    "plateau_of_training": ({"every_n_train_steps": 1}, {"scheduler": "plateau:loss", "validates": False}),
    "cosine": ({"every_n_train_steps": 1}, {"scheduler": "cosine", "max_epochs": 2}),
    "limited": ({"every_n_train_steps": 1}, {"limit_train_batches": 4, "limit_val_batches": 1}),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_of_checkpoints(schedule: str, tmp_path: Path) -> None:
    saver, settings = SCHEDULES[schedule]
    found = resumed_differences(tmp_path, lambda folder: model_checkpoint(folder, **saver), **settings)
    assert found == {}, next(iter(found.items()))


class ByHand(Traced):
    """Two optimizers that are stepped by hand, with schedulers of which one is stepped by hand too."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        first, second = cast("list[Any]", self.optimizers())
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        second.step()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end({"loss": 0.5}, batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        cast("Any", self.lr_schedulers()).step(self.trainer.callback_metrics["val_loss"])

    def configure_optimizers(self) -> Any:
        made = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.net[0], self.net[2])]
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(made[1], patience=0, factor=0.7, threshold=0.05)
        return made, [plateau]


def test_several_optimizers_stepped_by_hand(tmp_path: Path) -> None:
    found = resumed_differences(
        tmp_path, lambda folder: [SavesIn(folder, "on_train_batch_end")], make=ByHand, max_epochs=2
    )
    assert found == {}, next(iter(found.items()))


HOOKS = (
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_epoch_start",
    "on_validation_end",
    "on_validation_epoch_end",
)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_callback_that_saves_by_hand(hook: str, tmp_path: Path) -> None:
    """Its place is between others, so hooks of callbacks behind it are still to be called, and then the module's."""
    found = resumed_differences(tmp_path, lambda folder: [SavesIn(folder, hook)], val_check_interval=3, max_epochs=2)
    assert found == {}, next(iter(found.items()))


def test_two_processes() -> None:
    """Each rank has logged values, batches and sums of its own, within accumulation windows too."""
    assert processes.launch("tests.core.resume_jobs") == [{"steps": "{}", "by_hand": "{}"}] * 2
