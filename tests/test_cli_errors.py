"""What the command line says of errors: one paragraph with the nearest name, and a traceback where it is the user's code."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_eff import cli
from lightning_eff._cli import errors

ROOT = Path(__file__).parent.parent
BASE: dict[str, Any] = {
    "seed_everything": 1,
    "trainer": {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 2,
        "limit_val_batches": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
    },
    "model": {"class_path": "tests.models.TinyClassifier"},
    "data": {"class_path": "tests.cli_data.Classes"},
}
RECIPE = "RECIPE"  # stands for the path of a config with BASE and a case's changes


def callback(name: str, **arguments: Any) -> dict[str, Any]:
    """A trainer section with this callback."""
    return {"trainer": {"callbacks": [{"class_path": name, "init_args": arguments}]}}


def replacing(**optimizer: Any) -> dict[str, Any]:
    """A trainer section with ``ReplaceOptimizer``, whose optimizer has these keys."""
    return callback("ReplaceOptimizer", optimizer=optimizer)


def entry(**keys: Any) -> dict[str, Any]:
    """A trainer section with a callback that has these keys, behind another."""
    return {"trainer": {"callbacks": [{"class_path": "EfficiencyMonitor"}, keys]}}


def model(path: str, **arguments: Any) -> dict[str, Any]:
    return {"model": {"class_path": path, "init_args": arguments}}


def run(
    argv: list[str], changes: dict[str, Any] | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> "pytest.ExceptionInfo[SystemExit]":
    """The command with ``RECIPE`` in ``argv`` replaced; it must end by itself."""
    monkeypatch.chdir(ROOT)
    text = changes
    if not isinstance(text, str):
        merged = {**BASE, **{key: value for key, value in text.items() if key != "trainer"}}
        merged["trainer"] = {**BASE["trainer"], **text.get("trainer", {}), "default_root_dir": str(tmp_path)}
        text = yaml.safe_dump(merged)
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(tmp_path / "recipe.yaml") if word == RECIPE else word for word in argv])
    return stopped


FIT = ["fit", "--config", RECIPE]
#: what is wrong: the arguments, the config, and what the paragraph must say of it
CONFIGS: dict[str, tuple[list[str], dict[str, Any] | str, str]] = {
    "misspelt technique": (
        FIT,
        callback("ProgresiveStacking"),
        r"trainer\.callbacks: .*'ProgresiveStacking'\. Did you",
    ),
    "misspelt technique as an option": (
        [*FIT, "--trainer.callbacks+=SelectivBackprop"],
        {},
        "mean 'SelectiveBackprop'",
    ),
    "misspelt class of Lightning": (FIT, callback("ModelChekpoint"), "Did you mean 'ModelCheckpoint'"),
    "misspelt path": (FIT, callback("lightning_eff.SelectivBackprop"), "no class 'SelectivBackprop'. Did you mean"),
    "misspelt argument": (FIT, callback("SelectiveBackprop", keeep=0.5), "no argument 'keeep'. Did you mean 'keep'"),
    "misspelt argument of a plugin": (
        FIT,
        {"trainer": {"plugins": [{"class_path": "ACTPrecision", "init_args": {"bit": 4}}]}},
        "no argument 'bit'. Did you mean 'bits'",
    ),
    "wrong value": (
        FIT,
        callback("SelectiveBackprop", keep=1.5),
        r"SelectiveBackprop\(keep=1.5\): expected a number in",
    ),
    "wrong value of a plugin": (
        FIT,
        {"trainer": {"plugins": [{"class_path": "ACTPrecision", "init_args": {"bits": 9}}]}},
        r"plugins\.bits: lightning_eff\.ACTPrecision: Expected a Literal\[2, 4, 8\]\. Got value: 9\.$",
    ),
    "wrong type": (
        FIT,
        callback("LatestWeightAveraging", window="wide"),
        "callbacks.window: .*LatestWeightAveraging: Expected an int. Got value: wide",
    ),
    "plugin among callbacks": (FIT, callback("FP8Precision"), "FP8Precision is a precision plugin; expected .*plugins"),
    "its path among callbacks": (
        FIT,
        callback("lightning_eff.FP8Precision"),
        "is a precision plugin; expected .*plugins",
    ),
    "callback among plugins": (
        FIT,
        {"trainer": {"plugins": ["lightning_eff.SelectiveBackprop"]}},
        "is a callback; expected it under trainer.callbacks",
    ),
    "optimizer among callbacks": (
        FIT,
        callback("Muon", lr=0.02),
        r"Muon is an optimizer; expected it under ReplaceOptimizer in trainer\.callbacks: \{class_path: ReplaceOptimizer,"
        r" init_args: \{optimizer: \{class_path: lightning_eff\.Muon\}\}\}\.$",
    ),
    "optimizer of torch's among callbacks": (
        [*FIT, "--trainer.callbacks+=AdamW"],
        {},
        r"optimizer: \{class_path: torch\.optim\.AdamW\}",
    ),
    "module among callbacks": (
        FIT,
        callback("tests.models.TinyGPT"),
        r"tests\.models\.TinyGPT is a module; expected it under model\.$",
    ),
    "misspelt optimizer": (
        FIT,
        replacing(class_path="lightning_eff.Moun", init_args={"lr": 0.02}),
        r"callbacks\.optimizer: 'lightning_eff' has no class 'Moun'\. Did you mean 'Muon'\?",
    ),
    "misspelt optimizer, its path alone": (
        FIT,
        callback("ReplaceOptimizer", optimizer="lightning_eff.Moun"),
        r"callbacks\.optimizer: 'lightning_eff' has no class 'Moun'\. Did you mean 'Muon'\?",
    ),
    "misspelt argument of an optimizer": (
        FIT,
        replacing(class_path="lightning_eff.Muon", init_args={"lrr": 0.02}),
        r"lightning_eff\.Muon has no argument 'lrr'\. Did you mean 'lr'\? Expected init_args among lr, weight_decay",
    ),
    "wrong type in an optimizer": (
        FIT,
        replacing(class_path="lightning_eff.Muon", init_args={"lr": "fast"}),
        r"callbacks\.optimizer\.lr: lightning_eff\.Muon: Expected a float\. Got value: fast\.$",
    ),
    "callback in an optimizer's place": (
        FIT,
        replacing(class_path="lightning_eff.LoRA"),
        r"lightning_eff\.LoRA is a callback; expected it under trainer\.callbacks\.$",
    ),
    "optimizer that says not what it returns": (
        FIT,
        callback("ReplaceOptimizer", optimizer="tests.cli_data.unannotated"),
        r"tests\.cli_data\.unannotated has no return annotation Optimizer; .*def unannotated\(\.\.\.\) -> Optimizer\.$",
    ),
    "misspelt function": (
        FIT,
        callback("SelectiveBackprop", sample_loss="tests.cli_data.unanotated"),
        r"sample_loss: 'tests\.cli_data' has no function 'unanotated'\. Did you mean 'unannotated'",
    ),
    "class that is no function": (
        FIT,
        callback("SelectiveBackprop", sample_loss="json.JSONDecoder"),
        r"json\.JSONDecoder is a class whose objects cannot be called; expected a function",
    ),
    "misspelt class without another": (
        FIT,
        callback("lightning_eff.LoRa"),
        r"Did you mean 'LoRA'\? `lightning-eff tech",
    ),
    "misspelt argument with parts": (
        FIT,
        callback("ReplaceOptimizer", optimiser={"class_path": "lightning_eff.Muon"}),
        r"ReplaceOptimizer has no argument 'optimiser'\. Did you mean 'optimizer'\?",
    ),
    "misspelt key with parts": (
        FIT,
        {"optimiser": {"class_path": "lightning_eff.Muon"}},
        r"no key 'optimiser'\. Did you mean 'optimizer'\?",
    ),
    "unknown key of a section": (FIT, {"trainer": {"qqqq": 3}}, r"no key 'trainer\.qqqq'\. trainer has accelerator, "),
    "misspelt init_args": (
        FIT,
        entry(class_path="LabelSmoothing", init_arg={"epsilon": 0.2}),
        r"callbacks: an entry has no key 'init_arg'\. Did you mean 'init_args'\?",
    ),
    "misspelt init_args of a plugin": (
        FIT,
        {"trainer": {"plugins": [{"class_path": "ACTPrecision", "init_arg": {"bits": 4}}]}},
        r"plugins: an entry has no key 'init_arg'\. Did you mean 'init_args'\?",
    ),
    "misspelt init_args of an optimizer": (
        FIT,
        replacing(class_path="lightning_eff.Muon", init_arg={"lr": 0.1}),
        r"callbacks\.optimizer: an entry has no key 'init_arg'\. Did you mean 'init_args'\?",
    ),
    "misspelt class_path": (
        FIT,
        entry(class_pth="LabelSmoothing", init_args={"epsilon": 0.2}),
        r"callbacks: an entry has no key 'class_pth'\. Did you mean 'class_path'\?",
    ),
    "argument beside class_path": (
        FIT,
        entry(class_path="LabelSmoothing", epsilon=0.2),
        r"got epsilon next to class_path; expected \{class_path: LabelSmoothing, init_args: \{epsilon: 0\.2\}\}\.$",
    ),
    "class as a key": (
        FIT,
        entry(LabelSmoothing={"epsilon": 0.2}),
        r"got 'LabelSmoothing' as a key; expected \{class_path: LabelSmoothing, init_args: \{epsilon: 0\.2\}\}\.$",
    ),
    "arguments of no class": (
        FIT,
        entry(init_args={"epsilon": 0.2}),
        "got the argument 'epsilon' without a class; expected class_path",
    ),
    "argument that must be given": (
        FIT,
        {"trainer": {"callbacks": [{"class_path": "LabelSmoothing"}, {"class_path": "DifficultyPacing"}]}},
        r"fit: DifficultyPacing in trainer\.callbacks needs 'score': expected it under its init_args, such as"
        r" \{class_path: lightning_eff\.DifficultyPacing, init_args: \{score: loss\}\}\.$",
    ),
    "number that must be given": (
        FIT,
        callback("TokenBudgetBatches"),
        r"needs 'max_tokens': .* init_args: \{max_tokens: <int>\}\}\.$",
    ),
    "arguments of the model that must be given": (
        FIT,
        model("tests.cli_data.Sized"),
        r"Sized in model needs 'size' and 'depth': expected them under its init_args, .*\{size: <int>, depth: <int>\}\}\.$",
    ),
    "refused at setup": (FIT, callback("ProgressiveStacking", stages=[[0.0, 2], [0.5, 99]]), "needs 99 blocks"),
    "two that refuse each other": (
        FIT,
        {"trainer": {"callbacks": [{"class_path": "ImportanceSampling"}, {"class_path": "SelectiveBackprop"}]}},
        "cannot train together",
    ),
    "misspelt strategy": (FIT, {"trainer": {"strategy": "hybird_tp2"}}, "'hybird_tp2'.* Did you mean 'hybrid_tp2'"),
    "wrong accelerator": (FIT, {"trainer": {"accelerator": "gpuu"}}, "invalid accelerator name.*'gpuu'"),
    "misspelt option": ([*FIT, "--trainer.max_step", "3"], {}, r"'--trainer\.max_step'.* mean '--trainer\.max_steps'"),
    "misspelt section": (
        FIT,
        {"trianer": {"max_steps": 3}},
        "no key 'trianer.max_steps'. Did you mean 'trainer.max_steps'",
    ),
    "misspelt key": (FIT, {"trainer": {"max_step": 3}}, "no key 'trainer.max_step'. Did you mean 'trainer.max_steps'"),
    "unknown section": (FIT, {"qqqq": 3}, "no key 'qqqq'. Expected one of the sections .*trainer"),
    "number that is none": (
        FIT,
        {"trainer": {"max_steps": "many"}},
        "trainer.max_steps: Expected an int. Got value: many",
    ),
    "unknown precision": (FIT, {"trainer": {"precision": "bf17"}}, "trainer.precision: .*bf17"),
    "misspelt module": (
        FIT,
        model("tests.modles.TinyClassifier"),
        "there is no module 'tests.modles'.* Did you mean 'models'",
    ),
    "package that is not there": (
        FIT,
        model("templates.gpt.GPT"),  # not meant: "tempfile"
        r"no module 'templates', which templates.gpt.GPT needs; expected one .* current folder\.(?! Did)",
    ),
    "misspelt package": (FIT, model("tetss.models.TinyClassifier"), "no module 'tetss'.* Did you mean 'tests'"),
    "misspelt model": (
        FIT,
        model("tests.models.TinyClasifier"),
        "no class 'TinyClasifier'. Did you mean 'TinyClassifier'",
    ),
    "argument of the model": (FIT, model("tests.models.TinyGPT", dpeth=3), "TinyGPT has no argument 'dpeth'"),
    "no module at all": (FIT, {"model": {"class_path": "json.JSONDecoder"}}, "JSONDecoder"),
    "nothing given": (["fit"], {}, "fit: model must be given"),
    "no such file": (
        ["fit", "--config", "examples/gpt/basline.yaml"],
        {},
        "no such file\\. .* Did you mean 'baseline.yaml'",
    ),
    "no such file, nor one like it": (
        ["fit", "--config", "examples/gpt/zzz.yaml"],
        {},
        r"no such file\. Pass the path of a YAML config\.$",
    ),
    "no YAML": (FIT, "trainer: [1", "recipe.yaml: not valid YAML at line 1, column"),
    "no mapping": (FIT, "- trainer", "recipe.yaml: got a list; expected a mapping"),
    "no checkpoint": ([*FIT, "--ckpt_path", "nowhere.ckpt"], {}, "nowhere.ckpt"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_a_config_that_cannot_be_used_is_said_in_one_paragraph(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv, changes, message = CONFIGS[what]
    stopped = run(argv, changes, tmp_path, monkeypatch)
    told = capsys.readouterr().err
    said = [line for line in told.splitlines() if line.startswith("lightning-eff fit: ")]
    assert stopped.value.code == 2
    assert len(said) == 1 and re.search(message, said[0]), told
    assert told.rstrip().endswith(said[0]), "the useful line is the last"
    assert "Traceback" not in told and "usage:" not in told and len(told.splitlines()) <= 6, told
    assert len(said[0]) < 700


COMMANDS: dict[str, tuple[list[str], str]] = {
    "misspelt command": (
        ["fti"],
        "got 'fti'; expected one of fit, .*bench, tune, select, merge, plan, budget, techniques, .*recipe.* Did you mean 'fit'",
    ),
    "misspelt bench": (["bnech"], "Did you mean 'bench'"),
    "option before a command": (["--what"], "got '--what'; expected one of fit"),
    "techniques": (["techniques", "--all"], "got --all; there is no such option"),
    "option of bench": (["bench", "--basline", "a.yaml"], "required: --baseline"),
    "choice of bench": (
        ["bench", "--baseline=a", "--recipe=b", "--target=c", "--budget=1s", "--mode=mim"],
        "invalid choice: 'mim' .* Did you mean 'min'",
    ),
    "unknown option of bench": (
        ["bench", "--baseline=a", "--recipe=b", "--target=c", "--budget=1s", "--seed=3"],
        "got --seed=3; there is no such option. Did you mean '--seeds'",
    ),
    "file of bench": (
        ["bench", "--baseline=a.yaml", "--recipe=b", "--target=c", "--budget=1s"],
        "there is no file 'a.yaml'",
    ),
    "folder of bench": (["bench", "report", "nowhere"], "no such file"),
    "option of tune": (
        ["tune", "--baseline=a.yaml", "--target=c", "--budget=1s", "--dry-run", "--exlude=x"],
        "got --exlude=x; there is no such option. Did you mean '--exclude'",
    ),
    "option of plan": (
        ["plan", "--config=a.yaml", "--gpus=8", "--gpu=h200", "--fp9"],
        "got --fp9.* Did you mean '--fp8'",
    ),
    "number of plan": (["plan", "--config=a.yaml", "--gpus=x", "--gpu=h200"], "invalid int value: 'x'"),
}


@pytest.mark.parametrize("what", COMMANDS)
def test_arguments_that_cannot_be_used_are_said_in_one_line(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv, message = COMMANDS[what]
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    told = capsys.readouterr().err
    assert stopped.value.code == 2
    assert len(told.splitlines()) == 1 and re.search(message, told), told


USERS = """
import tests.models

class Fails(tests.models.TinyClassifier):
    def __init__(self, where: str = "init"):
        super().__init__()
        self.where = where
        if where == "init":
            {}["of the user's"]

    def training_step(self, batch, batch_idx):
        if self.where == "step":
            raise ValueError("of the user's own")
        if self.where == "torch":
            self(batch[0]) @ batch[0]
        return super().training_step(batch, batch_idx)
"""


@pytest.mark.parametrize(
    ("where", "kind", "message"),
    [("init", KeyError, "user's"), ("step", ValueError, "user's own"), ("torch", RuntimeError, "shapes")],
)
def test_errors_in_the_users_code_keep_their_traceback(
    where: str, kind: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"users_{where}.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(kind, match=message) as raised:
        run(FIT, model(f"users_{where}.Fails", where=where), tmp_path, monkeypatch)
    assert any(f"users_{where}.py" in str(entry.path) for entry in raised.traceback)
    assert (raised.value.__cause__ is None and raised.value.__suppress_context__) or where != "init"


def test_an_error_as_the_users_module_is_imported_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_import.py").write_text("import there_is_no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="there_is_no_such_module") as raised:
        run(FIT, model("users_import.Model"), tmp_path, monkeypatch)
    assert any("users_import.py" in str(entry.path) for entry in raised.traceback)


def test_debug_gives_the_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"SelectiveBackprop\(keep=1.5\)"):
        run([*FIT, "--debug"], callback("SelectiveBackprop", keep=1.5), tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("Got 3; expected 4.", "got 3; expected 4."),
        ("There is no such file.", "there is no such file."),
        ("SelectiveBackprop(keep=1.5): expected less.", "SelectiveBackprop(keep=1.5): expected less."),
        ("ImportanceSampling and SAM cannot train together.", "ImportanceSampling and SAM cannot train together."),
    ],
)
def test_what_is_told_goes_on_the_commands_name(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), errors.told("lightning-eff fit"):
        raise errors.UsageError(words)
    assert capsys.readouterr().err == f"lightning-eff fit: {told}\n"


def test_a_run_that_fails_ends_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = run(FIT, callback("EarlyStopping", monitor="nothing"), tmp_path, monkeypatch)
    told = capsys.readouterr().err
    assert stopped.value.code == 1 and "nothing" in told and "Traceback" not in told


INTERRUPTED = {
    "lightning_eff._cli.merge": "_run",
    "lightning_eff._cli.select": "_run",
    "lightning_eff.advice.command": "_run",
    "lightning_eff.bench.command": "_run",
    "lightning_eff.planner.command": "read",
    "lightning_eff.tune.command": "_run",
}


@pytest.mark.parametrize("module", INTERRUPTED)
def test_an_interrupted_command_says_so_in_one_line(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(argv: Any) -> None:
        raise KeyboardInterrupt

    command = importlib.import_module(module)
    monkeypatch.setattr(command, INTERRUPTED[module], interrupt)
    with pytest.raises(SystemExit) as ended:
        command.main([])
    assert ended.value.code == 130
    assert re.fullmatch(r"\nInterrupted.*\.\n", capsys.readouterr().err)


def test_an_interruption_stays_one_where_a_command_says_nothing() -> None:
    with pytest.raises(KeyboardInterrupt), errors.told("lightning-eff fit"):
        raise KeyboardInterrupt
