"""LAWA: the exact mean of the last k snapshots is validated, kept and left behind; training feels nothing of it."""

import copy
from fractions import Fraction
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_eff._core.session import Session
from lightning_eff.optim.averaging.latest_weight_averaging import LatestWeightAveraging, latest_mean
from tests.cases import Case
from tests.core.nop import Nop
from tests.models import TinyClassifier, flat, loader, module, trainer
from tests.optim.watch import State, Watch, differing, reference, state_of
from tests.runs import MODES, checkpoints, fit, resume_from_every_step

CASES = {
    "LatestWeightAveraging": Case(
        active=lambda: LatestWeightAveraging(window=3, interval=2),
        neutral=lambda: LatestWeightAveraging(start=1.0),
        anywhere=True,
    )
}

OURS = ("tiny_gpt", "classifier")

# -- the rule


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [1, 2, 3, 6, 7])
def test_mean_is_the_exact_mean_rounded_once(k: int, dtype: torch.dtype) -> None:
    snapshots = [(torch.randn(50) * 10.0 ** torch.randint(-2, 3, (50,))).to(dtype) for _ in range(k)]
    before = [w.clone() for w in snapshots]
    got = latest_mean(snapshots, device=torch.device("cpu"))
    exact = [sum((Fraction(w[i].item()) for w in snapshots), Fraction(0)) / k for i in range(50)]
    expected = torch.tensor([float(x) for x in exact], dtype=torch.float64)
    if dtype is torch.float64:  # here the sum itself rounds
        torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-15)
    else:
        assert torch.equal(got, expected.to(dtype))
    assert got.dtype == dtype
    assert all(torch.equal(a, b) for a, b in zip(before, snapshots, strict=True))


# -- which snapshots, and what fit leaves behind


@pytest.mark.parametrize(
    ("kwargs", "steps", "taken"),
    [
        ({"window": 3, "interval": 2}, [8, 10, 12], 6),
        ({"window": 6, "interval": 5}, [5, 10], 2),
        ({"window": 1, "interval": 5}, [10], 2),
        ({"window": 6}, [5, 10], 2),  # an epoch is 5 steps; the one that max_steps cuts short does not count
        ({"window": 1}, [10], 2),
        ({"window": 20, "interval": 1, "start": 0.5}, [7, 8, 9, 10, 11, 12], 6),  # step s runs at u = (s - 1) / 12
    ],
)
def test_final_weights_are_the_mean_of_the_last_snapshots(kwargs: dict[str, Any], steps: list[int], taken: int) -> None:
    watch, lawa = Watch(), LatestWeightAveraging(**kwargs)
    net, _ = fit("tiny_gpt", lambda: [lawa], callbacks=[watch])
    expected = reference(watch.raw, steps)
    assert expected.keys() == net.state_dict().keys()
    assert differing(state_of(net), expected) == []
    assert lawa.summary() == f"mean of the last {len(steps)} of {taken} snapshots"
    assert lawa.report() == {"snapshots": len(steps), "taken": taken}


@pytest.mark.parametrize(
    ("model", "mode"),
    [
        pytest.param(model, mode, marks=() if model in OURS or mode == "validate" else pytest.mark.slow)
        for model in (*OURS, "gpt2", "llama", "bert", "vit")
        for mode in sorted(MODES)
    ],
)
def test_training_goes_on_from_the_raw_weights(model: str, mode: str) -> None:
    watch, plain = Watch(), Watch()
    net, _ = fit(model, lambda: [LatestWeightAveraging(window=3, interval=2)], callbacks=[watch], **MODES[mode])
    plain_net, _ = fit(model, list, callbacks=[plain], **MODES[mode])
    assert watch.raw.keys() == plain.raw.keys() == set(range(1, 13))
    assert [step for step in plain.raw if differing(watch.raw[step], plain.raw[step])] == []
    assert differing(state_of(net), reference(plain.raw, [8, 10, 12])) == []
    assert not torch.equal(flat(net), flat(plain_net))
    assert watch.training == {True}


def test_offloaded_snapshots_give_the_same_mean() -> None:
    net, _ = fit("tiny_gpt", lambda: [LatestWeightAveraging(window=3, interval=2)])
    lawa = LatestWeightAveraging(window=3, interval=2, offload=True)
    other, _ = fit("tiny_gpt", lambda: [lawa])
    assert torch.equal(flat(net), flat(other))
    assert {w.device.type for snapshot in lawa.state_dict()["snapshots"] for w in snapshot.values()} == {"cpu"}


def test_holds_window_copies_of_what_is_trained() -> None:
    watch, lawa = Watch(), LatestWeightAveraging(window=3, interval=1)
    net = module("tiny_gpt")
    net.get_submodule("embed").requires_grad_(False)
    trainer(lawa, watch, max_steps=12).fit(net, loader("tiny_gpt"))
    snapshots = lawa.state_dict()["snapshots"]
    assert len(snapshots) == 3
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    assert all(snapshot.keys() == trained for snapshot in snapshots)
    assert "embed.weight" not in trained
    assert differing(state_of(net), reference(watch.raw, [10, 11, 12])) == []


def test_parameters_that_are_unfrozen_or_frozen_on_the_way() -> None:
    class Switch(pl.Callback):
        def on_train_batch_start(
            self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
        ) -> None:
            step = trainer.global_step
            pl_module.get_submodule("embed").requires_grad_(step >= 9)
            pl_module.get_submodule("head").requires_grad_(step < 11)

    watch = Watch()
    net, _ = fit(
        "tiny_gpt", lambda: [LatestWeightAveraging(window=6, interval=1)], callbacks=[Switch(), watch], max_steps=12
    )
    expected = {**reference(watch.raw, [7, 8, 9, 10, 11, 12])}
    expected["embed.weight"] = reference(watch.raw, [10, 11, 12])["embed.weight"]
    assert differing(state_of(net), expected) == []


def test_no_snapshot_is_told() -> None:
    lawa = LatestWeightAveraging(interval=13)
    with pytest.warns(UserWarning, match="first snapshot would be taken after 13"):
        net, _ = fit("tiny_gpt", lambda: [lawa])
    assert torch.equal(flat(net), flat(fit("tiny_gpt", list)[0]))
    assert "no snapshot" in lawa.summary()
    with pytest.warns(UserWarning, match=r"ends after 4 steps.* after 5 \(interval='epoch'\)"):
        fit("tiny_gpt", lambda: [LatestWeightAveraging()], max_steps=4)
    late = LatestWeightAveraging(interval=5, start=0.9)
    with pytest.warns(
        UserWarning, match=r"after 15 \(interval=5, start=0.9\), so nothing will be averaged.* earlier start="
    ):
        fit("tiny_gpt", lambda: [late])
    assert late.report()["taken"] == 0


def test_another_network_empties_the_window() -> None:
    class Grows(Nop):
        def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
            if session.trainer.global_step == 9:
                session.blocks_changed(self)

    watch = Watch()
    net, _ = fit("tiny_gpt", lambda: [LatestWeightAveraging(window=6, interval=1), Grows()], callbacks=[watch])
    assert differing(state_of(net), reference(watch.raw, [10, 11, 12])) == []


# -- evaluation runs on the mean


def plain_loss(model: str, state: State, batches: DataLoader[Any]) -> float:
    """The validation loss of a plain module with ``state``, without Lightning."""
    net: Any = module(model)
    net.load_state_dict(state, strict=True)
    net.eval()
    logged: list[float] = []
    net.log = lambda name, value, **_: logged.append(value.item())  # pyright: ignore[reportAttributeAccessIssue]
    with torch.no_grad():
        for i, batch in enumerate(batches):
            net.validation_step(batch, i)
    return sum(logged) / len(logged)


@pytest.mark.parametrize("model", ["tiny_gpt", "gpt2", "llama", "bert", "vit"])
def test_metrics_and_best_checkpoint_are_the_means(model: str, tmp_path: Path) -> None:
    watch = Watch()
    best = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1, filename="{step}")
    net, t = fit(
        model,
        lambda: [LatestWeightAveraging(window=3, interval=2)],
        callbacks=[watch, best],
        val_check_interval=3,
        limit_val_batches=2,
        num_sanity_val_steps=1,
        enable_checkpointing=True,
    )
    data = loader(model, 8, shuffle=False, seed=5)
    for step, (state, metric) in watch.validated.items():
        latest = list(range(2, step + 1, 2))[-3:]
        expected = {**watch.raw[step], **reference(watch.raw, latest)}
        assert differing(state, expected) == []
        assert metric == pytest.approx(plain_loss(model, expected, data), rel=1e-6)
        assert metric != pytest.approx(plain_loss(model, watch.raw[step], data), rel=1e-6)
    assert sorted(watch.validated) == [3, 8]
    assert best.best_model_path
    assert best.best_model_score is not None
    for path, score in best.best_k_models.items():
        saved = torch.load(path, weights_only=True)
        state, metric = watch.validated[saved["global_step"]]
        assert float(score) == metric
        assert saved["state_dict"].keys() == state.keys()
        assert differing(saved["state_dict"], state) == []
        module(model).load_state_dict(saved["state_dict"], strict=True)
        raw = saved["callbacks"]["LatestWeightAveraging"]["raw"]
        assert differing(watch.raw[saved["global_step"]], raw) == []
    (result,) = t.validate(net, data, verbose=False)
    final = {**watch.raw[12], **reference(watch.raw, [8, 10, 12])}
    assert result["val_loss"] == pytest.approx(plain_loss(model, final, data), rel=1e-6)
    (result,) = t.validate(net, data, ckpt_path="best", verbose=False)
    assert result["val_loss"] == pytest.approx(float(best.best_model_score), rel=1e-6)
    assert differing(state_of(net), torch.load(best.best_model_path, weights_only=True)["state_dict"]) == []


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    watch = Watch()
    net, _ = fit("gpt2", lambda: [LatestWeightAveraging(window=3, interval=2)], callbacks=[watch], directory=tmp_path)
    expected = reference(watch.raw, [8, 10, 12])
    tied = "model.transformer.wte.weight", "model.lm_head.weight"
    saved = torch.load(checkpoints(tmp_path)[-1], weights_only=True)["state_dict"]
    for state in (state_of(net), saved):
        assert all(torch.equal(state[name], expected[tied[0]]) for name in tied)
    assert saved[tied[0]].data_ptr() == saved[tied[1]].data_ptr(), "one storage on disk"
    assert net.get_parameter(tied[0]) is net.get_parameter(tied[1])


@pytest.mark.parametrize("weights_only", [False, True])
def test_checkpoints_of_weights_alone_hold_the_mean(weights_only: bool, tmp_path: Path) -> None:
    watch = Watch()
    every = ModelCheckpoint(
        tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}", save_weights_only=weights_only
    )
    fit(
        "tiny_gpt",
        lambda: [LatestWeightAveraging(window=2, interval=2)],
        callbacks=[watch, every],
        enable_checkpointing=True,
    )
    for step, path in enumerate(saved_at := checkpoints(tmp_path), start=1):
        saved = torch.load(path, weights_only=True)
        latest = list(range(2, step + 1, 2))[-2:]
        assert differing(saved["state_dict"], reference(watch.raw, latest or [step])) == []
        assert ("callbacks" in saved) is not weights_only
    assert len(saved_at) == 12


def test_saved_while_validating(tmp_path: Path) -> None:
    class Saves(pl.Callback):
        def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
            args[0].save_checkpoint(tmp_path / f"{args[0].global_step}.ckpt")

    watch = Watch()
    lawa = LatestWeightAveraging(window=3, interval=2)
    with pytest.warns(UserWarning, match="saved in on_validation_batch_end, while validation is under way"):
        fit("tiny_gpt", lambda: [lawa], callbacks=[watch, Saves()], limit_val_batches=2, val_check_interval=3)
    saved = torch.load(tmp_path / "8.ckpt", weights_only=True)
    mean = reference(watch.raw, [4, 6, 8])
    assert differing(saved["state_dict"], mean) == []
    assert differing(saved["callbacks"]["LatestWeightAveraging"]["raw"], watch.raw[8]) == []
    assert differing(watch.validated[8][0], mean) == []


def test_early_stopping_without_checkpoints() -> None:
    watch = Watch()
    net, t = fit(
        "tiny_gpt",
        lambda: [LatestWeightAveraging(window=2)],
        callbacks=[watch, EarlyStopping("val_loss", patience=1, min_delta=100.0)],
        limit_val_batches=1,
        max_steps=100,
    )
    assert t.global_step == 10
    assert differing(state_of(net), reference(watch.raw, [5, 10])) == []


# -- resuming


@pytest.mark.parametrize("model", ["classifier", "gpt2"])
def test_resumes_in_every_step_with_validation(model: str, tmp_path: Path) -> None:
    def build() -> list[Any]:
        return [LatestWeightAveraging(window=2)]

    found = resume_from_every_step(model, build, tmp_path, **MODES["validate"])
    weights = {step: [n for n in names if n.startswith(("weights", "optimizer"))] for step, names in found.items()}
    assert [step for step, names in weights.items() if names] == []


def test_fit_goes_on_from_what_is_saved_after_it(tmp_path: Path) -> None:
    def build() -> list[Any]:
        return [LatestWeightAveraging(window=3, interval=2)]

    whole, _ = fit("classifier", build, max_epochs=4, max_steps=-1)
    half, t = fit("classifier", build, max_epochs=2, max_steps=-1)
    t.save_checkpoint(tmp_path / "half.ckpt")
    t.validate(half, loader("classifier"), verbose=False)
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert differing(saved["state_dict"], state_of(half)) == []
    resumed, _ = fit("classifier", build, max_epochs=4, max_steps=-1, resume=tmp_path / "half.ckpt")
    assert differing(state_of(resumed), state_of(whole)) == []


def test_hooks_before_training_see_the_raw_weights(tmp_path: Path) -> None:
    """Also if one of them saves and restores everything, as Lightning's tuners do around their trial runs."""

    class Looks(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.before = state_of(pl_module)
            trainer.save_checkpoint(tmp_path / "tuner.ckpt")
            trainer._checkpoint_connector.restore(tmp_path / "tuner.ckpt")

        def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
            if not hasattr(self, "first"):
                self.first = state_of(args[1])

    watch, looks = Watch(), Looks()
    fit("classifier", lambda: [LatestWeightAveraging(window=3, interval=2)], callbacks=[watch], directory=tmp_path)
    path = checkpoints(tmp_path)[6]
    fit("classifier", lambda: [LatestWeightAveraging(window=2, interval=2)], callbacks=[looks], resume=path)
    assert differing(looks.before, watch.raw[7]) == []
    assert differing(looks.first, watch.raw[7]) == []
    assert differing(torch.load(path, weights_only=True)["state_dict"], watch.raw[7]) != []


def test_a_second_fit_starts_from_the_mean_with_an_empty_window() -> None:
    lawa, watch = LatestWeightAveraging(window=6, interval=1), Watch()
    net, _ = fit("classifier", lambda: [lawa])
    start = state_of(net)
    trainer(lawa, watch, max_steps=2, limit_val_batches=1, num_sanity_val_steps=1).fit(
        net, loader("classifier"), loader("classifier", shuffle=False)
    )
    assert lawa.report() == {"snapshots": 2, "taken": 2}
    assert differing(state_of(net), reference(watch.raw, [1, 2])) == []
    other = module("classifier")
    other.load_state_dict(start)
    plain = Watch()
    pl.seed_everything(1, verbose=False)
    trainer(plain, max_steps=1).fit(other, DataLoader(loader("classifier").dataset, 4))
    again = Watch()
    other.load_state_dict(start)
    pl.seed_everything(1, verbose=False)
    trainer(lawa, again, max_steps=1).fit(other, DataLoader(loader("classifier").dataset, 4))
    assert differing(again.raw[1], plain.raw[1]) == []


def test_a_finished_run_resumed_holds_the_mean(tmp_path: Path) -> None:
    net, _ = fit("classifier", lambda: [LatestWeightAveraging(window=3, interval=2)], directory=tmp_path)
    again, t = fit(
        "classifier", lambda: [LatestWeightAveraging(window=3, interval=2)], resume=checkpoints(tmp_path)[-1]
    )
    assert t.global_step == 12
    assert differing(state_of(again), state_of(net)) == []


def test_a_smaller_window_takes_the_latest(tmp_path: Path) -> None:
    watch = Watch()
    fit("classifier", lambda: [LatestWeightAveraging(window=6, interval=1)], callbacks=[watch], directory=tmp_path)
    net, _ = fit("classifier", lambda: [LatestWeightAveraging(window=2, interval=100)], resume=checkpoints(tmp_path)[7])
    assert differing(state_of(net), reference(watch.raw, [7, 8])) == []
    short, _ = fit("classifier", lambda: [LatestWeightAveraging(window=2, interval=1)], max_steps=8)
    assert differing(state_of(net), state_of(short)) == []  # BatchNorm's statistics too


def test_testing_leaves_the_state_of_training_alone(tmp_path: Path) -> None:
    lawa = LatestWeightAveraging(window=3, interval=2)
    net, t = fit("tiny_gpt", lambda: [lawa], directory=tmp_path)
    before = copy.deepcopy(lawa.state_dict())
    t.validate(net, loader("tiny_gpt"), ckpt_path=checkpoints(tmp_path)[3], verbose=False)
    after = lawa.state_dict()
    assert after["taken"] == before["taken"] == 6
    assert differing(after["raw"], before["raw"]) == []
    mean = torch.load(checkpoints(tmp_path)[3], weights_only=True)["state_dict"]
    assert differing(state_of(net), mean) == []


@pytest.mark.parametrize("where", ["on_validation_start", "on_validation_epoch_end", "on_train_batch_start"])
def test_an_exception_leaves_the_raw_weights(where: str, tmp_path: Path) -> None:
    class Fails(pl.Callback):
        pass

    def fail(trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 8:
            raise RuntimeError("planted")

    failing = Fails()
    setattr(failing, where, fail)
    watch, net = Watch(), module("classifier")
    lawa = LatestWeightAveraging(window=3, interval=2)
    emergency = ModelCheckpoint(tmp_path, every_n_train_steps=100, save_on_exception=True, filename="emergency")
    settings: dict[str, Any] = {"limit_val_batches": 1, "val_check_interval": 3, "enable_checkpointing": True}
    t = trainer(lawa, watch, failing, emergency, max_steps=12, **settings)
    with pytest.raises(RuntimeError, match="planted"):
        t.fit(net, loader("classifier"), loader("classifier", shuffle=False))
    assert differing(state_of(net), watch.raw[8]) == []
    assert "lightning_module_state_dict" not in t.strategy.__dict__
    saved = torch.load(tmp_path / "emergency.ckpt", weights_only=True)
    assert differing(saved["state_dict"], watch.raw[8]) == []
    assert saved["callbacks"]["LatestWeightAveraging"]["raw"] is None


# -- manual optimization


class Manual(TinyClassifier):
    """Two optimizers, each stepped once a batch."""

    def __init__(self, batch_norm: bool) -> None:
        super().__init__(batch_norm=batch_norm)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(m.parameters(), lr=0.05) for m in (self.blocks, self.head)]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # pyright: ignore[reportGeneralTypeIssues]
            optimizer.step()
            optimizer.zero_grad()


def test_manual_optimization_counts_every_optimizers_steps() -> None:
    watch, net = Watch(), Manual(batch_norm=False)
    trainer(LatestWeightAveraging(window=3, interval=3), watch, max_steps=16).fit(net, loader("classifier"))
    assert sorted(watch.raw) == list(range(2, 17, 2))
    assert differing(state_of(net), reference(watch.raw, [10, 12, 16])) == []  # 4, 6, 10, 12, 16: past 3, 6, 9, 12, 15


def test_manual_optimization_with_batch_norm_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"BatchNorm layers and automatic_optimization=False.*Use automatic optimization"
    ):
        trainer(LatestWeightAveraging(), max_steps=2).fit(Manual(batch_norm=True), loader("classifier"))


# -- bad input


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"window": 0}, r"window=0\): expected an integer >= 1"),
        ({"window": 2.0}, r"window=2.0\): expected an integer >= 1"),
        ({"interval": 0}, r"interval=0\): expected 'epoch' or an integer >= 1"),
        ({"interval": "step"}, r"interval='step'\): expected 'epoch'"),
        ({"interval": True}, r"interval=True\): expected 'epoch'"),
        ({"start": -0.1}, r"start=-0.1\): expected a number in \[0, 1\]"),
        ({"start": float("nan")}, r"start=nan\): expected a number in \[0, 1\]"),
        ({"bn_batches": 0}, r"bn_batches=0\): expected an integer >= 1, or None: the number of training batches"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LatestWeightAveraging(**kwargs)


@pytest.mark.parametrize("other", [EMAWeightAveraging(), StochasticWeightAveraging(swa_lrs=0.1)])
def test_other_weight_averaging_is_refused(other: pl.Callback) -> None:
    with pytest.raises(ValueError, match=rf"and {type(other).__name__} cannot train together.*Remove one"):
        fit("tiny_gpt", lambda: [LatestWeightAveraging()], callbacks=[other])


def test_start_needs_a_budget() -> None:
    with pytest.raises(
        ValueError, match=r"start=0.5\): this is a fraction of the run, and the Trainer has no max_steps"
    ):
        fit("tiny_gpt", lambda: [LatestWeightAveraging(start=0.5)], max_steps=-1, max_epochs=-1)


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    fit("tiny_gpt", lambda: [LatestWeightAveraging(interval=1)], directory=tmp_path, max_steps=2)
    net = module("tiny_gpt", num_layers=2)
    net.strict_loading = False
    t = trainer(LatestWeightAveraging(interval=1), max_steps=4)
    with pytest.raises(ValueError, match=r"that TinyGPT lacks or has in another shape, such as 'blocks\.2"):
        t.fit(net, loader("tiny_gpt"), ckpt_path=checkpoints(tmp_path)[0])
