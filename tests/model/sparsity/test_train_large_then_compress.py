"""TrainLargeThenCompress: the curve's rule against Lightning's own EarlyStopping and closed forms; zeros and grids as asked."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn

from lightning_eff import LayerFreezing, TrainLargeThenCompress
from lightning_eff.model.sparsity.train_large_then_compress import flattened, on_grid, survivors
from tests.cases import Case, no_map
from tests.families import module as family
from tests.model.sparsity.sparse import Counts, fit_on, sparsity_of
from tests.models import TinyGPT, hugging_face, loader, make_batch, trainer
from tests.runs import SaveBatches, differences, final_state, fit, fit_yaml

CASES = {
    "TrainLargeThenCompress": Case(
        active=lambda: TrainLargeThenCompress(sparsity=0.5, window=2, patience=20, latest=0.5, retrain=0.5, rounds=2),
        neutral=lambda: TrainLargeThenCompress(sparsity=0.0, bits=None),
        lost=(no_map, "classifier", "no trainable weight of a linear layer or convolution"),
        refuses_manual=True,  # with patience
    )
}


# -- the rules


def stops_at(curve: list[float], gain: float, patience: int) -> int | None:
    """How many numbers of the curve are seen until it is flat."""
    return next((k for k in range(1, len(curve) + 1) if flattened(curve[:k], gain=gain, patience=patience)), None)


def early_stopping(curve: list[float], gain: float, patience: int) -> int | None:
    """The same by Lightning's callback: on logarithms, a share of the loss is a difference."""
    callback = EarlyStopping("loss", min_delta=-math.log1p(-gain), patience=patience, check_finite=False)
    for k, m in enumerate(curve, start=1):
        if callback._evaluate_stopping_criteria(torch.tensor(m, dtype=torch.float64).log())[0]:
            return k
    return None


@pytest.mark.parametrize("patience", [1, 2, 5])
@pytest.mark.parametrize("gain", [0.003, 0.02, 0.1])
def test_the_curve_is_flat_where_lightnings_early_stopping_ends(gain: float, patience: int) -> None:
    g = torch.Generator().manual_seed(patience)
    for noise in (0.0, 0.01, 0.1):
        for c in (0.1, 0.5, 1.5):
            t = torch.arange(1, 120, dtype=torch.float64)
            drawn = torch.randn(len(t), generator=g, dtype=torch.float64)
            curve = ((1.0 + 3.0 * t**-c) * (noise * drawn).exp()).tolist()
            assert stops_at(curve, gain, patience) == early_stopping(curve, gain, patience)


def test_a_curve_without_noise_is_flat_where_its_slope_says_so() -> None:
    # L_k = 1 + 2^-k falls by the share 2^-k / (1 + 2^-(k-1)) at the k-th number; it is below 1 % first at k = 7
    curve = [1.0 + 2.0**-k for k in range(1, 20)]
    first = next(k for k in range(2, 20) if 2.0**-k / (1.0 + 2.0 ** (1 - k)) <= 0.01)
    assert first == 7
    assert stops_at(curve, 0.01, 1) == 7
    # later gains add up to less than 1 % of what it waits for (2^-6 / (1 + 2^-6) = 1.5 %) from k = 7 on: 2^-6 - 2^-k
    later = next(k for k in range(7, 20) if 2.0**-6 - 2.0**-k > 0.01 * (1.0 + 2.0**-6))
    assert later == 8 and stops_at(curve, 0.01, 2) == 8 + 2
    # a steady fall of 3 % never ends, and one of 0.4 % adds up within 3 numbers
    assert stops_at([0.97**k for k in range(200)], 0.02, 1) is None
    assert stops_at([0.996**k for k in range(200)], 0.01, 2) == 3
    assert stops_at([0.996**k for k in range(200)], 0.01, 3) is None
    assert stops_at([-1.0, -1.1, -1.2, -1.21], 0.05, 1) == 4, "losses may be below zero"
    assert stops_at([2.0, math.nan, math.nan], 0.01, 2) == 3


def test_each_round_keeps_the_same_share_of_what_is_left() -> None:
    kept = [survivors(10_000, sparsity=0.9, done=k, rounds=4) for k in range(5)]
    assert kept == [10_000, 5623, 3162, 1778, 1000]
    assert survivors(3, sparsity=0.99, done=1, rounds=1) == 1


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_grid_is_even_keeps_zeros_and_is_the_nearest(bits: int) -> None:
    torch.manual_seed(0)
    w = torch.randn(5, 300) * torch.tensor([[1.0], [10.0], [0.1], [1e-4], [0.0]])
    w[:, ::3] = 0.0
    ours = on_grid(w, bits, [1])
    assert not ours[w == 0].any() and torch.equal(ours[4], w[4])
    for row, was in zip(ours[:4], w[:4], strict=True):
        step = float(was.abs().max()) / (2 ** (bits - 1) - 1)
        grid = torch.arange(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1)) * step
        nearest = grid[(was[:, None] - grid).abs().argmin(1)]
        torch.testing.assert_close(row, nearest, rtol=1e-5, atol=1e-5 * step)
        assert len(row.unique()) <= 2**bits - 1
    whole = on_grid(w, bits, [0, 1])
    assert len(whole.unique()) <= 2**bits - 1 < len(ours.unique())


# -- the run


class Flat(TinyGPT):
    """A loss whose curve is that of ``1 + 2^-k`` by steps, with the network's own gradient."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss - loss.detach() + 1.0 + 2.0 ** -(self.trainer.global_step + 1)


def flat(window: int = 1) -> TrainLargeThenCompress:
    return TrainLargeThenCompress(
        sparsity=0.8, bits=4, window=window, patience=1, gain=0.01, latest=0.6, retrain=0.2, rounds=2, scope="layer"
    )


def run(technique: TrainLargeThenCompress, *callbacks: Any, resume: Path | None = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    net = Flat(2, dropout=0.0)
    t = trainer(technique, *callbacks, max_steps=20, enable_checkpointing=bool(callbacks), **settings)
    t.fit(net, loader("tiny_gpt", 80 * settings.get("accumulate_grad_batches", 1), shuffle=False), ckpt_path=resume)
    return net, t


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_flat_curve_ends_the_training_and_the_run(accumulate: int) -> None:
    technique, counts = flat(), Counts()
    net, t = run(technique, counts, accumulate_grad_batches=accumulate)
    assert technique.report()["stopped"] == pytest.approx(7 / 20), "flat at the curve's seventh number"
    assert t.global_step == 7 + 4, "a fifth of the budget later"
    assert [len(m) for m in counts.masks[:7]] == [0] * 7
    for step, k in ((7, 1), (8, 1), (9, 2), (10, 2)):
        for mask in counts.masks[step].values():
            assert int(mask.sum()) == survivors(mask.numel(), sparsity=0.8, done=k, rounds=2)
    assert counts.leaks == []
    first, last = counts.masks[7], counts.masks[-1]
    for name, w in counts.weights[8].items():
        assert not (last[name] & ~first[name]).any(), "masks only grow"
        gone, left = w.abs()[first[name] & ~last[name]], w.abs()[last[name]]
        assert float(gone.max()) <= float(left.min()), "the smallest go"
    named = dict(net.named_parameters())
    for name, mask in last.items():
        w = named[name].detach()
        assert not w[~mask].any()
        assert max(len(row.unique()) for row in w) <= 15 < len(w.unique())
        torch.testing.assert_close(on_grid(w, 4, [1]), w, rtol=1e-6, atol=0.0)


def test_latest_ends_the_training_where_the_curve_does_not() -> None:
    technique = TrainLargeThenCompress(window=1, patience=None, latest=0.5, retrain=0.3, bits=None)
    _, t = run(technique)
    assert technique.report()["stopped"] == 0.5 and t.global_step == 16
    assert technique.report()["sparsity"] == pytest.approx(0.6, abs=1e-3)


def test_resumes_around_the_stop_and_the_complete_run_resumes_to_nothing(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    net, t = run(flat(window=2), save)
    whole = final_state(net, t)
    assert t.global_step == 10 + 4
    for step in (3, 10, 13, 14):
        again, t = run(flat(window=2), resume=tmp_path / f"step={step}.ckpt")
        assert t.global_step == 14
        left = set(differences(whole, final_state(again, t)))
        assert not left - ({"steps"} if step == 14 else set()), "Lightning counts no epoch where nothing is trained"
    saved = torch.load(tmp_path / "step=14.ckpt", weights_only=True)["state_dict"]
    for name, p in net.state_dict().items():
        assert torch.equal(saved[name], p), "the last step's checkpoint is the compressed network"


def test_resumes_where_another_has_frozen_what_will_be_masked(tmp_path: Path) -> None:
    def build() -> list[Any]:
        return [LayerFreezing(start=0.0, end=0.3), TrainLargeThenCompress(patience=None, latest=0.6, retrain=0.4)]

    whole = final_state(*fit("tiny_gpt", build, callbacks=[SaveBatches(tmp_path, [5, 7])], max_steps=8))
    for batch in (5, 7):
        again = final_state(*fit("tiny_gpt", build, resume=tmp_path / f"batch={batch}.ckpt", max_steps=8))
        assert differences(whole, again) == []


def test_what_ends_the_run_earlier_leaves_it_compressed_and_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    class Ends(EarlyStopping):
        def __init__(self) -> None:
            super().__init__("val_loss", check_on_train_epoch_end=False)

        def on_train_batch_end(
            self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            trainer.should_stop = trainer.global_step >= 2

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            pass

    technique = flat()
    net, t = run(technique, Ends())
    assert t.global_step == 2 and technique.report()["sparsity"] == pytest.approx(0.8, abs=2e-3)
    assert "0 of 2 prunings" in "".join(capfd.readouterr())
    assert max(len(row.unique()) for row in net.head.weight) <= 15


@pytest.mark.parametrize("name", ["gpt2", "qwen3_moe", "resnet", "modernbert"])
def test_unchanged_modules(name: str) -> None:
    net: Any = hugging_face("gpt2", 2) if name == "gpt2" else family(name)
    technique = TrainLargeThenCompress(sparsity=0.7, bits=3, patience=None, latest=0.3, retrain=0.7, rounds=2)
    counts = fit_on(net, make_batch("vit" if name == "resnet" else "gpt2"), technique, steps=3)
    assert counts.leaks == [] and sparsity_of(counts) == pytest.approx(0.7, abs=2e-3)
    rows = 0
    for path, m in net.named_modules():
        if type(m).__name__ == "Conv1D":
            assert max(len(column.unique()) for column in m.weight.T) <= 7, path
            rows = max(rows, max(len(row.unique()) for row in m.weight))
        if isinstance(m, nn.Conv2d):
            assert max(len(row.unique()) for row in m.weight) <= 7, path
    if name == "qwen3_moe":
        (first, *_) = [p for n, p in net.named_parameters() if n in counts.masks[-1] and p.ndim == 3]
        assert max(len(rows.unique()) for expert in first for rows in expert) <= 7
    if name == "gpt2":
        assert rows > 7, "its outputs are columns"
        assert len(net.model.transformer.wte.weight.unique()) > 1000, "a tied head is an embedding, and stays"


def test_quantises_alone(tmp_path: Path) -> None:
    net, t = fit("classifier", lambda: [TrainLargeThenCompress(sparsity=0.0, bits=2, patience=None)], max_steps=4)
    for m in net.modules():
        if isinstance(m, nn.Linear):
            assert max(len(row.unique()) for row in m.weight) <= 3
    t.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"masks were made with .*'bits': 2.*this run has .*'bits': 4"):
        fit("classifier", lambda: [TrainLargeThenCompress(sparsity=0.0, bits=4)], resume=tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparsity": 1.0}, r"TrainLargeThenCompress\(sparsity=1.0\): expected a number in \[0, 1\)"),
        ({"bits": 1}, r"bits=1.: expected an integer in \[2, 16\], or None: the number of bits"),
        ({"window": 0}, "window=0.: expected an integer >= 1"),
        ({"patience": 1.5}, "patience=1.5.: expected an integer"),
        ({"rounds": None}, "rounds=None.: expected an integer"),
        ({"gain": 1.0}, r"gain=1.0.: expected a number in \[0, 1\): the fraction by which"),
        ({"latest": 1.0}, r"latest=1.0.: expected a number in \(0, 1\): the fraction of the budget"),
        ({"latest": 0.9}, r"latest=0.9, retrain=0.25.: together they exceed the budget\. Give retrain=0.1 or less"),
        ({"scope": "row"}, "scope='row'.: expected"),
    ],
)
def test_bad_arguments(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainLargeThenCompress(**settings)


def test_from_yaml(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "TrainLargeThenCompress", {"sparsity": 0.5, "patience": None, "bits": 4}, max_steps=4)
