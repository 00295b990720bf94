"""Messages between processes and waits of the host for its device in one training step, by layout: counted, not timed.

    python benchmarks/messages.py [--as after] [--into benchmarks/results/messages.json]

Counted on CPU processes (gloo), on every rank; the largest count of a rank is reported. A collective is one call of
torch.distributed, also one that FSDP2, DTensor, DDP or a pipeline's schedule makes; sends and receives of hidden states are
counted by themselves. The host waits for its device where a tensor is read (``item``, ``tolist``, ``cpu``, ``bool``). Tensors
that were made on the host, and what was computed from them alone, cost nothing to read and are not counted.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parent.parent))

import lightning_eff
from benchmarks.machine import described
from examples.gpt.data import StdlibText
from examples.gpt.module import GPT
from lightning_eff.strategies.hybrid_parallel import HybridParallelStrategy

ROOT = Path(__file__).parent.parent

#: Layout -> number of processes, and the strategy's arguments.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "data 2, replicas": (2, {"shard": False}),
    "data 2, shards": (2, {"min_num_params": 0}),
    "tensor 2": (2, {"tensor_parallel_size": 2}),
    "pipeline 2": (2, {"pipeline_parallel_size": 2, "num_microbatches": 8}),
    "pipeline 2 x data 2, replicas": (4, {"pipeline_parallel_size": 2, "num_microbatches": 8, "shard": False}),
    "pipeline 2 x data 2, shards": (4, {"pipeline_parallel_size": 2, "num_microbatches": 8}),
    "pipeline 2 x tensor 2": (4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "num_microbatches": 8}),
}
_READS = {Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.nonzero}
_READS |= {Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__}
_TORCH, _PACKAGE = (f"{Path(module.__file__ or '').parent}{os.sep}" for module in (torch, lightning_eff))
_POINT_TO_POINT = ("send", "recv_", "recv_any_source_")
_NONE = ("barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd")
_GENERATORS = "_core/rng.py"  # whose states are on the host


class Reads(TorchFunctionMode):
    """Counts reads of tensors that would lie on the device.

    Attributes:
        places: file and function of this package that reads -> how often.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_host = all(getattr(x, "_on_host", False) for x in given) and kwargs.get("device") is None
        if func in _READS and given and not on_host:
            place = _place(sys._getframe(1))
            if place is not None and not place.startswith(_GENERATORS):
                self.places[place] += 1
        result = func(*args, **kwargs)
        if func is Tensor.cpu and result is args[0]:
            result = result.view_as(result)  # the copy that a device's tensor would have
        if on_host or func is Tensor.cpu:
            for x in tree_leaves(result):
                if isinstance(x, Tensor) and not any(x is one for one in given):
                    x._on_host = True  # pyright: ignore[reportAttributeAccessIssue]
        return result


def _place(frame: FrameType | None) -> str | None:
    """The innermost function of this package that runs, unless torch or Lightning read by themselves below it."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(_PACKAGE):
        return None
    return f"{frame.f_code.co_filename.removeprefix(_PACKAGE)}: {frame.f_code.co_name}"


class Messages(TorchDispatchMode):
    """Counts collectives, what they carry, and sends and receives."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.bytes = 0
        self.point_to_point = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2]
            if name in _POINT_TO_POINT:
                self.point_to_point += 1
            elif name not in _NONE:
                self.collectives[name] += 1
                self.bytes += sum(x.nbytes for x in tree_leaves(args[:1]) if isinstance(x, Tensor))
        return func(*args, **(kwargs or {}))


class OneStep(Callback):
    """What the last of a few steps did."""

    def __init__(self, steps: int) -> None:
        self.steps, self.reads, self.messages = steps, Reads(), Messages()
        self.found: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self.steps - 1:
            self.reads.places.clear()
            self.messages.collectives.clear()
            self.messages.bytes = self.messages.point_to_point = 0

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self.steps:
            self.found = {
                "collectives": sum(self.messages.collectives.values()),
                "by_kind": dict(self.messages.collectives),
                "collective_bytes": self.messages.bytes,
                "sends_and_receives": self.messages.point_to_point,
                "waits_of_the_host": sum(self.reads.places.values()),
                "by_place": dict(self.reads.places),
            }


def counted(arguments: dict[str, Any], *, steps: int = 4) -> dict[str, Any]:
    """The counts of the rank that has most of them; on all ranks together."""
    seed_everything(0, verbose=False)
    one = OneStep(steps)
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"]),
        strategy=HybridParallelStrategy(failure_timeout=None, **arguments),
        max_steps=steps,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[one],
    )
    model = GPT(dim=32, num_layers=4, num_heads=2, block_size=32, num_samples=0)
    with one.reads, one.messages:
        trainer.fit(model, StdlibText(block_size=32, batch_size=8, max_bytes=200_000))
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, one.found)
    found = dict(max(told, key=lambda counts: counts["waits_of_the_host"]))
    most = max(told, key=lambda counts: counts["collectives"])
    return found | {name: most[name] for name in ("collectives", "by_kind", "collective_bytes", "sends_and_receives")}


def work(layouts: list[str], out: Path) -> None:
    """In each process."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    found = {name: counted(LAYOUTS[name][1]) for name in layouts}
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def start(processes: int, layouts: list[str], out: Path) -> dict[str, Any]:
    """Start the processes as torchrun would."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    shared = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "GROUP_RANK": 0, "MASTER_PORT": port}
    shared |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "benchmark", "OMP_NUM_THREADS": 1}
    running = []
    for rank in range(processes):
        env = {**os.environ, **{k: str(v) for k, v in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}}
        command = [sys.executable, __file__, "--layouts", ";".join(layouts), "--into", str(out)]
        running.append(subprocess.Popen(command, env=env, stdout=None if rank == 0 else subprocess.DEVNULL))
    codes = [process.wait() for process in running]
    if any(codes):
        sys.exit(f"processes ended with {codes}")
    found = json.loads(out.read_text())
    out.unlink()
    return found


def table(result: dict[str, Any]) -> str:
    """The counts of "before" and "after", as the page on parallelism shows them."""
    rows = [
        "| layout | collectives per step | sends and receives | waits of the host, before | waits of the host, now |",
        "|---|---|---|---|---|",
    ]
    for name, after in result["after"].items():
        before = result["before"][name]
        collectives = f"{before['collectives']} → {after['collectives']}"
        waits = f"{before['waits_of_the_host']} | {after['waits_of_the_host']}"
        rows.append(f"| {name} | {collectives} | {after['sends_and_receives']} | {waits} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--as", dest="name", default="after", help="under which name the counts are kept")
    parser.add_argument("--layouts", default=";".join(LAYOUTS), help="separated by semicolons")
    parser.add_argument("--into", type=Path, help="JSON file, in which other names' counts stay")
    args = parser.parse_args()
    layouts = args.layouts.split(";")
    if "RANK" in os.environ:
        work(layouts, args.into)
        return
    found: dict[str, Any] = {}
    for processes in sorted({LAYOUTS[name][0] for name in layouts}):
        alike = [name for name in layouts if LAYOUTS[name][0] == processes]
        found |= start(processes, alike, ROOT / f"messages_{os.getpid()}.json")
    kept = json.loads(args.into.read_text()) if args.into and args.into.is_file() else {"benchmark": "messages"}
    kept |= {args.name: found, "machine": described()}
    text = json.dumps(kept, indent=2)
    print(text)
    if args.into:
        args.into.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
