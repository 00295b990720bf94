"""Starts the ranks of :func:`tests.processes.fork` as forks of one process that has imported what all of them need.

    python -m tests.forked

Each line of its input asks for one launch, in JSON; it answers with the number of the process group that runs it, and, once
that has ended, with the processor seconds that it took. Importing torch, Lightning and transformers takes seconds of a core,
which all launches of a test session share. Nothing may start a thread before a fork, so nothing is computed here. Forks
have one hash seed: whether ranks agree on the order of a set is for ranks that are started one by one to show.
"""

import gc
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
from typing import Any

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


def launch(world_size: int, port: int, module: str, directory: str, arguments: list[str]) -> None:
    """Run the ranks as forks of this process, and leave their exit codes in the directory."""
    ranks: dict[int, int] = {}
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            os._exit(rank_of(rank, world_size, port, module, directory, arguments))
        ranks[child] = rank
    codes = [0] * world_size
    while ranks:
        child, status = os.wait()
        codes[ranks.pop(child)] = os.waitstatus_to_exitcode(status)
    Path(directory, "codes.json").write_text(json.dumps(codes))


def serve(asked: dict[str, Any], parent: int) -> float:
    """Do what is asked for in a process group of its own, of which the first line of the answer tells.

    Returns:
        Processor seconds of all of it.
    """
    head = os.fork()
    if head == 0:
        os.setsid()
        os.environ.clear()
        os.environ.update(asked["env"])
        os.chdir(asked["cwd"])
        out = os.open(Path(asked["directory"], "head.log"), os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code = 1
        try:
            launch(asked["world_size"], asked["port"], asked["module"], asked["directory"], asked["arguments"])
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)
    print(head, flush=True)
    while True:
        ended, _, usage = os.wait4(head, os.WNOHANG)
        if ended:
            return usage.ru_utime + usage.ru_stime
        if os.getppid() != parent:  # whoever wanted the result is gone
            os.killpg(head, signal.SIGKILL)
        time.sleep(0.02)


def main() -> None:
    parent = os.getppid()
    for name in SHARED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is never written to is shared
    for line in sys.stdin:
        print(serve(json.loads(line), parent), flush=True)


if __name__ == "__main__":
    main()
