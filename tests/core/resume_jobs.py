"""What two processes resume, hook by hook: ``python -m tests.core.resume_jobs DIRECTORY``."""

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.core.hook_traces import SavesIn, Traced, model_checkpoint, resumed_differences


class InProcesses(Traced):
    """What its hooks change is the same on all ranks; what they log is each rank's own."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trace.add("module", "on_train_batch_end", [outputs, batch, batch_idx])
        self.target.weight.data.lerp_(self.net[0].weight.detach().mean(0, keepdim=True), 0.1)
        self.log("held", batch[0].sum(), on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.trace.add("module", "validation_step", [batch, batch_idx])
        loss: Tensor = (self.net(batch[0])[:, 0] - batch[1]).square().mean()
        self.largest(loss)
        self.log("val_loss", loss, sync_dist=True)
        self.log("own_loss", loss)

    def on_validation_end(self) -> None:
        self.trace.add("module", "on_validation_end")
        self.target.bias.data.add_(0.01)

    def on_train_epoch_start(self) -> None:
        self.trace.add("module", "on_train_epoch_start")
        self.target.weight.data.add_(0.01)


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    settings: dict[str, Any] = {"strategy": "ddp", "devices": 2, "make": InProcesses, "max_epochs": 2, "few": True}
    found: dict[str, Any] = {}
    for name, savers in {
        "steps": lambda folder: model_checkpoint(folder, every_n_train_steps=1),
        "by_hand": lambda folder: [SavesIn(folder, "on_validation_epoch_end")],
    }.items():
        (root / name).mkdir(exist_ok=True)
        found[name] = resumed_differences(root / name, savers, accumulate_grad_batches=2, **settings)
    every: list[Any] = [None, None]
    torch.distributed.all_gather_object(every, {name: repr(one)[:2000] for name, one in found.items()})
    if torch.distributed.get_rank() == 0:
        (root / "result.json").write_text(json.dumps(every))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
