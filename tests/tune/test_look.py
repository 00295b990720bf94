"""What a short run of a config finds, what of its own can be searched, and what the command lists."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_eff import cli
from lightning_eff.bench.pace import Incomparable
from lightning_eff.bench.running.places import Places
from lightning_eff.monitor.machine import fingerprint
from lightning_eff.tune import timing
from lightning_eff.tune.arguments import parse_memory
from lightning_eff.tune.inspection.probing import after
from lightning_eff.tune.inspection.profiling import Found, Look, describe
from lightning_eff.tune.inspection.resuming import start_or_resume
from lightning_eff.tune.own import SETTINGS, discover
from lightning_eff.tune.settings import OptimizerSettings, scale_rates, set_decays
from lightning_eff.tune.tuner import Tuner
from tests.tune.tasks import Here, Regression, Table, config

HIDDEN = "model: {class_path: tests.tune.tasks.Hidden}"


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_eff.tune.tuner.Places", Here)


@pytest.fixture(scope="module")
def tuner(tmp_path_factory: pytest.TempPathFactory) -> Tuner:
    folder = tmp_path_factory.mktemp("look")
    return Tuner(
        config(folder),
        target="val_loss",
        budget=2,
        include=["ReplaceOptimizer", "SequencePacking", "Lookahead", "LearningRateSchedule"],
        exclude=["LearningRateSchedule"],
        memory="1TB",
        out=folder / "out",
        threads=1,
    )


@pytest.fixture(scope="module")
def found(tuner: Tuner) -> Found:
    start_or_resume(tuner.out, tuner._plan(), fingerprint(tuner.threads))
    return tuner._profile(lambda line: None)


def test_a_profile_says_what_there_is_and_how_it_was_told(found: Found) -> None:
    run = found.run
    assert (run.num_blocks, run.sequence_length, run.image_side, run.batch_size) == (0, None, None, 16)
    assert run.visible_loss and run.decayed_rate and run.optimizer_states and not run.masked_labels
    assert run.epochs == pytest.approx(found.steps * 16 / 512)
    assert found.base_rate == pytest.approx(3e-3) and found.decays == (0.01,) and found.metrics == ("val_loss",)
    assert set(found.why) >= {"num_blocks", "visible_loss", "decayed_rate", "epochs", "memory_bound"}
    text = "\n".join(describe(found))
    assert "time: " in text and "backward" in text and "memory: parameters" in text
    assert Found.of(json.loads(json.dumps(found.record()))) == found


def test_batches_are_told_apart(found: Found) -> None:
    def seen(batch: object) -> dict[str, object]:
        eye = Look()
        eye._look_at(batch, None)
        return eye.fields

    ids = torch.zeros(4, 32, dtype=torch.long)
    hidden = ids.clone()
    hidden[:, 4:] = -100
    assert seen({"input_ids": ids, "labels": ids})["sequence_length"] == 32
    assert seen({"input_ids": ids, "labels": hidden})["masked_labels"]
    assert not seen({"input_ids": ids, "labels": ids})["masked_labels"]
    assert seen([torch.zeros(4, 3, 28, 30), torch.zeros(4, dtype=torch.long)])["image_side"] == 28
    assert seen([torch.zeros(4, 3, 28, 30), torch.zeros(4, dtype=torch.long)])["sequence_length"] is None
    assert not seen({"input_ids": ids, "labels": ids})["grids"]
    for frames in (torch.zeros(4, 8, 3, 28, 28), torch.zeros(4, 8, 16), torch.zeros(4, 3, 28, 28, dtype=torch.uint8)):
        assert seen({"input_ids": ids, "video": frames})["grids"], "beside tokens, too"


def test_own_settings_are_arguments_that_have_the_value_that_is_seen(found: Found) -> None:
    data = {"init_args": {"batch_size": 16, "rows": 512}}
    model = {"init_args": {"lr": 3e-3, "head_lr": 1.0, "weight_decay": 0.01, "warmup_steps": 2}}
    owns, without = discover({"model": model, "data": data}, found)
    assert {one.name: one.key for one in owns} == {
        "rate": "model.init_args.lr",
        "weight_decay": "model.init_args.weight_decay",
        "batch": "data.init_args.batch_size",
        "warm_up": "model.init_args.warmup_steps",
    }
    assert not without
    assert owns[-1].in_steps and owns[-1].value == pytest.approx(2 / found.steps)
    model = {"init_args": {"lr": 1.0}}
    owns, without = discover({"model": model, "data": {"init_args": {"batch_size": 3}}}, found)
    assert {one.name: one.key for one in owns} == {"rate": None, "weight_decay": None}, "names alone deceive"
    assert "has the value 16 of the run" in without["batch"] and "named warm-up" in without["warm_up"]
    data = {"init_args": {"train_batch_size": 16, "val_batch_size": 16, "test_batch_size": 16}}
    model = {"init_args": {"drop_rate": 3e-3, "encoder_learning_rate": 3e-3}}
    owns, _ = discover({"model": model, "data": data}, found)
    keys = {one.name: one.key for one in owns}
    assert keys["batch"] == "data.init_args.train_batch_size", "what it trains on, though others are shorter to say"
    assert keys["rate"] == "model.init_args.encoder_learning_rate", "and not the dropout's"
    constant = replace(found, run=replace(found.run, decayed_rate=False), base_rate=0.0, decays=())
    owns, without = discover({}, constant)
    assert [(one.name, one.key) for one in owns] == [("warm_up", None)] and set(without) == {
        "rate",
        "weight_decay",
        "batch",
    }


def test_a_look_lists_what_would_be_tried_and_why_not_the_rest(tuner: Tuner, found: Found) -> None:
    look = tuner.look()
    assert set(look.space.techniques) == {"Lookahead"}
    assert look.space.left_out["ReplaceOptimizer"].startswith("the module has no hidden linear layer")
    text = "\n".join(look.lines())
    assert "SequencePacking: samples are not sequences" in text and "LearningRateSchedule: excluded" in text
    assert "ProgressiveStacking: not included" in text and "rate (model.init_args.lr, now 0.003)" in text
    told: list[str] = []
    assert tuner.look(told.append).lines() == look.lines() and not told, "nothing is looked for twice"
    with pytest.raises(ValueError, match="differs in target"):
        Tuner(tuner.paths, target="val_acc", budget=2, out=tuner.out, threads=1, memory="1TB").look()


def test_a_technique_that_refuses_is_left_out_with_its_reason(tuner: Tuner, tmp_path: Path) -> None:
    tuner.look()
    probes = json.loads((tuner.out / "probes.json").read_text())
    assert probes["Lookahead"] is None
    refusing = Tuner(
        tuner.paths, target="val_loss", budget=2, include=["tests.tune.tasks.Refusing"], out=tmp_path / "out", threads=1
    )
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "profile.json").write_text((tuner.out / "profile.json").read_text())
    (tmp_path / "out" / "plan.json").write_text((tuner.out / "plan.json").read_text())
    record = json.loads((tmp_path / "out" / "plan.json").read_text())
    (tmp_path / "out" / "plan.json").write_text(json.dumps({**record, "plan": refusing._plan()}))
    look = refusing.look()
    assert not look.space.techniques
    assert look.space.left_out["tests.tune.tasks.Refusing"] == "refused: Refusing: not on a Monday."


def test_a_technique_that_hangs_is_left_out_and_those_after_it_are_tried(
    tuner: Tuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One search before the first step, longer than any budget, would otherwise be the whole search."""
    monkeypatch.setattr(timing, "SETUP", 1.0)
    monkeypatch.setattr("lightning_eff.tune.tuner.Places", Places)
    names = ["tests.tune.tasks.Hanging", "Lookahead"]
    hanging = Tuner(tuner.paths, target="val_loss", budget=2, include=names, out=tmp_path / "out", threads=1)
    assert set(hanging.look().space.techniques) == set(names), "a named one is tried, however slow it is"
    found = json.loads((hanging.out / "probes.json").read_text())
    assert found["Lookahead"] is None
    space = after(hanging.look().space, found)
    assert set(space.techniques) == {"Lookahead"}
    assert re.fullmatch(
        r"its set-up takes more than \d+ s, and each of its runs would\. Name it with --include to try it",
        space.left_out["tests.tune.tasks.Hanging"],
    )


def test_a_technique_has_little_time_to_set_up_unless_a_run_is_long() -> None:
    def limit(budget: float) -> float:
        return timing.Durations(budget, step=0.1, start=2.0, validation=0.5, process=5.0, seeds=3, jobs=1).probe_limit

    assert limit(60.0) == pytest.approx(5.0 + 10.0 + 3 * 2.2)
    assert limit(600.0) == pytest.approx(5.0 + 30.0 + 3 * 2.2), "a twentieth of the budget"
    assert limit(86400.0) == pytest.approx(5.0 + 60.0 + 3 * 2.2)


def test_the_target_must_be_logged_and_the_budget_must_hold_a_schedule(tmp_path: Path) -> None:
    with pytest.raises(Incomparable, match="Got target 'val_acc', which validation does not log"):
        Tuner(config(tmp_path), target="val_acc", budget=2, out=tmp_path / "a", threads=1).look()
    with pytest.raises(Incomparable, match=r"Raise --budget to .* on 3 seeds\. Set --search to \d+m or more"):
        Tuner(config(tmp_path), target="val_loss", budget=1e-3, out=tmp_path / "b", threads=1).look()


def test_a_module_that_sets_its_rate_by_itself_is_tuned_from_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--baseline", config(tmp_path, HIDDEN), "--target=val_loss", "--budget=2s", "--threads=1", "--quiet"]
    cli.main(
        [
            "tune",
            *arguments,
            "--dry-run",
            "--out",
            str(tmp_path / "out"),
            "--include",
            "ProgressiveStacking,PatchDropout",
        ]
    )
    text = capsys.readouterr().out
    assert "rate (set from outside, now 0.003)" in text and "warm_up (set from outside, now unknown)" in text
    assert "with a linear decay to zero instead" in text and "Techniques to try, at most 4 together (0)\n  none" in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--memory=lots"], "got memory 'lots'"),
        (["--budget=soon"], "got budget 'soon'"),
        (["--space=nowhere.yaml"], "--space nowhere.yaml: there is no such file"),
        (["--baseline=nowhere.yaml"], "got the baseline 'nowhere.yaml'"),
        (["--jobs=-1"], "jobs=-1"),
    ],
)
def test_arguments_that_cannot_be_used_are_said_in_one_line(
    more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["tune", "--dry-run", "--baseline", config(tmp_path), "--target=val_loss", "--budget=2s", *more])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and message in said and len(said.splitlines()) == 1, said


def test_memory_in_words() -> None:
    assert parse_memory("40GB") == 40_000_000_000 and parse_memory("1.5 GiB") == 3 * 2**29 and parse_memory(7) == 7
    assert parse_memory(None) is None


# -- the rate and the decay from outside


def test_rates_and_decays_are_set_in_proportion() -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    groups = [
        {"params": [first], "lr": 0.1, "weight_decay": 0.2},
        {"params": [second], "lr": 0.02, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 2))
    scale_rates([optimizer], [scheduler], 1.0)
    set_decays([optimizer], 0.4)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.4, 0.0]
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.1]), "the schedule's first value"
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1 / 3, 0.2 / 3])


@pytest.mark.parametrize("kind", ["OneCycleLR", "CosineAnnealingLR", "SequentialLR"])
def test_schedules_keep_their_shapes(kind: str) -> None:
    def rates(peak: float, rate: float | None) -> list[float]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=peak)
        of = torch.optim.lr_scheduler
        if kind == "OneCycleLR":
            scheduler = of.OneCycleLR(optimizer, max_lr=peak, total_steps=10, cycle_momentum=False)
        elif kind == "CosineAnnealingLR":
            scheduler = of.CosineAnnealingLR(optimizer, 10)
        else:
            parts = [of.LinearLR(optimizer, 0.1, total_iters=3), of.LinearLR(optimizer, 1.0, 0.0, total_iters=7)]
            scheduler = of.SequentialLR(optimizer, parts, [3])
        if rate is not None:
            scale_rates([optimizer], [scheduler], rate)
        found = []
        for _ in range(9):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    assert rates(0.1, 0.4) == pytest.approx(rates(0.4, None))


def test_settings_from_outside_are_checked() -> None:
    assert f"{OptimizerSettings.__module__}.{OptimizerSettings.__name__}" == SETTINGS
    assert OptimizerSettings().neutral and not OptimizerSettings(0.1).neutral
    for wrong in ({"rate": 0.0}, {"rate": float("nan")}, {"weight_decay": -1.0}):
        with pytest.raises(ValueError, match="OptimizerSettings"):
            OptimizerSettings(**wrong)
    with pytest.raises(ValueError, match="no learning rate above 0"):
        scale_rates([torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.0)], [], 0.1)


# -- the target


def seen(monkeypatch: pytest.MonkeyPatch, text: str, folder: Path) -> tuple[list[int], str | None]:
    """The sizes of the validation batches of a look, and why it is refused."""
    sizes: list[int] = []
    original = Regression.validation_step

    def validation_step(self: Regression, batch: Any, batch_idx: int) -> None:
        sizes.append(len(batch[0]))
        original(self, batch, batch_idx)

    monkeypatch.setattr(Regression, "validation_step", validation_step)
    data = "data: {class_path: tests.tune.test_look.Batches}"
    file = folder / "baseline.yaml"
    file.write_text(f"trainer: {{accelerator: cpu, devices: 1}}\nmodel: {{class_path: {text}}}\n{data}\n")
    try:
        Tuner(file, target="val_los", budget=2, include=["Lookahead"], out=folder / "out", threads=1).look()
    except Incomparable as error:
        return sizes, str(error)
    return sizes, None


class Batches(Table):
    """The same rows, validated in eight batches."""

    def val_dataloader(self) -> Any:
        return DataLoader(self._set(1, 64), 8)


class LogsLate(Regression):
    """Logs nothing while a validation of one batch is all that it had."""

    def on_validation_epoch_start(self) -> None:
        self.count = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.count += 1

    def on_validation_epoch_end(self) -> None:
        if self.count > 1:
            self.log("val_los", float(self.count))


class NeedsMore(LogsLate):
    """Cannot be validated on one batch."""

    def on_validation_epoch_end(self) -> None:
        if self.count == 1:
            raise RuntimeError("one batch is not enough")
        super().on_validation_epoch_end()


def test_a_wrong_target_is_reported_after_one_validation_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, why = seen(monkeypatch, "tests.tune.tasks.Regression", tmp_path)
    assert "expected one of ['val_loss']" in str(why) and sizes == [8]


@pytest.mark.parametrize("name", ["LogsLate", "NeedsMore"])
def test_one_validation_batch_refuses_no_module_that_needs_more(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seen(monkeypatch, f"tests.tune.test_look.{name}", tmp_path)[1] is None
