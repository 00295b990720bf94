"""What `make test` leaves to `make test-full`: the tests that took longest, in a list that a report is made into.

    make test-full PYTEST_ARGS="--junitxml report.xml"  # or make test, to move more of it
    python -m tests.full report.xml [report.xml ...] [--slower 1.8]

Seconds are of the processor, as ``tests/conftest.py`` notes them. What stays is the most tests that fit into ten minutes on two
cores. Of every technique its run with a resume stays, and so do two stacks of pairs and comparisons of ranks with a program in
one process. A machine may be slower than the one that ``SECONDS`` is meant for: ``--slower`` divides its seconds.
"""

import argparse
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("full.txt")
SECONDS = 620.0  # of the processor; two workers take half as long, and a minute for starting and collecting tests
STACKS = 2
PAIRS = "tests/test_pairs.py::test_stack_trains_and_resumes"
STAYS = (PAIRS, *(f"tests/{file}.py::test_resume_equals_uninterrupted" for file in ("test_contract", "test_plugins")))
RULE = (
    "_as_the_algorithm_does_in_one_process"  # how functions end that compare a technique of several ranks with its rule
)
APART = "only in make test-full"  # a property of tests that the list says nothing of
_HEAD = "# Written by `python -m tests.full report.xml`: the tests that only `make test-full` runs.\n"


@cache
def listed() -> frozenset[str]:
    """The test functions that take long, by file and name."""
    return frozenset(line for line in LIST.read_text().splitlines() if line and not line.startswith("#"))


def mark(items: Iterable[pytest.Item]) -> None:
    """Give the marker ``full`` to the tests that are listed, and to all but the first stacks of pairs."""
    stacks = 0
    for item in items:
        name = item.nodeid.partition("[")[0]
        if item.get_closest_marker("full") is not None:  # by its own file, as some parameters of a function are
            item.user_properties.append((APART, "True"))
        if name == PAIRS and item.get_closest_marker("slow") is None:
            stacks += 1
        if name in listed() or (name == PAIRS and stacks > STACKS):
            item.add_marker(pytest.mark.full)


def longest(seconds: Mapping[str, float], budget: float = SECONDS) -> list[str]:
    """The test functions to leave out, so that the others take no more than ``budget``: those of the longest mean first.

    Args:
        seconds: of each test, by its path, function and parameters.
        budget: for all that stay.
    """
    of: dict[str, list[float]] = defaultdict(list)
    for test, taken in seconds.items():
        of[test.partition("[")[0]].append(taken)
    of[PAIRS] = of.pop(PAIRS, [])[:STACKS]
    whole = sum(sum(taken) for taken in of.values())
    found: list[str] = []
    for name in sorted(of, key=lambda name: sum(of[name]) / max(len(of[name]), 1), reverse=True):
        if whole <= budget:
            break
        if name not in STAYS and not name.endswith(RULE):
            found.append(name)
            whole -= sum(of[name])
    return sorted(found)


def read(report: Path) -> dict[str, float]:
    """Processor seconds of each test of a report of ``--junitxml``, by its path, function and parameters.

    Without those that their own files leave to `make test-full`.
    """
    found: dict[str, float] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find(f"properties/property[@name='{APART}']") is not None:
            continue
        taken = case.find("properties/property[@name='processor_seconds']")
        seconds = case.get("time", "0") if taken is None else taken.get("value", "0")
        found[f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"] = float(seconds)
    return found


def main() -> None:
    """Write the list from reports. Of a test in several, the last counts; what is listed and in no report stays listed."""
    parser = argparse.ArgumentParser(description="Write tests/full.txt.")
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--slower", type=float, default=1.0, help="how many times as long this machine takes")
    asked = parser.parse_args()
    seconds = {test: taken / asked.slower for report in asked.reports for test, taken in read(report).items()}
    reported = {test.partition("[")[0] for test in seconds}
    left_out = sorted({*longest(seconds), *(listed() - reported)})
    LIST.write_text(_HEAD + "".join(f"{test}\n" for test in left_out))
    print(f"{len(left_out)} entries in {LIST}")


if __name__ == "__main__":
    main()
