"""What two processes run for the tests of ``optim``: one start of them serves all."""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.strategies.launch import launch


def two_processes(once: Callable[[str, Callable[[], Any]], Any], make: Callable[[str], Path]) -> dict[str, Any]:
    """What each job found, by its name, and ``root``, the folder that they saved in.

    Args:
        once: the fixture.
        make: makes a folder, as ``tmp_path_factory.mktemp``.
    """

    def start() -> dict[str, Any]:
        root = str(make("optim"))
        return {"root": root, **launch("tests.optim.optim_jobs", "every", root, world_size=2)}

    return once("optim", start)


def every(root: str) -> dict[str, Any]:
    from tests import ddp_jobs
    from tests.optim.averaging import averaging_jobs
    from tests.optim.optimizers import first_order_jobs, muon_jobs
    from tests.optim.preconditioning import kfac_jobs

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return {
        "averaging": averaging_jobs.divided(root, averaging_jobs.LAYOUTS),
        "batch_norm": ddp_jobs.batch_norm("LatestWeightAveraging", Path(root)),
        "kfac": kfac_jobs.kfac(),
        "sharpness": {what: ddp_jobs.sharpness(what, Path(root)) for what in ("1", "2", "look")},
        "trajectory": ddp_jobs.trajectory("SAF", Path(root)),
        "muon": muon_jobs.all_of_them(),
        "first_order": first_order_jobs.sharded(),
    }
