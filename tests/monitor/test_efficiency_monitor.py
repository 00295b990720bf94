"""The monitor's numbers against hand-made counts, and that a run is the same with it and after it."""

import time
import types
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff._core import steps
from lightning_eff.data.curriculum.sequence_length_warmup import SequenceLengthWarmup
from lightning_eff.data.selection.selective_backprop import SelectiveBackprop
from lightning_eff.model.execution.regional_compilation import RegionalCompilation
from lightning_eff.model.growth.progressive_layer_dropping import ProgressiveLayerDropping
from lightning_eff.model.growth.progressive_stacking import ProgressiveStacking
from lightning_eff.monitor import _counting as counting
from lightning_eff.monitor import _phases as phases
from lightning_eff.monitor import efficiency_monitor as monitor
from lightning_eff.monitor._phases import PhaseClock
from lightning_eff.monitor.efficiency_monitor import EfficiencyMonitor
from lightning_eff.optim.sharpness import _uphill as sam
from lightning_eff.optim.sharpness.sharpness_aware_minimization import SharpnessAwareMinimization
from tests.models import LENGTH, VOCAB, TinyGPT, loader, trainer
from tests.runs import MODES, differences, final_state, fit

BATCH, DIM = 4, 16


def gpt_flops(batch: int = BATCH, length: int = LENGTH, layers: int = 4) -> tuple[int, int]:
    """A forward and a backward pass of ``TinyGPT``, two FLOPs for each multiplication and addition."""
    tokens = batch * length
    linear = layers * (3 + 1 + 4 + 4) * 2 * tokens * DIM * DIM + 2 * tokens * DIM * VOCAB
    scores = 2 * batch * length * length * DIM  # one product over all heads
    # backward: two products for each linear one; attention computes its scores again, and two for each of its two
    return linear + layers * 2 * scores, 2 * linear + layers * 5 * scores


class MLP(pl.LightningModule):
    """8 to 16 to 3 over (features, label) tuples; ``manual`` optimizes by hand."""

    def __init__(self, *, manual: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.automatic_optimization = not manual

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


MLP_FORWARD = 2 * 5 * 8 * 16 + 2 * 5 * 16 * 3
MLP_BACKWARD = 2 * 5 * 8 * 16 + 2 * (2 * 5 * 16 * 3)  # the features take no gradient


def data(samples: int = 20, batch_size: int = 5) -> DataLoader[Any]:
    g = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(samples, 8, generator=g), torch.arange(samples) % 3), batch_size)


def watch(net: pl.LightningModule, *callbacks: pl.Callback, data: Any, **kwargs: Any) -> dict[str, Any]:
    """The summary of a fit with the monitor last among the callbacks."""
    seen = EfficiencyMonitor()
    trainer(*callbacks, seen, **{"max_steps": 4, **kwargs}).fit(net, data)
    return seen.summary()


# -- FLOPs and bytes


@pytest.mark.parametrize("kwargs", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}])
def test_flops_of_a_gpt(kwargs: dict[str, Any]) -> None:
    told = watch(TinyGPT(dropout=0.0), data=loader("tiny_gpt"), max_epochs=1, max_steps=-1, **kwargs)
    assert (told["batches"], told["counted_batches"], told["flops_batches"]) == (5, 1, 4)
    assert told["flops"] == 4 * sum(gpt_flops())
    assert told["extra_flops"] == 0 and told["flops_left_out"] == []
    assert told["flops_per_second"] == pytest.approx(told["flops"] / told["rated_seconds"])
    assert (told["samples"], told["tokens"]) == (20, 20 * LENGTH)
    assert told["tokens_per_second"] == pytest.approx(16 * LENGTH / told["rated_seconds"])


@pytest.mark.parametrize(("manual", "accumulate"), [(False, 1), (False, 2), (True, 1)])
def test_flops_and_bytes_of_an_mlp(manual: bool, accumulate: int) -> None:
    settings = {"max_steps": 4 // accumulate, "accumulate_grad_batches": accumulate}
    told = watch(MLP(manual=manual), data=data(30), **settings)  # the last batch of the epoch is not reached
    assert told["flops"] == 3 * (MLP_FORWARD + MLP_BACKWARD)
    parameters = 4 * (8 * 16 + 16 + 16 * 3 + 3)
    assert told["memory"] == {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer": 2 * parameters + 4 * 4,  # two moments, and a step count for each tensor
        # the hidden layer, the log-probabilities, and the sum of the samples' weights
        "activations": 4 * (5 * 16 + 5 * 3 + 1),
    }
    assert told["tokens"] == 0 and told["tokens_per_second"] is None


def test_tied_weights_count_once() -> None:
    net = TinyGPT(dropout=0.0)
    net.head.weight = net.embed.weight
    told = watch(net, data=loader("tiny_gpt"))
    assert told["memory"]["parameters"] == 4 * sum(p.numel() for p in net.parameters())
    assert told["memory"]["gradients"] == told["memory"]["parameters"]


def test_weights_tied_by_their_memory_count_once() -> None:
    net = TinyGPT(dropout=0.0)
    net.head.weight = nn.Parameter(net.embed.weight.data)
    told = watch(net, data=loader("tiny_gpt"))
    assert told["memory"]["parameters"] == 4 * (sum(p.numel() for p in net.parameters()) - VOCAB * DIM)


def test_frozen_weights_take_no_flops() -> None:
    class Freeze(pl.Callback):
        def on_train_batch_start(self, t: pl.Trainer, net: pl.LightningModule, batch: Any, batch_idx: int) -> None:
            net.get_submodule("net.0").requires_grad_(batch_idx < 2)

    told = watch(MLP(), Freeze(), data=data())
    assert told["counted_batches"] == 2
    # without the hidden layer's weights, neither they nor the hidden layer's values take a gradient
    assert told["flops"] == (MLP_FORWARD + MLP_BACKWARD) + (MLP_FORWARD + 2 * 5 * 16 * 3)


def test_what_checkpointing_computes_again_is_no_model_flop() -> None:
    class Checkpointed(MLP):
        def loss(self, batch: Any) -> Tensor:
            hidden = checkpoint(self.net[:2], batch[0], use_reentrant=False)
            return F.cross_entropy(self.net[2](hidden), batch[1])

    told = watch(Checkpointed(), data=data())
    assert told["flops"] == 3 * (MLP_FORWARD + MLP_BACKWARD)
    assert told["extra_flops"] == 3 * (2 * 5 * 8 * 16)


def test_an_operator_without_a_formula_is_named() -> None:
    class Recurrent(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(8, 8)

        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.net(self.rnn(batch[0][None])[0][0]), batch[1])

    seen = EfficiencyMonitor()
    trainer(seen, max_steps=2).fit(Recurrent(), data())
    if torch.backends.mkldnn.is_available():
        assert any("rnn" in name for name in seen.summary()["flops_left_out"])
        assert "whose FLOPs are unknown" in seen.text()


def test_each_kind_of_step_is_counted_up_to_a_limit() -> None:
    sizes: Any = [(torch.randn(n, 8), torch.zeros(n).long()) for n in (5, 2, 5, 3, 2, 5)]
    batches = DataLoader(sizes, batch_size=None)
    told = watch(MLP(), data=batches, max_steps=6)
    assert (told["counted_batches"], told["flops_batches"]) == (3, 3)
    assert told["flops"] == (MLP_FORWARD + MLP_BACKWARD) * (5 + 2 + 5) // 5
    seen = EfficiencyMonitor(max_counts=2)
    trainer(seen, max_steps=6).fit(MLP(), batches)
    told = seen.summary()
    assert (told["counted_batches"], told["flops_batches"]) == (2, 3)  # the batch of 3 is of no known FLOPs
    assert told["flops"] == (MLP_FORWARD + MLP_BACKWARD) * (5 + 2 + 5) // 5
    seen = EfficiencyMonitor(max_counts=0)
    trainer(seen, max_steps=2).fit(MLP(), batches)
    assert seen.summary()["counted_batches"] == 0 and seen.summary()["flops_per_second"] is None
    assert "not counted: max_counts=0" in seen.text()


# -- techniques


def test_flops_follow_the_length_that_the_step_sees() -> None:
    lengths = []

    class Noting(TinyGPT):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            lengths.append(tuple(batch["input_ids"].shape))
            return super().training_step(batch, batch_idx)

    told = watch(
        Noting(dropout=0.0), SequenceLengthWarmup(start=8, until=0.6), data=loader("tiny_gpt", 48), max_steps=12
    )
    assert len(set(lengths)) == 3 == told["counted_batches"]
    first = {shape: lengths.index(shape) for shape in lengths}
    assert told["flops"] == sum(sum(gpt_flops(*shape)) for i, shape in enumerate(lengths) if i != first[shape])


@pytest.mark.parametrize("first", [False, True])
def test_extra_passes_are_apart_wherever_the_monitor_stands(first: bool) -> None:
    seen = EfficiencyMonitor()
    callbacks = [SharpnessAwareMinimization(rho=0.1)]
    net = TinyGPT(dropout=0.0)
    trainer(*([seen, *callbacks] if first else [*callbacks, seen]), max_steps=4).fit(net, loader("tiny_gpt"))
    told = seen.summary()
    assert told["flops"] == 3 * sum(gpt_flops())
    assert told["extra_flops"] == 3 * sum(gpt_flops())
    assert told["hardware_flops_per_second"] == pytest.approx(2 * told["flops_per_second"])
    assert told["phases"]["extra"] > 0
    assert "2.00 times the model FLOPs" in seen.text()


def test_a_scoring_pass_is_an_extra_one() -> None:
    told = watch(TinyGPT(dropout=0.0), SelectiveBackprop(keep=0.5), data=loader("tiny_gpt"))
    assert told["flops"] == 3 * sum(gpt_flops(batch=2))
    assert told["extra_flops"] == 3 * gpt_flops()[0]


def test_flops_follow_the_blocks_that_run() -> None:
    told = watch(
        TinyGPT(dropout=0.0),
        ProgressiveStacking(stages=[(0.0, 2), (0.5, 4)]),
        data=loader("tiny_gpt", 32),
        max_steps=8,
    )
    assert told["counted_batches"] == 2
    assert told["flops"] == 3 * sum(gpt_flops(layers=2)) + 3 * sum(gpt_flops(layers=4))


def test_flops_follow_the_blocks_that_are_dropped() -> None:
    ran: list[int] = []

    class Noting(TinyGPT):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            ran.append(0)
            return super().training_step(batch, batch_idx)

    def note(*args: Any) -> None:
        ran[-1] += 1

    net = Noting(dropout=0.0)
    assert net.blocks is not None
    for block in net.blocks:  # a dropped block's own hooks are called, with what it hands on
        block.mlp.register_forward_hook(note)
    told = watch(net, ProgressiveLayerDropping(theta_min=0.3), data=loader("tiny_gpt", 64), max_steps=16)
    kinds = {layers: ran.index(layers) for layers in ran}
    assert told["counted_batches"] == len(kinds) > 1
    assert told["flops"] == sum(sum(gpt_flops(layers=layers)) for i, layers in enumerate(ran) if i != kinds[layers])


# -- the run is the same


class Note(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, t: pl.Trainer, net: pl.LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs["loss"].clone())


TECHNIQUES: dict[str, Any] = {
    "none": list,
    "several": lambda: [SharpnessAwareMinimization(rho=0.1), SequenceLengthWarmup(start=8, until=0.5)],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("model", "built"), [("tiny_gpt", "none"), ("tiny_gpt", "several"), ("classifier", "none")])
def test_training_is_bit_for_bit_the_same(model: str, built: str, mode: str) -> None:
    plain, watched, seen = Note(), Note(), EfficiencyMonitor()
    build = TECHNIQUES[built]
    expected = final_state(*fit(model, build, callbacks=[plain], **MODES[mode]))
    found = final_state(*fit(model, build, callbacks=[seen, watched], **MODES[mode]))
    assert differences(expected, found) == []
    assert len(plain.losses) == len(watched.losses) > 0
    assert all(torch.equal(a, b) for a, b in zip(plain.losses, watched.losses, strict=True))
    assert seen.summary()["flops"] > 0


def test_logging_changes_nothing_either() -> None:
    expected = final_state(*fit("tiny_gpt", list, logger=Memo(), log_every_n_steps=1))
    found = final_state(*fit("tiny_gpt", list, logger=Memo(), log_every_n_steps=1, callbacks=[EfficiencyMonitor()]))
    assert differences(expected, found) == []


@pytest.mark.parametrize("build", [list, lambda: [SharpnessAwareMinimization(rho=0.1)]])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("fails", [None, 0, 2])
def test_nothing_is_left_behind(build: Any, first: bool, fails: int | None) -> None:
    class Failing(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == fails:
                raise KeyError("planned")
            return loss

    net, seen = Failing(), EfficiencyMonitor()
    callbacks: list[pl.Callback] = [seen, *build()] if first else [*build(), seen]
    t = trainer(*callbacks, max_steps=4)
    objects: list[Any] = [net, t.strategy, t.profiler, t.fit_loop.epoch_loop.val_loop]  # pyright: ignore[reportAttributeAccessIssue]
    names = ["training_step", "backward", "start", "stop", "run"]
    if fails is None:
        t.fit(net, data())
    else:
        with pytest.raises(KeyError, match="planned"):
            t.fit(net, data())
    assert [name for obj in objects for name in names if name in vars(obj)] == []
    assert seen.watch is None
    assert _get_current_dispatch_mode_stack() == []
    with counting.Counter() as counter:
        pass
    assert counter.flops is not None, "torch's record was left running"
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert seen.summary()["counted_batches"] == (fails != 0)


def test_names_that_break_the_record_leave_the_flops_unknown() -> None:
    x = torch.ones(2, 2)
    with counting.Counter() as counter, torch.autograd.profiler.record_function('a "name" in quotes'):
        _ = x @ x
    assert counter.flops is None
    with counting.Counter() as counter, torch.autograd.profiler.record_function('"nodes": [ in a\nname'):
        _ = x @ x
    assert counter.flops is None
    with counting.Counter() as counter, torch.autograd.profiler.record_function("a plain name, [of] its own"):
        _ = x @ x
    assert counter.flops == {"forward": 16, "backward": 0, "again": 0}


def test_another_wrapper_is_put_back_as_it_was() -> None:
    class Wrapping(pl.Callback):
        def setup(self, t: pl.Trainer, net: pl.LightningModule, stage: str) -> None:
            original = net.training_step
            net.__dict__["training_step"] = lambda batch, batch_idx: original(batch, batch_idx)

        def teardown(self, t: pl.Trainer, net: pl.LightningModule, stage: str) -> None:
            del net.__dict__["training_step"]

    for order in (0, 1):
        net, seen = MLP(), EfficiencyMonitor()
        callbacks = [seen, Wrapping()] if order else [Wrapping(), seen]
        trainer(*callbacks, max_steps=2).fit(net, data())
        assert "training_step" not in vars(net)
        assert seen.summary()["flops"] == MLP_FORWARD + MLP_BACKWARD


def test_a_second_fit_starts_anew() -> None:
    seen = EfficiencyMonitor()
    for _ in range(2):
        trainer(seen, max_steps=3).fit(MLP(), data())
        assert (seen.summary()["batches"], seen.summary()["counted_batches"]) == (3, 1)


# -- compiled code


def test_a_compiled_module_is_not_counted() -> None:
    net = MLP()
    net.net = torch.compile(net.net, backend="eager")  # pyright: ignore[reportAttributeAccessIssue]
    seen = EfficiencyMonitor()
    trainer(seen, max_steps=2).fit(net, data())
    told = seen.summary()
    assert told["flops_per_second"] is None and told["counted_batches"] == 0
    assert told["memory"]["activations"] is None
    assert "not counted: the module is compiled" in seen.text()


@pytest.mark.parametrize("first", [True, False])
def test_compiled_blocks_are_not_counted_and_nothing_is_said_of_peaks(first: bool) -> None:
    """A counted step that ran them plainly would differ by rounding, and a resumed run from the undisturbed one."""
    seen, technique = EfficiencyMonitor(), RegionalCompilation(backend="eager")
    both: list[pl.Callback] = [seen, technique] if first else [technique, seen]
    trainer(*both, max_steps=2).fit(TinyGPT(num_layers=2), loader("tiny_gpt"))
    told = seen.summary()
    assert technique.report()["blocks"] == 2
    assert told["flops_per_second"] is None and told["mfu"] is None and told["counted_batches"] == 0
    assert "not counted: RegionalCompilation compiles its blocks. Remove it to count FLOPs" in seen.text()


def test_a_compiled_function_is_still_compiled_after_a_counted_step() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=backend)

    class Compiled(MLP):
        def loss(self, batch: Any) -> Tensor:
            return super().loss((double(batch[0]), batch[1]))

    told = watch(Compiled(), data=data())
    assert told["flops"] == 3 * (MLP_FORWARD + MLP_BACKWARD)
    assert len(graphs) == 1


def test_activations_may_be_left_out() -> None:
    seen = EfficiencyMonitor(activations=False)
    trainer(seen, max_steps=2).fit(MLP(), data())
    assert seen.summary()["flops"] == MLP_FORWARD + MLP_BACKWARD
    assert seen.summary()["memory"]["activations"] is None


# -- seconds, on a clock that only the test moves


class FakeTime(types.SimpleNamespace):
    def __init__(self) -> None:
        super().__init__(now=0.0)

    def perf_counter(self) -> float:
        return self.now


class Takes(torch.autograd.Function):
    """The identity; its backward pass takes 4 seconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: FakeTime) -> Tensor:
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.clock.now += 4
        return grads[0], None


class Slow(MLP):
    """Forward takes 3 seconds, backward 4, the optimizer 5, a validation step 11."""

    def __init__(self, clock: FakeTime, *, manual: bool = False) -> None:
        super().__init__(manual=manual)
        self._clock = clock

    def loss(self, batch: Any) -> Tensor:
        self._clock.now += 3
        return Takes.apply(super().loss(batch), self._clock)  # pyright: ignore[reportReturnType]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._clock.now += 11

    def configure_optimizers(self) -> torch.optim.Optimizer:
        clock = self._clock

        class SGD(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                result = super().step(closure)
                clock.now += 5
                return result

        return SGD(self.parameters(), lr=0.1)


class SlowData(TensorDataset):
    """A sample takes 1 second."""

    def __init__(self, clock: FakeTime) -> None:
        super().__init__(torch.randn(20, 8), torch.arange(20) % 3)
        self.clock = clock

    def __getitem__(self, index: int) -> Any:
        self.clock.now += 1
        return super().__getitem__(index)


class SlowCallback(pl.Callback):
    """2 seconds in the midst of a step, 7 at its end, and 13 as validation begins."""

    def __init__(self, clock: FakeTime) -> None:
        self.clock = clock

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.clock.now += 2

    def on_train_batch_end(self, *args: Any) -> None:
        self.clock.now += 7

    def on_validation_start(self, *args: Any) -> None:
        self.clock.now += 13


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    for module in (phases, steps, sam):
        monkeypatch.setattr(module, "time", fake)
    return fake


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("manual", [False, True])
def test_each_second_is_in_its_phase(clock: FakeTime, manual: bool, first: bool) -> None:
    seen, other = EfficiencyMonitor(), SlowCallback(clock)
    t = trainer(*((seen, other) if first else (other, seen)), max_steps=4, limit_val_batches=1, val_check_interval=2)
    t.fit(Slow(clock, manual=manual), DataLoader(SlowData(clock), 5), DataLoader(TensorDataset(torch.zeros(5)), 5))
    told = seen.summary()
    assert told["counted_batches"] == 1
    assert told["phases"] == {
        "data": 3 * 5,
        "forward": 3 * 3,
        "backward": 3 * 4,
        "optimizer": 3 * 5,
        "extra": 0,
        "other": 3 * (2 + 7),
    }
    assert told["validation_seconds"] == 2 * (11 + 13)
    assert told["counting_seconds"] == 5 + 3 + 4 + 5 + 2 + 7
    assert told["training_seconds"] + told["validation_seconds"] == clock.now
    assert told["rated_seconds"] == sum(told["phases"].values())
    assert told["samples_per_second"] == pytest.approx(15 / told["rated_seconds"])


def test_extra_seconds_are_those_of_the_techniques_own_account(clock: FakeTime) -> None:
    seen, technique = EfficiencyMonitor(), SharpnessAwareMinimization(rho=0.1)
    trainer(seen, technique, max_steps=4).fit(Slow(clock), DataLoader(SlowData(clock), 5))
    told = seen.summary()
    assert told["phases"]["extra"] == 3 * (4 + 3)  # the climb's backward pass and the second forward pass
    assert (told["phases"]["forward"], told["phases"]["backward"]) == (3 * 3, 3 * 4)
    assert told["training_seconds"] == clock.now


def test_validation_takes_in_all_that_is_entered_within_it(clock: FakeTime) -> None:
    done: list[dict[str, float]] = []
    ticks: PhaseClock[None] = PhaseClock(torch.device("cpu"), lambda: 0.0, lambda _, seconds: done.append(seconds))
    ticks.enter("validation")
    clock.now = 1
    ticks.enter("forward")
    clock.now = 3
    ticks.leave()
    ticks.leave()
    ticks.leave()  # of something that began before the clock did
    clock.now = 4
    ticks.end_step(None)
    assert {phase: seconds for phase, seconds in done[0].items() if seconds} == {"validation": 3, "other": 1}


class FakeEvent:
    """A CUDA event on a device whose time is the test's, and which is over when the test says so."""

    device = FakeTime()
    done = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = -1.0

    def record(self) -> None:
        self.at = self.device.now

    def query(self) -> bool:
        return self.at <= FakeEvent.done

    def synchronize(self) -> None:
        FakeEvent.done = max(FakeEvent.done, self.at)

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.query() and end.query(), "read before it was over"
        return (end.at - self.at) * 1e3


def test_on_cuda_events_are_read_when_they_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "device", FakeTime())
    monkeypatch.setattr(FakeEvent, "done", 0.0)
    now = FakeEvent.device
    done: list[tuple[str, dict[str, float]]] = []
    ticks: PhaseClock[str] = PhaseClock(
        torch.device("cuda"), lambda: 0.0, lambda record, seconds: done.append((record, dict(seconds)))
    )
    ticks.enter("data")
    now.now = 1
    ticks.leave()
    ticks.enter("optimizer")
    ticks.enter("forward")
    now.now = 4
    ticks.mark()  # the first pass ends
    now.now = 9
    ticks.mark("extra")  # a second one, and what came between
    now.now = 10
    ticks.leave()
    now.now = 12
    ticks.leave()
    now.now = 15
    ticks.end_step("a")
    assert done == []
    FakeEvent.done = 15
    now.now = 16
    ticks.end_step("b")
    expected = ("a", {"data": 1.0, "forward": 4.0, "extra": 5.0, "optimizer": 2.0, "other": 3.0})
    assert done == [expected]
    now.now = 20
    ticks.stop("c")
    assert done == [expected, ("b", {"other": 1.0}), ("c", {"other": 4.0})]


# -- what it tells


class Memo(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "memo"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.seen.append((step, metrics))


def test_the_logger_gets_numbers_at_its_interval() -> None:
    memo = Memo()
    trainer(EfficiencyMonitor(), max_steps=10, logger=memo, log_every_n_steps=4).fit(MLP(), data(60))
    ours = [
        (step, {name: value for name, value in metrics.items() if name.startswith("eff/monitor/")})
        for step, metrics in memo.seen
    ]
    assert [step for step, metrics in ours if metrics] == [3, 7]
    for _, metrics in ours:
        assert all(isinstance(value, float) for value in metrics.values())
        assert {"eff/monitor/samples_per_second", "eff/monitor/forward_seconds"} <= metrics.keys()
        assert metrics["eff/monitor/parameters_bytes"] == 4 * (8 * 16 + 16 + 16 * 3 + 3)


class FakeMeter:
    """A machine that uses 7.2 MJ, that is 2 kWh."""

    def __init__(self, device: torch.device) -> None:
        self.joules, self.sources = 0.0, ["RAPL package-0"]

    def start(self) -> None:
        self.joules = 0.0

    def read(self) -> None:
        self.joules = 3.6e6

    def stop(self) -> None:
        self.joules = 7.2e6


@pytest.mark.parametrize(("grid", "grams"), [(None, None), (0.0, 0.0), (400.0, 800.0)])
def test_co2_is_energy_times_the_grid(monkeypatch: pytest.MonkeyPatch, grid: float | None, grams: float | None) -> None:
    monkeypatch.setattr(monitor, "EnergyMeter", FakeMeter)
    seen = EfficiencyMonitor(grid_g_per_kwh=grid)
    trainer(seen, max_steps=2).fit(MLP(), data())
    assert seen.summary()["energy_joules"] == 7.2e6
    assert seen.summary()["co2_grams"] == (None if grams is None else pytest.approx(grams))
    assert ("g of CO2" in seen.text()) == (grams is not None)


def test_the_closing_table(capsys: pytest.CaptureFixture[str]) -> None:
    seen = EfficiencyMonitor(peak=1e12)
    trainer(seen, max_steps=4).fit(MLP(), data())
    printed = capsys.readouterr().out
    assert printed.count("What this run cost") == 1 and seen.text() in printed
    told = seen.summary()
    assert told["mfu"] == pytest.approx(told["flops_per_second"] / 1e12)
    assert "of 1 TFLOP/s in float32 (given)" in printed
    assert "counted FLOPs in 1 batches" in printed
    trainer(seen, max_steps=4).fit(MLP(), data())
    assert "of 1 TFLOP/s" in seen.text()
    seen = EfficiencyMonitor()
    trainer(seen, max_steps=4).fit(MLP(), data())
    assert "MFU unknown, because the peak of this device is unknown" in seen.text()
    assert seen.summary()["mfu"] is None
    seen = EfficiencyMonitor(measure_peak=True)
    trainer(seen, max_steps=4).fit(MLP(), data())
    assert seen.summary()["peak_source"] == "measured" and seen.summary()["mfu"] > 0


def test_rates_are_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = EfficiencyMonitor(peak=1e12)
    t = trainer(seen, max_steps=4)
    monkeypatch.setattr(pl.Trainer, "world_size", 3)  # alike, as samplers make them
    t.fit(MLP(), data())
    told = seen.summary()
    assert (told["batches"], told["samples"]) == (12, 60)
    assert told["samples_per_second"] == pytest.approx(3 * 15 / told["rated_seconds"])
    # of one device
    assert told["flops"] == 3 * (MLP_FORWARD + MLP_BACKWARD)
    assert told["mfu"] == pytest.approx(told["flops"] / told["rated_seconds"] / 1e12)


def test_flops_under_ddp() -> None:
    told = watch(MLP(), data=data(), strategy="ddp")
    assert told["flops"] == 3 * (MLP_FORWARD + MLP_BACKWARD)
    assert told["flops_left_out"] == []


def test_arguments_out_of_range() -> None:
    wrong: Sequence[dict[str, Any]] = [
        {"grid_g_per_kwh": -1.0},
        {"co2_per_kwh": -1.0},
        {"price_per_hour": float("inf")},
        {"price_per_kwh": "0.3"},
        {"peak": 0.0},
        {"max_counts": -1},
        {"max_counts": 1.5},
    ]
    for kwargs in wrong:
        (name,) = kwargs
        with pytest.raises(ValueError, match=rf"EfficiencyMonitor\({name}=.*expected"):
            EfficiencyMonitor(**kwargs)
    with pytest.raises(ValueError, match=r"two names of one argument\. Remove grid_g_per_kwh"):
        EfficiencyMonitor(co2_per_kwh=400.0, grid_g_per_kwh=400.0)
    with pytest.raises(RuntimeError, match="has not watched a run yet"):
        EfficiencyMonitor().summary()


def test_time_is_the_real_one_again() -> None:
    assert phases.time is time
