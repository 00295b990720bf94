"""What the suite's tests cost by kind, and what they will at a hundred names: from reports that pytest itself wrote.

    pytest --junitxml report.xml            # or in parts, a report for each
    python benchmarks/suite_growth.py report.xml [...] --names 100 --out benchmarks/results/suite_growth.json

Seconds are of the processor, a test's ended processes included, which a busy machine changes less than the clock; they are
what ``tests/conftest.py`` notes in the report, and the clock's where a report has none.
"""

import argparse
import json
import os
import platform
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

RUNS = 2.75  # of a whole stack: undisturbed, interrupted and resumed at three steps, and without what changes no weight
LEFT_OUT = 0.3  # of a run, for a name that is left out: it stops where a step shows it
BEGUN = 0.5  # of a run, for the few names beside which one is left out: most show it in its first quarter
PLAIN = 1.5  # what a run without techniques costs, in what one technique adds to it


class Timed(NamedTuple):
    file: str  # tests.test_contract
    function: str
    parameters: str
    seconds: float


def read(report: Path) -> Iterator[Timed]:
    """The tests of one report of ``--junitxml`` that were not skipped."""
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        taken = case.find("properties/property[@name='processor_seconds']")
        seconds = case.get("time", "0") if taken is None else taken.get("value", "0")
        function, _, parameters = case.get("name", "").partition("[")
        yield Timed(case.get("classname", ""), function, parameters.rstrip("]"), float(seconds))


def kind(test: Timed, stems: Collection[str]) -> str:
    """Which part of the suite a test belongs to; ``stems`` are the files of techniques' own tests, without ``test_``."""
    if test.file == "tests.test_contract":
        if test.function.startswith(("test_groups", "test_alone_under_ddp")):
            return "contract, shared by groups"
        return "contract, each technique alone" if test.parameters else "fixed"
    if test.file == "tests.test_pairs":
        return "pairs"
    if test.file == "tests.test_plugins":
        return "contract of plugins" if test.parameters else "fixed"
    return "own tests" if test.file.rpartition("test_")[2] in stems else "fixed"


def work(stacks: Sequence[Sequence[str]], looked_at: Sequence[Mapping[str, Sequence[str]]]) -> float:
    """What a covering design costs, in what one technique adds to one run: runs of a stack cost as it is large.

    A name is left out of the stack, or of a few of it, which are begun once more as they are; see ``tests.stacks.checks``.
    """
    from tests.stacks import FEW

    total = 0.0
    for stack, seen in zip(stacks, looked_at, strict=True):
        total += RUNS * (PLAIN + len(stack))
        for partners in seen.values():
            few = FEW * (1 + len(partners)) < len(stack)
            total += (BEGUN + LEFT_OUT) * (PLAIN + 1 + len(partners)) if few else LEFT_OUT * (PLAIN + len(stack))
    return total


def rivals(size: int) -> tuple[list[str], set[frozenset[str]]]:
    """As many names as are asked for, refusing each other as they do now: 6 of 20 are plugins, and some come in pairs.

    Families grow with the names, to 10 plugins and 8 of one kind at a hundred.
    """
    from tests.covering import pairs

    names, refused, at = [f"t{i:03}" for i in range(size)], set[frozenset[str]](), 0
    for share, least in ((0.10, 6), (0.08, 2), (0.06, 2), (0.05, 2), (0.04, 2)):
        count = max(least, round(share * size))
        refused |= pairs(names[at : at + count])
        at += count
    return names, refused


def designed(size: int) -> tuple[int, float]:
    """How many stacks the design of ``size`` names has, and their :func:`work`."""
    from tests.covering import design, watched

    names, refused = rivals(size)
    stacks = design(names, refused)
    return len(stacks), work(stacks, watched(stacks, names))


def grown(seconds: dict[str, float], counts: dict[str, int], size: int, stacks_now: float) -> dict[str, float]:
    """Seconds by kind with ``size`` names.

    Args:
        seconds: by kind now.
        counts: how many "techniques" (with what stands in for them), "plugins" and own test files ("own") there are now.
        size: of techniques and plugins together; plugins are a tenth of them, but as many as now at least.
        stacks_now: the :func:`work` of the present design.
    """
    plugins = max(counts["plugins"], size // 10)
    techniques = (size - plugins) / (counts["techniques"])
    factors = {
        "contract, each technique alone": techniques,
        "contract, shared by groups": techniques,
        "contract of plugins": plugins / counts["plugins"],
        "own tests": size / counts["own"],
        "pairs": designed(size)[1] / stacks_now,
    }
    return {name: value * factors.get(name, 1.0) for name, value in seconds.items()}


def measure(reports: Sequence[Path], size: int, cores: int) -> dict[str, Any]:
    """What the JSON holds."""
    from tests.cases import ALL, CASES
    from tests.covering import design, watched
    from tests.plugins import PLUGINS
    from tests.selection import modules
    from tests.stacks import declared

    names = sorted([*CASES, *PLUGINS])
    stacks = design(names, set(declared(CASES, PLUGINS)))
    seen = watched(stacks, [name for name in names if name in PLUGINS or not CASES[name].exact])
    of = modules()
    stems = {of[name] for name in {*ALL, *PLUGINS} & of.keys()}
    tests = [test for report in reports for test in read(report)]
    seconds: Counter[str] = Counter()
    files: Counter[str] = Counter()
    functions: dict[str, Counter[str]] = defaultdict(Counter)
    for test in tests:
        seconds[kind(test, stems)] += test.seconds
        files[test.file] += test.seconds
        functions[test.file][test.function] += test.seconds
    own = {stem for stem in stems for file in files if file.rpartition("test_")[2] == stem}
    counts = {"techniques": len(ALL), "plugins": len(PLUGINS), "own": len(own)}
    now, then = dict(seconds), grown(dict(seconds), counts, size, work(stacks, seen))

    def told(values: dict[str, float], stacks: int) -> dict[str, Any]:
        total = sum(values.values())
        by_kind = {name: round(value, 1) for name, value in sorted(values.items(), key=lambda item: -item[1])}
        minutes = round(total / 60 / cores, 1)
        return {
            "seconds": by_kind,
            "total_seconds": round(total, 1),
            f"minutes_on_{cores}_cores": minutes,
            "stacks": stacks,
        }

    return {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "tests": len(tests),
        "names": len(names),
        "now": told(now, len(stacks)),
        f"at_{size}": told(then, designed(size)[0]),
        "contract_seconds_per_technique": {
            name: round(value / len(ALL), 2) for name, value in functions["tests.test_contract"].most_common()
        },
        "slowest_files": {name: round(value, 1) for name, value in files.most_common(25)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--names", type=int, default=100)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    text = json.dumps(measure(args.reports, args.names, args.cores), indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
