"""Gradual drop-in: the shallow network at p = 0, the deep one at p = 1, and units of both between."""

import copy
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_eff import DropIn, Rematerialization
from lightning_eff._core.rng import keyed_generator
from lightning_eff.model.growth.drop_in import drop_in, passed_share
from tests.cases import Case, no_blocks
from tests.model.growth.residual import PlainResNet, PostNorm
from tests.models import TinyGPT, flat, hugging_face, loader, make_batch, trainer
from tests.runs import fit_yaml

CASES = {
    "DropIn": Case(
        active=lambda: DropIn(first=2, start=0.2, end=0.8),
        neutral=lambda: DropIn(start=0.0, end=0.0),
        on_classifier=lambda: DropIn(first=1, start=0.2, end=0.8),
        lost=(no_blocks, "classifier", "no stack of repeated blocks"),
        refuses={"classifier": "does not return its input plus something"},
    )
}


def test_the_rule() -> None:
    found = [passed_share(u / 10, start=0.2, end=0.7) for u in range(11)]
    assert found == pytest.approx([0, 0, 0, 0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1])
    h, f = torch.randn(4000), torch.randn(4000)
    assert torch.equal(drop_in(h, f, 0.0, keyed_generator(1)), h) and torch.equal(drop_in(h, f, 0.0, None), h)
    assert torch.equal(drop_in(h, f, 1.0, keyed_generator(1)), f) and torch.equal(drop_in(h, f, 1.0, None), f)
    units = drop_in(h, f, 0.3, keyed_generator(1)) == f
    assert abs(float(units.float().mean()) - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 4000)
    assert torch.allclose(drop_in(h, f, 0.3, None), 0.7 * h + 0.3 * f, atol=1e-6)


def by_hand(net: TinyGPT, ids: Tensor, first: int, p: float) -> Tensor:
    """The network in evaluation whose blocks beyond the first are there as far as ``p``."""
    x = net.embed(ids) + net.position.weight[: ids.shape[1]]
    for i, block in enumerate(net.blocks or ()):
        if i < first:
            x = block(x)
        elif p:
            x = block(x) if p == 1.0 else (1 - p) * x + p * block(x)
    return net.head(net.norm(x))


def test_the_shallow_network_at_0_the_deep_one_at_1_and_their_mean_between() -> None:
    """T, in validation, by weights alone; and before ``start`` training is the shallow network's, bit for bit."""
    found: list[tuple[float, float]] = []
    technique = DropIn(first=2, start=0.35, end=0.75)

    class Compares(pl.Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            with torch.random.fork_rng():
                batch, other = make_batch("tiny_gpt", 4, seed=5), TinyGPT().eval()
            other.load_state_dict(pl_module.state_dict())
            with torch.no_grad():
                logits = by_hand(other, batch["input_ids"], 2, technique.report()["p"])  # pyright: ignore[reportArgumentType]
                plain = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            found.append((float(technique.report()["p"]), float(trainer.callback_metrics["val_loss"] - plain)))
            if trainer.global_step == 4:
                shallow_weights.update({k: v.clone() for k, v in pl_module.state_dict().items()})

    shallow_weights: dict[str, Tensor] = {}
    pl.seed_everything(1, verbose=False)
    deep, shallow = TinyGPT(num_layers=4), TinyGPT(num_layers=2)
    first = copy.deepcopy(deep.state_dict())
    shallow.load_state_dict({k: v for k, v in first.items() if k in shallow.state_dict()})
    settings: dict[str, Any] = {"limit_val_batches": 1, "val_check_interval": 2}
    data = loader("tiny_gpt", 4, shuffle=False, seed=5)
    for net, callbacks, steps in ((deep, [technique, Compares()], 12), (shallow, [], 4)):
        pl.seed_everything(2, verbose=False)
        trainer(*callbacks, max_steps=steps, **settings).fit(net, loader("tiny_gpt"), data)
    assert {p for p, _ in found} > {0.0, 1.0} and len({p for p, _ in found}) >= 4
    assert all(apart == 0.0 if p in (0.0, 1.0) else abs(apart) < 1e-6 for p, apart in found), found
    for key, value in shallow_weights.items():
        assert torch.equal(value, shallow.state_dict()[key] if key in shallow.state_dict() else first[key]), key
    assert technique.summary() == "2 of 4 blocks of 'blocks' at first; the others mixed in at 100.0% at the end"


class OneBlock(pl.Callback):
    """What a block was given and handed on in each batch, and what a copy of it from before makes of the same."""

    def __init__(self, block: nn.Module) -> None:
        self.alone, self.block = copy.deepcopy(block), block
        self.rows: list[tuple[Tensor, Tensor, Tensor]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.block.register_forward_hook(self._note, with_kwargs=True)

    def _note(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        with torch.no_grad():
            plain = self.alone(*args, **kwargs)
        plain, left = (value[0] if isinstance(value, tuple) else value for value in (plain, output))
        self.rows.append((args[0].detach(), plain, left.detach()))


@pytest.mark.parametrize("name", ["gpt2", "post_norm", "resnet"])
def test_each_unit_is_the_blocks_or_what_it_was_given(name: str) -> None:
    pl.seed_everything(1, verbose=False)
    net: Any = {"gpt2": lambda: hugging_face("gpt2"), "post_norm": PostNorm, "resnet": PlainResNet}[name]()
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.0)
    lists = [m for m in net.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    blocks: Any = net.stages[0] if name == "resnet" else next(m for m in lists if isinstance(m, nn.ModuleList))
    one, data = OneBlock(blocks[2]), {"gpt2": "gpt2", "post_norm": "tiny_gpt", "resnet": "vit"}[name]
    technique = DropIn(first=2, start=0.0, end=1.0, layers="stages.0" if name == "resnet" else None)
    trainer(technique, one, max_steps=8).fit(net, loader(data))
    assert len(one.rows) == 7, "not in the first step, at p = 0"
    masks = []
    for step, (h, f, found) in enumerate(one.rows, start=1):
        new, old = (found - f).abs() < 1e-6, found == h
        assert bool((new | old).all())
        sure = (h - f).abs() > 1e-4
        share, p, n = float(new[sure].float().mean()), step / 8, int(sure.sum())
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / n)
        masks.append(new & sure)
    assert not torch.equal(masks[3][0], masks[3][1]), "each sample has its own draw"


def test_a_block_that_runs_again_passes_on_the_same_units() -> None:
    """Also in a precision whose default type is another one in the backward pass."""
    found = []
    for recomputed in (False, True):
        pl.seed_everything(1, verbose=False)
        net = TinyGPT()
        beside = [Rematerialization()] if recomputed else []
        trainer(DropIn(first=1, start=0.0, end=1.0), *beside, max_steps=6, precision="bf16-true").fit(
            net, loader("tiny_gpt")
        )
        found.append(flat(net))
    assert torch.equal(*found)


def test_new_blocks_cost_nothing_before_they_come_in() -> None:
    net, seen = TinyGPT(), []

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            grads = [all(p.grad is not None for p in block.parameters()) for block in pl_module.blocks]
            state = [any(p in trainer.optimizers[0].state for p in block.parameters()) for block in pl_module.blocks]
            seen.append((grads, state))

    trainer(DropIn(first=1, start=0.5, end=0.9), Looks(), max_steps=10).fit(net, loader("tiny_gpt"))
    alone, together = [True, False, False, False], [True] * 4
    assert seen == [(alone, alone)] * 6 + [(together, together)] * 4


def test_a_run_that_ends_between_says_so(tmp_path: Path) -> None:
    """In the checkpoint and at the end, and evaluates what was trained."""
    net, technique = TinyGPT(), DropIn(first=2, start=0.0, end=1.0)
    t = trainer(technique, max_steps=4)
    with pytest.warns(
        UserWarning, match="The fit ended before all blocks ran. DropIn: of 4 blocks .* mixed in at 75.0%"
    ):
        t.fit(net, loader("tiny_gpt"))
    with pytest.warns(UserWarning, match="saved before all blocks run"):
        t.save_checkpoint(tmp_path / "mid.ckpt")
    batch = make_batch("tiny_gpt", 4, seed=5)
    (found,) = trainer(DropIn(first=2, start=0.0, end=1.0), limit_val_batches=1).validate(
        TinyGPT(), loader("tiny_gpt", 4, shuffle=False, seed=5), ckpt_path=tmp_path / "mid.ckpt", verbose=False
    )
    with torch.no_grad():
        logits = by_hand(net.eval(), batch["input_ids"], 2, 0.75)
    plain = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    assert found["val_loss"] == pytest.approx(float(plain), abs=1e-6)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"first=0\): expected an integer >= 1: the number of blocks"):
        DropIn(first=0)
    with pytest.raises(ValueError, match=r"start=-0.1\): expected a number in \[0, 1\): the fraction of the budget"):
        DropIn(start=-0.1)
    with pytest.raises(ValueError, match=r"start=0.5, end=0.5\): start must be below end"):
        DropIn(start=0.5, end=0.5)
    with pytest.raises(ValueError, match=r"first=5\): 'blocks' .* has only 4 blocks. Use first=2"):
        trainer(DropIn(first=5), max_steps=2).fit(TinyGPT(), loader("tiny_gpt"))


def test_runs_by_a_yaml(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "DropIn", {"first": 1, "start": 0.0, "end": 0.5}, model="TinyGPT", data="Sequences", max_steps=4)
