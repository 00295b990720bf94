"""AutoProg: the search trains and compares sub-networks of one network, and growth is from averaged weights."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import ModernBertConfig, ModernBertForMaskedLM

from lightning_eff import AutoProg
from lightning_eff.model.growth._progressive.course import due
from lightning_eff.model.growth._progressive.growing import added, interpolated, skipped
from lightning_eff.model.growth._progressive.search import balance, best_of, candidates_of, ladder, rungs
from lightning_eff.model.growth._shallower import Shallower
from tests.cases import Case, no_blocks
from tests.model.growth.residual import PostNorm
from tests.models import LENGTH, VOCAB, HuggingFace, TinyGPT, hugging_face, loader, module, trainer
from tests.runs import checkpoints, differences, final_state, fit, fit_yaml

SHORT: dict[str, Any] = {"depth": 0.25, "resolution": 1.0, "search": 0.5, "alpha": 1.0, "half_life": 0.1}

CASES = {
    "AutoProg": Case(
        active=lambda: AutoProg(**{**SHORT, "num_stages": 3, "until": 0.5, "search": 0.3}),
        neutral=lambda: AutoProg(depth=1.0, resolution=1.0),
        lost=(no_blocks, "classifier", "no stack of repeated blocks"),
        refuses={"classifier": "does not return its input plus something"},
    )
}


# -- the rules, by themselves


@pytest.mark.parametrize(
    ("count", "grown", "sources"),
    [
        (6, 12, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]),
        (6, 9, [0, 1, 2, 3, 3, 4, 4, 5, 5]),
        (2, 5, [0, 0, 1, 1, 1]),
        (3, 3, [0, 1, 2]),
        (1, 4, [0, 0, 0, 0]),
    ],
)
def test_each_block_is_followed_by_its_copies(count: int, grown: int, sources: list[int]) -> None:
    """The lists are those of the public code's ``new_idx``, which spreads copies so that the last blocks have one more."""
    assert interpolated(count, grown) == sources
    assert [i for i in range(grown) if i not in added(sources)] == [sources.index(s) for s in range(count)]
    for depth in range(count, grown + 1):
        left = [j for j in range(grown) if j not in skipped(sources, depth)]
        assert len(left) == depth and {sources[j] for j in left} == {*range(count)}  # one at least of each
    assert skipped(sources, count) == {*added(sources)}


def test_candidates_are_the_papers() -> None:
    depths, shares = rungs(12, 0.5, 4), ladder(0.5, 4)
    assert depths == [6, 8, 10, 12] and shares == pytest.approx([1 / 2, 2 / 3, 5 / 6, 1])
    assert candidates_of(depths, shares, None) == ([6, 10, 12], [shares[0], shares[2], 1.0])
    assert candidates_of(depths, shares, (6, shares[0])) == ([8, 10, 12], [*shares[:2]])
    assert candidates_of(depths, shares, (10, shares[1])) == ([12], [*shares[1:3]])
    assert candidates_of(depths, shares, (12, 1.0)) == ([12], [1.0])
    assert rungs(2, 0.5, 4) == [1, 2]
    assert [due(v) for v in (0.0, 0.49, 0.5, 0.62, 0.63, 0.99, 1.0, 1.7)] == [0, 0, 1, 1, 2, 4, 5, 5]


def test_loss_is_balanced_against_time_by_the_slope_between_them() -> None:
    times = {(i, 1.0): t for i, t in enumerate([0.25, 0.5, 0.75, 1.0], start=1)}
    law = {c: 3.0 * t**-0.2 for c, t in times.items()}
    assert balance(law, times, None) == pytest.approx(0.2)
    assert best_of(law, times, balance(law, times, None)) == (1, 1.0)  # all are equal, and the first costs least
    below = {**law, (3, 1.0): law[3, 1.0] * 0.97}
    alpha = balance(below, times, None)
    slope = torch.linalg.lstsq(
        torch.tensor([[math.log(t), 1.0] for t in times.values()], dtype=torch.float64),
        torch.tensor([math.log(v) for v in below.values()], dtype=torch.float64)[:, None],
    ).solution[0]
    assert alpha == pytest.approx(-float(slope))
    assert best_of(below, times, alpha) == (3, 1.0)
    assert best_of(below, times, 0.0) == (4, 1.0) and best_of(below, times, 1.0) == (1, 1.0)
    rising = {c: 1.0 + t for c, t in times.items()}
    assert balance(rising, times, None) == 0.0  # more time for a larger loss
    two = {c: law[c] for c in [*law][:2]}
    assert balance(two, times | {(3, 1.0): 0.25, (4, 1.0): 0.5}, 0.7) == 0.7
    assert balance({**law, (1, 1.0): -1.0}, times, 0.7) == 0.0


# -- momentum growth


class Before(pl.Callback):
    """Stands before the technique: weights as each step left them, and an average of them by the formula, in double."""

    def __init__(self, half_life: float) -> None:
        self.half_life = half_life
        self.average: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        self.moments: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.weights = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
        states = trainer.optimizers[0].state
        self.moments = {n: states[p]["exp_avg"].clone() for n, p in pl_module.named_parameters() if states.get(p)}
        m = 0.5 ** (1 / trainer.max_steps / self.half_life)
        for name, w in self.weights.items():
            before = self.average.get(name, w.double())
            self.average[name] = m * before + (1 - m) * w.double()


class After(pl.Callback):
    """Stands behind it: at each growth, the blocks against those before it."""

    def __init__(self, before: Before, technique: AutoProg, copies: bool) -> None:
        self.before, self.technique, self.copies = before, technique, copies
        self.active = 4
        self.grew: list[tuple[int, int]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        stack = self.technique._stack
        assert stack is not None
        was, self.active = self.active, stack.active
        now = dict(pl_module.named_parameters())
        states = trainer.optimizers[0].state
        if was < self.active:
            self.grew.append((was, self.active))
            sources = interpolated(was, self.active)
            average = dict(self.before.average)
            for j, i in enumerate(sources):
                new = j in added(sources)
                for name in (n.removeprefix("blocks.0.") for n in now if n.startswith("blocks.0.")):
                    ours, theirs = f"blocks.{j}.{name}", f"blocks.{i}.{name}"
                    if new:
                        torch.testing.assert_close(now[ours].double(), average[theirs], rtol=0, atol=1e-6)
                        assert not torch.equal(now[ours], self.before.weights[theirs])
                    else:
                        assert torch.equal(now[ours], self.before.weights[theirs])
                    if not new or self.copies:
                        assert torch.equal(states[now[ours]]["exp_avg"], self.before.moments[theirs])
                    else:
                        assert not states.get(now[ours])
                    self.before.average[ours] = average[theirs]
        for index in range(self.active, 4):  # no state of what does not run
            assert not any(states.get(p) for p in pl_module.blocks[index].parameters())
            assert not any(p.requires_grad for p in pl_module.blocks[index].parameters())


@pytest.mark.parametrize("copies", [True, False])
def test_new_layers_equal_interpolated_averaged_weights(copies: bool) -> None:
    pl.seed_everything(0, verbose=False)
    technique = AutoProg(
        depth=0.5, resolution=1.0, search=0.0, half_life=0.1, num_stages=3, copy_optimizer_state=copies
    )
    before = Before(0.1)
    after = After(before, technique, copies)
    after.active = 2
    net = TinyGPT(dropout=0.0)
    trainer(before, technique, after, max_steps=12).fit(net, loader("tiny_gpt", 48))
    assert after.grew == [(2, 3), (3, 4)]
    assert technique._momentum is not None and not technique._momentum.held  # the last stage needs none
    assert technique.report() == {
        "depth": 1.0,
        "resolution": 1.0,
        "searching": 0,
        "alpha": 0.0,
        "search_steps": 0,
        "search_passes": 0,
    }


# -- the search


class Look(pl.Callback):
    """What each step ran, and what gradients it left."""

    def __init__(self, technique: AutoProg) -> None:
        self.technique = technique
        self.ran: list[tuple[int, int, list[int]]] = []  # active, base, blocks with gradients

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        stack = self.technique._stack
        assert stack is not None
        blocks = [i for i, b in enumerate(stack.blocks) if any(p.grad is not None for p in b.parameters())]
        self.ran.append((stack.active, self.technique._base, blocks))


def test_steps_of_a_search_train_drawn_sub_networks_and_the_others_the_chosen_one() -> None:
    pl.seed_everything(0, verbose=False)
    technique = AutoProg(**{**SHORT, "depth": 0.5, "num_stages": 3, "search": 0.5})
    look = Look(technique)
    trainer(technique, look, max_steps=48, max_epochs=-1).fit(TinyGPT(), loader("tiny_gpt", 48))
    searched = [(active, base, *blocks) for active, base, blocks in look.ran if base]
    assert len(searched) == technique._steps > 20
    # both searches are of two blocks, each with a copy: of as many as there were, or one, or two more
    assert {*searched} == {(4, 2, 0, 2), (4, 2, 0, 2, 3), (4, 2, 0, 1, 2, 3)}
    rest = [(active, blocks) for active, base, blocks in look.ran if not base]
    assert all(blocks == [*range(active)] for active, blocks in rest)
    assert [active for active, _ in itertools.groupby(rest, key=lambda r: r[0])] == [2, 3, 4]
    told = technique.report()
    assert (told["search_steps"], told["depth"], told["searching"]) == (technique._steps, 1.0, 0)


class Sub(TinyGPT):
    """The sub-network as a module of its own."""

    def __init__(self, whole: dict[str, Tensor], blocks: list[int]) -> None:
        super().__init__(len(blocks), dropout=0.0)
        state = {name: value for name, value in whole.items() if not name.startswith("blocks.")}
        for i, j in enumerate(blocks):
            state |= {
                f"blocks.{i}." + n.removeprefix(f"blocks.{j}."): v
                for n, v in whole.items()
                if n.startswith(f"blocks.{j}.")
            }
        self.load_state_dict(state)


def test_candidates_are_compared_by_their_losses_with_averaged_weights() -> None:
    compared: list[int] = []

    class Check(AutoProg):
        def _evaluate(self, session: Any, batch: Any, batch_idx: int) -> None:
            raw = {name: p.detach().clone() for name, p in session.module.named_parameters()}
            passes, cost = self._passes, session.chain.cost.forward_passes
            super()._evaluate(session, batch, batch_idx)
            assert self._stack is not None and self._momentum is not None
            assert self._passes - passes == session.chain.cost.forward_passes - cost == len(self._losses[-1])
            assert all(torch.equal(p, raw[name]) for name, p in session.module.named_parameters())
            depths, _ = self._candidates()
            state = {**raw, **self._momentum.held}
            for count, loss in zip(depths, self._losses[-1], strict=True):
                out = skipped(interpolated(self._base, self._stack.active), count)
                net = Sub(state, [j for j in range(self._stack.active) if j not in out]).eval()
                logits = net(batch["input_ids"]).detach().flatten(0, 1)
                assert loss == pytest.approx(float(F.cross_entropy(logits, batch["labels"].flatten())), rel=1e-5)
                compared.append(count)

        def _decide(self, session: Any) -> None:
            assert self._stack is not None
            sources = interpolated(self._base, self._stack.active)
            raw = {name: p.detach().clone() for name, p in session.module.named_parameters()}
            super()._decide(session)
            assert self._now is not None
            left = [j for j in range(len(sources)) if j not in skipped(sources, self._now[0])]
            now = {name: p.detach().clone() for name, p in session.module.named_parameters()}
            ids = torch.randint(VOCAB, (2, LENGTH))
            one, other = Sub(raw, left), Sub(now, [*range(self._now[0])])  # the same network, at the front
            assert torch.equal(one(ids), other(ids))

    pl.seed_everything(0, verbose=False)
    net = TinyGPT(dropout=0.1)
    trainer(Check(**SHORT), max_steps=24).fit(net, loader("tiny_gpt", 96))
    assert len(compared) >= 10


def test_resumed_from_every_step_of_a_search_over_resolutions_it_ends_as_undisturbed(tmp_path: Path) -> None:
    def build() -> list[AutoProg]:
        return [AutoProg(**{**SHORT, "resolution": 0.5})]

    whole = final_state(*fit("vit", build, directory=tmp_path))
    saved = checkpoints(tmp_path)
    for path in saved[:-1]:
        assert differences(whole, final_state(*fit("vit", build, resume=path))) == []
    for path, base in ((saved[2], 0), (saved[4], 1)):  # the first search is over, and the second goes on
        state = torch.load(path, weights_only=True)
        module("vit").load_state_dict(state["state_dict"])
        held = next(value for key, value in state["callbacks"].items() if "AutoProg" in key)
        assert (held["base"], held["active"]) == (base, 4 if base else 1)
        assert base or held["note"].startswith("AutoProg: training has reached the first 1 of the 4 blocks")


def test_images_grow_with_the_blocks_and_small_ones_cost_less() -> None:
    sides: list[int] = []

    class Net(HuggingFace):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.training:
                sides.append(batch["pixel_values"].shape[-1])
            return super().training_step(batch, batch_idx)

    pl.seed_everything(0, verbose=False)
    technique = AutoProg(**{**SHORT, "resolution": 0.5, "search": 0.3})
    trainer(technique, max_steps=20, max_epochs=-1).fit(Net(hugging_face("vit", 4).model), loader("vit", 80))
    full = max(sides)
    assert sides[-5:] == [full] * 5 and full // 2 in sides
    assert technique._inputs.cost(0.5) == 0.25 and technique._inputs.cost(1.0) == 1.0


def test_sequences_are_truncated_where_asked_for_and_otherwise_depth_alone_is_searched(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    lengths: list[int] = []

    class Net(TinyGPT):
        def forward(self, ids: Tensor) -> Tensor:
            if self.training:
                lengths.append(ids.shape[1])
            return super().forward(ids)

    technique = AutoProg(**{**SHORT, "resolution": 0.5, "inputs": "sequences"})
    trainer(technique, max_steps=12).fit(Net(), loader("tiny_gpt", 48))
    assert lengths[-3:] == [LENGTH] * 3 and min(lengths) == LENGTH // 2
    assert "0.5 of the resolution" in technique.summary()
    lengths.clear()
    with caplog.at_level("INFO"):
        trainer(AutoProg(**{**SHORT, "resolution": 0.5}), max_steps=12).fit(Net(), loader("tiny_gpt", 48))
    assert {*lengths} == {LENGTH}
    assert "searches only the depth, because batches hold no images" in caplog.text + "".join(capfd.readouterr())


# -- modules of any make


class Encoder(pl.LightningModule):
    """``nn.TransformerEncoder`` as torch makes it: post-norm, with a list of layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(16, 3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.encoder(batch[0]).mean(1)), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-2, momentum=0.9)


class Tied(Encoder):
    """Blocks that share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.layers[2].linear1.bias = self.encoder.layers[0].linear1.bias


class Wider(Encoder):
    """Blocks of one class and another make."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.layers[2] = nn.TransformerEncoderLayer(16, 2, 32, bias=False)


def modern_bert() -> pl.LightningModule:
    config: dict[str, Any] = dict(
        **{"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4},
        **{"num_attention_heads": 2, "max_position_embeddings": LENGTH, "pad_token_id": 0, "local_attention": 8},
    )
    return HuggingFace(ModernBertForMaskedLM(ModernBertConfig(**config)))


def features() -> DataLoader[Any]:
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(48, 4, 16, generator=g), torch.randint(0, 3, (48,), generator=g))
    return DataLoader(data, 4)


MODULES: dict[str, tuple[Callable[[], pl.LightningModule], Callable[[], DataLoader[Any]]]] = {
    "gpt2": (lambda: hugging_face("gpt2"), lambda: loader("gpt2", 48)),
    "llama": (lambda: hugging_face("llama"), lambda: loader("llama", 48)),
    "modern_bert": (modern_bert, lambda: loader("bert", 48)),
    "vit": (lambda: hugging_face("vit"), lambda: loader("vit", 48)),
    "post_norm": (PostNorm, lambda: loader("tiny_gpt", 48)),
    "encoder": (Encoder, features),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_any_make_grow(name: str) -> None:
    pl.seed_everything(0, verbose=False)
    build, data = MODULES[name]
    net, technique = build(), AutoProg(**SHORT)
    shapes = {key: tuple(value.shape) for key, value in net.state_dict().items()}
    look = Look(technique)
    trainer(technique, look, max_steps=12).fit(net, data())
    assert [active for active, base, _ in look.ran if not base] == [1, 2, 3, 4, 4, 4]
    assert all(len(blocks) in (active, *range(max(base, 1), active)) for active, base, blocks in look.ran)
    assert {key: tuple(value.shape) for key, value in net.state_dict().items()} == shapes
    assert all(bool(p.isfinite().all()) for p in net.parameters())


@pytest.mark.parametrize(
    ("build", "data", "arguments", "told"),
    [
        (Tied, features, {}, "share the parameter 'linear1.bias'"),
        (Wider, features, {}, "the parameters or buffers of blocks 2 and 1 of .* differ at .*linear1"),
        (Encoder, features, {"depth": 0.9}, r"0.9 of the 4 blocks of .* is all of them"),
        (Encoder, features, {"resolution": 0.5, "inputs": "images"}, "found no images in the batch"),
        (Encoder, features, {"resolution": 0.5, "inputs": "sequences"}, "found no integer tensor"),
        (
            lambda: hugging_face("vit"),
            lambda: loader("vit", 8),
            {"resolution": 0.9, "multiple_of": 8},
            "never be small",
        ),
    ],
)
def test_what_cannot_grow_is_told_before_any_weight_changes(build: Any, data: Any, arguments: Any, told: str) -> None:
    net = build()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with pytest.raises(ValueError, match=f"(?s)AutoProg.*{told}"):
        trainer(AutoProg(**{**SHORT, **arguments}), max_steps=2).fit(net, data())
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_a_checkpoint_of_plain_training_is_not_gone_on_from(tmp_path: Path) -> None:
    fit("tiny_gpt", list, directory=tmp_path, max_steps=2)
    with pytest.raises(ValueError, match="AutoProg: the checkpoint was saved without AutoProg"):
        fit("tiny_gpt", lambda: [AutoProg(**SHORT)], resume=checkpoints(tmp_path)[0])


# -- what it is given, and what it is held against


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"num_stages": 1}, "num_stages=1.*expected an integer >= 2"),
        ({"depth": 0.0}, r"depth=0.0.*in \(0, 1\]"),
        ({"depth": 1.0}, "depth must be below 1"),
        ({"resolution": 1.5}, "resolution=1.5"),
        ({"until": 1.0}, r"until=1.0.*in \(0, 1\)"),
        ({"search": 0.75}, r"search=0.75, until=0.75\): search must be below until"),
        ({"alpha": -1}, "alpha=-1"),
        ({"half_life": 0}, "half_life=0"),
        ({"inputs": "text"}, "inputs='text'.*'sequences'"),
        ({"multiple_of": 0}, "multiple_of=0"),
        ({"keys": "pixels"}, "keys='pixels'.: expected a list of names or positions in the batch, or None"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=f"AutoProg.*{told}"):
        AutoProg(**arguments)


def test_controls_are_the_stages_by_the_clock_and_the_smallest_depth() -> None:
    technique = AutoProg(depth=0.25, num_stages=3, keys=[0], inputs="images")
    arms = AutoProg.control.arms(technique)
    clock, small = arms["the same stages without a search"], arms["the smallest depth throughout"]
    assert isinstance(clock, AutoProg) and isinstance(small, Shallower)
    assert vars(clock.like(search=0.06)).keys() == vars(technique).keys()
    assert {k: v for k, v in vars(clock).items() if k[0] != "_" and v != vars(technique)[k]} == {"search": 0.0}
    assert small.kept(8) == 2
    assert [*AutoProg.control.arms(clock)] == ["the smallest depth throughout"]
    assert AutoProg.control.arms(AutoProg(depth=1.0, resolution=1.0)) == {}


def test_from_a_yaml(tmp_path: Path) -> None:
    fit_yaml(
        tmp_path,
        "AutoProg",
        {"depth": 0.34, "resolution": 1.0, "search": 0.3},
        model="TinyGPT",
        data="Sequences",
        max_steps=8,
    )
