"""Stochastic depth: an unbiased branch in both modes, blocks that do no work, and stages of several widths."""

import copy
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_eff import StochasticDepth
from lightning_eff._core.rng import keyed_generator
from lightning_eff.model.growth._shallower import Shallower
from lightning_eff.model.growth.stochastic_depth import drop_samples, mean_kept, sample_dim
from tests.cases import Case, no_blocks
from tests.model.growth.residual import PlainResNet, PostNorm
from tests.models import TinyGPT, flat, hugging_face, loader, make_batch, trainer
from tests.runs import SaveBatches, differences, final_state, fit_yaml

CASES = {
    "StochasticDepth": Case(
        active=lambda: StochasticDepth(drop=0.7),
        neutral=lambda: StochasticDepth(drop=0.0),
        lost=(no_blocks, "classifier", "no stack of repeated blocks"),
        refuses={"classifier": "does not return its input plus something"},
    )
}


def blocks_of(net: nn.Module) -> list[Any]:
    return next(list(m) for m in net.modules() if isinstance(m, nn.ModuleList))


class Seen(pl.Callback):
    """By batch: which of some blocks were called, and which got gradients."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        self.called: list[list[int]] = []
        self.grads: list[list[bool]] = []
        self._blocks, self._now = blocks, [0] * len(blocks)
        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda *_, i=i: self._count(i))

    def _count(self, i: int) -> None:
        self._now[i] += 1

    def on_train_batch_end(self, *args: Any) -> None:
        self.called.append(self._now)
        self.grads.append([all(p.grad is not None for p in block.parameters()) for block in self._blocks])
        self._now = [0] * len(self._now)


# -- T: the expectation over the masks is what evaluation returns, for one block


class OneBlock(pl.Callback):
    """What the third block was given and handed on in each batch, and what a copy of it from before makes of the same."""

    def __init__(self, block: nn.Module) -> None:
        self.alone, self.block = copy.deepcopy(block).eval(), block
        self.rows: list[tuple[Tensor, Tensor, Tensor]] = []

    def on_train_start(self, *args: Any) -> None:
        self.block.register_forward_hook(self._note, with_kwargs=True)

    def _note(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        with torch.no_grad():
            plain = self.alone(*args, **kwargs)
        first = (value[0] if isinstance(value, tuple) else value for value in (plain, output))
        self.rows.append((args[0].detach(), *(value.detach() for value in first)))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("mode", ["batch", "sample"])
@pytest.mark.parametrize("name", ["gpt2", "post_norm"])
def test_the_expectation_of_a_block_is_its_output_in_evaluation(mode: str, name: str) -> None:
    """A kept branch is 1/p times the plain block's, and a dropped one nothing; kept as often as p."""
    pl.seed_everything(1, verbose=False)
    net: Any = PostNorm() if name == "post_norm" else hugging_face(name)
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.0)
    one, p, steps = OneBlock(blocks_of(net)[2]), 1 - 0.75 * 0.6, 60
    data = loader("tiny_gpt" if name == "post_norm" else name, 4 * steps)
    trainer(StochasticDepth(drop=0.6, mode=mode), one, max_steps=steps).fit(net, data)
    dim = 1 if name == "post_norm" else 0
    kept = []
    for entered, plain, left in one.rows if mode == "sample" else one.rows[1:]:  # none dropped before blocks were seen
        for h, f, found in zip(entered.unbind(dim), plain.unbind(dim), left.unbind(dim), strict=True):
            expected = h + (f - h) / p
            kept.append(not torch.equal(found, h))
            assert torch.allclose(found, expected if kept[-1] else h, rtol=0, atol=1e-5)
            assert not torch.allclose(expected, f, rtol=0, atol=1e-4)
    share, draws = sum(kept) / len(kept), len(kept) if mode == "sample" else steps - 1
    assert abs(share - p) < 3 * math.sqrt(p * (1 - p) / draws)
    apart = {len({*kept[i : i + 4]}) for i in range(0, len(kept), 4)}
    assert apart == ({1, 2} if mode == "sample" else {1}), "whether the samples of a batch are drawn for by themselves"


def test_the_rule() -> None:
    h, f = torch.zeros(5000, 1), torch.ones(5000, 1)
    found = drop_samples(h, f, 0.8, keyed_generator(1), dim=0)
    assert torch.equal(found.unique(), torch.tensor([0.0, 1.25]))
    assert abs(float(found.mean()) - 1.0) < 4 * math.sqrt(0.8 * 0.2 / 5000) / 0.8
    assert torch.equal(drop_samples(h, f, 1.0, keyed_generator(1), dim=0), f)
    assert drop_samples(h.bfloat16(), f, 0.5, keyed_generator(1), dim=0).dtype == torch.float32
    assert mean_kept(4, drop=0.5) == pytest.approx(4 - 0.5 * 2.5)
    assert sample_dim(nn.TransformerEncoderLayer(8, 2)) == 1
    assert sample_dim(nn.TransformerEncoderLayer(8, 2, batch_first=True)) == 0


# -- the work that is saved, and that which is not


def test_a_batchs_dropped_blocks_do_no_work_and_a_samples_do_all() -> None:
    for mode in ("batch", "sample"):
        net = TinyGPT()
        seen = Seen(blocks_of(net))
        technique = StochasticDepth(drop=0.7, mode=mode)
        trainer(technique, seen, max_steps=20).fit(net, loader("tiny_gpt"))
        assert [[bool(n) for n in row] for row in seen.called] == seen.grads
        ran = sum(map(sum, seen.called))
        if mode == "sample":
            assert ran == 80
            assert technique.summary().endswith("no work saved")
            assert technique.report() == {"layers_dropped": 0, "drop": 0.7}
        else:
            assert abs(ran - 4 - 19 * mean_kept(4, drop=0.7)) < 12
            assert technique.summary().startswith(f"dropped {(80 - ran) / 80:.1%} of block passes, of 4 blocks of 'bl")


def test_blocks_of_all_stages_are_dropped_but_those_that_change_the_shape() -> None:
    """Of a network without norms whose stages have several widths; ``l`` counts through them."""
    for mode in ("batch", "sample"):
        net = PlainResNet()
        seen = Seen(net.blocks())
        technique = StochasticDepth(drop=0.9, mode=mode)
        trainer(technique, seen, max_steps=30).fit(net, loader("vit"))
        dropped = [30 - sum(called) for called in zip(*seen.called, strict=True)]
        if mode == "sample":
            assert dropped == [0] * 7
        else:
            assert dropped[3] == dropped[5] == 0, "they halve the image"
            assert all(dropped[i] for i in (0, 1, 2, 4, 6)) and dropped[6] > dropped[0]
        assert "of 7 blocks of 'stages.0', 'stages.1', 'stages.2'" in technique.summary()


def test_its_control_is_a_shallower_network_in_each_stage() -> None:
    recipe = StochasticDepth(drop=0.5)
    (arm,) = recipe.control.arms(recipe).values()
    assert isinstance(arm, Shallower) and arm.kept(4) == mean_kept(4, drop=0.5)
    net = PlainResNet((4, 2))
    seen = Seen(net.blocks())
    trainer(arm, seen, max_steps=1).fit(net, loader("vit"))
    assert seen.called == [[1, 1, 1, 0, 1, 0]]  # 4.25 of 6
    assert StochasticDepth(drop=0.5, mode="sample").control.arms(StochasticDepth(mode="sample")) == {}
    assert recipe.control.arms(StochasticDepth(drop=0.0)) == {}


def test_evaluation_is_the_plain_modules() -> None:
    """In the fit and after it, whatever was dropped: the same as of a module that has none of this, bit for bit."""
    found: list[float] = []

    class Compares(pl.Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            batch, other = make_batch("tiny_gpt", 4, seed=5), TinyGPT().eval()
            other.load_state_dict(pl_module.state_dict())
            with torch.no_grad():
                plain = nn.functional.cross_entropy(other(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
            found.append(float(trainer.callback_metrics["val_loss"] - plain))

    for mode in ("batch", "sample"):
        t = trainer(StochasticDepth(mode=mode), Compares(), max_steps=4, limit_val_batches=1, val_check_interval=2)
        t.fit(TinyGPT(), loader("tiny_gpt"), loader("tiny_gpt", 4, shuffle=False, seed=5))
    assert found == [0.0] * len(found) and len(found) >= 4


# -- resuming, checkpointing


@pytest.mark.parametrize("mode", ["batch", "sample"])
def test_resumes_exactly_in_stages_and_windows(mode: str, tmp_path: Path) -> None:
    """Also in the first window, when nothing is dropped since no block has been seen."""

    def train(*saving: pl.Callback, resume: Path | None = None) -> dict[str, Tensor]:
        pl.seed_everything(3, verbose=False)
        net = PlainResNet()
        pl.seed_everything(3 if resume is None else 99, verbose=False)
        t = trainer(StochasticDepth(drop=0.8, mode=mode), *saving, max_steps=4, accumulate_grad_batches=3)
        t.fit(net, loader("vit"), ckpt_path=resume)
        return final_state(net, t)

    whole = train(SaveBatches(tmp_path, (2, 4)))
    for batch in (2, 4):
        assert differences(whole, train(resume=tmp_path / f"batch={batch}.ckpt")) == []


def test_checkpointed_blocks_draw_the_same_when_they_run_again() -> None:
    weights = []
    for again in (False, True):
        pl.seed_everything(1, verbose=False)
        net = hugging_face("gpt2")
        if again:
            model: Any = net.model
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        trainer(StochasticDepth(drop=0.8, mode="sample"), max_steps=3).fit(net, loader("gpt2"))
        weights.append(flat(net))
    assert torch.equal(*weights)


# -- errors, and by a YAML


@pytest.mark.parametrize("value", [-0.1, 1.0, math.nan])
def test_drop_is_a_probability(value: float) -> None:
    with pytest.raises(
        ValueError, match=rf"drop={value}\): expected a number in \[0, 1\): the probability.*default is 0.5"
    ):
        StochasticDepth(drop=value)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mode='row'\): expected 'batch' or 'sample': what a draw holds for"):
        StochasticDepth(mode="row")
    with pytest.raises(ValueError, match=r"layers='stem'\): that path is a Conv2d .* Candidates: 'stages\.0'"):
        trainer(StochasticDepth(layers="stem"), max_steps=1).fit(PlainResNet(), loader("vit"))
    net = PlainResNet((1, 1, 1))
    with pytest.raises(ValueError, match=r"every block of .* changes the shape of the hidden state"):
        trainer(StochasticDepth(layers=["stages.1", "stages.2"]), max_steps=3).fit(net, loader("vit"))

    class Joined(TinyGPT):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids).view(2, -1, self.dim)
            for block in self.blocks or ():
                x = block(x)
            return self.head(x).view(*ids.shape, -1)

    with pytest.raises(
        ValueError, match=r"block 0 of 'blocks'.* \(2, 64, 16\), without the batch's 4 samples in dimension 0"
    ):
        trainer(StochasticDepth(mode="sample"), max_steps=1).fit(Joined(), loader("tiny_gpt"))


def test_runs_by_a_yaml(tmp_path: Path) -> None:
    fit_yaml(
        tmp_path, "StochasticDepth", {"drop": 0.5, "mode": "sample"}, model="TinyGPT", data="Sequences", max_steps=2
    )
