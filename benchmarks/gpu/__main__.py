"""Everything worth knowing of a GPU, in units of at most 90 seconds: ``make gpu``.

    python -m benchmarks.gpu --seconds 560                 as many units as fit, in the order of their worth
    python -m benchmarks.gpu --only ceilings bandwidth     these alone
    python -m benchmarks.gpu --tiny                        all of them in small, on a CPU

Each unit is a process with a time limit and a JSON of its own, in --out. Called again, it skips what is finished (here, or
among the committed results, on such a device with such versions), goes on with what is not, and then tries again what failed.
A unit is begun only if it can end in the time that is left. Neither an installation nor a network is needed: run it at the
root of the tree.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu import files, table
from benchmarks.gpu.driver import ROOT, Unit, probe, run_all
from benchmarks.gpu.units import units

RESULTS = ROOT / "benchmarks" / "results"


def parse(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [unit.name.replace(" ", "_") for unit in units()]
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all; 3600")
    parser.add_argument("--only", nargs="+", choices=names, metavar="UNIT", help=", ".join(names))
    parser.add_argument(
        "--out", type=Path, help="folder for the results; benchmarks/results, a temporary one with --tiny"
    )
    parser.add_argument("--bundle", type=Path, help="one file more, with all results, written after each unit")
    parser.add_argument("--take", type=Path, nargs="+", default=[], help="bundles whose results come first into --out")
    parser.add_argument("--again", action="store_true", help="run finished units too")
    parser.add_argument("--list", action="store_true", help="what there is, and run nothing")
    parser.add_argument("--tiny", action="store_true", help="in small, on a CPU")
    args = parser.parse_args(given)
    if args.tiny and args.out is None:
        args.out = Path(tempfile.mkdtemp(prefix="benchmarks-gpu-"))
    args.out = args.out or RESULTS
    return args


def main(given: list[str] | None = None) -> int:
    """Run what the command line says; 0 where every unit that was run is all right or skipped."""
    began = time.monotonic()
    args = parse(given)
    for file in args.take:
        print(f"from {file}: {', '.join(files.unpack(file, args.out)) or 'nothing new'}")
    environment = probe(tiny=args.tiny)
    if not environment.pop("has_cuda") and not args.tiny:
        print(
            "benchmarks.gpu: torch sees no CUDA device; expected one. Add --tiny to see on a CPU that it runs.",
            file=sys.stderr,
        )
        return 2
    chosen = [unit for unit in units(tiny=args.tiny) if args.only is None or unit.name.replace(" ", "_") in args.only]
    folders = [args.out] if args.tiny or args.out.resolve() == RESULTS else [args.out, RESULTS]
    print(
        f"{environment['device']}, driver {environment['driver']}, torch {environment['torch']}, results in {args.out}"
    )
    bad = []

    def after(result: files.Result, left: list[Unit]) -> None:
        if result["status"] not in ("ok", "skipped", "partial"):
            bad.append(result["unit"])
        if args.bundle is not None:
            files.bundle(args.out, args.bundle)
        print(
            f"\n{time.monotonic() - began:.0f} s: {result['unit']} is {result['status']}, {len(left)} to go", flush=True
        )
        print(table.summary(chosen, folders, environment), flush=True)

    if not args.list:
        spent = time.monotonic() - began
        left = run_all(
            chosen, args.out, environment, seconds=args.seconds - spent, also=folders[1:], again=args.again, after=after
        )
        if left:
            print(f"\nno time for {', '.join(unit.name for unit in left)}: call it again", flush=True)
    if args.list or not args.only:
        print("\n" + table.summary(chosen, folders, environment))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
