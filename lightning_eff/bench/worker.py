"""A process that does a bench's jobs: a JSON line in for each group, JSON lines out, all else into a log."""

import gc
import json
import os
import sys
from typing import Any

MARK = "@lightning_eff.bench "


def main() -> None:
    """Do the jobs that standard input names until it ends; what the user's code prints goes to the log in argv[1]."""
    out = os.fdopen(os.dup(1), "w")
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)

    def tell(**message: Any) -> None:
        out.write(MARK + json.dumps(message) + "\n")
        out.flush()

    import torch

    from lightning_eff.bench.jobs import Job, work_all

    told: dict[str, float] = {}

    def progress(job: Job, u: float) -> None:
        if u - told.get(job.name, 0.0) >= 0.005 or u >= 1.0:
            told[job.name] = u
            tell(job=job.name, u=u)

    for line in sys.stdin:
        try:
            records = work_all([Job.of(record) for record in json.loads(line)], progress)
        except KeyboardInterrupt:
            return
        tell(done=records)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
