"""What two processes run of budget techniques: ``python -m tests.budget.budget_jobs DIRECTORY JOB``."""

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_eff import BatchSizeWarmup
from tests.models import TinyClassifier, flat, loader, trainer
from tests.runs import SaveBatches, differences, final_state, fit

DDP: dict[str, Any] = {"strategy": "ddp", "devices": 2, "samples": 80, "max_steps": 7}


def without_dropout(lr: float = 0.1, batch_norm: bool = False) -> TinyClassifier:
    """A classifier whose gradient of a batch does not depend on how the batch is cut."""
    pl.seed_everything(3, verbose=False)
    net = TinyClassifier(lr=lr, batch_norm=batch_norm)
    net.head[0].p = 0.0  # pyright: ignore[reportAttributeAccessIssue]
    return net


def _alike(vector: torch.Tensor) -> bool:
    others = [torch.empty_like(vector) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(others, vector)
    return all(torch.equal(vector, other) for other in others)


def _agreed(own: Any) -> list[Any]:
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, own)
    return every


def batch(root: Path) -> dict[str, Any]:
    """Train with batches that grow, and go on within a window; ends of both ways beside each other."""
    found: dict[str, Any] = {}
    ends = []
    for by in ("accumulation", "batch"):

        def build(by: Any = by) -> list[Any]:
            return [BatchSizeWarmup(1, 0.4, full=3, by=by)]

        net, t = fit("llama", build, callbacks=[SaveBatches(root / by, [8])], **DDP)
        whole = final_state(net, t)
        again = final_state(*fit("llama", build, resume=root / by / "batch=8.ckpt", **DDP))
        still = without_dropout()
        data = loader("classifier", 240, shuffle=False)
        trainer(*build(), strategy="ddp", devices=2, max_steps=7).fit(still, data)
        ends.append(flat(still))
        window = torch.load(root / by / "batch=8.ckpt", weights_only=True)["lightning_eff"]["window"]
        found[by] = {"alike": _alike(flat(net)), "differences": _agreed(differences(whole, again)), "window": window}
    found["close"] = float((ends[0] - ends[1]).abs().max())
    return found


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    result = {"batch": batch}[sys.argv[2]](root)
    if torch.distributed.get_rank() == 0:
        (root / "result.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
