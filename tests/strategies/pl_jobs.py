"""What the processes of ``test_pytorch_lightning.py`` run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_eff import CompressedDDPStrategy, ExactResume, FP8Precision, HybridParallelStrategy
from lightning_eff._core._lightning.names import package_of
from tests import runs
from tests.models import flat
from tests.pl import runs as other

STRATEGIES: dict[str, Callable[[], Any]] = {
    "by name": lambda: "ddp_onebit",
    "compressed": lambda: CompressedDDPStrategy("onebit", start_step=1),
    "hybrid": lambda: HybridParallelStrategy(min_num_params=1),
}


def under_both(directory: str) -> dict[str, Any]:
    """Whether runs are the same under both names, by strategy, and one of them also where it is resumed."""
    found: dict[str, Any] = {}
    settings: dict[str, Any] = {"devices": 2, "max_steps": 4, "samples": 40, "gradient_clip_val": 0.05}
    for name, make in STRATEGIES.items():
        nets, packages = [], []
        for of in (runs, other):
            net, t = of.fit("tiny_gpt", list, strategy=make(), **settings)
            nets.append(flat(net))
            packages.append(package_of(t.strategy))
        found[name] = [torch.equal(*nets), packages]
    save, path = other.SaveBatches(Path(directory), [3]), Path(directory, "batch=3.ckpt")
    ends: list[torch.Tensor] = []
    for more in ({"callbacks": [save]}, {"resume": path}):
        settings["strategy"] = CompressedDDPStrategy("onebit", start_step=1)
        settings["plugins"] = [FP8Precision(backend="emulated", skip=())]
        ends.append(flat(other.fit("tiny_gpt", lambda: [ExactResume()], **more, **settings)[0]))
    found["resumed"] = torch.equal(*ends)
    return found
