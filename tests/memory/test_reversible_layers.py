"""Two streams: losses and gradients are those of the same network by plain autograd, and memory does not grow with depth."""

import copy
import gc
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

import lightning_eff as eff
from lightning_eff import Rematerialization, ReversibleLayers
from lightning_eff._core.steps import looking_on
from lightning_eff.memory._reversible.streams import Streams
from tests.cases import ALL, Case, classifier
from tests.models import Block, TinyGPT, flat, make_batch, module, trainer
from tests.runs import checkpoints, fit

ONE = r"block 0 \(BertLayer\) computes one residual sum; expected h = x \+ F\(x\), then h \+ G\(h\) as its output"
NONE = r"block 0 \(Sequential\) computes no residual sum"
CASES = {
    "ReversibleLayers": Case(
        active=lambda: ReversibleLayers(),
        neutral=lambda: ReversibleLayers([]),
        architecture=True,
        stays="ReversibleLayers replaced .* at .*: no plain block computes two streams",
        refuses={"bert": ONE, "classifier": NONE},
        lost=(classifier, "classifier", NONE),
    )
}


def two_streams(net: TinyGPT, ids: Tensor) -> Tensor:
    """The network of the papers, written out: F is attention, G the MLP, and the output is the streams' mean."""
    first = second = net.embed(ids) + net.position.weight[: ids.shape[1]]
    for block in net.blocks or ():
        assert isinstance(block, Block)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in block.qkv(block.norm1(second)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        first = first + block.drop(block.proj(attended))
        second = second + block.drop(block.mlp(block.norm2(first)))
    return net.head(net.norm((first + second) / 2))


def gradients(net: nn.Module, loss: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    value = loss()
    value.backward()
    grads = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    net.zero_grad()
    return value.detach(), grads


def error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).detach().norm() / expected.detach().norm())


@pytest.mark.parametrize(
    ("dtype", "num_layers", "bound"),
    [(torch.float64, 12, 1e-13), (torch.float32, 12, 1e-6)],
    ids=["float64", "float32"],
)
def test_loss_and_gradients_are_those_of_the_two_stream_network(
    dtype: torch.dtype, num_layers: int, bound: float
) -> None:
    """With dropout: a branch that drew other masks the second time would be far off."""
    torch.manual_seed(0)
    plain = TinyGPT(num_layers, dropout=0.3).to(dtype)
    net = eff.apply(copy.deepcopy(plain), ReversibleLayers())
    ids = make_batch("tiny_gpt")["input_ids"]
    torch.manual_seed(5)
    after = torch.rand(1)
    for mode in (True, False):
        net.train(mode)
        plain.train(mode)
        loss, grads = gradients(net, lambda: net(ids).square().mean())
        drawn = torch.rand(1)
        expected_loss, expected = gradients(plain, lambda: two_streams(plain, ids).square().mean())
        assert torch.equal(loss, expected_loss) and torch.equal(drawn, torch.rand(1))
        assert error(grads, expected) < bound
    assert not torch.equal(drawn, after)
    plain.eval()
    assert error(plain(ids), two_streams(plain, ids)) > 1e-3  # another function than one stream
    assert net.blocks is not None
    streams: Any = net.blocks[0].streams
    assert streams.reruns == 2 * 2 * num_layers and float(streams.drift) < bound


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "videomae"])
@pytest.mark.parametrize("autocast", [False, True], ids=["32", "bf16"])
def test_published_modules_have_the_gradients_of_plain_autograd(name: str, autocast: bool) -> None:
    torch.manual_seed(0)
    net: Any = eff.apply(module(name, num_layers=3, dropout=0.1), ReversibleLayers())
    batch = make_batch(name)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return net.training_step(batch, 0)

    net.log = lambda *args, **kwargs: None
    value, grads = gradients(net, loss)
    with looking_on():  # nothing is recorded
        expected_value, expected = gradients(net, loss)
    assert torch.equal(value, expected_value)
    assert error(grads, expected) < (2e-2 if autocast else 1e-5)


def trained(*names: str, model: str, plain: bool, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The weights after steps with techniques, also by plain autograd."""
    torch.manual_seed(0)
    net: Any = module(model, num_layers=3)
    # a look gives all weights gradients, so its graph has other saved tensors than a step's
    [p for p in net.parameters() if p.ndim == 2][-2].requires_grad_(False)
    batch = make_batch(model)
    with monkeypatch.context() as patches:
        if plain:
            call = Streams.call

            def observed(self: Streams, *args: Any) -> Any:
                with nullcontext() if self.checked is not None else looking_on():
                    return call(self, *args)

            patches.setattr(Streams, "call", observed)
        run = trainer(*(ALL[name].active() for name in names), max_steps=3, precision="64-true")
        run.fit(net, DataLoader([batch] * 3, batch_size=None))  # pyright: ignore[reportArgumentType]
    return flat(net)


ATTENTION = ("A3Attention", "DOTAAttention", "ELSAAttention", "SangerAttention", "WindowPattern")
ATTENTION += ("ValueEmbeddings", "ValueResiduals")


@pytest.mark.parametrize("model", ["tiny_gpt", "gpt2"])
@pytest.mark.parametrize("name", [*ATTENTION, "QKNorm", "LSUV"])
def test_other_techniques_run_again_with_a_block(name: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of TinyGPT attend themselves, so another technique's class comes around the block's own."""
    names = ("ReversibleLayers", name)
    got = trained(*names, model=model, plain=False, monkeypatch=monkeypatch)
    assert error(got, trained(*names, model=model, plain=True, monkeypatch=monkeypatch)) < 1e-11
    assert torch.equal(got, trained(*names[::-1], model=model, plain=False, monkeypatch=monkeypatch))


class Counting(TinyGPT):
    """Notes the bytes that are held between the forward and the backward pass, beyond those before."""

    held = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        gc.disable()  # it would count what an earlier step allocated and left in cycles as given back here
        try:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
                loss = super().training_step(batch, batch_idx)
        finally:
            gc.enable()
        found: Any = made.profiler
        self.held = sum(e.nbytes() for e in found.kineto_results.events() if e.name() == "[memory]")
        return loss


def test_memory_does_not_grow_with_depth() -> None:
    """Beyond the states of random generators; ``Rematerialization`` keeps a hidden state per block in addition."""
    ids = torch.randint(0, 61, (32, 32))
    state, random = 32 * 32 * 32 * 4, 2 * torch.get_rng_state().nbytes

    def held(num_layers: int, *techniques: pl.Callback) -> int:
        net = Counting(num_layers, dim=32)
        data = DataLoader([{"input_ids": ids, "labels": ids}], batch_size=None)  # pyright: ignore[reportArgumentType]
        trainer(*techniques, max_steps=1).fit(net, data)
        return net.held

    def grows(*build: type[pl.Callback]) -> float:
        deep, shallow = (held(n, *(one() for one in build)) for n in (12, 4))
        return (deep - shallow) / 8

    assert grows() > 10 * state
    assert state <= grows(Rematerialization) <= state + random
    assert 0 <= grows(ReversibleLayers) <= random


def test_a_graph_that_is_kept_gives_the_same_gradients_again() -> None:
    torch.manual_seed(0)
    net = eff.apply(TinyGPT(3).double(), ReversibleLayers())
    loss = net(make_batch("tiny_gpt")["input_ids"]).square().mean()
    parameters = [*net.parameters()]
    one = torch.autograd.grad(loss, parameters, retain_graph=True)
    two = torch.autograd.grad(loss, parameters)
    assert all(torch.allclose(a, b, 1e-10) for a, b in zip(one, two, strict=True))


def test_each_branch_runs_once_more_in_the_backward_pass() -> None:
    net: Any = eff.apply(TinyGPT(3), ReversibleLayers())
    calls: list[str] = []
    for name, m in net.blocks[1].named_modules():
        if name in ("qkv", "mlp"):
            m.register_forward_hook(lambda *args, name=name: calls.append(name))
    loss = net(make_batch("tiny_gpt")["input_ids"]).square().mean()
    assert calls == ["qkv", "mlp"]
    loss.backward()
    assert calls == ["qkv", "mlp", "mlp", "qkv"]


def test_frozen_blocks_and_two_passes_before_one_backward_pass() -> None:
    torch.manual_seed(0)
    plain = TinyGPT(4, dropout=0.2).double()
    net = eff.apply(copy.deepcopy(plain), ReversibleLayers())
    for m in (plain, net):
        for name, p in m.named_parameters():
            p.requires_grad_(not name.startswith(("blocks.1.", "blocks.2.mlp.", "embed.")))
    a, b = (make_batch("tiny_gpt", seed=seed)["input_ids"] for seed in (0, 1))
    _, got = gradients(net, lambda: net(a).square().mean() + net(b).sum())
    _, expected = gradients(plain, lambda: two_streams(plain, a).square().mean() + two_streams(plain, b).sum())
    assert len(got) == len(expected) and error(got, expected) < 1e-12


class Normed(nn.Module):
    """Hand-written branches with BatchNorm, a sum in place and one that begins with the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.Dropout(0.2))
        self.g = nn.Sequential(nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8), nn.Dropout(0.2))

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, str]:
        h = self.f(x) * scale
        h += x
        h += self.g(h)
        return h, "more"


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Normed() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.scale.cos())[0]
        return x


def test_batch_norm_counts_once_and_other_arguments_get_gradients() -> None:
    torch.manual_seed(0)
    plain = Convolutional().double()
    x = torch.randn(4, 8, 6, dtype=torch.float64)
    net = eff.apply(copy.deepcopy(plain), ReversibleLayers(), batch=(x,))

    def written_out() -> Tensor:
        first = second = x
        for block in plain.blocks:
            assert isinstance(block, Normed)
            first = first + block.f(second) * plain.scale.cos()
            second = second + block.g(first)
        return ((first + second) / 2).square().mean()

    _, got = gradients(net, lambda: net(x).square().mean())
    _, expected = gradients(plain, written_out)
    assert error(got, expected) < 1e-12
    buffers = dict(net.named_buffers())
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(buffers[name], buffer)


# -- what is refused


class Odd(Block):
    """Blocks that do not have the form."""

    kind, calls = "", 0

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "parallel":
            return x + self.drop(self.mlp(self.norm1(x))) + self.mlp(self.norm2(x))
        if self.kind == "scaled":
            return 2 * super().forward(x)
        if self.kind == "in place":
            h = self.mlp(self.norm1(x)).add_(x)
            h.add_(self.mlp(self.norm2(h)))
            return h
        f = self.mlp(self.norm1(x))
        h = x + f
        if self.kind == "counts":
            self.calls += 1
            return h + self.mlp(self.norm2(h)) * float(self.calls)
        return h + self.mlp(self.norm2(h)) * (f if self.kind == "of f" else x)


def odd(kind: str, between: Callable[[Tensor], Tensor] | None = None) -> TinyGPT:
    net = TinyGPT(2)
    torch.manual_seed(0)
    blocks = nn.ModuleList(Odd(16, 0.0) for _ in range(2))
    for block in blocks:
        block.kind = kind  # pyright: ignore[reportArgumentType]
    net.blocks = blocks
    return net


FORM = r"inputs of block 1 \(ReversibleOdd\) do not follow from its outputs: G\(h\) depends on more than h"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("parallel", FORM),
        ("scaled", r"block 0 \(Odd\) computes more after two sums"),
        ("in place", r"block 0 \(Odd\) computes more after two sums"),
        ("of x", FORM),
        ("of f", FORM),
        ("counts", FORM),
    ],
)
def test_blocks_of_another_form_are_refused_and_nothing_is_changed(kind: str, message: str) -> None:
    net = odd(kind)
    with pytest.raises(ValueError, match=message):
        eff.apply(net, ReversibleLayers())
    assert net.blocks is not None and type(net.blocks[0]) is Odd


class Between(TinyGPT):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks or ():
            x = 1.5 * block(x)
        return self.head(x)


def test_code_between_blocks_that_changes_the_hidden_state_is_refused() -> None:
    with pytest.raises(ValueError, match="block 1 did not get the very tensor that block 0 returned"):
        eff.apply(Between(), ReversibleLayers())


def test_checkpointed_half_and_repeated_blocks_are_refused() -> None:
    net: Any = module("gpt2")
    net.model.transformer.gradient_checkpointing = True
    with pytest.raises(ValueError, match=r"ReversibleLayers: .* has gradient_checkpointing enabled"):
        eff.apply(net, ReversibleLayers())
    with pytest.raises(ValueError, match=r"block 0 got torch.bfloat16, in which inputs cannot be computed"):
        eff.apply(TinyGPT(2).bfloat16(), ReversibleLayers())
    net = TinyGPT(3)
    net.blocks[2] = net.blocks[0]
    with pytest.raises(ValueError, match=r"ReversibleLayers: .*blocks.* (has a block several times|run side by side)"):
        eff.apply(net, ReversibleLayers())
    with pytest.raises(ValueError, match=r"layers=3\): expected"):
        ReversibleLayers(3)  # pyright: ignore[reportArgumentType]


def test_second_derivatives_and_moved_weights_raise_in_the_backward_pass() -> None:
    net: Any = eff.apply(TinyGPT(2), ReversibleLayers())
    ids = make_batch("tiny_gpt")["input_ids"]
    with pytest.raises(RuntimeError, match="there are no second derivatives"):
        torch.autograd.grad(net(ids).square().mean(), [*net.parameters()], create_graph=True)
    loss = net(ids).square().mean()
    with torch.no_grad():
        net.blocks[1].proj.weight.add_(1.0)
    with pytest.raises(
        RuntimeError, match=r"parameters of block 1 .* were changed between its forward and its backward"
    ):
        loss.backward()


class Drawing(Block):
    """A block that draws from a generator of its own in training, so that it computes something else each time."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=self.generator) if self.training else 0.0
        h = x + self.mlp(self.norm1(x)) * noise
        return h + self.mlp(self.norm2(h))

    generator = torch.Generator().manual_seed(0)


def test_a_run_stops_if_computed_inputs_are_not_the_inputs() -> None:
    torch.manual_seed(0)
    net = TinyGPT(2)
    net.blocks = nn.ModuleList(Drawing(16, 0.0) for _ in range(2))
    data = [make_batch("tiny_gpt")] * 3
    with pytest.raises(
        RuntimeError, match=r"computed from its output, has a relative error of .*; expected at most 0.01"
    ):
        trainer(ReversibleLayers(), max_steps=3).fit(net, DataLoader(data, batch_size=None))  # pyright: ignore[reportArgumentType]


# -- runs


def test_it_resumes_to_the_bit_and_copies_compute_the_same(tmp_path: Path) -> None:
    reported: list[dict[str, Any]] = []

    class Reads(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            reported.append({k: float(v) for k, v in trainer.callback_metrics.items() if "reversible" in k})

    net, _ = fit("tiny_gpt", lambda: [ReversibleLayers()], directory=tmp_path, callbacks=[Reads()])
    again, t = fit("tiny_gpt", lambda: [ReversibleLayers()], resume=tmp_path / "step=4.ckpt")
    assert t.global_step == 12 and torch.equal(flat(net), flat(again))
    state = torch.load(checkpoints(tmp_path)[-1], weights_only=True)["state_dict"]
    marks = {key for key in state if key.endswith("lightning_eff_mark")}
    assert len(marks) == 4 and state.keys() - marks == module("tiny_gpt").state_dict().keys()
    applied = eff.apply(module("tiny_gpt"), ReversibleLayers())
    applied.load_state_dict(state)
    ids = make_batch("tiny_gpt")["input_ids"]
    net.eval()
    applied.eval()
    for other in (applied, copy.deepcopy(net), pickle.loads(pickle.dumps(applied))):
        torch.testing.assert_close(other(ids), net(ids))
    plain: Any = module("tiny_gpt").eval()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*lightning_eff_mark"):
        plain.load_state_dict(state)
    plain.load_state_dict({key: value for key, value in state.items() if key not in marks})
    torch.testing.assert_close(net(ids), two_streams(plain, ids))
    with pytest.raises(ValueError, match="no plain block computes two streams"):
        eff.export(net)
    assert all(r["eff/reversible_layers/reruns"] == 8 for r in reported[1:]) and len(reported) == 12
    assert all(0 < r["eff/reversible_layers/drift"] < 1e-5 for r in reported[1:])


def test_inference_mode_computes_the_same() -> None:
    net: Any = eff.apply(TinyGPT(3, dropout=0.0), ReversibleLayers())
    ids = make_batch("tiny_gpt")["input_ids"]
    with torch.inference_mode():
        found = net(ids)
    assert torch.equal(found, net(ids).detach())
