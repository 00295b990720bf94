"""Freezing from the bottom, and block by block: against a fit whose parameters are frozen by hand, and what a step costs."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_eff import GreedyLayerwise, LayerFreezing, TokenDropping
from lightning_eff._core.technique import Technique
from lightning_eff.model.growth.greedy_layerwise import block_at
from lightning_eff.model.growth.layer_freezing import num_frozen
from tests.cases import Case, no_blocks
from tests.model.growth.residual import PlainResNet, PostNorm
from tests.models import TinyGPT, flat, hugging_face, loader, trainer
from tests.runs import SaveBatches, differences, final_state, fit_yaml

CASES = {
    "LayerFreezing": Case(
        active=lambda: LayerFreezing(start=0.1, end=0.8),
        neutral=lambda: LayerFreezing(depth=0.0),
        lost=(no_blocks, "classifier", "no stack of repeated blocks"),
    ),
}

MODELS: dict[str, tuple[Callable[[], Any], str, int]] = {
    "tiny_gpt": (TinyGPT, "tiny_gpt", 4),
    "post_norm": (PostNorm, "tiny_gpt", 4),
    "resnet": (PlainResNet, "vit", 7),
    "gpt2": (lambda: hugging_face("gpt2"), "gpt2", 4),
}


def blocks_of(net: Any) -> list[Any]:
    return (
        net.blocks()
        if callable(getattr(net, "blocks", None)) and not isinstance(net.blocks, nn.Module)
        else next(list(m) for m in net.modules() if isinstance(m, nn.ModuleList))
    )


class ByHand(pl.Callback):
    """The reference: plain training, with parameters frozen from given steps on, as one does without any of this."""

    def __init__(self, frozen: Callable[[float, Any], list[nn.Parameter]]) -> None:
        self.frozen = frozen

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        frozen = {id(p) for p in self.frozen(trainer.global_step / 12, pl_module)}
        for p in pl_module.parameters():
            p.requires_grad_(id(p) not in frozen)
            p.grad = None if id(p) in frozen else p.grad


def below(net: Any) -> list[nn.Parameter]:
    inside = {id(p) for block in blocks_of(net) for p in block.parameters()}
    names = ("embed", "position", "stem", "wpe")
    return [p for n, p in net.named_parameters() if id(p) not in inside and any(name in n for name in names)]


def bottom(u: float, net: Any) -> list[nn.Parameter]:
    blocks = blocks_of(net)
    count = num_frozen(u, num_blocks=len(blocks), start=0.25, end=0.75, depth=1.0)
    return [p for block in blocks[:count] for p in block.parameters()] + (below(net) if count else [])


def but_one(u: float, net: Any) -> list[nn.Parameter]:
    blocks = blocks_of(net)
    block = block_at(u, num_blocks=len(blocks), until=0.7)
    if block is None:
        return []
    return [p for i, b in enumerate(blocks) if i != block for p in b.parameters()] + (below(net) if block else [])


def train(
    name: str, *callbacks: pl.Callback, resume: Path | None = None, **kwargs: Any
) -> tuple[dict[str, Tensor], Any]:
    make, data, _ = MODELS[name]
    pl.seed_everything(1, verbose=False)
    net = make()
    pl.seed_everything(2 if resume is None else 99, verbose=False)
    t = trainer(*callbacks, **{"max_steps": 12, **kwargs})
    t.fit(net, loader(data), ckpt_path=resume)
    return final_state(net, t), net


# -- T: frozen parameters have no gradient, and training is that of a module frozen by hand


def test_the_rule() -> None:
    counts = [num_frozen(u / 10, num_blocks=12, start=0.5, end=1.0, depth=1.0) for u in range(11)]
    assert counts == [0, 0, 0, 0, 0, 0, 2, 4, 7, 9, 11]
    assert num_frozen(0.9, num_blocks=12, start=0.2, end=0.6, depth=0.5) == 6


@pytest.mark.parametrize("name", ["tiny_gpt", "post_norm", "resnet"])
@pytest.mark.parametrize("kind", ["bottom", "one"])
def test_trains_as_a_module_that_is_frozen_by_hand(kind: str, name: str) -> None:
    """Weights, moments and random state, bit for bit; and gradients are None where they would be."""
    none: list[tuple[set[str], set[str]]] = []

    class Grads(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            named = dict(pl_module.named_parameters())
            without = {n for n, p in named.items() if p.grad is None}
            none.append((without, {n for n, p in named.items() if not p.requires_grad}))  # which DDP goes by

    by_hand, technique = (
        (bottom, LayerFreezing(start=0.25, end=0.75)) if kind == "bottom" else (but_one, GreedyLayerwise(until=0.7))
    )
    expected, _ = train(name, ByHand(by_hand), Grads())
    wanted, none = none, []
    found, net = train(name, technique, Grads())
    assert differences(expected, found) == []
    assert none == wanted and len({len(names) for names, _ in none}) >= 3
    assert all(without == frozen for without, frozen in none)
    assert all(p.requires_grad for p in net.parameters())
    count = MODELS[name][2]
    if kind == "bottom":
        assert technique.summary().startswith(f"{count - 1} of {count} blocks of '")
        assert technique.report()["blocks_frozen"] == count - 1
    else:
        assert technique.report() == {"block": -1, "parameters_frozen": 0.0}


class Split(TinyGPT):
    """Residual branches and norms outside the blocks, and each layer in two lists that take turns."""

    def __init__(self) -> None:
        super().__init__(num_layers=0)

        def several(make: Callable[[], nn.Module]) -> nn.ModuleList:
            return nn.ModuleList([make() for _ in range(4)])

        self.first, self.first_norms = several(self._network), several(lambda: nn.LayerNorm(16))
        self.second, self.second_norms = several(self._network), several(lambda: nn.LayerNorm(16))

    @staticmethod
    def _network() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        for norm, block, other_norm, other in zip(
            self.first_norms, self.first, self.second_norms, self.second, strict=True
        ):
            x = x + block(norm(x))
            x = x + other(other_norm(x))
        return self.head(self.norm(x))


@pytest.mark.parametrize("layers", ["first", "second"])
def test_what_a_residual_branch_leads_past_a_frozen_block_is_frozen_too(
    layers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would train on the part of its gradient that goes past the block, in silence."""
    monkeypatch.setitem(MODELS, "split", (Split, "tiny_gpt", 4))

    def by_hand(u: float, net: Any) -> list[nn.Parameter]:
        count = num_frozen(u, num_blocks=4, start=0.25, end=0.75, depth=1.0)
        there = [net.first_norms, net.first, net.second_norms, net.second]
        whole = count - 1 if layers == "first" else count
        depths = [count, count, whole, whole]
        below = [net.embed, net.position] if count else []
        frozen = [part for parts, depth in zip(there, depths, strict=True) for part in list(parts)[: max(depth, 0)]]
        return [p for part in [*below, *frozen] for p in part.parameters()]

    expected, _ = train("split", ByHand(by_hand))
    found, _ = train("split", LayerFreezing(start=0.25, end=0.75, layers=layers))
    assert differences(expected, found) == []


class Flops(pl.Callback):
    """Of each step."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.counter = FlopCounterMode(display=False)
        self.counter.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self.counter.__exit__(None, None, None)
        self.steps.append(self.counter.get_total_flops())


def backward_flops(name: str) -> int:
    """Of one block of the model by itself, whose input takes a gradient too."""
    block, width = blocks_of(MODELS[name][0]())[0], 16 if name == "tiny_gpt" else 32
    out = block(torch.randn(4, 32, width, requires_grad=True))
    with FlopCounterMode(display=False) as counter:
        (out if isinstance(out, Tensor) else out[0]).sum().backward()
    return counter.get_total_flops()


class Gradients(pl.Callback):
    """Which parameters are frozen at some step, and which are to train and take no gradient: DDP refuses these."""

    def __init__(self) -> None:
        self.frozen, self.untaken = set[str](), set[str]()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        named = list(pl_module.named_parameters())
        self.frozen |= {name for name, p in named if not p.requires_grad}
        self.untaken |= {name for name, p in named if p.requires_grad and p.grad is None}


@pytest.mark.parametrize("kind", [LayerFreezing, GreedyLayerwise])
def test_what_stands_below_is_found_beside_passes_that_only_look(kind: type[Technique]) -> None:
    """TokenDropping's own look at the first batch runs through the blocks, too, and is no part of the loss's graph."""
    gradients, net = Gradients(), TinyGPT()
    trainer(kind(), TokenDropping(), gradients, max_steps=12).fit(net, loader("tiny_gpt"))
    assert gradients.untaken == set()
    assert {name.partition(".")[0] for name in gradients.frozen} >= {"embed", "position", "blocks"}


@pytest.mark.parametrize("name", ["tiny_gpt", "gpt2"])
def test_the_backward_pass_ends_behind_the_frozen_blocks(name: str) -> None:
    """Also where a tied embedding goes on taking the head's gradient: each block frozen is a block's backward pass less."""
    flops, moved = Flops(), []

    class Moves(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            self.before = [p.detach().clone() for p in pl_module.parameters()]

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            pairs = zip(pl_module.named_parameters(), self.before, strict=True)
            moved.append({n for (n, p), old in pairs if not torch.equal(p, old)})

    train(name, LayerFreezing(start=0.0, end=1.0), flops, Moves(), max_steps=16)
    by_count = {}
    for step in range(16):
        by_count.setdefault(min(step // 4, 3), set()).add(flops.steps[step])
    assert all(len(found) == 1 for found in by_count.values())
    plain, one, two, three = (found.pop() for found in by_count.values())
    assert plain - one == one - two == two - three == backward_flops(name)
    tables = {n for n in moved[0] if "wte" in n}
    assert (name == "gpt2") == bool(tables) and tables <= moved[-1]
    assert not any("wpe" in n or "position" in n for n in moved[-1])


# -- resuming, growth, the network's own checkpointing


@pytest.mark.parametrize("kind", [LayerFreezing, GreedyLayerwise])
def test_resumes_exactly_in_stages_and_windows(kind: type[Technique], tmp_path: Path) -> None:
    def build() -> Technique:
        return LayerFreezing(start=0.1) if kind is LayerFreezing else GreedyLayerwise(until=0.9)

    settings: dict[str, Any] = {"max_steps": 6, "accumulate_grad_batches": 3}
    whole, _ = train("resnet", build(), SaveBatches(tmp_path, (4, 9)), **settings)
    for batch in (4, 9):
        found, _ = train("resnet", build(), resume=tmp_path / f"batch={batch}.ckpt", **settings)
        assert differences(whole, found) == []


def test_checkpointed_blocks_freeze_and_reentrant_ones_are_refused() -> None:
    """Transformers' own say so, at setup; those that a module's code checkpoints are found in the first step."""
    weights = []
    for reentrant in (None, False, True):
        pl.seed_everything(1, verbose=False)
        net: Any = hugging_face("gpt2")
        if reentrant is not None:
            net.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
        t = trainer(LayerFreezing(start=0.0), max_steps=6)
        if reentrant:
            with pytest.raises(ValueError, match=r"checkpointed with use_reentrant=True, so .*'use_reentrant': False"):
                t.fit(net, loader("gpt2"))
        else:
            t.fit(net, loader("gpt2"))
            weights.append(flat(net))
    assert torch.equal(*weights)

    class Checkpointed(TinyGPT):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids) + self.position.weight[: ids.shape[1]]
            for block in self.blocks or ():
                x = checkpoint(block, x, use_reentrant=True)
            return self.head(self.norm(x))

    with pytest.raises(
        ValueError, match=r"are checkpointed with use_reentrant=True, so .*checkpoint\(..., use_reentrant=False\)"
    ):
        trainer(LayerFreezing(), max_steps=8).fit(Checkpointed(), loader("tiny_gpt"))


# -- errors, and by a YAML


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"start=1.0\): expected a number in \[0, 1\): the fraction of the budget"):
        LayerFreezing(start=1.0)
    with pytest.raises(ValueError, match=r"start=0.5, end=0.5\): start must be below end"):
        LayerFreezing(end=0.5)
    with pytest.raises(
        ValueError, match=r"depth=nan\): expected a number in \[0, 1\]: the fraction of the blocks.* default is 1.0"
    ):
        LayerFreezing(depth=math.nan)
    with pytest.raises(
        ValueError, match=r"LayerFreezing.*GreedyLayerwise|GreedyLayerwise.*both set which blocks train"
    ):
        trainer(LayerFreezing(), GreedyLayerwise(), max_steps=1).fit(TinyGPT(), loader("tiny_gpt"))
    net = TinyGPT()
    for n, p in net.named_parameters():
        p.requires_grad_(n.startswith("blocks.0"))
    with pytest.raises(ValueError, match=r"no parameter is left to train with 1 of .* frozen. Freeze fewer"):
        trainer(LayerFreezing(start=0.0), max_steps=8).fit(net, loader("tiny_gpt"))
    net = TinyGPT()
    net.blocks = nn.ModuleList([blocks_of(net)[0]] * 3)
    with pytest.raises(ValueError, match="holds the same block several times"):
        trainer(GreedyLayerwise(), max_steps=8).fit(net, loader("tiny_gpt"))


def test_runs_by_a_yaml(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "LayerFreezing", {"start": 0.2, "depth": 0.5}, max_steps=4)
