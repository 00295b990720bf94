"""Starts the ranks of :func:`tests.processes.start` as forks of one process that has imported what all of them need.

    python -m tests.forked PORT WORLD_SIZE MODULE DIRECTORY ARGUMENT ...

Importing torch, Lightning and transformers takes seconds of a core, which forks share. Nothing may start a thread before
the fork, so nothing is computed here. Forks have one hash seed: whether ranks agree on the order of a set is for ranks
that are started one by one to show.
"""

import importlib
import json
import os
import random
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

from tests.processes import environment

SHARED = (
    "lightning_eff",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.parallel",
    "transformers",
    "tests.models",
    "tests.stacks",
)


def rank_of(rank: int, world_size: int, port: int, module: str, directory: str, arguments: list[str]) -> int:
    """Run ``module`` as this rank, in a fork; its exit code."""
    random.seed()  # a fork would have its siblings' numbers
    os.environ.update(environment(rank, world_size, port))
    out = os.open(Path(directory, f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.argv = [module, directory, *arguments]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main() -> None:
    port, size, module, directory, *arguments = sys.argv[1:]
    world_size, parent = int(size), os.getppid()
    for name in SHARED:
        importlib.import_module(name)
    ranks: dict[int, int] = {}
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            os._exit(rank_of(rank, world_size, int(port), module, directory, arguments))
        ranks[child] = rank
    codes = [0] * world_size
    while ranks:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            codes[ranks.pop(child)] = os.waitstatus_to_exitcode(status)
        elif os.getppid() != parent:  # whoever wanted the result is gone
            os.killpg(0, signal.SIGKILL)
        else:
            time.sleep(0.02)
    Path(directory, "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
