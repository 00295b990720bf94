"""Progressive stacking: what a new block is, what an inactive one costs, and what a checkpoint of mid-growth is."""

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from lightning_eff import ProgressiveStacking
from lightning_eff.model.growth._identity import is_identity, zeros_for_identity
from lightning_eff.model.growth._sizes.stages import size_at
from lightning_eff.model.growth.progressive_stacking import source_of
from tests.cases import Case, no_blocks
from tests.models import Block, TinyGPT, flat, hugging_face, loader, make_batch, module, trainer
from tests.runs import checkpoints, final_state, fit, resume_from_every_step

CASES = {
    "ProgressiveStacking": Case(
        active=lambda: ProgressiveStacking(stages=[(0.0, 1), (0.25, 2), (0.6, 4)]),
        neutral=lambda: ProgressiveStacking(stages=[(0.0, 4)]),
        on_classifier=lambda: ProgressiveStacking(stages=[(0.0, 1), (0.5, 3)]),
        neutral_on_classifier=lambda: ProgressiveStacking(stages=[(0.0, 3)]),
        lost=(no_blocks, "classifier", "no stack of repeated blocks"),
    )
}

MODELS = ["tiny_gpt", "gpt2", "llama", "bert", "vit"]
STAGES = [(0.0, 1), (0.25, 2), (0.5, 4)]


def blocks_of(net: nn.Module) -> list[Any]:
    return next(list(m) for m in net.modules() if isinstance(m, nn.ModuleList))


class Watch(pl.Callback):
    """Calls ``look(step, trainer, module)`` after ProgressiveStacking's part before a batch."""

    def __init__(self, look: Any) -> None:
        self.look = look

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.look(trainer.global_step, trainer, pl_module)


def values(block: nn.Module) -> list[Tensor]:
    return [t.detach().clone() for t in (*block.parameters(), *block.buffers())]


def moments(trainer: pl.Trainer, block: nn.Module) -> list[dict[str, Tensor]]:
    state = trainer.optimizers[0].state
    return [{key: value.clone() for key, value in state[p].items()} if p in state else {} for p in block.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- the rule


def test_the_rule() -> None:
    assert [source_of(j, count=3) for j in range(3, 8)] == [0, 1, 2, 0, 1]
    stages = [(0.0, 3), (0.25, 6), (0.5, 12)]
    assert [size_at(stages, u) for u in (0.0, 0.2499, 0.25, 0.499, 0.5, 1.0)] == [3, 3, 6, 6, 12, 12]


# -- T: block l + L is block l, with its moments where asked; the optimizer holds each parameter once


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_new_blocks_are_copies_at_the_switch(name: str, copy: bool) -> None:
    seen: dict[int, int] = {}

    def look(step: int, t: pl.Trainer, net: nn.Module) -> None:
        active = int(technique.report()["layers_active"])
        before = max(seen, default=1)
        if active > before:
            blocks = blocks_of(net)
            for j in range(before, active):
                source = blocks[j % before]
                assert same(values(blocks[j]), values(source))
                for new, old in zip(moments(t, blocks[j]), moments(t, source), strict=True):
                    assert {"exp_avg", "exp_avg_sq", "step"} <= old.keys()
                    assert float(old["step"]) == step - seen.get(j % before, 0) if copy or before == 1 else True
                    assert new.keys() == (old.keys() if copy else set())
                    assert all(torch.equal(new[key], old[key]) and new[key] is not old[key] for key in new)
            seen.update({active: step})
        held = Counter(id(p) for group in t.optimizers[0].param_groups for p in group["params"])
        assert held == Counter({id(p): 1 for p in net.parameters()})

    technique = ProgressiveStacking(stages=STAGES, copy_optimizer_state=copy)
    net, _ = fit(name, lambda: [technique], callbacks=[Watch(look)])
    assert seen == {2: 3, 4: 6}
    assert technique.summary().startswith("1 -> 2 (step 3) -> 4 (step 6) of 4 blocks of '")
    blocks = blocks_of(net)
    assert not same(values(blocks[0]), values(blocks[2]))  # and then they train


def test_a_count_that_is_no_multiple_wraps_around() -> None:
    def look(step: int, t: pl.Trainer, net: nn.Module) -> None:
        if step == 6:
            blocks = blocks_of(net)
            assert [same(values(blocks[j]), values(blocks[j % 2])) for j in (2, 3, 4)] == [True] * 3

    pl.seed_everything(1, verbose=False)
    technique = ProgressiveStacking(stages=[(0.0, 2), (0.5, 5)])
    trainer(technique, Watch(look), max_steps=12).fit(TinyGPT(num_layers=5), loader("tiny_gpt"))
    assert technique.summary() == "2 -> 5 (step 6) of 5 blocks of 'blocks'"


def test_stages_that_one_step_passes_are_all_taken() -> None:
    """With 2 steps, u jumps from 0 to 0.5, past a stage: 1 -> 2 -> 4 block by block, as if each had been seen."""
    checked = []

    def look(step: int, t: pl.Trainer, net: nn.Module) -> None:
        if step == 1:
            blocks = blocks_of(net)
            checked.append([same(values(blocks[j]), values(blocks[0])) for j in (1, 2, 3)])

    technique = ProgressiveStacking(stages=STAGES)
    fit("tiny_gpt", lambda: [technique], callbacks=[Watch(look)], max_steps=2)
    assert checked == [[True] * 3]
    assert technique.summary() == "1 -> 2 (step 1) -> 4 (step 1) of 4 blocks of 'blocks'"


def test_growth_waits_for_the_accumulation_window() -> None:
    counts: list[tuple[int, int, float]] = []

    class Counts(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            counts.append((trainer.current_epoch, batch_idx, technique.report()["layers_active"]))

    technique = ProgressiveStacking(stages=[(0.0, 1), (0.1, 2), (0.5, 4)])
    fit("tiny_gpt", lambda: [technique], callbacks=[Counts()], accumulate_grad_batches=2, max_steps=-1, max_epochs=2)
    changes = [(a, b) for a, b in pairwise(counts) if a[2] != b[2]]
    # u passes 0.1 at the second of ten batches, within a window, and grows at the third
    assert [(b[0], b[1], b[2]) for _, b in changes] == [(0, 2, 2), (1, 0, 4)]


def test_progress_that_jumps_within_a_window_waits_for_the_next() -> None:
    """A run resumed in mid-window reads the clock of max_time anew there."""
    active: list[tuple[int, int]] = []

    class Jumps(ProgressiveStacking):
        def on_batch_start(self, session: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx in (1, 2):
                session.progress.u = 0.6
            super().on_batch_start(session, batch, batch_idx)
            active.append((batch_idx, self._grown().active))

    fit("tiny_gpt", lambda: [Jumps(stages=STAGES)], accumulate_grad_batches=2, max_steps=2)
    assert active == [(0, 1), (1, 1), (2, 4), (3, 4)]


@pytest.mark.parametrize("built", ["init", "setup", "configure_model"])
def test_trains_blocks_that_are_built_late_with_a_filtered_optimizer(built: str) -> None:
    class Filters(TinyGPT):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    net = Filters(built=built)
    t = trainer(ProgressiveStacking(stages=STAGES), max_steps=12)
    t.fit(net, loader("tiny_gpt"))
    held = Counter(id(p) for group in t.optimizers[0].param_groups for p in group["params"])
    assert held == Counter({id(p): 1 for p in net.parameters()})
    assert all(p in t.optimizers[0].state for p in net.parameters())


def test_what_the_user_froze_stays_frozen() -> None:
    net = TinyGPT()
    assert net.blocks is not None
    for block in net.blocks:
        block.get_submodule("qkv").requires_grad_(False)
    before = values(net.blocks[0].get_submodule("qkv"))
    trainer(ProgressiveStacking(stages=STAGES), max_steps=12).fit(net, loader("tiny_gpt"))
    for block in net.blocks:
        assert same(values(block.get_submodule("qkv")), before)  # copied, not trained
        assert [name for name, p in block.named_parameters() if not p.requires_grad] == ["qkv.weight", "qkv.bias"]


# -- what inactive blocks cost: nothing


class SavedBytes(saved_tensors_hooks):
    """Bytes of distinct storages that autograd keeps for backward, parameters left out."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}
        self.kept: list[Tensor] = []
        super().__init__(self._pack, lambda t: t)

    def _pack(self, tensor: Tensor) -> Tensor:
        if not (tensor.is_leaf and tensor.requires_grad) and not isinstance(tensor._base, nn.Parameter):
            self.storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            self.kept.append(tensor)  # so that no address comes twice
        return tensor


def step_cost(name: str, active: int) -> dict[str, Any]:
    """What the one training step of a fit with ``active`` of 4 blocks does, by block where it can be told."""
    found: dict[str, Any] = {"calls": [0] * 4}
    counter, saved = FlopCounterMode(display=False), SavedBytes()

    def count(i: int) -> None:
        found["calls"][i] += 1

    class Around(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            for i, block in enumerate(blocks_of(pl_module)):
                block.register_forward_pre_hook(lambda *_, i=i: count(i))
            counter.__enter__()
            saved.__enter__()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            saved.__exit__(None, None, None)
            counter.__exit__(None, None, None)
            found["grads"] = [[p.grad is not None for p in b.parameters()] for b in blocks_of(pl_module)]
            state = trainer.optimizers[0].state
            found["state"] = [[p in state for p in b.parameters()] for b in blocks_of(pl_module)]

    fit(name, lambda: [ProgressiveStacking(stages=[(0.0, active)])], callbacks=[Around()], max_steps=1)
    return {**found, "flops": counter.get_total_flops(), "bytes": sum(saved.storages.values())}


@pytest.mark.parametrize("name", MODELS)
def test_inactive_blocks_cost_nothing(name: str) -> None:
    """No call, no FLOP, no activation kept for backward, no gradient, no optimizer state."""
    costs = {active: step_cost(name, active) for active in (1, 2, 4)}
    for active, cost in costs.items():
        expected = [i < active for i in range(4)]
        assert cost["calls"] == [int(runs) for runs in expected]
        assert [any(g) for g in cost["grads"]] == [all(g) for g in cost["grads"]] == expected
        assert [any(s) for s in cost["state"]] == expected
    block = costs[2]["flops"] - costs[1]["flops"]  # forward and backward of one block
    assert block > 0
    assert costs[4]["flops"] - costs[2]["flops"] == 2 * block
    block = costs[2]["bytes"] - costs[1]["bytes"]
    assert block > 10_000
    assert costs[4]["bytes"] - costs[2]["bytes"] == pytest.approx(2 * block, rel=0.02)


@pytest.mark.parametrize("name", MODELS)
def test_a_prefix_is_exactly_the_shallow_model(name: str) -> None:
    """A fit of 2 active blocks of 4 is that of the model built with 2 blocks, bit for bit."""
    pl.seed_everything(1, verbose=False)
    deep = module(name, num_layers=4)
    shallow = module(name, num_layers=2)
    shallow.load_state_dict({k: v for k, v in deep.state_dict().items() if k in shallow.state_dict()})
    for net, techniques in ((deep, [ProgressiveStacking(stages=[(0.0, 2)])]), (shallow, [])):
        pl.seed_everything(2, verbose=False)
        trainer(*techniques, max_steps=6).fit(net, loader(name))
    ours = deep.state_dict()
    assert all(torch.equal(ours[key], value) for key, value in shallow.state_dict().items())


# -- init="identity"


def logits(net: Any, name: str, batch: Any) -> Tensor:
    return net(batch["input_ids"]) if name == "tiny_gpt" else net.model(**batch).logits


@pytest.mark.parametrize("name", ["tiny_gpt", "gpt2", "llama", "vit"])
@pytest.mark.parametrize("init", ["identity", "stack"])
def test_identity_preserves_the_function_at_the_switch(name: str, init: str) -> None:
    batch = make_batch(name, seed=3)
    evaluated: list[tuple[Tensor, Tensor]] = []
    counts: list[int] = []

    class Evaluates(ProgressiveStacking):
        def on_batch_start(self, session: Any, batch_: Any, batch_idx: int) -> None:
            before = self._evaluate(session)
            random = torch.get_rng_state()
            super().on_batch_start(session, batch_, batch_idx)
            assert torch.equal(torch.get_rng_state(), random)
            assert session.module.training and all(m.training for m in session.module.modules())
            if self._grown().active not in counts:
                counts.append(self._grown().active)
                evaluated.append((before, self._evaluate(session)))

        def _evaluate(self, session: Any) -> Tensor:
            session.module.eval()
            with torch.no_grad(), self._grown().view(training=False):
                found = logits(session.module, name, batch)
            session.module.train()
            return found

    net, _ = fit(name, lambda: [Evaluates(stages=STAGES, init=init)])
    assert counts == [1, 2, 4]
    changes = [float((a - b).abs().max()) for a, b in evaluated[1:]]
    if init == "identity":
        assert max(changes) <= 1e-6
        for block in blocks_of(net)[1:]:  # and the zeros train
            assert all(p.abs().sum() > 0 for p in block.parameters() if p.ndim > 1)
    else:
        assert min(changes) > 1e-3


def test_identity_zeroes_output_projections_only_and_starts_their_state_anew() -> None:
    def look(step: int, t: pl.Trainer, net: nn.Module) -> None:
        if step == 6:
            for new, old in ((2, 0), (3, 1)):
                zeros = set()
                for (name, p), q in zip(
                    blocks_of(net)[new].named_parameters(), blocks_of(net)[old].parameters(), strict=True
                ):
                    if not p.any() and q.any():
                        zeros.add(name)
                        assert p not in t.optimizers[0].state
                    else:
                        assert torch.equal(p, q)
                        assert torch.equal(t.optimizers[0].state[p]["exp_avg"], t.optimizers[0].state[q]["exp_avg"])
                assert zeros == {"proj.weight", "proj.bias", "mlp.2.weight", "mlp.2.bias"}
            looked.append(step)

    looked: list[int] = []
    fit("tiny_gpt", lambda: [ProgressiveStacking(stages=STAGES, init="identity")], callbacks=[Watch(look)])
    assert looked == [6]


def test_post_norm_blocks_are_refused_before_anything_is_trained() -> None:
    net = module("bert")
    before = flat(net)
    buffers = {name: value.clone() for name, value in net.named_buffers()}
    t = trainer(ProgressiveStacking(stages=STAGES, init="identity"), max_steps=12)
    with pytest.raises(
        ValueError, match=r"init='identity'\): .*BertLayer.*not a pre-norm residual block.*Use init='stack'"
    ):
        t.fit(net, loader("bert"))
    assert t.global_step == 0
    assert torch.equal(flat(net), before)
    assert all(torch.equal(value, buffers[name]) for name, value in net.named_buffers())
    # a run that never grows copies nothing, so it need not be able to
    fit("bert", lambda: [ProgressiveStacking(stages=[(0.0, 2)], init="identity")], max_steps=2)


def test_weights_that_were_zero_at_the_start_are_zeroed_at_the_switch() -> None:
    """A block whose branch ends in a scale that starts at 0 is the identity at first, and then no more."""

    class Scaled(Block):
        def __init__(self, dim: int, dropout: float) -> None:
            super().__init__(dim, dropout)
            self.scale = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.scale * (super().forward(x) - x)

    class ScaledGPT(TinyGPT):
        def _blocks(self) -> nn.ModuleList:
            return nn.ModuleList(Scaled(self.dim, self.dropout) for _ in range(self.num_layers))

    identity: list[bool] = []

    def look(step: int, t: pl.Trainer, net: Any) -> None:
        if step == 6:
            x = torch.randn(2, 8, 16)
            identity.extend(is_identity(net.blocks[j].eval(), ((x,), {})) for j in (0, 1, 2, 3))
            net.blocks.train()

    pl.seed_everything(1, verbose=False)
    technique = ProgressiveStacking(stages=[(0.0, 2), (0.5, 4)], init="identity")
    trainer(technique, Watch(look), max_steps=12).fit(ScaledGPT(), loader("tiny_gpt"))
    assert identity == [False, False, True, True]


def test_zeros_for_identity_follow_the_calls_not_the_definition() -> None:
    class OutFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.inner, self.norm = nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.out(self.inner(self.norm(x)))

    block, x = OutFirst(), torch.randn(3, 4)
    before = values(block)
    check = lambda: is_identity(block, ((x,), {}))  # noqa: E731
    assert zeros_for_identity(block, check, keep=frozenset()) == ["out.weight"]
    assert same(values(block), before)
    used = frozenset({id(block.out.weight)})  # elsewhere, too: the next best
    assert zeros_for_identity(block, check, keep=used) == ["inner.weight", "inner.bias"]
    assert zeros_for_identity(block, check, keep=frozenset(map(id, block.parameters()))) is None
    assert same(values(block), before)
    assert not any(m._forward_pre_hooks for m in block.modules())


# -- checkpoints


@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch ended")
def test_mid_growth_checkpoints_load_in_the_plain_module_and_resume_there(tmp_path: Path) -> None:
    fit("tiny_gpt", lambda: [ProgressiveStacking(stages=STAGES)], directory=tmp_path)
    for path in checkpoints(tmp_path)[1:10:4]:
        checkpoint = torch.load(path, weights_only=True)
        plain = module("tiny_gpt")
        plain.load_state_dict(checkpoint["state_dict"], strict=True)
        net, t = fit("tiny_gpt", list, resume=path)
        assert t.global_step == 12 and flat(net).isfinite().all()
        assert not torch.equal(flat(net), flat(plain))


@pytest.mark.parametrize("settings", [{"init": "identity"}, {"copy_optimizer_state": False}])
def test_resumes_exactly_from_every_step(settings: dict[str, Any], tmp_path: Path) -> None:
    def build() -> list[ProgressiveStacking]:
        return [ProgressiveStacking(stages=STAGES, **settings)]

    assert resume_from_every_step("tiny_gpt", build, tmp_path, accumulate_grad_batches=2) == {}


def validation_loss(t: pl.Trainer, net: Any = None, **kwargs: Any) -> float:
    return t.validate(net, loader("tiny_gpt", 8, shuffle=False), verbose=False, **kwargs)[0]["val_loss"]


def with_prefix(net: Any, active: int) -> float:
    """The reference: the loss with the rest of the blocks taken out by hand."""
    kept, net.blocks = net.blocks, nn.ModuleList(list(net.blocks)[:active])
    try:
        return validation_loss(trainer(limit_val_batches=1.0), net)
    finally:
        net.blocks = kept


def test_evaluates_what_was_trained(tmp_path: Path) -> None:
    technique = ProgressiveStacking(stages=STAGES)
    fit("tiny_gpt", lambda: [technique], directory=tmp_path)
    saved = checkpoints(tmp_path)[4]  # 2 of 4 blocks
    raw = torch.load(saved, weights_only=True)["state_dict"]
    for callback in (technique, ProgressiveStacking(stages=STAGES)):  # the one that was fitted, and a fresh one
        other = TinyGPT()
        e = trainer(callback, limit_val_batches=1.0)
        found = validation_loss(e, other, ckpt_path=saved)
        assert all(torch.equal(value, raw[name]) for name, value in other.state_dict().items())
        assert found == with_prefix(other, 2) != with_prefix(other, 4)
        assert validation_loss(e, other) == found  # it remembers
        assert type(other.blocks) is nn.ModuleList and len(other.blocks) == 4

    # a callback that has seen no training shows the whole module
    fresh = TinyGPT()
    assert validation_loss(trainer(ProgressiveStacking(stages=STAGES), limit_val_batches=1.0), fresh) == with_prefix(
        fresh, 4
    )
    # so does one at a plain checkpoint
    _, p = fit("tiny_gpt", list, max_steps=2)
    p.save_checkpoint(tmp_path / "plain.ckpt")
    found = validation_loss(
        trainer(ProgressiveStacking(stages=STAGES), limit_val_batches=1.0), fresh, ckpt_path=tmp_path / "plain.ckpt"
    )
    assert found == with_prefix(fresh, 4)


def test_validates_what_was_trained_after_an_early_stop() -> None:
    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = trainer.global_step >= 4

    technique = ProgressiveStacking(stages=STAGES)
    net, t = fit("tiny_gpt", lambda: [technique], callbacks=[Stops()], limit_val_batches=1.0)
    assert technique.report() == {"layers_active": 2, "layers_fraction": 0.5}
    assert validation_loss(t, net) == with_prefix(net, 2) != with_prefix(net, 4)


def test_validation_in_a_fit_runs_the_active_blocks() -> None:
    losses: dict[int, tuple[float, float]] = {}

    class Compares(pl.Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            active = int(technique.report()["layers_active"])
            kept, batch = pl_module.blocks, make_batch("tiny_gpt", 4, seed=5)
            pl_module.blocks = nn.ModuleList(list(kept)[:active])
            with torch.no_grad():
                ids, labels = batch["input_ids"], batch["labels"]
                expected = nn.functional.cross_entropy(pl_module(ids).flatten(0, 1), labels.flatten())
            pl_module.blocks = kept
            losses[active] = (float(trainer.callback_metrics["val_loss"]), float(expected))

    pl.seed_everything(1, verbose=False)
    technique = ProgressiveStacking(stages=STAGES)
    t = trainer(technique, Compares(), max_steps=12, limit_val_batches=1, val_check_interval=2)
    t.fit(TinyGPT(), loader("tiny_gpt"), loader("tiny_gpt", 4, shuffle=False, seed=5))
    assert sorted(losses) == [1, 2, 4]
    assert all(found == expected for found, expected in losses.values())


# -- errors


@pytest.mark.parametrize(
    "stages",
    [
        [],
        "3",
        [3, 6],
        [(0.0, 3, 1)],
        [(0.1, 3), (0.5, 6)],
        [(0.0, 3), (1.0, 6)],
        [(0.0, 3), (-0.5, 6)],
        [(0.0, 3), (0.5, 6), (0.5, 12)],
        [(0.0, 6), (0.5, 3)],
        [(0.0, 6), (0.5, 6)],
        [(0.0, 0)],
        [(0.0, 2.5)],
        [(0.0, True)],
    ],
)
def test_bad_stages(stages: Any) -> None:
    expected = (
        "expected pairs (fraction of the budget in [0, 1), number of blocks >= 1), both growing,"
        " with 0 as the first fraction"
    )
    with pytest.raises(ValueError, match=re.escape(f"ProgressiveStacking(stages={stages!r}): {expected}: ")):
        ProgressiveStacking(stages=stages)


def test_arguments() -> None:
    with pytest.raises(ValueError, match=r"init='copy'\): expected 'stack' or 'identity': the way a new block starts"):
        ProgressiveStacking(init="copy")
    assert ProgressiveStacking(stages=[[0, 3], [0.5, 6.0]]).stages == [(0.0, 3), (0.5, 6)]  # type: ignore[list-item]
    a, b = ProgressiveStacking(), ProgressiveStacking()
    assert a.stages == [(0.0, 3), (0.25, 6), (0.5, 12)]
    assert a.stages is not b.stages


def test_more_blocks_than_the_module_has() -> None:
    with pytest.raises(
        ValueError, match=r"stage 2 needs 12 blocks, but 'blocks' \(4 x Block\) has 4. Build the module with 12"
    ):
        fit("tiny_gpt", lambda: [ProgressiveStacking(stages=[(0.0, 2), (0.2, 4), (0.5, 12)])])


def test_blocks_of_different_make_cannot_be_copied() -> None:
    net = hugging_face("t5")
    technique = ProgressiveStacking(stages=STAGES, layers="model.encoder.block")
    with pytest.raises(ValueError, match=r"block 1 of 'model.encoder.block' .*differ at .*relative_attention_bias"):
        trainer(technique, max_steps=4).fit(net, loader("t5"))


def test_an_optimizer_without_state_is_refused_and_one_with_is_not() -> None:
    def build(**kwargs: Any) -> list[ProgressiveStacking]:
        return [ProgressiveStacking(stages=[(0.0, 1), (0.5, 3)], **kwargs)]

    def train(momentum: float, **kwargs: Any) -> None:
        net = module("classifier", momentum=momentum)
        trainer(*build(**kwargs), max_steps=4).fit(net, loader("classifier"))

    with pytest.raises(ValueError, match=r"SGD keeps no state .*copy_optimizer_state=False"):
        train(0.0)
    train(0.0, copy_optimizer_state=False)
    train(0.9)


def test_the_state_is_looked_for_in_the_blocks_own_group() -> None:
    class Grouped(TinyGPT):
        momentum = (0.9, 0.0)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            blocks = set(self.blocks.parameters()) if self.blocks is not None else set()
            rest = [p for p in self.parameters() if p not in blocks]
            return torch.optim.SGD(
                [
                    {"params": rest, "momentum": self.momentum[0]},
                    {"params": list(blocks), "momentum": self.momentum[1]},
                ],
                lr=0.1,
            )

    with pytest.raises(ValueError, match="SGD keeps no state"):
        trainer(ProgressiveStacking(stages=STAGES), max_steps=2).fit(Grouped(), loader("tiny_gpt"))
    net = Grouped()
    net.momentum = (0.0, 0.9)
    trainer(ProgressiveStacking(stages=STAGES), max_steps=2).fit(net, loader("tiny_gpt"))


def test_an_optimizer_that_cannot_be_probed_trains() -> None:
    class Closure(TinyGPT):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=2)

    net = Closure(dropout=0.0)
    t = trainer(ProgressiveStacking(stages=STAGES), max_steps=8)
    t.fit(net, loader("tiny_gpt"))
    assert t.global_step == 8 and flat(net).isfinite().all()


def test_checkpoints_that_cannot_be_resumed_from(tmp_path: Path) -> None:
    _, plain = fit("tiny_gpt", list, max_steps=2)
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(
        ValueError, match=r"saved without ProgressiveStacking, so it was trained at full size.*Continue without"
    ):
        fit("tiny_gpt", lambda: [ProgressiveStacking(stages=STAGES)], resume=tmp_path / "plain.ckpt")
    pl.seed_everything(1, verbose=False)
    deeper = trainer(ProgressiveStacking(stages=STAGES), max_steps=2)
    deeper.fit(TinyGPT(num_layers=6), loader("tiny_gpt"))
    deeper.save_checkpoint(tmp_path / "deeper.ckpt")
    match = (
        re.escape("the checkpoint's module has 6 blocks, but 'blocks' (4 x Block) has 4")
        + ".*Build the module with 6 blocks"
    )
    with pytest.raises(ValueError, match=match):
        fit("tiny_gpt", lambda: [ProgressiveStacking(stages=STAGES)], resume=tmp_path / "deeper.ckpt")
    with pytest.raises(ValueError, match=match):
        validation_loss(
            trainer(ProgressiveStacking(stages=STAGES), limit_val_batches=1),
            TinyGPT(),
            ckpt_path=tmp_path / "deeper.ckpt",
        )


def test_a_last_stage_below_the_depth_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        net, t = fit("tiny_gpt", lambda: [ProgressiveStacking(stages=[(0.0, 1), (0.5, 3)])])
    assert "the last stage runs 3 of 4 blocks of 'blocks'; the others never run" in caplog.text
    assert not any(p in t.optimizers[0].state for p in net.blocks[3].parameters())


class Manual(TinyGPT):
    """Steps by itself, after two backward passes; counts the blocks that each of them saw."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: list[tuple[int, int]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        assert self.blocks is not None
        optimizer.zero_grad()
        first = len(self.blocks)
        self.manual_backward(super().training_step(batch, batch_idx))
        second = len(self.blocks)
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        self.seen.append((first, second))


def test_manual_optimization() -> None:
    net = Manual()
    trainer(ProgressiveStacking(stages=STAGES), max_steps=8).fit(net, loader("tiny_gpt"))
    assert net.seen == [(1, 1)] * 2 + [(2, 2)] * 2 + [(4, 4)] * 4
    assert net.blocks is not None and len(net.blocks) == 4
    with pytest.raises(ValueError, match=r"init='identity'\): Manual has automatic_optimization=False"):
        trainer(ProgressiveStacking(stages=STAGES, init="identity"), max_steps=8).fit(Manual(), loader("tiny_gpt"))


def test_all_blocks_from_the_start_is_plain_training() -> None:
    whole = final_state(*fit("gpt2", lambda: [ProgressiveStacking(stages=[(0.0, 4)])]))
    plain = final_state(*fit("gpt2", list))
    assert whole.keys() == plain.keys() and all(torch.equal(whole[key], plain[key]) for key in whole)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_without_a_loss_shows_the_whole_module_afterwards() -> None:
    class Skips(TinyGPT):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx % 2 else loss

    lengths: list[int] = []

    class First(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            lengths.append(len(pl_module.blocks))

    t = trainer(First(), ProgressiveStacking(stages=[(0.0, 1)]), max_epochs=1)
    t.fit(Skips(), loader("tiny_gpt"))
    assert lengths == [4] * 5
