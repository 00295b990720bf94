"""What two processes run of loaders with their own state: ``python -m tests.core.stream_jobs DIRECTORY``."""

import importlib.util
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_eff import ExactResume
from tests.core.streams import Rows, Stream, litdatas, nodes
from tests.core.test_loaders import Recorder
from tests.models import trainer


class OnRank(Recorder):
    """Makes its loader when ranks are known."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def train_dataloader(self) -> Any:
        return self.make(self.global_rank)


class Saves(pl.Callback):
    """Saves a checkpoint after each batch, under the number of batches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.fit_loop.total_batch_idx + 1}.ckpt")


def run(make: Any, *callbacks: pl.Callback, resume: Path | None = None) -> OnRank:
    pl.seed_everything(3 if resume is None else 44, verbose=False)
    net = OnRank(make)
    settings: dict[str, Any] = {"strategy": "ddp", "devices": 2, "accumulate_grad_batches": 2, "max_steps": 5}
    t = trainer(ExactResume(), *callbacks, max_epochs=-1, enable_checkpointing=bool(callbacks), **settings)
    t.fit(net, ckpt_path=resume)
    return net


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    kinds: dict[str, Any] = {
        "nodes": lambda rank: nodes(sampler=DistributedSampler(Rows(), 2, rank), threads=1, ahead=2),
        "stream": lambda rank: StatefulDataLoader(Stream(Rows(), rank), 4),
    }
    if importlib.util.find_spec("litdata"):
        folder = root / os.environ["RANK"]  # each rank writes all, and reads its part
        folder.mkdir()
        made = litdatas(folder, Rows())
        kinds["litdata"] = lambda rank: made()
    result = {}
    for kind, make in kinds.items():
        folder = root / kind
        whole = run(make, Saves(folder))
        same = True
        for trained in (1, 2, 3, 5):
            resumed = run(make, resume=folder / f"{trained}.ckpt")
            same &= len(resumed.seen) == len(whole.seen) - trained and torch.equal(whole.weight, resumed.weight)
            same &= all(map(torch.equal, whole.seen[trained:], resumed.seen))
        own = {"same": same, "samples": torch.cat(whole.seen[:2])[:, 0].tolist(), "weights": whole.weight.tolist()}
        every: list[Any] = [None, None]
        torch.distributed.all_gather_object(every, own)
        result[kind] = every
    if torch.distributed.get_rank() == 0:
        (root / "result.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
