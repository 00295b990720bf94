"""What two processes run of other targets and of fewer tokens: ``python -m tests.core.ways_jobs DIRECTORY``."""

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_eff._core._targets.calls import mixed
from lightning_eff._core.losses import LossNotVisible
from tests.core.test_targets import OtherTargets
from tests.core.test_tokens import Net, SomeTokens, T, Windows, ids
from tests.models import TinyGPT, flat, loader, trainer
from tests.runs import differences, final_state, fit

DDP: dict[str, Any] = {"strategy": "ddp", "devices": 2, "samples": 40, "max_steps": 6, "accumulate_grad_batches": 2}


class OnOneRank(TinyGPT):
    """Its loss can be seen on the first rank alone."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.global_rank == 0:
            return super().training_step(batch, batch_idx)
        return F.nll_loss(self(batch["input_ids"]).log_softmax(-1)[:, 0], batch["labels"][:, 0] * 0 + 1) * 0 - (
            self(batch["input_ids"]).log_softmax(-1).gather(-1, batch["labels"].unsqueeze(-1)).mean()
        )


def build() -> list[Any]:
    weights = torch.tensor([0.1, 0.5, 0.7, 1.0])
    return [OtherTargets(mixed(weights, 1 - weights)), SomeTokens(9, first=1, per_sample=True)]


def later() -> None:
    """The third batch of rank 1 alone has blocks that cannot be given fewer tokens: that rank's error ends both."""
    short, rank = ids(length=4), int(os.environ["RANK"])
    batches = [short, short, ids(length=T) if rank else short, short]
    data = DataLoader(batches, batch_size=None)
    settings: dict[str, Any] = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    trainer(SomeTokens(2), max_steps=len(batches), **settings).fit(Net(Windows), data)


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if sys.argv[2:] == ["later"]:
        return later()
    root = Path(sys.argv[1])
    every: list[Any] = [None, None]
    net, t = fit("llama", build, directory=root / "whole", **DDP)
    whole = final_state(net, t)
    others = [torch.empty_like(flat(net)) for _ in range(2)]
    torch.distributed.all_gather(others, flat(net))
    resumed = final_state(*fit("llama", build, resume=next((root / "whole").glob("step=3*.ckpt")), **DDP))
    plain = final_state(*fit("llama", list, **DDP))
    chosen = [index.tolist() for technique in build()[1:] for _, index in _chosen(technique)]
    refused = ""
    try:
        torch.manual_seed(0)
        trainer(OtherTargets(), max_steps=2, strategy="ddp", devices=2).fit(OnOneRank(), loader("tiny_gpt", 16))
    except LossNotVisible as error:
        refused = str(error)
    found = {"differences": differences(whole, resumed), "acts": bool(differences(whole, plain)), "refused": refused}
    torch.distributed.all_gather_object(every, {**found, "chosen": chosen})
    if torch.distributed.get_rank() == 0:
        (root / "result.json").write_text(json.dumps({"alike": torch.equal(*others), "ranks": every}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _chosen(technique: SomeTokens) -> list[Any]:
    """What it chooses in a short run."""
    fit("llama", lambda: [technique], **{**DDP, "max_steps": 1})
    return technique.chosen


if __name__ == "__main__":
    main()
