"""Delayed scaling: what goes into the history, what is left out, and that it resumes exactly."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_eff import ACTPrecision
from lightning_eff._core.technique import Technique
from lightning_eff.precision._scaling.history import AmaxHistory
from lightning_eff.precision._scaling.linear import DTYPES, Float8Linear
from lightning_eff.precision._scaling.products import emulated
from lightning_eff.precision.fp8 import FP8Precision
from tests.cases import CASES
from tests.models import flat, trainer
from tests.runs import MODES, checkpoints, differences, final_state, fit, resume_from_every_step


def plugin(**kwargs: Any) -> FP8Precision:
    return FP8Precision(**{"amax": "delayed", "history": 3, "backend": "emulated", "base": "32-true", **kwargs})


def resuming() -> list[Technique]:
    """What makes a run resume its data and its random numbers exactly, and changes no weight."""
    return [CASES["LatestWeightAveraging"].neutral()]


# -- the history by itself


def test_the_scale_is_that_of_the_largest_amax_of_the_last_steps() -> None:
    history = AmaxHistory(["a"], 3)
    f = Float8Linear("a", "tensorwise", emulated, fast=True, history=history, recording=lambda: True)
    sizes = [4.0, 1.0, 2.0, 0.5, 3.0, 1.0]
    expected = [4.0, 4.0, 4.0, 4.0, 2.0, 3.0]  # its own, then the largest of the three before
    for size, reference in zip(sizes, expected, strict=True):
        x = torch.tensor([[size, -size]])
        w = torch.ones(1, 2, requires_grad=True)
        pair, amax = f.cast(x, "x", rows=True, columns=False)
        assert amax == size and pair.rows is not None
        assert pair.scale == torch.tensor(448.0) / reference
        saturated = x.clamp(-reference, reference)
        torch.testing.assert_close(pair.rows.dequantized(), saturated, rtol=2.0**-4, atol=0)
        f(x, w, None).sum().backward()
        history.advance()
    assert history.amax[history.row("a", "x")].tolist() == sizes[:-4:-1]
    assert history.amax[history.row("a", "gradient")].tolist() == [1.0] * 3


def test_micro_batches_reruns_and_what_did_not_run() -> None:
    history = AmaxHistory(["a", "b"], 2)
    row = history.row("a", "x")
    for value in (1.0, 5.0, 5.0, 2.0):
        history.record(row, torch.tensor(value))
        assert history.peak("a", "x").value == -1.0, "nothing is known before the step has ended"
    history.advance()
    assert history.amax[row].tolist() == [5.0, -1.0]
    history.advance()
    assert history.amax[row].tolist() == [5.0, -1.0], "a map that did not run keeps its history"
    for bad in (torch.inf, torch.nan):
        history.record(row, torch.tensor(bad))
        history.advance()
        assert history.amax[row].tolist() == [5.0, -1.0], "an overflow is no measure"
    history.record(row, torch.tensor(0.0))
    history.advance()
    history.advance()
    assert history.amax[row].tolist() == [0.0, 5.0]
    assert (history.amax[3:] == -1).all()


def test_an_overflow_stays_visible_under_a_known_scale() -> None:
    history = AmaxHistory(["a"], 2)
    for role in DTYPES:
        history.record(history.row("a", role), torch.tensor(1.0))
    history.advance()
    f = Float8Linear("a", "tensorwise", emulated, fast=True, history=history, recording=lambda: False)
    x, w = torch.ones(2, 4, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    y = f(x, w, None)
    y.backward(torch.tensor([[1.0, torch.inf, 1.0], [1.0, 1.0, 1.0]]))
    assert y.isfinite().all()
    assert x.grad is not None and x.grad.isnan().any() and w.grad is not None and w.grad.isnan().any()


def test_only_backward_passes_that_are_recorded_count() -> None:
    """The forward pass finds the amax of x and W, but a backward pass of the Trainer decides whether they count."""
    history, recording = AmaxHistory(["a"], 2), [False]
    f = Float8Linear("a", "tensorwise", emulated, fast=True, history=history, recording=lambda: recording[0])
    x, w = torch.full((2, 4), 3.0, requires_grad=True), torch.full((3, 4), 2.0, requires_grad=True)
    for recording[0] in (False, True):
        f(x, w, None).sum().backward()
        history.advance()
        expected = [[3.0, -1.0], [2.0, -1.0], [1.0, -1.0]] if recording[0] else [[-1.0, -1.0]] * 3
        assert history.amax.tolist() == expected


def test_state_by_name_and_length() -> None:
    old = AmaxHistory(["a", "b"], 3)
    old.amax = torch.arange(18.0).view(6, 3)
    new = AmaxHistory(["b", "c"], 2)
    new.load_state_dict(old.state_dict())
    assert torch.equal(new.amax[:3], old.amax[3:, :2])
    assert (new.amax[3:] == -1).all()
    assert new.peak("b", "x").value == old.amax[3, :2].max() and new.peak("b", "x").known
    assert new.peak("c", "x").value == -1.0 and not new.peak("c", "x").known


# -- in a Trainer


class Watched(pl.LightningModule):
    """One linear map in each of two blocks, and the inputs that it has seen in training."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.seen: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(float(batch.abs().max()))
        return self.blocks[1](self.blocks[0](batch)).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.blocks[1](self.blocks[0](1000 * batch)).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows(p: FP8Precision, path: str) -> list[list[float]]:
    state = p.state_dict()["history"]
    start = 3 * state["maps"].index(path)
    return state["amax"][start : start + 3].tolist()


def test_one_entry_a_step_and_none_of_an_evaluation() -> None:
    torch.manual_seed(0)
    net, p = Watched(), plugin(history=2)
    data = torch.randn(6, 4, 8) * torch.tensor([1.0, 2.0, 7.0, 3.0, 5.0, 4.0]).view(6, 1, 1)
    t = trainer(max_steps=3, plugins=[p], accumulate_grad_batches=2, limit_val_batches=2, val_check_interval=2)
    t.fit(net, data, data)
    assert len(net.seen) == 6
    of_steps = [max(net.seen[i : i + 2]) for i in (0, 2, 4)]
    x, weight, gradient = rows(p, "blocks.0")
    assert x == of_steps[:0:-1]
    assert min(weight + gradient) > 0
    before = p.state_dict()["history"]["amax"].clone()
    t.validate(net, data, verbose=False)
    t.fit_loop.epoch_progress.reset()
    assert (before > 0).all()


class Manual(Watched):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        assert isinstance(optimizer, pl.core.optimizer.LightningOptimizer)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


def test_manual_optimization_does_the_same() -> None:
    def run(net: Watched) -> tuple[Tensor, list[list[float]]]:
        torch.manual_seed(0)
        for block in net.blocks:
            nn.init.normal_(block.weight)
        p = plugin(base="bf16-mixed")
        trainer(max_steps=4, plugins=[p]).fit(net, torch.randn(4, 4, 8))
        return flat(net), rows(p, "blocks.0")

    weights, history = run(Watched())
    other, found = run(Manual())
    assert torch.equal(weights, other) and history == found


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch, of its tracing
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # likewise
def test_compiled_blocks_leave_their_mark_too() -> None:
    def run(net: Watched) -> tuple[Tensor, Tensor]:
        p = plugin()
        trainer(max_steps=3, plugins=[p]).fit(net, torch.linspace(-1, 3, 96).view(3, 4, 8))
        return flat(net), p.state_dict()["history"]["amax"]

    torch.manual_seed(0)
    net = Watched()
    state = copy.deepcopy(net.state_dict())
    plain = run(net)
    compiled = Watched()
    compiled.load_state_dict(state)
    for block in compiled.blocks:
        block.compile(backend="aot_eager")
    for a, b in zip(plain, run(compiled), strict=True):
        assert torch.equal(a, b)
    assert (plain[1] > 0).all()


@pytest.mark.parametrize("mode", ["accumulate_clip", "bf16"])
def test_resume_equals_uninterrupted_from_every_step(mode: str, tmp_path: Path) -> None:
    settings = {key: value for key, value in MODES[mode].items() if key != "precision"}
    plugins = [plugin(base=MODES[mode].get("precision", "32-true"))]
    assert resume_from_every_step("tiny_gpt", resuming, tmp_path, plugins=plugins, **settings) == {}


def test_the_history_is_needed_to_resume(tmp_path: Path) -> None:
    """Without it the resumed run ends elsewhere, so the test above sees it; and a run inside of ACTPrecision has it."""
    whole = final_state(*fit("tiny_gpt", resuming, directory=tmp_path, plugins=[plugin()]))
    path = checkpoints(tmp_path)[5]
    saved = torch.load(path, weights_only=True)
    assert differences(whole, final_state(*fit("tiny_gpt", resuming, resume=path, plugins=[plugin()]))) == []
    del saved["FP8Precision"]["history"]
    torch.save(saved, tmp_path / "without.ckpt")
    found = fit("tiny_gpt", resuming, resume=tmp_path / "without.ckpt", plugins=[plugin()])
    assert differences(whole, final_state(*found)) != []


def test_inside_compressed_activations(tmp_path: Path) -> None:
    def run(**kwargs: Any) -> dict[str, Tensor]:
        return final_state(*fit("tiny_gpt", resuming, plugins=[ACTPrecision(bits=4, inner=plugin())], **kwargs))

    whole = run(directory=tmp_path)
    for path in checkpoints(tmp_path)[2:9:6]:
        assert differences(whole, run(resume=path)) == [], path.stem


def test_a_checkpoint_saved_after_fit_has_it(tmp_path: Path) -> None:
    p = plugin()
    _, t = fit("tiny_gpt", list, plugins=[p])
    t.save_checkpoint(tmp_path / "last.ckpt")
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["FP8Precision"]["history"]
    assert (state["amax"] > 0).all() and len(state["maps"]) == 16
