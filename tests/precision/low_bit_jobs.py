"""What two processes run of bits per layer: ``python -m tests.precision.low_bit_jobs DIRECTORY CHECKPOINTS``."""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from lightning_eff.precision.int8 import INT8Precision
from tests.models import flat
from tests.precision.plugin_contract import resuming
from tests.runs import checkpoints, differences, final_state, fit


def main(directory: Path) -> None:
    """One of two: ranks choose the same bits from all ranks' batches, and a resumed run ends as the undisturbed one."""

    def run(**settings: Any) -> tuple[Any, Any, INT8Precision]:
        plugin = INT8Precision("32-true", weight_bits="auto", activation_bits="auto", budget=3.5, interval=3)
        net, t = fit("tiny_gpt", resuming, plugins=[plugin], strategy="ddp", devices=2, accelerator="cpu", **settings)
        return net, t, plugin

    net, t, plugin = run(directory=directory)
    whole = final_state(net, t)
    assert plugin._mixed is not None
    found: list[Any] = [None, None]
    torch.distributed.all_gather_object(found, (plugin._mixed.state_dict(), plugin._mixed.bits, flat(net).tolist()))
    assert found[0] == found[1] and len(set(found[0][1]["weights"].values())) > 1
    torch.distributed.barrier()
    net, t, again = run(resume=checkpoints(directory)[6])
    assert differences(whole, final_state(net, t)) == []
    assert again._mixed is not None and again._mixed.bits == plugin._mixed.bits


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(Path(sys.argv[2]))
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1], "result.json").write_text("true")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
