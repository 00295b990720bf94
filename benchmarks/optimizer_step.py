"""How long a step of each matrix optimizer takes, beside the network's own step, in one run.

    python -m benchmarks.optimizer_step [--widths 48 128] [--rounds 20] [--out benchmarks/results/optimizer_step.json]

Four blocks of a GPT of each width, one thread. All arms take turns, one step each a round, so that what else the machine
does meets all alike; told are medians, quartiles and means in milliseconds, and each arm's ratio to ``torch.optim.Muon`` by
round. Means alone hold SOAP's refreshes, which are one step in ten: give it a multiple of ten rounds.

Muon's products are in float32 on a CPU and those of ``torch.optim.Muon`` in bfloat16: where the processor multiplies bfloat16
natively, several times as many of them a second, the ratio says more of that than of either optimizer. How busy the machine
was is in the results as ``load``, before and after.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from examples.gpt.module import GPT
from lightning_eff.monitor.machine import fingerprint
from lightning_eff.optim.optimizers.muon import Muon
from lightning_eff.optim.optimizers.soap import SOAP

ROOT = Path(__file__).resolve().parent.parent


def arms(width: int) -> dict[str, Callable[[], Any]]:
    """A step of each optimizer on the gradients of one batch, and the network's own forward and backward pass."""

    def net() -> GPT:
        torch.manual_seed(0)
        heads = max(width // 32, 2)
        module = GPT(dim=width, num_layers=4, num_heads=heads, block_size=128, warmup_steps=5, num_samples=0)
        module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
        return module

    tokens = torch.randint(0, 256, (16, 129))

    def model_step(module: GPT) -> None:
        logits = module(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()

    def stepping(make: Callable[[GPT], torch.optim.Optimizer]) -> Callable[[], Any]:
        module = net()
        model_step(module)
        return make(module).step

    def matrices(module: GPT) -> list[torch.Tensor]:
        held = Muon(module)._layouts
        return [p for p in module.parameters() if p in held]

    alone = net()
    return {
        "the network's own step": lambda: model_step(alone),
        "AdamW, fused": stepping(lambda m: torch.optim.AdamW(m.parameters(), fused=True)),
        "torch.optim.Muon (matrices alone)": stepping(lambda m: torch.optim.Muon(matrices(m))),
        "Muon (AdamW with it)": stepping(lambda m: Muon(m)),
        "SOAP": stepping(lambda m: SOAP(m)),
        "Muon, neuron normalization": stepping(lambda m: Muon(m, normalization="neuron")),
        "Muon, dtype='bfloat16'": stepping(lambda m: Muon(m, dtype="bfloat16")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[48, 128])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"machine": fingerprint(1), "rounds": options.rounds, "milliseconds": {}}
    found["load"] = [os.getloadavg()]
    found["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    for width in options.widths:
        steps = arms(width)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for round_ in range(options.rounds + 2):
            for name, step in steps.items():
                begin = time.perf_counter()
                step()
                if round_ >= 2:  # the first ones make states and warm caches
                    times[name].append(1e3 * (time.perf_counter() - begin))
        torchs = times["torch.optim.Muon (matrices alone)"]
        rows = {}
        for name, taken in times.items():
            low, median, high = statistics.quantiles(taken, n=4)
            ratio = statistics.median(a / b for a, b in zip(taken, torchs, strict=True))
            mean = statistics.fmean(taken)
            rows[name] = {"quartiles": [low, median, high], "mean": mean, "of_torch_muon": ratio}
            print(
                f"width {width:4}  {name:36} {median:8.2f} ms ({low:.2f} to {high:.2f}, mean {mean:.2f})"
                f"  {ratio:6.3f} of torch's Muon",
                flush=True,
            )
        found["milliseconds"][str(width)] = rows
    found["load"].append(os.getloadavg())
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
