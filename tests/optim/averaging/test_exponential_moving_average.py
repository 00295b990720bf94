"""The EMA is the closed-form sum of the raw weights; it is validated, kept and left behind; training feels nothing of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_eff._core.session import Session
from lightning_eff._core.technique import techniques_of
from lightning_eff.optim.averaging.exponential_moving_average import ExponentialMovingAverage, decay, move_average
from tests.cases import Case
from tests.conftest import Once
from tests.models import TinyClassifier, flat, loader, module, trainer
from tests.optim.averaging import averaging_jobs
from tests.optim.watch import State, Watch, differing, state_of
from tests.runs import MODES, checkpoints, fit, resume_from_batches, resume_from_every_step
from tests.strategies.launch import launch

CASES = {
    "ExponentialMovingAverage": Case(
        active=lambda: ExponentialMovingAverage(3.0, tail=0.75),
        neutral=lambda: ExponentialMovingAverage(0.0),
        anywhere=True,
    )
}


def closed_form(raw: dict[int, State], steps: list[int], s: float) -> dict[str, np.ndarray]:
    """``a_n = s^n w_0 + (1 - s) sum_i s^(n - i) w_i`` by NumPy in double precision, of all that is floating."""
    n = len(steps) - 1
    powers = [s**n, *((1 - s) * s ** (n - i) for i in range(1, n + 1))]
    return {
        name: sum(c * raw[step][name].double().numpy() for c, step in zip(powers, steps, strict=True))  # pyright: ignore[reportCallIssue]
        for name, value in raw[steps[-1]].items()
        if value.is_floating_point()
    }


def close(state: State, expected: dict[str, np.ndarray], rtol: float = 1e-5) -> None:
    assert expected
    for name, value in expected.items():
        np.testing.assert_allclose(state[name].double().numpy(), value, rtol=rtol, atol=1e-6, err_msg=name)


TABLES = ("embed.weight", "position.weight")

# -- the rule


def test_the_update_is_the_closed_form_sum() -> None:
    w = torch.randn(9, 50, dtype=torch.float64)
    a = [w[0].clone()]
    for i in range(1, 9):
        move_average(a, [w[i]], s=0.8)
    expected = 0.8**8 * w[0] + sum(0.2 * 0.8 ** (8 - i) * w[i] for i in range(1, 9))
    torch.testing.assert_close(a[0], expected, rtol=1e-13, atol=1e-13)


def test_half_of_the_weight_is_older_than_the_half_life() -> None:
    assert decay(7.0) ** 7 == pytest.approx(0.5, rel=1e-12)
    assert decay(104.0) == pytest.approx(np.exp(-1 / 150), rel=1e-5), "a time constant of 150 steps, by 1.44"
    assert decay(0.0) == 0.0


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("model", ["tiny_gpt", "classifier"])
def test_final_weights_and_buffers_are_the_closed_form_sum(model: str, mode: str) -> None:
    watch, plain = Watch(), Watch()
    net, _ = fit(model, lambda: [ExponentialMovingAverage(3.0)], callbacks=[watch], **MODES[mode])
    fit(model, list, callbacks=[plain], **MODES[mode])
    assert watch.raw.keys() == plain.raw.keys() == set(range(1, 13))
    assert [step for step in plain.raw if differing(watch.raw[step], plain.raw[step])] == []
    expected = closed_form(plain.raw, list(range(1, 13)), 2 ** (-1 / 3))
    if mode == "accumulate_clip":  # what was watched of a step is from a later micro-batch, which moves statistics
        expected = {name: value for name, value in expected.items() if "running" not in name}
    close(state_of(net), expected)
    if mode != "accumulate_clip" and model == "classifier":
        assert {"norm.running_mean", "norm.running_var"} <= expected.keys()
        assert torch.equal(net.get_buffer("norm.num_batches_tracked"), plain.raw[12]["norm.num_batches_tracked"])


@pytest.mark.parametrize("model", ["gpt2", "vit", "bert", "llama"])
def test_agrees_with_lightnings_own(model: str) -> None:
    """Which averages in a deep copy of the module, as torch's ``AveragedModel`` does."""
    net, _ = fit(model, lambda: [ExponentialMovingAverage(4.0)])
    other, _ = fit(model, list, callbacks=[EMAWeightAveraging(decay=decay(4.0))])
    torch.testing.assert_close(flat(net), flat(other), rtol=1e-5, atol=1e-7)
    assert not torch.equal(flat(net), flat(fit(model, list)[0]))


def test_the_tail_is_blended_with_the_last_weights_but_for_what_is_left_out() -> None:
    watch = Watch()
    technique = ExponentialMovingAverage(2.0, tail=0.25, exclude=["embedding", "*bias"])
    net, _ = fit("tiny_gpt", lambda: [technique], callbacks=[watch])
    average = closed_form(watch.raw, [10, 11, 12], 2 ** (-1 / 2))  # step s runs at u = (s - 1) / 12
    state = state_of(net)
    out = {name for name in average if name in TABLES or name.endswith("bias")}
    assert "embed.weight" in out
    assert differing(state, {name: watch.raw[12][name] for name in out}) == []
    blended = {
        name: 0.4 * watch.raw[12][name].double().numpy() + 0.6 * a for name, a in average.items() if name not in out
    }
    close(state, blended)
    moved = [name for name in blended if not torch.equal(state[name], watch.raw[12][name])]
    assert len(moved) > len(blended) / 2
    assert technique.report() == {"averaged_steps": 3}


def test_before_the_tail_the_raw_weights_are_shown(tmp_path: Path) -> None:
    watch = Watch()
    fit(
        "tiny_gpt",
        lambda: [ExponentialMovingAverage(2.0, tail=0.25)],
        callbacks=[watch],
        directory=tmp_path,
        **MODES["validate"],
    )
    for step, path in enumerate(checkpoints(tmp_path), start=1):
        saved = torch.load(path, weights_only=True)["state_dict"]
        assert (differing(saved, watch.raw[step]) == []) == (step <= 10), "the first of the tail is its own average"
    assert {step for step, (state, _) in watch.validated.items() if differing(state, watch.raw[step])} == {12}


def test_checkpoints_and_validation_hold_the_average_and_the_raw_weights_are_beside_it(tmp_path: Path) -> None:
    watch = Watch()
    best = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1, filename="{step}")
    net, t = fit(
        "classifier",
        lambda: [ExponentialMovingAverage(3.0)],
        callbacks=[watch, best],
        val_check_interval=3,
        limit_val_batches=2,
        enable_checkpointing=True,
    )
    assert sorted(watch.validated) == [3, 8]
    scores = dict(best.best_k_models)
    for step, (state, metric) in list(watch.validated.items()):
        close(state, closed_form(watch.raw, list(range(1, step + 1)), 2 ** (-1 / 3)))
        path = tmp_path / f"step={step}.ckpt"
        saved = torch.load(path, weights_only=True)
        assert differing(saved["state_dict"], state) == []
        assert differing(watch.raw[step], saved["callbacks"]["ExponentialMovingAverage"]["raw"]) == []
        assert float(scores[str(path)]) == metric
        (result,) = t.validate(net, loader("classifier", 8, shuffle=False, seed=5), ckpt_path=path, verbose=False)
        assert result["val_loss"] == pytest.approx(metric, rel=1e-6)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    watch = Watch()
    net, _ = fit("gpt2", lambda: [ExponentialMovingAverage(3.0)], callbacks=[watch], directory=tmp_path)
    tied = "model.transformer.wte.weight", "model.lm_head.weight"
    saved = torch.load(checkpoints(tmp_path)[-1], weights_only=True)["state_dict"]
    close(saved, {name: closed_form(watch.raw, list(range(1, 13)), 2 ** (-1 / 3))[name] for name in tied})
    assert saved[tied[0]].data_ptr() == saved[tied[1]].data_ptr(), "one storage on disk"
    assert net.get_parameter(tied[0]) is net.get_parameter(tied[1])


def test_recomputed_statistics_are_those_of_update_bn() -> None:
    data, net = loader("classifier", shuffle=False), TinyClassifier()
    technique = ExponentialMovingAverage(3.0, batch_norm="recompute", bn_batches=None)
    trainer(technique, max_steps=12).fit(net, data)
    got = {name: b.clone() for name, b in net.norm.named_buffers()}  # pyright: ignore[reportAttributeAccessIssue]
    torch.optim.swa_utils.update_bn(data, net)
    for name, b in net.norm.named_buffers():  # pyright: ignore[reportAttributeAccessIssue]
        torch.testing.assert_close(got[name], b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("batch_norm", ["average", "recompute"])
def test_the_statistics_that_training_gathers_are_those_of_plain_training(batch_norm: Any) -> None:
    gathered: list[list[Tensor]] = []
    techniques = [[], [ExponentialMovingAverage(3.0, batch_norm=batch_norm, bn_batches=2)]]
    for build in techniques:
        found: list[Tensor] = []

        class Look(pl.Callback):
            def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any, found=found) -> None:
                found.append(pl_module.norm.running_mean.clone())

        settings: dict[str, Any] = {"limit_val_batches": 1, "val_check_interval": 2}
        fit("classifier", lambda build=build: build, callbacks=[Look()], **settings)
        gathered.append(found)
    assert len(gathered[0]) == 12 and all(map(torch.equal, *gathered))


def test_masks_of_infinities_and_parameters_that_are_thawed_later() -> None:
    class Masked(TinyClassifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
            self.register_buffer("count", torch.tensor(0))
            self.head.requires_grad_(False)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.head.requires_grad_(self.global_step >= 8)

    net, watch = Masked(), Watch()
    trainer(ExponentialMovingAverage(3.0), watch, max_steps=12).fit(net, loader("classifier"))
    state, s = state_of(net), 2 ** (-1 / 3)
    assert torch.equal(state["mask"], torch.tensor([0.0, float("-inf")]))
    every, late = (closed_form(watch.raw, list(range(first, 13)), s) for first in (1, 9))
    close(state, {name: (late if name.startswith("head") else every)[name] for name in every if name != "mask"})


def test_weights_of_16_bits_are_averaged_in_32() -> None:
    class Half(TinyClassifier):
        def __init__(self) -> None:
            super().__init__(batch_norm=False)
            self.to(torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.bfloat16())

    net, watch, technique = Half(), Watch(), ExponentialMovingAverage(50.0)
    trainer(technique, watch, max_steps=12).fit(net, loader("classifier"))
    held = technique.saved()["held"]
    assert {value.dtype for value in held.values()} == {torch.float32}
    close(held, closed_form(watch.raw, list(range(1, 13)), decay(50.0)))


# -- resuming


def test_resumes_from_every_step_and_within_windows(tmp_path: Path) -> None:
    def build() -> list[Any]:
        return [ExponentialMovingAverage(3.0, tail=0.5)]

    assert resume_from_batches("classifier", build, tmp_path / "windows", (4, 7, 9, 10)) == {}
    found = resume_from_every_step("classifier", build, tmp_path / "steps", **MODES["validate"])
    weights = {step: [n for n in names if n.startswith(("weights", "optimizer"))] for step, names in found.items()}
    assert [step for step, names in weights.items() if names] == []


def test_an_exception_leaves_the_raw_weights() -> None:
    class Fails(pl.Callback):
        def on_validation_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 8:
                raise RuntimeError("planted")

    watch, net = Watch(), module("classifier")
    t = trainer(ExponentialMovingAverage(3.0), watch, Fails(), max_steps=12, limit_val_batches=1, val_check_interval=3)
    with pytest.raises(RuntimeError, match="planted"):
        t.fit(net, loader("classifier"), loader("classifier", shuffle=False))
    assert differing(state_of(net), watch.raw[8]) == []


# -- weights that are divided

LAYOUTS = averaging_jobs.LAYOUTS
OTHER_LAYOUTS = ["fsdp2+", "hybrid", "tensor", "pipeline", "pipeline+"]


@pytest.fixture(scope="module")
def others(once: Once, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], dict[str, Any]]:
    """What is found of the slow layouts."""
    job = "tests.optim.averaging.averaging_jobs", "divided"

    def start() -> dict[str, Any]:
        root = str(tmp_path_factory.mktemp("divided"))
        return {"root": root, "averaging": launch(*job, root, OTHER_LAYOUTS, world_size=2)}

    return lambda: once("averaging", start)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("alone")
    return directory, averaging_jobs.run(directory)


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHER_LAYOUTS)])
def test_divided_weights_have_the_average_of_whole_ones(
    name: str, request: pytest.FixtureRequest, others: Any, alone: Any, tmp_path: Path
) -> None:
    """In validation, in checkpoints, at the end and after a resume, on each rank."""
    result = request.getfixturevalue("two_processes") if name in LAYOUTS else others()
    (whole, expected), found = alone, result["averaging"][name]
    assert found["again"] and found["alike"] and found["steps"] == expected["steps"] > 3
    torch.testing.assert_close(torch.tensor(found["weights"]), torch.tensor(expected["weights"]), rtol=1e-4, atol=1e-5)
    assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)
    path = Path(result["root"], name, "step=4.ckpt")
    if name.endswith("+"):
        dcp_to_torch_save(path, tmp_path / "whole.ckpt")
        path = tmp_path / "whole.ckpt"
    states = [torch.load(one, weights_only=True)["state_dict"] for one in (path, whole / "step=4.ckpt")]
    for key, value in states[1].items():
        torch.testing.assert_close(states[0][key], value, rtol=1e-4, atol=1e-5)
    module("tiny_gpt", num_layers=2).load_state_dict(states[0], strict=True)


def test_averages_of_pieces_are_refused_elsewhere(two_processes: dict[str, Any], tmp_path: Path) -> None:
    directory, result = Path(two_processes["root"], "fsdp2"), two_processes["averaging"]
    with pytest.raises(ValueError, match="averages are the pieces of 2 processes, and this run's are whole tensors"):
        averaging_jobs.run(tmp_path, resume=directory / "step=4.ckpt")
    assert "batch_norm='recompute'): HybridParallelStrategy shards the module, and BatchNorm" in result["refused"]
    t = trainer(ExponentialMovingAverage(3.0), max_steps=2)
    t._accelerator_connector.strategy = pl.strategies.FSDPStrategy()
    with pytest.raises(
        ValueError,
        match=r"FSDPStrategy joins.*Use HybridParallelStrategy or",
    ):
        Session.open(t, module("classifier"), techniques_of(t), "fit")


# -- bad input


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"half_life": -1.0}, r"half_life=-1.0\): expected a finite number >= 0: the number of optimizer steps"),
        ({"half_life": float("inf")}, r"half_life=inf\): expected a finite"),
        ({"half_life": 3.0, "tail": 0.0}, r"tail=0.0\): expected a number in \(0, 1\]"),
        ({"half_life": 3.0, "tail": 1.5}, r"tail=1.5\): expected a number in \(0, 1\]"),
        (
            {"half_life": 3.0, "blend": 1.1},
            r"blend=1.1\): expected a number in \[0, 1\], or None: the weight of the average",
        ),
        ({"half_life": 3.0, "exclude": "embedding"}, r"exclude='embedding'\): expected a list.*\['embedding'\]"),
        ({"half_life": 3.0, "batch_norm": "latest"}, r"batch_norm='latest'\): expected 'average' or 'recompute'"),
        (
            {"half_life": 3.0, "bn_batches": 0},
            r"bn_batches=0\): expected an integer >= 1, or None: the number of training batches",
        ),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExponentialMovingAverage(**kwargs)


def test_a_pattern_that_matches_nothing_is_told_the_nearest_names() -> None:
    with pytest.raises(
        ValueError, match=r"exclude='emebd\.\*'\): no parameter of TinyGPT matches.*Nearest names: embed"
    ):
        fit("tiny_gpt", lambda: [ExponentialMovingAverage(3.0, exclude=["emebd.*"])])


def test_a_tail_needs_a_budget() -> None:
    with pytest.raises(ValueError, match=r"tail=0.25\): this is a fraction of the run.* no max_steps.*or tail=None"):
        fit("tiny_gpt", lambda: [ExponentialMovingAverage(3.0, tail=0.25)], max_steps=-1, max_epochs=-1)


def test_lightnings_own_is_refused_beside_it() -> None:
    with pytest.raises(ValueError, match="and EMAWeightAveraging cannot train together"):
        fit("tiny_gpt", lambda: [ExponentialMovingAverage(3.0)], callbacks=[EMAWeightAveraging()])


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    fit("tiny_gpt", lambda: [ExponentialMovingAverage(3.0)], directory=tmp_path, max_steps=2)
    net = module("tiny_gpt", num_layers=2)
    net.strict_loading = False
    with pytest.raises(ValueError, match=r"that TinyGPT lacks or has in another shape, such as 'blocks\.2"):
        trainer(ExponentialMovingAverage(3.0), max_steps=4).fit(
            net, loader("tiny_gpt"), ckpt_path=checkpoints(tmp_path)[0]
        )
