"""A dry run: it checks every arm with a few steps, writes nothing, and no arm holds it up."""

import time
import warnings
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from lightning_eff.bench.arms import Arm
from lightning_eff.bench.benchmark import Benchmark
from lightning_eff.bench.pace import Incomparable
from lightning_eff.bench.progress import PlanBar
from lightning_eff.bench.running import dry_run
from lightning_eff.bench.running.dry_run import Checked, estimate
from lightning_eff.bench.running.jobs import Job, work
from tests.bench.tasks import Constant, Fail, Small, arm, dataset
from tests.bench.test_pacer import reference


class Endless(Callback):
    """Takes a minute before the first step."""

    def on_fit_start(self, *args: object) -> None:
        for _ in range(6000):
            time.sleep(0.01)


def bench(folder: Path, recipes: dict, baseline=None, target: str = "val_loss") -> Benchmark:
    return Benchmark(baseline or arm(), recipes, target=target, budget="60s", out=folder / "out", threads=1)


def test_every_arm_is_checked_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "LEAST", 60.0)  # a busy machine does not matter
    recipes = {
        "good": arm(lambda: Small(lr=0.2)),
        "other data": arm(val=lambda: dataset(32, 2)),
        "broken": arm(callbacks=lambda: [Fail(1, RuntimeError("no such luck"))]),
    }
    text, possible = bench(tmp_path, recipes).dry_run()
    checks = {line.split("  ")[0]: line for line in text.splitlines()}
    assert " ok " in checks["baseline"] and " ok " in checks["good"]
    assert " refused " in checks["other data"] and " crashed " in checks["broken"]
    assert "no such luck" in text and "metrics on other data" in text and "The bench takes about" in text
    assert not possible and not list(tmp_path.iterdir())


def test_an_arm_that_takes_too_long_does_not_hold_it_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "LEAST", 0.2)
    bench_of = bench(tmp_path, {"endless": arm(callbacks=lambda: [Endless()])})
    checks = dry_run.Checks(bench_of._pace, bench_of.budget, 1, 1, False, seconds=0.0)
    baseline, endless = checks.of(bench_of.arms)
    assert (baseline.status, endless.status) == ("ok", "late")
    assert endless.step is None and "was not checked further" in endless.text


def test_what_a_bench_would_refuse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Incomparable, match="Got target 'val_f1', which validation does not log"):
        bench(tmp_path, {"copy": arm()}, target="val_f1").dry_run()
    text, possible = bench(tmp_path, {"copy": arm(Constant)}, arm(Constant)).dry_run()
    assert "ends at 100% of its peak" in " ".join(text.split()) and not possible


def test_the_time_is_that_of_runs_and_rehearsals() -> None:
    """By hand: runs of 100, 100 and 50 s, each with 2 s of start and 4 validations of 3 s, for 2 seeds.

    Each of two arms rehearses 4 times, with 96 steps of 0.01 s and 2 s of start, and one validation.
    """
    arms = [Arm("baseline", "baseline", ()), Arm("a", "recipe", ()), Arm("ladder", "ladder", (), factor=0.5)]
    found = [Checked(one, "ok", "", 0.01, 2.0, 3.0) for one in arms[:2]]
    counts = {"seeds": 2, "rounds": 3, "jobs": 1, "evaluations": 4}
    assert estimate(found, arms, 100.0, **counts) == pytest.approx(2 * (250 + 3 * 14) + 2 * (4 * 2.96 + 3))
    late = [found[0], Checked(arms[1], "late")]
    assert estimate(late, arms, 100.0, **counts) == estimate(found, arms, 100.0, **counts)


# -- the target, before anything else


class Counts(Small):
    """Counts its validation batches over all instances."""

    validated = 0

    def validation_step(self, batch, batch_idx):
        type(self).validated += 1
        super().validation_step(batch, batch_idx)


class LogsLate(Counts):
    """Logs only after its second validation batch."""

    def validation_step(self, batch, batch_idx):
        if batch_idx > 0:
            super().validation_step(batch, batch_idx)


class NeedsMore(Counts):
    """Cannot be validated on one batch."""

    def on_validation_epoch_end(self) -> None:
        raise RuntimeError("one batch is not enough")


def first_rehearsal(module: type[Small], target: str) -> dict:
    Counts.validated = module.validated = 0
    pace = reference(sweep=8, check_target=True)
    pace = type(pace)(**{**vars(pace), "target": target})
    return work(Job(Arm("baseline", "baseline", arm(module, val=lambda: dataset(64, 1))), 1, pace, "first", 1))


def test_the_target_is_looked_for_after_one_validation_batch() -> None:
    record = first_rehearsal(Counts, "val_los")
    assert record["status"] == "refused" and "one of ['val_acc', 'val_loss']" in record["error"]
    assert Counts.validated == 1 and record["steps"] == 8
    assert first_rehearsal(Counts, "val_loss")["status"] == "finished" and Counts.validated == 1


@pytest.mark.parametrize("module", [LogsLate, NeedsMore])
def test_one_validation_batch_refuses_no_module_that_needs_more(module: type[Small]) -> None:
    assert first_rehearsal(module, "val_loss")["status"] == "finished"


def test_the_bench_refuses_a_wrong_target_before_any_arm_has_rehearsed(tmp_path: Path) -> None:
    Counts.validated = 0
    names = []
    recipe = arm(callbacks=lambda: names.append("recipe") or [])
    with pytest.raises(Incomparable, match="Got target 'val_f1'"):
        bench(tmp_path, {"recipe": recipe}, arm(Counts), target="val_f1").run(progress=False, report=False)
    assert Counts.validated == 1 and names == ["recipe"], "it was only built to find its techniques"


# -- the progress bar


def test_the_progress_bar_has_one_comma_before_the_arm(capsys: pytest.CaptureFixture[str]) -> None:
    bar = PlanBar(10.0, 5.0, 1, enabled=True)
    job = Job(Arm("baseline", "baseline", ()), 1, reference(5.0), "run")
    bar.stage("runs", [job])
    bar.update(job, 0.5)
    bar._bar.refresh()
    bar.close()
    shown = capsys.readouterr().err
    assert ", baseline, seed 1" in shown and ", ," not in shown


def test_rounding_does_not_fill_the_bar_beyond_its_end() -> None:
    bar = PlanBar(3 * 0.1, 0.1, 0, enabled=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(4):  # the fourth is more than was counted on
            for share in (0.1, 0.3, 0.7, 1.0):
                bar.update(Job(Arm("baseline", "baseline", ()), seed, reference(0.1), f"run {seed}"), share)
                bar._bar.refresh()
        bar.close()
    assert bar._bar.n == pytest.approx(bar._bar.total)
