"""Compare techniques with their peers: other libraries' implementations of the same thing.

    python -m benchmarks.peers [--only NAME ...] [--rounds N] [--quick] [--out FILE]
    python -m benchmarks.peers page

Both arms of a case run in one process, in turns, on one thread and one core. The time is processor time. A run of everything
writes ``benchmarks/results/peers.json`` and takes up to eight minutes of a quiet core; ``page`` writes docs/peers.md from it.
A run of some cases (``--only``) or a quick one prints its table, and writes only where ``--out`` says. A peer that is not
installed is reported in the table. The exit status is 1 if a case failed.
"""

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import growth, page, running
from lightning_eff.monitor.machine import fingerprint

QUICK = 5  #: rounds of a quick run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=["run", "page"], default="run")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="words of names, techniques or families")
    parser.add_argument("--rounds", type=int, default=None, help="turns of each arm, instead of each case's own")
    parser.add_argument("--seconds", type=float, default=running.SECONDS, help="processor time for the turns of a case")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} rounds, and no growth")
    parser.add_argument("--no-growth", action="store_true", help="leave out how costs grow")
    parser.add_argument("--out", type=Path, default=None, help="write the results here")
    options = parser.parse_args(arguments)
    if options.command == "page":
        page.write()
        return 0
    chosen = running.found(options.only)
    grows = not options.quick and not options.no_growth
    series = growth.found(options.only) if grows else []
    if not chosen and not series:
        parser.error(f"no case has {' or '.join(options.only)} in its name, technique or family")
    out = options.out
    if out is None and not (options.only or options.quick or options.no_growth):
        out = page.RESULTS
    began = time.process_time()
    first = os.getloadavg()
    results: dict[str, Any] = {"machine": fingerprint(1), "threads": 1, "rows": [], "growth": []}

    def keep(part: str, rows: Iterable[dict[str, Any]]) -> None:
        """Write what there is after each row: a run that is stopped leaves what it measured."""
        for row in rows:
            results[part].append(row)
            results["load"] = [first, os.getloadavg()]
            results["seconds"] = time.process_time() - began
            results["complete"] = (len(results["rows"]), len(results["growth"])) == (len(chosen), len(series))
            if out is not None:
                out.write_text(json.dumps(results, indent=1) + "\n")

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    rounds = QUICK if options.quick else options.rounds
    keep("rows", running.rows(chosen, rounds, options.seconds, tell))
    keep("growth", growth.measured(series, tell))
    print(page.table(results["rows"]))
    if results["growth"]:
        print("\n" + page.growing(results["growth"]))
    return int(any("error" in row for row in results["rows"]))


def stay_on_one_core() -> None:
    """Keep the process on one core.

    Each arm has a thread of its own. On a busy machine the two stay on different cores, one of which other programs use more:
    a measured ratio of equal code was 1.5.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


if __name__ == "__main__":
    torch.set_num_threads(1)
    stay_on_one_core()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    sys.exit(main())
