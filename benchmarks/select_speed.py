"""How fast ``lightning-eff select dsir`` weighs text: gigabytes an hour, and the processor's seconds that they take.

    python benchmarks/select_speed.py [--megabytes 256] [--jobs 2] [--rounds 3] [--out benchmarks/results/select_speed.json]

The raw text is the standard library's source, again and again until it is that long, a document in each line; the target is
its package ``email``. A round weighs all of it in a folder of its own, in as many processes: buckets counted in target and raw
text, and then each document weighed, so that the raw text is read and hashed twice. Beside it stands one pass that only reads
the blocks. Seconds of the clock include the start of the processes; those of the processor are the children's own, which a
busy machine changes less.
"""

import argparse
import os
import resource
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lightning_eff.data.selection._offline.dsir import Weighing, gumbel_top_k
from lightning_eff.data.selection._offline.hashing import blocks


def write_texts(folder: Path, size: int) -> tuple[Path, Path]:
    """The raw text, of about ``size`` bytes, and the target."""
    library = Path(sysconfig.get_path("stdlib"))
    sources = [path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts]
    whole = b"".join(path.read_bytes().rstrip(b"\n") + b"\n" for path in sources)
    raw, target = folder / "raw.txt", folder / "target.txt"
    with raw.open("wb") as stream:
        for start in range(0, size, len(whole)):
            stream.write(whole[: size - start])
    target.write_bytes(b"".join(path.read_bytes() for path in sources if path.parent == library / "email"))
    return raw, target


def measure(raw: Path, target: Path, folder: Path, jobs: int) -> dict[str, Any]:
    """One round."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    weighing = Weighing([str(raw)], [str(target)], folder, jobs=jobs)
    weights = weighing.run()
    kept = gumbel_top_k(weights, len(weights) // 10, 0)
    seconds = time.perf_counter() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    weighing.clear()
    size = raw.stat().st_size
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "seconds": seconds,
        "processor_seconds": processor,
        "gigabytes_per_hour": size / 1e9 / seconds * 3600,
        "processor_seconds_per_gigabyte": processor / (size / 1e9),
        "documents": len(weights),
        "kept": len(kept),
        "kept_log_weight": float(weights[kept].mean()),
    }


def read_only(raw: Path) -> float:
    """Processor seconds a gigabyte of one pass that reads the blocks and does nothing with them."""
    begun, size = time.process_time(), raw.stat().st_size
    total = sum(len(block) for block in blocks(raw, 0, size))
    assert total >= size
    return (time.process_time() - begun) / (size / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        raw, target = write_texts(folder, args.megabytes * 10**6)
        reading = read_only(raw)
        rounds: list[dict[str, Any]] = []
        for number in range(args.rounds):
            rounds.append(measure(raw, target, folder / "work", args.jobs))
            one = rounds[-1]
            print(
                f"round {number}: {one['gigabytes_per_hour']:.0f} GB an hour by the clock,"
                f" {one['processor_seconds_per_gigabyte']:.1f} s of the processor a GB",
                flush=True,
            )
    finally:
        shutil.rmtree(folder)
    from benchmarks.machine import described, publish  # which imports torch: not in the processes that weigh

    names = ("gigabytes_per_hour", "processor_seconds_per_gigabyte", "seconds")
    summary = {
        name: {
            "median": statistics.median(one[name] for one in rounds),
            "least": min(one[name] for one in rounds),
            "most": max(one[name] for one in rounds),
        }
        for name in names
    }
    summary["gigabytes_per_hour_of_one_free_core"] = {
        "median": 3600 / summary["processor_seconds_per_gigabyte"]["median"]
    }
    load = os.getloadavg()[0]
    settings = {"megabytes": args.megabytes, "jobs": args.jobs, "rounds": args.rounds, "load_average": load}
    result = {**described(), "settings": settings, "summary": summary, "reading_seconds_per_gigabyte": reading}
    publish({**result, "rounds": rounds}, args.out)


if __name__ == "__main__":
    main()
