"""Time, memory and largest batch of the techniques of ``lightning_eff.memory``, and the bytes per second of the kernels.

    python -m benchmarks.memory --out benchmarks/results/memory_gpu     GPT-2 124M and ViT-B/16, on a GPU
    python -m benchmarks.memory --tiny                                  the same in seconds, on a CPU

Each arm trains through a Trainer, and in turns with plain training, A B A B: a ratio is of two runs next to each other.
On a GPU, memory is that of CUDA's allocator, and the largest batch of each arm is looked for; on a CPU, memory is what
torch's allocator gave out during a step: what offloading holds waits in buffers of earlier steps, which are not counted.
An arm that fails is recorded, and the next one goes on. Results so far are written after every table. Where time on the
GPU is short, run parts: ``--model``, ``--arms`` and ``--skip`` choose them, each into files of its own.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory import show
from benchmarks.memory.arms import arms
from benchmarks.memory.kernels import bandwidths
from benchmarks.memory.measure import CUDA, compare, largest_batch, quiet
from benchmarks.memory.models import tasks


def parse(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="small models and few steps")
    parser.add_argument("--model", nargs="+", choices=["gpt2", "vit"], default=["gpt2", "vit"])
    parser.add_argument(
        "--arms", nargs="+", choices=list(arms()), default=list(arms()), metavar="ARM", help=", ".join(arms())
    )
    parser.add_argument("--batch-sizes", type=int, nargs="+", help="to be timed; 16 on a GPU, 2 on a CPU")
    parser.add_argument("--rounds", type=int, help="turns of each arm; 3, or 1 with --tiny")
    parser.add_argument("--steps", type=int, help="timed in a turn; 10, or 2 with --tiny")
    parser.add_argument("--precision", default="bf16-mixed" if CUDA else "32-true")
    parser.add_argument("--memory-gb", type=float, help="use no more of the GPU, as if it were a smaller one")
    parser.add_argument("--skip", nargs="+", choices=["times", "limits", "kernels"], default=[])
    parser.add_argument("--out", type=Path, help="of the files, without the ending: .json, .txt and .png are written")
    args = parser.parse_args(given)
    args.rounds = args.rounds or (1 if args.tiny else 3)
    args.steps = args.steps or (2 if args.tiny else 10)
    args.batch_sizes = args.batch_sizes or ([16] if CUDA and not args.tiny else [2])
    return args


@quiet()
def main(given: list[str] | None = None) -> dict[str, Any]:
    """Run what the command line says; the result, as it is written."""
    args = parse(given)
    if CUDA and args.memory_gb:
        share = args.memory_gb * 1e9 / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0))
    began = time.perf_counter()

    def tell(text: str) -> None:
        print(f"{time.perf_counter() - began:7.0f} s  {text}", flush=True)

    settings = {key: value for key, value in vars(args).items() if key != "out"}
    found: dict[str, Any] = {"benchmark": "memory", "settings": settings, **show.fingerprint()}
    found |= {"times": [], "limits": [], "kernels": []}
    chosen = [arm for name, arm in arms(tiny=args.tiny).items() if name in args.arms]
    if "kernels" not in args.skip:
        found["kernels"] = bandwidths(2**16 if args.tiny else 2**26 if CUDA else 2**22, args.rounds + 2, tell)
        write(found, args.out)
    for name, task in tasks(tiny=args.tiny).items():
        if name not in args.model:
            continue
        for batch_size in args.batch_sizes if "times" not in args.skip else ():
            found["times"] += compare(task, chosen, batch_size, args.rounds, args.steps, args.precision, tell)
            write(found, args.out)
        start = 1 if args.tiny else 16
        for arm in chosen if CUDA and "limits" not in args.skip else ():
            found["limits"].append(largest_batch(task, arm, start, args.precision, tell))
            if arm.name == "plain":
                start = found["limits"][-1].get("largest_batch", start)
            write(found, args.out)
    print("\n" + text_of(found))
    return found


def text_of(found: dict[str, Any]) -> str:
    """All tables."""
    parts = []
    for key, view in (("times", show.of_arms), ("limits", show.of_limits), ("kernels", show.of_kernels)):
        if found[key]:
            parts.append(view(found[key]))
    return "\n\n".join(parts)


def write(found: dict[str, Any], out: Path | None) -> None:
    """JSON, text and picture, as far as there is something."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    out.with_suffix(".txt").write_text(text_of(found) + "\n")
    try:
        show.draw(found["times"], out.with_suffix(".png"))
    except ModuleNotFoundError as error:
        print(f"No picture: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
