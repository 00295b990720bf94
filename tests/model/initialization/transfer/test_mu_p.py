"""MuP: initial sizes, learning rates and weights are those of the paper's tables, and activations change alike at any width."""

import copy
import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_eff import Muon as OurMuon
from lightning_eff import MuP, ReplaceOptimizer
from lightning_eff.model.initialization.transfer._rules import Role, own_scale, rate_factor
from lightning_eff.model.initialization.transfer._widths import roles_of
from tests.cases import Case
from tests.models import VOCAB, HuggingFace, TinyClassifier, TinyGPT, trainer

OTHER = "differ in the parameters"
CASES = {
    "MuP": Case(
        active=lambda: MuP(partial(TinyGPT, dim=8), attention="keep"),
        neutral=lambda: MuP(None),
        own_optimizer=True,
        refuses=dict.fromkeys(
            ("gpt2", "llama", "bert", "vit", "translator", "classifier", "convolved", "normed"), OTHER
        ),
        lost=(TinyClassifier, "classifier", OTHER),
    )
}
STEPS, R = 3, 4  # steps, and how many times as wide as the base


class MLP(pl.LightningModule):
    def __init__(self, width: int, optimizer: Callable[[Any], torch.optim.Optimizer] | None = None) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.first, self.inner, self.last = nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 3)

    def hidden(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.hidden(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.optimizer is not None
        return self.optimizer(self.parameters())


def samples(seed: int = 1) -> DataLoader[Any]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * STEPS, 8, generator=g, dtype=torch.float64)
    return DataLoader(TensorDataset(x, torch.arange(4 * STEPS) % 3), 4)


#: Table 3 of the paper relative to the base, for an MLP R times as wide: of each parameter the first standard deviation, the
#: learning rate of Adam, and the learning rate of SGD.
TABLE_3 = {
    "first.weight": (1.0, 1.0, R),
    "first.bias": (1.0, 1.0, R),
    "inner.weight": (R**-0.5, 1 / R, 1.0),
    "inner.bias": (1.0, 1.0, R),
    "last.weight": (1 / R, 1 / R, 1 / R),
    "last.bias": (None, 1.0, 1.0),  # of the same shape
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.3),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "decayed SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_mlp_trains_as_by_the_table_of_the_paper(name: str) -> None:
    make = OPTIMIZERS[name]
    torch.manual_seed(0)
    base, wide = MLP(16).double(), MLP(16 * R, make).double()
    net = copy.deepcopy(wide)
    t = trainer(MuP(base), max_epochs=1, precision="64-true")
    t.fit(wide, samples())
    assert t.global_step == STEPS

    narrow, groups = dict(base.named_parameters()), list[dict[str, Any]]()
    for path, p in net.named_parameters():
        std, adam, sgd = TABLE_3[path]
        if std is not None:
            with torch.no_grad():
                p.mul_(std * (narrow[path] ** 2).mean().sqrt() / (p**2).mean().sqrt())
        factor = sgd if "SGD" in name else adam
        asked = make([p]).param_groups[0]
        groups.append({**asked, "lr": asked["lr"] * factor, "weight_decay": asked["weight_decay"] / factor})
    optimizer = make(groups)
    for x, y in samples():
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    for path, p in net.named_parameters():
        assert (wide.get_parameter(path) - p).abs().max() < 1e-12, path


class Small(pl.LightningModule):
    """A Transformer with a tied head and separate queries, whose attention heads are as wide as it is.

    Args:
        scores, logits: multipliers in the forward pass, 1 for a plain model.
    """

    def __init__(self, width: int, scores: float = 1.0, logits: float = 1.0) -> None:
        super().__init__()
        self.scores, self.logits, self.width = scores, logits, width
        self.embed, self.position = nn.Embedding(7, width), nn.Parameter(torch.randn(5, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=i != 1) for i in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.make: Callable[[Any], torch.optim.Optimizer] = torch.optim.SGD

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position[: ids.shape[1]]
        y = self.norms[0](x)
        q = self.scores * self.q(y)
        x = x + self.o(F.scaled_dot_product_attention(q[:, None], self.k(y)[:, None], self.v(y)[:, None])[:, 0])
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return self.logits * self.head(self.norms[2](x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters())


def texts() -> DataLoader[Any]:
    ids = torch.randint(7, (4 * STEPS, 6), generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:]), 4)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_transformer_trains_as_with_the_multipliers_of_table_8(name: Literal["AdamW", "SGD"]) -> None:
    make = {
        "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, eps=1e-300),  # eps has a scale of its own
        "SGD": partial(torch.optim.SGD, lr=0.02),
    }[name]
    torch.manual_seed(0)
    base, wide = Small(8).double(), Small(8 * R).double()
    wide.make = make
    net = Small(8 * R, scores=(8 / (8 * R)) ** 0.5, logits=1 / R).double()
    net.load_state_dict(wide.state_dict())
    trainer(MuP(base), max_epochs=1, precision="64-true").fit(wide, texts())

    narrow, groups = dict(base.named_parameters()), list[dict[str, Any]]()
    for path, p in net.named_parameters():
        hidden = p.ndim == 2 and path not in ("embed.weight", "position")
        with torch.no_grad():
            was = (p**2).mean().sqrt()
            if was:
                p.mul_((R**-0.5 if hidden else 1.0) * (narrow[path] ** 2).mean().sqrt() / was)
        factor = {"AdamW": 1 / R if hidden else 1.0, "SGD": 1.0 if hidden else R}[name]
        asked = make([p]).param_groups[0]
        groups.append({**asked, "lr": asked["lr"] * factor, "weight_decay": asked["weight_decay"] / factor})
    optimizer = make(groups)
    for ids, labels in texts():
        optimizer.zero_grad()
        F.cross_entropy(net(ids).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
    ids = torch.arange(5)[None]
    assert (net(ids) - wide(ids)).abs().max() < 1e-11
    for path, p in net.named_parameters():
        factor = 1 / R if path.startswith("norms.2") else R**-0.5 if path.startswith("q.") else 1.0
        assert (wide.get_parameter(path) - factor * p).abs().max() < 1e-12, path


def change(width: int, *techniques: pl.Callback) -> float:
    """How far hidden activations of an MLP move in four steps of Adam, as a root mean square."""
    torch.manual_seed(3)
    net = MLP(width, partial(torch.optim.Adam, lr=0.02))
    probe = torch.randn(16, 8, generator=torch.Generator().manual_seed(4))
    first = _Before(probe)
    data = DataLoader(TensorDataset(probe, torch.arange(16) % 3), 4)
    trainer(*techniques, first, max_epochs=1).fit(net, data)
    return float((net.hidden(probe) - first.hidden).detach().square().mean().sqrt())


class _Before(pl.Callback):
    """Keeps the activations before the first step, but after MuP has set the weights."""

    def __init__(self, probe: Tensor) -> None:
        self.probe = probe

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 0:
            self.hidden = pl_module.hidden(self.probe).detach()


def test_activations_change_alike_at_all_widths() -> None:
    widths = (32, 64, 128, 256)
    plain = [change(width) for width in widths]
    ours = [change(width, MuP(partial(MLP, 32))) for width in widths]
    assert plain[0] == ours[0]  # the base itself
    assert plain[-1] > 4 * plain[0]
    assert all(later > earlier for earlier, later in itertools.pairwise(plain))
    assert max(ours) < 1.5 * min(ours)


def test_a_base_of_the_same_shape_changes_no_bit() -> None:
    nets = []
    for techniques in ([], [MuP(partial(MLP, 16))]):
        torch.manual_seed(0)
        net = MLP(16, OPTIMIZERS["AdamW"]).double()
        t = trainer(*techniques, max_epochs=1, precision="64-true")
        t.fit(net, samples())
        assert len(t.optimizers[0].param_groups) == 1
        nets.append(net)
    for a, b in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(a, b)


def test_a_second_fit_does_not_rescale_again() -> None:
    net = MLP(32, partial(torch.optim.AdamW, lr=0.0)).double()
    started = net.inner.weight.detach().clone()
    trainer(MuP(partial(MLP, 16)), max_epochs=1, precision="64-true").fit(net, samples())
    once = net.inner.weight.detach().clone()
    assert not torch.equal(started, once)
    t = trainer(MuP(partial(MLP, 16)), max_epochs=1, precision="64-true")
    t.fit(net, samples())
    assert torch.equal(net.inner.weight, once)
    assert len(t.optimizers[0].param_groups) == 2  # the learning rates still follow the rule


def test_the_base_is_built_without_a_trace_in_the_random_state() -> None:
    states = []
    for techniques in ([], [MuP(partial(MLP, 16))]):
        net = MLP(32, OPTIMIZERS["AdamW"]).double()
        torch.manual_seed(5)
        trainer(*techniques, max_epochs=1, precision="64-true").fit(net, samples())
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_schedulers_and_muon_keep_the_multiples() -> None:
    class Scheduled(TinyGPT):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    muon = ReplaceOptimizer("muon", lr=0.2, scale="match_rms_adamw")
    for techniques in (
        [MuP(partial(Scheduled, dim=8), attention="keep"), muon],
        [muon, MuP(partial(Scheduled, dim=8), attention="keep")],
    ):
        net = Scheduled()
        t = trainer(*techniques, max_epochs=2)
        ids = torch.randint(VOCAB, (8, 12))
        rows = [{"input_ids": row, "labels": row} for row in ids]
        t.fit(net, DataLoader(rows, 4))  # pyright: ignore[reportArgumentType]
        rates = {
            id(p): group["lr"]
            for optimizer in t.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        assert rates[id(net.embed.weight)] == pytest.approx(0.1 / 4)
        assert rates[id(net.head.weight)] == pytest.approx(0.1 / 4 / 2)
        assert rates[id(net.get_parameter("blocks.0.proj.weight"))] == pytest.approx(0.2 / 4 / math.sqrt(2))


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.Muon, adjust_lr_fn="original"),
        partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw"),
        partial(OurMuon, scale="spectral", dtype="float32"),
        partial(OurMuon, scale="match_rms_adamw", dtype="float32"),
    ],
    ids=["torch original", "torch match", "spectral", "match"],
)
@pytest.mark.parametrize("sizes", [((96, 32), (24, 8)), ((32, 96), (8, 8)), ((64, 16), (16, 16))], ids=str)
def test_updates_of_muon_grow_as_the_spectral_condition_says(make: Any, sizes: Any) -> None:
    """Updates of both shapes, each as a multiple of sqrt(out / in), are alike."""
    norms = []
    role = Role("hidden", (sizes[0][1], sizes[1][1]), (sizes[0][0], sizes[1][0]))
    for shape in sizes:
        p = nn.Parameter(torch.zeros(shape))
        optimizer = make([p], lr=1.0, weight_decay=0.0)
        p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        group = optimizer.param_groups[0]
        if shape == sizes[0]:
            group["lr"] = rate_factor(role, "spectral") / own_scale(group, role, *sizes)
        optimizer.step()
        norms.append(float(torch.linalg.matrix_norm(p.detach(), 2)) / math.sqrt(shape[0] / shape[1]))
    assert norms[0] == pytest.approx(norms[1], rel=0.25)  # the iteration is coarse


def gpt2(width: int) -> HuggingFace:
    config = GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=width, n_layer=2, n_head=width // 16)
    return HuggingFace(GPT2LMHeadModel(config))


def test_roles_follow_from_what_layers_do() -> None:
    roles = roles_of(gpt2(64), gpt2(32), who="MuP")
    block = "model.transformer.h.0"
    assert roles[f"{block}.attn.c_attn.weight"] == Role("hidden", (64, 32), (192, 96))  # of shape (in, out)
    assert roles[f"{block}.mlp.c_proj.weight"] == Role("hidden", (256, 128), (64, 32))
    assert roles[f"{block}.ln_1.weight"] == Role("input", (1, 1), (64, 32))
    assert roles["model.transformer.wte.weight"] == Role("input", (1, 1), (64, 32))
    assert roles["model.transformer.ln_f.weight"].multiplier == roles["model.transformer.ln_f.bias"].multiplier == 0.5

    def convolutions(n: int) -> nn.Module:
        inner = [nn.Conv2d(3, n, 3), nn.Conv2d(n, n, 3, groups=n), nn.Conv2d(n, 2 * n, 3, groups=2)]
        return nn.Sequential(
            *inner,
            nn.ConvTranspose2d(2 * n, n, 3, groups=2),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(n * 4, 3),
        )

    roles = roles_of(convolutions(8), convolutions(4), who="MuP")
    assert roles["0.weight"] == Role("input", (3, 3), (8, 4))
    assert roles["1.weight"] == Role("input", (1, 1), (8, 4))
    assert roles["2.weight"] == Role("hidden", (4, 2), (16, 8))
    assert roles["3.weight"] == Role("hidden", (8, 4), (8, 4))
    assert roles["6.weight"] == Role("output", (32, 16), (3, 3))


class Dotted(nn.Module):
    """A head that is a vector, and weights of experts in one parameter of shape (experts, in, out)."""

    def __init__(self, width: int, experts: int = 2) -> None:
        super().__init__()
        self.first, self.vector = nn.Linear(3, width), nn.Parameter(torch.randn(width))
        self.experts = nn.Parameter(torch.randn(experts, width, 2 * width))
        self.back = nn.Parameter(torch.randn(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.bmm(self.first(x).expand(self.experts.shape[0], -1, -1), self.experts).sum(0)
        return (y @ self.back) @ self.vector


def test_roles_of_parameters_outside_of_layers() -> None:
    roles = roles_of(Dotted(8), Dotted(4), who="MuP")
    assert roles["vector"] == Role("output", (8, 4), (1, 1))
    assert roles["experts"] == Role("hidden", (8, 4), (16, 8))
    assert roles["back"] == Role("hidden", (16, 8), (8, 4))
    with pytest.raises(ValueError, match=r"differ in dimension 0. It is neither the inputs nor the outputs"):
        roles_of(Dotted(8, 3), Dotted(4), who="MuP")


class Bare(Small):
    """A tied head without a norm before it."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.down(self.up(self.embed(ids) + self.position[: ids.shape[1]])))


class Unseen(Small):
    """A tied head that only ``training_step`` uses."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.norms[0](self.embed(ids))


def rows(width: int, count: int) -> MLP:
    net = MLP(width)
    net.table = nn.Embedding(count, width)
    return net


REFUSALS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "another depth": (lambda: TinyGPT(3), lambda: TinyGPT(4, 8), OTHER),
    "fused queries": (
        lambda: TinyGPT(),
        lambda: TinyGPT(dim=8),
        "heads are 8 wide, and 4 in the base.*no layer computes",
    ),
    "a tied head": (lambda: Bare(16), lambda: Bare(8), "is an embedding and also the weight of a head"),
    "an unseen head": (lambda: Unseen(16), lambda: Unseen(8), "which a forward pass on made-up inputs does not use"),
    "a vocabulary": (lambda: rows(16, 5), lambda: rows(8, 4), "has the shape"),
    "rows": (lambda: rows(16, 5), lambda: rows(16, 4), "table.weight has 5 rows, and 4 in the base"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_bases(name: str) -> None:
    wide, narrow, message = REFUSALS[name]
    with pytest.raises(ValueError, match=message):
        roles_of(wide(), narrow(), who="MuP")


def test_refused_arguments_and_runs(tmp_path: Path) -> None:
    for wrong in (3, {"class": "MLP"}, {"class_path": "a.B", "dim": 3}):
        with pytest.raises(
            ValueError, match=r"MuP\(base=.*expected a module, a function that builds one, or a mapping"
        ):
            MuP(wrong)  # pyright: ignore[reportArgumentType]

    def fit(base: Any, optimizer: Any = OPTIMIZERS["AdamW"], width: int = 32, **settings: Any) -> None:
        net = MLP(width, optimizer).double()
        trainer(MuP(base, **settings), max_epochs=1, precision="64-true").fit(net, samples())

    with pytest.raises(ValueError, match="no class is found there"):
        fit({"class_path": "nowhere.Net"})
    with pytest.raises(ValueError, match=r"it builds a int; expected an nn.Module"):
        fit(lambda: 3)
    with pytest.raises(ValueError, match=r"Adadelta trains first.weight, and how its updates grow .* is not known"):
        fit(partial(MLP, 16), torch.optim.Adadelta)
    fit(partial(MLP, 16), torch.optim.Adadelta, rule="adam")
    with pytest.raises(ValueError, match=r"first.bias, which is not the weight of a linear layer"):
        fit(partial(MLP, 16), rule="spectral")
    started = MLP(16)
    torch.nn.init.zeros_(started.inner.weight)
    fit(started)
    wide = MLP(32, OPTIMIZERS["AdamW"]).double()
    torch.nn.init.zeros_(wide.inner.weight)
    with pytest.raises(ValueError, match=r"inner.weight starts at zero, but its root mean square"):
        trainer(MuP(partial(MLP, 16)), max_epochs=1, precision="64-true").fit(wide, samples())


def test_a_trained_base_and_a_checkpoint_without_it_are_refused(tmp_path: Path) -> None:
    base = TinyGPT(dim=8)
    torch.nn.init.uniform_(base.norm.weight)
    ids = torch.randint(VOCAB, (4, 12))
    data: Any = DataLoader([{"input_ids": row, "labels": row} for row in ids], 4)
    with pytest.raises(ValueError, match=r"norm, of LayerNorm, has scales that differ.*it must be freshly built"):
        trainer(MuP(base, attention="keep"), max_steps=1).fit(TinyGPT(), data)
    net, plain = MLP(32, OPTIMIZERS["AdamW"]).double(), trainer(max_epochs=1, precision="64-true")
    plain.fit(net, samples())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    again = trainer(MuP(partial(MLP, 16)), max_epochs=2, precision="64-true")
    with pytest.raises(ValueError, match="the checkpoint was saved without it"):
        again.fit(
            MLP(32, OPTIMIZERS["AdamW"]).double(), samples(), ckpt_path=tmp_path / "plain.ckpt", weights_only=False
        )


def test_a_base_in_a_config_is_built_from_its_class_path() -> None:
    base = {"class_path": "tests.model.initialization.transfer.test_mu_p.MLP", "init_args": {"width": 16}}
    net = MLP(32, OPTIMIZERS["AdamW"]).double()
    t = trainer(MuP(base), max_epochs=1, precision="64-true")
    t.fit(net, samples())
    assert sorted(group["lr"] for group in t.optimizers[0].param_groups) == [0.005, 0.01]
