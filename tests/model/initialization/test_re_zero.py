"""ReZero, and what SkipInit and LayerScale share with it: scales at the end of branches, found before anything has run."""

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, SequentialLR

import lightning_eff as eff
from lightning_eff import LayerScale, ReZero, SkipInit
from lightning_eff._core._branches.ends import tensors_that_end
from lightning_eff._core._branches.finding import branches
from lightning_eff._core._branches.graph import Graph
from lightning_eff._core._branches.probing import probed
from lightning_eff.model.initialization._scales.scaled import Scaled
from tests.cases import Case, classifier
from tests.model.initialization.test_zero_projections import (
    NETWORKS,
    Basic,
    Encoder,
    found,
    tokens,
    with_experts,
)
from tests.models import TinyGPT, hugging_face, loader, make_batch, module, trainer
from tests.runs import fit_yaml

CASES = {
    "ReZero": Case(
        active=lambda: ReZero(),
        neutral=lambda: ReZero(branches=[]),
        architecture=True,
        lost=(classifier, "classifier", "found no residual branch"),
    )
}
EVERY: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    **{name: (build, batch) for name, (build, batch, *_) in NETWORKS.items()},
    "gpt2": (lambda: hugging_face("gpt2", 2), lambda: make_batch("gpt2")),
    "post-norm": (Encoder, tokens),
}


def ends(graph: Graph, m: nn.Module) -> list[tuple[str, ...]]:
    every = branches(graph)
    return [tensors_that_end(m, graph, branch, every, who="X") for branch in every]


def scales(m: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in m.named_parameters() if name.endswith("branch_scale")}


def moved(m: Any, seed: int = 0) -> Any:
    """With scales that differ."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in scales(m).values():
            p.copy_(torch.rand(p.shape, generator=g) + 0.5)
    return m


def loss_of(m: Any, batch: Any) -> Tensor:
    m.log = lambda *args: None
    return m.eval().training_step(batch, 0)


# -- which branches


@pytest.mark.parametrize("name", EVERY)
def test_what_is_found_before_anything_has_run_is_what_a_step_does(name: str) -> None:
    build, batch = EVERY[name]
    m = build()
    before = {key: value.clone() for key, value in m.state_dict().items()}
    mode, drawn, attributes = m.training, torch.get_rng_state(), set(vars(m))
    probe = probed(m, who="X")
    assert torch.equal(torch.get_rng_state(), drawn) and m.training == mode and set(vars(m)) == attributes
    assert all(torch.equal(value, before[key]) for key, value in m.state_dict().items())
    assert all(p.grad is None for p in m.parameters())
    assert ends(probe.graph, m) == ends(found(m, batch()), m)


class OnlyStep(pl.LightningModule):
    """Nothing of it can be called as a whole but ``training_step``; its blocks can."""

    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        self.gated, self.embed, self.head = gated, nn.Embedding(61, 16), nn.Linear(16, 61)
        self.blocks = nn.ModuleList(Gated() if gated else Plain() for _ in range(3))
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        x = self.embed(batch["input_ids"])
        for block in self.blocks:
            x = block(x, x.mean(1, keepdim=True)) if self.gated else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Gated(Plain):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x + self.down(F.gelu(self.up(x)) * gate.repeat(1, 1, 2))


@pytest.mark.parametrize(("gated", "of"), [(False, "the blocks at 'blocks'"), (True, "training_step on ids")])
def test_blocks_alone_and_made_up_batches_will_do(gated: bool, of: str) -> None:
    m = OnlyStep(gated)
    probe = probed(m, who="X")
    assert probe.of.startswith(of) and m.calls == 0
    assert ends(probe.graph, m) == [(f"blocks.{i}.down.weight", f"blocks.{i}.down.bias") for i in range(3)]


class Odd(OnlyStep):
    """Takes batches that nobody would guess."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step({"input_ids": batch["texts"]["here"], "labels": batch["labels"]}, batch_idx)


def test_a_batch_or_names_are_given_where_no_input_can_be_made_up() -> None:
    m = Odd(gated=True)
    with pytest.raises(
        ValueError,
        match=r"could not look for .*Odd does not run on made-up inputs: .* raised .*'blocks' \(3 x Gated\).*batch=batch",
    ):
        eff.apply(m, ReZero())
    assert not scales(m)
    ids = tokens()
    batch = {"texts": {"here": ids["input_ids"]}, "labels": ids["labels"]}
    by_batch = scales(eff.apply(Odd(gated=True), ReZero(), batch=batch))
    by_name = scales(eff.apply(Odd(gated=True), ReZero(branches=[f"blocks.{i}.down" for i in range(3)])))
    assert [*by_batch] == [*by_name] == [f"blocks.{i}.down.branch_scale" for i in range(3)]
    with pytest.raises(ValueError, match="the batch that was given raised KeyError"):
        eff.apply(Odd(gated=True), ReZero(), batch=ids)


@pytest.mark.slow
def test_branches_of_model_families_are_found_before_they_run() -> None:
    from tests import families

    for name in families.FAMILIES:
        m = families.module(name)
        assert ends(probed(m, who="X").graph, m) == ends(found(m, families.batch(name, 2)), m), name


# -- the rule


def skips(name: str, m: Any) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """The blocks, each with what its skip path does."""
    if name == "post-norm":
        return [(layer, lambda x, b=layer: b.norm2(b.norm1(x))) for layer in m.encoder.layers]
    path = "model.transformer.h" if name == "gpt2" else NETWORKS[name][2]
    if path:
        return [(block, lambda x: x) for block in m.get_submodule(path)]
    return [(block, lambda x, b=block: F.relu(b.skip(x))) for block in m.network if isinstance(block, Basic)]


@pytest.mark.parametrize("name", EVERY)
def test_blocks_begin_as_their_skips_and_of_the_branches_alone_scales_have_gradients(name: str) -> None:
    build, batch = EVERY[name]
    probe = probed(plain := build(), who="X")
    inside = {part for branch in branches(probe.graph) for part in branch.inner}
    inside |= {part for names in ends(probe.graph, plain) for part in names}
    m, seen = eff.apply(build(), ReZero()), list[Any]()
    first: Any = lambda y: y[0] if isinstance(y, tuple) else y  # noqa: E731
    for block, skip in skips(name, m):
        block.register_forward_hook(lambda b, args, y, skip=skip: seen.append((skip(args[0]), first(y))))
    loss_of(m, batch()).backward()
    assert len(seen) > 1
    for skip, output in seen:
        assert skip.abs().sum() > 0
        torch.testing.assert_close(output, skip, rtol=0, atol=0)
    assert all(p.grad is not None and p.grad.any() for p in scales(m).values())
    assert len(inside) > 8
    for part, p in m.named_parameters():
        if part in inside:
            assert p.grad is None or not p.grad.any(), part


def test_a_branch_is_added_alpha_times() -> None:
    """Against the block's own parts, put together by hand."""
    torch.manual_seed(0)
    plain: Any = TinyGPT(2, dropout=0.0)
    net = moved(eff.apply(copy.deepcopy(plain), ReZero()))
    alpha = [*scales(net).values()]
    ids = tokens()["input_ids"]
    x = plain.embed(ids) + plain.position.weight[: ids.shape[1]]
    for i, block in enumerate(plain.blocks):
        y = block.mlp[2].weight.new_zeros(16)  # so that the block adds its attention alone
        mlp, block.mlp = block.mlp, nn.Module()
        block.mlp.forward = lambda x, y=y: y
        x = x + alpha[2 * i] * (block(x) - x)
        block.mlp = mlp
        x = x + alpha[2 * i + 1] * block.mlp(block.norm2(x))
    torch.testing.assert_close(net(ids), plain.head(plain.norm(x)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("technique", [ReZero, LayerScale])
@pytest.mark.parametrize("name", EVERY)
def test_folded_export_computes_the_same(name: str, technique: Any) -> None:
    build, batch = EVERY[name]
    plain = build()
    m = moved(eff.apply(copy.deepcopy(plain), technique()))
    whole = loss_of(m, batch())
    folded = eff.export(m)
    assert [*folded.state_dict()] == [*plain.state_dict()] and not any(isinstance(p, Scaled) for p in folded.modules())
    torch.testing.assert_close(loss_of(folded, batch()), whole, rtol=0, atol=1e-5)
    assert abs(loss_of(plain, batch()) - whole) > 1e-5


def test_the_fused_encoder_layer_does_not_pass_the_scales_by(monkeypatch: pytest.MonkeyPatch) -> None:
    fused: list[int] = []
    own = getattr(torch, name := "_transformer_encoder_layer_fwd")
    monkeypatch.setattr(torch, name, lambda *a: (fused.append(1), own(*a))[1])
    m = moved(eff.apply(Encoder(), ReZero())).eval()
    x = torch.randn(2, 5, 16)
    slow = m.encoder(x)
    assert not fused
    with torch.no_grad():
        fast = m.encoder(x)
    assert len(fused) == 3
    torch.testing.assert_close(fast, slow)


def test_to_others_the_tensors_are_what_is_stored() -> None:
    """Whoever sets ``module.weight`` in place, ties it or divides it, as ``fully_shard`` does, gets the parameter."""
    m: Any = eff.apply(TinyGPT(2), ReZero())
    part, stored = m.blocks[0].proj, m.blocks[0].proj._parameters["weight"]
    assert part.weight is stored and part.bias is part._parameters["bias"]
    part.weight.data.fill_(2.0)
    assert (stored == 2).all() and not part(torch.ones(1, 16)).any()
    assert part.weight is stored


def test_one_scale_goes_with_all_experts_of_a_branch_and_with_a_layer_that_runs_twice() -> None:
    m = eff.apply(with_experts(), ReZero())
    assert [*scales(m)] == [f"blocks.{i}.{part}.branch_scale" for i in range(2) for part in ("proj", "mlp")]
    twice = nn.Sequential(nn.Linear(4, 16), *[Plain()] * 2, nn.Linear(16, 2))
    assert [*scales(eff.apply(twice, ReZero()))] == ["1.down.branch_scale"]


def test_copies_and_pickles_have_scales_of_their_own() -> None:
    m = moved(eff.apply(hugging_face("llama", 2), LayerScale()))
    batch = make_batch("llama")
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        torch.testing.assert_close(loss_of(other, batch), loss_of(m, batch), rtol=0, atol=0)
        moved(other, seed=1)
        assert abs(loss_of(other, batch) - loss_of(m, batch)) > 1e-6


def test_what_is_built_on_the_meta_device_begins_as_it_should() -> None:
    with torch.device("meta"):
        m: Any = eff.apply(TinyGPT(2), ReZero())
    assert all(p.is_meta for p in scales(m).values()) and len(scales(m)) == 4
    m.to_empty(device="cpu")
    for part in m.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    assert all(not p.any() for p in scales(m).values())
    bound = 16**-0.5  # nn.Linear's own, of what is stored and not of what is read
    stored = m.blocks[0].proj._parameters["weight"]
    assert stored is not None and 0.9 * bound < stored.abs().max() <= bound


# -- the run


class Decayed(TinyGPT):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.named_parameters(), 1e-2, weight_decay=0.3)
        parts: list[Any] = [LinearLR(optimizer, 0.5, total_iters=2), LinearLR(optimizer, 1.0, 0.1, total_iters=9)]
        return [optimizer], [{"scheduler": SequentialLR(optimizer, parts, [2]), "interval": "step"}]


def test_scales_do_not_decay_and_go_at_the_modules_rate() -> None:
    m, rates = Decayed(2), list[list[float]]()

    class Rates(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
            (o,) = trainer.optimizers
            rates.append([group["lr"] for group in o.param_groups])

    run = trainer(ReZero(), Rates(), max_steps=5)
    run.fit(m, loader("tiny_gpt"))
    (o,) = run.optimizers
    first, last = o.param_groups
    assert [id(p) for p in last["params"]] == [id(p) for p in scales(m).values()]
    assert last["weight_decay"] == 0.0 and first["weight_decay"] == 0.3 and last["param_names"] == [*scales(m)]
    assert len(first["params"]) == len(first["param_names"]) == len([*m.parameters()]) - 4
    assert all(one == other for one, other in rates) and len({one for one, _ in rates}) > 3
    assert all(p.abs() > 1e-4 for p in scales(m).values())


def test_a_pretrained_module_is_left_alone_unless_told() -> None:
    loaded = hugging_face("gpt2", 2)
    loaded.model.config._name_or_path = "some/checkpoint"
    for run in (
        lambda: eff.apply(loaded, ReZero()),
        lambda: trainer(ReZero(), max_steps=1).fit(loaded, loader("gpt2")),
    ):
        with pytest.raises(ValueError, match=r"loaded from 'some/checkpoint'.*force=True"):
            run()
        assert not scales(loaded)
    assert len(scales(eff.apply(loaded, ReZero(force=True)))) == 4


def test_a_plain_checkpoint_is_not_gone_on_from(tmp_path: Path) -> None:
    plain = trainer(max_steps=1)
    plain.fit(module("tiny_gpt"), loader("tiny_gpt"))
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    m = module("tiny_gpt")
    with pytest.raises(ValueError, match="The checkpoint is of the plain module"):
        trainer(ReZero(), max_steps=2).fit(m, loader("tiny_gpt"), ckpt_path=tmp_path / "plain.ckpt")
    assert not scales(m)


@pytest.mark.parametrize("technique", [ReZero, SkipInit, LayerScale])
def test_bad_names_are_refused(technique: Any) -> None:
    for wrong in ("blocks.0.proj", [""], [1], 3):
        with pytest.raises(
            ValueError, match="expected a list of names or patterns of the weights in which residual branches end"
        ):
            technique(branches=wrong)
    with pytest.raises(ValueError, match="expected True or False"):
        technique(force=1)
    with pytest.raises(ValueError, match=r"has no weight, .*that matches. Did you mean blocks.1.proj"):
        eff.apply(TinyGPT(2), technique(branches=["blocks.7.proj"]))


def test_two_scales_of_one_branch_are_refused() -> None:
    with pytest.raises(ValueError, match="both put a scale at the end"):
        eff.apply(TinyGPT(2), ReZero(), LayerScale())
    with pytest.raises(ValueError, match=r"blocks.0.proj is already scaled, by ReZero"):
        eff.apply(eff.apply(TinyGPT(2), ReZero()), SkipInit(branches=["blocks.0.proj"]))


def test_what_is_scaled_is_said_in_few_words(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    eff.apply(TinyGPT(3), ReZero())
    told = "scaled 6 residual branches, found by the module (TinyGPT) on ids of shape (2, 8), by 0 at first: 3 of"
    assert f"{told} blocks.*.proj.weight, blocks.*.proj.bias; 3 of blocks.*.mlp.*.weight" in caplog.text


@pytest.mark.parametrize("technique", [ReZero(), SkipInit(alpha="depth"), LayerScale(init=0.1)])
def test_a_yaml_of_the_command_line_trains_with_it(tmp_path: Path, technique: Any) -> None:
    arguments = {name: value for name, value in technique.settings().items() if value is not None}
    fit_yaml(
        tmp_path, type(technique).__name__, arguments, model="TinyGPT", data="Sequences", keeps_state=False, max_steps=2
    )
