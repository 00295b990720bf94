"""benchmarks.peers in small: times in turns, bytes, fits that are called step by step, cases, and the page."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

import lightning_eff as eff
from benchmarks.peers import __main__ as command
from benchmarks.peers import growth, measure, page, running
from benchmarks.peers.case import Arm, Case
from benchmarks.peers.fits import Fit, fit_arm

MEBI = 2**20
pytestmark = pytest.mark.filterwarnings("ignore")


class Clock:
    """Processor time that goes on only when an arm says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def arm(self, name: str, seconds: float | Callable[[int], float]) -> Arm:
        def step() -> None:
            self.order.append(name)
            self.now += seconds(self.order.count(name)) if callable(seconds) else seconds

        return Arm(step)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "process_time", lambda: made.now)
    return made


def case(name: str, build: Callable[[], tuple[Arm, Arm]], **options: Any) -> Case:
    return Case(name, "Lion", "torch.optim.Adam", "torch", build, **options)


# -- time


def test_a_slower_arm_is_reported_as_slower(clock: Clock) -> None:
    row = running.measured(case("slow", lambda: (clock.arm("ours", 0.03), clock.arm("peer", 0.02)), goal=1.4))
    assert row["ratio"] == pytest.approx(1.5) and row["interval"] == pytest.approx([1.5, 1.5])
    assert row["ours_ms"] == pytest.approx([30, 30, 30]) and row["peer_ms"] == pytest.approx([20, 20, 20])
    assert page.verdict(row) == "50% slower; misses the time goal"
    row = running.measured(case("fast", lambda: (clock.arm("ours", 0.01), clock.arm("peer", 0.02)), goal=0.5))
    assert page.verdict(row) == "50% faster; meets the time goal"


def test_arms_take_turns_and_follow_each_other_equally_often(clock: Clock) -> None:
    measure.turns(clock.arm("a", 0.1), clock.arm("b", 0.1), rounds=4, seconds=100.0)
    warm = 2 * (measure.WARM_UP + 2)
    assert "".join(clock.order[warm:]) == "abbaabba"


def test_short_steps_are_repeated_within_a_turn_and_long_ones_make_fewer_rounds(clock: Clock) -> None:
    found = measure.turns(clock.arm("a", 1e-4), clock.arm("b", 2e-4), rounds=3, seconds=100.0)
    assert found["calls"] == 25 and found["ours_ms"][1] == pytest.approx(0.1)
    assert measure.turns(clock.arm("c", 0.5), clock.arm("d", 0.5), rounds=30, seconds=15.0)["rounds"] == 15
    assert measure.turns(clock.arm("e", 5.0), clock.arm("f", 5.0), rounds=30, seconds=15.0)["rounds"] == 10


def test_the_interval_is_wide_if_rounds_differ() -> None:
    ratio, low, high = measure.interval([1.0, 3.0] * 10, [2.0] * 20)
    assert ratio == 1.0 and low == 0.5 and high == 1.5
    row: dict[str, Any] = {"interval": [0.9, 1.2], "ratio": 1.1, "goal": 1.0, "transient_goal_mib": 3}
    row |= {"ours_transient_bytes": 5 * MEBI, "peer_transient_bytes": 2 * MEBI}
    assert page.verdict(row) == (
        "no measurable difference in time; 3.0 MiB more memory; misses the time goal by less than the spread; misses the"
        " memory goal"
    )


# -- bytes


def test_bytes_of_a_known_allocation() -> None:
    kept = [torch.zeros(MEBI // 4), torch.zeros(MEBI // 4)]

    def step() -> None:
        first = torch.empty(3 * MEBI // 4)
        del first
        second, third = torch.empty(MEBI // 4), torch.empty(MEBI // 4)
        kept[0] = second
        del third

    assert measure.transient_bytes(step) == 3 * MEBI
    views = [kept[1], kept[1][10:], torch.zeros(MEBI // 2, dtype=torch.int8)]
    assert measure.state_bytes(views) == MEBI + MEBI // 2
    counted = running.memory(Arm(step, lambda: views), Arm(lambda: None))
    assert counted["ours_peak_bytes"] == counted["ours_transient_bytes"] + counted["ours_state_bytes"]
    assert counted["peer_peak_bytes"] == 0


# -- fits


class Small(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.steps += 1
        if self.steps > 50:
            raise ArithmeticError("one step too many")
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def test_a_fit_is_called_step_by_step() -> None:
    module = Small()
    fit = Fit(module, torch.ones(2, 4))
    assert module.steps == 0
    for made in range(1, 4):
        fit()
        assert module.steps == made and fit.trainer.global_step == made
    fit.close()
    with pytest.raises(RuntimeError, match="has ended"):
        fit()
    several = Small()
    cycle = Fit(several, torch.ones(2, 4), batches=5)
    cycle()
    cycle()
    assert several.steps == 10
    cycle.close()


def test_memory_of_a_fit_is_counted_in_its_thread() -> None:
    class Waste(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            torch.empty(8 * MEBI // 4)

    ours, plain = fit_arm(Small(), torch.ones(2, 4), [Waste()]), fit_arm(Small(), torch.ones(2, 4))
    for arm in (ours, plain):
        arm.step()
    assert 8 * MEBI <= measure.transient_bytes(ours.step) < 8.1 * MEBI
    assert measure.transient_bytes(plain.step) < MEBI // 10
    assert measure.state_bytes(plain.state()) >= 2 * 4 * 20  # two averages of 20 numbers


def test_an_error_of_a_fit_is_its_rows() -> None:
    module = Small()
    module.steps = 50
    row = running.measured(case("fails", lambda: (fit_arm(module, torch.ones(2, 4)), Arm(lambda: None))))
    assert row["error"] == "ArithmeticError: one step too many"
    assert page.verdict(row) == "failed: ArithmeticError: one step too many"
    assert "| – |" in page.table([row | {"family": "x"}])


# -- cases


def test_a_peer_that_is_not_installed_is_reported() -> None:
    def never() -> tuple[Arm, Arm]:
        raise AssertionError

    row = running.measured(Case("absent", "Lion", "no_such.Lion", "no-such-package-at-all", never))
    assert row["missing"] == "no-such-package-at-all is not installed"
    assert page.verdict(row) == "not measured: no-such-package-at-all is not installed"


def test_every_case_names_a_public_technique() -> None:
    found = running.found()
    assert len({family for family, _ in found}) >= 7 and len(found) >= 35
    for family, one in found:
        assert hasattr(eff, one.technique), (family, one.name, one.technique)
        assert one.peer and one.package, one.name
    assert {case.name for _, case in running.found(["sam"])} >= {"SAM", "LookSAM"}
    assert not running.found(["nothing like it"])


def test_two_cases_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.peers.cases import sharpness

    one = sharpness.cases()[0]
    monkeypatch.setattr(sharpness, "cases", lambda: [one, one])
    with pytest.raises(ValueError, match="two cases have this name"):
        running.found()


def test_end_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def build() -> tuple[Arm, Arm]:
        weights = [nn.Parameter(torch.ones(8)) for _ in range(2)]
        for p in weights:
            p.grad = torch.ones(8)
        ours, peer = eff.Lion(weights[:1]), torch.optim.Adam(weights[1:])
        return Arm(ours.step, lambda: [s["exp_avg"] for s in peer.state.values()]), Arm(peer.step)

    tiny = case("tiny", build, rounds=3, figures=lambda: {"bytes in a checkpoint": 12.0})
    failing = case("failing", lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(
        running, "found", lambda only: [("optimizers_of_tests", tiny), ("optimizers_of_tests", failing)]
    )
    series = growth.Series("Nothing", "tensors", (1, 10), lambda n: (lambda: torch.ones(n).sum(), None))
    monkeypatch.setattr(growth, "found", lambda only: [series])
    out = tmp_path / "peers.json"
    assert command.main(["--out", str(out), "--rounds", "3"]) == 1
    results = json.loads(out.read_text())
    row, failed = results["rows"]
    assert row["rounds"] == 3 and row["interval"][0] <= row["ratio"] <= row["interval"][1] and row["version"]
    assert row["ours_state_bytes"] == 32 and results["machine"]["threads"] == 1 and len(results["load"]) == 2
    assert failed["error"] == "ZeroDivisionError: division by zero"
    assert [point["size"] for point in results["growth"][0]["points"]] == [1, 10]
    printed = capsys.readouterr()
    assert "[ 1 of 2] tiny" in printed.err and "| tiny | torch.optim.Adam (torch" in printed.out
    text = page.page(results)
    for part in (
        "## Optimizers of tests",
        "| tiny | bytes in a checkpoint | 12 |",
        "## How costs grow",
        "- Failed: failing.",
    ):
        assert part in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 128


def test_growth_is_a_slope_between_the_largest_sizes() -> None:
    assert growth.exponent([(1, 5.0), (10, 1.0), (100, 100.0)]) == pytest.approx(2.0)
    assert growth.exponent([(1, 1.0), (10, -1.0)]) is None
    names = {(one.name, one.axis) for one in growth.found()}
    assert len(names) == len(growth.found()) and ("Muon", "tensors of 8 x 8") in names


@pytest.mark.skipif(not page.RESULTS.exists(), reason="no results are committed")
def test_the_committed_page_is_that_of_the_committed_results() -> None:
    results = json.loads(page.RESULTS.read_text())
    assert page.PAGE.read_text() == page.page(results)
    assert not [row["name"] for row in results["rows"] if "error" in row]
