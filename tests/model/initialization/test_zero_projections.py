"""ZeroProjections: blocks that begin as their skips, and a first loss of log C."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff import ZeroProjections
from lightning_eff._core._branches.finding import branches, heads
from lightning_eff._core._branches.graph import Graph
from lightning_eff.model.initialization.zero_projections import scaled
from tests.cases import Case, classifier
from tests.models import VOCAB, TinyGPT, flat, hugging_face, loader, make_batch, module, trainer
from tests.runs import fit_yaml

CASES = {
    "ZeroProjections": Case(
        active=lambda: ZeroProjections(),
        neutral=lambda: ZeroProjections(scale=1.0),
        lost=(classifier, "classifier", "found no residual branch"),
    )
}


class Images(pl.LightningModule):
    """A network on images of three classes, trained by SGD."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Basic(nn.Module):
    """A residual block of two convolutions, with a projection where it halves the side."""

    def __init__(self, channels: int, out: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        stride = out // channels
        self.one, self.two = nn.Conv2d(channels, out, 3, stride, 1), nn.Conv2d(out, out, 3, 1, 1)
        self.norm1, self.norm2 = norm(out), norm(out)
        self.skip = nn.Identity() if stride == 1 else nn.Sequential(nn.Conv2d(channels, out, 1, stride), norm(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.skip(x) + self.norm2(self.two(F.relu(self.norm1(self.one(x))))))


def resnet(norm: Callable[[int], nn.Module]) -> Images:
    stem = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), norm(4), nn.ReLU())
    blocks = [Basic(4, 4, norm), Basic(4, 8, norm), Basic(8, 8, norm)]
    return Images(nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)))


class Experts(nn.Module):
    """Two experts, of which each token takes what a router says."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, 2)
        self.up, self.down = nn.Parameter(torch.randn(2, dim, 8)), nn.Parameter(torch.randn(2, 8, dim))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(torch.einsum("btd,edf->ebtf", x, self.up))
        return torch.einsum("ebtf,efd,bte->btd", inner, self.down, self.router(x).softmax(-1))


class Encoder(pl.LightningModule):
    """PyTorch's own encoder layers, post-norm, with a head that is a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.tell = nn.Linear(16, VOCAB)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.tell(self.encoder(self.embed(batch["input_ids"])))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def images() -> Any:
    g = torch.Generator().manual_seed(0)
    return torch.randn(4, 3, 8, 8, generator=g), torch.tensor([0, 1, 2, 0])


def tokens() -> dict[str, Tensor]:
    return make_batch("tiny_gpt")


def with_experts() -> TinyGPT:
    gpt = TinyGPT(2, dropout=0.0)
    assert gpt.blocks is not None
    for block in gpt.blocks:
        block.mlp = Experts(16)  # pyright: ignore[reportArgumentType]
    return gpt


# By name: the module, a batch, its blocks that begin as their skips, and its classes.
NETWORKS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str, int]] = {
    "hand-written": (lambda: TinyGPT(3, dropout=0.1), tokens, "blocks", VOCAB),
    "experts": (with_experts, tokens, "blocks", VOCAB),
    "llama": (lambda: hugging_face("llama", 2), lambda: make_batch("llama"), "model.model.layers", VOCAB),
    "vit": (lambda: hugging_face("vit", 2), lambda: make_batch("vit"), "model.vit.layers", 5),
    "norms": (lambda: resnet(nn.BatchNorm2d), images, "", 3),
    "no norms": (lambda: resnet(lambda _: nn.Identity()), images, "", 3),
}


def first_step(build: Any, batch: Any, **settings: Any) -> tuple[Any, float]:
    """The module after the technique has acted and before anything has moved, and its first loss in training."""
    torch.manual_seed(0)
    m, losses = build(), list[float]()
    step = m.training_step

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        loss = step(batch, batch_idx)
        losses.append(loss.item())
        return loss

    m.training_step = training_step
    m.configure_optimizers = lambda: torch.optim.SGD(m.parameters(), 0.0)
    data: DataLoader[Any] = DataLoader([batch], batch_size=None)  # pyright: ignore[reportArgumentType]
    trainer(ZeroProjections(**settings), max_steps=1).fit(m, data)
    return m, losses[-1]


@pytest.mark.parametrize("name", NETWORKS)
def test_blocks_begin_as_their_skips_and_the_loss_as_log_c(name: str) -> None:
    build, batch, path, classes = NETWORKS[name]
    m, loss = first_step(build, batch())
    assert loss == pytest.approx(math.log(classes), rel=1e-6)
    m.eval()
    seen: list[tuple[Tensor, Tensor]] = []
    blocks = [*m.get_submodule(path)] if path else [b for b in m.network if isinstance(b, Basic)]
    for block in blocks:

        def note(block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            skip = args[0] if path else F.relu(block.skip(args[0]))  # pyright: ignore[reportCallIssue]
            seen.append((skip, output[0] if isinstance(output, tuple) else output))

        block.register_forward_hook(note)
    m.log = lambda *args: None
    m.training_step(batch(), 0)
    assert len(seen) == len(blocks) > 1
    for skip, output in seen:
        assert skip.abs().sum() > 0
        torch.testing.assert_close(output, skip, rtol=0, atol=0)


def test_every_post_norm_block_begins_as_its_norms() -> None:
    m, loss = first_step(Encoder, tokens())
    assert loss == pytest.approx(math.log(VOCAB), rel=1e-6)
    for layer in m.encoder.layers:
        x = torch.randn(2, 5, 16)
        torch.testing.assert_close(layer.eval()(x), layer.norm2(layer.norm1(x)))


def test_a_tied_head_keeps_the_embedding(capsys: pytest.CaptureFixture[str]) -> None:
    build = lambda: hugging_face("gpt2", 2)  # noqa: E731
    torch.manual_seed(0)
    plain = build().state_dict()
    m, _ = first_step(build, make_batch("gpt2"))
    changed = {name for name, value in m.state_dict().items() if not torch.equal(value, plain[name])}
    assert changed == {f"model.transformer.h.{i}.{part}.c_proj.weight" for i in range(2) for part in ("attn", "mlp")}


def test_a_scale_of_the_last_maps_and_no_head() -> None:
    torch.manual_seed(0)
    plain = TinyGPT(2).state_dict()
    m, _ = first_step(lambda: TinyGPT(2), tokens(), scale=0.25, head=False)
    last = ("proj.weight", "proj.bias", "mlp.2.weight", "mlp.2.bias")
    for name, value in m.state_dict().items():
        torch.testing.assert_close(value, plain[name] * (0.25 if name.endswith(last) else 1), rtol=0, atol=0)


def test_what_is_not_finite_becomes_zero() -> None:
    tensor = torch.tensor([math.nan, math.inf, 1.0])
    assert scaled([tensor], 0.0) == 3 and not tensor.any()


def found(m: Any, batch: Any) -> Graph:
    m.log = lambda *args: None
    m.eval()
    return Graph(m.training_step(batch, 0), m)


def test_what_the_graph_tells_of_a_branch() -> None:
    graph = found(TinyGPT(2), tokens())
    first, second, *_ = branches(graph)
    assert [end.weight for end in first.last] == ["blocks.0.proj.weight"]
    parts = [f"blocks.0.{part}" for part in ("norm1", "qkv", "norm2", "mlp.0")]
    names = [f"{part}.{name}" for part in parts for name in ("weight", "bias")]
    assert {*first.inner[:2]} == {*names[:2]} and {*first.inner[2:]} == {*names[2:4]}
    assert {*second.inner[:2]} == {*names[4:6]} and {*second.inner[2:]} == {*names[6:]}
    assert heads(graph) == ["head.weight"]


class ValueResidual(nn.Module):
    """Attention whose later blocks add the first block's values to their own, which is no residual branch."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first: Tensor | None = None
        self.q, self.v, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        v = self.v(x)
        mixed = v if first is None else v + 0.5 * first
        return x + self.out(F.scaled_dot_product_attention(self.q(x), self.q(x), mixed)), v if first is None else first


def test_values_that_are_added_to_values_are_no_stream() -> None:
    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = nn.Embedding(VOCAB, 16), nn.ModuleList(ValueResidual(16) for _ in range(3))
            self.head = nn.Linear(16, VOCAB)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, first = self.embed(batch["input_ids"]), None
            for block in self.blocks:
                x, first = block(x, first)
            return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())

    last = [end.weight for branch in branches(found(Module(), tokens())) for end in branch.last]
    assert last == [f"blocks.{i}.out.weight" for i in range(3)]


class Residual(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


def test_a_branch_on_a_maps_own_output_is_found() -> None:
    """The first block's stream is what the stem returns, with no norm or activation between."""
    net = Images(nn.Sequential(nn.Linear(4, 8), Residual(8), Residual(8), nn.Linear(8, 3)))
    batch = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    last = [end.weight for branch in branches(Graph(net.training_step(batch, 0), net)) for end in branch.last]
    assert last == ["network.1.down.weight", "network.2.down.weight"]


class Switch(nn.Module):
    """Experts in a list, of which all tokens take the first."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 16)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x)


def test_experts_that_the_first_batch_left_aside_begin_at_zero_too() -> None:
    def build() -> TinyGPT:
        gpt = TinyGPT(2)
        assert gpt.blocks is not None
        for block in gpt.blocks:
            block.mlp = Switch()  # pyright: ignore[reportArgumentType]
        return gpt

    m, _ = first_step(build, tokens())
    for block in m.blocks:
        for expert in block.mlp.experts:
            assert not expert[2].weight.any() and not expert[2].bias.any() and expert[0].weight.any()


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None.")
def test_a_batch_that_the_step_passes_over_leaves_it_to_the_next() -> None:
    m, ours = TinyGPT(2), ZeroProjections()
    step, numbers = m.training_step, list[Any]()

    def training_step(batch: Any, batch_idx: int) -> Any:
        numbers.append(ours.report()["numbers"])
        return step(batch, batch_idx) if batch_idx else None

    m.training_step = training_step
    trainer(ours, max_steps=2).fit(m, loader("tiny_gpt"))
    assert numbers[1] == 0 and numbers[-1] > 0  # a pass to look, and the step; the same of the second batch


@pytest.mark.slow
def test_branches_of_model_families_are_found() -> None:
    from tests import families

    parallel = {"phi", "gpt_neox", "mamba"}  # attention and MLP in one sum; one mixer a block
    for name, family in families.FAMILIES.items():
        m = families.module(name)
        every = branches(found(m, families.batch(name, 2)))
        per_block = 1 if name in parallel else 2
        expected = {"bart": 16, "mbart": 16, "marian": 16, "pegasus": 16, "m2m_100": 16, "t5": 16, "resnet": 6}
        assert len(every) == expected.get(name, 4 * per_block), (name, family.kind, every)
        assert all(branch.inner for branch in every), name


def test_weights_that_were_loaded_or_trained_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrained = hugging_face("gpt2", 2)
    pretrained.model.config._name_or_path = "some/checkpoint"
    with pytest.raises(ValueError, match=r"model was loaded from 'some/checkpoint'.*force=True"):
        trainer(ZeroProjections(), max_steps=1).fit(pretrained, loader("gpt2"))
    trainer(ZeroProjections(force=True), max_steps=1).fit(pretrained, loader("gpt2"))

    m = module("tiny_gpt")
    plain = trainer(max_steps=2)
    plain.fit(m, loader("tiny_gpt"))
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    resumed = ZeroProjections()
    trainer(resumed, max_steps=3).fit(module("tiny_gpt"), loader("tiny_gpt"), ckpt_path=tmp_path / "plain.ckpt")
    assert resumed.report() == {"numbers": 0}

    trainer(ZeroProjections(), max_steps=2).fit(m, loader("tiny_gpt"))
    before, again = flat(m), ZeroProjections()
    m.configure_optimizers = lambda: torch.optim.SGD(m.parameters(), 0.0)
    trainer(again, max_steps=1).fit(m, loader("tiny_gpt"))
    assert torch.equal(flat(m), before) and again.report() == {"numbers": 0}


class Plus(pl.LightningModule):
    """Two residual branches; a norm behind each last map has a weight to which 1 is added."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.maps, self.gain = nn.ModuleList(nn.Linear(16, 16) for _ in range(2)), nn.Parameter(torch.zeros(16))
        self.tied = tied

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch["input_ids"])
        for m in self.maps:
            y = m(x)
            if not self.tied:
                y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.gain)
            x = x + y
        if self.tied:
            x = torch.tanh(self.maps[0](x))
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(
    ("tied", "message"),
    [(False, "a norm after maps.0.weight"), (True, "maps.0.weight .* is used elsewhere too .Addmm")],
)
def test_branches_that_cannot_be_made_zero_are_refused(tied: bool, message: str) -> None:
    m = Plus(tied)
    before = flat(m).clone()
    with pytest.raises(ValueError, match=message):
        trainer(ZeroProjections(), max_steps=1).fit(m, loader("tiny_gpt"))
    assert torch.equal(flat(m), before)


@pytest.mark.parametrize("scale", [-0.1, 1.5, math.nan])
def test_bad_scales_are_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=rf"scale={scale}\): expected a number in \[0, 1\]"):
        ZeroProjections(scale=scale)


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_yaml(tmp_path, "ZeroProjections", {"head": False}, model="TinyGPT", data="Sequences", max_steps=2)
    assert "numbers by 0" in capsys.readouterr().out
