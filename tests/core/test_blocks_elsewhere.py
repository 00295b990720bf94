"""Blocks that are in no list: every technique on blocks finds them, and trains as it does on a list."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_eff
from lightning_eff import (
    CompoundGrowth,
    DropIn,
    LayerFreezing,
    ProgressiveStacking,
    RandomLTD,
    Rematerialization,
    StochasticDepth,
    cli,
)
from tests.cases import CASES
from tests.core.elsewhere import LAYOUTS, Elsewhere, Numbered, in_the_list, plain_and_elsewhere
from tests.models import Block, hugging_face, loader, trainer
from tests.selection import one_of, share_of
from tests.test_cli import ROOT, config

ON_BLOCKS = [name for name in CASES if "layers" in inspect.signature(getattr(lightning_eff, name).__init__).parameters]
WHOLE_STEP = {"ActivationCompression", "ActivationOffload"}  # that act on the whole step unless they are told otherwise


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))


def same(other: pl.LightningModule, plain: pl.LightningModule) -> None:
    weights = in_the_list(other.state_dict())
    assert weights.keys() == plain.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())


def run(net: pl.LightningModule, technique: Any, name: str, *, steps: int = 12, **settings: Any) -> list[float]:
    losses = Losses()
    torch.manual_seed(1)
    fit = {key: settings.pop(key) for key in ("ckpt_path",) if key in settings}
    techniques = technique if isinstance(technique, list) else [technique]
    trainer(*techniques, losses, max_steps=steps, **settings).fit(net, loader(name, 48), **fit)
    return losses.seen


def on_names(name: str) -> Any:
    """The technique as in its case, on blocks, and with nothing drawn by the names of parameters."""
    if name == "CompoundGrowth":
        return CompoundGrowth(depth=[(0.0, 0.25), (0.4, 1.0)], width=[(0.0, 0.5), (0.6, 1.0)], noise=0.0)
    technique: Any = CASES[name].active()
    if name in WHOLE_STEP:
        technique.layers = "blocks" if name == "ActivationOffload" else None
    return technique


@pytest.mark.parametrize("name", [pytest.param(name, marks=one_of(3, name)) for name in ON_BLOCKS])
def test_every_technique_on_blocks_trains_as_on_a_list(name: str) -> None:
    model = CASES[name].model
    layout = LAYOUTS[share_of(3, name, "layout")] if model in ("tiny_gpt", "padded") else "within"
    plain, other = plain_and_elsewhere(model, layout)
    expected = run(plain, on_names(name), model)
    technique = on_names(name)
    if technique.layers is not None:
        technique.layers = {"attributes": "block_*", "dict": "stages", "within": ["body.layer1", "body.layer[2-4]"]}[
            layout
        ]
    found = run(other, technique, model)
    if name == "VisualPromptTuning":  # whose prompts are drawn by the names of blocks
        assert "prompts" in str(other.state_dict().keys())
    else:
        assert found == expected, layout
        same(other, plain)


FAMILIES: list[Callable[[], Any]] = [
    lambda: StochasticDepth(),
    lambda: LayerFreezing(start=0.1, end=0.8),
    lambda: ProgressiveStacking(stages=[(0.0, 1), (0.25, 2), (0.6, 4)]),
    lambda: DropIn(first=2, start=0.2, end=0.8),
    lambda: RandomLTD(start=0.25, until=0.8, multiple_of=4),
    lambda: Rematerialization("sqrt"),
]


@pytest.mark.parametrize("make", FAMILIES)
def test_every_layout_trains_as_a_list(make: Callable[[], Any]) -> None:
    plain, _ = plain_and_elsewhere("tiny_gpt", "attributes")
    expected = run(plain, make(), "tiny_gpt")
    for layout in LAYOUTS:
        _, other = plain_and_elsewhere("tiny_gpt", layout)
        technique = make()
        technique.layers = ["lower", "upper"] if layout == "two halves" and not stages(technique) else None
        if layout == "two halves" and stages(technique):
            technique.layers = "*er.*"  # as a path each would be a stage
        assert run(other, technique, "tiny_gpt") == expected, layout
        same(other, plain)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in other.modules()), "no trace"
        assert all(type(m) is Block for m in other.modules() if isinstance(m, Block))


def stages(technique: Any) -> bool:
    return isinstance(technique, StochasticDepth | LayerFreezing)


@pytest.mark.parametrize("make", FAMILIES[:4])
@pytest.mark.parametrize("layout", ["attributes", "dict"])
def test_a_run_resumes_from_a_checkpoint_of_the_plain_module(
    make: Callable[[], Any], layout: str, tmp_path: Path
) -> None:
    _, whole = plain_and_elsewhere("tiny_gpt", layout)
    losses = run(whole, make(), "tiny_gpt")
    _, first = plain_and_elsewhere("tiny_gpt", layout)
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    assert run(first, [make(), saving], "tiny_gpt", enable_checkpointing=True) == losses
    path = tmp_path / "step=5.ckpt"
    plain = Elsewhere(layout)
    plain.load_state_dict(torch.load(path, weights_only=True)["state_dict"], strict=True)
    _, resumed = plain_and_elsewhere("tiny_gpt", layout)
    assert run(resumed, make(), "tiny_gpt", ckpt_path=path) == losses[5:]
    assert all(map(torch.equal, resumed.state_dict().values(), whole.state_dict().values()))


def test_blocks_that_return_tuples_hand_them_on() -> None:
    nets = [hugging_face("gpt2", dropout=0.1), hugging_face("gpt2", dropout=0.1)]
    nets[1].load_state_dict(nets[0].state_dict())
    transformer: Any = nets[1].model.transformer
    transformer.h = Numbered(transformer.h)
    grow = [run(net, ProgressiveStacking(stages=[(0.0, 1), (0.5, 4)]), "gpt2", steps=6) for net in nets]
    drop = [run(net, StochasticDepth(), "gpt2", steps=6) for net in nets]
    assert grow[0] == grow[1] and drop[0] == drop[1]


def test_techniques_that_name_the_blocks_otherwise_act_on_one_stack(caplog: pytest.LogCaptureFixture) -> None:
    _, net = plain_and_elsewhere("tiny_gpt", "attributes")
    both = [StochasticDepth(layers="block_[0-9]"), Rematerialization(layers=[f"block_{i}" for i in range(4)])]
    with caplog.at_level("INFO"):
        run(net, both, "tiny_gpt", steps=2)
    assert caplog.text.count("blocks found at 'block_*' (4 x Block)") == 1


def test_the_command_line_takes_patterns_and_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    stages = {"stages": [[0.0, 2], [0.5, 4]], "layers": [f"blocks.{i}" for i in range(4)]}
    callbacks: list[dict[str, Any]] = [
        {"class_path": "ProgressiveStacking", "init_args": stages},
        {"class_path": "StochasticDepth", "init_args": {"layers": "blocks.*"}},
    ]
    cli.main(["fit", "--config", config(tmp_path, callbacks, max_steps=4)])
    assert "in 4 steps" in capsys.readouterr().out
    callbacks = [{"class_path": "Rematerialization", "init_args": {"layers": "blok.*"}}]
    with pytest.raises(SystemExit):
        cli.main(["fit", "--config", config(tmp_path, callbacks, max_steps=4)])
    told = capsys.readouterr().err
    assert "Rematerialization(layers='blok.*'): the pattern 'blok.*' matches no submodule of GPT." in told
    assert "'blocks' (4 x Block)" in told
