"""RandomLTD: the schedule's numbers, tokens that bypass a block bit for bit, draws of its own, and FLOPs that fall."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import lightning_eff as eff
from lightning_eff._core.rng import keyed_generator
from lightning_eff.data.tokens._draw import draw
from lightning_eff.data.tokens.random_ltd import RandomLTD, kept_tokens
from tests.cases import Case, classifier
from tests.models import LENGTH, TinyGPT, loader, make_batch, module, trainer
from tests.runs import differences, final_state, fit

CASES = {
    "RandomLTD": Case(
        active=lambda: RandomLTD(start=0.25, until=0.8, multiple_of=4),
        neutral=lambda: RandomLTD(start=1.0),
        lost=(classifier, "classifier", r"block 1 of .* has the shape \(4, 8\); expected \(B, T, D\)"),
    )
}


class Calls(pl.Callback):
    """What each block of the longest list got and returned in training, by the step, and the FLOPs of each step."""

    def __init__(self, *, flops: bool = False) -> None:
        self.found: list[tuple[int, int, Tensor, Tensor]] = []
        self.flops: list[int] = []
        self._count = flops
        self._handles: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        blocks = next(list(m) for m in pl_module.modules() if isinstance(m, nn.ModuleList))
        self.first = blocks[0]

        def note(i: int) -> Callable[..., None]:
            def hook(block: Any, args: Any, kwargs: Any, output: Any) -> None:
                if torch.is_grad_enabled():
                    entered = args[0] if args else kwargs["hidden_states"]
                    left = output[0] if isinstance(output, tuple) else output
                    self.found.append((trainer.global_step, i, entered.detach().clone(), left.detach().clone()))

            return hook

        self._handles = [b.register_forward_hook(note(i), with_kwargs=True) for i, b in enumerate(blocks)]

    def on_train_batch_start(self, *args: Any) -> None:
        if self._count:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        if self._count:
            self._counter.__exit__(None, None, None)
            self.flops.append(self._counter.get_total_flops())

    def on_train_end(self, *args: Any) -> None:
        for handle in self._handles:
            handle.remove()


# -- the rule


def test_the_schedule_is_deep_speeds() -> None:
    """``floor((t / T_c) (max - min) + min)``, down to a step: 128 of 2,048 tokens, in steps of 16, over 1,000 of 1,500."""
    for t in range(0, 1500, 7):
        deep_speed = int(t / 1000 * (2048 - 128) + 128)
        deep_speed = min(deep_speed - deep_speed % 16, 2048)
        got = kept_tokens(t / 1500, full=2048, start=0.0625, until=1000 / 1500, multiple_of=16)
        assert got == deep_speed or abs(t / 1000 * 1920 % 16) < 1e-6
    kept = [kept_tokens(u / 100, full=100, start=0.29, until=0.5, multiple_of=1) for u in range(101)]
    assert kept[0] == 29 and kept == sorted(kept) and kept[49] < 100 and set(kept[50:]) == {100}
    assert kept_tokens(0.0, full=30, start=0.1, until=0.5, multiple_of=8) == 8
    assert kept_tokens(0.0, full=5, start=0.1, until=0.5, multiple_of=8) == 5
    assert kept_tokens(0.0, full=30, start=0.1, until=0.0, multiple_of=8) == 30


def test_each_set_of_tokens_is_as_likely() -> None:
    g = keyed_generator(3)
    drawn = draw(6, 3, g, always=1, rows=4000)
    assert (drawn[:, 0] == 0).all() and (drawn.diff(dim=1) > 0).all() and drawn.max() == 5
    codes, counts = (2**drawn).sum(1).unique(return_counts=True)
    assert len(codes) == 10  # two of five
    assert ((counts - 400).abs() < 5 * (4000 * 0.1 * 0.9) ** 0.5).all()
    assert torch.equal(draw(5, 5, g), torch.arange(5).unsqueeze(0))


# -- T: dropped tokens bit-identical through the block; first and last full; draws of its own


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("name", ["tiny_gpt", "llama", "bert"])
def test_tokens_that_a_block_leaves_out_are_bit_for_bit_as_they_were(name: str, per_sample: bool) -> None:
    calls = Calls()
    build = RandomLTD(start=0.25, until=0.75, multiple_of=4, per_sample=per_sample)
    fit(name, lambda: [build], callbacks=[calls], max_steps=8)
    sets: dict[tuple[int, int], Tensor] = {}
    assert len(calls.found) == 8 * 4
    for step, block, entered, left in calls.found:
        changed = (entered != left).any(dim=-1)
        if block in (0, 3):
            assert changed.all(), "the first and the last block run on all tokens"
            continue
        expected = [8, 12, 16, 20, 24, 28, 32, 32][step]
        assert (changed.sum(dim=1) == expected).all()
        sets[step, block] = changed
        if step < 6 and per_sample:
            assert (changed != changed[0]).any()
        elif not per_sample:
            assert (changed == changed[0]).all()
    for step in range(6):
        assert not torch.equal(sets[step, 1], sets[step, 2]), "each block draws for itself"
    assert not torch.equal(sets[0, 1][:, :8], sets[1, 1][:, :8])


def test_all_tokens_are_the_block_itself() -> None:
    """From ``until`` on a step is the plain one, bit for bit."""
    net = TinyGPT(dropout=0.0)
    calls = Calls()
    data = DataLoader([make_batch("tiny_gpt", seed=i) for i in range(4)], batch_size=None)
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.0)  # type: ignore[method-assign]
    technique = RandomLTD(start=0.5, until=0.5)
    trainer(technique, calls, max_steps=4).fit(net, data)
    assert net.blocks is not None
    for step, block, entered, left in calls.found:
        plain = net.blocks[block](entered)
        assert torch.equal(left, plain) == (step >= 2 or block in (0, 3))
    assert technique.report() == {"kept": 32, "share": 1.0}
    assert technique.summary() == "2 middle blocks of 'blocks' (4 x Block) computed 75.0% of the tokens on average", (
        technique.summary()
    )


def test_tokens_that_are_always_kept() -> None:
    calls = Calls()
    fit("vit", lambda: [RandomLTD(start=0.3, until=1.0, multiple_of=1, always=1)], callbacks=[calls], max_steps=4)
    for _, block, entered, left in calls.found:
        changed = (entered != left).any(dim=-1)
        assert changed[:, 0].all() and (block in (0, 3)) == bool(changed.all())


def test_evaluation_never_drops() -> None:
    """The validation loss is that of the plain module with the same weights."""

    class Plainly(pl.Callback):
        """The loss by a loop of its own over the module's blocks."""

        def on_validation_batch_end(self, trainer: Any, net: Any, outputs: Any, batch: Any, *args: Any) -> None:
            with torch.no_grad():
                x = net.embed(batch["input_ids"]) + net.position.weight
                for block in net.blocks:
                    x = type(block).forward(block, x)
                logits = net.head(net.norm(x))
            self.loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    technique, plainly = RandomLTD(start=0.25, until=1.0, multiple_of=4), Plainly()
    t = trainer(technique, plainly, max_steps=2, limit_val_batches=1, val_check_interval=1, num_sanity_val_steps=1)
    t.fit(module("tiny_gpt"), loader("tiny_gpt", 8), loader("tiny_gpt", 4, shuffle=False))
    assert technique.report()["kept"] < LENGTH
    assert t.callback_metrics["val_loss"].item() == plainly.loss.item()


# -- T: FLOPs fall as predicted


@pytest.mark.parametrize("name", ["tiny_gpt", "gpt2", "llama"])
def test_flops_fall_by_those_of_the_tokens_that_are_left_out(name: str) -> None:
    """A middle block costs what it costs on sequences that are as short, which a plain run of such shows."""
    calls = Calls(flops=True)
    technique = RandomLTD(start=0.5, until=1.0, multiple_of=16)
    fit(name, lambda: [technique], callbacks=[calls], max_steps=2)

    def step_flops(blocks: int, length: int) -> int:
        net: Any = module(name, num_layers=blocks, dropout=0.0)
        net.__dict__["log"] = lambda *args, **kwargs: None
        with FlopCounterMode(display=False) as counter:
            net.training_step(make_batch(name, length=length), 0).backward()
        return counter.get_total_flops()

    block = {length: step_flops(3, length) - step_flops(2, length) for length in (LENGTH, LENGTH // 2)}
    assert block[LENGTH] >= 2 * block[LENGTH // 2]
    plain = step_flops(4, LENGTH)
    assert calls.flops[1] == plain - 2 * (block[LENGTH] - block[LENGTH // 2])


# -- beside others


def test_the_last_block_is_the_last_that_runs() -> None:
    """While the stack grows from 2 to 4 blocks: of two there is none in the middle."""
    calls = Calls()
    technique = RandomLTD(start=0.25, until=1.0, multiple_of=4)
    growth = eff.ProgressiveStacking(stages=[(0.0, 2), (0.5, 4)])
    fit("tiny_gpt", lambda: [technique, growth], callbacks=[calls], max_steps=8)
    full = {(step, block) for step, block, entered, left in calls.found if bool((entered != left).any(-1).all())}
    assert full == {(step, block) for step in range(8) for block in ((0, 1) if step < 4 else (0, 3))}
    assert {block for step, block, *_ in calls.found if step >= 4} == {0, 1, 2, 3}


def test_blocks_that_run_again_see_the_same_tokens() -> None:
    def build(*more: pl.Callback) -> Any:
        return lambda: [RandomLTD(start=0.25, until=0.8, multiple_of=4), *more]

    whole = final_state(*fit("tiny_gpt", build()))
    again = final_state(*fit("tiny_gpt", build(eff.Rematerialization(policy="full"))))
    assert differences(whole, again) == []


def test_compiled_blocks_take_any_number_of_tokens_from_the_start(caplog: pytest.LogCaptureFixture) -> None:
    """Of four lengths, and all tokens in the first and the last block."""
    caplog.set_level("INFO")
    compiled = eff.RegionalCompilation(backend="eager")
    fit("tiny_gpt", lambda: [RandomLTD(start=0.25, until=1.0, multiple_of=2), compiled], max_steps=4)
    assert "for any shapes because of RandomLTD" in caplog.text
    assert 1 <= compiled.report()["compilations"] <= 2
    assert not RandomLTD(start=1.0).changes_shapes
    torch.compiler.reset()


# -- what is refused


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"start": 0.0}, r"start=0.0.*in \(0, 1\]"),
        ({"until": 1.5}, r"until=1.5.*\[0, 1\]"),
        ({"multiple_of": 0}, r"multiple_of=0\): expected an integer >= 1"),
        ({"full_first": -1}, r"full_first=-1.*blocks"),
        ({"always": 1.5}, r"always=1.5.*tokens"),
    ],
)
def test_arguments_out_of_their_range(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"RandomLTD.*{message}"):
        RandomLTD(**kwargs)


def test_nothing_to_drop_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the blocks get 32 tokens per sample and would keep all of them"):
        fit("tiny_gpt", lambda: [RandomLTD(multiple_of=32)])
    with pytest.raises(ValueError, match=r"the range \[2:-2\] contains no block"):
        fit("tiny_gpt", lambda: [RandomLTD(full_first=2, full_last=2)])
    net: Any = TinyGPT()
    net.blocks[2] = net.blocks[1]
    with pytest.raises(ValueError, match="the same block several times"):
        trainer(RandomLTD(), max_steps=2).fit(net, loader("tiny_gpt"))


def test_convolutions_are_refused() -> None:
    """A residual network on images has no tokens."""
    from tests.families import batch
    from tests.families import module as family

    with pytest.raises(ValueError, match=r"RandomLTD: block 1 of .* cannot be given fewer .*\(B, T, D\)"):
        trainer(RandomLTD(), max_steps=2).fit(family("resnet"), DataLoader([batch("resnet", 4)], batch_size=None))


def test_a_trial_of_scaled_blocks_has_the_copy_s_own_weights() -> None:
    """Whose maps are watched at the first batch, by what a copy must not take along: it would run the block itself."""
    build = [
        RandomLTD(start=0.25, until=0.8, multiple_of=4),
        eff.ReZero(),
        eff.SequenceLengthWarmup(start=8, until=0.5),
    ]
    _, t = fit("tiny_gpt", lambda: build, max_steps=2, precision="bf16-true")
    assert t.global_step == 2
