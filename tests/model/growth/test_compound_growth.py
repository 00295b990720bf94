"""Compound growth: narrow networks keep their function as they grow, cost what they are, and lie in plain parameters."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig, MixtralForCausalLM, ModernBertConfig, ModernBertForMaskedLM

from lightning_eff import CompoundGrowth
from lightning_eff._core._branches.ffns import Part
from lightning_eff.model.growth._ffn.tiling import apart, tiled, tiled_state
from lightning_eff.model.growth._sizes.depth import copied
from tests.cases import Case, no_blocks
from tests.models import LENGTH, VOCAB, HuggingFace, TinyGPT, hugging_face, loader, module, trainer
from tests.runs import checkpoints, final_state, fit

CASES = {
    "CompoundGrowth": Case(
        active=lambda: CompoundGrowth(
            depth=[(0.0, 0.25), (0.25, 0.5), (0.6, 1.0)], width=[(0.0, 0.25), (0.4, 0.5), (0.6, 1.0)]
        ),
        neutral=lambda: CompoundGrowth(depth=[(0.0, 1.0)], width=None),
        on_classifier=lambda: CompoundGrowth(depth=[(0.0, 1 / 3), (0.5, 1.0)], width=None),
        lost=(no_blocks, "classifier", "no stack of repeated blocks"),
    )
}

WIDTH = [(0.0, 0.25), (0.25, 0.5), (0.5, 1.0)]


# -- the rule, against a network written out


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("times", [2, 3])
def test_tiling_keeps_the_function_exactly_and_gives_the_gradients_that_moments_are_scaled_by(
    gated: bool, times: int
) -> None:
    torch.manual_seed(0)
    up, down = Part("up", 0, 2 if gated else 1, last=False), Part("down", 1, 1, last=True)
    w1, w2 = torch.randn(6 * up.groups, 5).double(), torch.randn(5, 6).double()
    x, target = torch.randn(7, 5).double(), torch.randn(7, 5).double()

    def run(a: Tensor, b: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
        h = x @ a.T
        y = (F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1] if gated else F.gelu(h)) @ b.T
        return y.detach(), torch.autograd.grad(F.mse_loss(y, target), (a, b))

    y, (g1, g2) = run(w1, w2)
    grown, (h1, h2) = run(tiled(w1, up, times), tiled(w2, down, times))
    torch.testing.assert_close(grown, y, rtol=1e-13, atol=1e-13)
    kept = {"step": torch.tensor(3.0)}
    for part, g, h, units in ((up, g1, h1, 6), (down, g2, h2, 6)):
        state = tiled_state({**kept, "exp_avg": g, "exp_avg_sq": g**2}, part, units, times)
        assert state is not None and state["step"] == 3
        torch.testing.assert_close(state["exp_avg"], h)
        torch.testing.assert_close(state["exp_avg_sq"], h**2)
    assert tiled_state({"row": torch.zeros(4, 1)}, up, 6, times) is None


def test_noise_tells_copies_apart_and_sums_to_nothing_over_them() -> None:
    weight = tiled(torch.randn(6, 5), Part("up", 0, 1, last=False), 2)
    noisy = apart(weight, Part("up", 0, 1, last=False), 2, 1e-2, torch.Generator().manual_seed(0))
    assert 0.3e-2 < float((noisy - weight).norm() / weight.norm()) < 2e-2
    assert not torch.equal(noisy[:6], noisy[6:])
    torch.testing.assert_close(noisy[:6] + noisy[6:], weight[:6] + weight[6:])


# -- modules of any make


class Encoder(pl.LightningModule):
    """Post-norm encoder layers of torch's own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, **kwargs) for _ in range(2)
        )
        self.embed, self.head = nn.Linear(16, 16), nn.Linear(16, 3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean(1)), batch[1])

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Raw(nn.Module):
    """A network whose module owns its weights, and another's is a square map from the left."""

    def __init__(self, dim: int = 16, hidden: int = 16) -> None:
        super().__init__()
        self.hidden = hidden
        self.w1, self.w2 = nn.Parameter(torch.randn(dim, hidden) / 4), nn.Parameter(torch.randn(hidden, dim) / 4)
        self.scale = nn.Parameter(torch.rand(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(x @ self.w1) ** 2 * self.scale @ self.w2


class ResNet(Encoder):
    """Residual branches of convolutions, without norms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 4, 3, padding=1)) for _ in range(2)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x.mean(1)), batch[1])


def of(build: Callable[[], nn.Module]) -> pl.LightningModule:
    net = Encoder()
    net.layers = nn.ModuleList(build() for _ in range(2))
    return net


def modern_bert() -> pl.LightningModule:
    config: dict[str, Any] = dict(
        **{"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "max_position_embeddings": LENGTH, "pad_token_id": 0, "local_attention": 8},
    )
    return HuggingFace(ModernBertForMaskedLM(ModernBertConfig(**config)))


def mixtral() -> pl.LightningModule:
    config: dict[str, Any] = dict(
        **{"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1},
    )
    return HuggingFace(MixtralForCausalLM(MixtralConfig(**config)))


def features() -> DataLoader[Any]:
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(24, 4, 16, generator=g), torch.randint(0, 3, (24,), generator=g))
    return DataLoader(data, 4)


MODULES: dict[str, tuple[Callable[[], pl.LightningModule], Callable[[], DataLoader[Any]]]] = {
    "gpt": (lambda: TinyGPT(2, dropout=0.0), lambda: loader("tiny_gpt", 24)),
    "gpt2": (lambda: hugging_face("gpt2", 2), lambda: loader("gpt2", 24)),
    "llama": (lambda: hugging_face("llama", 2), lambda: loader("llama", 24)),
    "modern_bert": (modern_bert, lambda: loader("bert", 24)),
    "vit": (lambda: hugging_face("vit", 2), lambda: loader("vit", 24)),
    "post_norm": (Encoder, features),
    "pre_norm": (lambda: Encoder(norm_first=True, activation="gelu"), features),
    "raw": (lambda: of(Raw), features),
}


class Look(pl.Callback):
    """At each step, before and after growth: the loss, the FLOPs and the optimizer's tensors."""

    def __init__(self, technique: CompoundGrowth, val: bool = False) -> None:
        self.technique = technique
        self.told: list[tuple[float, float, float, int]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        net = pl_module
        width = self.technique._width
        assert width is not None
        net.eval()
        with torch.no_grad(), width.view(True):
            narrow = float(self.technique.session.chain.original(batch, 0))
        with torch.no_grad():
            whole = float(self.technique.session.chain.original(batch, 0))  # the plain module
        net.train()
        with FlopCounterMode(display=False) as counted, width.view(True):
            self.technique.session.chain.original(batch, 0)
        p = dict(net.named_parameters())[width.ffns[0].parts[-1].name]
        state = trainer.optimizers[0].state[p]["exp_avg"].numel() / p.numel()
        self.told.append((width.share, narrow, whole, counted.get_total_flops()))
        assert state == width.share
        for ffn in width.ffns:
            assert all(dict(net.named_parameters())[part.name].grad is not None for part in ffn.parts)


@pytest.mark.parametrize("name", MODULES)
def test_the_plain_module_computes_what_was_trained_and_products_are_those_of_the_narrow_network(name: str) -> None:
    pl.seed_everything(0, verbose=False)
    build, data = MODULES[name]
    net, technique = build(), CompoundGrowth(depth=None, width=[(0.0, 0.5), (0.5, 1.0)], noise=0.0)
    names = {key: tuple(value.shape) for key, value in net.state_dict().items()}
    look = Look(technique)
    trainer(technique, look, max_steps=4).fit(net, data())
    assert [share for share, *_ in look.told] == [0.5, 0.5, 1.0, 1.0]
    for _, narrow, whole, _ in look.told:
        assert narrow == pytest.approx(whole, rel=1e-5)
    assert {key: tuple(value.shape) for key, value in net.state_dict().items()} == names
    found = technique._learnt["ffns"] if technique._learnt else []
    assert len(found) == 2
    # the FLOPs that are spared are half of those of all maps that were found
    maps = {part[0]: dict(net.named_parameters())[part[0]] for _, parts in found for part in parts}
    tokens = 4 * {"post_norm": 4, "pre_norm": 4, "raw": 4, "vit": 17}.get(name, LENGTH)
    product = sum(2 * tokens * p.numel() for p in maps.values() if p.ndim == 2)
    assert look.told[2][3] - look.told[1][3] == pytest.approx(product / 2)


class Elsewhere(torch.optim.AdamW):
    """The same, of another library, which might ask for weights that lie in one piece."""


class Lies(pl.Callback):
    """Notes whether a weight or its gradient lies in pieces as the optimizer has stepped on it."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.in_pieces: set[bool] = set()
        hooks = trainer.optimizers[0]._optimizer_step_post_hooks
        handle = trainer.optimizers[0].register_step_post_hook(self.note)
        hooks.move_to_end(handle.id, last=False)  # before the technique's, which makes weights whole again

    def note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.in_pieces.add(not all(p.is_contiguous() and p.grad.is_contiguous() for p in held))


def test_torchs_optimizers_step_on_narrow_weights_as_they_lie_and_others_on_copies() -> None:
    """With the same numbers."""
    ends = []
    for cls, in_pieces in ((torch.optim.AdamW, True), (Elsewhere, False)):
        pl.seed_everything(0, verbose=False)
        net, lies = module("tiny_gpt"), Lies()
        net.configure_optimizers = lambda net=net, cls=cls: cls(net.parameters(), lr=1e-2)
        technique = CompoundGrowth(depth=None, width=[(0.0, 0.5), (0.9, 1.0)])
        trainer(technique, lies, max_steps=6).fit(net, loader("tiny_gpt"))
        assert (True in lies.in_pieces) == in_pieces
        ends.append([p.detach().clone() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("noise", [0.0, 1e-3])
@pytest.mark.parametrize("copy", [True, False])
def test_growth_keeps_the_function(noise: float, copy: bool) -> None:
    before: dict[str, Any] = {}
    losses: list[float] = []

    class Switch(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            net = pl_module
            net.eval()
            with torch.no_grad():
                now = {key: value.clone() for key, value in net.state_dict().items()}
                losses.append(float(F.cross_entropy(net(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())))
                if trainer.global_step == 3:
                    net.load_state_dict(before["weights"])
                    old = float(F.cross_entropy(net(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()))
                    net.load_state_dict(now)
                    assert losses[-1] == pytest.approx(old, rel=1e-5)
                    assert (losses[-1] == pytest.approx(old, rel=1e-12)) or noise
                    w1, w2 = "blocks.1.mlp.0.weight", "blocks.1.mlp.2.weight"
                    old1, old2 = before["weights"][w1], before["weights"][w2]
                    assert torch.equal(now[w1][16:32], old1[:16]) == (noise == 0)
                    torch.testing.assert_close(now[w2][:, :32], torch.cat([old2[:, :16] / 2] * 2, 1))
                    assert not now[w2][:, 32:].any()
                    p = dict(net.named_parameters())[w1]
                    state = trainer.optimizers[0].state.get(p)
                    if copy:
                        assert state is not None
                        torch.testing.assert_close(state["exp_avg"], torch.cat([before["exp_avg"] / 2] * 2))
                        torch.testing.assert_close(state["exp_avg_sq"], torch.cat([before["exp_avg_sq"] / 4] * 2))
                        assert state["step"] == 3
                    else:
                        assert not state
            net.train()

        def on_train_batch_end(
            self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            net = pl_module
            if trainer.global_step == 3:
                before["weights"] = {key: value.clone() for key, value in net.state_dict().items()}
                state = trainer.optimizers[0].state[dict(net.named_parameters())["blocks.1.mlp.0.weight"]]
                before.update({key: state[key].clone() for key in ("exp_avg", "exp_avg_sq")})

    pl.seed_everything(0, verbose=False)
    technique = CompoundGrowth(depth=None, width=WIDTH, noise=noise, copy_optimizer_state=copy)
    trainer(technique, Switch(), max_steps=12, max_epochs=-1).fit(TinyGPT(2).double(), loader("tiny_gpt", 48))
    assert technique.report() == {"width": 1.0}


# -- what it costs, and what a checkpoint of mid-growth is


class Modes(pl.Callback):
    """Whether gradients and optimizer state of absent blocks and units exist."""

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        net = pl_module
        technique = next(c for c in trainer.callbacks if isinstance(c, CompoundGrowth))  # pyright: ignore[reportAttributeAccessIssue]
        if trainer.global_step != 2:
            return
        state = trainer.optimizers[0].state
        for index, block in enumerate(net.blocks):
            for p in block.parameters():
                if index:
                    assert p.grad is None and p not in state
        assert technique._width is not None
        p = dict(net.named_parameters())
        for part in technique._width.ffns[0].parts:
            assert p[part.name].shape[part.dim] == 64 and state[p[part.name]]["exp_avg"].shape[part.dim] == 16
            assert not p[part.name].grad.narrow(part.dim, 16, 48).any()


def growing() -> CompoundGrowth:
    return CompoundGrowth(depth=WIDTH, width=WIDTH, length=[(0.0, 0.5), (0.5, 1.0)])


def test_resumed_in_mid_growth_it_ends_as_undisturbed(tmp_path: Path) -> None:
    whole = final_state(*fit("tiny_gpt", lambda: [growing()], directory=tmp_path, callbacks=[Modes()]))
    saved = checkpoints(tmp_path)
    for step in (2, 4):
        again = final_state(*fit("tiny_gpt", lambda: [growing()], resume=saved[step]))
        assert whole.keys() == again.keys()
        assert all(torch.equal(value, again[key]) for key, value in whole.items())
    state = torch.load(saved[4], weights_only=True)
    module("tiny_gpt").load_state_dict(state["state_dict"])
    note = next(value["note"] for key, value in state["callbacks"].items() if "CompoundGrowth" in key)
    assert note.startswith("CompoundGrowth: only the first 2 of the 4 blocks")


def test_sequences_are_short_and_then_whole() -> None:
    lengths: list[int] = []

    class Net(TinyGPT):
        def forward(self, ids: Tensor) -> Tensor:
            lengths.append(ids.shape[1])
            return super().forward(ids)

    technique = CompoundGrowth(depth=None, width=None, length=[(0.0, 0.25), (0.5, 1.0)])
    trainer(technique, max_steps=4).fit(Net(), loader("tiny_gpt", 16))
    assert lengths == [8, 8, 32, 32]
    assert technique.summary() == "0.25 of the length"


# -- what it cannot grow


@pytest.mark.parametrize(
    ("build", "data", "arguments", "told"),
    [
        (ResNet, features, {}, "no feed-forward network.*so it is not a plain linear layer"),
        (mixtral, lambda: loader("llama", 24), {}, r"no feed-forward network.*(expert|not a plain linear layer)"),
        (
            Encoder,
            features,
            {"width": [(0.0, 1 / 3), (0.5, 1.0)]},
            r"not whole numbers.*begin with: 1/2, 1/4, 1/8",
        ),
        (
            Encoder,
            features,
            {"ffn": [["layers.*.linear1", "layers.*.linear3"]]},
            "are not all linear layers.*layers.0.linear2.weight",
        ),
        (Encoder, features, {"ffn": [["layers.*.linear2", "head"]]}, "are not all linear layers|do not fit together"),
        (Encoder, features, {"depth": [(0.0, 0.3), (0.5, 1.0)]}, "not whole numbers. Use fractions such as 1/2"),
        (lambda: of(lambda: Bypassed()), features, {}, "uses layers.0.fc1.bias.*without calling the modules"),
        (
            lambda: of(lambda: Shuffled()),
            features,
            {"ffn": [["layers.*.fc1", "layers.*.fc2"]]},
            "repeating hidden units changes the values of",
        ),
    ],
)
def test_what_cannot_grow_is_told_before_any_weight_changes(build: Any, data: Any, arguments: Any, told: str) -> None:
    net = build()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with pytest.raises(ValueError, match=f"(?s)CompoundGrowth.*{told}"):
        trainer(CompoundGrowth(**{"depth": None, **arguments}), max_steps=2).fit(net, data())
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


class Bypassed(nn.Module):
    """A network whose maps are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(F.linear(x, self.fc1.weight, self.fc1.bias).relu(), self.fc2.weight)


class Shuffled(Bypassed):
    """A network that mixes its hidden units."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.fc1(x).cumsum(-1))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            {"width": [(0.0, 0.5), (0.5, 1.5)]},
            r"pairs \(fraction of the budget in \[0, 1\), fraction of the .* in \(0, 1\]\), both growing, .*\[\(0.0, 0.5\), ",
        ),
        (
            {"width": [(0.0, 0.5), (0.5, 0.75)]},
            "0.5 cannot grow to 0.75, because hidden units are repeated and 1.5 is no",
        ),
        (
            {"depth": [(0.0, 2), (0.5, 4)]},
            r"pairs \(fraction of the budget in \[0, 1\), fraction of the .* in \(0, 1\]\), both growing, .*\[\(0.0, 0.5\), ",
        ),
        ({"depth": [(0.1, 0.5)]}, r"depth=\[\(0.1, 0.5\)\]\): expected pairs .*with 0 as the first fraction"),
        ({"length": [(0.0, 0.5), (0.5, 0.25)]}, r"length=\[.*\]\): expected pairs .*, both growing"),
        ({"length": "all"}, r"length='all'\): expected pairs .*, or None"),
        ({"noise": -1}, "noise=-1"),
        ({"mode": "pool"}, "expected 'reshape'"),
        ({"keys": "ids"}, "keys='ids'.: expected a list of names or positions in the batch, or None"),
        ({"ffn": [["one"]]}, "at least two names"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=f"CompoundGrowth.*{told}"):
        CompoundGrowth(**arguments)


def test_controls_are_the_small_models_throughout() -> None:
    technique = CompoundGrowth(depth=[(0.0, 0.5), (0.3, 1.0)], width=[(0.0, 0.25), (0.5, 1.0)])
    arms = CompoundGrowth.control.arms(technique)
    assert list(arms) == [
        "0.5 of the depth, 0.25 of the width throughout",
        "1 of the depth, 0.25 of the width throughout",
    ]
    for arm in arms.values():
        assert CompoundGrowth.control.arms(arm) == {}
        assert not arm.neutral  # pyright: ignore[reportAttributeAccessIssue]


def test_blocks_with_more_parameters_than_their_source_begin_these_as_they_were_made() -> None:
    """ModernBERT's first block has no norm before its attention; the other way round it is told."""
    blocks = [nn.Linear(4, 4, bias=i > 0) for i in range(4)]
    stack: Any = SimpleNamespace(blocks=blocks)
    assert copied(stack, [1, 2, 4], who="Here") == [1, 2, 4]
    blocks[1], blocks[2] = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    assert copied(stack, [1, 4], who="Here") == [1, 4]
    with pytest.raises(ValueError, match=r"Here: block 3 .+ cannot copy block 1, .+ buffers differ at \['bias'\]"):
        blocks[3] = nn.Linear(4, 4, bias=False)
        copied(stack, [2, 4], who="Here")
