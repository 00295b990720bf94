"""What each of the processes that ``tests.ddp.launch`` starts runs: ``python -m tests.ddp_jobs DIRECTORY JOB NAME ...``."""

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.cases import CASES
from tests.models import flat
from tests.runs import MODES, NUM_STEPS, checkpoints, differences, final_state, fit

DDP: dict[str, Any] = {"strategy": "ddp", "devices": 2, "samples": 40}


def _same_on_all_ranks(vector: torch.Tensor) -> bool:
    others = [torch.empty_like(vector) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(others, vector)
    return all(torch.equal(vector, other) for other in others)


def resume(name: str, root: Path) -> dict[str, Any]:
    """Resume from every step under DDP; what differs, and whether the ranks end alike."""
    case = CASES[name]
    directory = root / name

    def build() -> list[Any]:
        return [case.active()]

    net, t = fit(case.model, build, directory=directory, **DDP)
    whole = final_state(net, t)
    alike = _same_on_all_ranks(flat(net))
    torch.distributed.barrier()
    saved = checkpoints(directory)
    found: dict[str, list[str]] = {}
    for path in saved:
        names = differences(whole, final_state(*fit(case.model, build, resume=path, **DDP)))
        if names:
            found[path.stem] = names
    every: list[Any] = [None, None]
    torch.distributed.all_gather_object(every, found)
    return {"differences": every, "alike": alike, "checkpoints": len(saved), "expected": NUM_STEPS}


def modes(name: str, root: Path) -> dict[str, Any]:
    """Train under accumulation, clipping, bf16 and validation; whether ranks end alike and the weights moved."""
    case = CASES[name]
    found: dict[str, Any] = {}
    for mode, kwargs in MODES.items():
        net, t = fit(case.model, lambda: [case.active()], **{**DDP, **kwargs})
        vector = flat(net)
        found[mode] = {
            "alike": _same_on_all_ranks(vector),
            "finite": bool(vector.isfinite().all()),
            "steps": t.global_step,
        }
    return found


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    directory, job, *names = sys.argv[1:]
    root = Path(directory)
    result = {name: globals()[job](name, root) for name in names}
    if torch.distributed.get_rank() == 0:
        (root / "result.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
