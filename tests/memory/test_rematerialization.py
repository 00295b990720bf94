"""Rematerialization in whole runs: the weights of plain training, the calls and bytes of its plan, and its errors."""

import functools
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff._core.technique import Technique
from lightning_eff.memory._planning.chain import Keep, Segment
from lightning_eff.memory._planning.plan import keep_all
from lightning_eff.memory._planning.rotor import optimal, smallest_budget
from lightning_eff.memory._recompute.optimum import parse_budget
from lightning_eff.memory._recompute.profile import MOST_ROUNDS, ROUNDS
from lightning_eff.memory.rematerialization import Rematerialization
from lightning_eff.model.growth.greedy_layerwise import GreedyLayerwise
from lightning_eff.model.growth.layer_freezing import LayerFreezing
from lightning_eff.model.growth.progressive_layer_dropping import ProgressiveLayerDropping
from lightning_eff.model.growth.progressive_stacking import ProgressiveStacking
from lightning_eff.optim.sharpness.sharpness_aware_minimization import SharpnessAwareMinimization
from tests.cases import Case, no_blocks
from tests.memory.test_recomputation import Live, counting
from tests.models import HuggingFace, TinyGPT, loader, module, trainer
from tests.processes import launch
from tests.runs import MODES, differences, final_state, fit, resume_from_every_step

CASES = {
    "Rematerialization": Case(
        active=lambda: Rematerialization(policy="optimal", memory_budget=0.75),
        neutral=lambda: Rematerialization(policy="optimal", memory_budget=1.0),
        exact=True,
        figure="recomputed_calls",
        saves_less=True,
        refuses_manual=True,
        on_classifier=lambda: Rematerialization(),
        lost=(no_blocks, "classifier", "no stack of repeated blocks"),
    )
}

POLICIES: dict[str, Callable[[], Rematerialization]] = {
    "full": lambda: Rematerialization(),
    "sqrt": lambda: Rematerialization(policy="sqrt"),
    "selective": lambda: Rematerialization(policy="selective"),
    "optimal": lambda: Rematerialization(policy="optimal", memory_budget=0.6),
}
every_policy = pytest.mark.parametrize("policy", POLICIES)


class ChainModule(pl.LightningModule):
    """Residual blocks of several widths, in a stack that an unchanged step runs through; the rest is as small as can be."""

    class Inner(nn.Module):
        def __init__(self, dim: int, wider: int) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, wider), nn.Linear(wider, dim)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)

    def __init__(self, widths: Sequence[int], dim: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner(dim, wider) for wider in widths)
        self.peaks: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            x = block(x)
        return x.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watch(pl.Callback):
    """From the second step on: the peak of live bytes from the batch to the end of backward, and calls of each block."""

    kind: type[Live] = Live

    def __init__(self) -> None:
        self.peaks: list[int] = []
        self.calls: list[list[int]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
        self.batch = batch.nbytes if isinstance(batch, Tensor) else 0
        self.live, self.counting = self.kind(pl_module), counting(pl_module)
        self.calls.append(self.counting.__enter__())
        self.live.__enter__()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.live.__exit__(None, None, None)
        self.counting.__exit__(None, None, None)
        self.peaks.append(self.live.peak + self.batch)


def planned(budget: int | float, *, offload: bool = False) -> Rematerialization:
    # blocks of several widths are not found by themselves
    return Rematerialization(policy="optimal", memory_budget=budget, layers="blocks", offload=offload)


def chain_data(batch_size: int = 32, steps: int = 3, dim: int = 16) -> DataLoader[Any]:
    return DataLoader(torch.randn(batch_size * steps, dim, generator=torch.Generator().manual_seed(0)), batch_size)


def train_chain(net: ChainModule, *callbacks: pl.Callback, watch: Watch | None = None, **kwargs: Any) -> Watch:
    torch.manual_seed(0)
    watch = watch or Watch()
    trainer(*callbacks, watch, max_epochs=1, **kwargs).fit(net, chain_data())
    return watch


# -- the weights of plain training


@functools.cache
def plainly(model: str, mode: str, steps: int) -> dict[str, Tensor]:
    return final_state(*fit(model, list, max_steps=steps, **MODES[mode]))


@every_policy
@pytest.mark.parametrize("mode", MODES)
def test_trains_bit_for_bit_as_plain(policy: str, mode: str) -> None:
    technique = POLICIES[policy]()
    found = final_state(*fit("tiny_gpt", lambda: [technique], max_steps=4, **MODES[mode]))
    assert differences(plainly("tiny_gpt", mode, 4), found) == []
    assert technique.report()["recomputed_calls"] > 0


@every_policy
@pytest.mark.parametrize("model", ["gpt2", "llama", "bert", "vit", "classifier"])
def test_trains_other_models_bit_for_bit(policy: str, model: str) -> None:
    technique = POLICIES[policy]()
    if (policy, model) == ("optimal", "classifier"):
        technique = Rematerialization(policy="optimal", memory_budget=0.95)
    found = final_state(*fit(model, lambda: [technique], max_steps=2))
    assert differences(plainly(model, "plain", 2), found) == []
    assert technique.report()["recomputed_calls"] > 0


@every_policy
def test_batch_norm_in_blocks(policy: str) -> None:
    class Normed(ChainModule):
        class Inner(nn.Module):
            def __init__(self, dim: int, wider: int) -> None:
                super().__init__()
                self.layer, self.norm = nn.Linear(dim, dim), nn.BatchNorm1d(dim)

            def forward(self, x: Tensor) -> Tensor:
                return x + torch.tanh(self.norm(self.layer(x)))

    def run(*techniques: Technique) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net = Normed([1] * 4)
        train_chain(net, *techniques)
        return {name: value.clone() for name, value in net.state_dict().items()}

    expected = run()
    assert expected["blocks.1.norm.num_batches_tracked"] == 3
    technique = Rematerialization(policy="optimal", memory_budget=0.9) if policy == "optimal" else POLICIES[policy]()
    assert differences(expected, run(technique)) == []


@pytest.mark.parametrize("policy", ["full", "sqrt", "selective"])
def test_manual_optimization(policy: str) -> None:
    def run(*techniques: Technique) -> dict[str, Tensor]:
        pl.seed_everything(1, verbose=False)
        net = module("tiny_gpt")
        net.automatic_optimization = False
        plain_step = net.training_step

        def manual_step(batch: Any, batch_idx: int) -> None:
            optimizer: Any = net.optimizers()
            for _ in range(2):
                loss = plain_step(batch, batch_idx)
                optimizer.zero_grad()
                net.manual_backward(loss)
                optimizer.step()

        net.training_step = manual_step
        t = trainer(*techniques, max_steps=8)
        t.fit(net, loader("tiny_gpt"))
        return final_state(net, t)

    technique = POLICIES[policy]()
    assert differences(run(), run(technique)) == []
    assert technique.report()["recomputed_calls"] > 0


OTHERS: dict[str, Callable[[], list[Technique]]] = {
    "sam": lambda: [SharpnessAwareMinimization(rho=0.1)],
    "dropping": lambda: [ProgressiveLayerDropping(theta_min=0.3, gamma=20.0)],
    "stacking": lambda: [ProgressiveStacking(stages=[(0.0, 1), (0.25, 2), (0.6, 4)])],
    "all": lambda: [
        SharpnessAwareMinimization(rho=0.1),
        ProgressiveLayerDropping(theta_min=0.3, gamma=20.0),
        ProgressiveStacking(stages=[(0.0, 2), (0.5, 4)]),
    ],
}


def check_together(name: str, policies: Sequence[str]) -> None:
    plain = final_state(*fit("tiny_gpt", OTHERS[name]))
    for i, policy in enumerate(policies):
        ours, others = [POLICIES[policy]()], OTHERS[name]()
        stacked = [*ours, *others] if i % 2 else [*others, *ours]
        assert differences(plain, final_state(*fit("tiny_gpt", lambda: stacked))) == [], (name, policy)  # noqa: B023


def test_together_with_techniques_that_change_the_step() -> None:
    """SAM runs the step twice, layer dropping leaves blocks out, stacking adds some: as without Rematerialization."""
    check_together("all", ["full", "optimal", "selective"])


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_together_with_each(name: str) -> None:
    check_together(name, [*POLICIES, *reversed(POLICIES)])


@pytest.mark.parametrize("freezing", [lambda: LayerFreezing(start=0.25), lambda: GreedyLayerwise(until=0.7)])
def test_beside_frozen_blocks_only_the_optimal_plan_is_refused(freezing: Callable[[], Technique]) -> None:
    plain = final_state(*fit("tiny_gpt", lambda: [freezing()]))
    for policy in ("full", "sqrt", "selective"):
        both = final_state(*fit("tiny_gpt", lambda: [freezing(), Rematerialization(policy=policy)]))  # noqa: B023
        assert differences(plain, both) == [], policy
    with pytest.raises(ValueError, match=r"frozen blocks store none\. Or use policy='full', 'sqrt' or 'selective'"):
        fit("tiny_gpt", lambda: [freezing(), Rematerialization(policy="optimal", memory_budget=0.75)])


def test_dropped_blocks_are_not_run_again() -> None:
    class Compare(pl.Callback):
        """Behind the others: forward calls of this step, and how many blocks it has."""

        def __init__(self) -> None:
            self.seen: list[tuple[int, int]] = []

        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            self.context = counting(pl_module)
            self.calls = self.context.__enter__()

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            self.context.__exit__(None, None, None)
            self.seen.append((sum(self.calls), sum(count > 0 for count in self.calls)))

    technique, dropping, seen = Rematerialization(), ProgressiveLayerDropping(theta_min=0.3, gamma=20.0), Compare()
    fit("tiny_gpt", lambda: [technique, dropping], callbacks=[seen])
    assert all(calls == 2 * blocks for calls, blocks in seen.seen)
    assert {blocks for _, blocks in seen.seen} > {4}


def test_growth_follows_the_blocks_that_run() -> None:
    planned: list[int] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            assert technique.plan is not None
            planned.append(len(technique.plan.stages))

    technique = Rematerialization(policy="optimal", memory_budget=0.6)
    fit(
        "tiny_gpt",
        lambda: [technique, ProgressiveStacking(stages=[(0.0, 1), (0.25, 2), (0.6, 4)])],
        callbacks=[Look()],
    )
    assert planned == [1] * 3 + [2] * 5 + [4] * 4


# -- the optimal plan


@pytest.mark.parametrize("length", range(6, 13, 2))
def test_the_measured_peak_is_never_over_the_budget(length: int) -> None:
    g = torch.Generator().manual_seed(length)
    widths = [16 * int(k) for k in torch.randint(1, 9, (length,), generator=g)]
    least = 0
    for fraction in (0.9, 0.7, 0.5, 0):
        technique = planned(fraction or least)
        watch = train_chain(ChainModule(widths), technique)
        plan = technique.plan
        assert plan is not None and plan.budget_bytes is not None
        assert plan.peak_bytes <= plan.budget_bytes
        assert max(watch.peaks[1:]) <= plan.budget_bytes, (widths, fraction)
        assert max(watch.peaks[1:]) >= 0.7 * plan.peak_bytes, "the prediction is not far from what is"
        assert [tuple(calls) for calls in watch.calls[1:]] == [plan.forward_calls] * 2
        least = smallest_budget(plan.stages)
    assert plan.forward_calls != (1,) * length


@pytest.mark.slow
@pytest.mark.parametrize("length", [16, 24, 32, 48])
def test_the_measured_peak_of_long_chains(length: int) -> None:
    g = torch.Generator().manual_seed(length)
    widths = [16 * int(k) for k in torch.randint(1, 9, (length,), generator=g)]
    least = 0.0
    for fraction in (0.9, 0.6, 0.4, 0.3, 0.25, least):
        technique = planned(fraction or int(least))
        watch = train_chain(ChainModule(widths), technique)
        plan = technique.plan
        assert plan is not None and plan.budget_bytes is not None
        assert max(watch.peaks[1:]) <= plan.budget_bytes, (widths, fraction)
        assert [tuple(calls) for calls in watch.calls[1:]] == [plan.forward_calls] * 2
        least = smallest_budget(plan.stages)


def test_the_smallest_budget_works_and_less_is_an_error_that_names_it() -> None:
    widths = [16] * 12
    probe = planned(0.9)
    train_chain(ChainModule(widths), probe)
    assert probe.plan is not None
    least = smallest_budget(probe.plan.stages)
    technique = planned(least)
    watch = train_chain(ChainModule(widths), technique)
    assert max(watch.peaks[1:]) <= least
    assert max(max(calls) for calls in watch.calls[1:]) > 2, "nested"
    net = ChainModule(widths)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for budget in (least - 1, 0.01):
        with pytest.raises(ValueError, match=rf"memory_budget={budget}\): .*needs at least {least} bytes"):
            train_chain(net, planned(budget))
    assert differences(before, net.state_dict()) == [], "weights changed before the error"


def test_autocasts_copies_of_weights_are_within_the_budget() -> None:
    widths = [16 * k for k in (1, 8, 2, 4, 1, 6, 3, 2)]
    for fraction in (0.9, 0.7):
        technique = planned(fraction)
        watch = train_chain(ChainModule(widths), technique, precision="bf16-mixed")
        assert technique.plan is not None and technique.plan.budget_bytes is not None
        weights = sum(2 * 16 * width for width in widths) + sum(widths) + 16 * 8
        assert technique._casts == 2 * weights
        assert max(watch.peaks[1:]) <= technique.plan.budget_bytes + technique._casts
        everything = keep_all(technique.plan.stages).peak_bytes + technique._casts
        assert technique.plan.budget_bytes + technique._casts == int(fraction * everything)
        assert sum(map(sum, watch.calls[1:])) == 2 * technique.plan.total_forward_calls > 16


def test_measuring_leaves_no_trace_and_plans_once() -> None:
    class Look(pl.Callback):
        def __init__(self) -> None:
            self.states: list[Tensor] = []
            self.logged: list[dict[str, Any]] = []
            self.grads: list[list[Tensor]] = []

        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            self.states.append(torch.get_rng_state())
            self.logged.append(dict(trainer.logged_metrics))
            self.grads.append([p.grad.clone() for p in pl_module.parameters() if p.grad is not None])

    runs: list[Look] = []
    calls: list[list[int]] = []
    for techniques in ([], [POLICIES["optimal"]()]):
        look = Look()
        pl.seed_everything(1, verbose=False)
        net = module("tiny_gpt")
        with counting(net) as called:
            trainer(*techniques, look, max_steps=3).fit(net, loader("tiny_gpt"))
        runs.append(look)
        calls.append(called)
    assert all(torch.equal(a, b) for a, b in zip(runs[0].states, runs[1].states, strict=True))
    assert "train_loss" not in runs[1].logged[0] and runs[1].grads[0] == []
    for a, b in zip(runs[0].grads, runs[1].grads, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    (technique,) = techniques
    assert isinstance(technique, Rematerialization) and technique.plan is not None
    assert calls[0] == [3] * 4
    (measuring,) = {calls[1][i] - 3 * n for i, n in enumerate(technique.plan.forward_calls)}
    assert 2 + ROUNDS <= measuring <= 2 + MOST_ROUNDS, "two runs count bytes"


def test_larger_batches_are_planned_for_anew() -> None:
    class Growing(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Tensor:
            return torch.randn((16, 8, 32, 32)[index], 16, generator=torch.Generator().manual_seed(index))

    plans: list[Any] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            plans.append(technique.plan)

    technique, watch = planned(0.6), Watch()
    net = ChainModule([16, 64, 32, 64])
    trainer(technique, watch, Look(), max_epochs=1).fit(net, DataLoader(Growing(), batch_size=None))
    assert plans[0] is plans[1] and plans[1] is not plans[2] and plans[2] is plans[3]
    assert plans[2].stages[0].input_bytes == 2 * plans[0].stages[0].input_bytes
    assert watch.peaks[1] <= plans[0].budget_bytes and watch.peaks[3] <= plans[2].budget_bytes


def test_the_plan_is_told_and_drawn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    technique = planned(0.5)
    with pytest.raises(RuntimeError, match="there is no plan yet"):
        technique.draw(tmp_path / "plan.png")
    with caplog.at_level("INFO"):
        train_chain(ChainModule([16, 64, 32, 64, 16, 16]), technique)
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert re.search(r"plan for the blocks of 'blocks' needs .* instead of .*, with \d+ more forward calls", told)
    assert "forward runs" in told
    technique.draw(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 5000


def test_blocks_out_of_order_cannot_be_planned_for() -> None:
    class Twice(ChainModule):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match=r"calls the blocks of 'blocks' in the order \[0, 1, 2, 0, 1, 2\].*'full'"):
        train_chain(Twice([16] * 3), planned(0.9))
    train_chain(Twice([16] * 3), Rematerialization())


def test_a_disturbance_is_no_part_of_the_measures() -> None:
    """Another 50 ms in two of the first three rounds: there are more rounds, and the prediction knows nothing of it."""

    class Disturbed(ChainModule):
        class Inner(ChainModule.Inner):
            calls = 0

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                if self.calls in (3, 4):  # two runs count bytes
                    began = time.thread_time()
                    while time.thread_time() < began + 0.05:
                        pass
                return super().forward(x)

    net, technique = Disturbed([16]), planned(1000**2)
    train_chain(net, technique)
    assert net.blocks[0].calls - 3 >= 2 + 5
    assert technique.plan is not None and technique.plan.stages[0].forward_seconds < 0.01


def test_blocks_that_do_the_same_share_their_measures_and_no_others() -> None:
    technique, net = planned(1000**2), ChainModule([64] * 5 + [16])
    for block in net.blocks[:2]:
        block.requires_grad_(False)
    trainer(technique, max_epochs=1).fit(net, chain_data())
    assert technique.plan is not None
    seconds = [(stage.forward_seconds, stage.backward_seconds) for stage in technique.plan.stages]
    assert seconds[0] == seconds[1] != seconds[2], "without gradients"
    assert seconds[2] != seconds[3] == seconds[4] != seconds[5], "without a gradient of the input; of another width"
    assert seconds[0][1] < 0.2 * seconds[3][1]


def test_what_runs_again_is_timed_until_the_last_saved_tensor() -> None:
    class Heavy(ChainModule):
        class Inner(nn.Module):
            def __init__(self, dim: int, wider: int) -> None:
                super().__init__()
                self.up, self.down = nn.Linear(dim, wider, bias=False), nn.Linear(wider, dim, bias=False)

            def forward(self, x: Tensor) -> Tensor:
                return self.down(self.up(x))  # the input of the second product is the last that is saved

    technique = planned(0.9)
    net = Heavy([2048] * 3, dim=128)
    trainer(technique, max_steps=1).fit(net, chain_data(256, 1, 128))
    assert technique.plan is not None
    for stage in technique.plan.stages:
        assert 0.3 * stage.forward_seconds < stage.last_seconds < 0.8 * stage.forward_seconds


@pytest.mark.slow
def test_predicted_seconds_are_those_of_a_step() -> None:
    """Of plans for two budgets, run in turns, within 10 %: in processor time, which other processes do not add to."""

    class Turns(pl.Callback):
        """Behind the technique: one plan after the other, made from the same measures."""

        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                stages = technique.plan.stages
                self.plans = [optimal(stages, int(f * keep_all(stages).peak_bytes)) for f in (0.95, 0.35)]
            technique.plan = self.plans[batch_idx % 2]
            technique._follow()
            self.began = time.thread_time()

        def on_after_backward(self, *args: Any) -> None:
            self.seconds.append(time.thread_time() - self.began)

    torch.manual_seed(0)
    technique, turns = planned(0.95), Turns()
    data = torch.randn(512, 256).repeat(24, 1)
    trainer(technique, turns, max_steps=24).fit(ChainModule([2048, 512] * 4, 256), DataLoader(data, 512))
    plenty, scarce = (statistics.median(turns.seconds[2 + k :: 2]) for k in (0, 1))
    a, b = (plan.seconds for plan in turns.plans)
    print(f"predicted {a:.3f} {b:.3f} {b / a:.3f} measured {plenty:.3f} {scarce:.3f} {scarce / plenty:.3f}")
    assert scarce / plenty == pytest.approx(b / a, rel=0.1)


# -- the host's memory


class OnDevice(Watch):
    """As :class:`Watch`, without the buffers in host memory, which are bytes."""

    class kind(Live):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = super().__torch_dispatch__(func, types, args, kwargs)
            if isinstance(output, Tensor) and output.dtype == torch.uint8:
                self.hide(output)
            return output


def test_offloading_holds_to_the_budget_and_to_the_gradients() -> None:
    widths = [16 * k for k in (4, 8, 2, 6, 3, 2)]
    net = ChainModule(widths)
    start = {name: value.clone() for name, value in net.state_dict().items()}
    train_chain(net)
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    left = 0
    for fraction in (0.9, 0.6):
        net.load_state_dict(start)
        technique = planned(fraction, offload=True)
        watch = train_chain(net, technique, watch=OnDevice())
        plan = technique.plan
        assert plan is not None and plan.budget_bytes is not None
        assert differences(expected, net.state_dict()) == []
        assert max(watch.peaks[1:]) <= plan.budget_bytes
        assert [tuple(calls) for calls in watch.calls[1:]] == [plan.forward_calls] * 2
        left += any(item.offload for item in plan.items)
        assert (technique.report()["bytes_to_host"] > 0) == any(item.offload for item in plan.items)
    assert left >= 1, "copies take no time to speak of here"


@pytest.mark.parametrize("model", ["gpt2", "bert"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_offloading_trains_as_plain(model: str, precision: Any) -> None:
    plain = final_state(*fit(model, list, max_steps=3, precision=precision))
    technique = Rematerialization(policy="optimal", memory_budget=0.5, offload=True)
    assert differences(plain, final_state(*fit(model, lambda: [technique], max_steps=3, precision=precision))) == []
    assert technique.report()["bytes_to_host"] > 0


# -- resume, processes, traces


def test_resumes_from_every_step(tmp_path: Path) -> None:
    build = POLICIES["optimal"]
    assert resume_from_every_step("tiny_gpt", lambda: [build()], tmp_path, **MODES["accumulate_clip"]) == {}


@pytest.mark.slow
@every_policy
@pytest.mark.parametrize("mode", MODES)
def test_resumes_in_every_mode(policy: str, mode: str, tmp_path: Path) -> None:
    build = POLICIES[policy]
    assert resume_from_every_step("tiny_gpt", lambda: [build()], tmp_path, **MODES[mode]) == {}


def test_a_resumed_run_has_the_plan_of_the_checkpoint(tmp_path: Path) -> None:
    first = POLICIES["optimal"]()
    fit("tiny_gpt", lambda: [first], directory=tmp_path, max_steps=3)
    path = next(iter(tmp_path.glob("step=2*.ckpt")))
    state = torch.load(path, weights_only=True)
    assert any("Rematerialization" in key for key in state["callbacks"])
    again = POLICIES["optimal"]()
    fit("tiny_gpt", lambda: [again], resume=path, max_steps=4)
    assert again.plan == first.plan, "it was measured again, and seconds differ"
    other = Rematerialization(policy="optimal", memory_budget=0.7)
    fit("tiny_gpt", lambda: [other], resume=path, max_steps=4)
    assert other.plan is not None and other.plan != first.plan


@every_policy
def test_nothing_is_left_behind(policy: str) -> None:
    for fail in (False, True):
        net = module("tiny_gpt")
        assert isinstance(net, TinyGPT) and net.blocks is not None
        before = [sorted(m.__dict__) for m in net.blocks.modules()]
        if fail:

            class Fails(pl.Callback):
                def on_before_zero_grad(self, *args: Any) -> None:
                    raise KeyError("planted")

            with pytest.raises(KeyError, match="planted"):
                trainer(POLICIES[policy](), Fails(), max_steps=2).fit(net, loader("tiny_gpt"))
        else:
            trainer(POLICIES[policy](), max_steps=2).fit(net, loader("tiny_gpt"))
        assert [sorted(m.__dict__) for m in net.blocks.modules()] == before
        assert all(not p._backward_hooks for p in net.parameters())


def test_evaluation_is_plain() -> None:
    technique = Rematerialization()
    seen: list[int] = []
    engines: list[Any] = []

    class Look(pl.Callback):
        def on_validation_start(self, *args: Any) -> None:
            assert technique._engine is not None
            engines.append(technique._engine.call)
            technique._engine.call = None  # pyright: ignore[reportAttributeAccessIssue]

        def on_validation_end(self, *args: Any) -> None:
            assert technique._engine is not None
            del technique._engine.call
            seen.append(1)

    fit("tiny_gpt", lambda: [technique], callbacks=[Look()], limit_val_batches=1, val_check_interval=2, max_steps=4)
    assert len(seen) == 2


def test_two_processes() -> None:
    launch("tests.memory.rematerialization_jobs", forked=True, timeout=280)


# -- arguments and refusals


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (1, 1),
        (10**9, 10**9),
        ("8GB", 8 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5 kB", 1500),
        ("7B", 7),
        (0.5, 0.5),
        (1.0, 1.0),
    ],
)
def test_budgets(given: Any, expected: int | float) -> None:
    assert parse_budget(given) == expected
    assert type(parse_budget(given)) is type(expected)


@pytest.mark.parametrize("given", [0, -1, 0.0, 1.5, float("nan"), "8", "GB", "8 iB", "-1GB", "0.1B", True, None, [1]])
def test_wrong_budgets(given: Any) -> None:
    with pytest.raises(ValueError, match=r"memory_budget=.*(expected bytes as an integer > 0|needs a memory_budget)"):
        Rematerialization(policy="optimal", memory_budget=given)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"policy='half'\): expected 'full', 'sqrt', 'selective' or 'optimal'"):
        Rematerialization(policy="half")
    with pytest.raises(
        ValueError, match=r"policy='optimal', and no other, needs a memory_budget\. Set policy='optimal'"
    ):
        Rematerialization(policy="full", memory_budget=0.5)
    with pytest.raises(ValueError, match="only the plan of policy='optimal' can offload"):
        Rematerialization(policy="sqrt", offload=True)
    assert Rematerialization(policy="optimal", memory_budget=1.0).neutral
    assert not Rematerialization(policy="optimal", memory_budget=1).neutral
    assert not any(build().neutral for build in POLICIES.values())


def test_what_cannot_be_run_again_is_refused_at_setup() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    net = module("gpt2")
    assert isinstance(net, HuggingFace)
    net.model.activation_checkpointing_enable()
    with pytest.raises(ValueError, match="has gradient_checkpointing enabled"):
        trainer(Rematerialization(), max_steps=2).fit(net, loader("gpt2"))
    chain = ChainModule([16] * 3)
    chain.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in chain.blocks)
    with pytest.raises(ValueError, match="in torch's checkpoint_wrapper, so"):
        train_chain(chain, Rematerialization())
    shared = ChainModule([16] * 3)
    shared.blocks = nn.ModuleList([shared.blocks[0]] * 3)
    for policy in ("sqrt", "optimal"):
        with pytest.raises(ValueError, match="holds the same block several times"):
            train_chain(shared, Rematerialization(policy=policy, memory_budget=0.5 if policy == "optimal" else None))
    manual = module("tiny_gpt")
    manual.automatic_optimization = False
    with pytest.raises(ValueError, match="automatic_optimization=False, so measuring"):
        trainer(POLICIES["optimal"](), max_steps=2).fit(manual, loader("tiny_gpt"))


@pytest.mark.parametrize("other", ["ActivationCompression", "ACTPrecision"])
def test_plans_of_measured_times_are_refused_beside_what_depends_on_them(other: str) -> None:
    """Another plan, made after a resume, would keep and so compress other tensors."""
    technique = Rematerialization(policy="optimal", memory_budget=0.75)
    assert "measured times" in technique.conflicts[other]
    assert not Rematerialization(policy="full").conflicts and not Rematerialization.conflicts


def test_the_same_block_several_times() -> None:
    def run(*techniques: Technique) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net = ChainModule([16] * 3)
        net.blocks = nn.ModuleList([net.blocks[0]] * 3)
        train_chain(net, *techniques)
        return dict(net.state_dict())

    expected = run()
    for policy in ("full", "selective"):
        assert differences(expected, run(POLICIES[policy]())) == []


def test_reports() -> None:
    technique = Rematerialization()
    train_chain(ChainModule([16] * 4), technique)
    n = 32 * 16 * 4
    assert technique.report() == {"recomputed_calls": 4, "input_bytes": 4 * n}
    assert technique.summary() == "full: 4.0 more forward calls of blocks per step"
    technique = Rematerialization(policy="optimal", memory_budget=0.6)
    train_chain(ChainModule([16] * 4), technique)
    plan = technique.plan
    assert plan is not None
    assert technique.report()["predicted_peak_bytes"] == plan.peak_bytes
    assert technique.report()["recomputed_calls"] == plan.total_forward_calls - 4
    assert all(isinstance(item, Keep | Segment) for item in plan.items)
