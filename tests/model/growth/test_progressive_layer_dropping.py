"""Progressive layer dropping: the rule's numbers, an unbiased branch, and dropped blocks that do no work."""

import itertools
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_eff import LayerFreezing, ProgressiveLayerDropping, ProgressiveStacking, SharpnessAwareMinimization
from lightning_eff._core.blocks import BlockStack, find_stack
from lightning_eff._core.rng import keyed_generator
from lightning_eff._core.session import Session
from lightning_eff._core.steps import silent
from lightning_eff._core.technique import techniques_of
from lightning_eff.model.growth import _dropping
from lightning_eff.model.growth._dropping import at_least_one, draw, keep_probabilities
from lightning_eff.model.growth.progressive_layer_dropping import theta
from tests.cases import Case, no_blocks
from tests.core.nop import Nop
from tests.models import TinyGPT, flat, hugging_face, loader, make_batch, module, trainer
from tests.runs import final_state, fit, resume_from_every_step

CASES = {
    "ProgressiveLayerDropping": Case(
        active=lambda: ProgressiveLayerDropping(theta_min=0.3, gamma=20.0),
        neutral=lambda: ProgressiveLayerDropping(theta_min=1.0),
        lost=(no_blocks, "classifier", "no stack of repeated blocks"),
        refuses={"classifier": "does not return its input plus something"},
    )
}

MODELS = ["tiny_gpt", "gpt2", "llama", "bert", "vit"]


def blocks_of(net: nn.Module) -> list[Any]:
    return next(list(m) for m in net.modules() if isinstance(m, nn.ModuleList))


def dropping(theta_min: float = 0.3, gamma: float = 1e6, **kwargs: Any) -> ProgressiveLayerDropping:
    """At its final theta from the second step on."""
    return ProgressiveLayerDropping(theta_min=theta_min, gamma=gamma, **kwargs)


class Calls(pl.Callback):
    """Which blocks each micro-batch called, which it should have dropped, and which got gradients."""

    def __init__(self, technique: ProgressiveLayerDropping) -> None:
        self.technique = technique
        self.rows: list[dict[str, Any]] = []
        self._called: list[int] = []
        self._handles: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for i, block in enumerate(blocks_of(pl_module)):
            self._handles.append(block.register_forward_pre_hook(lambda *_, i=i: self._called.append(i)))

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self._called.clear()
        self._step = trainer.global_step
        (stack,) = self.technique._stacks
        self._dropped, self._keep = set(stack.dropped), list(stack.keep)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        grads = [all(p.grad is not None for p in block.parameters()) for block in blocks_of(pl_module)]
        none = [all(p.grad is None for p in block.parameters()) for block in blocks_of(pl_module)]
        self.rows.append(
            {
                "step": self._step,
                "called": list(self._called),
                "dropped": self._dropped,
                "keep": self._keep,
                "grads": grads,
                "none": none,
            }
        )

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for handle in self._handles:
            handle.remove()


# -- the rule


def test_theta_and_keep_probabilities() -> None:
    for theta_min in (0.2, 0.5, 0.9):
        assert theta(0.0, theta_min=theta_min, gamma=100.0) == 1.0
        assert theta(1.0, theta_min=theta_min, gamma=100.0) == pytest.approx(theta_min, abs=1e-12)
        expected = (1 - theta_min) * math.exp(-3.0) + theta_min
        assert theta(0.03, theta_min=theta_min, gamma=100.0) == pytest.approx(expected, abs=1e-15)
        for length in (1, 4, 12):
            p = keep_probabilities(theta_min, num_blocks=length)
            assert p == pytest.approx([1 - i / length * (1 - theta_min) for i in range(1, length + 1)], abs=1e-15)
            assert p[-1] == pytest.approx(theta_min)
            # the mean drop in the end: (1 - theta_min)(L + 1) / 2L
            assert sum(1 - x for x in p) / length == pytest.approx((1 - theta_min) * (length + 1) / (2 * length))
    assert keep_probabilities(1.0, num_blocks=3) == [1.0] * 3


def test_draws_agree_with_their_probabilities() -> None:
    keep, draws = keep_probabilities(0.5, num_blocks=6), 4000
    found = [draw(keep, keyed_generator(7, "progressive_layer_dropping", step)) for step in range(draws)]
    for i, p in enumerate(keep):
        share = sum(i in dropped for dropped in found) / draws
        assert abs(share - (1 - p)) < 4 * math.sqrt(p * (1 - p) / draws)
    together = sum(4 in dropped and 5 in dropped for dropped in found) / draws  # and are independent
    both = (1 - keep[4]) * (1 - keep[5])
    assert abs(together - both) < 4 * math.sqrt(both * (1 - both) / draws)
    assert draw([1.0] * 5, keyed_generator(0)) == frozenset()


@pytest.mark.parametrize("keep", [[0.6, 0.3], [0.875, 0.75, 0.625, 0.5], [0.2, 0.7, 0.7], [1.0, 0.5]])
def test_at_least_one_block_is_kept_and_its_probability_is_exact(keep: list[float]) -> None:
    """Summed over all draws with their probabilities."""
    likely = [0.0] * len(keep)
    for dropped in itertools.product([False, True], repeat=len(keep)):
        chance = math.prod(1 - p if gone else p for p, gone in zip(keep, dropped, strict=True))
        _, left = at_least_one(keep, frozenset(i for i, gone in enumerate(dropped) if gone))
        assert len(left) < len(keep) or chance == 0.0
        likely = [sum_ + chance * (i not in left) for i, sum_ in enumerate(likely)]
    assert at_least_one(keep, frozenset())[0] == pytest.approx(likely)


# -- T: E[output] is the full block's


@pytest.mark.parametrize("p", [0.25, 0.5, 0.9])
@pytest.mark.parametrize("name", MODELS)
def test_the_expected_output_of_a_block_is_the_full_one(name: str, p: float) -> None:
    net = module(name).double()
    net.eval()  # no other randomness
    stack = BlockStack(find_stack(net, None, who="Test"))
    stack.watch(scales=True)
    found: dict[str, Tensor] = {}

    def note(key: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = args[0] if args else kwargs["hidden_states"]
            found[key] = value.detach().clone()

        return hook

    batch = make_batch(name)
    if name == "vit":
        batch["pixel_values"] = batch["pixel_values"].double()
    entered = stack.blocks[1].register_forward_pre_hook(note("entered"), with_kwargs=True)
    for key, keep, dropped in (("full", [], []), ("kept", [1.0, p, 1.0, 1.0], []), ("passed", [1.0, p, 1.0, 1.0], [1])):
        stack.keep, stack.dropped = keep, frozenset(dropped)
        left = stack.blocks[2].register_forward_pre_hook(note(key), with_kwargs=True)  # sees what block 1 hands on
        with stack.view(training=True), torch.no_grad(), silent(net):
            net.training_step(batch, 0)
        left.remove()
    entered.remove()
    stack.release()
    assert torch.equal(found["passed"], found["entered"])
    assert not torch.allclose(found["kept"], found["full"])
    expectation = p * found["kept"] + (1 - p) * found["passed"]
    assert torch.allclose(expectation, found["full"], rtol=0, atol=1e-12)


# -- T: dropped blocks do no work


@pytest.mark.parametrize("name", MODELS)
def test_dropped_blocks_are_not_called_and_get_no_gradient(name: str) -> None:
    technique = dropping()
    calls = Calls(technique)
    fit(name, lambda: [technique], callbacks=[calls])
    assert calls.rows[0]["dropped"] == set()  # theta(0) = 1
    assert calls.rows[0]["keep"] == [1.0] * 4
    dropped = 0
    for row in calls.rows:
        kept = [i for i in range(4) if i not in row["dropped"]]
        assert row["called"] == kept
        assert [i for i in range(4) if row["grads"][i]] == kept
        assert [i for i in range(4) if row["none"][i]] == sorted(row["dropped"])
        dropped += len(row["dropped"])
    assert dropped >= 8
    assert technique.summary().startswith(f"dropped {dropped / 48:.1%} of block passes, of 4 blocks")


@pytest.mark.parametrize("name", MODELS)
def test_a_steps_flops_are_those_of_the_blocks_that_ran(name: str) -> None:
    technique = dropping()
    calls = Calls(technique)
    flops: list[int] = []

    class Counts(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            self.counter = FlopCounterMode(display=False)
            self.counter.__enter__()

        def on_train_batch_end(self, *args: Any) -> None:
            self.counter.__exit__(None, None, None)
            flops.append(self.counter.get_total_flops())

    fit(name, lambda: [technique], callbacks=[calls, Counts()], max_steps=8)
    ran = [len(row["called"]) for row in calls.rows]
    assert ran[0] == 4 and len(set(ran)) > 1
    other = min(ran)
    block = (flops[0] - flops[ran.index(other)]) / (4 - other)
    assert block > 0
    assert flops == [flops[0] - (4 - n) * block for n in ran]


def test_a_dropped_block_keeps_its_weights_and_state() -> None:
    """No gradient means no step either: AdamW neither moves nor decays it."""
    technique = dropping(theta_min=0.05)
    seen: list[int] = []

    class Compares(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            self.before = [[p.detach().clone() for p in block.parameters()] for block in pl_module.blocks]
            self.dropped = technique._stacks[0].dropped

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            for i, (block, before) in enumerate(zip(pl_module.blocks, self.before, strict=True)):
                still = all(torch.equal(a, b) for a, b in zip(block.parameters(), before, strict=True))
                assert still == (i in self.dropped)
                seen.append(still)

    fit("tiny_gpt", lambda: [technique], callbacks=[Compares()])
    assert sum(seen) > 10


# -- when is drawn, and for whom


def test_one_draw_holds_for_an_accumulation_window() -> None:
    technique = dropping()
    calls = Calls(technique)
    fit("tiny_gpt", lambda: [technique], callbacks=[calls], accumulate_grad_batches=2, max_steps=9)
    windows: dict[int, list[set[int]]] = {}
    for row in calls.rows:
        windows.setdefault(row["step"], []).append(row["dropped"])
    assert all(drawn == [drawn[0]] * len(drawn) for drawn in windows.values())
    assert max(len(drawn) for drawn in windows.values()) == 2
    assert len({frozenset(drawn[0]) for drawn in windows.values()}) > 3


def test_histogram_of_a_run_agrees_with_the_probabilities() -> None:
    technique, steps = dropping(theta_min=0.5), 300
    drops = [0] * 4

    class Counts(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            for i in technique._stacks[0].dropped:
                drops[i] += 1

    pl.seed_everything(3, verbose=False)
    trainer(technique, Counts(), max_steps=steps).fit(TinyGPT(dim=4), loader("tiny_gpt", 8, 2))
    for i, p in enumerate(keep_probabilities(0.5, num_blocks=4)):
        assert abs(drops[i] / steps - (1 - p)) < 4 * math.sqrt(p * (1 - p) / steps)
    assert technique._passed_over / technique._passes == pytest.approx(sum(drops) / (4 * steps))


def test_all_ranks_draw_the_same() -> None:
    """What is drawn depends on the run's seed, the step and nothing of the rank."""
    drawn = []
    for rank in (0, 1):
        technique = dropping()
        net, t = TinyGPT(), trainer(technique, max_steps=100)
        technique.setup(t, net, "fit")
        session = technique.session
        session.rank, session.seed = rank, 12345
        technique.on_model(session)
        technique._stacks[0].carries = False
        session.progress.u = 0.5
        torch.manual_seed(rank)  # nor of the global random state
        rows = []
        for step in range(20):
            t.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
            assert t.global_step == step
            technique.on_batch_start(session, None, step)
            rows.append(technique._stacks[0].dropped)
        drawn.append(rows)
        technique.teardown(t, net, "fit")
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 3


def test_both_passes_of_sam_run_the_same_blocks() -> None:
    technique = dropping()
    calls = Calls(technique)
    fit("gpt2", lambda: [technique, SharpnessAwareMinimization(rho=0.05)], callbacks=[calls])
    for row in calls.rows:
        kept = [i for i in range(4) if i not in row["dropped"]]
        assert row["called"] == kept * 2


@pytest.mark.parametrize("order", [1, -1])
def test_with_stacking_the_depth_is_that_of_the_active_blocks(order: int) -> None:
    technique = dropping(theta_min=0.5)
    stacking = ProgressiveStacking(stages=[(0.0, 2), (0.5, 4)])
    calls = Calls(technique)
    fit("tiny_gpt", lambda: [technique, stacking][::order], callbacks=[calls])
    assert calls.rows[0]["keep"] == [1.0, 1.0]
    for row in calls.rows[1:]:
        active = 2 if row["step"] < 6 else 4
        expected = keep_probabilities(0.5, num_blocks=active)
        expected[0] += math.prod(1 - p for p in expected)  # the first block runs where none is drawn
        assert row["keep"] == pytest.approx(expected)
        assert row["called"] == [i for i in range(active) if i not in row["dropped"]]


def test_blocks_that_carry_tensors_keep_the_first() -> None:
    technique = dropping(theta_min=0.05, layers="model.decoder.block")
    net = hugging_face("t5")
    kept = []

    class First(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            kept.append(
                (technique._stacks[0].carries, 0 not in technique._stacks[0].dropped, technique._stacks[0].keep[0])
            )

    trainer(technique, First(), max_steps=20).fit(net, loader("t5"))
    assert kept == [(None, True, 1.0)] + [(True, True, 1.0)] * 19
    assert technique.report()["theta"] == pytest.approx(0.05)


def test_where_only_blocks_train_the_first_is_kept() -> None:
    net = TinyGPT(num_layers=2)
    for name, p in net.named_parameters():
        p.requires_grad_(name.startswith("blocks."))
    technique = dropping(theta_min=0.01)
    calls = Calls(technique)
    trainer(technique, calls, max_steps=30).fit(net, loader("tiny_gpt"))  # else some step had nothing to train
    assert all(0 in row["called"] for row in calls.rows)
    assert any(1 in row["dropped"] for row in calls.rows)


@pytest.mark.parametrize("first", [True, False])
def test_where_only_blocks_train_the_first_that_trains_is_kept(first: bool) -> None:
    """Whichever of the two acts first at a batch: a block that is frozen from this step on is needed no more."""
    net = TinyGPT(num_layers=3)
    for name, p in net.named_parameters():
        p.requires_grad_(name.startswith("blocks.") and name.endswith("bias"))
    technique = dropping(theta_min=0.01)
    freezing = LayerFreezing(start=0.3, end=0.7)
    calls = Calls(technique)
    both = [technique, freezing] if first else [freezing, technique]
    trainer(*both, calls, max_steps=30).fit(net, loader("tiny_gpt"))  # else some step had nothing to train
    kept = [set(row["called"]) for row in calls.rows]
    assert all(0 in some for some in kept[:9]) and all(2 in some for some in kept[-5:])
    assert any(0 not in some for some in kept)


def test_evaluation_runs_all_blocks_unscaled() -> None:
    losses: list[tuple[float, float]] = []

    class Compares(pl.Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            batch = make_batch("tiny_gpt", 4, seed=5)
            other = TinyGPT().eval()  # that no technique has hooks on
            other.load_state_dict(pl_module.state_dict())
            with torch.no_grad():
                logits = other(batch["input_ids"]).flatten(0, 1)
            plain = nn.functional.cross_entropy(logits, batch["labels"].flatten())
            losses.append((float(trainer.callback_metrics["val_loss"]), float(plain)))

    t = trainer(dropping(), Compares(), max_steps=8, limit_val_batches=1, val_check_interval=2)
    t.fit(TinyGPT(), loader("tiny_gpt"), loader("tiny_gpt", 4, shuffle=False, seed=5))
    assert len(losses) == 3
    assert all(found == plain for found, plain in losses)


# -- under checkpointing, bf16-mixed, manual optimization; resuming


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_checkpointed_blocks_train_the_same(name: str, precision: Any) -> None:
    weights = {}
    for reentrant in (None, False, True):
        pl.seed_everything(1, verbose=False)
        net = module(name)
        if reentrant is not None:
            checkpointing: Any = net.model
            checkpointing.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
        technique = dropping()
        trainer(technique, max_steps=4, precision=precision).fit(net, loader(name))
        weights[reentrant] = flat(net)
        assert technique._passed_over > 2
    assert torch.equal(weights[False], weights[None])
    # reentrant backward sums the two paths of a residual in another order
    assert torch.allclose(weights[True], weights[None], rtol=0, atol=1e-5 if precision == "32-true" else 1e-2)


def test_blocks_checkpointed_by_hand_train_the_same() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(TinyGPT):
        reentrant: bool | None = None

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids) + self.position.weight[: ids.shape[1]]
            assert self.blocks is not None
            for block in self.blocks:
                x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
            return self.head(self.norm(x))

    weights = {}
    for reentrant in (None, False, True):
        pl.seed_everything(1, verbose=False)
        net = Checkpointed()
        net.reentrant = reentrant
        trainer(dropping(), max_steps=8).fit(net, loader("tiny_gpt"))
        weights[reentrant] = flat(net)
    assert torch.equal(weights[False], weights[None])
    assert torch.equal(weights[True], weights[None])


def test_manual_optimization_drops_in_every_pass_of_a_step() -> None:
    from tests.model.growth.test_progressive_stacking import Manual

    technique = dropping()
    calls = Calls(technique)
    trainer(technique, calls, max_steps=8).fit(Manual(), loader("tiny_gpt"))
    for row in calls.rows:
        assert row["called"] == [i for i in range(4) if i not in row["dropped"]] * 2
    assert sum(len(row["dropped"]) for row in calls.rows) > 4


def test_resumes_exactly_with_stacking_from_every_step(tmp_path: Path) -> None:
    def build() -> list[Any]:
        return [dropping(), ProgressiveStacking(stages=[(0.0, 1), (0.3, 3)])]

    assert resume_from_every_step("gpt2", build, tmp_path, accumulate_grad_batches=2) == {}


def test_a_run_with_dropping_alone_goes_on_from_one_with_stacking(tmp_path: Path) -> None:
    """What was learnt of the blocks is taken over, not how many ran."""
    technique = dropping()
    _, t = fit("tiny_gpt", lambda: [technique, ProgressiveStacking(stages=[(0.0, 1), (0.9, 4)])], max_steps=4)
    t.save_checkpoint(tmp_path / "both.ckpt")
    technique = dropping()
    calls = Calls(technique)
    with pytest.warns(UserWarning, match="callbacks used to create the checkpoint"):
        fit("tiny_gpt", lambda: [technique], callbacks=[calls], resume=tmp_path / "both.ckpt")
    assert [len(row["keep"]) for row in calls.rows] == [4] * 8


def test_nothing_is_dropped_until_blocks_have_been_seen_to_run(tmp_path: Path) -> None:
    """A run that takes it up on the way begins beyond u = 0; its first window learns what a dropped block must return."""
    _, t = fit("t5", lambda: [Nop()], max_steps=1, accumulate_grad_batches=2)
    t.save_checkpoint(tmp_path / "without.ckpt")
    technique = dropping(theta_min=0.05, layers="model.encoder.block")
    calls = Calls(technique)
    fit("t5", lambda: [technique], callbacks=[calls], resume=tmp_path / "without.ckpt", accumulate_grad_batches=2)
    step = calls.rows[0]["step"]
    first = [row for row in calls.rows if row["step"] == step]
    assert [(row["dropped"], row["keep"]) for row in first] == [(set(), [1.0] * 4)] * 2
    assert all(row["keep"][3] == pytest.approx(0.05) for row in calls.rows if row["step"] > step)


def test_neutral_is_plain_training() -> None:
    assert ProgressiveLayerDropping(theta_min=1.0).neutral
    whole = final_state(*fit("gpt2", lambda: [ProgressiveLayerDropping(theta_min=1.0)]))
    plain = final_state(*fit("gpt2", list))
    assert all(torch.equal(whole[key], plain[key]) for key in plain)


# -- errors


@pytest.mark.parametrize("value", [0.0, -0.1, 1.1, math.nan])
def test_theta_min_is_a_probability(value: float) -> None:
    with pytest.raises(
        ValueError, match=rf"theta_min={value}\): expected a number in \(0, 1\]: .*probability.*default is 0.5"
    ):
        ProgressiveLayerDropping(theta_min=value)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_gamma_is_positive(value: float) -> None:
    with pytest.raises(ValueError, match=rf"gamma={value}\): expected a finite number > 0.*use theta_min=1"):
        ProgressiveLayerDropping(gamma=value)


def test_shared_blocks_are_refused() -> None:
    net = TinyGPT()
    assert net.blocks is not None
    net.blocks = nn.ModuleList([net.blocks[0]] * 3)
    with pytest.raises(ValueError, match=r"'blocks' \(3 x Block\) holds the same block several times"):
        trainer(dropping(), max_steps=2).fit(net, loader("tiny_gpt"))


def test_ddp_is_told_to_look_for_unused_parameters_and_static_graphs_are_refused() -> None:
    def opened(strategy: DDPStrategy) -> tuple[pl.Trainer, ProgressiveLayerDropping]:
        technique = dropping()
        t = trainer(technique, max_steps=2)
        t._accelerator_connector.strategy = strategy
        return t, technique

    strategy = DDPStrategy()
    strategy.broadcast = lambda obj, src=0: obj  # type: ignore[method-assign]
    t, technique = opened(strategy)
    net = TinyGPT()
    Session.open(t, net, techniques_of(t), "fit")
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}
    technique.session.close()
    assert strategy._ddp_kwargs == {}

    static = DDPStrategy(static_graph=True)
    static.broadcast = lambda obj, src=0: obj  # type: ignore[method-assign]
    t, _ = opened(static)
    with pytest.raises(ValueError, match=r"got DDPStrategy\(static_graph=True\); expected static_graph=False"):
        Session.open(t, net, techniques_of(t), "fit")

    strategy = DDPStrategy()
    strategy.broadcast = lambda obj, src=0: obj  # type: ignore[method-assign]
    t, technique = opened(strategy)
    checkpointed: Any = hugging_face("gpt2")
    checkpointed.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
    Session.open(t, checkpointed, techniques_of(t), "fit")
    with pytest.raises(ValueError, match="checkpointed with use_reentrant=True, under DDP; expected use_reent"):
        technique.on_model(technique.session)
    technique.session.close()


@pytest.mark.parametrize(("rest_trains", "walks"), [(True, 1), (False, 6)])
def test_parameters_outside_the_blocks_are_looked_for_once(
    rest_trains: bool, walks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they do not train, each step asks again, because a hook may have unfrozen them."""
    net, looked = module("tiny_gpt"), []
    walk = _dropping.parameters_of
    monkeypatch.setattr(_dropping, "parameters_of", lambda root: looked.append(root) or walk(root))
    inside = {id(p) for block in blocks_of(net) for p in block.parameters()}
    for p in net.parameters():
        p.requires_grad_(rest_trains or id(p) in inside)
    trainer(dropping(), max_steps=5).fit(net, loader("tiny_gpt"))
    assert len(looked) == walks
