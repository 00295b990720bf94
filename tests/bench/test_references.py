"""Reference step costs: their keys, the scaling of other arms, and files that are refused."""

import functools
import json
from pathlib import Path

import pytest

from lightning_eff.bench.arms import Arm
from lightning_eff.bench.pace import Incomparable
from lightning_eff.bench.references import References, task
from tests.bench import synthetic
from tests.bench.tasks import Small, arm

MACHINE = {"cpu": "Imaginary CPU 9000", "cores": 4, "gpu": None, "threads": 1, "torch": "2.13.0"}


def price(kind: str, seconds: float, share: float = 1.0) -> dict:
    return {"kind": kind, "seconds": seconds, "share": share}


def baseline(**settings: float) -> Arm:
    return Arm("baseline", "baseline", arm(lambda: Small(**settings)))


def test_the_first_bench_writes_and_the_next_reads(tmp_path: Path) -> None:
    """On a machine that is half as fast as the reference, all step costs are halved."""
    file = tmp_path / "deep" / "prices.json"
    told = {"baseline": [price("a", 0.1, 0.5), price("b", 0.3, 0.5)], "recipe": [price("c", 0.4)]}
    assert References(file).apply(baseline(), MACHINE, told) == told
    now = {"baseline": [price("a", 0.2, 0.5), price("b", 0.6, 0.5)], "recipe": [price("c", 1.0)]}
    again = References(file).apply(baseline(), MACHINE, now)
    assert again["baseline"] == told["baseline"]
    assert again["recipe"] == [price("c", pytest.approx(0.5))]
    assert len(json.loads(file.read_text())["entries"]) == 1


@pytest.mark.parametrize("machine", [{"cpu": "another"}, {"threads": 2}, {"gpu": "one"}, {"cores": 8}])
def test_another_machine_has_prices_of_its_own(tmp_path: Path, machine: dict) -> None:
    file = tmp_path / "prices.json"
    References(file).apply(baseline(), MACHINE, {"baseline": [price("a", 0.1)]})
    other = {"baseline": [price("a", 0.2)]}
    assert References(file).apply(baseline(), {**MACHINE, **machine}, other) == other
    assert len(json.loads(file.read_text())["entries"]) == 2
    versions = References(file).apply(baseline(), {**MACHINE, "torch": "3.0"}, other)
    assert versions["baseline"] == [price("a", 0.1)], "a second is not redefined by a new torch"


def test_a_task_is_what_its_configs_say_or_its_function_closes_over(tmp_path: Path) -> None:
    def of(text: str, name: str) -> Arm:
        (tmp_path / name).write_text(text)
        return Arm(name, "baseline", (str(tmp_path / name),))

    assert task(of("lr: 1", "a.yaml")) == task(of("lr: 1", "b.yaml")) != task(of("lr: 2", "c.yaml"))

    def build(rate: float):
        return lambda: rate

    assert task(Arm("x", "baseline", build(1.0))) == task(Arm("y", "baseline", build(1.0)))
    assert task(Arm("x", "baseline", build(1.0))) != task(Arm("x", "baseline", build(2.0)))
    partial = [task(Arm("x", "baseline", functools.partial(build, rate))) for rate in (1.0, 1.0, 2.0)]
    assert partial[0] == partial[1] != partial[2]


def test_results_of_another_bench_are_read_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    made = synthetic.results({"baseline": 1.0, "recipe": 1.2})
    file.write_text(json.dumps(made))
    told = {name: [price("step 128", 0.06), price("new", 0.2)] for name in ("baseline", "recipe")}
    found = References(tmp_path).apply(baseline(), MACHINE, told)
    for name in told:
        assert found[name] == [price("step 128", 0.03), price("new", pytest.approx(0.1))]
    assert json.loads(file.read_text()) == json.loads(json.dumps(made))
    with pytest.raises(Incomparable, match="no step cost for any of its kinds"):
        References(file).apply(baseline(), MACHINE, {"baseline": [price("other", 0.1)]})


def test_says_what_is_no_reference(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no such file or folder. Name the folder of a bench, or a .json file for step costs"
    ):
        References(tmp_path / "nowhere")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        References(tmp_path / "bad.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="schema"):
        References(tmp_path / "other.json")
