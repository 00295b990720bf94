"""The code of README and of the site's pages runs: Python trains some steps, configs too, and commands take their options."""

import functools
import importlib.util
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import yaml
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.distributed.run import get_args_parser

import lightning_eff
from docs.making import cards, notebook, pages
from lightning_eff import cli
from lightning_eff._cli import merge, select
from lightning_eff._core._stack.finding import find_stack
from lightning_eff._core.steps import Stage
from lightning_eff._core.technique import Technique
from lightning_eff.advice import command as advise
from lightning_eff.bench import command as bench
from lightning_eff.data.selection._offline.files import save
from lightning_eff.planner._launch import arguments as plan
from lightning_eff.recipes import resolving
from lightning_eff.strategies._names import sized
from lightning_eff.tune import command as tune
from tests import models, runs
from tests.cases import CASES
from tests.cli_data import Sequences
from tests.test_exported import Unrun

ROOT = Path(__file__).parent.parent
WRITTEN = {
    **{name: (ROOT / name).read_text() for name in ("README.md", "examples/README.md", "tests/README.md")},
    **pages.written(),
}
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
WAYS_IN = "ways_in.md"
BENCH = "benchmarking.md"
OPTIMIZERS = "optimizers.md"
OWN = "how/own_technique.md"
BLOCKS = "how/blocks.md"
EXAMPLES = "how/examples.md"


def blocks(page: str, language: str) -> list[str]:
    return [textwrap.dedent(body) for _, found, body in BLOCK.findall(WRITTEN[page]) if found == language]


def with_blocks(language: str) -> list[str]:
    return [page for page in WRITTEN if blocks(page, language)]


def test_every_block_is_of_a_kind_that_is_tried() -> None:
    kinds = {(page, language) for page, text in WRITTEN.items() for _, language, _ in BLOCK.findall(text)}
    drawn = {page for page, language in kinds if language == "text"}
    assert {language for _, language in kinds} <= {"python", "yaml", "bash", "text"}
    assert drawn == {"architecture.md"}, "`text` is for drawings, which nobody tries"


# -- Python


class Shortened:
    """Stands in for ``lightning.Trainer``: makes trainers with these settings and few steps on the device of the tests."""

    def __init__(self) -> None:
        self.made: list[pl.Trainer] = []

    def __call__(self, **given: Any) -> pl.Trainer:
        self.made.append(models.trainer(**{**given, "max_steps": 4, "accelerator": models.accelerator()}))
        return self.made[-1]

    def fit(self) -> int:
        """Fit those that the page has not, on what their techniques are tried on; how many have trained."""
        for made in self.made:
            if made.num_devices == 1 and made.global_step == 0:
                names = [type(callback).__name__ for callback in made.callbacks]
                kinds = {CASES[name].model for name in names if name in CASES} - {"tiny_gpt"}
                assert len(kinds) <= 1, f"{names} are tried on {kinds}"
                kind = kinds.pop() if kinds else "tiny_gpt"
                deep = {"num_layers": 12} if kind == "tiny_gpt" else {}
                made.fit(models.module(kind, **deep), models.loader(kind))
        return sum(made.global_step > 0 for made in self.made)


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> Shortened:
    shortened = Shortened()
    monkeypatch.setattr(lightning, "Trainer", shortened)
    return shortened


def prepared() -> dict[str, Any]:
    """What a block finds that imports nothing: the public names, and what stands for the reader's own."""
    public = {name: getattr(lightning_eff, name) for name in lightning_eff.__all__}
    deep = functools.partial(models.TinyGPT, num_layers=12)
    own = {"MyModule": deep, "MyLightningModule": deep, "datamodule": models.loader("tiny_gpt")}
    return {**public, **own, "MyData": functools.partial(models.loader, "tiny_gpt"), "L": lightning, "__name__": "page"}


def execute(page: str, code: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(code, page, "exec"), names)
    return names


@pytest.mark.filterwarnings("ignore:LatestWeightAveraging.* nothing will be averaged")  # within so few steps
@pytest.mark.parametrize(
    "page", [p for p in with_blocks("python") if p not in (WAYS_IN, BENCH, OPTIMIZERS, OWN, BLOCKS, EXAMPLES)]
)
def test_python_in_a_page_trains(page: str, trainers: Shortened) -> None:
    for code in blocks(page, "python"):
        trainers.made.clear()
        execute(page, code, prepared())
        assert trainers.made, f"{page}: a block that makes no trainer needs a test of its own"
        several = [made for made in trainers.made if made.num_devices > 1]
        assert trainers.fit() == len(trainers.made) - len(several)


def test_python_of_the_page_of_optimizers_trains() -> None:
    (code,) = blocks(OPTIMIZERS, "python")
    names = execute(OPTIMIZERS, code, prepared())
    own = type("Own", (models.TinyGPT,), {"configure_optimizers": names["configure_optimizers"]})()
    models.trainer(max_steps=2).fit(own, models.loader("tiny_gpt"))
    assert isinstance(own.optimizers(use_pl_optimizer=False), lightning_eff.Muon)


def test_python_of_the_examples_trains(trainers: Shortened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier, fine_tuned, several, own_cli = blocks(EXAMPLES, "python")
    names = execute(EXAMPLES, classifier, prepared())
    assert names["trainer"].global_step == 4
    (found,) = models.trainer(limit_val_batches=1).validate(names["model"], names["loader"], verbose=False)
    assert 0 <= found["val_accuracy"] <= 1

    names = execute(EXAMPLES, fine_tuned, prepared())
    names["trainer"].save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert saved and all("lora" in name for name in saved), "the adapters alone"

    execute(EXAMPLES, several, prepared())
    assert trainers.made[-1].num_devices == 8 and len(trainers.made) == 3

    (tmp_path / "recipe.yaml").write_text(blocks(EXAMPLES, "yaml")[1])
    short = [
        "max_steps=2",
        "accelerator=cpu",
        "logger=false",
        "enable_checkpointing=false",
        "enable_progress_bar=false",
    ]
    words = ["train.py", "fit", "--config", str(tmp_path / "recipe.yaml"), *(f"--trainer.{one}" for one in short)]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.chdir(tmp_path)
    ended: list[pl.Trainer] = []

    class Own(models.TinyGPT):
        def on_train_end(self) -> None:
            ended.append(self.trainer)

    execute(EXAMPLES, own_cli, {"__name__": "__main__", "MyModule": Own, "MyData": Sequences})
    assert [one.global_step for one in ended] == [2]
    assert "StochasticDepth" in {type(callback).__name__ for callback in ended[0].callbacks}


def test_layers_in_the_page_of_blocks_name_what_the_page_says() -> None:
    """Each line names its blocks in a module that is built as the line says."""

    def tree(*paths: str) -> nn.Module:
        root = nn.Module()
        for path in paths:
            here, *names = root, *path.split(".")
            for name in names[:-1]:
                if not hasattr(here, name):
                    here.add_module(name, nn.Module())
                here = here.get_submodule(name)
            here.add_module(names[-1], models.Block(8, 0.0))
        return root

    def listed(path: str, count: int) -> list[str]:
        return [f"{path}.{i}" for i in range(count)]

    named = tree("block_10", "block_2", "block_0", "head")
    ordered = ["block_0", "block_2", "block_10"]
    encoder, net = nn.Module(), nn.Module()
    encoder.model = nn.Module()
    encoder.model.encoder = nn.Module()
    encoder.model.encoder.layer = nn.ModuleDict({name: models.Block(8, 0.0) for name in ("low", "high")})
    net.net = nn.Sequential(nn.Linear(8, 8), *(models.Block(8, 0.0) for _ in range(4)), nn.Linear(8, 2))
    two = nn.Module()
    two.lower = nn.ModuleList(models.Block(8, 0.0) for _ in range(2))
    two.upper = nn.ModuleList(models.Block(8, 0.0) for _ in range(3))
    meant = {
        "model.encoder.layer": (encoder, ["model.encoder.layer.low", "model.encoder.layer.high"]),
        "net[1:5]": (net, [f"net.{i}" for i in range(1, 5)]),
        "block_*": (named, ordered),
        "model.layers.[0-5]": (tree(*listed("model.layers", 8)), listed("model.layers", 6)),
        "lower, upper": (two, [*listed("lower", 2), *listed("upper", 3)]),
        "up_3, up_2, up_1": (tree("up_1", "up_2", "up_3", "up_4"), ["up_3", "up_2", "up_1"]),
    }
    (code,) = blocks(BLOCKS, "python")
    for line in code.splitlines():
        layers = eval(line, prepared()).layers
        module, paths = meant.pop(layers if isinstance(layers, str) else ", ".join(layers))
        stack = find_stack(module, layers, who="page", in_runs=True)
        assert [id(block) for block in stack.blocks] == [id(module.get_submodule(path)) for path in paths]
    assert not meant


def test_python_of_the_page_of_the_bench_is_a_bench(trainers: Shortened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arms are made; the bench itself, which would run for minutes, has tests of its own."""
    seen: list[Any] = []
    monkeypatch.setattr(lightning_eff.Benchmark, "run", lambda self: seen.append(self))
    (code,) = blocks(BENCH, "python")
    names = execute(BENCH, code, prepared())
    for arm in ("baseline", "grown"):
        trainer, module, data = names[arm]()
        assert trainer is trainers.made[-1] and isinstance(module, pl.LightningModule) and len(data)
    assert [type(one).__name__ for one in seen] == ["Benchmark"]


def test_the_technique_that_a_page_writes_is_one(tmp_path: Path) -> None:
    """It changes training, is plain training where it is neutral, and resumes exactly."""
    (code,) = blocks(OWN, "python")
    Own = execute(OWN, code, {"__name__": "page"})["NoisyInputs"]

    def end(**settings: Any) -> Tensor:
        return models.flat(runs.fit("classifier", lambda: [Own(scale=0.5)], **settings)[0])

    whole = end(callbacks=[runs.SaveBatches(tmp_path, [7])])
    assert torch.equal(end(resume=tmp_path / "batch=7.ckpt"), whole)
    plain = models.flat(runs.plain("classifier")[0])
    assert not torch.equal(whole, plain)
    assert torch.equal(models.flat(runs.fit("classifier", lambda: [Own(scale=0.0)])[0]), plain)
    with pytest.raises(ValueError, match=r"NoisyInputs\(scale=-1\): expected >= 0"):
        Own(scale=-1)


class Adapted(nn.Module):
    """What the page of the ways in calls so: factors of low rank beside a linear map."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Parameter(torch.randn(rank, linear.in_features))
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.down.T @ self.up.T

    def fold(self) -> dict[str, Tensor]:
        bias = {} if self.linear.bias is None else {"bias": self.linear.bias}
        return {"weight": self.linear.weight + self.up @ self.down, **bias}


def test_python_of_the_ways_in_trains(tmp_path: Path) -> None:
    """Block after block, in one namespace; what the page leaves out of a class is given here."""
    mirrored, random_tokens, seen_branches, adapter, loaded, easier = blocks(WAYS_IN, "python")
    names: dict[str, Any] = {"__name__": "page", "Technique": Technique, "Stage": Stage, "Sequence": Sequence}
    names |= {"torch": torch, "Tensor": Tensor, "Adapted": Adapted, "lightning_eff": lightning_eff}

    def technique(name: str, **attributes: Any) -> Technique:
        told = {"saves": "", "paper": "", "kind": "callback", "control": lightning_eff.ExactResume.control}
        return type(name, (names[name],), told | attributes)()

    def ends(one: Technique, model: str = "tiny_gpt", **settings: Any) -> tuple[pl.LightningModule, pl.Trainer]:
        net, trainer = runs.fit(model, lambda: [one], **settings)
        assert models.flat(net).isfinite().all()
        return net, trainer

    plain = models.flat(runs.plain("tiny_gpt")[0])
    execute(WAYS_IN, mirrored, names)
    assert not torch.equal(models.flat(ends(technique("Mirrored", labels=None))[0]), plain)
    execute(WAYS_IN, random_tokens, names)
    assert not torch.equal(models.flat(ends(technique("RandomTokens", keep=8, layers=None))[0]), plain)

    module = models.TinyGPT()
    batch = models.make_batch("tiny_gpt")
    names |= {"module": module, "loss": F.cross_entropy(module(batch["input_ids"]).mT, batch["labels"])}
    execute(WAYS_IN, seen_branches, names)
    assert len(names["branches"](names["graph"])) == 8 and len(names["heads"](names["graph"])) == 1

    execute(WAYS_IN, adapter, names)
    changed, trainer = ends(names["LowRankAdapter"](rank=2), samples=8)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    names |= {"path": tmp_path / "last.ckpt", "Plain": models.TinyGPT, "lightning_eff": lightning_eff}
    execute(WAYS_IN, loaded.replace("rank=8", "rank=2"), names)
    assert names["plain"].state_dict().keys() == models.TinyGPT().state_dict().keys()
    ids = batch["input_ids"]
    torch.testing.assert_close(names["plain"].eval()(ids), changed.eval()(ids))

    execute(WAYS_IN, easier, names)
    whole = models.flat(ends(technique("Easier"), callbacks=[runs.SaveBatches(tmp_path, [7])])[0])
    assert not torch.equal(whole, plain)
    assert torch.equal(models.flat(ends(technique("Easier"), resume=tmp_path / "batch=7.ckpt")[0]), whole)


def test_python_on_the_cards_makes_trainers(trainers: Shortened) -> None:
    """As it stands there, of every card; that each trains is for the contract."""
    made = 0
    for name in cards.names():
        card = cards.card(name)
        for code in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
            execute(cards.file_of(name), code, {"__name__": "card"})
            assert len(trainers.made) > made, f"{name}: its code makes no trainer"
            made = len(trainers.made)
    assert made > 100


def test_the_notebook_prints_what_it_shows() -> None:
    """All but the digits, which are of one machine and one Python's source text; and Muon does gain there."""

    def digits(text: str) -> str:
        return re.sub(r"-?\d[\d.]*", "#", text)

    shown = [notebook.printed(cell) for cell in notebook.cells() if cell["cell_type"] == "code"]
    found = list(notebook.run())
    assert list(map(digits, found)) == list(map(digits, shown))
    plain, muon, longer = (float(re.search(r"loss (\d\.\d+)", text)[1]) for text in found[2:5])  # pyright: ignore[reportOptionalSubscript]
    assert muon < longer < plain
    assert len(notebook.FILE.read_text()) < 12_000
    for cell in notebook.cells():
        for target in re.findall(r"\]\(([^)#]+)", notebook.source(cell)) if cell["cell_type"] == "markdown" else []:
            assert (notebook.FILE.parent / target).is_file(), target


# -- YAML


@pytest.mark.filterwarnings("ignore:LatestWeightAveraging.* nothing will be averaged")
@pytest.mark.parametrize("page", with_blocks("yaml"))
def test_yaml_in_a_page_trains(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the command line reads it, on a small GPT; where it names an example, on a small one."""
    monkeypatch.chdir(ROOT)
    data_set = models.loader("tiny_gpt").dataset
    save(tmp_path / "kept.npz", num_samples=len(data_set), fingerprint="", indices=range(8))  # pyright: ignore[reportArgumentType]
    for text in blocks(page, "yaml"):
        config = yaml.safe_load(text.replace("kept.npz", str(tmp_path / "kept.npz")).replace("/shared", str(tmp_path)))
        if config["trainer"].get("num_nodes", 1) > 1:
            continue  # it trains in tests/strategies/test_several_machines.py
        short = {"max_steps": 2, "accelerator": "cpu", "devices": 1, "limit_val_batches": 0, "logger": False}
        quiet = {"enable_progress_bar": False, "enable_model_summary": False}
        quiet["enable_checkpointing"] = "ModelCheckpoint" in text
        config["trainer"] = {**config["trainer"], **short, **quiet}
        own = {"class_path": "tests.models.TinyGPT", "init_args": {"num_layers": 12, "dim": 32}}
        model = config.setdefault("model", own)
        data = config.setdefault("data", {"class_path": "tests.cli_data.Sequences"})
        if model is not own:
            model["init_args"] |= {"dim": 16, "num_layers": 2, "num_heads": 2, "block_size": 32, "num_samples": 0}
            data["init_args"] = {"block_size": 32, "batch_size": 4, "max_bytes": 100_000}
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(config))
        made = Unrun(["fit", "--config", str(path)], save_config_callback=None)
        made.trainer.fit(made.model, datamodule=made.datamodule)
        assert made.trainer.global_step == 2
        named = {entry["class_path"].rpartition(".")[2] for entry in config["trainer"].get("callbacks") or ()}
        assert named <= {type(callback).__name__ for callback in made.trainer.callbacks}


# -- commands

INLINE = re.compile(r"(?<!`)`((?:lightning-eff|make|pip|python -m) [^`\n]+)`")


def commands(text: str, language: str = "bash") -> Iterator[str]:
    """Those of a page's blocks, and those in its sentences."""
    for _, found, body in BLOCK.findall(text):
        if found == language:
            yield from (line for line in textwrap.dedent(body).splitlines() if line.partition("#")[0].strip())
    yield from INLINE.findall(BLOCK.sub("", text))


PARSERS = {
    "advise": advise.parser,
    "bench": bench.parser,
    "merge": merge.parser,
    "plan": plan.parser,
    "tune": tune.parser,
}


def check(command: str) -> None:
    """That a command's program takes these words; only ``techniques``, which trains nothing, is run."""
    if "..." in command:
        return
    program, *words = shlex.split(command, comments=True)
    if program == "make":
        goals = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[0] in goals, f"{command}: expected one of {goals}"
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = re.findall(r"\[([\w,]+)\]", command)
        assert words[0] == "install" and all(extra in extras for some in named for extra in some.split(",")), command
        assert all((ROOT / words[i + 1]).is_file() for i, word in enumerate(words) if word == "-c"), command
    elif program == "python":
        assert words[0] == "-m" and importlib.util.find_spec(words[1]) is not None, command
    elif program == "srun":
        check(shlex.join(words))
    elif program == "torchrun":
        asked = get_args_parser().parse_args(words)
        check(shlex.join([asked.training_script, *asked.training_script_args]))
    elif words[1:] == []:
        assert words[0] in cli.COMMANDS, command
    elif words[0] in PARSERS:
        if words[:2] not in (["bench", "report"], ["bench", "compare"]):
            PARSERS[words[0]]().parse_args(words[1:])
    elif words[0] == "select":
        select.parser(words[1]).parse_args(words[2:])
    elif words[0] in ("fit", "validate", "test", "predict"):
        given = list(zip(words[1::2], words[2::2], strict=True))
        assert {option for option, _ in given} <= {"--config", "--recipe"}, command
        for name in (value for option, value in given if option == "--recipe"):
            resolving.named(name)
        for path in (value for option, value in given if option == "--config"):
            there = (
                (ROOT / path).is_file() or "/" not in path or path.startswith("lightning_logs/")
            )  # which a tool writes
            assert there, f"{command}: there is no {path}"
    else:
        cli.main(words)


@pytest.mark.parametrize("page", [page for page in WRITTEN if [*commands(WRITTEN[page])]])
def test_commands_in_a_page_are_taken(page: str) -> None:
    for command in commands(WRITTEN[page]):
        check(command)


def test_strategies_that_pages_name_are_known() -> None:
    strategies = {(page, name) for page, text in WRITTEN.items() for name in re.findall(r'strategy="(\w+)"', text)}
    known = {"auto", *StrategyRegistry.available_strategies()}
    assert [name for _, name in strategies if name not in known and sized(name) is None] == []
    assert len(strategies) > 3


@pytest.mark.parametrize(
    "command",
    [
        "lightning-eff bench --baseline a.yaml --recipe b.yaml --target x --budget 1s --sead 3",
        "lightning-eff techniqes",
        "lightning-eff techniques --grop tokens",
        "lightning-eff fit --config examples/gpt/fast.yaml",
        "make demos",
        "pip install 'lightning-eff[tuning]'",
        "python -m docs.make",
    ],
)
def test_a_slip_in_a_command_is_found(command: str) -> None:
    assert [*commands(f"```bash\n{command}\n```")] == [command] == [*commands(f"Say `{command}`.")]
    with pytest.raises((AssertionError, SystemExit, ValueError)):
        check(command)


def test_a_slip_in_code_is_found(trainers: Shortened) -> None:
    with pytest.raises(TypeError, match="staged"):
        execute("page", "ProgressiveStacking(staged=[])", prepared())
    execute("page", "L.Trainer(callbacks=[ProgressiveStacking(stages=[(0.0, 1), (0.5, 99)])])", prepared())
    with pytest.raises(ValueError, match="99 blocks"):
        trainers.fit()
